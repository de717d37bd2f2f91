"""What the client says when a server misbehaves, against a small HTTP server."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.sampler.vllm.client import Client
from tepo_megatron.sampler.vllm.wire import SAMPLES, head_frame
from tests.support.programs import TIMEOUT_S
from tests.support.samples import answer, draw_group, response

KEY = "a-secret-key"
Reply = tuple[int, bytes]
Serve = Callable[..., Client]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Callable[[str, Any, dict[str, str]], Reply], timeout_s: float = 60.0) -> Client:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                status, content = answer(self.path, json.loads(body) if body else None, headers)
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return Client(f"http://127.0.0.1:{server.server_port}", KEY, timeout_s)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


NINE = WeightsVersion(9, "abc")


def generate(client: Client, **changes: Any) -> list[Response]:
    arguments: dict[str, Any] = {
        "n": 2, "temperature": 0.5, "max_new_tokens": 7, "seed": 3, "stop_token_ids": [2], "version": NINE
    }  # fmt: skip
    return draw_group(client, (1, 5), **arguments | changes)


def test_responses_come_back_with_key_and_parameters_sent(serve: Serve) -> None:
    seen: list[Any] = []

    def reply(path: str, body: Any, headers: dict[str, str]) -> Reply:
        seen.append((path, body, headers["authorization"]))
        one = response(1, [21], [-1.0], "length", [(0, "9:abc")])  # it finishes first
        return 200, answer([one, response(0, [10, 2], [-0.5, -11 / 3], "stop", [(0, "9:abc")])])

    first, second = generate(serve(reply))
    assert first == Response((10, 2), (-0.5, -11 / 3), "stop", NINE)
    assert second == Response((21,), (-1.0,), "length", NINE)
    (path, body, authorization) = seen[0]
    assert (path, authorization) == (SAMPLES, f"Bearer {KEY}")
    assert body.pop("id")
    assert body == {
        "model": "policy",
        "prompt": [1, 5],
        "sampling": {"temperature": 0.5, "stop_token_ids": [2]},
        "samples": [{"sample": at, "seed": 3 + at, "max_tokens": 7, "prefix": []} for at in range(2)],
    }


@pytest.mark.parametrize(
    ("versions", "expected", "said"),
    [
        (["9:abd"], NINE, "9:abd"),  # other weights of the same step
        (["9:abc", "10:f"], NINE, "10:f and 9:abc"),  # updated while it was being drawn
        (["default"], NINE, "default"),  # started again behind our back
        ([], NINE, "of no version"),
    ],
)
def test_a_response_of_an_unexpected_version_is_an_error(
    serve: Serve, versions: list[str], expected: WeightsVersion, said: str
) -> None:
    both = [response(at, [10, 2], [-0.5, -1.0], versions=list(enumerate(versions))) for at in range(2)]
    client = serve(lambda path, body, headers: (200, answer(both)))
    with pytest.raises(RuntimeError) as caught:
        generate(client, version=expected)
    expected_label = f"{expected.step}:{expected.digest}"
    assert f"{client.url} drew a response with weights {said}, but this run gave it {expected_label}" in str(caught.value)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((400, b'{"error": {"message": "the prompt is too long"}}'), "status 400: the prompt is too long"),
        ((401, b'{"error": "no key"}'), "status 401: no key"),
        ((422, b'{"detail": "a field is missing"}'), "status 422: a field is missing"),
        ((500, b"Internal Server Error"), "status 500: Internal Server Error"),
        ((503, b""), "status 503: no explanation"),
        ((200, head_frame({"error": "the engine is dead", "status": 500})), "status 500: the engine is dead"),
        ((200, b"<html>"), "something else than responses: b'<html>'"),
    ],
)
def test_an_error_carries_the_address_the_status_and_the_servers_words(serve: Serve, reply: Reply, message: str) -> None:
    client = serve(lambda path, body, headers: reply)
    with pytest.raises(RuntimeError) as caught:
        generate(client)
    assert client.url in str(caught.value)
    assert message in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_slow_server_is_given_up(serve: Serve) -> None:
    def answer(path: str, body: Any, headers: dict[str, str]) -> Reply:
        given_up.wait(TIMEOUT_S)
        return 200, b"{}"

    given_up = threading.Event()
    with pytest.raises(RuntimeError, match=r"POST http://127.0.0.1:\d+/resume: no answer within 0.5 s"):
        serve(answer, 0.5).resume()
    given_up.set()


def scored(prompt: list[int], logprobs: list[float]) -> bytes:
    tokens = [None, *({str(token): {"logprob": value, "rank": 1}} for token, value in zip(prompt[1:], logprobs, strict=True))]
    return json.dumps({"prompt_logprobs": tokens}).encode()


@pytest.mark.parametrize(
    "reply",
    [
        b"{}",
        b'{"choices": []}',
        b'{"prompt_logprobs": null}',
        scored([4, 9], [-1.0]),
        scored([4, 9, 8], [-1.0] * 2),
    ],
)
def test_scores_of_another_prompt_are_no_answer(serve: Serve, reply: bytes) -> None:
    client = serve(lambda path, body, headers: (200, reply))
    with pytest.raises(RuntimeError, match="something else than the log-probs of the prompt") as caught:
        client.prompt_logprobs((4, 9, 7))
    assert client.url in str(caught.value)

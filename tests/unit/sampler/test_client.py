"""What the client sends, what it says when a server misbehaves, and its watch over a server's progress."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest

from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.sampler.sampling import Sampling
from tepo_megatron.sampler.vllm import client
from tepo_megatron.sampler.vllm.client import Client, ProgressWatch, ServerFault, ServerGone, ServerSilent
from tepo_megatron.sampler.vllm.wire import SAMPLES, head_frame
from tests.support.faulty_server import answer, draw_group, response

KEY = "a-secret-key"
URL = "http://127.0.0.1:1"
NINE = WeightsVersion(9, "abc")

Serve = Callable[[int, bytes], Client]


@pytest.fixture
def sent() -> list[httpx.Request]:
    return []


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, sent: list[httpx.Request]) -> Serve:

    def start(status: int, content: bytes) -> Client:
        def handle(_transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
            sent.append(request)
            return httpx.Response(status, stream=httpx.ByteStream(content))

        monkeypatch.setattr(httpx.HTTPTransport, "handle_request", handle)
        return Client(URL, KEY, 60.0)

    return start


def generate(client: Client) -> list[Response]:
    return draw_group(client, (1, 5), Sampling(0.5, 7, (2,)), n=2, seed=3, version=NINE)


def test_responses_come_back_with_key_and_parameters_sent(serve: Serve, sent: list[httpx.Request]) -> None:
    one = response(1, [21], [-1.0], "length", [(0, "9:abc")])  # it finishes first
    first, second = generate(serve(200, answer([one, response(0, [10, 2], [-0.5, -11 / 3], "stop", [(0, "9:abc")])])))
    assert first == Response((10, 2), (-0.5, -11 / 3), "stop", NINE)
    assert second == Response((21,), (-1.0,), "length", NINE)
    assert (sent[0].url.path, sent[0].headers["authorization"]) == (SAMPLES, f"Bearer {KEY}")
    body = json.loads(sent[0].content)
    assert body.pop("id")
    assert body == {
        "model": "policy",
        "prompt": [1, 5],
        "sampling": {"temperature": 0.5, "stop_token_ids": [2]},
        "samples": [{"sample": at, "seed": 3 + at, "max_tokens": 7, "prefix": []} for at in range(2)],
    }


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (400, b'{"error": {"message": "the prompt is too long"}}', "status 400: the prompt is too long"),
        (401, b'{"error": "no key"}', "status 401: no key"),
        (422, b'{"detail": "a field is missing"}', "status 422: a field is missing"),
        (500, b"Internal Server Error", "status 500: Internal Server Error"),
        (503, b"", "status 503: no explanation"),
        (200, head_frame({"error": "the engine is dead", "status": 500}), "status 500: the engine is dead"),
        (200, b"", "stopped after 0 responses of 2"),
        (200, b"<html>", "something else than responses: b'<html>'"),
    ],
)
def test_an_error_has_the_address_the_status_and_the_servers_words(
    serve: Serve, status: int, content: bytes, message: str
) -> None:
    with pytest.raises(RuntimeError) as caught:
        generate(serve(status, content))
    assert URL in str(caught.value)
    assert message in str(caught.value)
    assert KEY not in str(caught.value)
    assert isinstance(caught.value, ServerFault) == (status not in (400, 401, 422))


def scored(prompt: list[int], logprobs: list[float]) -> bytes:
    tokens = [None, *({str(token): {"logprob": value, "rank": 1}} for token, value in zip(prompt[1:], logprobs, strict=True))]
    return json.dumps({"prompt_logprobs": tokens}).encode()


SCORES, SHARES = "the log-probs of the prompt", "what its weights are"


@pytest.mark.parametrize(
    ("what", "reply"),
    [
        *(
            (SCORES, reply)
            for reply in (b"{}", b'{"prompt_logprobs": null}', scored([4, 9], [-1.0]), scored([4, 9, 8], [-1.0] * 2))
        ),
        *((SHARES, reply) for reply in (b"{}", b'{"changed": null, "share": 1}', b'{"changed": [], "share": "all"}')),
    ],
)
def test_what_answers_another_question_is_no_answer(what: str, reply: bytes, serve: Serve) -> None:
    client = serve(200, reply)
    with pytest.raises(ServerFault, match=f"^{URL} answered with something else than {what}"):
        client.prompt_logprobs((4, 9, 7)) if what == SCORES else client.read_back()


def test_the_top_k_leaves_out_the_prompts_own_token_only_if_it_is_one_too_many(serve: Serve) -> None:
    def place(*tokens: tuple[int, float, int]) -> dict[str, dict[str, float]]:
        return {str(token): {"logprob": logprob, "rank": rank} for token, logprob, rank in tokens}

    own_is_third = place((9, -2.0, 3), (1, -0.5, 1), (2, -1.5, 2))
    own_is_second = place((7, -1.5, 2), (3, -0.5, 1))
    client = serve(200, json.dumps({"prompt_logprobs": [None, own_is_third, own_is_second]}).encode())
    logprobs, top = client.score((4, 9, 7), 2)
    assert logprobs == [-2.0, -1.5]
    assert top is not None
    assert top.tolist() == [[(1, -0.5), (2, -1.5)], [(3, -0.5), (7, -1.5)]]
    with pytest.raises(RuntimeError, match=r"something else than the log-probs of the prompt.*3 tokens are no top 4"):
        client.score((4, 9, 7), 4)


def test_one_connection_that_is_not_made_is_a_fault_that_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", Mock(side_effect=httpx.ConnectTimeout("")))
    client = Client(URL, KEY, 60.0)
    for ask, fault in ((lambda: generate(client), ServerFault), (client.read_back, ServerFault), (client.pause, ServerSilent)):
        with pytest.raises(fault, match="no connection within 10 s") as raised:
            ask()
        assert raised.type is fault


@pytest.mark.parametrize("fault", [ServerSilent, ServerFault])
def test_a_score_waits_for_no_answer_that_stands_still(fault: type[ServerFault], monkeypatch: pytest.MonkeyPatch) -> None:
    """The server counts as silent unless this process stood still, too."""
    if fault is ServerFault:
        monkeypatch.setattr("tepo_megatron.sampler.vllm.client.running_time", lambda: 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def begin_an_answer() -> None:
            connection, _ = listener.accept()
            held.append(connection)  # an open answer, whose engine says nothing
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

        held: list[socket.socket] = []
        server = threading.Thread(target=begin_an_answer)
        server.start()
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", KEY, 0.2)
        try:
            with pytest.raises(fault, match=r"rollout\.server\.request_timeout_s") as raised:
                client.score((1, 5))
            assert raised.type is fault
        finally:
            client.close()
            server.join()
            for connection in held:
                connection.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time passes as a test says, and a probe's answer is there when it was asked for."""

    def submit(probe: Callable[[], object]) -> Future[object]:
        future: Future[object] = Future()
        try:
            future.set_result(probe())
        except RuntimeError as error:
            future.set_exception(error)
        return future

    made = SimpleNamespace(now=0.0)
    made.monotonic = lambda: made.now
    monkeypatch.setattr(client, "time", made)
    monkeypatch.setattr(client, "ThreadPoolExecutor", lambda *_, **__: SimpleNamespace(submit=submit))
    return made


def looks(watch: ProgressWatch, clock: SimpleNamespace, seconds: float, step: float = 1.0) -> str:
    said = ""
    while seconds > 0 and not said:
        clock.now += step
        seconds -= step
        said = watch.look()
    return said


SILENT, GONE = Mock(side_effect=ServerSilent("no answer")), Mock(side_effect=ServerGone("connection refused"))


@pytest.mark.parametrize("probe", [lambda: "the same", lambda: None, SILENT])
def test_a_standstill_is_noticed_after_the_time_out_and_not_before(probe: Callable[[], object], clock: SimpleNamespace) -> None:
    watch = ProgressWatch(probe, 60.0)
    for _ in range(20):
        assert looks(watch, clock, 50.0) == ""
        watch.note_progress()  # an answer of the server itself
    assert looks(watch, clock, 30.0) == ""
    clock.now += 36000  # in which this process did not run, which is nobody's fault
    assert looks(watch, clock, 20.0) == ""
    assert "no new token" in looks(watch, clock, 60.0)


def test_progress_starts_the_count_anew_and_a_dead_server_is_told_at_once_but_not_by_one_failed_connection(
    clock: SimpleNamespace,
) -> None:
    watch = ProgressWatch(iter(range(100000)).__next__, 60.0)
    assert looks(watch, clock, 1000.0) == ""
    watch = ProgressWatch(GONE, 60.0)
    assert looks(watch, clock, 12.0) == "connection refused"
    answers: Iterator[Callable[[], object]] = iter([GONE, lambda: 1] * 50)
    watch = ProgressWatch(lambda: next(answers)(), 60.0)
    assert looks(watch, clock, 12.0) == ""


def test_every_change_of_the_progress_is_told_and_nothing_else(clock: SimpleNamespace) -> None:
    """An answer that is the same, none, or a server that moved by an answer of its own is no movement to tell."""
    moves: list[int] = []
    answers = iter([1, 1, 2, None, 2, 3, 3, 3, 3, 3])
    watch = ProgressWatch(lambda: next(answers), 60.0, lambda: moves.append(1))
    assert looks(watch, clock, 30.0) == ""
    watch.note_progress()
    assert len(moves) == 3

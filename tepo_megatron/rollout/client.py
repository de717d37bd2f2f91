"""The HTTP client of one vLLM server."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import httpx

from tepo_megatron.bridge.transfer.broadcast import Manifest
from tepo_megatron.rollout.server import IDLE_CONNECTION_S, MODEL_NAME
from tepo_megatron.types import Response, WeightsVersion

SLEEPS = frozenset({"weights", "kv_cache"})
"""What a server frees when it sleeps, under vLLM's names."""


GENERATE = "/inference/v1/generate"
"""vLLM's route for token ids in and out. Unlike /v1/completions it says by which weights a token was drawn."""

INITIAL_WEIGHTS = WeightsVersion(0)
"""The weights of the model's folder, with which a server starts."""

_INITIAL_LABEL = "default"
"""vLLM's name for weights that were never updated."""


class Client:
    """Requests to one server; may be used from several threads.

    Every method raises RuntimeError, with the address and what the server said, when the server cannot be reached, takes longer
    than ``timeout_s`` seconds, or answers with an error. ``asleep`` is what the server has freed of its GPU memory.
    """

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        self.url = url
        self.asleep: frozenset[str] = frozenset()
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_CONNECTION_S),
            trust_env=False,  # a proxy of the environment has no business with the key
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def generate(
        self,
        prompt: Sequence[int],
        *,
        n: int,
        temperature: float,
        max_new_tokens: int,
        seed: int | None,
        stop_token_ids: Sequence[int],
        version: WeightsVersion,
        from_cache: bool = True,
    ) -> list[Response]:
        """``n`` continuations of a prompt of token ids; sample j is drawn with the seed ``seed`` + j. ``from_cache``: what the
        prefix cache has of the prompt may be used.

        Raises RuntimeError, too, where the server answers that any token was drawn by other weights than ``version``.
        """
        self._check_awake()
        sampling = {
            "n": n,
            "temperature": temperature,
            "max_tokens": max_new_tokens,
            "seed": seed,
            "stop_token_ids": list(stop_token_ids),
            "logprobs": 0,  # only that of the drawn token
            **({} if from_cache else {"skip_reading_prefix_cache": True}),
        }
        reply = self._generate(prompt, sampling)
        try:
            responses = [self._response(choice, version) for choice in reply["choices"]]
        except (KeyError, TypeError) as error:
            raise RuntimeError(f"{self.url} answered {GENERATE} with something else than responses: {error!r}") from error
        if len(responses) != n:
            raise RuntimeError(f"{self.url} returned {len(responses)} responses to a prompt with n = {n}")
        return responses

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        """The natural-log probability of every token of ``prompt`` but the first, as the model has it: under temperature 1."""
        self._check_awake()
        # prompt_logprobs = 0: only those of the prompt's own tokens; vLLM applies no temperature to them
        reply = self._generate(prompt, {"max_tokens": 1, "prompt_logprobs": 0})
        try:
            scored = reply["prompt_logprobs"][1:]
            found = [float(scores[str(token)]["logprob"]) for token, scores in zip(prompt[1:], scored, strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            raise RuntimeError(
                f"{self.url} answered {GENERATE} with something else than the log-probs of the prompt: {error!r}"
            ) from error
        return found

    def cached_logprobs(self, prompt: Sequence[int], n: int, version: WeightsVersion) -> tuple[list[float], list[float]]:
        """The log-probs of up to ``n`` tokens that are drawn after ``prompt``, computed with what the prefix cache has of the
        prompt, and those of the same tokens without it. Natural logarithms, temperature 1.
        """
        # Drawn, and not the likeliest: log-probs near 0 say little. The same seed draws the same tokens.
        through, fresh = (
            self.generate(
                prompt,
                n=1,
                temperature=1.0,
                max_new_tokens=n,
                seed=0,
                stop_token_ids=(),
                version=version,
                from_cache=from_cache,
            )[0]
            for from_cache in (True, False)
        )
        pairs = zip(through.response_ids, fresh.response_ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))  # scores after another token are another's
        return list(through.logprobs[:same]), list(fresh.logprobs[:same])

    def _generate(self, prompt: Sequence[int], sampling: dict[str, Any]) -> dict[str, Any]:
        return self._post(GENERATE, {"model": MODEL_NAME, "token_ids": list(prompt), "sampling_params": sampling})

    def pause(self) -> None:
        """Hold requests where they are."""
        self._post("/pause?mode=keep")

    def resume(self) -> None:
        """Let the held requests go on."""
        self._post("/resume")

    def sleep(self) -> None:
        """Free the GPU: requests end, cache and weights are dropped, new ones must come before the next sample.

        That is vLLM's level 2. Level 1 would keep a copy of the weights on the host, only for the next update to replace it.
        """
        self._post("/sleep?level=2")
        self.asleep = SLEEPS

    def wake_up(self, *tags: str) -> None:
        """Take memory back for ``tags`` (``weights``, ``kv_cache``); requests are served again when there is all of it."""
        tags = tuple(tag for tag in tags if tag in self.asleep)
        if tags:
            self._post("/wake_up?" + "&".join(f"tags={tag}" for tag in tags))
            self.asleep -= set(tags)

    def reset_prefix_cache(self) -> None:
        """Forget cached keys and values, which belong to older weights."""
        self._post("/reset_prefix_cache")

    def init_weight_transfer(
        self, host: str, place: str, *, rank_offset: int, world_size: int, timeout_s: float, sharded: bool
    ) -> None:
        """Make the workers join the group that meets at ``place`` of ``host``; returns when all members have."""
        info = {
            "host": host,
            "place": place,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "timeout_s": timeout_s,
            "sharded": sharded,
        }
        self._post("/init_weight_transfer_engine", {"init_info": info})

    def start_weight_update(self) -> None:
        """Prepare for new weights."""
        self._post("/start_weight_update")

    def receive_shards(self) -> None:
        """Make the workers receive and load their shards; returns when they have, and have found the digests to agree."""
        self._post("/update_weights", {"update_info": {}})

    def receive_tensors(self, manifest: Manifest) -> None:
        """Make the workers receive and load the full tensors of the manifest; returns when they have."""
        self._post(
            "/update_weights", {"update_info": {"manifest": [[name, list(shape), dtype] for name, shape, dtype in manifest]}}
        )

    def finish_weight_update(self, version: WeightsVersion) -> None:
        """Let the model take the weights into use, and the server remember their version."""
        self._post("/finish_weight_update", {"weight_version": _label(version)})

    def _check_awake(self) -> None:
        if self.asleep:
            raise RuntimeError(
                f"{self.url} is asleep: its {' and '.join(sorted(self.asleep))} are not on the GPU, and a request would wait "
                "for ever; update its weights and wake it up first"
            )

    def _response(self, choice: dict[str, Any], expected: WeightsVersion) -> Response:
        ids, logprobs = choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]
        if len(ids) != len(logprobs) or any(value is None for value in logprobs):
            raise RuntimeError(f"{self.url} returned {len(logprobs)} log-probs for {len(ids)} tokens; every token needs one")
        # vLLM says by which weights each token was drawn, as spans of equal versions.
        labels = {span["version"] for span in choice["weight_versions"]}
        if labels != {_label(expected)} and not (expected == INITIAL_WEIGHTS and labels == {_INITIAL_LABEL}):
            raise RuntimeError(
                f"{self.url} drew a response with weights {' and '.join(sorted(labels)) or 'of no version'}, but this run gave "
                f"it {_label(expected)} (step:digest): another run updates this server, or an update was lost. Give every run "
                "servers of its own, and start this one again with --resume"
            )
        return Response(tuple(ids), tuple(logprobs), choice["finish_reason"], expected)

    def _post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        where = f"POST {self.url}{path}"
        try:
            reply = self._http.post(path, json=body)
        except httpx.TimeoutException as error:
            raise RuntimeError(f"{where}: no answer within {self._timeout_s:g} s ({type(error).__name__})") from error
        except httpx.TransportError as error:
            raise RuntimeError(f"{where}: {error or type(error).__name__}") from error
        if not reply.is_success:
            raise RuntimeError(f"{where}: status {reply.status_code}: {_message(reply)}")
        try:
            return reply.json() if reply.content else {}
        except ValueError as error:
            raise RuntimeError(
                f"{where}: status {reply.status_code}, but the answer is not JSON: {reply.text[:200]!r}"
            ) from error


def _label(version: WeightsVersion) -> str:
    """What vLLM stores as the version of its weights."""
    return f"{version.step}:{version.digest}"


def _message(reply: httpx.Response) -> str:
    """What the server said was wrong: vLLM puts it under error.message or detail."""
    try:
        content = reply.json()
    except ValueError:
        return reply.text[:500] or "no explanation"
    found = content.get("error", content.get("detail", content)) if isinstance(content, dict) else content
    return str(found.get("message", found) if isinstance(found, dict) else found)[:2000]

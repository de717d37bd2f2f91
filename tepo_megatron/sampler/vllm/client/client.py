"""The HTTP client of one vLLM server."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import httpx
import numpy as np

from tepo_megatron.core.rollout import Response, TokenIds, WeightsVersion
from tepo_megatron.sampler.protocol import INITIAL_WEIGHTS
from tepo_megatron.sampler.sampling import Sample, Sampling
from tepo_megatron.sampler.vllm.client.answers import (
    BadAnswer,
    FailedAnswer,
    OtherWeights,
    Routed,
    read_frames,
    read_prompt_logprobs,
    read_response,
)
from tepo_megatron.sampler.vllm.client.connection import Connection, ServerFault, ServerGone, ServerSilent
from tepo_megatron.sampler.vllm.plugin.middleware import ADAPTER_NAME, USE
from tepo_megatron.sampler.vllm.server.server import HEALTH_TIMEOUT_S
from tepo_megatron.sampler.vllm.server.server_program import MODEL_NAME
from tepo_megatron.sampler.vllm.wire import ABORT, SAMPLES
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.transfer.full_tensors import TensorManifest

SLEEPS = frozenset({"weights", "kv_cache"})
"""What a sleeping server frees, under vLLM's names."""


GENERATE = "/inference/v1/generate"
"""vLLM's route for token ids, which scores prompts here."""

PROGRESS = "/progress"
"""Our plugin's route: its answer changes as long as the server samples."""

_FIRST = -1
"""vLLM's priority of requests that pass all waiting samples; that of samples is 0."""

_INITIAL_LABEL = "default"
"""vLLM's name for weights that were never updated."""


class Client(Connection):
    """Requests to one server, from several threads.

    A refused request raises RuntimeError with the server's address and message: ServerFault if the server cannot be reached,
    fails (status 5xx) or answers wrongly, ServerSilent after ``timeout_s`` seconds. Samples and the receiving of weights have
    no time limit, but :meth:`close` ends them. ``asleep`` is the memory that the server has freed; ``vocab_size`` is None if
    unknown. ``routed``: the model, if responses must have their experts. ``versions_apart``: versions share no cached prompts.
    """

    def __init__(
        self,
        url: str,
        key: str,
        timeout_s: float,
        vocab_size: int | None = None,
        routed: ModelSpec | None = None,
        *,
        versions_apart: bool = False,
    ) -> None:
        super().__init__(url, key, timeout_s)
        self.asleep: frozenset[str] = frozenset()
        self._model = MODEL_NAME
        self._vocab_size = vocab_size
        self.versions_apart = versions_apart
        self._routed = routed

    def progress(self) -> object:
        """A value that changes with every token and request; None if the server cannot tell.

        Raises ServerGone if the server is unhealthy or refuses the connection, ServerSilent without an answer.
        """
        limit = min(self._timeout_s, HEALTH_TIMEOUT_S)
        traced = {"trace": self._note_socket}
        try:
            health = self._http.get("/health", timeout=limit, extensions=traced)
            if not health.is_success:
                raise ServerGone(f"{self.url}/health: status {health.status_code}", url=self.url)
            reply = self._http.get(PROGRESS, timeout=limit, extensions=traced)
        except httpx.ConnectError as error:
            raise ServerGone(f"{self.url}/health: {error or type(error).__name__}", url=self.url) from error
        except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: the client was closed
            if isinstance(error, ServerGone):
                raise
            raise ServerSilent(f"{self.url}/health: no answer within {limit:g} s", url=self.url) from error
        return reply.text if reply.is_success else None

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
        first: bool = False,
    ) -> list[Response]:
        """Sample j has the seed ``seed`` + j. ``from_cache``: the prefix cache may be used. ``first``: before all that waits.
        Raises as :meth:`draw`.
        """
        samples = [Sample(at, None if seed is None else seed + at, max_new_tokens) for at in range(n)]
        sampling = Sampling(temperature, max_new_tokens, tuple(stop_token_ids))
        drawn = self.draw("", prompt, samples, sampling, lambda: (version,), from_cache=from_cache, first=first)
        found = dict(drawn)
        return [found[at] for at in range(n)]

    def draw(
        self,
        name: str,
        prompt: Sequence[int] | TokenIds,
        samples: Sequence[Sample],
        sampling: Sampling,
        versions: Callable[[], Sequence[WeightsVersion]],
        *,
        from_cache: bool = True,
        first: bool = False,
        ended: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, Response]]:
        """Yields (sample, response) as samples finish. ``versions`` returns the weights that may draw tokens, oldest first.
        ``ended`` tells whether :meth:`abort` was called for ``name``: then unfinished samples with tokens come in part.

        Raises ServerFault for a wrong or cut answer, RuntimeError for a token of other weights.
        """
        self._check_awake()
        body = {
            "id": name or secrets.token_hex(8),
            "model": self._model,
            "prompt": _listed(prompt),
            **({"cache_salt": _label(versions()[-1])} if self.versions_apart else {}),
            **({"priority": _FIRST} if first else {}),
            "sampling": {**sampling.parameters(), **({} if from_cache else {"skip_reading_prefix_cache": True})},
            **({"sampling_mask": True} if sampling.sampling_mask else {}),
            "samples": [
                {"sample": each.index, "seed": each.seed, "max_tokens": each.max_new_tokens, "prefix": _listed(each.prefix)}
                for each in samples
            ],
        }
        rooms = {each.index: each.max_new_tokens for each in samples}
        routed = {}
        if self._routed is not None:
            routed = {each.index: Routed(self._routed, len(prompt) + len(each.prefix)) for each in samples}
        given: Sequence[WeightsVersion] = ()
        try:
            for frame in read_frames(self._stream(SAMPLES, body), list(rooms)):
                given = versions()
                labels = {label: version for version in given for label in _labels(version)}
                found = read_response(
                    frame,
                    max_new_tokens=rooms[frame.head["sample"]],
                    vocab_size=self._vocab_size,
                    labels=labels,
                    part=ended(),
                    routed=routed.get(frame.head["sample"]),
                    sampling_mask=sampling.sampling_mask,
                )
                if found is not None:
                    yield frame.head["sample"], found
        except BadAnswer as error:
            raise ServerFault(f"{self.url} {error} (POST {SAMPLES})", url=self.url) from error
        except FailedAnswer as error:
            message = f"POST {self.url}{SAMPLES}: status {error.status}: {error}"
            raise ServerFault(message, url=self.url) if error.status >= 500 else RuntimeError(message) from error
        except OtherWeights as error:
            raise RuntimeError(
                f"{self.url} drew a response with weights {error}, but this run gave "
                f"it {' and '.join(map(_label, given))} (step:digest): another run updates this server, or an update was lost. "
                "Give every run servers of its own, and start this one again with --resume"
            ) from error

    def abort(self, names: Sequence[str]) -> None:
        """Their parts are answered."""
        self._post(ABORT, {"ids": list(names)})

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        """Natural log-probs of all tokens but the first, at temperature 1. Passes all waiting samples."""
        self._check_awake()
        # prompt_logprobs = 0: only those of the prompt's own tokens; vLLM applies no temperature to them
        sampling = {"max_tokens": 1, "prompt_logprobs": 0}
        body = {"model": self._model, "token_ids": list(prompt), "sampling_params": sampling, "priority": _FIRST}
        reply = self._post(GENERATE, body)
        try:
            return read_prompt_logprobs(reply, prompt)
        except BadAnswer as error:
            raise ServerFault(f"{self.url} {error} (POST {GENERATE})", url=self.url) from error

    def cached_logprobs(self, prompt: Sequence[int], n: int, version: WeightsVersion) -> tuple[list[float], list[float]]:
        """Draws up to ``n`` tokens; natural log-probs with the prefix cache and without, at temperature 1. Passes all waiting
        samples.
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
                first=True,
            )[0]
            for from_cache in (True, False)
        )
        pairs = zip(through.response_ids.tolist(), fresh.response_ids.tolist(), strict=False)
        same = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)
        )  # after a different token the scores are of another text
        return through.logprobs[:same].tolist(), fresh.logprobs[:same].tolist()

    def pause(self, *, keep_cache: bool = False) -> None:
        """Holds requests. Without ``keep_cache`` their keys and values are computed again."""
        self._post("/pause?mode=keep" + ("&clear_cache=false" if keep_cache else ""))

    def resume(self) -> None:
        self._post("/resume")

    def sleep(self) -> None:
        """Ends requests and frees the GPU. vLLM's level 1 would keep a copy of weights that the next update replaces."""
        self._post("/sleep?level=2")
        self.asleep = SLEEPS

    def wake_up(self, *tags: str) -> None:
        """Takes memory back for ``tags`` (``weights``, ``kv_cache``). With all of it the server samples again."""
        tags = tuple(tag for tag in tags if tag in self.asleep)
        if tags:
            self._post("/wake_up?" + "&".join(f"tags={tag}" for tag in tags))
            self.asleep -= set(tags)

    def reset_prefix_cache(self) -> None:
        """Raises RuntimeError if the server could not."""
        if self._post("/reset_prefix_cache").get("success") is False:
            raise RuntimeError(
                f"{self.url} did not forget its prefix cache, since requests hold blocks of it; samples that begin as earlier "
                "ones would be of older weights"
            )

    def init_weight_transfer(
        self,
        host: str,
        place: str,
        *,
        rank_offset: int,
        world_size: int,
        timeout_s: float,
        sharded: bool,
        adapters: bool = False,
    ) -> None:
        """Returns when all members have joined."""
        info = {
            "host": host,
            "place": place,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "timeout_s": timeout_s,
            "sharded": sharded,
            "adapters": adapters,
        }
        self._post("/init_weight_transfer_engine", {"init_info": info})

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def receive_shards(self) -> None:
        """Returns when the workers have loaded their shards and compared the digests."""
        self._post("/update_weights", {"update_info": {}}, self._unbounded)

    def receive_tensors(self, manifest: TensorManifest) -> None:
        """Returns when the workers have loaded the full tensors."""
        tensors = [[name, list(shape), dtype] for name, shape, dtype in manifest]
        self._post("/update_weights", {"update_info": {"manifest": tensors}}, self._unbounded)

    def receive_adapters(self, manifest: TensorManifest, settings: Mapping[str, Any]) -> None:
        """As :meth:`receive_tensors`, for LoRA adapters with the settings of a PEFT folder."""
        tensors = [[name, list(shape), dtype] for name, shape, dtype in manifest]
        self._post("/update_weights", {"update_info": {"manifest": tensors, "settings": dict(settings)}}, self._unbounded)

    def use_adapter(self) -> None:
        self._post(USE)
        self._model = ADAPTER_NAME

    def finish_weight_update(self, version: WeightsVersion) -> None:
        """Makes the model use the weights, and the server remember their version."""
        self._post("/finish_weight_update", {"weight_version": _label(version)})

    def _check_awake(self) -> None:
        if self.asleep:
            raise RuntimeError(
                f"{self.url} is asleep: its {' and '.join(sorted(self.asleep))} are not on the GPU, and a request would wait "
                "for ever; update its weights and wake it up first"
            )


def _listed(ids: Sequence[int] | TokenIds) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)


def _labels(version: WeightsVersion) -> list[str]:
    return [_label(version), _INITIAL_LABEL] if version == INITIAL_WEIGHTS else [_label(version)]


def _label(version: WeightsVersion) -> str:
    return f"{version.step}:{version.digest}"

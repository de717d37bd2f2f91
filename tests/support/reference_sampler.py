"""A sampler in this process: a model of transformers in float64 that draws token by token, without batching or caches."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np
import torch
import transformers
from numpy.typing import ArrayLike
from safetensors.torch import load_file
from torch import Tensor

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import TOP_TOKEN, Response, SamplingMask, WeightsVersion, token_ids
from tepo_megatron.sampler.protocol import (
    INITIAL_WEIGHTS,
    NO_SERVERS,
    CacheReading,
    KeyedResponse,
    ReadBack,
    Sampler,
    SamplerOptions,
    Scores,
    SubmitOptions,
    refuse_others,
)
from tepo_megatron.sampler.sampling import Sample, Sampling, SamplingSettings, join_parts
from tepo_megatron.weights.transfer.full_tensors import TensorManifest


def truncate(logprobs: Tensor, sampling: Sampling) -> Tensor:
    """The log-probs [vocabulary] of the tokens that may be drawn, normalised; the others are -inf."""
    if sampling.min_p or sampling.top_p < 1 or sampling.stop or sampling.bad_words:
        raise ValueError("the reference sampler knows temperature, top_k and stop tokens only")
    if sampling.top_k is None:
        return logprobs
    return logprobs.masked_fill(logprobs < logprobs.topk(sampling.top_k).values[-1], -math.inf).log_softmax(-1)


_LAST_LOGITS: dict[tuple[bytes, tuple[int, ...]], Tensor] = {}
"""By the digest of the model's configuration and weights, and the tokens. Runs that are resumed or replayed ask again."""


class ReferenceSampler(Sampler):
    """A :class:`Sampler` for full tensors. ``sleep`` drops the weights, as a sampler on the trainer's GPUs does."""

    def __init__(self, config: ServerConfig, **options: Unpack[SamplerOptions]) -> None:
        self._options = options
        config_of = transformers.AutoConfig.from_pretrained(options["model_dir"])
        self._model: Any = transformers.AutoModelForCausalLM.from_config(config_of, dtype=torch.float64).eval()
        self._weights: dict[str, Tensor] = {}
        self._digest = b""
        self._version: WeightsVersion | None = None
        self._is_running = self._is_awake = False
        self._updating = threading.RLock()

    @property
    def weights_version(self) -> WeightsVersion | None:
        return self._version

    @property
    def addresses(self) -> list[str]:
        return ["reference"]

    def start(self) -> None:
        files = self._options["model_dir"].glob("*.safetensors")
        self._set_weights({name: tensor.double() for file in files for name, tensor in load_file(file).items()})
        self._version, self._is_running, self._is_awake = INITIAL_WEIGHTS, True, True

    def stop(self) -> None:
        self._is_running = False

    def revive(self) -> bool:
        if self._is_running and self._weights:
            return False
        self.start()
        self._version = None
        return True

    def sleep(self) -> None:
        self._is_awake, self._version = False, None

    def wake_up(self) -> None:
        self._is_awake = True

    def figures(self) -> dict[str, float]:
        return dict(NO_SERVERS)

    def update_weights_from_tensors(self, version: WeightsVersion, manifest: TensorManifest, tensors: Iterable[Tensor]) -> None:
        with self._updating:
            received = list(tensors)
            shapes = {name: tuple(tensor.shape) for name, tensor in self._weights.items()}
            wrong = [name for name, shape, _ in manifest if shapes.get(name) != tuple(shape)]
            if wrong or [tensor.shape for tensor in received] != [shape for _, shape, _ in manifest]:
                self._weights, self._version = {}, None
                raise ValueError(f"weights {version.step}: the tensors do not fit the model: {', '.join(wrong)}")
            new = {name: tensor.double() for (name, _, _), tensor in zip(manifest, received, strict=True)}
            self._set_weights(self._weights | new)
            self._version = version

    def update_weights_from_shards(self, version: WeightsVersion, sender: Any) -> None:
        raise RuntimeError("the reference sampler takes full tensors only; set rollout.server.transfer = gather")

    def update_adapters(
        self, version: WeightsVersion, manifest: TensorManifest, tensors: Any, settings: Mapping[str, Any]
    ) -> None:
        raise RuntimeError("the reference sampler takes full tensors only; set model.lora.serve = merged")

    def sample_stream(
        self, sampling: SamplingSettings, *, sampling_mask: bool = False, on_move: Callable[[], None] = lambda: None
    ) -> ReferenceStream:
        if self._version is None:
            raise RuntimeError("the sampler does not have the current weights; start it and update its weights")
        stop_ids = tuple(self._options["stop_token_ids"])
        return ReferenceStream(self, Sampling.of(sampling, stop_ids, sampling_mask=sampling_mask), on_move)

    def prompt_logprobs(self, prompt: Sequence[int]) -> dict[str, list[float]]:
        logprobs = self._logits(prompt)[:-1].log_softmax(-1)
        return {"reference": logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()}

    def score(self, tokens: Sequence[int], k: int = 0) -> Scores:
        json.dumps(tokens)  # as they travel to a real server
        best = self._logits(tokens)[:-1].log_softmax(-1).topk(k)
        top = np.empty(best.indices.shape, TOP_TOKEN)
        top["id"], top["logprob"] = best.indices.numpy(), best.values.numpy()
        return Scores(self.prompt_logprobs(tokens)["reference"], top if k else None)

    def read_through_cache(self, prompt: Sequence[int], n: int) -> dict[str, CacheReading]:
        ((response,),) = self.generate([prompt], n=1, temperature=1.0, max_new_tokens=n, seed=0)
        return {"reference": CacheReading(response.logprobs.tolist(), response.logprobs.tolist(), 0)}

    def read_back(self) -> dict[str, ReadBack]:
        return {"reference": ReadBack([], 1.0)}

    def _set_weights(self, weights: dict[str, Tensor]) -> None:
        digest = hashlib.sha1(self._model.config.to_json_string().encode(), usedforsecurity=False)
        for name in sorted(weights):
            digest.update(f"{name} {tuple(weights[name].shape)}".encode())
            digest.update(weights[name].contiguous().numpy().tobytes())
        with self._updating:
            self._weights, self._digest = weights, digest.digest()
            assert not self._model.load_state_dict(weights, strict=False).unexpected_keys  # tied weights are missing

    def _check_awake(self) -> None:
        if not (self._is_running and self._is_awake and self._weights):
            raise RuntimeError("the sampler is stopped or asleep")

    def _logits(self, ids: Sequence[int]) -> Tensor:
        """[tokens, vocabulary], after each of ``ids``."""
        self._check_awake()
        with self._updating, torch.no_grad():
            logits: Tensor = self._model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        return logits

    def _last_logits(self, ids: Sequence[int]) -> Tensor:
        """[vocabulary]; the oldest are forgotten at 50,000."""
        self._check_awake()
        key = (self._digest, tuple(ids))
        if key not in _LAST_LOGITS:
            if len(_LAST_LOGITS) == 50_000:
                del _LAST_LOGITS[next(iter(_LAST_LOGITS))]
            _LAST_LOGITS[key] = self._logits(ids)[-1].clone()
        return _LAST_LOGITS[key]

    def draw_token(self, draw: _Draw, sampling: Sampling) -> None:
        """Adds a token to ``draw``, with the weights as they are now."""
        with self._updating:
            logits = self._last_logits([*draw.prompt, *draw.ids])
            logprobs, version = truncate((logits / (sampling.temperature or 1.0)).log_softmax(-1), sampling), self._version
        assert version is not None
        token = int(logits.argmax())
        if draw.generator is not None:
            drawn = torch.rand((), generator=draw.generator, dtype=torch.float64)
            possible = logprobs.isfinite().nonzero()[:, 0]
            token = int(possible[min(int((logprobs[possible].exp().cumsum(0) <= drawn).sum()), possible.numel() - 1)])
        if not draw.versions or draw.versions[-1][1] != version:
            draw.versions.append((len(draw.ids) - draw.done, version))
        draw.others.append([other for other in logprobs.isfinite().nonzero()[:, 0].tolist() if other != token])
        draw.ids.append(token)
        draw.logprobs.append(float(logprobs[token]))


@dataclass
class _Draw:
    """A sample that is being drawn; ``done`` of ``ids`` are of an earlier part."""

    prompt: list[int]
    room: int
    generator: torch.Generator | None
    part: Response | None
    ids: list[int]
    done: int
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, WeightsVersion]] = field(default_factory=list)
    others: list[list[int]] = field(default_factory=list)

    def response(self, reason: str, *, has_mask: bool) -> Response:
        mask = SamplingMask([len(ids) for ids in self.others], [token for ids in self.others for token in ids])
        spans, new = tuple(self.versions), self.ids[self.done :]
        return join_parts(self.part, Response(new, self.logprobs, reason, spans, sampling_mask=mask if has_mask else None))


class ReferenceStream:
    """A :class:`SampleStream` that draws one token of every sample in turn, while it is asked for the next response."""

    def __init__(self, sampler: ReferenceSampler, sampling: Sampling, on_move: Callable[[], None]) -> None:
        self._sampler, self._sampling, self._on_move = sampler, sampling, on_move
        self._open: dict[tuple[Hashable, int], _Draw] = {}
        self._ready: deque[KeyedResponse] = deque()

    def __enter__(self) -> ReferenceStream:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._open.clear()

    def __iter__(self) -> Iterator[KeyedResponse]:
        while (result := self.next(None)) is not None:
            yield result

    @property
    def unfinished(self) -> int:
        return len(self._open) + len(self._ready)

    @property
    def weights_version(self) -> Any:
        return self._sampler.weights_version

    def submit(self, key: Hashable, prompt_ids: ArrayLike, seed: int, n: int = 1, **options: Unpack[SubmitOptions]) -> None:
        refuse_others(options)
        prompt: list[int] = token_ids(prompt_ids).tolist()
        if not prompt:
            raise ValueError(f"prompt {key} is empty")
        if self._sampling.temperature == 0 and n != 1:
            raise ValueError("greedy decoding gives one response per prompt")
        limit = self._sampling.max_new_tokens
        only, continued = options.get("only"), options.get("continued") or {}
        sampling = self._sampling._replace(max_new_tokens=min(options.get("room") or limit, limit))
        for index in range(n) if only is None else only:
            part = continued.get(index)
            sample = Sample.of(index, seed, sampling, part)
            generator = None if sample.seed is None else torch.Generator().manual_seed(sample.seed)
            before = sample.prefix.tolist()
            self._open[key, index] = _Draw(prompt, sample.max_new_tokens, generator, part, before, len(before))

    def next(self, timeout_s: float | None) -> KeyedResponse | None:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._ready and self._open:
            for (key, index), draw in list(self._open.items()):
                self._sampler.draw_token(draw, self._sampling)
                reason = "stop" if draw.ids[-1] in self._sampling.stop_token_ids else "length"
                if reason == "stop" or len(draw.logprobs) == draw.room:
                    del self._open[key, index]
                    self._ready.append((key, index, draw.response(reason, has_mask=self._sampling.sampling_mask)))
            self._on_move()
            if time.monotonic() > deadline:
                break
        return self._ready.popleft() if self._ready else None

    def abort(self) -> list[KeyedResponse]:
        results, self._ready = list(self._ready), deque()
        parts = [(key, index, draw) for (key, index), draw in self._open.items() if draw.logprobs]
        results += [(key, index, draw.response("abort", has_mask=self._sampling.sampling_mask)) for key, index, draw in parts]
        self._open.clear()
        return results

    def leave(self, home: Hashable) -> None: ...

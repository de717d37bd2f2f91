from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

TokenIds = NDArray[np.int32]

Logprobs = NDArray[np.float32]

TOP_TOKEN = np.dtype([("id", "<i4"), ("logprob", "<f4")])

TopTokens = NDArray[np.void]
"""Names the k most likely tokens at each place, the best first: ``TOP_TOKEN`` [tokens, k]."""

LossMask = NDArray[np.bool_]  # whether the model, and not an environment, wrote the response token

Routes = NDArray[np.uint8] | NDArray[np.int16]
"""Experts of all tokens but the last, read-only [tokens − 1, layers, experts per token]."""


@dataclass(frozen=True, order=True)
class WeightsVersion:
    """``step``: the one after which weights were taken; ``digest``: hex, empty if unknown."""

    step: int
    digest: str = ""

    @property
    def label(self) -> str:
        return f"{self.step}:{self.digest}"


Spans = tuple[tuple[int, WeightsVersion], ...]  # (index of the first token, weights that drew it and the following ones)


@dataclass(frozen=True, eq=False, init=False)
class _Sampled:
    """Equality compares all bits."""

    response_ids: TokenIds
    finish_reason: str
    versions: Spans
    routed_experts: Routes | None
    loss_mask: LossMask | None
    """None if the model wrote every response token."""
    sampling_mask: SamplingMask | None

    def _fill(self, arguments: Mapping[str, Any]) -> None:
        values = {item.name: arguments[item.name] for item in fields(self)}
        values |= {name: convert(values[name]) for name, convert in _CONVERSIONS.items() if name in values}
        values["loss_mask"] = _loss_mask(values["loss_mask"], len(values["response_ids"]))
        self.__dict__.update(values)  # the class is frozen

    @property
    def weights_version(self) -> WeightsVersion:
        """The oldest one."""
        return self.versions[0][1]

    @property
    def model_tokens(self) -> int:
        return self.response_ids.size if self.loss_mask is None else int(np.count_nonzero(self.loss_mask))

    def turns(self, decode: Callable[[Sequence[int]], str]) -> list[dict[str, str]]:
        """Texts of the model and of an environment, in order; empty if the model wrote all."""
        if self.loss_mask is None:
            return []
        starts = [0, *(np.flatnonzero(np.diff(self.loss_mask)) + 1)]
        return [
            {"by": "model" if self.loss_mask[start] else "environment", "text": decode(ids.tolist())}
            for start, ids in zip(starts, np.split(self.response_ids, starts[1:]), strict=True)
        ]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return False
        for item in fields(self):
            a, b = getattr(self, item.name), getattr(other, item.name)
            if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
                a, b = a.tobytes(), b.tobytes()  # so that nan equals nan, and 0 is not -0
            if (a is None) != (b is None) or a != b:
                return False
        return True

    def __hash__(self) -> int:
        return hash(self.response_ids.tobytes())


@dataclass(frozen=True, eq=False, init=False)
class Response(_Sampled):
    """``logprobs``: among tokens that could be drawn, under the sampling temperature (1 if greedy).

    ``finish_reason``: ``"stop"``, ``"length"`` or ``"abort"`` (can be continued).
    """

    logprobs: Logprobs

    def __init__(
        self,
        response_ids: ArrayLike,
        logprobs: ArrayLike,
        finish_reason: str,
        versions: Spans | WeightsVersion,
        routed_experts: Routes | None = None,
        loss_mask: ArrayLike | None = None,
        sampling_mask: SamplingMask | None = None,
    ) -> None:
        """An environment's token belongs to the span before it."""
        self._fill(locals())


NO_PARTS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, eq=False, init=False)
class Rollout(_Sampled):
    """One sampled response to a prompt, with its reward.

    ``sampler_logprobs``: natural logarithm, under the sampling temperature, among the tokens that could be drawn. ``group``
    numbers the prompt within its step. ``reward`` is None if the verifier failed: the response is not trained on.
    ``reward_parts``: the components of its weighted sum.
    """

    problem_id: str
    group: int
    prompt_ids: TokenIds
    sampler_logprobs: Logprobs
    text: str
    reward: float | None
    reward_parts: Mapping[str, float]
    teacher_logprobs: Logprobs | None
    """Of a served teacher, by response token."""
    teacher_top: TopTokens | None
    """For ``objective.distill.of = top_k``."""

    def __init__(
        self,
        problem_id: str,
        group: int,
        prompt_ids: ArrayLike,
        response_ids: ArrayLike,
        sampler_logprobs: ArrayLike,
        finish_reason: str,
        versions: Spans | WeightsVersion,
        text: str = "",
        reward: float | None = 0.0,
        reward_parts: Mapping[str, float] = NO_PARTS,
        routed_experts: Routes | None = None,
        loss_mask: ArrayLike | None = None,
        sampling_mask: SamplingMask | None = None,
        teacher_logprobs: ArrayLike | None = None,
        teacher_top: TopTokens | None = None,
    ) -> None:
        """Makes arrays of the right dtype read-only, without copy."""
        self._fill(locals())

    @classmethod
    def of(
        cls, response: Response, *, problem_id: str, group: int, prompt_ids: ArrayLike, text: str, reward: float | None = 0.0
    ) -> Rollout:
        drawn = {item.name: getattr(response, item.name) for item in fields(_Sampled)}
        return cls(problem_id, group, prompt_ids, sampler_logprobs=response.logprobs, text=text, reward=reward, **drawn)


def token_ids(values: ArrayLike) -> TokenIds:
    """Makes an int32 array read-only, or converts."""
    ids = np.asarray(values)
    if ids.size == 0:
        ids = ids.astype(np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"token ids must be whole numbers in a row, but they are {ids.dtype} of shape {ids.shape}")
    if ids.dtype != np.int32:
        narrow = ids.astype(np.int32)
        if not np.array_equal(narrow, ids):
            raise ValueError(f"token ids must fit in 32 bits, but one of them is {max(ids.tolist(), key=abs)}")
        ids = narrow
    ids.flags.writeable = False
    return ids


def _token_logprobs(values: ArrayLike) -> Logprobs:
    logprobs = np.asarray(values, dtype=np.float32)
    if logprobs.ndim != 1:
        raise ValueError(f"log-probs must be in a row, but they have the shape {logprobs.shape}")
    logprobs.flags.writeable = False
    return logprobs


def _spans(versions: Spans | WeightsVersion) -> Spans:
    return ((0, versions),) if isinstance(versions, WeightsVersion) else tuple(versions)


def _read_only(routes: Routes | None) -> Routes | None:
    if routes is not None:
        if routes.ndim != 3 or routes.dtype not in (np.uint8, np.int16):
            raise ValueError(f"routes must be uint8 or int16 with three axes, but they are {routes.dtype} of {routes.shape}")
        routes.flags.writeable = False
    return routes


def _top_tokens(top: TopTokens | None) -> TopTokens | None:
    if top is not None:
        if top.ndim != 2 or top.dtype != TOP_TOKEN:
            raise ValueError(
                f"a teacher's top tokens must be {TOP_TOKEN} with two axes, but they are {top.dtype} of {top.shape}"
            )
        top.flags.writeable = False
    return top


def _loss_mask(mask: ArrayLike | None, tokens: int) -> LossMask | None:
    if mask is None:
        return None
    bools = np.asarray(mask)
    if bools.dtype != np.bool_ or bools.shape != (tokens,):
        raise ValueError(
            f"a loss mask has one bool for each of the {tokens} response tokens, but it is {bools.dtype} of shape {bools.shape}"
        )
    if bools.all():
        return None  # so that equal responses are equal
    bools.flags.writeable = False
    return bools


_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "response_ids": token_ids,
    "prompt_ids": token_ids,
    "logprobs": _token_logprobs,
    "sampler_logprobs": _token_logprobs,
    "teacher_logprobs": lambda values: None if values is None else _token_logprobs(values),
    "teacher_top": _top_tokens,
    "versions": _spans,
    "routed_experts": _read_only,
    "reward_parts": dict,
}


def not_recorded(itemsize: int) -> int:
    return 2**8 - 1 if itemsize == 1 else 2**15 - 1


NO_TOKEN = -1


@dataclass(frozen=True, eq=False, init=False)
class SamplingMask:
    """``counts`` int32 [n]: other tokens that could have been drawn; ``ids`` int32 [Σ counts]; read-only."""

    counts: NDArray[np.int32]
    ids: NDArray[np.int32]

    def __init__(self, counts: ArrayLike, ids: ArrayLike) -> None:
        counts, ids = np.ascontiguousarray(counts, np.int32), np.ascontiguousarray(ids, np.int32)
        total = counts.sum(dtype=np.int64)
        if counts.ndim != 1 or ids.ndim != 1 or (counts < 0).any() or total != ids.size:
            raise ValueError(f"a sampling mask of {total} tokens beside those that were drawn names {ids.size}")
        for name, values in (("counts", counts), ("ids", ids)):
            values.flags.writeable = False
            object.__setattr__(self, name, values)

    @classmethod
    def empty(cls, n: int) -> SamplingMask:
        return cls(np.zeros(n, np.int32), np.zeros(0, np.int32))

    @classmethod
    def joined(cls, parts: Iterable[SamplingMask]) -> SamplingMask:
        masks = [cls.empty(0), *parts]
        return cls(np.concatenate([mask.counts for mask in masks]), np.concatenate([mask.ids for mask in masks]))

    def __len__(self) -> int:
        return self.counts.size

    def __getitem__(self, indices: NDArray[np.int64]) -> SamplingMask:
        counts = self.counts[indices]
        ends = np.cumsum(counts, dtype=np.int64)
        starts = np.cumsum(self.counts, dtype=np.int64)[indices] - counts
        return SamplingMask(
            counts, self.ids[np.arange(ends[-1] if ends.size else 0) + np.repeat(starts - (ends - counts), counts)]
        )

    def padded(self) -> NDArray[np.int32]:
        width = int(self.counts.max(initial=0))
        padded = np.full((len(self), width), NO_TOKEN, np.int32)
        padded[np.arange(width) < self.counts[:, None]] = self.ids
        return padded

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingMask):
            return NotImplemented
        return np.array_equal(self.counts, other.counts) and np.array_equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return hash((self.counts.tobytes(), self.ids.tobytes()))

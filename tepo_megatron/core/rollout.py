"""Responses of a sampler, and rollouts of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tepo_megatron.core.sampling_mask import SamplingMask

TokenIds = NDArray[np.int32]

Logprobs = NDArray[np.float32]

LossMask = NDArray[np.bool_]
"""Whether the model wrote the response token, and not an environment."""

Routes = NDArray[np.uint8] | NDArray[np.int16]
"""Experts of all tokens but the last, read-only [tokens − 1, layers, experts per token]; uint8 up to 255 experts."""


@dataclass(frozen=True, order=True)
class WeightsVersion:
    """The step after which the weights were taken, and their hex fingerprint, empty if unknown."""

    step: int
    digest: str = ""


Spans = tuple[tuple[int, WeightsVersion], ...]
"""(index of the first token, version of the weights that drew it and the following ones)."""


@dataclass(frozen=True, eq=False, init=False)
class Response:
    """One sampled continuation of a prompt. Equality compares all bits.

    ``logprobs``: among the tokens that could be drawn, under the sampling temperature (1 for greedy decoding).
    ``finish_reason``: ``"stop"`` (end token or stop string), ``"length"`` (cut) or ``"abort"`` (can be continued).
    """

    response_ids: TokenIds
    logprobs: Logprobs
    finish_reason: str
    versions: Spans
    routed_experts: Routes | None = None
    loss_mask: LossMask | None = None
    """None if the model wrote every token; other log-probs are 0."""
    sampling_mask: SamplingMask | None = None

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
        """``versions``: spans, or one version for all; an environment's token belongs to the span before it."""
        ids = token_ids(response_ids)
        _fill(
            self,
            response_ids=ids,
            logprobs=token_logprobs(logprobs),
            finish_reason=finish_reason,
            versions=_spans(versions),
            routed_experts=_read_only(routed_experts),
            loss_mask=_loss_mask(loss_mask, len(ids)),
            sampling_mask=sampling_mask,
        )

    @property
    def weights_version(self) -> WeightsVersion:
        """The oldest one."""
        return self.versions[0][1]

    @property
    def model_tokens(self) -> int:
        return _model_tokens(self)

    def __eq__(self, other: object) -> bool:
        return _same_bits(self, other)

    def __hash__(self) -> int:
        return hash((self.response_ids.tobytes(), self.finish_reason))


NO_PARTS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, eq=False, init=False)
class Rollout:
    """One sampled response to a prompt, with its reward. Equality compares all bits.

    ``sampler_logprobs``: natural logarithm, under the sampling temperature, among the tokens that could be drawn. ``group``
    numbers the prompt within its step. ``finish_reason``: ``"stop"`` (end token or stop string) or ``"length"`` (cut).
    ``reward`` is None if the verifier failed: the response is recorded, but not trained on. ``reward_parts``: the components of
    the reward's weighted sum.
    """

    problem_id: str
    group: int
    prompt_ids: TokenIds
    response_ids: TokenIds
    sampler_logprobs: Logprobs
    finish_reason: str
    versions: Spans
    text: str = ""
    reward: float | None = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    routed_experts: Routes | None = None
    loss_mask: LossMask | None = None
    """None if the model wrote every response token; other log-probs are 0."""
    sampling_mask: SamplingMask | None = None

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
    ) -> None:
        """``versions``: spans, or one version for all. Arrays of the right dtype are not copied, but made read-only."""
        ids = token_ids(response_ids)
        _fill(
            self,
            problem_id=problem_id,
            group=group,
            prompt_ids=token_ids(prompt_ids),
            response_ids=ids,
            sampler_logprobs=token_logprobs(sampler_logprobs),
            finish_reason=finish_reason,
            versions=_spans(versions),
            text=text,
            reward=reward,
            reward_parts=dict(reward_parts),
            routed_experts=_read_only(routed_experts),
            loss_mask=_loss_mask(loss_mask, len(ids)),
            sampling_mask=sampling_mask,
        )

    @classmethod
    def of(
        cls,
        response: Response,
        *,
        problem_id: str,
        group: int,
        prompt_ids: ArrayLike,
        text: str,
        reward: float | None = 0.0,
    ) -> Rollout:
        return cls(
            problem_id=problem_id,
            group=group,
            prompt_ids=prompt_ids,
            response_ids=response.response_ids,
            sampler_logprobs=response.logprobs,
            finish_reason=response.finish_reason,
            versions=response.versions,
            text=text,
            reward=reward,
            routed_experts=response.routed_experts,
            loss_mask=response.loss_mask,
            sampling_mask=response.sampling_mask,
        )

    @property
    def weights_version(self) -> WeightsVersion:
        """The oldest one."""
        return self.versions[0][1]

    @property
    def model_tokens(self) -> int:
        """T_i: response tokens that the model wrote."""
        return _model_tokens(self)

    def __eq__(self, other: object) -> bool:
        return _same_bits(self, other)

    def __hash__(self) -> int:
        return hash((self.problem_id, self.group, self.response_ids.tobytes()))


def token_ids(values: ArrayLike) -> TokenIds:
    """Makes an int32 array read-only without a copy, or converts. Raises ValueError unless 1-D integers of 32 bits."""
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


def token_logprobs(values: ArrayLike) -> Logprobs:
    """Makes a float32 array read-only without a copy, or converts. Raises ValueError unless 1-D."""
    logprobs = np.asarray(values, dtype=np.float32)
    if logprobs.ndim != 1:
        raise ValueError(f"log-probs must be in a row, but they have the shape {logprobs.shape}")
    logprobs.flags.writeable = False
    return logprobs


def _read_only(routes: Routes | None) -> Routes | None:
    if routes is not None:
        if routes.ndim != 3 or routes.dtype not in (np.uint8, np.int16):
            raise ValueError(f"routes must be uint8 or int16 with three axes, but they are {routes.dtype} of {routes.shape}")
        routes.flags.writeable = False
    return routes


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


def _model_tokens(value: Response | Rollout) -> int:
    return value.response_ids.size if value.loss_mask is None else int(np.count_nonzero(value.loss_mask))


def _spans(versions: Spans | WeightsVersion) -> Spans:
    return ((0, versions),) if isinstance(versions, WeightsVersion) else tuple(versions)


def _fill(target: object, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(target, name, value)


def _same_bits(one: Response | Rollout, other: object) -> bool:
    if not isinstance(other, type(one)):
        return False
    for item in fields(one):
        a, b = getattr(one, item.name), getattr(other, item.name)
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            a, b = a.tobytes(), b.tobytes()  # so that nan equals nan, and 0 is not -0
        if (a is None) != (b is None) or a != b:
            return False
    return True


def not_recorded(itemsize: int) -> int:
    """Returns the number of an unknown expert."""
    return 2**8 - 1 if itemsize == 1 else 2**15 - 1

"""What a sampler gives: responses, and rollouts of a step, with the weights that drew them. For others: ``types``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tepo_megatron.core.sampling_mask import SamplingMask

TokenIds = NDArray[np.int32]
"""Token ids as values carry them: read-only int32, one axis."""

Logprobs = NDArray[np.float32]
"""Natural-log probabilities of tokens as values carry them: read-only float32, one axis."""


LossMask = NDArray[np.bool_]
"""Which tokens of a response the model wrote, as values carry it: read-only bool, one axis. The others are an environment's:
context, on which nothing is trained."""


Routes = NDArray[np.uint8] | NDArray[np.int16]
"""The experts that the tokens of a sequence passed, as values carry them: read-only [tokens − 1, layers, experts per token], a
byte for each where the model has at most 255. The last token has none: a sampler draws it, and does not compute it."""


@dataclass(frozen=True, order=True)
class WeightsVersion:
    """Which weights: the step after which they were taken, and their fingerprint in hex, empty if not known."""

    step: int
    digest: str = ""


Spans = tuple[tuple[int, WeightsVersion], ...]
"""Which weights drew which tokens: (index of the first token, version), the first at 0, each to where the next one begins."""


@dataclass(frozen=True, eq=False, init=False)
class Response:
    """One sampled continuation of a prompt.

    ``logprobs`` has one natural-log probability per response id, under the temperature it was drawn with (under temperature 1
    where it was decoded greedily), among the tokens that could be drawn. ``finish_reason`` is ``"stop"`` (the last id is an end
    token, or completes a stop string), ``"length"`` (cut) or ``"abort"`` (a part, which can be gone on with). ``versions``: by
    which weights the tokens were drawn, as the server said. Two are equal if all their bits are.
    """

    response_ids: TokenIds
    logprobs: Logprobs
    finish_reason: str
    versions: Spans
    routed_experts: Routes | None = None
    """Of the prompt's tokens and the response's, where the server records them."""
    loss_mask: LossMask | None = None
    """None where the model wrote every token, as in all that has one turn; the log-probs of the others are 0."""
    sampling_mask: SamplingMask | None = None
    """Of the response's tokens, where it was asked for: tokens that could have been drawn in their place."""

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
        """``versions``: spans, or one version for all tokens; a token of the environment's counts to the span before it."""
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
        """The weights that drew the first token: the oldest."""
        return self.versions[0][1]

    @property
    def model_tokens(self) -> int:
        """How many of the tokens the model wrote."""
        return _model_tokens(self)

    def __eq__(self, other: object) -> bool:
        return _same_bits(self, other)

    def __hash__(self) -> int:
        return hash((self.response_ids.tobytes(), self.finish_reason))


NO_PARTS: Mapping[str, float] = MappingProxyType({})
"""Of a reward that is one number."""


@dataclass(frozen=True, eq=False, init=False)
class Rollout:
    """One sampled response to a prompt, with its reward.

    ``sampler_logprobs`` has one entry per response token: the natural-log probability with which the sampler drew it, under
    the sampling temperature and among the tokens that could be drawn. ``group`` numbers the prompt within its step; responses
    of one group share a prompt. ``finish_reason`` is ``"stop"`` (the last response id is an end token, or completes a stop
    string) or ``"length"`` (cut). ``versions``: by which weights the tokens were drawn. ``reward`` is None where the verifier
    failed: the response is recorded, and not trained on. ``reward_parts``: the components that the reward is the weighted sum
    of, by name; empty where the verifier returns none. Two are equal if all their bits are.
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
    """Of the prompt's tokens and the response's, where the sampler recorded them."""
    loss_mask: LossMask | None = None
    """None where the model wrote every response token; the sampler's log-probs of the others are 0."""
    sampling_mask: SamplingMask | None = None
    """Of the response's tokens, where the sampler recorded it: tokens that could have been drawn in their place."""

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
        """``versions``: spans, or one version for all tokens. Arrays of the right type are taken over, and read-only then."""
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
        """The rollout whose tokens, masks, versions and record of experts are those of ``response``."""
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
        """The weights that drew the first token: the oldest."""
        return self.versions[0][1]

    @property
    def model_tokens(self) -> int:
        """How many of the response tokens the model wrote: T_i of the paper's sums."""
        return _model_tokens(self)

    def __eq__(self, other: object) -> bool:
        return _same_bits(self, other)

    def __hash__(self) -> int:
        return hash((self.problem_id, self.group, self.response_ids.tobytes()))


def token_ids(values: ArrayLike) -> TokenIds:
    """Token ids as values carry them; an int32 array is taken over, and read-only then.

    Raises ValueError for what has more or fewer axes than one, is no whole number, or does not fit in 32 bits.
    """
    found = np.asarray(values)
    if found.size == 0:
        found = found.astype(np.int32)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(f"token ids must be whole numbers in a row, but they are {found.dtype} of shape {found.shape}")
    if found.dtype != np.int32:
        narrow = found.astype(np.int32)
        if not np.array_equal(narrow, found):
            raise ValueError(f"token ids must fit in 32 bits, but one of them is {max(found.tolist(), key=abs)}")
        found = narrow
    found.flags.writeable = False
    return found


def token_logprobs(values: ArrayLike) -> Logprobs:
    """Log-probs as values carry them; a float32 array is taken over, and read-only then. Raises ValueError unless one axis."""
    found = np.asarray(values, dtype=np.float32)
    if found.ndim != 1:
        raise ValueError(f"log-probs must be in a row, but they have the shape {found.shape}")
    found.flags.writeable = False
    return found


def _read_only(routes: Routes | None) -> Routes | None:
    if routes is not None:
        if routes.ndim != 3 or routes.dtype not in (np.uint8, np.int16):
            raise ValueError(f"routes must be uint8 or int16 with three axes, but they are {routes.dtype} of {routes.shape}")
        routes.flags.writeable = False
    return routes


def _loss_mask(mask: ArrayLike | None, tokens: int) -> LossMask | None:
    if mask is None:
        return None
    found = np.asarray(mask)
    if found.dtype != np.bool_ or found.shape != (tokens,):
        raise ValueError(
            f"a loss mask has one bool for each of the {tokens} response tokens, but it is {found.dtype} of shape {found.shape}"
        )
    if found.all():
        return None  # so that equal responses are equal
    found.flags.writeable = False
    return found


def _model_tokens(value: Response | Rollout) -> int:
    return value.response_ids.size if value.loss_mask is None else int(np.count_nonzero(value.loss_mask))


def _spans(versions: Spans | WeightsVersion) -> Spans:
    return ((0, versions),) if isinstance(versions, WeightsVersion) else tuple(versions)


def _fill(target: object, **values: object) -> None:
    """Sets the fields of a frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(target, name, value)


def _same_bits(one: Response | Rollout, other: object) -> bool:
    if not isinstance(other, type(one)):
        return False
    for each in fields(one):
        a, b = getattr(one, each.name), getattr(other, each.name)
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            a, b = a.tobytes(), b.tobytes()  # so that nan equals nan, and 0 is not -0
        if (a is None) != (b is None) or a != b:
            return False
    return True


def not_recorded(itemsize: int) -> int:
    """The number that stands for an expert that is not known, in a record of routes with so many bytes a number (1 or 2)."""
    return 2**8 - 1 if itemsize == 1 else 2**15 - 1

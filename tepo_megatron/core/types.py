"""Tensors that pass between folders.

S sequences, T packed tokens. A ``_T`` value at t belongs to the *label* there, the next token of its sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from tepo_megatron.core.rollout import SamplingMask

if TYPE_CHECKING:
    import torch
    from torch import Tensor


ON_HOST = ("routed_experts_T", "sampling_mask_T", "top_ids_TK", "top_logprobs_TK")  # of a batch: gigabytes in a step


@dataclass(frozen=True)
class Batch:
    """S sequences packed into T tokens: a step, a mini-batch or a micro-batch.

    - int64: ``tokens_T``, ``labels_T`` (the next token, or 0), ``groups_S``
    - ``loss_mask_T`` bool: whether the model wrote the label; ``cu_seqlens`` int64 [S+1]: offsets, first 0, last T
    - ``sampler_logprobs_T`` is 0 outside the mask; ``old_logprobs_T`` and ``old_entropy_T`` are of the pre-update policy
    - ``routed_experts_T`` uint8 or int16 [T, layers, k], on the host: experts of each *token*, unknown ones the dtype's maximum
    - ``sampling_mask_T``, on the host: the tokens that could have been drawn instead of the *label*
    - ``teachers_S`` int64: the number of a sequence's teacher, if there are several. ``teacher_states``: by micro-batch of this
      rank and by teacher, the hidden states of its tokens
    - ``top_ids_TK`` int32 and ``top_logprobs_TK``, on the host: the K most likely tokens of a served teacher, the best first
    - ``recorded_S`` int64: the index in the step of a sequence with recorded token values, or −1
    - ``expert_load_LE`` int64 [layers, experts]: tokens of the mini-batch sent to each expert
    """

    tokens_T: Tensor
    labels_T: Tensor
    loss_mask_T: Tensor
    cu_seqlens: Tensor
    sampler_logprobs_T: Tensor
    rewards_S: Tensor
    groups_S: Tensor
    advantages_S: Tensor | None = None
    old_logprobs_T: Tensor | None = None
    old_entropy_T: Tensor | None = None
    reference_logprobs_T: Tensor | None = None
    teacher_logprobs_T: Tensor | None = None
    top_ids_TK: Tensor | None = None
    top_logprobs_TK: Tensor | None = None
    reward_parts_SK: Tensor | None = None
    routed_experts_T: Tensor | None = None
    sampling_mask_T: SamplingMask | None = None
    expert_load_LE: Tensor | None = None
    recorded_S: Tensor | None = None
    teachers_S: Tensor | None = None
    teacher_states: Sequence[Sequence[Tensor]] | None = None

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.numel()

    @property
    def lengths_S(self) -> Tensor:
        """With prompts."""
        return self.cu_seqlens.diff()

    @property
    def sequence_index_T(self) -> Tensor:
        import torch

        lengths_S = self.lengths_S
        index_S = torch.arange(self.num_sequences, device=lengths_S.device)
        return torch.repeat_interleave(index_S, lengths_S, output_size=self.num_tokens)

    @property
    def positions_T(self) -> Tensor:
        import torch

        index_T = self.sequence_index_T
        return torch.arange(self.num_tokens, device=index_T.device) - self.cu_seqlens[index_T]

    def of_teacher(self, number: int) -> Tensor:
        """Returns the loss mask of its sequences, bool [T]."""
        if self.teachers_S is None:
            return self.loss_mask_T
        return self.loss_mask_T & (self.teachers_S == number)[self.sequence_index_T]

    def with_(self, **changes: Any) -> Batch:
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> Batch:
        names = [f.name for f in fields(self) if f.name not in (*ON_HOST, "teacher_states")]
        return replace(self, **{name: value.to(device) for name in names if (value := getattr(self, name)) is not None})

    @property
    def trained_sequences(self) -> list[int]:
        """Those with a loss token."""
        import torch

        before = torch.searchsorted(self.loss_mask_T.nonzero().flatten(), self.cu_seqlens)  # loss tokens before each
        indices: list[int] = before.diff().nonzero().flatten().tolist()
        return indices

    def token_index(self, sequences: Sequence[int], offsets: Sequence[int] | None = None) -> Tensor:
        """Returns int64 on the host. ``offsets``: ``cu_seqlens``, which it waits for otherwise."""
        import torch

        offsets = self.cu_seqlens.tolist() if offsets is None else offsets
        runs = [torch.arange(offsets[s], offsets[s + 1]) for s in sequences]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *runs])

    def select(self, sequences: Sequence[int], offsets: Sequence[int] | None = None) -> Batch:
        import torch

        local = self.token_index(sequences, offsets), torch.tensor(list(sequences), dtype=torch.int64)
        there = [index.to(self.tokens_T.device, non_blocking=True) for index in local]
        changes: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, SamplingMask):
                changes[f.name] = value[local[0].numpy()]
            elif value is not None and f.name not in ("cu_seqlens", "expert_load_LE", "teacher_states"):
                index_T, index_S = local if value.device.type == "cpu" else there
                changes[f.name] = value[index_T if f.name.endswith(("_T", "_TK")) else index_S]
        cu_seqlens = self.cu_seqlens.new_zeros(len(sequences) + 1)
        cu_seqlens[1:] = self.lengths_S[there[1]].cumsum(0)
        return replace(self, cu_seqlens=cu_seqlens, **changes)


class Checks:
    """Errors by numbers on the device. The host waits once for many."""

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, Callable[..., ValueError]]] = []

    def refuse(self, wrong_N: Tensor, error: Callable[..., ValueError], *facts: Tensor) -> None:
        """Notes ``error(index, *facts[..., index])`` of the first in ``wrong_N``."""
        import torch

        if wrong_N.numel():
            first = wrong_N.byte().argmax(0, keepdim=True)
            numbers = (wrong_N[first], first, *(fact[..., first].flatten() for fact in facts))
            self._noted.append((torch.cat([number.double() for number in numbers]), error))

    @staticmethod
    def first_errors(several: Sequence[Checks]) -> list[ValueError | None]:
        """Returns the first of each."""
        import torch

        noted = [one for checks in several for one in checks._noted]
        numbers = iter(torch.cat([facts for facts, _ in noted]).tolist() if noted else [])
        errors: list[ValueError | None] = []
        for checks in several:
            facts = [([next(numbers) for _ in range(held.numel())], error) for held, error in checks._noted]
            errors.append(next((error(int(index), *rest) for (wrong, index, *rest), error in facts if wrong), None))
        return errors

    def raise_first(self) -> None:
        if (error := self.first_errors([self])[0]) is not None:
            raise error


@dataclass(frozen=True)
class TokenScores:
    """Label's log-probability and entropy: fp32 [T], differentiable, natural logarithm, equal on tensor-parallel ranks."""

    logprob: Tensor
    entropy: Tensor
    entropy_slope: Tensor | None = None
    """Slope of the entropy H along e_k − p, the direction of a policy-gradient step on the label k with A > 0: Σ_j p_j² (log
    p_j + H) − p_k (log p_k + H). Detached; None if not requested.
    """
    divergence: Tensor | None = None
    """From the teacher, differentiable. None without one, as are the next two, which are detached."""
    teacher_logprob: Tensor | None = None
    """Is of the label, and None from `TeacherTopK`."""
    agreement: Tensor | None = None
    """bool [T]: whether the most likely token is the teacher's. The lowest id wins a tie; with `TeacherTopK` any does."""
    checks: Checks | None = field(default=None, kw_only=True)
    """Notes errors; None: they are raised."""


@dataclass(frozen=True)
class Divergence:
    """``forward_kl``: KL(teacher ‖ student); ``reverse_kl``: KL(student ‖ teacher); ``jsd``: the generalised Jensen-Shannon
    divergence of [GKD](https://arxiv.org/abs/2306.13649), β KL(teacher ‖ m) + (1 − β) KL(student ‖ m) with
    m = β teacher + (1 − β) student.
    """

    kind: Literal["forward_kl", "reverse_kl", "jsd"]
    beta: float = 0.5
    """Of ``jsd``, in (0, 1)."""

    def __post_init__(self) -> None:
        if self.kind not in ("forward_kl", "reverse_kl", "jsd"):
            raise ValueError(f"kind = {self.kind!r} is no divergence; give forward_kl, reverse_kl or jsd")
        if not 0 < self.beta < 1:
            raise ValueError(
                f"beta = {self.beta:g} is outside (0, 1); give kind = 'forward_kl' instead of 0 and 'reverse_kl' instead of 1"
            )


@dataclass(frozen=True)
class TeacherLogits:
    """A teacher's logits of the student's tokens and columns: [T, V/p], in the student's dtype. They get no gradient."""

    logits_TVp: Tensor
    divergence: Divergence


@dataclass(frozen=True)
class TeacherHead:
    """A teacher's hidden states [T, G], or [T/p, G] as the student's are, and its head [V/p, G], in the student's dtype.

    They get no gradient.
    """

    hidden_TG: Tensor
    weight_VpG: Tensor
    divergence: Divergence


LEAST_REST = 2.0**-20


@dataclass(frozen=True)
class TeacherTopK:
    """Names a teacher's K most likely tokens, the best first, [T, K], with log-probs at the student's temperature.

    The divergence is that of K + 1 outcomes: these, and all others together, which count as 2⁻²⁰ at least, since fp32 does
    not resolve less.
    """

    ids_TK: Tensor
    logprobs_TK: Tensor
    divergence: Divergence


@dataclass(frozen=True)
class ObjectiveOutput:
    """A micro-batch's share of the loss of one optimizer step.

    ``numerator``: a differentiable *sum*. ``denominator``, equal on all ranks, divides the sum over micro-batches and ranks
    once. Detached: ``metrics``, ``(sum, count)`` scalars that add up likewise; ``extrema``, named ``…/min`` or ``…/max``;
    ``token_values`` [T]; ``moves`` int64 [2, 3, bins] (`count_moves`), which add up too, of tokens with A < 0 and A > 0.
    """

    numerator: Tensor
    denominator: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    extrema: Mapping[str, Tensor] = field(default_factory=dict)
    token_values: Mapping[str, Tensor] = field(default_factory=dict)
    moves: Tensor | None = None


_LEAST, _OCTAVES, _PER_OCTAVE = 2.0**-30, 40, 32
BINS = 1 + _OCTAVES * _PER_OCTAVE
"""The first counts moves that are 0, or away from the bound; a bin's edges have the ratio 2^(1/32) = 1.02."""


LENGTH_UNIT = 1 / 1024  # of log₂ n


def count_moves(move_T: Tensor, where_T: Tensor, log2_length_T: Tensor | None = None) -> Tensor:
    """Returns int64 [3, BINS]: tokens by their positive moves, Σx and Σx² of them; x: ``log2_length_T`` in LENGTH_UNIT.

    Integers, so that they are equal over ranks once they are added up.
    """
    import torch

    move_T = move_T.detach().double()
    bins_T = ((move_T.clamp(min=_LEAST) / _LEAST).log2() * _PER_OCTAVE).floor().clamp(max=BINS - 2).long() + 1
    x_T = torch.zeros_like(bins_T) if log2_length_T is None else (log2_length_T / LENGTH_UNIT).round().long()
    counts = torch.zeros(3, BINS, dtype=torch.int64, device=move_T.device)
    # a bincount waits for the device
    return counts.index_add_(1, torch.where(move_T > 0, bins_T, 0), torch.stack([where_T, where_T * x_T, where_T * x_T**2]))


def bound_for_share(counts: Tensor, share: float) -> float | None:
    """Returns the bound, exact to 2 %, that leaves ``share`` of the counted tokens above it; None if fewer moved."""
    counts_B = counts[0].double()
    outside = share * float(counts_B.sum())
    above_B = counts_B.flip(0).cumsum(0).flip(0)  # in this bin and those above
    index = int((above_B >= outside).nonzero()[-1]) if outside else 0
    if index == 0:
        return None
    within = (float(above_B[index]) - outside) / float(counts_B[index])
    return _LEAST * math.exp2((index - 1 + within) / _PER_OCTAVE)


def sums_outside(counts: Tensor, bound: float) -> Tensor:
    """Sums rows of `count_moves` over the tokens above ``bound``; none are above the last bin."""
    position = 1 + max(math.log2(bound / _LEAST) * _PER_OCTAVE, 0.0)
    index = int(position)
    return counts[:, index:].double().sum(1) - (position - index) * counts[:, index : index + 1].double().sum(1)

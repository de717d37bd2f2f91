"""A rank's columns of the vocabulary, the rows to score, and the merge of shards' statistics.

T tokens, R scored tokens, V true vocabulary, Vp columns per rank with padding.

K = 4 statistics per row: m = max x, Σ e^t, Σ e^t·t, x of the label (0 if elsewhere), with t = (x − m)/temperature. The
entropy's slope adds Σ e^2t and Σ e^2t·t: K = 6. A teacher with logits y and s = (y − max y)/temperature adds six: the column of
max x, max y, Σ e^s, the column of max y, y of the label, and Σ e^s·(s − t) for the forward KL or Σ e^t·(t − s) for the reverse.
A teacher's top k add x of each, 0 if elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.core.types import LEAST_REST, Checks, Divergence, TeacherHead, TeacherLogits, TeacherTopK
from tepo_megatron.errors import NotFiniteError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_KINDS = {"forward_kl": 1, "reverse_kl": 2, "jsd": 3}

_Tensors = TypeVar("_Tensors", bound=NamedTuple)


def mapped(tensors: _Tensors, function: Callable[[Tensor], Tensor]) -> _Tensors:
    """None stays."""
    return tensors._make(None if values is None else function(values) for values in tensors)


class Logits(NamedTuple):
    """A shard [T, Vp], and a teacher's of the same tokens and columns."""

    student: Tensor
    teacher: Tensor | None = None


class LocalLabels(NamedTuple):
    """Of labels [R], or kept or a teacher's tokens [R, K]."""

    column_R: Tensor  # int64; 0 if another shard has the token
    inside_R: Tensor


class _LocalTopK(NamedTuple):
    """Of `TeacherTopK`."""

    tokens: LocalLabels
    logprob_RK: Tensor  # fp64
    divergence: Divergence


@dataclass(frozen=True)
class Scoring:
    tp_group: ProcessGroup | None
    temperature: float
    columns: int  # without padding, which is at the end
    tokens: int
    rows_R: Tensor | None  # int64; None if all are scored
    labels: LocalLabels
    checks: Checks
    entropy_slope: bool = False
    kept_tokens: LocalLabels | None = None  # None: the whole vocabulary
    divergence: Divergence | None = None  # None: no teacher with logits
    top: _LocalTopK | None = None

    @classmethod
    def plan(
        cls,
        labels_T: Tensor,
        *,
        tokens: int,
        width: int,
        tp_group: ProcessGroup | None,
        temperature: float,
        vocab_size: int | None,
        mask_T: Tensor | None,
        entropy_slope: bool,
        kept_TK: Tensor | None = None,
        teacher: TeacherHead | TeacherLogits | TeacherTopK | None = None,
        scored: int | None = None,
        checks: Checks | None = None,
    ) -> Scoring:
        """``width``: the shard's columns with padding. Raises ValueError."""
        checks = Checks() if checks is None else checks
        rank, world = (0, 1) if tp_group is None else (dist.get_rank(tp_group), dist.get_world_size(tp_group))
        vocab_size = width * world if vocab_size is None else vocab_size
        if not 0 < vocab_size <= width * world:
            raise ValueError(
                f"vocab_size = {vocab_size}, but {world} shards of {width} columns hold {width * world}; give the tokenizer's "
                "size without padding"
            )
        if not 0 < temperature < float("inf"):
            raise ValueError(
                f"temperature = {temperature:g} must be positive and finite; score at the temperature sampled with"
            )
        _check_shape("labels_T", labels_T, (tokens,), (torch.int64,))
        if mask_T is not None:
            _check_shape("mask_T", mask_T, (tokens,), (torch.bool,))
        if kept_TK is not None and teacher is not None:
            raise ValueError("kept_TK and a teacher exclude each other: divergences are of the whole vocabulary; leave out one")
        if kept_TK is not None:
            _check_shape("kept_TK", kept_TK, (tokens, kept_TK.shape[-1]), (torch.int32, torch.int64))
        top = teacher if isinstance(teacher, TeacherTopK) else None
        divergence = None if teacher is None or top is not None else teacher.divergence
        if top is not None:
            _check_shape("ids_TK", top.ids_TK, (tokens, top.ids_TK.shape[-1]), (torch.int32, torch.int64))
            if not 0 < top.ids_TK.shape[-1] < vocab_size:
                raise ValueError(
                    f"a teacher's top {top.ids_TK.shape[-1]} of {vocab_size} tokens leave no other; give at least 1 and at "
                    f"most {vocab_size - 1}, or the teacher's logits"
                )
            _check_shape("logprobs_TK", top.logprobs_TK, tuple(top.ids_TK.shape), (torch.float32, torch.float64))
        rows_R = None
        if mask_T is not None:
            rows_R = (mask_T.nonzero() if scored is None else mask_T.nonzero_static(size=scored)).squeeze(1)
        # Padding is at the end of the whole vocabulary: the last shards have it, and a small one may be padding alone.
        columns = min(max(vocab_size - rank * width, 0), width)

        def of_rows(values_T: Tensor) -> Tensor:
            return values_T if rows_R is None else values_T[rows_R]

        def local(ids: Tensor) -> LocalLabels:
            column = ids - rank * width
            inside = (column >= 0) & (column < columns) & (ids >= 0)
            return LocalLabels(torch.where(inside, column, 0), inside)

        labels_R, token_R = of_rows(labels_T), torch.arange(tokens, device=labels_T.device) if rows_R is None else rows_R
        kept_RK = None if kept_TK is None else of_rows(kept_TK).long()
        _check_ids(labels_R, kept_RK, token_R, vocab_size, checks)
        kept_tokens = None if kept_RK is None else local(kept_RK)
        labels, local_top = local(labels_R), None
        if top is not None:
            ids_RK = of_rows(top.ids_TK).long()
            _check_top(ids_RK, token_R, vocab_size, checks)
            local_top = _LocalTopK(local(ids_RK), of_rows(top.logprobs_TK).double(), top.divergence)
        return cls(
            tp_group, temperature, columns, tokens, rows_R, labels, checks, entropy_slope, kept_tokens, divergence, local_top
        )

    @property
    def statistics(self) -> int:
        count = (6 if self.entropy_slope else 4) + (0 if self.divergence is None else TEACHER_STATISTICS)
        return count + (0 if self.top is None else self.top.logprob_RK.shape[1])

    @property
    def without_top(self) -> Scoring:
        return replace(self, top=None)

    @property
    def kind(self) -> int:
        """As compiled sweeps number divergences; 0 without."""
        return 0 if self.divergence is None else _KINDS[self.divergence.kind]

    @property
    def has_mixture(self) -> bool:
        return self.divergence is not None and self.divergence.kind == "jsd"

    @property
    def count(self) -> int:
        return self.labels.column_R.numel()

    @property
    def token_R(self) -> Tensor:
        return torch.arange(self.count, device=self.labels.column_R.device) if self.rows_R is None else self.rows_R

    def of_rows(self, values_T: Tensor) -> Tensor:
        return values_T if self.rows_R is None else values_T[self.rows_R]

    def to_tokens(self, values_R: Tensor) -> Tensor:
        """Unscored tokens get 0."""
        if self.rows_R is None:
            return values_R
        return values_R.new_zeros(self.tokens, *values_R.shape[1:]).index_copy_(0, self.rows_R, values_R)

    def chunk(self, index: slice) -> Scoring:
        part, top = itemgetter(index), self.top
        if top is not None:
            top = top._replace(tokens=mapped(top.tokens, part), logprob_RK=top.logprob_RK[index])
        kept = None if self.kept_tokens is None else mapped(self.kept_tokens, part)
        labels, tokens = mapped(self.labels, part), index.stop - index.start
        return replace(self, tokens=tokens, rows_R=None, labels=labels, kept_tokens=kept, top=top)

    def gather(self, local_RK: Tensor) -> Tensor:
        """Returns [p, R, K]. Every rank calls."""
        if self.tp_group is None or not local_RK.numel():
            return local_RK.unsqueeze(0)
        return all_gather(local_RK, self.tp_group).view(-1, *local_RK.shape)

    def check_finite(self, stats_pRK: Tensor, scores: RowScores, divergence_R: Tensor | None) -> None:
        """Every rank notes the same errors."""
        token_R = self.token_R

        def refuse(log_sum_R: Tensor, sum_pR: Tensor, whose: str, hint: str) -> None:
            def error(_: int, token: float, *sum_p: float) -> ValueError:
                # A NaN or +inf makes its shard's sum NaN or inf, which names the rank; a finite 0 means that all are −inf.
                ranks = [rank for rank, total in enumerate(sum_p) if not math.isfinite(total)]
                if not ranks:
                    return NotFiniteError(
                        f"every {whose}logit of token {token:.0f} is −inf; a sampler's mask must leave at least one token"
                    )
                return NotFiniteError(
                    f"NaN or +inf {whose}logits on tensor-parallel rank {ranks[0]}, first at token {token:.0f}; look at {hint}"
                )

            self.checks.refuse(~log_sum_R.isfinite(), error, token_R, sum_pR)

        def infinite(_: int, token: float) -> ValueError:
            first, second = ("teacher", "student") if kind == "forward_kl" else ("student", "teacher")
            return NotFiniteError(
                f"{kind} of token {token:.0f} is infinite: a logit of the {second} is −inf where the {first}'s is not; use "
                "kind = 'jsd', or the same vocabulary and mask for both"
            )

        refuse(scores.log_sum_R, stats_pRK[..., 1], "", "the weights after the last step and at the learning rate")
        if self.divergence is not None and scores.teacher_log_sum_R is not None and divergence_R is not None:
            refuse(scores.teacher_log_sum_R, stats_pRK[..., 2 - TEACHER_STATISTICS], "teacher ", "the teacher's weights")
        compared = self.divergence if self.top is None else self.top.divergence
        if compared is not None and divergence_R is not None:
            kind = compared.kind
            self.checks.refuse(~divergence_R.isfinite(), infinite, token_R)


def _check_shape(name: str, values: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if values.shape != shape or values.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} is {values.dtype} {tuple(values.shape)} for {shape[0]} tokens; give {expected} for each token"
        )


def _check_ids(labels_R: Tensor, kept_RK: Tensor | None, token_R: Tensor, vocab_size: int, checks: Checks) -> None:
    """A wrong id is in no shard: nothing is read out of bounds."""

    def wrong_label(_: int, token: float, label: float) -> ValueError:
        return ValueError(
            f"the label of token {token:.0f} is {label:.0f}, outside [0, {vocab_size}); leave tokens without a label out of "
            "mask_T, and check that tokenizer and model agree on the vocabulary"
        )

    def wrong_kept(_: int, token: float, kept: float) -> ValueError:
        problem = f"is outside [0, {vocab_size})" if kept >= vocab_size else "is the label itself, which counts already"
        where = f"kept token {kept:.0f} of token {token:.0f}"
        return ValueError(f"{where} {problem}; sampler and model must agree on the vocabulary")

    checks.refuse((labels_R < 0) | (labels_R >= vocab_size), wrong_label, token_R, labels_R)
    if kept_RK is not None and kept_RK.numel():
        wrong_RK = (kept_RK >= vocab_size) | (kept_RK == labels_R.unsqueeze(1))
        first_R1 = wrong_RK.byte().argmax(1, keepdim=True)
        checks.refuse(wrong_RK.any(1), wrong_kept, token_R, kept_RK.gather(1, first_R1).squeeze(1))


def _check_top(ids_RK: Tensor, token_R: Tensor, vocab_size: int, checks: Checks) -> None:
    def wrong(_: int, token: float, lowest: float, highest: float) -> ValueError:
        return ValueError(
            f"the teacher's tokens of token {token:.0f} are between {lowest:.0f} and {highest:.0f}, not within [0, "
            f"{vocab_size}); teacher and model must agree on the vocabulary"
        )

    if ids_RK.numel():
        lowest_R, highest_R = ids_RK.amin(1), ids_RK.amax(1)
        wrong_R = (lowest_R < 0) | (highest_R >= vocab_size)
        checks.refuse(wrong_R, wrong, token_R, lowest_R, highest_R)


def all_gather(local: Tensor, group: ProcessGroup) -> Tensor:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the second is deprecated from 2.13 on
    gathered = local.new_empty(local.shape[0] * dist.get_world_size(group), *local.shape[1:])
    gather(gathered, local.contiguous(), group=group)
    return gathered


LOG2_E = math.log2(math.e)  # sweeps compute exp2: t is in units of log 2 there
EMPTY_MAX = -1e30  # of a shard without a finite logit; finite, since −inf · 0 is NaN
TEACHER_STATISTICS = 6


class RowScores(NamedTuple):
    """Contiguous [R]."""

    logprob_R: Tensor
    entropy_R: Tensor
    max_R: Tensor  # not divided by the temperature
    log_sum_R: Tensor  # log Σ exp((x − max)/temperature)
    teacher_max_R: Tensor | None = None
    teacher_log_sum_R: Tensor | None = None
    gap_R: Tensor | None = None  # KL of the student from the teacher, or from the mixture, for the gradient
    top_logprob_RK: Tensor | None = None  # fp64, of a teacher's top k


class _OtherScores(NamedTuple):
    """[R], without use in the gradient."""

    slope_R: Tensor | None = None
    divergence_R: Tensor | None = None
    teacher_logprob_R: Tensor | None = None
    agreement_R: Tensor | None = None


class Gradients(NamedTuple):
    """Of tokens or scored rows. None: the loss does not use the score."""

    logprob: Tensor | None
    entropy: Tensor | None
    divergence: Tensor | None = None


def combine(stats_pRK: Tensor, scoring: Scoring, mixture_R2: Tensor | None = None) -> tuple[RowScores, _OtherScores]:
    """``mixture_R2``: what `Backend.mixture` gives, added up over shards; a ``jsd`` needs it."""
    temperature, top = scoring.temperature, scoring.top
    if top is not None:
        count = scoring.without_top.statistics
        scores, others = combine(stats_pRK[..., :count], scoring.without_top)
        logits_RK, sum_R = stats_pRK[..., count:].sum(0), merge(stats_pRK[..., :count], temperature)[:, 1]
        shifted_RK = logits_RK.double() - scores.max_R.double().unsqueeze(1)
        logprob_RK = shifted_RK / temperature - sum_R.double().log().unsqueeze(1)
        divergence_R = divergence_of(outcomes(logprob_RK), outcomes(top.logprob_RK), top.divergence)[0]
        same_R = logits_RK[:, 0] >= scores.max_R
        others = others._replace(divergence_R=divergence_R.to(stats_pRK.dtype), agreement_R=same_R)
        return scores._replace(top_logprob_RK=logprob_RK), others
    max_R, sum_R, weighted_R, label_R, *rest = merge(stats_pRK, temperature, scoring.divergence).unbind(-1)
    log_sum_R = sum_R.log()
    # log p = t − log S, and H = −Σ p log p = log S − Σ p t = log S − U/S
    label_t_R = (label_R - max_R) / temperature
    logprob_R = label_t_R - log_sum_R
    scores = RowScores(logprob_R, log_sum_R - weighted_R / sum_R, max_R.contiguous(), log_sum_R)
    others = _OtherScores()
    if scoring.entropy_slope:
        square_R, weighted_square_R, *rest = rest
        mean_R, label_p_R = weighted_R / sum_R, logprob_R.exp()
        label_term_R = torch.where(label_p_R > 0, label_p_R * (label_t_R - mean_R), 0.0)  # a label of −inf: not 0 · inf
        # log p + H = t − its mean under p
        others = _OtherScores((weighted_square_R - mean_R * square_R) / sum_R.square() - label_term_R)
    if scoring.divergence is None:
        return scores, others
    first_R, teacher_max_R, teacher_sum_R, teacher_first_R, teacher_label_R, cross_R = rest
    teacher_log_sum_R = teacher_sum_R.log()
    scores = scores._replace(teacher_max_R=teacher_max_R.contiguous(), teacher_log_sum_R=teacher_log_sum_R)
    # log q − log p = s − t − log S(teacher) + log S; rounding alone makes a divergence negative
    ratio_R = teacher_log_sum_R - log_sum_R
    if scoring.divergence.kind == "forward_kl":
        divergence_R = (cross_R / teacher_sum_R - ratio_R).clamp(min=0)
    elif scoring.divergence.kind == "reverse_kl":
        divergence_R = (cross_R / sum_R + ratio_R).clamp(min=0)
        scores = scores._replace(gap_R=divergence_R)
    else:
        mixture_R2 = stats_pRK.new_zeros(*max_R.shape, 2) if mixture_R2 is None else mixture_R2
        gap_R, teacher_gap_R = mixture_R2.unbind(-1)
        beta = scoring.divergence.beta
        divergence_R = ((1 - beta) * gap_R + beta * teacher_gap_R).clamp(min=0)
        scores = scores._replace(gap_R=gap_R.contiguous())
    starts_pR, teacher_starts_pR = stats_pRK[..., 0], stats_pRK[..., 1 - TEACHER_STATISTICS]
    same_R = (starts_pR.argmax(0) == teacher_starts_pR.argmax(0)) & (first_R == teacher_first_R)
    teacher_logprob_R = (teacher_label_R - teacher_max_R) / temperature - teacher_log_sum_R
    return scores, others._replace(divergence_R=divergence_R, teacher_logprob_R=teacher_logprob_R, agreement_R=same_R)


def outcomes(logprob_RK: Tensor) -> Tensor:
    """Adds the log-prob of all other tokens: [R, K + 1]."""
    rest_R1 = 1 - logprob_RK.exp().sum(1, keepdim=True)
    return torch.cat([logprob_RK, rest_R1.clamp(min=LEAST_REST).log()], 1)


def divergence_of(logp_RO: Tensor, logq_RO: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """Returns the divergence of student p from teacher q, [R], and p · ∂/∂p of every outcome, up to a multiple of p."""
    p_RO, q_RO = logp_RO.exp(), logq_RO.exp()

    def weighted(weight_RO: Tensor, value_RO: Tensor) -> Tensor:
        return torch.where(weight_RO > 0, weight_RO * value_RO, 0.0)

    if divergence.kind == "forward_kl":
        return weighted(q_RO, logq_RO - logp_RO).sum(1).clamp(min=0), -q_RO
    if divergence.kind == "reverse_kl":
        pull_RO = weighted(p_RO, logp_RO - logq_RO)
        return pull_RO.sum(1).clamp(min=0), pull_RO
    beta = divergence.beta
    logm_RO = ((1 - beta) * p_RO + beta * q_RO).clamp(min=torch.finfo(p_RO.dtype).tiny).log()
    pull_RO = (1 - beta) * weighted(p_RO, logp_RO - logm_RO)
    return (pull_RO + beta * weighted(q_RO, logq_RO - logm_RO)).sum(1).clamp(min=0), pull_RO


def merge(stats_pRK: Tensor, temperature: float, divergence: Divergence | None = None) -> Tensor:
    max_pR, sum_pR, weighted_pR, label_pR, *rest = stats_pRK.unbind(-1)
    max_R = max_pR.amax(0)
    shift_pR = (max_pR - max_R) / temperature
    scale_pR = shift_pR.exp()
    # With the common maximum t becomes t + shift, so Σ e^t·t becomes e^shift · (Σ e^t·t + shift · Σ e^t).
    weighted_R = (scale_pR * (weighted_pR + shift_pR * sum_pR)).sum(0)
    merged = [max_R, (scale_pR * sum_pR).sum(0), weighted_R, label_pR.sum(0)]
    squares = rest[: len(rest) % TEACHER_STATISTICS]
    if squares:
        square_pR, weighted_square_pR = squares
        scale2_pR = scale_pR.square()
        merged += [(scale2_pR * square_pR).sum(0), (scale2_pR * (weighted_square_pR + shift_pR * square_pR)).sum(0)]
    if divergence is None:
        return torch.stack(merged, -1)
    first_pR, teacher_max_pR, teacher_sum_pR, teacher_first_pR, teacher_label_pR, cross_pR = rest[-TEACHER_STATISTICS:]
    teacher_max_R = teacher_max_pR.amax(0)
    teacher_shift_pR = (teacher_max_pR - teacher_max_R) / temperature
    teacher_scale_pR = teacher_shift_pR.exp()
    # Of Σ e^s (s − t): the sum of differences of the shifts, not their products, so that a large offset costs no digits. It
    # is infinite in a shard with a −inf, and adds nothing if no weight is left there.
    if divergence.kind == "forward_kl":
        cross_pR = cross_pR + (teacher_shift_pR - shift_pR) * teacher_sum_pR
        cross_pR = torch.where(teacher_scale_pR > 0, teacher_scale_pR * cross_pR, 0.0)
    elif divergence.kind == "reverse_kl":
        cross_pR = torch.where(scale_pR > 0, scale_pR * (cross_pR + (shift_pR - teacher_shift_pR) * sum_pR), 0.0)
    merged += [_at_first(first_pR, max_pR), teacher_max_R, (teacher_scale_pR * teacher_sum_pR).sum(0)]
    merged += [_at_first(teacher_first_pR, teacher_max_pR), teacher_label_pR.sum(0), cross_pR.sum(0)]
    return torch.stack(merged, -1)


def _at_first(values_pR: Tensor, max_pR: Tensor) -> Tensor:
    """Of the first shard with the maximum."""
    return values_pR.gather(0, max_pR.argmax(0, keepdim=True)).squeeze(0)

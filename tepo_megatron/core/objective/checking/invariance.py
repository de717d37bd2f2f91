"""What must not matter to an objective. Each check raises ``ObjectiveError``. Steps are in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tepo_megatron.core.objective.checking.steps import StepOutcome, pick, summary, whole
from tepo_megatron.core.types import Batch, TokenScores

if TYPE_CHECKING:
    from tepo_megatron.core.objective.compose import Objective

_RTOL = 1e-9
_ATOL = 1e-12


class ObjectiveError(ValueError): ...


def check_finite(objective: Objective, batch: Batch, scores: TokenScores) -> None:
    """Loss and gradients are finite, and there is no gradient outside the loss mask."""
    outcome = whole(objective, batch, scores)
    if not outcome.loss.isfinite():
        raise ObjectiveError(f"the loss is {outcome.loss.item()}; look for a division by 0, log of 0, or exp of a large number")
    for name, gradient_T in zip(("log-prob", "entropy"), outcome.gradients, strict=True):
        wrong_T = ~gradient_T.isfinite()
        if wrong_T.any():
            token = int(wrong_T.nonzero()[0])
            where = "a response token" if batch.loss_mask_T[token] else "a token outside the loss mask"
            raise ObjectiveError(
                f"the gradient by the {name} of token {token}, {where}, is {gradient_T[token].item()}, and the loss is "
                f"{outcome.loss.item():.6g}: what torch.where leaves out must be finite too, or its gradient is 0 · inf"
            )
        outside_T = (gradient_T != 0) & ~batch.loss_mask_T
        if outside_T.any():
            token = int(outside_T.nonzero()[0])
            raise ObjectiveError(
                f"token {token} is outside the loss mask, and the gradient by its {name} is {gradient_T[token].item():.6g} and "
                "not 0"
            )


def check_deterministic(objective: Objective, batch: Batch, scores: TokenScores) -> None:
    before = torch.get_rng_state()
    first, second = whole(objective, batch, scores), whole(objective, batch, scores)
    advice = (
        ": ranks that compute the same micro-batch would differ, and a resumed run too; keep no state, and make what looks "
        "random from the token itself"
    )
    _compare(first, second, batch, "at first", "when computed again", advice, rtol=0.0, atol=0.0)
    if not torch.equal(before, torch.get_rng_state()):
        raise ObjectiveError(
            "it draws random numbers from torch's generator, whose state differs between ranks and after a resume; make what "
            "looks random from the token itself"
        )


def check_order(objective: Objective, batch: Batch, scores: TokenScores, order: Sequence[int]) -> None:
    """Loss, gradients and metrics stay equal; each sequence keeps its advantage."""
    shuffled, shuffled_scores = pick(batch, scores, order)
    advantages_S = objective.advantages(shuffled)
    pairs = zip(objective.advantages(batch)[list(order)].tolist(), advantages_S.tolist(), strict=True)
    for left, right in pairs:
        if abs(left - right) > 1e-5 + 1e-5 * abs(left):  # rewards are fp32
            raise ObjectiveError(
                f"a response's advantage is {left:.10g} with the responses in their order, {right:.10g} in another order; it "
                "may depend on its group, by groups_S, and on the batch, and not on where responses stand"
            )
    shuffled = shuffled.with_(advantages_S=advantages_S)
    outcome = summary([objective(shuffled_scores, shuffled, objective.prepare(shuffled))], scores)
    advice = "; sequences are packed in any order"
    _compare(whole(objective, batch, scores), outcome, batch, "with the sequences in one order", "in another", advice)


def check_cuts(objective: Objective, batch: Batch, scores: TokenScores, parts: Sequence[Sequence[int]]) -> None:
    """Micro-batches give the same as one piece. ``parts``: numbers of sequences."""
    ready = batch.with_(advantages_S=objective.advantages(batch))
    context = objective.prepare(ready)
    outputs = []
    for part in parts:
        micro, micro_scores = pick(ready, scores, part)
        outputs.append(objective(micro_scores, micro, context))
    sizes = " and ".join(str(len(part)) for part in parts)
    advice = (
        ": something is computed over whichever sequences happen to share a micro-batch, such as a mean, a count or a maximum. "
        "Give one value per token, from the token and its own sequence; sums and means are objective.aggregation's, and what "
        "has to be known of the whole step is found in prepare"
    )
    there = f"in micro-batches of {sizes} sequences"
    _compare(whole(objective, batch, scores), summary(outputs, scores), batch, "in one piece", there, advice)


def check_ranks(objective: Objective, batch: Batch, scores: TokenScores, parts: Sequence[Sequence[int]]) -> None:
    """Works as `check_cuts`; each part prepares its own copy of the mini-batch."""
    ready = batch.with_(advantages_S=objective.advantages(batch))
    outputs = []
    for part in parts:
        context = objective.prepare(copy.deepcopy(ready))
        micro, micro_scores = pick(ready, scores, part)
        outputs.append(objective(micro_scores, micro, context))
    divisors = [float(output.denominator) for output in outputs]
    other = next((divisor for divisor in divisors if divisor != divisors[0]), None)
    if other is not None:
        raise ObjectiveError(
            f"one rank divides by {divisors[0]:.10g}, another by {other:.10g}: the denominator must come from the whole step "
            "alone"
        )
    there = f"on {len(parts)} data-parallel ranks"
    _compare(whole(objective, batch, scores), summary(outputs, scores), batch, "on one rank", there)


def check_context_parallel(objective: Objective, batch: Batch, scores: TokenScores) -> None:
    """Two ranks compute half of the tokens each, and the loss of all."""
    expected = whole(objective, batch, scores)
    ready = batch.with_(advantages_S=objective.advantages(batch))
    parts = []
    for rank in range(2):
        local_T = torch.arange(batch.num_tokens) % 2 == rank
        logprob, entropy = (torch.where(local_T, value, value.detach()) for value in (scores.logprob, scores.entropy))
        output = objective(TokenScores(logprob, entropy, scores.entropy_slope), ready, objective.prepare(ready))
        parts.append(summary([output], scores))
    gradients = tuple(torch.stack(pair).sum(0) for pair in zip(*(part.gradients for part in parts), strict=True))
    for part in parts:
        outcome = part._replace(gradients=gradients)
        _compare(expected, outcome, batch, "on one rank", "on two ranks of context parallelism")


def check_padding(objective: Objective, batch: Batch, scores: TokenScores, tokens: int = 3) -> None:
    """A sequence outside the mask changes nothing, with scores of 0, NaN or −inf."""
    ready = batch.with_(advantages_S=objective.advantages(batch))
    context = objective.prepare(ready)
    expected = summary([objective(scores, ready, context)], scores)
    advice = ": a sequence without a response token must not count; values.mask_T says which tokens do, and its length is 0"
    for fill in (0.0, torch.nan, -torch.inf):
        padded = _pad(ready, tokens, fill)
        longer = TokenScores(
            *(torch.cat([values, values.new_full((tokens,), fill)]) for values in vars(scores).values() if values is not None)
        )
        for used, where in ((context, "in the micro-batch"), (objective.prepare(padded), "in the step")):
            outcome = summary([objective(longer, padded, used)], scores)
            there = f"with a sequence of padding {where} (scores {fill})"
            _compare(expected, outcome, batch, "without padding", there, advice)
        padding, padding_scores = pick(padded, longer, [batch.num_sequences])
        output = objective(padding_scores, padding, context)
        if output.numerator.item() != 0:
            raise ObjectiveError(
                f"a micro-batch of padding only adds {output.numerator.item():.6g} to the loss, and must add 0"
            )


def _pad(batch: Batch, tokens: int, fill: float) -> Batch:
    longer: dict[str, Tensor] = {}
    for name, values in vars(batch).items():
        if name.endswith("_T") and values is not None:
            longer[name] = torch.cat([values, values.new_full((tokens,), fill if values.is_floating_point() else 0)])
        elif name.endswith(("_S", "_SK")) and values is not None:
            longer[name] = torch.cat([values, values.new_zeros((1, *values.shape[1:]))])
    return batch.with_(cu_seqlens=torch.cat([batch.cu_seqlens, batch.cu_seqlens[-1:] + tokens]), **longer)


def _compare(
    expected: StepOutcome,
    outcome: StepOutcome,
    batch: Batch,
    here: str,
    there: str,
    advice: str = "",
    *,
    rtol: float = _RTOL,
    atol: float = _ATOL,
) -> None:
    pairs = [("the loss", expected.loss, outcome.loss)]
    for name, left_T, right_T in zip(("log-prob", "entropy"), expected.gradients, outcome.gradients, strict=True):
        pairs.append((f"the gradient by the {name}", left_T, right_T))
    pairs += [(f"the metric {name}", expected.metrics[name], outcome.metrics[name]) for name in expected.metrics]
    pairs += [(f"the metric {name}", expected.extrema[name], outcome.extrema[name]) for name in expected.extrema]
    for what, left, right in pairs:
        differs = ~torch.isclose(left, right, rtol=rtol, atol=atol, equal_nan=True).flatten()
        if differs.any():
            index = int(differs.nonzero()[0])
            if what.startswith("the gradient"):
                what += f" of token {index} (sequence {int(batch.sequence_index_T[index])})"
            first, second = float(left.flatten()[index]), float(right.flatten()[index])
            raise ObjectiveError(f"{what} is {first:.10g} {here}, {second:.10g} {there}{advice}")

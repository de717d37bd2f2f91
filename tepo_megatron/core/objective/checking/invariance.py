"""What must not matter to an objective: the order of sequences, how they are cut into micro-batches and ranks, padding.

Each check raises ``ObjectiveError`` with a sentence that has the two numbers. Steps are in float64, so that what is more than
rounding is seen.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tepo_megatron.core.objective.checking.steps import Outcome, pick, summary, whole
from tepo_megatron.core.types import Batch, ObjectiveOutput, TokenScores

if TYPE_CHECKING:
    from tepo_megatron.core.objective.compose import Objective

RTOL = 1e-9
_ATOL = 1e-12


class ObjectiveError(ValueError):
    """An objective breaks a rule that every objective keeps to."""


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
        if (gradient_T[~batch.loss_mask_T] != 0).any():
            token = int(((gradient_T != 0) & ~batch.loss_mask_T).nonzero()[0])
            raise ObjectiveError(
                f"token {token} is outside the loss mask, and the gradient by its {name} is {gradient_T[token].item():.6g} and "
                "not 0"
            )


def check_deterministic(objective: Objective, batch: Batch, scores: TokenScores) -> None:
    """The same step gives the same to the last bit, and no random number is drawn."""
    before = torch.get_rng_state()
    first, second = whole(objective, batch, scores), whole(objective, batch, scores)
    found = difference(first, second, batch, rtol=0.0, atol=0.0)
    if found is not None:
        raise ObjectiveError(
            f"{_two(found, 'at first', 'when computed again')}: ranks that compute the same micro-batch would differ, and a "
            "resumed run too; keep no state, and make what looks random from the token itself"
        )
    if not torch.equal(before, torch.get_rng_state()):
        raise ObjectiveError(
            "it draws random numbers from torch's generator, whose state differs between ranks and after a resume; make what "
            "looks random from the token itself"
        )


def check_order(objective: Objective, batch: Batch, scores: TokenScores, order: Sequence[int]) -> None:
    """The sequences of a step in another order: the same loss, gradients and metrics; each keeps its advantage."""
    expected = whole(objective, batch, scores)
    shuffled, shuffled_scores = pick(batch, scores, order)
    advantages_S = objective.advantages(shuffled)
    _compare_advantages(objective.advantages(batch)[list(order)], advantages_S, "in their order", "in another order")
    shuffled = shuffled.with_(advantages_S=advantages_S)
    outcome = summary([objective(shuffled_scores, shuffled, objective.prepare(shuffled))], scores)
    found = difference(expected, outcome, batch)
    if found is not None:
        raise ObjectiveError(
            f"{_two(found, 'with the sequences in one order', 'in another')}; sequences are packed in any order"
        )


def check_cuts(objective: Objective, batch: Batch, scores: TokenScores, parts: Sequence[Sequence[int]]) -> None:
    """The sequences of a step in micro-batches, each by their numbers: the same loss, gradients and metrics as in one."""
    expected = whole(objective, batch, scores)
    ready = batch.with_(advantages_S=objective.advantages(batch))
    context = objective.prepare(ready)
    outputs: list[ObjectiveOutput] = []
    for part in parts:
        micro, micro_scores = pick(ready, scores, part)
        outputs.append(objective(micro_scores, micro, context))
    found = difference(expected, summary(outputs, scores), batch)
    if found is not None:
        sizes = " and ".join(str(len(part)) for part in parts)
        raise ObjectiveError(
            f"{_two(found, 'in one piece', f'in micro-batches of {sizes} sequences')}: something is computed over whichever "
            "sequences happen to share a micro-batch, such as a mean, a count or a maximum. Give one value per token, from the "
            "token and its own sequence; sums and means are objective.aggregation's, and what has to be known of the whole "
            "step is found in prepare"
        )


def check_ranks(objective: Objective, batch: Batch, scores: TokenScores, parts: Sequence[Sequence[int]]) -> None:
    """As `check_cuts`, where each part is a data-parallel rank's, which has prepared its own copy of the whole mini-batch."""
    expected = whole(objective, batch, scores)
    ready = batch.with_(advantages_S=objective.advantages(batch))
    outputs = []
    for part in parts:
        context = objective.prepare(copy.deepcopy(ready))
        micro, micro_scores = pick(ready, scores, part)
        outputs.append(objective(micro_scores, micro, context))
    first, *others = (float(output.denominator) for output in outputs)
    other = next((each for each in others if each != first), first)
    if other != first:
        raise ObjectiveError(
            f"one rank divides by {first:.10g}, another by {other:.10g}: the denominator must come from the whole step alone"
        )
    found = difference(expected, summary(outputs, scores), batch)
    if found is not None:
        raise ObjectiveError(_two(found, "on one rank", f"on {len(parts)} data-parallel ranks"))


def check_context_parallel(objective: Objective, batch: Batch, scores: TokenScores) -> None:
    """Two ranks that compute half of the tokens each, and the loss of all: their parts of the gradient are the gradient."""
    expected = whole(objective, batch, scores)
    ready = batch.with_(advantages_S=objective.advantages(batch))
    parts = []
    for rank in range(2):
        own_T = torch.arange(batch.num_tokens) % 2 == rank
        logprob, entropy = (torch.where(own_T, value, value.detach()) for value in (scores.logprob, scores.entropy))
        output = objective(TokenScores(logprob, entropy, scores.entropy_slope), ready, objective.prepare(ready))
        parts.append(summary([output], scores))
    gradients = tuple(torch.stack(each).sum(0) for each in zip(*(part.gradients for part in parts), strict=True))
    for part in parts:
        found = difference(expected, part._replace(gradients=gradients), batch)
        if found is not None:
            raise ObjectiveError(_two(found, "on one rank", "on two ranks of context parallelism"))


def check_padding(objective: Objective, batch: Batch, scores: TokenScores, tokens: int = 3) -> None:
    """A trailing sequence outside the mask changes nothing, with zeros or with rubbish as scores, in the step or only in the
    micro-batch; and a micro-batch of nothing else adds nothing."""
    ready = batch.with_(advantages_S=objective.advantages(batch))
    context = objective.prepare(ready)
    expected = summary([objective(scores, ready, context)], scores)
    for rubbish in (0.0, torch.nan, -torch.inf):
        padded = pad(ready, tokens, rubbish)
        longer = TokenScores(
            *(
                torch.cat([values, values.new_full((tokens,), rubbish)])
                for values in vars(scores).values()
                if values is not None
            )
        )
        for used, where in ((context, "in the micro-batch"), (objective.prepare(padded), "in the step")):
            found = difference(expected, summary([objective(longer, padded, used)], scores), batch)
            if found is not None:
                raise ObjectiveError(
                    f"{_two(found, 'without padding', f'with a sequence of padding {where} (scores {rubbish})')}: a sequence "
                    "without a response token must not count; values.mask_T says which tokens do, and its length is 0"
                )
        last = batch.num_sequences
        padding, padding_scores = pick(padded, longer, [last])
        output = objective(padding_scores, padding, context)
        if output.numerator.item() != 0:
            raise ObjectiveError(
                f"a micro-batch of padding only adds {output.numerator.item():.6g} to the loss, and must add 0"
            )


def pad(batch: Batch, tokens: int, rubbish: float) -> Batch:
    """The batch with one more sequence, of tokens outside the loss mask, whose values are rubbish."""
    longer: dict[str, Tensor] = {}
    for name, values in vars(batch).items():
        if name.endswith("_T") and values is not None:
            fill = rubbish if values.is_floating_point() else 0
            longer[name] = torch.cat([values, values.new_full((tokens,), fill)])
        elif name.endswith(("_S", "_SK")) and values is not None:
            longer[name] = torch.cat([values, values.new_zeros((1, *values.shape[1:]))])
    return batch.with_(cu_seqlens=torch.cat([batch.cu_seqlens, batch.cu_seqlens[-1:] + tokens]), **longer)


def difference(
    expected: Outcome, found: Outcome, batch: Batch, *, rtol: float = RTOL, atol: float = _ATOL
) -> tuple[str, float, float] | None:
    """What two outcomes of a step differ in first, by more than rounding, with the two numbers; None: nothing."""
    pairs = [("the loss", expected.loss, found.loss)]
    for name, left_T, right_T in zip(("log-prob", "entropy"), expected.gradients, found.gradients, strict=True):
        pairs.append((f"the gradient by the {name}", left_T, right_T))
    pairs += [(f"the metric {name}", expected.metrics[name], found.metrics[name]) for name in expected.metrics]
    pairs += [(f"the metric {name}", expected.extrema[name], found.extrema[name]) for name in expected.extrema]
    for what, left, right in pairs:
        if torch.allclose(left, right, rtol=rtol, atol=atol, equal_nan=True):
            continue
        apart = ~torch.isclose(left, right, rtol=rtol, atol=atol, equal_nan=True)
        at = int(apart.flatten().nonzero()[0])
        if what.startswith("the gradient"):
            what += f" of token {at} (sequence {int(batch.sequence_index_T[at])})"
        return what, float(left.flatten()[at]), float(right.flatten()[at])
    return None


def _compare_advantages(left_S: Tensor, right_S: Tensor, here: str, there: str) -> None:
    for left, right in zip(left_S.tolist(), right_S.tolist(), strict=True):
        if abs(left - right) > 1e-5 + 1e-5 * abs(left):  # rewards are fp32
            raise ObjectiveError(
                f"a response's advantage is {left:.10g} with the responses {here}, {right:.10g} {there}; it may depend on its "
                "group, by groups_S, and on the batch, and not on where responses stand"
            )


def _two(found: tuple[str, float, float], here: str, there: str) -> str:
    what, left, right = found
    return f"{what} is {left:.10g} {here}, {right:.10g} {there}"

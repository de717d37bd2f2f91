"""Checks an objective on random optimizer steps in float64 (docs/guides/own-objective.md)."""

from __future__ import annotations

import copy
import json
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from tepo_megatron.config.base import Section
from tepo_megatron.config.objective.custom import CustomKind
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.objective.trust_region import next_clip_range
from tepo_megatron.core.types import Batch, ObjectiveOutput, TokenScores

if TYPE_CHECKING:
    from tepo_megatron.core.objective.compose import Objective, StepContext

_STEPS = 12

_Steps = Sequence[tuple[Batch, TokenScores]]


class _ObjectiveError(ValueError): ...


class _Finding(NamedTuple):
    rule: str
    problem: str


def check_objective(config: ObjectiveConfig, *, steps: int = _STEPS, reward_parts: int = 2) -> None:
    """Checks the rules of docs/guides/own-objective.md, on a CPU in float64. Raises ValueError if one is broken.

    ``steps`` random optimizer steps, always the same ones, are computed. ``reward_parts``: K of ``Batch.reward_parts_SK``.
    """
    findings = run_checks(config, steps=steps, reward_parts=reward_parts)
    problems = [f"  {finding.rule}: {finding.problem}" for finding in findings if finding.problem]
    if problems:
        raise _ObjectiveError("\n".join(["the objective breaks a rule:", *problems]))


def run_checks(config: ObjectiveConfig, *, steps: int = _STEPS, reward_parts: int = 2) -> list[_Finding]:
    findings = list(check_invariance(config, steps=steps, reward_parts=reward_parts))
    if findings[0].problem:
        return findings
    telling = telling_steps(parts=reward_parts)
    for kind in (section for section in config.sections.values() if isinstance(section, CustomKind)):
        if kind.slot in ("mask", "penalty", "mismatch"):  # those that may be null
            findings.append(_Finding(f"{kind.kind} acts", _problem(partial(_check_acts, config, kind, telling))))
        findings += [
            _Finding(f"fields of {kind.kind} act", _problem(partial(_check_fields, config, kind, telling))),
            _Finding(f"{kind.kind} is documented", _problem(partial(_check_documented, kind))),
        ]
    findings.append(_Finding("survives its own configuration", _problem(partial(_check_round_trip, config))))
    return findings


def check_invariance(config: ObjectiveConfig, *, steps: int = _STEPS, reward_parts: int = 2) -> Iterator[_Finding]:
    objective, checked = build_objective(config), list(_random_steps(steps, parts=reward_parts))
    for rule, check in _RULES.items():
        problems = (_problem(partial(check, objective, *step, number)) for number, step in enumerate(checked))
        problem = next(filter(None, problems), "")
        yield _Finding(rule, problem)
        if problem and rule == "can be computed":
            return


def _shuffled(batch: Batch, seed: int) -> list[int]:
    return torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(seed)).tolist()


def _parts(order: list[int], size: int) -> list[list[int]]:
    return [order[start : start + size] for start in range(0, len(order), size)]


_RULES: dict[str, Callable[[Objective, Batch, TokenScores, int], object]] = {
    "can be computed": lambda objective, batch, scores, _: whole(objective, batch, scores),
    "is finite": lambda objective, batch, scores, _: check_finite(objective, batch, scores),
    "is deterministic": lambda objective, batch, scores, _: check_deterministic(objective, batch, scores),
    "order of sequences": lambda objective, batch, scores, number: check_order(
        objective, batch, scores, _shuffled(batch, number)
    ),
    "micro-batches": lambda objective, batch, scores, number: check_cuts(
        objective, batch, scores, _parts(_shuffled(batch, number), 1 + number % 3)
    ),
    "data-parallel ranks": lambda objective, batch, scores, _: check_ranks(
        objective, batch, scores, _parts(list(range(batch.num_sequences)), -(-batch.num_sequences // 2))
    ),
    "context-parallel ranks": lambda objective, batch, scores, _: check_context_parallel(objective, batch, scores),
    "padding": lambda objective, batch, scores, _: check_padding(objective, batch, scores),
}


def _problem(check: Callable[[], object]) -> str:
    try:
        check()
    except _ObjectiveError as error:
        return str(error)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, ValueError) else f" ({frame.filename}, line {frame.lineno})"
        return f"it raised {type(error).__name__}: {error}{where}"
    return ""


def outcome(config: ObjectiveConfig, steps: _Steps) -> list[Tensor]:
    objective, values = build_objective(config), []
    for batch, scores in steps:
        loss, gradients, metrics, extrema = whole(objective, batch, scores)
        named = {**metrics, **extrema}
        values += [objective.advantages(batch), loss, *gradients, *(named[name] for name in sorted(named))]
        batch = batch.with_(advantages_S=objective.advantages(batch))
        moves = objective(scores, batch, objective.prepare(batch)).moves
        clip_range = None if moves is None else next_clip_range(config.trust_region, moves, None)
        values.append(torch.tensor(clip_range or (0.0, 0.0)))
    return values


def differ(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    if len(left) != len(right):
        return True
    return any(not torch.allclose(a, b, rtol=1e-9, atol=1e-13, equal_nan=True) for a, b in zip(left, right, strict=True))


def other_values(node: dict[str, Any], value: Any) -> Iterator[Any]:
    for option in node.get("anyOf") or [node]:
        if "enum" in option:
            yield from option["enum"]
        elif "const" in option:
            yield option["const"]
        elif option.get("type") == "boolean":
            yield not value
        elif option.get("type") in ("integer", "number"):
            near = value if isinstance(value, int | float) else 0.5
            numbers = (near * 1.5, near * 0.5, near * 4, near * 0.1, near * 1e4, near + 0.4, near - 0.4, near + 2)
            yield from (round(number) if option["type"] == "integer" else number for number in numbers)
        elif option.get("type") == "array":
            yield [1.0, 3.0]
        elif option.get("type") == "null":
            yield None


def is_choice(value: Any) -> bool:
    return isinstance(value, bool) or not isinstance(value, float | int)


def _check_acts(config: ObjectiveConfig, kind: CustomKind, steps: _Steps) -> None:
    without = config.model_copy(update={kind.slot: None})
    if not differ(outcome(config, steps), outcome(without, steps)):
        raise _ObjectiveError(f"objective.{kind.slot}.kind = {kind.kind!r} changes nothing in any of {len(steps)} steps")


def _check_fields(config: ObjectiveConfig, kind: CustomKind, steps: _Steps) -> None:
    expected = outcome(config, steps)

    def acts(path: tuple[str, ...], other: Any) -> bool:
        changed = _changed(kind, path, other)
        if changed is None:
            return is_choice(other)
        return differ(outcome(config.model_copy(update={kind.slot: changed}), steps), expected)

    for path, node, value in _leaves(kind, type(kind).model_json_schema()):
        others = [other for other in other_values(node, value) if other != value]
        if others and not any(acts(path, other) for other in others):
            raise _ObjectiveError(
                f"no other value of objective.{kind.slot}.{'.'.join(path)} changes anything; it is {json.dumps(value)} here. "
                "Use the field, or leave it out"
            )


def _check_documented(kind: CustomKind) -> None:
    name = type(kind).__name__
    if not (type(kind).__doc__ or "").strip() or type(kind).__doc__ == type(kind).__mro__[1].__doc__:
        raise _ObjectiveError(f"{name} has no docstring; say what it computes, as tepo objective show prints it")
    for field, info in type(kind).model_fields.items():
        if field != "kind" and not (info.description or "").strip():
            raise _ObjectiveError(f"{name}.{field} has no docstring; write what it means as a string below the field")


def _check_round_trip(config: ObjectiveConfig) -> None:
    if config.plugins and ObjectiveConfig.model_validate(config.model_dump(mode="json")) != config:
        raise _ObjectiveError("the configuration that a run writes down gives another one when it is read; look at validators")


def _leaves(section: Section, schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any], Any]]:
    for name, node in schema.get("properties", {}).items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from (((name, *path), leaf, inner) for path, leaf, inner in _leaves(value, type(value).model_json_schema()))
        elif name != "kind":
            while "$ref" in node:
                node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
            yield (name,), node, value


def _changed(section: Section, path: tuple[str, ...], value: Any) -> Section | None:
    changed = section.model_dump()
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return type(section).model_validate(changed)
        except ValidationError:
            return None


def check_finite(objective: Objective, batch: Batch, scores: TokenScores) -> None:
    outcome = whole(objective, batch, scores)
    if not outcome.loss.isfinite():
        raise _ObjectiveError(
            f"the loss is {outcome.loss.item()}; look for a division by 0, log of 0, or exp of a large number"
        )
    for name, gradient_T in zip(("log-prob", "entropy"), outcome.gradients, strict=True):
        wrong_T = ~gradient_T.isfinite()
        if wrong_T.any():
            token = int(wrong_T.nonzero()[0])
            where = "a response token" if batch.loss_mask_T[token] else "a token outside the loss mask"
            raise _ObjectiveError(
                f"the gradient by the {name} of token {token}, {where}, is {gradient_T[token].item()}, and the loss is "
                f"{outcome.loss.item():.6g}: what torch.where leaves out must be finite too, or its gradient is 0 · inf"
            )
        outside_T = (gradient_T != 0) & ~batch.loss_mask_T
        if outside_T.any():
            token = int(outside_T.nonzero()[0])
            raise _ObjectiveError(
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
        raise _ObjectiveError(
            "it draws random numbers from torch's generator, whose state differs between ranks and after a resume; make what "
            "looks random from the token itself"
        )


def check_order(objective: Objective, batch: Batch, scores: TokenScores, order: Sequence[int]) -> None:
    shuffled, shuffled_scores = pick(batch, scores, order)
    advantages_S = objective.advantages(shuffled)
    pairs = zip(objective.advantages(batch)[list(order)].tolist(), advantages_S.tolist(), strict=True)
    for left, right in pairs:
        if abs(left - right) > 1e-5 + 1e-5 * abs(left):  # rewards are fp32
            raise _ObjectiveError(
                f"a response's advantage is {left:.10g} with the responses in their order, {right:.10g} in another order; it "
                "may depend on its group, by groups_S, and on the batch, and not on where responses stand"
            )
    shuffled = shuffled.with_(advantages_S=advantages_S)
    outcome = summary([objective(shuffled_scores, shuffled, objective.prepare(shuffled))], scores)
    advice = "; sequences are packed in any order"
    _compare(whole(objective, batch, scores), outcome, batch, "with the sequences in one order", "in another", advice)


def check_cuts(objective: Objective, batch: Batch, scores: TokenScores, parts: Sequence[Sequence[int]]) -> None:
    ready = batch.with_(advantages_S=objective.advantages(batch))
    context = objective.prepare(ready)
    outputs = [_run_part(objective, ready, scores, part, context) for part in parts]
    sizes = " and ".join(str(len(part)) for part in parts)
    advice = (
        ": something is computed over whichever sequences happen to share a micro-batch, such as a mean, a count or a maximum. "
        "Give one value per token, from the token and its own sequence; sums and means are objective.aggregation's, and what "
        "has to be known of the whole step is found in prepare"
    )
    there = f"in micro-batches of {sizes} sequences"
    _compare(whole(objective, batch, scores), summary(outputs, scores), batch, "in one piece", there, advice)


def check_ranks(objective: Objective, batch: Batch, scores: TokenScores, parts: Sequence[Sequence[int]]) -> None:
    ready = batch.with_(advantages_S=objective.advantages(batch))
    outputs = [_run_part(objective, ready, scores, part, objective.prepare(copy.deepcopy(ready))) for part in parts]
    divisors = [float(output.denominator) for output in outputs]
    other = next((divisor for divisor in divisors if divisor != divisors[0]), None)
    if other is not None:
        raise _ObjectiveError(
            f"one rank divides by {divisors[0]:.10g}, another by {other:.10g}: the denominator must come from the whole step "
            "alone"
        )
    there = f"on {len(parts)} data-parallel ranks"
    _compare(whole(objective, batch, scores), summary(outputs, scores), batch, "on one rank", there)


def check_context_parallel(objective: Objective, batch: Batch, scores: TokenScores) -> None:
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
        added = _run_part(objective, padded, longer, [batch.num_sequences], context).numerator.item()
        if added != 0:
            raise _ObjectiveError(f"a micro-batch of padding only adds {added:.6g} to the loss, and must add 0")


def _run_part(
    objective: Objective, batch: Batch, scores: TokenScores, sequences: Sequence[int], context: StepContext
) -> ObjectiveOutput:
    micro, micro_scores = pick(batch, scores, sequences)
    return objective(micro_scores, micro, context)


def _pad(batch: Batch, tokens: int, fill: float) -> Batch:
    longer: dict[str, Tensor] = {}
    for name, values in vars(batch).items():
        if name.endswith("_T") and values is not None:
            longer[name] = torch.cat([values, values.new_full((tokens,), fill if values.is_floating_point() else 0)])
        elif name.endswith(("_S", "_SK")) and values is not None:
            longer[name] = torch.cat([values, values.new_zeros((1, *values.shape[1:]))])
    return batch.with_(cu_seqlens=torch.cat([batch.cu_seqlens, batch.cu_seqlens[-1:] + tokens]), **longer)


def _compare(
    expected: _StepOutcome,
    outcome: _StepOutcome,
    batch: Batch,
    here: str,
    there: str,
    advice: str = "",
    *,
    rtol: float = 1e-9,
    atol: float = 1e-12,
) -> None:
    pairs = [("the loss", expected.loss, outcome.loss)]
    for name, left_T, right_T in zip(("log-prob", "entropy"), expected.gradients, outcome.gradients, strict=True):
        pairs.append((f"the gradient by the {name}", left_T, right_T))
    for left_metrics, right_metrics in ((expected.metrics, outcome.metrics), (expected.extrema, outcome.extrema)):
        pairs += [(f"the metric {name}", left_metrics[name], right_metrics[name]) for name in left_metrics]
    for name, left, right in pairs:
        differs = ~torch.isclose(left, right, rtol=rtol, atol=atol, equal_nan=True).flatten()
        if differs.any():
            index = int(differs.nonzero()[0])
            if name.startswith("the gradient"):
                name += f" of token {index} (sequence {int(batch.sequence_index_T[index])})"
            first, second = float(left.flatten()[index]), float(right.flatten()[index])
            raise _ObjectiveError(f"{name} is {first:.10g} {here}, {second:.10g} {there}{advice}")


class _StepOutcome(NamedTuple):
    loss: Tensor
    gradients: tuple[Tensor, ...]  # by log-probs and by entropies, [T] each
    metrics: Mapping[str, Tensor]  # (sum, count), [2]
    extrema: Mapping[str, Tensor]


def make_step(
    masks: Sequence[Sequence[bool]],
    *,
    seed: int = 0,
    spread: float = 0.3,
    rewards: Sequence[float] | None = None,
    groups: Sequence[int] | None = None,
    parts: int = 2,
) -> tuple[Batch, TokenScores]:
    """``masks`` has a row per sequence; ``spread`` is the distance from the old policy."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([len(mask) for mask in masks])
    total, count = int(lengths.sum()), len(masks)
    cu = torch.zeros(count + 1, dtype=torch.int32)
    cu[1:] = lengths.cumsum(0)
    old = -2 * torch.rand(total, generator=generator, dtype=torch.float64) - 0.01
    noise = torch.randn(4, total, generator=generator, dtype=torch.float64)
    mask = torch.tensor([value for row in masks for value in row], dtype=torch.bool)
    batch = Batch(
        tokens_T=torch.zeros(total, dtype=torch.int64),
        labels_T=torch.randint(0, 1000, (total,), generator=generator),
        loss_mask_T=mask,
        cu_seqlens=cu,
        sampler_logprobs_T=torch.where(mask, old + 0.2 * noise[0], 0.0),
        rewards_S=torch.rand(count, generator=generator) if rewards is None else torch.tensor(rewards),
        groups_S=torch.arange(count) // 2 if groups is None else torch.tensor(groups),
        old_logprobs_T=old,
        old_entropy_T=torch.rand(total, generator=generator, dtype=torch.float64),
        reference_logprobs_T=old + 0.3 * noise[1],
        # as a reward and bonuses that are seldom given; where the rewards are set they are the only ones
        reward_parts_SK=None
        if rewards is not None
        else torch.randint(0, 3, (count, parts), generator=generator).clamp(min=1) - 1.0,
    )
    assert batch.old_entropy_T is not None
    logprob = (old + spread * noise[2]).requires_grad_()
    entropy = (batch.old_entropy_T + 0.1 * noise[3]).requires_grad_()
    return batch, TokenScores(logprob, entropy, torch.randn(total, generator=generator, dtype=torch.float64))


def _random_steps(count: int, *, parts: int = 2) -> Iterator[tuple[Batch, TokenScores]]:
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, 8, (2 + seed % 5,), generator=generator).tolist()
        rows = [(torch.rand(size, generator=generator) < 0.7).tolist() for size in sizes]
        rows[0][-1] = rows[1][-1] = True  # a step has response tokens
        yield make_step(rows, seed=seed, spread=(0.3, 1e-3, 1.0)[seed % 3], parts=parts)


def telling_steps(*, parts: int = 2) -> list[tuple[Batch, TokenScores]]:
    """Any field of an objective changes one of these steps."""
    rows = [[True] * 6, [True, False, True, True], [False] + [True] * 4, [True], [False, False], [True] * 3, [True, True]]
    steps = []
    for seed, spread, scale in ((0, 1e-3, 6), (1, 0.3, 6), (2, 1.0, 6), (4, 0.3, 6), (7, 0.6, 1)):
        batch, scores = make_step(rows, seed=seed, groups=[0, 0, 0, 1, 1, 2, 2], rewards=[1.0, 0.0, 0.25, 1.0, 0.0, 0.5, 0.25])
        assert batch.old_logprobs_T is not None
        assert batch.reference_logprobs_T is not None
        old = scale * batch.old_logprobs_T
        sampler = torch.where(batch.loss_mask_T, old + 6 * (batch.sampler_logprobs_T - batch.old_logprobs_T), 0.0)
        logprob = (old + spread * (scores.logprob - batch.old_logprobs_T) / 0.3).detach().requires_grad_()
        reference = old + batch.reference_logprobs_T - batch.old_logprobs_T
        components = [batch.rewards_S, batch.rewards_S.flip(0), *(batch.rewards_S.roll(shift) for shift in range(2, parts))]
        columns = torch.stack(components[:parts], 1)
        changed = batch.with_(
            old_logprobs_T=old, sampler_logprobs_T=sampler, reference_logprobs_T=reference, reward_parts_SK=columns
        )
        steps.append((changed, TokenScores(logprob, scores.entropy, scores.entropy_slope)))
    return steps


def whole(objective: Objective, batch: Batch, scores: TokenScores) -> _StepOutcome:
    batch = batch.with_(advantages_S=objective.advantages(batch))
    return summary([objective(scores, batch, objective.prepare(batch))], scores)


def summary(outputs: Sequence[ObjectiveOutput], scores: TokenScores) -> _StepOutcome:
    loss = torch.stack([output.numerator / output.denominator for output in outputs]).sum()
    gradients = torch.autograd.grad(loss, (scores.logprob, scores.entropy), allow_unused=True, materialize_grads=True)
    names = outputs[0].metrics
    metrics = {name: torch.stack([torch.stack(output.metrics[name]) for output in outputs]).sum(0) for name in names}
    extrema = {
        name: getattr(torch.stack([output.extrema[name] for output in outputs]), name.rpartition("/")[2])()
        for name in outputs[0].extrema
    }
    return _StepOutcome(loss.detach(), gradients, metrics, extrema)


def pick(batch: Batch, scores: TokenScores, sequences: Sequence[int]) -> tuple[Batch, TokenScores]:
    index_T = batch.token_index(sequences)
    picked = (None if values_T is None else values_T[index_T] for values_T in vars(scores).values())
    return batch.select(sequences), TokenScores(*picked)  # type: ignore[arg-type] # only the last may be None

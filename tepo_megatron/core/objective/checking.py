"""Checks an objective on random optimizer steps in float64 (docs/guides/own-objective.md)."""

from __future__ import annotations

import copy
import inspect
import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from tepo_megatron.config.base import Section
from tepo_megatron.config.objective.choices import ClipRange
from tepo_megatron.config.objective.custom import CustomKind
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.compose import Objective, StepContext, build_objective
from tepo_megatron.core.objective.trust_region import next_clip_range
from tepo_megatron.core.types import Batch, ObjectiveOutput, TokenScores

_STEPS = 12
_INPUTS = ("log-prob", "entropy", "divergence")
_METHODS = (
    *("advantages", "log_ratio", "surrogate", "sequence_weights", "denominator", "importance_weights"),
    *("prepare", "choose", "penalty"),
)


class _ObjectiveError(ValueError): ...


class _Finding(NamedTuple):
    rule: str
    problem: str


class _StepOutcome(NamedTuple):
    loss: Tensor
    gradients: tuple[Tensor, ...]  # by each of `_INPUTS` that there is, [T]
    metrics: Mapping[str, Tensor]  # (sum, count), [2]
    extrema: Mapping[str, Tensor]


class Step(NamedTuple):
    batch: Batch
    scores: TokenScores

    @classmethod
    def plain(cls, lengths: Sequence[int], old_T: Tensor, logprob_T: Tensor, **changes: Any) -> Step:
        """Makes responses without prompts, drawn from the old policy. ``changes``: fields of the batch. Entropies are 1."""
        zeros_T, zeros_S = torch.zeros(sum(lengths), dtype=torch.int64), torch.zeros(len(lengths), dtype=torch.int64)
        fields: dict[str, Any] = {
            "tokens_T": zeros_T,
            "labels_T": zeros_T,
            "loss_mask_T": torch.ones_like(zeros_T, dtype=torch.bool),
            "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
            "sampler_logprobs_T": old_T,
            "rewards_S": zeros_S.float(),
            "groups_S": zeros_S,
            "old_logprobs_T": old_T,
            "old_entropy_T": torch.ones_like(old_T),
        }
        return cls(Batch(**fields | changes), TokenScores(logprob_T, torch.ones_like(old_T).requires_grad_()))

    @classmethod
    def random(
        cls,
        masks: Sequence[Sequence[bool]],
        *,
        seed: int = 0,
        spread: float = 0.3,
        rewards: Sequence[float] | None = None,
        groups: Sequence[int] | None = None,
        parts: int = 2,
    ) -> Step:
        """``masks`` has a row per sequence; ``spread`` is the distance from the old policy."""
        generator = torch.Generator().manual_seed(seed)
        count, mask = len(masks), torch.tensor([value for row in masks for value in row], dtype=torch.bool)
        total = len(mask)
        old = -2 * torch.rand(total, generator=generator, dtype=torch.float64) - 0.01
        noise = torch.randn(4, total, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 1000, (total,), generator=generator)
        rewards_S = torch.rand(count, generator=generator) if rewards is None else torch.tensor(rewards)
        entropy = torch.rand(total, generator=generator, dtype=torch.float64)
        seldom_SK = torch.randint(0, 3, (count, parts), generator=generator).clamp(min=1) - 1.0 if rewards is None else None
        logprob, later_entropy = (old + spread * noise[2]).requires_grad_(), (entropy + 0.1 * noise[3]).requires_grad_()
        slope, teacher, divergence = torch.randn(3, total, generator=generator, dtype=torch.float64)
        top = torch.randn(total, 4, generator=generator, dtype=torch.float64).log_softmax(1)
        step = cls.plain(
            [*map(len, masks)],
            old,
            logprob,
            labels_T=labels,
            loss_mask_T=mask,
            sampler_logprobs_T=torch.where(mask, old + 0.2 * noise[0], 0.0),
            rewards_S=rewards_S,
            groups_S=torch.arange(count) // 2 if groups is None else torch.tensor(groups),
            old_entropy_T=entropy,
            reference_logprobs_T=old + 0.3 * noise[1],
            teacher_logprobs_T=old + 0.3 * teacher,
            top_logprobs_TK=top[:, :3],
            reward_parts_SK=seldom_SK,  # as bonuses that are seldom given
        )
        scores = TokenScores(logprob, later_entropy, slope, divergence=divergence.abs().requires_grad_())
        return step._replace(scores=scores)

    def pick(self, sequences: Sequence[int]) -> Step:
        index_T = self.batch.token_index(sequences)
        return Step(self.batch.select(sequences), _changed(self.scores, lambda values_T: values_T[index_T]))

    def with_advantages(self, objective: Objective) -> Step:
        return self._replace(batch=self.batch.with_(advantages_S=objective.advantages(self.batch)))

    def output(self, objective: Objective, context: StepContext | None = None) -> ObjectiveOutput:
        return objective(self.scores, self.batch, context or objective.prepare(self.batch))

    def whole(self, objective: Objective) -> _StepOutcome:
        return self.summary([self.with_advantages(objective).output(objective)])

    def summary(self, outputs: Sequence[ObjectiveOutput]) -> _StepOutcome:
        loss = torch.stack([output.numerator / output.denominator for output in outputs]).sum()
        inputs = [values for values in (self.scores.logprob, self.scores.entropy, self.scores.divergence) if values is not None]
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        names = outputs[0].metrics
        metrics = {name: torch.stack([torch.stack(output.metrics[name]) for output in outputs]).sum(0) for name in names}
        extrema = {
            name: getattr(torch.stack([output.extrema[name] for output in outputs]), name.rpartition("/")[2])()
            for name in outputs[0].extrema
        }
        return _StepOutcome(loss.detach(), gradients, metrics, extrema)


def check_objective(config: ObjectiveConfig, *, steps: int = _STEPS, reward_parts: int = 2) -> None:
    """Checks the rules of docs/guides/own-objective.md, on a CPU in float64. Raises ValueError if one is broken.

    ``steps`` random optimizer steps, always the same ones, are computed. ``reward_parts``: K of ``Batch.reward_parts_SK``.
    """
    findings = ObjectiveChecks(config, steps=steps, reward_parts=reward_parts).run()
    problems = [f"  {finding.rule}: {finding.problem}" for finding in findings if finding.problem]
    if problems:
        raise _ObjectiveError("\n".join(["the objective breaks a rule:", *problems]))


class ObjectiveChecks:
    """The rules of `check_objective`, and whether a field acts."""

    def __init__(self, config: ObjectiveConfig, *, steps: int = _STEPS, reward_parts: int = 2) -> None:
        self._config = config
        self._random = [*_random_steps(steps, reward_parts)]
        self._telling = [*_telling_steps(reward_parts)]

    def run(self) -> list[_Finding]:
        findings = list(self.invariance())
        if findings[0].problem:
            return findings
        checks: dict[str, Callable[[], object]] = {}
        for kind in (section for section in self._config.sections.values() if isinstance(section, CustomKind)):
            if kind.slot in ("mask", "penalty", "mismatch"):  # those that may be null
                checks[f"{kind.kind} acts"] = partial(self._check_acts, kind)
            checks[f"fields of {kind.kind} act"] = partial(self._check_fields, kind)
            checks[f"{kind.kind} is documented"] = partial(_check_documented, kind)
        checks["survives its own configuration"] = partial(_check_round_trip, self._config)
        return [*findings, *(_Finding(rule, _problem(check)) for rule, check in checks.items())]

    def invariance(self) -> Iterator[_Finding]:
        objective = build_objective(self._config)
        for rule, check in RULES.items():
            problems = (_problem(partial(check, objective, step, number)) for number, step in enumerate(self._random))
            problem = next(filter(None, problems), "")
            yield _Finding(rule, problem)
            if problem and rule == "can be computed":
                return

    def acts(self, changed: ObjectiveConfig) -> bool:
        """Returns whether ``changed`` gives other advantages, losses, gradients or metrics."""
        return any(map(_differ, self._outcomes(changed), self._expected))

    def fields(self, slot: str, section: Section) -> Iterator[tuple[str, Any, Iterator[tuple[Any, Callable[[], str]]]]]:
        """Yields fields of ``objective.<slot>``, their values, and other values with their effects.

        An effect returns "acts", also of a choice that is refused; "refused" of a number; or "nothing".
        """
        for path, node, value in _leaves(section, type(section).model_json_schema()):
            others = (other for other in _other_values(node, value) if other != value)
            yield ".".join(path), value, ((other, partial(self._effect, slot, section, path, other)) for other in others)

    def _effect(self, slot: str, section: Section, path: tuple[str, ...], value: Any) -> str:
        try:
            other = section.with_values({".".join(path): value})
        except ValidationError:
            return "refused" if isinstance(value, int | float) and not isinstance(value, bool) else "acts"
        return "acts" if self.acts(self._config.model_copy(update={slot: other})) else "nothing"

    @cached_property
    def _expected(self) -> list[list[Tensor]]:
        return list(self._outcomes(self._config))  # within a check: a user's kind may raise

    def _outcomes(self, config: ObjectiveConfig) -> Iterator[list[Tensor]]:
        objective = build_objective(config)
        for step in self._telling:
            output = step.with_advantages(objective).output(objective)
            loss, gradients, metrics, extrema = step.summary([output])
            named = {**metrics, **extrema}
            clip_range = None if output.moves is None else next_clip_range(config.trust_region, output.moves, None)
            values = [objective.advantages(step.batch), loss, *gradients, *(named[name] for name in sorted(named))]
            yield [*values, torch.tensor([bound or 0.0 for bound in clip_range or ClipRange()])]

    def _check_acts(self, kind: CustomKind) -> None:
        if not self.acts(self._config.model_copy(update={kind.slot: None})):
            steps = len(self._telling)
            raise _ObjectiveError(f"objective.{kind.slot}.kind = {kind.kind!r} changes nothing in any of {steps} steps")

    def _check_fields(self, kind: CustomKind) -> None:
        for field, value, effects in self.fields(kind.slot, kind):
            acts = (effect() == "acts" for _, effect in effects)
            first = next(acts, None)  # one value that acts is enough; a user's kind may raise for others
            if first is not None and not (first or any(acts)):
                raise _ObjectiveError(
                    f"no other value of objective.{kind.slot}.{field} changes anything; it is {json.dumps(value)} here. "
                    "Use the field, or leave it out"
                )


def _differ(values: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    close = (torch.allclose(a, b, rtol=1e-9, atol=1e-13, equal_nan=True) for a, b in zip(values, others, strict=False))
    return len(values) != len(others) or not all(close)


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


def _check_inputs_stay(objective: Objective, step: Step, _: int) -> None:
    watched = {name: item.model_copy() for name, item in objective.config.sections.items() if isinstance(item, CustomKind)}
    for kind in watched.values():
        for name in filter(partial(hasattr, kind), _METHODS):
            kind.__dict__[name] = partial(_call_watched, kind, name, getattr(kind, name))
    step.whole(build_objective(objective.config.model_copy(update=watched)))


def _call_watched(kind: CustomKind, name: str, method: Callable[..., Any], *args: Any) -> Any:
    named = inspect.signature(method).bind(*args).arguments
    inputs = {argument: value for argument, value in named.items() if isinstance(value, Tensor)}
    for argument, value in named.items():
        fields = vars(value) if is_dataclass(value) else {}
        inputs |= {f"{argument}.{field}": item for field, item in fields.items() if isinstance(item, Tensor)}
    before = {tensor: (value._version, value.detach().clone()) for tensor, value in inputs.items()}
    result = method(*args)
    for tensor, (version, values) in before.items():
        stayed = (inputs[tensor] == values) | values.isnan()  # what .data writes has no version
        if inputs[tensor]._version != version or not stayed.all():
            raise _ObjectiveError(
                f"objective.{kind.slot} {kind.kind!r}: {type(kind).__name__}.{name} changes {tensor} in place, which "
                "others read afterwards; make a new tensor, as clamp does and clamp_ does not"
            )
    return result


def _check_finite(objective: Objective, step: Step, _: int) -> None:
    outcome, mask_T = step.whole(objective), step.batch.loss_mask_T
    if not outcome.loss.isfinite():
        raise _ObjectiveError(f"the loss is {outcome.loss}; look for a division by 0, log of 0, or exp of a large number")
    for name, gradient_T in zip(_INPUTS, outcome.gradients, strict=False):
        for wrong_T, rule in (
            (~gradient_T.isfinite(), "what torch.where leaves out must be finite too, or its gradient is 0 · inf"),
            ((gradient_T != 0) & ~mask_T, "outside the loss mask it must be 0"),
        ):
            if wrong_T.any():
                token = int(wrong_T.nonzero()[0])
                where = "a response token" if mask_T[token] else "a token outside the loss mask"
                gradient = f"the gradient by the {name} of token {token}, {where}, is {gradient_T[token].item():.6g}"
                raise _ObjectiveError(f"{gradient}, and the loss is {outcome.loss.item():.6g}: {rule}")


def _check_deterministic(objective: Objective, step: Step, _: int) -> None:
    before = torch.get_rng_state()
    first, second = step.whole(objective), step.whole(objective)
    advice = ": ranks that compute the same micro-batch would differ; keep no state, and make randomness from the token itself"
    _compare(first, second, step, "at first", "when computed again", advice, exact=True)
    if not torch.equal(before, torch.get_rng_state()):
        raise _ObjectiveError(
            "it draws random numbers from torch's generator, whose state differs between ranks and after a resume; make "
            "randomness from the token itself"
        )


def _shuffled(step: Step, seed: int) -> list[int]:
    return torch.randperm(step.batch.num_sequences, generator=torch.Generator().manual_seed(seed)).tolist()


def _check_order(objective: Objective, step: Step, number: int) -> None:
    order = _shuffled(step, number)
    shuffled = step.pick(order)
    pairs = torch.stack([objective.advantages(step.batch)[order], objective.advantages(shuffled.batch)], 1)
    for left, right in pairs.tolist():
        if abs(left - right) > 1e-5 + 1e-5 * abs(left):  # rewards are fp32
            raise _ObjectiveError(
                f"a response's advantage is {left:.10g} with the responses in their order, {right:.10g} in another order; it "
                "may depend on its group, by groups_S, and on the batch, and not on where responses stand"
            )
    outcome = step.summary([shuffled.with_advantages(objective).output(objective)])
    advice = "; sequences are packed in any order"
    _compare(step.whole(objective), outcome, step, "with the sequences in one order", "in another", advice)


def _check_micro_batches(objective: Objective, step: Step, number: int) -> None:
    ready, order, size = step.with_advantages(objective), _shuffled(step, number), 1 + number % 3
    context = objective.prepare(ready.batch)
    parts = [ready.pick(order[start : start + size]) for start in range(0, len(order), size)]
    outputs = [part.output(objective, context) for part in parts]
    advice = (
        ": something is computed over whichever sequences happen to share a micro-batch, such as a mean, a count or a maximum. "
        "Give one value per token, from the token and its own sequence; sums and means are objective.aggregation's, and "
        "statistics of the whole step are prepare's"
    )
    there = f"in micro-batches of {' and '.join(str(part.batch.num_sequences) for part in parts)} sequences"
    _compare(step.whole(objective), step.summary(outputs), step, "in one piece", there, advice)


def _check_ranks(objective: Objective, step: Step, _: int) -> None:
    ready = step.with_advantages(objective)
    sequences = torch.arange(step.batch.num_sequences)
    parts = sequences.tensor_split(2) if len(sequences) > 1 else (sequences,)
    contexts = [objective.prepare(copy.deepcopy(ready.batch)) for _ in parts]
    outputs = [ready.pick(part.tolist()).output(objective, own) for part, own in zip(parts, contexts, strict=True)]
    divisors = [float(output.denominator) for output in outputs]
    if divisors[0] != divisors[-1]:
        raise _ObjectiveError(
            f"one rank divides by {divisors[0]:.10g}, another by {divisors[-1]:.10g}: the denominator must come from the whole "
            "step alone"
        )
    _compare(step.whole(objective), step.summary(outputs), step, "on one rank", f"on {len(outputs)} data-parallel ranks")


def _check_context_parallel(objective: Objective, step: Step, _: int) -> None:
    batch, scores = step.with_advantages(objective)
    whole, parts = step.whole(objective), []
    for rank in range(2):
        local_T = torch.arange(batch.num_tokens) % 2 == rank
        local = Step(batch, _changed(scores, lambda values_T: torch.where(local_T, values_T, values_T.detach())))  # noqa: B023
        parts.append(step.summary([local.output(objective)]))
    gradients = tuple(torch.stack(pair).sum(0) for pair in zip(*(part.gradients for part in parts), strict=True))
    for part in parts:
        outcome = part._replace(gradients=gradients)
        _compare(whole, outcome, step, "on one rank", "on two ranks of context parallelism")


def _check_padding(objective: Objective, step: Step, number: int) -> None:
    ready, tokens = step.with_advantages(objective), 1 + number % 5
    context, whole = objective.prepare(ready.batch), step.whole(objective)
    advice = ": a sequence without a response token must not count; values.mask_T says which tokens do, and its length is 0"
    for fill in (0.0, torch.nan, -torch.inf):
        padded = _pad(ready, tokens, fill)
        for used, where in ((context, "in the micro-batch"), (objective.prepare(padded.batch), "in the step")):
            outcome = step.summary([padded.output(objective, used)])
            there = f"with a sequence of padding {where} (scores {fill})"
            _compare(whole, outcome, step, "without padding", there, advice)
        added = padded.pick([step.batch.num_sequences]).output(objective, context).numerator.item()
        if added != 0:
            raise _ObjectiveError(f"a micro-batch of padding only adds {added:.6g} to the loss, and must add 0")


def _pad(step: Step, tokens: int, fill: float) -> Step:
    longer: dict[str, Tensor] = {}
    batch = step.batch
    for name, values in vars(batch).items():
        if name.endswith(("_T", "_TK")) and values is not None:
            added = values.new_full((tokens, *values.shape[1:]), fill if values.is_floating_point() else 0)
            longer[name] = torch.cat([values, added])
        elif name.endswith(("_S", "_SK")) and values is not None:
            longer[name] = torch.cat([values, values.new_zeros((1, *values.shape[1:]))])
    cu_seqlens = torch.cat([batch.cu_seqlens, batch.cu_seqlens[-1:] + tokens])
    scores = _changed(step.scores, lambda values_T: torch.cat([values_T, values_T.new_full((tokens,), fill)]))
    return Step(batch.with_(cu_seqlens=cu_seqlens, **longer), scores)


def _changed(scores: TokenScores, change: Callable[[Tensor], Tensor]) -> TokenScores:
    changes: dict[str, Any] = {name: change(value) for name, value in vars(scores).items() if isinstance(value, Tensor)}
    return replace(scores, **changes)


RULES: Mapping[str, Callable[[Objective, Step, int], object]] = {
    "can be computed": lambda objective, step, number: step.whole(objective),
    "changes no input": _check_inputs_stay,
    "is finite": _check_finite,
    "is deterministic": _check_deterministic,
    "order of sequences": _check_order,
    "micro-batches": _check_micro_batches,
    "data-parallel ranks": _check_ranks,
    "context-parallel ranks": _check_context_parallel,
    "padding": _check_padding,
}
"""Each raises ValueError for a step that breaks it; the number seeds orders and sizes."""


def _compare(
    expected: _StepOutcome, outcome: _StepOutcome, step: Step, here: str, there: str, advice: str = "", *, exact: bool = False
) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-9, "atol": 1e-12}
    names = [f"the gradient by the {name}" for name in _INPUTS]
    pairs = [("the loss", expected.loss, outcome.loss), *zip(names, expected.gradients, outcome.gradients, strict=False)]
    for left_metrics, right_metrics in ((expected.metrics, outcome.metrics), (expected.extrema, outcome.extrema)):
        pairs += [(f"the metric {name}", left_metrics[name], right_metrics[name]) for name in left_metrics]
    for name, left, right in pairs:
        differs = ~torch.isclose(left, right, **tolerance, equal_nan=True).flatten()
        if differs.any():
            index = int(differs.nonzero()[0])
            if name in names:
                name += f" of token {index} (sequence {int(step.batch.sequence_index_T[index])})"
            first, second = float(left.flatten()[index]), float(right.flatten()[index])
            raise _ObjectiveError(f"{name} is {first:.10g} {here}, {second:.10g} {there}{advice}")


def _random_steps(count: int, parts: int) -> Iterator[Step]:
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, 8, (2 + seed % 5,), generator=generator).tolist()
        rows = [(torch.rand(size, generator=generator) < 0.7).tolist() for size in sizes]
        rows[0][-1] = rows[1][-1] = True  # a step has response tokens
        yield Step.random(rows, seed=seed, spread=(0.3, 1e-3, 1.0)[seed % 3], parts=parts)


def _other_values(node: Mapping[str, Any], value: Any) -> Iterator[Any]:
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


def _telling_steps(parts: int) -> Iterator[Step]:
    rows = [[True] * 6, [True, False, True, True], [False] + [True] * 4, [True], [False, False], [True] * 3, [True, True]]
    for seed, spread, scale in ((0, 1e-3, 6), (1, 0.3, 6), (2, 1.0, 6), (4, 0.3, 6), (7, 0.6, 1)):
        rewards = [1.0, 0.0, 0.25, 1.0, 0.0, 0.5, 0.25]
        batch, scores = Step.random(rows, seed=seed, groups=[0, 0, 0, 1, 1, 2, 2], rewards=rewards)
        assert batch.old_logprobs_T is not None
        assert batch.reference_logprobs_T is not None
        assert batch.teacher_logprobs_T is not None
        old = scale * batch.old_logprobs_T
        sampler = torch.where(batch.loss_mask_T, old + 6 * (batch.sampler_logprobs_T - batch.old_logprobs_T), 0.0)
        logprob = (old + spread * (scores.logprob - batch.old_logprobs_T) / 0.3).detach().requires_grad_()
        reference = old + batch.reference_logprobs_T - batch.old_logprobs_T
        components = [batch.rewards_S, batch.rewards_S.flip(0), *(batch.rewards_S.roll(shift) for shift in range(2, parts))]
        changed = batch.with_(
            old_logprobs_T=old,
            sampler_logprobs_T=sampler,
            reference_logprobs_T=reference,
            teacher_logprobs_T=old + batch.teacher_logprobs_T - batch.old_logprobs_T,
            reward_parts_SK=torch.stack(components[:parts], 1),
        )
        divergence = (scores.logprob - batch.reference_logprobs_T).detach().abs().requires_grad_()
        yield Step(changed, TokenScores(logprob, scores.entropy, scores.entropy_slope, divergence=divergence))


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

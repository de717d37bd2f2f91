"""All checks of one objective."""

from __future__ import annotations

import json
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from tepo_megatron.config.base import Section
from tepo_megatron.config.objective.custom import CustomKind
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.checking import invariance
from tepo_megatron.core.objective.checking.invariance import ObjectiveError
from tepo_megatron.core.objective.checking.steps import random_steps, telling_steps, whole
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.types import Batch, TokenScores

if TYPE_CHECKING:
    from tepo_megatron.core.objective.compose import Objective

_STEPS = 12

Steps = Sequence[tuple[Batch, TokenScores]]


class Finding(NamedTuple):
    rule: str
    problem: str


def check_objective(config: ObjectiveConfig, *, steps: int = _STEPS, reward_parts: int = 2) -> None:
    """Checks that an objective keeps the rules of every objective (docs/guides/own-objective.md), on a CPU in float64.

    Args:
        steps: number of random optimizer steps; always the same ones.
        reward_parts: K of ``Batch.reward_parts_SK``.

    Raises:
        ValueError: a rule is broken, with the two numbers that should be equal.
    """
    findings = run_checks(config, steps=steps, reward_parts=reward_parts)
    problems = [f"  {finding.rule}: {finding.problem}" for finding in findings if finding.problem]
    if problems:
        raise ObjectiveError("\n".join(["the objective breaks a rule:", *problems]))


def run_checks(config: ObjectiveConfig, *, steps: int = _STEPS, reward_parts: int = 2) -> list[Finding]:
    """Stops after the first rule if the objective cannot be computed at all."""
    findings = list(check_invariance(config, steps=steps, reward_parts=reward_parts))
    if findings[0].problem:
        return findings
    telling = telling_steps(parts=reward_parts)
    for kind in (section for section in config.sections.values() if isinstance(section, CustomKind)):
        if kind.slot in ("mask", "penalty", "mismatch"):  # those that may be null
            findings.append(Finding(f"{kind.kind} acts", _problem(partial(_check_acts, config, kind, telling))))
        findings += [
            Finding(f"fields of {kind.kind} act", _problem(partial(_check_fields, config, kind, telling))),
            Finding(f"{kind.kind} is documented", _problem(partial(_check_documented, kind))),
        ]
    findings.append(Finding("survives its own configuration", _problem(partial(_check_round_trip, config))))
    return findings


def check_invariance(config: ObjectiveConfig, *, steps: int = _STEPS, reward_parts: int = 2) -> Iterator[Finding]:
    """Checks what must not matter, as a run with plugins does before it starts."""
    objective, checked = build_objective(config), list(random_steps(steps, parts=reward_parts))
    for rule, check in _RULES.items():
        problems = (_problem(partial(check, objective, *step, number)) for number, step in enumerate(checked))
        problem = next(filter(None, problems), "")
        yield Finding(rule, problem)
        if problem and rule == "can be computed":
            return


def _check_order(objective: Objective, batch: Batch, scores: TokenScores, number: int) -> None:
    invariance.check_order(objective, batch, scores, _shuffled(batch, number))


def _check_cuts(objective: Objective, batch: Batch, scores: TokenScores, number: int) -> None:
    invariance.check_cuts(objective, batch, scores, _parts(_shuffled(batch, number), 1 + number % 3))


def _check_ranks(objective: Objective, batch: Batch, scores: TokenScores, number: int) -> None:
    del number
    parts = _parts(list(range(batch.num_sequences)), -(-batch.num_sequences // 2))
    invariance.check_ranks(objective, batch, scores, parts)


_RULES: dict[str, Callable[[Objective, Batch, TokenScores, int], object]] = {
    "can be computed": lambda objective, batch, scores, _: whole(objective, batch, scores),
    "is finite": lambda objective, batch, scores, _: invariance.check_finite(objective, batch, scores),
    "is deterministic": lambda objective, batch, scores, _: invariance.check_deterministic(objective, batch, scores),
    "order of sequences": _check_order,
    "micro-batches": _check_cuts,
    "data-parallel ranks": _check_ranks,
    "context-parallel ranks": lambda objective, batch, scores, _: invariance.check_context_parallel(objective, batch, scores),
    "padding": lambda objective, batch, scores, _: invariance.check_padding(objective, batch, scores),
}


def _shuffled(batch: Batch, seed: int) -> list[int]:
    return torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(seed)).tolist()


def _parts(order: list[int], size: int) -> list[list[int]]:
    return [order[start : start + size] for start in range(0, len(order), size)]


def _problem(check: Callable[[], object]) -> str:
    try:
        check()
    except ObjectiveError as error:
        return str(error)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, ValueError) else f" ({frame.filename}, line {frame.lineno})"
        return f"it raised {type(error).__name__}: {error}{where}"
    return ""


def outcome(config: ObjectiveConfig, steps: Steps) -> list[Tensor]:
    objective, values = build_objective(config), []
    for batch, scores in steps:
        loss, gradients, metrics, extrema = whole(objective, batch, scores)
        named = {**metrics, **extrema}
        values += [objective.advantages(batch), loss, *gradients, *(named[name] for name in sorted(named))]
    return values


def differ(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    if len(left) != len(right):
        return True
    return any(not torch.allclose(a, b, rtol=1e-9, atol=1e-13, equal_nan=True) for a, b in zip(left, right, strict=True))


def other_values(node: dict[str, Any], value: Any) -> Iterator[Any]:
    for option in node.get("anyOf") or [node]:
        if "enum" in option:
            yield from option["enum"]
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
    """Returns whether each value has to act: a number, as a bound, may have no effect."""
    return isinstance(value, bool) or not isinstance(value, float | int)


def _check_acts(config: ObjectiveConfig, kind: CustomKind, steps: Steps) -> None:
    without = config.model_copy(update={kind.slot: None})
    if not differ(outcome(config, steps), outcome(without, steps)):
        raise ObjectiveError(f"objective.{kind.slot}.kind = {kind.kind!r} changes nothing in any of {len(steps)} steps")


def _check_fields(config: ObjectiveConfig, kind: CustomKind, steps: Steps) -> None:
    expected = outcome(config, steps)

    def acts(path: tuple[str, ...], other: Any) -> bool:
        changed = _changed(kind, path, other)
        if changed is None:
            return is_choice(other)
        return differ(outcome(config.model_copy(update={kind.slot: changed}), steps), expected)

    for path, node, value in _leaves(kind, type(kind).model_json_schema()):
        others = [other for other in other_values(node, value) if other != value]
        if others and not any(acts(path, other) for other in others):
            raise ObjectiveError(
                f"no other value of objective.{kind.slot}.{'.'.join(path)} changes anything; it is {json.dumps(value)} here. "
                "Use the field, or leave it out"
            )


def _check_documented(kind: CustomKind) -> None:
    name = type(kind).__name__
    if not (type(kind).__doc__ or "").strip() or type(kind).__doc__ == type(kind).__mro__[1].__doc__:
        raise ObjectiveError(f"{name} has no docstring; say what it computes, as tepo objective show prints it")
    for field, info in type(kind).model_fields.items():
        if field != "kind" and not (info.description or "").strip():
            raise ObjectiveError(f"{name}.{field} has no docstring; write what it means as a string below the field")


def _check_round_trip(config: ObjectiveConfig) -> None:
    if config.plugins and ObjectiveConfig.model_validate(config.model_dump(mode="json")) != config:
        raise ObjectiveError("the configuration that a run writes down gives another one when it is read; look at validators")


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
    """Returns None if the value is refused."""
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

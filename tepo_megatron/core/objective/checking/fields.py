"""No field of an objective does nothing: another legal value changes the outcome of some step, or is refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from torch import Tensor

from tepo_megatron.config.base import Section
from tepo_megatron.config.objective.custom import CustomKind
from tepo_megatron.core.objective.checking.invariance import ObjectiveError
from tepo_megatron.core.objective.checking.steps import whole
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.types import Batch, TokenScores

if TYPE_CHECKING:
    from tepo_megatron.config.objective.section import ObjectiveConfig

SWITCHED = ("mask", "penalty", "mismatch")
"""The fields below ``objective`` that may be null."""

Steps = Sequence[tuple[Batch, TokenScores]]


def outcome(config: ObjectiveConfig, steps: Steps) -> list[Tensor]:
    """Advantages, losses, gradients and metrics of these steps."""
    objective, values = build_objective(config), []
    for batch, scores in steps:
        loss, gradients, metrics, extrema = whole(objective, batch, scores)
        named = {**metrics, **extrema}
        values += [objective.advantages(batch), loss, *gradients, *(named[name] for name in sorted(named))]
    return values


def differ(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """By more than a rounding: two ways to write one thing are one thing."""
    if len(left) != len(right):
        return True
    return any(not torch.allclose(a, b, rtol=1e-9, atol=1e-13, equal_nan=True) for a, b in zip(left, right, strict=True))


def other_values(node: dict[str, Any], value: Any) -> Iterator[Any]:
    """Other values to try for a field that is no section, from its JSON schema."""
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
    """Whether a value is one of a few, each of which has to act. Of numbers one is enough: a bound may hold nowhere."""
    return isinstance(value, bool) or not isinstance(value, float | int)


def check_acts(config: ObjectiveConfig, kind: CustomKind, steps: Steps) -> None:
    """A mask, penalty or correction, of ``SWITCHED``, changes the outcome of some step."""
    without = config.model_copy(update={kind.slot: None})
    if not differ(outcome(config, steps), outcome(without, steps)):
        raise ObjectiveError(f"objective.{kind.slot}.kind = {kind.kind!r} changes nothing in any of {len(steps)} steps")


def check_fields(config: ObjectiveConfig, kind: CustomKind, steps: Steps) -> None:
    """Another value of each field of the kind changes the outcome of some step, or is refused."""
    expected = outcome(config, steps)
    for path, node, value in _leaves(kind, type(kind).model_json_schema()):
        tried, acts = 0, False
        for other in other_values(node, value):
            if other == value:
                continue
            tried += 1
            changed = _changed(kind, path, other)
            if changed is None:
                acts |= is_choice(other)
            else:
                acts |= differ(outcome(config.model_copy(update={kind.slot: changed}), steps), expected)
            if acts:
                break
        if tried and not acts:
            raise ObjectiveError(
                f"no other value of objective.{kind.slot}.{'.'.join(path)} changes anything; it is {json.dumps(value)} here. "
                "Use the field, or leave it out"
            )


def check_documented(kind: CustomKind) -> None:
    """The class and each of its fields say what they mean: ``tepo objective show`` and ``tepo config schema`` print it."""
    if not (type(kind).__doc__ or "").strip() or type(kind).__doc__ == type(kind).__mro__[1].__doc__:
        raise ObjectiveError(f"{type(kind).__name__} has no docstring; say what it computes, as tepo objective show prints it")
    for name, field in type(kind).model_fields.items():
        if name != "kind" and not (field.description or "").strip():
            raise ObjectiveError(
                f"{type(kind).__name__}.{name} has no docstring; write what it means as a string below the field"
            )


def _leaves(
    section: Section, schema: dict[str, Any], above: tuple[str, ...] = (), node: dict[str, Any] | None = None
) -> Iterator[tuple[tuple[str, ...], dict[str, Any], Any]]:
    """Every field that is no section: its path, its schema, its value."""
    for name, raw in (node or schema).get("properties", {}).items():
        if name == "kind":
            continue
        value, inner = getattr(section, name), raw
        while "$ref" in inner:
            inner = schema["$defs"][inner["$ref"].rsplit("/", 1)[1]]
        if isinstance(value, Section):
            yield from _leaves(value, {"$defs": {}, **type(value).model_json_schema()}, (*above, name))
        else:
            yield (*above, name), inner, value


def _changed(section: Section, path: tuple[str, ...], value: Any) -> Section | None:
    """The section with another value of a field; None where it is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return type(section).model_validate(_with(section.model_dump(), path, value))
        except ValidationError:
            return None


def _with(given: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    head, *rest = path
    return {**given, head: _with(given[head], tuple(rest), value) if rest else value}

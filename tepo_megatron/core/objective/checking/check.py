"""All checks of one objective: what the command ``tepo objective check`` and a user's own test call."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from tepo_megatron.config.objective.custom import CustomKind
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.checking import invariance
from tepo_megatron.core.objective.checking.fields import SWITCHED, check_acts, check_documented, check_fields
from tepo_megatron.core.objective.checking.invariance import ObjectiveError
from tepo_megatron.core.objective.checking.steps import random_steps, telling_steps, whole
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.types import Batch, TokenScores

if TYPE_CHECKING:
    from tepo_megatron.core.objective.compose import Objective

STEPS = 12
"""Random steps that each rule is checked on."""


class Finding(NamedTuple):
    """A rule, and how the objective breaks it; ``problem`` is empty where it does not."""

    rule: str
    problem: str


def check_objective(config: ObjectiveConfig, *, steps: int = STEPS, reward_parts: int = 2) -> None:
    """Checks that an objective keeps the rules of objectives (docs/guides/own-objective.md), on a CPU in float64.

    For a test of one's own: ``check_objective(ObjectiveConfig(preset="my_preset.yaml"))``.

    Args:
        steps: random optimizer steps that each rule is checked on; always the same ones.
        reward_parts: the components that each reward has, K of ``Batch.reward_parts_SK``.

    Raises:
        ValueError: a rule is broken; for each such rule a sentence with the two numbers that should be equal.
    """
    problems = [
        f"{each.rule}: {each.problem}" for each in run_checks(config, steps=steps, reward_parts=reward_parts) if each.problem
    ]
    if problems:
        raise ObjectiveError("\n".join(["the objective breaks a rule:", *(f"  {problem}" for problem in problems)]))


def run_checks(config: ObjectiveConfig, *, steps: int = STEPS, reward_parts: int = 2) -> list[Finding]:
    """Every rule with what was found. Where the objective cannot be computed at all, that is the only one."""
    found = list(check_invariance(config, steps=steps, reward_parts=reward_parts))
    if found[0].problem:
        return found
    telling = telling_steps(parts=reward_parts)
    for kind in (getattr(config, name) for name in type(config).model_fields):
        if isinstance(kind, CustomKind):
            if kind.slot in SWITCHED:
                found.append(Finding(f"{kind.kind} acts", _problem(partial(check_acts, config, kind, telling))))
            found += [
                Finding(f"fields of {kind.kind} act", _problem(partial(check_fields, config, kind, telling))),
                Finding(f"{kind.kind} is documented", _problem(partial(check_documented, kind))),
            ]
    found.append(Finding("survives its own configuration", _problem(lambda: _check_round_trip(config))))
    return found


def check_invariance(config: ObjectiveConfig, *, steps: int = STEPS, reward_parts: int = 2) -> Iterator[Finding]:
    """The rules about what must not matter, each on so many random steps; a run with plugins asks them before it begins."""
    objective, made = build_objective(config), list(random_steps(steps, parts=reward_parts))
    rules: dict[str, Callable[[Batch, TokenScores, int], None]] = {
        "can be computed": lambda batch, scores, number: _compute(objective, batch, scores),
        "is finite": lambda batch, scores, number: invariance.check_finite(objective, batch, scores),
        "is deterministic": lambda batch, scores, number: invariance.check_deterministic(objective, batch, scores),
        "order of sequences": lambda batch, scores, number: invariance.check_order(
            objective, batch, scores, _order(batch, number)
        ),
        "micro-batches": lambda batch, scores, number: invariance.check_cuts(
            objective, batch, scores, _parts(_order(batch, number), 1 + number % 3)
        ),
        "data-parallel ranks": lambda batch, scores, number: invariance.check_ranks(
            objective, batch, scores, _parts(list(range(batch.num_sequences)), -(-batch.num_sequences // 2))
        ),
        "context-parallel ranks": lambda batch, scores, number: invariance.check_context_parallel(objective, batch, scores),
        "padding": lambda batch, scores, number: invariance.check_padding(objective, batch, scores),
    }
    for rule, check in rules.items():
        problem = next((text for number, step in enumerate(made) if (text := _problem(lambda: check(*step, number)))), "")  # noqa: B023
        yield Finding(rule, problem)
        if problem and rule == "can be computed":
            return


def _compute(objective: Objective, batch: Batch, scores: TokenScores) -> None:
    whole(objective, batch, scores)


def _order(batch: Batch, seed: int) -> list[int]:
    return torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(seed)).tolist()


def _parts(order: list[int], size: int) -> list[list[int]]:
    return [order[start : start + size] for start in range(0, len(order), size)]


def _check_round_trip(config: ObjectiveConfig) -> None:
    if config.plugins and ObjectiveConfig.model_validate(config.model_dump(mode="json")) != config:
        raise ObjectiveError("the configuration that a run writes down gives another one when it is read; look at validators")


def _problem(check: Callable[[], None]) -> str:
    """What a check found, or what the user's code raised on the way; empty where neither."""
    try:
        check()
    except ObjectiveError as error:
        return str(error)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, ValueError) else f" ({frame.filename}, line {frame.lineno})"
        return f"it raised {type(error).__name__}: {error}{where}"
    return ""

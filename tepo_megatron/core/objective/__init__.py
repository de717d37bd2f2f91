"""The paper's mathematics on [sequence, token] values."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tepo_megatron.core.objective.advantage import group_advantages, overlong_penalty
    from tepo_megatron.core.objective.checking import check_objective
    from tepo_megatron.core.objective.compose import Objective, StepContext, build_objective
    from tepo_megatron.core.objective.ratio import sequence_sum
    from tepo_megatron.core.objective.trust_region import Surrogate
    from tepo_megatron.core.objective.values import StepValues, TokenValues

__all__ = [
    "Objective",
    "StepContext",
    "StepValues",
    "Surrogate",
    "TokenValues",
    "build_objective",
    "check_objective",
    "group_advantages",
    "overlong_penalty",
    "sequence_sum",
]

_HOMES = {
    "Objective": "compose",
    "StepContext": "compose",
    "StepValues": "values",
    "Surrogate": "trust_region",
    "TokenValues": "values",
    "build_objective": "compose",
    "check_objective": "checking",
    "group_advantages": "advantage",
    "overlong_penalty": "advantage",
    "sequence_sum": "ratio",
}


def __getattr__(name: str) -> Any:  # on first use, so that the table of presets can be printed without torch
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

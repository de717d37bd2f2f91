"""The reward of a response from what its verifier returned: a number, or the weighted sum of components by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tepo_megatron.config.reward import component_fault


def weigh(
    value: float | Mapping[str, float], weights: Mapping[str, float] | None, names: Sequence[str] | None
) -> tuple[float, dict[str, float]]:
    """The reward, and its components; none where the verifier returns a number.

    Args:
        value: what the verifier returned, each number finite.
        weights: ``reward.weights``. None: each component weighs 1.
        names: which components are expected, in the order in which they are returned here; empty: a number. None: any.

    Raises:
        ValueError: other components than expected, one that cannot be a metric, or a sum that is not finite.
    """
    expected = list(weights) if weights is not None else names
    if not isinstance(value, Mapping):
        if expected:
            raise ValueError(f"the verifier returned a number, not the components {_listed(expected)}{_whence(weights)}")
        return float(value), {}
    for name in value:
        fault = component_fault(name)
        if fault is not None:
            raise ValueError(fault)
    if expected is not None and set(value) != set(expected):
        wanted = f"the components {_listed(expected)}" if expected else "a number"
        raise ValueError(f"the verifier returned the components {_listed(sorted(value))}, not {wanted}{_whence(weights)}")
    parts = {name: float(value[name]) for name in (value if expected is None else expected)}
    reward = math.fsum((1.0 if weights is None else weights[name]) * part for name, part in parts.items())
    if not math.isfinite(reward):
        raise ValueError(f"the weighted sum of the components {_listed(list(parts))} is {reward}, not a finite number")
    return reward, parts


def _whence(weights: Mapping[str, float] | None) -> str:
    return " of reward.weights" if weights is not None else " that it returned before"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name[:60] for name in names)

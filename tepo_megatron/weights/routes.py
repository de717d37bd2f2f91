"""Routing records: every token's experts, which the sampler records and the trainer replays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepo_megatron.core.rollout import Rollout
from tepo_megatron.weights.architecture import ModelSpec


def routes_dtype(spec: ModelSpec) -> np.dtype[Any]:
    assert spec.experts is not None
    return np.dtype({1: np.uint8, 2: np.int16}[spec.experts.number_bytes])


def routes_fault(routes: NDArray[Any], spec: ModelSpec, tokens: int) -> str | None:
    """Returns the end of a sentence, or None if the record can be replayed."""
    if spec.experts is None:
        return f"has a routing record, and {spec.architecture} has no experts"
    expected = (tokens - 1, spec.num_layers, spec.experts.per_token)
    if routes.shape != expected:
        return (
            f"has a routing record of {_sizes(routes.shape)}, and {tokens} tokens of this model make {_sizes(expected)} (all "
            "but the last × layers × experts per token): it is of another model or another length"
        )
    if routes.size and not 0 <= int(routes.min()) <= int(routes.max()) < spec.experts.count:
        worst = int(routes.min()) if routes.min() < 0 else int(routes.max())
        return f"has a routing record with expert {worst}, and this model has {spec.experts.count}: it is of another model"
    return None


def rollout_fault(rollout: Rollout, spec: ModelSpec) -> str | None:
    if rollout.routed_experts is None:
        return "has no routing record"
    return routes_fault(rollout.routed_experts, spec, rollout.prompt_ids.size + rollout.response_ids.size)


def _sizes(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))

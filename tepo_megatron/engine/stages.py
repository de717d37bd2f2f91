"""Which layers each stage of the pipeline has, and what Megatron-Core must be told of stages that are uneven or interleaved."""

from __future__ import annotations

from typing import Any

from tepo_megatron.bridge.architecture import ModelSpec
from tepo_megatron.bridge.layouts import pipeline_stages
from tepo_megatron.config import ParallelConfig


def pipeline_stages_of(spec: ModelSpec, parallel: ParallelConfig) -> tuple[tuple[range, ...], ...]:
    """Returns the layers of each chunk of each stage. Raises ValueError where the model's layers do not fit them."""
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    if first is None and last is None:
        spec.check_parallel(tp=1, pp=parallel.pp)
    try:
        return pipeline_stages(spec.num_layers, parallel.pp, chunks=parallel.vpp, first=first, last=last)
    except ValueError as error:
        asked = {
            "pp": parallel.pp,
            "vpp": parallel.vpp if parallel.vpp > 1 else None,
            "num_layers_in_first_pipeline_stage": first,
            "num_layers_in_last_pipeline_stage": last,
        }
        given = ", ".join(f"{name} = {value}" for name, value in asked.items() if value is not None)
        raise ValueError(f"engine.parallel does not fit the model with {given}: {error}") from None


def stage_options(parallel: ParallelConfig) -> dict[str, Any]:
    """Returns the fields of Megatron's ``TransformerConfig`` that say how layers are divided among stages.

    Interleaved stages exchange activations each way by itself, overlapped with computation. Batched exchanges, Megatron's
    default, would be wrong with two stages: each is the other's predecessor and successor, so that an activation and a gradient
    that travel between the same two ranks in one batch would be taken for one another.
    """
    interleaved = parallel.vpp > 1
    return {
        "virtual_pipeline_model_parallel_size": parallel.vpp if interleaved else None,
        "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage,
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }

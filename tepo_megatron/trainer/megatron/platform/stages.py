"""What Megatron-Core must be told of pipeline stages that are uneven or interleaved."""

from __future__ import annotations

from typing import Any

from tepo_megatron.config import ParallelConfig


def stage_options(parallel: ParallelConfig) -> dict[str, Any]:
    """Returns the fields of Megatron's ``TransformerConfig`` that say how layers are divided among stages.

    Interleaved stages exchange activations each way by itself, overlapped with computation. Batched exchanges, Megatron's
    default, would be wrong with two stages: each is the other's predecessor and successor, so that an activation and a gradient
    that travel between the same two ranks in one batch would be taken for one another.
    """
    interleaved = parallel.vpp > 1
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    if parallel.pp == 2 and first is not None:
        last = None  # it has the rest; of two numbers Megatron divides what they leave by the stages between, which are none
    return {
        "virtual_pipeline_model_parallel_size": parallel.vpp if interleaved else None,
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }

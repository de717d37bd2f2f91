"""Communication that goes on while Megatron computes: gradients are reduced, weights gathered, activations handed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig

from tepo_megatron.config import EngineConfig


def ddp_options(engine: EngineConfig) -> dict[str, Any]:
    """Returns the fields of ``DistributedDataParallelConfig`` for what data-parallel ranks do while they compute."""
    return {
        "overlap_grad_reduce": engine.overlap_grad_reduce,
        "overlap_param_gather": engine.overlap_param_gather,
        "bucket_size": engine.bucket_size,
    }


def pipeline_options() -> dict[str, Any]:
    """Returns the fields of ``TransformerConfig`` for what pipeline stages hand over.

    Without ``batch_p2p_sync`` the host does not wait for the whole GPU after each exchange; Megatron-Core waits by default, for
    a torch older than any that this project takes. It still waits once, where it exchanges the lengths of micro-batches.
    """
    return {"batch_p2p_sync": False}


def reduce_in_last_micro_batch(
    megatron: TransformerConfig, ddp: Sequence[DistributedDataParallel], engine: EngineConfig
) -> None:
    """Has Megatron's schedules start the reduction of gradients in the last micro-batch, if they overlap at all.

    The first update reduces at its end: in it Megatron learns which gradients make a bucket complete.
    """
    if engine.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in ddp]
        megatron.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]


@dataclass
class ParamGather:
    """Whether this rank's weights are whole after an optimizer step. Every rank has one, and calls it in step.

    With ``overlapped`` an optimizer step leaves each data-parallel rank with the weights that it updated itself. The next
    forward pass gathers each bucket before it is used, through Megatron's hooks on the modules; whoever else reads weights
    must :meth:`finish` first.
    """

    ddp: Sequence[DistributedDataParallel]
    overlapped: bool
    pending: bool = False

    def after_step(self) -> None:
        """Notes that the optimizer has made a step."""
        self.pending = self.overlapped

    def finish(self) -> None:
        """Returns when the weights are whole; no communication if they are. Every rank calls."""
        if not self.pending:
            return
        for chunk in self.ddp:
            # The last bucket has the first layers, and finishing one starts the next. Megatron's start_param_sync(force_sync)
            # would not make the copies that FP8 weights need.
            for group in reversed([*chunk.expert_parallel_bucket_groups, *chunk.bucket_groups]):
                group.finish_param_sync()
        self.pending = False

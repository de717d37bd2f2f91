"""Mixture-of-experts models: Megatron's options for them, checks, and the router that replaces Megatron's on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn.functional import linear

from tepo_megatron.bridge.architecture import ModelSpec
from tepo_megatron.config import ParallelConfig
from tepo_megatron.engine.platform import Platform


class Float32Router(TopKRouter):  # type: ignore[misc]  # Megatron's types are not followed
    """Megatron's router for machines without Transformer Engine, where Megatron's function for the logits raises NameError."""

    def gating(self, input: Tensor) -> Tensor:
        """Computes logits […, experts] from hidden states […, hidden], in fp32 whatever the weights' dtype."""
        return linear(input.float(), self.weight.float())


def moe_options(spec: ModelSpec, parallel: ParallelConfig, platform: Platform, *, grouped: bool) -> dict[str, Any]:
    """Returns the fields of Megatron's ``TransformerConfig`` that a model with experts needs.

    ``grouped``: one grouped matrix product for all experts of a rank (Transformer Engine's), otherwise one MLP after the other.
    There is no auxiliary loss, no capacity and no dropped token: an expert takes all that is routed to it, as vLLM's does, so
    that trainer and rollout servers agree.
    """
    if spec.experts is None:
        # Nothing dispatches, but with its default Megatron refuses stages that exchange micro-batches of several lengths.
        return {"moe_token_dispatcher_type": "alltoall"}
    return {
        "num_moe_experts": spec.experts.count,
        "moe_ffn_hidden_size": spec.ffn_size,
        "moe_router_topk": spec.experts.per_token,
        # A softmax over the chosen experts' logits alone is the softmax over all, renormalised to sum 1.
        "moe_router_pre_softmax": not spec.experts.renormalize,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": grouped,
        # Megatron's all-to-all works on CUDA streams, and gathers unequal parts where gloo can only gather equal ones.
        "moe_token_dispatcher_type": "alltoall" if platform.kind == "cuda" else "allgather",
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.tp if parallel.etp is None else parallel.etp,
    }


def gathers_tokens(parallel: ParallelConfig, platform: Platform) -> bool:
    """Whether the ranks that share experts gather each other's tokens; each must then have equally many."""
    return parallel.ep > 1 and platform.kind == "cpu"


def one_length(spec: ModelSpec, parallel: ParallelConfig, platform: Platform) -> bool:
    """Whether the stages of a pipeline can exchange micro-batches of one length only: with Megatron's gathering dispatcher."""
    return parallel.pp > 1 and spec.experts is not None and platform.kind == "cpu"


def largest_in_group(sizes: list[int], device: torch.device) -> list[int]:
    """Returns, for each micro-batch, the largest size over the ranks whose tokens are gathered for one set of experts.

    Every rank of such a group calls, with equally many sizes.
    """
    most = torch.tensor(sizes, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=parallel_state.get_expert_tensor_and_model_parallel_group())
    return most.tolist()

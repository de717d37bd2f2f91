"""Mixture-of-experts models: what Megatron must be told of them, and what it could not do right."""

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
    """Megatron's router where Transformer Engine is not there: its own function for the logits then fails by name."""

    def gating(self, input: Tensor) -> Tensor:
        """Hidden states […, hidden] → logits […, experts], computed in fp32 whatever the weights' dtype."""
        return linear(input.float(), self.weight.float())


def moe_options(spec: ModelSpec, parallel: ParallelConfig, platform: Platform, *, grouped: bool) -> dict[str, Any]:
    """The fields of Megatron's ``TransformerConfig`` that a model with experts needs; none for a dense one. ``grouped``: one
    grouped matrix product for all experts of a rank (Transformer Engine's), otherwise one MLP after the other.

    No auxiliary loss, no capacity, no dropped token: an expert takes whatever is routed to it, as in the model that was
    pretrained, so that trainer and rollout servers agree. A softmax over the logits of the chosen experts is the softmax over
    all, renormalised.
    """
    if spec.experts is None:
        return {}
    return {
        "num_moe_experts": spec.experts.count,
        "moe_ffn_hidden_size": spec.ffn_size,
        "moe_router_topk": spec.experts.per_token,
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


def check_parallel(spec: ModelSpec, parallel: ParallelConfig) -> None:
    """Raises ValueError where Megatron could not train this model under this layout, naming the field to change."""
    tp, ep, etp = parallel.tp, parallel.ep, parallel.etp
    spec.check_parallel(tp=tp, pp=parallel.pp, ep=ep, etp=etp)
    spec.check_training(tp=tp, ep=ep, etp=etp, sequence_parallel=parallel.sequence_parallel)


def gathers_tokens(parallel: ParallelConfig, platform: Platform) -> bool:
    """Whether the ranks that share experts gather the tokens of all, of which each must then have equally many."""
    return parallel.ep > 1 and platform.kind == "cpu"


def largest_in_group(sizes: list[int], device: torch.device) -> list[int]:
    """The largest of each micro-batch's sizes over the ranks whose tokens are gathered for one set of experts.

    Every rank of such a group calls with as many sizes.
    """
    most = torch.tensor(sizes, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=parallel_state.get_expert_tensor_and_model_parallel_group())
    return most.tolist()

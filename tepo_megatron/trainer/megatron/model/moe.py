"""Mixture-of-experts models: Megatron's options for them, checks, and the router that replaces Megatron's on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn.functional import linear

from tepo_megatron.config import EngineConfig, ParallelConfig
from tepo_megatron.trainer.megatron.platform.platform import Platform
from tepo_megatron.weights.architecture import ModelSpec


class Float32Router(TopKRouter):  # type: ignore[misc]  # Megatron's types are not followed
    """Megatron's router for machines without Transformer Engine, where Megatron's function for the logits raises NameError."""

    def gating(self, input: Tensor) -> Tensor:
        """Computes logits […, experts] from hidden states […, hidden], in fp32 whatever the weights' dtype."""
        return linear(input.float(), self.weight.float())

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Counts the tokens of each expert, as Megatron's does, which torch would compile."""
        if self.enable_expert_bias and torch.is_grad_enabled():
            real = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
            self.local_tokens_per_expert += real.sum(dim=0)


def moe_options(spec: ModelSpec, engine: EngineConfig, platform: Platform, *, grouped: bool) -> dict[str, Any]:
    """Returns the fields of Megatron's ``TransformerConfig`` that a model with experts needs.

    ``grouped``: one grouped matrix product for all experts of a rank (Transformer Engine's), otherwise one MLP after the other.
    There is no capacity and no dropped token: an expert takes all that is routed to it, as vLLM's does, so that trainer and
    rollout servers agree. An auxiliary loss is not Megatron's (``model/expert_balance.py``).
    """
    parallel, balance = engine.parallel, engine.moe_balance
    if spec.experts is None:
        # Nothing dispatches, but with its default Megatron refuses stages that exchange micro-batches of several lengths.
        return {"moe_token_dispatcher_type": "alltoall"}
    experts, biased = spec.experts, spec.experts.biased
    return {
        "num_moe_experts": experts.count,
        "moe_layer_freq": [int(spec.has_experts(layer)) for layer in range(spec.num_layers)],
        "moe_ffn_hidden_size": spec.ffn_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
        "moe_router_topk": experts.per_token,
        # A softmax over the chosen experts' logits alone is the softmax over all, renormalised to sum 1.
        "moe_router_pre_softmax": not experts.renormalize,
        "moe_router_score_function": "sigmoid" if biased else "softmax",
        "moe_router_topk_scaling_factor": experts.scale if biased else None,
        "moe_router_enable_expert_bias": biased,
        # With a rate of 0 the biases stay as the model has them.
        "moe_router_bias_update_rate": balance.update_rate if balance.kind == "expert_bias" else 0.0,
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

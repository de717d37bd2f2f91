"""Sets Megatron's options for experts, and computes the auxiliary loss that balances them.

Per layer, loss = coefficient · E · Σ_i f_i · P_i, with f_i = (tokens at expert i) / (k T) over the mini-batch's T tokens on all
ranks, and P_i the mean router probability. f_i has no gradient (docs/decisions/037-expert-balance.md).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler, TopKRouter
from torch import Tensor
from torch.nn.functional import linear

from tepo_megatron.config import EngineConfig, ParallelConfig
from tepo_megatron.trainer.megatron.platform.platform import Platform
from tepo_megatron.weights.architecture import Experts, ModelSpec


class Float32Router(TopKRouter):  # type: ignore[misc]  # Megatron's types are not followed
    """Without Transformer Engine, Megatron's function for the logits raises NameError."""

    def gating(self, input: Tensor) -> Tensor:
        """[…, hidden] → float32 […, experts]."""
        return linear(input.float(), self.weight.float())

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Megatron's version calls torch.compile."""
        if self.enable_expert_bias and torch.is_grad_enabled():
            real = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
            self.local_tokens_per_expert += real.sum(dim=0)


def moe_options(spec: ModelSpec, engine: EngineConfig, platform: Platform, *, grouped: bool) -> dict[str, Any]:
    """No token is dropped, as in vLLM.

    ``grouped``: one matrix product for all experts of a rank (Transformer Engine).
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
    """Ranks that gather each other's tokens need equally many."""
    return parallel.ep > 1 and platform.kind == "cpu"


def one_length(spec: ModelSpec, parallel: ParallelConfig, platform: Platform) -> bool:
    """Megatron's gathering dispatcher exchanges micro-batches of one length."""
    return parallel.pp > 1 and spec.experts is not None and platform.kind == "cpu"


def largest_in_group(sizes: list[int], device: torch.device) -> list[int]:
    """Every rank that gathers tokens calls, with equally many sizes."""
    most = torch.tensor(sizes, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=parallel_state.get_expert_tensor_and_model_parallel_group())
    return most.tolist()


def auxiliary_loss(logits_tE: Tensor, load_E: Tensor, real_t: Tensor, experts: Experts, coefficient: float) -> Tensor:
    """Returns float32, this rank's part. ``load_E``: the mini-batch's tokens per expert."""
    if experts.biased:
        score_tE = logits_tE.float().sigmoid()
        probability_tE = score_tE / (score_tE.sum(-1, keepdim=True) + 1e-20)
    else:
        probability_tE = logits_tE.float().softmax(-1)
    tokens = load_E.sum() / experts.per_token
    share_E = (load_E / load_E.sum()).to(probability_tE)
    return coefficient * experts.count / tokens * (probability_tE @ share_E)[real_t].sum()


def attach(probabilities: Tensor, loss: Tensor) -> Tensor:
    """The backward pass of ``probabilities`` also differentiates ``loss``, with the objective's weight."""
    attached: Tensor = MoEAuxLossAutoScaler.apply(probabilities, loss)
    return attached

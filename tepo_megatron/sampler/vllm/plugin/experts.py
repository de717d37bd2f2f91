"""Experts in vLLM on a CPU, whose weights it packs for its kernel when it first loads them, and at no later update."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform


def pack_experts_again(model: torch.nn.Module) -> None:
    """Before an update: has every layer make its kernel anew and pack the weights that come; nothing to do on a GPU.

    vLLM 0.32 packs when it makes the kernel. A layer that has one would compute with unpacked weights as if they were packed:
    without an error, unless packing pads them, since the shapes are the same.
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None

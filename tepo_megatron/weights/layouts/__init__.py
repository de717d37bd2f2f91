"""Layouts of Hugging Face tensors over the ranks of Megatron-Core and of vLLM."""

from tepo_megatron.weights.layouts.megatron import (
    MegatronParallel,
    Stages,
    check_balance,
    check_recompute,
    check_trainer_split,
    megatron_layout,
    megatron_ranks,
    pipeline_stages,
    pipeline_stages_of,
)
from tepo_megatron.weights.layouts.table import tensor_shapes
from tepo_megatron.weights.layouts.vllm import VllmParallel, check_vllm_parallel, vllm_layout, vllm_ranks

__all__ = [
    "MegatronParallel",
    "Stages",
    "VllmParallel",
    "check_balance",
    "check_recompute",
    "check_trainer_split",
    "check_vllm_parallel",
    "megatron_layout",
    "megatron_ranks",
    "pipeline_stages",
    "pipeline_stages_of",
    "tensor_shapes",
    "vllm_layout",
    "vllm_ranks",
]

"""Bytes of Adam's states: on the GPU, on the host, and made for the length of a step. Formulas: docs/reference/plan.md."""

from __future__ import annotations

from tepo_megatron.config import RunConfig
from tepo_megatron.plan.shapes import expert_tp, vocabulary_parameters
from tepo_megatron.weights.architecture import ModelSpec

MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}

PART_ELEMENTS = 2**26
"""Of how many weights at once a step makes reduced states fp32: ``trainer/megatron/optimizer/adam_states.py``."""

HOST_STATE_BYTES = 20
"""On the host, for each weight whose states are there: fp32 weight and both means 12; its gradient 4, in pinned memory, of
which torch takes powers of two, up to twice as much."""


def state_bytes(config: RunConfig) -> float:
    """Bytes on the GPU for a weight whose states a rank keeps: fp32 master, unless it is fp32 itself, and both means."""
    optimizer = config.optimizer
    master = 0 if config.model.dtype == "float32" else 2 if optimizer.store_param_remainders else 4
    moments = MOMENT_BYTES[optimizer.exp_avg_dtype] + MOMENT_BYTES[optimizer.exp_avg_sq_dtype]
    return (1 - optimizer.offload_fraction) * (master + moments)


def host_state_bytes(config: RunConfig) -> float:
    """Bytes on the host per weight whose states a rank keeps."""
    return HOST_STATE_BYTES * config.optimizer.offload_fraction


def step_copies(spec: ModelSpec, config: RunConfig, owned: float) -> float:
    """Bytes of fp32 copies that a step of Transformer Engine's Adam makes of states in fewer bits, of a part of the ``owned``
    weights at a time, or of the largest tensor."""
    optimizer, tp = config.optimizer, config.engine.parallel.tp
    reduced = sum(dtype != "float32" for dtype in (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype))
    gate_and_up = 2 * spec.hidden_size * spec.ffn_size // (expert_tp(config.engine.parallel) if spec.experts else tp)
    largest = max(PART_ELEMENTS, vocabulary_parameters(spec, tp), gate_and_up)
    return 4 * reduced * min(largest, owned)

"""Bytes on one training rank, computed from the run's configuration alone. docs/plan.md has the formulas and their sources.

Symbols: T tokens of a micro-batch on this rank, h hidden, f MLP size, q and k the widths of all query and all key heads, t
tensor-parallel size, b bytes per element, s = t under sequence parallelism and 1 without. The kind of
layers (``engine/layers.py``) decides which kernels are fused: Transformer Engine's layers keep fewer activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from tepo_megatron.bridge.architecture import ModelSpec
from tepo_megatron.config import RunConfig
from tepo_megatron.launch.plan.shapes import (
    expert_copies,
    expert_parameters,
    expert_tp,
    layer_parameters,
    stage_parameters,
    vocabulary_parameters,
)

GIB = 2**30
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
SCORE_WORKSPACE = {"cuda": 128 * 2**20, "cpu": 768 * 2**10}
"""Memory that ``vocab_parallel`` uses beside the logits, whatever their size."""

FUSED_HEAD_CHUNK = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}
"""Bytes of logits that a fused head holds at once; at least 16 tokens' (``vocab_parallel/fused_linear.py``)."""

CUDA_CONTEXT = 2 * GIB
"""CUDA's context, NCCL's channels and cuBLAS' workspaces: an assumption."""

USABLE = 0.9
"""The part of a GPU's memory that a plan may fill; the rest is for the allocator's gaps and what the plan leaves out."""

BATCH_BYTES_PER_TOKEN = 29
"""Every rank holds the step's batch: tokens and labels in 8 bytes each, mask 1, sampler's log-probs, old log-probs and old
entropy 4 each.
"""

_NORM_COPIES = {"te": 2, "local": 3}
"""Tensors that a norm keeps for its backward pass: input and output, and torch's norm also the normalised input."""

FP8_COPIES = 2
"""Extra bytes per weight of a layer that is kept in bfloat16 and computed in FP8: a copy by rows, and one by columns for
gradients.
"""


@dataclass(frozen=True)
class RankMemory:
    """Bytes at the peak of an optimizer step on a rank of one pipeline stage."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    activations: float
    logits: float
    transient: float
    """Gathered inputs, gradients of activations and of the largest weight during the backward pass of one layer or the head."""

    communication: float
    """Activations and gradients that pipeline stages exchange, and the step's batch."""

    context: float

    @property
    def total(self) -> float:
        return sum(self.terms.values())

    @property
    def terms(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def platform_of(config: RunConfig) -> str:
    """``cpu`` or ``cuda``: plans take ``auto`` for a GPU."""
    return "cpu" if config.engine.platform == "cpu" else "cuda"


def layers_of(config: RunConfig) -> str:
    """``te`` or ``local``, as ``engine/layers.py`` chooses at the start of the run."""
    return "te" if platform_of(config) == "cuda" and config.engine.layers != "local" else "local"


def micro_batch_tokens(config: RunConfig, longest: int) -> int:
    """T: tokens of a micro-batch on a rank. One sequence that is longer than the bound makes a micro-batch of its own."""
    return -(-max(config.engine.micro_batch_tokens, longest) // config.engine.parallel.cp)


def layer_activations(spec: ModelSpec, config: RunConfig) -> Mapping[str, float]:
    """Bytes per token that one layer keeps for its backward pass without recomputation, by what is kept."""
    parallel, b = config.engine.parallel, ELEMENT_BYTES[config.model.dtype]
    t, s = parallel.tp, parallel.tp if parallel.sequence_parallel else 1
    q, k = spec.num_heads * spec.head_dim / t, spec.num_kv_heads * spec.head_dim / t
    residual, mlp = spec.hidden_size / s, _chosen(spec) * spec.ffn_size / t
    recomputed, local = config.engine.recompute == "selective", layers_of(config) == "local"
    as_rows = local and not recomputed  # engine/attention_cpu.py
    return {
        "norms": b * residual * 2 * _NORM_COPIES[layers_of(config)],
        # fused qkv, and rotated q and k; as rows: q, k and v, with k and v repeated for every query head
        "attention inputs": b * 3 * q if as_rows else b * (q + 2 * k + q + k),
        "attention output": b * q * (2 if as_rows else 1),
        "log-sum-exp": 0 if recomputed else 4 * spec.num_heads / t,
        "rotation": b * 4 * spec.head_dim,
        "gate and up": b * 2 * mlp,
        "activated gate, offset up, product": b * (3 if local else 1) * mlp,  # fused: the product alone
        **_routing_activations(spec, config),
    }


def _chosen(spec: ModelSpec) -> int:
    """The number of MLPs that a token passes through in a layer."""
    return spec.experts.per_token if spec.experts else 1


def _routing_activations(spec: ModelSpec, config: RunConfig) -> Mapping[str, float]:
    """Bytes per token that a layer of experts keeps beside those of their MLPs, if all experts get equally many tokens."""
    if spec.experts is None:
        return {}
    parallel, b = config.engine.parallel, ELEMENT_BYTES[config.model.dtype]
    inputs = spec.experts.per_token * expert_tp(parallel) * spec.hidden_size
    local = layers_of(config) == "local"
    return {
        "experts' inputs": b * inputs / parallel.tp,
        # logits, probabilities of all and of the chosen, in fp32; engine/moe.py's router also its input
        "router": 4 * (3 * spec.experts.count + (spec.hidden_size if local else 0)) / parallel.tp,
        # in the experts' MLP: what is multiplied with the probability
        "weighted product": b * spec.experts.per_token * spec.ffn_size / parallel.tp if local else 0,
    }


def rank_memory(spec: ModelSpec, config: RunConfig, stage: int, *, longest: int, step_tokens: float) -> RankMemory:
    """The peak on a rank of pipeline stage ``stage``, for sequences of up to ``longest`` tokens and ``step_tokens`` a step."""
    parallel, b = config.engine.parallel, ELEMENT_BYTES[config.model.dtype]
    count, on_gpu = stage_parameters(spec, parallel, stage), platform_of(config) == "cuda"
    tokens = micro_batch_tokens(config, longest)
    micro_batches = -(-step_tokens / config.train.minibatches / parallel.dp / (tokens * parallel.cp) // 1)
    in_flight = layers_in_flight(spec, config, stage, micro_batches)
    logits, transient = _head_or_layer(spec, config, stage, tokens)
    boundary = tokens * b * spec.hidden_size / (parallel.tp if parallel.sequence_parallel else 1)
    handed_over = boundary * (min(parallel.pp - stage, micro_batches) + 1) if parallel.pp > 1 else 0
    return RankMemory(
        weights=b * count + _fp8_copies(spec, config),
        gradients=4 * count,
        # Adam's two fp32 moments, and the fp32 copy of weights that are not fp32 themselves
        optimizer=(8 if config.model.dtype == "float32" else 12) * _optimized(spec, config, count),
        reference=b * count + _fp8_copies(spec, config) if config.objective.needs_reference else 0,
        activations=_activations(spec, config, stage, tokens, in_flight, boundary),
        logits=logits,
        transient=transient,
        communication=handed_over + step_tokens * BATCH_BYTES_PER_TOKEN * (1 + 2 / config.train.minibatches),
        context=CUDA_CONTEXT if on_gpu else 0,
    )


def _optimized(spec: ModelSpec, config: RunConfig, count: int) -> float:
    """How many of a stage's ``count`` parameters a rank keeps optimizer states for.

    The distributed optimizer shares states among the copies of a parameter, and experts have fewer copies.
    """
    parallel = config.engine.parallel
    if not config.optimizer.distributed:
        return count
    experts = spec.num_layers // parallel.pp * expert_parameters(spec, parallel)
    return (count - experts) / (parallel.dp * parallel.cp) + experts / expert_copies(parallel)


def _fp8_copies(spec: ModelSpec, config: RunConfig) -> float:
    """Bytes of the FP8 copies that Transformer Engine keeps beside a stage's bfloat16 weights between micro-batches.

    0 where the weights themselves are FP8: both copies then take the two bytes that bfloat16 would.
    """
    fp8, parallel = config.engine.fp8, config.engine.parallel
    if not fp8.enabled or fp8.params:
        return 0
    return FP8_COPIES * spec.num_layers // parallel.pp * layer_parameters(spec, parallel)


def layers_in_flight(spec: ModelSpec, config: RunConfig, stage: int, micro_batches: float) -> float:
    """How many layers' activations are alive at once on a stage under (interleaved) 1F1B."""
    parallel = config.engine.parallel
    per_chunk = spec.num_layers / (parallel.pp * parallel.vpp)
    behind = parallel.pp - stage - 1
    # 1F1B: a stage runs ahead by one micro-batch for each stage behind it. Interleaved, Megatron warms up with two chunks for
    # each stage behind, and one round of all stages for every further chunk.
    chunks = behind + 1 if parallel.vpp == 1 else 2 * behind + (parallel.vpp - 1) * parallel.pp + 1
    return per_chunk * min(chunks, micro_batches * parallel.vpp)


def _activations(spec: ModelSpec, config: RunConfig, stage: int, tokens: int, in_flight: float, boundary: float) -> float:
    """Bytes of all activations that a stage keeps. ``boundary``: bytes of one tensor between layers."""
    final_norm = boundary * _NORM_COPIES[layers_of(config)] if stage == config.engine.parallel.pp - 1 else 0
    layer = tokens * sum(layer_activations(spec, config).values())
    if config.engine.recompute == "full":
        # Only each layer's input is kept; one layer at a time is computed again, and is then alive as a whole.
        return in_flight * boundary + layer + final_norm
    return in_flight * layer + final_norm


def _head_or_layer(spec: ModelSpec, config: RunConfig, stage: int, tokens: int) -> tuple[float, float]:
    """Returns (logits, transient) in bytes for the moment that needs more: the backward pass of the head, or of an MLP."""
    parallel, b = config.engine.parallel, ELEMENT_BYTES[config.model.dtype]
    hidden, mlp = spec.hidden_size, spec.ffn_size / (expert_tp(parallel) if spec.experts else parallel.tp)
    gathered = b * tokens * hidden
    passing = tokens * _chosen(spec) * expert_tp(parallel) / parallel.tp  # tokens in the MLPs of this rank, if evenly routed
    # the input's gradient; gradients of gate, up and their product; the gradient of the fused gate-and-up weight before it is
    # added to the fp32 buffer
    layer = b * passing * hidden + b * passing * 3 * mlp + b * hidden * 2 * mlp
    if stage < parallel.pp - 1:
        return 0, layer
    head = vocabulary_parameters(spec, parallel.tp)
    if config.engine.head == "fused":
        logits, at_head = _fused_head(config, tokens, b * head / hidden, gathered, b * head)
    else:
        logits = b * tokens * head / hidden
        # under sequence parallelism the gathered input and its gradient exist at once; then the gradient of the head's weight
        at_head = gathered * (2 if parallel.sequence_parallel else 1) + b * head
    logits += SCORE_WORKSPACE[platform_of(config)]
    return (logits, at_head) if logits + at_head > layer else (0, layer)


def _fused_head(config: RunConfig, tokens: int, row: float, gathered: float, weight: float) -> tuple[float, float]:
    """Returns (logits, transient) in bytes of a fused head. ``row``: of a token's logits; ``gathered``: of all its inputs."""
    kind = platform_of(config)
    chunk = min(tokens, max(16, FUSED_HEAD_CHUNK[kind] // row)) * row
    # the scored tokens' inputs and their gradients; what stands for the weight's gradient is memory that a CPU never touches
    return chunk, 2 * gathered + (weight if kind == "cuda" else 0)

"""Bytes on a training rank's GPU and host (docs/reference/plan.md). T tokens of a micro-batch on this rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

from tepo_megatron.config import RunConfig
from tepo_megatron.plan.shapes import (
    AdapterCount,
    expert_copies,
    expert_parameters,
    expert_tp,
    stage_adapters,
    stage_expert_layers,
    stage_layer_parameters,
    stage_layers,
    stage_parameters,
    vocabulary_parameters,
)
from tepo_megatron.weights.architecture import ModelSpec

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}

NORM_COPIES = {"te": 2, "local": 3}  # input and output, with torch also the normalised input

# a rank's tokens in FP8 layers must be a multiple of this
FP8_TOKENS = {"none": 1, "delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}


def platform_of(config: RunConfig) -> str:
    # ``auto`` counts as a GPU
    return "cpu" if config.engine.platform == "cpu" else "cuda"


def layers_of(config: RunConfig) -> str:
    return "te" if platform_of(config) == "cuda" and config.engine.layers != "local" else "local"


def _chosen_mlps(spec: ModelSpec) -> int:
    return spec.experts.per_token if spec.experts else 1


def passed_width(spec: ModelSpec) -> int:
    return _chosen_mlps(spec) * spec.ffn_size + (spec.experts.shared_ffn_size if spec.experts else 0)


def layer_activations(spec: ModelSpec, config: RunConfig) -> Mapping[str, float]:
    """Bytes per token; recomputed modules keep their inputs."""
    return _activations_without(spec, config, config.engine.recomputed)


def _recomputed_activations(spec: ModelSpec, config: RunConfig) -> float:
    """Bytes per token, alive for one layer at a time."""
    return sum(_activations_without(spec, config, ()).values()) - sum(layer_activations(spec, config).values())


def _activations_without(spec: ModelSpec, config: RunConfig, again: Collection[str]) -> Mapping[str, float]:
    parallel, b = config.engine.parallel, ELEMENT_BYTES[config.model.dtype]
    t, s = parallel.tp, parallel.tp if parallel.sequence_parallel else 1
    q, k = spec.num_heads * spec.head_dim / t, spec.num_kv_heads * spec.head_dim / t
    residual, mlp = spec.hidden_size / s, passed_width(spec) / t
    local = layers_of(config) == "local"
    attention_again, mlp_again = "core_attn" in again, "mlp" in again or "moe" in again
    as_rows = local and not attention_again  # trainer/megatron/model/attention_cpu.py
    # Transformer Engine has the norm of a dense MLP within it, and discards the output of the norm before experts.
    norm_again = "layernorm" in again or (not local and "mlp" in again)
    return {
        "norms": b * residual * (2 * NORM_COPIES[layers_of(config)] - norm_again),
        # fused qkv, and rotated q and k; as rows: q, k and v, with k and v repeated for every query head, and those of all
        # context-parallel ranks
        "attention inputs": b * q * (1 + 2 * parallel.cp) if as_rows else b * (q + 2 * k + q + k),
        "attention output": b * q * (2 if as_rows else 1),
        "log-sum-exp": 0 if attention_again else 4 * spec.num_heads / t,
        "rotation": b * 4 * spec.head_dim,
        "gate and up": 0 if mlp_again else b * 2 * mlp,
        # fused: the product alone
        "activated gate, offset up, product": 0 if mlp_again or "moe_act" in again else b * (3 if local else 1) * mlp,
        **({} if "moe" in again else _routing(spec, config)),
    }


def _routing(spec: ModelSpec, config: RunConfig) -> Mapping[str, float]:
    # as if all experts got equally many tokens
    if spec.experts is None:
        return {}
    parallel, b = config.engine.parallel, ELEMENT_BYTES[config.model.dtype]
    inputs = spec.experts.per_token * expert_tp(parallel) * spec.hidden_size
    local = layers_of(config) == "local"
    return {
        "experts' inputs": b * inputs / parallel.tp,
        # logits, probabilities of all and of the chosen, in fp32; trainer/megatron/model/routers.py's router also its input
        "router": 4 * (3 * spec.experts.count + (spec.hidden_size if local else 0)) / parallel.tp,
        # in the experts' MLP: the factor of the probability
        "weighted product": b * spec.experts.per_token * spec.ffn_size / parallel.tp if local else 0,
    }


def token_multiple(config: RunConfig) -> int:
    """Applies to the tokens of all context-parallel ranks together."""
    parallel = config.engine.parallel
    share = (parallel.tp if parallel.sequence_parallel else 1) * FP8_TOKENS[config.engine.fp8.recipe]
    return parallel.cp * math.lcm(2, share) if parallel.cp > 1 else share


def _padded_tokens(config: RunConfig, tokens: int) -> int:
    multiple = token_multiple(config)
    return -(-tokens // multiple) * multiple


def padding_share(config: RunConfig, mean_length: float) -> float:
    # half a multiple per micro-batch, and cp tokens per sequence if cp > 1
    parallel = config.engine.parallel
    of_sequences = (2 * parallel.cp - 1) / 2 / mean_length if parallel.cp > 1 else 0.0
    tokens = max(config.engine.micro_batch_tokens, mean_length)
    return of_sequences + (token_multiple(config) - 1) / 2 / tokens


GIB = 2**30
SCORE_WORKSPACE = {"cuda": 128 * 2**20, "cpu": 768 * 2**10}

FUSED_HEAD_CHUNK = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}  # bytes of fp32 logits and their gradient; at least 16 tokens

CUDA_CONTEXT = 1.5 * GIB  # with workspaces of cuBLAS, cuDNN and Transformer Engine: an assumption

COMMUNICATOR = 0.35 * GIB  # NCCL's buffers per group: an assumption

VLLM_ASLEEP = 3 * GIB  # an assumption; vLLM's own test allows up to 7 GiB

USABLE = 0.9  # the allocator's gaps need the rest

BATCH_BYTES_PER_TOKEN = 29  # tokens and labels 8 each, mask 1; three log-probs or entropies 4 each

FP8_COPIES = 2  # by rows and by columns


MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}

PART_ELEMENTS = 2**26  # weights per part in ``trainer/megatron/policy.py``

HOST_STATE_BYTES = 20  # fp32 weight and moments 12, pinned gradient 4, which torch rounds up to a power of two

PROCESS = 6 * GIB  # an assumption


@dataclass(frozen=True)
class RankMemory:
    """Bytes at the peak of an optimizer step, on a rank of one pipeline stage."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    activations: float
    logits: float
    transient: float  # of one layer's or the head's backward pass, or Adam's fp32 copies if they are more
    communication: float
    context: float
    server: float

    @property
    def total(self) -> float:
        return sum(self.terms.values())

    @property
    def terms(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def micro_batch_tokens(config: RunConfig, longest: int) -> int:
    # a sequence longer than the bound is a micro-batch of its own
    return -(-_padded_tokens(config, max(config.engine.micro_batch_tokens, longest)) // config.engine.parallel.cp)


def rank_memory(spec: ModelSpec, config: RunConfig, stage: int, *, longest: int, step_tokens: float) -> RankMemory:
    """``longest``: tokens of the longest sequence."""
    parallel, b = config.engine.parallel, ELEMENT_BYTES[config.model.dtype]
    count, trained, adapters = stage_parameters(spec, parallel, stage), _trained(spec, config, stage), 0
    if config.model.lora is not None:
        adapters = trained.total
    tokens = micro_batch_tokens(config, longest)
    micro_batches = -(-step_tokens / config.train.minibatches / parallel.dp / (tokens * parallel.cp) // 1)
    in_flight = layers_in_flight(spec, config, stage, micro_batches)
    logits, transient = _head_or_layer(spec, config, stage, tokens)
    owned = owned_weights(spec, config, stage)
    boundary = tokens * b * spec.hidden_size / (parallel.tp if parallel.sequence_parallel else 1)
    handed_over = boundary * (min(parallel.pp - stage, micro_batches) + 1) if parallel.pp > 1 else 0
    activations = _activations(spec, config, stage, tokens, in_flight, boundary)
    if (copies := step_copies(spec, config, owned)) > activations + logits + transient:
        activations, logits, transient = 0, 0, copies
    return RankMemory(
        weights=b * (count + adapters) + _fp8_copies(spec, config, stage),
        gradients=4 * trained.total,
        optimizer=state_bytes(config) * owned,
        # with LoRA the reference is the model itself, without its adapters
        reference=b * count + _fp8_copies(spec, config, stage) if config.objective.needs_reference and not adapters else 0,
        activations=activations,
        logits=logits,
        transient=transient,
        communication=handed_over + step_tokens * BATCH_BYTES_PER_TOKEN * (1 + 2 / config.train.minibatches),
        context=CUDA_CONTEXT + len(_communicators(spec, config)) * COMMUNICATOR if platform_of(config) == "cuda" else 0,
        server=VLLM_ASLEEP if config.rollout.server.placement == "colocated" and config.rollout.replay is None else 0,
    )


def _communicators(spec: ModelSpec, config: RunConfig) -> list[str]:
    """Groups of more than one rank, at the end of the pipeline."""
    parallel = config.engine.parallel
    copies = parallel.cp * parallel.dp
    sizes = {
        "all ranks": parallel.world_size,
        "tensor-parallel": parallel.tp,
        "pipeline": parallel.pp,
        "context-parallel": parallel.cp,
        "data-parallel": parallel.dp if parallel.cp > 1 else 1,
        "copies of the weights": copies,
        "ranks of one copy": parallel.tp * parallel.pp,
        "optimizer's ranks": parallel.world_size if config.optimizer.distributed else 1,
        "tied embeddings": parallel.pp if spec.tied_embeddings else 1,
        "expert-parallel": parallel.ep,
        "expert-tensor-parallel": expert_tp(parallel) if spec.experts else 1,
        "ranks that share experts": parallel.ep * expert_tp(parallel) if parallel.ep > 1 else 1,
        "copies of the experts": expert_copies(parallel) if spec.experts else 1,
        "trainer and servers": 2 if config.rollout.replay is None and config.rollout.server.placement != "colocated" else 1,
    }
    return [name for name, size in sizes.items() if size > 1]


def _trained(spec: ModelSpec, config: RunConfig, stage: int) -> AdapterCount:
    parallel = config.engine.parallel
    sparse = stage_expert_layers(spec, parallel)[stage]
    if config.model.lora is not None:
        dense = stage_layers(spec, parallel)[stage] - sparse
        return stage_adapters(spec, config.model.lora, parallel, dense=dense, sparse=sparse)
    experts = sparse * expert_parameters(spec, parallel)
    return AdapterCount(stage_parameters(spec, parallel, stage) - experts, experts)


def owned_weights(spec: ModelSpec, config: RunConfig, stage: int) -> float:
    """Counts trained parameters with optimizer states on a rank."""
    parallel, trained = config.engine.parallel, _trained(spec, config, stage)
    if not config.optimizer.distributed:
        return trained.total
    return trained.dense / (parallel.dp * parallel.cp) + trained.experts / expert_copies(parallel)


def _fp8_copies(spec: ModelSpec, config: RunConfig, stage: int) -> float:
    # FP8 weights use the two bytes of bfloat16
    fp8, parallel = config.engine.fp8, config.engine.parallel
    if not fp8.enabled or fp8.params:
        return 0
    return FP8_COPIES * stage_layer_parameters(spec, parallel, stage)


def layers_in_flight(spec: ModelSpec, config: RunConfig, stage: int, micro_batches: float) -> float:
    """Counts layers with live activations under (interleaved) 1F1B."""
    parallel = config.engine.parallel
    per_chunk = stage_layers(spec, parallel)[stage] / parallel.vpp
    behind = parallel.pp - stage - 1
    # 1F1B: a stage runs ahead by one micro-batch for each stage behind it. Interleaved, Megatron warms up with two chunks for
    # each stage behind, and one round of all stages for every further chunk.
    chunks = behind + 1 if parallel.vpp == 1 else 2 * behind + (parallel.vpp - 1) * parallel.pp + 1
    return per_chunk * min(chunks, micro_batches * parallel.vpp)


def _activations(spec: ModelSpec, config: RunConfig, stage: int, tokens: int, in_flight: float, boundary: float) -> float:
    final_norm = boundary * NORM_COPIES[layers_of(config)] if stage == config.engine.parallel.pp - 1 else 0
    layer = tokens * sum(layer_activations(spec, config).values())
    if config.engine.recompute == "full":
        # Only each layer's input is kept; one layer at a time is computed again, and is then alive as a whole.
        return in_flight * boundary + layer + final_norm
    return in_flight * layer + tokens * _recomputed_activations(spec, config) + final_norm


def _head_or_layer(spec: ModelSpec, config: RunConfig, stage: int, tokens: int) -> tuple[float, float]:
    """Returns (logits, transient) in bytes for the head, or an MLP if that needs more."""
    parallel, b = config.engine.parallel, ELEMENT_BYTES[config.model.dtype]
    hidden, mlp = spec.hidden_size, spec.ffn_size / (expert_tp(parallel) if spec.experts else parallel.tp)
    gathered = b * tokens * hidden
    passing = tokens * _chosen_mlps(spec) * expert_tp(parallel) / parallel.tp  # in this rank's MLPs, if evenly routed
    # the input's gradient; gradients of gate, up and their product; the gradient of the fused gate-and-up weight before it is
    # added to the fp32 buffer
    lora = config.model.lora is not None
    # with LoRA also the merged weight, which is not kept from the forward pass
    layer = b * passing * hidden + b * passing * 3 * mlp + b * hidden * 2 * mlp * (2 if lora else 1)
    if stage < parallel.pp - 1:
        return 0, layer
    head = vocabulary_parameters(spec, parallel.tp)
    if config.engine.head == "fused":
        logits, at_head = _fused_head(config, tokens, b * head / hidden, gathered, 0 if lora else b * head)
    else:
        logits = b * tokens * head / hidden
        # under sequence parallelism the gathered input and its gradient exist at once; then the gradient of the head's weight
        at_head = gathered * (2 if parallel.sequence_parallel else 1) + (0 if lora else b * head)
    logits += SCORE_WORKSPACE[platform_of(config)]
    return (logits, at_head) if logits + at_head > layer else (0, layer)


def _fused_head(config: RunConfig, tokens: int, row: float, gathered: float, weight: float) -> tuple[float, float]:
    """``row``: bytes of a token's logits; ``gathered``: bytes of all inputs."""
    kind = platform_of(config)
    row = row if config.model.dtype == "float32" else 3 * row  # logits in fp32, their gradient in bf16
    chunk = min(tokens, max(16, FUSED_HEAD_CHUNK[kind] // row)) * row
    # the scored tokens' inputs and their gradients; the weight's gradient has a placeholder that a CPU never touches
    return chunk, 2 * gathered + (weight if kind == "cuda" else 0)


def state_bytes(config: RunConfig) -> float:
    """Per owned weight, on the GPU."""
    optimizer = config.optimizer
    master = 0 if config.model.dtype == "float32" else 2 if optimizer.store_param_remainders else 4
    moments = MOMENT_BYTES[optimizer.exp_avg_dtype] + MOMENT_BYTES[optimizer.exp_avg_sq_dtype]
    return (1 - optimizer.offload_fraction) * (master + moments)


def host_state_bytes(config: RunConfig) -> float:
    """Per owned weight."""
    return HOST_STATE_BYTES * config.optimizer.offload_fraction


def step_copies(spec: ModelSpec, config: RunConfig, owned: float) -> float:
    # Transformer Engine's Adam makes fp32 copies of reduced states
    optimizer, tp = config.optimizer, config.engine.parallel.tp
    reduced = sum(dtype != "float32" for dtype in (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype))
    gate_and_up = 2 * spec.hidden_size * spec.ffn_size // (expert_tp(config.engine.parallel) if spec.experts else tp)
    largest = max(PART_ELEMENTS, vocabulary_parameters(spec, tp), gate_and_up)
    return 4 * reduced * min(largest, owned)


@dataclass(frozen=True)
class HostMemory:
    process: float
    states: float
    turns: float  # what leaves the GPU for colocated servers
    staged: float
    routes: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def host_memory(spec: ModelSpec, config: RunConfig, memory: RankMemory, owned: float, *, step_tokens: float) -> HostMemory:
    """``owned``: number of weights with states."""
    shares = config.rollout.server.placement == "colocated" and config.rollout.replay is None
    return HostMemory(
        process=PROCESS,
        states=host_state_bytes(config) * owned,
        turns=memory.weights + memory.optimizer + memory.reference if shares else 0,
        staged=12 * owned if config.train.async_save else 0,
        routes=2 * _step_routes(spec, config, step_tokens),
    )


def _step_routes(spec: ModelSpec, config: RunConfig, step_tokens: float) -> float:
    return step_tokens * spec.route_bytes if config.rollout.server.routing_replay else 0


def root_routes(spec: ModelSpec, config: RunConfig, step_tokens: float) -> float:
    """Rank 0 also holds routes of rollouts, and of steps sampled ahead."""
    ahead = config.train.max_staleness + 1 if config.train.schedule == "overlap" else 0
    return (1 + ahead) * _step_routes(spec, config, step_tokens)


def check_host(config: RunConfig, needed: list[float], root: float = 0) -> str | None:
    """``needed``: bytes of a rank, by stage. Returns a sentence if a node's memory is too small."""
    cluster = config.cluster
    ranks = min(config.engine.parallel.world_size, cluster.gpus_per_node)
    most, room = ranks * max(needed) + root, cluster.host_memory_gib * GIB
    if most <= room:
        return None
    replay = ", set rollout.server.routing_replay = false" if root else ""
    return (
        f"{ranks} training ranks on a node need {most / GIB:.0f} GiB of its host's memory, more than cluster.host_memory_gib = "
        f"{cluster.host_memory_gib:g}; set train.async_save = false, lower optimizer.offload_fraction{replay}, or train on "
        "more nodes"
    )

"""Estimates of one step: FLOPs, seconds, a vLLM worker's memory, and the traffic of a weight sync."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tepo_megatron.config import RunConfig
from tepo_megatron.plan.memory import (
    ELEMENT_BYTES,
    GIB,
    RankMemory,
    layers_of,
    owned_weights,
    padding_share,
    passed_width,
    platform_of,
    state_bytes,
)
from tepo_megatron.plan.shapes import (
    active_parameters,
    expert_copies,
    expert_parameters,
    linear_parameters,
    model_adapters,
    model_parameters,
    resolve_spec,
    stage_expert_layers,
    stage_layers,
    stage_parameters,
)
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel, pipeline_stages_of
from tepo_megatron.weights.reshard import reshard_plan

VLLM_WORKSPACE = 3 * GIB  # largest prefill and CUDA graphs of a worker: an assumption


@dataclass(frozen=True)
class ServerMemory:
    """Bytes on one worker. ``capacity`` in tokens, ``concurrency_…`` in sequences."""

    weights: float
    draft: float  # 0 without a draft model, or if its shape is unknown
    workspace: float
    kv_cache: float
    kv_bytes_per_token: float
    capacity: float
    concurrency_longest: float
    concurrency_mean: float  # at most ``max_num_seqs`` and a server's share of a step


@dataclass(frozen=True)
class SyncTraffic:
    """``…_most``: of the busiest rank or worker."""

    moves: int
    bytes_total: int
    bytes_sent_most: int
    bytes_received_most: int
    seconds: float  # lower bound: the most loaded link


def _server_bytes(config: RunConfig) -> int:
    return ELEMENT_BYTES[config.rollout.server.served_dtype(config.model.dtype)]


def _server_weights(spec: ModelSpec, config: RunConfig) -> float:
    # scales of quantised layers are negligible
    b = _server_bytes(config)
    quantised = linear_parameters(spec) if config.rollout.server.quantization != "none" else 0
    return b * model_parameters(spec) - (b - 1) * quantised


def draft_spec(config: RunConfig) -> tuple[ModelSpec | None, str | None]:
    """Returns the shape, or why it is unknown. vLLM supports models that the trainer does not."""
    speculative = config.rollout.server.speculative
    if speculative is None or speculative.draft_model is None:
        return None, None
    try:
        return resolve_spec(str(speculative.draft_model), "rollout.server.speculative.draft_model")[0], None
    except ValueError as error:
        return None, f"the draft model's memory is not counted: {error}"


def _kv_bytes_per_token(spec: ModelSpec, tp: int, element: int) -> float:
    # several workers may hold the same head
    return 2 * spec.num_layers * max(1.0, spec.num_kv_heads / tp) * spec.head_dim * element


def server_memory(spec: ModelSpec, config: RunConfig, *, longest: int, mean: float) -> ServerMemory:
    """``longest`` and ``mean``: tokens of prompt and response."""
    server, b = config.rollout.server, _server_bytes(config)
    weights = _server_weights(spec, config) / server.tp
    per_token = _kv_bytes_per_token(spec, server.tp, b)
    guesser, _ = draft_spec(config)
    draft = 0.0
    if guesser is not None:  # it has the server's tensor parallelism, and its own keys and values besides the policy's
        draft = b * model_parameters(guesser) / server.tp
        per_token += _kv_bytes_per_token(guesser, server.tp, b)
    if platform_of(config) == "cuda":
        workspace: float = VLLM_WORKSPACE
        kv_cache = server.gpu_memory_utilization * config.cluster.gpu_memory_gib * GIB - weights - draft - workspace
    else:
        workspace, kv_cache = 0.0, float(server.cpu_kv_cache_gib * GIB)
    capacity = max(0.0, kv_cache / per_token)
    share = config.rollout.prompts_per_step * config.rollout.samples_per_prompt / server.count
    return ServerMemory(
        weights=weights,
        draft=draft,
        workspace=workspace,
        kv_cache=kv_cache,
        kv_bytes_per_token=per_token,
        capacity=capacity,
        concurrency_longest=capacity // longest,
        concurrency_mean=min(capacity / mean, server.max_num_seqs, share),
    )


def check_turns(config: RunConfig, context: float) -> str | None:
    """Returns a sentence if an awake server does not fit next to ``context`` bytes."""
    server, memory = config.rollout.server, config.cluster.gpu_memory_gib * GIB
    if server.gpu_memory_utilization * memory + context <= memory:
        return None
    most = int(100 * (1 - context / memory)) / 100
    return (
        f"a colocated server takes rollout.server.gpu_memory_utilization = {server.gpu_memory_utilization:g} of a GPU, and the "
        f"trainer keeps {context / GIB:.1f} GiB of its {memory / GIB:g} for CUDA and NCCL; lower it to {most:g}"
    )


def check_server(config: RunConfig, memory: ServerMemory, longest: int) -> str | None:
    if memory.capacity >= longest:
        return None
    server = config.rollout.server
    missing = longest * memory.kv_bytes_per_token - memory.kv_cache
    return (
        f"a vLLM worker with rollout.server.tp = {server.tp} has {memory.kv_cache / GIB:.1f} GiB for its KV cache "
        f"after {(memory.weights + memory.draft) / GIB:.1f} GiB of weights, which is {missing / GIB:.1f} GiB too little for "
        f"one sequence of {longest} tokens; raise rollout.server.tp to {2 * server.tp}, or rollout.server."
        "gpu_memory_utilization"
    )


def weight_sync(spec: ModelSpec, config: RunConfig) -> SyncTraffic:
    """Takes seconds for 70B. Raises ValueError if vLLM cannot split the model."""
    cluster, parallel, server = config.cluster, config.engine.parallel, config.rollout.server
    stages = pipeline_stages_of(spec, parallel)
    replicas, is_te = parallel.dp * parallel.cp, layers_of(config) == "te"
    trainer = MegatronParallel(parallel.tp, parallel.pp, replicas, stages, is_te, parallel.ep, parallel.etp)
    plan = reshard_plan(spec, trainer, VllmParallel(tp=server.tp, replicas=server.count))
    sent, received = Counter[int](), Counter[int]()
    for (source, destination), size in plan.bytes_between(_server_bytes(config)).items():
        sent[source] += size
        received[destination] += size
    most_sent, most_received = max(sent.values()), max(received.values())
    link = cluster.network_gb_per_s if cluster.rollout_nodes else cluster.nvlink_gb_per_s
    seconds = max(most_sent, most_received) / (link * 1e9 * cluster.link_efficiency)
    return SyncTraffic(len(plan.moves), sent.total(), most_sent, most_received, seconds)


PACK_SECONDS_PER_TOKEN = 0.02e-6  # all ranks wait for rank 0; one CPU core took half of this

DECODE_SECONDS_PER_TOKEN = 3e-6  # measured; servers continue meanwhile

DIGEST_SECONDS_PER_BYTE = 1e-9  # SHA-256 on one core, measured

ADAM_BANDWIDTH = 0.7  # share of a GPU's memory bandwidth: an assumption


@dataclass(frozen=True)
class Lengths:
    """Tokens; ``longest``: of prompt and response together."""

    prompt: float
    response: float
    longest: int
    longest_response: int

    @property
    def mean(self) -> float:
        return self.prompt + self.response


@dataclass(frozen=True)
class StepTime:
    """FLOPs over all GPUs, and seconds of consecutive phases."""

    sequences: int
    tokens: float
    response_tokens: float
    flops_generation: float
    flops_score: float
    flops_train: float
    bubble: float  # idle over busy time in an update
    imbalance: float  # additional work of the busiest stage over the mean
    padding: float
    generation: float
    score: float
    train: float
    exposed: float  # part of ``score`` and ``train`` in which ranks wait
    exchange: float  # exposed transfer between data-parallel ranks
    adam: float  # with states on the host also transfers and the cores' work
    turns: float
    sync: float
    root: float
    save: float
    mfu: float  # without recomputation, while the pipeline is full

    @property
    def seconds(self) -> float:
        first = self.generation + self.score + self.train + self.exchange + self.adam
        return first + self.turns + self.sync + self.root + self.save


def step_time(
    spec: ModelSpec,
    config: RunConfig,
    lengths: Lengths,
    server: ServerMemory,
    sync: SyncTraffic | None,
    stages: Sequence[RankMemory],
) -> StepTime:
    """Counts 3 forward passes plus recomputation in training, 1 in scoring (2 with a reference), 1 in generation."""
    cluster, parallel, rollout = config.cluster, config.engine.parallel, config.rollout
    sequences = rollout.prompts_per_step * rollout.samples_per_prompt
    tokens, responses = sequences * lengths.mean, sequences * lengths.response
    token = forward_flops(spec, lengths.mean)
    training = 3 * token + _recomputed_flops(spec, config, lengths.mean)
    scores = 2 if config.objective.needs_reference else 1
    peak = cluster.gpu_tflops * 1e12 * parallel.world_size
    imbalance = _stage_imbalance(spec, config)
    bubble, score_bubble = _bubble(config, tokens / config.train.minibatches), _bubble(config, tokens)
    waits_train, waits_score = _exposed_seconds(spec, config, tokens)
    waits_score *= scores
    prefill = rollout.prompts_per_step * lengths.prompt * token
    padding = padding_share(config, lengths.mean)
    score = (scores * token * tokens / (peak * cluster.score_mfu) * (1 + imbalance) + waits_score) * (1 + padding)
    train = (training * tokens / (peak * cluster.train_mfu) * (1 + imbalance) + waits_train) * (1 + padding)
    return StepTime(
        sequences=sequences,
        tokens=tokens,
        response_tokens=responses,
        flops_generation=prefill + responses * token,
        flops_score=scores * token * tokens,
        flops_train=training * tokens,
        bubble=bubble,
        imbalance=imbalance,
        padding=padding,
        generation=_generation(config, lengths, server, prefill, responses * token),
        score=score * (1 + score_bubble),
        train=train * (1 + bubble),
        exposed=(waits_score * (1 + score_bubble) + waits_train * (1 + bubble)) * (1 + padding),
        exchange=_exchange(spec, config, train / config.train.minibatches / _micro_batches(config, tokens)),
        adam=config.train.minibatches * max(_adam(spec, config, stage) for stage in range(parallel.pp)),
        turns=max(_turns(config, memory) for memory in stages),
        sync=sync.seconds if sync else 0.0,
        root=responses * PACK_SECONDS_PER_TOKEN,
        save=_save(spec, config),
        mfu=3 * token * tokens / (peak * train),
    )


def _stage_imbalance(spec: ModelSpec, config: RunConfig) -> float:
    layers = stage_layers(spec, config.engine.parallel)
    head = spec.vocab_size * spec.hidden_size
    layer = (active_parameters(spec) - head * (1 if spec.tied_embeddings else 2)) / spec.num_layers
    work = [count * layer for count in layers]
    work[-1] += head
    return max(work) * len(work) / sum(work) - 1


def _exposed_seconds(spec: ModelSpec, config: RunConfig, tokens: float) -> tuple[float, float]:
    """Activations move 4 times forward, 6 times backward per layer; 2 of these are hidden."""
    parallel, cluster = config.engine.parallel, config.cluster
    share = tokens / (parallel.dp * parallel.cp)  # that a rank sees
    activations = ELEMENT_BYTES[config.model.dtype] * spec.hidden_size * share
    within = cluster.nvlink_gb_per_s * 1e9 * cluster.link_efficiency
    across = (cluster.network_gb_per_s if cluster.train_nodes > 1 else cluster.nvlink_gb_per_s) * 1e9 * cluster.link_efficiency
    once = activations * (1 - 1 / parallel.tp) / within * max(stage_layers(spec, parallel))
    handed_on = 0.0
    if parallel.pp > 1 and parallel.vpp == 1:
        handed_on = activations / (parallel.tp if parallel.sequence_parallel else 1) / across
    return 8 * once + 2 * handed_on, 4 * once + handed_on


def _micro_batches(config: RunConfig, tokens: float) -> float:
    per_rank = tokens / config.train.minibatches / config.engine.parallel.dp
    return max(1.0, per_rank / config.engine.micro_batch_tokens)


def _bubble(config: RunConfig, tokens: float) -> float:
    parallel = config.engine.parallel
    micro_batches = max(1.0, tokens / (parallel.dp * config.engine.micro_batch_tokens))
    return (parallel.pp - 1) / (micro_batches * parallel.vpp)


def _adam(spec: ModelSpec, config: RunConfig, stage: int) -> float:
    cluster, optimizer = config.cluster, config.optimizer
    owned, b = owned_weights(spec, config, stage), ELEMENT_BYTES[config.model.dtype]
    # a gradient is read, states are read and written, a weight is written
    bytes_per_weight = (1 - optimizer.offload_fraction) * (4 + b) + 2 * state_bytes(config)
    on_gpu = owned * bytes_per_weight / (cluster.gpu_memory_gb_per_s * 1e9 * ADAM_BANDWIDTH)
    offloaded = owned * optimizer.offload_fraction
    transfer = (4 + 4) * offloaded / (cluster.pcie_gb_per_s * 1e9 * cluster.link_efficiency)
    return on_gpu + transfer + offloaded / cluster.host_adam_per_s


def _turns(config: RunConfig, memory: RankMemory) -> float:
    if config.rollout.server.placement != "colocated" or config.rollout.replay is not None:
        return 0.0
    bytes_moved = 2 * (memory.weights + memory.optimizer + memory.reference)
    return bytes_moved / (config.cluster.pcie_gb_per_s * 1e9 * config.cluster.link_efficiency)


def _save(spec: ModelSpec, config: RunConfig) -> float:
    # an asynchronous save only copies to the host
    every, cluster = config.train.save_every, config.cluster
    if not every:
        return 0.0
    rank_bytes = checkpoint_bytes_of_a_rank(spec, config)
    if config.train.async_save:
        return rank_bytes / (cluster.pcie_gb_per_s * 1e9 * cluster.link_efficiency) / every
    return (checkpoint_bytes(spec, config) / (cluster.storage_gb_per_s * 1e9) + rank_bytes * DIGEST_SECONDS_PER_BYTE) / every


def checkpoint_bytes_of_a_rank(spec: ModelSpec, config: RunConfig) -> float:
    return 12 * max(owned_weights(spec, config, stage) for stage in range(config.engine.parallel.pp))


def checkpoint_bytes(spec: ModelSpec, config: RunConfig) -> int:
    lora = config.model.lora
    return 12 * (model_parameters(spec) if lora is None else model_adapters(spec, lora))


def _generation(config: RunConfig, lengths: Lengths, server: ServerMemory, prefill: float, decode: float) -> float:
    """A wave reads weights once per position of its longest response, keys and values once per token."""
    cluster, rollout = config.cluster, config.rollout
    if rollout.replay is not None:
        return 0.0
    if server.concurrency_mean == 0:
        return float("inf")
    gpus = rollout.server.count * rollout.server.tp
    rate = gpus * cluster.gpu_tflops * 1e12 * cluster.score_mfu
    per_server = rollout.prompts_per_step * rollout.samples_per_prompt / rollout.server.count
    waves = per_server / server.concurrency_mean
    read = waves * lengths.longest_response * server.weights
    read += per_server * lengths.response * (lengths.prompt + lengths.response / 2) * server.kv_bytes_per_token
    bandwidth = cluster.gpu_memory_gb_per_s * 1e9 * cluster.decode_bandwidth
    answers = rollout.prompts_per_step * rollout.samples_per_prompt * lengths.response * DECODE_SECONDS_PER_TOKEN
    return max(prefill / rate + max(read / bandwidth, decode / rate), answers)


def _exchange(spec: ModelSpec, config: RunConfig, micro_batch: float) -> float:
    """``micro_batch``: seconds of a forward and backward pass."""
    parallel, cluster, engine = config.engine.parallel, config.cluster, config.engine
    copies, minibatches = parallel.dp * parallel.cp, config.train.minibatches
    experts = max(stage_expert_layers(spec, parallel)) * expert_parameters(spec, parallel)
    dense = max(stage_parameters(spec, parallel, stage) for stage in range(parallel.pp)) - experts
    sent = dense * (1 - 1 / copies) + experts * (1 - 1 / expert_copies(parallel))
    link = (cluster.network_gb_per_s if cluster.train_nodes > 1 else cluster.nvlink_gb_per_s) * 1e9 * cluster.link_efficiency
    # distributed optimizer: reduce-scatter of fp32 gradients, all-gather of weights; otherwise an all-reduce, which is both
    distributed = config.optimizer.distributed
    reduce = (4 if distributed else 8) * sent / link
    gather = (ELEMENT_BYTES[config.model.dtype] if distributed else 0) * sent / link
    exposed = minibatches * max(0.0, reduce - 2 / 3 * micro_batch if engine.overlap_grad_reduce else reduce)
    between = max(0.0, gather - 1 / 3 * micro_batch if engine.overlap_param_gather else gather)
    return exposed + (minibatches - 1) * between + gather


def forward_flops(spec: ModelSpec, mean_length: float) -> float:
    """2 per weight that a token meets, and causal attention."""
    matrices = active_parameters(spec) - (0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size)
    # Attention: 2 FLOPs × 2 products (scores, values) × half of the sequence on average, since it is causal.
    return 2 * matrices + 2 * spec.num_layers * spec.num_heads * spec.head_dim * mean_length


def _recomputed_flops(spec: ModelSpec, config: RunConfig, mean_length: float) -> float:
    again, head = set(config.engine.recomputed), 2 * spec.vocab_size * spec.hidden_size
    fused_head = head if config.engine.head == "fused" else 0
    if config.engine.recompute == "full":
        return forward_flops(spec, mean_length) - head + fused_head
    attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * mean_length if "core_attn" in again else 0
    mlp = 2 * spec.num_layers * 3 * spec.hidden_size * passed_width(spec) if again & {"mlp", "moe"} else 0
    return attention + mlp + fused_head


@dataclass(frozen=True)
class ScheduleTime:
    """``idle_…``: shares of the time."""

    schedule: str
    seconds: float
    idle_trainer: float
    idle_servers: float


def schedule_times(step: StepTime, *, is_colocated: bool) -> list[ScheduleTime]:
    """Ignores ``train.max_staleness``."""
    if step.generation == 0:
        return []
    trains = step.seconds - step.generation
    schedules = [("sync", step.seconds)]
    if not is_colocated:
        schedules.append(("overlap", max(step.generation + step.sync, trains)))
    return [
        ScheduleTime(name, seconds, 1 - trains / seconds, 1 - step.generation / seconds)
        for name, seconds in schedules
        if seconds < float("inf")
    ]

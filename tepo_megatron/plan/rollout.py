"""A vLLM worker's memory and concurrency, and the traffic of a weight sync."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tepo_megatron.config import RunConfig
from tepo_megatron.plan.activations import ELEMENT_BYTES, layers_of, platform_of
from tepo_megatron.plan.memory import GIB
from tepo_megatron.plan.shapes import linear_parameters, model_parameters, resolve_spec
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel, pipeline_stages_of
from tepo_megatron.weights.reshard.plan import reshard_plan

VLLM_WORKSPACE = 3 * GIB
"""Largest prefill and CUDA graphs of a worker: an assumption."""


@dataclass(frozen=True)
class ServerMemory:
    """Bytes on one worker. ``capacity`` in tokens, ``concurrency_…`` in sequences."""

    weights: float
    draft: float
    """0 without a draft model, or if its shape is unknown."""

    workspace: float
    kv_cache: float
    kv_bytes_per_token: float
    capacity: float
    concurrency_longest: float
    concurrency_mean: float
    """At most ``max_num_seqs`` and a server's share of a step."""


@dataclass(frozen=True)
class SyncTraffic:
    """``…_most``: of the busiest rank or worker."""

    moves: int
    bytes_total: int
    bytes_sent_most: int
    bytes_received_most: int
    seconds: float
    """Lower bound: the most loaded link."""


def _server_bytes(config: RunConfig) -> int:
    return ELEMENT_BYTES[config.rollout.server.served_dtype(config.model.dtype)]


def _server_weights(spec: ModelSpec, config: RunConfig) -> float:
    """Scales of quantised layers are negligible."""
    b = _server_bytes(config)
    quantised = linear_parameters(spec) if config.rollout.server.quantization != "none" else 0
    return b * model_parameters(spec) - (b - 1) * quantised


def draft_spec(config: RunConfig) -> tuple[ModelSpec | None, str | None]:
    """Returns the draft model's shape, or why it is unknown. vLLM supports models that the trainer does not."""
    speculative = config.rollout.server.speculative
    if speculative is None or speculative.draft_model is None:
        return None, None
    try:
        return resolve_spec(str(speculative.draft_model), "rollout.server.speculative.draft_model")[0], None
    except ValueError as error:
        return None, f"the draft model's memory is not counted: {error}"


def _kv_bytes_per_token(spec: ModelSpec, tp: int, element: int) -> float:
    """Several workers may hold the same head."""
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

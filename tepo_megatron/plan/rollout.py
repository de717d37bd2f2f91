"""The servers' side: what a vLLM worker holds, how many sequences run at once, what a weight sync moves."""

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
"""Bytes for activations of the largest prefill and CUDA graphs of one worker: an assumption."""


@dataclass(frozen=True)
class ServerMemory:
    """Bytes on one worker of a server. ``capacity``: tokens that its KV cache holds; ``concurrency_…``: sequences."""

    weights: float
    draft: float
    """Weights of the draft model that guesses, 0 without one or where its shape is not known (:func:`draft_spec`)."""

    workspace: float
    kv_cache: float
    kv_bytes_per_token: float
    capacity: float
    concurrency_longest: float
    """Sequences of the longest length that fit at once."""

    concurrency_mean: float
    """Sequences of the mean length that run at once: no more than fit, ``max_num_seqs``, or a server's share of a step."""


@dataclass(frozen=True)
class SyncTraffic:
    """Bytes and time of one weight sync from shard to shard, as the bridge's planner lays it out."""

    moves: int
    bytes_total: int
    """Bytes that go over the links: every server's shards once."""

    bytes_sent_most: int
    """Bytes that the busiest training rank sends."""

    bytes_received_most: int
    """Bytes that the busiest worker receives."""

    seconds: float
    """Lower bound: the time of the most loaded link alone."""


def server_bytes(config: RunConfig) -> int:
    """Bytes of one weight in the servers."""
    return ELEMENT_BYTES[config.rollout.server.served_dtype(config.model.dtype)]


def server_weights(spec: ModelSpec, config: RunConfig) -> float:
    """Bytes of the weights in a whole server. Quantised, linear layers have one byte a weight; what has their scales is too
    little to count. Embedding, head, norms and routers stay as they are."""
    b = server_bytes(config)
    quantised = linear_parameters(spec) if config.rollout.server.quantization != "none" else 0
    return b * model_parameters(spec) - (b - 1) * quantised


def draft_spec(config: RunConfig) -> tuple[ModelSpec | None, str | None]:
    """Returns the shape of the draft model, and why it is not known; both None without a draft model.

    vLLM can guess with models that the trainer does not know, so that an unknown shape is no reason to refuse a run.
    """
    speculative = config.rollout.server.speculative
    if speculative is None or speculative.draft_model is None:
        return None, None
    try:
        return resolve_spec(str(speculative.draft_model), "rollout.server.speculative.draft_model")[0], None
    except ValueError as error:
        return None, f"the draft model's memory is not counted: {error}"


def _kv_bytes_per_token(spec: ModelSpec, tp: int, element: int) -> float:
    """Bytes of a token in one worker; where there are more workers than key/value heads, several hold the same head."""
    return 2 * spec.num_layers * max(1.0, spec.num_kv_heads / tp) * spec.head_dim * element


def server_memory(spec: ModelSpec, config: RunConfig, *, longest: int, mean: float) -> ServerMemory:
    """Memory and concurrency of a worker; prompt and response have at most ``longest`` tokens together, ``mean`` on average."""
    server, b = config.rollout.server, server_bytes(config)
    weights = server_weights(spec, config) / server.tp
    per_token = _kv_bytes_per_token(spec, server.tp, b)
    guesser, _ = draft_spec(config)
    draft = 0.0
    if guesser is not None:  # it has the server's tensor parallelism, and its own keys and values beside the policy's
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
    """Returns a sentence if a server that is awake has no room beside what the trainer keeps on the same GPU, else None.

    ``context``: the trainer's, which stays when everything else has left.
    """
    server, memory = config.rollout.server, config.cluster.gpu_memory_gib * GIB
    if server.gpu_memory_utilization * memory + context <= memory:
        return None
    most = int(100 * (1 - context / memory)) / 100
    return (
        f"a colocated server takes rollout.server.gpu_memory_utilization = {server.gpu_memory_utilization:g} of a GPU, and the "
        f"trainer keeps {context / GIB:.1f} GiB of its {memory / GIB:g} for CUDA and NCCL; lower it to {most:g}"
    )


def check_server(config: RunConfig, memory: ServerMemory, longest: int) -> str | None:
    """Returns a sentence if a worker's KV cache has no room for one sequence of the longest length, else None."""
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
    """Plans the weight sync of a run with servers; takes seconds for a 70B model. Raises ValueError if vLLM cannot split it."""
    cluster, parallel, server = config.cluster, config.engine.parallel, config.rollout.server
    stages = pipeline_stages_of(spec, parallel)
    replicas, is_te = parallel.dp * parallel.cp, layers_of(config) == "te"
    trainer = MegatronParallel(parallel.tp, parallel.pp, replicas, stages, is_te, parallel.ep, parallel.etp)
    plan = reshard_plan(spec, trainer, VllmParallel(tp=server.tp, replicas=server.count))
    sent, received = Counter[int](), Counter[int]()
    for (source, destination), size in plan.bytes_between(server_bytes(config)).items():
        sent[source] += size
        received[destination] += size
    most_sent, most_received = max(sent.values()), max(received.values())
    link = cluster.network_gb_per_s if cluster.rollout_nodes else cluster.nvlink_gb_per_s
    seconds = max(most_sent, most_received) / (link * 1e9 * cluster.link_efficiency)
    return SyncTraffic(len(plan.moves), sent.total(), most_sent, most_received, seconds)

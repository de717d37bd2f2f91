"""Estimates FLOPs and seconds of one step: sample, score, update, sync. Every assumption is printed with them."""

from __future__ import annotations

from dataclasses import dataclass

from tepo_megatron.bridge.architecture import ModelSpec
from tepo_megatron.config import RunConfig
from tepo_megatron.launch.plan.memory import ELEMENT_BYTES
from tepo_megatron.launch.plan.rollout import ServerMemory, Sync
from tepo_megatron.launch.plan.shapes import (
    active_parameters,
    expert_copies,
    expert_parameters,
    stage_parameters,
)


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens. ``prompt``, ``response``: means; ``longest``: longest prompt and longest response together."""

    prompt: float
    response: float
    longest: int
    longest_response: int

    @property
    def mean(self) -> float:
        return self.prompt + self.response


@dataclass(frozen=True)
class StepTime:
    """Sizes of one step, FLOPs over all GPUs, and seconds of each phase; the phases follow one another."""

    sequences: int
    tokens: float
    response_tokens: float
    flops_generation: float
    flops_score: float
    flops_train: float
    bubble: float
    """Idle time of the pipeline in an update, relative to the time it works."""

    generation: float
    score: float
    train: float
    exchange: float
    """Seconds for gradients and new weights between data-parallel ranks."""

    sync: float

    @property
    def seconds(self) -> float:
        return self.generation + self.score + self.train + self.exchange + self.sync


def forward_flops(spec: ModelSpec, mean_length: float) -> float:
    """FLOPs of one token's forward pass: 2 per weight of every matrix that it meets, and causal attention.

    The embedding is a lookup and costs nothing; of the experts only the chosen ones count.
    """
    matrices = active_parameters(spec) - (0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size)
    # Attention: 2 FLOPs × 2 products (scores, values) × half of the sequence on average, since it is causal.
    return 2 * matrices + 2 * spec.num_layers * spec.num_heads * spec.head_dim * mean_length


def step_time(spec: ModelSpec, config: RunConfig, lengths: Lengths, server: ServerMemory, sync: Sync | None) -> StepTime:
    """Estimates a step. A token costs 3 forward passes in training (4 with full recomputation; a fused head 4 of its own), 1 in
    scoring (2 with a reference model), 1 in generation.
    """
    cluster, parallel, rollout = config.cluster, config.engine.parallel, config.rollout
    sequences = rollout.prompts_per_step * rollout.samples_per_prompt
    tokens, responses = sequences * lengths.mean, sequences * lengths.response
    token = forward_flops(spec, lengths.mean)
    passes = 4 if config.engine.recompute == "full" else 3
    training = passes * token
    if config.engine.head == "fused" and passes == 3:
        training += 2 * spec.vocab_size * spec.hidden_size  # a fused head computes its product once more
    scores = 2 if config.objective.needs_reference else 1
    peak = cluster.gpu_tflops * 1e12 * parallel.world_size
    bubble = _bubble(config, tokens / config.train.minibatches)
    prefill = rollout.prompts_per_step * lengths.prompt * token
    return StepTime(
        sequences=sequences,
        tokens=tokens,
        response_tokens=responses,
        flops_generation=prefill + responses * token,
        flops_score=scores * token * tokens,
        flops_train=training * tokens,
        bubble=bubble,
        generation=_generation(config, lengths, server, prefill, responses * token),
        score=scores * token * tokens / (peak * cluster.score_mfu) * (1 + _bubble(config, tokens)),
        train=training * tokens / (peak * cluster.train_mfu) * (1 + bubble),
        exchange=config.train.minibatches * _exchange(spec, config),
        sync=sync.seconds if sync else 0.0,
    )


def _bubble(config: RunConfig, tokens: float) -> float:
    """The pipeline's idle share, (pp − 1) / (micro-batches · vpp), for ``tokens`` spread over the data-parallel ranks."""
    parallel = config.engine.parallel
    micro_batches = max(1.0, tokens / (parallel.dp * config.engine.micro_batch_tokens))
    return (parallel.pp - 1) / (micro_batches * parallel.vpp)


def _generation(config: RunConfig, lengths: Lengths, server: ServerMemory, prefill: float, decode: float) -> float:
    """Seconds of sampling: prompts at ``score_mfu``, then decoding, which is bound by memory bandwidth or by FLOPs.

    A wave is the sequences that run at once. It reads the weights once for every position of its longest response, and every
    sequence's keys and values once per token.
    """
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
    return prefill / rate + max(read / bandwidth, decode / rate)


def _exchange(spec: ModelSpec, config: RunConfig) -> float:
    """Seconds per optimizer step for reducing fp32 gradients and, with the distributed optimizer, gathering new weights."""
    parallel, cluster = config.engine.parallel, config.cluster
    copies = parallel.dp * parallel.cp
    # distributed optimizer: reduce-scatter of fp32 gradients, all-gather of weights; otherwise an all-reduce, which is both
    bytes_each = (4 + ELEMENT_BYTES[config.model.dtype]) if config.optimizer.distributed else 8
    experts = spec.num_layers // parallel.pp * expert_parameters(spec, parallel)
    dense = max(stage_parameters(spec, parallel, stage) for stage in range(parallel.pp)) - experts
    sent = dense * (1 - 1 / copies) + experts * (1 - 1 / expert_copies(parallel))
    link = cluster.network_gb_per_s if cluster.train_nodes > 1 else cluster.nvlink_gb_per_s
    return bytes_each * sent / (link * 1e9 * cluster.link_efficiency)

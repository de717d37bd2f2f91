"""Estimates a step's FLOPs and seconds, a vLLM worker's memory, and a weight sync's traffic."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from tepo_megatron.config import ClusterConfig, RunConfig
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.plan.memory import ELEMENT_BYTES, GIB, HostMemory, TrainingRanks
from tepo_megatron.plan.shapes import active_parameters, model_parameters, resolve_spec
from tepo_megatron.weights.adapters import adapted_tensors
from tepo_megatron.weights.architecture import ModelSpec, read_object
from tepo_megatron.weights.geometry import ReshardPlan
from tepo_megatron.weights.layouts import VllmParallel, check_trainer_split
from tepo_megatron.weights.reshard import reshard_traffic
from tepo_megatron.weights.table import tensor_shapes

_SPLIT_INPUTS = r"\.(o_proj|down_proj)\.weight$|\.experts\."  # per channel; vLLM quantises all parts of an expert at once

_VLLM_WORKSPACE = 3 * GIB  # largest prefill and CUDA graphs of a worker: an assumption


@dataclass(frozen=True)
class ServerMemory:
    """Sizes are bytes, ``capacity`` tokens, ``concurrency_…`` sequences."""

    weights: float
    draft: float  # 0 without a draft model, or if its shape is unknown
    workspace: float
    waiting: float  # weights in full precision that wait, in an update, for scales over all workers
    kv_cache: float
    kv_bytes_per_token: float
    capacity: float
    concurrency_longest: float
    concurrency_mean: float  # at most ``max_num_seqs`` and a server's share of a step

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        config: RunConfig,
        *,
        longest: int,
        mean: float,
        server: ServerConfig | None = None,
        path: str = "",
    ) -> ServerMemory:
        """Of ``rollout.server``, or of another one's, which serves ``path``."""
        server = server or config.rollout.server
        b = ELEMENT_BYTES[server.served_dtype(config.dtype())]
        quantised = _linear_parameters(spec) if server.quantization != "none" else 0  # their scales are negligible
        weights = (b * model_parameters(spec) - (b - 1) * quantised) / server.tp
        config_file = Path(path).expanduser() / "config.json"
        if path and config_file.is_file() and "quantization_config" in read_object(config_file):
            stored = sum(file.stat().st_size for file in config_file.parent.glob("*.safetensors"))
            weights = stored / server.tp if stored else weights  # as vLLM holds them
        per_token = _kv_bytes_per_token(spec, server.tp, b)
        guesser, _ = cls.draft_spec(server)
        draft = 0.0
        if guesser is not None:  # it has the server's tensor parallelism, and its own keys and values besides the policy's
            draft = b * model_parameters(guesser) / server.tp
            per_token += _kv_bytes_per_token(guesser, server.tp, b)
        if config.engine.wants_gpus:
            workspace: float = _VLLM_WORKSPACE
            kv_cache = server.gpu_memory_utilization * config.cluster.gpu_memory_gib * GIB - weights - draft - workspace
        else:
            workspace, kv_cache = 0.0, float(server.cpu_kv_cache_gib * GIB)
        capacity = max(0.0, kv_cache / per_token)
        share = config.rollout.responses_per_step / server.count
        return cls(
            weights=weights,
            draft=draft,
            workspace=workspace,
            waiting=b * _waiting_parameters(spec, server) / server.tp,
            kv_cache=kv_cache,
            kv_bytes_per_token=per_token,
            capacity=capacity,
            concurrency_longest=capacity // longest,
            concurrency_mean=min(capacity / mean, server.max_num_seqs, share),
        )

    def update_problem(self, config: RunConfig, spec: ModelSpec, trainer: float) -> str | None:
        """``trainer``: bytes of a rank meanwhile."""
        server, memory = config.rollout.server, config.cluster.gpu_memory_gib * GIB
        if not config.engine.wants_gpus:
            return None
        no_blocks = server.quantization == "fp8_per_block" or VllmParallel(tp=server.tp).pads_blocks(spec)
        blocks = "" if no_blocks else "choose rollout.server.quantization = fp8_per_block, "
        if config.is_colocated:  # without the servers' cache
            weights = self.weights + self.draft + self.waiting
            if trainer + weights <= memory:
                return None
            return (
                f"in a weight update a colocated server's {weights / GIB:.1f} GiB of weights need room beside "
                f"{trainer / GIB:.1f} GiB of a training rank, and cluster.gpu_memory_gib = {config.cluster.gpu_memory_gib:g}; "
                f"{blocks}raise rollout.server.tp, or raise engine.parallel.tp"
            )
        room = (1 - server.gpu_memory_utilization) * memory + self.workspace
        if self.waiting <= room:
            return None
        return (
            f"a vLLM worker holds {self.waiting / GIB:.1f} GiB of weights in full precision until an update is there whole, as "
            f"rollout.server.quantization = {server.quantization} compares those of all workers, and has {room / GIB:.1f} GiB "
            f"for them; {blocks}raise rollout.server.tp, or lower rollout.server.gpu_memory_utilization by "
            f"{math.ceil(100 * (self.waiting - room) / memory) / 100:g}"
        )

    @staticmethod
    def draft_spec(server: ServerConfig) -> tuple[ModelSpec | None, str | None]:
        """Returns the shape, or why it is unknown. vLLM supports more models than the trainer."""
        speculative = server.speculative
        if speculative is None or speculative.draft_model is None:
            return None, None
        try:
            return resolve_spec(str(speculative.draft_model), "rollout.server.speculative.draft_model")[0], None
        except ValueError as error:
            return None, f"the draft model's memory is not counted: {error}"


_Link = Literal["device", "nvlink", "network"]


@dataclass(frozen=True)
class _LinkTraffic:
    link: _Link
    pairs: int
    total: int
    busiest_sender: int
    busiest_receiver: int
    seconds: float


@dataclass(frozen=True)
class _PlanSummary:
    """Traffic is in bytes; ``imbalance`` is the sources' largest load over their mean."""

    sources: int
    destinations: int
    moves: int
    digest: str
    built_in_seconds: float
    received_by_each: int
    imbalance: float
    links: list[_LinkTraffic]
    seconds: float


@dataclass(frozen=True)
class Links:
    """Rates are in 10⁹ bytes/s per GPU and direction. Unless ``shared``, workers have their own nodes."""

    gpus_per_node: int = 8
    nvlink_gb_per_s: float = 450.0
    network_gb_per_s: float = 50.0
    shared: bool = False

    def local(self, num_sources: int, num_destinations: int) -> dict[int, int]:
        return {rank: rank for rank in range(min(num_sources, num_destinations))} if self.shared else {}

    def summarize(self, plan: ReshardPlan, itemsize: int, *, built_in_seconds: float = 0.0) -> _PlanSummary:
        local, remote = plan.bytes_between(itemsize, local=True), plan.bytes_between(itemsize)
        first_node = 0 if self.shared else -(-plan.num_sources // self.gpus_per_node)
        by_link: dict[_Link, Counter[tuple[int, int]]] = {"device": local, "nvlink": Counter(), "network": Counter()}
        for (source, destination), size in remote.items():
            same_node = source // self.gpus_per_node == first_node + destination // self.gpus_per_node
            by_link["nvlink" if same_node else "network"][source, destination] += size
        links = [self._traffic(link, pairs) for link, pairs in by_link.items() if pairs]
        sent, received = _ends(remote)[0], _ends(local + remote)[1]
        return _PlanSummary(
            sources=plan.num_sources,
            destinations=plan.num_destinations,
            moves=len(plan.moves),
            digest=plan.digest,
            built_in_seconds=built_in_seconds,
            received_by_each=max(received.values()),
            imbalance=max(sent.values(), default=0) * plan.num_sources / max(sent.total(), 1),
            links=links,
            seconds=max(link.seconds for link in links),
        )

    def _traffic(self, link: _Link, pairs: Counter[tuple[int, int]]) -> _LinkTraffic:
        sent, received = (max(end.values()) for end in _ends(pairs))
        rate = {"device": float("inf"), "nvlink": self.nvlink_gb_per_s, "network": self.network_gb_per_s}[link]
        return _LinkTraffic(link, len(pairs), pairs.total(), sent, received, max(sent, received) / 1e9 / rate)


def _ends(pairs: Counter[tuple[int, int]]) -> tuple[Counter[int], Counter[int]]:
    sent, received = Counter[int](), Counter[int]()
    for (source, destination), size in pairs.items():
        sent[source] += size
        received[destination] += size
    return sent, received


@dataclass(frozen=True)
class SyncTraffic:
    """``…_most`` is that of the busiest rank or worker; no bytes are counted that stay on a GPU."""

    moves: int
    bytes_total: int
    bytes_sent_most: int
    bytes_received_most: int
    seconds: float  # lower bound: the most loaded link

    @classmethod
    def of(cls, ranks: TrainingRanks) -> SyncTraffic:
        """Raises ValueError if vLLM cannot split the model."""
        spec, config = ranks.spec, ranks.config
        server, rate = config.rollout.server, _link_rate(config.cluster, across=config.cluster.rollout_nodes > 0)
        adapters = config.adapter_rank is not None
        if adapters or server.transfer == "gather":  # whole tensors, of which gloo's tree takes some copies from rank 0
            workers = server.tp * server.count
            size = model_parameters(spec, config.model.lora if adapters else None) * ELEMENT_BYTES[config.dtype()]
            sent_most = workers.bit_length() * size
            return cls(workers, workers * size, sent_most, size, sent_most / rate)
        trainer = replace(check_trainer_split(spec, config.engine.parallel), fused_norms=ranks.has_te)
        destination = VllmParallel(tp=server.tp, replicas=server.count)
        local = {worker: worker for worker in range(destination.world_size)} if config.is_colocated else {}
        moves, elements = reshard_traffic(spec, trainer, destination, local)
        b, (sent, received) = _server_bytes(config), _ends(elements)
        sent_most, received_most = b * max(sent.values(), default=0), b * max(received.values(), default=0)
        return cls(moves, b * sent.total(), sent_most, received_most, max(sent_most, received_most) / rate)


def _server_bytes(config: RunConfig) -> int:
    return ELEMENT_BYTES[config.rollout.server.served_dtype(config.dtype())]


def _kv_bytes_per_token(spec: ModelSpec, tp: int, element: int) -> float:
    # several workers may hold the same head
    return 2 * spec.num_layers * max(1.0, spec.num_kv_heads / tp) * spec.head_dim * element


def _link_rate(cluster: ClusterConfig, *, across: bool) -> float:
    """Returns bytes per second."""
    return (cluster.network_gb_per_s if across else cluster.nvlink_gb_per_s) * 1e9 * cluster.link_efficiency


def _pcie_rate(cluster: ClusterConfig) -> float:
    return cluster.pcie_gb_per_s * 1e9 * cluster.link_efficiency


PACK_SECONDS_PER_TOKEN = 0.02e-6  # all ranks wait for rank 0; one CPU core took half of this

_DECODE_SECONDS_PER_TOKEN = 3e-6  # measured; servers continue meanwhile

DIGEST_SECONDS_PER_BYTE = 1e-9  # SHA-256 on one core, measured

_ADAM_BANDWIDTH = 0.7  # share of a GPU's memory bandwidth: an assumption


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens; ``longest``: of prompt and response together."""

    prompt: float
    response: float
    longest: int
    longest_response: int

    @property
    def mean(self) -> float:
        return self.prompt + self.response


@dataclass(frozen=True)
class ScheduleTime:
    """``idle_…``: shares of the time."""

    schedule: str
    seconds: float
    idle_trainer: float
    idle_servers: float


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

    @classmethod
    def of(
        cls, ranks: TrainingRanks, lengths: Lengths, server: ServerMemory, sync: SyncTraffic | None, hosts: Sequence[HostMemory]
    ) -> StepTime:
        """Counts forward passes: 3 plus recomputation in training, 1 in scoring (2 with a reference, and those of
        teachers on the ranks), 1 in generation.
        """
        spec, config = ranks.spec, ranks.config
        cluster, parallel, rollout = config.cluster, config.engine.parallel, config.rollout
        sequences = rollout.responses_per_step
        tokens, responses = sequences * lengths.mean, sequences * lengths.response
        trained = tokens * config.train.epochs_per_batch
        token = _forward_flops(spec, lengths.mean)
        training = 3 * token + _recomputed_flops(ranks, lengths.mean)
        teachers = sum(_forward_flops(split.spec, lengths.mean) for split in ranks.teachers.values())
        scores = (2 if config.objective.needs_reference else 1) + teachers / token
        peak = _peak_flops(config, config.dtype()) * parallel.world_size
        imbalance = _stage_imbalance(ranks)
        tokens_at_once = max(config.engine.micro_batch_tokens, lengths.mean)  # a longer sequence is a micro-batch of its own
        micro_batches = max(1.0, tokens / config.train.minibatches / parallel.dp / tokens_at_once)
        bubble = (parallel.pp - 1) / (micro_batches * parallel.vpp)
        waits_train, waits_score = _exposed_seconds(ranks, tokens)
        waits_train *= config.train.epochs_per_batch
        waits_score *= scores
        prefill = rollout.prompts_per_step * lengths.prompt * token
        padding = ranks.padding_share(lengths.mean)
        score = (scores * token * tokens / (peak * cluster.score_mfu) * (1 + imbalance) + waits_score) * (1 + padding)
        train = (training * trained / (peak * cluster.train_mfu) * (1 + imbalance) + waits_train) * (1 + padding)
        return cls(
            sequences=sequences,
            tokens=tokens,
            response_tokens=responses,
            flops_generation=prefill + responses * token,
            flops_score=scores * token * tokens,
            flops_train=training * trained,
            bubble=bubble,
            imbalance=imbalance,
            padding=padding,
            generation=_generation(config, lengths, server, prefill, responses * token),
            score=score * (1 + bubble),
            train=train * (1 + bubble),
            exposed=(waits_score + waits_train) * (1 + bubble) * (1 + padding),
            exchange=_exchange(ranks, train / config.train.updates_per_step / micro_batches),
            adam=config.train.updates_per_step * max(_adam(ranks, stage) for stage in range(parallel.pp)),
            turns=max(2 * host.turns for host in hosts) / _pcie_rate(cluster),
            sync=sync.seconds if sync else 0.0,
            root=responses * PACK_SECONDS_PER_TOKEN,
            save=_save(ranks),
            mfu=3 * token * trained / (peak * train),
        )

    @property
    def seconds(self) -> float:
        first = self.generation + self.score + self.train + self.exchange + self.adam
        return first + self.turns + self.sync + self.root + self.save

    @property
    def trainer_seconds(self) -> float:
        """Excludes servers, checkpoints and rank 0's packing."""
        return self.score + self.train + self.exchange + self.adam + self.turns

    def schedules(self, *, is_colocated: bool) -> list[ScheduleTime]:
        """Ignores ``train.max_staleness``."""
        if self.generation == 0:
            return []
        trains = self.seconds - self.generation
        schedules = [("sync", self.seconds)]
        if not is_colocated:
            schedules.append(("overlap", max(self.generation + self.sync, trains)))
        return [
            ScheduleTime(name, seconds, 1 - trains / seconds, 1 - self.generation / seconds)
            for name, seconds in schedules
            if seconds < float("inf")
        ]


def _stage_imbalance(ranks: TrainingRanks) -> float:
    spec = ranks.spec
    head = spec.vocab_size * spec.hidden_size
    layer = (active_parameters(spec) - head * (1 if spec.tied_embeddings else 2)) / spec.num_layers
    work = [len(layers) * layer for layers in ranks.split.stage_layers]
    work[-1] += head
    return max(work) * len(work) / sum(work) - 1


def _exposed_seconds(ranks: TrainingRanks, tokens: float) -> tuple[float, float]:
    """A layer's activations move 4 times forward, 6 backward; 2 are hidden."""
    parallel, cluster = ranks.config.engine.parallel, ranks.config.cluster
    share = tokens / (parallel.dp * parallel.cp)  # that a rank sees
    activations = ELEMENT_BYTES[ranks.config.dtype()] * ranks.spec.hidden_size * share
    most_layers = max(map(len, ranks.split.stage_layers))
    once = activations * (1 - 1 / parallel.tp) / _link_rate(cluster, across=ranks.tensor_ranks_straddle) * most_layers
    handed_on = 0.0
    if parallel.pp > 1 and parallel.vpp == 1:
        across = _link_rate(cluster, across=cluster.train_nodes > 1)
        handed_on = activations / (parallel.tp if parallel.sequence_parallel else 1) / across
    return 8 * once + 2 * handed_on, 4 * once + handed_on


def _adam(ranks: TrainingRanks, stage: int) -> float:
    cluster, optimizer = ranks.config.cluster, ranks.config.optimizer
    owned, b = ranks.owned_weights(stage), ELEMENT_BYTES[ranks.config.dtype()]
    # a gradient is read, states are read and written, a weight is written
    bytes_per_weight = (1 - optimizer.offload_fraction) * (4 + b) + 2 * ranks.state_bytes
    seconds = owned * bytes_per_weight / (cluster.gpu_memory_gb_per_s * 1e9 * _ADAM_BANDWIDTH)
    offloaded = owned * optimizer.offload_fraction
    return seconds + (4 + 4) * offloaded / _pcie_rate(cluster) + offloaded / cluster.host_adam_per_s


def _save(ranks: TrainingRanks) -> float:
    # an asynchronous save only copies to the host
    train, cluster = ranks.config.train, ranks.config.cluster
    if not train.save_every:
        return 0.0
    if ranks.saves_beside_training:
        return ranks.rank_checkpoint_bytes / _pcie_rate(cluster) / train.save_every
    written = ranks.checkpoint_bytes / (cluster.storage_gb_per_s * 1e9)
    return (written + ranks.rank_checkpoint_bytes * DIGEST_SECONDS_PER_BYTE) / train.save_every


_OF_BF16 = {"bfloat16": 1.0, "float32": 1 / 15}  # outside the tensor cores: 67 of 989 on an H100, 19.5 of 312 on an A100


def _peak_flops(config: RunConfig, dtype: str) -> float:
    return config.cluster.gpu_tflops * 1e12 * _OF_BF16[dtype]


def _generation(config: RunConfig, lengths: Lengths, server: ServerMemory, prefill: float, decode: float) -> float:
    """A wave reads weights once per position of its longest response, keys and values per token."""
    cluster, rollout = config.cluster, config.rollout
    if rollout.replay is not None:
        return 0.0
    if server.concurrency_mean == 0:
        return float("inf")
    gpus = rollout.server.count * rollout.server.tp
    rate = gpus * _peak_flops(config, rollout.server.served_dtype(config.dtype())) * cluster.score_mfu
    per_server = rollout.responses_per_step / rollout.server.count
    waves = per_server / server.concurrency_mean
    read = waves * lengths.longest_response * server.weights
    read += per_server * lengths.response * (lengths.prompt + lengths.response / 2) * server.kv_bytes_per_token
    bandwidth = cluster.gpu_memory_gb_per_s * 1e9 * cluster.decode_bandwidth
    answers = rollout.responses_per_step * lengths.response * _DECODE_SECONDS_PER_TOKEN
    return max(prefill / rate + max(read / bandwidth, decode / rate), answers)


def _exchange(ranks: TrainingRanks, micro_batch: float) -> float:
    """``micro_batch``: seconds of a forward and backward pass."""
    config, split = ranks.config, ranks.split
    parallel, engine, updates = config.engine.parallel, config.engine, config.train.updates_per_step
    stages = split.stages(config.model.lora)
    experts = max(count.experts for count in stages)
    dense = max(count.total for count in stages) - experts
    sent = dense * (1 - 1 / (parallel.dp * parallel.cp)) + experts * (1 - 1 / split.expert_copies)
    link = _link_rate(config.cluster, across=config.cluster.train_nodes > 1)
    # distributed optimizer: reduce-scatter of fp32 gradients, all-gather of weights; otherwise an all-reduce, which is both
    distributed = config.optimizer.distributed
    reduce = (4 if distributed else 8) * sent / link
    gather = (ELEMENT_BYTES[config.dtype()] if distributed else 0) * sent / link
    exposed = updates * max(0.0, reduce - 2 / 3 * micro_batch if engine.overlap_grad_reduce else reduce)
    between = max(0.0, gather - 1 / 3 * micro_batch if engine.overlap_param_gather else gather)
    return exposed + (updates - 1) * between + gather


def _forward_flops(spec: ModelSpec, mean_length: float) -> float:
    """2 per weight that a token meets, and causal attention."""
    matrices = active_parameters(spec) - (0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size)
    # Attention: 2 FLOPs × 2 products (scores, values) × half of the sequence on average, since it is causal.
    return 2 * matrices + 2 * spec.num_layers * spec.num_heads * spec.head_dim * mean_length


def _recomputed_flops(ranks: TrainingRanks, mean_length: float) -> float:
    spec, engine = ranks.spec, ranks.config.engine
    again, head = set(ranks.recomputed), 2 * spec.vocab_size * spec.hidden_size
    fused_head = head if engine.head == "fused" else 0
    if engine.recompute == "full":
        return _forward_flops(spec, mean_length) - head + fused_head
    attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * mean_length if "core_attn" in again else 0
    mlp = 2 * spec.num_layers * 3 * spec.hidden_size * ranks.passed_width if again & {"mlp", "moe"} else 0
    return attention + mlp + fused_head


@lru_cache(maxsize=64)
def _linear_parameters(spec: ModelSpec, pattern: str = "") -> int:
    shapes = tensor_shapes(spec)
    return sum(math.prod(shapes[name]) for name in adapted_tensors(shapes, ["all-linear"]) if re.search(pattern, name))


def _waiting_parameters(spec: ModelSpec, server: ServerConfig) -> int:
    # as the servers' ShardLoader has it
    if server.tp == 1 or server.transfer == "gather" or server.quantization in ("none", "fp8_per_block"):
        return 0
    return _linear_parameters(spec, _SPLIT_INPUTS if server.quantization == "fp8_per_channel" else "")

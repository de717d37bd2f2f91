"""Compares the weight sync from shard to shard with alternatives (``tepo bench reshard``)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.tools.results import in_processes, markdown, reset_peak, resident_bytes, write_report
from tepo_megatron.trainer.megatron.collectives import broadcast_json
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.geometry import ReshardPlan, ShardLayout
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel, megatron_ranks, vllm_ranks
from tepo_megatron.weights.reshard import reshard_plan
from tepo_megatron.weights.transfer import digests as verification
from tepo_megatron.weights.transfer import full_tensors as broadcast
from tepo_megatron.weights.transfer import move
from tepo_megatron.weights.transfer.full_tensors import GatherPlan
from tepo_megatron.weights.transfer.transport import connect, listen
from tepo_megatron.weights.transfer.transports.gloo import GlooGroup

_HOST, _TIMEOUT_S = "127.0.0.1", 120.0
_GATHER, _RAW = "gather and broadcast", "raw point-to-point copy"


@dataclass(frozen=True)
class ReshardSetting:
    """Of a Llama 1024 wide with 32 000 tokens; 206 M parameters at 12 layers."""

    tp: int
    pp: int
    server_tp: int
    servers: int
    layers: int
    dtype: str

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            architecture="LlamaForCausalLM",
            num_layers=self.layers,
            hidden_size=1024,
            num_heads=16,
            num_kv_heads=8,
            head_dim=64,
            ffn_size=2816,
            vocab_size=32000,
            tied_embeddings=False,
            norm_eps=1e-5,
            rope_theta=1e4,
            rope_scaling=None,
            max_positions=2048,
        )

    @property
    def splits(self) -> tuple[MegatronParallel, VllmParallel]:
        return MegatronParallel(tp=self.tp, pp=self.pp), VllmParallel(tp=self.server_tp, replicas=self.servers)

    @property
    def plan(self) -> ReshardPlan:
        return reshard_plan(self.spec, *self.splits)


@dataclass(frozen=True)
class _ReshardMeasurement:
    method: str
    seconds: float
    wire_bytes: int
    largest_link: int  # bytes received by the busiest rank
    peak_source: int | None  # bytes of a trainer rank beyond its shards; None if unknown
    peak_destination: int | None
    digest_seconds: float  # processor seconds of the busiest rank


def run(setting: ReshardSetting, repeats: int) -> list[_ReshardMeasurement]:
    """Raises ValueError for an impossible split, RuntimeError if two methods leave different weights."""
    if setting.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype {setting.dtype} is unknown; give float32 or bfloat16")
    plan = setting.plan
    _, place = listen(_HOST)
    rows = in_processes(_worker, plan.num_sources + plan.num_destinations, setting, place, repeats)
    return [_ReshardMeasurement(**row) for row in rows]


@dataclass
class _Rank:
    rank: int
    plan: ReshardPlan
    layouts: list[ShardLayout]  # of the source ranks
    params: dict[str, Tensor]
    queues: move.Queues
    pairs: GlooGroup
    star: GlooGroup | None  # trainer's rank 0 and the destinations; None on other trainer ranks
    local: ShardLayout
    copies: int
    digest_seconds: float = 0.0

    @property
    def is_source(self) -> bool:
        return self.rank < self.plan.num_sources

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.params.values())).dtype

    def reshard(self) -> None:
        step = move.send if self.is_source else move.receive
        step(self.pairs, self.queues, self.params, self.dtype)

    def reshard_timed(self) -> None:
        self.digest_seconds = 0.0

        def timed(data: Tensor) -> Tensor:
            start = time.thread_time()
            result = verification.digest(data)
            self.digest_seconds += time.thread_time() - start
            return result

        with mock.patch.object(move, "digest", timed):
            self.reshard()

    def reshard_unverified(self) -> None:
        with mock.patch.object(move, "digest", return_value=torch.zeros((), dtype=torch.int64)):
            self.reshard()

    def gather_and_broadcast(self) -> None:
        shapes = self.local.shapes
        manifest = [(name, shape, str(self.dtype).removeprefix("torch.")) for name, shape in shapes.items()]
        if self.is_source:
            stream = GatherPlan(self.layouts).gather_to_root(self.params)
            if self.star is None:
                for _ in stream:
                    continue
            else:
                broadcast.send(self.star, manifest, (tensor for _, tensor in stream if tensor is not None))
            return
        assert self.star is not None
        expected: dict[str, list[Any]] = {}
        for shard in self.local.shards:
            expected.setdefault(shard.tensor, []).append(shard)
        for name, tensor in broadcast.receive(self.star, manifest):
            for shard in expected.get(name, ()):
                self.params[shard.param][shard.param_box.slices] = tensor[shard.box.slices]

    def raw_copy(self) -> None:
        """As large as the messages, but without digests."""
        largest = max(move.numel_of(message) for queue in self.queues.values() for message in queue)
        slots = {(peer, slot): torch.zeros(largest, dtype=self.dtype) for peer in self.queues for slot in range(move.WINDOW)}
        start = self.pairs.send if self.is_source else self.pairs.receive
        for number in range(max(map(len, self.queues.values())) + move.WINDOW):
            for peer, queue in self.queues.items():
                if 0 <= number - move.WINDOW < len(queue):
                    self.pairs.wait(peer, number - move.WINDOW)
                if number < len(queue):
                    numel = move.numel_of(queue[number])
                    start(slots[peer, number % move.WINDOW][:numel], peer, number)

    def received(self, method: str) -> int:
        if method == _GATHER:
            everything = sum(planned.numel for planned in self.plan.moves) // self.copies
            if self.is_source:
                everything = everything - sum(tensor.numel() for tensor in self.params.values()) if self.rank == 0 else 0
            return everything * self.dtype.itemsize
        if self.is_source:
            return 0
        elements = sum(move.numel_of(message) for queue in self.queues.values() for message in queue)
        return elements * self.dtype.itemsize


def _make_rank(setting: ReshardSetting, rank: int) -> _Rank:
    plan, spec, (source, destination) = setting.plan, setting.spec, setting.splits
    layouts = megatron_ranks(spec, source)
    local = (layouts + vllm_ranks(spec, destination))[rank]
    dtype: torch.dtype = getattr(torch, setting.dtype)
    params = {name: torch.zeros(shape, dtype=dtype) for name, shape in local.params.items()}
    is_source = rank < plan.num_sources
    for number, param in enumerate(params.values()):
        generator = torch.Generator().manual_seed(1000 * rank + number)
        if is_source and param.dim() > 1:
            param.normal_(generator=generator)
        else:
            param.fill_(1.0)
    queues = move.queues(move.move_ends(plan, rank), itemsize=dtype.itemsize, limit=move.message_bytes(plan))
    world = list(range(plan.num_sources + plan.num_destinations))
    pairs = _group(world, rank)
    assert pairs is not None
    star = _group([0, *world[plan.num_sources :]], rank)
    return _Rank(rank, plan, layouts, params, queues, pairs, star, local, setting.servers)


def _group(members: list[int], rank: int) -> GlooGroup | None:
    """None on ranks outside the group. All ranks must call."""
    store, place = listen(_HOST) if rank == members[0] else (None, "")
    place = broadcast_json(place, source=members[0], device=torch.device("cpu"))
    if rank not in members:
        return None
    store = store or connect(_HOST, place, _TIMEOUT_S)
    return GlooGroup(store, _HOST, members.index(rank), len(members), _TIMEOUT_S)


def _worker(rank: int, setting: ReshardSetting, place: str, repeats: int, inbox: Any) -> None:
    torch.set_num_threads(1)
    world = setting.plan.num_sources + setting.plan.num_destinations
    dist.init_process_group("gloo", store=connect(_HOST, place, _TIMEOUT_S), rank=rank, world_size=world)
    with torch.no_grad():
        local = _make_rank(setting, rank)
        rows = _measure(local, repeats)
    if rank == 0:
        inbox.put(json.dumps(rows))
    dist.barrier()
    local.pairs.close()
    dist.destroy_process_group()  # an interpreter that exits while gloo's threads run may abort


def _measure(local: _Rank, repeats: int) -> list[dict[str, Any]]:
    methods: dict[str, Callable[[], None]] = {
        "shard to shard": local.reshard_timed,
        "shard to shard, no digests": local.reshard_unverified,
        _RAW: local.raw_copy,
        _GATHER: local.gather_and_broadcast,
    }
    digest_seconds: list[float] = []
    outcomes: set[int] = set()  # hashes of all received parameters
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    peaks: dict[str, list[int]] = {name: [] for name in methods}
    for _ in range(repeats):  # in turn, so that a busy moment of the machine affects all methods
        for name, work in methods.items():
            with _peak(peaks[name]):
                dist.barrier()
                start = time.perf_counter()
                work()
                seconds[name].append(_greatest(time.perf_counter() - start))
            if name == "shard to shard":
                digest_seconds.append(local.digest_seconds)
            if not local.is_source and name != _RAW:
                outcomes.add(hash(tuple(int(verification.digest(tensor)) for tensor in local.params.values())))
                for tensor in local.params.values():
                    tensor.zero_()
    if len(outcomes) > 1:
        raise RuntimeError(f"rank {local.rank} got different weights by different ways; the measurement is void")
    rows = []
    for name in methods:
        digest_s = _greatest(min(digest_seconds)) if name == "shard to shard" else 0.0
        rows.append({**_row(local, name, min(seconds[name]), max(peaks[name], default=-1)), "digest_seconds": digest_s})
    return rows


def _row(local: _Rank, method: str, seconds: float, peak: int) -> dict[str, Any]:
    figures = torch.tensor([local.received(method), peak])
    gathered = [torch.zeros_like(figures) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, figures)
    received, peaks = torch.stack(gathered).T.tolist()
    sources, known = local.plan.num_sources, min(peaks) >= 0
    return {
        "method": method,
        "seconds": seconds,
        "wire_bytes": sum(received),
        "largest_link": max(received),
        "peak_source": max(peaks[:sources]) if known else None,
        "peak_destination": max(peaks[sources:]) if known else None,
    }


def _greatest(value: float) -> float:
    result = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return float(result)


@contextmanager
def _peak(into: list[int]) -> Iterator[None]:
    if not Path("/proc/self/clear_refs").exists():
        yield
        return
    before = reset_peak()
    yield
    into.append(max(0, resident_bytes("VmHWM") - before))


COLUMNS = (
    *("method", "seconds", "× gather", "× raw", "MB on the wire", "MB into the busiest rank"),
    *("peak MB, trainer / server", "of it digests, s"),
)


def table(results: Sequence[_ReshardMeasurement]) -> list[tuple[str, ...]]:
    seconds = {row.method: row.seconds for row in results}
    rows = []
    for row in results:
        ratios = (f"{row.seconds / seconds[method]:.2f}" for method in (_GATHER, _RAW))
        peaks = ("–" if peak is None else f"{peak / 1e6:.0f}" for peak in (row.peak_source, row.peak_destination))
        moved = (f"{row.wire_bytes / 1e6:.1f}", f"{row.largest_link / 1e6:.1f}")
        digests = f"{row.digest_seconds:.3f}" if row.digest_seconds else "–"
        rows.append((row.method, f"{row.seconds:.3f}", *ratios, *moved, " / ".join(peaks), digests))
    return rows


def write_results(
    results: Sequence[_ReshardMeasurement], folder: Path, setting: ReshardSetting, repeats: int
) -> tuple[Path, Path]:
    record = {"setting": asdict(setting), "repeats": repeats, "results": [asdict(row) for row in results]}
    stem = f"reshard-tp{setting.tp}pp{setting.pp}-to-{setting.servers}xtp{setting.server_tp}-{setting.dtype}"
    return write_report(folder, stem, record, markdown(COLUMNS, table(results)), note=f"best of {repeats}")

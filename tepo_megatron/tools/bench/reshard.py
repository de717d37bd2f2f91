"""Compares the weight sync between shards with alternatives (``tepo bench reshard``)."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.tools.bench.recipes import llama
from tepo_megatron.tools.results import Report, Table, in_processes, resident_peak
from tepo_megatron.trainer.megatron.parallel.collectives import all_gather_json, broadcast_json
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.geometry import ReshardPlan, ShardLayout
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel
from tepo_megatron.weights.reshard import reshard_plan
from tepo_megatron.weights.transfer import digests as verification
from tepo_megatron.weights.transfer import full_tensors as broadcast
from tepo_megatron.weights.transfer import move
from tepo_megatron.weights.transfer.full_tensors import GatherPlan
from tepo_megatron.weights.transfer.transport import connect, listen
from tepo_megatron.weights.transfer.transports.gloo import TRANSPORT, GlooGroup

_HOST, _TIMEOUT_S = "127.0.0.1", 120.0
_OURS, _RAW, _GATHER = "shard to shard", "raw point-to-point copy", "gather and broadcast"


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
        more = {"head_dim": 64, "tie_word_embeddings": False, "max_position_embeddings": 2048}
        return ModelSpec.of(llama(self.layers, 1024, 2816, 32000, 16, 8, **more), "the benchmark's model")

    @property
    def splits(self) -> tuple[MegatronParallel, VllmParallel]:
        return MegatronParallel(tp=self.tp, pp=self.pp), VllmParallel(tp=self.server_tp, replicas=self.servers)

    @property
    def plan(self) -> ReshardPlan:
        return reshard_plan(self.spec, *self.splits)

    def run(self, repeats: int) -> list[dict[str, Any]]:
        """Returns a row per method. Peaks are bytes of a rank beyond its shards (None: unknown), ``largest_link`` and
        ``digest_seconds`` the busiest rank's. Raises ValueError for an impossible split, RuntimeError if two methods'
        weights differ.
        """
        world = self.plan.num_sources + self.plan.num_destinations
        return list(in_processes(_measure, world, self, repeats, backend="gloo"))

    def report(self, results: Sequence[Mapping[str, Any]], repeats: int) -> Report:
        seconds = {row["method"]: row["seconds"] for row in results}
        rows = []
        for row in results:
            peaks = ("–" if row[name] is None else f"{row[name] / 1e6:.0f}" for name in ("peak_source", "peak_destination"))
            rows.append(
                {
                    "method": row["method"],
                    "seconds": f"{row['seconds']:.3f}",
                    "× gather": f"{row['seconds'] / seconds[_GATHER]:.2f}",
                    "× raw": f"{row['seconds'] / seconds[_RAW]:.2f}",
                    "MB on the wire": f"{row['wire_bytes'] / 1e6:.1f}",
                    "MB into the busiest rank": f"{row['largest_link'] / 1e6:.1f}",
                    "peak MB, trainer / server": " / ".join(peaks),
                    "of it digests, s": f"{row['digest_seconds']:.3f}" if row["digest_seconds"] else "–",
                }
            )
        record = {"setting": asdict(self), "repeats": repeats, "results": results}
        stem = f"reshard-tp{self.tp}pp{self.pp}-to-{self.servers}xtp{self.server_tp}-{self.dtype}"
        return Report(stem, record, [Table.of(rows)], f"best of {repeats}")


class _Rank:
    def __init__(self, setting: ReshardSetting, rank: int) -> None:
        source, destination = setting.splits
        self.plan, self.rank, self._copies = setting.plan, rank, setting.servers
        self._layouts = source.layouts(setting.spec)
        self._layout: ShardLayout = (self._layouts + destination.layouts(setting.spec))[rank]
        self._dtype: torch.dtype = getattr(torch, setting.dtype)
        self.is_source = rank < self.plan.num_sources
        self.params = {name: torch.zeros(shape, dtype=self._dtype) for name, shape in self._layout.params.items()}
        for number, param in enumerate(self.params.values()):
            generator = torch.Generator().manual_seed(1000 * rank + number)
            if self.is_source and param.dim() > 1:
                param.normal_(generator=generator)
            else:
                param.fill_(1.0)
        plan = self.plan
        limit, _ = move.message_limits(plan, TRANSPORT)
        self._queues = move.queues(move.MoveEnd.of(plan, rank), itemsize=self._dtype.itemsize, limit=limit)
        world = list(range(plan.num_sources + plan.num_destinations))
        pairs = _group(world, rank)
        assert pairs is not None
        self.pairs = pairs
        self._star = _group([0, *world[plan.num_sources :]], rank)  # the trainer's rank 0 and the destinations
        self.digest_seconds = 0.0

    def reshard(self, digest: Callable[[Tensor], Tensor]) -> None:
        step = move.send if self.is_source else move.receive
        with mock.patch.object(move, "digest", digest):
            step(self.pairs, self._queues, self.params, self._dtype)

    def timed_digest(self, data: Tensor) -> Tensor:
        start = time.thread_time()
        result = verification.digest(data)
        self.digest_seconds += time.thread_time() - start
        return result

    def gather_and_broadcast(self) -> None:
        shapes = self._layout.shapes
        manifest = [(name, shape, str(self._dtype).removeprefix("torch.")) for name, shape in shapes.items()]
        if self.is_source:
            stream = GatherPlan(self._layouts).gather_to_root(self.params)
            if self._star is None:
                for _ in stream:
                    continue
            else:
                broadcast.send(self._star, manifest, (tensor for _, tensor in stream if tensor is not None))
            return
        assert self._star is not None
        expected: dict[str, list[Any]] = {}
        for shard in self._layout.shards:
            expected.setdefault(shard.tensor, []).append(shard)
        for name, tensor in broadcast.receive(self._star, manifest):
            for shard in expected.get(name, ()):
                self.params[shard.param][shard.param_box.slices] = tensor[shard.box.slices]

    def raw_copy(self) -> None:
        """As large as the messages, without digests."""
        queues, start = self._queues, self.pairs.send if self.is_source else self.pairs.receive
        largest = max(move.numel_of(message) for queue in queues.values() for message in queue)
        slots = {(peer, slot): torch.zeros(largest, dtype=self._dtype) for peer in queues for slot in range(move.WINDOW)}
        for number in range(max(map(len, queues.values())) + move.WINDOW):
            for peer, queue in queues.items():
                if 0 <= number - move.WINDOW < len(queue):
                    self.pairs.wait(peer, number - move.WINDOW)
                if number < len(queue):
                    numel = move.numel_of(queue[number])
                    start(slots[peer, number % move.WINDOW][:numel], peer, number)

    def received_bytes(self, method: str) -> int:
        elements = 0
        if method == _GATHER and (not self.is_source or self.rank == 0):
            elements = sum(planned.numel for planned in self.plan.moves) // self._copies
            elements -= sum(tensor.numel() for tensor in self.params.values()) if self.is_source else 0
        elif method != _GATHER and not self.is_source:
            elements = sum(move.numel_of(message) for queue in self._queues.values() for message in queue)
        return elements * self._dtype.itemsize


def _group(members: list[int], rank: int) -> GlooGroup | None:
    """Returns None outside the group. All ranks must call."""
    store, place = listen(_HOST) if rank == members[0] else (None, "")
    place = broadcast_json(place, source=members[0], device=torch.device("cpu"))
    if rank not in members:
        return None
    store = store or connect(_HOST, place, _TIMEOUT_S)
    return GlooGroup(store, _HOST, members.index(rank), len(members), _TIMEOUT_S)


@torch.no_grad()
def _measure(rank: int, setting: ReshardSetting, repeats: int) -> list[dict[str, Any]]:
    local = _Rank(setting, rank)
    methods: dict[str, Callable[[], None]] = {
        _OURS: partial(local.reshard, local.timed_digest),
        "shard to shard, no digests": partial(local.reshard, lambda data: torch.zeros((), dtype=torch.int64)),
        _RAW: local.raw_copy,
        _GATHER: local.gather_and_broadcast,
    }
    digest_seconds: list[float] = []
    outcomes: set[int] = set()  # hashes of all received parameters
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    peaks: dict[str, list[int]] = {name: [] for name in methods}
    for _ in range(repeats):  # in turn, so that a busy moment of the machine affects all methods
        for name, work in methods.items():
            local.digest_seconds = 0.0
            with resident_peak(peaks[name]):
                dist.barrier()
                start = time.perf_counter()
                work()
                seconds[name].append(max(_of_all_ranks(time.perf_counter() - start)))
            if name == _OURS:
                digest_seconds.append(local.digest_seconds)
            if not local.is_source and name != _RAW:
                outcomes.add(hash(tuple(int(verification.digest(tensor)) for tensor in local.params.values())))
                for tensor in local.params.values():
                    tensor.zero_()
    if len(outcomes) > 1:
        raise RuntimeError(f"rank {rank} got different weights by different ways; the measurement is void")
    rows = []
    for name in methods:
        received, peak = _of_all_ranks(local.received_bytes(name)), _of_all_ranks(max(peaks[name], default=-1))
        sources, known = local.plan.num_sources, min(peak) >= 0
        rows.append(
            {
                **{"method": name, "seconds": min(seconds[name]), "wire_bytes": sum(received), "largest_link": max(received)},
                "peak_source": max(peak[:sources]) if known else None,
                "peak_destination": max(peak[sources:]) if known else None,
                "digest_seconds": max(_of_all_ranks(min(digest_seconds))) if name == _OURS else 0.0,
            }
        )
    local.pairs.close()
    return rows


def _of_all_ranks(value: float) -> list[Any]:
    return all_gather_json(value, device=torch.device("cpu"))

"""The processes of ``tepo bench reshard``: trainer ranks first, then the servers' workers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.tools.bench.settings import ReshardSetting
from tepo_megatron.trainer.megatron.platform.collectives import broadcast_json
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.geometry import ReshardPlan, ShardLayout
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel, megatron_ranks, vllm_ranks
from tepo_megatron.weights.reshard.plan import reshard_plan
from tepo_megatron.weights.transfer import digests as verification
from tepo_megatron.weights.transfer import full_tensors as broadcast
from tepo_megatron.weights.transfer import messages, move
from tepo_megatron.weights.transfer.full_tensors import gather_sources, gather_to_root
from tepo_megatron.weights.transfer.transport import connect, listen
from tepo_megatron.weights.transfer.transports.gloo import GlooGroup

HOST, TIMEOUT_S = "127.0.0.1", 120.0
Params = dict[str, Tensor]


def _spec_of(setting: ReshardSetting) -> ModelSpec:
    """A Llama with 206 M parameters at 12 layers."""
    return ModelSpec(
        architecture="LlamaForCausalLM",
        num_layers=setting.layers,
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


def splits(setting: ReshardSetting) -> tuple[MegatronParallel, VllmParallel]:
    return MegatronParallel(tp=setting.tp, pp=setting.pp), VllmParallel(tp=setting.server_tp, replicas=setting.servers)


def plan_of(setting: ReshardSetting) -> ReshardPlan:
    """Raises ValueError for a split that Megatron or vLLM cannot make."""
    return reshard_plan(_spec_of(setting), *splits(setting))


@dataclass
class Rank:
    rank: int
    plan: ReshardPlan
    layouts: list[ShardLayout]
    """The source ranks' layouts."""
    params: Params
    queues: messages.Queues
    pairs: GlooGroup
    star: GlooGroup | None
    """The trainer's rank 0 and the destinations; None on other trainer ranks."""
    own: ShardLayout
    copies: int
    """Servers, each with a whole model."""
    digest_seconds: float = 0.0

    @property
    def is_source(self) -> bool:
        return self.rank < self.plan.num_sources

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.params.values())).dtype

    def reshard(self) -> None:
        if self.is_source:
            move.send(self.pairs, self.queues, self.params, self.dtype)
        else:
            move.receive(self.pairs, self.queues, self.params, self.dtype)

    def reshard_timed(self) -> None:
        self.digest_seconds = 0.0

        def timed(data: Tensor) -> Tensor:
            began = time.thread_time()
            result = verification.digest(data)
            self.digest_seconds += time.thread_time() - began
            return result

        with mock.patch.object(move, "digest", timed):
            self.reshard()

    def reshard_unverified(self) -> None:
        with mock.patch.object(move, "digest", return_value=torch.zeros((), dtype=torch.int64)):
            self.reshard()

    def gather_and_broadcast(self) -> None:
        """Gather each full tensor on rank 0 and broadcast it to all destinations, which slice it."""
        shapes = self.own.shapes
        manifest = [(name, shape, str(self.dtype).removeprefix("torch.")) for name, shape in shapes.items()]
        if self.is_source:
            stream = gather_to_root(gather_sources(self.layouts), shapes, self.params)
            if self.star is None:
                for _ in stream:
                    continue
            else:
                broadcast.send(self.star, manifest, (tensor for _, tensor in stream if tensor is not None))
            return
        assert self.star is not None
        expected: dict[str, list[Any]] = {}
        for shard in self.own.shards:
            expected.setdefault(shard.tensor, []).append(shard)
        for name, tensor in broadcast.receive(self.star, manifest):
            for shard in expected.get(name, ()):
                self.params[shard.param][shard.param_box.slices] = tensor[shard.box.slices]

    def raw_copy(self) -> None:
        """Messages of equal sizes between the same ranks: plain buffers, no digests."""
        largest = max(messages.numel_of(message) for queue in self.queues.values() for message in queue)
        slots = {
            (peer, slot): torch.zeros(largest, dtype=self.dtype) for peer in self.queues for slot in range(messages.WINDOW)
        }
        start = self.pairs.send if self.is_source else self.pairs.receive
        for number in range(max(map(len, self.queues.values())) + messages.WINDOW):
            for peer, queue in self.queues.items():
                if 0 <= number - messages.WINDOW < len(queue):
                    self.pairs.wait(peer, number - messages.WINDOW)
                if number < len(queue):
                    numel = messages.numel_of(queue[number])
                    start(slots[peer, number % messages.WINDOW][:numel], peer, number)

    def received(self, method: str) -> int:
        if method == "gather and broadcast":
            everything = sum(planned.numel for planned in self.plan.moves) // self.copies
            if self.is_source:
                held = sum(tensor.numel() for tensor in self.params.values())
                return (everything - held) * self.dtype.itemsize if self.rank == 0 else 0
            return everything * self.dtype.itemsize
        if self.is_source:
            return 0
        elements = sum(messages.numel_of(message) for queue in self.queues.values() for message in queue)
        return elements * self.dtype.itemsize


def _make_rank(setting: ReshardSetting, rank: int) -> Rank:
    plan, spec = plan_of(setting), _spec_of(setting)
    source, destination = splits(setting)
    layouts, targets = megatron_ranks(spec, source), vllm_ranks(spec, destination)
    own = (layouts + targets)[rank]
    dtype: torch.dtype = getattr(torch, setting.dtype)
    params = {name: torch.zeros(shape, dtype=dtype) for name, shape in own.params.items()}
    is_source = rank < plan.num_sources
    for number, param in enumerate(params.values()):
        generator = torch.Generator().manual_seed(1000 * rank + number)
        if is_source and param.dim() > 1:
            param.normal_(generator=generator)
        else:
            param.fill_(1.0)
    ends = messages.source_ends(plan, rank) if is_source else messages.destination_ends(plan, rank - plan.num_sources)
    queues = messages.queues(ends, itemsize=dtype.itemsize, limit=messages.message_bytes(plan))
    world = list(range(plan.num_sources + plan.num_destinations))
    pairs = _group(world, rank)
    assert pairs is not None
    return Rank(
        rank=rank,
        plan=plan,
        layouts=layouts,
        params=params,
        queues=queues,
        pairs=pairs,
        star=_group([0, *world[plan.num_sources :]], rank),
        own=own,
        copies=setting.servers,
    )


def worker(rank: int, setting: ReshardSetting, place: str, repeats: int, inbox: Any) -> None:
    """Run one process. Rank 0 puts the measurements into ``inbox`` as a JSON list."""
    torch.set_num_threads(1)
    world = setting.sources + setting.destinations
    dist.init_process_group("gloo", store=connect(HOST, place, TIMEOUT_S), rank=rank, world_size=world)
    with torch.no_grad():
        own = _make_rank(setting, rank)
        methods: dict[str, Callable[[], None]] = {
            "shard to shard": own.reshard_timed,
            "shard to shard, no digests": own.reshard_unverified,
            "raw point-to-point copy": own.raw_copy,
            "gather and broadcast": own.gather_and_broadcast,
        }
        rows, digest_seconds = [], list[float]()
        outcomes: list[int] = []  # one hash of all received parameters for each method and repeat
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        peaks: dict[str, list[int]] = {name: [] for name in methods}
        for _ in range(repeats):  # in turn, so that a busy moment of the machine affects all methods
            for name, work in methods.items():
                with _peak(peaks[name]):
                    seconds[name].append(_slowest(work))
                if name == "shard to shard":
                    digest_seconds.append(own.digest_seconds)
                if not own.is_source and name != "raw point-to-point copy":
                    outcomes.append(hash(tuple(int(verification.digest(tensor)) for tensor in own.params.values())))
                    for tensor in own.params.values():
                        tensor.zero_()
        if len(set(outcomes)) > 1:
            raise RuntimeError(f"rank {rank} got different weights by different ways; the measurement is void")
        for name in methods:
            digest_s = _greatest(min(digest_seconds)) if name == "shard to shard" else 0.0
            rows.append(_row(own, name, min(seconds[name]), max(peaks[name], default=None)) | {"digest_seconds": digest_s})
    if rank == 0:
        inbox.put(json.dumps(rows))
    dist.barrier()
    own.pairs.close()
    dist.destroy_process_group()  # an interpreter that exits while gloo's threads run may abort


def _row(own: Rank, method: str, seconds: float, peak: int | None) -> dict[str, Any]:
    mine = torch.tensor([own.received(method), -1 if peak is None else peak])
    gathered = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    received = [int(pair[0]) for pair in gathered]
    peaks = [int(pair[1]) for pair in gathered]
    known = min(peaks) >= 0
    return {
        "method": method,
        "seconds": seconds,
        "wire_bytes": sum(received),
        "largest_link": max(received),
        "peak_source": max(peaks[: own.plan.num_sources]) if known else None,
        "peak_destination": max(peaks[own.plan.num_sources :]) if known else None,
    }


def _slowest(work: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    work()
    return _greatest(time.perf_counter() - began)


def _greatest(value: float) -> float:
    result = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return float(result)


@contextmanager
def _peak(into: list[int]) -> Iterator[None]:
    """Append the block's peak of resident memory, in added bytes; nothing if unknown."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        yield
        return
    reset.write_text("5")  # resets VmHWM, the peak of resident memory, to its current value
    before = _kib(status, "VmRSS")
    yield
    into.append(max(0, _kib(status, "VmHWM") - before) * 1024)


def _kib(status: Path, key: str) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(key))


def _group(members: list[int], rank: int) -> GlooGroup | None:
    """None on ranks outside the group. All ranks must call, to learn the address."""
    store, place = listen(HOST) if rank == members[0] else (None, "")
    place = broadcast_json(place, source=members[0], device=torch.device("cpu"))
    if rank not in members:
        return None
    store = store or connect(HOST, place, TIMEOUT_S)
    return GlooGroup(store, HOST, members.index(rank), len(members), TIMEOUT_S)

"""Weights between two processes through CUDA IPC on one GPU, and through NCCL where there are two; memory that leaves a GPU."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel
from tepo_megatron.weights.reshard import reshard_plan
from tepo_megatron.weights.table import tensor_shapes
from tepo_megatron.weights.transfer import move
from tepo_megatron.weights.transfer.sender import ReceiveOrder, ShardSender
from tepo_megatron.weights.transfer.transport import connect
from tepo_megatron.weights.transfer.transports import Member, join
from tests.support.launch import run_dist
from tests.support.reshard_models import numbered_model, parameters, small_spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

HOST, TIMEOUT_S = "127.0.0.1", 60.0
UPDATES = 3
SPEC = small_spec(hidden_size=192, ffn_size=512, vocab_size=1000)  # messages of many sizes, some of them direct
SOURCES, DESTINATIONS = MegatronParallel().layouts(SPEC), VllmParallel().layouts(SPEC)
MODEL = numbered_model(tensor_shapes(SPEC))

KINDS = [
    pytest.param("ipc", id="ipc"),
    pytest.param(
        "nccl", id="nccl", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank")
    ),
]


def shard_sender(plan: Any, params: dict[str, Tensor], rank: int, device: torch.device, kind: str) -> ShardSender:
    options: dict[str, Any] = {"broadcast_from_root": lambda value: value, "timeout_s": TIMEOUT_S, "device": device}
    return ShardSender(plan, params, rank=rank, dtype=torch.float32, transport=kind, **options)


def send_updates(sender: ShardSender, params: dict[str, Tensor], updates: int) -> None:
    """The values of each are twice those of the one before."""
    for _ in range(updates):
        sender.send_shards()
        for tensor in params.values():
            tensor *= 2


def receive_updates(
    kind: str, rank: int, world: int, device: torch.device, first: dict[str, Tensor], updates: int
) -> tuple[Any, Any, list[bool]]:
    """The order, the group, and whether each update has brought what it should."""
    place = [""]
    dist.broadcast_object_list(place, src=0)
    store = connect(HOST, place[0], TIMEOUT_S)
    order = ReceiveOrder.decode(store.get(ReceiveOrder.key(rank)))
    group = join(kind, store, Member(rank, world, device, HOST, writers=order.writers), TIMEOUT_S)
    right = []
    for update in range(updates):
        found = {name: torch.zeros(tensor.shape, device=device) for name, tensor in first.items()}
        move.receive(group, order.incoming, found, order.wire)
        right.append(all(torch.equal(found[name].cpu(), first[name].float() * 2**update) for name in found))
    return order, group, right


def sends(kind: str, device: torch.device, updates: int, dies: bool) -> Any:
    plan = reshard_plan(SPEC, MegatronParallel(), VllmParallel(), {0: 0} if kind == "ipc" else None)
    params = {name: tensor.float().to(device) for name, tensor in parameters(SOURCES, MODEL)[0].items()}
    sender = shard_sender(plan, params, 0, device, kind)
    dist.broadcast_object_list([sender.open_rendezvous(HOST)], src=0)
    sender.join_group()
    send_updates(sender, params, updates)
    failed_after = -1.0
    if dies:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"sending|NCCL could not start"):
            sender.send_shards()
        failed_after = time.monotonic() - began
    sender.close()
    return failed_after


def receives(kind: str, device: torch.device, updates: int, dies: bool) -> Any:
    _, group, right = receive_updates(kind, 1, 2, device, parameters(DESTINATIONS, MODEL)[0], updates)
    if dies:
        time.sleep(1)
    group.close()
    return right


def work(rank: int, world: int, kind: str, updates: int, dies: bool) -> Any:
    device = torch.device("cuda", rank if kind == "nccl" else 0)
    torch.cuda.set_device(device)
    return (receives if rank else sends)(kind, device, updates, dies)


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_arrives_update_after_update(kind: str) -> None:
    _, right = run_dist(2, work, kind, UPDATES, False)
    assert right == [True] * UPDATES


@pytest.mark.parametrize("updates", [0, UPDATES])  # NCCL has not connected the two before their first message
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_leaves_ends_the_sending_long_before_the_time_out(kind: str, updates: int) -> None:
    failed_after, right = run_dist(2, work, kind, updates, True)
    assert right == [True] * updates
    assert 0 <= failed_after < TIMEOUT_S / 2


def relays(rank: int, world: int) -> Any:
    """Two trainer ranks and two workers, a pair on each of two GPUs; half of each worker's weights come from the other GPU."""
    device = torch.device("cuda", rank % 2)
    torch.cuda.set_device(device)
    source, destination = MegatronParallel(tp=2), VllmParallel(tp=1, replicas=2)
    plan = reshard_plan(SPEC, source, destination, {0: 0, 1: 1})
    if rank < 2:
        shards = parameters(source.layouts(SPEC), MODEL)[rank]
        params = {name: tensor.float().to(device) for name, tensor in shards.items()}
        sender = shard_sender(plan, params, rank, device, "ipc")
        place = [sender.open_rendezvous(HOST) if rank == 0 else ""]
        dist.broadcast_object_list(place, src=0)
        sender._rendezvous = [HOST, place[0]]
        sender.join_group()
        send_updates(sender, params, UPDATES)
        dist.barrier()
        sender.close()
        return None
    expected = parameters(destination.layouts(SPEC), MODEL)[rank - 2]
    order, group, right = receive_updates("ipc", rank, world, device, expected, UPDATES)
    assert order.relayed
    dist.barrier()
    group.close()
    return right


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_what_goes_to_another_gpu_is_passed_on_there() -> None:
    assert run_dist(4, relays)[2:] == [[True] * UPDATES] * 2


def test_what_leaves_a_gpu_frees_its_memory_and_comes_back() -> None:
    from tepo_megatron.trainer.megatron.policy.offload import Offloader

    device = torch.device("cuda", 0)
    whole = torch.randn(2**24, device=device)
    views, alone = [whole[: 2**20].view(1024, 1024), whole[2**20 :]], torch.randn(1000, device=device)
    before, used = [tensor.cpu() for tensor in (*views, alone)], torch.cuda.memory_allocated()
    optimizer = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[], state={}))
    ddp = SimpleNamespace(offload_grad_buffers=lambda **_: None, restore_grad_buffers=lambda **_: None)
    chunks = [torch.nn.ParameterList([*views, alone])]
    policy: Any = SimpleNamespace(chunks=chunks, ddp=[ddp], optimizer=optimizer)
    offloader = Offloader(policy, device, barrier=lambda: None)
    for _ in range(2):
        offloader.keep()
        assert offloader.most_offloaded >= whole.nbytes + alone.nbytes
        assert torch.cuda.memory_allocated() <= used - whole.nbytes
        offloader.keep("weights")
        assert all(torch.equal(tensor.cpu(), value) for tensor, value in zip((*views, alone), before, strict=True))

"""Moving: the destination's parameters become what the plan promises, and digests notice damage."""

import re
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tepo_megatron.plan.shapes import resolve_spec
from tepo_megatron.weights.architecture import EXPERT_BIAS
from tepo_megatron.weights.geometry import Box, Region, Shard
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel
from tepo_megatron.weights.reshard import reshard_plan
from tepo_megatron.weights.transfer import digests as module
from tepo_megatron.weights.transfer import move
from tepo_megatron.weights.transfer.digests import BLOCK_BYTES, TensorDigests, digest, fingerprint
from tepo_megatron.weights.transfer.move import MoveEnd, changed_since, numel_of, queues
from tepo_megatron.weights.transfer.transports import find_transport
from tests.support.reshard_models import MOE, Case, cases, small_spec
from tests.support.transfers import Mailbox, blank, carry_out, mailboxes, setting

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16


@pytest.mark.parametrize(("source", "to", "wire"), [(F32, BF16, BF16), (BF16, F32, BF16), (F16, BF16, BF16), (F32, F32, F32)])
def test_the_smaller_dtype_travels(source: torch.dtype, to: torch.dtype, wire: torch.dtype) -> None:
    assert move.wire_dtype(source, to) == wire
    plan, sources, expected = setting(Case(small_spec(), MegatronParallel(2, 2), VllmParallel(2), {}))
    sources = [{name: tensor.sin().to(source) for name, tensor in params.items()} for params in sources]
    found = [blank(params, to) for params in expected]
    carry_out(plan, sources, found, limit=4096)
    for params, got in zip(expected, found, strict=True):
        assert all(torch.equal(got[name], tensor.sin().to(source).to(to)) for name, tensor in params.items())


def typed(params: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.float32 if "bias" in name else dtype) for name, tensor in params.items()}


@settings(max_examples=10)
@given(limit=st.sampled_from([6, 64, 2**20]), kept=st.sampled_from([torch.bfloat16, torch.float32]))
def test_biases_in_fp32_keep_their_bits_where_weights_travel_in_16(limit: int, kept: torch.dtype) -> None:
    """Also where a message ends within one. A message has one digest of each parameter, whose parts are next to each other."""
    spec = small_spec(architecture="Glm4MoeForCausalLM", experts=MOE["Glm4MoeForCausalLM"], dense_layers=1, dense_ffn_size=8)
    plan, sources, expected = setting(Case(spec, MegatronParallel(2, 2, 2, ep=2), VllmParallel(2), {}))
    sources = [typed({name: tensor.sin() for name, tensor in params.items()}, torch.bfloat16) for params in sources]
    found = [typed(blank(params), kept) for params in expected]
    with mock.patch.object(move, "digest", wraps=digest) as counted:
        carry_out(plan, sources, found, limit=limit)
    ends = (MoveEnd.of(plan, rank) for rank in range(plan.world_size))
    sent = [queue for end in ends for queue in queues(end, itemsize=2, limit=limit).values()]
    assert counted.call_count <= sum(len({segment.end.name for segment in message}) for queue in sent for message in queue)
    for rank, got in enumerate(found):
        wanted = {name: expected[rank][name].sin().float() for name in got if name.endswith(EXPERT_BIAS)}
        assert len(wanted) == spec.num_layers - 1
        assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


@settings(max_examples=40)
@given(data=st.data(), case=cases(), limit=st.sampled_from([64, 2**20]), kept=st.sampled_from([BF16, F32]))
def test_what_changes_after_it_arrived_is_named(data: st.DataObject, case: Case, limit: int, kept: torch.dtype) -> None:
    plan, sources, expected = setting(case)
    found, arrived = [typed(blank(params), kept) for params in expected], dict[int, Any]()
    receive = move.receive

    def noting(box: Mailbox, incoming: move.Queues, *rest: Any) -> dict[int, Tensor]:
        digests = receive(box, incoming, *rest)
        arrived[box.rank - plan.num_sources] = digests, incoming
        return digests

    with mock.patch.object(move, "receive", noting):
        carry_out(plan, [typed(params, BF16) for params in sources], found, limit=limit)
    victim = data.draw(st.sampled_from(sorted(rank for rank in arrived if arrived[rank][0])))
    digests, incoming = arrived[victim]
    assert changed_since(digests, incoming, found[victim], BF16) == []
    moved = data.draw(st.sampled_from(list(plan.receives(victim))))
    part = moved.destination_region.view(found[victim][moved.destination_param])
    index = tuple(data.draw(st.integers(0, size - 1)) for size in part.shape)
    part[index] = part[index] * 2 + 1
    assert changed_since(digests, incoming, found[victim], BF16) == [moved.destination_param]
    others = {name: param for name, param in found[victim].items() if name != moved.destination_param}
    assert changed_since(digests, incoming, others, BF16) == []


class Merging(dict[str, Tensor]):
    """Makes a new tensor at each access, as LoRA's mapping does, and counts those that are alive."""

    def __init__(self, params: dict[str, Tensor]) -> None:
        super().__init__(params)
        self.made, self.alive, self.most = Counter[str](), 0, 0

    def __getitem__(self, name: str) -> Tensor:
        self.made[name] += 1
        memory = super().__getitem__(name).numpy().copy()
        weakref.finalize(memory, self._freed)
        self.alive += 1
        self.most = max(self.most, self.alive)
        return torch.from_numpy(memory)  # whose views keep it too

    def _freed(self) -> None:
        self.alive -= 1


@settings(max_examples=12)
@given(case=cases(), limit=st.sampled_from([8, 64, 1000]), alone=st.sampled_from([8, 2**18]))
def test_a_parameter_is_merged_once_for_a_peer_at_most_and_few_are_kept(case: Case, limit: int, alone: int) -> None:
    plan, sources, expected = setting(case)
    merging, found = [Merging(params) for params in sources], [blank(params) for params in expected]
    carry_out(plan, merging, found, limit=limit, alone=alone)
    for params, got in zip(expected, found, strict=True):
        assert all(torch.equal(got[name], tensor) for name, tensor in params.items())
    for rank, params in enumerate(merging):
        ends = MoveEnd.of(plan, rank)
        pairs = Counter(name for name, _ in {(end.param, end.peer) for end in ends})
        assert params.made <= pairs
        assert params.most <= 2 * len({end.peer for end in ends})


class Damaging(Mailbox):
    """Flips one bit of the ``at``-th byte that this rank receives of weights."""

    at, seen = 0, 0

    def wait(self, peer: int, number: int) -> None:
        landing = self.landing.get((peer, number))
        super().wait(peer, number)
        if landing is not None and landing.dtype == torch.float32:
            raw = landing.view(torch.uint8)
            if self.seen <= self.at < self.seen + raw.numel():
                raw[self.at - self.seen] ^= 1 << self.at % 8
            self.seen += raw.numel()


@settings(max_examples=40)
@given(data=st.data(), case=cases(), limit=st.sampled_from([64, 2**20]))
def test_one_flipped_bit_is_noticed_and_its_tensor_ranks_and_digests_are_named(
    data: st.DataObject, case: Case, limit: int
) -> None:
    plan, sources, expected = setting(case)
    sources = [{name: tensor.float() for name, tensor in params.items()} for params in sources]
    boxes = mailboxes(plan.world_size)
    victim = data.draw(st.integers(0, plan.num_destinations - 1), label="destination rank")
    size = sum(moved.numel * 4 for moved in plan.receives(victim))
    bad = boxes[plan.num_sources + victim] = Damaging(plan.num_sources + victim, boxes[0].letters)
    bad.at = data.draw(st.integers(0, size - 1), label="byte")
    found = [blank(params, torch.float32) for params in expected]
    with pytest.raises(RuntimeError, match=r"1 tensors did not arrive as they were sent") as caught:
        carry_out(plan, sources, found, limit=limit, boxes=boxes)
    named = re.search(r"'(\S+)' \(sent ([0-9a-f]{16}), arrived ([0-9a-f]{16})\) from rank (\d+)", str(caught.value))
    assert named[2] != named[3]
    wrong = [name for name, wanted in expected[victim].items() if not torch.equal(wanted.float(), found[victim][name])]
    assert wrong == [named[1]]
    assert any(moved.source == int(named[4]) for moved in plan.receives(victim) if moved.destination_param == named[1])


ends = st.builds(
    lambda peer, rows, inner, count, gap: MoveEnd(
        peer, "p", "p", Region(Box((0, *[0] * len(inner)), (rows, *inner)), count, rows + gap if count > 1 else 0)
    ),
    st.integers(0, 2), st.integers(1, 9), st.lists(st.integers(1, 5), max_size=2), st.integers(1, 5), st.integers(0, 3),
)  # fmt: skip


@given(st.lists(ends, max_size=6), st.integers(2, 300), st.sampled_from([20, 300]))
def test_messages_are_bounded_and_cover_every_element_once(given_ends: list[MoveEnd], limit: int, alone: int) -> None:
    found = queues(given_ends, itemsize=2, limit=limit, alone=alone)
    for peer in {end.peer for end in given_ends}:
        for message in found[peer]:
            if numel_of(message) * 2 > limit:
                assert [segment.rows[1] - segment.rows[0] for segment in message] == [1]
    for number, end in enumerate(given_ends):
        height = (end.region.count - 1) * end.region.step + end.region.box.stop[0]
        param = torch.zeros(height, *end.region.box.stop[1:])
        for segment in (segment for message in found[end.peer] for segment in message if segment.end is given_ends[number]):
            segment.view(param, param.dtype).add_(1)
        assert param.sum() == end.region.numel
        assert param.max() == 1


def test_a_worker_of_a_70b_model_gets_few_messages_on_gpus_and_all_fit_the_staging_memory() -> None:
    plan = reshard_plan(resolve_spec("Llama-3.3-70B-Instruct")[0], MegatronParallel(8, 4, 2), VllmParallel(4, 1, 8))
    for name, messages, rounds in (("gloo", 15_500, 2_000), ("nccl", 1_100, 150), ("ipc", 1_100, 150)):
        transport = find_transport(name)
        limit, alone = move.message_limits(plan, transport)
        for rank in (0, plan.num_sources, plan.world_size - 1):
            found = queues(MoveEnd.of(plan, rank), itemsize=2, limit=limit, alone=alone).values()
            assert move.count_messages(plan, rank, 2, transport) == (sum(map(len, found)), max(map(len, found)))
            assert move.count_messages(plan, rank, 2, transport) <= (messages, rounds)
            assert max(map(len, found)) <= rounds
            assert sum(max(map(numel_of, queue)) for queue in found) * 2 * move.WINDOW <= transport.staging_bytes


class Walked(tuple[Any, ...]):
    times = 0

    def __iter__(self) -> Iterator[Any]:
        type(self).times += 1
        return super().__iter__()


def test_one_pass_over_all_moves_finds_those_of_every_worker() -> None:
    """Rank 0 tells each worker of a large model's its own, at the first update and after a server is lost."""
    plan = reshard_plan(small_spec(num_layers=2), MegatronParallel(tp=2), VllmParallel(tp=2, replicas=3))
    walked = replace(plan, moves=Walked(plan.moves))
    before = Walked.times
    ends = [MoveEnd.of(walked, plan.num_sources + destination) for destination in range(plan.num_destinations)]
    assert Walked.times == before + 1
    for destination, found in enumerate(ends):
        expected = [moved for moved in plan.moves if moved.destination == destination]
        assert [(end.peer, end.param, end.region) for end in found] == [
            (moved.source, moved.destination_param, moved.destination_region) for moved in expected
        ]


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn]


def of(**tensors: Tensor) -> int:
    boxes = {name: Box.whole(tensor.shape) for name, tensor in tensors.items()}
    return fingerprint([Shard(name, box, name, box) for name, box in boxes.items()], tensors)


@st.composite
def split_tensors(draw: st.DrawFn) -> tuple[Tensor, list[Box]]:
    """A tensor of one to three dimensions, and boxes that cover it once: a grid of uneven cuts."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    torch.manual_seed(draw(st.integers(0, 1000)))
    tensor = torch.randn(shape).to(draw(st.sampled_from(DTYPES)))
    boxes = [Box((), ())]
    for extent in shape:
        cuts = [0, *sorted(draw(st.sets(st.integers(1, extent), max_size=3)) - {extent}), extent]
        boxes = [Box((*box.start, a), (*box.stop, b)) for box in boxes for a, b in pairwise(cuts)]
    return tensor, boxes


@given(split_tensors(), st.sampled_from([40, module._CHUNK]))
def test_parts_add_up_to_the_whole(case: tuple[Tensor, list[Box]], chunk: int) -> None:
    """Also where those are taken a chunk at a time."""
    tensor, boxes = case
    total = 0
    for box in boxes:  # each part as a rank would hold it: a parameter of its own, behind a row of something else
        part = tensor[box.slices]
        param = torch.cat([torch.zeros_like(part[:1].float()), part.float()]).to(tensor.dtype)
        at = Box((1, *[0] * (part.ndim - 1)), (1 + part.shape[0], *part.shape[1:]))
        with mock.patch.object(module, "_CHUNK", chunk):
            total += fingerprint([Shard("w", box, "p", at)], {"p": param})
    assert total % 2**64 == of(w=tensor)


@given(st.data())
def test_any_other_element_makes_another(data: st.DataObject) -> None:
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    at = data.draw(st.integers(0, 34))
    bit = data.draw(st.integers(0, 31))
    changed = tensor.clone()
    changed.view(torch.int32).view(-1)[at] ^= 1 << bit if bit < 31 else -(2**31)
    assert of(w=changed) != of(w=tensor)


def test_the_place_counts() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    swapped = a.clone()
    swapped[2, 3], swapped[3, 2] = a[3, 2], a[2, 3]
    others = [a, a.t().contiguous(), a.roll(1, 0), swapped, a.flip(1)]
    assert len({of(x=b, y=a), of(z=a, y=b), *(of(x=other, y=b) for other in others)}) == 7


def test_it_is_the_same_in_all_versions() -> None:
    """Checkpoints and rollouts of earlier versions carry it."""
    assert of(w=torch.arange(12, dtype=torch.float32).view(3, 4)) == 0x34CD077FCF800000


# -- messages


@given(st.integers(1, 100) | st.integers(BLOCK_BYTES - 9, BLOCK_BYTES + 9) | st.just(3 * BLOCK_BYTES + 5), st.data())
def test_a_digest_depends_on_every_bit_and_on_the_size(size: int, data: st.DataObject) -> None:
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    before = digest(raw)
    assert before == digest(raw.clone())
    assert before == digest(torch.cat([raw.new_ones(3), raw])[3:])  # wherever it lies in memory
    at = data.draw(st.integers(0, size - 1))
    changed = raw.clone()
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(changed) != before
    assert digest(torch.cat([raw, raw.new_zeros(1)])) != before


def test_a_digest_depends_on_the_order_of_blocks() -> None:
    raw = torch.randint(-(2**62), 2**62, (4, BLOCK_BYTES // 8), generator=torch.Generator().manual_seed(0))
    assert digest(raw[[1, 0, 2, 3]]) != digest(raw)


def test_the_digests_of_a_tensor_depend_on_which_segment_came_first() -> None:
    first, second = TensorDigests(["a"]), TensorDigests(["a"])
    for one, other in ((3, 5), (5, 3)):
        first.add("a", torch.tensor(one))
        second.add("a", torch.tensor(other))
    assert first.different(second.as_tensor())
    assert not first.different(first.as_tensor())

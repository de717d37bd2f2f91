"""The plan: every destination element once, no byte more than needed, equal work for equal ranks, and what it costs."""

import json
import math
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.plan.time import Links
from tepo_megatron.weights.geometry import Box, Region, ReshardPlan, Shard, ShardLayout
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel, pipeline_stages
from tepo_megatron.weights.reshard import reshard_plan, reshard_traffic
from tepo_megatron.weights.table import tensor_shapes
from tests.support.cli import invoke
from tests.support.reshard_models import Case, cases, small_spec
from tests.support.transfers import blank, setting


@given(cases())
def test_moves_write_every_element_once_and_send_no_byte_too_many_and_equal_ranks_share_the_work(case: Case) -> None:
    """The busiest rank against a bound for any division: the ranks of a set send at least what only they hold."""
    plan, sources, destinations = setting(case)
    found = [blank(params) for params in destinations]
    for move in plan.moves:
        target = move.destination_region.view(found[move.destination][move.destination_param])
        target.add_(move.source_region.view(sources[move.source][move.source_param]))
    for rank, (got, params) in enumerate(zip(found, destinations, strict=True)):
        assert [(rank, name) for name, param in params.items() if not torch.equal(got[name], param)] == []
    owners: dict[int, list[int]] = defaultdict(list)
    for rank, params in enumerate(sources):
        for value in {int(v) for param in params.values() for v in param.flatten().tolist()} - {0}:
            owners[value].append(rank)
    demand: Counter[frozenset[int]] = Counter()
    for rank, params in enumerate(destinations):
        for value in (int(v) for param in params.values() for v in param.flatten().tolist() if v):
            if case.local.get(rank) not in owners[value]:
                demand[frozenset(owners[value])] += 1
    between = plan.bytes_between(1)
    assert sum(between.values()) == demand.total()
    assert reshard_traffic(case.spec, case.source, case.destination, case.local)[1] == between
    kinds = list(demand)
    unions = {frozenset().union(*some) for size in range(1, min(len(kinds), 3) + 1) for some in combinations(kinds, size)}
    unions.add(frozenset().union(*kinds))
    best = max((sum(n for kind, n in demand.items() if kind <= union) / len(union) for union in unions if union), default=0)
    sent: Counter[int] = Counter()
    for (source, _), size in between.items():
        sent[source] += size
    row = max(shape[-1] for shape in tensor_shapes(case.spec).values())
    assert max(sent.values(), default=0) <= 1.1 * best + row


def test_data_parallel_copies_send_equally_much() -> None:
    """3 copies for 4 servers: the real sizes of one layer, where no row is large against the whole."""
    spec = small_spec(hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=32, ffn_size=512, vocab_size=1000)
    plan = reshard_plan(spec, MegatronParallel(tp=2, dp=3), VllmParallel(tp=2, replicas=4))
    sent = [sum(size for (source, _), size in plan.bytes_between(2).items() if source == rank) for rank in range(6)]
    assert max(sent) <= 1.02 * sum(sent) / 6


@pytest.mark.parametrize(("source_tp", "server_tp"), [(1, 1), (2, 2), (4, 2), (2, 4), (1, 4)])
def test_one_move_per_tensor_and_pair_of_ranks(source_tp: int, server_tp: int) -> None:
    """16 interleaved groups of queries, keys and values travel as one region each."""
    ranks = small_spec(num_heads=32, num_kv_heads=16), MegatronParallel(tp=source_tp), VllmParallel(tp=server_tp)
    plan = reshard_plan(*ranks)
    routes = [(move.tensor, move.source, move.destination) for move in plan.moves]
    assert len(routes) == len(set(routes)) == reshard_traffic(*ranks)[0]


def test_the_digest_names_every_input() -> None:
    spec, source, destination = small_spec(), MegatronParallel(tp=2, pp=2), VllmParallel(tp=2)
    inputs = [
        (spec, source, destination, {}),
        (replace(spec, vocab_size=14), source, destination, {}),
        (spec, replace(source, dp=2), destination, {}),
        (spec, replace(source, stages=pipeline_stages(4, 2, chunks=2)), destination, {}),
        (spec, replace(source, fused_norms=True), destination, {}),
        (spec, source, replace(destination, replicas=2), {}),
        (spec, source, destination, {0: 0}),
    ]
    digests = [reshard_plan(*given).digest for given in inputs]
    assert len(set(digests)) == len(inputs)
    assert reshard_plan(*inputs[0]) is reshard_plan(*inputs[0]), "the same plan is not made twice"


def test_servers_begin_at_different_stages_and_each_goes_through_the_model_once() -> None:
    spec = small_spec(num_layers=8)
    plan = reshard_plan(spec, MegatronParallel(pp=4), VllmParallel(replicas=4))
    firsts = []
    for server in range(4):
        layers = [move.tensor.split(".")[2] for move in plan.receives(server) if ".layers." in move.tensor]
        visits = [layer for at, layer in enumerate(layers) if at == 0 or layers[at - 1] != layer]
        assert len(visits) <= 9, "a layer is left before it is complete"
        firsts.append(plan.receives(server)[0].source)
    assert sorted(firsts) == [0, 1, 2, 3]


def rank(start: int, stop: int) -> ShardLayout:
    return ShardLayout({"w": (4,)}, (Shard("w", Box((start,), (stop,)), "p", Box((0,), (stop - start,))),))


@pytest.mark.parametrize(
    ("sources", "local", "message"),
    [
        ([rank(0, 3)], {}, r"w cannot be resharded: .* hold 3 of 4 elements"),
        ([rank(0, 3), rank(2, 4)], {}, r"w cannot be resharded: .* overlap without being equal"),
        ([rank(0, 4)], {1: 0}, "destination rank 1 shares a device with source rank 0, but there are 1 destinations"),
    ],
)
def test_sources_that_make_no_plan_are_refused(
    sources: list[ShardLayout], local: dict[int, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MegatronParallel, "layouts", lambda *_: sources)
    monkeypatch.setattr(VllmParallel, "layouts", lambda *_: [rank(0, 4)])
    with pytest.raises(ValueError, match=message):
        reshard_plan(small_spec(max_positions=1), MegatronParallel(), VllmParallel(), local)


def broken(plan: ReshardPlan, kind: str) -> ReshardPlan:
    """The last layer's, which is proved with others' cases."""
    at = max(n for n, move in enumerate(plan.moves) if move.tensor.endswith("k_proj.weight"))
    move = plan.moves[at]
    box = move.source_region.box
    lower = Box((box.start[0] + 3, *box.start[1:]), (box.stop[0] + 3, *box.stop[1:]))
    instead = {
        "missing": (),
        "twice": (move, move),
        "elsewhere": (replace(move, source_region=Region(lower, move.source_region.count, move.source_region.step)),),
        "swapped": (replace(move, tensor=move.tensor.replace("k_proj", "v_proj")),),
    }[kind]
    return replace(plan, moves=(*plan.moves[:at], *instead, *plan.moves[at + 1 :]))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", r"writes \d+ of \d+ elements of model\.layers\.3\.self_attn\.qkv_proj\.weight on destination rank 1"),
        ("twice", r"writes Box.* and Box.*, which overlap, of model\.layers\.3\.self_attn\.qkv_proj\.weight on destination"),
        ("elsewhere", r"the move of model\.layers\.3\.self_attn\.k_proj\.weight .* takes None to where Box"),
        ("swapped", r"the move of model\.layers\.3\.self_attn\.v_proj\.weight .* takes None to where None"),
    ],
)
def test_a_wrong_plan_is_not_proved(kind: str, message: str) -> None:
    case = Case(small_spec(), MegatronParallel(tp=2), VllmParallel(tp=2), {})
    with pytest.raises(RuntimeError, match=message):
        broken(setting(case)[0], kind).prove(case.source.layouts(case.spec), case.destination.layouts(case.spec))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), st.data())
def test_a_range_of_elements_is_cut_into_contiguous_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, numbers.numel()))
    stop = data.draw(st.integers(start, numbers.numel()))
    boxes = list(Box.of_range(shape, start, stop))
    parts = [numbers[box.slices] for box in boxes]
    assert [value for part in parts for value in part.flatten().tolist()] == list(range(start, stop))
    assert all(part.is_contiguous() for part in parts)
    assert len(boxes) <= 2 * len(shape) - 1


WEIGHTS = sum(math.prod(shape) for shape in tensor_shapes(small_spec()).values())


@settings(max_examples=40)
@given(cases())
def test_every_byte_is_on_one_link(case: Case) -> None:
    wanted = sum(math.prod(shard.box.shape) for layout in case.destination.layouts(case.spec) for shard in layout.shards)
    for shared in (False, True):
        cluster = Links(gpus_per_node=2, shared=shared)
        local = cluster.local(case.source.world_size, case.destination.world_size)
        plan = reshard_plan(case.spec, case.source, case.destination, local)
        links = cluster.summarize(plan, 2).links
        assert sum(link.total for link in links) == 2 * wanted
        if not shared:
            assert {link.link for link in links} == {"network"}


def test_time_is_that_of_the_busiest_gpu() -> None:
    """One trainer rank, two servers: it sends the model twice, at 2·10⁹ bytes/s."""
    plan = reshard_plan(small_spec(), MegatronParallel(), VllmParallel(replicas=2))
    (link,) = Links(network_gb_per_s=2.0).summarize(plan, 4).links
    model = 4 * WEIGHTS
    assert (link.pairs, link.total, link.busiest_sender, link.busiest_receiver) == (2, 2 * model, 2 * model, model)
    assert link.seconds == pytest.approx(2 * model / 2e9)


def test_a_shared_gpu_a_shared_node_and_the_network() -> None:
    """Two copies of the trainer on GPUs 0 and 1, servers on GPUs 0, 1, 2 of nodes of two."""
    cluster = Links(gpus_per_node=2, shared=True)
    plan = reshard_plan(small_spec(), MegatronParallel(dp=2), VllmParallel(replicas=3), cluster.local(2, 3))
    links = {link.link: link for link in cluster.summarize(plan, 2).links}
    assert links["device"].total == 4 * WEIGHTS
    assert links["device"].seconds == 0
    assert links["network"].total == 2 * WEIGHTS
    assert "nvlink" not in links


def test_the_command_prints_what_a_70b_model_moves(tmp_path: Path) -> None:
    """A server's ranks hold the model once, but every one of them all norms: two a layer and the last."""
    command = "reshard plan Llama-3.3-70B-Instruct --tp 8 --pp 4 --vpp 5 --servers 2 --server-tp 8 --json --save"
    printed = json.loads(invoke(*command.split(), tmp_path / "plan.json").output)
    (link,) = printed["links"]
    assert link["total"] == 2 * 2 * (70_553_706_496 + 7 * 161 * 8192)
    assert link["pairs"] == 2 * 8 * 4, "each worker hears from one rank of each stage"
    assert printed["imbalance"] < 1.04, "the embedding and the head make the outer stages larger"
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert (len(saved["moves"]), saved["digest"]) == (printed["moves"], printed["digest"])


def test_the_command_refuses_what_cannot_be() -> None:
    refused = invoke("reshard", "plan", "Llama-3.3-70B-Instruct", "--vpp", 2, code=1)
    assert "a virtual pipeline size of 2 needs a pipeline" in refused.output
    for end in ("--first-layers", "--last-layers"):
        refused = invoke("reshard", "plan", "Llama-3.3-70B-Instruct", "--pp", 2, end, 0, code=2)
        assert f"'{end}'" in refused.output

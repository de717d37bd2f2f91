"""Nodes, ranks and servers that do not go together are named, and the numbers that the sentence gives do go together."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.plan import check_placement


def run(nodes: int, parallel: dict[str, int], *, rollout_nodes: int = 1, servers: int = 1, server_tp: int = 1) -> RunConfig:
    return RunConfig.model_validate(
        {
            "cluster": {"train_nodes": nodes, "rollout_nodes": rollout_nodes, "gpus_per_node": 4},
            "engine": {"parallel": parallel},
            "rollout": {"server": {"count": servers, "tp": server_tp}},
        }
    )


sizes = st.sampled_from([1, 2, 3, 4])


@given(st.integers(2, 12), sizes, sizes, sizes, sizes)
@settings(max_examples=200, deadline=None)
def test_nodes_pass_if_the_ranks_fill_them_and_otherwise_the_mend_does(nodes: int, tp: int, pp: int, cp: int, dp: int) -> None:
    parallel = {"tp": tp, "pp": pp, "cp": cp, "dp": dp}
    if tp * pp * cp * dp == 4 * nodes:
        check_placement(run(nodes, parallel))
        return
    with pytest.raises(ValueError, match=r"cluster\.train_nodes|engine\.parallel") as refused:
        check_placement(run(nodes, parallel))
    text = str(refused.value)
    if found := re.search(r"use (?:(\d+) or )?(\d+) nodes", text):
        assert 4 * nodes % (tp * pp * cp)
        for offered in map(int, filter(None, found.groups())):
            dp_then = 4 * offered // (tp * pp * cp)
            if offered > 1:
                check_placement(run(offered, {**parallel, "dp": dp_then}))
    else:
        offered = int(re.search(r"set engine\.parallel\.dp = (\d+)", text)[1])
        check_placement(run(nodes, {**parallel, "dp": offered}))


def test_one_node_need_not_be_filled_but_must_suffice() -> None:
    check_placement(run(1, {"tp": 2}, rollout_nodes=0, servers=2))
    with pytest.raises(ValueError, match=r"8 ranks, but cluster\.train_nodes = 1 has 4 GPUs; raise cluster\.train_nodes to 2"):
        check_placement(run(1, {"dp": 8}))
    with pytest.raises(ValueError, match=r"count = 1 servers of tp = 4 do not fit: .*\(2 GPUs, .* room for 0; lower rollout"):
        check_placement(run(1, {"tp": 2}, rollout_nodes=0, server_tp=4))


def test_what_must_share_a_node_may_not_be_larger_than_one() -> None:
    with pytest.raises(ValueError, match=r"engine\.parallel\.tp = 8 is more than cluster\.gpus_per_node = 4"):
        check_placement(run(2, {"tp": 8}))
    with pytest.raises(ValueError, match=r"count = 3 servers of tp = 3 .*rollout_nodes = 2 of 4 GPUs has room for 2"):
        check_placement(run(1, {}, rollout_nodes=2, servers=3, server_tp=3))
    with pytest.raises(ValueError, match=r"rollout\.server\.tp = 8 is more than cluster\.gpus_per_node = 4"):
        check_placement(run(1, {}, rollout_nodes=2, server_tp=8))


def test_colocated_servers_take_the_trainers_gpus_of_one_node() -> None:
    def colocated(nodes: int, rollout_nodes: int, servers: int) -> RunConfig:
        config = run(nodes, {"tp": 2, "dp": 2 * nodes}, rollout_nodes=rollout_nodes, servers=servers, server_tp=2)
        server = config.rollout.server.model_copy(update={"placement": "colocated"})
        return config.model_copy(update={"rollout": config.rollout.model_copy(update={"server": server})})

    check_placement(colocated(1, 0, 2))
    with pytest.raises(ValueError, match=r"servers of tp = 2 do not fit: what the trainer's ranks use .4 GPUs. has room for 2"):
        check_placement(colocated(1, 0, 3))
    for nodes, rollout_nodes in ((1, 1), (2, 0)):
        with pytest.raises(
            ValueError, match=rf"train_nodes = {nodes} and rollout_nodes = {rollout_nodes}; set them to 1 and 0"
        ):
            check_placement(colocated(nodes, rollout_nodes, 1))

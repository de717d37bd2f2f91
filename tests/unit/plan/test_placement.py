"""Ranks and servers on the nodes of a cluster: what fits, and what is refused."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.plan import check_placement


def run(nodes: int, parallel: dict[str, int], rollout_nodes: int = 1, **server: Any) -> RunConfig:
    cluster = {"train_nodes": nodes, "rollout_nodes": rollout_nodes, "gpus_per_node": 4}
    rollout = {"server": {"placement": "local", **server}}
    return RunConfig.model_validate({"cluster": cluster, "engine": {"parallel": parallel}, "rollout": rollout})


def taught(rollout_nodes: int, **server: Any) -> RunConfig:
    values = run(1, {"tp": 2}, rollout_nodes).model_dump(exclude_unset=True)
    teacher = {"path": "m", "place": "server", "server": server}
    return RunConfig.model_validate({**values, "teachers": {"a": teacher}, "objective": {"preset": "on_policy_distill"}})


def colocated(nodes: int, rollout_nodes: int, servers: int) -> RunConfig:
    return run(nodes, {"tp": 2, "dp": 2 * nodes}, rollout_nodes, count=servers, tp=2, placement="colocated")


sizes = st.sampled_from([1, 2, 3, 4])


@given(st.integers(2, 12), sizes, sizes, sizes, sizes)
@settings(max_examples=200)
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


def test_one_node_need_not_be_filled_and_colocated_servers_take_the_trainers_gpus() -> None:
    check_placement(run(1, {"tp": 2}, rollout_nodes=0, count=2))
    check_placement(colocated(1, 0, 2))
    check_placement(taught(0))
    check_placement(taught(1, tp=2))
    check_placement(taught(0, count=2, placement="external", registry="/r"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (run(1, {"dp": 8}), r"8 ranks, but cluster\.train_nodes = 1 has 4 GPUs; raise cluster\.train_nodes to 2"),
        (run(2, {"tp": 8}), r"engine\.parallel\.tp = 8 is more than cluster\.gpus_per_node = 4"),
        (run(1, {"tp": 2}, rollout_nodes=0, tp=4), r"1 servers of tp = 4 do not fit: .*\(2 GPUs, .* room for 0; lower"),
        (run(1, {}, rollout_nodes=2, count=3, tp=3), r"3 servers of tp = 3 .*s = 2 of 4 GPUs has room for 2"),
        (run(1, {}, rollout_nodes=2, count=3), r"3 servers cannot be spread evenly over .* = 2 nodes; set it to 2 or 4"),
        (run(1, {}, rollout_nodes=2, count=1), r"1 servers cannot be spread evenly over .* = 2 nodes; set it to 2$"),
        (run(1, {}, rollout_nodes=2, tp=8), r"rollout\.server\.tp = 8 is more than cluster\.gpus_per_node = 4"),
        (colocated(1, 0, 3), r"servers of tp = 2 do not fit: what the trainer's ranks use .4 GPUs. has room for 2"),
        (colocated(1, 1, 1), "train_nodes = 1 and rollout_nodes = 1; set them to 1 and 0"),
        (colocated(2, 0, 1), "train_nodes = 2 and rollout_nodes = 0; set them to 1 and 0"),
        (taught(0, tp=2), r"2 GPUs of the first .*, and 1 are left there; serve them .*serve RUN --teacher NAME\), or"),
        (taught(1, count=3), "teachers take 3 GPUs of the first training node, and 2 are left there"),
    ],
)
def test_ranks_or_servers_that_do_not_fit_the_cluster_are_refused(config: RunConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_placement(config)

"""What a plan costs: every byte is on exactly one kind of link, and the time follows from the busiest GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

from tepo_megatron.cli.main import app
from tepo_megatron.plan.time import Links
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel, vllm_ranks
from tepo_megatron.weights.reshard import reshard_plan
from tepo_megatron.weights.table import tensor_shapes
from tests.support.reshard_models import Case, cases, small_spec

WEIGHTS = sum(math.prod(shape) for shape in tensor_shapes(small_spec()).values())


@settings(deadline=None, max_examples=40)
@given(cases())
def test_every_byte_is_on_one_link(case: Case) -> None:
    wanted = sum(math.prod(shard.box.shape) for layout in vllm_ranks(case.spec, case.destination) for shard in layout.shards)
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
    command = "reshard plan Llama-3.3-70B-Instruct --tp 8 --pp 4 --vpp 5 --servers 4 --server-tp 8 --json --save"
    done = CliRunner().invoke(app, [*command.split(), str(tmp_path / "plan.json")])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.output)
    (link,) = printed["links"]
    assert link["total"] == 2 * 4 * (70_553_706_496 + 7 * 161 * 8192)
    assert link["pairs"] == 4 * 8 * 4, "each worker hears from one rank of each stage"
    assert printed["imbalance"] < 1.04, "the embedding and the head make the outer stages larger"
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert (len(saved["moves"]), saved["digest"]) == (printed["moves"], printed["digest"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("NoSuchModel", "NoSuchModel"),
        ("Llama-3.3-70B-Instruct --vpp 2", "a virtual pipeline size of 2 needs a pipeline"),
        ("Qwen2.5-72B --server-tp 24", "the rollout servers cannot split the model so"),
    ],
)
def test_the_command_refuses_what_cannot_be(options: str, message: str) -> None:
    done = CliRunner().invoke(app, ["reshard", "plan", *options.split()])
    assert done.exit_code == 1
    assert message in done.output

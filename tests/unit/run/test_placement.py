"""Where servers run, and what a machine or a model cannot do."""

import re
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.plan.shapes import resolve_spec
from tepo_megatron.run.step import placement
from tepo_megatron.run.step.placement import Placement
from tepo_megatron.run.training import phase_limits
from tepo_megatron.runtime.machine import Machine
from tepo_megatron.trainer.megatron.policy import weights as policy_weights
from tepo_megatron.weights.layouts import VllmParallel

SPEC = resolve_spec("Qwen2.5-1.5B")[0]

LAPTOP = Machine(gpus=0, has_nccl=False, local_ranks=2, ranks=2)
NODE = Machine(gpus=8, has_nccl=True, local_ranks=4, ranks=4)
TWO_NODES = Machine(gpus=8, has_nccl=True, local_ranks=8, ranks=16)
ONE_GPU = Machine(gpus=1, has_nccl=True, local_ranks=1, ranks=1)


OVERLAP: dict[str, Any] = {"train": {"schedule": "overlap"}, "objective": {"mismatch": {"kind": "truncate"}}}


def config(server: dict[str, Any], platform: str = "auto", *, threads: Any = None, overlap: bool = False) -> RunConfig:
    sections = {"engine": {"platform": platform, "cpu_threads": threads}, "rollout": {"server": server}}
    return RunConfig.model_validate(sections | (OVERLAP if overlap else {}))


@pytest.mark.parametrize(
    ("server", "machine", "platform", "transport", "first_gpu"),
    [
        ({}, LAPTOP, "auto", "gloo", 0),
        ({}, NODE, "auto", "nccl", 4),
        ({"tp": 2, "count": 2}, NODE, "cuda", "nccl", 4),
        ({"tp": 8}, NODE, "cpu", "gloo", 0),
        ({"placement": "colocated", "tp": 2, "count": 2}, NODE, "auto", "ipc", 0),
        ({"placement": "colocated"}, ONE_GPU, "auto", "ipc", 0),
        ({"placement": "colocated", "transport": "gloo"}, ONE_GPU, "auto", "gloo", 0),
        ({"placement": "external", "registry": "/r", "count": 4, "tp": 8}, TWO_NODES, "auto", "nccl", 8),
        ({"placement": "external", "registry": "/r", "transport": "gloo"}, NODE, "auto", "gloo", 4),
        ({"transport": "nccl"}, NODE, "auto", "nccl", 4),
        ({"transfer": "gather"}, TWO_NODES, "cpu", "gloo", 0),  # rank 0 alone sends
        ({"host": "10.0.0.7"}, TWO_NODES, "cpu", "gloo", 0),
    ],
)
def test_what_is_left_to_auto(server: dict[str, Any], machine: Machine, platform: str, transport: str, first_gpu: int) -> None:
    placed = Placement(config(server, platform), machine)
    placed.check()
    assert (placed.transport, placed.first_server_gpu) == (transport, first_gpu)
    shared = range(placed.workers) if server.get("placement") == "colocated" else ()  # by the trainer rank of that number
    assert placed.shared_gpus == {worker: worker for worker in shared}


@pytest.mark.parametrize(
    ("machine", "platform", "async_save", "expected"),
    [
        (ONE_GPU, "auto", "auto", True),
        (ONE_GPU, "cpu", "auto", False),
        (LAPTOP, "auto", "auto", False),
        (LAPTOP, "auto", True, True),
        (ONE_GPU, "auto", False, False),
        (replace(ONE_GPU, memory=23 * 10**6), "auto", "auto", False),  # 12 bytes of a million parameters are more than half
        (replace(ONE_GPU, memory=25 * 10**6), "auto", "auto", True),
        (replace(TWO_NODES, memory=13 * 10**6), "auto", "auto", True),  # a node has half of the ranks
    ],
)
def test_checkpoints_are_written_beside_training_on_gpus_whose_hosts_have_room(
    machine: Machine, platform: str, async_save: Any, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "model_parameters", lambda spec, lora: 10**6)
    run = RunConfig.model_validate({"engine": {"platform": platform}, "train": {"async_save": async_save}})
    assert Placement(run, machine).saves_beside_training(SPEC) == expected


@pytest.mark.parametrize(
    ("server", "machine", "platform", "message"),
    [
        ({"transport": "nccl"}, LAPTOP, "auto", r"transport = nccl moves weights between GPUs, and torch \S+ sees 0 GPUs here"),
        ({"transport": "nccl"}, NODE, "cpu", r"transport = nccl moves weights between GPUs, and engine.platform = cpu"),
        ({"transport": "nccl"}, Machine(8, False, 4, 4), "auto", r"transport = nccl, but torch \S+ has no NCCL"),
        ({"placement": "colocated", "transport": "ipc"}, LAPTOP, "auto", r"transport = ipc moves weights between GPUs"),
        ({"placement": "colocated"}, LAPTOP, "auto", r"placement = colocated shares GPUs .*, and torch \S+ sees 0 GPUs"),
        ({"placement": "colocated"}, NODE, "cpu", r"placement = colocated shares GPUs .*, and engine.platform = cpu"),
        ({"placement": "colocated"}, TWO_NODES, "auto", r"16 ranks run on several machines \(8 here\)"),
        ({"placement": "colocated", "tp": 2, "count": 3}, NODE, "auto", r"2 × 3 workers do not fit on the GPUs of 4 trainer"),
        ({"tp": 4, "count": 2}, NODE, "auto", r"uses 4 GPUs and the servers .* 8 others, but this machine has 8"),
        ({}, ONE_GPU, "auto", r"share them with rollout.server.placement = colocated"),
        (
            {},
            TWO_NODES,
            "auto",
            r"host = 127.0.0.1 cannot be reached by the 8 ranks on other machines, .* placement = external",
        ),
        ({}, LAPTOP, "cuda", r"engine\.platform = cuda, but torch .* sees no GPU"),
    ],
)
def test_what_a_machine_cannot_do_is_refused(server: dict[str, Any], machine: Machine, platform: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(config(server, platform), machine).check()


@pytest.mark.parametrize("placement", ["external", "colocated", "replay"])
def test_a_machine_that_has_lost_a_gpu_is_refused_by_its_name(placement: str) -> None:
    server = {"placement": placement, "registry": "/r" if placement == "external" else None}
    run = RunConfig.model_validate({"rollout": {"replay": "/recorded"} if placement == "replay" else {"server": server}})
    with pytest.raises(ValueError, match=f"^8 ranks run on {re.escape(socket.gethostname())}, where torch sees 7 GPUs"):
        Placement(run, replace(TWO_NODES, gpus=7)).check()


def test_served_teachers_take_the_gpus_after_all_others() -> None:
    servers = {"far": {"placement": "external", "registry": "/r"}, "a": {"tp": 2}, "b": {}}
    teachers = {name: {"path": "/t", "place": "server", "server": server} for name, server in servers.items()}
    sources = [{"path": "builtin:addition", "name": name, "teacher": name} for name in teachers]
    sections = {"teachers": teachers, "data": {"train": sources}, "objective": {"preset": "on_policy_distill"}}

    def placed(**server: Any) -> Placement:
        return Placement(RunConfig.model_validate({**sections, "rollout": {"server": server}}), NODE)

    placed().check()
    assert placed().teacher_gpus == {"far": 5, "a": 5, "b": 7}
    assert placed(placement="colocated").teacher_gpus == {"far": 4, "a": 4, "b": 6}
    assert replace(placed(), machine=LAPTOP).teacher_gpus == {"far": 0, "a": 0, "b": 0}
    sentence = r"teachers\.b is served on GPUs 8 to 8, and this machine has 8.*tepo serve RUN --teacher b\)"
    with pytest.raises(ValueError, match=sentence):
        placed(count=2).check()


@pytest.mark.parametrize(
    ("threads", "server", "overlap", "expected"),
    [
        (None, {}, False, None),
        (3, {}, True, 3),
        ("auto", {}, False, 4),  # eight cores for two ranks, while the servers wait
        ("auto", {"cpu_threads": "all"}, False, 4),
        ("auto", {}, True, 3),  # the server has one
        ("auto", {"count": 2, "tp": 2}, True, 2),
        ("auto", {"cpu_threads": "0-5"}, True, 1),
        ("auto", {"cpu_threads": "nobind"}, True, 1),  # it may be anywhere
        ("auto", {"cpu_threads": "0,1|2,3", "tp": 2}, True, 2),
        ("auto", {"placement": "external", "registry": "/r", "cpu_threads": "all"}, True, 4),  # on other machines
    ],
)
def test_phases_that_alternate_have_all_cores_and_phases_that_overlap_share_them(
    threads: int | str | None, server: dict[str, Any], overlap: bool, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tepo_megatron.sampler.vllm.resources.available_cores", lambda: list(range(8)))
    run = config(server, threads=threads, overlap=overlap)
    replay = run.model_copy(update={"rollout": run.rollout.model_copy(update={"replay": "/recorded"})})
    assert [Placement(each, LAPTOP).trainer_threads(range(8)) for each in (run, replay)] == [expected, expected]


def test_threads_that_cannot_act_are_refused() -> None:
    placement = Placement(config({}, threads="auto"), NODE)
    with pytest.raises(ValueError, match=r"engine.cpu_threads = auto acts where the trainer runs on a CPU, and it runs on"):
        placement.check()
    assert placement.trainer_threads(range(8)) is None
    Placement(RunConfig.model_validate({"rollout": {"replay": "/recorded"}}), ONE_GPU).check()  # needs no place for servers


def test_the_watch_allows_for_the_time_limits_of_what_a_phase_waits_for() -> None:
    def limits(collect: str | None = None, **sections: Any) -> Mapping[str, float]:
        rollout = {"prompts_per_step": 2, "samples_per_prompt": 4, "collect": collect}
        return phase_limits(
            RunConfig.model_validate({"reward": {"timeout_s": 40.0, "workers": 2}, "rollout": rollout, **sections})
        )

    usual, ahead, played = limits(), limits(**OVERLAP), limits(environment={"name": "calculator", "timeout_s": 700.0})
    waits, teacher = RunConfig().rollout.server.longest_wait_s, {"path": "/t", "place": "server"}
    taught = limits(teachers={"t": teacher}, objective={"distill": {"coefficient": 0.5}})
    assert (usual["reward"], usual["servers"], usual["sync"]) == (8 * 40 / 2, waits, waits)
    assert taught["reward"] == usual["reward"] + waits
    assert ahead["rollout"] == limits("mine.py:best")["rollout"] == usual["rollout"] + usual["reward"]
    assert {name: played[name] - usual[name] for name in ("rollout", "eval")} == {"rollout": 700.0, "eval": 700.0}


def test_the_plan_of_the_transfer_has_the_time_of_the_servers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, sender = Mock(), Mock()
    monkeypatch.setattr(policy_weights, "reshard_plan", lambda *_: list(weights.heartbeat.phase.call_args.args))
    monkeypatch.setattr(policy_weights, "ShardSender", sender)
    servers: Any = {"local": {}, "dtype": torch.bfloat16, "transport": "gloo", "timeout_s": 1.0}
    policy_weights.PolicyWeights.make_shard_sender(weights, VllmParallel(), **servers)
    assert sender.call_args.args[0] == ["servers"]

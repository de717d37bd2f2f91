"""How vLLM is started: the arguments, the environment and the machine of a server."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tepo_megatron.config import RunConfig
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.sampler.vllm.plugin.patches import take_cores
from tepo_megatron.sampler.vllm.resources import check_quantization
from tepo_megatron.sampler.vllm.server import Server
from tepo_megatron.sampler.vllm.wire import (
    AWAITS_VARIABLE,
    DUMMY_FORMAT,
    FORK_VARIABLE,
    ROUTES_VARIABLE,
    SPECULATES_VARIABLE,
)

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere servers start as vLLM has them")
WORKER = "--worker-cls tepo_megatron.sampler.vllm.plugin.workers.Worker"
FP8 = ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"]
EXTERNAL: dict[str, Any] = {"placement": "external", "registry": Path("/r")}


def server(config: ServerConfig, *, cores: str = "0", model_dir: Path = Path("m"), **options: Any) -> Server:
    return Server(config, model_dir=model_dir, dtype="bfloat16", cores=cores, key="the-key", log=Path("log"), **options)


NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}'


@pytest.mark.parametrize(
    ("config", "cores", "on_gpu", "argument", "variable"),
    [
        ({"placement": "colocated"}, "0", True, "--enable-sleep-mode", ""),
        ({"quantization": "fp8_per_channel"}, "0", False, "--quantization fp8_per_channel", ""),
        ({"head_dtype": "float32"}, "0", False, '--hf-overrides {"head_dtype": "float32"}', ""),
        ({"head_dtype": "float32"}, "0", True, '--hf-overrides {"head_dtype": "float32"}', ""),
        ({"speculative": {"num_speculative_tokens": 3}}, "0", False, f"--speculative-config {NGRAM}", SPECULATES_VARIABLE),
        ({"routing_replay": True}, "0", False, "--enable-return-routed-experts", ROUTES_VARIABLE),
        ({"routing_replay": True}, "nobind", False, WORKER, ROUTES_VARIABLE),
        ({"routing_replay": True}, "0", True, "--enable-return-routed-experts", ROUTES_VARIABLE),  # vLLM's own worker does
        ({"interface": "ib0"}, "0", True, "", "NCCL_SOCKET_IFNAME"),
    ],
)
def test_a_setting_reaches_vllm_and_its_default_does_not(
    config: dict[str, Any], cores: str, on_gpu: bool, argument: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    made, plain = (server(ServerConfig.model_validate(changes), cores=cores) for changes in (config, {}))
    assert argument in " ".join(made.command(on_gpu=on_gpu))
    assert not argument or argument not in " ".join(plain.command(on_gpu=on_gpu))
    assert not variable or variable in made.environment(on_gpu=on_gpu)
    assert variable not in plain.environment(on_gpu=on_gpu)
    assert (WORKER in " ".join(made.command(on_gpu=True))) is False


def test_servers_get_their_gpus_in_order_by_the_names_that_the_trainer_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServerConfig(tp=2, count=2, placement="colocated")
    fleet = Fleet(config, model_dir=tmp_path, dtype="float32", stop_token_ids=[2], log_dir=tmp_path, first_gpu=1)

    def shown(visible: str) -> list[str]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return [each.environment(on_gpu=True)["CUDA_VISIBLE_DEVICES"] for each in fleet._servers]  # type: ignore[union-attr]

    assert shown("9,4,5,6,7") == ["4,5", "6,7"]
    assert shown("") == ["1,2", "3,4"]
    with pytest.raises(ValueError, match=r"run on GPU 4, but CUDA_VISIBLE_DEVICES = 0,1,2,3 shows 4"):
        shown("0,1,2,3")


@LINUX
@pytest.mark.parametrize(
    ("cores", "tp", "on_gpu", "forks"),
    [
        ("3", 1, False, True),
        ("0|1", 2, False, True),
        ("0-3", 1, False, True),
        ("0,2|1,3-5", 2, False, True),
        ("nobind", 1, False, False),
        ("3-0", 1, False, False),
        ("0|1", 1, False, False),  # two engines of one worker
        ("0", 1, True, False),
    ],
)
def test_processes_are_forks_where_each_worker_has_its_cores(cores: str, tp: int, on_gpu: bool, forks: bool) -> None:
    made = server(ServerConfig(tp=tp), cores=cores)
    command = made.command(on_gpu=on_gpu)
    assert (FORK_VARIABLE in made.environment(on_gpu=on_gpu)) == (WORKER in " ".join(command)) == forks
    assert ("--distributed-executor-backend" in command) == (forks and tp == 1)
    assert command[1:3] == ["-m", "tepo_megatron.sampler.vllm.plugin.start" if forks else "vllm.entrypoints.openai.api_server"]


@LINUX
def test_a_core_that_the_machine_has_not_is_a_sentence_and_a_worker_runs_on_all_of_its_cores() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match=r"worker 1 of this server cannot run on core 4095: .* set rollout.server.cpu_threads"):
        take_cores("0|4095", 1)
    assert os.sched_getaffinity(0) == before
    try:
        assert take_cores(f"4095|{max(before)}", 1) == 1
        assert os.sched_getaffinity(0) == {max(before)}
    finally:
        os.sched_setaffinity(0, before)


# -- weights at the start


@pytest.mark.parametrize(
    ("trained", "config", "dummy"),
    [
        (True, {}, True),
        (True, EXTERNAL, True),
        (True, {"placement": "colocated"}, True),
        (True, {"transfer": "gather"}, False),
        (True, {"load_format": "model"}, False),
        (True, {"extra_args": ("--load-format=runai_streamer",)}, False),
        (True, {"speculative": {"draft_model": Path("d")}}, False),  # vLLM would fill the draft model with dummies, too
        (False, {}, False),
        (False, {"load_format": "dummy"}, True),
    ],
)
def test_servers_of_a_training_run_read_no_weights_and_others_do(trained: bool, config: dict[str, Any], dummy: bool) -> None:
    assert ServerConfig.model_validate(config).starts_with_dummies(trained=trained) == dummy
    made = server(ServerConfig(), dummy=dummy)
    assert (DUMMY_FORMAT in made.command(on_gpu=True)) == (AWAITS_VARIABLE in made.environment(on_gpu=True)) == dummy


# -- speculation and quantization


def test_a_draft_model_reaches_vllm_if_it_is_one_of_the_policys_vocabulary(tmp_path: Path) -> None:
    policy, draft, other = (tmp_path / name for name in ("policy", "draft", "other"))
    for folder, size in ((policy, 64), (draft, 64), (other, 65)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"vocab_size": size}))

    def guessing(model: Path) -> Server:
        config = ServerConfig.model_validate({"speculative": {"draft_model": model}, "tp": 2})
        return server(config, cores="0|1", model_dir=policy)

    command = guessing(draft).command(on_gpu=False)
    assert json.loads(command[command.index("--speculative-config") + 1]) == {
        "method": "draft_model", "model": str(draft), "draft_tensor_parallel_size": 2, "num_speculative_tokens": 4
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"other has a vocabulary of 65 tokens, and the model in .*policy one of 64"):
        guessing(other)
    with pytest.raises(ValueError, match=r"draft_model = .*nowhere is no folder with a model"):
        guessing(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"host": ""}, "no address that trainer and servers can reach"),
        ({"host": "0.0.0.0"}, "no address that trainer and servers can reach"),
        ({"host": "::"}, "no address that trainer and servers can reach"),
        ({"placement": "external"}, "needs registry"),
        ({"load_format": "dummy", "transfer": "gather"}, "load_format = dummy needs transfer = reshard"),
        ({"speculative": {"draft_model": "d", "prompt_lookup_max": 3}}, "prompt_lookup_max is for n-grams"),
        ({"speculative": {"draft_model": "d"}, "load_format": "dummy"}, "would fill the draft model with dummies too"),
        ({"speculative": {"draft_model": "d"}, "quantization": "fp8_per_channel"}, "has not been tested"),
        ({"speculative": {"prompt_lookup_min": 5}}, "prompt_lookup_min = 5 is above prompt_lookup_max = 4"),
        ({"speculative": {}, "routing_replay": True}, "routing_replay = true with speculative"),
        ({"head_dtype": "float32", "extra_args": ("--hf-overrides", "{}")}, '"head_dtype": "float32" into the overrides'),
        ({"head_dtype": "float32", "extra_args": ("--hf_overrides={}",)}, '"head_dtype": "float32" into the overrides'),
    ],
)
def test_settings_that_cannot_work_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ServerConfig.model_validate(config)


@pytest.mark.parametrize("quantization", FP8)
def test_samples_of_other_numbers_need_a_correction_and_a_dtype_that_does_something(quantization: str) -> None:
    def run(server: dict[str, Any], *, mismatch: Any = None, uncorrected: bool = False, model: str = "bfloat16") -> RunConfig:
        rollout = {"server": server, "uncorrected": uncorrected}
        raw = {"rollout": rollout, "objective": {"mismatch": mismatch}, "model": {"dtype": model}}
        return RunConfig.model_validate(raw)

    server, kind = {"quantization": quantization, "dtype": "bfloat16"}, {"kind": "truncate"}
    assert run(server, mismatch=kind).objective.mismatch is not None
    assert run(server, uncorrected=True).objective.mismatch is None
    with pytest.raises(ValidationError, match=r"biases the gradient; set objective.mismatch.kind = truncate"):
        run(server)
    for dtype, model in (("float32", "bfloat16"), ("auto", "float32")):
        with pytest.raises(ValidationError, match=r"takes servers in bfloat16, not float32; set rollout.server.dtype"):
            run(server | {"dtype": dtype}, mismatch=kind, model=model)
        with pytest.raises(ValidationError, match=r"head_dtype = float32 does nothing for servers in float32; leave it out"):
            run({"head_dtype": "float32", "dtype": dtype}, model=model)


@pytest.mark.parametrize(
    ("gpu", "amx", "quantization", "message"),
    [
        (None, False, "fp8_per_tensor", "fp8_per_tensor cannot be served on this machine: vLLM has no such quantiser"),
        (None, False, "fp8_per_block", "needs a CPU with AMX tiles"),
        (None, False, "fp8_per_channel", ""),
        (None, False, "none", ""),
        (None, True, "fp8_per_block", ""),
        *(((8, 0), False, kind, r"NVIDIA Example has no FP8 arithmetic \(compute capability 8.0, 8.9") for kind in FP8),
        *((gpu, False, kind, "") for kind in FP8 for gpu in [(8, 9), (9, 0), (10, 0)]),
    ],
)
def test_what_a_machine_cannot_serve_is_refused_before_a_server_starts(
    gpu: tuple[int, int] | None, amx: bool, quantization: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Example")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    if not message:
        check_quantization(quantization)
        return
    for check in (lambda: check_quantization(quantization), lambda: server(ServerConfig(quantization=quantization))):
        with pytest.raises(ValueError, match=message):
            check()

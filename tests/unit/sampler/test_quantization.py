"""Quantised rollouts are asked for, refused where they cannot be served or would bias the run, and passed on to vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tepo_megatron.config import RunConfig
from tepo_megatron.config.rollout_server import ServerConfig
from tepo_megatron.sampler.vllm.server.checks import check_quantization
from tepo_megatron.sampler.vllm.server.server import Server

FP8 = ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"]


def run(quantization: str, **changes: Any) -> RunConfig:
    rollout = {"server": {"quantization": quantization, "dtype": "bfloat16"}, **changes.pop("rollout", {})}
    return RunConfig.model_validate({"rollout": rollout, "objective": {"mismatch": {"kind": "truncate"}}} | changes)


@pytest.mark.parametrize("quantization", FP8)
def test_uncorrected_samples_are_refused_unless_they_are_wanted(quantization: str) -> None:
    with pytest.raises(ValidationError, match=r"biases the gradient; set objective.mismatch.kind = truncate"):
        run(quantization, objective={})
    assert run(quantization).objective.mismatch is not None
    server = {"quantization": quantization, "dtype": "bfloat16"}
    assert run(quantization, objective={}, rollout={"server": server, "uncorrected": True}).objective.mismatch is None
    assert run("none", objective={}).objective.mismatch is None


@pytest.mark.parametrize(("dtype", "model"), [("float32", "bfloat16"), ("auto", "float32")])
def test_servers_in_another_dtype_than_vllm_quantises_are_refused(dtype: str, model: str) -> None:
    with pytest.raises(ValidationError, match=r"takes servers in bfloat16, not float32; set rollout.server.dtype = bfloat16"):
        run("fp8_per_block", rollout={"server": {"quantization": "fp8_per_block", "dtype": dtype}}, model={"dtype": model})


def server(quantization: str, folder: Path) -> Server:
    config = ServerConfig.model_validate({"quantization": quantization})
    return Server(config, model_dir=folder, dtype="bfloat16", cores="0", key="k", log=folder / "log")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def be(*, gpu: tuple[int, int] | None = None, amx: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Example")
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)

    return be


def test_what_a_machine_cannot_serve_is_refused_before_a_server_starts(machine: Any, tmp_path: Path) -> None:
    machine()
    with pytest.raises(ValueError, match=r"fp8_per_tensor cannot be served on this machine: vLLM has no such quantiser"):
        check_quantization("fp8_per_tensor")
    with pytest.raises(ValueError, match="needs a CPU with AMX tiles"):
        server("fp8_per_block", tmp_path)
    check_quantization("fp8_per_channel")
    check_quantization("none")
    machine(amx=True)
    check_quantization("fp8_per_block")


@pytest.mark.parametrize("quantization", FP8)
def test_a_gpu_without_fp8_is_refused_and_one_with_it_is_not(machine: Any, quantization: str) -> None:
    machine(gpu=(8, 0))
    with pytest.raises(ValueError, match=r"NVIDIA Example has no FP8 arithmetic \(compute capability 8.0, 8.9 is needed\)"):
        check_quantization(quantization)
    for capability in [(8, 9), (9, 0), (10, 0)]:
        machine(gpu=capability)
        check_quantization(quantization)


@pytest.mark.parametrize("quantization", ["none", "fp8_per_channel"])
def test_vllm_is_told(quantization: str, tmp_path: Path) -> None:
    command = server(quantization, tmp_path).program.command(on_gpu=False)
    assert ("--quantization" in command) == (quantization != "none")
    if quantization != "none":
        assert command[command.index("--quantization") + 1] == quantization

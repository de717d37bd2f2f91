"""Quantised rollouts, and a head in another dtype: asked for, refused where they cannot act or would bias a run, passed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tepo_megatron.config import RunConfig
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.sampler.vllm.resources import check_quantization
from tepo_megatron.sampler.vllm.server import Server

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
    command = server(quantization, tmp_path).command(on_gpu=False)
    assert ("--quantization" in command) == (quantization != "none")
    if quantization != "none":
        assert command[command.index("--quantization") + 1] == quantization


@pytest.mark.parametrize(("dtype", "model"), [("float32", "bfloat16"), ("auto", "float32")])
def test_a_head_in_float32_is_refused_where_all_is(dtype: str, model: str) -> None:
    rollout = {"server": {"head_dtype": "float32", "dtype": dtype}}
    with pytest.raises(ValidationError, match=r"head_dtype = float32 does nothing for servers in float32; leave it out"):
        RunConfig.model_validate({"rollout": rollout, "model": {"dtype": model}})


@pytest.mark.parametrize("override", [("--hf-overrides", "{}"), ('--hf_overrides={"rope": 1}',)])
def test_a_head_in_float32_is_refused_with_overrides_that_vllm_would_take_instead(override: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError, match=r"leave head_dtype out, and put \"head_dtype\": \"float32\" into the overrides"):
        ServerConfig(head_dtype="float32", extra_args=override)
    assert ServerConfig(extra_args=override).head_dtype == "model"


@given(st.sampled_from(["model", "float32"]), st.booleans())
def test_vllm_gets_the_heads_dtype_as_an_override_of_the_models_config(head_dtype: Any, on_gpu: bool) -> None:
    config = ServerConfig(head_dtype=head_dtype)
    command = Server(config, model_dir=Path("m"), dtype="bfloat16", cores="0", key="k", log=Path("log")).command(on_gpu=on_gpu)
    assert ("--hf-overrides" in command) == (head_dtype != "model")
    if head_dtype != "model":
        assert json.loads(command[command.index("--hf-overrides") + 1]) == {"head_dtype": head_dtype}

"""Dummy weights: who starts without them, and what they leave as it is. Real servers: tests/e2e/test_architectures_vllm.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.sampler.vllm.wire import DUMMY_FORMAT
from tepo_megatron.tasks.evaluate.standalone import evaluate_model


def test_an_evaluation_without_a_trainer_reads_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its servers share their GPUs with no trainer."""

    def refuse(server: ServerConfig, **_options: object) -> None:
        raise RuntimeError(f"{server.placement}, {server.tp}, {server.starts_with_dummies(trained=False)}")

    monkeypatch.setattr("tepo_megatron.tasks.evaluate.standalone.make_sampler", refuse)
    for placement in ("local", "colocated"):
        server = {"placement": placement, "tp": 2, "load_format": "dummy"}
        config = RunConfig.model_validate({"output": tmp_path, "rollout": {"server": server}})
        with pytest.raises(RuntimeError, match="local, 2, False"):
            evaluate_model(config, "builtin:tiny")
    config = RunConfig.model_validate({"output": tmp_path, "rollout": {"server": {"placement": "external", "registry": "/r"}}})
    with pytest.raises(ValueError, match=r"servers of 'tepo serve' start without weights.*load_format = model"):
        evaluate_model(config, "builtin:tiny")


def test_nccl_of_the_trainer_takes_the_interface_that_the_run_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from tepo_megatron.trainer.megatron.gpu import prepare_process

    environment: dict[str, str] = {}
    monkeypatch.setattr("tepo_megatron.trainer.megatron.gpu.os.environ", environment)
    prepare_process(RunConfig())
    assert environment == {}
    for interface in ("ib0", "ib1"):  # what is set stays
        prepare_process(RunConfig.model_validate({"rollout": {"server": {"interface": interface}}}))
    assert environment == {"NCCL_SOCKET_IFNAME": "ib0"}


def test_dummies_leave_what_no_checkpoint_brings_as_the_model_made_it() -> None:
    """vLLM's own would overwrite a buffer that a state dict has."""
    pytest.importorskip("vllm")
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from tepo_megatron.sampler.vllm.plugin import engine as engine  # registers the loader

    def layer() -> Any:
        made = torch.nn.Linear(4, 4)
        made.register_buffer("scale", torch.ones(3))
        made.register_buffer("angles", torch.arange(3.0), persistent=False)
        return made

    model, theirs = layer(), layer()
    before = model.weight.detach().clone()
    get_model_loader(LoadConfig(load_format=DUMMY_FORMAT)).load_weights(model, None)
    assert not torch.equal(model.weight, before)
    assert model.get_buffer("scale").tolist() == [1.0] * 3
    assert model.get_buffer("angles").tolist() == [0.0, 1.0, 2.0]
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(theirs, None)
    assert theirs.get_buffer("scale").tolist() != [1.0] * 3

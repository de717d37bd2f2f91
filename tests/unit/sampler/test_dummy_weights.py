"""Servers that start with dummy weights: which do, that nothing samples from them, and what the dummies leave as it is.

Real servers: tests/e2e/test_reshard_vllm.py.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.sampler.vllm.client import GENERATE
from tepo_megatron.sampler.vllm.plugin.middleware import ALLOWED, AWAITS_VARIABLE, DUMMY_FORMAT, RequireWeights
from tepo_megatron.sampler.vllm.server import Server
from tepo_megatron.sampler.vllm.wire import SAMPLES
from tepo_megatron.tasks.evaluate.standalone import evaluate_model, without_trainer

UPDATE = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")
EXTERNAL = ServerConfig(placement="external", registry=Path("/r"))


class Served:
    """The gate before an application that answers everything with ``status``."""

    def __init__(self) -> None:
        self.status = 200
        self.gate = RequireWeights(self._answer)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def post(self, path: str, status: int = 200) -> tuple[int, str]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {}

        self.status = status
        asyncio.run(self.gate({"type": "http", "path": path}, receive, send))
        return sent[0]["status"], sent[1]["body"].decode()


@pytest.fixture
def dummies(monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setenv(AWAITS_VARIABLE, "1")
    return Served()


@pytest.mark.parametrize("path", [SAMPLES, GENERATE, "/v1/completions", "/v1/load_lora_adapter", "/what/comes/next"])
def test_nothing_but_an_update_is_served_before_the_first_one_has_ended(dummies: Served, path: str) -> None:
    for step in UPDATE:
        status, said = dummies.post(path)
        assert status == 409
        assert f"{path}: this server has no weights yet" in json.loads(said)["error"]["message"]
        assert dummies.post(step, status=200 if step != UPDATE[-1] else 500)[0] != 409
    assert dummies.post(path)[0] == 409  # the update's end failed
    dummies.post(UPDATE[-1])
    assert dummies.post(path)[0] == 200


def test_a_server_that_let_its_weights_go_needs_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AWAITS_VARIABLE, raising=False)
    served = Served()
    assert served.post(GENERATE)[0] == 200
    assert served.post("/sleep")[0] == 200
    assert served.post("/wake_up")[0] == 200
    assert served.post(GENERATE)[0] == 409
    served.post("/finish_weight_update")
    assert served.post(GENERATE)[0] == 200


@given(paths=st.lists(st.sampled_from([GENERATE, "/v1/completions", *sorted(ALLOWED)]), max_size=12))
def test_samples_come_only_after_an_update_that_nothing_undid(paths: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(AWAITS_VARIABLE, "1")
        served = Served()
    has_weights = False
    for path in paths:
        assert served.post(path)[0] == (200 if path in ALLOWED or has_weights else 409)
        has_weights = {"/finish_weight_update": True, "/sleep": False}.get(path, has_weights)


def test_servers_of_a_training_run_read_no_weights_and_others_do(tmp_path: Path) -> None:
    for trained, config, dummy in (
        (True, ServerConfig(), True),
        (True, EXTERNAL, True),
        (True, ServerConfig(placement="colocated"), True),
        (True, ServerConfig(transfer="gather"), False),
        (True, ServerConfig(load_format="model"), False),
        (True, ServerConfig(extra_args=("--load-format=runai_streamer",)), False),
        (False, ServerConfig(), False),
        (False, ServerConfig(load_format="dummy"), True),
    ):
        assert config.starts_with_dummies(trained=trained) == dummy, config
        server = Server(config, model_dir=tmp_path, dtype="float32", cores="0", key="k", log=tmp_path / "log", dummy=dummy)
        assert (DUMMY_FORMAT in server.command(on_gpu=True)) == dummy
        assert (AWAITS_VARIABLE in server.environment(on_gpu=True)) == dummy


def test_a_fleet_of_servers_without_weights_has_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for trained in (False, True):
        made = Fleet(ServerConfig(), model_dir=tmp_path, dtype="float32", stop_token_ids=[2], log_dir=tmp_path, trained=trained)
        monkeypatch.setattr(made, "_start", lambda servers: None)
        made.start()
        assert (made.weights_version is None) == trained
        with pytest.raises(RuntimeError, match="do not have the current weights"):
            made.generate([(1,)], n=1, temperature=1.0, max_new_tokens=1, seed=0)


def test_dummies_that_would_stay_are_refused() -> None:
    with pytest.raises(ValueError, match="load_format = dummy needs transfer = reshard"):
        ServerConfig(load_format="dummy", transfer="gather")


def test_an_evaluation_without_a_trainer_reads_the_model(tmp_path: Path) -> None:
    for server in (ServerConfig(load_format="dummy"), ServerConfig(placement="colocated", load_format="dummy")):
        assert not without_trainer(server).starts_with_dummies(trained=False)
    config = RunConfig.model_validate({"output": tmp_path, "rollout": {"server": {"placement": "external", "registry": "/r"}}})
    with pytest.raises(ValueError, match=r"servers of 'tepo serve' start without weights.*load_format = model"):
        evaluate_model(config, "builtin:tiny")


def test_nccl_of_the_servers_takes_the_interface_that_the_run_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tepo_megatron.trainer.megatron.gpu import set_interface

    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    config = ServerConfig(interface="ib0")
    server = Server(config, model_dir=tmp_path, dtype="float32", cores="0", key="k", log=tmp_path / "log")
    assert server.environment(on_gpu=True)["NCCL_SOCKET_IFNAME"] == "ib0"
    environment: dict[str, str] = {}
    monkeypatch.setattr("tepo_megatron.trainer.megatron.gpu.os.environ", environment)
    set_interface(None)
    assert environment == {}
    set_interface("ib0")
    set_interface("ib1")  # what is set stays
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

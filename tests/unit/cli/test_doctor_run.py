"""The doctor on what clusters trip over: versions, disks, ports, servers; and on the machine that submits."""

from __future__ import annotations

import re
import shutil
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from tepo_megatron.cli.doctor import run_checks
from tepo_megatron.cli.machine_checks import Diagnosis, diagnose
from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.sampler.fleet.external import RegistryEntry
from tepo_megatron.sampler.vllm.resources import reserve_port


def of_run(config: RunConfig, name: str) -> Diagnosis:
    (check,) = diagnose({name: run_checks(config)[name]})
    return check


@pytest.mark.parametrize(
    ("train", "retained"),
    [
        (["keep_checkpoints=3"], 3),
        (["save_every=10"], 2),
        (["save_every=10", "keep_every=100"], 2 + 10),
        (["save_every=40", "keep_every=100"], 2 + 5),  # steps of which both are divisors
        (["keep_every=100"], 2),  # by the clock alone none is sure to fall on such a step
        (["save_every=10", "keep_best={metric: reward/mean}"], 2 + 1),
        (["save_every=1", "keep_every=1", "keep_checkpoints=5"], 1000),  # there are no more than steps
    ],
)
def test_a_full_disk_is_named_with_what_the_checkpoints_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: list[str], retained: int
) -> None:
    (tmp_path / "model").mkdir()
    with (tmp_path / "model" / "model.safetensors").open("wb") as file:
        file.truncate(2**30)  # sparse: 1 GiB of weights that take no disk
    settings = [f"model.path={tmp_path}/model", f"output={tmp_path}/not/yet", "train.steps=1000"]
    config = load_run(None, [*settings, *(f"train.{item}" for item in train)])
    for free, status in ((8 * retained - 1, "fail"), (8 * retained, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free * 2**30))
        check = of_run(config, "output")
        assert (check.name, check.status, check.needed) == ("output", status, True)
        takes = f"the {retained} checkpoints that it keeps may take {8 * retained:.1f} GiB"
        assert (takes in check.advice) == (status == "fail")


def test_a_taken_port_is_named() -> None:
    with reserve_port("127.0.0.1") as held:  # so that no other process is given it
        port = held.getsockname()[1]
        with socket.create_server(("127.0.0.1", port)):
            check = of_run(load_run(None, [f"rollout.server.port={port}"]), "server port")
            assert check.status == "warn"
            assert f"127.0.0.1:{port} is taken" in check.detail
            assert "rollout.server.port" in check.advice
        assert of_run(load_run(None, [f"rollout.server.port={port}"]), "server port").status == "ok"


def test_external_servers_are_looked_for(tmp_path: Path) -> None:
    config = load_run(
        None, ["rollout.server.placement=external", f"rollout.server.registry={tmp_path}", "rollout.server.count=2"]
    )
    RegistryEntry(tmp_path, 1).register("http://127.0.0.1:9", "life")
    checks = {name: of_run(config, name) for name in ("server 0", "server 1")}
    assert (checks["server 0"].status, checks["server 1"].status) == ("missing", "fail")
    assert "http://127.0.0.1:9" in checks["server 1"].detail


@pytest.mark.parametrize("folder", ["", "not/yet"])
def test_a_registry_without_servers_is_one_sentence(tmp_path: Path, folder: str) -> None:
    place = f"rollout.server.registry={tmp_path / folder}"
    config = load_run(None, ["rollout.server.placement=external", place, "rollout.server.count=3"])
    check = of_run(config, "servers")
    assert (check.status, check.needed) == ("missing", True)
    assert check.detail == f"no server is registered in {tmp_path / folder}"


@pytest.mark.parametrize(("status", "found"), [(200, "ok"), (503, "fail")])
def test_a_server_that_answers_is_told_with_its_latency(tmp_path: Path, status: int, found: str) -> None:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing into the tests' output."""

    config = load_run(None, ["rollout.server.placement=external", f"rollout.server.registry={tmp_path}"])
    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        RegistryEntry(tmp_path, 0).register(url, "life")
        check = of_run(config, "server 0")
        server.shutdown()
    assert check.status == found
    assert re.fullmatch(rf"{url} answers (in \d+ ms|with status 503)", check.detail)


@pytest.mark.parametrize(
    ("overrides", "name", "said"),
    [
        (["rollout.server.max_model_len=1000"], "model length", "rollout.server.max_model_len"),
        (["rollout.server.routing_replay=true"], "routing replay", "LlamaForCausalLM has none"),
        (["rollout.server.tp=3"], "server split", "rollout.server.tp = 3 does not fit this model"),
        (
            ["rollout.server.quantization=fp8_per_tensor", "rollout.server.dtype=bfloat16", "rollout.uncorrected=true"],
            "server machine",
            "no such quantiser for a CPU",
        ),
        (["engine.parallel.tp=3"], "trainer", "engine.parallel.tp"),
    ],
)
def test_what_training_would_refuse_is_reported_by_the_name_of_its_check(overrides: list[str], name: str, said: str) -> None:
    check = of_run(load_run(None, overrides), name)
    assert (check.status, check.needed, said in check.advice) == ("fail", True, True), check


def test_checks_of_features_that_a_run_does_not_use_are_not_listed() -> None:
    names = set(run_checks(load_run(None, ["rollout.server.tp=2"])))
    assert {"trainer", "server split", "memory", "model and data", "verifier"} <= names
    assert not {"loggers", "shards", "adapters", "fused head", "routing replay"} & names
    assert of_run(load_run(None, ["rollout.server.tp=2"]), "server split").status == "ok"

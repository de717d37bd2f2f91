"""The walls of docs/design.md hold: every contract is seen to fail, in a copy of the package with a planted fault."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.programs import TIMEOUT_S

ROOT = Path(__file__).parents[2]
PACKAGE = "tepo_megatron"
CONTRACTS = {
    each["id"]: each for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}

# Runs import-linter for each case in one process, in which the package itself is never imported: files named in a case are
# written, and are afterwards as before.
LINT = """
import contextlib, io, json, sys
from pathlib import Path
from importlinter.cli import lint_imports

reports = {}
for name, files in json.load(sys.stdin).items():
    before = {path: Path(path).read_text() if Path(path).exists() else None for path in files}
    for path, text in files.items():
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(text)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = lint_imports(no_cache=True, no_logo=True)
    reports[name] = [status, printed.getvalue()]
    for path, text in before.items():
        if text is None:
            Path(path).unlink()
        else:
            Path(path).write_text(text)
json.dump(reports, sys.stdout)
"""


class Planted(NamedTuple):
    """``line`` in ``file``, which breaks ``contract``."""

    file: str
    line: str
    contract: str


PLANTED = (
    Planted("sampler/fleet/external.py", "import vllm", "vllm"),
    Planted("run/loop.py", "import megatron.core", "megatron"),
    Planted("cli/launch.py", "import nemo_run", "nemo"),
    Planted("trainer/packing.py", "import triton", "triton"),
    Planted("run/loop.py", "import transformers", "transformers"),
    Planted("tasks/reward/recorded.py", "import pyarrow", "pyarrow"),
    Planted("run/loop.py", "import wandb", "loggers"),
    Planted("sampler/vllm/client.py", "import aiohttp", "aiohttp"),
    Planted("tools/results.py", "import typer", "typer"),
    Planted("config/run.py", "from tepo_megatron.core.types import Batch; import torch", "torch"),
    Planted("weights/table.py", "import torch", "torch"),  # launch reaches it
    Planted("sampler/fleet/sync.py", "import tepo_megatron.trainer.megatron.engine", "rooms"),
    Planted("run/loop.py", "from tepo_megatron.tools import results", "rooms"),
    Planted("core/objective/ratio.py", "from tepo_megatron.core.objective import compose", "circles"),
    Planted("weights/geometry.py", "from tepo_megatron.config import RunConfig", "config"),
    Planted("run/loop.py", "from tepo_megatron.core.objective.compose import build_objective", "maths"),
    Planted("tasks/evaluate/standalone.py", "from tepo_megatron.launch.job import Job", "launch"),
    Planted("run/output/resume.py", "from tepo_megatron.trainer.megatron.engine import Engine", "trainer"),
    Planted("cli/train.py", "from tepo_megatron.cli.config import plan", "cli"),
    Planted("weights/transfer/move.py", "from tepo_megatron.weights import reshard", "bridge"),
    Planted("sampler/protocol.py", "from tepo_megatron.sampler.vllm import client", "rollout"),
    Planted("run/rank0.py", "from tepo_megatron.sampler.fleet.fleet import Fleet", "sampler"),
    Planted("sampler/vllm/plugin/engine.py", "from tepo_megatron.sampler.vllm import client", "plugin"),
    Planted("config/run.py", "from tepo_megatron.config import load", "sections"),
    Planted("run/metrics.py", "from tepo_megatron.run import loop", "runs"),
)
AS_A_TYPE = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {line}"
IN_A_FUNCTION = "def _planted() -> None:\n    {line}"
FAULTS = {f"{fault.contract}: {fault.file}": (fault, IN_A_FUNCTION) for fault in PLANTED}
FAULTS["a type"] = (PLANTED[0], AS_A_TYPE)
NEW = {
    "a file beside the rooms": "extra.py",
    "a room": "extra/__init__.py",
    "a command": "cli/extra.py",
    "a folder of weights": "weights/extra/__init__.py",
}


def cases() -> dict[str, dict[str, str]]:
    """Name → the files of the copy that are written for it, and their texts."""
    result: dict[str, dict[str, str]] = {
        "an exception that nothing needs": {f"{PACKAGE}/tools/bench/megatron_step.py": '"""Empty."""\n'}
    }
    for name, (fault, way) in FAULTS.items():
        path = f"{PACKAGE}/{fault.file}"
        result[name] = {path: f"{(ROOT / path).read_text()}\n{way.format(line=fault.line)}\n"}
    result |= {what: {f"{PACKAGE}/{file}": '"""New."""\n'} for what, file in NEW.items()}
    return result | {"as it is": {}}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[int, str]]:
    """Case → exit status of import-linter and what it printed."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "builtin"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    done = subprocess.run(
        [sys.executable, "-c", LINT],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "400", "PYTHONDONTWRITEBYTECODE": "1"},
        input=json.dumps(cases()),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: (status, printed) for name, (status, printed) in json.loads(done.stdout).items()}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_import_breaks_its_contract(name: str, reports: Mapping[str, tuple[int, str]]) -> None:
    status, printed = reports[name]
    broken = {id for id, contract in CONTRACTS.items() if f"{contract['name']} BROKEN" in printed}
    assert status == 1
    assert FAULTS[name][0].contract in broken, printed


def test_the_copy_keeps_every_contract(reports: Mapping[str, tuple[int, str]]) -> None:
    """After all others, so that none of them left anything."""
    status, printed = reports["as it is"]
    assert status == 0, printed
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in printed


def test_every_contract_has_a_planted_import() -> None:
    assert {fault.contract for fault in PLANTED} == set(CONTRACTS)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        *((what, "The following modules are not listed as layers") for what in NEW),
        ("an exception that nothing needs", "tepo_megatron.tools.bench.megatron_step -> megatron"),
    ],
)
def test_what_is_new_is_placed_and_an_exception_needed(what: str, said: str, reports: Mapping[str, tuple[int, str]]) -> None:
    status, printed = reports[what]
    assert (status, said in printed) == (1, True), printed

"""The walls of docs/design.md hold: every contract is seen to fail, in a copy of the package with a planted fault."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.programs import TIMEOUT_S

ROOT = Path(__file__).parents[2]
PACKAGE = "tepo_megatron"
CONTRACTS = {
    each["id"]: each for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
LAYERS = [re.split(r" *[|:] *", layer) for layer in CONTRACTS["rooms"]["layers"]]

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
    Planted("rollout/serve.py", "import vllm", "vllm"),
    Planted("cli/doctor/run_checks.py", "import vllm", "vllm"),
    Planted("cli/doctor/run_checks.py", "from megatron.core import parallel_state", "megatron"),
    Planted("train/loop.py", "import megatron.core", "megatron"),
    Planted("bench/gpu.py", "import megatron.core", "megatron"),
    Planted("bridge/reshard/plan.py", "from vllm import LLM", "vllm"),
    Planted("evaluate/evaluation.py", "import vllm", "vllm"),
    Planted("rollout/plugin/shards.py", "import megatron.core", "megatron"),
    Planted("cli/launch.py", "import nemo_run", "nemo"),
    Planted("reward/recorded.py", "import pyarrow", "pyarrow"),
    Planted("rollout/client.py", "import aiohttp", "aiohttp"),
    Planted("launch/job.py", "import torch", "torch"),
    Planted("config/run.py", "from tepo_megatron.types import Batch; import torch", "torch"),
    Planted("bridge/layouts/table.py", "import torch", "torch"),  # launch reaches it
    Planted("engine/model.py", "from tepo_megatron.rollout.fleet import Fleet", "rooms"),
    Planted("rollout/sync.py", "import tepo_megatron.engine.engine", "rooms"),
    Planted("train/loop.py", "from tepo_megatron.bench import results", "rooms"),
    Planted("types.py", "from tepo_megatron.config import RunConfig", "rooms"),
    Planted("bridge/geometry.py", "from tepo_megatron.config import RunConfig", "config"),
    Planted("train/loop.py", "from tepo_megatron.objective import build_objective", "maths"),
    Planted("evaluate/standalone.py", "from tepo_megatron.launch.job import Job", "launch"),
    Planted("cli/train.py", "from tepo_megatron.cli.plan import plan", "cli"),
    Planted("bridge/transfer/move.py", "from tepo_megatron.bridge.reshard import plan", "bridge"),
    Planted("rollout/plugin/engine.py", "from tepo_megatron.rollout import client", "rollout"),
    Planted("objective/ratio.py", "from tepo_megatron.objective import compose", "circles"),
)
WAYS = {
    "at the end": "{line}",
    "in a function": "def _planted() -> None:\n    {line}",
    "as a type": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {line}",
}
FAULTS = [(fault, way) for fault in PLANTED for way in WAYS if way == "in a function" or fault in PLANTED[:7]]
NEW = {
    "a file beside the rooms": "extra.py",
    "a room": "extra/__init__.py",
    "a command": "cli/extra.py",
    "a folder of bridge": "bridge/extra/__init__.py",
}
FOREIGN = ("vllm", "megatron", "nemo_run", "triton", "transformers", "pyarrow", "typer")


@cache
def sources() -> dict[str, Path]:
    """Module → file."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def cases() -> dict[str, dict[str, str]]:
    """Name → the files of the copy that are written for it, and their texts."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in sources().values()}
    foreign = WAYS["in a function"].format(line="import " + ", ".join(FOREIGN))
    found: dict[str, dict[str, str]] = {
        "as it is": {},
        "foreign packages everywhere": {path: f"{text}\n{foreign}\n" for path, text in texts.items()},
        "an exception that nothing needs": {f"{PACKAGE}/bench/score_methods.py": '"""Empty."""\n'},
    }
    for fault, way in FAULTS:
        path = f"{PACKAGE}/{fault.file}"
        found[f"{fault.file}: {fault.line}, {way}"] = {path: f"{texts[path]}\n{WAYS[way].format(line=fault.line)}\n"}
    return found | {what: {f"{PACKAGE}/{file}": '"""New."""\n'} for what, file in NEW.items()}


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


def broken(printed: str) -> set[str]:
    """The ids of the contracts that a report calls broken."""
    return {id for id, contract in CONTRACTS.items() if f"{contract['name']} BROKEN" in printed}


def test_the_package_keeps_every_contract(reports: Mapping[str, tuple[int, str]]) -> None:
    status, printed = reports["as it is"]
    assert (status, broken(printed)) == (0, set()), printed
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in printed


@pytest.mark.parametrize(("fault", "way"), FAULTS, ids=[f"{fault.contract}:{fault.file}, {way}" for fault, way in FAULTS])
def test_a_planted_import_breaks_its_contract(fault: Planted, way: str, reports: Mapping[str, tuple[int, str]]) -> None:
    status, printed = reports[f"{fault.file}: {fault.line}, {way}"]
    assert status == 1
    assert fault.contract in broken(printed), printed


@pytest.mark.parametrize("what", NEW)
def test_what_is_new_must_be_placed(what: str, reports: Mapping[str, tuple[int, str]]) -> None:
    status, printed = reports[what]
    assert status == 1
    assert "The following modules are not listed as layers" in printed


def test_an_exception_that_nothing_needs_is_an_error(reports: Mapping[str, tuple[int, str]]) -> None:
    status, printed = reports["an exception that nothing needs"]
    assert status == 1
    assert "tepo_megatron.bench.score_methods -> megatron" in printed


@pytest.mark.parametrize(
    ("foreign", "rooms"),
    [
        ("vllm", ["rollout.plugin"]),
        ("megatron", ["engine", "bench.score_methods", "bench.score_ranks", "bench.step_megatron"]),
        ("nemo_run", ["launch"]),
        ("triton", ["vocab_parallel"]),
        ("transformers", ["data"]),
        ("pyarrow", ["data"]),
        ("typer", ["cli"]),
    ],
)
def test_of_all_files_only_these_may_import_it(foreign: str, rooms: list[str], reports: Mapping[str, tuple[int, str]]) -> None:
    refused = set(re.findall(rf"- ([\w.]+) -> {foreign} \(", reports["foreign packages everywhere"][1]))
    allowed = {module for module in sources() if inside(module, [f"{PACKAGE}.{room}" for room in rooms])}
    assert allowed
    assert refused == set(sources()) - allowed


# --- The same from the files themselves, without import-linter ----------------------------------------------------------------


class Import(NamedTuple):
    """``as_type``: under ``if TYPE_CHECKING``."""

    importer: str
    imported: str
    as_type: bool


def inside(module: str, packages: list[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@cache
def imports() -> tuple[Import, ...]:
    """Of all files, wherever in a file they stand; ``import_module("name")`` is one too."""
    return tuple(each for module, file in sources().items() for each in read_imports(module, file.read_text()))


def read_imports(module: str, text: str) -> Iterator[Import]:
    tree = ast.parse(text)
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    types = {id(inner) for block in blocks for inner in ast.walk(block)}
    for node in ast.walk(tree):
        for name in imported_names(node):
            yield Import(module, name, id(node) in types)


def imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "we import by full names"
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name if name in sources() else str(node.module) for name in inner]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        return [str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)]
    return []


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Every strongly connected set of more than one file, or one that imports itself (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for target in sorted(edges.get(node, ())):
            if target not in order:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in stack:
                lowest[node] = min(lowest[node], order[target])
        if lowest[node] == order[node]:
            members = [stack.pop()]
            while members[-1] != node:
                members.append(stack.pop())
            if len(members) > 1 or node in edges.get(node, ()):
                found.append(sorted(members))

    for node in sorted(edges):
        if node not in order:
            visit(node)
    return found


def room_of(module: str) -> str:
    """The room of a module of ours; nothing for others."""
    return module.split(".")[1] if inside(module, [PACKAGE]) and module != PACKAGE else ""


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == [["b", "c"], ["d"]]


def test_files_make_no_circle() -> None:
    edges: dict[str, set[str]] = defaultdict(set)
    for importer, imported, _ in imports():
        if inside(imported, [PACKAGE]):
            edges[importer].add(imported)
    assert len(edges) > 150
    assert circles(edges) == []


def test_no_file_imports_upward_or_beside() -> None:
    level = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
    ours = [each for each in imports() if inside(each.imported, [PACKAGE]) and each.importer != PACKAGE]
    wrong = [
        each
        for each in ours
        if room_of(each.importer) != room_of(each.imported) and level[room_of(each.importer)] >= level[room_of(each.imported)]
    ]
    assert wrong == []


def test_no_file_imports_the_list_of_public_names() -> None:
    """``tepo_megatron`` itself reaches everything; a file imports what it needs from where it is."""
    assert [each for each in imports() if each.imported == PACKAGE] == []


def test_reserved_packages_are_not_imported_by_name_either() -> None:
    for contract in CONTRACTS.values():
        if contract["type"] != "protected":
            continue
        excused = [text.split(" -> ")[0] for text in contract.get("ignore_imports", ())]
        allowed = [*contract["allowed_importers"], *contract["protected_modules"], *excused]
        wrong = [
            each
            for each in imports()
            if inside(each.imported, contract["protected_modules"])
            and not inside(each.importer, allowed)
            and each.importer != PACKAGE
        ]
        assert wrong == [], contract["name"]


def test_the_objective_needs_config_for_its_types_and_the_users_kinds_alone() -> None:
    """Its checks, which stand beside it and which nothing of it imports, make configurations too."""
    found = [
        each for each in imports() if inside(each.importer, [f"{PACKAGE}.objective"]) and room_of(each.imported) == "config"
    ]
    assert found
    own, checks = f"{PACKAGE}.config.objective_own", f"{PACKAGE}.objective.checking"
    real = [each for each in found if not each.as_type and not inside(each.importer, [checks])]
    assert {each.imported for each in real} == {own}
    within = [each for each in imports() if inside(each.imported, [checks]) and inside(each.importer, [f"{PACKAGE}.objective"])]
    assert {each.importer for each in within if not inside(each.importer, [checks]) and not each.as_type} <= {
        f"{PACKAGE}.objective"
    }


@pytest.mark.parametrize(("module", "others"), [("errors", set()), ("versions", {"packaging"})])
def test_what_stands_on_the_standard_library(module: str, others: set[str]) -> None:
    found = {each.imported.split(".")[0] for each in imports() if each.importer == f"{PACKAGE}.{module}"}
    assert found - sys.stdlib_module_names - {"__future__"} == others


def test_the_design_shows_the_rooms_as_the_contract_has_them() -> None:
    rows = re.findall(r"^\| (\d+) \| (`[^|]*`) \|", (ROOT / "docs/design.md").read_text(), flags=re.MULTILINE)
    shown = [(int(level), room.rstrip("/")) for level, names in rows for room in re.findall(r"`([^`]+)`", names)]
    assert sorted(shown) == sorted((number, room) for number, rooms in enumerate(LAYERS, 1) for room in rooms)

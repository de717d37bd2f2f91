"""The lists of what to change for a new architecture, objective, knob or metric are complete for everything that is there."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.config.objective.presets import PRESETS
from tepo_megatron.config.schema import schema_rows
from tepo_megatron.run.metrics import PHASES
from tepo_megatron.weights.architecture import FAMILIES
from tepo_megatron.weights.table import EXPERT_NAMES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tepo_megatron"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def keys(path: str, name: str) -> list[str]:
    """The keys of the dictionary that a file of tests assigns to ``name``."""
    for node in tree_of(ROOT / path).body:
        match node:
            case ast.Assign([ast.Name(id=found)], ast.Dict(keys)) | ast.AnnAssign(ast.Name(id=found), value=ast.Dict(keys)):
                if found == name:
                    return [str(key.value) for key in keys if isinstance(key, ast.Constant)]
    raise AssertionError(f"{path} has no {name}")


def section(document: str, heading: str) -> str:
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", (ROOT / document).read_text(), re.M | re.S)
    assert found is not None, f"{document} has no section {heading!r}"
    return found[1]


def cells(document: str) -> set[str]:
    """The code in the first cells of a document's tables."""
    rows = re.findall(r"^\|([^|]*)\|", (ROOT / document).read_text(), re.M)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


PLACES = {"tests/support/random_models.py": "MODELS", "tests/unit/trainer/test_te_layouts.py": "MODELS"}
"""Where a line for each architecture must be: file → the name there."""


@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_architecture_is_in_every_test_and_table(architecture: str) -> None:
    family = architecture.removesuffix("ForCausalLM")
    for path, name in PLACES.items():
        found = {key.partition("-")[0].removesuffix("ForCausalLM") for key in keys(path, name)}
        assert family in found, f"{path}: {name} has no {family}"
    assert (architecture in EXPERT_NAMES) == FAMILIES[architecture].experts
    assert architecture in cells("docs/reference/models.md")
    assert family.lower() in re.sub("[^a-z0-9]", "", (ROOT / "README.md").read_text().lower())


def test_the_list_for_an_architecture_names_every_place() -> None:
    listed = section("docs/reference/models.md", "Add an architecture")
    code = ("weights/architecture.py", "weights/table.py", "trainer/megatron/model/model.py", "README.md")
    for path in (*code, "tests/unit/weights/test_architecture.py", *PLACES):
        assert f"`{path}`" in listed


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_explained(preset: str) -> None:
    """That it has its formula: test_presets.py."""
    page = (ROOT / "docs/reference/tepo.md").read_text()
    assert re.search(rf"`(objective\.)?(preset: ?|preset=)?{preset}`", page), f"tepo.md does not explain {preset}"


def names_read(path: Path) -> Iterator[str]:
    """The attributes that a file reads, also by name."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value  # getattr(config.data, "train")


def read_in_config(path: Path) -> Iterator[str]:
    """The attributes that a section's public properties and methods read for others, such as ``served_dtype``; what only a
    check reads, nothing acts on."""
    if path.stem == "checks":
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield from (inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute))


PERMITS = {"rollout.uncorrected"}
"""Fields whose only reader is the validator that would otherwise refuse a run."""


def test_every_knob_is_read_by_some_code() -> None:
    outside = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "config" not in path.parents]
    read = {name for path in outside for name in names_read(path)}
    read |= {name for path in (PACKAGE / "config").rglob("*.py") for name in read_in_config(path)}
    assert {row.path for row in schema_rows(of_lists=True) if row.path.rpartition(".")[2] not in read} == PERMITS


PAGE = "docs/reference/metrics.md"
NAME = re.compile(r"[a-z_]+(/[a-z_@0-9]+)+|[a-z]+/s")
NOT_METRICS = {"entropy/noise", "ratio/noise", "sequence_ratio/noise"}
"""Keys of dictionaries that look like a metric: those of the noise get a quantile each."""


def metrics_in_code() -> dict[str, str]:
    """Every key that the package writes into a row of metrics → where: keys of dictionaries, and what ``row[…] =`` sets."""
    found = {}
    for room in ("core", "run", "sampler", "tasks", "trainer"):
        for path in sorted((PACKAGE / room).rglob("*.py")):
            for node in ast.walk(tree_of(path)):
                for key in _keys_written(node):
                    if NAME.fullmatch(key) and key not in NOT_METRICS:
                        found[key] = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
    quantiles = keys("tepo_megatron/core/scores/__init__.py", "_QUANTILES")
    found |= {f"time/{name}": "run/metrics.py: PHASES" for name in (*PHASES, "other", "step")}
    found |= {f"{name}/{label}": "core/scores/__init__.py" for name in NOT_METRICS for label in quantiles}
    return found | dict.fromkeys(("step", "ess", "loss", "grad_norm", "lr", "response_tokens"), "run/step/minibatches.py")


def _keys_written(node: ast.AST) -> list[str]:
    keys: list[ast.expr | None] = []
    if isinstance(node, ast.Dict):
        keys = list(node.keys)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        keys = [node.slice]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip" and node.args:
        keys = list(node.args[0].elts) if isinstance(node.args[0], ast.Tuple) else []
    return [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]


def test_every_metric_may_be_named_and_a_misspelt_one_is_refused_with_its_name() -> None:
    run = RunConfig()
    for name, place in sorted(metrics_in_code().items()):
        if name == "step":
            continue
        assert not [fault for fault in run.metric_faults("field", name) if "is in no row, since" not in fault]
        *_, fault = run.metric_faults("field", f"{name}x")
        assert f"field = {name}x is no metric of this run; did you mean {name.replace('@k', '@')}" in fault
        if "core/objective/" in place:  # of tokens
            assert not [fault for fault in run.metric_faults("train.rollback.metric", name) if "no figure" in fault]


def test_every_metric_has_its_line_in_the_one_table_and_nothing_else_has() -> None:
    written = metrics_in_code()
    assert len(written) > 60
    missing = {name: place for name, place in written.items() if name not in cells(PAGE)}
    lines = "\n".join(f"| `{name}` | (what it is, and its unit) |     <- {place}" for name, place in missing.items())
    assert not missing, f"add to the table 'Every metric' of {PAGE}:\n{lines}"
    rows = re.findall(r"^\|([^|]*)\|", section(PAGE, "Every metric"), re.M)
    gone = {name for row in rows for name in re.findall(r"`([^`]+)`", row) if "NAME" not in name} - set(written)
    assert not gone, f"{PAGE}, 'Every metric', explains what nothing writes: {sorted(gone)}; remove the line, or correct it"

"""``examples/paper``: every file is a run that fits, and its page says what the plan, the registry and the results say."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from examples.paper import results
from tepo_megatron.config import RunConfig
from tepo_megatron.config.loading.load import load_run
from tepo_megatron.plan import make_plan
from tepo_megatron.tasks.data.benchmarks.prepare import sets_yaml
from tepo_megatron.tasks.data.benchmarks.registry import BENCHMARKS

KIT = Path(__file__).parents[3] / "examples/paper"
FILES = sorted(KIT.glob("*.yaml"))
PAGE = (KIT / "README.md").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_run_fits_and_differs_from_its_first_by_its_objective(path: Path) -> None:
    config = load_run(path)
    assert make_plan(config).problems == ()
    assert config.output == Path("out/paper") / path.stem
    first = load_run(KIT / f"{path.stem.partition('-')[0]}.yaml")
    differing = {name for name in RunConfig.model_fields if getattr(config, name) != getattr(first, name)}
    allowed = {"name", "output", "objective", "rollout"} if path.stem.endswith("dapo") else {"name", "output", "objective"}
    assert differing <= allowed
    assert path == KIT / f"{first.output.name}.yaml" or "objective" in differing


def test_the_list_of_data_is_the_registrys() -> None:
    listed = json.loads((KIT / "data.json").read_text())
    assert set(listed) == {row.name for row in results.ROWS}
    for name, fields in listed.items():
        assert fields == {field: getattr(BENCHMARKS[name], field) for field in fields}
    (prepared,) = re.findall(r"^tepo data prepare (.*) --family base$", PAGE, re.M)
    assert set(prepared.split()) == set(listed)


def test_the_commands_for_evaluation_are_configurations(tmp_path: Path) -> None:
    lock = {name: {"family": "base", "prepared_sha256": "0" * 64} for name in json.loads((KIT / "data.json").read_text())}
    (tmp_path / "benchmarks.yaml").write_text(sets_yaml(tmp_path, lock))
    commands = re.findall(r"^ *tepo eval (\S+) --run data/benchmarks/benchmarks.yaml (.*)$", PAGE, re.M)
    assert len(commands) == 2
    for model, settings in commands:
        config = load_run(tmp_path / "benchmarks.yaml", [f"model.path={model}", *shlex.split(settings)])
        assert set(config.evaluate.sets) == set(lock)
    of_training = {load_run(path).rollout.sampling.max_new_tokens for path in FILES}
    assert of_training == {3072, 4096}
    for path, (_, settings) in zip(("7b", "70b"), commands, strict=True):
        assert f"max_new_tokens={load_run(KIT / f'{path}.yaml').rollout.sampling.max_new_tokens} " in settings


def test_the_table_is_empty_until_results_fill_it(tmp_path: Path) -> None:
    assert (KIT / "results.md").read_text() == results.table(None)
    assert results.table(None).count(results.NOT_RUN) == len(results.RUNS) * (len(results.ROWS) + 1) + 1
    for row in results.ROWS:
        write(tmp_path / "7b-p1", row.name, samples=4)
    write(tmp_path / "7b", "math500", samples=0)
    (tmp_path / "7b-grpo").mkdir()  # trained, not evaluated
    lines = [line.strip("| ").split(" | ") for line in results.table(tmp_path).splitlines() if line.startswith("|")]
    columns = {head: cells for head, _, *cells in zip(*lines, strict=True)}
    assert columns["`7b`"][0].startswith("100.0 (")
    assert set(columns["`7b`"][1:]) == {results.NOT_RUN}
    assert all(cell.startswith("62.5 (") for cell in columns["`7b-p1`"][:-1])
    assert columns["`7b-p1`"][-1] == "62.5"  # the average
    assert set(columns["`7b-grpo`"]) == {results.NOT_RUN}


def write(folder: Path, name: str, *, samples: int) -> None:
    """What ``tepo eval`` leaves of a benchmark of two problems."""
    place = folder / "eval/results"
    place.mkdir(parents=True, exist_ok=True)
    figures: list[dict[str, Any]] = [{f"avg@{samples}": 1.0}, {f"avg@{samples}": 0.25}] if samples else [{"greedy": 1.0}] * 2
    rows = [{"problem": str(at), "digest": str(at), "figures": each} for at, each in enumerate(figures)]
    (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / f"{name}.json").write_text(json.dumps({"settings": {"samples": samples}}))

"""``examples/paper``: every file is a run that fits, and its page says what the plan, the registry and the results say."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from examples.paper import results
from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.plan import make_plan
from tepo_megatron.tasks.data.benchmarks import BENCHMARKS, sets_yaml

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


def commands(folder: Path) -> list[list[str]]:
    """The words of each ``tepo`` command, as bash makes them of the page's blocks."""
    (folder / "examples/paper").mkdir(parents=True)
    stubs = 'tepo() { printf "%s\\n" "$@" "--end--"; }; hf() { :; }; python() { :; }\n'
    script = stubs + "".join(re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S))
    result = subprocess.run(["bash", "-euc", script], cwd=folder, capture_output=True, text=True, check=True)
    return [text.strip().split("\n") for text in result.stdout.split("--end--")[:-1]]


def test_every_command_of_the_page_is_a_run_or_an_evaluation(tmp_path: Path) -> None:
    """Each run with both seeds, into a folder of its own; each evaluation with the benchmarks and lengths of its size."""
    lock = {name: {"family": "base", "prepared_sha256": "0" * 64} for name in json.loads((KIT / "data.json").read_text())}
    (tmp_path / "benchmarks.yaml").write_text(sets_yaml(tmp_path, lock))
    trained, evaluated = [], []
    exported = set()
    for command, first, *rest in commands(tmp_path):
        if command in ("train", "launch"):
            settings = [word for word in rest if not word.startswith("--")]
            trained.append((Path(first).stem, load_run(KIT / Path(first).name, settings)))
        if command == "export":
            exported.add(rest[0])
        if command == "eval":
            size = Path(first).parent.name.partition("-")[0]
            config = load_run(tmp_path / "benchmarks.yaml", [f"model.path={first}", *rest[2:]])
            assert Path(first) == config.output / "model"
            assert rest[:2] == ["--run", f"data/benchmarks{'-reasoning' if size == '14b' else ''}/benchmarks.yaml"]
            assert set(config.evaluate.sets) == set(lock)
            of_training = load_run(KIT / f"{size}.yaml").rollout
            assert config.rollout.sampling.max_new_tokens == of_training.sampling.max_new_tokens
            assert config.rollout.server.max_model_len == of_training.server.max_model_len
            evaluated.append(config.output)
    seeds = {(name, config.seed) for name, config in trained}
    assert {(path.stem, seed) for path in FILES if not path.stem.startswith("70b") for seed in (0, 1)} <= seeds
    assert {name for name, _ in trained} == {path.stem for path in FILES}
    folders = {config.output for _, config in trained}
    assert len(folders) == len(seeds)
    assert {*folders, *(Path(model).parent for model in exported)} == set(evaluated)
    assert sorted(folder.name for folder in evaluated) == sorted(results.FOLDERS)


def test_the_costs_of_the_page_are_those_of_the_plan() -> None:
    for name in ("7b", "14b", "70b"):
        config = load_run(KIT / f"{name}.yaml")
        gpus, steps = 8 * (config.cluster.train_nodes + config.cluster.rollout_nodes), config.train.steps
        sync, overlap = (item.seconds for item in make_plan(config).time.schedules(is_colocated=False))
        hours = sync * steps / 3600
        cells = [name, gpus, steps, round(sync), f"{hours:.1f}", round(gpus * hours), round(overlap)]
        assert f"| {' | '.join(map(str, [*cells, round(overlap * steps / 3600 * gpus)]))} |\n" in PAGE


def test_the_table_is_empty_until_results_fill_it(tmp_path: Path) -> None:
    assert (KIT / "results.md").read_text() == results.table(None)
    assert results.table(None).count(results.NOT_RUN) == 1 + len(results.LINES)
    assert {line.run for line in results.LINES} == {path.stem for path in FILES}
    for row in results.ROWS:
        write(tmp_path / "7b-p1", row.name, samples=4)
        write(tmp_path / "7b-p1-seed1", row.name, samples=4, rewards=(0.5, 0.25))
    write(tmp_path / "7b-step72", "math500", samples=0)
    (tmp_path / "7b-grpo").mkdir()  # trained, not evaluated
    lines = [line.strip("| ").split(" | ") for line in results.table(tmp_path).splitlines() if line.startswith("|")]
    rows = {tuple(cells[:2]): dict(zip(lines[0][2:], cells[2:], strict=False)) for cells in lines[2:]}
    assert rows["`7b`", "72"]["seeds"] == "0"
    assert rows["`7b`", "72"]["MATH-500"].startswith("100.0 (")
    assert rows["`7b`", "72"]["AIME 2024"] == rows["`7b`", "72"]["average"] == "–"
    both = rows["`7b-p1`", "132"]
    assert both["seeds"] == "0, 1"
    assert both["Omni-MATH"].startswith("50.0 (62.5, 37.5)")
    assert both["average"] == "50.0 (62.5, 37.5)"
    assert rows["`7b-grpo`", "132"]["seeds"] == results.NOT_RUN
    assert rows["P2", "–"]["AMC 2023"] == "66.41"


def write(folder: Path, name: str, *, samples: int, rewards: tuple[float, float] = (1.0, 0.25)) -> None:
    """What ``tepo eval`` leaves of a benchmark of two problems."""
    place = folder / "eval/results"
    place.mkdir(parents=True, exist_ok=True)
    figures: list[dict[str, Any]] = [{f"avg@{samples}": reward} for reward in rewards] if samples else [{"greedy": 1.0}] * 2
    rows = [{"problem": str(index), "digest": str(index), "figures": item} for index, item in enumerate(figures)]
    (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / f"{name}.json").write_text(json.dumps({"settings": {"samples": samples}}))

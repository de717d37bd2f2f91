"""The runs that a sweep's file stands for, and the table of what they found."""

import ast
import csv
import json
import math
import os
import statistics
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.load import dump_resolved, load_run
from tepo_megatron.tools.sweep import Spread, Sweep, SweepFile, SweepResults, area, read_sweep, runs_of, seconds_left, shard
from tests.support.cli import invoke
from tests.support.processes import eventually, gone
from tests.support.programs import TIMEOUT_S

AXES = {"objective": {"tepo": "objective.preset=tepo", "grpo": ["objective.preset=grpo"]}, "lr": {"low": "optimizer.lr=1e-5"}}


def write(folder: Path, **given: Any) -> Path:
    (folder / "run.yaml").write_text("name: tiny\n")
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"run": "run.yaml", "output": str(folder / "out"), **given}, sort_keys=False))
    return path


def test_every_choice_that_is_not_left_out_meets_every_seed_and_the_runs_have_their_settings(tmp_path: Path) -> None:
    sweep = read_sweep(write(tmp_path, axes=AXES, seeds=[3, 5], overrides=["train.steps=7"]))
    runs = runs_of(sweep)
    assert [run.name for run in runs] == ["tepo-low-seed3", "grpo-low-seed3", "tepo-low-seed5", "grpo-low-seed5"]
    for run in runs:
        config = load_run(sweep.run, run.overrides)
        assert (config.seed, config.train.steps, config.optimizer.lr) == (run.seed, 7, 1e-5)
        assert config.objective.preset == run.choices["objective"]
        assert config.output == tmp_path / "out" / run.name
    axes = {**AXES, "lr": {"low": "optimizer.lr=1e-5", "high": "optimizer.lr=1e-4"}}
    sweep = read_sweep(write(tmp_path, axes=axes, leave_out=[{"objective": "grpo", "lr": "high"}]))
    assert [run.name for run in runs_of(sweep)] == ["tepo-low-seed0", "tepo-high-seed0", "grpo-low-seed0"]


@pytest.mark.parametrize("name", ["exp #1", "a: b", "[x]", "${HOME}", "!x", "'", "plain", "%s*&", "a\x85b", r"\${x}"])
def test_a_run_goes_into_its_folder_whatever_its_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = read_sweep(write(tmp_path))
    monkeypatch.chdir(tmp_path)
    for root in (Path(name), tmp_path / name):
        (run,) = runs_of(sweep, root)
        assert load_run(sweep.run, run.overrides).output == root / "seed0"


def test_settings_are_shown_as_they_are_written(tmp_path: Path) -> None:
    layers, name = "data.filter=[unique]", "name='[red]'"
    path = write(tmp_path, axes={"a": {"both": [layers, name]}})
    shown = invoke("sweep", path, "--dry-run", env={"COLUMNS": "200"}).output
    assert f"{layers} {name}" in shown
    warned = write(tmp_path, overrides=["objective.trust_region.low=0.2"], seeds=[0, 1])
    said = invoke("sweep", warned, "--dry-run").stderr
    assert (said.count("warning: "), said.count("UserWarning")) == (1, 0)


@given(count=st.integers(1, 40), parts=st.integers(1, 9))
def test_the_parts_of_several_jobs_are_all_runs_once(count: int, parts: int) -> None:
    sweep = SweepFile(run=Path("run.yaml"), seeds=tuple(range(count)))
    runs = runs_of(sweep)
    dealt = [run.name for k in range(parts) for run in shard(runs, f"{k + 1}/{parts}")]
    assert sorted(dealt) == sorted(run.name for run in runs)
    assert len(shard(runs, f"1/{parts}")) - len(shard(runs, f"{parts}/{parts}")) in (0, 1)


def replace_python(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """``tepo train …`` is this code."""
    program = folder / "run"
    program.write_text(f"#!{sys.executable}\nimport os, pathlib, sys, time\n{code}")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.parametrize(("cores", "jobs"), [(5, 3), (2, 3), (4, 4), (7, 2)])
def test_runs_at_a_time_share_the_cores(cores: int, jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[list[int]] = []
    monkeypatch.setattr("tepo_megatron.tools.sweep.available_cores", lambda: list(range(cores)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, share: shares.append(share), raising=False)
    replace_python(
        monkeypatch, tmp_path, f"while len(list(pathlib.Path({str(tmp_path / 'out/logs')!r}).glob('*'))) < {jobs}: pass"
    )
    sweep = read_sweep(write(tmp_path, seeds=[*range(jobs)], attempts=1))
    Sweep(sweep, runs_of(sweep), say=lambda line: None, jobs=jobs).run()
    assert (len(shares), {core for share in shares for core in share}) == (jobs, set(range(cores)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert sum(map(len, shares)) == max(cores, jobs)  # none is in two if there are enough


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="has one core")
def test_two_runs_at_a_time_start_on_cores_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says its cores, and waits until the other has."""
    code = (
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "(here / f'{os.getpid()}.said').write_text(repr(sorted(os.sched_getaffinity(0))))\n"
        f"until = time.monotonic() + {TIMEOUT_S}\n"
        "while len(list(here.glob('*.said'))) < 2 and time.monotonic() < until: time.sleep(0.01)\n"
    )
    replace_python(monkeypatch, tmp_path, code)
    before = os.sched_getaffinity(0)
    sweep = read_sweep(write(tmp_path, seeds=[0, 1], attempts=1))
    ended = Sweep(sweep, runs_of(sweep), say=lambda line: None, jobs=2).run()
    assert [one.outcome for one in ended] == ["failed", "failed"]  # it exports no model
    one, other = (set(ast.literal_eval(path.read_text(encoding="utf-8"))) for path in tmp_path.glob("*.said"))
    assert one | other == before
    assert not one & other
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("gpus", "visible", "jobs", "shares"),
    [(5, None, 2, {"0,1", "2,3"}), (3, "7,MIG-a,2", 3, {"7", "MIG-a", "2"}), (2, "5,6", 1, {"5,6"}), (0, "", 2, {""})],
)
def test_runs_at_a_time_share_the_gpus(
    gpus: int, visible: str | None, jobs: int, shares: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    logs = tmp_path / "out/logs"
    code = (
        "print(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        f"until = time.monotonic() + {TIMEOUT_S}\n"
        f"while len(list(pathlib.Path({str(logs)!r}).glob('*'))) < {jobs} and time.monotonic() < until: time.sleep(0.01)\n"
    )
    replace_python(monkeypatch, tmp_path, code)
    sweep = read_sweep(write(tmp_path, seeds=[*range(jobs)], attempts=1))
    Sweep(sweep, runs_of(sweep), say=lambda line: None, jobs=jobs).run()
    said = [path.read_text(encoding="utf-8").strip() for path in logs.glob("*")]
    assert (len(said), set(said)) == (jobs, shares)
    if gpus:
        with pytest.raises(ValueError, match=rf"--jobs {gpus + 1}: runs at a time have their own GPUs, and .* shows {gpus};"):
            Sweep(sweep, runs_of(sweep), say=lambda line: None, jobs=gpus + 1).run()


SWEEP = """
import sys
from pathlib import Path
from tepo_megatron.tools.sweep import Sweep, read_sweep, runs_of

sweep, sys.executable = read_sweep(Path(sys.argv[1])), sys.argv[2]
Sweep(sweep, runs_of(sweep), say=print).run()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent was killed")
def test_the_runs_of_a_killed_sweep_are_asked_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import signal\n"
        "from tepo_megatron.cli import main, train\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "def wait(*_):\n"
        "    signal.signal(signal.SIGTERM, lambda *_: (here / 'asked').touch())\n"
        "    (here / f'{os.getpid()}.pid').touch()\n"
        f"    until = time.monotonic() + {TIMEOUT_S}\n"
        "    while not (here / 'asked').exists() and time.monotonic() < until: time.sleep(0.01)\n"
        "    os._exit(0)\n"
        "train.load_config = wait\n"
        "main.app(sys.argv[3:])\n"
    )
    python = sys.executable
    replace_python(monkeypatch, tmp_path, code)
    sweep = subprocess.Popen([python, "-c", SWEEP, write(tmp_path, attempts=1), sys.executable])
    assert eventually(lambda: sweep.poll() is not None or list(tmp_path.glob("*.pid")) != [])
    sweep.kill()
    sweep.wait()
    (run,) = (int(path.stem) for path in tmp_path.glob("*.pid"))
    try:
        assert eventually((tmp_path / "asked").exists)
    finally:
        (tmp_path / "asked").touch()
        assert gone(run)


@given(each=st.integers(1, 1000), waiting=st.integers(0, 60), jobs=st.integers(1, 9))
def test_what_is_left_goes_by_how_many_run_at_a_time_and_for_how_long(each: int, waiting: int, jobs: int) -> None:
    assert seconds_left([each, each], [], waiting, jobs) == math.ceil(waiting / jobs) * each
    if waiting:  # one more has just begun on a place that the others do not have
        assert seconds_left([each], [0.0], waiting, jobs) == math.ceil((waiting + 1) / jobs) * each
    assert seconds_left([240.0], [239.0], 50, 2) == 6001.0  # the first of 52, two at a time; the other is nearly done
    assert seconds_left([20.0, 40.0], [10.0], 0, 8) == 20.0  # the last one has its place alone
    assert seconds_left([30.0], [45.0], 0, 1) == 0.0  # takes longer than the others did


def test_a_damaged_file_or_folder_of_one_run_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line counts what ended, and all but the last say what is left."""
    code = (
        "out = pathlib.Path(next(each for each in sys.argv if each.startswith('output=')).partition('=')[2])\n"
        "(out / 'model').mkdir(parents=True)\n"
        "(out / 'metrics.jsonl').write_text('damaged\\n' if out.name == 'seed0' else '')\n"
    )
    replace_python(monkeypatch, tmp_path, code)
    sweep = read_sweep(write(tmp_path, seeds=[0, 1, 2]))
    (tmp_path / "out/logs/seed1.log").mkdir(parents=True)  # it cannot be opened
    lines: list[str] = []
    ended = Sweep(sweep, runs_of(sweep), say=lines.append).run()
    assert [one.outcome for one in ended] == ["done", "failed", "done"]
    assert "seed1.log" in ended[1].said
    assert [line.partition(" ")[0] for line in lines[1:]] == ["[1/3]", "[2/3]", "[3/3]"]
    assert [" left" in line for line in lines[1:]] == [True, True, False]


@pytest.mark.parametrize(("written", "reported"), [("checkpoints", "the second"), ("model", "the first")])
def test_a_failed_run_is_reported_with_the_error_of_its_last_attempt(
    written: str, reported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has exported its model is not started again."""
    code = (
        f"pathlib.Path({str(tmp_path / 'out/seed0' / written)!r}).mkdir(parents=True, exist_ok=True)\n"
        f"marker = pathlib.Path({str(tmp_path / 'marker')!r})\n"
        "print('error: the second' if marker.exists() else 'error: the first')\n"
        "marker.touch()\n"
        "sys.exit(1)\n"
    )
    replace_python(monkeypatch, tmp_path, code)
    sweep = read_sweep(write(tmp_path, attempts=2))
    (ended,) = Sweep(sweep, runs_of(sweep), say=lambda line: None).run()
    assert ended.outcome == "failed"
    assert ended.said.startswith(f"error: {reported} (")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"axis": {}}, "axis: unknown key (got {}); did you mean axes?"),
        ({"seed": 7}, "seed: unknown key (got 7); did you mean seeds?"),
        ({"axes": 3}, "axes: got 3; allowed: a section"),
        ({"axes": {"lr": {"a": 3}}}, "axes.lr.a: got 3; allowed: text or a list, each item text"),
        ({"reach": [{"at": 0.5}]}, "reach[0].at: got 0.5; allowed: a list, each item a number"),
        ({"axes": {"lr": {"a/b": "optimizer.lr=1"}}}, "becomes part of a folder's name"),
        ({"axes": {"lr": {}}}, "axes.lr has no choices"),
        ({"overrides": ["train.steps=7", "seed=7"]}, "seed=7: every run has its own seed and output; write seeds: / output:"),
        ({"axes": {"a": {"one": "optimizer.lr=1", "two": ["train.steps=7", "output=x"]}}}, "output=x: every run has its own"),
        ({"axes": {"seed": {"a": "optimizer.lr=1"}}}, "axes.seed: the tables have a column of this name"),
        ({"leave_out": [{"lr": "low"}]}, "axes.lr.low is not there"),
        ({"seeds": [1, 1]}, "has one of them twice"),
        ({"seeds": []}, "seeds: got []; allowed: a list, each item an integer ≥ 0; give 1 or more"),
        ({"run": None}, "run: got null; allowed: a path"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="not a sweep") as error:
        read_sweep(write(tmp_path, **given))
    assert said in str(error.value)


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "1/0"])
def test_a_part_of_another_form_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match="write K/N"):
        shard([], part)


def test_a_run_that_cannot_begin_and_a_folder_of_another_run_are_named_before_anything_starts(tmp_path: Path) -> None:
    wrong = read_sweep(write(tmp_path, axes={"lr": {"low": "optimizer.lr=1e-5", "bad": "optimizer.lrr=1"}}))
    with pytest.raises(ValueError, match=r"the run bad-seed0 cannot begin[\s\S]*optimizer\.lrr"):
        wrong.check(runs_of(wrong))
    sweep = read_sweep(write(tmp_path, axes=AXES))
    runs = runs_of(sweep)
    runs[0].folder.mkdir(parents=True)
    there = load_run(sweep.run, [*runs[0].overrides, "train.resume=auto"])
    (runs[0].folder / "resolved.yaml").write_text(dump_resolved(there))
    sweep.check(runs)  # that it was resumed is no other setting
    (runs[0].folder / "resolved.yaml").write_text(dump_resolved(there.with_dtype("float32")))
    sweep.check(runs)  # nor what auto became
    sweep.check(runs, gpus=0)
    (runs[0].folder / "resolved.yaml").write_text(dump_resolved(load_run(sweep.run, ["seed=9"])))
    with pytest.raises(ValueError, match=r"tepo-low-seed0 holds a run of other settings .*seed"):
        sweep.check(runs)


@pytest.mark.parametrize(
    ("dtypes", "gpus", "share", "said"),
    [
        (["float32", "bfloat16"], None, 2, "float32 for tepo-low-seed0 and bfloat16 for grpo-low-seed0, as "),
        (["float32"], 1, 2, "float32 for tepo-low-seed0 and bfloat16 for grpo-low-seed0, as "),
        (["bfloat16"], 0, 2, "bfloat16 for tepo-low-seed0 and float32 for grpo-low-seed0, as "),
        (["float32", "bfloat16"], 0, 1, "float32 for tepo-low-seed0 and bfloat16 for grpo-low-seed0, as "),
        (["", "bfloat16"], 0, 1, "float32 for tepo-low-seed0 and bfloat16 for grpo-low-seed0, as "),
        (["float32"], None, 2, ""),
        (["float32"], 0, 2, ""),
        (["float32"], 1, 1, ""),  # the other begins elsewhere
        (["bfloat16"], 1, 2, ""),
        (["float32"] * 2, 1, 2, ""),  # nothing begins here
        (["bfloat16", "ended early in float32"], 1, 2, ""),
    ],
)
def test_a_table_does_not_mix_what_auto_is_on_two_machines(
    dtypes: list[str], gpus: int | None, share: int, said: str, tmp_path: Path
) -> None:
    """A folder without a model or a checkpoint says nothing: its run begins anew."""
    sweep = read_sweep(write(tmp_path, axes=AXES))
    for run, dtype in zip(runs := runs_of(sweep), dtypes, strict=False):
        if dtype:
            (run.folder if dtype.startswith("ended") else run.folder / "model").mkdir(parents=True)
            resolved = load_run(sweep.run, run.overrides).with_dtype(dtype.removeprefix("ended early in "))
            (run.folder / "resolved.yaml").write_text(dump_resolved(resolved))
    with pytest.raises(ValueError, match=f"model.dtype = auto is {said}") if said else nullcontext():
        sweep.check(runs, gpus, runs[:share])


def test_settings_that_make_other_dtypes_of_auto_are_a_choice(tmp_path: Path) -> None:
    platforms = {"a": "engine.platform=cpu", "b": "engine.platform=auto"}
    sweep = read_sweep(write(tmp_path, axes={"platform": platforms}))
    sweep.check(runs_of(sweep), gpus=1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"figures": ["nonsense/metric"]}, "figures = nonsense/metric is no metric of this run"),
        ({"area": ["accuracy/greedy"], "overrides": ["evaluate.every=0"]}, "evaluate.every = 0 makes none"),
        ({"reach": [{"figure": "accuracy/gredy"}]}, "did you mean accuracy/greedy"),
        ({"overrides": ["evaluate.every=0"]}, None),  # the figures that a file does not name
        ({"figures": ["accuracy/greedy"], "axes": {"e": {"no": "evaluate.every=0", "yes": "evaluate.every=1"}}}, None),
    ],
)
def test_a_figure_that_no_run_has_is_named_before_anything_starts(
    given: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    sweep = read_sweep(write(tmp_path, **given))
    with nullcontext() if said is None else pytest.raises(ValueError, match=f"^no run of the sweep has this figure: .*{said}"):
        sweep.check(runs_of(sweep)[:1])


ROWS = [
    {"step": 0, "accuracy/greedy": 0.5, "time/canary": 1.0},
    {"step": 1, "time/step": 9.0},
    {"step": 2, "time/step": 1.0, "accuracy/greedy": 0.7},
    {"step": 4, "time/step": 2.0, "accuracy/greedy": 0.9, "reward/mean": None},
]


def test_figures_of_a_run_by_hand() -> None:
    figures = ["accuracy/greedy", "time/step", "time/canary", "reward/mean"]
    reach = [{"figure": "accuracy/greedy", "at": [0.7, 0.95]}]
    sweep = SweepFile.model_validate({"run": "run.yaml", "figures": figures, "area": ["accuracy/greedy"], "reach": reach})
    assert sweep.figures_of(ROWS) == {
        "accuracy/greedy": 0.9,
        "time/step, median": 2.0,
        "time/canary, median": None,
        "reward/mean": None,
        "accuracy/greedy, area": pytest.approx((2 * 0.6 + 2 * 0.8) / 4),
        "steps to accuracy/greedy 0.7": 2.0,
        "steps to accuracy/greedy 0.95": None,
    }
    assert area([(3, 1.0)]) is None


def test_a_spread_is_the_mean_with_students_interval_and_says_what_is_missing() -> None:
    spread = Spread((0.8, 0.9, 1.0))
    assert spread.half_width == pytest.approx(4.303 * statistics.stdev([0.8, 0.9, 1.0]) / math.sqrt(3))
    assert str(spread) == "0.900 ± 0.248"
    assert str(Spread((30.0, None))) == "30.0 (1 of 2)"
    assert str(Spread((None,))) == "–"


def test_tables_are_of_what_is_done(tmp_path: Path) -> None:
    sweep = read_sweep(write(tmp_path, axes=AXES, seeds=[0, 1], figures=["accuracy/greedy"], area=[]))
    runs = runs_of(sweep)
    for number, run in enumerate(runs[:3]):  # both seeds of tepo, one of grpo
        (run.folder / "model").mkdir(parents=True)
        row = {"step": 1, "accuracy/greedy": 0.5 + number / 10}
        (run.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert [run.is_done for run in runs] == [True, True, True, False]
    columns, rows = SweepResults(sweep, runs).table()
    assert columns == ["objective", "lr", "seeds", "accuracy/greedy"]
    assert rows == [["tepo", "low", "2", "0.600 ± 1.271"], ["grpo", "low", "1", "0.600"]]
    SweepResults(sweep, runs).write(tmp_path)
    with (tmp_path / "sweep.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    found = [(one["objective"], one["seed"], float(one["accuracy/greedy"])) for one in read]
    assert found == [("tepo", "0", 0.5), ("tepo", "1", 0.7), ("grpo", "0", 0.6)]
    assert "| tepo | low | 2 | 0.600 ± 1.271 |" in (tmp_path / "sweep.md").read_text(encoding="utf-8")


def test_tables_that_cannot_be_written_leave_the_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = read_sweep(write(tmp_path))
    results = SweepResults(sweep, runs_of(sweep))
    before = {path: path.read_bytes() for path in results.write(tmp_path)}

    def full_disk(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(csv.DictWriter, "writeheader", full_disk)
    with pytest.raises(OSError, match="no space left"):
        results.write(tmp_path)
    assert {path: path.read_bytes() for path in before} == before
    assert {path.name for path in tmp_path.glob("sweep.*")} == {"sweep.yaml", "sweep.md", "sweep.csv", "sweep.json"}

"""What is seen of a run: lines, tables, pictures, and its status."""

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from tepo_megatron.config import LogConfig, RunConfig
from tepo_megatron.config.load import dump_resolved
from tepo_megatron.run.display.figures import COUNTED, LOST, duration, evaluation_line, fault_lines, final_table, set_lines
from tepo_megatron.run.display.plots import plot_comparison, plot_curves
from tepo_megatron.run.display.progress import Progress
from tepo_megatron.run.output.status import run_status
from tepo_megatron.runtime.heartbeat import Heartbeat, RankRecord
from tests.support.data_files import write_jsonl
from tests.support.processes import files_of_at_most
from tests.support.programs import run_python

PLAIN = LogConfig(progress="plain")
TIMES = {"time/rollout": 3.0, "time/update": 1.0, "time/step": 4.0}
ROW = {"reward/mean": 0.43211, "entropy/mean": 0.15, "mask/fraction": 0.034, "grad_norm": 0.5, "tokens/s": 5210.4, **TIMES}
EVALUATED = {"accuracy/greedy": 0.5, "accuracy/avg@3": 0.25, "accuracy/pass@3": 0.75}
RUN = RunConfig.model_validate({"name": "tiny", "output": "out/tiny", "train": {"steps": 20}, "evaluate": {"samples": 3}})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def text_of(renderable: object, width: int = 120) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(renderable)
    return stream.getvalue()


def test_plain_output_is_a_line_a_step_a_line_an_evaluation_and_phases_that_take_long() -> None:
    stream, now = io.StringIO(), [0.0]
    with open("/dev/full", "w") as full:
        for view in (Progress.of(PLAIN, stream, clock=lambda: now[0]), Progress.of(PLAIN, full)):
            view.start(RUN)
            view.step(0, EVALUATED | {"eval/aime/greedy": 0.25})
            for phase, seconds in (("score", 4), ("rollout", 28), ("update", 1)):
                view.phase(phase)
                now[0] += seconds
            view.step(7, ROW)
            view.step(8, ROW | EVALUATED | {"grad_norm": None})
            view.close()  # a full disk ends neither the run nor what Python writes at its end
    figures = "reward 0.432  entropy 0.150  masked 3.4 %"
    assert stream.getvalue().splitlines() == [
        "run tiny: 20 steps of builtin:tiny, output in out/tiny",
        "step  0/20  held out: greedy 0.500  avg@3 0.250  pass@3 0.750",
        "step  0/20  aime: greedy 0.250",
        "  rollout took 28.0 s",
        f"step  7/20  {figures}  grad norm 0.500  tokens/s 5210  4.0 s",
        f"step  8/20  {figures}  tokens/s 5210  4.0 s",
        "step  8/20  held out: greedy 0.500  avg@3 0.250  pass@3 0.750",
    ]


def test_what_repeats_is_left_out_and_evaluation_sets_have_lines_of_their_own() -> None:
    """Accuracies alone; of a set that is evaluated seldom the last one stays in the table."""
    binary = EVALUATED | {"heldout/reward_greedy": 0.5, "heldout/reward_sampled": 0.25}
    graded = binary | {"heldout/reward_greedy": 0.75}
    assert evaluation_line(binary) == evaluation_line(EVALUATED)
    assert evaluation_line(graded) == f"{evaluation_line(EVALUATED)}  reward, greedy 0.750"
    of_set = {"eval/aime/greedy": 0.25, "eval/aime/maj@8": 0.5, "eval/aime/truncated": 0.125, "eval/aime/failed": 0.0}
    assert set_lines({"step": 3, **ROW, **of_set}) == {"aime": "aime: greedy 0.250  maj@8 0.500"}
    assert set_lines({"step": 3, **EVALUATED}) == {}
    rows = [{"step": 0, **binary, **of_set}, {"step": 1, **ROW}]
    shown = text_of(final_table(rows, Path("none")))
    assert "aime maj@8" in shown
    assert "truncated" not in shown
    assert "reward, greedy" not in shown
    assert "reward, greedy" in text_of(final_table([*rows, {"step": 2, **graded}], Path("none")))


def test_the_view_follows_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    live = type(Progress.of(LogConfig(progress="live"), Terminal()))
    assert live is not Progress
    assert type(Progress.of(LogConfig(), Terminal())) is live
    assert type(Progress.of(LogConfig(), io.StringIO())) is Progress
    silent = Progress.of(LogConfig(progress="none"), stream := Terminal())
    silent.message("nothing")
    assert stream.getvalue() == ""
    monkeypatch.setenv("TERM", "dumb")
    assert type(Progress.of(LogConfig(), Terminal())) is Progress


def test_the_live_view_shows_the_figures_and_leaves_the_cursor_visible() -> None:
    stream, now = Terminal(), [0.0]
    view: Any = Progress.of(LogConfig(progress="live"), stream, 110, lambda: now[0])
    view.start(RUN.model_copy(update={"name": "run [bold]"}))
    view.step(0, EVALUATED)
    view.step(5, ROW)
    view.phase("rollout")
    now[0] += 65
    shown = text_of(view.render())
    assert max(len(line) for line in text_of(view.render(), 40).splitlines()) <= 40
    view.message("server is up [1]")
    view.close()
    view.close()
    figures = ("5/20", "4.0 s/step  1:00 left", "rollout  1:05", "reward 0.432", "avg@3 0.250")
    for expected in ("run [bold]", "out/tiny", *figures):
        assert expected in shown
    assert "server is up [1]" in stream.getvalue()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_the_final_table_has_first_best_last_and_the_files_with_whole_paths(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    for name in ("metrics.jsonl", "resolved.1.yaml", "run.lock"):
        (folder / name).touch()
    rewards = {1: 0.2, 2: 0.9, 3: 0.6}
    rows = [{"step": 0, **EVALUATED, "time/step": 50.0}, *({**ROW, "step": s, "reward/mean": r} for s, r in rewards.items())]
    assert f"{folder}/metrics.jsonl" in text_of(final_table(rows, folder), 80).replace("\n", "").replace(" ", "")
    shown = text_of(final_table(rows, folder), 200)
    assert "resolved.1.yamltheconfigurationbefore" in "".join(shown.split())  # a long path is folded
    assert "run.lock" not in shown
    (reward,) = [line for line in shown.splitlines() if "reward" in line and "0.900" in line]
    assert [part.strip() for part in reward.strip("│").split("│")] == ["reward", "0.200 (1)", "0.900 (2)", "0.600 (3)"]
    (seconds,) = [line for line in shown.splitlines() if "3.00" in line]
    numbers = [float(part) for part in seconds.strip("│").split("│")]
    assert (sum(numbers[:-1]), numbers[0], numbers[-1]) == (4.0, 3.0, 4.0)


def test_durations_and_a_run_without_faults_says_nothing_of_them() -> None:
    seconds = (0, 59.94, 60, 3599.6, 3725)
    assert [duration(value) for value in seconds] == ["0.0 s", "59.9 s", "1:00", "1:00:00", "1:02:05"]
    row = {**dict.fromkeys(COUNTED, 0.0), **dict.fromkeys(LOST, 0.0), "step": 1}
    assert fault_lines([row, {"step": 2, "update/skipped": None}]) == []
    for key in (*COUNTED, *LOST):
        assert len(fault_lines([row, {**row, key: 3.0}])) == 1


def row(step: int) -> dict[str, Any]:
    return {**ROW, "step": step, "reward/mean": 1 - 1 / step, "entropy/mean": 1 / step, "time/other": 0.1, "time/step": 4.1}


EVALUATION = EVALUATED | {"accuracy/pass@3": None}
ROWS = [
    {"step": 0, **EVALUATION, "time/step": 1.0, "time/eval": 1.0},
    *(row(step) for step in range(1, 40)),
    row(40) | EVALUATION,
]


def test_runs_of_any_length_share_a_size_and_other_numbers_and_faults_make_another_picture(tmp_path: Path) -> None:
    changes = {
        "none": {"update/skipped": 0.0},
        "some": {"update/skipped": 3.0, "lost/skipped": 61.0},
        "other": {"grad_norm": 9.0},
    }
    runs = {name: [*ROWS[:-1], ROWS[-1] | change] for name, change in changes.items()}
    runs |= {"plain": ROWS, "one": ROWS[1:2], "eval": ROWS[:1], "bare": [{"step": 3}]}
    paths = {name: Path(write_jsonl(tmp_path / name / "metrics.jsonl", rows)) for name, rows in runs.items()}
    title = "a $x_$ b"  # no formula, though it looks like one
    for name, path in paths.items():
        plot_curves(path, tmp_path / "new" / f"{name}.png", title)
    plot_comparison({title: paths["plain"], "one": paths["one"]}, tmp_path / "new" / "several.png", "two runs")
    pictures = {path.stem: imread(path) for path in (tmp_path / "new").iterdir()}
    assert len(pictures) == 8
    assert {picture.shape[:2] for picture in pictures.values()} == {(1080, 1800)}
    same = {name for name, picture in pictures.items() if np.array_equal(picture, pictures["plain"])}
    assert same == {"plain", "none"}
    before = (tmp_path / "new" / "one.png").read_bytes()
    for name in ("one", "another"):  # half a picture would count as that of a finished run
        with files_of_at_most(10_000), pytest.raises(OSError, match="File too large"):
            plot_curves(paths["plain"], tmp_path / "new" / f"{name}.png", title)
    assert {path.stem for path in (tmp_path / "new").iterdir()} == set(pictures)
    assert (tmp_path / "new" / "one.png").read_bytes() == before
    with pytest.raises(ValueError, match="has no row yet"):
        plot_curves(Path(write_jsonl(tmp_path / "empty" / "metrics.jsonl", [])), tmp_path / "empty.png", "")
    assert not (tmp_path / "empty.png").exists()


WRITTEN = [
    {"step": 0, "accuracy/greedy": 0.25, "time/step": 30.0},
    {"step": 1, "reward/mean": 0.5, "time/step": 10.0, "update/skipped": 2.0, "lost/skipped": 5.0},
    {"step": 2, "reward/mean": 0.625, "time/step": 20.0, "update/skipped": 0.0, "servers/restarts": 1.0, "lost/server": 70.0},
]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A run's folder with the last words of two ranks that are this process."""
    folder = tmp_path / "out"
    write_jsonl(folder / "metrics.jsonl", WRITTEN)
    config = RunConfig.model_validate({"name": "made up", "output": folder, "train": {"steps": 10}})
    (folder / "resolved.yaml").write_text(dump_resolved(config))
    assert run_status(folder)[0][0].startswith("made up: ended at step 2 of 10, or of a version that says no more")
    for rank in (0, 1):
        beats = Heartbeat(folder / "status", rank, 2)
        beats.start()
        beats.close("")
    return folder


def change(output: Path, rank: int, **said: object) -> None:
    """Has a rank have said something else last."""
    (record,) = [record for record in RankRecord.read_all(output / "status") if record.rank == rank]
    (output / "status" / f"rank-{rank:05d}.json").write_text(json.dumps({**asdict(record), **said}))


def test_a_running_one(output: Path) -> None:
    facts = {"servers": ["http://127.0.0.1:5"], "reward_workers": 3}
    now = 1000.0
    said = {"time": now - 1, "since": now - 125, "moved_at": now - 5, "phase": "rollout"}
    change(output, 0, **said, done=3, total=8, waits_for="the rollout servers' samples", facts=facts)
    change(output, 1, **said, waits_for="rank 0")
    lines, goes_on = run_status(output, now=now)
    assert goes_on
    assert lines[0] == "made up: runs, step 2 of 10 done, about 2:00 left"
    assert lines[1] == "  phase    rollout for 2:05, 3 of 8 done"
    assert lines[2].startswith("  rank 0   rollout, waits for the rollout servers' samples; last move 5.0 s ago on ")
    assert lines[3].startswith("  rank 1   rollout, waits for rank 0; last move 5.0 s ago on ")
    assert lines[4:] == [
        "  server   http://127.0.0.1:5",
        "  rewards  3 workers, waiting for responses",
        "  step 2   reward 0.625  20.0 s",
        "  step 0   held out: greedy 0.250",
        "  fault    2 optimizer steps skipped",
        "  fault    1 servers started again",
        "  fault    5.0 s lost in steps that were skipped",
        "  fault    1:10 lost until a server was there again",
    ]
    (output / "metrics.jsonl").unlink()
    assert run_status(output)[0][0] == "made up: runs, step 0 of 10 done"


def test_on_another_machine_a_rank_is_there_as_long_as_it_says_something(output: Path) -> None:
    change(output, 0, host="elsewhere", time=1000.0)
    change(output, 1, host="elsewhere", time=900.0)
    lines, goes_on = run_status(output, now=1010.0)
    assert goes_on
    assert lines[3].endswith(": SILENT for 1:50")
    assert not run_status(output, now=1100.0)[1]


KILLED = (
    "made up: ended at step 2 of 10 without a last word (killed?), in phase sync, 5.0 s ago; continue with the same command "
    "and --resume, without --from"
)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"ended": "failed: a sentence"}, "made up: ended at step 2 of 10 5.0 s ago: failed: a sentence"),
        ({"pid": 2**22, "phase": "sync"}, KILLED),
        ({"started": 1, "phase": "sync"}, KILLED),  # the number is another process' by now
    ],
)
def test_one_that_has_ended(output: Path, said: dict[str, object], expected: str) -> None:
    change(output, 0, time=995.0, **said)
    lines, goes_on = run_status(output, now=1000.0)
    assert not goes_on
    assert lines[0] == expected


def test_plots_and_status_need_neither_torch_nor_pyplot_and_watch_ends_with_the_run(output: Path, tmp_path: Path) -> None:
    change(output, 0, ended="finished")
    code = f"""
import sys
from pathlib import Path
from tepo_megatron.cli.main import app
from tepo_megatron.run.display.plots import plot_curves
app(standalone_mode=False)
assert "matplotlib" not in sys.modules
plot_curves(Path({str(output)!r}) / "metrics.jsonl", Path({str(tmp_path / "a.png")!r}), "a")
assert not {{"torch", "matplotlib.pyplot"}} & set(sys.modules)
"""
    done = run_python("-c", code, "status", output, "--watch")
    assert done.stderr == ""
    assert done.stdout.startswith("made up: ended at step 2 of 10 ")
    assert "\x1b" not in done.stdout
    with pytest.raises(ValueError, match=r"holds no run: it has no resolved\.yaml; give the output folder of tepo train"):
        run_status(tmp_path)

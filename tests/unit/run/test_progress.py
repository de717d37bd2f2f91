"""What is seen of a run."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tepo_megatron.config import LogConfig, RunConfig
from tepo_megatron.run.display.figures import COUNTED, LOST, duration, evaluation_line, fault_lines, final_table, set_lines
from tepo_megatron.run.display.progress import Progress, make_progress

PLAIN = LogConfig(progress="plain")
TIMES = {"time/rollout": 3.0, "time/update": 1.0, "time/step": 4.0}
ROW = {"reward/mean": 0.43211, "entropy/mean": 0.15, "mask/fraction": 0.034, "grad_norm": 0.5, "tokens/s": 5210.4, **TIMES}
EVALUATED = {"accuracy/greedy": 0.5, "accuracy/avg@k": 0.25, "accuracy/pass@k": 0.75}
RUN = RunConfig.model_validate({"name": "tiny", "output": "out/tiny", "train": {"steps": 20}, "evaluate": {"samples": 3}})


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def text_of(renderable: object, width: int = 120) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(renderable)
    return stream.getvalue()


def test_plain_output_is_a_line_a_step_and_a_line_an_evaluation() -> None:
    stream = io.StringIO()
    view = make_progress(PLAIN, stream)
    view.start(RUN)
    view.step(0, EVALUATED)
    view.step(7, ROW)
    view.step(8, ROW | EVALUATED | {"grad_norm": None})
    view.close()
    figures = "reward 0.432  entropy 0.150  masked 3.4 %"
    assert stream.getvalue().splitlines() == [
        "tiny: 20 steps, output in out/tiny",
        "step  0/20  held out: greedy 0.500  avg@3 0.250  pass@3 0.750",
        f"step  7/20  {figures}  grad norm 0.500  tokens/s 5210  4.0 s",
        f"step  8/20  {figures}  tokens/s 5210  4.0 s",
        "step  8/20  held out: greedy 0.500  avg@3 0.250  pass@3 0.750",
    ]


def test_mean_rewards_are_said_where_they_are_not_the_accuracies() -> None:
    binary = EVALUATED | {"heldout/reward_greedy": 0.5, "heldout/reward_sampled": 0.25}
    graded = EVALUATED | {"heldout/reward_greedy": 0.75, "heldout/reward_sampled": 0.25}
    assert evaluation_line(binary, 3) == evaluation_line(EVALUATED, 3)
    assert evaluation_line(graded, 3) == f"{evaluation_line(EVALUATED, 3)}  reward, greedy 0.750"
    rows = [{"step": 0, **binary}, {"step": 1, **ROW}]
    assert "reward, greedy" not in text_of(final_table(rows, Path("none")))
    assert "reward, greedy" in text_of(final_table([*rows, {"step": 2, **graded}], Path("none")))


def test_evaluation_sets_have_lines_and_rows_of_their_own() -> None:
    """Accuracies alone; of a set that is evaluated seldom the last one stays in the table."""
    of_set = {"eval/aime/greedy": 0.25, "eval/aime/maj@8": 0.5, "eval/aime/truncated": 0.125, "eval/aime/failed": 0.0}
    assert set_lines({"step": 3, **ROW, **of_set}) == {"aime": "aime: greedy 0.250  maj@8 0.500"}
    assert set_lines({"step": 3, **EVALUATED}) == {}
    stream = io.StringIO()
    progress = make_progress(PLAIN, stream)
    progress.start(RUN)
    progress.step(0, of_set)
    assert stream.getvalue().splitlines()[1] == "step  0/20  aime: greedy 0.250  maj@8 0.500"
    shown = text_of(final_table([{"step": 0, **of_set}, {"step": 1, **ROW}], Path("none")))
    assert "aime maj@8" in shown
    assert "truncated" not in shown


def test_plain_output_mentions_only_phases_that_take_long() -> None:
    stream, clock = io.StringIO(), Clock()
    view = make_progress(PLAIN, stream, clock=clock)
    view.phase("score")
    clock.now += 4
    view.phase("rollout")
    clock.now += 28
    view.phase("update")
    clock.now += 1
    view.close()
    assert stream.getvalue().splitlines() == ["  rollout took 28.0 s"]


def test_the_view_follows_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    live, plain = (type(make_progress(LogConfig(progress=kind), Terminal())) for kind in ("live", "plain"))
    assert live is not plain
    assert type(make_progress(LogConfig(), Terminal())) is live
    assert type(make_progress(LogConfig(), io.StringIO())) is plain
    assert type(make_progress(LogConfig(progress="none"), Terminal())) is Progress
    monkeypatch.setenv("TERM", "dumb")
    assert type(make_progress(LogConfig(), Terminal())) is plain


def test_the_live_view_shows_the_figures_and_leaves_the_cursor_visible() -> None:
    stream, clock = Terminal(), Clock()
    view: Any = make_progress(LogConfig(progress="live"), stream, 110, clock)
    view.start(RUN.model_copy(update={"name": "run [bold]"}))
    view.step(0, EVALUATED)
    view.step(5, ROW)
    view.phase("rollout")
    clock.now += 65
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
    (folder / "metrics.jsonl").touch()
    rewards = {1: 0.2, 2: 0.9, 3: 0.6}
    rows = [{"step": 0, **EVALUATED, "time/step": 50.0}, *({**ROW, "step": s, "reward/mean": r} for s, r in rewards.items())]
    assert f"{folder}/metrics.jsonl" in text_of(final_table(rows, folder), 80).replace("\n", "").replace(" ", "")
    shown = text_of(final_table(rows, folder), 200)
    (reward,) = [line for line in shown.splitlines() if "reward" in line and "0.900" in line]
    assert [part.strip() for part in reward.strip("│").split("│")] == ["reward", "0.200 (1)", "0.900 (2)", "0.600 (3)"]
    (seconds,) = [line for line in shown.splitlines() if "3.00" in line]
    numbers = [float(part) for part in seconds.strip("│").split("│")]
    assert (sum(numbers[:-1]), numbers[0], numbers[-1]) == (4.0, 3.0, 4.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.0 s"), (59.94, "59.9 s"), (60, "1:00"), (3599.6, "1:00:00"), (3725, "1:02:05")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_view_on_a_full_disk_does_not_end_the_run() -> None:
    with open("/dev/full", "w") as full:
        progress = make_progress(PLAIN, full)
        progress.start(RunConfig())
        progress.message("the disk is full")
        progress.step(1, {"reward/mean": 0.5})
        progress.close()  # and what Python writes when it ends goes well


def test_a_run_without_faults_says_nothing_of_them() -> None:
    row = {**dict.fromkeys(COUNTED, 0.0), **dict.fromkeys(LOST, 0.0), "step": 1}
    assert fault_lines([row, {"step": 2, "update/skipped": None}]) == []
    for key in (*COUNTED, *LOST):
        assert len(fault_lines([row, {**row, key: 3.0}])) == 1

"""The picture of a run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from tepo_megatron.run.display.plots import plot_comparison, plot_curves


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(step: int) -> dict[str, Any]:
    times = {"time/rollout": 2.0, "time/update": 1.0, "time/other": 0.1, "time/step": 3.1}
    return {
        "step": step,
        "reward/mean": 1 - 1 / step,
        "entropy/mean": 1 / step,
        "mask/fraction": 0.1,
        "grad_norm": 0.5,
        **times,
    }


EVALUATION = {"accuracy/greedy": 0.5, "accuracy/avg@k": 0.3, "accuracy/pass@k": None}
ROWS = [
    {"step": 0, **EVALUATION, "time/step": 1.0, "time/eval": 1.0},
    *(row(step) for step in range(1, 40)),
    row(40) | EVALUATION,
]


@pytest.mark.parametrize(
    "rows", [ROWS, ROWS[1:2], ROWS[:1], [{"step": 3}], ROWS[1:4]], ids=["full", "one", "eval", "bare", "few"]
)
def test_a_run_becomes_a_png_of_its_size(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    png = tmp_path / "new" / "curves.png"
    plot_curves(write(tmp_path / "a", rows), png, "a run")
    image = imread(png)
    assert image.shape[:2] == (1080, 1800)
    assert image[..., :3].min() < 0.5


def test_other_numbers_make_another_picture(tmp_path: Path) -> None:
    for name, rows in (("a", ROWS), ("b", [{**each, "reward/mean": 0.1} for each in ROWS[1:]])):
        plot_curves(write(tmp_path / name, rows), tmp_path / f"{name}.png", "a run")
    assert not np.array_equal(imread(tmp_path / "a.png"), imread(tmp_path / "b.png"))


def test_faults_are_said_below_the_picture_and_nothing_is_where_there_were_none(tmp_path: Path) -> None:
    faults = {"none": {"update/skipped": 0.0}, "some": {"update/skipped": 3.0, "lost/skipped": 61.0}}
    for name, fault in faults.items():
        plot_curves(write(tmp_path / name, [row(1), row(2) | fault]), tmp_path / f"{name}.png", "a run")
    plot_curves(write(tmp_path / "plain", [row(1), row(2)]), tmp_path / "plain.png", "a run")
    plain = imread(tmp_path / "plain.png")
    assert np.array_equal(imread(tmp_path / "none.png"), plain)
    assert not np.array_equal(imread(tmp_path / "some.png"), plain)
    assert imread(tmp_path / "some.png").shape == plain.shape


def test_several_runs_share_a_picture(tmp_path: Path) -> None:
    runs = {"a": write(tmp_path / "a", ROWS), "b": write(tmp_path / "b", ROWS[1:9])}
    plot_comparison(runs, tmp_path / "ab.png", "two runs")
    assert imread(tmp_path / "ab.png").shape[:2] == (1080, 1800)


def test_a_run_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no row yet"):
        plot_curves(write(tmp_path / "a", []), tmp_path / "a.png", "")
    assert not (tmp_path / "a.png").exists()


def test_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a", ROWS)
    probe = f"""
import sys
from pathlib import Path
from tepo_megatron.run.display.plots import plot_curves
assert "matplotlib" not in sys.modules
plot_curves(Path({str(path)!r}), Path({str(tmp_path / "a.png")!r}), "a")
print("matplotlib.pyplot" in sys.modules, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]

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


@pytest.mark.parametrize("rows", [ROWS[1:2], ROWS[:1], [{"step": 3}]], ids=["one", "eval", "bare"])
def test_a_short_run_becomes_a_png_of_its_size(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    plot_curves(write(tmp_path / "a", rows), tmp_path / "new" / "curves.png", "a run")
    assert imread(tmp_path / "new" / "curves.png").shape[:2] == (1080, 1800)


def test_other_numbers_and_faults_make_another_picture(tmp_path: Path) -> None:
    changes = {"plain": {}, "none": {"update/skipped": 0.0}, "some": {"update/skipped": 3.0, "lost/skipped": 61.0}}
    pictures = []
    for name, change in (*changes.items(), ("other", {"reward/mean": 0.1})):
        plot_curves(write(tmp_path / name, [*ROWS[:-1], ROWS[-1] | change]), tmp_path / f"{name}.png", "a run")
        pictures.append(imread(tmp_path / f"{name}.png"))
    plain, none, some, other = pictures
    assert plain.shape[:2] == some.shape[:2] == (1080, 1800)
    assert np.array_equal(none, plain)
    assert not np.array_equal(some, plain)
    assert not np.array_equal(other, plain)


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

"""The benchmark of training steps: all methods compute the same on the same tokens, and what cannot be measured is refused."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.tools.bench.step import OLDER, OURS, PACKED, ROOT, ROWS, StepMeasurement, StepSetting, World, source_of


def setting(**changes: object) -> StepSetting:
    values = {"layouts": ("tp2",), "ratios": (3.0,), "size": "tiny", "sequences": 8, "mean_length": 16}
    return StepSetting(**{**values, "micro_batch_tokens": 64, "repeats": 1, **changes})  # type: ignore[arg-type]


@pytest.mark.slow
def test_ours_megatrons_and_an_older_state_compute_the_same() -> None:
    results = setting().run(str(ROOT))
    assert [row.method for row in results] == [OURS, PACKED, ROWS, OLDER]
    ours, packed, rows, older = results
    assert older.losses == ours.losses
    assert older.peak_bytes == pytest.approx(ours.peak_bytes, rel=0.1)
    assert packed.losses == pytest.approx(ours.losses, abs=1e-5)
    assert rows.losses == pytest.approx(ours.losses, abs=1e-5)
    assert all(len(figures) == 1 for row in results for figures in (row.score_s, row.update_s))
    assert {row.tokens for row in results} == {sum(setting().draw_lengths(3.0))}
    assert all(row.peak_bytes > 0 for row in results)


class FakeWorld:
    """Answers with figures that it was given, in turn."""

    def __init__(self, losses: Iterator[float]) -> None:
        self.losses = losses

    def step(self, method: str, ratio: float, *, memory: bool) -> dict[str, float]:
        return {"peak_bytes": 2.0**20} if memory else {"score_s": 1.0, "update_s": 3.0, "loss": next(self.losses)}


def test_methods_that_do_not_compute_the_same_are_not_compared() -> None:
    same, other = FakeWorld(iter([4.0, 4.0])), FakeWorld(iter([4.0, 4.002]))
    with pytest.raises(RuntimeError, match=r"tp2, longest/mean 3: .* they do not compute the same"):
        setting(repeats=2).compare("tp2", 3.0, {OURS: same, PACKED: other})


def test_ratios_are_medians_of_the_pairs_of_each_repeat() -> None:
    ours = StepMeasurement("tp2", 3.0, OURS, 100, [1.0, 1.0, 2.0], [1.0, 2.0, 2.0], [4.0] * 3, 2**20)
    other = StepMeasurement("tp2", 3.0, PACKED, 100, [1.0, 1.0, 1.0], [2.0, 2.0, 1.0], [4.0] * 3, 2**21)
    (table,) = setting().report([ours, other], "none").tables
    first, second = table.rows
    assert len(first) == len(second) == len(table.columns)
    assert first == ("tp2", "3", OURS, "50", "33", "", "", "0.50 (0.50–0.67)", "1.0")
    assert second == ("", "", PACKED, "50", "33", *("1.00 (0.50–2.00)", "1.00 (0.50–1.50)", "0.67 (0.25–1.00)"), "2.0")


@given(st.integers(2, 60).map(lambda groups: 4 * groups), st.floats(1, 7), st.integers(64, 512))
def test_lengths_have_the_ratio_that_was_asked_for(sequences: int, ratio: float, mean: int) -> None:
    lengths = setting(sequences=sequences, mean_length=mean).draw_lengths(ratio)
    assert len(lengths) == sequences
    assert min(lengths) > 4  # the prompt
    assert max(lengths) == pytest.approx(ratio * mean, abs=1)
    assert sum(lengths) / sequences >= mean - 1  # short ones are longer than drawn: a response has a token


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "2b"}, "--size 2b is unknown; known: tiny, small"),
        ({"layouts": ("tq2",)}, "--layouts tq2 is not made of sizes such as tp2"),
        ({"ratios": (8.0,)}, "--ratios 8 is no longest length over the mean of 8 sequences"),
        ({"sequences": 6}, "--sequences 6 must be a multiple of 4"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        setting(**changes).run("none")


def test_an_older_state_that_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--before .* has no package tepo_megatron"):
        setting().run(str(tmp_path))
    (tmp_path / "tepo_megatron").mkdir()
    (tmp_path / "tepo_megatron" / "__init__.py").touch()
    with pytest.raises(ValueError, match=r"--before .* is from before the package's folders moved"):
        setting().run(str(tmp_path))
    with pytest.raises(ValueError, match="--before no-such-state is neither a folder nor a revision that git finds"):
        setting().run("no-such-state")


def test_a_revision_is_found_as_it_was_committed() -> None:
    if subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, check=False).returncode:
        pytest.skip("not a checkout")
    with source_of("HEAD") as folder:
        assert folder is not None
        assert (folder / "tepo_megatron" / "__init__.py").is_file()
    assert not folder.exists()


def test_what_a_rank_ended_of_is_said(tmp_path: Path) -> None:
    (tmp_path / "tepo_megatron").mkdir()
    (tmp_path / "tepo_megatron" / "__init__.py").write_text("raise RuntimeError('an old state that does not start')")
    with (
        pytest.raises(RuntimeError, match="tp1: rank 0 ended with exit code 1: RuntimeError: an old state that does not start"),
        World(tmp_path, tmp_path, setting(), "tp1") as world,
    ):
        world.step(OURS, 3.0, memory=False)

"""Rows on disk, and the time of a step."""

import math
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.run.metrics import PHASES, MetricsWriter, Stopwatch, read_metrics

keys = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda key: key != "step"
)
rows = st.lists(st.dictionaries(keys, st.floats(allow_nan=True, allow_infinity=True), max_size=4), max_size=5)


@settings(deadline=None, max_examples=20)
@given(rows=rows)
def test_rows_are_read_as_written_and_what_is_not_finite_is_null(
    rows: list[dict[str, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    output = tmp_path_factory.mktemp("run")
    with closing(MetricsWriter(output, tensorboard=False)) as writer:
        for step, row in enumerate(rows):
            writer.write(step, row)
    expected = [
        {"step": step} | {key: value if math.isfinite(value) else None for key, value in row.items()}
        for step, row in enumerate(rows)
    ]
    assert read_metrics(output / "metrics.jsonl") == expected


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"lr": 1}'])
def test_a_line_that_is_no_row_is_told_with_its_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a row of metrics"):
        read_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("tensorboard", [False, True])
def test_resuming_drops_the_rows_beyond_its_step(tmp_path: Path, tensorboard: bool) -> None:
    with closing(MetricsWriter(tmp_path, tensorboard=tensorboard)) as writer:
        for step in range(5):
            writer.write(step, {"lr": float(step), "accuracy/avg@k": 0.5 if step else math.nan})
    with closing(MetricsWriter(tmp_path, tensorboard=tensorboard)) as writer:
        writer.truncate_after(2)
        writer.write(3, {"lr": 30.0})
    assert [(row["step"], row["lr"]) for row in read_metrics(tmp_path / "metrics.jsonl")] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    if tensorboard:
        assert scalars(tmp_path / "tensorboard", "lr") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
        assert scalars(tmp_path / "tensorboard", "accuracy/avg@k") == [(1, 0.5), (2, 0.5)]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


visits = st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=8)


@given(visits=visits)
def test_the_split_is_what_the_clock_says(visits: list[tuple[str, int, int, bool]]) -> None:
    clock = Clock()
    watch, expected, other = Stopwatch(clock), dict.fromkeys(PHASES, 0.0), 0.0
    for name, inside, between, fails in visits:
        with (
            pytest.raises(ZeroDivisionError) if fails else nullcontext(),
            watch.phase(name),
        ):  # what a phase raises goes through it
            clock.now += inside
            if fails:
                raise ZeroDivisionError
        clock.now += between
        expected[name] += inside
        other += between
    split = watch.split()
    assert {name: split[f"time/{name}"] for name in PHASES} == expected
    assert (split["time/other"], split["time/step"]) == (other, other + sum(expected.values()))
    assert set(watch.split().values()) == {0.0}


def test_a_phase_inside_a_phase_stops_the_outer_one() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.phase("eval"):
        clock.now += 1
        with watch.phase("rollout"):
            clock.now += 10
        clock.now += 100
    split = watch.split()
    assert (split["time/eval"], split["time/rollout"], split["time/other"], split["time/step"]) == (101, 10, 0, 111)


def test_an_unknown_phase_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="phase 'coffee' is not known; known phases: rollout, reward"),
        Stopwatch().phase("coffee"),
    ):
        pass

"""The watch over a server's progress: a standstill is noticed, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest

from tepo_megatron.sampler.vllm import client
from tepo_megatron.sampler.vllm.client import ProgressWatch, ServerGone, ServerSilent


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe's answer is there when it was asked for."""

    def submit(probe: Callable[[], object]) -> Future[object]:
        future: Future[object] = Future()
        try:
            future.set_result(probe())
        except RuntimeError as error:
            future.set_exception(error)
        return future

    monkeypatch.setattr(client, "ThreadPoolExecutor", lambda *_, **__: SimpleNamespace(submit=submit))


def watch_of(probe: Callable[[], object], on_move: Callable[[], None] = lambda: None) -> tuple[ProgressWatch, Clock]:
    clock = Clock()
    return ProgressWatch(probe, 60.0, clock, on_move), clock


def looks(watch: ProgressWatch, clock: Clock, seconds: float, step: float = 1.0) -> str:
    said = ""
    while seconds > 0 and not said:
        clock.now += step
        seconds -= step
        said = watch.look()
    return said


def fails(error: Exception) -> object:
    raise error


SILENT = partial(fails, ServerSilent("no answer"))
GONE = partial(fails, ServerGone("connection refused"))


@pytest.mark.parametrize("probe", [lambda: "the same", lambda: None, SILENT])
def test_a_standstill_is_noticed_after_the_time_out_and_not_before(probe: Callable[[], object]) -> None:
    watch, clock = watch_of(probe)
    for _ in range(20):
        assert looks(watch, clock, 50.0) == ""
        watch.note_progress()  # an answer of the server itself
    assert looks(watch, clock, 30.0) == ""
    clock.now += 36000  # in which this process did not run, which is nobody's fault
    assert looks(watch, clock, 20.0) == ""
    assert "no new token" in looks(watch, clock, 60.0)


def test_progress_starts_the_count_anew_and_a_dead_server_is_told_at_once_but_not_by_one_failed_connection() -> None:
    watch, clock = watch_of(iter(range(100000)).__next__)
    assert looks(watch, clock, 1000.0) == ""
    watch, clock = watch_of(GONE)
    assert looks(watch, clock, 12.0) == "connection refused"
    answers: Iterator[Callable[[], object]] = iter([GONE, lambda: 1] * 50)
    watch, clock = watch_of(lambda: next(answers)())
    assert looks(watch, clock, 12.0) == ""


def test_every_change_of_the_progress_is_told_and_nothing_else() -> None:
    """An answer that is the same, none, or a server that moved by an answer of its own is no movement to tell."""
    moves: list[int] = []
    answers = iter([1, 1, 2, None, 2, 3, 3, 3, 3, 3])
    watch, clock = watch_of(lambda: next(answers), lambda: moves.append(1))
    assert looks(watch, clock, 30.0) == ""
    watch.note_progress()
    assert len(moves) == 3

"""Heartbeats, and who hangs: which ranks a signal stopped, or do not go on (real ones: tests/unit/cli/test_torchrun.py)."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tepo_megatron.runtime import heartbeat, restarts
from tepo_megatron.runtime.heartbeat import STOPPED_S, HangDetector, Heartbeat, RankRecord, WatchedRank
from tepo_megatron.runtime.proc import Process
from tests.support.processes import eventually
from tests.support.programs import TIMEOUT_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def test_a_rank_says_what_it_does_and_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", TIMEOUT_S)  # so long the end waits for its record
    beats = Heartbeat(tmp_path, 0, 1, hang_timeout_s=7.0, limits={"rollout": 3.0})
    beats.start()
    try:
        beats.phase("rollout", waits_for="the servers " * 100)
        beats.moved(3, 8)
        with beats.waiting("rank 0"):
            beats.tell(servers=["http://a"])
    finally:
        beats.close("failed: a sentence")
    beats.close("and not this one")
    (record,) = RankRecord.read_all(tmp_path)
    assert (record.phase, record.done, record.total, record.allowance_s, record.hang_timeout_s) == ("rollout", 3, 8, 3.0, 7.0)
    assert (record.passive, record.facts, record.ended) == (False, {"servers": ["http://a"]}, "failed: a sentence")
    assert (record.pid, record.started) == (os.getpid(), Process.read(os.getpid()).started)


def test_the_record_of_a_rank_is_there_again_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rank 0 makes the output folder again. A record of another run stays."""
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.02)
    folder = tmp_path / "out" / "status"
    beats = Heartbeat(folder, 0, 1)
    beats.start()
    try:
        shutil.rmtree(folder.parent)
        folder.parent.mkdir()
        assert eventually(lambda: folder.is_dir() and [record.pid for record in RankRecord.read_all(folder)] == [os.getpid()])
    finally:
        beats.close("")
    assert [record.ended for record in RankRecord.read_all(folder)] == [""]


def test_ranks_of_an_earlier_run_are_removed_by_rank_0_and_damage_is_left_out(tmp_path: Path) -> None:
    for number in (0, 7):
        beats = Heartbeat(tmp_path, number, 8)
        beats.start()
        beats.close("")
    assert [record.rank for record in RankRecord.read_all(tmp_path)] == [0, 7]
    (tmp_path / "rank-00007.json").write_text('{"rank": 7, "wor')
    assert [record.rank for record in RankRecord.read_all(tmp_path)] == [0]
    (tmp_path / "rank-00007.json").write_text('{"rank": 7, "world": 8, "of": "another version"}')
    assert [record.rank for record in RankRecord.read_all(tmp_path)] == [0]
    again = Heartbeat(tmp_path, 0, 1)
    again.start()
    again.close("")
    assert [path.name for path in sorted(tmp_path.glob("*.json"))] == ["rank-00000.json"]


# -- who hangs: only time between two checks counts, and moves, not clocks

LIMIT = 100.0


def rank(number: int, *, state: str = "S", **said: Any) -> WatchedRank:
    record = replace(RankRecord(number, 2, pid=1000 + number, host="here", phase="update", hang_timeout_s=LIMIT), **said)
    return Process(1000 + number, 1, 1, state, 5), record


RARELY = st.sampled_from([False, False, False, False, True])


@given(st.lists(st.tuples(RARELY, RARELY, st.floats(20, 60)), max_size=40), st.sampled_from([0.0, 50.0]))
def test_a_rank_hangs_when_it_was_seen_without_a_move_for_its_limit(
    looks: list[tuple[bool, bool, float]], allowance: float
) -> None:
    """Each look: whether it moved since, whether it waits for rank 0, seconds since the last look."""
    detector, moves, still, first = HangDetector(), 0, 0.0, True
    for moved, passive, elapsed in looks:
        moves += moved
        still = 0.0 if moved or passive or first else still + elapsed
        first = False
        hang = detector.check([rank(1, moves=moves, passive=passive, allowance_s=allowance)], elapsed)
        assert (hang is not None) == (still >= LIMIT + allowance)


@given(st.lists(st.tuples(st.sampled_from("TSRDt"), st.floats(0, 20)), max_size=30))
def test_a_rank_hangs_that_was_seen_stopped_for_long_enough(looks: list[tuple[str, float]]) -> None:
    detector, stopped = HangDetector(), 0.0
    for moves, (state, elapsed) in enumerate(looks):
        stopped = stopped + elapsed if state == "T" else 0.0
        assert (detector.check([rank(1, state=state, moves=moves)], elapsed) is not None) == (stopped >= STOPPED_S)


@pytest.mark.parametrize(("beats", "state", "silent"), [(0, "S", True), (1, "S", False), (0, "T", False)])
def test_a_rank_that_also_writes_nothing_may_have_a_disk_that_takes_nothing(beats: int, state: str, silent: bool) -> None:
    detector = HangDetector()
    for number in range(4):
        hang = detector.check([rank(1, state=state, beats=beats * number)], 50.0)
    assert hang is not None
    assert hang.is_silent == silent


def test_no_rank_is_ended_while_its_disk_takes_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.02)
    monkeypatch.setattr(heartbeat, "_STACKS_TIMEOUT_S", 0.0)
    tried: list[str] = []
    said: list[str] = []

    def fail(**_: Any) -> None:
        tried.append("again")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with subprocess.Popen(["sleep", "1000"], env={**os.environ, "RANK": "0"}) as child:
        try:
            started = Process.read(child.pid).started
            record = RankRecord(0, 1, child.pid, started, "here", hang_timeout_s=0.1)
            (tmp_path / "rank-00000.json").write_text(json.dumps(asdict(record)))
            with heartbeat.watching(tmp_path, said.append):
                with monkeypatch.context() as patch:
                    patch.setattr(tempfile, "TemporaryFile", fail)
                    assert eventually(lambda: len(tried) > 2)
                    assert (child.poll(), said) == (None, [])
                assert eventually(lambda: child.poll() is not None)
        finally:
            child.kill()
    assert "rank 0" in said[0]
    assert "has not moved" in said[0]


def test_who_is_stopped_is_blamed_and_not_who_waits_for_it() -> None:
    detector = HangDetector()
    for _ in range(2):
        hang = detector.check([rank(0), rank(1, state="T", waits_for="rank 0")], 60.0)
    assert hang.processes == (1001,)
    assert hang.sentence.startswith(
        "rank 1 (process 1001 on here) is stopped (state T: SIGSTOP, SIGTSTP) for 120 s, in phase update"
    )
    assert "rank 0 (" not in hang.sentence


def test_rank_0_is_left_to_end_what_it_started_where_another_hangs_too() -> None:
    """Ranks that were silent yet, or have ended, do not hang."""
    both, alone, none = HangDetector(), HangDetector(), HangDetector()
    for _ in range(4):
        hang = both.check([rank(0), rank(1)], 50.0)
        only = alone.check([rank(0), rank(1, passive=True)], 50.0)
        assert none.check([(rank(1)[0], None), rank(0, ended="finished")], 50.0) is None
    assert hang is not None
    assert only is not None
    assert hang.processes == (1001,)
    assert "rank 0 (process 1000 on here) has not moved for 150 s (train.hang_timeout_s = 100)" in hang.sentence
    assert only.processes == (1000,)


def test_a_node_is_gone_that_is_silent_while_others_run_and_whose_ranks_have_not_ended() -> None:
    """Those of the first node may still export, or a callback of theirs does."""
    store, beats = HashStore(), dict[int, tuple[bytes, float]]()
    first = restarts.NodeMeeting(store, store, 0, 2, 0, 3, 60.0)
    store.set("alive/1", "0")
    silent = [first._is_silent(0, 1, beats, restarts.SILENT_S / 2) for _ in range(4)]
    assert silent == [False, False, False, True]
    store.set("alive/1", "1")
    assert not first._is_silent(0, 1, beats, restarts.SILENT_S)
    store.set("0/end/1", "[0]")
    assert not any(first._is_silent(0, 1, beats, restarts.SILENT_S) for _ in range(4))


@pytest.mark.parametrize(
    ("second", "saves", "again"),
    [("KeyError: 'a'", False, False), ("KeyError: 'b'", False, True), ("KeyError: 'a'", True, True)],
)
def test_an_error_that_comes_twice_is_known_by_what_every_node_says_of_it(second: str, saves: bool, again: bool) -> None:
    """The first node only sees that a connection was closed, in gloo's words with another port each time."""
    store, saved = HashStore(), iter([["step_1"], ["step_2" if saves else "step_1"]])
    first = restarts.NodeMeeting(store, store, 0, 2, 0, 3, 60.0, saved=lambda: next(saved))
    for number, error in enumerate(["KeyError: 'a'", second]):
        closed = f"rank 0: RuntimeError: Connection closed by peer [10.0.0.2]:{4000 + number}"
        store.set(f"{number}/end/0", json.dumps(restarts.RanksEnd(1, closed, lost=True)))
        store.set(f"{number}/end/1", json.dumps(restarts.RanksEnd(1, f"rank 1: {error}", lost=True)))
    assert [first._decide(number, [0, 1]) for number in (0, 1)] == [True, again]


def test_only_records_of_ranks_of_this_node_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job of hundreds of nodes each would otherwise read the records of all, all the time."""
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.02)
    for number in range(64):
        (tmp_path / f"rank-{number:05d}.json").write_text("{}")
    read: list[str] = []
    right = Path.read_text

    def read_text(path: Path, *args: Any, **options: Any) -> str:
        read.append(path.name)
        return right(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, "RANK": "7"}) as child:
        try:
            with heartbeat.watching(tmp_path, lambda _: None):
                assert eventually(lambda: "rank-00007.json" in read)
        finally:
            child.kill()
    assert {name for name in read if name.startswith("rank-")} == {"rank-00007.json"}

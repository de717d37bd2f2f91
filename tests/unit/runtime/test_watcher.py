"""Real processes, without torch: heartbeats, ranks that a signal stops or that do not go on, and what is written of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tepo_megatron.runtime.heartbeat import Heartbeat, RankRecord
from tepo_megatron.runtime.proc import Process
from tests.support.programs import TIMEOUT_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

RANK = """
import sys, time
from pathlib import Path
from tepo_megatron.runtime.heartbeat import Heartbeat

folder, rank = Path(sys.argv[1]), int(sys.argv[2])

def the_place_where_it_waits():
    while True:
        time.sleep(0.05)
        if rank != 1:
            beats.moved()

beats = Heartbeat(folder / "status", rank, 2, hang_timeout_s=2.0 if rank == 1 else 1000.0)
if rank == 1:  # as ranks do: after rank 0
    while not (folder / "status" / "rank-00000.json").exists():
        time.sleep(0.05)
beats.start()
beats.step(12)  # before the phase, which is written at once
beats.phase("update")
the_place_where_it_waits()
"""

PARENT = f"""
import subprocess, sys, time
from pathlib import Path
from tepo_megatron.runtime import heartbeat

heartbeat.INTERVAL_S = 0.2
folder = Path(sys.argv[1])
ranks = [subprocess.Popen([sys.executable, "-c", {RANK!r}, *sys.argv[1:], str(number)]) for number in (0, 1)]
with heartbeat.watching(folder / "status", lambda sentence: print(sentence, flush=True)):
    print(ranks[1].pid, flush=True)
    code = ranks[1].wait()
ranks[0].kill()
sys.exit(-code)
"""


def run_parent(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True)


def test_a_rank_that_does_not_go_on_is_reported_with_its_stack_and_ended(tmp_path: Path) -> None:
    parent = run_parent(tmp_path)
    pid = int(parent.stdout.readline())
    said, _ = parent.communicate(timeout=TIMEOUT_S)
    assert parent.returncode == signal.SIGKILL
    assert said.startswith(f"rank 1 (process {pid} on ")
    assert "(train.hang_timeout_s = 2), in phase update after 12 steps; its last move was at " in said
    (report,) = (tmp_path / "logs").glob("hang-*.txt")
    assert f"The stacks of this machine's processes are in {report}. The job is ended" in said
    of_rank_0, of_rank_1 = report.read_text().split("== rank 1")
    assert "== rank 0 (process " in of_rank_0
    assert "the_place_where_it_waits" in of_rank_0
    assert "the_place_where_it_waits" in of_rank_1
    assert f"process {pid}, child of {parent.pid}, " in of_rank_1


def test_a_hang_ends_also_where_no_report_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where a folder should be")
    parent = run_parent(tmp_path)
    said, _ = parent.communicate(timeout=TIMEOUT_S)
    assert parent.returncode == signal.SIGKILL
    assert "The report of what hangs could not be written: " in said


def test_a_rank_says_what_it_does_and_how_it_ended(tmp_path: Path) -> None:
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

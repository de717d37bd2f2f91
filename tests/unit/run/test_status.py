"""`tepo status`: of running runs, ended ones, killed ones, and folders that hold none."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import dump_resolved
from tepo_megatron.run.output.status import run_status
from tepo_megatron.runtime.heartbeat import Heartbeat, RankRecord

ROWS = [
    {"step": 0, "accuracy/greedy": 0.25, "time/step": 30.0},
    {"step": 1, "reward/mean": 0.5, "time/step": 10.0, "update/skipped": 2.0, "lost/skipped": 5.0},
    {"step": 2, "reward/mean": 0.625, "time/step": 20.0, "update/skipped": 0.0, "servers/restarts": 1.0, "lost/server": 70.0},
]


def run_folder(folder: Path) -> Path:
    folder.mkdir()
    config = RunConfig.model_validate({"name": "made up", "output": folder, "train": {"steps": 10}})
    (folder / "resolved.yaml").write_text(dump_resolved(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def change(output: Path, rank: int, **said: object) -> None:
    """Has a rank have said something else last."""
    (record,) = [record for record in RankRecord.read_all(output / "status") if record.rank == rank]
    (output / "status" / f"rank-{rank:05d}.json").write_text(json.dumps({**asdict(record), **said}))


def beating(output: Path) -> None:
    """The words of two ranks that are this process."""
    for rank in (0, 1):
        beats = Heartbeat(output / "status", rank, 2)
        beats.start()
        beats.close("")


def test_a_running_one(tmp_path: Path) -> None:
    output = run_folder(tmp_path / "out")
    beating(output)
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
        "  fault    1 rollout servers started again",
        "  fault    5.0 s lost in steps that were skipped",
        "  fault    1:10 lost until a server was there again",
    ]


def test_on_another_machine_a_rank_is_there_as_long_as_it_says_something(tmp_path: Path) -> None:
    output = run_folder(tmp_path / "out")
    beating(output)
    change(output, 0, host="elsewhere", time=1000.0)
    change(output, 1, host="elsewhere", time=900.0)
    lines, goes_on = run_status(output, now=1010.0)
    assert goes_on
    assert lines[3].endswith(": SILENT for 1:50")
    assert not run_status(output, now=1100.0)[1]


KILLED = "made up: ended at step 2 of 10 without a last word (killed?), in phase sync, 5.0 s ago; continue with --resume"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"ended": "failed: a sentence"}, "made up: ended at step 2 of 10 5.0 s ago: failed: a sentence"),
        ({"pid": 2**22, "phase": "sync"}, KILLED),
        ({"started": 1, "phase": "sync"}, KILLED),  # the number is another process' by now
    ],
)
def test_one_that_has_ended(tmp_path: Path, said: dict[str, object], expected: str) -> None:
    output = run_folder(tmp_path / "out")
    beating(output)
    change(output, 0, time=995.0, **said)
    lines, goes_on = run_status(output, now=1000.0)
    assert not goes_on
    assert lines[0] == expected


def test_one_without_heartbeats_and_one_without_rows(tmp_path: Path) -> None:
    output = run_folder(tmp_path / "out")
    assert run_status(output)[0][0].startswith("made up: ended at step 2 of 10, or of a version that says no more")
    (output / "metrics.jsonl").unlink()
    beating(output)
    assert run_status(output)[0][0] == "made up: runs, step 0 of 10 done"


def test_the_command_needs_no_torch_and_watch_ends_with_the_run(tmp_path: Path) -> None:
    output = run_folder(tmp_path / "out")
    beating(output)
    change(output, 0, ended="finished")
    code = "import sys; from tepo_megatron.cli.main import app; app(standalone_mode=False); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, "status", str(output), "--watch"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("made up: ended at step 2 of 10 ")
    with pytest.raises(ValueError, match=r"holds no run: it has no resolved\.yaml; give the output folder of tepo train"):
        run_status(tmp_path)
    assert "\x1b" not in done.stdout

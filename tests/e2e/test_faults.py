"""Faults of every class (`tepo faults --quick`, bash scripts/test.sh --long), and of a trainer that replays rollouts."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tepo_megatron import train
from tepo_megatron.runtime.heartbeat import RankRecord
from tepo_megatron.sampler.rollout_file import Record, write_rollouts
from tepo_megatron.tools.faults.run import CLASSES
from tepo_megatron.tools.faults.workshop import REPLAYED, differences, make_rollouts
from tests.support.cli import invoke
from tests.support.killing_callback import killing
from tests.support.launch import run_world
from tests.support.processes import assert_none_names
from tests.support.programs import RUN, TIMEOUT_S, rows, start, wait_for_rows


@pytest.mark.faults
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk and become another user")
@pytest.mark.timeout(7200)  # for what hangs: three minutes on two idle cores, ten times as long beside other tests, and more
def test_a_few_faults_of_every_class_are_survived_or_refused(tmp_path: Path) -> None:
    out = tmp_path / "faults"
    command = [sys.executable, "-m", "tepo_megatron", "faults", "--quick", "--seed", "1", "--output", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    entries = [json.loads(line) for line in (out / "outcomes.jsonl").read_text().splitlines()[1:]]
    lost = [entry for entry in entries if entry["result"] == "lost"]
    assert not lost, json.dumps(lost, indent=1)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = Counter(entry["class"] for entry in entries)
    assert {name: counts[name] for name in counts if name != "ending"} == {name: kind.quick for name, kind in CLASSES.items()}
    assert "lost" in done.stdout  # the table's column
    assert (out / "faults.md").read_text().startswith("# Faults, injected")
    assert_none_names(out)


HUGE = 1e15
"""The largest reward. With the small divisor below, the square of its gradient's norm is no number in fp32."""
OVERFLOWS = ("objective.preset=dr_grpo", "objective.aggregation.constant=1e-10")


def start_replay(output: Path, rollouts: Path, *settings: str) -> subprocess.Popen[str]:
    return start(f"output={output}", f"rollout.replay={rollouts}", *REPLAYED, *settings)


def run_replay(output: Path, rollouts: Path, *settings: str) -> str:
    """Runs two ranks without a launcher and returns what rank 0 printed."""
    run_world("train", 2, RUN, f"output={output}", f"rollout.replay={rollouts}", *REPLAYED, "engine.parallel.tp=2", *settings)
    return (output / "printed.txt").read_text()


def status(output: Path) -> str:
    """In this process: another one may take longer to start than a stopped rank is let live."""
    return invoke("status", output).output


def test_a_step_with_a_nan_costs_that_step_alone(tmp_path: Path) -> None:
    output, rollouts = tmp_path / "out", make_rollouts(tmp_path / "rollouts", 3)
    broken = Record.read(rollouts, 1).rollouts
    broken[5] = replace(broken[5], reward=HUGE)
    write_rollouts(rollouts, 1, broken)
    out = run_replay(output, rollouts, "train.steps=3", *OVERFLOWS)
    skips = [row.get("update/skipped") for row in rows(output)]
    assert skips in ([None, 0, 1, 0], [None, 0, 2, 0])  # both samples of the group may be in one mini-batch
    assert rows(output)[2]["lost/skipped"] > 0
    said = next(line for line in out.splitlines() if line.startswith("step 2: "))
    assert said.startswith(f"step 2: {skips[2]:.0f} of 2 optimizer steps skipped, a number was not finite: ")
    assert said.endswith(f"see {output}/skipped/step_0000001.json")
    skipped = json.loads((output / "skipped" / "step_0000001.json").read_text())["skipped"]
    assert len(skipped) == skips[2]
    assert 5 in [rollout for each in skipped for rollout in each["rollouts"]]
    assert f"{skips[2]:.0f} optimizer steps skipped" in out
    text = status(output)
    assert "ended at step 3 of 3" in text
    assert "finished" in text
    assert f"fault    {skips[2]:.0f} optimizer steps skipped" in text


def test_lost_ranks_start_again_and_the_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Rank 1 before the first checkpoint, rank 0 two steps after it."""
    rollouts, output = make_rollouts(tmp_path / "rollouts", 7), tmp_path / "out"
    settings = ("train.steps=7", "train.save_every=4")
    run_replay(tmp_path / "quiet", rollouts, *settings)
    kills = killing((0, 2, 1), (1, 6, 0))
    process = start_replay(output, rollouts, *settings, kills, "engine.parallel.tp=2", "train.max_restarts=2")
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    for restart, victim in enumerate((1, 0), 1):
        assert f"rank {victim} was ended by SIGKILL" in err
        assert f"(restart {restart} of at most 2, train.max_restarts)" in err
    assert out.count("resumed from") == 1
    assert f"resumed from {output}/checkpoints/step_000004 at step 4" in out
    assert not differences(output, tmp_path / "quiet")
    assert [row["step"] for row in rows(output)] == list(range(8))
    assert not list(output.glob("resolved.*.yaml"))
    assert_none_names(output)


def test_restarts_that_nobody_would_make_are_refused(tmp_path: Path) -> None:
    message = "train.max_restarts = 1, but nothing would start these ranks again"
    rollouts = make_rollouts(tmp_path / "rollouts", 1)
    settings = {"model.path": "builtin:tiny", "evaluate.every": 0, "rollout.replay": str(rollouts), "train.max_restarts": 1}
    with pytest.raises(ValueError, match=message):
        train({"output": str(tmp_path / "out"), **settings})


@pytest.mark.long
def test_a_rank_that_is_stopped_ends_the_job_and_the_run_goes_on_when_resumed(tmp_path: Path) -> None:
    output, rollouts = tmp_path / "out", make_rollouts(tmp_path / "rollouts", 400)
    process = start_replay(output, rollouts, "train.steps=400", "train.save_every=2", "engine.parallel.tp=2")
    try:
        wait_for_rows(process, output, 4)
        (pid,) = [record.pid for record in RankRecord.read_all(output / "status") if record.rank == 1]
        os.kill(pid, signal.SIGSTOP)
        text = status(output)
        assert "of 400 done" in text
        assert f"process {pid}: STOPPED (state T)" in text
        _, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGKILL
    last = err.splitlines()[-1]
    assert last.startswith(f"error: rank 1 (process {pid} on ")
    (report,) = (output / "logs").glob("hang-*.txt")
    assert str(report) in last
    assert "Thread 0x" in report.read_text()
    assert_none_names(output)
    assert f"report   {report}" in status(output)
    done = rows(output)[-1]["step"]
    again = start_replay(output, rollouts, f"train.steps={done + 2}", "engine.parallel.tp=2", "train.resume=true")
    _, err = again.communicate(timeout=TIMEOUT_S)
    assert again.returncode == 0, err
    assert [row["step"] for row in rows(output)] == list(range(done + 3))

"""`tepo launch` on a real Slurm of two nodes: one trains with torchrun, the other serves vLLM."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.tools.faults.workshop import make_rollouts
from tests.support.killing_callback import killing
from tests.support.programs import FEW_BLOCKS, RUN, TIMEOUT_S, rows

pytestmark = pytest.mark.slurm

STEPS = 2
SMALL = [
    *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "train.minibatches=2", "evaluate.every=0"),
    *("engine.platform=cpu", "rollout.server.interface=lo"),
    *("rollout.server.max_num_seqs=16", f"rollout.server.extra_args=[{FEW_BLOCKS}]"),
    *("rollout.server.start_timeout_s=1000", "rollout.server.transfer_timeout_s=1000"),  # for a busy machine
    *("cluster.train_nodes=1", "cluster.rollout_nodes=1", "cluster.gpus_per_node=2"),
    *("log.curves=false", "log.tensorboard=false"),
    *("cluster.partition=test", "cluster.time_limit=00:30:00", f"cluster.python={sys.executable}"),
]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def launch(cluster: Any, tepo: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return cluster.run(tepo, "launch", str(RUN), f"output={out}", *SMALL, *options, timeout=TIMEOUT_S)


def submitted(cluster: Any, tepo: str, out: Path, *options: str) -> str:
    done = launch(cluster, tepo, out, *options)
    assert done.returncode == 0, done.stderr + done.stdout
    found = re.search(r"submitted job (\d+)", done.stdout)
    assert found, done.stdout
    return found[1]


def shown(cluster: Any, job: str, field: str) -> str:
    """A field of what Slurm shows of a job, such as JobState."""
    text = cluster.repeat("scontrol", "--oneliner", "show", "job", job, until=lambda done: f" {field}=" in done.stdout)
    return text.partition(f" {field}=")[2].split()[0]


def wait_for(cluster: Any, job: str, out: Path, enough: Any) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not enough(now := shown(cluster, job, "JobState")):
        assert time.monotonic() < deadline, f"{now}\n{evidence(out)}"
        time.sleep(0.5)


def evidence(out: Path) -> str:
    return "\n".join(
        f"--- {log}\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(out.glob("logs/*")) if log.is_file()
    )


def steps(out: Path) -> list[int]:
    return [row["step"] for row in rows(out)] if (out / "metrics.jsonl").exists() else []


def test_two_nodes_train_together_and_leave_what_the_docs_say(cluster: Any, tepo: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = submitted(cluster, tepo, out, f"train.steps={STEPS}")
    wait_for(cluster, job, out, lambda now: now in ENDED)
    assert shown(cluster, job, "JobState") == "COMPLETED", evidence(out)
    assert shown(cluster, job, "ExitCode") == "0:0"
    status = (tepo, "launch", "status", str(out / "resolved.yaml"))
    said = cluster.repeat(*status, until=lambda done: "UNKNOWN" not in done.stdout and done.stdout != "")
    assert said == f"job {job}: COMPLETED\n"
    assert steps(out) == list(range(STEPS + 1))
    trained = rows(out)[1:]
    # The servers sampled with the weights of the step before: had a sync not arrived, log-probs would differ by 1e-3 and more.
    assert [row["weights_version/max"] for row in trained] == list(range(STEPS))
    assert max(abs(row["mismatch/kl"]) for row in trained) < 1e-6
    assert max(abs(row["grad_norm"]) for row in trained) > 0

    logs = out / "logs"
    for name in (f"slurm-{job}.out", f"train-{job}.0-node0.log", f"serve-{job}.0-node0.log", "server-0.log"):
        assert (logs / name).stat().st_size > 0, name
    for rank in (0, 1):
        assert list((logs / "ranks" / f"{job}.0" / "node-0").glob(f"*/attempt_0/{rank}/stdout.log"))
    tail = cluster.run(tepo, "launch", "logs", str(out / "resolved.yaml"), "--rank", "0", "--lines", "100")
    assert f"step {STEPS}/{STEPS}" in tail.stdout, tail.stdout + tail.stderr
    assert json.loads((out / "launch" / f"{job}.0.json").read_text())["slurm_job_nodelist"] == "n[1-2]"
    assert "commit" in json.loads((out / "launch" / "submission.json").read_text())["git"]

    key = out / "servers" / f"{job}.0" / "key"
    assert key.stat().st_mode & 0o777 == 0o600
    texts = [path.read_bytes() for path in out.rglob("*") if path.is_file() and path != key]
    assert not any(key.read_bytes() in text for text in texts)


@pytest.mark.long
def test_a_job_that_is_warned_or_preempted_resumes_without_a_person_and_a_cancelled_one_with(
    cluster: Any, tepo: str, tmp_path: Path
) -> None:
    """Slurm's warning before the time limit, then a requeue by an administrator, then the user's end. Each start waits for the
    test.
    """
    out, go = tmp_path / "out", tmp_path / "go"
    gate = f"printenv SLURM_RESTART_COUNT && while ! test -e {go}.$SLURM_RESTART_COUNT; do sleep 0.2; done || true"
    job = submitted(cluster, tepo, out, "train.steps=1000", "train.warning_s=900", f"cluster.setup=['{gate}']")
    wait_for(cluster, job, out, lambda now: len(steps(out)) > 2 or now in ENDED)
    cluster.repeat("scontrol", "update", f"JobId={job}", "TimeLimit=14")
    saved = wait_for_restart(cluster, job, out, 1)
    cluster.repeat("scontrol", "update", f"JobId={job}", "TimeLimit=60")  # while it waits in the queue
    log = (out / "logs" / f"train-{job}.0-node0.log").read_text()
    assert "SIGUSR1: the run saves and ends, within 900 s (train.warning_s)" in log
    assert f"SIGUSR1: saved step_{saved:06d}; continue with the same command and --resume" in log
    assert "Traceback" not in log
    batch = (out / "logs" / f"slurm-{job}.out").read_text()
    assert f"preempted: job {job} goes back into the queue and resumes by itself, restart 1 of at most 50" in batch

    Path(f"{go}.1").touch()
    wait_for(cluster, job, out, lambda now: len(steps(out)) > saved + 2 or now in ENDED)
    cluster.repeat("scontrol", "requeue", job)
    again = wait_for_restart(cluster, job, out, 2)
    log = (out / "logs" / f"train-{job}.1-node0.log").read_text()
    assert f"resumed from {out}/checkpoints/step_{saved:06d}" in log
    assert f"SIGTERM: saved step_{again:06d}; continue with the same command and --resume" in log
    assert again > saved

    Path(f"{go}.2").touch()
    wait_for(cluster, job, out, lambda now: len(steps(out)) > again + 2 or now in ENDED)
    assert f"resumed from {out}/checkpoints/step_{again:06d}" in (out / "logs" / f"train-{job}.2-node0.log").read_text()
    done = cluster.run(tepo, "launch", "cancel", str(out / "resolved.yaml"))
    assert done.returncode == 0, done.stderr
    wait_for(cluster, job, out, lambda now: now in ENDED)
    assert shown(cluster, job, "JobState") == "CANCELLED", evidence(out)
    # it still saves for a moment
    shows_all = ("squeue", "--noheader", "--states=all", "--format=%i %T")
    cluster.repeat(*shows_all, until=lambda done: f"{job} CANCELLED" in done.stdout)
    reached = newest_checkpoint(out)

    job = submitted(cluster, tepo, out, "--resume", f"train.steps={reached + 2}", "train.save_every=1")
    wait_for(cluster, job, out, lambda now: now in ENDED)
    assert shown(cluster, job, "JobState") == "COMPLETED", evidence(out)
    assert shown(cluster, job, "ExitCode") == "0:0"
    assert steps(out) == list(range(reached + 3))
    assert all("reward/mean" in row for row in rows(out)[1:])
    assert f"resumed from {out}/checkpoints/step_{reached:06d}" in (out / "logs" / f"train-{job}.0-node0.log").read_text()


def newest_checkpoint(out: Path) -> int:
    return max(int(path.parent.name.removeprefix("step_")) for path in out.glob("checkpoints/step_*/state.json"))


def wait_for_restart(cluster: Any, job: str, out: Path, number: int) -> int:
    """Returns the step of the newest checkpoint when Slurm has put the job back."""
    back = ("PENDING", "CONFIGURING", "RUNNING")  # not COMPLETING: it is still saving
    wait_for(cluster, job, out, lambda now: (now in back and int(shown(cluster, job, "Restarts")) == number) or now in ENDED)
    assert shown(cluster, job, "JobState") not in ENDED, evidence(out)
    return newest_checkpoint(out)


@pytest.mark.long
def test_a_spare_node_takes_over_when_a_rank_is_killed_and_the_job_goes_on(cluster: Any, tepo: str, tmp_path: Path) -> None:
    """A rank on each of two nodes, on recorded rollouts; the second one's is killed."""
    out, rollouts, last = tmp_path / "out", make_rollouts(tmp_path / "rollouts", 7), 7
    settings = ["cluster.train_nodes=2", "cluster.rollout_nodes=0", "cluster.spare_nodes=1", "cluster.gpus_per_node=1"]
    settings += ["engine.parallel.tp=1", "engine.parallel.dp=2", "engine.parallel.sequence_parallel=false", killing((0, 5, 1))]
    settings += ["train.max_restarts=2", f"train.steps={last}", "train.save_every=2", f"rollout.replay={rollouts}"]
    job = submitted(cluster, tepo, out, *settings)
    wait_for(cluster, job, out, lambda now: now in ENDED)
    assert shown(cluster, job, "JobState") == "COMPLETED", evidence(out)
    log = (out / "logs" / f"train-{job}.0-node0.log").read_text()
    assert "node 1: rank 1 was ended by SIGKILL" in log
    assert "(restart 1 of at most 2, train.max_restarts)" in log
    assert [bool(list(out.glob(f"logs/ranks/{job}.0/node-{node}/*/attempt_0/0"))) for node in range(3)] == [True] * 3
    assert steps(out) == list(range(last + 1))


def test_what_slurm_refuses_is_one_sentence(cluster: Any, tepo: str, tmp_path: Path) -> None:
    done = launch(cluster, tepo, tmp_path / "out", "train.save_every=1", "cluster.partition=nowhere")
    assert done.returncode == 1
    assert done.stderr.startswith("error: Slurm refused the job (sbatch: error: invalid partition specified: nowhere")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tmp_path / "out" / "launch" / "job.json").exists()


def test_the_doctor_reads_the_clocks_of_an_allocation(cluster: Any, tepo: str) -> None:
    """Both nodes have this machine's clock; n9 is none of them. A node that answers too late, which it may, is asked again."""
    doctor = (tepo, "doctor", "--launch", "--json", "--nodes")
    for nodes, code in (("n1,n2", 0), ("n1,n9", 1)):
        given = cluster.repeat(
            *("salloc", "--nodes=2", "--time=30", *doctor, nodes),
            until=lambda done: done.stdout.startswith("{") and "no answer to" not in done.stdout,
        )
        found = {check["name"]: check for check in json.loads(given)["checks"]}
        assert found["node n1"]["status"] == "ok", found
        assert any(check["status"] == "fail" for check in found.values()) == bool(code), found
    assert found["node n9"]["status"] == "fail"
    assert "n9" in found["node n9"]["advice"]
    assert "srun: error: " in found["node n9"]["detail"]

"""The harness: it finds processes by their roles, goes on where it ended, counts what was lost, and sees a difference."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it without saying so

from tepo_megatron.runtime.proc import Process
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tools.faults import input_faults, record_faults, run, stop_faults, strangers, workshop
from tepo_megatron.tools.faults.processes import by_role, descendants, end_tree, listening, wait_until
from tepo_megatron.tools.faults.run_faults import LIVE, PHASES, ROLES
from tepo_megatron.tools.faults.silent import ALL, SILENT_FAULTS, judge
from tepo_megatron.tools.faults.workshop import FaultClass, FaultOutcome, RunEnd, Workshop, differences
from tests.support.programs import TIMEOUT_S


class Sample(FaultClass):
    name, title, whole, quick = "sample", "a class of the test", 5, 2
    injected: list[tuple[int, float]] = []  # noqa: RUF012

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        self.injected.append((number, rng.random()))
        if number == 3:
            raise OSError("the harness broke")
        return FaultOutcome(f"fault {number}", "survived", recovery_s=float(number))


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> type[Sample]:
    Sample.injected.clear()
    monkeypatch.setattr(run, "CLASSES", {"sample": Sample})
    return Sample


def test_a_rerun_goes_on_with_what_is_missing_and_the_same_random_numbers(tmp_path: Path, sample: type[Sample]) -> None:
    run.run([sample], tmp_path, seed=3, quick=False, say=lambda line: None)
    first = list(sample.injected)
    assert [number for number, _ in first] == [0, 1, 2, 3, 4]
    path = tmp_path / "outcomes.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:3]) + "\n" + lines[3][:17])  # killed while it wrote the third outcome
    sample.injected.clear()
    record = run.run([sample], tmp_path, seed=3, quick=False, say=lambda line: None)
    assert sample.injected == first[2:]
    assert len({drawn for _, drawn in first}) == 5  # every fault has random numbers of its own
    assert [entry["number"] for entry in record.outcomes("sample")] == [0, 1, 2, 3, 4]
    again = run.run([sample], tmp_path, seed=3, quick=False, say=lambda line: None)
    assert sample.injected == first[2:]  # what was cut off has not spoilt the line after it
    assert [entry["number"] for entry in again.outcomes("sample")] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="another --output"):
        run.run([sample], tmp_path, seed=2, quick=False, say=lambda line: None)


def test_what_the_harness_breaks_at_is_lost_and_the_rest_is_tried(tmp_path: Path, sample: type[Sample]) -> None:
    record = run.run([sample], tmp_path, seed=3, quick=False, say=lambda line: None)
    assert [entry["result"] for entry in record.outcomes("sample")] == ["survived"] * 3 + ["lost", "survived"]
    assert record.lost == ["sample: number 3: the harness came to no end: OSError: the harness broke"]
    assert record.table().rows[0][1:] == ("5", "4", "0", "1", "1.5 s", "4.0 s")
    page = record.write_markdown(tmp_path / "faults.md", command="tepo faults").read_text()
    assert "the harness broke" in page


def test_there_are_as_many_faults_as_were_promised_and_no_two_kills_are_the_same() -> None:
    promised = {"kills": 16, "hangs": 8, "damage": 12, "disks": 5, "strangers": 22, "configs": 200, "answers": 60}
    promised |= {"restarts": 14, "teachers": 7, "stops": 21, "records": 19, "journals": 5}
    promised |= {"clocks": 4, "memory": 2, "sizes": 2, "borders": 105}
    assert {name: kind.whole for name, kind in run.CLASSES.items() if name in promised} == promised
    assert len(SILENT_FAULTS) >= 12
    assert sum(kind.whole for kind in run.CLASSES.values()) >= 500
    pairs = set(LIVE[0].cases)
    assert len(pairs) == 16
    assert ({role for role, _ in pairs}, {phase for _, phase in pairs}) == (set(ROLES), set(PHASES))


def test_processes_are_found_by_role_and_ended() -> None:
    """A parent with a child that looks like a rank, and one that looks like a reward worker and listens."""
    wait = "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); time.sleep(600)"
    start = (
        "import os, subprocess, sys, time;"
        f"code = {wait!r};"
        "a = subprocess.Popen([sys.executable, '-c', code, '-m', 'a.module', 'x'], env={**os.environ, 'RANK': '1'});"
        "b = subprocess.Popen([sys.executable, '-c', code, 'tepo_megatron.tasks.reward.worker']); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", start], start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        roles = wait_until(lambda: len(found := by_role(process.pid, "a.module")) == 3 and found, TIMEOUT_S, "the children")
        assert isinstance(roles, dict)
        assert set(roles) == {"parent", "rank 1", "reward worker"}
        pids = descendants(process.pid)
        assert len(pids) == 3
        wait_until(lambda: len(list(listening(pids))) == 2, TIMEOUT_S, "their ports")
        os.kill(roles["rank 1"][0], signal.SIGSTOP)
    finally:
        end_tree(process)
    assert not any(map(Process.start_time, pids))


def write_run(folder: Path, rollouts: str = "the same", weights: bytes = b"weights", **changes: Any) -> Path:
    rows = [{"step": step, "loss": 0.1 * step, "time/step": random.random()} for step in range(3)]
    rows[2] |= changes
    (folder / "rollouts").mkdir(parents=True)
    (folder / "model").mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "lo')
    (folder / "rollouts/step_0000000.jsonl").write_text(rollouts)
    (folder / "model/model.safetensors").write_bytes(weights)
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"loss": 0.2000001}, "row 2 of metrics.jsonl differs in loss"),
        ({"kl": 1.0}, "row 2 of metrics.jsonl differs in kl"),
        ({"step": 1, "loss": 0.1}, "metrics.jsonl has the steps [0, 1, 1]"),
        ({"rollouts": "others"}, "the rollouts in step_0000000.jsonl differ"),
        ({"weights": b"weightz"}, "the exported weights differ"),
    ],
)
def test_a_difference_in_metrics_rollouts_or_weights_is_seen(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert differences(write_run(tmp_path / "run", **changes), write_run(tmp_path / "reference")) == said


def test_a_silent_fault_that_no_check_saw_is_lost_and_a_false_alarm_too() -> None:
    clean = {"prompt": 0.01}
    seen = {"size": 1.0, "figures": {"prompt": 2.0}, "clean": clean, "caught": {"prompt": "a sentence"}}
    small = {"size": 0.1, "figures": {"prompt": 0.02}, "clean": clean, "caught": {}}
    fault, control = SILENT_FAULTS[0], ALL[0]
    coarse, noise = (next(item for item in ALL if item.kind == kind and "bf16" in item.server) for kind in ("stale", "noise"))
    for what, result, outcome in (
        (fault, [seen, small], "refused"),
        (fault, [small], "lost"),
        (coarse, [small], "lost"),
        (noise, [small], "survived"),
        (noise, [seen], "lost"),
        (control, [seen], "lost"),
        (fault, [{**seen, "caught": {"transfer": "the update failed"}}], "lost"),  # another fault than was injected
        (control, [small], "survived"),
    ):
        assert judge(what, result).result == outcome
    assert judge(fault, [seen, small]).details["smallest"]["prompt"] == 1.0


def test_a_stranger_finds_the_open_store_among_ports_that_never_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(strangers, "PATIENCE_S", 5.0)
    silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(20)]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    live = SimpleNamespace(pids=[os.getpid()], last_step=0, steps=1, wait_for_row=bool, running=True, out=tmp_path)
    shop = SimpleNamespace(folder=tmp_path, live_run=lambda: live, reference=lambda: write_run(tmp_path / "reference"))
    try:
        outcomes = [run.CLASSES["strangers"](cast(Any, shop)).inject(9, random.Random(0))]
        assert [(item.fault, item.result) for item in outcomes] == [("a value in every key-value store", "lost")]
        assert outcomes[0].said == f"the stores at the ports [{store.port}] took a stranger's value"
    finally:
        for each in silent:
            each.close()


def test_a_call_that_goes_on_takes_live_runs_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    write_run(tmp_path / "reference/out")
    for name in ("first-run-01", "second-run-01", "second-run-02"):
        (tmp_path / name).mkdir()
    for lane in ("first", "second"):
        Workshop(tmp_path, lane=lane, quick=True, say=lambda _: None).live_run()
    assert {path.parent.name for path in tmp_path.glob("*/log.txt")} == {"first-run-02", "second-run-03"}


RUN = """
import signal, subprocess, sys, time
from pathlib import Path
out, does = Path(sys.argv[1]), sys.argv[2]
def stop(number, frame):
    if does == "traceback":
        raise OSError("a defect")
    sys.exit(75)
if does == "child":
    subprocess.Popen(["sleep", "100"], start_new_session=True)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, stop)
out.mkdir(parents=True, exist_ok=True)
for step in range(int(sys.argv[3])):
    with (out / "metrics.jsonl").open("a") as file:
        print('{"step": %d}' % step, file=file)
    time.sleep(0.05)
(out / "model").mkdir()
(out / "model/model.safetensors").touch()
"""


@pytest.mark.parametrize(
    ("fault", "does", "said"),
    [
        ("Ctrl-C", "saves", "ended and resumed"),
        ("Ctrl-Z, then fg", "saves", "it went on"),
        ("the terminal is closed", "saves", "ended and resumed"),
        ("Ctrl-Z, then the terminal is closed", "saves", "ended and resumed"),
        ("the terminal is closed, under nohup", "saves", "it went on"),
        ("the whole job is suspended", "saves", "it went on"),
        ("Ctrl-C", "traceback", "a traceback: "),
        ("SIGTERM to the launcher", "child", "1 processes are left"),
        ("Ctrl-Z, then fg", "child", "1 of 2 processes go on: sleep 100"),
    ],
)
def test_a_terminal_has_keys_and_can_be_closed(
    fault: str, does: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 60 if fault == "Ctrl-Z, then fg" or said == "it went on" else 6000
    reference = tmp_path / "base/whole/out"
    (reference / "model").mkdir(parents=True)
    (reference / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(steps)))
    (reference / "model/model.safetensors").touch()

    def command(folder: Path, *_: object) -> list[str]:
        folder.mkdir()
        return [sys.executable, "-c", RUN, str(folder / "out"), does, str(steps)]

    monkeypatch.setattr(stop_faults, "replay_command", command)
    monkeypatch.setattr(workshop, "replay", lambda *_, **__: RunEnd(0, ""))
    if does == "child":  # it neither stops nor ends; the others do, however slow the machine is
        for name in ("SUSPENDED_S", "STOPPED_S", "GONE_S"):
            monkeypatch.setattr(stop_faults, name, 0.5)
    faults = run.CLASSES["stops"](cast(Any, SimpleNamespace(folder=tmp_path, long_replay=lambda: tmp_path / "base")))
    outcome = faults.inject(list(stop_faults.STOPS).index(fault), random.Random(0))
    assert outcome.said.startswith(said)
    assert outcome.result == ("survived" if does == "saves" else "lost")


@pytest.mark.parametrize("name", ["records", "damage"])
def test_each_edit_changes_the_files_of_the_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def content(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    lines = b"".join(b'{"step": 3, "updates": %d}\n' % number for number in range(3))
    shard = (100).to_bytes(8, "little") + bytes(range(256)) * 20
    newest, before = "out/checkpoints/step_000003", "out/checkpoints/step_000002"
    sound = dict.fromkeys(("rollouts/step_0000003.jsonl", "out/metrics.jsonl", "out/resolved.yaml", "out/status/a"), lines)
    sound |= {
        f"{newest}/state.json": lines[: len(lines) // 3],
        f"{newest}/shards/a.safetensors": shard,
        f"{before}/shards/a.safetensors": b"2",
    }
    for file, data in sound.items():
        path = tmp_path / ("" if file.startswith("rollouts") else "saved") / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    edited: list[dict[str, bytes]] = []

    def replay(folder: Path, *_: object, **__: object) -> RunEnd:
        edited.append(content(folder))
        return RunEnd(1, "")

    monkeypatch.setattr(record_faults, "replay", replay)
    faults = run.CLASSES[name](cast(Any, SimpleNamespace(folder=tmp_path / "faults", undisturbed=lambda: tmp_path)))
    assert [faults.inject(number, random.Random(0)).result for number in range(faults.whole)] == ["refused"] * faults.whole
    assert len(edited) == faults.whole
    assert sound not in edited


LATE = RewardResult(None, error=f"problem 'wrong': {input_faults.TOOK_TOO_LONG}")
RIGHT, WRONG = RewardResult(1.0), RewardResult(0.0)
HOSTILE = RewardResult(None, error=input_faults.TOOK_TOO_LONG)


@pytest.mark.parametrize(
    ("scores", "result"),
    [
        ([[RIGHT, HOSTILE, WRONG, RIGHT]], "refused"),
        ([[RIGHT, WRONG, LATE, RIGHT], [RIGHT, WRONG, WRONG, RIGHT]], "survived"),
        ([[LATE, HOSTILE, WRONG, RIGHT], [RIGHT, HOSTILE, LATE, RIGHT], [RIGHT, HOSTILE, WRONG, RIGHT]], "refused"),
        ([[RIGHT, HOSTILE, LATE, RIGHT]] * input_faults.ATTEMPTS, "lost"),
        ([[RIGHT, HOSTILE, RewardResult(None, error="it ended"), RIGHT]], "lost"),
        ([[RIGHT, HOSTILE, RIGHT, RIGHT]], "lost"),
    ],
    ids=["its own response", "late once", "late twice", "late each time", "ended with it", "wrong taken for right"],
)
def test_an_honest_answer_may_be_late_but_not_each_time(
    scores: list[list[RewardResult]], result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(scores)

    class Pool:
        """Remembers what failed, as the real one."""

        def __init__(self, config: object) -> None:
            self.results = next(calls)

        def score(self, items: object) -> list[RewardResult]:
            return self.results

        def close(self) -> None: ...

    monkeypatch.setattr(input_faults, "RewardPool", Pool)
    fault = run.CLASSES["answers"](cast(Any, SimpleNamespace(is_quick=True, folder=tmp_path)))
    assert fault.inject(0, random.Random(0)).result == result
    assert next(calls, None) is None

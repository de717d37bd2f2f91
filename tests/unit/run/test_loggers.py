"""What W&B and MLflow are given, whatever they do: each row once, no secret, and never a wait but at the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tepo_megatron.cli.doctor.run_checks import run_checks
from tepo_megatron.config import RunConfig
from tepo_megatron.config.loading.load import ConfigError, load_run
from tepo_megatron.run.display.progress import NoProgress
from tepo_megatron.run.loggers import installed
from tepo_megatron.run.loggers.client import Ending, RunSettings
from tepo_megatron.run.loggers.follow import Follower, SentRows
from tepo_megatron.run.loggers.process import Session, serve
from tepo_megatron.run.loggers.redact import HIDDEN, without_secrets
from tepo_megatron.run.metrics.metrics import MetricsWriter, read_metrics
from tepo_megatron.run.output import output as output_module
from tepo_megatron.run.output.output import Output
from tepo_megatron.run.output.run_folder import prepare_folder
from tepo_megatron.runtime.preemption import PREEMPTED, StopSignals

# -- which rows are new

ROW, BACK, LOOK, RESTART, FAIL = "row", "back", "look", "restart", "fail"


@example(events=[(ROW, 0), (ROW, 0), (LOOK, 0), (BACK, 0), (ROW, 0), (ROW, 0), (ROW, 0)])  # another file, and a longer one
@given(events=st.lists(st.tuples(st.sampled_from([ROW, ROW, ROW, BACK, LOOK, RESTART, FAIL]), st.integers(0, 6)), max_size=30))
def test_a_logger_has_in_the_end_what_the_file_has(
    events: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whenever it looks, fails, or is started again, and wherever the run goes back to: of the rows of a step the last one
    counts, and all that count are the file's. The position of what is logged rises by one each time.
    """
    folder = tmp_path_factory.mktemp("run")
    logged: list[tuple[int, int, float]] = []

    def log(position: int, step: int, row: Mapping[str, Any]) -> None:
        logged.append((position, step, row["at"]))

    def refuse(position: int, step: int, row: Mapping[str, Any]) -> None:
        raise ConnectionError("no network")

    def start() -> Follower:
        return Follower(folder / "metrics.jsonl", SentRows(folder / "wandb/sent.jsonl"))

    SentRows(folder / "wandb/sent.jsonl").begin("abc")
    writer, follower = MetricsWriter(folder, tensorboard=False), start()
    for number, (event, argument) in enumerate(events):
        if event == ROW:
            writer.write((-1 if writer.last_step is None else writer.last_step) + 1, {"at": number})
        elif event == BACK:
            writer.truncate_after(argument)
        elif event == LOOK:
            follower.pass_on(log)
        elif event == RESTART:
            follower.close()
            follower = start()
        else:
            with contextlib.suppress(ConnectionError):
                follower.pass_on(refuse)
    follower.pass_on(log)
    follower.close()
    assert [position for position, _, _ in logged] == list(range(len(logged)))
    counts: list[tuple[int, float]] = []
    for _, step, at in logged:
        counts = [each for each in counts if each[0] < step]
        counts.append((step, at))
    there = [(row["step"], row["at"]) for row in read_metrics(folder / "metrics.jsonl")]
    assert counts[: len(there)] == there  # beyond them is what a run that went back has not done again yet


def test_a_list_of_what_was_sent_may_be_cut_but_not_damaged(tmp_path: Path) -> None:
    path = tmp_path / "sent.jsonl"
    path.write_text('{"id": "abc"}\n[0, 11]\n[1, 2')
    sent = SentRows(path)
    sent.add(1, 22)
    again = SentRows(path)
    assert (again.run_id, again.rows, again.count) == ("abc", [(0, 11), (1, 22)], 2)
    path.unlink()
    again.add(2, 33)
    assert (SentRows(path).run_id, SentRows(path).rows) == ("abc", [(2, 33)])
    path.write_text('{"id": "abc"}\n[0]\n')
    with pytest.raises(ValueError, match=r"sent\.jsonl is damaged .*; remove it"):
        SentRows(path)


# -- what fails over there


class Faulty:
    """A client that fails as often as it is told to before it works."""

    def __init__(self, failures: int, *, has_disk: bool = False) -> None:
        self.failures, self.has_disk = failures, has_disk
        self.steps: list[int] = []
        self.forgotten = 0
        self.opened: list[str | None] = []
        self.ending: Ending | None = None

    def go_offline(self) -> bool:
        self.failures = 0 if self.has_disk else self.failures
        return self.has_disk

    def open(self, run_id: str | None) -> str:
        self._fail()
        self.opened.append(run_id)
        return run_id or "new"

    def forget(self) -> None:
        self.forgotten += 1

    def where(self) -> str:
        return "https://user:key@there"

    def log(self, position: int, step: int, row: Mapping[str, float]) -> None:
        self._fail()
        assert "step" not in row
        assert None not in row.values()
        self.steps.append(step)

    def finish(self, ending: Ending) -> None:
        self.ending = ending

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("")


def session_of(client: Faulty, folder: Path, clock: Iterator[float]) -> tuple[Session, list[Mapping[str, Any]]]:
    run = RunSettings(folder, "run", {}, {}, 1.0)
    told: list[Mapping[str, Any]] = []
    return Session(run, "wandb", lambda: client, told.append, lambda: next(clock)), told


@given(failures=st.integers(0, 6), hurry=st.booleans())
def test_what_could_not_be_sent_is_sent_later_and_no_failure_is_hidden(
    failures: int, hurry: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    client = Faulty(failures)
    clock = iter(float(10_000 * at) for at in range(1000)) if not hurry else iter([0.0] * 1000)
    session, told = session_of(client, folder, clock)
    with MetricsWriter(folder, tensorboard=False) as writer:
        session.open()
        for step in range(10):
            writer.write(step, {"loss": float("nan") if step % 2 else 0.5})
            session.pass_on()
        failed = [each for each in told if "failed" in each]
        # In a hurry it waits after a failure, however often it is called.
        assert len(failed) == (min(failures, 1) if hurry else failures)
        session.finish("finished")
    assert all(each["failed"] == "ConnectionError" for each in failed)
    assert client.forgotten == len([each for each in told if "failed" in each])
    if not hurry or failures <= 1:  # the end tries once more
        assert (client.steps, client.ending) == (list(range(10)), "finished")
        assert [each for each in told if "note" in each] == [{"note": f"https://{HIDDEN}@there"}]


def test_a_run_that_never_reached_its_server_is_written_to_the_disk_at_its_end(tmp_path: Path) -> None:
    client = Faulty(100, has_disk=True)
    session, told = session_of(client, tmp_path, iter([0.0] * 100))
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(0, {"loss": 0.5})
    # The input ends without a word: rank 0 was killed.
    assert serve(session, [b'{"row": true}\n', b"\n"]) == "failed"
    session.finish("failed")
    assert (client.steps, client.ending, client.opened) == ([0], "failed", [None])
    assert [sorted(each) for each in told] == [["failed"], ["note"]]  # the end does not wait for the network once more


@pytest.mark.parametrize(("error", "ending"), [(ConnectionError("gone"), "stopped"), (TimeoutError("too slow"), None)])
def test_an_end_that_is_not_taken_is_tried_again_unless_time_is_up(error: OSError, ending: str | None, tmp_path: Path) -> None:
    client = Faulty(0)
    session, told = session_of(client, tmp_path, iter([0.0] * 100))
    finish, errors = client.finish, [error]

    def fails_once(ending: Ending) -> None:
        if errors:
            raise errors.pop()
        finish(ending)

    setattr(client, "finish", fails_once)  # noqa: B010
    session.open()
    session.finish("stopped")
    assert client.ending == ending
    assert [each["note"] for each in told[1:]] == ([] if ending else ["the end of the run was not taken: too slow"])


# -- secrets

SECRET = "sk-0123456789"


@pytest.mark.parametrize(
    ("given", "in_environment"),
    [
        ({"reward": {"kwargs": {"api_key": SECRET}}}, False),
        ({"kwargs": {"HF_TOKEN": SECRET, "deep": [{"Password": SECRET}]}}, False),
        ({"uri": f"postgresql://me:{SECRET}@host/db"}, False),
        ({"client-secret": SECRET}, False),
        ({"setup": [f"export OTHER={SECRET}"]}, True),
        (f"Bearer {SECRET}", True),
    ],
)
def test_a_secret_does_not_leave(given: Any, in_environment: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_environment:
        monkeypatch.setenv("SOME_API_KEY", SECRET)
    assert SECRET not in json.dumps(without_secrets(given))


def test_a_configuration_without_secrets_leaves_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):  # whatever this machine keeps there
        monkeypatch.delenv(name)
    resolved = RunConfig().model_dump(mode="json")
    assert without_secrets(resolved) == resolved


# -- settings


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("log.mlflow={experiment_name: a, tracking_uri: 'postgresql://me:pw@host/db'}", "an address with a password in it"),
        ("log.mlflow={experiment_name: a, tracking_uri: ./mlruns}", "is a folder, which MLflow 3 no longer writes to"),
        ("log.mlflow={experiment_name: a, tracking_uri: 'http://[::1'}", "is no address"),
        ("log.mlflow={}", "log.mlflow.experiment_name"),
        ("log.wandb={project: team/mine}", "W&B takes no / in the name of a project"),
        ("log.wandb={project: mine, mode: disabled}", 'allowed: "online", "offline"'),
        ("log.wandb.api_key=abc", "log.wandb.api_key"),
    ],
)
def test_what_cannot_act_is_refused(setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_run(None, [setting])
    assert sentence in str(raised.value)


def test_a_missing_package_is_a_sentence_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "_is_installed", lambda name: name == "mlflow")
    config = load_run(None, [f"output={tmp_path / 'out'}", "log.mlflow.experiment_name=a", "log.wandb.project=b"])
    for start in (lambda: prepare_folder(config), lambda: Output(config, NoProgress())):
        with pytest.raises(ValueError, match=r"log.wandb is given, but the package wandb is not .*'tepo-megatron\[wandb\]'"):
            start()
    (check,) = [check() for check in run_checks(config) if "_loggers" in repr(check)]
    assert (check.status, check.needed) == ("fail", True)
    only = load_run(None, ["log.mlflow.experiment_name=a"])
    with pytest.raises(ValueError, match=r"the package sqlalchemy is not"):
        installed.check_installed(only.log)
    installed.check_installed(load_run(None, ["log.mlflow={experiment_name: a, tracking_uri: 'https://there'}"]).log)


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "left_by_a_logger").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not installed._is_installed("left_by_a_logger")
    assert installed._is_installed("json")


# -- rank 0 and the process

FAKE = """
import json, os, sys, time
from pathlib import Path

class Settings:
    model_fields = {"console": None, "finish_timeout": None}
    def __init__(self, **given): self.given = given

def init(**given):
    given["settings"] = given["settings"].given
    return Run(given)

class Run:
    url, step = "https://there/abc", 0
    def __init__(self, given):
        self.id = given["id"]
        self.to = Path(given["dir"]) / "told.jsonl"
        self.dir = given["dir"]
        self.config = self
        self.tell("init", given)
        print("chatter on the pipe")
    def tell(self, *words):
        with self.to.open("a") as file: file.write(json.dumps(words) + "\\n")
    def define_metric(self, *words, **named): self.tell("define_metric", words)
    def update(self, given, allow_val_change): self.tell("update", sorted(given))
    def mark_preempting(self): self.tell("preempting")
    def finish(self, exit_code): self.tell("finish", exit_code)
    def log(self, row, step, commit): self.tell("log", step, row)
"""


class Said(NoProgress):
    def __init__(self) -> None:
        self.words: list[str] = []

    def message(self, text: str) -> None:
        self.words.append(text)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package ``wandb`` that writes down what it is asked to do; its file, to be changed."""
    package = tmp_path / "packages" / "wandb" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text(FAKE)
    monkeypatch.setattr(installed, "_is_installed", lambda name: True)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")]))
    return package


def open_output(folder: Path, *, resume: bool = False, timeout_s: float = 600.0) -> tuple[Output, list[str]]:
    log = {"tensorboard": False, "wandb": {"project": "mine"}, "finish_timeout_s": timeout_s}
    document = {"output": str(folder), "train": {"resume": resume}, "log": log, "reward": {"kwargs": {}}}
    said = Said()
    return Output(RunConfig.model_validate(document), said), said.words


def told(folder: Path, kind: str) -> list[Any]:
    lines = [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]
    return [line[1:] for line in lines if line[0] == kind]


def test_a_run_that_is_stopped_and_resumed_is_one_run(tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out"
    signals = StopSignals()
    monkeypatch.setattr(output_module, "stop_signals", lambda: signals)
    first, said = open_output(folder)
    for step in range(4):
        first.write_row(step, {"reward/mean": step / 10, "ratio/max": float("inf")})
    signals.requested = signal.SIGTERM
    first.close()
    assert said == ["W&B: https://there/abc"]
    signals.requested = None
    second, _ = open_output(folder, resume=True)
    second.resume_from(2)
    second.write_row(3, {"reward/mean": 0.5})
    second.finish()
    second.close()
    (new,), (again,) = told(folder, "init")
    assert (new["resume"], new["mode"], new["project"], new["name"]) == ("allow", "online", "mine", "run")
    assert (again["id"], again["resume"]) == (new["id"], "allow")
    assert told(folder, "update") == [[sorted(new["config"])]]  # the resumed run's configuration is the newer one
    assert new["settings"] == {"console": "off", "finish_timeout": 480.0}
    assert new["config"]["optimizer"]["lr"] == RunConfig().optimizer.lr
    rows = [(step, row["step"], row["reward/mean"]) for step, row in told(folder, "log")]
    assert rows == [(0, 0, 0.0), (1, 1, 0.1), (2, 2, 0.2), (3, 3, 0.3), (4, 3, 0.5)]
    assert (told(folder, "preempting"), told(folder, "finish")) == ([[]], [[PREEMPTED], [0]])
    assert "chatter on the pipe" in (folder / "logs/wandb.log").read_text()


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("raise RuntimeError('its core is\\nbroken')", "W&B cannot be logged to: its core is ("),
        ("import os; os._exit(3)", "W&B cannot be logged to: the process that logs has ended ("),
    ],
)
def test_a_logger_that_fails_is_said_once_and_counted_and_costs_no_row(
    tmp_path: Path, fake: Path, fault: str, sentence: str
) -> None:
    fake.write_text(fault)
    folder = tmp_path / "out"
    output, said = open_output(folder)
    step = 0
    while not said:  # the process needs its time
        output.write_row(step, {})
        step += 1
        time.sleep(0.05)
    output.write_row(step, {})
    output.finish()
    output.close()
    assert said[0].startswith(sentence)
    assert not [text for text in said[1:] if "cannot be logged to" in text]
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(step + 1))
    assert sum(row["log/failed"] for row in rows) >= 1


def test_a_logger_that_stands_still_holds_up_neither_a_step_nor_the_end(tmp_path: Path, fake: Path) -> None:
    """Its pipe is full long before the last row."""
    (tmp_path / "lives").touch()
    fake.write_text(f"import time\nwhile {str(tmp_path / 'lives')!r}: time.sleep(0.1)")
    output, said = open_output(tmp_path / "out", timeout_s=0.2)
    (process,) = output._loggers._processes
    for _ in range(10_000):
        output._loggers.row_written()
    output.write_row(0, {})
    output.close()
    assert process._process.returncode is not None
    assert len(said) == 1
    assert said[0].startswith("W&B has not taken everything by the end of the run (log.finish_timeout_s = 0.2); ")


def test_a_logger_that_dies_at_the_end_is_said(tmp_path: Path, fake: Path) -> None:
    fake.write_text(FAKE.replace('self.tell("finish", exit_code)', "os._exit(4)"))
    output, said = open_output(tmp_path / "out")
    output.write_row(0, {})
    output.close()
    assert [text.partition(":")[0] for text in said] == ["W&B", "W&B cannot be logged to"]


def test_a_run_that_begins_anew_in_its_folder_is_another_run(tmp_path: Path, fake: Path) -> None:
    """As after a start that failed in its first step."""
    for _ in range(2):
        output, _ = open_output(tmp_path / "out")
        output.write_row(0, {})
        output.close()
    assert len({given["id"] for (given,) in told(tmp_path / "out", "init")}) == 2
    assert told(tmp_path / "out", "finish") == [[1], [1]]

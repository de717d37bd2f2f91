"""What W&B and MLflow are given, whatever they do: each row once, no secret, and never a wait but at the end."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.run import loggers
from tepo_megatron.run.display.progress import Progress
from tepo_megatron.run.loggers import HIDDEN, Ending, without_secrets
from tepo_megatron.run.loggers.process import Session
from tepo_megatron.run.metrics import read_metrics
from tepo_megatron.run.output.output import Output
from tepo_megatron.run.output.resume import prepare_folder
from tepo_megatron.runtime.preemption import PREEMPTED, StopSignals
from tests.support.processes import numbers_above_1023
from tests.support.programs import TIMEOUT_S
from tests.unit.run.conftest import open_output


class Faulty:
    """A client that fails so many times before it works."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.rows: list[tuple[int, int]] = []
        self.opened: list[str | None] = []
        self.ending: Ending | None = None

    def open(self, run_id: str | None) -> str:
        self._fail()
        self.opened.append(run_id)
        return run_id or "new"

    def address(self) -> str:
        return "https://user:key@there"

    def log(self, number: int, step: int, row: Mapping[str, float]) -> None:
        self._fail()
        assert "step" not in row
        self.rows.append((number, step))

    def finish(self, ending: Ending) -> None:
        self._fail()
        self.ending = ending

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("")


def session_of(client: Any, folder: Path, clock: Callable[[], float]) -> tuple[Session, list[Mapping[str, Any]]]:
    reports: list[Mapping[str, Any]] = []
    return Session(lambda: client, folder / "wandb/run.json", reports.append, clock), reports


@given(failures=st.integers(0, 6), in_a_hurry=st.booleans())
def test_no_failure_is_hidden_and_rows_after_it_are_logged(
    failures: int, in_a_hurry: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    client, clock = Faulty(failures), itertools.count(0, 0 if in_a_hurry else 10_000)
    session, reports = session_of(client, tmp_path_factory.mktemp("run"), lambda: float(next(clock)))
    session.open()
    for step in range(10):
        session.log({"step": step, "loss": 0.5})
    failed = [report for report in reports if "failed" in report]
    # After a failure, rows are dropped for a while, without an attempt.
    assert len(failed) == (min(failures, 1) if in_a_hurry else failures)
    assert all(report["failed"] == "ConnectionError" for report in failed)
    lost = 10 if in_a_hurry and failures else max(0, failures - 1)
    assert client.rows == [(number, step) for number, step in enumerate(range(lost, 10))]
    session.finish("finished")
    assert client.ending == (None if in_a_hurry and failures else "finished")
    if lost < 10:
        assert [report for report in reports if "note" in report] == [{"note": f"https://{HIDDEN}@there"}]


def test_another_process_continues_the_run_and_an_end_that_fails_is_tried_once_more(tmp_path: Path) -> None:
    for start, failures, ending in ((0, 1, "stopped"), (3, 5, None)):
        session, reports = session_of(client := Faulty(0), tmp_path, time.monotonic)
        session.open()
        for step in range(3):
            session.log({"step": step})
        assert client.opened == [None if start == 0 else "new"]
        assert client.rows == [(start + step, step) for step in range(3)]
        client.failures = failures
        session.finish("stopped")
        assert client.ending == ending
        assert ["failed" in report for report in reports] == ([False] if ending else [False, True])


SECRET = "sk-0123456789"


def test_a_secret_does_not_leave_and_all_else_leaves_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):  # whatever this machine keeps there
        monkeypatch.delenv(name)
    resolved = RunConfig().model_dump(mode="json")
    shown = {"key_file": "keys/a", "api_key_env": "KEY", "max_new_tokens": 8, "tokens": [1], "monkey": 1, "token": None}
    for value in (resolved, shown, {"has": {"key": True}, "at": "http://host:80/a@b", "mail": "me@host"}):
        assert without_secrets(value) == value
    for secret in (
        {"reward": {"kwargs": {"api_key": SECRET}}},
        {"kwargs": {"HF_TOKEN": SECRET, "deep": [{"Password": SECRET}]}},
        {"uri": f"postgresql://me:{SECRET}@host/db"},
        {"client-secret": SECRET},
        *({name: SECRET} for name in ("accessToken", "apiKey", "OpenAIKey", "db.userPassword")),
        {"api_key": [SECRET], "token": {"value": SECRET}},
        {"uri": f"https://{SECRET}@host/x", "other": f"https://me:p@{SECRET}@host"},
    ):
        assert SECRET not in json.dumps(without_secrets(secret))
    assert without_secrets({"password": 12345678}) == {"password": HIDDEN}
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    assert SECRET not in json.dumps(without_secrets({"setup": [f"export OTHER={SECRET}", f"Bearer {SECRET}"]}))


def test_a_missing_package_is_a_sentence_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"mlflow": SimpleNamespace(origin="here"), "wandb": SimpleNamespace(origin=None)}  # a folder is no package
    monkeypatch.setattr(loggers, "find_spec", found.get)
    config = load_run(None, [f"output={tmp_path / 'out'}", "log.mlflow.experiment_name=a", "log.wandb.project=b"])
    for start in (lambda: prepare_folder(config), lambda: Output(config, Progress())):
        with pytest.raises(ValueError, match=r"log.wandb is given, but the package wandb is not .*'tepo-megatron\[wandb\]'"):
            start()


SERVER, DATABASE = "https://there", "postgresql://there/db"


@pytest.mark.parametrize(
    ("uri", "variable", "needs"),
    [("null", "", True), (SERVER, DATABASE, False), (DATABASE, SERVER, True), ("null", SERVER, False)],
)
def test_mlflow_needs_sqlalchemy_for_a_database(uri: str, variable: str, needs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "find_spec", {"mlflow": SimpleNamespace(origin="here")}.get)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", variable)
    log = load_run(None, [f"log.mlflow={{experiment_name: a, tracking_uri: {uri}}}"]).log
    with pytest.raises(ValueError, match="the package sqlalchemy is not") if needs else nullcontext():
        loggers.Loggers.check_installed(log)


FAKE = """
import json, os
from pathlib import Path

class Settings:
    model_fields = {"console": None, "finish_timeout": None}
    def __init__(self, **given): self.given = given

class init:
    url, step, offline, disabled = "https://there/abc", 0, False, False
    def __init__(self, settings, id, dir, config, **given):
        self.id, self.dir, self.config = id, dir, self
        self.tell("init", {"id": id, "settings": settings.given})
        print("chatter on the pipe")
    def tell(self, *words):
        with (Path(self.dir) / "told.jsonl").open("a") as file: file.write(json.dumps(words) + "\\n")
    def define_metric(self, *words, **named): pass
    def mark_preempting(self): self.tell("preempting")
    def finish(self, exit_code): self.tell("finish", exit_code)
    def log(self, row, step, commit): self.tell("log", step, row)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package ``wandb`` that writes down what it is asked to do; its file, to be changed."""
    package = tmp_path / "packages" / "wandb" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text(FAKE)
    monkeypatch.setattr(loggers, "find_spec", lambda name: SimpleNamespace(origin="here"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")]))
    return package


WANDB: dict[str, Any] = {"wandb": {"project": "mine"}, "finish_timeout_s": 600.0}


def told(folder: Path, kind: str) -> list[Any]:
    lines = [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]
    return [line[1:] for line in lines if line[0] == kind]


def test_a_run_that_is_stopped_is_one_that_was_preempted(tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends two seconds after its output, as W&B's may."""
    fake.write_text(FAKE + "import atexit, time\natexit.register(time.sleep, 2)\n")
    folder, signals = tmp_path / "out", StopSignals()
    monkeypatch.setattr(StopSignals, "current", lambda: signals)
    output, said = open_output(folder, log=WANDB)
    for step in range(4):
        output.write_row(step, {"reward/mean": step / 10, "ratio/max": float("inf")})
    signals.requested = signal.SIGTERM
    output.close()
    assert said == ["W&B: https://there/abc"]
    ((new,),) = told(folder, "init")
    assert new["settings"] == {"console": "off", "finish_timeout": 480.0}
    rows = [(step, row["step"], row["reward/mean"], "ratio/max" in row) for step, row in told(folder, "log")]
    assert rows == [(step, step, step / 10, False) for step in range(4)]
    assert (told(folder, "preempting"), told(folder, "finish")) == ([[]], [[PREEMPTED]])
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
    output, said = open_output(folder, log=WANDB)
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
    fake.write_text("import time\nwhile True: time.sleep(0.1)")
    output, said = open_output(tmp_path / "out", log=WANDB | {"finish_timeout_s": 0.2})
    for step in range(1_000):
        output.write_row(step, {f"figure/{number}": 0.5 for number in range(100)})
    output.close()
    assert len(said) == 1
    assert said[0].startswith("W&B has not taken everything by the end of the run (log.finish_timeout_s = 0.2); ")


def test_a_logger_that_has_ended_when_another_has_used_up_the_time_has_taken_everything(tmp_path: Path, fake: Path) -> None:
    output, said = open_output(tmp_path / "out", log=WANDB)
    (logger,) = output._loggers._processes
    logger.post({"finish": "finished"})
    assert logger.exit_status(TIMEOUT_S) == "exit status 0"
    output._loggers.close("finished", 0.0)
    output.close()
    assert said == ["W&B: https://there/abc"]


def test_a_run_that_begins_again_in_its_folder_is_another_one_and_a_death_at_the_end_is_said(
    tmp_path: Path, fake: Path
) -> None:
    """As after a start that failed in its first step. Many files are open."""
    for end in ('self.tell("finish", exit_code)', "os._exit(4)"):
        fake.write_text(FAKE.replace('self.tell("finish", exit_code)', end))
        with numbers_above_1023():
            output, said = open_output(tmp_path / "out", log=WANDB)
            output.write_row(0, {})
            output.close()
    assert len({given["id"] for (given,) in told(tmp_path / "out", "init")}) == 2
    assert told(tmp_path / "out", "finish") == [[1]]
    assert [text.partition(":")[0] for text in said] == ["W&B", "W&B cannot be logged to"]


@pytest.mark.parametrize("last", ['{"row": {"step": 1, "lo', "nonsense\n"])
def test_a_line_that_is_cut_ends_the_logger_as_a_failed_run_does(last: str, tmp_path: Path, fake: Path) -> None:
    """Rank 0 was killed while it wrote: the logger's process, which ignores SIGTERM, would never end."""
    settings = load_run(None, ["log.wandb.project=mine"]).log.model_dump(mode="json")["wandb"]
    setup = {"kind": "wandb", "folder": str(tmp_path), "name": "a", "settings": settings, "config": {}, "finish_timeout_s": 60}
    command = [sys.executable, "-m", "tepo_megatron.run.loggers.process"]
    for whole in ((), (setup, {"row": {"step": 0}})):
        text = "".join(json.dumps(line) + "\n" for line in whole) + last
        subprocess.run(command, input=text.encode(), capture_output=True, check=True, timeout=TIMEOUT_S)
    assert (told(tmp_path, "log"), told(tmp_path, "finish")) == ([[0, {"step": 0}]], [[1]])

"""W&B and MLflow themselves: what a run leaves on the disk is read back with their own readers.

Both packages are in requirements/test.txt; without one of them its test is skipped.
"""

import gzip
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tepo_megatron.run.metrics import read_metrics
from tepo_megatron.run.output.output import Output
from tests.support.http_server import http_server
from tests.unit.run.conftest import open_output


class WandbServer:
    """As much of a W&B server as its own client needs to send a run and to continue it.

    What it was sent: the rows of the run's history in their places, what was said of the run, and its exit codes."""

    def __init__(self) -> None:
        self.url = ""
        self.history: list[dict[str, Any]] = []
        self.run: dict[str, Any] = {}
        """The newest value of each field: name (the id), project, displayName, groupName, tags, config."""
        self.ids: set[str] = set()
        self.exit_codes: list[int] = []
        self._lock = threading.Lock()

    def answer(self, path: str, headers: Mapping[str, str], content: bytes) -> tuple[int, bytes]:
        if headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        answer: dict[str, Any] = {}
        if path == "/graphql":
            answer = {"data": self.graphql(json.loads(content))}
        elif path.endswith("/file_stream"):
            self.stream(json.loads(content))
            answer = {"limits": {}}
        return 200, json.dumps(answer).encode()

    def graphql(self, request: dict[str, Any]) -> dict[str, Any]:
        given, operation = request.get("variables") or {}, request.get("operationName")
        with self._lock:
            if operation == "UpsertBucket":
                if given.get("name"):
                    self.ids.add(given["name"])
                self.run |= {name: value for name, value in given.items() if value not in (None, [], "")}
                return {"upsertBucket": {"bucket": self._bucket(), "inserted": True}}
            if operation == "RunResumeStatus":
                return {"model": {"bucket": self._bucket() if self.ids else None}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in given["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        return {}

    def stream(self, request: dict[str, Any]) -> None:
        with self._lock:
            piece = request.get("files", {}).get("wandb-history.jsonl")
            if piece:
                rows = [json.loads(line) for line in piece["content"]]
                self.history[piece["offset"] : piece["offset"] + len(rows)] = rows
            if request.get("complete"):
                self.exit_codes.append(request["exitcode"])

    def _bucket(self) -> dict[str, Any]:
        tail = json.dumps([json.dumps(self.history[-1])] if self.history else [])
        entity = {"id": "1", "name": "someone"}
        return {
            "id": "1",
            "name": self.run.get("name"),
            "displayName": self.run.get("displayName"),
            "project": {"id": "1", "name": self.run.get("project"), "entity": entity},
            "config": "{}",
            "summaryMetrics": "{}",
            "tags": self.run.get("tags") or [],
            "wandbConfig": json.dumps({"t": 1}),
            "historyLineCount": len(self.history),
            "historyTail": tail,
            "eventsLineCount": 0,
            "eventsTail": "[]",
            "logLineCount": 0,
        }


KEY = "0123456789abcdef0123456789abcdef01234567"
PLANTED = "sk-planted-in-the-kwargs"


def open_run(folder: Path, section: dict[str, Any], *, resume: bool, lr: float) -> tuple[Output, list[str]]:
    reward = {"verifier": "math.py:verify", "kwargs": {"api_key": PLANTED}}
    sections = {"name": "tiny", "train": {"resume": resume}, "optimizer": {"lr": lr}, "reward": reward}
    return open_output(folder, log={"finish_timeout_s": 600, **section}, **sections)


def run_twice(folder: Path, section: dict[str, Any]) -> list[dict[str, Any]]:
    """A run that fails after step 3, and is resumed from step 2 with another setting. Returns its rows."""
    first, _ = open_run(folder, section, resume=False, lr=1e-4)
    for step in range(4):
        first.write_row(step, {"reward/mean": step / 10, "accuracy/avg@k": step / 4, "ratio/max": math.inf})
    first.close()
    second, _ = open_run(folder, section, resume=True, lr=2e-4)
    second.resume_from(2)
    for step in range(3, 5):
        second.write_row(step, {"reward/mean": step / 20, "accuracy/avg@k": step / 8, "ratio/max": 1.5})
    second.finish()
    second.close()
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["log/failed"] for row in rows] == [0] * 5
    return rows


def no_secret_in(*folders: Path) -> None:
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        assert not [secret for secret in (KEY, PLANTED) if secret.encode() in path.read_bytes()], path


def end_wandbs_own_process(output: Output, said: list[str]) -> None:
    """Once the run is known to the server."""
    while not said:
        output._loggers.take_reports()
        time.sleep(0.05)
    assert said[0].startswith("W&B: ")
    children = psutil.Process().children(recursive=True)
    (core,) = [child for child in children if "wandb-core" in child.name()]
    core.terminate()
    while core.status() != psutil.STATUS_ZOMBIE:  # W&B's client waits for it at its own end
        time.sleep(0.05)


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_a_run_of_wandb_has_every_row_offline_and_online_and_goes_on_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails, is resumed, both offline as WANDB_MODE says; ``wandb sync`` reads both folders and sends them; then it is
    resumed online, as the setting says, where a signal to every process of the job ends W&B's own.
    """
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    section: dict[str, Any] = {"project": "tepo", "tags": ["tiny"], "group": "seeds"}
    folder = tmp_path / "out"
    server = WandbServer()
    with http_server(server.answer, {"Content-Type": "application/json"}) as server.url:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
        monkeypatch.setenv("WANDB_MODE", "disabled")
        disabled, said = open_run(tmp_path / "disabled", {"wandb": section}, resume=False, lr=1e-4)
        disabled.write_row(0, {"reward/mean": 0.5})
        disabled.close()
        assert said == ["W&B: disabled, as W&B's own settings say"]
        monkeypatch.setenv("WANDB_MODE", "offline")
        rows = run_twice(folder, {"wandb": section})
        folders = sorted(folder.glob("wandb/offline-run-*"))
        assert (len(folders), server.history, server.ids) == (2, [], set())
        sync = [sys.executable, "-m", "wandb", "sync", *map(str, folders)]
        done = subprocess.run(sync, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        third, said = open_run(folder, {"wandb": section | {"mode": "online"}}, resume=True, lr=2e-4)
        third.resume_from(4)
        end_wandbs_own_process(third, said)
        rows.append(third.write_row(5, {"reward/mean": 0.5}))
        third.finish()
        third.close()
    run_id = folders[0].name.rpartition("-")[2]
    assert server.ids == {run_id}
    run = server.run
    assert (run["name"], run["project"], run["displayName"], run["groupName"]) == (run_id, "tepo", "tiny", "seeds")
    assert list(run["tags"]) == ["tiny"]
    config = json.loads(run["config"])
    assert config["optimizer"]["value"]["lr"] == 2e-4
    assert config["reward"]["value"]["kwargs"] == {"api_key": "***"}
    assert server.exit_codes == [1, 0, 0]
    assert [row["_step"] for row in server.history] == list(range(7))  # it never falls, so that nothing is thrown away
    assert [row["step"] for row in server.history] == [0, 1, 2, 3, 3, 4, 5]
    for row, there in zip(rows, [*server.history[:3], *server.history[4:]], strict=True):
        assert {key: there.get(key) for key in row} == row
    metrics = config["_wandb"]["value"]["m"]  # in W&B's short form: 1 is a name, 2 a pattern, 5 its x axis by number
    (every,) = [metric for metric in metrics if metric.get("2") == "*"]
    assert metrics[every["5"] - 1]["1"] == "step"
    no_secret_in(folder / "wandb", folder / "logs")


def test_the_database_of_mlflow_has_every_row_and_goes_on_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for package in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(package)
    section = {"mlflow": {"experiment_name": "tepo", "tags": {"of": "tests"}}}
    folder = tmp_path / "out"
    rows = run_twice(folder, section)
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow/mlflow.db'}")
    experiment = client.get_experiment_by_name("tepo")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name, run.data.tags["of"]) == ("FINISHED", "tiny", "tests")
    assert (run.data.params["optimizer.lr"], run.data.tags["optimizer.lr"]) == ("0.0001", "0.0002")
    assert run.data.params["reward.kwargs.api_key"] == "***"
    for name, shown in {"reward/mean": "reward/mean", "accuracy/avg@k": "accuracy/avg_at_k", "ratio/max": "ratio/max"}.items():
        history = sorted(client.get_metric_history(run.info.run_id, shown), key=lambda metric: (metric.step, metric.timestamp))
        last = {metric.step: metric.value for metric in history}
        assert last == {row["step"]: row[name] for row in rows if row[name] is not None}
    assert len(client.get_metric_history(run.info.run_id, "reward/mean")) == 6
    ids = [run.info.run_id]
    client = MlflowClient(uri := f"sqlite:///{tmp_path / 'other.db'}")
    for _ in ("on another server", "deleted there"):
        again, said = open_run(folder, {"mlflow": section["mlflow"] | {"tracking_uri": uri}}, resume=True, lr=2e-4)
        again.resume_from(4)
        row = again.write_row(5, {"reward/mean": 0.5})
        again.finish()
        again.close()
        (run,) = client.search_runs([client.get_experiment_by_name("tepo").experiment_id])
        assert (row["log/failed"], run.info.status, run.data.metrics["reward/mean"]) == (0, "FINISHED", 0.5)
        assert said[-1].endswith(
            f"run {run.info.run_id} of the tracking server, without earlier rows: run {ids[-1]} is not there"
        )
        client.delete_run(run.info.run_id)
        ids.append(run.info.run_id)
    assert len(set(ids)) == 3
    no_secret_in(folder / "mlflow", folder / "logs")

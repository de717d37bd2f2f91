"""W&B and MLflow themselves, without a network: what a run leaves is read back with their own readers.

Both packages are in requirements/test.txt; without one of them its test is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.train.metrics import read_metrics
from tepo_megatron.train.output import Output
from tepo_megatron.train.progress import NoProgress

KEY = "0123456789abcdef0123456789abcdef01234567"
PLANTED = "sk-planted-in-the-kwargs"


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (requirements/test.txt)")


def open_output(folder: Path, section: dict[str, Any], *, resume: bool, lr: float) -> Output:
    log = {"tensorboard": False, "finish_timeout_s": 600, **section}
    document = {"output": str(folder), "name": "tiny", "train": {"resume": resume}, "optimizer": {"lr": lr}, "log": log}
    own = {"reward": {"verifier": "math.py:verify", "kwargs": {"api_key": PLANTED}}}
    return Output(RunConfig.model_validate(document | own), NoProgress())


def run_twice(folder: Path, section: dict[str, Any]) -> list[dict[str, Any]]:
    """A run that fails after step 3, and is resumed from step 2 with another setting. Returns its rows."""
    first = open_output(folder, section, resume=False, lr=1e-4)
    for step in range(4):
        first.write_row(step, {"reward/mean": step / 10, "accuracy/avg@k": step / 4, "ratio/max": math.inf})
    first.close()
    second = open_output(folder, section, resume=True, lr=2e-4)
    second.resume_from(2)
    for step in range(3, 5):
        second.write_row(step, {"reward/mean": step / 20, "accuracy/avg@k": step / 8, "ratio/max": 1.5})
    second.finish()
    second.close()
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["log/failed"] for row in rows] == [0] * 5
    return rows


def no_secret_in(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert KEY.encode() not in content, path
            assert PLANTED.encode() not in content, path


def records(path: Path) -> Iterator[Any]:
    """The records of a ``.wandb`` file, as W&B's own protocol has them: after seven bytes that name the format blocks of 32 KiB
    with pieces behind checksum, length and type.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for a head: the block is filled up
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


@needs("wandb")
def test_an_offline_run_of_wandb_has_every_row_and_goes_on_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    section = {"wandb": {"project": "tepo", "mode": "offline", "tags": ["tiny"], "group": "seeds"}}
    folder = tmp_path / "out"
    rows = run_twice(folder, section)
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    found = [list(records(path)) for path in files]
    runs = [record.run for each in found for record in each if record.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {files[0].stem.removeprefix("run-")}
    assert {(run.project, run.display_name, run.run_group, tuple(run.tags)) for run in runs} == {
        ("tepo", "tiny", "seeds", ("tiny",))
    }
    rates = []
    for each in found:
        given = {item.key: json.loads(item.value_json) for record in each for item in record.run.config.update}
        rates.append(given["optimizer"]["lr"])
    assert rates == [1e-4, 2e-4]
    assert [[record.exit.exit_code for record in each if record.HasField("exit")] for each in found] == [[1], [0]]
    logged = [_history(record) for each in found for record in each if record.HasField("history")]
    assert [row["_step"] for row in logged] == list(range(6))  # it never falls, so that nothing is thrown away
    assert [row["step"] for row in logged] == [0, 1, 2, 3, 3, 4]
    for row, there in zip(rows, [*logged[:3], *logged[4:]], strict=True):
        assert {key: there.get(key) for key in row} == row
    axes = {
        record.metric.glob_name: record.metric.step_metric for each in found for record in each if record.HasField("metric")
    }
    assert axes["*"] == "step"
    no_secret_in(folder / "wandb")


def _history(record: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


@needs("mlflow", "sqlalchemy", "alembic")
def test_the_database_of_mlflow_has_every_row_and_goes_on_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
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
    no_secret_in(folder / "mlflow")
    no_secret_in(folder / "logs")

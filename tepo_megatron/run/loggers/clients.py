"""Clients of W&B and MLflow in a logger's process; the only importer of both packages."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tepo_megatron.run.loggers.loggers import Ending
from tepo_megatron.runtime.preemption import PREEMPTED


@dataclass(frozen=True)
class RunSettings:
    """``settings``: the section ``log.wandb`` or ``log.mlflow``; ``config``: without secrets."""

    folder: Path
    name: str
    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    finish_timeout_s: float


class Client(Protocol):
    def open(self, run_id: str | None) -> str:
        """Starts or continues a run; returns its id."""

    def forget(self) -> None: ...

    def address(self) -> str: ...

    def log(self, number: int, step: int, row: Mapping[str, float]) -> None:
        """``number`` counts the run's rows; ``step`` goes back when the run returns to a checkpoint."""

    def finish(self, ending: Ending) -> None: ...


class WandbClient:
    """W&B drops lower steps than before: so its step counts rows, and ``step`` is every curve's x axis.

    If its server does not answer at the start, it writes to the disk (offline mode).
    """

    def __init__(self, run: RunSettings) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run_settings = run
        self._mode = run.settings["mode"]
        self._run: Any = None
        self._new_id = secrets.token_hex(4)

    def open(self, run_id: str | None) -> str:
        try:
            self._init(run_id or self._new_id)
        except Exception:
            if self._mode == "offline":
                raise
            self.forget()
            self._mode = "offline"
            self._init(run_id or self._new_id)
        if run_id is not None:
            self._run.config.update(dict(self._run_settings.config), allow_val_change=True)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def forget(self) -> None:
        with suppress(Exception):
            self._wandb.teardown()
        self._run = None

    def address(self) -> str:
        if self._mode == "offline":
            return f"{self._run.dir.removesuffix('/files')} (wandb sync sends it)"
        return str(self._run.url)

    def log(self, number: int, step: int, row: Mapping[str, float]) -> None:
        # A run that was resumed online may have rows that a killed process did not count.
        self._run.log({**row, "step": step}, step=max(number, self._run.step), commit=True)

    def finish(self, ending: Ending) -> None:
        if ending == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code={"finished": 0, "stopped": PREEMPTED, "failed": 1}[ending])

    def _init(self, run_id: str) -> None:
        run, section = self._run_settings, self._run_settings.settings
        settings = {
            # Only figures, configuration and the use of the machine leave it: no output, no code, no git.
            "console": "off",
            "save_code": False,
            "disable_code": True,
            "disable_git": True,
            "silent": True,
            "x_transaction_log_flush_interval": 1.0,  # rows that are not on the disk are lost with its process
            "x_stats_pid": os.getppid(),  # of rank 0, not of this process
            # By default the end of a run waits for the network without a limit.
            "finish_timeout": 0.8 * run.finish_timeout_s,
            "finish_timeout_raises": True,
            "init_timeout": 0.5 * run.finish_timeout_s,
        }
        known = self._wandb.Settings.model_fields
        self._run = self._wandb.init(
            project=section["project"],
            entity=section["entity"],
            name=section["name"] or run.name,
            group=section["group"],
            tags=section["tags"],
            id=run_id,
            # Offline too: then wandb sync asks the server for the run's state and appends to its rows.
            resume="allow",
            mode=self._mode,
            dir=str(run.folder),
            config=dict(run.config),
            settings=self._wandb.Settings(**{name: value for name, value in settings.items() if name in known}),
        )


class MlflowClient:
    """Metrics of a repeated step are added to the older ones, with a later time."""

    def __init__(self, run: RunSettings) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        self._run_settings = run
        self._folder = run.folder.absolute() / "mlflow"
        uri = run.settings["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI")
        self._is_local = not uri
        self._uri = uri or f"sqlite:///{self._folder / 'mlflow.db'}"
        self._client: Any = None
        self._run_id = ""

    def open(self, run_id: str | None) -> str:
        if self._is_local:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._client = self._mlflow.MlflowClient(self._uri)
        if run_id is None:
            tags = {"mlflow.source.name": "tepo train", **self._run_settings.settings["tags"]}
            name = self._run_settings.settings["run_name"] or self._run_settings.name
            run_id = self._client.create_run(self._experiment(), run_name=name, tags=tags).info.run_id
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = str(run_id)
        self._log_config()
        return self._run_id

    def forget(self) -> None:
        self._client = None

    def address(self) -> str:
        return f"run {self._run_id} of {self._uri if self._is_local else 'the tracking server'}"

    def log(self, number: int, step: int, row: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._mlflow.entities.Metric(_mlflow_name(key), float(value), now, step) for key, value in row.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, ending: Ending) -> None:
        self._client.set_terminated(self._run_id, {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[ending])

    def _experiment(self) -> str:
        name = self._run_settings.settings["experiment_name"]
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            artifacts = (self._folder / "artifacts").as_uri() if self._is_local else None
            try:
                return str(self._client.create_experiment(name, artifact_location=artifacts))
            except self._mlflow.exceptions.MlflowException:
                experiment = self._client.get_experiment_by_name(name)  # another run was faster
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _log_config(self) -> None:
        """As parameters, at most 100 in a request. MLflow never changes them: a resumed run's changes are tags."""
        values = {_mlflow_name(key): value[:500] for key, value in _flatten(self._run_settings.config)}
        logged = self._client.get_run(self._run_id).data.params
        new = [self._mlflow.entities.Param(key, value) for key, value in values.items() if key not in logged]
        for start in range(0, len(new), 100):
            self._client.log_batch(self._run_id, params=new[start : start + 100])
        for key, value in values.items():
            if logged.get(key, value) != value:
                self._client.set_tag(self._run_id, key, value)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _mlflow_name(key: str) -> str:
    """MLflow allows no ``@`` in a name."""
    return re.sub(r"[^\w\-. :/]", "_", key.replace("@", "_at_"))

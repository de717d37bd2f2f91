"""A run of MLflow. The only importer of mlflow; within a logger's process."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tepo_megatron.run.loggers.client import Ending, RunSettings

_MOST_AT_ONCE = 100
"""Parameters that one request takes."""
_LONGEST = 500
"""Characters of a parameter that every store takes."""


class MlflowClient:
    """Metrics of a step that is done again stand beside the older ones of that step, with a later time."""

    def __init__(self, run: RunSettings) -> None:
        import mlflow

        self._given = run
        self._own = run.folder.absolute() / "mlflow"
        uri = run.settings["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI")
        self._is_own = not uri
        self._uri = uri or f"sqlite:///{self._own / 'mlflow.db'}"
        self._mlflow: Any = mlflow
        self._client: Any = None
        self._run_id = ""

    def go_offline(self) -> bool:
        return False

    def open(self, run_id: str | None) -> str:
        if self._is_own:
            self._own.mkdir(parents=True, exist_ok=True)
        self._client = self._mlflow.MlflowClient(self._uri)
        if run_id is None:
            tags = {"mlflow.source.name": "tepo train", **self._given.settings["tags"]}
            name = self._given.settings["run_name"] or self._given.name
            run_id = self._client.create_run(self._experiment(), run_name=name, tags=tags).info.run_id
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = str(run_id)
        self._log_config()
        return self._run_id

    def forget(self) -> None:
        self._client = None

    def where(self) -> str:
        return f"run {self._run_id} of {self._uri if self._is_own else 'the tracking server'}"

    def log(self, position: int, step: int, row: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._mlflow.entities.Metric(_name(key), float(value), now, step) for key, value in row.items() if key != "step"
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, ending: Ending) -> None:
        status = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[ending]
        self._client.set_terminated(self._run_id, status)

    def _experiment(self) -> str:
        name = self._given.settings["experiment_name"]
        found = self._client.get_experiment_by_name(name)
        if found is None:
            artifacts = (self._own / "artifacts").as_uri() if self._is_own else None
            try:
                return str(self._client.create_experiment(name, artifact_location=artifacts))
            except self._mlflow.exceptions.MlflowException:
                found = self._client.get_experiment_by_name(name)  # another run was faster
                if found is None:
                    raise
        return str(found.experiment_id)

    def _log_config(self) -> None:
        """As parameters, which MLflow never changes: what a resumed run has otherwise is a tag of that name."""
        wanted = {_name(key): value[:_LONGEST] for key, value in _flat(self._given.config)}
        there = self._client.get_run(self._run_id).data.params
        new = [self._mlflow.entities.Param(key, value) for key, value in wanted.items() if key not in there]
        for begin in range(0, len(new), _MOST_AT_ONCE):
            self._client.log_batch(self._run_id, params=new[begin : begin + _MOST_AT_ONCE])
        for key, value in wanted.items():
            if there.get(key, value) != value:
                self._client.set_tag(self._run_id, key, value)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _name(key: str) -> str:
    """A name that MLflow takes: it has no ``@``."""
    return re.sub(r"[^\w\-. :/]", "_", key.replace("@", "_at_"))

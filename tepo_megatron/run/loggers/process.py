"""The logger's process: ``python -m tepo_megatron.run.loggers.process``.

It reads JSON lines: the settings, ``{"row": {…}}`` per step, and ``{"finish": "finished"}``, unless rank 0 died. It reports
messages (``note``) and failures (``failed``).
"""

import json
import os
import re
import secrets
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO, cast

from tepo_megatron.run.loggers import Ending, without_secrets
from tepo_megatron.runtime.files import write_atomically
from tepo_megatron.runtime.preemption import PREEMPTED, STOP_SIGNALS
from tepo_megatron.runtime.text import echo, flat
from tepo_megatron.runtime.worker_child import redirect_standard_streams

_RETRY_S = (30.0, 3600.0)  # rows are dropped for so long after a failure: doubled up to the second value

_MAX_WAITING_ROWS = 10_000

_NO_SUCH_RUN = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # the second: it was deleted

_QUIET = {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}


@dataclass
class _Run:
    kind: str
    folder: Path
    name: str
    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    finish_timeout_s: float


@dataclass
class _WandbClient(_Run):
    """W&B drops lower steps: its step counts rows, and ``step``, which a rollback lowers, is every curve's x axis."""

    def __post_init__(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._mode = self.settings["mode"]
        self._run: Any = None
        self._new_id = secrets.token_hex(4)

    def open(self, run_id: str | None) -> str:
        for mode in dict.fromkeys((self._mode, "offline")):
            with suppress(Exception):  # what an earlier attempt left
                self._wandb.teardown()
            self._mode = mode
            try:
                self._init(run_id or self._new_id)
                break
            except Exception:
                if mode == "offline":
                    raise
        if run_id is not None:
            self._run.config.update(dict(self.config), allow_val_change=True)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def address(self) -> str:
        if self._run.offline:
            return f"{self._run.dir.removesuffix('/files')} (wandb sync sends it)"
        return "disabled, as W&B's own settings say" if self._run.disabled else str(self._run.url)

    def log(self, number: int, step: int, row: Mapping[str, float]) -> None:
        # A run that was resumed online may have rows that a killed process did not count.
        self._run.log({**row, "step": step}, step=max(number, self._run.step), commit=True)

    def finish(self, ending: Ending) -> None:
        if ending == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code={"finished": 0, "stopped": PREEMPTED, "failed": 1}[ending])

    def _init(self, run_id: str) -> None:
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
            "finish_timeout": 0.8 * self.finish_timeout_s,
            "finish_timeout_raises": True,
            "init_timeout": 0.5 * self.finish_timeout_s,
        }
        known = self._wandb.Settings.model_fields
        self._run = self._wandb.init(
            **{name: self.settings[name] for name in ("project", "entity", "group", "tags")},
            name=self.settings["name"] or self.name,
            id=run_id,
            # Offline too: then wandb sync asks the server for the run's state and appends to its rows.
            resume="allow",
            mode=self._mode,
            dir=str(self.folder),
            config=dict(self.config),
            settings=self._wandb.Settings(**{name: value for name, value in settings.items() if name in known}),
        )


@dataclass
class _MlflowClient(_Run):
    def __post_init__(self) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        self._folder = self.folder / "mlflow"
        uri = self.settings["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI")
        self._is_local = not uri
        self._uri = uri or f"sqlite:///{self._folder / 'mlflow.db'}"
        self._missing: str | None = None  # the run that this one was to continue

    def open(self, run_id: str | None) -> str:
        if self._is_local:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._client: Any = self._mlflow.MlflowClient(self._uri)
        if run_id is not None:
            try:
                self._client.update_run(run_id, status="RUNNING")
            except self._mlflow.exceptions.MlflowException as error:
                if error.error_code not in _NO_SUCH_RUN:
                    raise
                self._missing, run_id = run_id, None
        if run_id is None:
            experiment, tags = self._experiment(self.settings["experiment_name"]), self.settings["tags"]
            tags = {"mlflow.source.name": "tepo train", **tags}
            run = self._client.create_run(experiment, run_name=self.settings["run_name"] or self.name, tags=tags)
            run_id = run.info.run_id
        self._run_id = str(run_id)
        self._log_config()
        return self._run_id

    def address(self) -> str:
        lacks = f", without earlier rows: run {self._missing} is not there" if self._missing else ""
        return f"run {self._run_id} of {self._uri if self._is_local else 'the tracking server'}{lacks}"

    def log(self, number: int, step: int, row: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._mlflow.entities.Metric(_mlflow_name(key), float(value), now, step) for key, value in row.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, ending: Ending) -> None:
        self._client.set_terminated(self._run_id, {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[ending])

    def _experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        artifacts = (self._folder / "artifacts").as_uri() if self._is_local else None
        try:
            return str(self._client.create_experiment(name, artifact_location=artifacts))
        except self._mlflow.exceptions.MlflowException:  # another run was faster
            if (experiment := self._client.get_experiment_by_name(name)) is None:
                raise
            return str(experiment.experiment_id)

    def _log_config(self) -> None:
        """A request takes at most 100. MLflow never changes parameters: a resumed run's changes are tags."""
        values = {_mlflow_name(key): str(value)[:500] for key, value in flat(self.config).items()}
        logged = self._client.get_run(self._run_id).data.params
        new = [self._mlflow.entities.Param(key, value) for key, value in values.items() if key not in logged]
        for start in range(0, len(new), 100):
            self._client.log_batch(self._run_id, params=new[start : start + 100])
        for key, value in values.items():
            if logged.get(key, value) != value:
                self._client.set_tag(self._run_id, key, value)


def _mlflow_name(key: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", key.replace("@", "_at_"))


_Client = _WandbClient | _MlflowClient


class Session:
    """A row that fails is reported and lost."""

    def __init__(
        self,
        make_client: Callable[[], _Client],
        state: Path,
        report: Callable[[Mapping[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_client, self._state, self._report, self._clock = make_client, state, report, clock
        self._client: _Client | None = None
        self._is_open = self._has_noted_address = False
        self._retry_at, self._retry_s = clock(), _RETRY_S[0]
        self._run_id: str | None = None
        self._rows = 0
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(state.read_text())
            self._run_id, self._rows = str(content["id"]), int(content["rows"])

    def open(self) -> None:
        self._attempt(lambda client: None)

    def log(self, row: Mapping[str, Any]) -> None:
        values = {key: value for key, value in row.items() if key != "step"}

        def log(client: _Client) -> None:
            client.log(self._rows, row["step"], values)
            self._rows += 1
            self._save()

        if self._clock() >= self._retry_at:
            self._attempt(log)

    def finish(self, ending: Ending) -> None:
        if self._has_noted_address:  # a server that never answered is not asked once more
            self._attempt(lambda client: client.finish(ending))

    def _open(self) -> _Client:
        if self._client is None:
            self._client = self._make_client()
        if not self._is_open:
            self._run_id = self._client.open(self._run_id)
            self._is_open = True
            self._save()
        if not self._has_noted_address:
            self._has_noted_address = True
            self._report({"note": without_secrets(self._client.address())})
        return self._client

    def _save(self) -> None:
        write_atomically(self._state, json.dumps({"id": self._run_id, "rows": self._rows}))

    def _attempt(self, work: Callable[[_Client], None]) -> None:
        """Opens a failing client again once: W&B's service process may have ended."""
        may_try_again = self._is_open
        try:
            work(self._open())
            self._retry_s = _RETRY_S[0]
        except Exception as error:  # clients raise whatever they like, and none of it may end the process
            echo(traceback.format_exc(), err=True)
            self._is_open = False
            if may_try_again and not isinstance(error, TimeoutError):
                self._attempt(work)
                return
            self._retry_at = self._clock() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _RETRY_S[1])
            reason = str(error).strip().partition("\n")[0][:250] or type(error).__name__
            self._report({"failed": without_secrets(reason)})


def _read(requests: BinaryIO, inbox: SimpleQueue[dict[str, Any]]) -> None:
    """Runs in a thread: rank 0 can always write."""
    try:
        for line in requests:
            if not line.endswith(b"\n"):
                break  # rank 0 died while it wrote
            if inbox.qsize() < _MAX_WAITING_ROWS or b'"finish"' in line[:12]:
                inbox.put(json.loads(line))
    finally:
        inbox.put({"finish": "failed"})


def _main() -> None:
    for number in STOP_SIGNALS:  # they ask the run to stop; rank 0 sends "finish" afterwards
        signal.signal(number, signal.SIG_IGN)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    requests, reply = redirect_standard_streams()

    def report(message: Mapping[str, Any]) -> None:
        try:
            reply(message)
        except BrokenPipeError:
            echo(f"rank 0 is gone; not reported: {message}", err=True)

    inbox: SimpleQueue[dict[str, Any]] = SimpleQueue()
    Thread(target=_read, args=(requests, inbox), daemon=True).start()
    first = inbox.get()
    if "kind" not in first:
        return
    run = _Run(**{**first, "folder": Path(first["folder"])})
    client = _WandbClient if run.kind == "wandb" else _MlflowClient
    session = Session(lambda: client(**vars(run)), run.folder / run.kind / "run.json", report)
    session.open()
    while "row" in (message := inbox.get()):
        session.log(message["row"])
    # Rank 0 ends this process if it needs longer; if rank 0 is gone, the clock does.
    signal.setitimer(signal.ITIMER_REAL, run.finish_timeout_s + 5)
    session.finish(cast(Ending, message["finish"]))


if __name__ == "__main__":
    _main()

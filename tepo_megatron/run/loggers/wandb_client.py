"""A run of Weights & Biases. The only importer of wandb; within a logger's process."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from typing import Any

from tepo_megatron.run.loggers.client import Ending, RunSettings
from tepo_megatron.runtime.preemption import PREEMPTED

_STEP = "step"


class WandbClient:
    """W&B's own step only rises, and what comes with a lower one is thrown away. So it counts rows, and ``step``, which goes
    back with the run, is the x axis of every curve.
    """

    def __init__(self, run: RunSettings) -> None:
        import wandb

        self._wandb: Any = wandb
        self._given = run
        self._mode = run.settings["mode"]
        self._run: Any = None
        self._new_id = secrets.token_hex(4)
        """The same in every attempt to begin a run: one that seemed to fail may have been heard."""

    def go_offline(self) -> bool:
        was, self._mode = self._mode, "offline"
        return was != "offline"

    def open(self, run_id: str | None) -> str:
        given = self._given.settings
        self._run = self._wandb.init(
            project=given["project"],
            entity=given["entity"],
            name=given["name"] or self._given.name,
            group=given["group"],
            tags=given["tags"],
            id=run_id or self._new_id,
            # Offline too: for such a folder wandb sync asks the server for the run's state, and goes on behind its rows.
            resume="allow",
            mode=self._mode,
            dir=str(self._given.folder),
            config=dict(self._given.config),
            settings=self._settings(),
        )
        if run_id is not None:
            self._run.config.update(dict(self._given.config), allow_val_change=True)
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric("*", step_metric=_STEP)
        return str(self._run.id)

    def forget(self) -> None:
        """W&B's own process may be gone: a signal to every process of a job ends it."""
        with contextlib.suppress(Exception):  # the connection is broken, and says so once more
            self._wandb.teardown()
        self._run = None

    def where(self) -> str:
        return (
            f"{self._run.dir.removesuffix('/files')} (wandb sync sends it)" if self._mode == "offline" else str(self._run.url)
        )

    def log(self, position: int, step: int, row: Mapping[str, float]) -> None:
        # A run that was resumed online may have rows that a killed process could not note.
        self._run.log({**row, _STEP: step}, step=max(position, self._run.step), commit=True)

    def finish(self, ending: Ending) -> None:
        if ending == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code={"finished": 0, "stopped": PREEMPTED, "failed": 1}[ending])

    def _settings(self) -> Any:
        """Nothing is taken but figures, configuration and the use of the machine: no output, no code, no git. Only what this
        version of W&B knows.
        """
        wanted = {
            "console": "off",
            "save_code": False,
            "disable_code": True,
            "disable_git": True,
            "silent": True,
            "x_transaction_log_flush_interval": 1.0,  # what is not on the disk is lost with its process
            "x_stats_pid": os.getppid(),  # of rank 0, not of this process
            # Left alone, the end of a run waits for the network for ever. What has not left the disk then is an error.
            "finish_timeout": 0.8 * self._given.finish_timeout_s,
            "finish_timeout_raises": True,
            "init_timeout": 0.5 * self._given.finish_timeout_s,
        }
        known = self._wandb.Settings.model_fields
        return self._wandb.Settings(**{name: value for name, value in wanted.items() if name in known})

"""What a client of W&B or MLflow must be able to do, and what it is made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Ending = Literal["finished", "stopped", "failed"]
"""How a run ended: complete, by a signal that asked it to stop, or otherwise."""


@dataclass(frozen=True)
class RunSettings:
    """What a client is made with; it goes to the process as JSON."""

    folder: Path
    """The output folder of the run."""
    name: str
    """The run's name."""
    settings: Mapping[str, Any]
    """The section ``log.wandb`` or ``log.mlflow``."""
    config: Mapping[str, Any]
    """The resolved configuration without secrets."""
    finish_timeout_s: float


class Client(Protocol):
    """One run over there. Any error of any method means: not this time."""

    def go_offline(self) -> bool:
        """A run that is not open yet is written to the disk alone, where the client can do so. Returns whether that is new."""

    def open(self, run_id: str | None) -> str:
        """Begins a run, or goes on with the one of this id. Returns its id."""

    def forget(self) -> None:
        """Lets go of a connection that failed, whatever state it is in; :meth:`open` makes another one."""

    def where(self) -> str:
        """Where the user finds the run."""

    def log(self, position: int, step: int, row: Mapping[str, float]) -> None:
        """``row`` is without its step. ``position`` rises by one with every call; ``step`` goes back when a run goes back to a
        checkpoint.
        """

    def finish(self, ending: Ending) -> None:
        """After the last row."""

"""The command ``tepo`` whose runs report their phase, so that a fault can hit it.

    python -m tepo_megatron.tools.faults.program train RUN.yaml [a.b=c ...]

The file ``armed`` in ``$TEPO_FAULTS_FOLDER`` names a phase; rank 0 renames it to ``reached`` on entering it.
"""

import contextlib
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tepo_megatron.core.problem import Problem
from tepo_megatron.runtime import torchrun
from tepo_megatron.runtime.rank import under_torchrun
from tepo_megatron.tasks.reward.verifiers import last_word

MODULE = "tepo_megatron.tools.faults.program"
FOLDER = "TEPO_FAULTS_FOLDER"


def run_rank(log: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """For a new process. ``command``: as after ``python -m``."""
    os.setsid()
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(environment)
    sys.argv = list(command)
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def slow_last_word(problem: Problem, response: str) -> float:
    """Lets a fault come in between."""
    time.sleep(0.005)
    return last_word(problem, response)


def _announce(folder: Path, phase: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if (folder / "armed").read_text() == phase:
            (folder / "armed").replace(folder / "reached")


def _announce_phases(folder: Path) -> None:
    from tepo_megatron.run.loop import Loop
    from tepo_megatron.run.rank0 import Rank0

    enter, save = Rank0.phase, Loop.save_if_due

    def phase(self: Rank0, name: str) -> contextlib.AbstractContextManager[None]:
        _announce(folder, name)
        return enter(self, name)

    def save_if_due(self: Loop) -> None:
        if self.rank0 is not None:
            _announce(folder, "save")
        save(self)

    Rank0.phase = phase  # type: ignore[method-assign]
    Loop.save_if_due = save_if_due  # type: ignore[method-assign]


if __name__ == "__main__":
    if under_torchrun():
        _announce_phases(Path(os.environ[FOLDER]))
    else:  # ranks must run this program, too
        torchrun.run_ranks = partial(torchrun.run_ranks, module=MODULE)
    runpy.run_module("tepo_megatron", run_name="__main__")

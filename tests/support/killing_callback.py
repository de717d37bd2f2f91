"""A callback that kills ranks of its own run, so that they die at a known point: between two steps."""

import os
import signal
from collections.abc import Iterable, Mapping
from typing import Any

from tepo_megatron import RunInfo
from tepo_megatron.runtime.heartbeat import RankRecord
from tepo_megatron.runtime.restarts import attempt


class Kills:
    """``at``: (start of the ranks, step, rank), each of which is killed when that start has completed the step."""

    def __init__(self, at: Iterable[tuple[int, int, int]]) -> None:
        self.victims = {(start, step): rank for start, step, rank in at}

    def on_run_begin(self, run: RunInfo) -> None:
        self.status = run.config.output / "status"

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        victim = self.victims.get((attempt(), step))
        for record in RankRecord.read_all(self.status):
            if record.rank == victim:
                os.kill(record.pid, signal.SIGKILL)


def killing(*at: tuple[int, int, int]) -> str:
    """As a setting of the run."""
    return f"train.callbacks=[{{callback: '{__file__}:Kills', kwargs: {{at: {[list(each) for each in at]}}}}}]"

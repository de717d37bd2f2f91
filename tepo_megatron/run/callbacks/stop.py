"""What callbacks know of the run that they are of, and how they end it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tepo_megatron.config import RunConfig


class Stop(Exception):  # noqa: N818
    """Raised by a callback: the run ends after the step under way as after its last one, with a checkpoint and the model.

    Its text is the reason, which the run shows. ``--resume`` goes on from there.
    """


@dataclass(frozen=True)
class RunInfo:
    """A run as it begins, or goes on: ``step`` completed steps, and the rows of metrics so far, oldest first."""

    config: RunConfig
    step: int
    rows: Sequence[Mapping[str, Any]]

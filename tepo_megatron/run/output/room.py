"""The disk space that a run's checkpoints take."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import NamedTuple

from tepo_megatron.config import RunConfig
from tepo_megatron.config.data import BUILTIN
from tepo_megatron.plan.shapes import CHECKPOINT_BYTES, model_parameters
from tepo_megatron.runtime.hub import HUB
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.trainer.checkpoint_folder import checkpoints
from tepo_megatron.weights.architecture import read_model_spec

_BYTES_PER_CHECKPOINT_BYTE = 8
"""A checkpoint's disk space over bf16 model files': 6 for fp32 weights and two moments, 1 for the export; rounded up."""


class Room(NamedTuple):
    """Bytes. ``once`` is the export, where ``per_checkpoint`` lacks it."""

    free: int
    saves: int
    retained: int
    per_checkpoint: int
    once: int = 0

    @property
    def needed(self) -> int:
        return self.per_checkpoint * self.retained + self.once

    @classmethod
    def of(cls, config: RunConfig) -> Room:
        """Raises ValueError if the model's size is unknown."""
        train, lora = config.train, config.model.lora
        # Checkpoints written only by the clock fall on such a step by chance.
        for_good = train.steps // math.lcm(train.keep_every, train.save_every) if train.keep_every and train.save_every else 0
        saves = train.steps if train.save_minutes or not train.save_every else -(-train.steps // train.save_every)
        retained = min(saves, train.keep_checkpoints + for_good + (train.keep_best is not None))
        named, free = config.model.path, _free_for(config.output)
        model = resolve_model_path(named) if named.startswith((BUILTIN, HUB)) else Path(named).expanduser()
        weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        if lora is None:
            return cls(free, saves, retained, weights * _BYTES_PER_CHECKPOINT_BYTE)
        # states of adapters, and one whole export
        return cls(free, saves, retained, CHECKPOINT_BYTES * model_parameters(read_model_spec(model), lora), weights)

    def lack(self, output: Path) -> str:
        """Returns a sentence if there is too little for the checkpoints that ``output`` does not have yet, else nothing."""
        present = len(checkpoints(output / "checkpoints"))
        missing = max(1, min(self.saves, self.retained + 1) - present)  # one more is written before the oldest goes
        needed = self._replace(retained=missing).needed
        if self.free >= needed:
            return ""
        what = f"the next {missing} checkpoints" if missing > 1 else "the next checkpoint"
        return (
            f"{self.free:,} bytes are free for output {output}, and {what} may take {needed:,}; a run that cannot write "
            "one ends: make room, or set output to another disk"
        )


def _free_for(output: Path) -> int:
    folder = output.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free

""":class:`tepo_megatron.trainer.protocol.Checkpoints` for Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tepo_megatron.config import RunConfig
from tepo_megatron.runtime.watch.heartbeat import Heartbeat
from tepo_megatron.trainer.megatron.checkpoint import boxes as checkpoint
from tepo_megatron.trainer.megatron.checkpoint.boxes import bias_boxes, shards_to_save
from tepo_megatron.trainer.megatron.checkpoint.saving import Saving
from tepo_megatron.trainer.megatron.policy.policy import Policy
from tepo_megatron.trainer.megatron.policy.weights import PolicyWeights
from tepo_megatron.trainer.protocol import SavedCheckpoint


@dataclass
class Counters:
    updates: int = 0
    """Skipped steps do not count."""

    updates_skipped: int = 0

    entropy_noise: float = 0.0
    """99th percentile of the last measurement, in nats; 0 before."""


class MegatronCheckpoints:
    """``about``, rank 0's, describes the run."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        weights: PolicyWeights,
        counters: Counters,
        *,
        group: dist.ProcessGroup | None,
        heartbeat: Heartbeat,
        about: Mapping[str, Any],
    ) -> None:
        self._policy, self._weights, self._counters = policy, weights, counters
        self._group, self._heartbeat, self._about = group, heartbeat, about
        # FP8 weights are rounded with scales that depend on how tensors are cut
        self._restores_bits = not config.engine.fp8.params
        self._saving: Saving | None = None
        self.bytes_read = 0
        """Bytes that this rank read in :meth:`load`."""

    def save(self, folder: Path, *, step: int, state: dict[str, Any]) -> Path:
        """Returns the checkpoint's path. Every rank calls."""
        self.begin(folder, step=step, state=state)
        saved = self.finish()
        assert saved is not None
        return saved.path

    def begin(self, folder: Path, *, step: int, state: dict[str, Any], background: bool = False) -> None:
        self.finish()
        self._heartbeat.phase("save")
        weights, rank = self._weights, dist.get_rank()
        self._saving = Saving(
            folder,
            step=step,
            state={**asdict(self._counters), "weights_digest": weights.version(step).digest, **self._about, **state},
            policy=self._policy,
            shards=shards_to_save(weights.trained_sources, weights.split, rank, self._policy),
            biases=bias_boxes(weights.trained_sources, rank, self._policy),
            group=self._group,
            background=background,
        )

    def finish(self, *, wait: bool = True) -> SavedCheckpoint | None:
        saving = self._saving
        if saving is None or not (wait or saving.is_written()):
            return None
        self._saving = None
        return saving.finish()

    def check(self, folder: Path) -> dict[str, Any]:
        return checkpoint.check(folder, self._group)

    def load(self, folder: Path, checked: dict[str, Any] | None = None) -> dict[str, Any]:
        self._heartbeat.phase("load")
        state = self.check(folder) if checked is None else checked
        counters = self._counters
        counters.updates = state["updates"]
        counters.updates_skipped = state.get("updates_skipped", 0)  # absent from older checkpoints
        counters.entropy_noise = state.get("entropy_noise", 0.0)
        self._policy.param_gather.finish()
        self.bytes_read = checkpoint.load(
            folder, policy=self._policy, layout=self._weights.trained_layout, updates=counters.updates
        )
        self._policy.schedule.num_steps = 0
        self._policy.schedule.step(increment=counters.updates)
        if self._restores_bits:
            checkpoint.check_restored(folder, state, self._weights.version(state["step"]).digest)
        return state

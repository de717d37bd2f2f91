"""Whole runs of ``tepo_megatron.train`` in this process, on the reference trainer and sampler: without Megatron and vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tepo_megatron
from tepo_megatron.config.load import load_run
from tepo_megatron.run import rank0
from tepo_megatron.trainer.protocol import trainer_kind
from tests.support.reference_sampler import ReferenceSampler
from tests.support.reference_trainer import make_trainer

ON_REFERENCES = ("engine.parallel={tp: 1, sequence_parallel: false}", "rollout.server.transfer=gather", "log.progress=none")


def train_on_references(config: Path | str, output: Path, *overrides: str, **arguments: Any) -> list[dict[str, Any]]:
    """Returns the rows of metrics. ``arguments`` are those of :func:`tepo_megatron.train`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_kind(), "make_trainer", lambda config, model_dir, **_: make_trainer(config, model_dir))
        patch.setattr(rank0, "make_sampler", ReferenceSampler)
        run = load_run(config, [f"output={output}", *ON_REFERENCES, *overrides])
        return [dict(row) for row in tepo_megatron.train(run, **arguments).rows]

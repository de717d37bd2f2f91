"""What worlds that take one random model after the other have in common; tests and their ranks import it."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.config import RunConfig


def save_random_model(family: str, settings: Mapping[str, Any], out: Path, *, seed: int) -> None:
    """A model of transformers in which no weight is left at 0 or 1, as it leaves biases and norms."""
    import transformers

    torch.manual_seed(seed)
    made = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**settings))
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(0.15 * torch.randn_like(param) + (param.dim() == 1))
    made.save_pretrained(out)


def in_turn(runs: Iterable[dict[str, Any]], one_model: Callable[[dict[str, Any]], Any]) -> None:
    """Does ``one_model``, which returns its engine, for each run; every engine splits the same ranks again."""
    engine: Any = None
    for run in runs:
        if engine is not None:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
        engine = one_model(run)
    engine.close()


def train_in_turn(one_model: Callable[[RunConfig, Path, Path, str | None], Any]) -> None:
    """What a world with the argument CASE.json does: ``one_model(config, rollouts, out, resume)`` for each of its runs."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    case: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())

    def trained(run: dict[str, Any]) -> Any:
        return one_model(RunConfig.model_validate(run["config"]), Path(case["rollouts"]), Path(run["out"]), run["resume"])

    in_turn(case["runs"], trained)

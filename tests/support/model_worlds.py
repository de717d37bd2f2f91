"""What worlds that take one random model after the other have in common; tests and their ranks import it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch


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

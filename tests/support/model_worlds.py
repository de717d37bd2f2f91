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
from tepo_megatron.weights.architecture import is_always_fp32
from tests.support.launch import end_model_parallel


def save_random_model(family: str, settings: Mapping[str, Any], out: Path, *, seed: int) -> None:
    """A model of transformers in which no weight is left at 0 or 1, as it leaves biases and norms."""
    import transformers

    torch.manual_seed(seed)
    made = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**settings))
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(0.15 * torch.randn_like(param) + (param.dim() == 1))
        for name, buffer in made.named_buffers():
            if is_always_fp32(name):
                buffer.copy_(0.05 * torch.randn_like(buffer))  # so that they change the choice
    made.save_pretrained(out)


VOCABULARY = 61

WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "head_dim": 10,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
    },
    "Glm4Moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "attention_bias": True,
        "use_qk_norm": True,
    },
}
"""What each family of models with experts has of its own."""


def save_model_with_experts(family: str, out: Path, *, layers: int) -> None:
    """A random one of ``WITH_EXPERTS``."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    save_random_model(family, {**sizes, **WITH_EXPERTS[family]}, out, seed=len(family))


def in_turn(runs: Iterable[dict[str, Any]], one_model: Callable[[dict[str, Any]], Any]) -> None:
    """Does ``one_model``, which returns its engine, for each run; every engine splits the same ranks again."""
    engine: Any = None
    for run in runs:
        if engine is not None:
            end_model_parallel()
        engine = one_model(run)
    engine.close()


def train_in_turn(one_model: Callable[[RunConfig, Path, Path, str | None], tuple[Any, dict[str, Any]]]) -> None:
    """What a world with the argument CASE.json does: ``one_model(config, rollouts, out, resume)`` for each of its runs, which
    returns its engine and what rank 0 writes to ``out/report.json``."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    case: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())

    def trained(run: dict[str, Any]) -> Any:
        out = Path(run["out"])
        engine, report = one_model(RunConfig.model_validate(run["config"]), Path(case["rollouts"]), out, run["resume"])
        if engine.ranks.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            (out / "report.json").write_text(json.dumps(report))
        return engine

    in_turn(case["runs"], trained)

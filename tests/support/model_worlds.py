"""What worlds that take one random model after the other have in common; tests and their ranks import it."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.weights.architecture import is_always_fp32
from tepo_megatron.weights.geometry import Box
from tepo_megatron.weights.storage.stored import StoredWeights
from tests.support.launch import end_model_parallel
from tests.support.random_models import LLAMA3_ROPE


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

DENSE: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 8, "rope_parameters": LLAMA3_ROPE},
    "Llama-tied": {"tie_word_embeddings": True},
    "Mistral": {"head_dim": 10, "sliding_window": None, "num_key_value_heads": 3},
    "Qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "Qwen2-tied": {"tie_word_embeddings": True, "num_key_value_heads": 3},
    "Qwen3": {"head_dim": 10},
    "Qwen3-tied": {"head_dim": 6, "tie_word_embeddings": True},
}
"""What sets each dense model apart; the family is the name up to the dash."""


def save_model(name: str, out: Path, *, layers: int) -> None:
    """A random one of ``DENSE`` or ``WITH_EXPERTS``."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    if name in DENSE:
        sizes["tie_word_embeddings"] = False
    save_random_model(name.split("-")[0], {**sizes, **{**DENSE, **WITH_EXPERTS}[name]}, out, seed=len(name))


def short_rollouts(*, routes: Callable[[torch.Generator, int], Any] | None = None, prompt: int = 1) -> list[Rollout]:
    """Responses of 1 to 29 tokens, so that data-parallel ranks have micro-batches of different sizes."""
    generator = torch.Generator().manual_seed(3)
    rollouts = []
    for number in range(8):
        length = int(torch.randint(1, 30, (1,), generator=generator))
        ids = torch.randint(0, VOCABULARY, (prompt + length,), generator=generator).tolist()
        recorded = {} if routes is None else {"routed_experts": routes(generator, len(ids))}
        made = (f"p{number}", number, tuple(ids[:prompt]), tuple(ids[prompt:]), (-1.0,) * length, "stop", WeightsVersion(0))
        rollouts.append(Rollout(*made, **recorded))
    return rollouts


def assert_first_moments(checkpoint: Path, gradients: Mapping[str, Tensor], *, norm: Tensor | float | None = None) -> None:
    """After one step Adam's first moment is a tenth of the gradient; to 1e-4 of its norm, or of ``norm``."""
    stored = StoredWeights.open_boxes(checkpoint, "exp_avg")
    assert stored.boxes.keys() == gradients.keys()
    for name, expected in gradients.items():
        moment = torch.empty(expected.shape)
        stored.read(name, Box((0,) * expected.dim(), tuple(expected.shape)), moment)
        assert expected.norm() > 0, f"{name} has no gradient"
        error = (moment.double() / (1 - 0.9) - expected).norm() / (expected.norm() if norm is None else norm)
        assert error < 1e-4, f"{name}: the gradient is off by {error:.1e} of the norm"


def bits_of(tensors: Mapping[str, Tensor]) -> str:
    """A digest of the names and of every bit."""
    digest = hashlib.blake2b()
    for name, tensor in tensors.items():
        digest.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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

"""Every architecture under every split: what Megatron computes is what transformers computes, and it comes back byte for byte.

Every case starts from what ``tepo import`` made of a Hugging Face folder. One torchrun world per number of ranks takes all
splits and models in turn. Sizes divide nothing by chance: 61 tokens of vocabulary, 3 key/value heads where tensor parallelism
allows, a head size that is not hidden size / heads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.sampler.rollout_file import read_rollouts, write_rollouts
from tepo_megatron.trainer.packing import pack
from tepo_megatron.weights.architecture import read_model_spec
from tepo_megatron.weights.geometry import Box
from tepo_megatron.weights.storage.convert import export_model, import_model
from tepo_megatron.weights.storage.stored import StoredWeights
from tepo_megatron.weights.table import tensor_shapes
from tests.support.launch import run_world
from tests.support.model_worlds import save_random_model
from tests.support.random_models import LLAMA3_ROPE

VOCABULARY = 61
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 8, "rope_parameters": LLAMA3_ROPE},
    "Llama-tied": {"tie_word_embeddings": True},
    "Mistral": {"head_dim": 10, "sliding_window": None},
    "Qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "Qwen2-tied": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 10},
    "Qwen3-tied": {"head_dim": 6, "tie_word_embeddings": True},
}
"""What sets each model apart; the family is the name up to the dash."""


@dataclass(frozen=True)
class Split:
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.pp

    @property
    def name(self) -> str:
        return f"tp{self.tp}pp{self.pp}" + ("-sp" if self.sequence_parallel else "")

    @property
    def models(self) -> list[str]:
        """Models and their key/value heads: 3, or 2 where 3 cannot be split; both on the one rank that others are compared
        with.
        """
        heads = [2, 3] if self == SINGLE else [3 if self.tp == 1 else 2]
        return [f"{model}-{kv}kv" for model in MODELS for kv in heads]


SINGLE = Split()
SPLITS = [SINGLE, Split(tp=2), Split(tp=2, sequence_parallel=True), Split(pp=2), Split(tp=2, pp=2)]
CASES = [pytest.param(split, model, id=f"{split.name}-{model}") for split in SPLITS for model in split.models]


def make_model(name: str, out: Path) -> None:
    model, kv = name.rsplit("-", 1)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": int(kv.removesuffix("kv")),
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        **MODELS[model],
    }
    save_random_model(model.split("-")[0], settings, out, seed=len(name))


def make_rollouts(folder: Path) -> None:
    """Sequences of 2 to 30 tokens after prompts of one, so that almost every position is scored."""
    generator = torch.Generator().manual_seed(3)
    rollouts = []
    for number in range(8):
        length = int(torch.randint(1, 30, (1,), generator=generator))
        tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=generator).tolist()
        logprobs = tuple(-1.0 - 0.1 * (token % 7) for token in tokens[1:])
        version, reward = WeightsVersion(0), float(number % 3 == 0)
        rollouts.append(
            Rollout(f"p{number // 4}", number // 4, (tokens[0],), tuple(tokens[1:]), logprobs, "stop", version, reward=reward)
        )
    write_rollouts(folder, 0, rollouts)


class Worlds:
    """Runs all splits of one world size in one world, once, on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batch = pack(read_rollouts(folder / "rollouts", 0))
        self._run_world = cache(self._start)
        self.oracle_logits = cache(self._oracle_logits)

    def run(self, split: Split) -> Path:
        self._run_world(split.world)
        return self.folder / split.name

    @torch.no_grad()
    def _oracle_logits(self, model: str) -> torch.Tensor:
        """What transformers computes in float64 for every token of the packed batch: [T, V]."""
        import transformers

        oracle = transformers.AutoModelForCausalLM.from_pretrained(self.folder / model, dtype=torch.float64)
        batch = self.batch
        return torch.cat([oracle(tokens[None]).logits[0] for tokens in batch.tokens_T.split(batch.lengths_S.tolist())])

    def _start(self, size: int) -> None:
        runs = []
        for split in (split for split in SPLITS if split.world == size):
            for name in split.models:
                out = self.folder / split.name / name
                import_model(self.folder / name, out / "shards", tp=split.tp, pp=split.pp)
                runs.append({"config": self._config(split, name, out), "out": str(out)})
        case = self.folder / f"world-{size}.json"
        case.write_text(json.dumps({"runs": runs, "rollouts": str(self.folder / "rollouts")}))
        run_world("architectures", size, case)

    def _config(self, split: Split, name: str, out: Path) -> dict[str, Any]:
        parallel = {"tp": split.tp, "pp": split.pp, "sequence_parallel": split.sequence_parallel}
        return {
            "model": {"path": str(self.folder / name), "shards": str(out / "shards")},
            "engine": {"parallel": parallel, "micro_batch_tokens": 70},
            "optimizer": {"lr": 1e-3},
            "rollout": {"sampling": {"temperature": 1.0}},
        }


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    folder = tmp_path_factory.mktemp("architectures")
    for name in SINGLE.models:
        make_model(name, folder / name)
    make_rollouts(folder / "rollouts")
    return Worlds(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_bytes(found: Path, expected: Path) -> None:
    ours, theirs = weights(found), weights(expected)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize(("split", "model"), CASES)
def test_logits_are_those_of_transformers(worlds: Worlds, split: Split, model: str) -> None:
    found_TV = load_file(worlds.run(split) / model / "logits.safetensors")["logits"]
    expected_TV = worlds.oracle_logits(model)
    assert found_TV.dtype == torch.float32
    assert expected_TV.std() > 0.1
    torch.testing.assert_close(found_TV.double(), expected_TV, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("split", "model"), CASES)
def test_scores_match_transformers_in_float64(worlds: Worlds, split: Split, model: str) -> None:
    batch = worlds.batch
    found = json.loads((worlds.run(split) / model / "scores.json").read_text())
    logprobs_TV = worlds.oracle_logits(model).log_softmax(-1)
    mask_T = batch.loss_mask_T
    assert mask_T.sum() == batch.num_tokens - batch.num_sequences
    logprob_T = logprobs_TV.gather(1, batch.labels_T[:, None])[:, 0]
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    assert logprob_T.std() > 0.1
    found_logprob_T, found_entropy_T = (torch.tensor(found[key]).double() for key in ("logprobs", "entropy"))
    torch.testing.assert_close(found_logprob_T[mask_T], logprob_T[mask_T], atol=2e-5, rtol=0)
    torch.testing.assert_close(found_entropy_T[mask_T], entropy_T[mask_T], atol=2e-5, rtol=0)


@pytest.mark.parametrize(("split", "model"), CASES)
def test_an_export_of_the_loaded_model_is_the_model(worlds: Worlds, split: Split, model: str) -> None:
    assert_same_bytes(worlds.run(split) / model / "initial", worlds.folder / model)


@pytest.mark.parametrize(("split", "model"), CASES)
def test_an_exported_checkpoint_is_what_the_ranks_would_export(worlds: Worlds, split: Split, model: str) -> None:
    out = worlds.run(split) / model
    export_model(out / "checkpoints" / "step_000001", out / "converted")
    assert_same_bytes(out / "converted", out / "trained")
    assert json.loads((out / "converted" / "config.json").read_text()) == json.loads(
        (out / "trained" / "config.json").read_text()
    )


@pytest.mark.parametrize(("split", "model"), [case for case in CASES if case.values[0] != SINGLE])
def test_gradients_are_those_of_one_rank(worlds: Worlds, split: Split, model: str) -> None:
    """After one step Adam's first moment is the gradient, times a constant."""
    source = worlds.folder / model
    for name, shape in tensor_shapes(read_model_spec(source)).items():
        expected, found = (gradient(worlds.run(run) / model, name, shape) for run in (SINGLE, split))
        assert expected.norm() > 0, f"{name} has no gradient"
        error = (found - expected).norm() / expected.norm()
        assert error < 1e-4, f"{name}: the gradient is off by {error:.1e} of its norm"


def gradient(out: Path, tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
    stored = StoredWeights.open_boxes(out / "checkpoints" / "step_000001", "exp_avg")
    into = torch.empty(shape)
    stored.read(tensor, Box((0,) * len(shape), shape), into)
    return into

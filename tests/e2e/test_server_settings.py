"""Real vLLM servers with another head, in FP8, and with speculative decoding say what the trainer's model says."""

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.run.consistency_checks import Canary, Tolerances
from tepo_megatron.run.weights import make_shard_sender
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tests.contracts.sampler_contract import EOS, VOCABULARY, contract_model
from tests.e2e.test_rollout_server import sync
from tests.support.engines import make_engine
from tests.support.launch import run_dist
from tests.support.programs import FEW_BLOCKS
from tests.support.random_models import greedy_after

TOKEN = 7
PROMPT = [1, *(token for other in range(10, 34, 2) for token in (other, TOKEN))]


def test_logits_are_not_rounded_to_the_models_dtype(tmp_path: Path) -> None:
    """One token has a logit z and all others 0, so that z can be read off its log-prob."""
    model = copy.deepcopy(contract_model(0))
    with torch.no_grad():
        row = 3 * model.lm_head.weight[TOKEN].clone()
        model.lm_head.weight.zero_()[TOKEN] = row
    model.bfloat16().save_pretrained(tmp_path / "model")
    config = ServerConfig(max_model_len=64, max_num_seqs=8, dtype="bfloat16", head_dtype="float32", extra_args=(FEW_BLOCKS,))
    with Fleet(config, model_dir=tmp_path / "model", dtype="bfloat16", stop_token_ids=[EOS], log_dir=tmp_path) as fleet:
        (logprobs,) = fleet.prompt_logprobs(PROMPT).values()
    # p = e^z / (e^z + V − 1)
    logits = torch.tensor(
        [p - math.log(-math.expm1(p)) + math.log(VOCABULARY - 1) for p in logprobs[1::2]], dtype=torch.float64
    )
    apart = (logits - logits.bfloat16().double()).abs()
    assert logits.abs().max() > 1
    assert apart.max() > 1e-5, "rounded"
    assert (apart < 0.1).all()


LIMITS = {"max_model_len": 64, "max_num_seqs": 8, "extra_args": (FEW_BLOCKS,)}
SERVER = {"quantization": "fp8_per_channel", "dtype": "bfloat16", **LIMITS}


def serve(_rank: int, _world: int, out: Path) -> dict[str, Any]:
    """The server's log-probs of the canary prompt as it loaded the model from disk, after an update to other weights by full
    tensors, which vLLM's own loaders take apart, and after updates to the first and the other weights again, from shard to
    shard; and how far the trainer's are from the last.
    """
    config = RunConfig.model_validate({"rollout": {"server": SERVER}, "objective": {"mismatch": {"kind": "truncate"}}})
    model_dir, prompt = resolve_model_path(config.model.path), Canary.prompt(64, 64)
    with Fleet(config.rollout.server, model_dir=model_dir, dtype="float32", stop_token_ids=[2], log_dir=out) as fleet:
        engine = make_engine(config)
        config = engine.config
        sender = make_shard_sender(config, engine.weights)
        torch.manual_seed(0)
        first = {name: param.detach().clone() for name, param in engine.policy.params.items()}
        other = {name: values * (1 + 0.05 * torch.randn(values.shape)) for name, values in first.items()}

        def answer() -> list[float]:
            (logprobs,) = fleet.prompt_logprobs(prompt).values()
            return logprobs

        def become(weights: dict[str, torch.Tensor]) -> None:
            for name, param in engine.policy.params.items():
                param.data.copy_(weights[name])

        report: dict[str, Any] = {"first_from_disk": answer()}
        become(other)
        tensors = (tensor for _, tensor in engine.weights.stream() if tensor is not None)
        fleet.update_weights_from_tensors(engine.weights.version(1), engine.weights.manifest, tensors)
        report["other_by_tensors"] = answer()
        for step, (name, weights) in enumerate({"first": first, "other": other}.items(), start=2):
            become(weights)
            fleet.update_weights_from_shards(engine.weights.version(step), sender)
            report[f"{name}_by_shards"] = answer()
        said = {fleet.addresses[0]: report["other_by_shards"]}
        report["gap"] = Canary(Tolerances.of(config).token).check(3, prompt, engine.prompt_logprobs(prompt), said)
    sender.close()
    return report


def test_shards_are_quantised_as_full_tensors_are_and_the_canary_passes(tmp_path: Path) -> None:
    (said,) = run_dist(1, serve, tmp_path)
    # To the last bit: the same FP8 weights and the same scales, whoever took the tensors apart.
    assert said["first_by_shards"] == said["first_from_disk"]
    assert said["other_by_shards"] == said["other_by_tensors"]
    moved = max(abs(a - b) for a, b in zip(said["first_from_disk"], said["other_by_shards"], strict=True))
    assert moved > 2 * said["gap"]
    assert 0.01 < said["gap"] < 1.0  # far above what float32 shows: it does compute in FP8


REPEATS = (1, 5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6)
NGRAM = {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@torch.no_grad()
def scores(model: torch.nn.Module, response: Sequence[int], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probs of a response's tokens, and of all tokens at their places."""
    logits = model(torch.tensor([[*REPEATS, *response]])).logits[0, len(REPEATS) - 1 : -1].double() / temperature
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0], logprobs


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculative_samples_are_the_models(method: str, tmp_path: Path) -> None:
    """The draft model is the first policy with some noise: it guesses well, and is of no use after the update."""
    first, second = contract_model(0), contract_model(1)
    first.save_pretrained(tmp_path / "model")
    settings = {"max_model_len": 128, "max_num_seqs": 64, "max_restarts": 0, "extra_args": (FEW_BLOCKS,)}
    config = ServerConfig.model_validate({**settings, "speculative": NGRAM})
    if method == "draft_model":
        draft = copy.deepcopy(first)
        with torch.no_grad():
            draft.lm_head.weight.add_(0.02 * torch.randn_like(draft.lm_head.weight))
        draft.save_pretrained(tmp_path / "draft")
        guess = {"num_speculative_tokens": 3, "draft_model": tmp_path / "draft"}
        config = ServerConfig.model_validate({**config.model_dump(), "speculative": guess})
    with Fleet(config, model_dir=tmp_path / "model", dtype="float32", stop_token_ids=[EOS], log_dir=tmp_path) as fleet:
        for model, temperature in ((first, 1.0), (second, 0.6)):
            if model is second:
                sync(fleet, model, WeightsVersion(1))
            (group,) = fleet.generate([REPEATS], n=48, temperature=temperature, max_new_tokens=40, seed=1)
            surplus = variance = 0.0
            for response in group:
                expected, logprobs = scores(model, response.response_ids.tolist(), temperature)
                torch.testing.assert_close(torch.tensor(response.logprobs.tolist()).double(), expected, rtol=0, atol=1e-4)
                probabilities = logprobs.exp()
                mean = (probabilities * logprobs).sum(-1)
                surplus += float((expected - mean).sum())
                variance += float(((probabilities * logprobs**2).sum(-1) - mean**2).sum())
            # The log-prob of a token that is drawn is on average minus the entropy, whatever was drawn before.
            assert abs(surplus) < 4 * variance**0.5
            (greedy,) = fleet.generate([REPEATS], n=1, temperature=0.0, max_new_tokens=16, seed=1)
            assert greedy[0].response_ids.tolist() == greedy_after(model, REPEATS, 16)
    log = (tmp_path / "server-0.log").read_text()
    assert f"method='{method}'" in log

"""A real server that decodes speculatively: tokens and log-probs are the model's, before and after an update."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.sampler.fleet.fleet import Fleet
from tests.contracts.sampler_contract import EOS, contract_model
from tests.e2e.test_rollout_server import sync
from tests.support.random_models import greedy_after

PROMPT = (1, 5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6)
NGRAM = {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@torch.no_grad()
def scores(model: torch.nn.Module, response: Sequence[int], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probs of a response's tokens, and of all tokens at their places."""
    logits = model(torch.tensor([[*PROMPT, *response]])).logits[0, len(PROMPT) - 1 : -1].double() / temperature
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0], logprobs


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculative_samples_are_the_models(method: str, tmp_path: Path) -> None:
    """The draft model is the first policy with some noise: it guesses well, and is of no use after the update."""
    first, second = contract_model(0), contract_model(1)
    first.save_pretrained(tmp_path / "model")
    config = ServerConfig.model_validate({"max_model_len": 128, "max_num_seqs": 64, "max_restarts": 0, "speculative": NGRAM})
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
            (group,) = fleet.generate([PROMPT], n=48, temperature=temperature, max_new_tokens=40, seed=1)
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
            (greedy,) = fleet.generate([PROMPT], n=1, temperature=0.0, max_new_tokens=16, seed=1)
            assert greedy[0].response_ids.tolist() == greedy_after(model, PROMPT, 16)
    log = (tmp_path / "server-0.log").read_text()
    assert f"method='{method}'" in log

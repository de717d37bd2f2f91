"""``rollout.server.head_dtype = float32`` on a real vLLM server in bfloat16."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import torch

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.sampler.fleet.fleet import Fleet
from tests.contracts.sampler_contract import EOS, VOCABULARY, contract_model

TOKEN = 7
PROMPT = [1, *(token for other in range(10, 34, 2) for token in (other, TOKEN))]


def test_logits_are_not_rounded_to_the_models_dtype(tmp_path: Path) -> None:
    """One token has a logit z and all others 0, so that z can be read off its log-prob."""
    model = copy.deepcopy(contract_model(0))
    with torch.no_grad():
        row = 3 * model.lm_head.weight[TOKEN].clone()
        model.lm_head.weight.zero_()[TOKEN] = row
    model.bfloat16().save_pretrained(tmp_path / "model")
    config = ServerConfig(max_model_len=64, max_num_seqs=8, dtype="bfloat16", head_dtype="float32")
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

"""Top-k, top-p, min-p, bad words and stop strings with a real vLLM server: the trainer's log-probs are the sampler's."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from tepo_megatron.config import RunConfig, SamplingConfig
from tepo_megatron.core.rollout import Response, Rollout
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tests.support.dense_scores import dense_logprob_and_entropy
from tests.support.engines import MeanSurprise, make_engine
from tests.support.launch import run_dist
from tests.support.programs import FEW_BLOCKS
from tests.support.random_models import rollouts_of

MODEL = resolve_model_path(RunConfig().model.path)
TOKENIZER = load_tokenizer(MODEL)
PROMPTS = [TOKENIZER.prompt_ids(text) for text in ("37+58=", "10+11=", "99+99=", "5+5=")]
TEMPERATURE = 1.5
VOCABULARY = 64
BAD = "7"
STOP = "=1"

TRUNCATED: Mapping[str, Mapping[str, Any]] = {
    "top_k and top_p": {"top_k": 40, "top_p": 0.9},
    "top_k": {"top_k": 3},
    "top_k and min_p": {"top_k": VOCABULARY, "min_p": 0.05},
    "all of them": {"top_k": 12, "top_p": 0.95, "min_p": 0.01, "bad_words": (BAD,)},
}
ALONE: Mapping[str, Mapping[str, Any]] = {"stop": {"stop": (STOP,)}, "nothing": {}}


Drawn = Mapping[str, list[list[Response]]]
"""Kind of sampling → a group of responses for each prompt."""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    folder = tmp_path_factory.mktemp("truncated")
    config = RunConfig().rollout.server.model_copy(update={"start_timeout_s": 3600.0, "extra_args": (FEW_BLOCKS,)})
    stop_ids = TOKENIZER.eos_ids
    groups: dict[str, list[list[Response]]] = {}
    with Fleet(config, model_dir=MODEL, dtype="float32", stop_token_ids=stop_ids, log_dir=folder, tokenizer=True) as fleet:
        for number, (name, given) in enumerate({**TRUNCATED, **ALONE}.items()):
            sampling = SamplingConfig(temperature=TEMPERATURE, max_new_tokens=20, **given)
            groups[name] = [[] for _ in PROMPTS]
            with fleet.sample_stream(sampling, sampling_mask=sampling.truncates) as stream:
                for at, prompt in enumerate(PROMPTS):
                    stream.submit(at, prompt, seed=100 * number + 10 * at, n=4)
                for at, _, response in stream:
                    groups[name][at].append(response)
        # as an evaluation asks for it: what truncates is of no meaning to greedy decoding
        alone: dict[str, Any] = {"stop": (STOP,), "top_k": 3, "bad_words": (BAD,)}
        groups["greedy"] = fleet.generate(PROMPTS, n=1, temperature=0.0, max_new_tokens=20, seed=0, **alone)
    return groups


def score(_rank: int, _world: int, steps: list[list[Rollout]]) -> dict[str, dict[str, Any]]:
    """Scores the steps among the tokens that could have been drawn, and the first also among all; makes one step on it."""
    reports = {}
    for head in ("logits", "fused"):
        config = {
            "rollout": {"sampling": {"temperature": TEMPERATURE, "top_k": VOCABULARY}},
            "engine": {"head": head, "parallel": {"tp": 2}},
        }
        engine = make_engine(config, MeanSurprise())
        batches = [engine.batch_from_root(step if engine.ranks.rank == 0 else None) for step in steps]
        scored = [engine.score(batch) for batch in batches]
        whole = engine.score(batches[0].with_(sampling_mask_T=None))
        result = engine.update(scored[0])
        reports[head] = {
            "logprobs": [batch.old_logprobs_T[batch.loss_mask_T].numpy() for batch in scored],
            "entropies": [batch.old_entropy_T[batch.loss_mask_T].numpy() for batch in scored],
            "whole": whole.old_logprobs_T[whole.loss_mask_T].numpy(),
            "update": [result.loss, result.grad_norm],
        }
    return reports


@pytest.fixture(scope="module")
def scored(drawn: Drawn) -> Mapping[str, Any]:
    """What the trainer makes of the truncated ones at TP2, with logits and with a fused head."""
    return run_dist(2, score, [rollouts_of(drawn[name], PROMPTS) for name in TRUNCATED])[0]


@pytest.mark.parametrize("head", ["logits", "fused"])
def test_the_trainers_logprobs_are_the_samplers(drawn: Drawn, scored: Mapping[str, Any], head: str) -> None:
    report = scored[head]
    gaps = {}
    for step, name in enumerate(TRUNCATED):
        theirs = np.concatenate([rollout.sampler_logprobs for rollout in rollouts_of(drawn[name], PROMPTS)])
        gaps[name] = float(np.abs(theirs - report["logprobs"][step]).max())
    assert max(gaps.values()) < 1e-4, gaps
    theirs = np.concatenate([rollout.sampler_logprobs for rollout in rollouts_of(drawn["top_k and top_p"], PROMPTS)])
    assert np.abs(theirs - report["whole"]).mean() > 0.01  # so far the kept tokens' share is from 1


def test_loss_and_gradient_are_those_of_the_truncated_distribution(drawn: Drawn, scored: Mapping[str, Any]) -> None:
    """Against transformers, all tokens but the kept ones masked, in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64)
    entropies, total, count = [], torch.zeros((), dtype=torch.float64), 0
    for rollout in rollouts_of(drawn["top_k and top_p"], PROMPTS):
        ids = [*rollout.prompt_ids.tolist(), *rollout.response_ids.tolist()]
        logits, labels = model(torch.tensor([ids])).logits[0, rollout.prompt_ids.size - 1 : -1], rollout.response_ids.tolist()
        assert rollout.sampling_mask is not None
        kept = torch.tensor(rollout.sampling_mask.padded())
        scores = dense_logprob_and_entropy(logits, torch.tensor(labels), temperature=TEMPERATURE, kept_TK=kept)
        total, count = total - scores.logprob.sum(), count + len(labels)
        entropies.append(scores.entropy.detach())
    (total / count).backward()
    norm = torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None]).norm().item()
    for report in scored.values():
        assert report["update"] == pytest.approx([total.item() / count, norm], rel=1e-4)
        np.testing.assert_allclose(report["entropies"][0], torch.cat(entropies).numpy(), atol=1e-4)


def test_bad_words_are_neither_drawn_nor_among_the_tokens_that_could_be(drawn: Drawn) -> None:
    (bad,) = TOKENIZER.encode(BAD)
    elsewhere = np.concatenate([response.response_ids for response in chain(*drawn["top_k and min_p"])])
    assert bad in elsewhere
    for response in chain(*drawn["all of them"], *drawn["greedy"]):
        assert bad not in response.response_ids
    for response in chain(*drawn["all of them"]):
        assert bad not in response.sampling_mask.ids


def test_a_response_ends_with_the_token_that_completes_a_stop_string(drawn: Drawn) -> None:
    ended = 0
    for response in chain(*drawn["stop"], *drawn["greedy"]):
        text, last = TOKENIZER.decode(response.response_ids.tolist()), int(response.response_ids[-1])
        assert response.response_ids.size == response.logprobs.size
        assert response.sampling_mask is None
        assert STOP not in text[:-1]
        if text.endswith(STOP):
            assert response.finish_reason == "stop"
            ended += 1
        else:
            assert (last in TOKENIZER.eos_ids) == (response.finish_reason == "stop")
    assert ended
    assert any(STOP in TOKENIZER.decode(response.response_ids.tolist())[:-1] for response in chain(*drawn["nothing"]))

"""Weights that change in the middle of responses, in a real server: every token is of the version that the record says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tepo_megatron.config.rollout import SamplingConfig, ServerConfig
from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.sampler.fleet.fleet import Fleet
from tests.e2e.test_rollout_server import random_model, sync

TOKENS = 800
PROMPT = (1, 5, 6, 7)


def model_of(seed: int) -> Any:
    """It never ends a response by itself."""
    return random_model(seed, eos=None, positions=2048)


@torch.no_grad()
def forcing(token: int) -> Any:
    """Whatever it reads, it draws this token: nothing is added to embeddings that are all alike."""
    model = model_of(0)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight.fill_(1.0)
    model.lm_head.weight.zero_()
    model.lm_head.weight[token] = 1.0  # a logit of 64, and 0 for the others
    return model


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("in-flight")
    model_of(0).save_pretrained(folder / "model")
    config = ServerConfig(max_model_len=2048, max_num_seqs=8)
    with Fleet(config, model_dir=folder / "model", dtype="float32", stop_token_ids=[], log_dir=folder) as running:
        yield running


def send(fleet: Fleet, model: Any, step: int) -> None:
    sync(fleet, model, WeightsVersion(step, f"{step:x}"))


def sample_while(fleet: Fleet, models: dict[int, Any]) -> list[Response]:
    """Four responses; the models, by their steps, become the servers' one after another while they are drawn."""
    found: list[Any] = []

    def sample() -> None:
        try:
            with fleet.sample_stream(SamplingConfig(max_new_tokens=TOKENS)) as stream:
                stream.submit("a", PROMPT, 3, 4)
                found.extend(response for _, _, response in stream)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=sample)
    thread.start()
    for step, model in models.items():
        before = tokens_held(fleet)
        while tokens_held(fleet) <= before and thread.is_alive():  # until a token is drawn by the version before
            time.sleep(0.001)
        send(fleet, model, step)
    thread.join()
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def tokens_held(fleet: Fleet) -> int:
    """Of the requests that the server has not answered yet. That a request has begun is no token."""
    return json.loads(str(fleet._clients[0].progress()))["tokens"]


def test_every_token_is_of_the_version_that_is_said_to_have_drawn_it(fleet: Fleet) -> None:
    """Weights of step s draw token s and nothing else."""
    send(fleet, forcing(10), 10)
    steps = [10, 11, 12, 13, 14]
    responses = sample_while(fleet, {step: forcing(step) for step in steps[1:]})
    assert len(responses) == 4
    for response in responses:
        assert len(response.response_ids) == TOKENS
        drawn_by = [version.step for _, version in response.versions]
        assert drawn_by in (steps, steps[1:])  # on a busy machine one may begin after the first token of another
        said = [version for _, version in response.versions]
        starts = [start for start, _ in response.versions]
        for at, token in enumerate(response.response_ids.tolist()):
            version = said[max(index for index, start in enumerate(starts) if start <= at)]
            assert version == WeightsVersion(token, f"{token:x}"), at
    assert any(response.versions[0][1].step == 10 for response in responses)


def gap_of_the_last_version(fleet: Fleet, responses: list[Response]) -> float:
    """Between the log-probs of the tokens that the present weights drew, and what they give for the same tokens anew."""
    gap = 0.0
    spanning = [response for response in responses if len(response.versions) == 2]
    assert spanning
    for response in spanning:
        start = response.versions[-1][0]
        assert 0 < start < TOKENS - 1
        (scored,) = fleet.prompt_logprobs([*PROMPT, *response.response_ids.tolist()]).values()
        ours = torch.tensor(scored[len(PROMPT) - 1 + start :])
        gap = max(gap, float((ours - torch.tensor(response.logprobs[start:].tolist())).abs().max()))
    return gap


def test_keys_and_values_are_computed_again_or_kept_as_the_config_says(fleet: Fleet) -> None:
    """Tokens that follow an update are those of the new weights alone, where keys and values are computed again."""
    send(fleet, model_of(1), 20)
    assert gap_of_the_last_version(fleet, sample_while(fleet, {21: model_of(2)})) < 1e-4
    fleet._close_sync()
    fleet._keep_cache = fleet._clients[0].versions_apart = True
    send(fleet, model_of(1), 22)
    assert gap_of_the_last_version(fleet, sample_while(fleet, {23: model_of(2)})) > 1e-2
    # What later requests begin with is never taken from a cache of older weights.
    for through, fresh in fleet.cached_logprobs(list(range(1, 60)) * 5, 8).values():
        assert through == fresh

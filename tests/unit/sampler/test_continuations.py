"""Turns of model and environment become one response: no id is lost, and each knows who wrote it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.rollout import Response, WeightsVersion, token_ids
from tepo_megatron.sampler.sampling import append_observation, join_parts

turn = st.tuples(st.booleans(), st.integers(1, 5), st.integers(0, 2))
"""Whether the model writes it, its number of tokens, and by how many versions the weights are newer than before."""


@given(st.lists(turn, min_size=1, max_size=6), st.booleans())
def test_a_response_of_turns_is_what_each_side_wrote(turns: list[tuple[bool, int, int]], routed: bool) -> None:
    """The record of experts of a turn begins with all that is before it, as servers return it; ``prompt`` is one token."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    spans: list[tuple[int, int]] = []
    drawn_by: list[int] = []  # of the record of experts: a turn's server adds what has no record yet
    weights, response = 0, None
    for own, size, newer in [*turns, (True, 1, 0)]:
        new = list(range(len(ids), len(ids) + size))
        ids += new
        mask += [own] * size
        logprobs += [-0.5 if own else 0.0] * size
        if not own:
            response = append_observation(response, token_ids(new))
            continue
        weights += newer
        if not spans or spans[-1][1] != weights:
            spans.append((len(ids) - size if spans else 0, weights))
        drawn_by += [weights] * (len(ids) - len(drawn_by))
        routes = np.full((len(ids), 1, 1), weights, np.uint8) if routed else None  # of all tokens but the last
        drawn = Response(new, [-0.5] * size, "stop", WeightsVersion(weights), routes)
        response = join_parts(response, drawn)
    assert response is not None
    assert response.response_ids.tolist() == ids
    assert response.logprobs.tolist() == logprobs
    assert (response.loss_mask is None) == all(mask)
    assert (response.loss_mask is None) or response.loss_mask.tolist() == mask
    assert response.model_tokens == sum(mask)
    assert [(at, version.step) for at, version in response.versions] == spans
    assert response.finish_reason == "stop"
    if routed:
        assert response.routed_experts is not None
        assert response.routed_experts[:, 0, 0].tolist() == drawn_by

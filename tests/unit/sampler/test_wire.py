"""Responses of servers, with experts: what arrives is what was sent, turns become one, a wrong answer is refused."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.rollout import Response, SamplingMask, WeightsVersion, token_ids
from tepo_megatron.sampler.sampling import Sample, append_observation, join_parts
from tepo_megatron.sampler.vllm.wire import BadAnswer, head_frame, read_responses, response_frame
from tests.support.faulty_server import answer, response
from tests.support.reshard_models import MOE, small_spec

SPEC = small_spec(architecture="MixtralForCausalLM", num_layers=2, experts=MOE["MixtralForCausalLM"])
"""Each of its two layers chooses two of four experts."""
VERSIONS = [WeightsVersion(8, "a"), WeightsVersion(9, "abc")]


def read(
    experts: Any = None, mask: Any = None, spans: Any = ((0, "8:a"),), *, has_experts: bool = False, has_mask: bool = False
) -> Response:
    stream = [response_frame(0, [4, 5], [-0.5, -0.25], "stop", spans, experts, mask), head_frame({"end": 1})]
    options: dict[str, Any] = {"prompt_tokens": 2, "vocab_size": 16, "sampling_mask": has_mask}
    routed = SPEC if has_experts else None
    return dict(read_responses(stream, {0: Sample(0, 0, 4)}, lambda: VERSIONS, routed=routed, **options))[0]


def responses(pieces: Iterable[bytes], sizes: Sequence[int]) -> list[tuple[int, list[int], list[float]]]:
    asked = {index: Sample(index, 0, size) for index, size in enumerate(sizes)}
    result = read_responses(pieces, asked, lambda: [WeightsVersion(0)])
    return [(index, one.response_ids.tolist(), one.logprobs.tolist()) for index, one in result]


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), data=st.data())
def test_what_arrives_is_what_was_sent_in_any_pieces_and_a_cut_stream_is_a_wrong_answer(
    sizes: list[int], data: st.DataObject
) -> None:
    sent = [response(index, [index] * size, [-0.5 * index] * size) for index, size in enumerate(sizes)]
    stream = answer(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in pairwise([0, *cuts, len(stream)])]
    assert responses(pieces, sizes) == [(sample["sample"], sample["ids"], sample["logprobs"]) for sample in sent]
    with pytest.raises(BadAnswer, match=r"stopped after \d responses"):
        responses([stream[: data.draw(st.integers(0, len(stream) - 1))]], sizes)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": []}, "0 log-probs for 2 response tokens"),
        ({"logprobs": [-1.0]}, "1 log-probs for 2 response tokens"),
        ({"ids": [3]}, "2 log-probs for 1 response tokens"),
        ({"ids": [], "logprobs": []}, "a response of 0 tokens"),
        ({"ids": [3] * 9, "logprobs": [-1.0] * 9}, "a response of 9 tokens"),
        ({"logprobs": [-0.5, NAN]}, "log-prob of response token 1 is nan"),
        ({"logprobs": [-0.5, -INF]}, "log-prob of response token 1 is -inf"),
        ({"logprobs": [-0.5, 0.5]}, "log-prob of response token 1 is 0.5"),
        ({"ids": [16, 2]}, "token 16 is not one of"),
        ({"ids": [-1, 2]}, "token -1 is not one of"),
        ({"sample": 5}, "sample 5, which was not asked for"),
        ({"versions": [[]]}, "something else than responses"),
        ({"finish_reason": "abort"}, "finish_reason = 'abort'"),
    ],
)
def test_a_response_that_cannot_be_right_is_a_wrong_answer(changes: dict[str, Any], message: str) -> None:
    pieces = [answer([response(0, [3, 2], [-0.5, -1.0]) | changes])]
    with pytest.raises(BadAnswer, match=message):
        list(read_responses(pieces, {0: Sample(0, 0, 4)}, lambda: [WeightsVersion(0)], vocab_size=16))


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b'{"choices": [', "something else than responses"),
        (head_frame({"object": "error"}), "sample None, which was not asked for"),
        (head_frame([1, 2]), "something else than responses"),  # type: ignore[arg-type]
        *(
            (head_frame({"sample": 0, "arrays": arrays}), "something else than responses")
            for arrays in (
                "two",
                *({"routes": ["|u1", sizes]} for sizes in ([1, -2, 3], [2**20, 2**10, 2**10], "1", [1, 2, True])),
                *({"ids": ["<i4", sizes]} for sizes in ([-1], 1, [True], [2**40])),
                {"ids": ["<i8", [1]]},
                {"others": [1]},
                {"more": ["<i4", [1]]},
            )
        ),
        (answer([response(0, [3], [-1.0])] * 2), "returned the response to sample 0 again"),
    ],
)
def test_what_is_no_stream_of_responses_is_a_wrong_answer(stream: bytes, message: str) -> None:
    with pytest.raises(BadAnswer, match=message):
        responses([stream], [4])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_records_that_fit_are_read_as_the_model_has_them(dtype: Any) -> None:
    sent = np.arange(12).reshape(3, 2, 2) % 4
    result = read(sent.astype(dtype), ([1, 2], [7, 4, 15]), has_experts=True, has_mask=True)
    assert result.sampling_mask == SamplingMask([1, 2], [7, 4, 15])
    assert result.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(result.routed_experts, sent)


SPANS = ((0, "8:a"), (1, "9:abc"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": None}, "without the experts that its tokens passed"),
        ({"experts": np.zeros((4, 2, 2), np.uint8)}, "4 × 2 × 2, and 4 tokens of this model make 3 × 2 × 2"),
        ({"experts": np.full((3, 2, 2), 4, np.uint8)}, "with expert 4, and this model has 4"),
        ({"mask": None}, "without the tokens that could have been drawn"),
        ({"mask": ([1, 1], [7])}, "a sampling mask of 2 tokens beside those that were drawn names 1"),
        ({"mask": ([1, 0], [16])}, "token 16 is not one of the model's 16"),
        ({"mask": ([1, 1], [7, 5])}, "names a drawn token beside itself"),
        ({"spans": [(1, "8:a")]}, r"change at response tokens \[1\]"),
        ({"spans": [(0, "8:a"), (0, "9:abc")]}, r"change at response tokens \[0, 0\]"),
        ({"spans": [(0, "8:a"), (2, "9:abc")]}, r"change at response tokens \[0, 2\]"),
        ({"spans": [(0, "8:a"), (True, "9:abc")]}, "something else than responses"),
        ({"spans": [(0, "9:abc"), (1, "8:a")]}, "older weights drew tokens after newer ones: 9:abc, 8:a"),
        ({"spans": [(0, "9:abd")]}, r"with weights 9:abd, but this run gave it 8:a and 9:abc"),  # others of the same step
        ({"spans": [(0, "9:abc"), (1, "10:f")]}, "with weights 10:f and 9:abc, but"),  # updated meanwhile
        ({"spans": [(0, "default")]}, "with weights default, but"),  # started again behind our back
        ({"spans": []}, "with weights of no version, but"),
    ],
)
def test_experts_masks_and_versions_that_do_not_fit_are_a_wrong_answer(changes: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"spans": SPANS}
    right |= {"experts": np.zeros((3, 2, 2), np.uint8)} if "experts" in changes else {}
    right |= {"mask": ([1, 0], [7])} if "mask" in changes else {}
    options = {"has_experts": "experts" in changes, "has_mask": "mask" in changes}
    assert read(**right, **options).versions == ((0, VERSIONS[0]), (1, VERSIONS[1]))
    with pytest.raises(BadAnswer, match=message):
        read(**(right | changes), **options)


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
    assert response.response_ids.tolist() == ids
    assert response.logprobs.tolist() == logprobs
    assert (response.loss_mask is None) == all(mask)
    assert (response.loss_mask is None) or response.loss_mask.tolist() == mask
    assert response.model_tokens == sum(mask)
    assert [(at, version.step) for at, version in response.versions] == spans
    assert response.finish_reason == "stop"
    if routed:
        assert response.routed_experts[:, 0, 0].tolist() == drawn_by

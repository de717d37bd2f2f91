"""Routes in the frames of responses: what arrives is what was sent, and what does not fit the model is a wrong answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.sampler.sampling import join_parts
from tepo_megatron.sampler.vllm.client.answers import BadAnswer, Routed, read_response
from tepo_megatron.sampler.vllm.wire import BadFrame, Frame, FrameReader, head_frame, response_frame
from tepo_megatron.weights.architecture import model_spec

SPEC = model_spec(
    {
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 16,
        "num_local_experts": 4,
    },
    "test",
)
VERSION = WeightsVersion(3, "ab")

sizes = array_shapes(min_dims=3, max_dims=3, min_side=0, max_side=5)
routes = st.none() | arrays(st.sampled_from([np.uint8, np.uint16]), sizes)


def frame(routed: Any) -> Frame:
    sent = response_frame(0, [4, 5], [-0.5, -0.25], "stop", [(0, "3:ab")], routed)
    (found,) = FrameReader().feed(sent)
    return found


def read(routed: Any) -> Response | None:
    where = Routed(SPEC, before=2)
    return read_response(frame(routed), max_new_tokens=4, vocab_size=16, labels={"3:ab": VERSION}, part=False, routed=where)


@given(sent=st.lists(routes, min_size=1, max_size=3), piece=st.integers(1, 50))
def test_what_arrives_is_what_was_sent_in_any_pieces(sent: list[Any], piece: int) -> None:
    data = b"".join(response_frame(at, [1, 2], [-1.0, -2.0], "stop", [], each) for at, each in enumerate(sent))
    reader = FrameReader()
    found = [each for at in range(0, len(data), piece) for each in reader.feed(data[at : at + piece])]
    assert [each.head["sample"] for each in found] == list(range(len(sent)))
    for each, expected in zip(found, sent, strict=True):
        assert (each.ids.tolist(), each.logprobs.tolist()) == ([1, 2], [-1.0, -2.0])
        if expected is None:
            assert each.routes is None
        else:
            assert each.routes is not None
            assert each.routes.dtype == expected.dtype
            np.testing.assert_array_equal(each.routes, expected)


@pytest.mark.parametrize("given", [[1, 2, 3], [1, 2, 3, 4], [1, -2, 3, 1], [2**20, 2**10, 2**10, 1], "1", [1, 2, True, 1]])
def test_sizes_that_are_none_are_no_frame(given: Any) -> None:
    with pytest.raises(BadFrame):
        list(FrameReader().feed(head_frame({"sample": 0, "routes": given})))


def test_a_record_that_fits_is_read_as_the_model_has_it() -> None:
    sent = np.arange(12).reshape(3, 2, 2) % 4
    for dtype in (np.uint8, np.uint16):
        found = read(sent.astype(dtype))
        assert found is not None
        assert found.routed_experts is not None
        assert found.routed_experts.dtype == np.uint8
        np.testing.assert_array_equal(found.routed_experts, sent)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (None, "without the experts that its tokens passed"),
        (np.zeros((4, 2, 2), np.uint8), "4 × 2 × 2, and 4 tokens of this model make 3 × 2 × 2"),
        (np.full((3, 2, 2), 4, np.uint8), "with expert 4, and this model has 4"),
    ],
)
def test_a_record_that_does_not_fit_is_a_wrong_answer(sent: Any, message: str) -> None:
    with pytest.raises(BadAnswer, match=message):
        read(sent)


def test_behind_a_part_the_record_is_that_of_when_each_token_was_drawn() -> None:
    part = Response([7], [-1.0], "abort", VERSION, np.full((2, 2, 2), 1, np.uint8))
    rest = Response([8, 9], [-1.0, -1.0], "stop", VERSION, np.full((4, 2, 2), 2, np.uint8))
    routes = join_parts(part, rest).routed_experts
    assert routes is not None
    assert routes[:, 0, 0].tolist() == [1, 1, 2, 2]

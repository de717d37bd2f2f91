"""Frames of responses, with experts and sampling masks: what arrives is what was sent, and a wrong answer is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from tepo_megatron.core.rollout import Response, SamplingMask, WeightsVersion
from tepo_megatron.sampler.vllm.wire import BadAnswer, head_frame, read_frames, read_response, response_frame, split_frames
from tepo_megatron.weights.architecture import model_spec
from tests.support.samples import answer, response

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
VERSIONS = {"8:a": WeightsVersion(8, "a"), "9:abc": WeightsVersion(9, "abc")}

sizes = array_shapes(min_dims=3, max_dims=3, min_side=0, max_side=5)
routes = st.none() | arrays(st.sampled_from([np.uint8, np.uint16]), sizes)
masks = st.none() | st.lists(st.integers(0, 15), max_size=3)


def read(
    experts: Any = None, mask: Any = None, spans: Any = ((0, "8:a"),), *, has_experts: bool = False, has_mask: bool = False
) -> Response | None:
    (frame,) = split_frames([response_frame(0, [4, 5], [-0.5, -0.25], "stop", spans, experts, mask)])
    routed = (SPEC, 2) if has_experts else None
    return read_response(
        frame, max_new_tokens=4, vocab_size=16, labels=VERSIONS, part=False, routed=routed, sampling_mask=has_mask
    )


@given(sent=st.lists(st.tuples(routes, masks), min_size=1, max_size=3), size=st.integers(1, 50))
def test_what_arrives_is_what_was_sent_in_any_pieces(sent: list[tuple[Any, Any]], size: int) -> None:
    data = b"".join(
        response_frame(index, [1], [-1.0], "stop", [], experts, None if mask is None else ([len(mask)], mask))
        for index, (experts, mask) in enumerate(sent)
    )
    frames = list(split_frames(data[start : start + size] for start in range(0, len(data), size)))
    assert [frame.head["sample"] for frame in frames] == list(range(len(sent)))
    for frame, (experts, mask) in zip(frames, sent, strict=True):
        assert (frame.ids.tolist(), frame.logprobs.tolist()) == ([1], [-1.0])
        assert (frame.mask and [part.tolist() for part in frame.mask]) == (None if mask is None else [[len(mask)], mask])
        assert (frame.routes is None) == (experts is None)
        if frame.routes is not None:
            assert frame.routes.dtype == experts.dtype
            np.testing.assert_array_equal(frame.routes, experts)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), data=st.data())
def test_a_cut_stream_is_a_wrong_answer(sizes: list[int], data: st.DataObject) -> None:
    sent = [response(index, [index] * size, [-0.5 * index] * size) for index, size in enumerate(sizes)]
    stream = answer(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    frames = list(read_frames((stream[a:b] for a, b in pairwise([0, *cuts, len(stream)])), range(len(sizes))))
    assert [(frame.head["sample"], frame.ids.tolist(), frame.logprobs.tolist()) for frame in frames] == [
        (sample["sample"], sample["ids"], sample["logprobs"]) for sample in sent
    ]
    with pytest.raises(BadAnswer):
        list(read_frames([stream[: data.draw(st.integers(0, len(stream) - 1))]], range(len(sizes))))


@pytest.mark.parametrize(
    "head",
    [
        *(
            {"routes": sizes}
            for sizes in ([1, 2, 3], [1, 2, 3, 4], [1, -2, 3, 1], [2**20, 2**10, 2**10, 1], "1", [1, 2, True, 1])
        ),
        *({"tokens": 1, "kept": size} for size in (-1, "1", True, 2**40)),
    ],
)
def test_impossible_sizes_are_no_frame(head: dict[str, Any]) -> None:
    with pytest.raises(BadAnswer):
        list(split_frames([head_frame({"sample": 0, **head})]))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_records_that_fit_are_read_as_the_model_has_them(dtype: Any) -> None:
    sent = np.arange(12).reshape(3, 2, 2) % 4
    result = read(sent.astype(dtype), ([1, 2], [7, 4, 15]), has_experts=True, has_mask=True)
    assert result is not None
    assert result.sampling_mask == SamplingMask([1, 2], [7, 4, 15])
    assert result.routed_experts is not None
    assert result.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(result.routed_experts, sent)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (None, "without the experts that its tokens passed"),
        (np.zeros((4, 2, 2), np.uint8), "4 × 2 × 2, and 4 tokens of this model make 3 × 2 × 2"),
        (np.full((3, 2, 2), 4, np.uint8), "with expert 4, and this model has 4"),
    ],
)
def test_experts_that_do_not_fit_are_a_wrong_answer(experts: Any, message: str) -> None:
    with pytest.raises(BadAnswer, match=message):
        read(experts, has_experts=True)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (None, "without the tokens that could have been drawn"),
        (([1, 1], [7]), "a sampling mask of 2 tokens beside those that were drawn names 1"),
        (([1, 0], [16]), "returned 16 at position 0, which is no token of the vocabulary of 16"),
        (([1, 1], [7, 5]), "names a drawn token beside itself"),
    ],
)
def test_a_mask_that_cannot_be_right_is_a_wrong_answer(mask: Any, message: str) -> None:
    with pytest.raises(BadAnswer, match=message):
        read(mask=mask, has_mask=True)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(1, "8:a")], r"change at the tokens \[1\] of 2"),
        ([(0, "8:a"), (0, "9:abc")], r"change at the tokens \[0, 0\] of 2"),
        ([(0, "8:a"), (2, "9:abc")], r"change at the tokens \[0, 2\] of 2"),
        ([(0, "8:a"), (True, "9:abc")], "which is no order"),
        ([(0, "9:abc"), (1, "8:a")], "older weights drew tokens after newer ones: 9:abc, 8:a"),
    ],
)
def test_spans_of_versions_follow_each_other(spans: list[tuple[int, str]], message: str) -> None:
    result = read(spans=[(0, "8:a"), (1, "9:abc")])
    assert result is not None
    assert result.versions == ((0, VERSIONS["8:a"]), (1, VERSIONS["9:abc"]))
    with pytest.raises(BadAnswer, match=message):
        read(spans=spans)

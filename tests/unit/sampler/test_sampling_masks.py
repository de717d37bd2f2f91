"""Which tokens could have been drawn, from vLLM's log-probs to responses of several parts; records: test_rollout_file.py."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tepo_megatron.config import SamplingConfig
from tepo_megatron.core.rollout import NO_TOKEN, Response, SamplingMask, WeightsVersion, token_ids
from tepo_megatron.sampler.sampling import Sample, Sampling, append_observation, join_parts
from tepo_megatron.sampler.vllm.plugin.middleware import Middleware
from tepo_megatron.sampler.vllm.wire import SAMPLES, read_responses
from tests.unit.sampler.conftest import ask

VERSION = WeightsVersion(3, "ab")
NEVER = -np.inf


class Engine:
    """As vLLM's, of a vocabulary of ``others`` tokens, so that no more are named."""

    def __init__(self, token_ids: list[int], logprobs: list[float], others: int) -> None:
        self.model_config = SimpleNamespace(get_vocab_size=lambda: others)
        drawn = {"token_ids": token_ids[:: 1 + others], "finish_reason": "stop", "routed_experts": None}
        named = SimpleNamespace(token_ids=token_ids, logprobs=logprobs)
        versions = [SimpleNamespace(start=0, version="3:ab")]
        self.output = SimpleNamespace(outputs=[SimpleNamespace(**drawn, logprobs=named, weight_versions=versions)])

    async def generate(self, _prompt: Any, parameters: Any, *_arguments: Any, **_options: Any) -> AsyncIterator[Any]:
        self.parameters = parameters
        yield self.output


def served(engine: Engine, middleware: Middleware, *, sampling_mask: bool, **sampling: Any) -> Response:
    pytest.importorskip("vllm")
    sample = {"sample": 0, "seed": 1, "max_tokens": 4}
    body = {"id": "a", "prompt": [1], "sampling": {"top_k": 3, **sampling}, "samples": [sample], "sampling_mask": sampling_mask}
    state = SimpleNamespace(engine_client=engine)
    status, content = ask(middleware, SAMPLES, json.dumps(body).encode(), state=state)
    assert status == 200
    return dict(read_responses([content], {0: Sample(0, 1, 4)}, lambda: [VERSION], sampling_mask=sampling_mask))[0]


def test_those_of_vllms_likeliest_tokens_that_could_be_drawn_are_kept(middleware: Middleware) -> None:
    # the drawn token is the likeliest; is not; is all that there is; is none of the likeliest, which a tie has crowded out
    ids = [4, 4, 6, 7, 6, 7, 6, 4, 5, 5, 1, 2, 9, 7, 6, 4]
    logprobs = [-0.1, -0.1, -3.0, NEVER, -1.5, -0.5, -1.5, -2.5, 0.0, 0.0, NEVER, -1e31, -2.0, -1.0, -2.0, -2.0]
    response = served(Engine(ids, logprobs, 3), middleware, sampling_mask=True)
    assert response == Response(
        [4, 6, 5, 9], [-0.1, -1.5, 0.0, -2.0], "stop", VERSION, sampling_mask=SamplingMask([1, 2, 0, 3], [6, 7, 4, 7, 6, 4])
    )
    plain = served(Engine([4, 5], [-1.0, -2.0], 0), middleware, sampling_mask=False)
    assert plain == Response([4, 5], [-1.0, -2.0], "stop", VERSION)


def test_joined_parts_have_the_mask_of_both_and_an_environments_tokens_were_drawn_from_nothing() -> None:
    first = Response([8], [-1.0], "abort", VERSION, sampling_mask=SamplingMask([1], [3]))
    rest = Response([8, 9], [-1.0, -1.0], "stop", VERSION, sampling_mask=SamplingMask([0, 2], [1, 2]))
    assert join_parts(first, rest).sampling_mask == SamplingMask([1, 0, 2], [3, 1, 2])
    assert join_parts(first, replace(rest, sampling_mask=None)).sampling_mask is None
    part = append_observation(join_parts(append_observation(None, token_ids([9])), first), token_ids([5, 6]))
    assert part.sampling_mask == SamplingMask([0, 1, 0, 0], [3])
    assert join_parts(part, rest).sampling_mask == SamplingMask([0, 1, 0, 0, 0, 2], [3, 1, 2])
    assert append_observation(replace(first, sampling_mask=None), token_ids([5])).sampling_mask is None


def test_a_server_is_asked_for_what_is_not_as_by_default_under_vllms_names() -> None:
    plain = Sampling.of(SamplingConfig(temperature=0.5), (2,))
    assert plain == Sampling(0.5, 512, (2,))
    assert plain.parameters() == {"temperature": 0.5, "stop_token_ids": [2]}
    settings = SamplingConfig(top_p=0.9, top_k=20, min_p=0.1, stop=("\n",), bad_words=("a", "b"))
    asked = Sampling.of(settings, (), sampling_mask=True)
    assert asked.sampling_mask
    assert asked.parameters() == {
        "temperature": 1.0,
        "stop_token_ids": [],
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "stop": ("\n",),
        "bad_words": ("a", "b"),
    }


def test_a_stop_string_that_is_a_special_token_is_found(middleware: Middleware) -> None:
    tokens = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokens.add_special_tokens(["<end>"])
    served(engine := Engine([4], [-1.0], 0), middleware, sampling_mask=False, stop=["<end>"])
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    request: Any = SimpleNamespace(request_id="a", prompt_token_ids=[0], sampling_params=engine.parameters)
    text = IncrementalDetokenizer.from_new_request(PreTrainedTokenizerFast(tokenizer_object=tokens), request)
    assert text.update([1], False) is None
    assert text.update([2], False) == "<end>"


Others = list[list[int]]


def mask_of(others: Others) -> SamplingMask:
    return SamplingMask([len(ids) for ids in others], [token for ids in others for token in ids])


def lists_of(mask: SamplingMask) -> Others:
    return [[int(token) for token in row if token != NO_TOKEN] for row in mask.padded()]


@given(st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), max_size=6)), st.data())
def test_joined_masks_are_their_tokens_at_places_that_may_repeat_in_any_order(parts: list[Others], data: st.DataObject) -> None:
    whole = [ids for part in parts for ids in part]
    joined = SamplingMask.joined(map(mask_of, parts))
    assert joined == mask_of(whole) != mask_of([*whole, [1]])
    assert hash(joined) == hash(mask_of(whole))
    assert lists_of(joined) == whole
    assert joined.padded().shape == (len(joined), max(map(len, whole), default=0))
    assert len(joined) == len(whole)
    places = data.draw(st.lists(st.sampled_from(range(len(whole))))) if whole else []
    assert lists_of(joined[np.array(places, np.int64)]) == [whole[index] for index in places]


@pytest.mark.parametrize(("counts", "ids"), [([2], [1]), ([-1, 1], []), ([1, 1], [1, 2, 3]), ([[1]], [1])])
def test_counts_and_ids_that_do_not_fit_are_refused(counts: list[int], ids: list[int]) -> None:
    with pytest.raises(ValueError, match="a sampling mask of"):
        SamplingMask(counts, ids)

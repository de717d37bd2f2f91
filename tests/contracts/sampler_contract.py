"""What every sampler keeps (``sampler/protocol.py``), as checks that take one: a second sampler passes these, too.

It serves ``contract_model(0)`` in float32 from a folder that ``write_model`` makes, with the stop token ``EOS`` and room for
``MAX_LENGTH`` tokens, and takes full tensors. The oracle is transformers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tepo_megatron.core.rollout import TOP_TOKEN, Response, WeightsVersion
from tepo_megatron.sampler.protocol import NO_SERVERS, Sampler, SampleStream, Scores
from tepo_megatron.sampler.sampling import Sampling, prompt_seed
from tests.contracts.naming import have_members, naming_members, refused

EOS, VOCABULARY, MAX_LENGTH = 2, 64, 256
PROMPTS = [(1, 5, 6, 7), (1, 9), (1, 30, 31, 32, 33, 34, 35), (1, 5, 6, 7)]
LONG = 180
"""Tokens of a response that is still being drawn when another one has ended after ``SHORT``."""
SHORT = 3
ATTEMPTS = 10
"""On a busy machine a response may end before this process notices that another one has."""
TOLERANCE = 1e-3
"""Nats, in float32."""

CHECKS: dict[str, Callable[[Sampler], None]] = {}
"""Name → check. The name begins with the member of the protocol at fault. Those that stop the sampler come last."""

_steps = count(1)


def check(name: str) -> Callable[[Callable[[Sampler], None]], Callable[[Sampler], None]]:
    def register(function: Callable[[Sampler], None]) -> Callable[[Sampler], None]:
        CHECKS[name] = naming_members(function, name.partition(":")[0])
        return function

    return register


def contract_failures(sampler: Sampler, names: Iterable[str] = CHECKS) -> dict[str, str]:
    """Name → error of every check that a started sampler fails."""
    failures = {}
    for name in names:
        try:
            CHECKS[name](sampler)
        except AssertionError as error:
            failures[name] = str(error)
    return failures


@cache
def contract_model(seed: int) -> Any:
    """A Llama of 0.2 M parameters, with next-token distributions that are neither flat nor sharp."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=MAX_LENGTH, tie_word_embeddings=False,
        initializer_range=0.12, bos_token_id=1, eos_token_id=EOS, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def write_model(folder: Path) -> Path:
    contract_model(0).save_pretrained(folder)
    return folder


def send(sampler: Sampler, seed: int) -> WeightsVersion:
    step = next(_steps)
    version, weights = WeightsVersion(step, f"{step:x}"), contract_model(seed).state_dict()
    sampler.update_weights_from_tensors(version, manifest(weights), iter(weights.values()))
    return version


def manifest(weights: dict[str, Tensor]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in weights.items()]


@torch.no_grad()
def oracle_logits(seed: int, ids: Sequence[int]) -> Tensor:
    logits: Tensor = contract_model(seed)(torch.tensor([list(ids)])).logits[0]
    return logits


def text_logprobs(seed: int, ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probs of every token but the first, in one forward pass."""
    logprobs = (oracle_logits(seed, ids)[:-1] / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def oracle_logprobs(seed: int, prompt: Sequence[int], response: Response, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of the response's tokens."""
    return text_logprobs(seed, [*prompt, *response.response_ids.tolist()], temperature)[len(prompt) - 1 :]


def tokens(groups: Sequence[Sequence[Response]]) -> list[list[list[int]]]:
    return [[response.response_ids.tolist() for response in group] for group in groups]


def assert_close(member: str, ours: Any, theirs: Any) -> None:
    gap = float(np.abs(np.asarray(ours) - np.asarray(theirs)).max())
    assert gap < TOLERANCE, f"{member}: log-probs are {gap:.3g} nats off"


MEMBERS, CALLS, STOP = "Sampler: its members", "Sampler: every member answers", "stop: for good"
"""The checks that name a member that is missing, or raises."""
DEFAULTS = ("generate", "describe", "__enter__", "__exit__")


@check(MEMBERS)
def members(sampler: Sampler) -> None:
    have_members(sampler, Sampler, defaults=DEFAULTS)
    have_members(sampler.sample_stream(Sampling(1.0, 1)), SampleStream, defaults=DEFAULTS)


def returned(member: str, value: Any, kind: type) -> None:
    assert isinstance(value, kind), f"{member}: {value!r}, not a {kind.__name__}"


@check(CALLS)
def calls(sampler: Sampler) -> None:
    send(sampler, 0)
    made: Any = sampler.sample_stream(Sampling(1.0, 2))
    assert made is not None, "sample_stream: None"
    with made as stream:
        assert stream is made, "SampleStream.__enter__: not the stream"
        returned("SampleStream.weights_version", stream.weights_version, WeightsVersion)
        stream.submit("a", PROMPTS[0], 1, home="home")
        returned("SampleStream.unfinished", stream.unfinished, int)
        assert stream.unfinished == 1, "submit: one sample was submitted, and another number is unfinished"
        assert stream.next(None) is not None, "next: None although a sample is unfinished"
        stream.leave("home")
        refused("submit", TypeError, lambda: made.submit("b", PROMPTS[0], 1, rooms=2))
        stream.submit("b", PROMPTS[0], 1)
        responses: Any = stream.__iter__()
        assert responses is not None, "SampleStream.__iter__: None"
        assert len(list(responses)) == 1, "SampleStream.__iter__: not the responses"
        returned("abort", stream.abort(), list)
    returned("generate", sampler.generate(PROMPTS[:1], n=1, temperature=1.0, max_new_tokens=2, seed=0), list)
    returned("weights_version", sampler.weights_version, WeightsVersion)
    returned("addresses", sampler.addresses, list)
    returned("describe", sampler.describe(), list)
    returned("figures", sampler.figures(), dict)
    returned("prompt_logprobs", sampler.prompt_logprobs(PROMPTS[0]), dict)
    returned("score", sampler.score(PROMPTS[0], 2), Scores)
    returned("read_through_cache", sampler.read_through_cache(PROMPTS[0], 2), dict)
    returned("read_back", sampler.read_back(), dict)
    assert not any(result.changed for result in sampler.read_back().values()), (
        "read_back: the weights have changed by themselves"
    )
    sampler.sleep()
    send(sampler, 0)
    sampler.wake_up()
    returned("revive", sampler.revive(), bool)
    send(sampler, 0)
    sampler.wake_up()


@check("generate: the same seed draws the same tokens")
def seeds(sampler: Sampler) -> None:
    send(sampler, 0)

    def draw(prompts: Sequence[Sequence[int]], seed: int, numbers: Sequence[int] | None = None) -> list[list[list[int]]]:
        return tokens(sampler.generate(prompts, n=4, temperature=1.0, max_new_tokens=16, seed=seed, numbers=numbers))

    first = draw(PROMPTS, 7)
    assert draw(PROMPTS, 7) == first, "generate: the same seed draws other tokens"
    assert draw(PROMPTS, 8) != first, "generate: another seed draws the same tokens"
    assert all(group[0] != group[1] for group in first), "generate: two samples of a group are the same draw"
    assert first[0] != first[3], "generate: two groups of the same prompt are the same draw"
    assert draw(PROMPTS[::-1], 7, [3, 2, 1, 0])[::-1] == first, "generate: tokens depend on more than seed and number"


@check("sample_stream: sample j has the seed + j")
def sample_seeds(sampler: Sampler) -> None:
    send(sampler, 0)
    with sampler.sample_stream(Sampling(1.0, 16)) as stream:
        stream.submit("group", PROMPTS[0], 70, 3)
        stream.submit("alone", PROMPTS[0], 72)
        stream.submit("only", PROMPTS[0], 70, 3, only=[1])
        drawn = {(key, index): response.response_ids.tolist() for key, index, response in stream}
    assert set(drawn) == {("group", 0), ("group", 1), ("group", 2), ("alone", 0), ("only", 1)}, "submit: other samples"
    assert drawn["group", 2] == drawn["alone", 0], "submit: sample 2 of seed 70 is not sample 0 of seed 72"
    assert drawn["group", 1] == drawn["only", 1], "submit: `only` changes the draw"
    ((response,),) = sampler.generate([PROMPTS[0]], n=1, temperature=1.0, max_new_tokens=16, seed=3)
    with sampler.sample_stream(Sampling(1.0, 16)) as stream:
        stream.submit(0, PROMPTS[0], prompt_seed(3, 0))
        ((_, _, same),) = list(stream)
    assert response.response_ids.tolist() == same.response_ids.tolist(), "generate: a group's seed is not prompt_seed's"


@check("generate: log-probs are those of the distribution that was sampled")
def logprobs(sampler: Sampler) -> None:
    send(sampler, 0)
    for temperature in (1.0, 0.6):
        groups = sampler.generate(PROMPTS[:2], n=3, temperature=temperature, max_new_tokens=16, seed=5)
        for prompt, group in zip(PROMPTS, groups, strict=False):
            for response in group:
                assert_close("generate", response.logprobs, oracle_logprobs(0, prompt, response, temperature))


@check("sample_stream: the sampling mask names what could have been drawn")
def sampling_mask(sampler: Sampler) -> None:
    send(sampler, 0)
    with sampler.sample_stream(Sampling(1.0, 8, top_k=5), sampling_mask=True) as stream:
        stream.submit("a", PROMPTS[0], 5, 3)
        responses = [response for _, _, response in stream]
    for response in responses:
        ids, mask = response.response_ids.tolist(), response.sampling_mask
        assert mask is not None, "sample_stream: no sampling mask"
        assert len(mask) == len(ids), "sample_stream: the sampling mask has another length than the response"
        others = np.split(mask.ids, np.cumsum(mask.counts)[:-1])
        logits = oracle_logits(0, [*PROMPTS[0], *ids])[len(PROMPTS[0]) - 1 : -1]
        for row, token, rest, logprob in zip(logits, ids, others, response.logprobs, strict=True):
            possible = {token, *rest.tolist()}
            assert possible == set(row.topk(5).indices.tolist()), "sample_stream: not the likeliest 5"
            assert_close("sample_stream", logprob, row[token] - row[sorted(possible)].logsumexp(0))


@check("generate: temperature 0 takes the likeliest token")
def greedy(sampler: Sampler) -> None:
    send(sampler, 0)
    groups = sampler.generate(PROMPTS, n=1, temperature=0.0, max_new_tokens=8, seed=0)
    for prompt, (response,) in zip(PROMPTS, groups, strict=True):
        ids = response.response_ids.tolist()
        logits = oracle_logits(0, [*prompt, *ids])[len(prompt) - 1 : -1]
        assert ids == logits.argmax(-1).tolist(), "generate: another token than the likeliest at temperature 0"
        assert_close("generate", response.logprobs, oracle_logprobs(0, prompt, response))
    two = {"n": 2, "temperature": 0.0, "max_new_tokens": 8, "seed": 0}
    refused("generate", ValueError, lambda: sampler.generate(PROMPTS[:1], **two))  # type: ignore[arg-type]


@check("generate: responses end at a stop token or the limit")
def ends(sampler: Sampler) -> None:
    send(sampler, 0)
    reasons = set()
    for group in sampler.generate(PROMPTS, n=12, temperature=1.5, max_new_tokens=20, seed=1):
        for response in group:
            ids = response.response_ids.tolist()
            reasons.add(response.finish_reason)
            assert EOS not in ids[:-1], "generate: tokens after the stop token"
            expected = "stop" if ids[-1] == EOS else "length"
            assert response.finish_reason == expected, f"generate: {response.finish_reason}, not {expected}"
            assert expected == "stop" or len(ids) == 20, "generate: neither a stop token nor max_new_tokens"
    assert reasons == {"stop", "length"}, f"generate: of 48 responses all end with {reasons}"
    refused("generate", ValueError, lambda: sampler.generate([(1,), ()], n=1, temperature=1.0, max_new_tokens=4, seed=0))


@check("generate: groups are in the order of the prompts and are reported when complete")
def order(sampler: Sampler) -> None:
    version = send(sampler, 0)
    groups: dict[int, list[Response]] = {}
    progress: list[tuple[int, int]] = []
    result = sampler.generate(
        PROMPTS,
        n=2,
        temperature=1.0,
        max_new_tokens=8,
        seed=2,
        on_group=lambda index, group: groups.update({index: group}),
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert [groups[index] for index in range(len(PROMPTS))] == result, "generate: on_group gets other groups"
    assert progress == [(done, 4) for done in range(1, 5)], f"generate: on_progress gets {progress}"
    for prompt, group in zip(PROMPTS, result, strict=True):
        for response in group:
            assert response.versions == ((0, version),), "generate: a response carries another version than the update's"
            assert_close("generate", response.logprobs, oracle_logprobs(0, prompt, response))
    with sampler.sample_stream(Sampling(1.0, 8)) as stream:
        for key in range(3):
            stream.submit(key, PROMPTS[key], 5, 2)
        seen: list[Any] = []
        while stream.unfinished:
            assert stream.unfinished == 6 - len(seen), "unfinished: not the samples that were not returned yet"
            if (result_ := stream.next(1.0)) is not None:
                seen.append(result_[:2])
    assert sorted(seen) == [(key, index) for key in range(3) for index in range(2)], "next: a sample is lost or comes twice"
    assert stream.next(0.0) is None, "next: a response that nobody requested"


@check("update_weights_from_tensors: later tokens are of the new weights")
def update(sampler: Sampler) -> None:
    versions = [send(sampler, 0), send(sampler, 3)]
    assert sampler.weights_version == versions[1], "weights_version: not the one of the last update"
    (group,) = sampler.generate(PROMPTS[:1], n=2, temperature=1.0, max_new_tokens=8, seed=2)
    for response in group:
        assert response.versions == ((0, versions[1]),), "update_weights_from_tensors: responses carry another version"
        assert_close("update_weights_from_tensors", response.logprobs, oracle_logprobs(3, PROMPTS[0], response))
    for scores in sampler.prompt_logprobs(PROMPTS[2]).values():
        assert_close("prompt_logprobs", scores, text_logprobs(3, PROMPTS[2]))


def long_responses(sampler: Sampler, seed: int) -> Iterator[tuple[SampleStream, int]]:
    """A stream with three responses in progress, and their seed; again and again, as they may end too early."""
    for attempt in range(ATTEMPTS):
        with sampler.sample_stream(Sampling(1.0, LONG)) as stream:
            stream.submit("short", PROMPTS[1], seed, room=SHORT)
            stream.submit("long", PROMPTS[0], seed + 100 * attempt, 3)
            first = stream.next(None)
            assert first is not None, "next: nothing although samples are unfinished"
            yield stream, seed + 100 * attempt


@check("update_weights_from_tensors: a response in progress continues with the new weights")
def update_in_flight(sampler: Sampler) -> None:
    old = send(sampler, 1)
    for stream, _ in long_responses(sampler, 11):
        new = send(sampler, 3)
        assert stream.weights_version == new, "SampleStream.weights_version: not the newest"
        mixed = [response for key, _, response in stream if key == "long" and len(response.versions) > 1]
        for response in mixed:
            (_, first), (start, second) = response.versions
            assert (first, second) == (old, new), "update_weights_from_tensors: the versions of a response are not old, new"
            assert_close("versions", response.logprobs[:start], oracle_logprobs(1, PROMPTS[0], response)[:start])
            assert_close("versions", response.logprobs[start:], oracle_logprobs(3, PROMPTS[0], response)[start:])
        if mixed:
            return
        old = send(sampler, 1)
    raise AssertionError("update_weights_from_tensors: no response in progress was continued with the new weights")


def continue_parts(sampler: Sampler, seed: int, *, updates: bool) -> None:
    """Ends responses in progress early, and continues them, perhaps with other weights."""
    old = send(sampler, 1)
    for stream, long_seed in long_responses(sampler, seed):
        results = [(index, response) for key, index, response in stream.abort() if key == "long"]
        assert stream.unfinished == 0, "abort: something is still unfinished"
        parts = {index: response for index, response in results if response.finish_reason == "abort"}
        if not parts:
            continue
        new = send(sampler, 3) if updates else old
        for index, part in parts.items():
            assert 0 < part.response_ids.size < LONG, "abort: a part without tokens, or one that is whole"
            stream.submit("rest", PROMPTS[0], long_seed, 3, continued={index: part}, only=[index])
        for _, index, response in stream:
            start, ids = parts[index].response_ids.size, response.response_ids.tolist()
            assert ids[:start] == parts[index].response_ids.tolist(), "submit: not continued from its part"
            assert response.finish_reason in ("stop", "length"), "submit: a continued response does not finish"
            assert len(ids) <= LONG, "submit: a continued response is longer than max_new_tokens"
            versions = ((0, old), (start, new)) if updates else ((0, old),)
            assert response.versions == versions, "submit: not the versions of the part and of its continuation"
            before, after = (oracle_logprobs(weights, PROMPTS[0], response) for weights in (1, 3 if updates else 1))
            assert_close("submit", response.logprobs[:start], before[:start])
            assert_close("submit", response.logprobs[start:], after[start:])
        return
    raise AssertionError("abort: no response in progress came back as a part")


@check("abort: parts come back and can be continued")
def abort(sampler: Sampler) -> None:
    continue_parts(sampler, 31, updates=False)


@check("abort: a part is continued with the weights of a later update")
def abort_and_update(sampler: Sampler) -> None:
    continue_parts(sampler, 51, updates=True)


@check("score: many threads score texts, and each gets its own, with the most likely tokens")
def _scores_in_threads(sampler: Sampler) -> None:
    send(sampler, 0)
    with ThreadPoolExecutor(4) as threads:
        scored = list(threads.map(sampler.score, PROMPTS * 3, (0, 1, 5) * len(PROMPTS)))
    for prompt, k, (logprobs, top) in zip(PROMPTS * 3, (0, 1, 5) * len(PROMPTS), scored, strict=True):
        assert_close("score", logprobs, text_logprobs(0, prompt))
        if k:
            assert top is not None, "score: the most likely tokens are missing"
            assert (top.shape, top.dtype) == ((len(prompt) - 1, k), TOP_TOKEN), "score: not k tokens at each place"
            best = oracle_logits(0, prompt)[:-1].log_softmax(-1)
            ids = torch.from_numpy(top["id"].astype(np.int64))
            assert_close("score", top["logprob"].ravel(), best.gather(1, ids).ravel())
            assert_close("score", top["logprob"].ravel(), best.topk(k).values.ravel())


@check("prompt_logprobs: every server scores a prompt")
def prompt_scores(sampler: Sampler) -> None:
    send(sampler, 0)
    scores, cached = sampler.prompt_logprobs(PROMPTS[2]), sampler.read_through_cache(PROMPTS[2], 6)
    assert set(scores) == set(cached) == set(sampler.addresses), "prompt_logprobs: not one result for each address"
    for url in scores:
        assert_close("prompt_logprobs", scores[url], text_logprobs(0, PROMPTS[2]))
        reading = cached[url]
        assert 0 < len(reading.logprobs) <= 6, "read_through_cache: no tokens, or too many"
        assert_close("read_through_cache", reading.logprobs, reading.logprobs_without)
        assert reading.cached_tokens == 0, "read_through_cache: tokens in a cache that the update has emptied"


@check("sleep: an update and wake_up bring the sampler back")
def sleep(sampler: Sampler) -> None:
    before = send(sampler, 0)
    sampler.sleep()
    assert sampler.weights_version in (None, before), "sleep: other weights than before"
    version = send(sampler, 3)
    sampler.wake_up()
    assert sampler.weights_version == version, "wake_up: other weights than those of the update"
    response = draw_one(sampler)
    assert_close("wake_up", response.logprobs, oracle_logprobs(3, PROMPTS[0], response))


@check("figures: counts since the last call")
def figures(sampler: Sampler) -> None:
    assert sampler.revive() is False, "revive: True although nothing is dead"
    send(sampler, 0)  # a sampler on shared GPUs sleeps after revive
    sampler.wake_up()
    sampler.figures()
    assert sampler.figures() == NO_SERVERS, "figures: not the figures of NO_SERVERS, or counted twice"


@check("update_weights_from_tensors: tensors that do not fit are an error, and revive repairs it")
def failed_update(sampler: Sampler) -> None:
    weights = {**contract_model(0).state_dict(), "model.norm.weight": torch.ones(3)}
    stream = iter(weights.values())
    version = WeightsVersion(next(_steps))
    refused(
        "update_weights_from_tensors",
        (RuntimeError, ValueError),
        lambda: sampler.update_weights_from_tensors(version, manifest(weights), stream),
        naming="model.norm.weight",
    )
    assert next(stream, None) is None, "update_weights_from_tensors: the rest of the tensors is not consumed after an error"
    assert sampler.weights_version is None, "weights_version: not None after a failed update"
    refused("generate", RuntimeError, lambda: draw_one(sampler))
    assert sampler.revive() is True, "revive: False after a failed update"
    update(sampler)


@check(STOP)
def stop(sampler: Sampler) -> None:
    sampler.stop()
    sampler.stop()
    refused("stop", RuntimeError, lambda: draw_one(sampler))


def draw_one(sampler: Sampler) -> Response:
    ((response,),) = sampler.generate(PROMPTS[:1], n=1, temperature=1.0, max_new_tokens=8, seed=2)
    return response

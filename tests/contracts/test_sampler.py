"""The fleet of vLLM servers and the reference sampler keep the sampler's contract, and the contract sees who does not."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.sampler.protocol import KeyedResponse, Sampler, SampleStream, Scores, make_sampler, sampler_spec
from tepo_megatron.sampler.sampling import Sampling
from tepo_megatron.weights.transfer.full_tensors import TensorManifest
from tests.contracts import sampler_contract
from tests.contracts.naming import members_of
from tests.contracts.sampler_contract import (
    CALLS,
    CHECKS,
    DEFAULTS,
    EOS,
    MAX_LENGTH,
    MEMBERS,
    STOP,
    contract_failures,
    write_model,
)
from tests.support.programs import FEW_BLOCKS
from tests.support.reference_sampler import ReferenceSampler, ReferenceStream, _Draw

SAMPLERS: dict[str, Callable[..., Sampler]] = {"reference": ReferenceSampler, "vllm": make_sampler}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def make(factory: Any, model_dir: Path) -> Sampler:
    config = ServerConfig(max_model_len=MAX_LENGTH, max_num_seqs=16, extra_args=(FEW_BLOCKS,))
    sampler: Sampler = factory(
        config, model_dir=model_dir, dtype="float32", stop_token_ids=[EOS], log_dir=model_dir.parent / "logs"
    )
    return sampler


@pytest.fixture(scope="module", params=SAMPLERS)
def sampler(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Sampler]:
    with make(SAMPLERS[request.param], model_dir) as running:
        yield running


def test_servers_say_what_computes_their_samples(sampler: Sampler) -> None:
    runner = "" if isinstance(sampler, ReferenceSampler) else ": Model Runner V1, CPUAttentionBackendImpl"
    assert sampler.describe() == [address + runner for address in sampler.addresses]


@pytest.mark.parametrize("name", CHECKS)
def test_a_sampler_keeps_the_contract(sampler: Sampler, name: str) -> None:
    CHECKS[name](sampler)


def test_an_unknown_sampler_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"there is no sampler 'sglang'; there is vllm"):
        sampler_spec("sglang")


class OneSeed(ReferenceSampler):
    """Draws every sample with the same numbers."""

    def draw_token(self, draw: _Draw, sampling: Any) -> None:
        if draw.generator is not None:
            draw.generator.manual_seed(0)
        super().draw_token(draw, sampling)


class UntemperedLogprobs(ReferenceSampler):
    def draw_token(self, draw: _Draw, sampling: Any) -> None:
        super().draw_token(draw, sampling)
        draw.logprobs[-1] *= sampling.temperature or 1.0


def with_streams(kind: Any) -> type[ReferenceSampler]:
    def sample_stream(self: Any, sampling: Any, *, sampling_mask: bool = False, on_move: Any = lambda: None) -> Any:
        stop_ids = tuple(self._options["stop_token_ids"])
        return kind(self, Sampling.of(sampling, stop_ids, sampling_mask=sampling_mask), on_move)

    return type("OnStream", (ReferenceSampler,), {"sample_stream": sample_stream})


class IgnoresStopTokens(ReferenceStream):
    def __init__(self, sampler: ReferenceSampler, sampling: Sampling, on_move: Callable[[], None]) -> None:
        super().__init__(sampler, sampling._replace(stop_token_ids=()), on_move)


class KeepsOldWeights(ReferenceSampler):
    def update_weights_from_tensors(self, version: WeightsVersion, manifest: TensorManifest, tensors: Iterable[Tensor]) -> None:
        weights = dict(self._weights)
        super().update_weights_from_tensors(version, manifest, tensors)
        self._set_weights(weights)


class ForgetsTheFirstVersion(ReferenceSampler):
    def draw_token(self, draw: _Draw, sampling: Any) -> None:
        super().draw_token(draw, sampling)
        draw.versions = [(0, draw.versions[-1][1])]


class SwapsGroups(ReferenceSampler):
    def generate(self, *args: Any, **kwargs: Any) -> list[list[Response]]:
        return super().generate(*args, **kwargs)[::-1]


class FinishedParts(ReferenceStream):
    def abort(self) -> list[KeyedResponse]:
        results = super().abort()
        return [(key, index, Response(part.response_ids, part.logprobs, "stop", part.versions)) for key, index, part in results]


class WorstFirst(ReferenceSampler):
    def score(self, tokens: Any, k: int = 0) -> Scores:
        logprobs, top = super().score(tokens, k)
        return Scores(logprobs, None if top is None else top[:, ::-1])


class NeverWakes(ReferenceSampler):
    def wake_up(self) -> None:
        return None


class ConsumesNothing(ReferenceSampler):
    """Leaves the tensors that come after one that does not fit."""

    def update_weights_from_tensors(self, version: WeightsVersion, manifest: TensorManifest, tensors: Iterable[Tensor]) -> None:
        taken = []
        for (_, shape, _), tensor in zip(manifest, tensors, strict=False):
            taken.append(tensor)
            if len(shape) == 1 and shape[0] == 3:
                break
        super().update_weights_from_tensors(version, manifest, taken)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (OneSeed, "generate: the same seed draws the same tokens"),
        (UntemperedLogprobs, "generate: log-probs are those"),
        (with_streams(IgnoresStopTokens), "generate: responses end"),
        (KeepsOldWeights, "update_weights_from_tensors: later tokens"),
        (ForgetsTheFirstVersion, "update_weights_from_tensors: a response in progress"),
        (SwapsGroups, "generate: groups are in the order"),
        (with_streams(FinishedParts), "abort: parts come back"),
        (WorstFirst, "score: many threads"),
        (NeverWakes, "sleep: an update and wake_up"),
        (ConsumesNothing, "update_weights_from_tensors: tensors that do not fit"),
    ],
)
def test_a_misbehaving_member_is_named(
    kind: type[ReferenceSampler], check: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_contract, "ATTEMPTS", 1)  # in this process, no response ends unnoticed
    (name,) = (name for name in CHECKS if name.startswith(check))
    member = name.partition(":")[0]
    with make(kind, model_dir) as sampler, pytest.raises(AssertionError) as error:
        CHECKS[name](sampler)
    assert member in str(error.value) or "versions" in str(error.value)


def broken(protocol: type, member: str, fault: Any) -> type[ReferenceSampler]:
    """The reference without a member, or with one that raises, or returns None."""
    base: type = ReferenceStream if protocol is SampleStream else ReferenceSampler

    def act(*_args: object, **_options: object) -> None:
        if fault is not None:
            raise fault("broken")

    act.__code__ = act.__code__.replace(co_qualname=f"Broken.{member}")
    is_property = isinstance(members_of(protocol)[member], property)
    if not is_property:
        act.__signature__ = inspect.signature(getattr(base, member))  # type: ignore[attr-defined]
    kind: Any = type("Broken", (base,), {member: property(act) if is_property else act})
    if fault == "missing":
        inherited = {name: vars(Sampler)[name] for name in DEFAULTS}
        others = {name: value for name, value in vars(base).items() if name not in ("__dict__", "__weakref__")}
        kind = type("Broken", (), {name: value for name, value in (inherited | others).items() if name != member})
    return with_streams(kind) if protocol is SampleStream else kind


UNUSED = {"update_weights_from_shards", "update_adapters"}
"""They need ranks of a trainer: tests/e2e/test_sync.py."""
ENDS = {"start", "__enter__", "__exit__"}
"""A sampler is started before it is checked, and ended after it."""
SILENT = {"sleep", "wake_up", "leave", "update_weights_from_tensors", "__exit__"}
"""They return None; what they do is checked by the table above."""
CASES = [
    (protocol, member, fault)
    for protocol in (Sampler, SampleStream)
    for member, error in zip(members_of(protocol), cycle((RuntimeError, KeyError, AssertionError)), strict=False)
    for fault in ("missing", error, None)
    if fault == "missing" or (member not in UNUSED and (fault is not None or member not in SILENT))
    if fault == "missing" or protocol is SampleStream or member not in ENDS
]


@pytest.mark.parametrize(("protocol", "member", "fault"), CASES)
def test_a_member_that_is_missing_or_raises_or_returns_nothing_is_named(
    protocol: type, member: str, fault: Any, model_dir: Path
) -> None:
    sampler: Any = make(broken(protocol, member, fault), model_dir)
    ReferenceSampler.start(sampler)
    failures = contract_failures(sampler, [MEMBERS] if fault == "missing" else [CALLS, STOP])
    assert any(member in sentence.split(" raised ")[0] for sentence in failures.values()), failures


def test_a_sampler_that_inherits_and_lacks_members_cannot_be_made() -> None:
    assert set(members_of(Sampler)) - set(DEFAULTS) == Sampler.__abstractmethods__
    lacking: Any = type(
        "Lacking", (Sampler,), {name: value for name, value in vars(ReferenceSampler).items() if name != "sleep"}
    )
    with pytest.raises(TypeError, match=r"'?sleep'?$"):
        lacking()

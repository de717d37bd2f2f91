"""What the comparisons of log-probs let pass and stop: the canary, the rollouts, the ages of tokens."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.run.consistency_checks import CACHED_TOKENS, Canaries, Canary, Tolerances
from tepo_megatron.run.output.resume import resolve_dtype
from tepo_megatron.run.sampling.step_rewards import token_ages, version_figures
from tepo_megatron.run.step.minibatches import minibatches
from tepo_megatron.sampler.protocol import CacheReading, ReadBack
from tepo_megatron.sampler.rollout_file import check_rollouts
from tepo_megatron.trainer.packing import pack
from tests.support.fake_sampling import FakeFleet, FakeVerifiers, collector

PROMPT = (5, 9, 2, 7)
OURS = [-3.0, -2.5, -8.0]


def moved(by: float, at: int = 1) -> list[float]:
    return [value + by * (place == at) for place, value in enumerate(OURS)]


def sizes(max_positions: int) -> Any:
    """What of a model counts here."""
    return SimpleNamespace(vocab_size=50, max_positions=max_positions)


def test_a_server_that_differs_is_named_with_prompt_position_token_and_both_values() -> None:
    with pytest.raises(RuntimeError) as caught:
        Canary(1e-3).check(4, PROMPT, OURS, {"http://a": OURS, "http://b": moved(0.25), "http://c": moved(-2.0, at=2)})
    text = str(caught.value)
    for part in (
        "weights 4",
        "[5, 9, 2, 7]",
        "http://b gives token 2 at position 2 the log-prob -2.25, the trainer -2.5",
        "http://c gives token 7 at position 3 the log-prob -10, the trainer -8",
        "rollout.canary.tolerance = 0.001",
    ):
        assert part in text
    assert "http://a" not in text
    for wrong in ([-3.0, math.nan, -8.0], [-3.0, -math.inf, -8.0]):
        for ours, theirs in ((OURS, wrong), (wrong, OURS)):
            with pytest.raises(RuntimeError, match="token 2 at position 2"):
                Canary(1e3).check(0, PROMPT, ours, {"http://a": theirs})


@given(st.floats(0, 10), st.floats(1e-6, 1), st.integers(0, 2), st.sampled_from([-1, 1]))
def test_what_is_beyond_the_tolerance_stops_and_nothing_else_does(gap: float, bound: float, at: int, sign: int) -> None:
    canary, theirs = Canary(bound), {"http://a": moved(sign * gap, at)}
    if abs(theirs["http://a"][at] - OURS[at]) > bound:
        with pytest.raises(RuntimeError, match="log-prob"):
            canary.check(0, PROMPT, OURS, theirs)
    else:
        theirs["http://b"] = OURS
        assert canary.check(0, PROMPT, OURS, theirs) == abs(theirs["http://a"][at] - OURS[at])


@given(st.floats(5e-4, 0.05))
def test_a_server_that_kept_its_weights_is_known_after_a_few_small_updates(step: float) -> None:
    """A real learning rate moves the log-probs by less than the share of the tolerance that one update would need."""
    canary, frozen = Canary(0.5), moved(0.01)
    answers_until = math.ceil(0.005 / step + 1e-6)
    for count in range(answers_until):
        canary.check(count, PROMPT, moved(count * step), {"http://a": moved(count * step + 0.01), "http://b": frozen})
    count = answers_until + 1
    with pytest.raises(RuntimeError, match="http://b still gives the same log-probs") as caught:
        canary.check(count, PROMPT, moved(count * step), {"http://a": moved(count * step + 0.01), "http://b": frozen})
    assert "http://a" not in str(caught.value)


def test_a_server_that_follows_in_coarse_steps_is_not_stale() -> None:
    """Small updates round to the same weights for a while, then to others; without an update the answers are the same."""
    canary = Canary(0.5)
    for count in range(200):
        for _ in range(2):
            canary.check(count, PROMPT, moved(count * 0.002), {"http://a": moved(count // 2 * 0.004)})


@pytest.mark.parametrize(
    ("run", "due"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"rollout": {"canary": {"every": 3}}}, [0, 3, 6]),
        ({"rollout": {"canary": {"every": 0}}}, []),
        ({"rollout": {"replay": "a/folder"}}, []),
        # Servers that sample with an adapter cannot score a prompt meanwhile.
        ({"train": {"schedule": "overlap"}, "model": {"lora": {"serve": "adapter"}}, "rollout": {"uncorrected": True}}, [0]),
    ],
)
def test_the_prompt_is_due_as_often_as_wanted_where_servers_are(run: dict[str, Any], due: list[int]) -> None:
    config, spec = resolve_dtype(RunConfig.model_validate(run), gpus=0), sizes(64)
    prompts = {sync: Canary.due_prompt(config, spec, sync=sync, has_drawn=sync > 0) for sync in range(7)}
    assert [sync for sync, prompt in prompts.items() if prompt is not None] == due
    assert {prompt for prompt in prompts.values() if prompt is not None} <= {Canary.prompt(50, 64)}
    revived = Canary.due_prompt(config, spec, sync=0, has_drawn=True)  # of servers that ended in mid-run
    assert (revived is None) == ("model" in run or not due)


@given(st.integers(2, 200_000), st.integers(3, 5000))
def test_the_prompts_are_the_same_everywhere_and_within_what_a_model_takes(vocab_size: int, limit: int) -> None:
    for make, length in (
        (Canary.prompt, min(32, limit - 1)),  # and one that the server samples
        (Canary.cached_prompt, max(2, min(257, limit - CACHED_TOKENS - 1))),
    ):
        prompt = make(vocab_size, limit)
        assert prompt == make(vocab_size, limit)
        assert all(0 <= token < vocab_size for token in prompt)
        assert len(prompt) == length
    served = RunConfig.model_validate({"rollout": {"server": {"max_model_len": 10}}})
    for config, count in ((RunConfig(), min(32, limit - 1)), (served, 9)):
        assert len(Canary.due_prompt(config, sizes(limit), sync=0, has_drawn=False) or ()) == count
    for size in (32_000, 128_256, 151_936):  # in every part of a vocabulary that is split over eight ranks
        assert {token * 8 // size for token in Canary.prompt(size, 4096)} == set(range(8))


@pytest.mark.parametrize(
    ("trained", "setting", "expected"),
    [
        ("float32", "rollout.server.dtype=auto", (1e-3, 1e-4)),
        ("bfloat16", "rollout.server.dtype=auto", (0.5, 0.1)),
        ("float32", "rollout.server.dtype=bfloat16", (0.5, 0.1)),
        ("bfloat16", "rollout.server.dtype=float32", (0.5, 0.1)),
        ("bfloat16", "rollout.server.quantization=fp8_per_block", (2.0, 1.0)),
        ("bfloat16", "engine.fp8.recipe=tensorwise", (2.0, 1.0)),
    ],
)
def test_the_default_tolerances_are_those_of_the_coarser_side(
    trained: str, setting: str, expected: tuple[float, float]
) -> None:
    settings = [f"model.dtype={trained}", setting, "objective.mismatch.kind=truncate"]
    assert Tolerances.of(load_run(None, settings)) == expected
    chosen = "rollout.canary={tolerance: 0.07, rollouts_tolerance: 0.03}"
    assert Tolerances.of(load_run(None, [*settings, chosen])) == (0.07, 0.03)


@pytest.mark.parametrize(("first", "then", "drift"), [(0.01, 0.03, 3.0), (0.0, 2e-7, 2.0)])
def test_gaps_are_compared_with_the_first_syncs_which_a_resumed_run_knows(first: float, then: float, drift: float) -> None:
    """Of the server where they are largest. Sides that agreed to the last bit have no ratio."""
    config, ours, theirs = resolve_dtype(RunConfig(), gpus=0).with_dtype("bfloat16"), [-1.0] * 11, {"http://a": [-1.0] * 11}
    fleet: Any = SimpleNamespace(
        read_back=dict, prompt_logprobs=lambda _: theirs, read_through_cache=lambda *_: {"http://a": CacheReading([], [], 0)}
    )
    checks, resumed = (Canaries(config, sizes(64)) for _ in range(2))
    for step, gap in enumerate((first, then)):
        theirs["http://b"] = [-1.0, *[-1.0 - gap] * 9, -1.0 - 2 * gap]
        checks.check_servers(fleet, step, range(12), ours, is_logged=False)
    resumed.first_gap = checks.first_gap
    resumed.check_servers(fleet, 1, range(12), ours, is_logged=False)
    for figures in (checks.take_figures(), resumed.take_figures()):
        assert figures["canary/drift"] == pytest.approx(drift)
        assert figures["canary/mean_logprob_gap"] == pytest.approx(then)
        assert figures["canary/p90_logprob_gap"] == pytest.approx(then)
        assert figures["canary/max_logprob_gap"] == pytest.approx(2 * then)


@given(st.integers(0, 257), st.floats(0, 10))
def test_a_cache_that_was_not_emptied_stops_and_other_log_probs_do_not(tokens: int, gap: float) -> None:
    """On a GPU log-probs depend on what else is in the batch, so that a difference says nothing of the cache."""
    readings = {"http://a": CacheReading([-1.0], [-1.0], 0), "http://b": CacheReading([-1.0, -2.0 - gap], [-1.0, -2.0], tokens)}
    if tokens:
        with pytest.raises(RuntimeError, match=rf"weights 3: http://b took {tokens} tokens .* not emptied"):
            Canary.check_cache(3, readings)
    else:
        assert Canary.check_cache(3, readings) == pytest.approx(gap)
        assert Canary.check_cache(3, {"http://c": CacheReading([], [], 0)}) == 0  # no token in common


def scored(gaps: list[list[float]], groups: list[int], *, sampler: bool = False) -> Batch:
    """A batch whose response tokens differ by ``gaps``, sequence by sequence, by the sampler's fault or by the trainer's;
    ``groups`` numbers the sequences' groups.
    """
    batch = pack([rollout(group, [(0, 0)], len(gap)) for group, gap in zip(groups, gaps, strict=True)])
    wrong_T = batch.sampler_logprobs_T.clone()
    wrong_T[batch.loss_mask_T] += torch.tensor([value for gap in gaps for value in gap])
    if sampler:
        return batch.with_(old_logprobs_T=batch.sampler_logprobs_T, sampler_logprobs_T=wrong_T)
    return batch.with_(old_logprobs_T=wrong_T)


def check(*parts: Batch, tolerance: float = 0.01, token_tolerance: float = 0.1) -> dict[str, float]:
    return Tolerances(token_tolerance, tolerance).check_rollouts(7, parts)


def test_a_server_whose_weights_are_not_what_it_was_sent_is_named_with_them() -> None:
    good = {"http://a": ReadBack([], 1.0), "http://b": ReadBack([], 0.25)}
    assert Canary.check_read_back(3, good) == 0.25
    with pytest.raises(RuntimeError, match=r"^weights 3: .* http://b has 1: norm\.weight in worker 1\. "):
        Canary.check_read_back(3, {**good, "http://b": ReadBack(["norm.weight in worker 1"], 1.0)})


def test_one_wrong_group_among_many_stops_the_step_and_is_named() -> None:
    """One of many servers may be wrong: a mean over all rollouts would hide it. Figures are over all mini-batches."""
    gaps = [[0.0] * 20 for _ in range(50)]
    gaps[31] = [0.03] * 20
    with pytest.raises(RuntimeError, match=r"step 7: 1 of 50 groups .* in group 31 the log-probs of 20 tokens differ by 0\.03"):
        check(scored(gaps, list(range(50))))
    assert check(scored([[0.002, -0.004], [0.0]], [0, 1]), scored([[0.001]], [0])) == {
        "canary/rollouts_mean_gap": pytest.approx(0.007 / 4, rel=1e-3),
        "canary/rollouts_worst_group": pytest.approx(0.007 / 3, rel=1e-3),
        "canary/rollouts_max_gap": pytest.approx(0.004, rel=1e-3),
    }


@given(st.integers(1, 200), st.floats(0, 1))
def test_a_group_may_have_one_token_beyond_the_mean(tokens: int, gap: float) -> None:
    batch = scored([[gap] + [0.0] * (tokens - 1)], [0])
    limit = 0.01 * tokens + 0.1
    if gap > limit * 1.0001:
        with pytest.raises(RuntimeError, match="not drawn from the trainer's policy"):
            check(batch)
    elif gap < limit * 0.9999:
        check(batch)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sampler_without_a_number_stops_and_a_trainer_without_one_does_not(value: float) -> None:
    """The trainer's optimizer step is skipped, for its own reason."""
    with pytest.raises(RuntimeError, match="in group 1 "):
        check(scored([[0.0] * 9, [0.0, value]], [0, 1], sampler=True))
    figures = check(scored([[0.0] * 9, [0.004, value]], [0, 1]), scored([[value]], [2]))
    assert figures["canary/rollouts_worst_group"] == pytest.approx(0.004, rel=1e-3)
    assert check(scored([[value]], [0])) == {}
    assert check(scored([[3.0, 5.0]], [0]), tolerance=math.inf)["canary/rollouts_mean_gap"] == pytest.approx(4.0)


def test_no_tensor_of_all_tokens_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may have 2^29 tokens: a sort of them takes tens of gigabytes of rank 0's GPU."""
    sorted_sizes, unique = [0], torch.Tensor.unique

    def noted(one: torch.Tensor, **options: bool) -> Any:
        sorted_sizes.append(one.numel())
        return unique(one, **options)

    monkeypatch.setattr(torch.Tensor, "unique", noted)
    gaps = [math.nan, 0.5, -0.5, 0.25, 0.0, 0.0]
    figures = figures_of([rollout(group, [(0, 0), (1, 1)], 2) for group in (7, 7, 3)], 1, 2, gaps, canary={"tolerance": 9})
    assert figures == {
        "staleness/kl_0": pytest.approx((math.expm1(0.5) - 0.5 + math.expm1(0.25) - 0.25) / 3, rel=1e-6),
        "staleness/kl_1": pytest.approx((math.expm1(-0.5) + 0.5) / 2, rel=1e-6),
        "canary/rollouts_mean_gap": pytest.approx(0.25),
        "canary/rollouts_worst_group": pytest.approx(0.375),
        "canary/rollouts_max_gap": 0.5,
    }
    masked_T = torch.tensor([0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]).bool()
    batch = pack([rollout(group, [(0, 0)], 2) for group in range(3)]).with_(loss_mask_T=masked_T)
    assert batch.trained_sequences == [1]
    assert max(sorted_sizes) <= 3


def rollout(group: int, spans: list[tuple[int, int]], tokens: int) -> Rollout:
    versions = tuple((start, WeightsVersion(step)) for start, step in spans)
    return Rollout(f"p{group}", group, [1, 2], [3] * tokens, [-1.0] * tokens, "stop", versions)


def test_ages_are_counted_token_by_token() -> None:
    """What an environment wrote has none."""
    mixed, fresh = rollout(0, [(0, 3), (2, 5)], 3), rollout(1, [(0, 6)], 1)
    assert token_ages(mixed, 6).tolist() == [3, 3, 1]
    assert version_figures([mixed, fresh], 6) == {
        "weights_version/min": 3.0,
        "weights_version/max": 6.0,
        "staleness/mean": 7 / 4,
        "staleness/max": 3.0,
        "staleness/versions": 1.5,
    }
    logprobs, mask = np.array([-3.0, 0.0, 0.0, -1.0], np.float32), np.array([True, False, False, True])
    with_tool = replace(rollout(0, [(0, 3), (2, 5)], 4), sampler_logprobs=logprobs, loss_mask=mask)
    assert version_figures([with_tool], 6)["staleness/mean"] == (3 + 1) / 2
    assert kl_of(figures_of([with_tool], 6, canary={"every": 0})) == of_ages([1, 3])


def figures_of(rollouts: list[Rollout], step: int, count: int = 1, gaps: list[float] | None = None, **settings: Any) -> Any:
    """What the check of a step finds, with the log-probs of the trainer 0, or those of the sampler and ``gaps``."""
    train = {"schedule": "overlap", "max_staleness": 9, "minibatches": count}
    run = {"seed": 3, "train": train, "rollout": {"uncorrected": True, **settings}}
    batch = pack(rollouts, mask_truncated=settings.get("truncated") == "mask")
    old_T = torch.zeros_like(batch.sampler_logprobs_T) if gaps is None else batch.sampler_logprobs_T.clone()
    old_T[batch.loss_mask_T] += torch.tensor(gaps or [0.0])
    parts = list(minibatches(batch.with_(old_logprobs_T=old_T), count, seed=3, step=step))
    checks = Canaries(resolve_dtype(RunConfig.model_validate(run), gpus=0), sizes(64))
    checks.check_rollouts(step, parts, rollouts)
    return checks.take_figures()


def kl_of(figures: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if "/kl_" in name}


def of_ages(ages: Iterable[int]) -> dict[str, Any]:
    """The mismatch of tokens with the sampler's log-prob −age."""
    return {f"staleness/kl_{age}": pytest.approx(math.expm1(age) - age, rel=1e-6) for age in ages}


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=4, max_size=9), st.integers(1, 4), st.booleans())
def test_every_token_has_its_own_age_through_packing_and_minibatches(lengths: list[list[int]], count: int, cut: bool) -> None:
    """Each token's log-prob is its own age, so that a wrong age would show in the mean of another. Mini-batches have no
    masked responses.
    """
    step, rollouts = 9, []
    for group, spans in enumerate(lengths):
        starts = [sum(spans[:index]) for index in range(len(spans))]
        drawn = rollout(group, [(start, 5 + index) for index, start in enumerate(starts)], sum(spans))
        reason = "length" if cut and group % 2 else "stop"
        logprobs = -token_ages(drawn, step).astype(np.float32)
        rollouts.append(replace(drawn, sampler_logprobs=logprobs, finish_reason=reason))
    trained = [each for each in rollouts if each.finish_reason == "stop"]
    count = min(count, len(trained))
    figures = figures_of(rollouts, step, count, canary={"every": 0}, truncated="mask" if cut else "train")
    ages = {int(age) for each in trained for age in token_ages(each, step)}
    assert kl_of(figures) == of_ages(ages)


def test_the_canary_looks_at_what_the_present_weights_drew_only() -> None:
    mixed, gaps = rollout(0, [(0, 0), (2, 1)], 4), [0.5, -0.5, 0.001, -0.001]
    canary = {"tolerance": 0.1, "rollouts_tolerance": 0.01}
    figures = figures_of([mixed], 1, gaps=gaps, canary=canary)
    assert figures["canary/rollouts_max_gap"] == pytest.approx(0.001, rel=1e-3)
    assert figures["staleness/kl_1"] == pytest.approx((math.expm1(0.5) - 0.5 + math.expm1(-0.5) + 0.5) / 2, rel=1e-5)
    assert figures["staleness/kl_0"] == pytest.approx(0.5e-6, rel=1e-2)
    with pytest.raises(RuntimeError, match="not drawn from the trainer's policy"):
        figures_of([rollout(0, [(0, 1)], 4)], 1, gaps=gaps, canary=canary)


@pytest.mark.parametrize(
    ("spans", "stalest", "message"),
    [
        ([(0, 2), (1, 4)], 1, "drawn by the weights of step 2, not of step 4, for which the file is, nor of one of the 1"),
        ([(0, 5)], 3, "drawn by the weights of step 5"),
        ([(1, 4)], 1, "places in order from 0"),
        ([(0, 3), (2, 4)], 1, "places in order from 0"),
        ([], 1, "places in order from 0"),
    ],
)
def test_a_record_of_too_old_weights_is_refused(spans: list[tuple[int, int]], stalest: int, message: str) -> None:
    check_rollouts(Path("r"), [rollout(0, [(0, 3), (1, 4)], 2)], step=4, prompts=1, samples=1, stalest=1)
    with pytest.raises(ValueError, match=message):
        check_rollouts(Path("r"), [rollout(0, spans, 2)], step=4, prompts=1, samples=1, stalest=stalest)


def test_idle_shares_leave_the_evaluation_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tepo_megatron.run.sampling.group_worker.time.perf_counter", lambda: now[0])
    rollouts = collector(RunConfig(output=tmp_path), [Problem("p", "q", "a")], FakeVerifiers(0, lambda *_: 0.0), FakeFleet(0))
    split = {"time/rollout": 3.0, "time/reward": 1.0, "time/journal": 1.0, "time/eval": 2.0, "time/step": 12.0}
    assert rollouts.idle_shares(split) == {"idle/trainer": 0.5, "idle/servers": 1.0}  # the servers did nothing
    with rollouts.clock.busy():
        now[0] = 3.0
        with rollouts.clock.hold():
            now[0] = 5.0
    now[0] = 10.0
    assert rollouts.idle_shares(split)["idle/servers"] == pytest.approx(0.7)
    assert rollouts.idle_shares({**split, "time/step": 2.0}) == {}

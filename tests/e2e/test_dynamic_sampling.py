"""Dynamic sampling and partial rollouts with a real server and real verifiers, killed in mid-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.run.sampling.collector import RolloutCollector
from tepo_megatron.run.sampling.journal import Journal
from tepo_megatron.run.sampling.step_rewards import StepRewards
from tepo_megatron.runtime.heartbeat import Heartbeat
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tepo_megatron.tasks.reward.verifier_task import VerifierTask
from tepo_megatron.weights.architecture import read_model_spec
from tests.support.fake_sampling import Killed, groups_of, groups_on_disk

MODEL = resolve_model_path(RunConfig().model.path)
TOKENIZER = load_tokenizer(MODEL)
TRAIN = load_problems(RunConfig().data.train_sources[0])[:60]


def config(output: Path, **rollout: Any) -> RunConfig:
    sampling = {"max_new_tokens": 32}
    sections = {"prompts_per_step": 4, "samples_per_prompt": 4, "sampling": sampling, "uncorrected": True, **rollout}
    return RunConfig.model_validate({"output": str(output), "rollout": sections, "train": {"minibatches": 1}})


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    logs = tmp_path_factory.mktemp("logs")
    server = RunConfig().rollout.server
    with Fleet(server, model_dir=MODEL, dtype="float32", stop_token_ids=TOKENIZER.eos_ids, log_dir=logs) as running:
        yield running


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierTask]:
    with VerifierTask({"": RunConfig().reward}) as running:
        yield running


class Watched:
    """A fleet whose requests are counted."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.weights_version = fleet.weights_version
        self.asked: list[int] = []

    @contextmanager
    def sample_stream(self, *given: Any, **options: Any) -> Iterator[Any]:
        with self._fleet.sample_stream(*given, **options) as stream:
            submit = stream.submit

            def counted(key: Any, *given: Any, **options: Any) -> None:
                self.asked.append(key)
                submit(key, *given, **options)

            stream.submit = counted  # type: ignore[method-assign]
            yield stream


class KilledWhen:
    """A pool under which the process is killed when two groups of a step are on disk: others are still to be judged."""

    def __init__(self, pool: VerifierTask, output: Path) -> None:
        self._pool, self._groups = pool, output / "journal" / "groups"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def poll(self, timeout_s: float | None) -> Any:
        if len(list(self._groups.glob("step_*.jsonl"))) >= 2:
            raise Killed
        return self._pool.poll(timeout_s)


def collector(config: RunConfig, pool: VerifierTask, fleet: Any) -> RolloutCollector:
    inputs: Any = type("Inputs", (), {"train": TRAIN, "tokenizer": TOKENIZER, "spec": read_model_spec(MODEL)})
    journal, rewards = Journal(config, print, print), StepRewards(config, print)
    phase: Any = lambda name: nullcontext()  # noqa: E731
    made = RolloutCollector(config, inputs, rewards, pool, journal, fleet, phase=phase, heartbeat=Heartbeat())
    made.published(fleet.weights_version)
    return made


def drawn(rollouts: Sequence[Rollout]) -> list[tuple[Any, ...]]:
    """What was drawn; log-probs may differ in the last bits by what else a server had to do."""
    return [(each.problem_id, each.group, each.response_ids.tolist(), each.reward) for each in rollouts]


def test_a_run_that_is_killed_in_mid_batch_has_the_batches_of_one_that_is_not(
    fleet: Fleet, pool: VerifierTask, tmp_path: Path
) -> None:
    settings = {"filter_groups": {"filters": ["zero_variance"]}, "oversample": 1.5}
    whole = collector(config(tmp_path / "whole", **settings), pool, fleet)
    expected = [whole.collect(step) for step in range(2)]
    for rollouts in expected:
        assert [len(group) for group in groups_of(rollouts).values()] == [4] * 4
        assert all(len({rollout.reward for rollout in group}) == 2 for group in groups_of(rollouts).values())

    run = config(tmp_path / "killed", **settings)
    killed: Any = KilledWhen(pool, run.output)
    first = collector(run, killed, fleet)
    before = first.state()
    with pytest.raises(Killed):
        first.collect(0)
    on_disk = groups_on_disk(run.output)
    assert len(on_disk) >= 2
    again: Any = Watched(fleet)
    resumed = collector(run, pool, again)
    assert resumed.restore({"sampler": before}) == []
    assert [drawn(resumed.collect(step)) for step in range(2)] == [drawn(rollouts) for rollouts in expected]
    assert not set(again.asked) & set(on_disk)


def test_what_a_step_leaves_unfinished_goes_on_in_the_next_one(fleet: Fleet, pool: VerifierTask, tmp_path: Path) -> None:
    """One version of weights is enough to see it: a response that goes on begins with the tokens that it had."""
    run = config(tmp_path, oversample=2, partial=True)
    of = collector(run, pool, fleet)
    parts: list[Rollout] = []
    for step in range(4):
        rollouts = of.collect(step)
        assert [len(group) for group in groups_of(rollouts).values()] == [4] * 4
        whole = {(rollout.problem_id, tuple(rollout.response_ids.tolist())): rollout for rollout in rollouts}
        for part in parts:
            ids = tuple(part.response_ids.tolist())
            found = [
                each for (problem, drawn), each in whole.items() if problem == part.problem_id and drawn[: len(ids)] == ids
            ]
            if part.problem_id in {rollout.problem_id for rollout in rollouts}:
                assert found
                assert (found[0].sampler_logprobs[: len(ids)] == part.sampler_logprobs).all()
        kept = [each for group in groups_on_disk(tmp_path).values() for each in group if each.finish_reason == "abort"]
        parts = [part for part in parts if part.problem_id not in {rollout.problem_id for rollout in rollouts}] + kept
    figures = of.take_figures()
    left = figures["groups/kept"] + figures["groups/filtered"] + figures["groups/carried"]
    assert figures["groups/carried_in"] + figures["groups/drawn"] == left

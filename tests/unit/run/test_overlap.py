"""The overlapped schedule: what is sampled ahead, what meets which step, and that nothing is lost or trained on twice."""

import random
import sys
import time
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Response, Rollout, WeightsVersion
from tepo_megatron.run.sampling.groups import Group, GroupBuffer
from tepo_megatron.run.sampling.step_rewards import token_ages
from tepo_megatron.tasks.data.sources import ProblemSampler
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tools.faults.processes import wait_until
from tests.support.fake_sampling import FakeServers, FakeVerifiers, collector
from tests.support.programs import TIMEOUT_S

PROBLEMS = [Problem(f"p{number}", "q", "a") for number in range(101)]
B = 3


class Run:
    """A schedule, its servers, and a trainer whose steps end with :meth:`trained`."""

    def __init__(
        self, output: Path, k: int = 1, state: Any = None, journal: bool = False, filters: Any = None, **train: Any
    ) -> None:
        rollout = {"prompts_per_step": B, "samples_per_prompt": 2, "uncorrected": True, "journal": journal}
        rollout["filter_groups"] = filters
        train = {"minibatches": 2, "schedule": "overlap", "max_staleness": k, **train}
        config = RunConfig.model_validate({"output": str(output), "rollout": rollout, "train": train})
        self.servers, verifiers = FakeServers(), FakeVerifiers(0, lambda problem, text: 1.0)
        self.schedule = collector(config, PROBLEMS, verifiers, self.servers)
        self.version = 0 if state is None else state["step"]
        if state is not None:
            self.schedule.restore(state)
        self.trained(0)

    def trained(self, steps: int = 1) -> None:
        """The step is over, and the servers have the new weights."""
        self.version += steps
        self.schedule.published(WeightsVersion(self.version, f"{self.version:x}"))

    def asked(self, count: int) -> list[int]:
        """The numbers of the groups that were asked for, once there are so many requests."""
        wait_until(lambda: len(self.servers.asked) >= count, TIMEOUT_S, "the requests")
        return [number for number, _, _ in self.servers.asked]

    def finish_all(self) -> None:
        """Once there are the first two steps' requests, each finishes with the present weights."""
        for number in set(self.asked(2 * B)):
            self.servers.finish(number, (0, self.version))

    def collect(self) -> list[Rollout]:
        return self.schedule.collect(self.version)

    def state(self) -> dict[str, Any]:
        return {"step": self.version, "sampler": self.schedule.state()}


def problems(rollouts: Sequence[Rollout]) -> list[str]:
    return list({rollout.group: rollout.problem_id for rollout in rollouts}.values())


@pytest.fixture
def make(tmp_path: Path) -> Any:
    runs: list[Run] = []

    def made(*arguments: Any, **options: Any) -> Run:
        runs.append(Run(tmp_path, *arguments, **options))
        return runs[-1]

    yield made
    for run in runs:
        run.schedule.close()


def decide(buffer: GroupBuffer, group: Group, *rewards: float, weights: int = 0) -> None:
    """The group is complete, of tokens of these weights."""
    response = Response([5], [-1.0], "stop", ((0, WeightsVersion(weights, f"{weights:x}")),))
    for sample, reward in enumerate(rewards):
        group.samples[sample] = Rollout.of(
            response, problem_id=group.problem.id, group=sample, prompt_ids=group.prompt_ids, text="", reward=None
        )
        group.score(sample, RewardResult(reward))
    buffer.decide(group)


def collect_later(run: Run, finish: Callable[[], object]) -> list[Rollout]:
    """Collects, while ``finish`` has servers answer once the first step's groups were asked for."""
    with ThreadPoolExecutor(1) as pool:
        collected = pool.submit(run.collect)
        finish()
        return collected.result(TIMEOUT_S)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_servers_run_ahead_by_so_many_steps_and_no_further(k: int, make: Any) -> None:
    run = make(k, steps=100)

    def finish() -> None:
        assert run.asked((k + 1) * B) == list(range((k + 1) * B))
        for number in (2, 0, 4):  # whatever finishes first is trained on first
            run.servers.finish(number, (0, 0))

    rollouts = collect_later(run, finish)
    assert [rollout.group for rollout in rollouts] == [0, 0, 1, 1, 2, 2]
    assert problems(rollouts) == [ProblemSampler(PROBLEMS, 0).problem(number).id for number in (0, 2, 4)]
    assert len(run.servers.asked) == (k + 1) * B  # the trainer trains with weights that are old by then
    run.trained()
    assert run.asked((k + 2) * B) == list(range((k + 2) * B))


def test_no_more_is_sampled_than_the_run_will_train_on(make: Any) -> None:
    run = make(4, steps=2)
    assert len(collect_later(run, run.finish_all)) == 2 * B
    run.trained()
    assert len(run.collect()) == 2 * B
    run.trained()
    assert len(run.servers.asked) == 2 * B


def test_nothing_is_sampled_with_weights_that_are_undone(make: Any) -> None:
    run = make(steps=100)
    collect_later(run, run.finish_all)
    run.trained()
    asked = len(run.asked(3 * B))
    run.schedule.go_back()
    time.sleep(0.5)  # in which a worker would have claimed more
    assert len(run.servers.asked) == asked
    run.trained(-1)
    assert len(run.asked(asked + B)) == asked + B


def test_a_run_that_goes_back_while_it_reads_the_journal_draws_others(make: Any) -> None:
    run = make(steps=100, journal=True)
    state = run.state()
    first = problems(collect_later(run, run.finish_all))
    run.schedule.close()
    again = make(state=state, steps=100, journal=True)
    assert problems(again.collect()) == first
    again.schedule.go_back()
    again.trained(0)
    assert again.schedule._find(0, ()) is None
    other = problems(collect_later(again, again.finish_all))
    assert not set(other) & set(first)


def test_a_resumed_run_draws_no_group_again_that_it_trained_on_while_an_older_one_of_its_problem_ran(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PROBLEMS", PROBLEMS[:B])
    run = make(steps=100, journal=True)
    state = run.state()
    collect_later(run, lambda: (run.asked(2 * B), [run.servers.finish(number, (0, 0)) for number in range(B, 2 * B)]))
    run.schedule.close()
    again = make(state=state, steps=100, journal=True)
    again.collect()
    again.trained()
    collect_later(again, again.finish_all)
    assert sorted(again.asked(2 * B)) == [*range(B), *range(2 * B, 3 * B)]


def test_a_resumed_run_without_overlap_draws_again_what_was_drawn_ahead(make: Any) -> None:
    """And nothing that it has trained on."""
    run = make(2, steps=100)
    for group in run.schedule._buffer.claim()[B - 1 : 2 * B - 1]:
        decide(run.schedule._buffer, group, 1.0, 0.0)
    run.schedule._buffer.take()
    run.trained()
    state = run.state()
    left = [*range(B - 1), *range(2 * B - 1, 5 * B)]
    for step in (1, 2, 3, 4):
        again = make(state=state, steps=100, schedule="sync")
        buffer = again.schedule._buffer
        buffer.begin(step)
        buffer.drop_step(step)
        buffer.begin(step)
        groups = buffer.claim()
        assert [group.number for group in groups] == left[(step - 1) * B : step * B]
        for group in groups:
            decide(buffer, group, 1.0, 0.0, weights=step)
        assert buffer.take()[0] == groups
        again.trained()
        state = again.state()


def test_a_run_may_go_back_while_its_thread_submits_requests(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(steps=100)
    asked: list[str] = []

    def stream(samples: Any, problem_of: Callable[[int], Problem]) -> Any:
        """As an environment's: asks for the problem of every request."""

        def submit(number: int, *_args: Any, **_options: Any) -> None:
            run.schedule.go_back()
            asked.append(problem_of(number).id)

        monkeypatch.setattr(run.servers, "submit", submit)
        return samples

    monkeypatch.setattr(run.schedule._task, "stream", stream)
    run.schedule._sample(lambda: True)
    assert asked == [problem.id for problem in ProblemSampler(PROBLEMS, 0).next(2 * B)]


class Looked(dict[int, Group]):
    looks = 0

    def values(self) -> Any:
        self.looks += 1
        return super().values()


def test_a_response_costs_no_look_at_all_running_groups(make: Any) -> None:
    buffer = make(1, steps=100).schedule._buffer
    groups = buffer.claim()
    buffer.running = running = Looked(buffer.running)
    for group in groups[:2]:
        for _ in range(100):
            assert buffer.claim() == []
        decide(buffer, group, 1.0, 0.0)
    assert 0 < running.looks <= 3


def test_filters_refuse_any_number_of_groups_while_the_next_step_is_full(make: Any) -> None:
    buffer = make(1, steps=100, filters={"filters": ["zero_variance"], "max_batches": 1}).schedule._buffer
    groups = buffer.claim()
    for group in groups:
        decide(buffer, group, 1.0, float(group.number >= B))
    assert buffer.take()[:2] == (groups[:B], groups[B:])


@pytest.mark.parametrize("stale", ["drop", "keep"])
def test_what_is_too_old_when_its_turn_comes_is_dropped_and_counted_unless_the_config_keeps_it(stale: str, make: Any) -> None:
    run = make(1, steps=100, stale=stale)
    collect_later(run, lambda: (run.asked(2 * B), [run.servers.finish(number, (0, 0)) for number in (1, 2, 3)]))
    run.trained()
    run.asked(3 * B)
    for number in (4, 5, 6):
        run.servers.finish(number, (0, 0), (1, 1))
    assert [token_ages(rollout, 1).tolist() for rollout in run.collect()] == [[1, 0, 0]] * 6
    figures = run.schedule.take_figures()
    assert figures["staleness/mean"] == pytest.approx(1 / 3)
    assert (figures["staleness/max"], figures["staleness/versions"], figures["staleness/dropped"]) == (1, 2, 0)
    run.trained()
    # The room of what will be too old is given to another.
    assert max(run.asked(4 * B + (stale == "drop"))) == 4 * B - (stale == "keep")
    run.servers.finish(0, (0, 0), (2, 2))  # of weights 0, and now it is step 2
    for number in (7, 8) if stale == "keep" else (7, 8, 9):
        run.servers.finish(number, (0, 1))
    ages = sorted(int(token_ages(rollout, 2).max()) for rollout in run.collect()[::2])
    assert ages == ([1, 1, 2] if stale == "keep" else [1, 1, 1])
    assert run.schedule.take_figures()["staleness/dropped"] == (stale == "drop")


def test_what_is_too_old_and_complete_at_the_last_moment_is_dropped(make: Any) -> None:
    run = make(1, steps=100)
    buffer = run.schedule._buffer
    old, *groups = buffer.claim()
    for step in range(3):
        for group in groups:
            decide(buffer, group, 1.0, 0.0, weights=step)
        assert buffer.is_ready()
        if step == 2:
            decide(buffer, old, 1.0, 0.0)
        batch, _, figures = buffer.take()
        run.trained()
        groups = buffer.claim()
    assert (old in batch, figures["staleness/dropped"]) == (False, 1)


def test_the_last_step_draws_what_it_lacks_where_whole_batches_are_drawn(make: Any) -> None:
    """For ``rollout.collect``. After it no room comes for a whole batch."""
    run = make(1, steps=3)
    buffer = run.schedule._buffer
    for step in range(3):
        old, *groups = buffer.claim(batch=True)
        decide(buffer, old, 1.0, 0.0)
        for group in groups:
            decide(buffer, group, 1.0, 0.0, weights=step)
        if step == 2:
            assert not buffer.is_ready()
            (group,) = buffer.claim(batch=True)
            decide(buffer, group, 1.0, 0.0, weights=step)
        assert buffer.is_ready()
        assert (old in buffer.take()[0]) == (step < 2)
        run.trained()


@pytest.mark.parametrize("kind", [ValueError, CancelledError])
def test_an_error_that_is_no_servers_death_ends_the_run(kind: type[BaseException], make: Any) -> None:
    run = make(1, steps=100)
    collect_later(run, run.finish_all)
    run.trained()
    run.asked(3 * B)
    run.servers.fail(kind("a prompt is empty"))
    wait_until(lambda: run.schedule._thread._error is not None, TIMEOUT_S, "the error")
    with pytest.raises(kind, match="a prompt is empty"):
        run.collect()


@settings(max_examples=8)
@given(
    k=st.sampled_from([1, 2]),
    ends=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["saved", "given up", "killed"])), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
    journal=st.booleans(),
)
def test_a_run_that_ends_and_goes_on_trains_on_every_problem_once(
    k: int, ends: list[tuple[int, str]], seed: int, journal: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It ends after some steps: right after a checkpoint, in a step that is given up, or in one that nobody heard of; what
    samples finish first is chance. Whatever happens, the groups of the steps are those of a run that never ended, each once.
    """
    output, rng = tmp_path_factory.mktemp("run"), random.Random(seed)
    trained: dict[int, list[str]] = {}
    saved: dict[str, Any] | None = None
    for steps, how in [*ends, (2, "saved")]:
        run = Run(output, k, state=saved, steps=1000, journal=journal, stale="keep")
        try:
            for last in [False] * steps + [True] * (how != "saved"):
                found = problems(_collect_by_chance(run, rng))
                assert len(found) == B
                if journal:  # what was drawn is not drawn again
                    assert trained.get(run.version, found) == found
                trained[run.version] = found
                if not last:
                    run.trained()
            if how == "given up":
                run.schedule.drop_step(run.version)
            if how != "killed":
                saved = run.state()
        finally:
            run.schedule.close()
    seen = [problem for step, batch in trained.items() if step < saved["step"] for problem in batch]
    order = ProblemSampler(PROBLEMS, 0)
    ahead = [order.problem(group["number"]).id for group in saved["sampler"].get("carried", ())]
    assert len(seen) == B * saved["step"]
    assert sorted([*seen, *ahead]) == sorted(each.id for each in order.next(saved["sampler"]["position"]))


def _collect_by_chance(run: Run, rng: random.Random) -> list[Rollout]:
    """Whatever was asked for finishes in some order, as soon as it was asked for."""
    done: set[int] = {group.number for group in run.schedule._buffer.done}
    with ThreadPoolExecutor(1) as pool:
        collected = pool.submit(run.collect)
        while not collected.done():
            waiting = [number for number, _, _ in list(run.servers.asked) if number not in done]
            if waiting:
                done.add(number := rng.choice(waiting))
                run.servers.finish(number, (0, run.version))
            time.sleep(0.001)
        return collected.result()

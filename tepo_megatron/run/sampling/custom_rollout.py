"""A generation step of the user's own (``rollout.collect``), in place of ``samples_per_prompt`` draws for each prompt. Rank 0
only. What it returns is checked as a record is that is replayed.
"""

from __future__ import annotations

import inspect
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tepo_megatron.config import RunConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.errors import is_ours
from tepo_megatron.run.sampling.group_worker import POLL_INTERVAL_S
from tepo_megatron.run.sampling.inputs import Inputs
from tepo_megatron.run.sampling.step_rewards import answer_of
from tepo_megatron.run.step.minibatches import derive_seed
from tepo_megatron.runtime.user_code import load_user_code, locate_user_code
from tepo_megatron.sampler.protocol import Sampler, ServerDied
from tepo_megatron.sampler.rollout_file import rollout_fault
from tepo_megatron.sampler.sampling import prompt_seed
from tepo_megatron.tasks.data.prompts import encode_prompt
from tepo_megatron.tasks.evaluate.answers import Scorer
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.verifiers import GIVEN

Collect = Callable[[Sequence[Problem], "StepSampler"], Sequence[Rollout]]


class StepSampler:
    """Draws responses and rates them, for one step of a generation step of one's own.

    ``step``: the number of the step, from 1. ``samples``: ``rollout.samples_per_prompt``, how many responses to each problem
    the step must return. Draws depend on the run's seed, the step and the order of the calls, so that a step that is repeated
    draws the same.
    """

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        fleet: Sampler,
        scorer: Scorer,
        step: int,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.step, self.samples = step + 1, config.rollout.samples_per_prompt
        self._config, self._inputs, self._fleet, self._scorer = config, inputs, fleet, scorer
        self._on_progress = on_progress
        self._problems: dict[str, Problem] = {}
        self._calls = 0

    def sample(self, problems: Sequence[Problem], n: int | None = None) -> list[list[Rollout]]:
        """``n`` responses (None: ``samples``) to each problem, by the run's sampling and the servers' present weights; without
        rewards. A problem may have another ``prompt`` than it was given with, but must keep its ``id``.

        Raises what a run's sampling raises; where a server dies, the run starts it again and repeats the step.
        """
        config, tokenizer = self._config, self._inputs.tokenizer
        count = self.samples if n is None else n
        seed = derive_seed(config.seed, self.step - 1, f"collect/{self._calls}")
        self._calls += 1
        self._problems |= {problem.id: problem for problem in problems}
        prompts = [encode_prompt(tokenizer, problem) for problem in problems]
        drawn: list[list[Rollout | None]] = [[None] * count for _ in problems]
        left, sampling = count * len(prompts), config.rollout.sampling
        with self._fleet.sample_stream(sampling, sampling_mask=sampling.truncates, on_move=self._on_progress) as stream:
            for at, prompt in enumerate(prompts):
                stream.submit(at, prompt, prompt_seed(seed, at), count)
            while left:
                found = stream.next(POLL_INTERVAL_S)
                if found is None:
                    continue
                at, index, response = found
                text = tokenizer.decode(response.response_ids.tolist())
                drawn[at][index] = Rollout.of(
                    response, problem_id=problems[at].id, group=at, prompt_ids=prompts[at], text=text, reward=None
                )
                left -= 1
                self._on_progress()
        return [[rollout for rollout in group if rollout is not None] for group in drawn]

    def reward(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with the verifier's rewards; None where it failed. ``problem_id`` says which problem each answers."""
        groups = [rollout.problem_id for rollout in rollouts]
        results = self._scorer.score([(self._problem(rollout), answer_of(rollout)) for rollout in rollouts], groups)
        return [
            replace(rollout, reward=result.reward, reward_parts=result.parts)
            for rollout, result in zip(rollouts, results, strict=True)
        ]

    def _problem(self, rollout: Rollout) -> Problem:
        if rollout.problem_id not in self._problems:
            raise ValueError(f"no problem {rollout.problem_id!r} was sampled in this step; reward what sample() has drawn")
        return self._problems[rollout.problem_id]


def load_collect(config: RunConfig, given: Any = None) -> Collect | None:
    """The run's own generation step: ``given``, or what ``rollout.collect`` names; a class is made without arguments. None: the
    built-in one. Raises ValueError where there is none of that name, or it cannot be called.
    """
    name = config.rollout.collect
    if name is None:
        return None
    what = f"rollout.collect = {name!r}"
    found = given if given is not None else load_user_code(_place(name, what), what)
    if inspect.isclass(found):
        try:
            found = found()
        except Exception as error:
            raise ValueError(f"{what} cannot be made without arguments: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"{what} cannot be called: it is {type(found).__name__}, and a function (problems, sampler) is needed")
    collect: Collect = found
    return collect


def _place(name: str, what: str) -> str:
    if name.startswith(GIVEN):
        raise ValueError(
            f"{what} is a function that a Python program gave to its run, and no other process has it; give it again, "
            "tepo_megatron.train(…, collect=…), or put it into a file and name it path/file.py:function"
        )
    return locate_user_code(name, what)


def call_collect(name: str, collect: Collect, problems: Sequence[Problem], sampler: StepSampler) -> Sequence[Rollout]:
    """What it returns. Raises RuntimeError with its line where it raises anything but what a run's sampling raises."""
    try:
        found = collect(problems, sampler)
    except Exception as error:
        if is_ours(error) or isinstance(error, ServerDied):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise RuntimeError(
            f"rollout.collect = {name} raised {type(error).__name__} in step {sampler.step}: {error} "
            f"({frame.filename}:{frame.lineno})"
        ) from error
    if isinstance(found, str | dict) or not isinstance(found, Sequence) or not all(isinstance(each, Rollout) for each in found):
        raise RuntimeError(
            f"rollout.collect = {name} returned no list of rollouts in step {sampler.step}; return what sample() drew"
        )
    return found


def arranged(
    name: str,
    rollouts: Sequence[Rollout],
    problems: Sequence[Problem],
    *,
    step: int,
    drawn_by: int | None,
    samples: int,
    vocab_size: int,
) -> list[Rollout]:
    """The rollouts group by group, in the order of the problems; their own ``group`` is not read. ``drawn_by``: the step of the
    weights that drew all tokens; None: of any weights.

    Raises RuntimeError with the problem and the fault where one cannot be trained on, or where there are not ``samples`` for
    each problem.
    """
    what = f"step {step + 1}: rollout.collect = {name} returned"
    by_problem: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        newest = max((version.step for _, version in rollout.versions), default=0) if drawn_by is None else drawn_by
        fault = rollout_fault(rollout, newest, vocab_size=vocab_size, stalest=newest if drawn_by is None else 0)
        if fault is not None:
            raise RuntimeError(f"{what} a rollout for problem {rollout.problem_id!r} that cannot be trained on: {fault}")
        by_problem[rollout.problem_id].append(rollout)
    found: list[Rollout] = []
    for place, problem in enumerate(problems):
        group, by_problem[problem.id] = by_problem[problem.id][:samples], by_problem[problem.id][samples:]
        if len(group) < samples:
            raise RuntimeError(
                f"{what} {len(group)} rollouts for problem {problem.id!r}; a group has {samples} (samples_per_prompt)"
            )
        if any(not np.array_equal(each.prompt_ids, group[0].prompt_ids) for each in group):
            raise RuntimeError(f"{what} rollouts with different prompts for problem {problem.id!r}; those of a group share one")
        found += [replace(each, group=place) for each in group]
    left = next((id_ for id_, group in by_problem.items() if group), None)
    if left is not None:
        raise RuntimeError(
            f"{what} rollouts for problem {left!r} that the step did not ask for; return samples for its problems"
        )
    return found


def with_results(rollouts: Sequence[Rollout], problems: Sequence[Problem], scorer: Scorer) -> list[RewardResult]:
    """A result for each: the reward that it has, or the verifier's, where it has none."""
    results = [RewardResult(rollout.reward, parts=rollout.reward_parts) for rollout in rollouts]
    unscored = [at for at, rollout in enumerate(rollouts) if rollout.reward is None]
    if unscored:
        items = [(problems[rollouts[at].group], answer_of(rollouts[at])) for at in unscored]
        for at, result in zip(unscored, scorer.score(items, [rollouts[at].group for at in unscored]), strict=True):
            results[at] = result
    return results

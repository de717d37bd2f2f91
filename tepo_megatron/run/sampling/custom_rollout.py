"""The user's generation step, ``rollout.collect``, runs on rank 0 only."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from tepo_megatron.config import RunConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.run.sampling.group_worker import POLL_INTERVAL_S
from tepo_megatron.run.sampling.inputs import Inputs
from tepo_megatron.run.sampling.step_rewards import answer_of
from tepo_megatron.run.step.minibatches import derive_seed
from tepo_megatron.runtime.user_code import load_user_code
from tepo_megatron.sampler.protocol import Sampler
from tepo_megatron.sampler.sampling import prompt_seed
from tepo_megatron.tasks.data.problems import encode_prompt
from tepo_megatron.tasks.evaluate.answers import Scorer
from tepo_megatron.tasks.reward.verifiers import GIVEN

Collect = Callable[[Sequence[Problem], "StepSampler"], Sequence[Rollout]]


class StepSampler:
    """Draws and rewards responses for a custom generation step.

    ``step``: from 1; of a step drawn ahead, the number of its batch. ``samples``: how many responses to each problem it must
    return. Draws depend on the run's seed, the step and the order of the calls: a repeated step draws the same.
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
        """``n``: responses per problem; None: ``samples``. A problem's ``prompt`` may change, its ``id`` may not. If a server
        dies, this raises; the run restarts the server and repeats the step.
        """
        config, tokenizer = self._config, self._inputs.tokenizer
        count = self.samples if n is None else n
        seed = derive_seed(config.seed, self.step - 1, f"collect/{self._calls}")
        self._calls += 1
        problems = [self._with_prompt(problem) for problem in problems]
        self._problems |= {problem.id: problem for problem in problems}
        prompts = [encode_prompt(tokenizer, problem) for problem in problems]
        drawn: dict[tuple[int, int], Rollout] = {}
        sampling = config.rollout.sampling
        with self._fleet.sample_stream(sampling, sampling_mask=sampling.truncates, on_move=self._on_progress) as stream:
            for number, prompt in enumerate(prompts):
                stream.submit(number, prompt, prompt_seed(seed, number), count)
            while len(drawn) < count * len(prompts):
                if (result := stream.next(POLL_INTERVAL_S)) is None:
                    continue
                number, index, response = result
                text = tokenizer.decode(response.response_ids.tolist())
                drawn[number, index] = Rollout.of(
                    response, problem_id=problems[number].id, group=number, prompt_ids=prompts[number], text=text, reward=None
                )
                self._on_progress()
        return [[drawn[number, index] for index in range(count)] for number in range(len(prompts))]

    def reward(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Rewards are None if the verifier failed. ``problem_id`` names the problem."""
        names = [rollout.problem_id for rollout in rollouts]
        if unknown := next((name for name in names if name not in self._problems), None):
            raise ValueError(f"no problem {unknown!r} was sampled in this step; reward what sample() has drawn")
        items = [(self._problems[rollout.problem_id], answer_of(rollout)) for rollout in rollouts]
        results = [replace(item, reward=None) if item.error else item for item in self._scorer.score(items, names)]
        return [result.of(rollout) for rollout, result in zip(rollouts, results, strict=True)]

    def _with_prompt(self, problem: Problem) -> Problem:
        """A changed prompt is that of the last message."""
        known = self._inputs.by_id.get(problem.id)
        if known is None or not problem.messages or problem.messages != known.messages or problem.prompt == known.prompt:
            return problem
        role, _ = problem.messages[-1]
        return replace(problem, messages=(*problem.messages[:-1], (role, problem.prompt)))


def load_collect(config: RunConfig, function: Any = None) -> Collect | None:
    name = config.rollout.collect
    if name is None:
        return None
    what = f"rollout.collect = {name!r}"
    if function is None and name.startswith(GIVEN):
        raise ValueError(
            f"{what} is a function that a Python program gave to its run, and no other process has it; give it again, "
            "tepo_megatron.train(…, collect=…), or put it into a file and name it path/file.py:function"
        )
    loaded: Any = function if function is not None else load_user_code(name, what)
    if inspect.isclass(loaded):
        try:
            loaded = loaded()
        except (Exception, SystemExit) as error:
            raise ValueError(f"{what} cannot be made without arguments: {type(error).__name__}: {error}") from error
    if not callable(loaded):
        kind = type(loaded).__name__
        raise ValueError(f"{what} cannot be called: it is {kind}, and a function (problems, sampler) is needed")
    return cast(Collect, loaded)

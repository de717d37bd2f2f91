"""The overlapped schedule: servers sample ahead while the trainer trains, and take new weights in the middle of responses."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Response, Rollout, WeightsVersion
from tepo_megatron.run.output.resume import restore_data
from tepo_megatron.run.sampling import length_handling as truncated
from tepo_megatron.run.sampling.async_sampler import AheadSampler, Group, OpenStream
from tepo_megatron.run.sampling.filters import load_filters, refused_by
from tepo_megatron.run.sampling.groups import histogram
from tepo_megatron.run.sampling.inputs import Inputs
from tepo_megatron.run.sampling.journal import Journal
from tepo_megatron.run.sampling.staleness import most_stale, version_figures
from tepo_megatron.run.sampling.step_rewards import StepRewards
from tepo_megatron.run.step.minibatches import derive_seed
from tepo_megatron.runtime.preemption import stop_signals
from tepo_megatron.runtime.watch.heartbeat import Heartbeat
from tepo_megatron.sampler.protocol import Sampler
from tepo_megatron.tasks.data.mixture import make_sampler
from tepo_megatron.tasks.environments.episode_tokens import prompt_of
from tepo_megatron.tasks.protocol import RewardResult, Task, turn_figures

Phase = Callable[[str], contextlib.AbstractContextManager[None]]


class Overlap:
    """Takes each step's groups from those that a thread has sampled ahead; ``rollouts``: those that :meth:`collect` gave last,
    ``drawn`` the same with those that have no reward.

    While step s is due and weights s are the servers', (k + 1) steps' groups may be there, k = ``train.max_staleness``; while
    the trainer trains on one of them, k. So a group that is trained on in the order in which it was drawn is k versions old at
    most; those that take longer to sample are taken later, and are older.

    ``open_stream`` and ``open_verifiers`` as for ``AheadSampler``. All methods are the main thread's.
    """

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        rewards: StepRewards,
        journal: Journal,
        *,
        phase: Phase,
        heartbeat: Heartbeat,
        open_stream: OpenStream,
        open_verifiers: Callable[[], Task],
    ) -> None:
        self._config, self._inputs = config, inputs
        self._rewards, self._journal = rewards, journal
        self._phase, self._heartbeat = phase, heartbeat
        self._signals = stop_signals()
        self._problems = make_sampler(inputs.train, config.data, config.seed)
        self._by_id = {problem.id: problem for problem in inputs.train}
        self._drawn = 0
        """Groups that were drawn, in all."""
        self._taken: tuple[int, list[Group]] = (-1, [])
        """The step that took groups last, and the groups."""
        self._version: WeightsVersion | None = None
        self._sampling = False
        """Whether the thread has begun: not before the journal has given what it has."""
        self._filters = load_filters(config.rollout.filter_groups)
        self._refused = 0
        """Groups that filters refused since the last step."""
        self._seen_rewards: Counter[float] = Counter()
        """Of all that was sampled for it."""
        self._samples = config.rollout.samples_per_prompt
        self._sampler = AheadSampler(
            open_stream,
            open_verifiers,
            self._draw,
            lambda group: derive_seed(config.seed, group.number, "group"),
            self._read,
            self._accept,
            samples=self._samples,
            max_staleness=config.train.max_staleness if config.train.stale == "drop" else None,
        )
        self.drawn: list[Rollout] = []
        self.rollouts: list[Rollout] = []
        self._figures: dict[str, float] = {}

    # -- a step's rollouts -------------------------------------------------------------------------------------------------

    def collect(self, step: int, fleet: Sampler | None) -> list[Rollout]:
        """The step's groups, without responses that have no reward; the same again if called again for the same step.

        Raises ServerDied where too few are there and the servers that should sample them are gone.
        """
        self.drawn = self._collect(step)
        self.rollouts = self._rewards.leave_out(self.drawn)
        trained, figures = truncated.trained(self.rollouts, self._config, step)
        dropped, self._sampler.dropped = self._sampler.dropped, 0
        self._figures = {**version_figures(self.rollouts, step), "staleness/dropped": float(dropped), **figures}
        task = self._sampler.verifiers  # None until the thread samples
        self._figures |= turn_figures(self.rollouts) if task is None else task.take_figures(self.rollouts)
        if self._filters:
            self._figures["groups/filtered"] = float(self._refused)
        self._refused = 0
        self._seen_rewards.clear()
        self._allow(step + 1)
        return trained

    def _collect(self, step: int) -> list[Rollout]:
        with self._phase("journal"):
            drawn_by = self._journal.identity((), (), self._version, schedule=_of_schedule(self._config))
            # What is sampled comes behind what an interrupted run has left: once it has begun, nothing is looked for.
            found = None if self._sampling else self._journal.find(step, drawn_by, stalest=most_stale(self._config, step))
        if found is not None:
            if self._taken[0] != step:
                self._taken = (step, self._pass_over(found.rollouts))
            self._rewards.failed = found.failed_rewards
            return found.rollouts
        if self._taken[0] != step:
            self._taken = (step, self._take(step))
        rollouts, results = self._as_rollouts(self._taken[1])
        rollouts = self._rewards.reward(rollouts, results, step)
        with self._phase("journal"):
            self._journal.write(step, rollouts, drawn_by, self._rewards.failed)
        return rollouts

    def _take(self, step: int) -> list[Group]:
        self._sampling = True
        self._allow(step)
        moves = self._sampler.moves

        def tell() -> None:
            nonlocal moves
            if self._sampler.moves != moves:
                moves = self._sampler.moves
                self._heartbeat.moved()

        with self._phase("rollout"), self._signals.interruptible():
            return self._sampler.take(self._config.rollout.prompts_per_step, step, tell)

    def _allow(self, turn: int) -> None:
        """The next groups are for step ``turn``; how many may be there follows from the weights that the servers have."""
        if self._version is None or not self._sampling:
            return
        steps = min(self._version.step + self._config.train.max_staleness + 1, self._config.train.steps) - turn
        self._sampler.allow(turn, max(0, steps) * self._config.rollout.prompts_per_step)

    def _as_rollouts(self, groups: Sequence[Group]) -> tuple[list[Rollout], list[RewardResult]]:
        rollouts, results = [], []
        for place, group in enumerate(groups):
            for sample in range(self._samples):
                rollouts.append(
                    Rollout.of(
                        group.responses[sample],
                        problem_id=group.problem.id,
                        group=place,
                        prompt_ids=group.prompt,
                        text=str(group.texts[sample]),
                    )
                )
                results.append(group.results[sample])
        return rollouts, results

    def take_figures(self) -> dict[str, float]:
        """Of the step that was just collected, for its row."""
        figures, self._figures = self._figures, {}
        return figures

    # -- what the thread asks ------------------------------------------------------------------------------------------------

    def _accept(self, group: Group) -> bool:
        """Whether no filter refuses a complete group. Raises RuntimeError where filters refuse nearly all."""
        rollouts, results = self._as_rollouts([group])
        rewarded = [replace(rollout, reward=result.reward) for rollout, result in zip(rollouts, results, strict=True)]
        self._seen_rewards.update(each.reward for each in rewarded if each.reward is not None)
        filters = self._config.rollout.filter_groups
        if filters is None or refused_by(self._filters, rewarded) is None:
            return True
        self._refused += 1
        if self._refused >= filters.max_batches * self._config.rollout.prompts_per_step:
            raise RuntimeError(
                f"filters refused {self._refused} groups, rollout.filter_groups.max_batches = {filters.max_batches} times "
                f"prompts_per_step, before a step was full. Rewards of the responses: {histogram(self._seen_rewards)}. If "
                "nearly all are equal, the problems are too hard or too easy for the model, or the verifier does not "
                "understand its answers; else raise max_batches, or take the filter out"
            )
        return False

    def problem_of(self, number: int) -> Problem:
        """Of a group that is being sampled."""
        return self._sampler.problem_of(number)

    def _draw(self) -> Group:
        return self._group(self._problems.next(1)[0].id)

    def _group(self, problem_id: str, number: int | None = None) -> Group:
        problem = self._by_id[problem_id]
        if number is None:
            number, self._drawn = self._drawn, self._drawn + 1
        prompt = prompt_of(self._config.environment, self._inputs.tokenizer, problem)
        return Group(number, problem, prompt)

    def _read(self, response: Response) -> ResponseText:
        text = self._inputs.tokenizer.decode(response.response_ids.tolist())
        return ResponseText(text, response.response_ids, response.finish_reason)

    # -- weights -------------------------------------------------------------------------------------------------------------

    def published(self, version: WeightsVersion) -> None:
        """All servers have these weights, and sample with them."""
        self._version = version
        self._sampler.published(version.step)
        if self._taken[0] >= 0:
            self._allow(self._taken[0] + 1)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within, the servers take weights, or work for another: they count neither as idle nor as busy with samples."""
        self._sampler.clock.hold()
        try:
            yield
        finally:
            self._sampler.clock.release()

    def busy_seconds(self, split: Mapping[str, float]) -> float:
        """Seconds since the last call in which the servers sampled."""
        return self._sampler.clock.take()

    # -- the order of the problems -------------------------------------------------------------------------------------------

    def drop_step(self, step: int) -> None:
        """The step is given up, if it was begun: its groups wait for their turn again."""
        if self._taken[0] == step:
            self._sampler.give_back(self._taken[1])
            self._taken = (-1, [])

    def go_back(self) -> None:
        """All that weights have drawn which are undone is given up. The next steps draw other problems."""
        self._sampler.forget()
        self._taken = (-1, [])

    def state(self) -> dict[str, Any]:
        """Of the order of the problems, for a checkpoint; with what was drawn and not trained on, which is sampled again."""
        with self._sampler.locked():
            ahead = [[group.number, group.problem.id] for group in self._sampler.pending()]
            return {**self._problems.state(), "drawn": self._drawn, "ahead": ahead}

    def restore(self, state: Mapping[str, Any]) -> str | None:
        """Goes on in the data where the run that was saved stopped; see :func:`restore_data`."""
        begun_anew = restore_data(self._problems, state, self._config.train.allow_change)
        if begun_anew is None:
            saved = state["sampler"]
            self._drawn = saved.get("drawn", 0)  # a run that was not overlapped has drawn nothing ahead
            self._sampler.add(self._group(problem_id, number) for number, problem_id in saved.get("ahead", ()))
        return begun_anew

    def _pass_over(self, rollouts: Sequence[Rollout]) -> list[Group]:
        """These are trained on as the journal has them: their groups, which are not sampled. Those drawn before them are."""
        groups = []
        for problem_id in {rollout.group: rollout.problem_id for rollout in rollouts}.values():
            assert problem_id in self._by_id, "the journal is of other problems"
            while (group := self._sampler.remove(problem_id)) is None:
                self._sampler.add([self._draw()])
            groups.append(group)
        return groups

    def close(self) -> None:
        """Ends the thread."""
        self._sampler.close()


def _of_schedule(config: RunConfig) -> dict[str, Any]:
    """What decides which groups meet which step, beside what decides every step's rollouts."""
    train = config.train
    return {"schedule": train.schedule, "k": train.max_staleness, "stale": train.stale, "kv_cache": train.kv_cache}

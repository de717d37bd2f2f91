"""A step's rollouts on rank 0: prompts drawn, sampled, rewarded and filtered, or read from the journal or a replay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.run.output.resume import restore_data
from tepo_megatron.run.sampling import length_handling as truncated
from tepo_megatron.run.sampling.custom_rollout import Collect, StepSampler, arranged, call_collect, with_results
from tepo_megatron.run.sampling.filters import load_filters
from tepo_megatron.run.sampling.groups import Group, StepGroups
from tepo_megatron.run.sampling.inputs import Inputs, read_replay
from tepo_megatron.run.sampling.journal import Journal
from tepo_megatron.run.sampling.prompt_cursor import Draws
from tepo_megatron.run.sampling.staleness import most_stale, version_figures
from tepo_megatron.run.sampling.step_rewards import StepRewards
from tepo_megatron.run.sampling.sync_sampler import Gathering
from tepo_megatron.runtime.preemption import stop_signals
from tepo_megatron.runtime.watch.heartbeat import Heartbeat
from tepo_megatron.sampler.protocol import Sampler
from tepo_megatron.tasks.data.mixture import make_sampler
from tepo_megatron.tasks.environments.episode_tokens import prompt_of
from tepo_megatron.tasks.protocol import Task

Phase = Callable[[str], contextlib.AbstractContextManager[None]]


class RolloutCollector:
    """Remembers which prompts a step drew, so that a step that is repeated or given up gets the same ones again.

    ``phase`` enters a phase of the step; ``heartbeat`` is told what the servers do; ``collect`` is a generation step of the
    user's own. ``rollouts`` are those that :meth:`collect` gave last, with the rewards that the verifier gave; ``drawn`` the
    same with those that have none.
    """

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        rewards: StepRewards,
        task: Task,
        journal: Journal,
        *,
        phase: Phase,
        heartbeat: Heartbeat,
        collect: Collect | None = None,
    ) -> None:
        self._collect_own = collect
        self._config, self._inputs = config, inputs
        self._rewards, self._task, self._journal = rewards, task, journal
        self._phase, self._heartbeat = phase, heartbeat
        self._signals = stop_signals()
        rollout = config.rollout
        filters = load_filters(rollout.filter_groups)
        self._dynamic = rollout.filter_groups is not None or rollout.partial
        self._draws = Draws(
            make_sampler(inputs.train, config.data, config.seed),
            samples=rollout.samples_per_prompt,
            encode=lambda problem: prompt_of(config.environment, inputs.tokenizer, problem),
            begin_step=lambda step, carried: StepGroups(step, rollout, filters, carried),
        )
        self._store = journal.group_store(self._identity, active=self._dynamic)
        self.drawn: list[Rollout] = []
        self.rollouts: list[Rollout] = []
        self._figures: dict[str, float] = {}

    def collect(self, step: int, fleet: Sampler | None) -> list[Rollout]:
        """The responses that a step trains on: ``prompts_per_step`` groups, without responses that have no reward; the same
        again if called again for the same step. ``fleet``: None in a replayed run.

        Raises RuntimeError where filters leave too few groups, or where too few responses are left to train on.
        """
        self.drawn = self._collect(step, fleet)
        self.rollouts = self._rewards.leave_out(self.drawn)
        self._figures |= version_figures(self.rollouts, step) | self._task.take_figures(self.rollouts)
        trained, figures = truncated.trained(self.rollouts, self._config, step)
        self._figures |= figures
        return trained

    def take_figures(self) -> dict[str, float]:
        """Of the step that was just collected, for its row; once."""
        figures, self._figures = self._figures, {}
        return figures

    def _collect(self, step: int, fleet: Sampler | None) -> list[Rollout]:
        if self._config.rollout.replay is not None:
            with self._phase("rollout"):
                return read_replay(self._config, self._inputs.spec.vocab_size, step)
        assert fleet is not None
        # A step that a server's death repeats asks again, and must get the same prompts.
        groups = self._draws.begin(step, fleet.weights_version)
        with self._phase("journal"):
            first = groups.begun_with
            problems, prompts = [group.problem for group in first], [group.prompt_ids for group in first]
            drawn_by = self._journal.identity(problems, prompts, fleet.weights_version)
            found = self._find(step, drawn_by)
        if found is not None:
            return found
        with self._signals.interruptible():
            rollouts = self._sampled(groups, fleet, step)
        figures = groups.figures() if self._dynamic else {}
        self._figures |= figures
        self._draws.end(groups)
        with self._phase("journal"):
            # The entry last: what it is found with must be there.
            self._store.write_state(step, {"drawn_by": drawn_by, "figures": figures, "after": self._draws.state()})
            self._journal.write(step, rollouts, drawn_by, self._rewards.failed)
            self._store.keep_only([group.number for group in self._draws.carried])
        return rollouts

    def _find(self, step: int, drawn_by: str) -> list[Rollout] | None:
        """The step as an interrupted run left it, with what it drew and carried over."""
        after = self._store.read_state(step) if self._dynamic else None
        if self._dynamic and (after is None or after.get("drawn_by") != drawn_by):
            return None
        found = self._journal.find(step, drawn_by, stalest=most_stale(self._config, step))
        if found is None:
            return None
        self._rewards.failed = found.failed_rewards
        self._draws.pass_over(None if after is None else after["after"])
        self._figures |= {} if after is None else after["figures"]
        return found.rollouts

    def _sampled(self, groups: StepGroups, fleet: Sampler, step: int) -> list[Rollout]:
        """Every response of the step, with its reward."""
        if self._collect_own is None:
            self._gather(groups, fleet)
            return self._rewarded(groups, step)
        problems, config = [group.problem for group in groups.begun_with], self._config.rollout
        name, samples, vocab_size = str(config.collect), config.samples_per_prompt, self._inputs.spec.vocab_size
        with self._phase("rollout"):
            sampler = StepSampler(self._config, self._inputs, fleet, self._task, step, self._heartbeat)
            found = call_collect(name, self._collect_own, problems, sampler)
            rollouts = arranged(name, found, problems, step=step, samples=samples, vocab_size=vocab_size)
        with self._phase("reward"):
            results = with_results(rollouts, problems, self._task)
        groups.open.clear()  # nothing of it is carried over
        return self._rewards.reward(rollouts, results, step)

    def _gather(self, groups: StepGroups, fleet: Sampler) -> None:
        config = self._config.rollout
        sampling = config.sampling
        samples = fleet.sample_stream(sampling, sampling_mask=sampling.truncates, on_move=self._heartbeat.moved)
        with self._task.stream(samples, lambda number: groups.open[number].problem) as stream:
            Gathering(
                groups,
                stream,
                self._task,
                self._store,
                draw=lambda: self._draws.draw(groups, fleet.weights_version),
                decode=self._inputs.tokenizer.decode,
                seed=self._config.seed,
                wanted=config.prompts_per_step,
                partial=config.partial,
                moved=self._heartbeat.moved,
                phase=self._phase,
            ).run()

    def _rewarded(self, groups: StepGroups, step: int) -> list[Rollout]:
        """The batch's rollouts as they are recorded. Failures count over all that the step decided."""
        batch, _ = groups.take()
        decided = [*batch, *groups.filtered]
        rollouts = [replace(each, group=at) for at, group in enumerate(decided) for each in group.rollouts()]
        results = [group.results[at] for group in decided for at in range(len(group.samples))]
        rewarded = self._rewards.reward(rollouts, results, step)
        return [rollout for rollout in rewarded if rollout.group < len(batch)]

    def _identity(self, group: Group) -> str:
        """What a group comes of: as a step's, with its place in the run."""
        drawn_by = self._journal.identity([group.problem], [group.prompt_ids], group.version)
        return f"{drawn_by}/{group.number}/{group.step}/{group.place}"

    def drop_step(self, step: int) -> None:
        """The step is given up, if it was begun: its problems are drawn again."""
        self._draws.drop(step)

    def go_back(self) -> None:
        """The next steps draw other problems than those that are undone, also where they have the same numbers."""
        self._draws.forget()

    def state(self) -> dict[str, Any]:
        """Of the order of the problems, and of what is carried over, for a checkpoint."""
        return self._draws.state()

    def restore(self, state: Mapping[str, Any]) -> str | None:
        """Goes on in the data where the run that was saved stopped; see :func:`restore_data`."""
        begun_anew = restore_data(self._draws.sampler, state, self._config.train.allow_change)
        if begun_anew is None:
            self._draws.restore(state["sampler"])
        return begun_anew

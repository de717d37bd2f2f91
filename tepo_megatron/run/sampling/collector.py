"""A step's rollouts on rank 0: sampled, rewarded and filtered, or read from the journal or a replay.

``train.schedule`` chooses the buffer's window: 0 samples within a step (``sync``), k samples ahead in a thread
(``overlap``).
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from tepo_megatron.config import RunConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.errors import is_ours
from tepo_megatron.run.sampling.custom_rollout import Collect, StepSampler
from tepo_megatron.run.sampling.group_worker import POLL_INTERVAL_S, BusyClock, Ended, GroupWorker
from tepo_megatron.run.sampling.groups import Group, GroupBuffer
from tepo_megatron.run.sampling.inputs import Inputs, read_replay
from tepo_megatron.run.sampling.journal import GroupStore, Journal
from tepo_megatron.run.sampling.step_rewards import StepRewards, answer_of, version_figures
from tepo_megatron.runtime.heartbeat import Heartbeat
from tepo_megatron.runtime.preemption import StopSignals
from tepo_megatron.runtime.user_code import line_of
from tepo_megatron.sampler.protocol import Sampler, ServerDied
from tepo_megatron.sampler.rollout_file import Record, rollout_fault
from tepo_megatron.tasks.data.sources import ProblemSampler
from tepo_megatron.tasks.protocol import RewardResult, Task
from tepo_megatron.trainer.run_compatibility import is_allowed


class RolloutCollector:
    """A repeated or dropped step gets the same prompts. For the main thread. ``fleet``: None for a replay. ``rollouts``: of
    the last ``collect``; ``drawn``: also those without a reward.
    """

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        rewards: StepRewards,
        task: Task,
        journal: Journal,
        fleet: Sampler | None,
        *,
        phase: Callable[[str], AbstractContextManager[None]],
        heartbeat: Heartbeat,
        collect: Collect | None = None,
    ) -> None:
        self._config, self._inputs, self._fleet = config, inputs, fleet
        self._rewards, self._task, self._journal = rewards, task, journal
        self._phase, self._heartbeat, self._collect_custom = phase, heartbeat, collect
        self._signals = StopSignals.current()
        rollout, train = config.rollout, config.train
        window = train.max_staleness if train.schedule == "overlap" and fleet is not None else 0
        self._buffer = GroupBuffer(config, inputs, window=window)
        self._is_dynamic = window == 0 and (rollout.filter_groups is not None or rollout.partial)
        self._store = GroupStore(journal, active=self._is_dynamic and rollout.journal)
        self._sampled_task = None if window else task
        """A task belongs to one thread, and evaluations use the run's: window k's thread opens another."""
        self.clock = BusyClock()
        self._thread = _BackgroundThread(self._sample, self._buffer) if window else None
        self._collected_step = -1
        self._has_gone_back = False
        self._moves = 0
        self.drawn: list[Rollout] = []
        self.rollouts: list[Rollout] = []
        self._figures: dict[str, float] = {}

    # -- a step ----------------------------------------------------------------------------------------------------------

    def collect(self, step: int) -> list[Rollout]:
        """The same rollouts for a repeated step. Raises RuntimeError for too few groups or responses, ServerDied if required
        servers are gone.
        """
        if self._collected_step != step:
            self.drawn, self._collected_step = self._collect(step), step
        self.rollouts = self._rewards.leave_out(self.drawn)
        task = self._sampled_task  # None until the thread samples
        self._figures |= version_figures(self.rollouts, step)
        self._figures |= Task.turn_figures(self.rollouts) if task is None else task.take_figures(self.rollouts)
        trained, figures = self._rewards.apply_overlong(self.rollouts, step)
        self._figures |= figures
        return trained

    def take_figures(self) -> dict[str, float]:
        figures, self._figures = self._figures, {}
        return figures

    def _collect(self, step: int) -> list[Rollout]:
        if self._config.rollout.replay is not None:
            with self._phase("rollout"):
                rollouts = read_replay(self._config, self._inputs.spec.vocab_size, step)
            self._inputs.order.drawn += self._config.rollout.prompts_per_step  # for a resumed run that samples
            return rollouts
        first = self._buffer.begin(step)
        with self._phase("journal"):
            recorded = self._find(step, first)
        if recorded is not None:
            return recorded
        if self._thread is None:
            with self._signals.interruptible():
                self._sample(self._buffer.is_ready)
        else:
            self._wait(self._thread)
        batch, filtered, figures = self._buffer.take()
        drawn_by, decided = self._step_identity(first or batch), [*batch, *filtered]
        rollouts = [replace(rollout, group=index) for index, group in enumerate(decided) for rollout in group.rollouts()]
        results = [group.results[sample] for group in decided for sample in range(len(group.samples))]
        rollouts = [rollout for rollout in self._rewards.reward(rollouts, results, step) if rollout.group < len(batch)]
        self._rewards.leave_out(rollouts)  # raises before a step that cannot be trained on is in the journal
        self._figures |= figures
        with self._phase("journal"):
            # The entry is written last: the files that it refers to must exist.
            if self._is_dynamic:
                self._store.write_state(step, {"drawn_by": drawn_by, "figures": figures, "after": self._buffer.state()})
            # One problem may have several groups under way.
            numbers = "" if self._thread is None else "".join(f"/{group.number}" for group in batch)
            self._journal.write(step, rollouts, drawn_by + numbers, self._rewards.failed)
            self._store.keep_only([group.number for group in self._buffer.pending()])
        return rollouts

    def _find(self, step: int, first: Sequence[Group]) -> list[Rollout] | None:
        if self._thread is not None and (self._thread.ident is not None or self._has_gone_back):
            return None  # sampling continues from an interrupted run's groups, or must draw others
        after = self._store.read_state(step) if self._is_dynamic else None
        if self._is_dynamic and (after is None or after.get("drawn_by") != self._step_identity(first)):
            return None

        def drawn_by(entry: Record) -> str | None:
            groups = first or self._buffer.groups_of(problem_ids(entry.rollouts))
            return "".join([self._step_identity(groups), *entry.drawn_by.partition("/")[1:]]) if groups else None

        def problem_ids(rollouts: Sequence[Rollout]) -> list[str]:
            return list({rollout.group: rollout.problem_id for rollout in rollouts}.values())

        entry = self._journal.find(step, drawn_by, stalest=self._config.most_stale(step))
        if entry is None:
            return None
        self._rewards.failed = entry.failed_rewards
        if self._thread is None:
            after = after or {"after": None, "figures": {}}
            self._buffer.skip_step(after["after"])
            self._figures |= after["figures"]
        else:
            numbers = [int(number) for number in entry.drawn_by.split("/")[1:]]
            self._figures |= self._buffer.skip(problem_ids(entry.rollouts), numbers)
        return entry.rollouts

    def _wait(self, thread: _BackgroundThread) -> None:
        if thread.ident is None:
            thread.start()
        moves, buffer = self._moves, self._buffer
        with self._phase("rollout"), self._signals.interruptible(), buffer.changed:
            while True:
                is_ready = buffer.is_ready()
                thread.raise_error(unless_died=is_ready)
                if is_ready:
                    return
                buffer.changed.wait(POLL_INTERVAL_S)
                if moves != self._moves:
                    moves = self._moves
                    self._heartbeat.moved()

    # -- sampling, in the thread of window k -----------------------------------------------------------------------------

    def _sample(self, is_done: Ended) -> None:
        if self._sampled_task is None:
            self._sampled_task = self._task.another()
        if self._collect_custom is not None:
            self._sample_custom(self._collect_custom, self._sampled_task, is_done)
            return
        fleet, sampling = self._fleet, self._config.rollout.sampling
        assert fleet is not None
        worker = GroupWorker(
            self._buffer,
            self._sampled_task,
            self._store,
            self.clock,
            decode=self._inputs.tokenizer.decode,
            seed=self._config.seed,
            partial=self._config.rollout.partial and self._thread is None,
            on_progress=lambda: self._note_move(self._buffer.done),
            phase=self._phase_here,
        )
        samples = fleet.sample_stream(sampling, sampling_mask=sampling.truncates, on_move=self._note_move)
        with self._sampled_task.stream(samples, lambda number: worker.problems[number]) as stream:
            worker.run(stream, is_done)

    def _sample_custom(self, collect: Collect, task: Task, is_done: Ended) -> None:
        buffer, rollout = self._buffer, self._config.rollout
        assert self._fleet is not None
        buffer.requeue()
        while not is_done():
            groups = buffer.claim(batch=True)
            if not groups:
                buffer.wait_for_room(POLL_INTERVAL_S, rollout.prompts_per_step)
                continue
            problems, first = [group.problem for group in groups], groups[0]
            step = first.number // rollout.prompts_per_step if first.step is None else first.step
            sampler = StepSampler(self._config, self._inputs, self._fleet, task, step, self._note_move)
            with self._phase_here("rollout"), self.clock.busy():
                what, vocab_size = f"rollout.collect = {rollout.collect}", self._inputs.spec.vocab_size
                rollouts = _draw_groups(collect, problems, sampler, what, vocab_size, ahead=self._thread is not None)
            unscored = [rollout for rollout in rollouts if rollout.reward is None]
            with self._phase_here("reward"):
                items = [(problems[rollout.group], answer_of(rollout)) for rollout in unscored]
                scored = iter(task.score(items, [rollout.group for rollout in unscored]) if items else ())
            remaining = iter(rollouts)
            for group in groups:
                for sample in range(len(group.samples)):
                    group.samples[sample] = drawn = next(remaining)
                    if drawn.reward is None:
                        group.score(sample, next(scored))
                    else:
                        judged = drawn.teacher_logprobs, drawn.teacher_top
                        group.score(sample, RewardResult(drawn.reward, None, drawn.reward_parts, *judged))
                buffer.decide(group)

    def _phase_here(self, name: str) -> AbstractContextManager[None]:
        return self._phase(name) if self._thread is None else nullcontext()

    def _note_move(self, done: Sequence[Group] | None = None) -> None:
        if self._thread is not None:
            self._moves += 1
        elif done is None:
            self._heartbeat.moved()
        else:
            size = self._config.rollout.prompts_per_step
            self._heartbeat.moved(min(len(done), size), size)

    # -- weights and the time of the servers -----------------------------------------------------------------------------

    def published(self, version: WeightsVersion) -> None:
        with self._buffer.changed:
            self._buffer.version = version
        if self._thread is not None:
            self._thread.resume()

    @property
    def weights(self) -> WeightsVersion:
        assert self._buffer.version is not None, "nothing was published"
        return self._buffer.version

    def idle_shares(self, split: Mapping[str, float]) -> dict[str, float]:
        """Shares of a step without its evaluation. ``split``: seconds by phase."""
        seconds, busy_s = split["time/step"] - split["time/eval"], self.clock.take()
        if seconds <= 0:
            return {}
        waited = sum(split[f"time/{name}"] for name in ("rollout", "reward", "journal"))
        return {"idle/trainer": min(1.0, waited / seconds), "idle/servers": min(1.0, max(0.0, 1 - busy_s / seconds))}

    # -- the order of the problems ---------------------------------------------------------------------------------------

    def drop_step(self, step: int) -> None:
        """The step's problems are drawn again."""
        self._buffer.drop_step(step)
        if self._config.rollout.replay is not None and self._collected_step == step:
            self._inputs.order.drawn -= self._config.rollout.prompts_per_step
        self._collected_step = -1

    def refuse(self, step: int) -> None:
        """No resumed run takes what the servers drew since the last step."""
        self._journal.refuse(step)
        self._store.keep_only(())

    def go_back(self) -> None:
        self._buffer.forget()
        self._collected_step, self._figures, self._has_gone_back = -1, {}, True

    def state(self) -> dict[str, Any]:
        return self._buffer.state()

    @staticmethod
    def changed_order(state: Mapping[str, Any], order: ProblemSampler, config: RunConfig) -> list[str]:
        """Returns the changed fields for which the problems are drawn from the beginning. Raises ValueError for other
        problems or another seed, unless ``train.allow_change`` permits them.
        """
        if "sampler" not in state:
            raise ValueError("the checkpoint does not say which problems were drawn; it was not written by a training run")
        saved, present = state["sampler"], order.state()
        differing = [name for name, key in (("data.train", "problems"), ("seed", "seed")) if saved[key] != present[key]]
        if not all(is_allowed(name, config.train.allow_change) for name in differing):
            order.restore(saved)  # which raises
        return differing

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Returns and raises as ``changed_order``."""
        differing = self.changed_order(state, self._buffer.order, self._config)
        if not differing:
            self._buffer.restore(state["sampler"])
        return differing

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
            if self._sampled_task is not None:
                self._sampled_task.close()

    def _step_identity(self, groups: Sequence[Group]) -> str:
        """``groups``: in window 0 those that the step starts with, in window k those that it trained on."""
        train, also = self._config.train, {}
        if self._thread is not None:
            order = self._buffer.order.state()["problems"]  # the groups come from anywhere in the order
            window = {"k": train.max_staleness, "stale": train.stale, "kv_cache": train.kv_cache, "order": order}
            also["schedule"] = {"schedule": train.schedule, **window}
        prompts = [group.prompt_ids for group in groups]
        return self._journal.identity([group.problem for group in groups], prompts, self._buffer.version, **also)


class _BackgroundThread(threading.Thread):
    """Works while the servers have weights. ``work`` returns when its argument returns true."""

    def __init__(self, work: Callable[[Ended], None], buffer: GroupBuffer) -> None:
        super().__init__(name="sample-ahead", daemon=True)
        self._work, self._buffer = work, buffer
        self._is_ready = self._is_closed = False
        self._error: BaseException | None = None

    def resume(self) -> None:
        with self._buffer.changed:
            self._is_ready = True
            if isinstance(self._error, ServerDied):
                self._error = None
            self._buffer.changed.notify_all()

    def raise_error(self, *, unless_died: bool) -> None:
        """Raises once; with ``unless_died`` not for a server's death."""
        with self._buffer.changed:
            if self._error is not None and not (unless_died and isinstance(self._error, ServerDied)):
                error, self._error = self._error, None
                raise error

    def close(self) -> None:
        """Takes seconds unless user code blocks it; may be called twice."""
        with self._buffer.changed:
            self._is_closed = True
            self._buffer.changed.notify_all()
        if self.is_alive():
            self.join(10 * POLL_INTERVAL_S)

    def run(self) -> None:
        changed = self._buffer.changed
        while True:
            with changed:
                changed.wait_for(lambda: self._is_closed or self._is_ready)
                if self._is_closed:
                    return
                generation = self._buffer.generation
            try:
                self._work(lambda: self._is_closed or self._buffer.generation != generation)  # noqa: B023 read in this round
            except BaseException as error:  # the main thread raises it
                with changed:
                    self._error, self._is_ready = error, False
                    changed.notify_all()


def _draw_groups(
    collect: Collect, problems: Sequence[Problem], sampler: StepSampler, what: str, vocab_size: int, *, ahead: bool
) -> list[Rollout]:
    """Returns groups in the problems' order. ``ahead``: any weights may have drawn them. Errors of ``collect``, and
    rollouts that cannot be trained on, become RuntimeError; sampling errors pass.
    """
    samples = sampler.samples
    try:
        rollouts = collect(problems, sampler)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if is_ours(error) or isinstance(error, ServerDied):
            raise
        raised = f"{type(error).__name__} in step {sampler.step}: {error}{line_of(error, collect)}"
        raise RuntimeError(f"{what} raised {raised}") from error
    is_sequence = isinstance(rollouts, Sequence) and not isinstance(rollouts, str | dict)
    if not is_sequence or not all(isinstance(rollout, Rollout) for rollout in rollouts):
        raise RuntimeError(f"{what} returned no list of rollouts in step {sampler.step}; return what sample() drew")
    what = f"step {sampler.step}: {what} returned"
    by_problem: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        newest = max((version.step for _, version in rollout.versions), default=0) if ahead else sampler.step - 1
        fault = rollout_fault(rollout, newest, vocab_size=vocab_size, stalest=newest if ahead else 0)
        if fault is not None:
            raise RuntimeError(f"{what} a rollout for problem {rollout.problem_id!r} that cannot be trained on: {fault}")
        by_problem[rollout.problem_id].append(rollout)
    arranged: list[Rollout] = []
    for place, problem in enumerate(problems):
        group, by_problem[problem.id] = by_problem[problem.id][:samples], by_problem[problem.id][samples:]
        if len(group) < samples:
            raise RuntimeError(
                f"{what} {len(group)} rollouts for problem {problem.id!r}; a group has {samples} (samples_per_prompt)"
            )
        if any(not np.array_equal(rollout.prompt_ids, group[0].prompt_ids) for rollout in group):
            raise RuntimeError(f"{what} rollouts with different prompts for problem {problem.id!r}; those of a group share one")
        arranged += [replace(rollout, group=place) for rollout in group]
    surplus = next((name for name, group in by_problem.items() if group), None)
    if surplus is not None:
        raise RuntimeError(
            f"{what} rollouts for problem {surplus!r} that the step did not ask for; return samples for its problems"
        )
    return arranged

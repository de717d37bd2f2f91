"""The algorithm, as every rank runs it."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.core.types import Batch
from tepo_megatron.errors import is_ours
from tepo_megatron.run.consistency_checks import Canary
from tepo_megatron.run.output.resume import Resumed
from tepo_megatron.run.rank0 import Rank0
from tepo_megatron.run.step.instability import Rollback, SkippedUpdates, TooManySkippedError
from tepo_megatron.run.step.minibatches import mark_recorded, minibatches, summarize
from tepo_megatron.run.step.placement import Placement
from tepo_megatron.run.step.stopping import Stopping
from tepo_megatron.run.weights import WeightPublisher
from tepo_megatron.runtime.heartbeat import Heartbeat
from tepo_megatron.runtime.machine import this_machine
from tepo_megatron.runtime.preemption import StopRequested
from tepo_megatron.trainer.protocol import Trainer, UpdateResult

_T = TypeVar("_T")


class _WorkFailed(Exception):  # noqa: N818
    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__("an error ends the run")


@dataclass
class Loop:
    config: RunConfig
    engine: Trainer
    rank0: Rank0 | None
    publisher: WeightPublisher
    heartbeat: Heartbeat
    step: int = 0
    servers_are_new: bool = True
    has_drawn: bool = False

    def __post_init__(self) -> None:
        self.stopping = Stopping(saved_step=self.step)
        self.stopping.signals.at_risk = lambda: self.stopping.at_risk(self.step)
        self.stopping.signals.has_trained = lambda: self.step > 0
        placement = Placement(self.config, this_machine())
        self.saves_beside_training = self.engine.broadcast_from_root(placement.saves_beside_training(self.engine.spec))
        keep = None if self.rank0 is None else self.rank0.keep_skipped
        self.skipped = SkippedUpdates(self.config, keep, self.engine.broadcast_from_root)
        self.rollback = Rollback(self.config.train)

    def run(self) -> None:
        """Every rank calls. Signals, skipped steps, and errors of disks, servers, sampling, rewards, checks and evaluation,
        are raised on all ranks once unsaved steps are saved.
        """
        try:
            self.run_steps()
        except StopRequested as stop:
            self.save_before_leaving(stop)
            self.say_failed_callback()
            raise
        except _WorkFailed as failed:
            if self.step > self.stopping.saved_step:
                sentence = f"{failed.error}; the run saves and ends"  # first, since a save may fail, also one under way
                self.on_root(lambda rank0: rank0.output.message(sentence))
                self.save_before_leaving(failed)
            self.say_failed_callback()
            raise failed.error from failed.error.__cause__

    def run_steps(self) -> None:
        self.engine.offload()
        self.heartbeat.phase("servers")
        self.from_root(lambda rank0: rank0.wait_until_ready())
        self.update_weights()
        # The first row is missing at a new start, or if the run ended between a checkpoint and its row.
        if not self.from_root(lambda rank0: rank0.output.last_step == self.step):
            self.evaluate()
            self.log({})
        while self.from_root(lambda rank0: self.step < self.config.train.steps and rank0.callbacks.go_on):
            self.train_step()
        self.finish_save()
        self.onload_trainer()
        if self.step > self.stopping.saved_step:  # a callback ended the run
            self.save()
            self.finish_save()
        self.on_root(lambda rank0: rank0.retention.after_row(self.step))  # the last save may have ended after the last row

    def train_step(self) -> None:
        engine = self.engine
        self.has_drawn = True
        rollouts = self.with_servers(lambda rank0: rank0.collect(self.step))
        with self.phase("score"):
            self.onload_trainer()
            batch = mark_recorded(self.batch_of(rollouts), self.config.log, self.step + 1)
            noise_every = self.config.engine.noise_every
            noise = engine.measure_noise(batch) if noise_every and self.step % noise_every == 0 else {}
            # Mini-batches first: each is scored in the very micro-batches of its update, so that rounding, which depends on a
            # token's place in its micro-batch, cancels in ratios and in differences of entropies (decision 012).
            parts = minibatches(batch, self.config.train.minibatches, seed=self.config.seed, step=self.step)
            scored = [engine.score(part) for part in parts]
            # A step is dropped if its updates take too long.
            self.checked(lambda rank0: rank0.check_rollouts(self.step, scored), unless=self.stopping.update_fits)
        with self.phase("update"), self.stopping.timed_update():
            passes = scored * self.config.train.epochs_per_batch  # in one order: a part keeps the micro-batches of its scores
            updates = [engine.update(part, last=number == len(passes)) for number, part in enumerate(passes, start=1)]
            self.check_skipped(batch, updates)
        self.finish_save(wait=False)
        row = {**summarize(batch, updates), **noise, **self.stopping.take_save_times()}
        reason = self.rollback.reason(row)
        if reason and self.go_back(reason):
            return
        self.step += 1
        row |= engine.memory() | engine.take_routing_metrics()
        self.on_root(lambda rank0: rank0.note_step(self.step, row, passes, updates))
        self.save_if_due()
        self.safe_point()
        self.update_weights()
        self.evaluate()
        self.log(row)

    def batch_of(self, rollouts: list[Rollout] | None) -> Batch:
        """Rollouts that cannot be trained on are not taken from the journal again."""
        teachers = self.checked(lambda rank0: rank0.teachers_of(rollouts or ()))
        try:
            return self.engine.batch_from_root(rollouts, teachers)
        except ValueError as error:
            if not is_ours(error):
                raise
            self.on_root(lambda rank0: rank0.collector.refuse(self.step))
            raise _WorkFailed(error) from None

    def check_skipped(self, batch: Batch, updates: Sequence[UpdateResult]) -> None:
        try:
            self.skipped.check(self.step, batch, updates)
        except TooManySkippedError as error:
            if all(update.skipped for update in updates):  # the trainer is as after the last step, which can be saved
                raise _WorkFailed(error) from None
            raise

    def go_back(self, reason: str) -> bool:
        """Returns false without a checkpoint. Raises RuntimeError if none is whole, or after too many."""
        self.finish_save()
        checkpoint = Resumed.newest_whole(self.config, self.engine, reason)
        if checkpoint is None:
            sentence = f"step {self.step + 1}: {reason}, but there is no checkpoint yet to go back to; the run continues"
            self.on_root(lambda rank0: rank0.output.message(sentence))
            return False
        self.rollback.count(reason)
        self.engine.take_routing_metrics()  # of the undone step
        undone = self.step + 1
        self.engine.checkpoints.load(checkpoint.folder, checked=dict(checkpoint.state))
        self.step = self.stopping.saved_step = checkpoint.step
        sentence = f"step {undone}: {reason}; back to {checkpoint.folder}, with other prompts"
        self.on_root(lambda rank0: rank0.go_back(checkpoint, sentence))
        self.update_weights()
        return True

    def update_weights(self) -> None:
        """Returns when all servers have the weights; shared GPUs are then theirs."""
        while not self.try_update_weights():
            self.servers_are_new = True
        self.servers_are_new = False

    def try_update_weights(self) -> bool:
        engine = self.engine
        with self.phase("sync"):
            engine.onload_weights_only()
            version = engine.weights.version(self.step)
            died = False
            failed: Exception | None = None
            if self.rank0 is None:
                self.publisher.update_weights(version)
            else:
                try:
                    died = self.rank0.update_weights(version, self.publisher)
                except (RuntimeError, ValueError, OSError) as error:
                    if not (isinstance(error, OSError) or is_ours(error)):
                        raise
                    failed = error  # it is raised after the canary, in which the other ranks take part
            # By the step, so that a resumed run checks, and logs, after the same steps; and if all servers have just started.
            sync = 0 if self.servers_are_new else self.step
            prompt = Canary.due_prompt(self.config, engine.spec, sync=sync, has_drawn=self.has_drawn)
            logprobs = () if prompt is None else engine.prompt_logprobs(prompt)
            engine.offload()
            if self.checked(lambda rank0: rank0.revive_or_wake(died, failed)):
                return False
            return prompt is None or not self.checked(lambda rank0: rank0.check_canary(self.step, prompt, logprobs))

    def onload_trainer(self) -> None:
        if self.checked(lambda rank0: rank0.servers.sleep()):
            self.servers_are_new = True
        self.engine.onload()

    def evaluate(self) -> None:
        if self.config.evaluate.any_due(self.step, self.config.train.steps, heldout=self.config.data.heldout is not None):
            self.with_servers(lambda rank0: rank0.evaluate(self.step))

    def save_if_due(self) -> None:
        """Call it right after an update: the GPUs are the trainer's, and no server's death can end the run before."""
        config = self.config.train
        by_count = self.step == config.steps or (config.save_every and self.step % config.save_every == 0)
        if by_count or self.from_root(lambda _: self.stopping.save_is_due(config.save_minutes)):
            self.save()

    def save(self) -> None:
        """If it is written beside training, the checkpoint counts only after ``finish_save``."""
        self.finish_save()
        folder, background = self.config.output / "checkpoints", self.saves_beside_training
        state = self.on_root(lambda rank0: rank0.state() | {"rollback": self.rollback.state()}) or {}
        self.engine.checkpoints.begin(folder, step=self.step, state=state, background=background)
        self.stopping.began_save()
        if not background:
            self.finish_save()

    def finish_save(self, *, wait: bool = True) -> None:
        saved = self.engine.checkpoints.finish(wait=wait)
        if saved is not None:
            self.stopping.saved(saved.step, stage_s=saved.stage_s, write_s=saved.write_s, waited_s=saved.waited_s)

    def save_before_leaving(self, reason: StopRequested | _WorkFailed) -> None:
        self.finish_save()
        engine, saved_step = self.engine, self.stopping.saved_step
        self.on_root(lambda rank0: rank0.collector.drop_step(self.step))
        if self.step > saved_step:
            if self.config.is_colocated:
                self.on_root(lambda rank0: rank0.close())  # the servers have the GPUs, and are not needed again
                engine.broadcast_from_root(None)  # the others wait for that
            engine.onload()
            self.save()
            self.finish_save()
        sentence = self.stopping.describe(reason, saved=self.step > saved_step)
        self.on_root(lambda rank0: self.stopping.signals.say_last(sentence))

    def say_failed_callback(self) -> None:
        """For a run that ends for another reason, which is raised."""
        if self.rank0 is not None and (failure := self.rank0.callbacks.failure) is not None:
            self.rank0.output.message(str(failure))

    def log(self, row: Mapping[str, float]) -> None:
        self.on_root(lambda rank0: rank0.log(self.step, row))
        self.heartbeat.step(self.step)

    def phase(self, name: str) -> AbstractContextManager[None]:
        if self.rank0 is not None:
            return self.rank0.phase(name)
        self.heartbeat.phase(name)
        return contextlib.nullcontext()

    def with_servers(self, work: Callable[[Rank0], _T | None]) -> _T | None:
        """Other ranks return None. If a server dies, revives and updates it, and repeats the work; like ``checked``."""
        results: list[_T | None] = []

        def attempt(rank0: Rank0) -> bool:
            result, stale = rank0.servers.run_or_revive(lambda: work(rank0))
            results.append(result)
            return stale

        while self.checked(attempt):
            self.servers_are_new = True
            self.update_weights()
        return results[-1] if results else None

    def checked(self, work: Callable[[Rank0], _T], *, unless: Callable[[], bool] = bool) -> _T | None:
        """Like ``from_root``. Raises _WorkFailed on every rank if the work fails."""
        errors: list[RuntimeError | ValueError | OSError] = []

        def attempt(rank0: Rank0) -> tuple[_T | None, str | None, bool]:
            try:
                return work(rank0), None, False
            except (RuntimeError, ValueError, OSError) as error:
                is_system = isinstance(error, OSError)
                if not (is_system or is_ours(error)):
                    raise
                errors.append(error)
                return None, str(error), is_system

        answer, problem, is_system = self.from_root(attempt, unless=unless) or (None, None, False)
        if problem is not None:  # a RuntimeError raised below is a sentence, after which no ranks are restarted
            other = OSError(f"rank 0: {problem}") if is_system else RuntimeError(problem)
            raise _WorkFailed(errors[0] if errors else other)
        return answer

    def on_root(self, work: Callable[[Rank0], _T]) -> _T | None:
        return None if self.rank0 is None else work(self.rank0)

    def safe_point(self) -> None:
        self.from_root(lambda _: None)

    def from_root(self, work: Callable[[Rank0], _T], *, unless: Callable[[], bool] = bool) -> _T | None:
        """Broadcasts JSON values. Every rank calls. A safe point: raises StopRequested on every rank after a signal to rank 0,
        also during the work, except while ``unless`` is true there.
        """
        answer: _T | None = None
        with contextlib.suppress(StopRequested):  # rank 0 tells all below
            answer = self.on_root(work)
        requested = self.stopping.signals.requested
        stop = None if requested is None or unless() else int(requested)
        agreed: list[Any] = self.engine.broadcast_from_root([stop, answer])
        if agreed[0] is not None:
            raise StopRequested(agreed[0])
        return agreed[1]

"""What rank 0 does beside training: servers, problems, rewards, evaluation, logs. The other ranks have a ``NonRootDriver``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.run.callbacks.callbacks import Callbacks
from tepo_megatron.run.consistency_checks import Canaries
from tepo_megatron.run.display.lost_time import LostTime
from tepo_megatron.run.metrics.metrics import Stopwatch
from tepo_megatron.run.metrics.source_figures import source_figures
from tepo_megatron.run.metrics.train_samples import train_samples
from tepo_megatron.run.output.output import Output
from tepo_megatron.run.output.resume import Resumed, set_aside_others
from tepo_megatron.run.output.retention import Retention
from tepo_megatron.run.output.token_samples import TokenRecorder
from tepo_megatron.run.sampling.collector import RolloutCollector
from tepo_megatron.run.sampling.custom_rollout import Collect
from tepo_megatron.run.sampling.inputs import Inputs
from tepo_megatron.run.sampling.journal import Journal
from tepo_megatron.run.sampling.step_rewards import StepRewards
from tepo_megatron.run.step.minibatches import derive_seed
from tepo_megatron.run.step.noise_floor import below_the_noise
from tepo_megatron.run.step.nonfinite_updates import write_skipped
from tepo_megatron.run.step.placement import first_server_gpu, this_machine
from tepo_megatron.runtime.preemption import stop_signals
from tepo_megatron.runtime.watch.heartbeat import Heartbeat
from tepo_megatron.sampler.protocol import NO_SERVERS, Sampler, ServerDied
from tepo_megatron.sampler.registry import make_sampler
from tepo_megatron.sampler.sampling import truncation_of
from tepo_megatron.tasks.evaluate.evaluation import VerifierPools, evaluate_all, what_failed, what_is_due
from tepo_megatron.tasks.protocol import Task

if TYPE_CHECKING:
    from tepo_megatron.run.weights import WeightPublisher
    from tepo_megatron.trainer.protocol import UpdateResult

T = TypeVar("T")

_WAITS_FOR = {
    "rollout": "the rollout servers' samples",
    "reward": "the reward workers",
    "sync": "the rollout servers to take the weights",
    "eval": "samples of the held-out problems",
}
"""Phase → whom rank 0 waits for in it, beside the other ranks."""


class RootDriver:
    """Rank 0's driver. Making it starts servers in the background; servers on the trainer's GPUs are started by
    :meth:`wait_until_ready`. It closes ``task``, and not ``pools``, the verifiers of evaluation sets.
    """

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        output: Output,
        heartbeat: Heartbeat,
        task: Task,
        pools: VerifierPools | None = None,
        callbacks: Callbacks | None = None,
        collect: Collect | None = None,
    ) -> None:
        self.config = config
        self.callbacks = callbacks or Callbacks(())
        self.inputs = inputs
        self.tokenizer = inputs.tokenizer
        self.output = output
        self.heartbeat = heartbeat
        self.watch = Stopwatch()
        self._retention = Retention(config, output.message)
        self.task = task
        self._pools = pools or VerifierPools(config, (), task)
        self.rewards = StepRewards(config, self.task, output.message)
        self.fleet: Sampler | None = None
        self._starting: Future[None] | None = None
        if config.rollout.replay is None:
            self.fleet = make_sampler(
                config.rollout.server,
                model_dir=inputs.model_dir,
                dtype=config.model.dtype,
                stop_token_ids=self.tokenizer.eos_ids,
                log_dir=config.output / "logs",
                seed=config.seed,
                first_gpu=first_server_gpu(config, this_machine()),
                report=output.message,
                keep_cache=config.train.kv_cache == "keep",
                trained=True,
                adapter_rank=config.adapter_rank,
                tokenizer=config.servers_need_tokenizer,
            )
            if config.rollout.server.placement != "colocated":
                # Servers take tens of seconds to start; the model is built meanwhile.
                self._starting = ThreadPoolExecutor(1, "fleet").submit(self.fleet.start)
        journal = Journal(config, output.message, output.write_failed)
        self.rollouts = RolloutCollector(
            config,
            inputs,
            self.rewards,
            self.task,
            journal,
            self.fleet,
            phase=self.phase,
            heartbeat=heartbeat,
            collect=collect,
        )
        self._signals = stop_signals()
        self._canaries = Canaries(config, inputs.spec)
        self._evaluation: dict[str, float] = {}
        self._returns = 0
        self._row: dict[str, float] = {}
        """Figures of the step that is not logged yet."""
        self._said_noise = self._has_collected = False
        self._problems = {problem.id: problem for problem in inputs.train}
        self._tokens = TokenRecorder(config.log, self._problems, inputs.tokenizer, output)
        self.lost = LostTime()

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        self.output.progress.phase(name)
        self.heartbeat.phase(name, waits_for=_WAITS_FOR.get(name, ""))
        return self.watch.phase(name)

    def run_or_revive(self, work: Callable[[], T | None]) -> tuple[T | None, bool]:
        with self.lost.if_in_vain("lost/server") as was_in_vain:
            result, died = self._run_or_report(work)
            if died:
                was_in_vain()
                self._revive()
        return result, died

    def _revive(self) -> None:
        self.heartbeat.phase("servers", waits_for="a rollout server that is started again")
        with self._signals.interruptible():
            self._fleet().revive()

    def _run_or_report(self, work: Callable[[], T | None]) -> tuple[T | None, bool]:
        """The result, and whether a server died under it, which is reported and left to be revived."""
        try:
            return work(), False
        except ServerDied as error:
            if self._signals.requested is None:
                self.output.message(f"{error}; starting it again")
            return None, True
        except RuntimeError:
            if self._signals.requested is None:
                raise
            return None, True  # servers got the signal too

    def wait_until_ready(self) -> None:
        if self.fleet is None:
            return
        self.output.progress.phase("servers")  # no phase of the stopwatch: it is no part of a step
        self.heartbeat.phase("servers", waits_for="the rollout servers to start")
        with self._signals.interruptible():
            if self._starting is not None:
                self._starting.result()
            else:
                self.fleet.start()
        self._tell_who_works()

    def _tell_who_works(self) -> None:
        servers = [] if self.fleet is None else self.fleet.addresses
        self.heartbeat.tell(servers=servers, reward_workers=self.config.reward.workers)

    # -- rollouts --------------------------------------------------------------------------------------------------------

    def collect(self, step: int) -> list[Rollout]:
        """G samples of each of the step's prompts, without those that have no reward; the same again if called again for the
        same step."""
        if self.output.last_step == step and not self._has_collected:
            self.watch.split()  # a resumed run has its row already: what the start took is no part of its first step
        self._has_collected = True
        rollouts = self.rollouts.collect(step)
        if self.config.log.train_samples:
            count, decode = self.config.log.train_samples, self.tokenizer.decode
            chosen = train_samples(self.rollouts.drawn, self._problems, count, decode)
            self.output.write_train_samples(step + 1, chosen)
        self.callbacks.tell("on_rollouts", step + 1, step + 1, rollouts)
        return rollouts

    def keep_skipped(self, step: int, skipped: Sequence[Mapping[str, Any]]) -> Path:
        folder = self.config.output / "skipped"
        try:
            path = write_skipped(folder, step, self.rollouts.rollouts, skipped)
        except OSError as error:  # what is kept for study does not end a run
            self.output.message(f"the skipped batch could not be kept: {error}")
            path = folder
        self.output.message(
            f"step {step + 1}: {len(skipped)} of {self.config.train.minibatches} optimizer steps skipped, a number was not "
            f"finite: {skipped[0]['cause']}; see {path}"
        )
        return path

    def go_back(self, found: Resumed, sentence: str) -> None:
        passed_over = [f"{error}; going back to {found.folder.name}" for error in found.damaged]
        for text in [*passed_over, sentence, *set_aside_others(self.config, found)]:
            self.message(text)
        self.rollouts.go_back()
        self.lost.add("lost/rollback", self.output.resume_from(found.step) + self.watch.elapsed())
        self._returns += 1

    # -- weights ---------------------------------------------------------------------------------------------------------

    def update_weights(self, version: WeightsVersion, publisher: WeightPublisher) -> bool:
        with self.lost.if_in_vain("lost/server") as was_in_vain, self.rollouts.hold_clock():
            died = self._run_or_report(lambda: publisher.update_weights(version))[1]
            if died:
                was_in_vain()
            else:
                self.rollouts.published(version)
        return died

    def revive_or_wake(self, died: bool) -> bool:
        if self.fleet is None:
            return False
        if died:
            with self.lost.if_in_vain("lost/server") as was_in_vain:
                was_in_vain()
                self._revive()
            return True
        return self.run_or_revive(self.fleet.wake_up)[1]

    def sleep_servers(self) -> None:
        if self.fleet is not None:
            self.run_or_revive(self.fleet.sleep)

    def check_canary(self, step: int, prompt: Sequence[int], logprobs: Sequence[float]) -> None:
        self._canaries.check_servers(self._fleet(), step, prompt, logprobs, is_logged=self.has_logged(step))

    def check_rollouts(self, step: int, parts: Sequence[Batch]) -> None:
        self._canaries.check_rollouts(step, parts, self.rollouts.rollouts)

    def _fleet(self) -> Sampler:
        assert self.fleet is not None, "a replayed run has no servers"
        return self.fleet

    # -- evaluation and logs ---------------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> None:
        if self.config.rollout.replay is not None:
            return
        with self.phase("eval"), self.rollouts.hold_clock(), self._signals.interruptible():
            fleet, truncation = self._fleet(), truncation_of(self.config.rollout.sampling)
            told: dict[str, Any] = {"on_progress": self.heartbeat.moved, "on_move": self.heartbeat.moved}
            generate, heldout = partial(fleet.generate, **truncation, **told), self.inputs.heldout
            result = evaluate_all(
                self.config,
                *what_is_due(self.config, heldout, self.inputs.sets, step),
                generate=generate,
                generate_heldout=self.task.heldout_generate(generate, fleet, heldout, **truncation, **told),
                tokenizer=self.tokenizer,
                pools=self._pools,
                seed=partial(derive_seed, self.config.seed, step),
            )
        for sentence in what_failed(result):
            self.output.message(sentence)
        self._evaluation = result.metrics
        self.output.write_samples(step, result.samples)
        self.callbacks.tell("on_evaluation", step, step, result)

    def goes_on(self, step: int) -> bool:
        return step < self.config.train.steps and self.callbacks.go_on

    def has_logged(self, step: int) -> bool:
        return self.output.last_step == step

    def log(self, step: int, row: Mapping[str, float]) -> None:
        split = self.watch.split()
        figures = {**self._row, **row, **self._evaluation, **self._canaries.take_figures()}
        if "response_tokens" in row:
            figures["tokens/s"] = row["response_tokens"] / split["time/step"]
        self._row, self._evaluation = {}, {}
        self.lost.add("lost/skipped", split["time/step"] * row.get("update/skipped", 0.0) / self.config.train.minibatches)
        servers = NO_SERVERS
        if self.fleet is not None:
            servers = self.fleet.figures() | self.rollouts.idle_shares(split)
        written = self.output.write_row(step, {**figures, **servers, **split, **self.lost.split()})
        self.heartbeat.step(step)
        self._tell_who_works()
        self._retention.after_row(step)
        if not self._said_noise:
            for sentence in below_the_noise(self.config.objective, figures):
                self.output.message(sentence)
                self._said_noise = True
        self.callbacks.tell("on_step_end", step, step, written)

    def note_step(self, step: int, row: Mapping[str, float], parts: Sequence[Batch], updates: Sequence[UpdateResult]) -> None:
        self._tokens.record(step, self.rollouts.rollouts, parts, updates)
        counts = {**self.rewards.take_figures(), "rollback/count": float(self._returns)}
        counts |= source_figures(self.rollouts.rollouts, self._problems)
        self._row = {**self.rollouts.take_figures(), **row, **counts, **self._canaries.take_figures()}
        self._returns = 0

    def state(self) -> dict[str, Any]:
        return {"sampler": self.rollouts.state(), "row": self._row}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on in the data where the run that was saved stopped; its last row is written if it was not."""
        begun_anew = self.rollouts.restore(state)
        if begun_anew is not None:
            self.output.message(begun_anew)
        if not self.has_logged(state["step"]):
            self._row = dict(state.get("row", {}))  # checkpoints of 0.1.0 lack it

    def drop_step(self, step: int) -> None:
        self.rollouts.drop_step(step)

    def message(self, text: str) -> None:
        self.output.message(text)

    def close(self) -> None:
        """Ends servers and verifiers; safe after any failure, also while the servers are still starting."""
        self.rollouts.close()
        if self.fleet is not None:
            self.fleet.stop()
        self.task.close()

"""Rank 0's work besides training: it collects rollouts, evaluates, checks, and writes the run's output."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.run.callbacks.callbacks import Callbacks
from tepo_megatron.run.consistency_checks import Canaries
from tepo_megatron.run.display.figures import LostTime
from tepo_megatron.run.metrics.metrics import Stopwatch
from tepo_megatron.run.metrics.summary import source_figures
from tepo_megatron.run.output.output import Output, Retention
from tepo_megatron.run.output.resume import Resumed, set_aside_others
from tepo_megatron.run.output.token_samples import TokenRecorder, train_samples
from tepo_megatron.run.sampling.collector import RolloutCollector
from tepo_megatron.run.sampling.custom_rollout import Collect
from tepo_megatron.run.sampling.inputs import Inputs
from tepo_megatron.run.sampling.journal import Journal
from tepo_megatron.run.sampling.step_rewards import StepRewards
from tepo_megatron.run.servers import Servers
from tepo_megatron.run.step.instability import below_the_noise, write_skipped
from tepo_megatron.run.step.minibatches import derive_seed
from tepo_megatron.runtime.preemption import stop_signals
from tepo_megatron.runtime.watch.heartbeat import Heartbeat
from tepo_megatron.sampler.protocol import NO_SERVERS
from tepo_megatron.sampler.sampling import truncation_of
from tepo_megatron.tasks.evaluate.evaluation import VerifierPools, evaluate_all, what_failed, what_is_due
from tepo_megatron.tasks.protocol import Task

if TYPE_CHECKING:
    from tepo_megatron.run.weights import WeightPublisher
    from tepo_megatron.trainer.protocol import UpdateResult

_WAITS_FOR = {
    "rollout": "the rollout servers' samples",
    "reward": "the reward workers",
    "sync": "the rollout servers to take the weights",
    "eval": "samples of the held-out problems",
}


class Rank0:
    """Rank 0's part of a run. It closes ``task``, and not ``pools``, the verifiers of evaluation sets."""

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
        self.config, self.output, self.heartbeat = config, output, heartbeat
        self.callbacks = callbacks or Callbacks(())
        self.watch, self.lost = Stopwatch(), LostTime()
        self.servers = Servers(config, inputs, output, heartbeat, self.lost)
        self.checks = Canaries(config, inputs.spec)
        self._inputs, self._task = inputs, task
        self._pools = pools or VerifierPools(config, (), task)
        self._retention = Retention(config, output.message)
        self._rewards = StepRewards(config, task, output.message)
        self.collector = RolloutCollector(
            config,
            inputs,
            self._rewards,
            task,
            Journal(config, output.message, output.write_failed),
            self.servers.sampler,
            phase=self.phase,
            heartbeat=heartbeat,
            collect=collect,
        )
        self._signals = stop_signals()
        self._problems = {problem.id: problem for problem in inputs.train}
        self._tokens = TokenRecorder(config.log, self._problems, inputs.tokenizer, output)
        self._evaluation: dict[str, float] = {}
        self._row: dict[str, float] = {}
        self._returns = 0
        self._has_warned = self._has_collected = False

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        self.output.progress.phase(name)
        self.heartbeat.phase(name, waits_for=_WAITS_FOR.get(name, ""))
        return self.watch.phase(name)

    # -- rollouts --------------------------------------------------------------------------------------------------------

    def collect(self, step: int) -> list[Rollout]:
        if self.output.last_step == step and not self._has_collected:
            self.watch.split()  # a resumed run has its row already: the time of its start belongs to no step
        self._has_collected = True
        rollouts = self.collector.collect(step)
        if count := self.config.log.train_samples:
            chosen = train_samples(self.collector.drawn, self._problems, count, self._inputs.tokenizer.decode)
            self.output.write_train_samples(step + 1, chosen)
        self.callbacks.tell("on_rollouts", step + 1, step + 1, rollouts)
        return rollouts

    def keep_skipped(self, step: int, skipped: Sequence[Mapping[str, Any]]) -> Path:
        """Saves the last rollouts after mini-batches were ``skipped``; returns the file."""
        folder = self.config.output / "skipped"
        try:
            path = write_skipped(folder, step, self.collector.rollouts, skipped)
        except OSError as error:  # a file that is kept for study does not end a run
            self.output.message(f"the skipped batch could not be kept: {error}")
            path = folder
        self.output.message(
            f"step {step + 1}: {len(skipped)} of {self.config.train.minibatches} optimizer steps skipped, a number was not "
            f"finite: {skipped[0]['cause']}; see {path}"
        )
        return path

    def go_back(self, checkpoint: Resumed, sentence: str) -> None:
        passed_over = [f"{error}; going back to {checkpoint.folder.name}" for error in checkpoint.damaged]
        for text in [*passed_over, sentence, *set_aside_others(self.config, checkpoint)]:
            self.output.message(text)
        self.collector.go_back()
        self.lost.add("lost/rollback", self.output.resume_from(checkpoint.step) + self.watch.elapsed())
        self._returns += 1

    # -- servers ---------------------------------------------------------------------------------------------------------

    def update_weights(self, version: WeightsVersion, publisher: WeightPublisher) -> bool:
        """Returns whether a server died. It stays dead until ``servers.revive_or_wake``: its GPU memory may still be the
        trainer's.
        """
        with self.lost.if_in_vain("lost/server") as was_in_vain, self.collector.hold_clock():
            died = self.servers.run_or_report(lambda: publisher.update_weights(version))[1]
            if died:
                was_in_vain()
            else:
                self.collector.published(version)
        return died

    def check_canary(self, step: int, prompt: Sequence[int], logprobs: Sequence[float]) -> None:
        """Raises RuntimeError if log-probs of a prompt are too far apart."""
        assert self.servers.sampler is not None, "a replayed run has no servers"
        self.checks.check_servers(self.servers.sampler, step, prompt, logprobs, is_logged=self.output.last_step == step)

    # -- evaluation and logs ---------------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> None:
        sampler = self.servers.sampler
        if sampler is None:
            return
        with self.phase("eval"), self.collector.hold_clock(), self._signals.interruptible():
            settings: dict[str, Any] = {"on_progress": self.heartbeat.moved, "on_move": self.heartbeat.moved}
            settings |= truncation_of(self.config.rollout.sampling)
            generate, heldout = partial(sampler.generate, **settings), self._inputs.heldout
            result = evaluate_all(
                self.config,
                *what_is_due(self.config, heldout, self._inputs.sets, step),
                generate=generate,
                generate_heldout=self._task.heldout_generate(generate, sampler, heldout, **settings),
                tokenizer=self._inputs.tokenizer,
                pools=self._pools,
                seed=partial(derive_seed, self.config.seed, step),
            )
        for sentence in what_failed(result):
            self.output.message(sentence)
        self._evaluation = result.metrics
        self.output.write_samples(step, result.samples)
        self.callbacks.tell("on_evaluation", step, step, result)

    def note_step(self, step: int, row: Mapping[str, float], parts: Sequence[Batch], updates: Sequence[UpdateResult]) -> None:
        """Keeps an updated step's figures until they are logged; records token values if due."""
        rollouts = self.collector.rollouts
        self._tokens.record(step, rollouts, parts, updates)
        counts = {**self._rewards.take_figures(), "rollback/count": float(self._returns)}
        counts |= source_figures(rollouts, self._problems)
        self._row = {**self.collector.take_figures(), **row, **counts, **self.checks.take_figures()}
        self._returns = 0

    def log(self, step: int, row: Mapping[str, float]) -> None:
        split = self.watch.split()
        figures = {**self._row, **row, **self._evaluation, **self.checks.take_figures()}
        if "response_tokens" in row:
            figures["tokens/s"] = row["response_tokens"] / split["time/step"]
        self._row, self._evaluation = {}, {}
        self.lost.add("lost/skipped", split["time/step"] * row.get("update/skipped", 0.0) / self.config.train.minibatches)
        sampler = self.servers.sampler
        figures |= NO_SERVERS if sampler is None else sampler.figures() | self.collector.idle_shares(split)
        written = self.output.write_row(step, {**figures, **split, **self.lost.split()})
        self.servers.report_addresses()
        self._retention.after_row(step)
        if not self._has_warned:
            for sentence in below_the_noise(self.config.objective, figures):
                self.output.message(sentence)
                self._has_warned = True
        self.callbacks.tell("on_step_end", step, step, written)

    # -- state -----------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"sampler": self.collector.state(), "row": self._row}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues in the data; writes the saved run's last row if it is missing."""
        restart = self.collector.restore(state)
        if restart is not None:
            self.output.message(restart)
        if self.output.last_step != state["step"]:
            self._row = dict(state.get("row", {}))  # checkpoints of 0.1.0 lack it

    def close(self) -> None:
        self.collector.close()
        self.servers.stop()
        self._task.close()

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.errors import is_ours
from tepo_megatron.run.callbacks import Callbacks
from tepo_megatron.run.consistency_checks import Canaries
from tepo_megatron.run.display.figures import LOST
from tepo_megatron.run.metrics import Stopwatch
from tepo_megatron.run.output.output import Output, Retention
from tepo_megatron.run.output.resume import Resumed
from tepo_megatron.run.output.token_samples import token_samples, train_samples
from tepo_megatron.run.sampling.collector import RolloutCollector
from tepo_megatron.run.sampling.custom_rollout import Collect
from tepo_megatron.run.sampling.inputs import Inputs
from tepo_megatron.run.sampling.journal import Journal
from tepo_megatron.run.sampling.served_teachers import ServedTeachers
from tepo_megatron.run.sampling.step_rewards import StepRewards
from tepo_megatron.run.step.instability import ObjectiveWatch
from tepo_megatron.run.step.minibatches import derive_seed, source_figures
from tepo_megatron.run.step.placement import Placement
from tepo_megatron.run.weights import WeightPublisher
from tepo_megatron.runtime.heartbeat import Heartbeat
from tepo_megatron.runtime.machine import this_machine
from tepo_megatron.runtime.preemption import StopSignals
from tepo_megatron.runtime.restarts import job_of_checkpoints
from tepo_megatron.sampler.protocol import NO_SERVERS, Sampler, ServerDied, make_sampler
from tepo_megatron.sampler.rollout_file import write_rollouts
from tepo_megatron.sampler.sampling import truncation_of
from tepo_megatron.tasks.evaluate.evaluation import evaluate_all
from tepo_megatron.tasks.protocol import Task
from tepo_megatron.trainer.protocol import UpdateResult

_WAITS_FOR = {
    "rollout": "the rollout servers' samples",
    "reward": "the reward workers",
    "sync": "the rollout servers to take the weights",
    "eval": "samples of the held-out problems",
}


class Rank0:
    """It closes ``task``, but not ``pools``, the verifiers of evaluation sets."""

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        output: Output,
        heartbeat: Heartbeat,
        task: Task,
        pools: Mapping[str | None, Task],
        callbacks: Callbacks,
        collect: Collect | None,
    ) -> None:
        self.config, self.output, self.heartbeat = config, output, heartbeat
        self.callbacks = callbacks
        self.watch = Stopwatch()
        self.lost: defaultdict[str, float] = defaultdict(float)  # seconds by cause
        self.servers = _Servers(config, inputs, output, heartbeat, self.lost)
        self.teachers = ServedTeachers(config, inputs, output.message)
        self.checks = Canaries(config, inputs.spec, on_move=heartbeat.moved)
        self._inputs, self._task, self._pools = inputs, task, pools
        self.retention = Retention(config, output.message)
        self._rewards = StepRewards(config, output.message)
        judged = self.teachers.judged(task)
        journal = Journal(config, output.message, output.write_failed, inputs.tokenizer.eos_ids)
        self.collector = RolloutCollector(
            config,
            inputs,
            self._rewards,
            judged,
            journal,
            self.servers.sampler,
            phase=self.phase,
            heartbeat=heartbeat,
            collect=collect,
        )
        self._signals = StopSignals.current()
        self._problems = inputs.by_id
        self._sources = sorted({problem.source for problem in inputs.train} - {""})  # a single source may have no name
        self._evaluation: dict[str, float] = {}
        self._row: dict[str, float] = {}
        self._returns = 0
        self._has_collected = False
        self._objective_watch = ObjectiveWatch(config.objective)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        self.output.progress.phase(name)
        self.heartbeat.phase(name, waits_for=_WAITS_FOR.get(name, ""))
        return self.watch.phase(name)

    def teachers_of(self, rollouts: Sequence[Rollout]) -> list[int] | None:
        """Returns the number of each one's teacher, if there are several."""
        names = list(self.config.teachers)
        if len(names) < 2 or not rollouts:
            return None
        problems = [rollout.problem_id for rollout in rollouts]
        if unknown := next((name for name in problems if name not in self._problems), None):
            raise ValueError(
                f"the problem {unknown!r} of rollout.replay is not in data.train, whose sources name the teachers; give the "
                "data of the recorded run"
            )
        return [names.index(self.config.teacher_of(self._problems[name].source) or "") for name in problems]

    # -- rollouts --------------------------------------------------------------------------------------------------------

    def collect(self, step: int) -> list[Rollout]:
        if self.output.last_step == step and not self._has_collected:
            self.watch.split()  # a resumed run has its row already: the time of its start belongs to no step
        self._has_collected = True
        rollouts = self.collector.collect(step)
        if self.config.rollout.replay is not None:
            sentence = self.checks.check_record(step, self.collector.drawn, self.collector.weights)
            if sentence is not None:
                self.output.message(sentence)
        if count := self.config.log.train_samples:
            chosen = train_samples(self.collector.drawn, self._problems, count, self._inputs.tokenizer.decode)
            self.output.write_samples(step + 1, chosen, trained=True)
        self.callbacks.tell("on_rollouts", step + 1, step + 1, rollouts)
        return rollouts

    def keep_skipped(self, step: int, skipped: Sequence[Mapping[str, Any]]) -> Path:
        """Writes the rollouts, as for ``rollout.replay``, and the causes as JSON; returns the latter's path."""
        path = folder = self.config.output / "skipped"
        drawn = self.collector.drawn  # a record has those without a reward, too
        places = {id(rollout): place for place, rollout in enumerate(drawn)}
        trained = [places[id(rollout)] for rollout in self.collector.rollouts]
        causes = [{**entry, "rollouts": [trained[index] for index in entry["rollouts"]]} for entry in skipped]
        try:
            path = write_rollouts(folder, step, drawn).with_suffix(".json")
            path.write_text(json.dumps({"step": step, "skipped": causes}, indent=2) + "\n", encoding="utf-8")
            # Not by number: a run that went back writes lower ones again.
            records = sorted(folder.glob("step_*.jsonl"), key=lambda record: (record.stat().st_mtime_ns, record.name))
            for record in records[: -self.config.train.max_skipped - 1]:  # what stopped a run stays whole
                record.unlink()
                record.with_suffix(".json").unlink(missing_ok=True)
        except OSError as error:  # a file that is kept for study does not end a run
            self.output.message(f"the skipped batch could not be kept: {error}")
        self.output.message(
            f"step {step + 1}: {len(skipped)} of {self.config.train.updates_per_step} optimizer steps skipped, a number was "
            f"not finite: {skipped[0]['cause']}; see {path}"
        )
        return path

    def go_back(self, checkpoint: Resumed, sentence: str) -> None:
        passed_over = [f"{error}; going back to {checkpoint.folder.name}" for error in checkpoint.damaged]
        for text in [*passed_over, sentence, *checkpoint.set_aside_others(self.config)]:
            self.output.message(text)
        self.collector.go_back()
        self.checks.take_figures()  # of the undone step
        self.lost["lost/rollback"] += self.resume_from(checkpoint.step) + self.watch.split()["time/step"]
        self.lost.pop("lost/server", None)  # of the undone step, whose seconds are in lost/rollback
        self.collector.clock.take()
        self._returns += 1

    def resume_from(self, step: int) -> float:
        """Returns the seconds of the dropped steps, whose returns the next row counts."""
        seconds, returns = self.output.resume_from(step)
        self._returns += returns
        return seconds

    # -- servers ---------------------------------------------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        self.servers.wait_until_ready()
        self.teachers.check_started()  # before an evaluation that may take long

    def update_weights(self, version: WeightsVersion, publisher: WeightPublisher) -> bool:
        """Returns whether a server died; it stays dead until ``servers.revive_or_wake``, since the trainer may use its GPU."""
        start = time.monotonic()
        with self.collector.clock.hold():
            died = self.servers.run_or_report(lambda: publisher.update_weights(version))[1]
        if died:
            self.lost["lost/server"] += time.monotonic() - start
        else:
            self.collector.published(version)
        return died

    def revive_or_wake(self, died: bool, failed: Exception | None) -> bool:
        """Returns whether some servers have stale weights, after a weight update."""
        if failed is not None:
            raise failed
        return self.servers.revive_or_wake(died)

    def check_rollouts(self, step: int, scored: Sequence[Batch]) -> None:
        try:
            self.checks.check_rollouts(step, scored, self.collector.rollouts)
        except RuntimeError as error:
            if is_ours(error):
                self.collector.refuse(step)
            raise

    def check_canary(self, step: int, prompt: Sequence[int], logprobs: Sequence[float]) -> bool:
        """Returns whether a server died; it is revived with stale weights."""
        sampler, is_logged = self.servers.sampler, self.output.last_step == step
        assert sampler is not None, "a replayed run has no servers"
        check = partial(self.checks.check_servers, sampler, step, prompt, logprobs, is_logged=is_logged)
        with self._signals.interruptible():  # servers whose slots are busy answer late
            return self.servers.run_or_revive(check)[1]

    # -- evaluation and logs ---------------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> None:
        sampler = self.servers.sampler
        if sampler is None:
            return
        with self.phase("eval"), self.collector.clock.hold(), self._signals.interruptible():
            settings: dict[str, Any] = {"on_progress": self.heartbeat.moved, "on_move": self.heartbeat.moved}
            settings |= truncation_of(self.config.rollout.sampling)
            generate, heldout = partial(sampler.generate, **settings), self._inputs.heldout
            scorers: dict[str | None, Any] = {
                name: SimpleNamespace(score=partial(pool.score, on_move=self.heartbeat.moved))
                for name, pool in self._pools.items()
            }
            result = evaluate_all(
                self.config,
                heldout,
                self._inputs.sets,
                generate=generate,
                generate_heldout=self._task.heldout_generate(generate, sampler, heldout, **settings),
                tokenizer=self._inputs.tokenizer,
                pools=scorers,
                seed=partial(derive_seed, self.config.seed, step),
                step=step,
            )
        for sentence in result.warnings:
            self.output.message(sentence)
        self._evaluation = result.metrics
        self.output.write_samples(step, result.samples)
        self.callbacks.tell("on_evaluation", step, step, result)

    def note_step(self, step: int, row: Mapping[str, float], parts: Sequence[Batch], updates: Sequence[UpdateResult]) -> None:
        rollouts = self.collector.rollouts
        if (log := self.config.log).records_tokens(step):
            problems, tokenizer = self._problems, self._inputs.tokenizer
            samples = token_samples(step, rollouts, parts, updates, log.token_samples, problems, tokenizer)
            self.output.tokens.write(samples)
        counts = {**self._rewards.take_figures(), "rollback/count": float(self._returns)}
        counts |= source_figures(self._sources, rollouts, self._problems, parts)
        self._row = {**self.collector.take_figures(), **row, **counts, **self.checks.take_figures()}
        self._returns = 0
        for sentence in filter(None, (self._objective_watch.equal_rewards(row), self._objective_watch.clip(row, updates))):
            self.output.message(f"step {step}: {sentence}")

    def log(self, step: int, row: Mapping[str, float]) -> None:
        split = self.watch.split()
        figures = {**self._row, **row, **self._evaluation, **self.checks.take_figures()}
        if "response_tokens" in row:
            figures["tokens/s"] = row["response_tokens"] / split["time/step"]
        self._row, self._evaluation = {}, {}
        self.lost["lost/skipped"] += split["time/step"] * row.get("update/skipped", 0.0) / self.config.train.updates_per_step
        sampler = self.servers.sampler
        counted = [item.figures() for item in (sampler, *self.teachers.samplers.values()) if item is not None]
        figures |= {name: sum(counts[name] for counts in counted) + 0.0 for name in NO_SERVERS}
        times = split if sampler is None else split | self.collector.idle_shares(split)
        if step and not self._has_collected:  # an earlier process did the step: the times are those of this one's start
            times = {}
        written = self.output.write_row(step, {**figures, **times, **dict.fromkeys(LOST, 0.0), **self.lost})
        self.lost.clear()
        self.servers.report_servers()
        self.retention.after_row(step, written)
        for sentence in self._objective_watch.noise(figures):
            self.output.message(sentence)
        self.callbacks.tell("on_step_end", step, step, written)

    # -- state -----------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        state = {"sampler": self.collector.state(), "row": self._row, "first_gap": self.checks.first_gap}
        return state | ({"job": job} if (job := job_of_checkpoints()) else {})

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        restarted = self.collector.restore(state)
        self.checks.first_gap = state.get("first_gap")  # so that a resumed run has the same rows
        if self.output.last_step != state["step"]:
            self._row = dict(state.get("row", {}))  # checkpoints of 0.1.0 lack it
        return restarted

    def close(self) -> None:
        self.collector.close()
        self.servers.stop()
        self.teachers.close()
        self._task.close()


_T = TypeVar("_T")


class _Servers:
    """Servers on the trainer's GPUs start in ``wait_until_ready``, others in the background; none for a replay."""

    def __init__(self, config: RunConfig, inputs: Inputs, output: Output, heartbeat: Heartbeat, lost: dict[str, float]) -> None:
        self._config, self._output, self._heartbeat, self._lost = config, output, heartbeat, lost
        self._signals = StopSignals.current()
        self.sampler: Sampler | None = None
        if config.rollout.replay is not None:
            return
        self.sampler = make_sampler(
            config.rollout.server,
            model_dir=inputs.model_dir,
            dtype=config.model.dtype,
            stop_token_ids=inputs.tokenizer.eos_ids,
            log_dir=config.output / "logs",
            seed=config.seed,
            first_gpu=Placement(config, this_machine()).first_server_gpu,
            report=output.message,
            keep_cache=config.train.kv_cache == "keep",
            trained=True,
            adapter_rank=config.adapter_rank,
            tokenizer=config.rollout.sampling.needs_tokenizer,
        )
        self._wait_for_start = self.sampler.start
        if config.rollout.server.placement != "colocated":
            # Servers need tens of seconds to start; the model is built meanwhile.
            self._wait_for_start = ThreadPoolExecutor(1, "fleet").submit(self.sampler.start).result

    def wait_until_ready(self) -> None:
        if self.sampler is None:
            return
        self._output.progress.phase("servers")  # no phase of the stopwatch: it belongs to no step
        self._heartbeat.phase("servers", waits_for="the rollout servers to start")
        with self._signals.interruptible():
            self._wait_for_start()
        self.report_servers()

    def report_servers(self) -> None:
        servers = [] if self.sampler is None else self.sampler.describe()
        self._heartbeat.tell(servers=servers, reward_workers=self._config.reward.workers)

    def run_or_revive(self, work: Callable[[], _T | None]) -> tuple[_T | None, bool]:
        """Also returns whether a server died; it is revived with stale weights."""
        start = time.monotonic()
        result, died = self.run_or_report(work)
        if died:
            self._revive(start)
        return result, died

    def run_or_report(self, work: Callable[[], _T | None]) -> tuple[_T | None, bool]:
        """Also returns whether a server died; it stays dead."""
        try:
            return work(), False
        except RuntimeError as error:
            if self._signals.requested is None:  # otherwise servers got the signal too
                if not isinstance(error, ServerDied):
                    raise
                self._output.message(f"{error}; starting it again")
            return None, True

    def revive_or_wake(self, died: bool) -> bool:
        """Returns whether some servers have stale weights, after a weight update."""
        if self.sampler is None:
            return False
        if died:
            self._revive(time.monotonic())
            return True
        return self.run_or_revive(self.sampler.wake_up)[1]

    def sleep(self) -> bool:
        """Returns whether a server died; it is revived."""
        return self.sampler is not None and self.run_or_revive(self.sampler.sleep)[1]

    def stop(self) -> None:
        if self.sampler is not None:
            self.sampler.stop()

    def _revive(self, lost_since: float) -> None:
        assert self.sampler is not None
        self._heartbeat.phase("servers", waits_for="a rollout server that is started again")
        with self._signals.interruptible():
            self.sampler.revive()
        self._lost["lost/server"] += time.monotonic() - lost_since

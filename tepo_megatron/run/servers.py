"""The sampler's servers on rank 0: start, restarts, and sleep while the trainer has their GPUs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from tepo_megatron.config import RunConfig
from tepo_megatron.run.display.figures import LostTime
from tepo_megatron.run.output.output import Output
from tepo_megatron.run.sampling.inputs import Inputs
from tepo_megatron.run.step.placement import first_server_gpu, this_machine
from tepo_megatron.runtime.preemption import stop_signals
from tepo_megatron.runtime.watch.heartbeat import Heartbeat
from tepo_megatron.sampler.protocol import Sampler, ServerDied
from tepo_megatron.sampler.registry import make_sampler

T = TypeVar("T")


class Servers:
    """Starts the servers in the background; :meth:`wait_until_ready` starts those on the trainer's GPUs. In a replayed run
    ``sampler`` is None, and methods do nothing.
    """

    def __init__(self, config: RunConfig, inputs: Inputs, output: Output, heartbeat: Heartbeat, lost: LostTime) -> None:
        self._config, self._output, self._heartbeat, self._lost = config, output, heartbeat, lost
        self._signals = stop_signals()
        self.sampler: Sampler | None = None
        self._starting: Future[None] | None = None
        if config.rollout.replay is not None:
            return
        self.sampler = make_sampler(
            config.rollout.server,
            model_dir=inputs.model_dir,
            dtype=config.model.dtype,
            stop_token_ids=inputs.tokenizer.eos_ids,
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
            # Servers need tens of seconds to start; the model is built meanwhile.
            self._starting = ThreadPoolExecutor(1, "fleet").submit(self.sampler.start)

    def wait_until_ready(self) -> None:
        if self.sampler is None:
            return
        self._output.progress.phase("servers")  # no phase of the stopwatch: it belongs to no step
        self._heartbeat.phase("servers", waits_for="the rollout servers to start")
        with self._signals.interruptible():
            if self._starting is not None:
                self._starting.result()
            else:
                self.sampler.start()
        self.report_addresses()

    def report_addresses(self) -> None:
        addresses = [] if self.sampler is None else self.sampler.addresses
        self._heartbeat.tell(servers=addresses, reward_workers=self._config.reward.workers)

    def run_or_revive(self, work: Callable[[], T | None]) -> tuple[T | None, bool]:
        """A server that dies is revived, with stale weights; returns also whether one died."""
        with self._lost.if_in_vain("lost/server") as was_in_vain:
            result, died = self.run_or_report(work)
            if died:
                was_in_vain()
                self._revive()
        return result, died

    def run_or_report(self, work: Callable[[], T | None]) -> tuple[T | None, bool]:
        """A server that dies stays dead and is reported; returns also whether one died."""
        try:
            return work(), False
        except ServerDied as error:
            if self._signals.requested is None:
                self._output.message(f"{error}; starting it again")
            return None, True
        except RuntimeError:
            if self._signals.requested is None:
                raise
            return None, True  # servers got the signal too

    def revive_or_wake(self, died: bool) -> bool:
        """After a weight update, revives dead servers or wakes sleeping ones. Returns whether some weights are stale."""
        if self.sampler is None:
            return False
        if died:
            with self._lost.if_in_vain("lost/server") as was_in_vain:
                was_in_vain()
                self._revive()
            return True
        return self.run_or_revive(self.sampler.wake_up)[1]

    def sleep(self) -> None:
        if self.sampler is not None:
            self.run_or_revive(self.sampler.sleep)

    def stop(self) -> None:
        """Safe also while the servers are starting."""
        if self.sampler is not None:
            self.sampler.stop()

    def _revive(self) -> None:
        assert self.sampler is not None
        self._heartbeat.phase("servers", waits_for="a rollout server that is started again")
        with self._signals.interruptible():
            self.sampler.revive()

"""The algorithm, as every rank runs it. Rank 0 drives: its ``Driver`` alone talks to servers, verifiers and files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tepo_megatron.config import RunConfig
from tepo_megatron.rollout.canary import due_prompt
from tepo_megatron.train.driver import Driver
from tepo_megatron.train.minibatches import minibatches
from tepo_megatron.train.summary import summarize

if TYPE_CHECKING:
    from tepo_megatron.engine.engine import Engine
    from tepo_megatron.train.weights import WeightPublisher

T = TypeVar("T")


@dataclass
class Loop:
    """One run, from ``step`` completed steps to ``config.train.steps``."""

    config: RunConfig
    engine: Engine
    driver: Driver
    publisher: WeightPublisher
    step: int = 0
    updates_sent: int = 0
    """Weight updates that reached every server; one that a server's death repeated counts once."""

    def run(self) -> None:
        """Every rank calls. Afterwards the trainer has its GPUs, and everything on them."""
        driver, engine = self.driver, self.engine
        engine.offload()
        driver.wait_until_ready()
        self.update_weights()
        # A first row is missing at the start of a run, and where it ended between a checkpoint and its row.
        if not engine.broadcast_from_root(driver.has_logged(self.step)):
            self.evaluate()
            driver.log(self.step, {})
        while self.step < self.config.train.steps:
            self.train_step()
        self.onload_trainer()

    def train_step(self) -> None:
        """Sample, reward, score, update K times, save if due, update the servers' weights, evaluate if due."""
        driver, engine = self.driver, self.engine
        rollouts = self.with_servers(lambda: driver.collect(self.step))
        with driver.phase("score"):
            self.onload_trainer()
            batch = engine.batch_from_root(rollouts)
            noise = engine.measure_noise(batch) if self.noise_is_due() else {}
            # Mini-batches first: each is scored in the very micro-batches of its update, so that rounding, which depends on a
            # token's place in its micro-batch, cancels in ratios and in differences of entropies (decision 012).
            parts = minibatches(batch, self.config.train.minibatches, seed=self.config.seed, step=self.step)
            scored = [engine.score(part) for part in parts]
            driver.check_rollouts(self.step, scored)
        with driver.phase("update"):
            updates = [engine.update(part) for part in scored]
        self.step += 1
        self.save_if_due()
        self.update_weights()
        self.evaluate()
        driver.log(self.step, {**summarize(batch, updates), **noise, **engine.memory()})

    def update_weights(self) -> None:
        """The servers' weights become the trainer's, and a canary shows that they do; every later rollout carries their
        version. A server that dies under it is revived, and gets them too. GPUs that both use are the servers' afterwards.
        """
        while not self.try_update_weights():
            continue
        self.updates_sent += 1

    def try_update_weights(self) -> bool:
        """Whether all servers have the weights and sample; not if one died under it, which has been revived."""
        driver, engine = self.driver, self.engine
        with driver.phase("sync"):
            engine.onload_weights_only()
            died = driver.update_weights(engine.weights_version(self.step), self.publisher)
            scored = self.score_canary()
            engine.offload()
            if engine.broadcast_from_root(driver.revive_or_wake(died)):
                return False
            return scored is None or self.canary_agrees(*scored)

    def score_canary(self) -> tuple[Sequence[int], Sequence[float]] | None:
        """The canary prompt and the trainer's log-probs of its tokens but the first, where they are due."""
        prompt = due_prompt(self.config, self.engine.spec, sync=self.updates_sent)
        return None if prompt is None else (prompt, self.engine.prompt_logprobs(prompt))

    def canary_agrees(self, prompt: Sequence[int], logprobs: Sequence[float]) -> bool:
        """The servers score the prompt too; a difference stops the run. False if a server died under it."""
        _, died = self.driver.run_or_revive(lambda: self.driver.check_canary(self.step, prompt, logprobs))
        return not self.engine.broadcast_from_root(died)

    def onload_trainer(self) -> None:
        """Servers on the trainer's GPUs sleep, and what it needs for training is onloaded. Elsewhere it is there anyway."""
        self.driver.sleep_servers()
        self.engine.onload()

    def noise_is_due(self) -> bool:
        every = self.config.engine.noise_every
        return bool(every) and self.step % every == 0

    def evaluate(self) -> None:
        every = self.config.evaluate.every
        if every and (self.step % every == 0 or self.step == self.config.train.steps):
            self.with_servers(lambda: self.driver.evaluate(self.step))

    def save_if_due(self) -> None:
        """Right after an update, while the GPUs are the trainer's, and before a server can end the run."""
        every, steps = self.config.train.save_every, self.config.train.steps
        if self.step == steps or (every and self.step % every == 0):
            self.engine.save(self.config.output / "checkpoints", step=self.step, state=self.driver.state())

    def with_servers(self, work: Callable[[], T | None]) -> T | None:
        """Rank 0 does the work; if a server died under it, it is revived, all ranks update its weights, and the work is
        repeated. Other ranks get None.
        """
        while True:
            result, stale = self.driver.run_or_revive(work)
            if not self.engine.broadcast_from_root(stale):
                return result
            self.update_weights()

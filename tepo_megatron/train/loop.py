"""The algorithm, as every rank runs it. Rank 0 drives: it alone has a ``Driver`` that talks to servers, verifiers and files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tepo_megatron.config import RunConfig
from tepo_megatron.rollout.canary import canary_prompt
from tepo_megatron.train.driver import Driver
from tepo_megatron.train.minibatches import minibatches
from tepo_megatron.train.summary import summarize

if TYPE_CHECKING:
    from tepo_megatron.engine.engine import Engine

T = TypeVar("T")

Canary = tuple[Sequence[int], Sequence[float]]
"""A prompt, and the trainer's log-probs of its tokens but the first."""


@dataclass
class Loop:
    """One run, from ``step`` completed steps to ``config.train.steps``."""

    config: RunConfig
    engine: Engine
    driver: Driver
    step: int = 0
    syncs: int = 0

    def run(self) -> None:
        """Every rank calls."""
        self.engine.occupy("nothing")
        self.driver.ready()
        self.publish()
        if self.step == 0:
            self.evaluate()
            self.driver.log(0, {})
        while self.step < self.config.train.steps:
            self.train_step()
        self.save_if_due(last=True)

    def train_step(self) -> None:
        """Sample, reward, score, update K times, hand the new weights over, evaluate if due."""
        driver, engine = self.driver, self.engine
        rollouts = self.with_servers(lambda: driver.collect(self.step))
        with driver.phase("score"):
            self.take_the_gpus()
            batch = engine.score(engine.share(rollouts))
        with driver.phase("update"):
            count = self.config.train.minibatches
            parts = minibatches(batch, count, seed=self.config.seed, step=self.step)
            updates = [engine.update(part) for part in parts]
        self.step += 1
        self.publish()
        self.evaluate()
        driver.log(self.step, {**summarize(batch, updates), **engine.memory()})
        self.save_if_due(last=False)

    def publish(self) -> None:
        """The servers' weights become the trainer's, and a canary shows that they do; every later rollout carries their
        version. A server that dies under it is revived, and gets them too. GPUs that both use are the servers' afterwards.
        """
        driver, engine = self.driver, self.engine
        stale = True
        while stale:
            with driver.phase("sync"):
                engine.occupy("weights")
                died = driver.publish(engine.version(self.step), engine)
                canary = self.score_canary()
                engine.occupy("nothing")
                stale = engine.told(driver.wake(died)) or self.check_canary(canary)
        self.syncs += 1

    def score_canary(self) -> Canary | None:
        """The trainer's log-probs of a fixed prompt, where they are due."""
        rollout, spec = self.config.rollout, self.engine.spec
        if rollout.replay is not None or not rollout.canary.every or self.syncs % rollout.canary.every:
            return None
        prompt = canary_prompt(spec.vocab_size, rollout.server.max_model_len or spec.max_positions)
        return prompt, self.engine.prompt_logprobs(prompt)

    def check_canary(self, canary: Canary | None) -> bool:
        """The servers score the prompt too; a difference stops the run. Whether a server died."""
        if canary is None:
            return False
        _, died = self.driver.attempt(lambda: self.driver.compare(self.step, *canary))
        return self.engine.told(died)

    def take_the_gpus(self) -> None:
        """Servers on the trainer's GPUs sleep, and what it needs for training comes back. Elsewhere it is there anyway."""
        self.driver.rest()
        self.engine.occupy("everything")

    def evaluate(self) -> None:
        every = self.config.evaluate.every
        if every and (self.step % every == 0 or self.step == self.config.train.steps):
            self.with_servers(lambda: self.driver.evaluate(self.step))

    def save_if_due(self, *, last: bool) -> None:
        every = self.config.train.save_every
        if last or (every and self.step % every == 0 and self.step < self.config.train.steps):
            self.take_the_gpus()
            state = self.driver.state()
            self.engine.save(self.config.output / "checkpoints", step=self.step, state=state)
            if not last and self.engine.shares_gpus:
                self.publish()

    def with_servers(self, work: Callable[[], T | None]) -> T | None:
        """Rank 0 does the work; if a server died under it, it is revived, all ranks hand the weights over again, and the
        work is repeated. Other ranks get None.
        """
        while True:
            result, stale = self.driver.attempt(work)
            if not self.engine.told(stale):
                return result
            self.publish()

"""The algorithm, as every rank runs it. Rank 0 drives: it alone has a ``Driver`` that talks to servers, verifiers and files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tepo_megatron.config import RunConfig
from tepo_megatron.train.driver import Driver
from tepo_megatron.train.minibatches import minibatches
from tepo_megatron.train.summary import summarize

if TYPE_CHECKING:
    from tepo_megatron.engine.engine import Engine

T = TypeVar("T")


@dataclass
class Loop:
    """One run, from ``step`` completed steps to ``config.train.steps``."""

    config: RunConfig
    engine: Engine
    driver: Driver
    step: int = 0

    def run(self) -> None:
        """Every rank calls."""
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
            batch = engine.score(engine.share(rollouts))
        with driver.phase("update"):
            count = self.config.train.minibatches
            parts = minibatches(batch, count, seed=self.config.seed, step=self.step)
            updates = [engine.update(part) for part in parts]
        self.step += 1
        self.publish()
        self.evaluate()
        driver.log(self.step, summarize(batch, updates))
        self.save_if_due(last=False)

    def publish(self) -> None:
        """The servers' weights become the trainer's; every later rollout carries their version. A server that dies under it is
        revived, and gets them too.
        """
        stale = True
        while stale:
            with self.driver.phase("sync"):
                died = self.driver.publish(self.step, self.engine)
                stale = self.engine.told(died)

    def evaluate(self) -> None:
        every = self.config.evaluate.every
        if every and (self.step % every == 0 or self.step == self.config.train.steps):
            self.with_servers(lambda: self.driver.evaluate(self.step))

    def save_if_due(self, *, last: bool) -> None:
        every = self.config.train.save_every
        if last or (every and self.step % every == 0 and self.step < self.config.train.steps):
            state = self.driver.state()
            self.engine.save(self.config.output / "checkpoints", step=self.step, state=state)

    def with_servers(self, work: Callable[[], T | None]) -> T | None:
        """Rank 0 does the work; if a server died under it, it is revived, all ranks hand the weights over again, and the
        work is repeated. Other ranks get None.
        """
        while True:
            result, stale = self.driver.attempt(work)
            if not self.engine.told(stale):
                return result
            self.publish()

"""The algorithm, as every rank runs it. Rank 0 drives: it alone has a ``Driver`` that talks to servers, verifiers and files."""

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

T = TypeVar("T")


@dataclass
class Loop:
    """One run, from ``step`` completed steps to ``config.train.steps``."""

    config: RunConfig
    engine: Engine
    driver: Driver
    step: int = 0
    syncs: int = 0

    def run(self) -> None:
        """Every rank calls. Afterwards the trainer has its GPUs, and everything on them."""
        self.engine.occupy("nothing")
        self.driver.ready()
        self.publish()
        if not self.engine.told(self.driver.logged(self.step)):  # the start, or a run that ended between checkpoint and row
            self.evaluate()
            self.driver.log(self.step, {})
        while self.step < self.config.train.steps:
            self.train_step()
        self.take_the_gpus()

    def train_step(self) -> None:
        """Sample, reward, score, update K times, save if due, hand the new weights over, evaluate if due."""
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
        self.save_if_due()
        self.publish()
        self.evaluate()
        driver.log(self.step, {**summarize(batch, updates), **engine.memory()})

    def publish(self) -> None:
        """The servers' weights become the trainer's, and a canary shows that they do; every later rollout carries their
        version. A server that dies under it is revived, and gets them too. GPUs that both use are the servers' afterwards.
        """
        while not self.hand_over():
            continue
        self.syncs += 1

    def hand_over(self) -> bool:
        """Whether all servers have the weights and sample; not if one died under it, which has been revived."""
        driver, engine = self.driver, self.engine
        with driver.phase("sync"):
            engine.occupy("weights")
            died = driver.publish(engine.version(self.step), engine)
            scored = self.score_canary()
            engine.occupy("nothing")
            if engine.told(driver.wake(died)):
                return False
            return scored is None or self.servers_agree(*scored)

    def score_canary(self) -> tuple[Sequence[int], Sequence[float]] | None:
        """The canary prompt and the trainer's log-probs of its tokens but the first, where they are due."""
        prompt = due_prompt(self.config, self.engine.spec, sync=self.syncs)
        return None if prompt is None else (prompt, self.engine.prompt_logprobs(prompt))

    def servers_agree(self, prompt: Sequence[int], logprobs: Sequence[float]) -> bool:
        """The servers score the prompt too; a difference stops the run. False if a server died under it."""
        _, died = self.driver.attempt(lambda: self.driver.compare(self.step, prompt, logprobs))
        return not self.engine.told(died)

    def take_the_gpus(self) -> None:
        """Servers on the trainer's GPUs sleep, and what it needs for training comes back. Elsewhere it is there anyway."""
        self.driver.rest()
        self.engine.occupy("everything")

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
        """Rank 0 does the work; if a server died under it, it is revived, all ranks hand the weights over again, and the
        work is repeated. Other ranks get None.
        """
        while True:
            result, stale = self.driver.attempt(work)
            if not self.engine.told(stale):
                return result
            self.publish()

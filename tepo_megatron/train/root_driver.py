"""What rank 0 does beside training: servers, problems, rewards, evaluation, logs. The other ranks have a ``NonRootDriver``."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from tepo_megatron.config import RunConfig
from tepo_megatron.data.prompts import encode_prompt
from tepo_megatron.data.sampler import ProblemSampler
from tepo_megatron.evaluate.evaluation import evaluate
from tepo_megatron.reward.pool import RewardPool
from tepo_megatron.rollout.canary import CACHED_TOKENS, Canary, cached_prompt, rollouts_tolerance, tolerance
from tepo_megatron.rollout.fleet import Fleet, ServerDied
from tepo_megatron.rollout.record import read_rollouts, write_rollouts
from tepo_megatron.train.agreement import check_rollouts
from tepo_megatron.train.inputs import Inputs
from tepo_megatron.train.metrics import Stopwatch
from tepo_megatron.train.minibatches import derive_seed
from tepo_megatron.train.noise_floor import below_the_noise
from tepo_megatron.train.output import Output
from tepo_megatron.train.placement import first_server_gpu, this_machine
from tepo_megatron.train.step_rewards import StepRewards
from tepo_megatron.types import Batch, Problem, Rollout, WeightsVersion

if TYPE_CHECKING:
    from tepo_megatron.train.weights import WeightPublisher

T = TypeVar("T")


class RootDriver:
    """Rank 0's driver. Making it starts servers in the background; servers on the trainer's GPUs are started by
    :meth:`wait_until_ready`. It closes ``pool``.
    """

    def __init__(self, config: RunConfig, inputs: Inputs, output: Output, pool: RewardPool) -> None:
        self.config = config
        self.inputs = inputs
        self.tokenizer = inputs.tokenizer
        self.output = output
        self.watch = Stopwatch()
        self.sampler = ProblemSampler(inputs.train, config.seed)
        self.pool = pool
        self.rewards = StepRewards(config, self.pool, output.message)
        self.fleet: Fleet | None = None
        self._starting: Future[None] | None = None
        if config.rollout.replay is None:
            self.fleet = Fleet(
                config.rollout.server,
                model_dir=inputs.model_dir,
                dtype=config.model.dtype,
                stop_token_ids=self.tokenizer.eos_ids,
                log_dir=config.output / "logs",
                seed=config.seed,
                first_gpu=first_server_gpu(config, this_machine()),
            )
            if config.rollout.server.placement != "colocated":
                # Servers take tens of seconds to start; the model is built meanwhile.
                self._starting = ThreadPoolExecutor(1, "fleet").submit(self.fleet.start)
        self._drawn: tuple[int, list[Problem]] = (-1, [])
        self._canary = Canary(tolerance(config))
        limit = config.rollout.server.max_model_len or inputs.spec.max_positions
        self._cached_prompt = cached_prompt(inputs.spec.vocab_size, limit)
        self._figures: dict[str, float] = {}
        """Of the canaries, for the next row."""
        self._evaluation: dict[str, float] = {}
        self._versions: dict[str, float] = {}
        self._said_noise = False

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        self.output.progress.phase(name)
        return self.watch.phase(name)

    def run_or_revive(self, work: Callable[[], T | None]) -> tuple[T | None, bool]:
        result, died = self._run_or_report(work)
        if died:
            self._fleet().revive()
        return result, died

    def _run_or_report(self, work: Callable[[], T | None]) -> tuple[T | None, bool]:
        """The result, and whether a server died under it, which is reported and left to be revived."""
        try:
            return work(), False
        except ServerDied as error:
            self.output.message(f"{error}; starting it again")
            return None, True

    def wait_until_ready(self) -> None:
        if self.fleet is None:
            return
        self.output.progress.phase("servers")  # no phase of the stopwatch: it is no part of a step
        if self._starting is not None:
            self._starting.result()
        else:
            self.fleet.start()

    # -- rollouts --------------------------------------------------------------------------------------------------------

    def collect(self, step: int) -> list[Rollout]:
        """G rewarded samples of each of the step's prompts; the same again if called again for the same step."""
        rollouts = self._collect(step)
        steps = [rollout.weights_version.step for rollout in rollouts]
        self._versions = {"weights_version/min": float(min(steps)), "weights_version/max": float(max(steps))}
        return rollouts

    def _collect(self, step: int) -> list[Rollout]:
        if self.config.rollout.replay is not None:
            with self.phase("rollout"):
                return read_rollouts(self.config.rollout.replay, step)
        # A step that a server's death repeats asks again, and must get the same problems.
        if self._drawn[0] != step:
            self._drawn = (step, self.sampler.next(self.config.rollout.prompts_per_step))
        problems = self._drawn[1]
        rollouts = self._sample(problems, step)
        with self.phase("reward"):
            rollouts = self.rewards.score(rollouts, problems, step)
        if self.config.rollout.record:
            write_rollouts(self.config.output / "rollouts", step, rollouts)
        return rollouts

    def _sample(self, problems: Sequence[Problem], step: int) -> list[Rollout]:
        config = self.config.rollout
        template = self.config.data.chat_template
        prompts = [encode_prompt(self.tokenizer, problem, chat_template=template) for problem in problems]
        with self.phase("rollout"):
            groups = self._fleet().generate(
                prompts,
                n=config.samples_per_prompt,
                temperature=config.sampling.temperature,
                max_new_tokens=config.sampling.max_new_tokens,
                seed=derive_seed(self.config.seed, step, "rollout"),
            )
        return [
            Rollout(
                problem_id=problem.id,
                group=group,
                prompt_ids=prompt,
                response_ids=tuple(response.response_ids),
                sampler_logprobs=tuple(response.logprobs),
                finish_reason=response.finish_reason,
                weights_version=response.weights_version,
                text=self.tokenizer.decode(response.response_ids),
            )
            for group, (problem, prompt, responses) in enumerate(zip(problems, prompts, groups, strict=True))
            for response in responses
        ]

    # -- weights ---------------------------------------------------------------------------------------------------------

    def update_weights(self, version: WeightsVersion, publisher: WeightPublisher) -> bool:
        return self._run_or_report(lambda: publisher.update_weights(version))[1]

    def revive_or_wake(self, died: bool) -> bool:
        if self.fleet is None:
            return False
        if died:
            self.fleet.revive()
            return True
        return self.run_or_revive(self.fleet.wake_up)[1]

    def sleep_servers(self) -> None:
        if self.fleet is not None:
            self.run_or_revive(self.fleet.sleep)

    def check_canary(self, step: int, prompt: Sequence[int], logprobs: Sequence[float]) -> None:
        started = time.perf_counter()
        self._figures["canary/max_logprob_gap"] = self._canary.check(
            step, prompt, logprobs, self._fleet().prompt_logprobs(prompt)
        )
        through_cache = self._fleet().cached_logprobs(self._cached_prompt, CACHED_TOKENS)
        self._figures["canary/cache_gap"] = self._canary.check_cache(step, through_cache)
        self._figures["time/canary"] = time.perf_counter() - started

    def check_rollouts(self, step: int, parts: Sequence[Batch]) -> None:
        checked = (
            self.fleet is not None and self.config.rollout.canary.every
        )  # replayed ones may be another run's: figures only
        limit = rollouts_tolerance(self.config) if checked else math.inf
        self._figures |= check_rollouts(step, parts, tolerance=limit, token_tolerance=tolerance(self.config))

    def _fleet(self) -> Fleet:
        assert self.fleet is not None, "a replayed run has no servers"
        return self.fleet

    # -- evaluation and logs ---------------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> None:
        if self.config.rollout.replay is not None:
            return
        with self.phase("eval"):
            result = evaluate(
                self.inputs.heldout,
                generate=self._fleet().generate,
                tokenizer=self.tokenizer,
                pool=self.pool,
                config=self.config.evaluate,
                sampling=self.config.rollout.sampling,
                seed=derive_seed(self.config.seed, step, "evaluate"),
                chat_template=self.config.data.chat_template,
            )
        if result.failures:
            count = f"evaluation: {result.failures} responses could not be scored; they count as wrong"
            self.output.message(f"{count}; the first: {result.first_failure}")
        self._evaluation = result.metrics
        self.output.write_samples(step, result.samples)

    def has_logged(self, step: int) -> bool:
        return self.output.last_step == step

    def log(self, step: int, row: Mapping[str, float]) -> None:
        split = self.watch.split()
        figures = {**self._versions, **row, **self._evaluation, **self._figures}
        if "response_tokens" in row:
            figures["tokens/s"] = row["response_tokens"] / split["time/step"]
            figures |= self.rewards.figures()
        self._versions, self._evaluation, self._figures = {}, {}, {}
        self.output.write_row(step, {**figures, **split})
        if not self._said_noise:
            for sentence in below_the_noise(self.config.objective, figures):
                self.output.message(sentence)
                self._said_noise = True

    def state(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on in the data where the run that was saved stopped."""
        self.sampler.restore(state["sampler"])

    def close(self) -> None:
        """Ends servers and verifiers; safe after any failure, also while the servers are still starting."""
        if self.fleet is not None:
            self.fleet.stop()
        self.pool.close()

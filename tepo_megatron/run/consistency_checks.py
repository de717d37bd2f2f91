"""What rank 0 compares of trainer and servers: the canary prompt, the prefix cache, and the rollouts themselves."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.core.types import Batch
from tepo_megatron.run.sampling.length_handling import trained_places
from tepo_megatron.run.sampling.staleness import mismatch_by_age, most_stale, part_ages
from tepo_megatron.run.step.agreement import check_agreement
from tepo_megatron.run.step.canary import CACHED_TOKENS, Canary, cached_prompt, rollouts_tolerance, tolerance
from tepo_megatron.sampler.protocol import Sampler
from tepo_megatron.weights.architecture import ModelSpec


class Canaries:
    """Each raises RuntimeError where trainer and servers are too far apart; their figures wait for the next row."""

    def __init__(self, config: RunConfig, spec: ModelSpec) -> None:
        self._config = config
        self._canary = Canary(tolerance(config))
        self._cached_prompt = cached_prompt(spec.vocab_size, config.rollout.server.max_model_len or spec.max_positions)
        self._figures: dict[str, float] = {}

    def check_servers(
        self, fleet: Sampler, step: int, prompt: Sequence[int], logprobs: Sequence[float], *, is_logged: bool
    ) -> None:
        """Compares the servers' log-probs of a prompt with the trainer's, and those through their prefix caches with those
        without. ``is_logged``: the step has its row already.
        """
        started = time.perf_counter()
        gap = self._canary.check(step, prompt, logprobs, fleet.prompt_logprobs(prompt))
        cache_gap = self._canary.check_cache(step, fleet.cached_logprobs(self._cached_prompt, CACHED_TOKENS))
        # Not what is checked beside the steps that log it, of servers that have just started: a resumed run has the same rows.
        if step % self._config.rollout.canary.every == 0 and not is_logged:
            seconds = time.perf_counter() - started
            self._figures |= {"canary/max_logprob_gap": gap, "canary/cache_gap": cache_gap, "time/canary": seconds}

    def check_rollouts(self, step: int, parts: Sequence[Batch], rollouts: Sequence[Rollout]) -> None:
        """Compares the sampler's log-probs of a step's scored mini-batches with the trainer's, where its present weights drew
        them; ``rollouts``: the step's, as they were packed.
        """
        config = self._config
        # Replayed ones may be another run's, and keys and values of older weights may be among what drew others: figures only.
        is_checked = config.rollout.replay is None and config.rollout.canary.every and config.train.kv_cache == "recompute"
        limit = rollouts_tolerance(config) if is_checked else math.inf
        fresh = None
        if most_stale(config, step):
            trained = trained_places(rollouts, config.rollout)
            ages = part_ages(rollouts, parts, seed=config.seed, step=step, trained=trained)
            fresh = [ages_T == 0 for ages_T in ages]
            self._figures |= mismatch_by_age(parts, ages)
        self._figures |= check_agreement(step, parts, tolerance=limit, token_tolerance=tolerance(config), fresh=fresh)

    def take_figures(self) -> dict[str, float]:
        """Of the checks since the last call, for a row of metrics."""
        figures, self._figures = self._figures, {}
        return figures

"""Compares the trainer's log-probs (natural) with the servers': digests only show that weights arrived."""

from __future__ import annotations

import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.run.sampling.step_rewards import token_ages
from tepo_megatron.run.step.minibatches import members
from tepo_megatron.sampler.protocol import CacheReading, ReadBack, Sampler
from tepo_megatron.weights.architecture import ModelSpec


class Canaries:
    def __init__(self, config: RunConfig, spec: ModelSpec, on_move: Callable[[], None] = lambda: None) -> None:
        self._config, self._on_move = config, on_move
        self._canary = Canary(Tolerances.of(config).token)
        self._cached_prompt = Canary.cached_prompt(spec.vocab_size, config.rollout.server.max_model_len or spec.max_positions)
        self._figures: dict[str, float] = {}
        self._has_left_the_record = False
        self.first_gap: float | None = None  # the run's first mean gap, which is numerics alone

    def check_record(self, step: int, rollouts: Sequence[Rollout], weights: WeightsVersion) -> str | None:
        """Compares the weights that drew replayed ``rollouts`` with the trainer's. Returns a sentence at the first
        difference. Raises ValueError for another model's record, unless allowed.
        """
        drawn_by = {version.digest for rollout in rollouts for _, version in rollout.versions if version.step == step}
        others = sorted(drawn_by - {"", weights.digest})  # a record that was not written by a run may have no digests
        if not others or self._has_left_the_record:
            return None
        rollout = self._config.rollout
        if step == 0 and rollout.replay_weights == "same":
            raise ValueError(
                f"rollout.replay = {rollout.replay}: step 0 was drawn by other weights than this run starts with (digests "
                f"{others[0]} and {weights.digest}); set model.path, model.dtype and model.lora to what recorded it, or train "
                "on samples of other weights: rollout.replay_weights=any"
            )
        self._has_left_the_record = True
        return (
            f"step {step + 1}: rollout.replay's rollouts were drawn by other weights than this run has now; mismatch/kl and "
            "ess say how far they are (said once)"
        )

    def check_servers(
        self, fleet: Sampler, step: int, prompt: Sequence[int], ours: Sequence[float], *, is_logged: bool
    ) -> None:
        started = time.perf_counter()
        share = Canary.check_read_back(step, fleet.read_back())
        self._on_move()
        theirs = fleet.prompt_logprobs(prompt)
        self._on_move()
        gap = self._canary.check(step, prompt, ours, theirs)
        mean, p90 = Canary.usual_gaps(ours, theirs)
        self.first_gap = mean if self.first_gap is None else self.first_gap
        cache_gap = self._canary.check_cache(step, fleet.read_through_cache(self._cached_prompt, CACHED_TOKENS))
        # No figures of checks at other steps, after a start of servers: a resumed run has the same rows.
        if step % self._config.rollout.canary.every == 0 and not is_logged:
            seconds = time.perf_counter() - started
            self._figures |= {"canary/max_logprob_gap": gap, "canary/p90_logprob_gap": p90, "canary/mean_logprob_gap": mean}
            self._figures |= {"canary/drift": mean / max(self.first_gap, _ROUNDING), "canary/cache_gap": cache_gap}
            self._figures |= {"canary/read_back": share, "time/canary": seconds}

    def check_rollouts(self, step: int, parts: Sequence[Batch], rollouts: Sequence[Rollout]) -> None:
        config = self._config
        # Replayed rollouts may be another run's, and kept caches have keys and values of older weights: figures only.
        is_checked = config.rollout.replay is None and config.rollout.canary.every and config.train.kv_cache == "recompute"
        tolerances = Tolerances.of(config) if is_checked else Tolerances(0.0, math.inf)
        fresh = None
        if config.most_stale(step):
            trained = [index for index, item in enumerate(rollouts) if config.rollout.trains_on(item.finish_reason)]
            places = members(trained, len(parts), seed=config.seed, step=step)
            ages = [_ages(part, [rollouts[i] for i in chosen], step) for part, chosen in zip(parts, places, strict=True)]
            fresh = [ages_T == 0 for ages_T in ages]
            self._figures |= _mismatch_by_age(parts, ages)
        self._figures |= tolerances.check_rollouts(step, parts, fresh)

    def take_figures(self) -> dict[str, float]:
        figures, self._figures = self._figures, {}
        return figures


def _ages(part: Batch, rollouts: Sequence[Rollout], step: int) -> Tensor:
    """int64 [T], in steps; −1 for tokens that are not the model's response. ``rollouts``: the part's sequences."""
    ages_T = torch.full_like(part.labels_T, -1)
    for first, rollout in zip(part.cu_seqlens.tolist(), rollouts, strict=False):
        first += len(rollout.prompt_ids) - 1  # the last prompt token's label is the first of the response
        response_ages = torch.from_numpy(token_ages(rollout, step)).to(ages_T)
        ages_T[first : first + response_ages.numel()] = response_ages
    return ages_T.masked_fill(~part.loss_mask_T, -1)  # no weights drew an environment's tokens


def _mismatch_by_age(parts: Sequence[Batch], ages: Sequence[Tensor]) -> dict[str, float]:
    """KL(π_sampler‖π_old) by k3, over each age's tokens with a finite log-prob of the trainer."""
    tokens, sums = defaultdict[int, int](int), defaultdict[int, float](float)
    for part, ages_T in zip(parts, ages, strict=True):
        assert part.old_logprobs_T is not None
        gap_T = (part.old_logprobs_T - part.sampler_logprobs_T).double()
        counted_T = part.loss_mask_T & gap_T.isfinite()
        gap, age = gap_T[counted_T], ages_T[counted_T]
        kl, counts = torch.expm1(gap) - gap, age.bincount().tolist()
        for value in (value for value, count in enumerate(counts) if count):
            tokens[value] += counts[value]
            sums[value] += float(kl[age == value].sum())
    return {f"staleness/kl_{value}": sums[value] / tokens[value] for value in sorted(tokens)}


CACHED_TOKENS = 1

_LENGTH = 32
_STALE_SHARE = 0.01
"""Log-probs are stale if no bit changes while the trainer's change by more than this share of the tolerance."""

_ROUNDING = 1e-7  # nats; below it gaps have no ratio
_CACHED_LENGTH = 257  # two blocks of vLLM on a CPU (128; 16 on a GPU), and the last token, which is never cached

_TOLERANCES = {"float32": (1e-3, 1e-4), "bfloat16": (0.5, 0.1)}


def _tokens(name: str, length: int, vocab_size: int) -> tuple[int, ...]:
    digests = (hashlib.blake2b(f"{name} {index}".encode(), digest_size=8).digest() for index in range(length))
    return tuple(int.from_bytes(digest) % vocab_size for digest in digests)


class Tolerances(NamedTuple):
    """In nats, of a token and of a group's mean."""

    token: float
    mean: float

    @classmethod
    def of(cls, config: RunConfig) -> Tolerances:
        """What the config says, else the coarser side's (docs/reference/numerics.md)."""
        canary, server = config.rollout.canary, config.rollout.server
        defaults = max(_TOLERANCES[config.model.dtype], _TOLERANCES[server.served_dtype(config.model.dtype)])
        if server.quantization != "none" or config.engine.fp8.enabled:
            defaults = (2.0, 1.0)  # the first is 5 (FP8) to 300 times (float32) the measured values
        token = defaults[0] if canary.tolerance is None else canary.tolerance
        return cls(token, defaults[1] if canary.rollouts_tolerance is None else canary.rollouts_tolerance)

    def check_rollouts(self, step: int, parts: Sequence[Batch], fresh: Sequence[Tensor] | None = None) -> dict[str, float]:
        """A group's mean difference may be ``mean`` + ``token`` / tokens.

        ``fresh``: the tokens of each part that the current weights drew, bool [T]; None: all. Leaves out tokens without a
        finite log-prob of the trainer; the sampler's non-finite ones count as inf. Raises RuntimeError with the worst group.
        """
        names = torch.cat([part.groups_S for part in parts]).unique()
        tokens = torch.zeros(names.numel(), dtype=torch.float64, device=names.device)
        total, largest = torch.zeros_like(tokens), torch.zeros_like(tokens)
        for index, part in enumerate(parts):
            assert part.old_logprobs_T is not None
            gap_T = (part.old_logprobs_T - part.sampler_logprobs_T).abs().nan_to_num(nan=torch.inf)
            counted_T = part.loss_mask_T & part.old_logprobs_T.isfinite()
            if fresh is not None:
                counted_T &= fresh[index]
            gap, group = gap_T[counted_T].double(), torch.searchsorted(names, part.groups_S)[part.sequence_index_T[counted_T]]
            tokens += group.bincount(minlength=names.numel())
            total.index_add_(0, group, gap)
            largest.scatter_reduce_(0, group, gap, "amax")
        names, tokens, total, largest = (values[tokens > 0] for values in (names, tokens, total, largest))
        if not names.numel():
            return {}
        mean = total / tokens
        if wrong := int((mean > self.mean + self.token / tokens).sum()):
            worst = int((mean - self.token / tokens).argmax())
            raise RuntimeError(
                f"step {step}: {wrong} of {len(names)} groups of rollouts were not drawn from the trainer's policy: in group "
                f"{int(names[worst])} the log-probs of {int(tokens[worst])} tokens differ by {float(mean[worst]):.3g} nats on "
                f"average, {float(largest[worst]):.3g} at most (rollout.canary.rollouts_tolerance = {self.mean:g}). The "
                "servers' weights, temperature or cache are not what this run gave them; nothing was trained on these "
                "rollouts. Start again with --resume, which starts new servers"
            )
        return {
            "canary/rollouts_mean_gap": float(total.sum() / tokens.sum()),
            "canary/rollouts_worst_group": float(mean.max()),
            "canary/rollouts_max_gap": float(largest.max()),
        }


class Canary:
    """In nats. Unchanged log-probs reveal old weights."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._since: dict[str, tuple[Sequence[float], Sequence[float]]] = {}

    @staticmethod
    def due_prompt(config: RunConfig, spec: ModelSpec, *, sync: int, has_drawn: bool) -> tuple[int, ...] | None:
        rollout, lora = config.rollout, config.model.lora
        if rollout.replay is not None or not rollout.canary.every or sync % rollout.canary.every:
            return None
        if has_drawn and config.train.schedule == "overlap" and lora is not None and lora.serve == "adapter":
            return None  # vLLM 0.32 cannot score a prompt next to other requests of an adapter; the rollouts are compared
        return Canary.prompt(spec.vocab_size, rollout.server.max_model_len or spec.max_positions)

    @staticmethod
    def prompt(vocab_size: int, limit: int) -> tuple[int, ...]:
        return _tokens("canary", max(2, min(_LENGTH, limit - 1)), vocab_size)  # the server samples a token after it

    @staticmethod
    def cached_prompt(vocab_size: int, limit: int) -> tuple[int, ...]:
        """Longer than a cache block and always the same, to reveal blocks of older weights."""
        return _tokens("cached canary", max(2, min(_CACHED_LENGTH, limit - CACHED_TOKENS - 1)), vocab_size)

    def check(self, step: int, prompt: Sequence[int], ours: Sequence[float], theirs: Mapping[str, Sequence[float]]) -> float:
        """Returns the largest gap. Raises RuntimeError."""
        worst = {url: _worst(ours, logprobs) for url, logprobs in theirs.items()}
        wrong = [
            f"{url} gives token {prompt[index + 1]} at position {index + 1} the log-prob {theirs[url][index]:.6g}, "
            f"the trainer {ours[index]:.6g}"
            for url, (gap, index) in worst.items()
            if not gap <= self._tolerance
        ]
        for url, logprobs in theirs.items() if not wrong else ():
            if url not in self._since or self._since[url][0] != logprobs:
                self._since[url] = (logprobs, ours)
            elif (change := _worst(ours, self._since[url][1])[0]) > _STALE_SHARE * self._tolerance:
                same = f"{url} still gives the same log-probs, to the last bit,"
                wrong.append(f"{same} after the trainer's have moved by {change:.2g} nats")
        if wrong:
            raise RuntimeError(
                f"weights {step}: trainer and servers do not compute the same of the canary prompt {list(prompt)}: "
                f"{'; '.join(wrong)} (rollout.canary.tolerance = {self._tolerance:g}). Either weights are in the wrong place "
                "there, or are old ones, or the two sides' models differ; samples of these servers would train nothing"
            )
        return max(gap for gap, _ in worst.values())

    @staticmethod
    def usual_gaps(ours: Sequence[float], theirs: Mapping[str, Sequence[float]]) -> tuple[float, float]:
        """Returns the mean and the 90th percentile of the worst server."""
        gaps_ST = (torch.tensor(list(theirs.values()), dtype=torch.float64) - torch.tensor(ours, dtype=torch.float64)).abs()
        return float(gaps_ST.mean(1).max()), float(gaps_ST.quantile(0.9, dim=1).max())

    @staticmethod
    def check_read_back(step: int, results: Mapping[str, ReadBack]) -> float:
        """Returns the smallest share of weights that was compared. Raises RuntimeError."""
        wrong = [
            f"{url} has {len(item.changed)}: {', '.join(item.changed[:8])}" for url, item in results.items() if item.changed
        ]
        if wrong:
            raise RuntimeError(
                f"weights {step}: parameters of servers do not have the values that the trainer sent, though all arrived: "
                f"{'; '.join(wrong)}. They were loaded into the wrong place, not at all, or changed since; samples would be of "
                "other weights. Start again with --resume, which starts new servers"
            )
        return min((result.share for result in results.values()), default=0.0)

    @staticmethod
    def check_cache(step: int, readings: Mapping[str, CacheReading]) -> float:
        """Returns the largest gap with and without a prefix cache. It is 0 on a CPU; on a GPU log-probs depend on what else is
        computed, so that only cached tokens are wrong. Raises RuntimeError.
        """
        wrong = [f"{url} took {reading.cached_tokens} tokens" for url, reading in readings.items() if reading.cached_tokens]
        if wrong:
            raise RuntimeError(
                f"weights {step}: {' and '.join(wrong)} of a prompt from its prefix cache. The cache was not emptied with the "
                "update: it holds keys and values of older weights, and samples that begin as earlier ones did would be wrong"
            )
        pairs = [(reading.logprobs_without, reading.logprobs) for reading in readings.values() if reading.logprobs]
        return max((_worst(*pair)[0] for pair in pairs), default=0.0)


def _worst(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, int]:
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return max(((gap, index) for index, gap in enumerate(gaps)), key=lambda item: (item[0] != item[0], item[0]))

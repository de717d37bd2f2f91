"""Servers and verifiers for tests of a ``RolloutCollector``. Those of ``FakeFleet`` answer at once, in a random order, and
responses follow from their seeds. Those of ``FakeServers`` answer when a test says so.
"""

from __future__ import annotations

import queue
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Unpack

from tepo_megatron.config import RunConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Response, Rollout, WeightsVersion
from tepo_megatron.run.sampling.collector import RolloutCollector
from tepo_megatron.run.sampling.journal import Journal
from tepo_megatron.run.sampling.step_rewards import StepRewards
from tepo_megatron.runtime.heartbeat import Heartbeat
from tepo_megatron.sampler.protocol import SubmitOptions
from tepo_megatron.sampler.rollout_file import Record
from tepo_megatron.sampler.sampling import Sample, Sampling
from tepo_megatron.tasks.data.sources import ProblemSampler
from tepo_megatron.tasks.protocol import RewardResult

MAX_NEW_TOKENS = 8


class Killed(BaseException):
    """The process ends here."""


def response_to(seed: int, version: WeightsVersion, continued: Response | None = None) -> Response:
    """What the servers draw with a seed: up to ``MAX_NEW_TOKENS`` tokens; a continuation adds some of its own."""
    draws = random.Random(seed)
    before = () if continued is None else tuple(continued.response_ids.tolist())
    length = len(before) + draws.randint(1, MAX_NEW_TOKENS - len(before))
    ids = (*before, *(draws.randint(0, 9) for _ in range(length - len(before))))
    logprobs = (*(() if continued is None else continued.logprobs.tolist()), *(-0.5,) * (length - len(before)))
    spans = () if continued is None else continued.versions
    if not spans or spans[-1][1] != version:
        spans = (*spans, (len(before), version))
    return Response(ids, logprobs, "length" if length == MAX_NEW_TOKENS else "stop", spans)


class FakeFleet:
    """``order`` decides what finishes first; ``dies_after`` responses, counted over all streams, the process is killed, or a
    server (``error``).
    """

    def __init__(self, order: int, dies_after: int | None = None, error: Callable[[], BaseException] = Killed) -> None:
        self.weights_version = WeightsVersion(0, "w0")
        self.asked: list[tuple[Any, int, Sequence[int], bool]] = []
        """(key, seed, prompt, continued) of every sample that was asked for."""
        self._order = random.Random(order)
        self._left, self._error = dies_after, error
        self.lost: Counter[Hashable] = Counter()
        """Samples of each group that were under way when a server died; by then ``asked_before`` were asked for."""
        self.asked_before = 0

    @contextmanager
    def sample_stream(self, sampling: Any, **options: Any) -> Iterator[FakeFleet]:
        self._pending: list[tuple[Hashable, int, Response]] = []
        yield self

    def submit(self, key: Hashable, prompt_ids: Sequence[int], seed: int, n: int, **options: Unpack[SubmitOptions]) -> None:
        continued, only = options.get("continued") or {}, options.get("only")
        for sample in range(n) if only is None else only:
            part = continued.get(sample)
            own = Sample.of(sample, seed, Sampling(1.0, MAX_NEW_TOKENS), part).seed
            assert own is not None
            self.asked.append((key, own, tuple(prompt_ids), part is not None))
            self._pending.append((key, sample, response_to(own, self.weights_version, part)))

    def next(self, timeout_s: float) -> tuple[Hashable, int, Response] | None:
        if not self._pending or self._order.random() < 0.1:
            return None
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._left = None
                self.asked_before, self.lost = len(self.asked), Counter(key for key, *_ in self._pending)
                raise self._error()
        return self._pending.pop(self._order.randrange(len(self._pending)))

    def abort(self) -> list[tuple[Hashable, int, Response]]:
        """Each as far as it is: some have no token, and one or the other has just finished."""
        parts = []
        for key, sample, whole in self._pending:
            begun = whole.versions[-1][0]  # a continuation keeps what it had
            length = self._order.randint(begun, len(whole.response_ids))
            if length == len(whole.response_ids):
                parts.append((key, sample, whole))
            elif length:
                spans = tuple(span for span in whole.versions if span[0] < length)
                parts.append((key, sample, Response(whole.response_ids[:length], whole.logprobs[:length], "abort", spans)))
        self._pending = []
        return parts


class FakeVerifiers:
    """Gives ``reward(problem, text)``, in any order; None is a failure."""

    scores_groups = False

    def __init__(self, order: int, reward: Callable[[Problem, str], float | None]) -> None:
        self._order, self._reward = random.Random(order), reward
        self._waiting: list[tuple[Hashable, RewardResult]] = []
        self.scored = 0

    def another(self) -> FakeVerifiers:
        return self

    def close(self) -> None: ...

    def stream(self, samples: Any, problem_of: Callable[[Any], Problem]) -> Any:
        return samples

    def take_figures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        return {}

    def submit(self, key: Hashable, problem: Problem, response: str, *, group: Hashable, group_size: int) -> None:
        self._waiting.append((key, self._result(problem, response)))

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Hashable, RewardResult]]:
        self._order.shuffle(self._waiting)
        count = self._order.randint(0, len(self._waiting)) if timeout_s == 0 else len(self._waiting)
        finished, self._waiting = self._waiting[:count], self._waiting[count:]
        self.scored += len(finished)
        return finished

    def score(
        self, items: Sequence[tuple[Problem, str]], groups: Sequence[Any] | None = None, **_options: Any
    ) -> list[RewardResult]:
        self.scored += len(items)
        return [self._result(problem, text) for problem, text in items]

    def reset(self) -> None:
        self._waiting.clear()

    def _result(self, problem: Problem, text: str) -> RewardResult:
        reward = self._reward(problem, text)
        return RewardResult(reward, "no" if reward is None else None)


@dataclass
class FakeServers:
    """``asked``: (number of the group, seed, samples) of every request. :meth:`finish` gives a group's responses, :meth:`fail`
    has what samples raise."""

    asked: list[tuple[int, int, int]] = field(default_factory=list)
    _ready: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)

    @contextmanager
    def sample_stream(self, sampling: Any, *, on_move: Callable[[], None], **options: Any) -> Iterator[FakeServers]:
        on_move()
        while not self._ready.empty():
            self._ready.get()
        yield self

    def submit(self, key: int, prompt_ids: Sequence[int], seed: int, n: int, *, continued: Any, only: Sequence[int]) -> None:
        self.asked.append((key, seed, len(only)))

    def next(self, timeout_s: float) -> tuple[int, int, Response] | None:
        try:
            result = self._ready.get(timeout=min(timeout_s, 0.005))
        except queue.Empty:
            return None
        if isinstance(result, BaseException):
            raise result
        return result

    def finish(self, number: int, *spans: tuple[int, int]) -> None:
        """``spans``: (first token, step of the weights)."""
        versions = tuple((start, WeightsVersion(step, f"{step:x}")) for start, step in spans)
        for sample in (0, 1):
            self._ready.put((number, sample, Response([5, 6, 7 + sample], [-1.0, -2.0, -3.0], "stop", versions)))

    def fail(self, error: BaseException) -> None:
        self._ready.put(error)


def collector(
    config: RunConfig, problems: Sequence[Problem], verifiers: Any, fleet: Any, *, collect: Any = None
) -> RolloutCollector:
    """A run's collector, with a tokenizer that writes token ids as text."""

    tokenizer = SimpleNamespace(prompt_ids=lambda prompt, **_: [len(prompt), 3], unk_id=None)
    tokenizer.decode = lambda ids: " ".join(map(str, ids))
    by_id, spec = {problem.id: problem for problem in problems}, SimpleNamespace(vocab_size=50)
    order = ProblemSampler.of(problems, config.data, config.seed)
    inputs: Any = SimpleNamespace(train=list(problems), order=order, by_id=by_id, tokenizer=tokenizer, spec=spec)
    journal, rewards = Journal(config, print, print), StepRewards(config, print)
    collected_by = RolloutCollector(
        config,
        inputs,
        rewards,
        verifiers,
        journal,
        fleet,
        phase=lambda _: nullcontext(),
        heartbeat=Heartbeat(),
        collect=collect,
    )
    if isinstance(fleet, FakeFleet):
        collected_by.published(fleet.weights_version)
    return collected_by


def run_steps(
    of: RolloutCollector, fleet: FakeFleet, steps: range, states: dict[int, dict[str, Any]] | None = None
) -> list[tuple[list[Rollout], dict[str, float]]]:
    """Each step's rollouts and figures; the weights change after every step, and its state is put into ``states``."""
    batches = []
    for step in steps:
        fleet.weights_version = WeightsVersion(step, f"w{step}")
        of.published(fleet.weights_version)
        if states is not None:
            states[step] = of.state()
        batches.append((of.collect(step), of.take_figures()))
    return batches


def groups_of(rollouts: Sequence[Rollout]) -> dict[int, list[Rollout]]:
    found: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.group, []).append(rollout)
    return found


def groups_on_disk(output: Path) -> dict[int, list[Rollout]]:
    """Number → rollouts of the groups that the journal keeps for a step under way or a later one."""
    folder = output / "journal" / "groups"
    numbers = [int(path.stem.removeprefix("step_")) for path in sorted(folder.glob("step_*.jsonl"))]
    return {number: Record.read(folder, number).rollouts for number in numbers}

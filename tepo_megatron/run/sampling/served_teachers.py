"""Teachers with ``place = server`` score finished responses while others are drawn. Rank 0 only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from tepo_megatron.config import RunConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Logprobs, Rollout, TopTokens
from tepo_megatron.errors import is_ours
from tepo_megatron.run.sampling.inputs import Inputs
from tepo_megatron.run.step.placement import Placement
from tepo_megatron.runtime.machine import available_cores, this_machine
from tepo_megatron.sampler.protocol import ResponseStream, Sampler, SampleStream, ServerDied, make_sampler
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.protocol import RewardResult, Task

_POLL_S = 0.005

_Judged = tuple[Logprobs, TopTokens | None]  # by response token


class ServedTeachers:
    """Starts servers in the background, none for a replay; scores wait for them. Thread-safe."""

    def __init__(self, config: RunConfig, inputs: Inputs, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        samples = config.rollout.replay is None
        named = {name: teacher for name, teacher in config.teachers.items() if teacher.place == "server" and samples}
        placement = Placement(config, this_machine())
        gpus, (cores, _) = placement.teacher_gpus, placement.split_cores(available_cores())
        self.samplers: dict[str, Sampler] = {}
        for name, teacher in named.items():
            self.samplers[name] = make_sampler(
                teacher.served,
                model_dir=resolve_model_path(teacher.path),
                dtype=config.model.dtype,
                stop_token_ids=inputs.tokenizer.eos_ids,
                log_dir=config.teacher_logs(name),
                seed=config.seed,
                first_gpu=gpus[name],
                cores=cores[name],
                with_ranks=True,
                report=partial(self._report, name),
            )
        self._threads = {name: ThreadPoolExecutor(teacher.threads, f"teacher-{name}") for name, teacher in named.items()}
        self._starting = {name: self._threads[name].submit(sampler.start) for name, sampler in self.samplers.items()}
        self._reviving, self._closed = threading.Lock(), False

    def _report(self, name: str, sentence: str) -> None:
        self._say(f"teacher {name}: {sentence}")

    def judged(self, task: Task) -> Task:
        return _JudgedTask(task, self) if self.samplers else task

    def name_of(self, problem: Problem) -> str | None:
        """None if a model on the trainer's ranks judges it."""
        name = self._config.teacher_of(problem.source)
        return name if name in self.samplers else None

    def score(self, name: str, response: ResponseText) -> Future[_Judged]:
        # numpy's numbers are no JSON
        prompt, ids = ([int(token) for token in tokens] for tokens in (response.prompt_ids, response.token_ids))
        return self._threads[name].submit(self._score, name, prompt, ids)

    def _score(self, name: str, prompt: list[int], response: list[int]) -> _Judged:
        sampler, first = self.samplers[name], len(prompt) - 1
        with self._named(name):
            self._starting[name].result()
            while True:
                try:
                    scores = sampler.score([*prompt, *response], self._config.objective.teacher_top_k)
                    break
                except ServerDied as error:
                    if self._closed:
                        raise
                    with self._reviving:
                        self._report(name, f"{error}; starting it again")
                        sampler.revive()  # raises RuntimeError after too many restarts
        logprobs = np.asarray(scores.logprobs[first:], dtype=np.float32)
        top = None if scores.top is None else scores.top[first:].copy()
        finite = np.isfinite(logprobs) if top is None else np.isfinite(logprobs) & np.isfinite(top["logprob"]).all(1)
        if not finite.all():
            token = int(np.flatnonzero(~finite)[0])
            raise RuntimeError(
                f"teacher {name} gave token {token} of a response the log-prob {logprobs[token]}; is it the model of "
                f"teachers.{name}.path, in a dtype that it can be served in?"
            )
        return logprobs, top

    def check_started(self) -> None:
        """Does not wait. Raises RuntimeError for a teacher whose start has failed."""
        for name, started in self._starting.items():
            if started.done():
                with self._named(name):
                    started.result()

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ServerDied) or not is_ours(error):
                raise
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            sentence = str(error).replace("rollout.server.", f"teachers.{name}.server.")
            raise kind(f"teacher {name}: {sentence}") from error

    def close(self) -> None:
        self._closed = True
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        for sampler in self.samplers.values():
            sampler.stop()


@dataclass
class _JudgedTask(Task):
    """Adds the teachers' log-probs to another task's results."""

    inner: Task
    teachers: ServedTeachers
    _results: dict[Hashable, RewardResult] = field(default_factory=dict)
    _scores: dict[Hashable, Future[_Judged]] = field(default_factory=dict)

    @property
    def scores_groups(self) -> bool:
        return self.inner.scores_groups

    @property
    def unfinished(self) -> int:
        return self.inner.unfinished + len(self._results)

    def stream(self, samples: SampleStream, problem_of: Callable[[Any], Problem]) -> ResponseStream:
        return self.inner.stream(samples, problem_of)

    def submit(self, key: Hashable, problem: Problem, response: str, *, group: Hashable = None, group_size: int = 1) -> None:
        self.inner.submit(key, problem, response, group=group, group_size=group_size)
        if (name := self.teachers.name_of(problem)) is not None:
            assert isinstance(response, ResponseText)
            self._scores[key] = self.teachers.score(name, response)

    def poll(self, timeout_s: float | None = 0.0) -> list[tuple[Hashable, RewardResult]]:
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            wait = min(left, _POLL_S) if self._results else left
            for key, result in self.inner.poll(None if wait == float("inf") else max(0.0, wait)):
                self._results[key] = result
            whole = [key for key in self._results if key not in self._scores or self._scores[key].done()]
            if whole or left <= 0 or not self.unfinished:
                return [(key, self._whole(key)) for key in whole]
            if self._results and not self.inner.unfinished:
                time.sleep(_POLL_S)

    def _whole(self, key: Hashable) -> RewardResult:
        result, scores = self._results.pop(key), self._scores.pop(key, None)
        if scores is None:
            return result
        logprobs, top = scores.result()
        return replace(result, teacher_logprobs=logprobs, teacher_top=top)

    def reset(self) -> None:
        self.inner.reset()
        self._results.clear()
        for scores in self._scores.values():
            scores.cancel()
        self._scores.clear()

    def rehearse(self, problems: Sequence[Problem]) -> None:
        self.inner.rehearse(problems)

    def take_figures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        return self.inner.take_figures(rollouts)

    def another(self) -> _JudgedTask:
        return _JudgedTask(self.inner.another(), self.teachers)

    def close(self) -> None:
        self.inner.close()

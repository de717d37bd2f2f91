"""Worker processes that run episodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tepo_megatron.config.reward import OUTSIDE, AgentConfig, EnvironmentConfig
from tepo_megatron.config.rollout import SamplingConfig
from tepo_megatron.runtime.worker_child import why_it_ended
from tepo_megatron.runtime.worker_process import START_TIMEOUT_S, Worker, WorkerProcess, WorkerSet
from tepo_megatron.tasks.environments.protocol import END, EpisodeAnswer, make_key
from tepo_megatron.tasks.environments.worker import SETUP, resolve_environment, took_too_long
from tepo_megatron.tasks.reward.verifiers import resolve_verifier

_EXTRA_TIME_S = 2.0  # an async environment's worker ends late calls itself


@dataclass(eq=False)
class _Call:
    number: int
    episode: int
    kind: str
    deadline: float
    awaited: bool = True


@dataclass(eq=False)
class _Worker(Worker[_Call]):
    alone: bool = False  # it runs one episode at a time, to find which ended another worker
    episodes: set[int] = field(default_factory=set)
    outbox: list[Any] = field(default_factory=list)  # calls to send when it is ready; it does not read before


class EnvironmentWorkers:
    """A call that raises, is invalid or exceeds a limit fails its episode. A worker that hangs or dies is replaced: the late
    call's episode fails, others are lost, and suspected ones begin again one by one in an extra worker. Raises ValueError for
    an unusable environment, RuntimeError if a worker does not start.
    """

    def __init__(self, config: EnvironmentConfig, sampling: SamplingConfig | None = None) -> None:
        self._config = config
        self._agent = agent_setup(config, sampling)
        self._name = resolve_environment(config.name)
        self._workers: WorkerSet[_Worker] = WorkerSet()
        self._numbers = count()
        self._home: dict[int, _Worker] = {}
        self._waiting: dict[int, list[Any]] = {}
        self._answers: list[EpisodeAnswer] = []
        self._notice: str | None = None
        try:
            for _ in range(config.workers):
                self._workers.add(self._start())
            while not self._workers.ready:
                self._wait(START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    @property
    def notice(self) -> str | None:
        return self._notice

    @property
    def busy(self) -> bool:
        under_way = (call.awaited for worker in self._workers for call in worker.pending)
        return bool(self._answers or self._waiting) or any(under_way)

    def call(self, episode: int, call: list[Any]) -> None:
        worker = self._home.get(episode) or self._room(call)
        if worker is None:
            self._waiting[episode] = call
            return
        self._home[episode] = worker
        worker.episodes.add(episode)
        self._begin(worker, episode, call)

    def end(self, episode: int) -> None:
        self._waiting.pop(episode, None)
        self._answers = [item for item in self._answers if item.episode != episode]
        worker = self._home.pop(episode, None)
        if worker is not None:
            worker.episodes.discard(episode)
            self._begin(worker, episode, END)
            for call in worker.pending:
                call.awaited = call.awaited and call.episode != episode
            self._give_room()

    def poll(self, timeout_s: float) -> Sequence[EpisodeAnswer]:
        deadline = time.monotonic() + timeout_s
        self._wait(0.0)
        while not self._answers and self.busy and (left := deadline - time.monotonic()) > 0:
            self._wait(left)
        result, self._answers = self._answers, []
        return result

    def close(self) -> None:
        self._workers.close()

    def _start(self, *, alone: bool = False) -> _Worker:
        config = self._config
        process = WorkerProcess("tepo_megatron.tasks.environments.worker")
        worker = _Worker(process, alone=alone)
        setup = {name: getattr(config, name) for name in SETUP}
        # An absolute path: the worker may run in another folder.
        name = self._name if ":" in config.name else config.name
        # Two processes cannot have one port; agents of this package use any free one.
        agent = self._agent if self._agent is None or not alone else {**self._agent, "port": 0}
        setup |= {"name": name, "agent": agent, "concurrency": config.concurrency}
        process.send({**setup, "path": sys.path, "network": not config.cuts_network}, START_TIMEOUT_S)
        return worker

    def _begin(self, worker: _Worker, episode: int, call: list[Any]) -> None:
        under_way = _Call(next(self._numbers), episode, call[0], self._deadline(worker))
        worker.pending.append(under_way)
        self._send(worker, [[under_way.number, episode, call]])

    def _send(self, worker: _Worker, calls: list[Any]) -> None:
        worker.outbox += calls
        if worker.ready:
            worker.process.send(worker.outbox, self._config.timeout_s)
            worker.outbox = []

    def _room(self, reset: list[Any]) -> _Worker | None:
        alone = bool(reset[3])
        if alone and not any(worker.alone for worker in self._workers):
            self._workers.add(self._start(alone=True))
        room = 1 if alone else self._config.concurrency
        free = [worker for worker in self._workers if worker.alone == alone and len(worker.episodes) < room]
        if alone:  # no other episode may run in it, nor end in it
            free = [worker for worker in free if not worker.pending]
        return min(free, key=lambda worker: len(worker.episodes), default=None)

    def _give_room(self) -> None:
        for episode, call in list(self._waiting.items()):
            if self._room(call) is None:
                if not call[3]:
                    return
                continue
            del self._waiting[episode]
            self.call(episode, call)

    def _deadline(self, worker: _Worker) -> float:
        """A waiting call gets a new deadline when its turn comes."""
        return time.monotonic() + self._config.timeout_s + (_EXTRA_TIME_S if worker.concurrent else 0.0)

    def _wait(self, timeout_s: float) -> None:
        for worker, has_written in self._workers.wait(timeout_s):
            if has_written:
                self._take_answers(worker)
            else:
                self._replace_late(worker)

    def _take_answers(self, worker: _Worker) -> None:
        try:
            answers = worker.process.receive()
        except EOFError:
            status = worker.process.exit_status()
            why = why_it_ended(status, self._config.memory_mb, what="environment", section="environment")
            self._replace(worker, why)
            return
        for answer in answers:
            if not worker.ready:
                self._begin_work(worker, answer)
                continue
            number, content, seconds, last = answer
            call = next(call for call in worker.pending if call.number == number)
            worker.pending.remove(call)
            error = content.pop("error", None)
            if call.awaited:
                self._answers.append(EpisodeAnswer(call.episode, content, error, seconds=seconds))
            elif worker.alone:
                self._give_room()
            if worker.pending and not worker.concurrent:
                worker.pending[0].deadline = self._deadline(worker)
            if last:
                worker.pending.clear()  # calls that it has not started are not the cause
                self._replace(worker, "its worker had grown too large")
                return

    def _begin_work(self, worker: _Worker, answer: dict[str, Any]) -> None:
        if "error" in answer:
            raise ValueError(answer["error"])
        worker.ready, worker.concurrent, self._notice = True, answer["concurrent"], answer["notice"]
        for call in worker.pending:
            call.deadline = self._deadline(worker)
        if worker.outbox:
            self._send(worker, [])

    def _replace_late(self, worker: _Worker) -> None:
        now = time.monotonic()
        late = [call for call in worker.running if now >= call.deadline]
        # If several calls hold up one process, the cause is unknown.
        if len(late) == 1 and late[0].awaited and not worker.process.stopped:
            episode = late[0].episode
            worker.episodes.discard(episode)
            del self._home[episode]
            self._answers.append(EpisodeAnswer(episode, error=took_too_long(self._config.timeout_s, late[0].kind)))
        kind = late[0].kind if late else "reset"
        self._replace(worker, took_too_long(self._config.timeout_s, kind))

    def _replace(self, worker: _Worker, why: str) -> None:
        if not worker.ready:
            raise RuntimeError(f"a worker for environment.name = {self._config.name!r} did not start: {why}")
        self._workers.kill(worker)
        self._workers.replace(worker, self._start(alone=worker.alone))
        suspects = {call.episode for call in worker.running if call.awaited}
        for episode in sorted(worker.episodes):
            del self._home[episode]
            self._answers.append(EpisodeAnswer(episode, lost=why, suspect=episode in suspects))
        self._give_room()


def shared_setup(settings: AgentConfig, sampling: SamplingConfig | None) -> dict[str, Any]:
    """Settings that determine an agent's episode, as JSON values."""
    drawn = sampling or SamplingConfig()
    return {
        "history": settings.history,
        "ignore": list(settings.ignore),
        "verifier": settings.verifier,
        "tool_calls": settings.tool_calls,
        "max_request_mb": settings.max_request_mb,
        "sampling": {
            "temperature": drawn.temperature,
            "top_p": drawn.top_p,
            "top_k": drawn.top_k,
            "min_p": drawn.min_p,
            "stop": list(drawn.stop),
        },
    }


def agent_setup(config: EnvironmentConfig, sampling: SamplingConfig | None) -> dict[str, Any] | None:
    """As :func:`shared_setup`, with this machine's settings; None without an agent. Writes a missing key file."""
    if config.adapter != "agent":
        return None
    settings = config.agent_settings
    outside = settings.key_file if config.name == OUTSIDE else None
    return {
        **shared_setup(settings, sampling),
        # An absolute path: the process may run in another folder.
        "verifier": None if settings.verifier is None else resolve_verifier(settings.verifier),
        "port": settings.port,
        "key": None if outside is None else make_key(outside, "environment.agent.key_file"),
    }

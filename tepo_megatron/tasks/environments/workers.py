import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tepo_megatron.config.reward import OUTSIDE, AgentConfig, EnvironmentConfig
from tepo_megatron.config.rollout import SamplingConfig
from tepo_megatron.runtime.worker_process import End, Worker, WorkerCall, WorkerPool, WorkerProcess
from tepo_megatron.tasks.environments.protocol import END, EpisodeAnswer, read_key
from tepo_megatron.tasks.environments.worker import resolve_environment
from tepo_megatron.tasks.reward.verifiers import resolve_verifier


@dataclass(eq=False)
class _Call(WorkerCall):
    episode: int
    call: list[Any]
    awaited: bool = True

    def __post_init__(self) -> None:
        self.method = "close" if self.call == END else self.call[0]

    @property
    def message(self) -> list[Any]:
        return [self.episode, self.call]


@dataclass(eq=False)
class _Worker(Worker[_Call]):
    alone: bool = False  # it runs one episode at a time, to find which ended another worker
    episodes: set[int] = field(default_factory=set)


class EnvironmentWorkers(WorkerPool[_Worker, _Call]):
    """A call that raises, is invalid or exceeds a limit fails its episode. A worker that hangs or dies is replaced: the
    late call's episode fails, others are lost; suspected ones begin again one by one in an extra worker.
    """

    def __init__(self, config: EnvironmentConfig, sampling: SamplingConfig | None = None) -> None:
        self._config, self._agent = config, self.agent_setup(config, sampling)
        self._numbers = count()
        self._home: dict[int, _Worker] = {}
        self._waiting: dict[int, list[Any]] = {}
        self._answers: list[EpisodeAnswer] = []
        located = resolve_environment(config.name)
        # An absolute path: the worker may run in another folder.
        name = located if ":" in config.name else config.name
        setup = {"name": name, "adapter": config.adapter, "agent": self._agent, "concurrency": config.concurrency}
        super().__init__(
            lambda: _Worker(WorkerProcess("tepo_megatron.tasks.environments.worker")),
            config,
            names=("environment", "environment", f"environment.name = {config.name!r}"),
            setup={**setup, "timeout_s": config.call_limit_s},
        )

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
        self._send(worker, [_Call(next(self._numbers), episode, call)])

    def end(self, episode: int) -> None:
        self._waiting.pop(episode, None)
        self._answers = [item for item in self._answers if item.episode != episode]
        worker = self._home.pop(episode, None)
        if worker is not None:
            worker.episodes.discard(episode)
            self._send(worker, [_Call(next(self._numbers), episode, END)])
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

    def _start_alone(self) -> None:
        # Two processes cannot have one port; agents of this package use any free one.
        worker = self._start(agent=self._agent and {**self._agent, "port": 0})
        worker.alone = True

    def _start_like(self, worker: _Worker) -> None:
        if worker.alone:
            self._start_alone()
        else:
            self._start()

    def _room(self, reset: list[Any]) -> _Worker | None:
        alone = bool(reset[3])
        if alone and not any(worker.alone for worker in self._workers):
            self._start_alone()
        room = 1 if alone else self._config.concurrency
        fitting = [worker for worker in self._workers if worker.alone == alone and not worker.worn]
        free = [worker for worker in fitting if len(worker.episodes) < room]
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

    def _answered(self, worker: _Worker, call: _Call, answer: dict[str, Any], seconds: float) -> None:
        if call.awaited:
            error = answer.pop("error", None) if isinstance(answer, dict) else None
            self._answers.append(EpisodeAnswer.read([call.episode, answer, error, None, False, seconds], call.episode))
        else:  # its worker may be idle, or no longer worn
            self._give_room()

    def _lost(self, worker: _Worker, why: str, end: End) -> None:
        # Calls that it has not started are not the cause of its growth. If several calls hold it up, the cause is unknown.
        # Agents outside could not reach the other port of an extra worker.
        suspected = end != "grown" and self._config.name != OUTSIDE
        suspects = [call.episode for call in worker.running if call.awaited] if suspected else []
        if end == "late" and len(worker.late) == 1 and worker.late[0].awaited:
            episode = worker.late[0].episode
            worker.episodes.discard(episode)
            del self._home[episode]
            self._answers.append(EpisodeAnswer(episode, error=why))
        for episode in sorted(worker.episodes):
            del self._home[episode]
            self._answers.append(EpisodeAnswer(episode, lost=why, suspect=episode in suspects))
        self._give_room()

    @staticmethod
    def shared_setup(settings: AgentConfig, sampling: SamplingConfig | None) -> dict[str, Any]:
        """JSON values that determine an agent's episode."""
        drawn = (sampling or SamplingConfig()).model_dump(
            include={"temperature", "top_p", "top_k", "min_p", "stop"}, mode="json"
        )
        fields = {"history", "ignore", "verifier", "tool_calls", "max_request_mb"}
        return settings.model_dump(include=fields, mode="json") | {"sampling": drawn}

    @classmethod
    def agent_setup(cls, config: EnvironmentConfig, sampling: SamplingConfig | None) -> dict[str, Any] | None:
        """Adds this machine's settings to ``shared_setup``; None without an agent. Writes a missing key file."""
        if config.adapter != "agent":
            return None
        settings = config.agent_settings
        outside = settings.key_file if config.name == OUTSIDE else None
        return {
            **cls.shared_setup(settings, sampling),
            # An absolute path: the process may run in another folder.
            "verifier": None if settings.verifier is None else resolve_verifier(settings.verifier),
            "port": settings.port,
            "key": None if outside is None else read_key(outside, "environment.agent.key_file", write=True),
        }

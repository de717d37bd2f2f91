from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from queue import Empty, SimpleQueue
from typing import Unpack

from numpy.typing import ArrayLike

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import Response, TokenIds, WeightsVersion, token_ids
from tepo_megatron.sampler.fleet.server_pool import ServerPool
from tepo_megatron.sampler.protocol import KeyedResponse, ServerDied, SubmitOptions, refuse_others
from tepo_megatron.sampler.sampling import Sample, Sampling, join_parts
from tepo_megatron.sampler.vllm.client import MORE_THREADS, Client, ProgressWatch, ServerFault, ServerGone, ServerSilent

FIRST_PAUSE_S = 0.1  # it doubles per repetition, up to _LAST_PAUSE_S
_LAST_PAUSE_S = 5.0
_QUEUE_FACTOR = 2  # longest queue of a server, in samples that it draws at once
_ABORT_INTERVAL_S = 0.5


@dataclass(eq=False)
class _Lane:
    index: int
    client: Client
    watch: ProgressWatch
    samples: int = 0
    tokens: int = 0  # upper bound of outstanding ones, prompts included
    faults: int = 0  # consecutive ones


@dataclass
class _Request:
    key: Hashable
    prompt: TokenIds
    samples: dict[int, Sample]
    parts: Mapping[int, Response]
    since: int
    faults: int = 0  # without the loss of its server
    name: str = ""
    home: Hashable = None
    lane: _Lane | None = None
    failed_lane: _Lane | None = None

    @property
    def tokens(self) -> int:
        return sum(self.prompt.size + sample.prefix.size + sample.max_new_tokens for sample in self.samples.values())


@dataclass
class _Event:
    request: _Request
    name: str  # a repeated request has another
    index: int = -1
    response: Response | None = None
    error: BaseException | None = None


@dataclass
class FleetStream:
    """Requests go to the server with the fewest outstanding tokens, and are repeated up to ``max_retries`` times.

    The stream gives up a server after more faults in a row, if it is dead, or silent for ``request_timeout_s``.
    """

    pool: ServerPool
    sampling: Sampling
    on_move: Callable[[], None] = lambda: None
    _waiting: deque[_Request] = field(default_factory=deque)
    _sent: dict[str, _Request] = field(default_factory=dict)
    _events: SimpleQueue[_Event] = field(default_factory=SimpleQueue)
    _ready: deque[KeyedResponse] = field(default_factory=deque)
    _lanes: dict[int, _Lane] = field(default_factory=dict)
    _homes: dict[Hashable, int] = field(default_factory=dict)
    _names: Iterator[int] = field(default_factory=count)
    _is_aborted: bool = False

    def __enter__(self) -> FleetStream:
        self._refresh()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._waiting.clear()
        self._abort_sent()
        self._sent.clear()
        for lane in self._lanes.values():
            lane.watch.close()

    @property
    def _config(self) -> ServerConfig:
        return self.pool.config

    @property
    def unfinished(self) -> int:
        return len(self._ready) + sum(len(request.samples) for request in (*self._waiting, *self._sent.values()))

    @property
    def _is_unfinished(self) -> bool:
        requests = chain(self._sent.values(), self._waiting)
        return bool(self._ready) or any(request.samples for request in requests)  # asked per response: counting takes longer

    @property
    def weights_version(self) -> WeightsVersion:
        return self.pool.versions(self.pool.published)[-1]

    def submit(self, key: Hashable, prompt_ids: ArrayLike, seed: int, n: int = 1, **options: Unpack[SubmitOptions]) -> None:
        refuse_others(options)
        prompt = token_ids(prompt_ids)
        if not prompt.size:
            raise ValueError(f"prompt {key} is empty; a prompt needs at least one token")
        if self.sampling.temperature == 0 and n != 1:
            raise ValueError(f"greedy decoding gives one response per prompt, but n = {n}; use n = 1 or a temperature above 0")
        parts, only, room = options.get("continued") or {}, options.get("only"), options.get("room")
        sampling = self.sampling
        if room is not None:
            sampling = sampling._replace(max_new_tokens=min(room, sampling.max_new_tokens))
        samples = [Sample.of(index, seed, sampling, parts.get(index)) for index in (range(n) if only is None else only)]
        since = self.pool.published
        for first in range(0, len(samples), self._config.max_num_seqs):
            some = {sample.index: sample for sample in samples[first : first + self._config.max_num_seqs]}
            self._waiting.append(_Request(key, prompt, some, parts, since, home=options.get("home")))
        self._refresh()
        self._dispatch()

    def leave(self, home: Hashable) -> None:
        self._homes.pop(home, None)

    def __iter__(self) -> Iterator[KeyedResponse]:
        while self._is_unfinished:
            if (result := self.next(None)) is not None:
                yield result

    def next(self, timeout_s: float | None) -> KeyedResponse | None:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self._ready and self._is_unfinished:
                look_s = min((lane.watch.interval_s for lane in self._lanes.values()), default=1.0)
                with suppress(Empty):
                    self._settle(self._events.get(timeout=max(0.0, min(look_s, deadline - time.monotonic()))))
                self._check_servers()
                if not self._ready and time.monotonic() >= deadline:
                    return None
        except RuntimeError as error:
            self.pool.raise_if_dead(error)
            raise
        return self._ready.popleft() if self._ready else None

    def abort(self) -> list[KeyedResponse]:
        self._waiting.clear()
        self._abort_sent()
        limit_s = self._config.request_timeout_s  # of silence: a server may need long for the parts of all its requests
        deadline = time.monotonic() + limit_s
        lost, cause = 0, f"no answer within {limit_s:g} s (rollout.server.request_timeout_s)"
        while self._sent and (left := deadline - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=min(left, _ABORT_INTERVAL_S))
            except Empty:
                self._abort_sent()  # it does not end a request that was being sent
                continue
            deadline = time.monotonic() + limit_s
            self.on_move()
            if not isinstance(event.error, ServerFault):
                self._settle(event)
            elif event.name in self._sent:
                lost, cause = lost + len(event.request.samples), str(event.error)
                self._forget(event.request)
        for request in list(self._sent.values()):
            lost += len(request.samples)
            self._forget(request)
        if lost:
            self.pool.report_once(f"{lost} unfinished responses were lost when a step ended: {cause}")
        self._is_aborted = False
        results = list(self._ready)
        self._ready.clear()
        return results

    # -- within

    def _refresh(self) -> None:
        for index, client in self.pool.sampling().items():
            known = self._lanes.get(index)
            if known is None or known.client is not client:
                if known is not None:
                    known.watch.close()
                watch = ProgressWatch(client.progress, self._config.request_timeout_s, on_move=self.on_move)
                self._lanes[index] = _Lane(index, client, watch)

    def _dispatch(self) -> None:
        while self._waiting and self._lanes:
            first = self._waiting[0]
            home = self._lanes.get(self._homes.get(first.home, -1))
            lane = min(self._lanes.values(), key=lambda lane: (lane is first.failed_lane, lane.tokens, lane.index))
            if home is not None and home is not first.failed_lane and home.samples < self._config.max_num_seqs:
                lane = home
            if lane.samples and lane.samples + len(first.samples) > _QUEUE_FACTOR * self._config.max_num_seqs:
                return
            self._send(self._waiting.popleft(), lane)

    def _send(self, request: _Request, lane: _Lane) -> None:
        if not lane.samples:
            lane.watch.note_progress()
        request.lane, request.name = lane, f"{id(self):x}-{next(self._names)}"
        if request.home is not None:
            self._homes[request.home] = lane.index
        lane.samples += len(request.samples)
        lane.tokens += request.tokens
        self._sent[request.name] = request
        try:
            lane.client.pool.submit(self._draw, request, lane, dict(request.samples), request.name)
        except RuntimeError as error:
            if lane.client.is_closed:  # the fleet has ended its servers meanwhile, in another thread
                self._events.put(_Event(request, request.name, error=ServerGone(str(error))))
            else:  # no further thread could be started; the request waits for one that the client has
                self.pool.report_once(f"requests to the servers wait for each other: {error}; {MORE_THREADS}")

    def _draw(self, request: _Request, lane: _Lane, samples: Mapping[int, Sample], name: str) -> None:
        try:
            if self._is_aborted:
                self._events.put(_Event(request, name))
                return
            if request.faults:
                time.sleep(min(FIRST_PAUSE_S * 2 ** (request.faults - 1), _LAST_PAUSE_S))
            drawn = lane.client.draw(
                name,
                request.prompt,
                list(samples.values()),
                self.sampling,
                lambda: self.pool.versions(request.since),
                updating=lambda: self.pool.updating,
                is_aborted=lambda: self._is_aborted,
            )
            for index, response in drawn:
                self._events.put(_Event(request, name, index, response))
            self._events.put(_Event(request, name))
        except BaseException as error:
            if type(error) is ServerFault and not self.pool.is_healthy(lane.index):
                error = ServerGone(str(error))
            self._events.put(_Event(request, name, error=error))

    def _settle(self, event: _Event) -> None:
        request = event.request
        lane = request.lane
        if event.name not in self._sent or lane is None:
            return  # the request was repeated at another server, or given up
        lane.watch.note_progress()
        if event.response is not None:
            if (sample := request.samples.pop(event.index, None)) is not None:
                lane.samples -= 1
                lane.tokens -= request.prompt.size + sample.prefix.size + sample.max_new_tokens
                self._ready.append((request.key, event.index, join_parts(request.parts.get(event.index), event.response)))
        else:
            self._forget(request)
            if event.error is None:
                lane.faults = 0
            elif isinstance(event.error, ServerFault):
                self._failed(request, lane, event.error)
            else:
                raise event.error
        self._dispatch()

    def _forget(self, request: _Request) -> None:
        if request.lane is not None and self._sent.pop(request.name, None) is not None:
            request.lane.samples -= len(request.samples)
            request.lane.tokens -= request.tokens

    def _failed(self, request: _Request, lane: _Lane, error: ServerFault) -> None:
        lane.faults += 1
        request.faults += 1
        request.failed_lane = lane
        if request.samples:
            self.pool.count_retried(1)
            self._waiting.appendleft(request)
        if isinstance(error, ServerGone | ServerSilent) or max(lane.faults, request.faults) > self._config.max_retries:
            self._lose(lane, error)

    def _lose(self, lane: _Lane, cause: ServerFault) -> None:
        if self._lanes.get(lane.index) is lane:  # else another has its place already
            del self._lanes[lane.index]
        lane.watch.close()
        left = [request for request in self._sent.values() if request.lane is lane]
        for request in left:
            del self._sent[request.name]
            request.lane = None
        self.pool.lose(lane.index, lane.client, cause)
        self._refresh()
        if not self._lanes:  # also if all were restarted and wait for their weights
            raise ServerDied(f"no rollout server samples: {cause}") from cause
        self.pool.count_retried(len(left))
        self._waiting.extendleft(reversed(left))

    def _check_servers(self) -> None:
        updating = self.pool.updating  # asked first: the end of an update brings servers
        self._refresh()
        if not self._lanes and not updating:  # another stream has lost the last
            raise ServerDied("no server is left to sample")
        for lane in list(self._lanes.values()):
            if not lane.samples or self.pool.updating:
                lane.watch.note_progress()  # nothing is outstanding
            elif why := lane.watch.look():
                self._lose(lane, ServerSilent(f"{lane.client.url}: {why}"))
        self._dispatch()

    def _abort_sent(self) -> None:
        # In threads of their own, since a server may hang.
        self._is_aborted = True
        for lane in self._lanes.values():
            if names := [request.name for request in self._sent.values() if request.lane is lane and request.samples]:
                threading.Thread(target=_abort, args=(lane.client, names), name="abort-samples", daemon=True).start()


def _abort(client: Client, names: Sequence[str]) -> None:
    with suppress(RuntimeError):  # the watch finds a server that fails
        client.abort(names)

"""Samples asked for at any time, and responses one by one as they finish; spread over servers, watched, asked for again."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Protocol

from numpy.typing import ArrayLike

from tepo_megatron.core.rollout import Response, TokenIds, WeightsVersion, token_ids
from tepo_megatron.sampler.fleet.progress import ProgressWatch, interval_s
from tepo_megatron.sampler.protocol import KeyedResponse, ServerDied
from tepo_megatron.sampler.sampling import Sample, Sampling, join_parts, make_sample
from tepo_megatron.sampler.vllm.client.client import Client
from tepo_megatron.sampler.vllm.client.connection import ServerFault, ServerGone, ServerSilent


@dataclass
class Lane:
    """One server that samples. ``healthy`` asks whether it says that it works; ``index`` is its number in the fleet.

    Its requests wait in threads of its own: those of a server that hangs must not keep the others' from starting.
    """

    index: int
    client: Client
    pool: ThreadPoolExecutor
    healthy: Callable[[], bool]
    samples: int = 0
    """That it owes."""
    tokens: int = 0
    """That it may have to read and draw for them."""
    faults: int = 0
    """In a row."""


class Host(Protocol):
    """What a stream asks of its fleet."""

    @property
    def updating(self) -> bool:
        """Whether the servers are getting new weights just now, for which they hold their requests."""

    def lanes(self) -> Sequence[Lane]:
        """The servers that sample, each time new."""

    def published(self) -> int:
        """How many weights the servers have been given so far, those that all of them have now included."""

    def versions(self, since: int) -> Sequence[WeightsVersion]:
        """The weights that were given to the servers, the last of the first ``since`` and all after it."""

    def lose(self, lane: Lane, cause: ServerFault) -> None:
        """A server is dead, hangs or answers wrongly. May raise to end everything."""

    def raise_if_dead(self, cause: Exception) -> None:
        """Raises ServerDied if ``cause`` is the consequence of one that is gone."""

    def count_retried(self, requests: int) -> None:
        """So many requests were asked again."""


FIRST_PAUSE_S = 0.1
"""Before a request is asked again for the first time; the pause doubles each time, up to LAST_PAUSE_S."""

LAST_PAUSE_S = 5.0

AHEAD = 2
"""So many times the samples that a server draws at once are asked of it; more wait here, for whichever has room first."""

AGAIN_S = 0.5
"""After so long a server is told once more which responses it shall end."""

ABORT_S = 30.0
"""What a server has to send what it has of responses that are ended."""


@dataclass
class _Request:
    """Samples of one prompt that are asked for together, and not here yet."""

    key: Hashable
    prompt: TokenIds
    samples: dict[int, Sample]
    parts: Mapping[int, Response]
    since: int
    faults: int = 0
    """How often it has failed, for whatever reason but the loss of its server."""
    name: str = ""
    home: Hashable = None
    """Requests of the same one go to one server, which has their beginnings in its cache."""
    lane: Lane | None = None
    after: Lane | None = None
    """The server that it failed at."""

    @property
    def tokens(self) -> int:
        return sum(self.prompt.size + each.prefix.size + each.max_new_tokens for each in self.samples.values())


@dataclass
class _Event:
    """From a server's thread: a response, the end of a request, or what it failed of."""

    request: _Request
    name: str
    """That it was asked under; it has another one by now if it was asked again."""
    index: int = -1
    response: Response | None = None
    error: BaseException | None = None


@dataclass
class FleetStream:
    """Requests for samples to the servers of ``host``, whose weights may be updated meanwhile. A context manager, used from one
    thread, which need not be that of the updates.

    A request goes to the server that owes the fewest tokens. One that fails is asked again, of another server where there is
    one, at most ``max_retries`` times; so may a server fail in a row. Beyond that, when it is gone, or silent for
    ``timeout_s`` seconds, the server is lost to the fleet (``host.lose``), and the others draw what it owed. ``at_once``:
    samples that a server draws at a time. ``on_move`` is called, in this thread, when a server was seen to make tokens.
    """

    host: Host
    sampling: Sampling
    timeout_s: float
    max_retries: int
    at_once: int
    on_move: Callable[[], None] = lambda: None
    _waiting: deque[_Request] = field(default_factory=deque)
    _asked: dict[str, _Request] = field(default_factory=dict)
    _events: SimpleQueue[_Event] = field(default_factory=SimpleQueue)
    _ready: deque[KeyedResponse] = field(default_factory=deque)
    _lanes: dict[int, Lane] = field(default_factory=dict)
    _homes: dict[Hashable, int] = field(default_factory=dict)
    """The server that a home's last request went to."""
    _watches: dict[int, ProgressWatch] = field(default_factory=dict)
    _names: Iterator[int] = field(default_factory=count)
    _ended: bool = False

    def __enter__(self) -> FleetStream:
        self._refresh()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        """What is unfinished is given up: the servers drop it."""
        self._waiting.clear()
        self._end_asked()
        self._asked.clear()
        for watch in self._watches.values():
            watch.close()

    @property
    def unfinished(self) -> int:
        """Samples that were asked for and not given out yet."""
        return len(self._ready) + sum(len(each.samples) for each in (*self._waiting, *self._asked.values()))

    @property
    def weights_version(self) -> WeightsVersion:
        """The newest weights that may draw the next token."""
        return self.host.versions(self.host.published())[-1]

    def submit(
        self,
        key: Hashable,
        prompt_ids: ArrayLike,
        seed: int,
        n: int = 1,
        *,
        continued: Mapping[int, Response] | None = None,
        only: Sequence[int] | None = None,
        room: int | None = None,
        home: Hashable = None,
    ) -> None:
        """Ask for samples 0 to n − 1 of a prompt (token ids, at least one), or those in ``only``; sample j has the seed
        ``seed`` + j wherever and whenever it is drawn. Those in ``continued`` go on behind what an :meth:`abort` gave of them,
        and their responses begin with it. ``room``: of tokens, where it is less than the sampling allows. Requests of a
        ``home`` go to one server as long as it has room for them, until :meth:`leave`.

        Raises ValueError for an empty prompt, for greedy decoding of more than one, and where a part leaves no room.
        """
        prompt = token_ids(prompt_ids)
        if not prompt.size:
            raise ValueError(f"prompt {key} is empty; a prompt needs at least one token")
        if self.sampling.temperature == 0 and n != 1:
            raise ValueError(f"greedy decoding gives one response per prompt, but n = {n}; use n = 1 or a temperature above 0")
        parts = continued or {}
        sampling = self.sampling
        if room is not None:
            sampling = sampling._replace(max_new_tokens=min(room, sampling.max_new_tokens))
        samples = [make_sample(at, seed, sampling, parts.get(at)) for at in (range(n) if only is None else only)]
        since = self.host.published()
        for first in range(0, len(samples), self.at_once):
            some = {each.index: each for each in samples[first : first + self.at_once]}
            self._waiting.append(_Request(key, prompt, some, parts, since, home=home))
        self._hand_out()

    def leave(self, home: Hashable) -> None:
        """Nothing more is asked under this home."""
        self._homes.pop(home, None)

    def __iter__(self) -> Iterator[KeyedResponse]:
        """Responses as they finish, until none is owed."""
        while self.unfinished:
            found = self.next(None)
            if found is not None:
                yield found

    def next(self, timeout_s: float | None) -> KeyedResponse | None:
        """The next response that finishes; None where there is none within ``timeout_s`` seconds (None: no limit), or none is
        owed.

        Raises ServerDied when a server is gone and no other can do its work, RuntimeError for whatever else a server answers.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self._ready and self.unfinished:
                left = interval_s(self.timeout_s)
                if deadline is not None:
                    left = min(left, deadline - time.monotonic())
                with suppress(Empty):
                    self._settle(self._events.get(timeout=max(0.0, left)))
                self._look()
                if not self._ready and deadline is not None and time.monotonic() >= deadline:
                    return None
        except RuntimeError as error:
            self.host.raise_if_dead(error)
            raise
        return self._ready.popleft() if self._ready else None

    def abort(self) -> list[KeyedResponse]:
        """End all that is unfinished; what there is of it, with the finish reason ``abort``, and what has finished meanwhile.

        Samples without a token are not in it, nor what a server did not send within ``ABORT_S``. A part can be gone on with
        (``submit(continued=…)``). The stream may be used further.
        """
        self._waiting.clear()
        self._end_asked()
        deadline = time.monotonic() + ABORT_S
        while self._asked and (left := deadline - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=min(left, AGAIN_S))
            except Empty:
                self._end_asked()  # a request that was just on its way was not ended
                continue
            if isinstance(event.error, ServerFault):
                self._drop(event)
            else:
                self._settle(event)
        for request in list(self._asked.values()):
            self._forget(request)
        self._ended = False
        found = list(self._ready)
        self._ready.clear()
        return found

    # -- within

    def _refresh(self) -> None:
        """Takes the fleet's servers as they are now: one that was replaced samples again."""
        for lane in self.host.lanes():
            known = self._lanes.get(lane.index)
            if known is None or known.client is not lane.client:
                self._lanes[lane.index] = lane
                if (watch := self._watches.pop(lane.index, None)) is not None:
                    watch.close()
                # Each of this stream only: what was seen before means nothing.
                self._watches[lane.index] = ProgressWatch(lane.client.progress, self.timeout_s, on_move=self.on_move)

    def _hand_out(self) -> None:
        while self._waiting and self._lanes:
            first = self._waiting[0]
            home = self._lanes.get(self._homes.get(first.home, -1))
            lane = min(self._lanes.values(), key=lambda each: (each is first.after, each.tokens, each.index))
            if home is not None and home is not first.after and home.samples < self.at_once:
                lane = home
            if lane.samples and lane.samples + len(self._waiting[0].samples) > AHEAD * self.at_once:
                return
            self._ask(self._waiting.popleft(), lane)

    def _ask(self, request: _Request, lane: Lane) -> None:
        if not lane.samples:
            self._watches[lane.index].moved()
        request.lane, request.name = lane, f"{id(self):x}-{next(self._names)}"
        if request.home is not None:
            self._homes[request.home] = lane.index
        lane.samples += len(request.samples)
        lane.tokens += request.tokens
        self._asked[request.name] = request
        try:
            lane.pool.submit(self._draw, request, lane, dict(request.samples), request.name)
        except RuntimeError as error:  # the fleet has ended its servers meanwhile, in another thread
            self._events.put(_Event(request, request.name, error=ServerGone(str(error), url=lane.client.url)))

    def _draw(self, request: _Request, lane: Lane, samples: Mapping[int, Sample], name: str) -> None:
        """In a server's thread."""
        try:
            if self._ended:
                self._events.put(_Event(request, name))
                return
            if request.faults:
                time.sleep(min(FIRST_PAUSE_S * 2 ** (request.faults - 1), LAST_PAUSE_S))
            drawn = lane.client.draw(
                name,
                request.prompt,
                list(samples.values()),
                self.sampling,
                lambda: self.host.versions(request.since),
                ended=lambda: self._ended,
            )
            for index, response in drawn:
                self._events.put(_Event(request, name, index, response))
            self._events.put(_Event(request, name))
        except (ServerGone, ServerSilent) as error:
            self._events.put(_Event(request, name, error=error))
        except ServerFault as error:
            gone = not lane.healthy()
            self._events.put(_Event(request, name, error=ServerGone(str(error), url=error.url) if gone else error))
        except BaseException as error:
            self._events.put(_Event(request, name, error=error))

    def _settle(self, event: _Event) -> None:
        request = event.request
        lane = request.lane
        if event.name not in self._asked or lane is None:
            return  # its server was lost, and it was asked again; or it was given up
        self._watches[lane.index].moved()
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
        self._hand_out()

    def _drop(self, event: _Event) -> None:
        """A request that failed while all were ended: what it owes is given up."""
        if event.name in self._asked:
            self._forget(event.request)

    def _forget(self, request: _Request) -> None:
        if request.lane is not None and self._asked.pop(request.name, None) is not None:
            request.lane.samples -= len(request.samples)
            request.lane.tokens -= request.tokens

    def _failed(self, request: _Request, lane: Lane, error: ServerFault) -> None:
        lane.faults += 1
        request.faults += 1
        request.after = lane
        if request.samples:
            self.host.count_retried(1)
            self._waiting.appendleft(request)
        if isinstance(error, ServerGone | ServerSilent) or max(lane.faults, request.faults) > self.max_retries:
            self._lose(lane, error)

    def _lose(self, lane: Lane, cause: ServerFault) -> None:
        del self._lanes[lane.index]
        self._watches.pop(lane.index).close()
        left = [request for request in self._asked.values() if request.lane is lane]
        for request in left:
            del self._asked[request.name]
            request.lane = None
        self.host.lose(lane, cause)
        self._refresh()
        if not self._lanes:  # also where all were started again meanwhile, and wait for their weights
            raise ServerDied(f"no rollout server samples: {cause}") from cause
        self.host.count_retried(len(left))
        self._waiting.extendleft(reversed(left))

    def _look(self) -> None:
        self._refresh()
        for lane in list(self._lanes.values()):
            watch = self._watches[lane.index]
            if not lane.samples or self.host.updating:
                watch.moved()  # nothing is due
            elif why := watch.look():
                self._lose(lane, ServerSilent(f"{lane.client.url}: {why}", url=lane.client.url))
        self._hand_out()

    def _end_asked(self) -> None:
        """Has the servers end what they were asked for. In threads of its own: a server that hangs is not waited for."""
        self._ended = True
        for lane in self._lanes.values():
            if names := [each.name for each in self._asked.values() if each.lane is lane and each.samples]:
                threading.Thread(target=_abort, args=(lane.client, names), name="abort-samples", daemon=True).start()


def _abort(client: Client, names: Sequence[str]) -> None:
    with suppress(RuntimeError):  # a server that fails is found by what it owes
        client.abort(names)

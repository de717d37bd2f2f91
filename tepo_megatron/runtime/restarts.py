"""Starts a job's ranks again after one was lost (docs/decisions/043-restarts.md)."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from tepo_megatron.runtime.machine import changed_environment, variable
from tepo_megatron.runtime.preemption import INTERRUPTED, PREEMPTED
from tepo_megatron.runtime.proc import Process
from tepo_megatron.runtime.text import echo

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_JOB, _ATTEMPT = "TEPO_JOB", "TEPO_ATTEMPT"
_LAUNCHED_JOB = "TEPO_LAUNCHED_JOB"  # the name of tepo launch's job, also when Slurm starts it again


class RanksEnd(NamedTuple):
    """``lost``: a rank was killed, hung, or failed by an error that is no sentence for the user: another try may succeed.
    ``killed``: process ids of this machine's ranks that a signal ended. ``advice``: what to do if it is the job's end.
    """

    code: int
    message: str = ""
    lost: bool = False
    killed: tuple[int, ...] = ()
    advice: str = ""


class NodesApartError(RuntimeError):
    """A job's nodes do not meet."""


def job_name() -> str:
    """Returns a random name, the same in all attempts of a job; "" if its ranks are not started again."""
    return os.environ.get(_JOB, "")


def job_of_checkpoints() -> str:
    """``job_name``, but of ``tepo launch`` the same when Slurm starts the job again."""
    return os.environ.get(_LAUNCHED_JOB) or job_name()


def starts_again() -> bool:
    return attempt() > 0 or (_LAUNCHED_JOB in os.environ and variable("SLURM_RESTART_COUNT", 0) > 0)


def attempt() -> int:
    """Counts the starts of this job's ranks from 0."""
    return variable(_ATTEMPT, 0)


@contextmanager
def named_job(name: str = "") -> Iterator[None]:
    with changed_environment(**{_JOB: name or secrets.token_hex(8), _ATTEMPT: None}):
        yield


def _set_attempt(number: int) -> None:
    os.environ[_ATTEMPT] = str(number)


def run_attempts(run: Callable[[], RanksEnd], max_restarts: int, saved: Callable[[], Sequence[str]]) -> RanksEnd:
    """Runs once, and again while ranks are lost, but not after one error twice with the same checkpoints (``saved``)."""
    if not max_restarts:
        return run()
    last: tuple[str, Sequence[str]] | None = None
    with named_job():
        for number in count():
            _set_attempt(number)
            end = run()
            failed = (end.message, saved())
            is_same = failed == last and not end.killed
            if not end.lost or number == max_restarts or is_same:
                return end
            last = failed
            echo(f"{end.message}. {_restart_sentence(number, max_restarts)}", err=True)
    raise AssertionError


def _restart_sentence(number: int, max_restarts: int) -> str:
    again = f"restart {number + 1} of at most {max_restarts}, train.max_restarts"
    return f"The ranks are started again, from the newest checkpoint ({again})"


POLL_INTERVAL_S = 1.0
SILENT_S = 30.0
"""A node is gone if its agent writes nothing for so long."""
GATHER_S = 60.0
"""An agent ends its ranks in half a minute."""
LEAVE_S = 30.0
"""After ranks that left in order those of other nodes have so long to do it."""
_CLOSE_S = 600.0
"""After a stop; rank 0 closes servers and logs."""
_WITH_OTHERS = "ended with the ranks of another node"
_CONSEQUENCE = re.compile(rf"{_WITH_OTHERS}|[Cc]onnection (closed|reset)|Broken pipe|Socket Timeout")


class NodeMeeting:
    """The agents of a job's nodes decide at one store who runs the next attempt. The first node keeps the store and has rank 0.

    ``watching``: another connection, for a thread. The first ``nodes`` of ``nodes + spares`` run, and a spare replaces a node
    that is gone, or that lost a rank to a signal. Raises NodesApartError if the first node is gone, or too few are left.
    ``stopped``: this agent's stop signals, which the other agents get too. ``saved``: as of ``run_attempts``.
    """

    def __init__(
        self,
        store: Store,
        watching: Store,
        node: int,
        nodes: int,
        spares: int,
        max_restarts: int,
        meet_s: float,
        stopped: Sequence[int] = (),
        saved: Callable[[], Sequence[str]] = list,
    ) -> None:
        self._store, self._watching = store, watching
        self._node, self._nodes, self._max_restarts, self._meet_s = node, nodes, max_restarts, meet_s
        self._stopped, self._saved = stopped, saved
        self._order = list(range(nodes + spares))
        """Of the first node: who may run, those first that should."""
        self._last: tuple[list[str], Sequence[str]] | None = None
        """Of the first node: the errors of the attempt before, and the checkpoints by then."""

    def run(self, run: Callable[[int], RanksEnd]) -> RanksEnd:
        """``run`` gets this node's place in the attempt. A spare that was not needed returns code 0."""
        if self._node == 0:
            self._write("job", secrets.token_hex(8))
        with named_job(self._read("job")):
            for number in count():
                members = self._members(number)
                end = RanksEnd(0)
                if self._node in members:
                    _set_attempt(number)
                    with self._watched(number, members) as ended_here:
                        end = run(members.index(self._node))
                    if ended_here and not set(end.killed) - ended_here:
                        own = "" if end.killed else end.message
                        end = RanksEnd(end.code, own or _WITH_OTHERS, lost=True)
                    if stop := self._stop_of_all():
                        self._write(f"{number}/stop", stop)
                    self._write(f"{number}/end/{self._node}", list(end))
                    if end.lost or (end.code and not self._store.check([f"{number}/over"])):
                        patience_s = _CLOSE_S if end.code in (PREEMPTED, INTERRUPTED) else LEAVE_S
                        self._write(f"{number}/over", 0.0 if end.lost else patience_s)
                if not self._continues(number, members):
                    self._leave()
                    return end
        raise AssertionError

    def _leave(self) -> None:
        """The first node leaves last, since the store ends with it."""
        self._write(f"left/{self._node}", 1)
        deadline = time.monotonic() + GATHER_S
        while self._node == 0 and len(self._answered("left/", self._order)) < len(self._order) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)

    def _members(self, number: int) -> list[int]:
        self._write(f"{number}/here/{self._node}", 1)
        if self._node == 0:
            deadline = time.monotonic() + (GATHER_S if number else self._meet_s)
            while (
                len(here := self._answered(f"{number}/here/", self._order)) < len(self._order) and time.monotonic() < deadline
            ):
                time.sleep(POLL_INTERVAL_S)
            self._order, missing = here, sorted({*self._order} - {*here})
            answer: list[int] | str = here[: self._nodes]
            if missing and not number:
                names = " and ".join(f"node {node}" for node in missing)
                answer = f"{names} of {len(here) + len(missing)}, spares included, did not come within {self._meet_s:g} s"
            elif len(here) < self._nodes:
                answer = (
                    f"{len(here)} of {self._nodes} nodes are left, and the ranks cannot start again; go on from the newest "
                    "checkpoint with --resume, and keep nodes in reserve (cluster.spare_nodes)"
                )
            self._write(f"{number}/members", answer)
        members = self._read(f"{number}/members")
        if isinstance(members, str):
            self._leave()
            raise NodesApartError(members)
        return list(members)

    def _continues(self, number: int, members: Sequence[int]) -> bool:
        if self._node == 0:
            self._write(f"{number}/next", self._decide(number, members))
        return bool(self._read(f"{number}/next"))

    def _decide(self, number: int, members: Sequence[int]) -> bool:
        """Collects how the attempt has ended on each node, and puts those at the end of the order that failed."""
        deadline = None
        while len(answered := self._answered(f"{number}/end/", members)) < len(members):
            if deadline is None and self._store.check([f"{number}/over"]):
                deadline = time.monotonic() + GATHER_S
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(POLL_INTERVAL_S)
        ends = {node: RanksEnd(*self._read(f"{number}/end/{node}")) for node in answered}
        gone = [node for node in members if node not in ends]
        killed = [node for node in ends if ends[node].killed]
        refused = any(end.code and not end.lost for end in ends.values())
        causes = [f"node {node} is gone" for node in gone] + [f"node {node}: {ends[node].message}" for node in killed]
        messages = [] if causes else [end.message for end in ends.values() if end.message]
        messages = [text for text in messages if not _CONSEQUENCE.search(text)] or messages
        causes = causes or messages[:1]
        # of several ranks another one may be the first, and gloo names a port
        errors = sorted(re.sub(r"^rank \d+: |(?<=\]):\d+", "", text) for text in messages)
        message = ", and ".join(causes)
        self._order = [node for node in self._order if node not in gone]
        is_complete = members[0] in ends and ends[members[0]].code == 0
        failed = (errors, self._saved())
        is_same = bool(errors) and failed == self._last
        if not causes or refused or is_complete or is_same or number == self._max_restarts:
            return False
        self._last = failed
        self._order.sort(key=lambda node: node != 0 and node in killed)  # the first node keeps the store
        echo(f"{message}. {_restart_sentence(number, self._max_restarts)}", err=True)
        return True

    def _stop_of_all(self) -> int:
        """0: none. A second Ctrl-C ends at once, so it is not passed on."""
        return next((stop for stop in self._stopped if stop != signal.SIGINT), 0)

    @contextmanager
    def _watched(self, number: int, members: Sequence[int]) -> Iterator[set[int]]:
        """Ends this node's ranks if those of another have ended, or its agent is gone. Yields their process ids."""
        stop, ended_here = threading.Event(), set[int]()

        def watch() -> None:
            beats: dict[int, tuple[bytes, float]] = {}  # node → its last beat, and seconds of silence since
            last, over_s = time.monotonic(), 0.0
            for beat in count():
                now = time.monotonic()
                elapsed_s, last = min(now - last, 2 * POLL_INTERVAL_S), now  # in a longer gap this process was stopped, too
                try:
                    self._watching.set(f"alive/{self._node}", str(beat))
                    if stopped := self._stop_of_all():
                        self._watching.set(f"{number}/stop", str(stopped))
                    elif not self._stopped and self._watching.check([f"{number}/stop"]):
                        os.kill(os.getpid(), int(self._watching.get(f"{number}/stop")))
                    if self._node == 0 and any(self._is_silent(number, node, beats, elapsed_s) for node in members):
                        self._watching.set(f"{number}/over", "0")
                    over = self._watching.check([f"{number}/over"])
                    over_s += elapsed_s if over else 0.0
                    over = over and over_s >= json.loads(self._watching.get(f"{number}/over"))
                except RuntimeError:  # the first node is gone: the next request of the main thread says so
                    over = True
                if stop.wait(POLL_INTERVAL_S):
                    return
                for child in Process.children(os.getpid()) if over else ():
                    if child.alive and "RANK" in Process.environment(child.pid):
                        ended_here.add(child.pid)
                        with suppress(ProcessLookupError):
                            os.kill(child.pid, signal.SIGKILL)

        thread = threading.Thread(target=watch, name="other nodes", daemon=True)
        thread.start()
        try:
            yield ended_here
        finally:
            stop.set()
            thread.join()

    def _is_silent(self, number: int, node: int, beats: dict[int, tuple[bytes, float]], elapsed_s: float) -> bool:
        beat = self._watching.get(f"alive/{node}") if self._watching.check([f"alive/{node}"]) else b""
        if self._watching.check([f"{number}/end/{node}"]):
            return False  # its ranks have ended; it waits for the others
        known, silent_s = beats.get(node, (None, 0.0))
        beats[node] = beat, silent_s + elapsed_s if beat == known else 0.0
        return beats[node][1] > SILENT_S

    def _answered(self, prefix: str, nodes: Sequence[int]) -> list[int]:
        return [node for node in nodes if self._store.check([f"{prefix}{node}"])]

    def _write(self, key: str, value: object) -> None:
        with _first_node_lives():
            self._store.set(key, json.dumps(value))

    def _read(self, key: str) -> Any:
        """Waits for it."""
        with _first_node_lives():
            while not self._store.check([key]):
                time.sleep(POLL_INTERVAL_S)
            return json.loads(self._store.get(key))


@contextmanager
def _first_node_lives() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise NodesApartError(
            "the first node, which decides about restarts, is gone; go on from the newest checkpoint with --resume"
        ) from error

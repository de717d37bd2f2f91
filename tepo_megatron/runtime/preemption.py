"""Signals that stop a run (SIGINT, SIGTERM, SIGHUP, Slurm's warning SIGUSR1), and exit codes. Imports no torch."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from tepo_megatron.runtime.files import write_atomically
from tepo_megatron.runtime.proc import PROC, Process

INTERRUPTED = 130  # after SIGINT, as in shells

PREEMPTED = 75  # after another signal (EX_TEMPFAIL): the run can be resumed

CONTINUE = "continue with the same command and --resume, without --from"  # which would go back again

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

RANKS_FOLDER = "TEPO_RANKS_FOLDER"
"""Each rank of this machine writes its PID here when it handles signals."""

_WAKE = signal.SIGURG
"""Interrupts what the main thread waits for: the kernel may deliver a stopped process's signals to another thread."""

_POLL_INTERVAL_S = 1.0  # between looks whether rank 0 lives, after a signal

_OTHERS_S = 5.0
"""Other ranks wait longer, so that rank 0 reports the reason."""

_SAY_S = 2.0

_REPEATED_S = 0.5
"""A SIGINT to all processes of a job comes twice to a rank, since the parent sends it on: that is no second Ctrl-C."""


class StopRequested(KeyboardInterrupt):
    """In a loop all ranks raise it at the same point."""

    def __init__(self, number: int, outcome: str = "") -> None:
        self.number = signal.Signals(number)
        super().__init__(f"{_name(number)}: {outcome}" if outcome else _name(number))

    @property
    def exit_code(self) -> int:
        return INTERRUPTED if self.number == signal.SIGINT else PREEMPTED


def not_ignored(numbers: Iterable[signal.Signals] = STOP_SIGNALS) -> tuple[signal.Signals, ...]:
    """Leaves out what the starter ignores, as ``nohup`` does SIGHUP, but SIGUSR1: job scripts ignore it for all but ranks."""
    return tuple(item for item in numbers if item == signal.SIGUSR1 or signal.getsignal(item) is not signal.SIG_IGN)


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], object], numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Does nothing outside the main thread, which alone may handle signals."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if is_main}
    try:
        yield
    finally:
        _restore(before)


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


class StopSignals:
    """Until ``defer`` the first signal raises ``StopRequested`` in the main thread; later only within
    ``interruptible``, elsewhere it sets ``requested``. A thread ends the process after the grace time, or at a second
    Ctrl-C.

    ``grace_s``, ``warning_s``: seconds from SIGTERM and SIGUSR1; Ctrl-C and SIGHUP have no limit. Without ``ends`` a second
    Ctrl-C raises KeyboardInterrupt. Without ``of_rank`` the launcher sends it none.
    Signals ignored at ``install`` stay ignored.
    """

    def __init__(
        self,
        *,
        grace_s: float = math.inf,
        warning_s: float = math.inf,
        numbers: tuple[signal.Signals, ...] = STOP_SIGNALS,
        ends: bool = True,
        of_rank: bool = True,
    ) -> None:
        self._numbers, self._ends, self._of_rank = numbers, ends, of_rank
        self.requested: signal.Signals | None = None  # the first one
        self.say: Callable[[str], None] = lambda text: None
        """Called from another thread."""
        self.at_risk: Callable[[], str] = str
        self.has_trained: Callable[[], bool] = bool
        self._limits = {
            signal.SIGTERM: (grace_s, "train.grace_s"),
            signal.SIGUSR1: (warning_s, "train.warning_s"),
            signal.SIGHUP: (math.inf, ""),  # a closed terminal kills nobody
        }
        self._deadline, self._limited_by = math.inf, signal.SIGTERM
        self._raises, self._has_handled = True, False
        self._announced = threading.Event()
        self._wakes: socket.socket | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._wakes_before = -1
        self._noting = threading.RLock()  # a handler may interrupt another in the main thread

    @staticmethod
    def current() -> StopSignals:
        """Returns a handler without signals if the caller handles them."""
        return _current

    @contextmanager
    def borrowed(self) -> Iterator[StopSignals]:
        """Handles signals in the context, if in the main thread."""
        global _current
        before, _current = _current, self
        if threading.current_thread() is threading.main_thread():
            self._install()
        try:
            yield self
        finally:
            self._uninstall()
            _current = before

    def install(self) -> StopSignals:
        """Makes them this process's ``current``."""
        global _current
        _current = self
        self._install()
        return self

    def _install(self) -> None:
        hears, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._numbers = not_ignored(self._numbers)
        self._before = {number: signal.getsignal(number) for number in (*self._numbers, _WAKE)}
        signal.signal(_WAKE, lambda number, frame: None)
        self._wakes_before = signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(hears, threading.get_ident()), name="stop signals", daemon=True).start()
        if self._of_rank and (folder := os.environ.get(RANKS_FOLDER)) and (rank := os.environ.get("RANK")):
            write_atomically(Path(folder) / f"rank-{rank}.pid", str(os.getpid()))
        self._handle_all()  # a signal may raise from here on

    def _uninstall(self) -> None:
        if self._wakes is not None:
            signal.set_wakeup_fd(self._wakes_before, warn_on_full_buffer=False)
            _restore(self._before)
            self._wakes.close()  # ends the thread
            self._wakes = None

    def defer(self) -> None:
        self._raises = False
        if self._wakes is not None:
            self._handle_all()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A signal in this context, or an earlier one, raises ``StopRequested``."""
        self._raises = True
        try:
            if self.requested is not None:
                raise StopRequested(self.requested)
            yield
        finally:
            self._raises = False

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Signals raise ``StopRequested`` at its end."""
        raises, self._raises = self._raises, False
        try:
            yield
        finally:
            self._raises = raises
        if raises and self.requested is not None:
            self._raises = False
            raise StopRequested(self.requested)

    def say_last(self, text: str) -> None:
        """After the sentence that announces the signal."""
        if self.requested is not None and self._wakes is not None:
            self._announced.wait(_SAY_S)
        self.say(text)

    def seconds_left(self) -> float:
        """Returns infinity without a signal and after Ctrl-C."""
        return self._deadline - time.monotonic()

    def _handle_all(self) -> None:
        for number in self._numbers:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        again, self._has_handled = self._has_handled, True  # not what the thread has noted, which may be this very signal
        self._note(number)
        if again and number == signal.SIGINT and not self._ends:
            raise KeyboardInterrupt
        if self._raises and self.requested is not None:
            self._raises = False  # once: the clean-up must not be cut short
            raise StopRequested(self.requested)

    def _note(self, number: int) -> None:
        with self._noting:
            came = signal.Signals(number)
            self.requested = self.requested or came
            if came in self._limits and (deadline := time.monotonic() + self._limits[came][0]) < self._deadline:
                self._deadline, self._limited_by = deadline, came

    def _listen(self, hears: socket.socket, main_thread: int) -> None:
        """The kernel reports signals here, whatever the main thread does."""
        first: signal.Signals | None = None
        announced = 0.0
        patience = 0.0 if os.environ.get("RANK", "0") == "0" else _OTHERS_S
        while True:
            left = max(0.0, self.seconds_left() + patience)
            # A rank that waits for rank 0 does not notice its end.
            wait = min(left, _POLL_INTERVAL_S) if first is not None and _root_process() else left
            if not select.select([hears], [], [], None if wait == math.inf else wait)[0]:
                if wait == left:
                    seconds, field = self._limits[self._limited_by]
                    self._end(f"{field} = {seconds:g} s after {self._limited_by.name} are over: ended without saving")
                if not Process.start_time(_root_process()):
                    os._exit(1)
                continue
            numbers = hears.recv(64)
            if not numbers:
                hears.close()
                return
            for number in numbers:
                if number not in self._numbers:
                    continue
                if first is not None and number == signal.SIGINT and self._ends:
                    if first == number and time.monotonic() < announced + _REPEATED_S:
                        continue
                    self._end("ended at once, without saving")
                self._note(number)
                signal.pthread_kill(main_thread, _WAKE)
                if first is None:
                    first = signal.Signals(number)
                    announced = time.monotonic()
                    self._tell(self._plan(first))
                    self._announced.set()

    def _tell(self, text: str) -> None:
        """Returns soon even if nobody takes the output: this thread counts the time."""

        def tell() -> None:
            with suppress(Exception):  # nothing may keep the process alive
                self.say(text)
                sys.stdout.flush()

        teller = threading.Thread(target=tell, name="stop signal's sentence", daemon=True)
        with suppress(RuntimeError):  # at the limit of threads it stays unsaid: said here, it could block
            teller.start()
            teller.join(_SAY_S)

    def _plan(self, number: signal.Signals) -> str:
        saves, unsaved = ("saves and ", ", without saving") if self.has_trained() else ("", "")
        plan = f"{_name(number)}: the run {saves}ends"
        if number == signal.SIGINT:
            return f"{plan}; a second Ctrl-C ends it at once{unsaved}"
        seconds, field = self._limits[number]
        return plan if seconds == math.inf else f"{plan}, within {seconds:g} s ({field})"

    def _end(self, why: str) -> None:
        assert self.requested is not None
        lost = self.at_risk()
        self._tell(f"{why}. {lost}" if lost else f"{why}; nothing is lost")
        os._exit(StopRequested(self.requested).exit_code)


_current = StopSignals()


def _root_process() -> int:
    folder = os.environ.get(RANKS_FOLDER)
    if folder is None or os.environ.get("RANK", "0") == "0" or not PROC.exists():
        return 0
    with suppress(OSError, ValueError):  # rank 0 is on another machine, or has not started
        return int((Path(folder) / "rank-0.pid").read_text())
    return 0


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name

"""Signals that ask a process to stop: real ones, sent to real processes, which import no torch, and to this one."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.runtime.preemption import INTERRUPTED, PREEMPTED, STOP_SIGNALS, StopRequested, StopSignals
from tepo_megatron.tools.faults.processes import wait_until
from tests.support.programs import TIMEOUT_S, run_python

RANK = """
import contextlib, ctypes, os, signal, sys, threading, time
from tepo_megatron.runtime import preemption
from tepo_megatron.runtime.preemption import STOP_SIGNALS, StopRequested, StopSignals

preemption._REPEATED_S = 1000.0 if "sent on" in sys.argv[1] else 0.0
what, grace = sys.argv[1], float(sys.argv[2])

def tell(text):
    os.write(1, (text + "\\n").encode())

def no_thread(thread):
    raise RuntimeError("can't start new thread")

def in_c():
    # As in a collective: no handler of Python runs, whatever comes.
    mutex = ctypes.create_string_buffer(128)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    tell("ready")
    libc.pthread_mutex_lock(mutex)

def sleep_in(context):
    try:
        with context:
            tell("ready")
            time.sleep(1000)
    finally:
        if "twice" in what:
            sys.stdin.readline()
            tell("cleaned up")

signals = StopSignals(grace_s=grace, warning_s=2000.0).install()
signals.say = tell
signals.at_risk = lambda: "step 3 is lost; the newest checkpoint is step_000002"
signals.has_trained = lambda: "before" not in what
assert StopSignals.current() is signals
if "another thread" in what:  # as the kernel may choose where a process was stopped
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
try:
    if "before" in what:
        sleep_in(contextlib.nullcontext())
    signals.defer()
    if what == "safe point":
        tell("ready")
        while signals.requested is None:
            time.sleep(0.01)
        tell(f"safe point after {signals.requested.name}, {signals.seconds_left() > 100}")
        with signals.interruptible():
            tell("never")
    if what in ("wait", "twice", "twice, sent on"):
        sleep_in(signals.interruptible())
    if "stalled" in what:
        signals.say = lambda text: time.sleep(1000)
    if "no thread" in what:
        threading.Thread.start = no_thread
    if "in C" in what:
        in_c()
except StopRequested as stop:
    tell(f"left: {stop}")
    sys.exit(stop.exit_code)
"""


class Rank:
    """A process that handles signals but those that it ignores, as after nohup; ``says`` reads its next line."""

    def __init__(self, what: str, grace: float = 1000.0, ignores: Sequence[signal.Signals] = (), **environment: str) -> None:
        def ignore() -> None:
            for number in ignores:
                signal.signal(number, signal.SIG_IGN)

        command = [sys.executable, "-c", RANK, what, str(grace)]
        options: Any = {"env": os.environ | environment, "preexec_fn": ignore, "text": True}
        self.process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, **options)
        assert self.says() == "ready"

    def send(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            self.process.send_signal(number)

    def says(self) -> str:
        return self.process.stdout.readline().rstrip("\n")

    def ends(self) -> tuple[int, list[str]]:
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        assert err == ""
        return self.process.returncode, out.splitlines()


@pytest.fixture
def start() -> Iterator[Callable[..., Rank]]:
    started: list[Rank] = []

    def start_one(*given: Any, **options: Any) -> Rank:
        started.append(Rank(*given, **options))
        return started[-1]

    yield start_one
    for rank in started:
        rank.process.kill()
        rank.process.communicate()


ASKED = {
    signal.SIGINT: ("Ctrl-C: the run saves and ends; a second Ctrl-C ends it at once, without saving", "Ctrl-C", INTERRUPTED),
    signal.SIGTERM: ("SIGTERM: the run saves and ends, within 1000 s (train.grace_s)", "SIGTERM", PREEMPTED),
    signal.SIGUSR1: ("SIGUSR1: the run saves and ends, within 2000 s (train.warning_s)", "SIGUSR1", PREEMPTED),
    signal.SIGHUP: ("SIGHUP: the run saves and ends", "SIGHUP", PREEMPTED),
}


def untrained(told: str) -> str:
    return told.replace("saves and ends", "ends").replace(", without saving", "")


@pytest.mark.parametrize("what", ["before", "before, in another thread", "wait", "safe point"])
@pytest.mark.parametrize("number", ASKED)
def test_a_signal_ends_what_may_be_left(start: Callable[..., Rank], what: str, number: signal.Signals) -> None:
    rank = start(what)
    rank.send(number)
    told, name, code = ASKED[number]
    told = untrained(told) if "before" in what else told
    reached = [f"safe point after {number.name}, True"] if what == "safe point" else []
    got, lines = rank.ends()
    # The thread that tells may come too late for a process that ends at once.
    assert (got, [line for line in lines if line != told]) == (code, [*reached, f"left: {name}"])


@pytest.mark.parametrize("what", ["before", "wait", "safe point"])
def test_a_signal_that_the_starter_ignores_stays_ignored(start: Callable[..., Rank], what: str) -> None:
    """nohup ignores SIGHUP, a shell without job control ignores SIGINT for what it starts in the background. A job's script
    ignores the warning, and leaves it to the ranks.
    """
    rank = start(what, ignores=(signal.SIGHUP, signal.SIGINT, signal.SIGUSR1))
    last = signal.SIGUSR1 if what == "before" else signal.SIGTERM
    rank.send(signal.SIGHUP, signal.SIGINT, last)
    code, lines = rank.ends()
    assert (code, [line for line in lines if line.startswith("left")]) == (PREEMPTED, [f"left: {last.name}"])


@pytest.mark.parametrize(
    ("what", "number"), [("twice", signal.SIGTERM), ("twice before", signal.SIGTERM), ("twice, sent on", signal.SIGINT)]
)
def test_a_signal_that_is_sent_on_cuts_nothing_short(start: Callable[..., Rank], what: str, number: signal.Signals) -> None:
    """Slurm sends it to all processes, and the parent of the ranks sends it on."""
    rank = start(what)
    rank.send(number)
    told, name, code = ASKED[number]
    assert rank.says() == (untrained(told) if "before" in what else told)
    rank.send(number, signal.SIGUSR1)
    rank.process.stdin.write("\n")
    rank.process.stdin.flush()
    assert rank.ends() == (code, ["cleaned up", f"left: {name}"])


@pytest.mark.parametrize("what", ["twice", "in C"])
def test_a_second_ctrl_c_ends_the_process_at_once_and_says_what_is_lost(start: Callable[..., Rank], what: str) -> None:
    rank = start(what)
    rank.send(signal.SIGINT)
    assert rank.says() == ASKED[signal.SIGINT][0]
    rank.send(signal.SIGINT)
    rank.process.wait(TIMEOUT_S)  # with its input open, at whose end it would be cleaned up
    lost = "ended at once, without saving. step 3 is lost; the newest checkpoint is step_000002"
    assert rank.ends() == (INTERRUPTED, [lost])


@pytest.mark.parametrize("first", ASKED)
def test_a_process_that_does_not_come_to_a_safe_point_ends_with_the_grace_time(
    start: Callable[..., Rank], first: signal.Signals
) -> None:
    rank = start("in C", grace=0.2)
    rank.send(first)
    assert rank.says() == ASKED[first][0].replace("1000", "0.2")  # at once
    if first != signal.SIGTERM:
        rank.send(signal.SIGTERM)
    over = "train.grace_s = 0.2 s after SIGTERM are over: ended without saving"
    assert rank.ends() == (ASKED[first][2], [f"{over}. step 3 is lost; the newest checkpoint is step_000002"])


@pytest.mark.parametrize("what", ["in C, stalled", "in C, no thread"])
def test_a_sentence_that_cannot_be_said_delays_no_end(start: Callable[..., Rank], what: str) -> None:
    """Nobody takes the output, or the limit of threads is reached."""
    for number, code in ((signal.SIGTERM, PREEMPTED), (signal.SIGINT, INTERRUPTED)):
        rank = start(what, grace=0.2)
        rank.send(number)
        while number == signal.SIGINT and rank.process.poll() is None:  # two of one kind may come as one
            time.sleep(0.5)
            rank.send(number)
        assert rank.ends()[0] == code


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_rank_that_waits_for_rank_0_ends_when_that_is_gone(start: Callable[..., Rank], tmp_path: Path) -> None:
    """The agent asks it to end after rank 0's death; nothing but SIGKILL half a minute later would end the wait otherwise."""
    root = subprocess.Popen(["sleep", "600"])
    (tmp_path / "rank-0.pid").write_text(str(root.pid))
    rank = start("in C", RANK="1", TEPO_RANKS_FOLDER=str(tmp_path))
    rank.send(signal.SIGTERM)
    assert rank.says() == ASKED[signal.SIGTERM][0]
    root.kill()
    root.wait()
    assert rank.ends() == (1, [])


EARLY = """
import signal
from tepo_megatron.runtime.rank import run_rank

install, early = signal.signal, lambda number, handler: number == signal.SIGTERM and callable(handler)
signal.signal = lambda *of: (install(*of), early(*of) and signal.raise_signal(signal.SIGTERM))
raise SystemExit(run_rank(lambda: print("works"), grace_s=60.0, warning_s=60.0))
"""


def test_a_signal_ends_a_rank_that_has_just_installed_its_handlers(tmp_path: Path) -> None:
    """It leaves in order, and its peers know its process."""
    done = run_python("-c", EARLY, code=PREEMPTED, environment={"RANK": "0", "TEPO_RANKS_FOLDER": str(tmp_path)})
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "rank-0.pid").exists()


LATE = """
import atexit, signal
from tepo_megatron.runtime.rank import run_rank

def fail():
    atexit.register(signal.raise_signal, signal.SIGTERM)
    raise ValueError("cannot be split")

raise SystemExit(run_rank(fail, grace_s=60.0, warning_s=60.0))
"""


def test_a_signal_adds_nothing_to_the_error_of_a_rank_that_leaves() -> None:
    """The agent asks all ranks to end once the first has failed."""
    done = run_python("-c", LATE, code=1, environment={"RANK": "0"})
    assert done.stderr.endswith("error: rank 0: ValueError: cannot be split\n")


# -- in a process that is the user's own


def test_a_signal_asks_for_a_stop_and_a_second_ctrl_c_interrupts() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    outer, threads = StopSignals.current(), set(threading.enumerate())
    signal.set_wakeup_fd(wakes := signal.set_wakeup_fd(-1))
    said: list[str] = []

    def say(text: str) -> None:
        time.sleep(0.3 * (not said))
        said.append(text)

    with StopSignals(ends=False).borrowed() as signals:
        assert StopSignals.current() is signals
        signals.say = say
        with pytest.raises(StopRequested):
            os.kill(os.getpid(), signal.SIGTERM)
        signals.defer()
        with pytest.raises(KeyboardInterrupt) as caught:
            os.kill(os.getpid(), signal.SIGINT)
        assert not isinstance(caught.value, StopRequested)
        assert signals.requested == signal.SIGTERM
        signals.say_last("SIGTERM: ended")
        assert said == ["SIGTERM: the run ends", "SIGTERM: ended"]
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert StopSignals.current() is outer
    wakes_after = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakes)
    assert wakes_after == wakes
    # Threads of earlier tests in this process may end at any time.
    wait_until(lambda: not set(threading.enumerate()) - threads, TIMEOUT_S, "the end of the thread")


def test_the_first_ctrl_c_is_not_the_second_if_another_thread_takes_it() -> None:
    with StopSignals(ends=False).borrowed() as signals:
        signals.defer()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        os.kill(os.getpid(), signal.SIGINT)  # its handler runs here nevertheless
        wait_until(lambda: signals.requested is not None, TIMEOUT_S, "the signal")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_in_another_thread_no_signal_is_touched() -> None:
    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in STOP_SIGNALS]

    def work() -> list[Any]:
        with StopSignals(ends=False).borrowed():
            return handlers()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == handlers()

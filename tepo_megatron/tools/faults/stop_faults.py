"""Faults of the terminal and of what starts a run: keys, hang-ups, signals, suspended jobs, closed streams."""

from __future__ import annotations

import os
import pty
import random
import re
import select
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from tepo_megatron.runtime.proc import STOPPED, Process
from tepo_megatron.tools.faults.processes import descendants, wait_gone, wait_until
from tepo_megatron.tools.faults.workshop import (
    LONG,
    FaultClass,
    FaultOutcome,
    RunEnd,
    differences,
    last_step,
    long_replay,
    replay,
    replay_command,
)

_PATIENCE_S = 300.0
_SUSPENDED_S = 4.0
GONE_S = 60.0


class _Terminal:
    """A shell with job control at a terminal of its own; ``text`` is what it printed."""

    def __init__(self) -> None:
        self.shell, self._end = pty.fork()
        if not self.shell:
            os.environ |= {"PS1": "", "TERM": "dumb", "PROMPT_COMMAND": "echo ended=$?"}
            os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])  # noqa: S606  # the shell itself
        self.text, self._open = "", True
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # the shell has ended
            while self._open:  # a read in progress would keep a closed terminal open
                if select.select([self._end], [], [], 0.05)[0]:
                    self.text += os.read(self._end, 65536).decode(errors="replace")

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def run(self, command: str) -> None:
        self.type(f"{command}\n")

    def wait_code(self, count: int = 1) -> int:
        """Returns the exit code of the ``count``-th command."""
        try:
            wait_until(lambda: len(self._codes) > count, _PATIENCE_S, "the end of a command")
        except TimeoutError as error:
            raise RuntimeError(f"{error}; the terminal has {self.text[-500:]!r}") from None
        return self._codes[count]

    @property
    def _codes(self) -> list[int]:
        """The first is the prompt's before any command."""
        return [int(code) for code in re.findall(r"ended=(\d+)\r?\n", self.text)]

    @property
    def pids(self) -> list[int]:
        return descendants(self.shell)[1:]

    def hang_up(self) -> None:
        if self._open:
            self._open = False
            self._reader.join()
            os.close(self._end)

    def close(self) -> None:
        pids = self.pids
        self.hang_up()
        for pid in (self.shell, *pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.shell, 0)


_Act = Callable[[_Terminal, random.Random], str | None]  # returns what is wrong


def _keys(*keys: str) -> _Act:
    def act(terminal: _Terminal, rng: random.Random) -> None:
        for key in keys:
            terminal.type(key)
            time.sleep(rng.uniform(0.0, 0.5))
        terminal.wait_code()

    return act


def _all_stopped(pids: Sequence[int]) -> str:
    def running() -> list[str]:
        processes = filter(None, map(Process.read, pids))
        return [Process.command_line(item.pid) for item in processes if item.alive and item.state != STOPPED]

    with suppress(TimeoutError):
        wait_until(lambda: not running(), 10.0, "")
    return f"{len(others)} of {len(pids)} processes go on: {others[0][:100]}" if (others := running()) else ""


def _stop_key(then: str) -> _Act:
    def act(terminal: _Terminal, rng: random.Random) -> str:
        pids = terminal.pids
        terminal.type("\x1a")
        terminal.wait_code()  # the shell's, of a stopped job
        wrong = _all_stopped(pids)
        time.sleep(rng.uniform(0.5, _SUSPENDED_S))
        terminal.run(then)
        terminal.wait_code(2)
        return wrong

    return act


def _hang_up(terminal: _Terminal, rng: random.Random) -> None:
    terminal.hang_up()


def _stopped_then_hung_up(terminal: _Terminal, rng: random.Random) -> None:
    terminal.type("\x1a")
    terminal.wait_code()
    terminal.hang_up()


def _send(number: signal.Signals, *, to_all: bool = False) -> _Act:
    def act(terminal: _Terminal, rng: random.Random) -> None:
        for pid in terminal.pids if to_all else terminal.pids[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        terminal.wait_code()

    return act


def _suspend(times: int) -> _Act:
    def act(terminal: _Terminal, rng: random.Random) -> str:
        wrong = ""
        for _ in range(times):
            pids = terminal.pids[1:]  # the shell around the run takes no part, as in a job of Slurm
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                if number == signal.SIGSTOP:
                    wrong = wrong or _all_stopped(pids)
                    time.sleep(_SUSPENDED_S)
            time.sleep(rng.uniform(0.0, 0.5))
        code = terminal.wait_code()
        return wrong or (f"it ended with {code}" if code else "")

    return act


def _nothing(terminal: _Terminal, rng: random.Random) -> str:
    code = terminal.wait_code()
    return f"it ended with {code}" if code else ""


STOPS: dict[str, tuple[str, _Act]] = {
    "Ctrl-C": ("{}", _keys("\x03")),
    "Ctrl-Z, then fg": ("{}", _stop_key("fg")),
    "the terminal is closed": ("{}", _hang_up),
    "the whole job is suspended": ("({}; exit $?)", _suspend(1)),
    "standard output is closed": ("{} >&-", _nothing),
    "Ctrl-C twice": ("{}", _keys("\x03", "\x03")),
    "Ctrl-\\": ("{}", _keys("\x1c")),
    "Ctrl-Z, then bg and a wait": ("{}", _stop_key("bg; wait")),
    "Ctrl-Z, then the terminal is closed": ("{}", _stopped_then_hung_up),
    "the terminal is closed, under nohup": ("nohup {}", _hang_up),
    "the shell is killed, as when an SSH connection ends": (
        "{}",
        lambda terminal, rng: os.kill(terminal.shell, signal.SIGKILL),
    ),
    "SIGHUP to the launcher": ("{}", _send(signal.SIGHUP)),
    "SIGTERM to the launcher": ("{}", _send(signal.SIGTERM)),
    "SIGTERM to every process": ("{}", _send(signal.SIGTERM, to_all=True)),
    "SIGINT to every process": ("{}", _send(signal.SIGINT, to_all=True)),
    "the whole job is suspended three times": ("({}; exit $?)", _suspend(3)),
    "standard error is closed": ("{} 2>&-", _nothing),
    "all streams are closed": ("{} <&- >&- 2>&-", _nothing),
    "the reader ends after one line": ("{} 2>&1 | head -1", _nothing),
    "standard output is a full disk": ("{} > /dev/full", _nothing),
    "standard output takes only ASCII": ("PYTHONIOENCODING=ascii PYTHONUTF8=0 LC_ALL=C {}", _nothing),
}
"""Fault → (how the shell starts the run, what happens after its first step). The first are the quick ones."""


class _Stops(FaultClass):
    name = "stops"
    title = "keys, hang-ups and signals of a terminal, suspended jobs, closed streams, then --resume"
    whole, quick = len(STOPS), 4

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        name, (line, act) = list(STOPS.items())[number % len(STOPS)]
        base, folder = long_replay(self.workshop.folder), self.new_folder(number)
        command = shlex.join(replay_command(folder, base / "rollouts", LONG))
        terminal = _Terminal()
        start = time.monotonic()
        try:
            terminal.run(f"cd {shlex.quote(str(folder))}; {line.format(command)}")
            wait_until(lambda: last_step(folder / "out") > 0, _PATIENCE_S, "the first step")
            time.sleep(rng.uniform(0.0, 1.0))
            pids = terminal.pids
            wrong = act(terminal, rng) or ""
            if left := wait_gone(pids, GONE_S):
                wrong = wrong or f"{len(left)} processes are left"
            message = RunEnd(0, terminal.text)
        finally:
            terminal.close()
        if message.has_traceback:
            wrong = wrong or f"a traceback: {message.said}"
        if wrong:
            return FaultOutcome(name, "lost", wrong)
        has_ended = not (folder / "out/model/model.safetensors").exists()
        if has_ended and (result := replay(folder, base / "rollouts", LONG, resume=True)).code:
            return FaultOutcome(name, "lost", f"it could not be resumed: {result.said}")
        if wrong := differences(folder / "out", base / "whole/out"):
            return FaultOutcome(name, "lost", wrong)
        shutil.rmtree(folder, ignore_errors=True)
        return FaultOutcome(name, "survived", "ended and resumed" if has_ended else "it went on", time.monotonic() - start)


FAULTS: tuple[type[FaultClass], ...] = (_Stops,)

"""Faults of the terminal and of what starts a run: keys, hang-ups, signals, suspended jobs, closed streams."""

import os
import random
import re
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from tepo_megatron.runtime.proc import STOPPED, Process
from tepo_megatron.tools.faults.processes import CTRL_Z, Terminal, signal_all, wait_gone, wait_until
from tepo_megatron.tools.faults.workshop import LONG, FaultClass, FaultOutcome, RunEnd, last_step, replay_command

_PATIENCE_S = 300.0
SUSPENDED_S = 4.0
STOPPED_S = 10.0
GONE_S = 60.0


def _wait_code(terminal: Terminal, count: int = 1) -> int:

    def codes() -> list[str]:
        return re.findall(r"ended=(\d+)\r?\n", terminal.printed)  # the first is the prompt's before any command

    terminal.wait(lambda: len(codes()) > count, _PATIENCE_S, "the end of a command")
    return int(codes()[count])


_Act = Callable[[Terminal, random.Random], str | None]  # returns what is wrong


def _keys(*keys: str) -> _Act:
    def act(terminal: Terminal, rng: random.Random) -> None:
        for key in keys:
            terminal.press(key)
            time.sleep(rng.uniform(0.0, 0.5))
        _wait_code(terminal)

    return act


def _all_stopped(pids: Sequence[int]) -> str:
    def running() -> list[str]:
        processes = filter(None, map(Process.read, pids))
        return [Process.command_line(item.pid) for item in processes if item.alive and item.state != STOPPED]

    with suppress(TimeoutError):
        wait_until(lambda: not running(), STOPPED_S, "")
    return f"{len(others)} of {len(pids)} processes go on: {others[0][:100]}" if (others := running()) else ""


def _stop_key(then: str) -> _Act:
    def act(terminal: Terminal, rng: random.Random) -> str:
        pids = terminal.jobs
        terminal.press(CTRL_Z)
        _wait_code(terminal)  # the shell's, of a stopped job
        wrong = _all_stopped(pids)
        time.sleep(rng.uniform(0.5, SUSPENDED_S))
        terminal.press(f"{then}\n")
        _wait_code(terminal, 2)
        return wrong

    return act


def _stopped_then_hung_up(terminal: Terminal, rng: random.Random) -> None:
    terminal.press(CTRL_Z)
    _wait_code(terminal)
    terminal.hang_up()


def _send(number: signal.Signals, *, to_all: bool = False) -> _Act:
    def act(terminal: Terminal, rng: random.Random) -> None:
        signal_all(terminal.jobs if to_all else terminal.jobs[:1], number)
        _wait_code(terminal)

    return act


def _suspend(times: int) -> _Act:
    def act(terminal: Terminal, rng: random.Random) -> str:
        wrong = ""
        for _ in range(times):
            pids = terminal.jobs[1:]  # the shell around the run takes no part, as in a job of Slurm
            signal_all(pids, signal.SIGSTOP)
            wrong = wrong or _all_stopped(pids)
            time.sleep(SUSPENDED_S)
            signal_all(pids, signal.SIGCONT)
            time.sleep(rng.uniform(0.0, 0.5))
        code = _wait_code(terminal)
        return wrong or (f"it ended with {code}" if code else "")

    return act


def _runs_on(terminal: Terminal, rng: random.Random) -> str:
    code = _wait_code(terminal)
    return f"it ended with {code}" if code else ""


STOPS: dict[str, tuple[str, _Act]] = {
    "Ctrl-C": ("{}", _keys("\x03")),
    "Ctrl-Z, then fg": ("{}", _stop_key("fg")),
    "the terminal is closed": ("{}", lambda terminal, rng: terminal.hang_up()),
    "the whole job is suspended": ("({}; exit $?)", _suspend(1)),
    "standard output is closed": ("{} >&-", _runs_on),
    "Ctrl-C twice": ("{}", _keys("\x03", "\x03")),
    "Ctrl-\\": ("{}", _keys("\x1c")),
    "Ctrl-Z, then bg and a wait": ("{}", _stop_key("bg; wait")),
    "Ctrl-Z, then the terminal is closed": ("{}", _stopped_then_hung_up),
    "the terminal is closed, under nohup": ("nohup {}", lambda terminal, rng: terminal.hang_up()),
    "the shell is killed, as when an SSH connection ends": ("{}", lambda terminal, rng: os.kill(terminal.pid, signal.SIGKILL)),
    "SIGHUP to the launcher": ("{}", _send(signal.SIGHUP)),
    "SIGTERM to the launcher": ("{}", _send(signal.SIGTERM)),
    "SIGTERM to every process": ("{}", _send(signal.SIGTERM, to_all=True)),
    "SIGINT to every process": ("{}", _send(signal.SIGINT, to_all=True)),
    "the whole job is suspended three times": ("({}; exit $?)", _suspend(3)),
    "standard error is closed": ("{} 2>&-", _runs_on),
    "all streams are closed": ("{} <&- >&- 2>&-", _runs_on),
    "the reader ends after one line": ("{} 2>&1 | head -1", _runs_on),
    "standard output is a full disk": ("{} > /dev/full", _runs_on),
    "standard output takes only ASCII": ("PYTHONIOENCODING=ascii PYTHONUTF8=0 LC_ALL=C {}", _runs_on),
}
"""Fault → (how the shell starts the run, what happens after its first step). The first are the quick ones."""


class _Stops(FaultClass):
    name = "stops"
    title = "keys, hang-ups and signals of a terminal, suspended jobs, closed streams, then --resume"
    whole, quick = len(STOPS), 4

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        name, (line, act) = list(STOPS.items())[number % len(STOPS)]
        base, folder = self.workshop.long_replay(), self.new_folder(number)
        command = shlex.join(replay_command(folder, base / "rollouts", LONG))
        start = time.monotonic()
        with Terminal(folder, PROMPT_COMMAND="echo ended=$?") as terminal:
            terminal.press(f"{line.format(command)}\n")
            wait_until(lambda: last_step(folder / "out") > 0, _PATIENCE_S, "the first step")
            time.sleep(rng.uniform(0.0, 1.0))
            pids = terminal.jobs
            wrong = act(terminal, rng)
            if left := wait_gone(pids, GONE_S):
                wrong = wrong or f"{len(left)} processes are left"
        if wrong:
            return FaultOutcome(name, "lost", wrong)
        has_ended = not (folder / "out/model/model.safetensors").exists()
        return self.outcome_of(name, folder, base, LONG, RunEnd(int(has_ended), terminal.printed), start)


FAULTS: tuple[type[FaultClass], ...] = (_Stops,)

"""What runs on this machine, and limits of this process."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import psutil

from tests.support.programs import TIMEOUT_S


def processes_naming(words: object) -> list[str]:
    """Command lines of living processes other than this one that contain the words, whoever started them.

    (``ps`` cuts command lines at 80 characters where there is no terminal.)
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if str(words) in line and process.pid != os.getpid():
                found.append(line)
    return found


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return done


def gone(pid: int) -> bool:
    """Whether a process ends in time. A zombie has ended when its last thread has closed its files."""

    def has_ended() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() == 1
        return True

    return eventually(has_ended)


def assert_none_names(words: object) -> None:
    """As :func:`processes_naming`; the kernel is given a moment for what was killed."""
    assert eventually(lambda: not processes_naming(words)), f"still running: {processes_naming(words)}"


class Listener(NamedTuple):
    address: str
    port: int
    program: str
    """The command line of the process that listens."""


def family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def listeners(pid: int) -> set[Listener]:
    """TCP and UDP sockets on which the process, or one below it, takes what others send."""
    found = set()
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in process.net_connections(kind="inet"):
                if each.status == psutil.CONN_LISTEN or (each.status == psutil.CONN_NONE and not each.raddr):
                    found.add(Listener(each.laddr.ip, each.laddr.port, " ".join(process.cmdline())))
    return found


def unix_sockets(pid: int) -> set[str]:
    """Paths of the sockets in the file system that they have bound."""
    found = set()
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {each.laddr for each in process.net_connections(kind="unix") if each.laddr.startswith("/")}
    return found


@contextlib.contextmanager
def python_programs(environment: Mapping[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts programs outside torchrun; at the end, what is left of them and of what they started is killed."""
    running: list[subprocess.Popen[str]] = []
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}

    def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
        command, env = [sys.executable, *map(str, arguments)], {**inherited, **environment}
        running.append(subprocess.Popen(command, env=env, stdout=-1, stderr=-1, text=True, **options))
        return running[-1]

    try:
        yield start
    finally:
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in family(process.pid) if process.poll() is None else ():
                    each.kill()
            process.communicate()


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a full disk, the kernel lets no file of this process grow beyond ``size`` bytes, also in the middle of a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def numbers_above_1023() -> Iterator[None]:
    """For files that are opened: ``select()`` takes none of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
    held = [os.open(os.devnull, os.O_RDONLY)]
    while held[-1] < 1024:
        held.append(os.dup(held[0]))
    try:
        yield
    finally:
        for number in held:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def suspend(pid: int, seconds: float, *, parent_first: bool = False) -> None:
    """Stops the process and all below it, as ``scontrol suspend`` does with a job."""
    processes = family(pid)
    for process in processes:
        process.suspend()
    time.sleep(seconds)
    for process in processes if parent_first else reversed(processes):
        process.resume()
        time.sleep(0.3 if parent_first else 0.0)

"""What runs on this machine, and limits of this process."""

import atexit
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psutil

from tests.support import launch
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


class Fork:
    """``python -c`` in a fork of the process that has torch imported, with the part of Popen that tests use."""

    def __init__(self, program: str, *arguments: str, env: dict[str, str]) -> None:
        context = launch.imported()
        readers, writers = zip(*(context.Pipe(duplex=False) for _ in range(2)), strict=True)
        self._process = context.Process(target=_run_program, args=(writers, program, arguments, env))
        self._process.start()
        self.pid = self._process.pid
        self._streams = [open(os.dup(reader.fileno()), encoding="utf-8") for reader in readers]  # noqa: SIM115
        for end in (*readers, *writers):
            end.close()

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns when whoever has inherited the pipes has ended, too."""
        pool = ThreadPoolExecutor(2)
        texts = [pool.submit(stream.read) for stream in self._streams]
        pool.shutdown(wait=False)
        out, err = (text.result(timeout) for text in texts)
        self._process.join(timeout)
        return out, err


def _run_program(writers: Sequence[Connection], program: str, arguments: Sequence[str], env: dict[str, str]) -> None:
    for number, writer in enumerate(writers, start=1):
        os.dup2(writer.fileno(), number)
        writer.close()
    os.environ.clear()
    os.environ |= env
    sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
    sys.argv = ["-c", *arguments]
    try:
        exec(program, {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()


@contextlib.contextmanager
def python_programs(environment: Mapping[str, str], *, forks: bool = False) -> Iterator[Callable[..., Any]]:
    """Starts programs outside torchrun; at the end, what is left of them and of what they started is killed. ``forks``: those
    of ``-c`` without options are forks, which need not import torch.
    """
    running: list[Any] = []
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}

    def start(*arguments: object, **options: Any) -> Any:
        words, env = [str(argument) for argument in arguments], {**inherited, **environment}
        if forks and words[0] == "-c" and not options:
            running.append(Fork(*words[1:], env=env))
        else:
            running.append(subprocess.Popen([sys.executable, *words], env=env, stdout=-1, stderr=-1, text=True, **options))
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

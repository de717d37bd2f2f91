"""Runs Python programs that a model wrote."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO

from tepo_megatron.runtime.isolation import PYTHON, confined
from tepo_megatron.runtime.worker_child import time_limit

_MOST_PRINTED = 4 * 2**20

_ENVIRONMENT: Mapping[str, str] = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
"""``HOME`` and ``TMPDIR`` are added."""


@dataclass(frozen=True)
class _Ran:
    """Has first and last bytes of output, and the exit status or the limit that ended the program."""

    head: bytes
    tail: bytes
    status: int | None
    limit: str | None = None


@dataclass(frozen=True)
class Sandbox:
    """Runs programs by this Python with the standard library alone, each in an empty folder.

    ``seconds`` limits clock and processor time; ``memory_mb`` is in 10⁶ bytes. docs/guides/rewards.md says what a program may
    reach. It has the caller's network: raises RuntimeError if that is still the parent's.
    """

    seconds: float
    memory_mb: int

    def __post_init__(self) -> None:
        if _shares_network():
            raise RuntimeError("the kernel does not take the network away from it, and the model's programs would have one")

    async def run(self, arguments: Sequence[str], *, kept: int, given: bytes = b"", partner: Sequence[str] = ()) -> _Ran:
        """``arguments``: a script, which the program may read, or ``-c``. ``kept``: bytes of output to return, from both ends.

        ``partner``: arguments of a second program, whose output is not read. The last argument of both is then the
        descriptor of their end of a socket between them. Raises OSError.
        """
        async with AsyncExitStack() as stack:
            # A pipe of our own: with asyncio's, wait() waits for its end too, which is not seen where it is no longer read.
            printed, write_end = await stack.enter_async_context(_read_end())
            ends = [stack.enter_context(end) for end in socket.socketpair()] if partner else []
            if partner:
                await stack.enter_async_context(self._started(partner, b"", None, ends[1:]))
            process = await stack.enter_async_context(self._started(arguments, given, write_end, ends[:1]))
            write_end.close()
            for end in ends:
                end.close()
            return await self._read(process, printed, kept)

    @asynccontextmanager
    async def _started(
        self, arguments: Sequence[str], given: bytes, stdout: BinaryIO | None, ends: Sequence[socket.socket]
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        descriptors = [end.fileno() for end in ends]
        with confined([path for path in arguments[:1] if path != "-c"]) as (folder, confine):
            with tempfile.TemporaryFile() as stdin:
                stdin.write(given)
                stdin.seek(0)
                process = await asyncio.create_subprocess_exec(
                    *PYTHON,
                    *arguments,
                    *map(str, descriptors),
                    cwd=folder,
                    env={**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
                    stdin=stdin,
                    stdout=stdout or asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=descriptors,
                    preexec_fn=lambda: self._limit(confine),
                )
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):  # also what it has started
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    async def _read(self, process: asyncio.subprocess.Process, stdout: asyncio.StreamReader, kept: int) -> _Ran:
        head, tail, printed = b"", b"", 0
        try:
            async with time_limit(self.seconds):
                while piece := await stdout.read(1 << 14):
                    printed += len(piece)
                    head = (head + piece)[:kept]
                    tail = (tail + piece)[-kept:]
                    if printed > _MOST_PRINTED:
                        return _Ran(head, tail, None, f"it printed more than {_MOST_PRINTED} bytes")
                return _Ran(head, tail, await process.wait())
        except TimeoutError:
            return _Ran(head, tail, None, f"it ran longer than {self.seconds:g} s")

    def _limit(self, confine: Callable[[], None]) -> None:
        confine()  # first: the kernel starts nothing of a user who is above the limit of processes
        for what, most in (
            (resource.RLIMIT_CPU, int(self.seconds) + 1),
            (resource.RLIMIT_AS, self.memory_mb * 10**6),
            (resource.RLIMIT_FSIZE, 10**7),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_NPROC, 0),
            (resource.RLIMIT_CORE, 0),
        ):
            _, hard = resource.getrlimit(what)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(what, (most, most))


def _shares_network() -> bool:
    try:
        return os.readlink("/proc/self/ns/net") == os.readlink(f"/proc/{os.getppid()}/ns/net")
    except PermissionError:  # it belongs to another namespace of users
        return False
    except OSError:
        return True


@asynccontextmanager
async def _read_end() -> AsyncIterator[tuple[asyncio.StreamReader, BinaryIO]]:
    reads, writes = os.pipe()
    stream = asyncio.StreamReader()
    with os.fdopen(writes, "wb", 0) as write_end:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reads, "rb", 0)
        )
        try:
            yield stream, write_end
        finally:
            transport.close()

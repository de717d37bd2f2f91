"""Runs Python programs that a model wrote, without files, signals, privileges, and a life beyond their parent's."""

import asyncio
import ctypes
import errno
import functools
import os
import platform
import resource
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from tepo_megatron.runtime.supervise import locked_folder, temporary_folder
from tepo_megatron.runtime.worker_child import time_limit

_MOST_PRINTED = 4 * 2**20
_LARGEST_FILE = 10**7
_MOST_WRITTEN, _MOST_FILES = 10 * _LARGEST_FILE, 5000
_LOOK_S = 0.25

_ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # a program whose output depends on a set's order has the same reward in each run
}
"""``HOME`` and ``TMPDIR`` are added."""


@dataclass
class _Ran:
    """Has first and last bytes of output, and the exit status or the limit that ended the program."""

    head: bytes = b""
    tail: bytes = b""
    status: int | None = None
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

        ``partner``: arguments of a second program. Its output is not read. The last argument of both is then the
        descriptor of their end of a socket between them. Raises OSError.
        """
        async with AsyncExitStack() as stack:
            # A pipe of our own: with asyncio's, wait() waits for its end too, which is not seen where it is no longer read.
            printed, write_end = await stack.enter_async_context(_read_end())
            ends = [stack.enter_context(end) for end in socket.socketpair()] if partner else []
            folders = []
            if partner:
                _, folder = await stack.enter_async_context(self._started(partner, b"", None, ends[1:]))
                folders.append(folder)
            process, folder = await stack.enter_async_context(self._started(arguments, given, write_end, ends[:1]))
            folders.append(folder)
            write_end.close()
            for end in ends:
                end.close()
            return await self._watch(process, printed, kept, folders)

    @asynccontextmanager
    async def _started(
        self, arguments: Sequence[str], given: bytes, stdout: BinaryIO | None, ends: Sequence[socket.socket]
    ) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
        descriptors = [end.fileno() for end in ends]
        with _confined([path for path in arguments[:1] if path != "-c"]) as (folder, confine):
            with tempfile.TemporaryFile() as stdin:
                stdin.write(given)
                stdin.seek(0)
                process = await asyncio.create_subprocess_exec(
                    *_PYTHON,
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
                yield process, folder
            finally:
                with suppress(ProcessLookupError):  # also what it has started
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    async def _watch(
        self, process: asyncio.subprocess.Process, stdout: asyncio.StreamReader, most: int, folders: Sequence[str]
    ) -> _Ran:
        ran = _Ran()
        reading = asyncio.create_task(self._read(process, stdout, most, ran))
        try:
            while not (await asyncio.wait([reading], timeout=_LOOK_S))[0]:
                if any([await _is_full(folder) for folder in folders]):
                    ran.limit = f"its files exceed {_MOST_WRITTEN} bytes or {_MOST_FILES} in number, or are hidden"
                    return ran
            reading.result()
        finally:
            reading.cancel()
        return ran

    async def _read(self, process: asyncio.subprocess.Process, stdout: asyncio.StreamReader, most: int, ran: _Ran) -> None:
        printed = 0
        try:
            async with time_limit(self.seconds):
                while piece := await stdout.read(1 << 14):
                    printed += len(piece)
                    ran.head = (ran.head + piece)[:most]
                    ran.tail = (ran.tail + piece)[-most:]
                    if printed > _MOST_PRINTED:
                        ran.limit = f"it printed more than {_MOST_PRINTED} bytes"
                        return
                ran.status = await process.wait()
        except TimeoutError:
            ran.limit = f"it ran longer than {self.seconds:g} s"

    def _limit(self, confine: Callable[[], None]) -> None:
        confine()  # first: the kernel starts nothing of a user who is above the limit of processes
        for what, most in (
            (resource.RLIMIT_CPU, int(self.seconds) + 1),
            (resource.RLIMIT_AS, self.memory_mb * 10**6),
            (resource.RLIMIT_FSIZE, _LARGEST_FILE),
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
    except FileNotFoundError:  # /proc hides it for the same reason (hidepid=2), or the parent (0) or all of /proc is missing
        return os.getppid() == 0 or not os.path.lexists("/proc/self/ns/net")
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


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_BRANCHES = 64


async def _is_full(folder: str) -> bool:
    size = entries = 0
    # Each folder is opened from the one above: a program can make longer paths than the kernel takes.
    left: list[tuple[int, list[str]]] = [(os.open("/", _FOLDER), [folder])]
    try:
        while left:
            above, names = left[-1]
            opened = -1
            with suppress(FileNotFoundError, NotADirectoryError):  # the program has just removed it
                opened = os.open(names.pop(), _FOLDER, dir_fd=above)
            if not names:
                os.close(left.pop()[0])
            if opened < 0:
                continue
            inner: list[str] = []
            left.append((opened, inner))
            with os.scandir(opened) as items:
                for item in items:
                    entries += 1
                    with suppress(FileNotFoundError):
                        size += 512 * item.stat(follow_symlinks=False).st_blocks
                        if item.is_dir(follow_symlinks=False):
                            inner.append(item.name)
                    if size > _MOST_WRITTEN or entries > _MOST_FILES or len(left) > _MOST_BRANCHES:
                        return True
                    if entries % 100 == 0:
                        await asyncio.sleep(0)
            if not inner:
                os.close(left.pop()[0])
    except PermissionError:  # the program has taken the right away
        return True
    finally:
        for descriptor, _ in left:
            os.close(descriptor)
    return False


_NOBODY = 65534
_KERNEL = ctypes.CDLL(None, use_errno=True)
_PDEATHSIG, _KEEPCAPS, _GET_SECCOMP, _SET_SECCOMP, _NO_NEW_PRIVS, _AMBIENT = 1, 8, 21, 22, 38, 47  # prctl(2)
_READ_SEARCH = 1 << 2  # CAP_DAC_READ_SEARCH
_MACHINES: Mapping[str, tuple[int, Sequence[int], Mapping[int, Sequence[int]]]] = {
    # AUDIT_ARCH; prctl, clone, prlimit64, socketpair, kill, tkill, tgkill, fcntl, ioctl; then by error:
    # ptrace, open_by_handle_at, clone3, fork, vfork
    # sched_setaffinity, sched_setscheduler, sched_setparam, sched_setattr, setpriority, ioprio_set,
    # shmget, msgget, semget, mq_open, io_uring_setup,
    # add_key, request_key, keyctl, unshare, setns, bpf, perf_event_open, userfaultfd,
    # rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal,
    # what Landlock allows for all files: truncate (before Linux 6.2), chmod, chown, utime, setxattr, removexattr, file_setattr
    # socket, connect
    "x86_64": (
        0xC000003E,
        (157, 56, 302, 53, 62, 200, 234, 72, 16),
        {
            errno.ENOSYS: (101, 304, 435, 57, 58),  # the C library then tries another call
            errno.EPERM: (
                *(203, 144, 142, 314, 141, 251, 29, 68, 64, 240, 425, 248, 249, 250, 272, 308, 321, 298, 323, 129, 297, 424),
                *(76, 90, 91, 268, 452, 92, 93, 94, 260, 132, 235, 261, 280, 188, 189, 190, 463, 197, 198, 199, 466, 469),
            ),
            errno.ENETUNREACH: (41, 42),
        },
    ),
    "aarch64": (
        0xC00000B7,
        (167, 220, 261, 199, 129, 130, 131, 25, 29),
        {
            errno.ENOSYS: (117, 265, 435),
            errno.EPERM: (
                *(122, 119, 118, 274, 140, 30, 194, 186, 190, 180, 425, 217, 218, 219, 97, 268, 280, 241, 282, 138, 240, 424),
                *(45, 52, 53, 452, 55, 54, 88, 5, 6, 7, 463, 14, 15, 16, 466, 469),
            ),
            errno.ENETUNREACH: (198, 203),
        },
    ),
}
_PYTHON = (sys.executable, "-P", "-s", "-S")
"""Has neither this package's folders nor the user's, and the standard library alone: -I, but PYTHONHASHSEED is read."""


@contextmanager
def _confined(scripts: Sequence[str], identity: tuple[bool, int] | None = None) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields a new folder, and what a child calls, as ``preexec_fn``, before it runs Python there. It may read ``scripts``.

    The folder has the caller's name, so that ``sweep`` removes it if the caller is killed.
    """
    other_user, capabilities = identity or _identity()
    with ExitStack() as stack:
        folder = str(stack.enter_context(locked_folder(temporary_folder())))
        if other_user:  # its owner stays, who sweeps
            os.chown(folder, -1, _NOBODY)
            os.chmod(folder, 0o770)  # noqa: S103
        rules = _rules(folder, scripts)
        if rules is not None:
            stack.callback(os.close, rules)
        yield folder, functools.partial(_confine, os.getpid(), other_user, capabilities, rules)


@functools.cache
def _identity() -> tuple[bool, int]:
    """Returns whether programs run as another user, and with which capabilities: the least with which Python starts."""
    if os.geteuid() == 0:
        for capabilities in (0, _READ_SEARCH) if landlock_version() else (0,):
            with (
                suppress(OSError, subprocess.SubprocessError),  # also where the namespace has no such user
                _confined((__file__,), (True, capabilities)) as (folder, confine),
            ):
                command = [*_PYTHON, "-c", f"open({__file__!r}); open({folder!r} + '/file', 'w')"]
                tried = subprocess.run(command, env=_ENVIRONMENT, preexec_fn=confine, stderr=subprocess.DEVNULL, check=False)
                if tried.returncode == 0:
                    return True, capabilities
    return False, 0


def _confine(parent: int, other_user: bool, capabilities: int, rules: int | None) -> None:
    if other_user:
        _prctl(_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    _call(_KERNEL.capset, struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", *[capabilities] * 3, 0, 0, 0))
    if capabilities:
        _prctl(_AMBIENT, 2, capabilities.bit_length() - 1)
    _prctl(_NO_NEW_PRIVS, 1)
    if rules is not None:
        _system_call(446, rules, 0)
    _prctl(_PDEATHSIG, signal.SIGKILL)  # a change of the user would have removed it
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    program = _filter()
    if program is not None:
        code = ctypes.create_string_buffer(program)
        header = ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(code)))
        _prctl(_SET_SECCOMP, 2, ctypes.addressof(header))


def landlock_version() -> int:
    """Returns 0 without Landlock."""
    return max(0, _KERNEL.syscall(444, None, ctypes.c_size_t(0), 1)) if platform.machine() in _MACHINES else 0


def _rules(folder: str, scripts: Sequence[str]) -> int | None:
    version = landlock_version()
    if version == 0:
        return None
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    of_files = everything & 0b1100_0000_0000_0111  # execute, write, read, truncate, ioctl
    read, read_and_write = 0b1101, 0b110  # execute, read, list; write, read
    scopes = 0b11 if version >= 6 else 0  # abstract sockets, signals
    rules = _system_call(444, struct.pack("QQQ", everything, 0, scopes), 24, 0)
    libraries = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
    python = (
        *map(sysconfig.get_path, ("stdlib", "platstdlib")),
        f"{sys.base_prefix}/lib",
        sys.executable,
        f"{sys.prefix}/pyvenv.cfg",
    )
    devices = ("/usr/share/zoneinfo", "/etc/localtime", "/dev/urandom", "/dev/zero")
    rights = dict.fromkeys((*libraries, *_library_folders(), *python, *devices, *scripts), read)
    for path, allowed in {**rights, "/dev/null": read_and_write, folder: everything}.items():
        with suppress(FileNotFoundError):  # this system has none
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed &= everything if os.path.isdir(path) else of_files
            try:
                _system_call(445, rules, 1, struct.pack("=Qi", allowed, descriptor), 0)
            finally:
                os.close(descriptor)
    return rules


@functools.cache
def _library_folders() -> list[str]:
    """Where this process found its libraries, which need not be the system's folders."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        files = {line.split(maxsplit=5)[-1].strip() for line in maps if ".so" in line}
    return sorted({os.path.dirname(file) for file in files if file.startswith("/")})


def _filter() -> bytes | None:
    """Returns seccomp's program for this process."""
    if platform.machine() not in _MACHINES or _KERNEL.prctl(_GET_SECCOMP, 0, 0, 0, 0) < 0:
        return None
    architecture, (prctl, clone, prlimit, socketpair, *kill, fcntl, ioctl), refused = _MACHINES[platform.machine()]
    load, mask, equal, at_least, has_bits, end = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000
    program = [
        *((load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, 0x80000000), (load, 0, 0, 0)),
        *((at_least, 0, 1, 0x40000000), (end, 0, 0, refuse | errno.ENOSYS)),  # x32
    ]
    for error, numbers in refused.items():
        for number in numbers:
            program += [(equal, 0, 1, number), (end, 0, 0, refuse | error)]
    round_down = (mask, 0, 0, 0xFFFFFFF8)
    for number, argument, tests, error in (
        (prctl, 0, [(equal, 1, 0, _PDEATHSIG)], errno.ENOSYS),
        (clone, 0, [(has_bits, 0, 1, 0x10000)], errno.ENOSYS),  # a thread
        (prlimit, 0, [(equal, 0, 1, 0)], errno.EPERM),  # itself
        (socketpair, 1, [(has_bits, 1, 0, 2)], errno.EPERM),  # datagrams could go to any socket
        *((number, 0, [(equal, 0, 1, os.getpid())], errno.EPERM) for number in kill),  # itself
        (fcntl, 1, [round_down, (equal, 1, 0, 8)], errno.EPERM),  # F_SETOWN, F_SETOWN_EX: whom the kernel signals
        (ioctl, 1, [round_down, (equal, 1, 0, 0x8900)], errno.EPERM),  # FIOSETOWN, SIOCSPGRP
    ):  # the kernel too reads only the lower half of these arguments
        checks = [(load, 0, 0, 16 + 8 * argument), *tests, (end, 0, 0, allow)]
        program += [(equal, 0, len(checks) + 1, number), *checks, (end, 0, 0, refuse | error)]
    program.append((end, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _prctl(option: int, *arguments: int) -> None:
    _call(_KERNEL.prctl, option, *(ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]))


def _system_call(number: int, *arguments: Any) -> int:
    return _call(
        _KERNEL.syscall, *(ctypes.c_long(value) if isinstance(value, int) else value for value in (number, *arguments))
    )


def _call(function: Callable[..., int], *arguments: Any) -> int:
    result = function(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

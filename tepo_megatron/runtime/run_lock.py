"""Allows one run at a time in an output folder: rank 0 holds ``run.lock``. Imports no torch.

Within a machine the kernel's flock decides. Shared file systems may lack it, so the holder renews the file's time: another
machine's lock is stale if that is old, or its Slurm job was requeued (decision 014).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import NamedTemporaryFile

from tepo_megatron.runtime.machine import variable
from tepo_megatron.runtime.proc import PROC, Process, boot_id
from tepo_megatron.runtime.text import parse_json

FILE = "run.lock"
_RENEW_EVERY_S = 15.0
SILENT_S = 180.0
"""File systems cache times for up to 60 s."""
_AGAIN_S = 1.0
"""A new holder of a dead machine's file writes its name within this time."""

_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class _Holder:
    """``kernel``: where flock is certain; ``born``: process start in kernel ticks (0: unknown); ``life``: Slurm's requeues;
    ``namespace``: of process ids ("": unknown).
    """

    host: str
    pid: int
    started: str
    kernel: str
    born: int
    job: str
    life: int
    token: str
    namespace: str = ""

    @classmethod
    def this_process(cls) -> _Holder:
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            started=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            kernel=boot_id(),
            born=Process.start_time(os.getpid()),
            job=os.environ.get("SLURM_JOB_ID", ""),
            life=variable("SLURM_RESTART_COUNT", 0),
            token=secrets.token_hex(8),
            namespace=_pid_namespace(),
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, a run since {self.started}"


class RunLock:
    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / FILE
        self._own: _Holder | None = None
        self._fd = -1
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @staticmethod
    def check_free(folder: Path) -> None:
        """Changes nothing. Raises ValueError if a run holds the folder."""
        path = folder / FILE
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            _judge(fd, path, flock(fd, fcntl.LOCK_SH))
        finally:
            os.close(fd)

    def holder(self) -> _Holder | None:
        with suppress(OSError):
            return _parse(self._path.read_bytes())
        return None

    def take(self) -> _Holder | None:
        """Renews the lock until ``release``; returns a stale lock's holder.

        Raises ValueError if a run holds the folder, OSError if it cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        dead: _Holder | None = None
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                certain = flock(fd, fcntl.LOCK_EX)
                left_behind = _judge(fd, self._path, certain)
                if certain is False and left_behind == dead and _is_at(fd, self._path):
                    # A server may keep a dead machine's lock on this file, and has none on the next.
                    self._path.unlink(missing_ok=True)
                elif certain is False:
                    dead = left_behind
                    time.sleep(_AGAIN_S)
                if certain is False or not _is_at(fd, self._path):  # its holder has removed it meanwhile
                    os.close(fd)
                    continue
                self._own = _Holder.this_process()
                text = (json.dumps(asdict(self._own)) + "\n").encode()
                os.pwrite(fd, text, 0)  # in place, since a lock is on the file, not its name
                os.ftruncate(fd, len(text))
            except BaseException:
                os.close(fd)
                raise
            break
        self._fd = fd
        self._stop.clear()
        self._thread = threading.Thread(target=self._renew, args=(fd,), name="run-lock", daemon=True)
        self._thread.start()
        return left_behind or dead

    def is_there(self) -> bool:
        """Raises RuntimeError if another run has taken the folder."""
        try:
            holder = _parse(self._path.read_bytes())
            is_ours = self._fd >= 0 and os.path.samestat(os.fstat(self._fd), self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # the disk is away, which is no loss of the folder
        if holder is not None and self._own is not None and holder.token != self._own.token:
            raise RuntimeError(
                f"output {self._folder} was taken over by {holder}, while this run stood still or could not reach the disk; "
                "this one stops, and writes there no more"
            )
        return holder is not None and is_ours

    def release(self) -> None:
        if self._fd < 0:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        # The folder may be removed or another run's by now.
        with suppress(OSError):
            if _is_at(self._fd, self._path) and self.holder() == self._own:
                self._path.unlink()
        os.close(self._fd)
        self._fd = -1

    def _renew(self, fd: int) -> None:
        while not self._stop.wait(_RENEW_EVERY_S):
            with suppress(OSError):  # a disk may be away: others see the silence, and is_there() the result
                os.utime(fd)


def _judge(fd: int, path: Path, certain: bool | None) -> _Holder | None:
    """``certain``: flock's answer. Returns a dead holder."""
    holder = _parse(os.pread(fd, 4096, 0))
    present = _Holder.this_process()
    if certain is False and (holder is None or holder.kernel == present.kernel):
        raise _held(path, holder)
    if holder is None:
        return None
    # Without flock the process decides, but another container's is not seen here.
    if holder.kernel == present.kernel and (certain or holder.namespace in ("", present.namespace)):
        if certain is None and _is_running(holder):
            raise _held(path, holder)
        return holder
    if holder.job and holder.job == present.job and present.life > holder.life:
        return holder  # Slurm starts a job's next life after the end of the last one
    with NamedTemporaryFile(prefix=f"{path.name}.", dir=path.parent) as new:  # by the disk's clock
        silent_s = os.fstat(new.fileno()).st_mtime - os.fstat(fd).st_mtime
    if silent_s < SILENT_S:
        raise _held(
            path,
            holder,
            f"it gave a sign of life {max(silent_s, 0):.0f} s ago. End it there; if that machine is gone, start again in "
            f"{SILENT_S:.0f} s, or remove the file",
        )
    return holder


def _held(
    path: Path, holder: _Holder | None, advice: str = "wait until it ends, end it, or give another folder (output=…)"
) -> ValueError:
    who = "another run" if holder is None else str(holder)
    return ValueError(f"output {path.parent} is in use by {who} ({path.name}); {advice}")


def flock(fd: int, mode: int) -> bool | None:
    """None means no flock in the file system."""
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return None
        raise
    return True


def _is_at(fd: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


def _parse(text: bytes) -> _Holder | None:
    with suppress(ValueError, TypeError):
        values = parse_json(text, "it", dict)
        return _Holder(**{name: value for name, value in values.items() if name in _Holder.__dataclass_fields__})
    return None


def _pid_namespace() -> str:
    with suppress(OSError):
        return os.readlink(PROC / "self/ns/pid")
    return ""


def _is_running(holder: _Holder) -> bool:
    if PROC.exists():
        return Process.start_time(holder.pid) == holder.born
    try:
        os.kill(holder.pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True

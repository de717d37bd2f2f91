"""``python -m tepo_megatron.runtime.supervise -- COMMAND...``: runs a command that must not outlive its starter.

When standard input, the starter's pipe, closes, or on SIGTERM, the process group gets SIGTERM, the command first, then SIGKILL;
then its temporary folder and shared memory are removed. The supervisor must lead its group (``start_new_session=True``).

It records names in /dev/shm that its group has mapped; if it is killed too, ``sweep`` removes them.
"""

import fcntl
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

from tepo_megatron.runtime.preemption import not_ignored
from tepo_megatron.runtime.proc import PROC, Process, boot_id
from tepo_megatron.runtime.run_lock import flock
from tepo_megatron.runtime.text import echo

_GRACE_S = 2.0  # between SIGTERM to the command and to its group

_REST_S = 2.0  # from then to SIGKILL

_POLL_INTERVAL_S = 0.1


def _main(arguments: list[str]) -> int:
    if len(arguments) < 2 or arguments[0] != "--":
        raise SystemExit("usage: python -m tepo_megatron.runtime.supervise -- COMMAND...")
    if os.getpgrp() != os.getpid():
        raise SystemExit("the supervisor must lead its own process group; start it with start_new_session=True")
    asked_to_stop: list[int] = []
    for number in not_ignored((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
        signal.signal(number, lambda number, _frame: asked_to_stop.append(number))  # a handler is not inherited by the command
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm warns all processes of a step; the trainer acts on it. Inherited
    starter = os.getppid()
    sweep()
    scratch = _Scratch()
    child = subprocess.Popen(
        arguments[1:],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **scratch.environment()},
        preexec_fn=partial(Process.end_with, os.getpid()),  # this process has one thread
    )
    # A forked relative of the starter may hold the pipe open after the starter's death: its parent id tells that too.
    while child.poll() is None and not asked_to_stop and os.getppid() == starter and not _closed(sys.stdin.fileno()):
        scratch.record()
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
        os.killpg(0, signal.SIGTERM)
    else:
        echo(f"supervisor: the server ended by itself with exit code {child.returncode}", err=True)
    started = time.monotonic()
    while (others := _others()) and (waited := time.monotonic() - started) < 2 * _REST_S:
        for pid in others if waited > _REST_S else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_INTERVAL_S)
    scratch.remove()
    os.killpg(0, signal.SIGKILL)  # this process as well, and all others where there is no /proc
    time.sleep(1)
    return 1


def _others() -> list[int]:
    return [pid for pid in Process.in_group(os.getpid()) if pid != os.getpid()]


def _closed(fd: int) -> bool:
    readable, _, _ = select.select([fd], [], [], _POLL_INTERVAL_S)
    return bool(readable) and os.read(fd, 1) == b""


_PREFIX = "tepo"
SHM = Path("/dev/shm")  # noqa: S108
_LONGEST_BASE = 107 - len("/tepo-01abcd-1234567-1234567890-s-12345678") - len(f"/{uuid4()}")
_RECORD = "shm"
_SUPERVISORS = "s"
_LOOKS = 3
"""Names that the server has not mapped in so many looks are others'."""


class _Scratch:
    """Create it before the group's other processes."""

    def __init__(self) -> None:
        base = temporary_folder()
        self.folder = base / folder_name()
        try:
            self.folder.mkdir(mode=0o700)
        except FileExistsError:  # another user has guessed it, and no server would start
            self.folder = Path(tempfile.mkdtemp(prefix=f"{folder_name()}-{_SUPERVISORS}-", dir=base))
        self._lock = _lock(self.folder)
        self._looks = dict.fromkeys(_names(), _LOOKS)
        self._recorded: dict[str, int] = {}
        self._written = 0

    def environment(self) -> dict[str, str]:
        """The folder has mode 0700: vLLM's processes unpickle messages from its sockets."""
        return dict.fromkeys(("TMPDIR", "TMP", "TEMP", "VLLM_RPC_BASE_PATH"), str(self.folder))

    def record(self) -> None:
        new = {name: inode for name in _names() if self._looks.get(name, 0) < _LOOKS and (inode := _own_inode(SHM / name))}
        if not new:
            return
        used = _used_inodes(Process.in_group(os.getpgrp()))
        for name, inode in new.items():
            self._looks[name] = _LOOKS if inode in used else self._looks.get(name, 0) + 1
        self._recorded |= {name: inode for name, inode in new.items() if inode in used}
        unwritten = list(self._recorded.items())[self._written :]
        with suppress(OSError), (self.folder / _RECORD).open("a", encoding="utf-8") as file:
            # On a full disk the record is in this process alone; the server continues.
            file.writelines(json.dumps(entry) + "\n" for entry in unwritten)
            self._written = len(self._recorded)

    def remove(self) -> None:
        """Call it when the group's other processes have ended."""
        _remove(self.folder, self._recorded)


def folder_name() -> str:
    pid = os.getpid()
    return f"{_PREFIX}-{_place()}-{pid}-{Process.start_time(pid)}"


@contextmanager
def locked_folder(base: str | Path | None = None, prefix: str | None = None) -> Iterator[Path]:
    """Cleaners of old temporary files leave the new folder (0700) alone (tmpfiles.d(5))."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix=prefix or f"{folder_name()}-", dir=base))
        stack.callback(_remove_tree, folder)
        stack.callback(os.close, _lock(folder))
        yield folder


def _lock(folder: Path) -> int:
    handle = os.open(folder, os.O_RDONLY)
    flock(handle, fcntl.LOCK_EX)
    return handle


def _remove_tree(folder: Path) -> None:
    """A model's program may make thousands of folders in one another."""
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def temporary_folder() -> Path:
    """Socket paths have at most 107 characters."""
    folder = Path(tempfile.gettempdir())
    return folder if len(os.fsencode(folder)) <= _LONGEST_BASE else Path("/tmp")  # noqa: S108


def sweep(base: Path | None = None) -> list[Path]:
    """Removes folders of this user's killed servers and trainers.

    A folder is in use while its process, one of its group, or one with it in its environment lives.
    """
    if not PROC.exists():
        return []
    removed = []
    for folder in (base or temporary_folder()).glob(f"{_PREFIX}-{_place()}-*"):
        try:
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not _in_use(folder):
                _remove(folder, _read_record(folder / _RECORD) if _is_supervisors(folder) else {})
                removed.append(folder)
        except FileNotFoundError:  # another sweeps too
            continue
        except OSError as error:
            echo(f"warning: {folder} of a process that was killed stays: {error}", err=True)
    return removed


def _is_supervisors(folder: Path) -> bool:
    # a model's programs write to the sandbox's folders, whose names have one random part more
    parts = folder.name.split("-")[4:]
    return not parts or (parts[0] == _SUPERVISORS and len(parts) == 2)


def _place() -> str:
    """Identifies boot and PID namespace, in which a PID is valid."""
    parts = [os.uname().nodename, boot_id()]
    with suppress(OSError):
        parts.append(os.readlink(PROC / "self/ns/pid"))
    return blake2b("/".join(parts).encode(), digest_size=3).hexdigest()


def _remove(folder: Path, recorded: Mapping[str, int]) -> None:
    """Removes shared memory first: its record is in the folder."""
    present = {name for name in _names() if (inode := _own_inode(SHM / name)) and recorded.get(name) == inode}
    still_used = _used_inodes(_own_processes()) if present else set()
    for name in present:
        if recorded[name] not in still_used:
            with suppress(FileNotFoundError):
                (SHM / name).unlink()
    _remove_tree(folder)  # the next sweep removes the rest


def _read_record(path: Path) -> dict[str, int]:
    record: dict[str, int] = {}
    with suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, TypeError):  # the supervisor was killed while it wrote
                name, inode = json.loads(line)
                record[name] = inode
    return record


def _names() -> list[str]:
    with suppress(OSError):  # the system has no /dev/shm
        return os.listdir(SHM)
    return []


def _own_inode(path: Path) -> int:
    with suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
            return status.st_ino
    return 0


def _used_inodes(processes: Iterable[int]) -> set[int]:
    """Semaphores are mapped under a name before they are renamed."""
    used: set[int] = set()
    for process in processes:
        with suppress(OSError):
            maps = (PROC / str(process) / "maps").read_text(errors="replace")
            used |= {int(line.split()[4]) for line in maps.splitlines() if f" {SHM}/" in line}
        with suppress(OSError):
            for descriptor in os.scandir(PROC / str(process) / "fd"):
                with suppress(OSError):
                    if os.readlink(descriptor.path).startswith(f"{SHM}/"):
                        used.add(os.stat(descriptor.path).st_ino)
    return used


def _own_processes() -> list[int]:
    return [state.pid for state in Process.all() if state.uid == os.getuid()]


def _in_use(folder: Path) -> bool:
    try:
        pid, began = map(int, folder.name.split("-")[2:4])
    except ValueError:
        return True  # no folder of ours, whatever its name
    now = Process.start_time(pid)
    if now:  # a number is reused only when its process and its group have ended
        return now == began
    named = (str(folder) in value for pid in _own_processes() for value in Process.environment(pid).values())
    return bool(Process.in_group(pid)) or any(named)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))

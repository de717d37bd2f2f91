"""Removes the temporary folder and the names in /dev/shm that a killed server leaves.

The supervisor records the names that its server has mapped; if it is killed too, :func:`sweep` removes them later. Without
Linux's /proc, only the supervisor removes the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

from tepo_megatron.runtime.proc import PROC, boot_id, group_members, processes, start_time

_PREFIX = "tepo"
SHM = Path("/dev/shm")  # noqa: S108
_LONGEST_BASE = 107 - len("/tepo-01abcd-1234567-1234567890") - len(f"/{uuid4()}")
_RECORD = "shm"
_LOOKS = 3
"""A name that none of the server's processes maps after this many looks belongs to others."""


class Scratch:
    """The temporary folder and the shared memory of the process group that the calling process leads.

    Create it before the group's other processes.
    """

    def __init__(self, base: Path | None = None) -> None:
        base = base or temporary_folder()
        self.folder = base / folder_name()
        self.folder.mkdir(mode=0o700)
        self._looks = dict.fromkeys(_names(), _LOOKS)
        self._recorded: dict[str, int] = {}
        self._written = 0

    def environment(self) -> dict[str, str]:
        """Variables that direct Python, vLLM and C libraries to the folder.

        vLLM's processes unpickle what arrives by sockets there: the folder's mode is 0700.
        """
        return dict.fromkeys(("TMPDIR", "TMP", "TEMP", "VLLM_RPC_BASE_PATH"), str(self.folder))

    def record(self) -> None:
        new = {name: inode for name in _names() if self._looks.get(name, 0) < _LOOKS and (inode := _own_inode(SHM / name))}
        if not new:
            return
        used = _used_inodes(group_members(os.getpgrp()))
        for name, inode in new.items():
            self._looks[name] = _LOOKS if inode in used else self._looks.get(name, 0) + 1
        self._recorded |= {name: inode for name, inode in new.items() if inode in used}
        self._write()

    def _write(self) -> None:
        lines = [json.dumps(entry) + "\n" for entry in self._recorded.items()]
        if len(lines) > self._written:
            with suppress(OSError), (self.folder / _RECORD).open("a", encoding="utf-8") as file:
                # On a full disk the record is in this process alone; the server continues.
                file.writelines(lines[self._written :])
                self._written = len(lines)

    def remove(self) -> None:
        """Removes the folder and the recorded names. Call it when the group's other processes have ended."""
        _remove(self.folder, self._recorded)


def folder_name() -> str:
    """Returns ``tepo-PLACE-PID-STARTED``, by which :func:`sweep` finds the process that made the folder."""
    pid = os.getpid()
    return f"{_PREFIX}-{_place()}-{pid}-{start_time(pid)}"


def temporary_folder() -> Path:
    """The system's temporary folder, or /tmp if that path is too long: socket paths have at most 107 characters."""
    found = Path(tempfile.gettempdir())
    return found if len(os.fsencode(found)) <= _LONGEST_BASE else Path("/tmp")  # noqa: S108


def sweep(base: Path | None = None) -> list[Path]:
    """Removes what this user's killed servers and trainers left on this machine; returns their folders.

    A folder is in use while its process, one of that group, or one with the folder in its environment lives.
    """
    if not PROC.exists():
        return []
    base = base or temporary_folder()
    removed = []
    for folder in base.glob(f"{_PREFIX}-{_place()}-*"):
        with suppress(FileNotFoundError):  # another sweeps too
            if _is_own_folder(folder) and not _in_use(folder):
                _remove(folder, _read_record(folder / _RECORD))
                removed.append(folder)
    return removed


def _place() -> str:
    """Identifies the boot and the PID namespace (container), in which a PID is valid."""
    parts = [os.uname().nodename, boot_id()]
    with suppress(OSError):
        parts.append(os.readlink(PROC / "self/ns/pid"))
    return blake2b("/".join(parts).encode(), digest_size=3).hexdigest()


def _remove(folder: Path, recorded: Mapping[str, int]) -> None:
    """Shared memory first: its record is in the folder."""
    present = {name for name, inode in recorded.items() if _own_inode(SHM / name) == inode}
    still_used = _used_inodes(_own_processes()) if present else set()
    for name in present:
        if recorded[name] not in still_used:
            with suppress(FileNotFoundError):
                (SHM / name).unlink()
    shutil.rmtree(folder, ignore_errors=True)  # what cannot be removed now is left to the next sweep


def _read_record(path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    with suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # the supervisor was killed in the middle of it
                name, inode = json.loads(line)
                found[name] = inode
    return found


def _names() -> list[str]:
    try:
        return os.listdir(SHM)
    except OSError:  # this system has none
        return []


def _own_inode(path: Path) -> int:
    with suppress(FileNotFoundError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid():
            return found.st_ino
    return 0


def _used_inodes(processes: Iterable[int]) -> set[int]:
    """Inodes, not names: semaphores are mapped under another name, from which they were renamed."""
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
    return [state.pid for state in processes() if state.uid == os.getuid()]


def _is_own_folder(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _in_use(folder: Path) -> bool:
    try:
        pid, began = map(int, folder.name.split("-")[2:4])
    except ValueError:
        return True  # no folder of ours, whatever its name
    now = start_time(pid)
    if now:  # a number is given again only when its process and its group are gone
        return now == began
    return bool(group_members(pid)) or _is_named(folder)


def _is_named(folder: Path) -> bool:
    name = os.fsencode(folder)
    for process in _own_processes():
        with suppress(OSError):
            if name in (PROC / str(process) / "environ").read_bytes():
                return True
    return False

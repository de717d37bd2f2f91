"""Files of lines on a disk that fills up, and the lock of an output folder, between real processes."""

import errno
import fcntl
import io
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.runtime.files import LogFile, read_lines, sync_to_disk
from tepo_megatron.runtime.run_lock import FILE, SILENT_S, RunLock
from tests.support.processes import files_of_at_most, python_programs
from tests.support.programs import TIMEOUT_S


class Failures(list[tuple[Path, int]]):
    def __call__(self, path: Path, error: OSError) -> None:
        self.append((path, error.errno))


pieces = st.lists(st.binary(min_size=1, max_size=60).map(lambda text: text.replace(b"\n", b" ") + b"\n"), max_size=8)


@given(before=pieces, during=pieces, after=pieces, room=st.integers(0, 300))
def test_nothing_is_lost_or_cut_on_a_disk_that_was_full(
    before: list[bytes], during: list[bytes], after: list[bytes], room: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, failures = tmp_path_factory.mktemp("disk") / "log", Failures()
    file = LogFile(path, failures)
    for piece in before:
        file.append(piece)
    written = b"".join(before)
    with files_of_at_most(max(room, len(written))):
        for at, piece in enumerate(during, start=1):
            file.append(piece)
            whole = b"".join([*before, *during[: at - file.waiting]])
            assert path.read_bytes() == whole
    assert set(failures) <= {(path, errno.EFBIG)}
    assert bool(failures) == (len(b"".join([*before, *during])) > max(room, len(written)))
    for piece in after:
        file.append(piece)
    file.flush()
    assert file.waiting == 0
    assert (path.read_bytes() if path.exists() else b"") == b"".join([*before, *during, *after])


def test_a_disk_that_is_full_only_when_a_file_is_closed_keeps_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As network disks and quotas are. The part is cut off before the next write, if the disk is away meanwhile."""

    class Closes(io.FileIO):
        def close(self) -> None:
            if not self.closed and faults:
                os.ftruncate(self.fileno(), os.fstat(self.fileno()).st_size - 2)
                super().close()
                raise OSError(faults.pop(), "quota")
            super().close()

    faults: list[int] = []
    path, failures = tmp_path / "log", Failures()
    file = LogFile(path, failures)
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode, *_, **o: Closes(self, mode) if mode == "ab" else opened(self, mode))
    file.append(b"one\n")
    faults.append(errno.EDQUOT)
    file.append(b"two\n")
    assert (path.read_bytes(), failures) == (b"one\n", [(path, errno.EDQUOT)])
    file.append(b"three\n")
    assert path.read_bytes() == b"one\ntwo\nthree\n"
    with monkeypatch.context() as away:
        away.setattr(os, "truncate", Mock(side_effect=OSError(errno.ETIMEDOUT, "away")))
        faults.append(errno.EDQUOT)
        file.append(b"four\n")
        assert path.read_bytes() == b"one\ntwo\nthree\nfou"
        file.append(b"five\n")
        assert path.read_bytes() == b"one\ntwo\nthree\nfou"
    file.append(b"six\n")
    assert path.read_bytes() == b"one\ntwo\nthree\nfour\nfive\nsix\n"


def test_a_file_system_that_cannot_sync_folders_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as VirtualBox's shared folders. A file must be synced."""
    (tmp_path / "file").touch()
    for number, path in ((errno.EINVAL, tmp_path), (errno.EIO, tmp_path), (errno.EINVAL, tmp_path / "file")):
        monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(number, "planted")))
        is_fault = (number, path) != (errno.EINVAL, tmp_path)
        with pytest.raises(OSError, match="planted") if is_fault else nullcontext():
            sync_to_disk(path)


@given(lines=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n"))), rest=st.binary(max_size=5))
def test_lines_are_read_as_json_lines_are_meant(
    lines: list[str], rest: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rest = rest.replace(b"\n", b"")
    path = tmp_path_factory.mktemp("lines") / "log"
    path.write_bytes("".join(line + "\n" for line in lines).encode() + rest)
    assert (list(read_lines(path)), LogFile(path).is_cut()) == (lines, bool(rest))


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"one\nt\xffo\n")
    with pytest.raises(ValueError, match=r"log:2: not UTF-8 text \(byte 1 of the line\); remove the line"):
        list(read_lines(tmp_path / "log"))


HOLD = """
import sys, time
from pathlib import Path
from tepo_megatron.runtime.run_lock import RunLock

lock = RunLock(Path(sys.argv[1]))
try:
    lock.take()
except ValueError as error:
    print(error, flush=True)
    sys.exit(3)
print("taken", flush=True)
sys.stdin.readline()
lock.release()
"""


def change(folder: Path, **changes: Any) -> None:
    (folder / FILE).write_text(json.dumps(json.loads((folder / FILE).read_text()) | changes))


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a process that takes the lock, or says why not, and releases it at the end of its input."""
    with python_programs({}) as start:
        yield lambda: start("-c", HOLD, tmp_path, stdin=subprocess.PIPE)


@pytest.fixture
def holder(hold: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
    process = hold()
    assert process.stdout.readline() == "taken\n"
    return process


def assert_refused(folder: Path, sentence: str) -> None:
    for attempt in (RunLock(folder).take, partial(RunLock.check_free, folder)):
        with pytest.raises(ValueError, match=sentence):
            attempt()


def test_a_second_run_is_refused_and_told_by_whom(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    before = (tmp_path / FILE).read_bytes()
    assert_refused(tmp_path, rf"is in use by process {holder.pid} on .*, a run since 20.* UTC .*; wait until")
    assert (tmp_path / FILE).read_bytes() == before


def test_of_runs_that_start_at_once_one_gets_the_folder(hold: Callable[[], subprocess.Popen[str]], tmp_path: Path) -> None:
    processes = [hold() for _ in range(4)]
    said = [process.stdout.readline() for process in processes]
    assert said.count("taken\n") == 1
    assert all(line == "taken\n" or "is in use by" in line for line in said)
    for process in processes:
        process.communicate(timeout=TIMEOUT_S)
    assert not list(tmp_path.iterdir())


def test_a_file_that_was_removed_while_it_was_opened_is_no_lock(
    hold: Callable[[], subprocess.Popen[str]], holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking one run ends, and another begins with a file of its own."""
    flock, others = fcntl.flock, []

    def late(fd: int, mode: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        holder.communicate("\n", timeout=TIMEOUT_S)
        others.append(hold())
        assert others[0].stdout.readline() == "taken\n"
        flock(fd, mode)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ValueError, match="is in use by process"):
        RunLock(tmp_path).take()
    assert RunLock(tmp_path).holder().pid == others[0].pid


def test_what_a_killed_run_left_is_taken_and_named(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.kill()
    holder.wait()
    RunLock.check_free(tmp_path)
    lock = RunLock(tmp_path)
    assert lock.take().pid == holder.pid
    assert RunLock(tmp_path).holder().pid == os.getpid()
    lock.release()
    assert not list(tmp_path.iterdir())


def test_without_flock_the_process_decides(
    holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a shared disk without it: no such disk is here, so the answer of such a one is planted."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    assert_refused(tmp_path, f"is in use by process {holder.pid}")
    written = (tmp_path / FILE).read_text()
    change(tmp_path, pid=1, born=-1, namespace="pid:[1]")  # as one of another container of this machine looks
    assert_refused(tmp_path, "is in use by process 1 .*; it gave a sign of life")
    (tmp_path / FILE).write_text(written)
    change(tmp_path, born=json.loads(written)["born"] - 1)  # another process has the number now
    lock = RunLock(tmp_path)
    assert lock.take().pid == holder.pid
    lock.release()
    holder.kill()
    holder.wait()
    (tmp_path / FILE).write_text(written)
    assert RunLock(tmp_path).take().pid == holder.pid


def leave(folder: Path, *, silent_s: float, **changes: Any) -> None:
    """The lock of a run on another machine that gave its last sign of life so long ago."""
    (folder / FILE).unlink(missing_ok=True)
    lock = RunLock(folder)
    lock.take()
    change(folder, host="node7", kernel="another", token="another", **changes)
    lock.release()
    then = time.time() - silent_s
    os.utime(folder / FILE, (then, then))


def test_a_run_on_another_machine_is_refused_while_it_gives_signs_of_life(tmp_path: Path) -> None:
    leave(tmp_path, silent_s=100)
    assert_refused(tmp_path, r"on node7, .*sign of life 1\d\d s ago.*start again in 180 s, or remove the file")
    leave(tmp_path, silent_s=SILENT_S + 5)
    lock = RunLock(tmp_path)
    assert lock.take().host == "node7"
    lock.release()


def test_a_run_notices_that_its_folder_is_gone_or_was_taken_over(tmp_path: Path) -> None:
    """By another machine that believed it dead, since it stood still for long. What is no lock is no obstacle."""
    folder = tmp_path / "out"
    lock = RunLock(folder)
    lock.take()
    assert lock.is_there()
    change(folder, host="node7", token="another")
    with pytest.raises(RuntimeError, match=r"was taken over by process .* on node7.*; this one stops"):
        lock.is_there()
    shutil.rmtree(folder)
    assert not lock.is_there()
    lock.release()
    folder.mkdir()
    for content in (b"", b"\xff\xfe", b"[1]", b'{"pid": 3}'):
        (folder / FILE).write_bytes(content)
        assert lock.take() is None
        assert lock.is_there()
        lock.release()


def test_a_disk_that_is_away_is_no_removed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without flock the run would take the lock again, and refuse itself."""
    lock = RunLock(tmp_path)
    lock.take()
    for method in ("read_bytes", "stat"):
        with monkeypatch.context() as away:
            away.setattr(Path, method, Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
            assert lock.is_there()
    lock.release()
    assert not lock.is_there()


@pytest.mark.parametrize(
    ("job", "life", "taken"), [("17", "2", True), ("17", "1", False), ("18", "2", False), ("", "2", False)]
)
def test_a_requeued_job_takes_the_lock_of_its_life_before(
    job: str, life: str, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(tmp_path, silent_s=1, job=job if not job else "17", life=1)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", life)
    if taken:
        lock = RunLock(tmp_path)
        assert lock.take().host == "node7"
        lock.release()
    else:
        assert_refused(tmp_path, "sign of life")


@pytest.mark.parametrize(("silent_s", "life", "taken"), [(SILENT_S + 5, "1", True), (1, "2", True), (SILENT_S / 2, "1", False)])
def test_a_lock_that_the_server_keeps_of_a_dead_machine_is_judged_by_signs_of_life(
    silent_s: float, life: str, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does after a loss of power. A run that lives renews the file's time."""
    leave(tmp_path, silent_s=silent_s, job="17", life=1)
    kept, flock = (tmp_path / FILE).stat(), fcntl.flock

    def kept_by_server(fd: int, mode: int) -> None:
        if os.path.samestat(os.fstat(fd), kept):
            raise BlockingIOError
        flock(fd, mode)

    monkeypatch.setattr(fcntl, "flock", kept_by_server)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", life)
    if not taken:
        assert_refused(tmp_path, "node7.*sign of life")
        return
    with (tmp_path / FILE).open():  # or the next file may get its number
        RunLock.check_free(tmp_path)
        lock = RunLock(tmp_path)
        assert lock.take().host == "node7"
        assert lock.is_there()
        assert_refused(tmp_path, f"is in use by process {os.getpid()}")
        lock.release()
    assert not list(tmp_path.iterdir())


def test_who_takes_the_file_of_a_dead_machine_first_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run has the lock already, and writes its name a moment later."""
    leave(tmp_path, silent_s=SILENT_S + 5)
    with (tmp_path / FILE).open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(time, "sleep", lambda _: change(tmp_path, token="the first"))
        with pytest.raises(ValueError, match="sign of life"):
            RunLock(tmp_path).take()
    assert RunLock(tmp_path).holder().token == "the first"

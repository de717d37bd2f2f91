"""Killed servers leave nothing in /dev/shm and in the temporary folder: real processes, real kills, no vLLM."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from tepo_megatron.runtime import supervise as scratch
from tepo_megatron.runtime.proc import Process
from tepo_megatron.runtime.supervise import SHM, sweep
from tests.support.processes import eventually, gone
from tests.support.programs import TIMEOUT_S

LINUX = SHM.is_dir() and Path("/proc/self/maps").exists()
pytestmark = pytest.mark.skipif(not LINUX, reason="needs Linux' /dev/shm and /proc")

LEAVES = """
import multiprocessing, os, sys, tempfile, time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *_: None  # as after its death: nobody cleans up
memory = shared_memory.SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Lock()  # a semaphore, which its maker has mapped under another name
child = os.fork()
own = shared_memory.SharedMemory(create=True, size=64) if child == 0 else None
if child == 0:
    open(sys.argv[1] + ".draft", "w").write(own.name)
    os.rename(sys.argv[1] + ".draft", sys.argv[1] + ".child")
    time.sleep(600)
while not os.path.exists(sys.argv[1] + ".child"):
    time.sleep(0.01)
open(os.path.join(tempfile.gettempdir(), "a-socket"), "w").close()
os.makedirs(os.path.join(os.environ["VLLM_RPC_BASE_PATH"], "a/b"))
name = lock._semlock.name.strip("/")
open(sys.argv[1] + ".new", "w").write(f"{tempfile.gettempdir()} {memory.name} sem.{name}\\n")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


TAKES_ITS_NAME = """
import os, sys
from tepo_megatron.runtime.supervise import folder_name, temporary_folder
(temporary_folder() / folder_name()).mkdir()
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def supervised(*command: str, taken: bool = False) -> subprocess.Popen[bytes]:
    """``taken``: the folder of its name is there, as if another user had guessed it."""
    before = ["-c", TAKES_ITS_NAME] if taken else []
    arguments = [sys.executable, *before, "-m", "tepo_megatron.runtime.supervise", "--", *command]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, start_new_session=True)


class Left:
    """A supervised command that has made files, and says which."""

    def __init__(self, note: Path, taken: bool) -> None:
        self.process = supervised(sys.executable, "-c", LEAVES, str(note), taken=taken)
        assert eventually(note.exists)
        folder, *names = note.read_text().split()
        self.folder = Path(folder)
        self.names = [*names, note.with_name(f"{note.name}.child").read_text()]
        assert eventually(self.is_recorded)

    def is_recorded(self) -> bool:
        """Whether the supervisor has seen them all."""
        record = self.folder / "shm"
        return record.exists() and all(name in record.read_text() for name in self.names)

    @property
    def command(self) -> int:
        (command,) = psutil.Process(self.process.pid).children()
        return command.pid

    def nothing_stays(self) -> bool:
        return not self.folder.exists() and not any((SHM / name).exists() for name in self.names)

    def all_there(self) -> bool:
        return self.folder.is_dir() and all((SHM / name).exists() for name in self.names)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of these tests alone, with a short path: whatever server starts beside them sweeps the system's.
    (``tmp_path``, which this does not use, is made in the system's.)
    """
    with tempfile.TemporaryDirectory(prefix="left-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def left(base: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Left]:
    made = Left(tmp_path / "note", taken=getattr(request, "param", False))
    assert made.folder.parent == base
    yield made
    with suppress(ProcessLookupError):
        os.killpg(made.process.pid, signal.SIGKILL)
    made.process.wait()
    assert eventually(lambda: not Process.in_group(made.process.pid))
    sweep()
    assert made.nothing_stays()


@pytest.mark.parametrize("command_dies", [True, False])
def test_nothing_stays_when_the_command_is_killed_or_the_starter_is_gone(left: Left, command_dies: bool) -> None:
    """Also of processes that are stopped."""
    for pid in set(Process.in_group(left.process.pid)) - {left.process.pid, *([left.command] if command_dies else [])}:
        os.kill(pid, signal.SIGSTOP)
    if command_dies:
        os.kill(left.command, signal.SIGKILL)
    else:
        left.process.stdin.close()
    left.process.wait(TIMEOUT_S)
    assert eventually(left.nothing_stays)
    assert eventually(lambda: not Process.in_group(left.process.pid))


@pytest.mark.parametrize("left", [False, True], indirect=True, ids=["", "taken"])
def test_what_a_killed_supervisor_leaves_is_removed_by_the_next_and_not_before_all_are_dead(left: Left) -> None:
    command = left.command
    os.kill(left.process.pid, signal.SIGKILL)
    left.process.wait()
    assert gone(command)  # the kernel asks the server to end; what it leaves still runs
    assert left.folder not in sweep()
    assert left.all_there()
    for pid in Process.in_group(left.process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not Process.in_group(left.process.pid))
    assert left.all_there()
    with supervised("sleep", "600") as following:
        assert eventually(left.nothing_stays)
        following.stdin.close()


def test_what_others_use_or_made_is_left_alone(left: Left) -> None:
    """A name that this process holds too; a name that was given again; one that appeared meanwhile and is another's."""
    held = SharedMemory(left.names[0])
    again = SHM / left.names[2]
    again.unlink()
    other = SharedMemory(create=True, size=64)  # before the name is given again: it might be given the same inode
    again.write_bytes(b"another file")
    try:
        os.killpg(left.process.pid, signal.SIGKILL)
        left.process.wait()
        assert eventually(lambda: not Process.in_group(left.process.pid))
        assert left.folder in sweep()
        assert (SHM / left.names[0]).exists()
        assert (SHM / other.name).exists()
        assert again.read_bytes() == b"another file"
        assert not (SHM / left.names[1]).exists()
    finally:
        held.close()
        held.unlink()
        other.close()
        other.unlink()
        again.unlink()


MAKES_A_FOLDER = """
import os, subprocess, sys, tempfile, time
from tepo_megatron.runtime.supervise import folder_name
folder = tempfile.mkdtemp(prefix=f"{folder_name()}-", dir=sys.argv[1])
told = {**os.environ, "TEPO_RENDEZVOUS": folder}
rank = subprocess.Popen(["sleep", "600"], env=told, stdout=subprocess.DEVNULL, start_new_session=True)
print(folder, rank.pid, flush=True)
time.sleep(600)
"""


def test_the_folder_of_a_trainer_that_was_killed_goes_when_its_ranks_are_gone(tmp_path: Path) -> None:
    """Of the process that starts the ranks, which are in sessions of their own and know the folder."""
    parent = subprocess.Popen([sys.executable, "-c", MAKES_A_FOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    folder, rank = parent.stdout.readline().split()
    try:
        assert sweep(tmp_path) == []
        parent.kill()
        parent.communicate()
        assert sweep(tmp_path) == []
    finally:
        parent.kill()
        os.kill(int(rank), signal.SIGKILL)
    swept: list[Path] = []

    def is_swept() -> bool:
        swept.extend(sweep(tmp_path))
        return bool(swept)

    assert eventually(is_swept)
    assert swept == [Path(folder)]
    assert not Path(folder).exists()


def test_folders_of_others_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And files that a record names outside /dev/shm. A folder that cannot be removed keeps no other."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    monkeypatch.setattr(scratch, "_place", lambda: "0a0b0c")
    notes, foreign, wrong, earlier, ours = (
        tmp_path / name
        for name in (
            "tepo-0a0b0c-notes",
            f"tepo-ffffff-{dead.pid}-1",  # of another machine or container, whose processes are not seen here
            f"tepo-0a0b0c-{dead.pid}-1",
            f"tepo-0a0b0c-{os.getpid()}-1",  # of an earlier process of this number
            f"tepo-0a0b0c-{dead.pid}-3",
        )
    )
    for folder in (notes, foreign, wrong, earlier, ours):
        folder.mkdir()
    target = tmp_path / "precious"
    target.mkdir()
    file = target / "file"
    file.touch()
    (ours / "shm").write_text("".join(json.dumps(line) + "\n" for line in (5, ["..", 0], [str(file), file.stat().st_ino])))
    (wrong / "shm").mkdir()
    (tmp_path / f"tepo-0a0b0c-{dead.pid}-2").symlink_to(target)
    assert sorted(sweep(tmp_path)) == sorted([earlier, ours])
    assert f"{wrong} of a process that was killed stays" in capsys.readouterr().err
    assert file.is_file()
    assert notes.is_dir()
    assert foreign.is_dir()

"""What a program in the sandbox may not do, and what a killed worker leaves: real programs, a real worker, this kernel."""

import errno
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest

from tepo_megatron.runtime import sandbox
from tests.support.processes import eventually, gone
from tests.support.programs import TIMEOUT_S

WORKER = """
import asyncio, os, sys
from tepo_megatron.runtime import sandbox
from tepo_megatron.runtime.worker_child import leave_network
if "no landlock" in sys.argv:
    sandbox.landlock_version = lambda: 0
assert leave_network() is None
if "hidden parent" in sys.argv:  # as /proc with hidepid=2 does, which only an administrator mounts
    parent = f"/proc/{os.getppid()}/ns/net"
    os.readlink = lambda path, read=os.readlink: read("/proc/none" if path == parent else path)
ran = asyncio.run(sandbox.Sandbox(60, 256).run(("-c", sys.argv[1]), kept=4000))
print(ran.head.decode(), ran.limit or "")
"""
LANDLOCK = sandbox.landlock_version()
NOBODY = 65534
TRIED = "\ntry:\n    {}\nexcept OSError as error:\n    print(type(error).__name__)\nelse:\n    print('done')"


def start(program: str, *options: str, **kwargs: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, program, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **kwargs)  # type: ignore[call-overload]


def printed(program: str, *options: str) -> str:
    return start(program, *options).communicate()[0].strip()


@pytest.fixture
def base() -> Iterator[Path]:
    """Every user may write there."""
    with tempfile.TemporaryDirectory(prefix="box-", dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def test_folders_in_one_another_are_removed_however_many(base: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(base)}
    program = "import os\nfor _ in range(3000):\n    os.mkdir('a')\n    os.chdir('a')\nprint('deep')"
    assert start(program, env=environment).communicate()[0].strip() == "deep"
    assert os.listdir(base) == []


@pytest.mark.parametrize(
    ("program", "full"),
    [
        ("fill(11)", True),
        ("for _ in range(3000):\n    os.mkdir('a')\n    os.chdir('a')\nfill(11)", True),
        ("for i in range(5001): open(str(i), 'w')", True),
        ("for _ in range(99):\n    os.mkdir('a')\n    os.mkdir('b')\n    os.chdir('a')", True),
        ("fill(9); os.symlink('/', 'a'); os.symlink('.', 'b'); open('c', 'w').truncate(10**7)", False),
    ],
    ids=["bytes", "deep", "number", "branches", "allowed"],
)
def test_a_program_does_not_fill_the_disk(program: str, full: bool) -> None:
    fill = "import os, time\ndef fill(n):\n    for i in range(n): open(f'f{i}', 'wb').write(bytes(10**7))\n"
    expected = "its files exceed 100000000 bytes or 5000 in number, or are hidden" if full else "runs on"
    assert printed(f"{fill}{program}\ntime.sleep({1000 if full else 1})\nprint('runs on')") == expected


def test_where_a_namespace_has_no_other_user_programs_run_as_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container without privileges, where root is mapped alone."""
    monkeypatch.setattr(os, "chown", mock.Mock(side_effect=OSError(errno.EINVAL, "")))
    assert sandbox._identity.__wrapped__() == (False, 0)


@pytest.mark.skipif(LANDLOCK == 0, reason="this kernel has no Landlock")
def test_a_program_reads_and_writes_its_folder_alone(base: Path) -> None:
    key = base / "key"
    key.write_text("secret")
    key.chmod(0o666)
    attempts = f"open({str(key)!r})", f"open({str(key)!r}, 'w')", f"open('{base}/new', 'w')", "open('/etc/passwd')"
    own = "\nimport os, sqlite3, ssl, zoneinfo; open('a', 'w').write('b'); print(open('a').read(), os.listdir())"
    assert printed("".join(map(TRIED.format, attempts)) + own).splitlines() == ["PermissionError"] * 4 + ["b ['a']"]
    assert (key.read_text(), os.listdir(base)) == ("secret", ["key"])


@pytest.fixture
def other() -> Iterator[int]:
    """Is a process that programs' user may signal and limit."""
    identity = {"user": NOBODY, "group": NOBODY, "extra_groups": ()} if os.geteuid() == 0 else {}
    process = subprocess.Popen(["sleep", "600"], **identity)  # type: ignore[call-overload]
    yield process.pid
    process.kill()
    process.wait()


@pytest.mark.parametrize("options", [(), ("no landlock",)])
def test_a_program_signals_itself_alone(other: int, options: tuple[str, ...]) -> None:
    """Also where Landlock has no scopes of signals, which came with Linux 6.12."""
    tkill, queue, queue_to_thread = {"x86_64": (200, 129, 297), "aarch64": (130, 138, 240)}[platform.machine()]
    attempts = (
        *(f"os.kill({pid}, 0)" for pid in (other, 0, -1, -other)),
        *(f"call({tkill}, {thread}, 0)" for thread in (other, -1)),
        f"call({queue}, {other}, 0, info)",
        f"call({queue_to_thread}, {other}, {other}, 0, info)",
        "call(424, 0, 0, None, 0)",  # pidfd_send_signal
        f"fcntl.fcntl(end, fcntl.F_SETOWN, {other})",
        f"fcntl.fcntl(end, 15, struct.pack('ii', 1, {other}))",  # F_SETOWN_EX
        *(f"fcntl.ioctl(end, {number}, struct.pack('i', {other}))" for number in (0x8901, 0x8902)),  # FIOSETOWN, SIOCSPGRP
    )
    first = """
import ctypes, fcntl, os, signal, socket, struct
libc, info = ctypes.CDLL(None, use_errno=True), struct.pack("128s", struct.pack("iii", 0, 0, -1))
def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
end, _ = socket.socketpair()
"""
    own = """
signal.signal(signal.SIGUSR1, lambda *_: print("own"))
signal.raise_signal(signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR1)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
signal.setitimer(signal.ITIMER_REAL, 0.01)
print(signal.sigwait([signal.SIGALRM]).name)
print(fcntl.fcntl(end, fcntl.F_GETFL) != 0, flush=True)
os.abort()
"""
    answers = printed(first + "".join(map(TRIED.format, attempts)) + own, *options).splitlines()
    assert answers == ["PermissionError"] * len(attempts) + ["own", "own", "SIGALRM", "True"]


@pytest.mark.parametrize("options", [(), ("no landlock",)])
def test_a_program_changes_no_mode_owner_time_or_attribute_of_a_file(options: tuple[str, ...]) -> None:
    """Landlock does not look at them. Where the run is not root's, the files of its user are the program's user's."""
    attempts = (
        "os.chmod('a', 0o777)",
        "os.fchmod(file.fileno(), 0o777)",
        "os.chmod('a', 0o777, dir_fd=folder)",
        "call(452, folder, b'a', 0o777, 0)",  # fchmodat2
        "os.chown('a', -1, -1)",
        "os.fchown(file.fileno(), -1, -1)",
        "os.lchown('a', -1, -1)",
        "os.chown('a', -1, -1, dir_fd=folder)",
        "os.utime('a')",
        "os.utime(file.fileno())",
        "os.truncate('a', 0)",
        "os.setxattr('a', 'user.a', b'')",
        "os.setxattr('a', 'user.a', b'', follow_symlinks=False)",
        "os.setxattr(file.fileno(), 'user.a', b'')",
        "os.removexattr('a', 'user.a')",
        "os.removexattr('a', 'user.a', follow_symlinks=False)",
        "os.removexattr(file.fileno(), 'user.a')",
        *(f"call({number}, folder, b'a', 0, 0, 0, 0)" for number in (463, 466, 469)),  # setxattrat, removexattrat, file_setattr
    )
    first = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
file, folder = open("a", "w"), os.open(".", os.O_RDONLY)
"""
    ordinary = """
import pathlib, shutil, sqlite3, tempfile, zipfile
file.truncate(0)
pathlib.Path("b").touch()
shutil.copyfile("a", "c")
with tempfile.TemporaryDirectory() as inner, tempfile.NamedTemporaryFile() as other, zipfile.ZipFile("d", "w") as archive:
    archive.writestr("e", "")
    archive.extractall(inner)
with sqlite3.connect("f") as database:
    database.execute("create table g (h)")
shutil.rmtree("b", ignore_errors=True)
print(sorted(os.listdir()))
"""
    answers = printed(first + "".join(map(TRIED.format, attempts)) + ordinary, *options).splitlines()
    assert answers == ["PermissionError"] * len(attempts) + ["['a', 'b', 'c', 'd', 'f']"]


@pytest.mark.parametrize("options", [(), ("no landlock",)])
def test_a_program_limits_no_process_of_its_user(other: int, options: tuple[str, ...]) -> None:
    attempts = (
        f"import os, resource; resource.prlimit({other}, resource.RLIMIT_CPU)",
        f"os.sched_setaffinity({other}, [0])",
        f"os.sched_setscheduler({other}, os.SCHED_BATCH, os.sched_param(0))",
        f"os.sched_setparam({other}, os.sched_param(0))",
        f"os.setpriority(os.PRIO_PROCESS, {other}, 19)",
    )
    last = "\nresource.setrlimit(resource.RLIMIT_NOFILE, (9, 9)); print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    answers = printed("".join(map(TRIED.format, attempts)) + last, *options).splitlines()
    assert answers == ["PermissionError"] * len(attempts) + ["(9, 9)"]


@pytest.mark.parametrize("options", [(), ("no landlock",), ("hidden parent",)])
def test_a_program_starts_no_process_and_has_no_power_of_root(options: tuple[str, ...]) -> None:
    attempts = "import os; os.fork()", "import subprocess; subprocess.run(['true'])", "import os; os.chown('.', 1, 1)"
    assert "done" not in printed("".join(map(TRIED.format, attempts)), *options)
    assert printed("print('runs')", *options) == "runs"


def test_a_program_has_the_same_order_of_sets_in_each_run_and_no_modules_of_its_folder() -> None:
    program = "import os, sys; print(hash('a'), {'', os.getcwd()} & {*sys.path} or 'none')"
    first, second = printed(program), printed(program)
    assert first == second
    assert first.endswith(" none")


@pytest.mark.parametrize("options", [(), ("no landlock",)])
def test_a_program_leaves_no_memory_behind(options: tuple[str, ...]) -> None:
    """Key 0 is ``IPC_PRIVATE``: only the numbers that the calls return name the objects."""
    program = """
import ctypes, os
libc, librt = ctypes.CDLL(None, use_errno=True), ctypes.CDLL("librt.so.1", use_errno=True)
for call in (lambda: libc.shmget(0, 4096, 0o1600), lambda: libc.msgget(0, 0o1600), lambda: libc.semget(0, 1, 0o1600),
             lambda: librt.mq_open(b"/tepo", os.O_CREAT | os.O_RDWR, 0o600, None),
             lambda: libc.syscall({add_key}, b"user", b"a", b"1", 1, -4), lambda: libc.unshare(0x10000000)):  # CLONE_NEWUSER
    print(call() >= 0 or os.strerror(ctypes.get_errno()))
"""
    program = program.replace("{add_key}", {"x86_64": "248", "aarch64": "217"}[platform.machine()])
    assert printed(program, *options).splitlines() == ["Operation not permitted"] * 6


@pytest.mark.parametrize("options", [(), ("no landlock",)])
def test_a_program_reaches_no_socket_of_another(base: Path, options: tuple[str, ...]) -> None:
    """A socket that is a file belongs to no network: the bus of systemd, an agent of SSH, Docker."""
    program = """
import asyncio, ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def io_uring():
    if libc.syscall(425, 1, ctypes.create_string_buffer(120)) < 0:
        raise OSError(ctypes.get_errno(), "")
async def echo():
    ours, theirs = socket.socketpair()
    ours.sendall(b"own")
    print((await asyncio.get_running_loop().sock_recv(theirs, 9)).decode())
for kind in socket.SOCK_DGRAM, socket.SOCK_RAW:
    try:
        print(socket.socketpair(type=kind)[0].sendto(b"to all", "{base}/datagrams"))
    except PermissionError:
        print("refused")
"""
    attempts = f"socket.socket(socket.AF_UNIX).connect('{base}/stream')", "io_uring()"
    program = program.replace("{base}", str(base)) + "".join(map(TRIED.format, attempts))
    with socket.socket(socket.AF_UNIX) as stream, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        for item, name in (stream, "stream"), (datagrams, "datagrams"):
            item.bind(str(base / name))
            os.chmod(base / name, 0o777)
        stream.listen()
        answers = printed(f"{program}\nasyncio.run(asyncio.wait_for(echo(), 60))", *options).splitlines()
    assert answers == ["refused", "refused", "OSError", "PermissionError", "own"]


KEEPS_ON = """
import ctypes, json, os, time
ctypes.CDLL(None).prctl(1, 0)  # PR_SET_PDEATHSIG
{}
open("started", "w")
time.sleep(10**6)
"""


@pytest.mark.parametrize(
    "left",
    [
        "open('shm', 'w').write(json.dumps(['{file}', os.stat('{file}').st_ino]))",
        "os.mkfifo('shm')",  # whoever opens it waits for ever
    ],
    ids=["file of the user", "pipe"],
)
def test_a_killed_worker_leaves_no_program_and_no_folder(base: Path, left: str) -> None:
    """A supervisor's folder has a record of that name, by which files are removed."""
    file, environment = base / "file", {**os.environ, "TMPDIR": str(base)}
    file.touch()
    worker = start(KEEPS_ON.format(left.format(file=file)), env=environment)
    assert eventually(lambda: any(base.glob("*/started")))
    (folder,) = [path.parent for path in base.glob("*/started")]
    (program,) = psutil.Process(worker.pid).children()
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    assert gone(program.pid)
    subprocess.run([sys.executable, "-c", POOL], env=environment, check=True, timeout=TIMEOUT_S)
    assert not folder.exists()
    assert file.exists()


POOL = """
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.tasks.reward.pool import RewardPool
RewardPool(RewardConfig(verifier="exact")).close()
"""

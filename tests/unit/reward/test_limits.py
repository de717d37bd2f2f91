"""What a verifier may take, with real workers that take too much; each test's verifier does what the response says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.reward.pool import RewardPool
from tests.support.programs import TIMEOUT_S

GREEDY = '''
import ctypes, os, resource, signal, socket, subprocess, sys, time

kept = []

def judge(problem, response):
    """Takes what the response says."""
    what, _, size = response.partition(" ")
    with open(os.environ["TRIES"], "a") as file:
        file.write(f"{os.getpid()} {response}\\n")
    if what == "memory":
        return float(len(bytearray(int(size))))
    if what == "keep":
        kept.append(bytearray(int(size)))
    if what == "abort":
        os.abort()
    if what == "file":
        with open(os.environ["TRIES"] + ".large", "wb") as file:
            file.write(bytes(int(size)))
    if what == "files":
        kept.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(int(size)))
    if what == "core":
        return float(resource.getrlimit(resource.RLIMIT_CORE)[1])
    if what == "connect":
        socket.create_connection(("127.0.0.1", int(size))).close()
    if what == "name":
        socket.getaddrinfo("example.invalid", 80)
    if what == "owner":
        return float(os.getuid() == int(size) and os.stat(os.environ["TRIES"]).st_uid == int(size))
    if what == "child":
        kept.append(subprocess.Popen(["sleep", "1000"]))
        print("child", kept[-1].pid, file=open(os.environ["TRIES"], "a"))
        while True:
            pass
    if what == "spin":
        while True:
            pass
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "die once" or response == "die once":
        if sum("die once" in line for line in open(os.environ["TRIES"])) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        return int("no number")
    return 1.0

def three(problem, response, third):
    return 1.0

def none(problem, response):
    return None

def text(problem, response):
    return "1.0"

def nan(problem, response):
    return float("nan")
'''


@pytest.fixture
def tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in which the verifier writes a line for every response that it is given."""
    (tmp_path / "greedy.py").write_text(GREEDY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TRIES", str(tmp_path / "tries"))
    (tmp_path / "tries").touch()
    return tmp_path / "tries"


def pool_of(**options: object) -> RewardPool:
    return RewardPool(RewardConfig.model_validate({"verifier": "greedy:judge", "timeout_s": 60.0, "memory_mb": 100, **options}))


@pytest.fixture
def pool(tries: Path) -> Iterator[RewardPool]:
    with pool_of() as pool:
        yield pool


def items(*responses: str) -> list[tuple[Problem, str]]:
    return [(Problem("p", "q", "a"), response) for response in responses]


def error_of(pool: RewardPool, response: str) -> str:
    """Why this response failed; one beside it must not have suffered."""
    good, bad, other = pool.score(items("good", response, "other"))
    assert (good.reward, other.reward) == (1.0, 1.0), (good, other)
    assert bad.reward is None
    assert bad.error is not None
    return bad.error


def tried(tries: Path, response: str) -> list[int]:
    """The processes that were given a response, once for each time."""
    return [int(line.split(" ", 1)[0]) for line in tries.read_text().splitlines() if line.endswith(f" {response}")]


def test_memory(pool: RewardPool) -> None:
    assert pool.score(items("memory 50000000"))[0].reward == 5e7
    error = error_of(pool, "memory 200000000")
    assert error.startswith("problem 'p': the verifier needed more memory than reward.memory_mb = 100, at ")
    assert error.endswith('"return float(len(bytearray(int(size))))"')


def test_what_a_c_library_does_without_memory_says_so(pool: RewardPool) -> None:
    assert "process ended (signal 6); a C library does this that gets no more memory" in error_of(pool, "abort")


def test_a_worker_that_keeps_too_much_is_replaced_between_responses(tries: Path, pool: RewardPool) -> None:
    """Ten times 20 MB are more than the limit of 100 MB, and none fails."""
    results = pool.score([(Problem(f"p{number}", "q", "a"), "keep 20000000") for number in range(10)])
    assert [result.error for result in results] == [None] * 10
    assert len(set(tried(tries, "keep 20000000"))) >= 4


def test_files_and_core_dumps(tries: Path) -> None:
    with pool_of(file_mb=1) as pool:
        assert pool.score(items("file 900000", "core"))[0].error is None
        assert pool.score(items("core"))[0].reward == 0.0
        assert "(a verifier's files may have reward.file_mb = 1), at " in error_of(pool, "file 1100000")
        assert Path(f"{tries}.large").stat().st_size <= 10**6
        assert "(a verifier may have 256 files open)" in error_of(pool, "files 300")
        assert tried(tries, "other")[-1] != tried(tries, "files 300")[-1]  # which has none left


def test_a_long_log_of_the_run_does_not_count(tries: Path) -> None:
    """Standard error is the run's, and may be a file that is larger than what a verifier may write."""
    code = """
import sys
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.tasks.reward.pool import RewardPool
from tepo_megatron.core.problem import Problem
sys.path.insert(0, sys.argv[1])
open(sys.argv[1] + "/printing.py", "w").write("def judge(p, r):\\n    print(r, flush=True)\\n    return 1.0\\n")
with RewardPool(RewardConfig(verifier="printing:judge", file_mb=1)) as pool:
    print(pool.score([(Problem("p", "q", "a"), "x" * 1000)])[0])
"""
    log = tries.parent / "log"
    log.write_bytes(bytes(3 * 10**6))
    with log.open("ab") as file:
        command = [sys.executable, "-c", code, str(tries.parent)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=file, text=True, timeout=TIMEOUT_S)
    assert done.stdout.strip() == "RewardResult(reward=1.0, error=None)"
    assert b"x" * 1000 in log.read_bytes()


def cut() -> bool:
    """Whether this kernel lets a process leave the network."""
    probe = "from tepo_megatron.runtime.worker_child import leave_network; import sys; sys.exit(leave_network() is not None)"
    return subprocess.run([sys.executable, "-c", probe], timeout=TIMEOUT_S).returncode == 0


@pytest.mark.parametrize(
    ("verifier", "network", "expected"),
    [
        ("math", None, True),
        ("greedy:judge", None, False),
        ("greedy:judge", False, True),
        ("greedy:judge", True, False),
        ("math", True, False),
    ],
)
def test_who_has_a_network(verifier: str, network: bool | None, expected: bool) -> None:
    assert RewardConfig(verifier=verifier, network=network).cuts_network == expected


def test_a_verifier_without_network_reaches_nobody(tries: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pool_of() as pool:
            assert pool.notice is None
            assert pool.score(items(f"connect {port}"))[0].reward == 1.0
        with pool_of(network=False) as pool:
            if not cut():
                assert str(pool.notice).startswith("verifiers keep their network: ")
                return
            assert pool.notice is None
            hint = "(this verifier has no network; reward.network=true gives it one)"
            assert hint in error_of(pool, f"connect {port}")
            assert hint in error_of(pool, "name")
            assert pool.score(items(f"owner {os.getuid()}"))[0].reward == 1.0  # the user and the files are the same


@pytest.mark.skipif(os.getuid() != 0, reason="needs a user to become another one")
def test_a_user_without_privileges_leaves_the_network_too() -> None:
    if not cut():
        return
    limits = (Path(__file__).parents[3] / "tepo_megatron/runtime/worker_child.py").read_text()
    code = limits + (
        "\nimport encodings.idna, socket\nos.setgid(65534), os.setuid(65534)\n"
        "ctypes.CDLL(None).prctl(4, 1)  # its own files in /proc are its own again, as after an exec\n"
        "why = leave_network()\ntry:\n"
        "    socket.create_connection(('127.0.0.1', 9))\nexcept OSError as error:\n    print(why, os.getuid(), error.errno)\n"
    )
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout.split() in (["None", "65534", "101"], ["Operation", "not", "permitted", "65534", "111"]), done.stderr


def test_the_same_hostile_response_costs_its_time_once(tries: Path) -> None:
    with pool_of(timeout_s=2.0, network=False) as pool:
        results = pool.score(items(*["spin"] * 40, "good"))
        assert {result.error for result in results[:40]} == {
            "problem 'p': the verifier took longer than reward.timeout_s = 2 s"
        }
        assert results[40].reward == 1.0
        assert pool.score(items("spin"))[0].error is not None
        assert len(tried(tries, "spin")) == 1
        assert pool.score([(Problem("another", "q", "a"), "spin")])[0].error is not None
        assert len(tried(tries, "spin")) == 2


def test_with_a_network_a_later_call_tries_again(tries: Path, pool: RewardPool) -> None:
    assert [result.error is None for result in pool.score(items("raise", "raise", "good", "good"))] == [
        False,
        False,
        True,
        True,
    ]
    assert len(tried(tries, "raise")) == 1
    assert len(tried(tries, "good")) == 2  # a verifier need not give the same response the same reward
    assert pool.score(items("raise"))[0].error is not None
    assert len(tried(tries, "raise")) == 2


def test_a_worker_that_is_killed_costs_no_response(tries: Path, pool: RewardPool) -> None:
    assert pool.score(items("die once", "good"))[0].reward == 1.0
    assert len(tried(tries, "die once")) == 2


def test_a_worker_that_is_stopped_is_replaced(tries: Path) -> None:
    with pool_of(timeout_s=2.0) as pool:
        assert error_of(pool, "stop") == "problem 'p': the verifier took longer than reward.timeout_s = 2 s"
        assert len(tried(tries, "stop")) == 2  # it may have been somebody else who stopped it


def test_a_worker_that_is_stopped_before_a_response_of_any_length_does_not_hold_up_the_run(tries: Path) -> None:
    with pool_of(timeout_s=2.0) as pool:
        pool.score(items("good"))
        (pid,) = tried(tries, "good")
        os.kill(pid, signal.SIGSTOP)
        done: list[float | None] = []
        thread = threading.Thread(target=lambda: done.append(pool.score(items("x" * 3_000_000))[0].reward), daemon=True)
        thread.start()
        thread.join(TIMEOUT_S)
        assert done == [1.0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_a_verifier_has_started_ends_with_it(tries: Path) -> None:
    with pool_of(timeout_s=2.0) as pool:
        error_of(pool, "child")
    (child,) = [int(line.split()[1]) for line in tries.read_text().splitlines() if line.startswith("child")]
    until(lambda: not Path(f"/proc/{child}/stat").exists() or ") Z " in Path(f"/proc/{child}/stat").read_text())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("judge", "raised ValueError: invalid literal for int() with base 10: 'no number', at {file}:{raises}: \"return int"),
        ("three", "raised TypeError: three() missing 1 required positional argument: 'third', at {file}:{three}: \"def three"),
        ("none", "returned NoneType, not a number"),
        ("text", "returned str, not a number"),
        ("nan", "returned nan, not a finite number"),
    ],
)
def test_a_verifier_that_cannot_work_is_refused_with_its_own_line(tries: Path, function: str, message: str) -> None:
    with (
        pool_of(verifier=f"greedy:{function}") as pool,
        pytest.raises(ValueError, match="cannot score the first 2 problems") as caught,
    ):
        pool.rehearse([Problem("p1", "q", "raise"), Problem("p2", "q", "raise again")])
    text = str(caught.value)
    lines = GREEDY.splitlines()
    raises, three = lines.index('        return int("no number")') + 1, lines.index("def three(problem, response, third):") + 1
    said = message.format(file=tries.parent / "greedy.py", raises=raises, three=three)
    assert f"problem 'p1': the verifier {said}" in text
    assert text.startswith(f"reward.verifier = 'greedy:{function}'")
    assert text.endswith("; correct the verifier, or the data")


def test_one_problem_that_can_be_scored_is_enough(pool: RewardPool) -> None:
    pool.rehearse([Problem("p1", "q", "raise"), Problem("p2", "q", "good")])
    pool.rehearse([])

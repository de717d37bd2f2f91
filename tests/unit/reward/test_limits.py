"""What a verifier may take, with real workers that take too much; ``odd_verifiers.judge`` does what the response says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.reward.pool import RewardPool
from tests.support import odd_verifiers
from tests.support.programs import TIMEOUT_S

FILE = odd_verifiers.__file__


def pool_of(function: str = "judge", **options: object) -> RewardPool:
    settings = {"timeout_s": 60.0, "memory_mb": 100, **options}
    return RewardPool(RewardConfig.model_validate({"verifier": f"{FILE}:{function}", **settings}))


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


def test_a_worker_that_keeps_too_much_is_replaced_between_responses(tries: Path, pool: RewardPool) -> None:
    """Ten times 20 MB are more than the limit of 100 MB, and none fails."""
    assert pool.score(items("memory 50000000"))[0].reward == 5e7
    results = pool.score([(Problem(f"p{number}", "q", "a"), "keep 20000000") for number in range(10)])
    assert [result.error for result in results] == [None] * 10
    assert len(set(tried(tries, "keep 20000000"))) >= 4


def test_files_and_core_dumps(tries: Path) -> None:
    with pool_of(file_mb=1) as pool:
        assert [result.reward for result in pool.score(items("file 900000", "core"))] == [1.0, 0.0]
        error_of(pool, "file 1100000")
        assert tries.with_suffix(".large").stat().st_size <= 10**6
        error_of(pool, "files 300")
        assert tried(tries, "other")[-1] != tried(tries, "files 300")[-1]  # which has none left


def test_a_long_log_of_the_run_does_not_count(tries: Path) -> None:
    """Standard error is the run's, and may be a file that is larger than what a verifier may write."""
    code = f"""
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.tasks.reward.pool import RewardPool
from tepo_megatron.core.problem import Problem
with RewardPool(RewardConfig(verifier={f"{FILE}:judge"!r}, file_mb=1)) as pool:
    print(pool.score([(Problem("p", "q", "a"), "print " + "x" * 1000)])[0])
"""
    log = tries.parent / "log"
    log.write_bytes(bytes(3 * 10**6))
    with log.open("ab") as file:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=file, text=True, timeout=TIMEOUT_S)
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
        ("mine.py:judge", None, False),
        ("mine.py:judge", False, True),
        ("mine.py:judge", True, False),
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
    results = pool.score(items("raise", "raise", "good", "good"))
    assert [result.error is None for result in results] == [False, False, True, True]
    assert len(tried(tries, "raise")) == 1
    assert len(tried(tries, "good")) == 2  # a verifier need not give the same response the same reward
    assert pool.score(items("raise"))[0].error is not None
    assert len(tried(tries, "raise")) == 2


def test_a_worker_that_is_killed_costs_no_response(tries: Path, pool: RewardPool) -> None:
    assert pool.score(items("die-once", "good"))[0].reward == 1.0
    assert len(tried(tries, "die-once")) == 2


def test_a_worker_that_is_stopped_is_replaced(tries: Path) -> None:
    """Before a response of any length, too."""
    with pool_of(timeout_s=2.0) as pool:
        assert error_of(pool, "stop") == "problem 'p': the verifier took longer than reward.timeout_s = 2 s"
        assert len(tried(tries, "stop")) == 2  # it may have been somebody else who stopped it
        pool.score(items("good"))
        os.kill(tried(tries, "good")[-1], signal.SIGSTOP)
        done: list[float | None] = []
        thread = threading.Thread(target=lambda: done.append(pool.score(items("x" * 3_000_000))[0].reward), daemon=True)
        thread.start()
        thread.join(TIMEOUT_S)
        assert done == [1.0]


def test_what_a_verifier_has_started_ends_with_it(tries: Path) -> None:
    with pool_of(timeout_s=2.0) as pool:
        error_of(pool, "child")
    status = Path("/proc", tries.with_suffix(".child").read_text(), "stat")
    deadline = time.monotonic() + TIMEOUT_S
    while status.exists() and ") Z " not in status.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("function", "message", "line"),
    [
        ("judge", "raised ValueError: invalid literal for int() with base 10: 'no number'", 'return int("no number")'),
        ("three", "raised TypeError: three() missing 1 required positional argument: 'third'", "def three(problem"),
    ],
)
def test_a_verifier_that_cannot_work_is_refused_with_its_own_line(tries: Path, function: str, message: str, line: str) -> None:
    with (
        pool_of(function) as pool,
        pytest.raises(ValueError, match="cannot score the first 2 problems") as caught,
    ):
        pool.rehearse([Problem("p1", "q", "raise"), Problem("p2", "q", "raise again")])
    number, text = next((i, text) for i, text in enumerate(Path(FILE).read_text().splitlines(), start=1) if line in text)
    said = str(caught.value)
    assert f"problem 'p1': the verifier {message}, at {FILE}:{number}: \"{text.strip()}\"" in said
    assert said.startswith(f"reward.verifier = '{FILE}:{function}'")
    assert said.endswith("; correct the verifier, or the data")


def test_one_problem_that_can_be_scored_is_enough(pool: RewardPool) -> None:
    pool.rehearse([Problem("p1", "q", "raise"), Problem("p2", "q", "good")])
    pool.rehearse([])

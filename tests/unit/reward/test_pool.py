import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.worker_process import WorkerProcess
from tepo_megatron.tasks.reward.pool import RewardPool
from tests.support.programs import TIMEOUT_S

VERIFIER = '''
import os, re, sys, time

def judge(problem, response):
    """Does what the response says, and otherwise gives the number in it."""
    if response == "raise":
        raise KeyError("boom")
    if response == "spin":
        while True:
            pass
    if response == "hold":  # backtracking holds the interpreter's lock
        re.match(r"(a|a)*b", "a" * 60)
    if response == "sleep":
        time.sleep(600)
    if response == "exit":
        sys.exit(3)
    if response == "die":
        os.kill(os.getpid(), 9)
    if response == "print":
        print("noise on stdout", flush=True)
        return 1
    if response == "read":
        return float(len(sys.stdin.read()))
    if response == "interrupt":
        raise KeyboardInterrupt
    if response == "pid":
        return os.getpid()
    values = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "bool": True}
    return values[response] if response in values else float(response)
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards.py").write_text(VERIFIER)
    (tmp_path / "broken_rewards.py").write_text("import no_such_module\n")
    (tmp_path / "quitting_rewards.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_rewards:judge"


SLOW = ("spin", "hold", "sleep")
"""What takes for ever. Only where it is tried the limit is short: what is quick must meet it too, on a slow machine."""


def pool_of(module: str, timeout_s: float) -> RewardPool:
    return RewardPool(RewardConfig(verifier=module, workers=2, timeout_s=timeout_s, failed_reward=-1.0))


@pytest.fixture
def pool(module: str) -> Iterator[RewardPool]:
    with pool_of(module, 600.0) as pool:
        yield pool


def _items(*responses: str) -> list[tuple[Problem, str]]:
    return [(Problem(f"p{i}", "q", "a"), response) for i, response in enumerate(responses)]


def _gone(pid: int, within_s: float) -> bool:
    """Whether a process ends in time (a zombie that nobody has reaped yet has ended)."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
        except (FileNotFoundError, ProcessLookupError):  # gone before, or while it is read
            return True
        if state == "Z" and threads == 1:  # the last thread closes the files
            return True
        time.sleep(0.02)
    return False


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.floats(-1e6, 1e6), max_size=300))
def test_rewards_come_in_order(pool: RewardPool, values: list[float]) -> None:
    results = pool.score(_items(*[repr(value) for value in values]))
    assert [result.reward for result in results] == values
    assert all(result.error is None for result in results)


def test_problem_and_text_arrive_unchanged(pool: RewardPool) -> None:
    text = "\u2028 \n \ud800 ü 😀 \0 \\"
    with RewardPool(RewardConfig(verifier="exact")) as exact:
        assert (
            exact.score([(Problem("p", "q", f"a{text}a"), f"a{text}a"), (Problem("p", "q", text + "b"), text + "c")])[0].reward
            == 1
        )
    assert pool.score(_items("bool"))[0].reward == 1.0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("raise", "raised KeyError: 'boom'"),
        ("interrupt", "raised KeyboardInterrupt"),
        ("exit", "raised SystemExit: 3"),
        ("nan", "returned nan, not a finite number"),
        ("inf", "returned inf, not a finite number"),
        ("none", "returned NoneType, not a number"),
        ("text", "returned str, not a number"),
        ("spin", "longer than reward.timeout_s = 2 s"),
        ("hold", "longer than reward.timeout_s = 2 s"),
        ("sleep", "longer than reward.timeout_s = 2 s"),
        ("die", "process ended (signal 9)"),
    ],
)
def test_only_the_bad_response_suffers(module: str, bad: str, message: str) -> None:
    responses = [str(i) for i in range(40)]
    responses[3] = responses[4] = responses[39] = bad
    with pool_of(module, 2.0 if bad in SLOW else 600.0) as pool:
        results = pool.score(_items(*responses))
        assert [result.reward for result in pool.score(_items("5", "6"))] == [5.0, 6.0]
    for i, result in enumerate(results):
        if responses[i] == bad:
            assert result.reward == -1.0
            assert result.error is not None
            assert result.error.startswith(f"problem 'p{i}': the verifier")
            assert message in result.error
        else:
            assert (result.reward, result.error) == (float(i), None)


def test_the_limit_is_for_one_response_not_for_a_chunk(module: str, tmp_path: Path) -> None:
    (tmp_path / "slow_rewards.py").write_text(
        "import time\ndef judge(problem, response):\n    time.sleep(0.5 if response == 'slow' else 0.0)\n    return 1.0\n"
    )
    with RewardPool(RewardConfig(verifier="slow_rewards:judge", timeout_s=5.0)) as pool:
        # Of 48 responses 12 are sent at a time; the first of them take 6 s.
        responses = ["slow"] * 12 + ["x"] * 36
        assert [result.error for result in pool.score(_items(*responses))] == [None] * 48


def test_standard_streams_are_not_the_protocol(pool: RewardPool) -> None:
    assert [result.reward for result in pool.score(_items("print", "read", "2"))] == [1.0, 0.0, 2.0]


def test_several_workers_work(pool: RewardPool) -> None:
    pids = {result.reward for result in pool.score(_items(*["pid"] * 64))}
    assert os.getpid() not in pids
    assert 1 <= len(pids) <= 2


def test_a_worker_that_dies_idle_costs_no_response(pool: RewardPool) -> None:
    pids = {int(result.reward) for result in pool.score(_items(*["pid"] * 64))}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        assert _gone(pid, within_s=TIMEOUT_S)
    assert [(result.reward, result.error) for result in pool.score(_items("1", "2"))] == [(1.0, None), (2.0, None)]


def test_load_errors_come_from_the_constructor(module: str) -> None:
    with pytest.raises(ValueError, match="did you mean last_word"):
        RewardPool(RewardConfig(verifier="lastword"))
    with pytest.raises(ValueError, match="broken_rewards raised ModuleNotFoundError"):
        RewardPool(RewardConfig(verifier="broken_rewards:judge", workers=2))
    with pytest.raises(RuntimeError, match=r"did not start: .*exit status 7"):
        RewardPool(RewardConfig(verifier="quitting_rewards:judge"))


def test_closed_pool(module: str) -> None:
    pool = RewardPool(RewardConfig(verifier=module))
    pid = int(pool.score(_items("pid"))[0].reward)
    pool.close()
    pool.close()
    assert _gone(pid, within_s=TIMEOUT_S)
    with pytest.raises(RuntimeError, match="pool is closed"):
        pool.score(_items("1"))


def test_math_in_a_worker() -> None:
    with RewardPool(RewardConfig(verifier="math", timeout_s=30)) as pool:
        results = pool.score([(Problem("p", "q", "1/2"), r"\boxed{0.5}"), (Problem("p", "q", "x"), "$y$")])
    assert [(result.reward, result.error) for result in results] == [(1.0, None), (0.0, None)]


PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts tests in the background has it ignored
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.tasks.reward.pool import RewardPool
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.worker_process import WorkerProcess
sys.path.insert(0, sys.argv[1])
pool = RewardPool(RewardConfig(verifier="my_rewards:judge", workers=1, timeout_s=300))
print(int(pool.score([(Problem("p", "q", "a"), "pid")])[0].reward), flush=True)
pool.score([(Problem("p", "q", "a"), sys.argv[2])])
"""


@pytest.mark.parametrize("work", ["sleep", "spin"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_die_with_the_parent(module: str, tmp_path: Path, work: str, how: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), work], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stderr is not None
    worker = int(parent.stdout.readline())
    time.sleep(0.2)
    parent.send_signal(how)
    assert _gone(worker, within_s=TIMEOUT_S)
    parent.wait(timeout=TIMEOUT_S)
    shown = parent.stderr.read()
    # Only the parent may speak of the interruption.
    assert shown.count("Traceback") == (1 if how == signal.SIGINT else 0), shown
    assert "tasks/reward/worker.py" not in shown


def test_an_orphan_that_holds_the_lock_runs_out_of_processor_time(module: str, tmp_path: Path) -> None:
    worker = WorkerProcess("tepo_megatron.tasks.reward.worker")
    limits = {"timeout_s": -5.97, "memory_mb": 1000, "file_mb": 1, "network": True, "run_code": False}
    worker.send({"verifier": module, "kwargs": {}, "path": [*sys.path, str(tmp_path)], **limits}, TIMEOUT_S)
    assert worker.receive()[0]["ready"]
    worker.send([[0, Problem("p", "q", "a").to_json(), [ResponseText("hold").to_json()]]], TIMEOUT_S)
    with pytest.raises(EOFError):
        worker.receive()
    assert worker.exit_status() == f"signal {signal.SIGPROF:d}"
    worker.close()

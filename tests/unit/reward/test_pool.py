"""Responses come back with their rewards, at once or as they come; only the bad ones suffer; workers end with their parent."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Hashable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.worker_process import WorkerProcess
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.pool import RewardPool
from tests.support import odd_verifiers
from tests.support.programs import TIMEOUT_S

FILE = odd_verifiers.__file__
SLOW = ("spin", "hold", "sleep", "stop")
"""What takes for ever. Only where it is tried the limit is short: what is quick must meet it too, on a slow machine."""


def pool_of(function: str = "judge", **options: object) -> RewardPool:
    settings = {"workers": 2, "timeout_s": 600.0, "failed_reward": -1.0, "network": False, **options}
    return RewardPool(RewardConfig.model_validate({"verifier": f"{FILE}:{function}", **settings}))


@pytest.fixture
def pool(tries: Path) -> Iterator[RewardPool]:
    with pool_of() as pool:
        yield pool


def items(*responses: str) -> list[tuple[Problem, str]]:
    return [(Problem(f"p{i}", "q", "a"), response) for i, response in enumerate(responses)]


def drain(pool: RewardPool) -> list[tuple[Hashable, RewardResult]]:
    """Polls until nothing is under way."""
    results: list[tuple[Hashable, RewardResult]] = []
    while found := pool.poll(None):
        results += found
    return results


def gone(pid: int) -> bool:
    """Whether a process ends in time (a zombie that nobody has reaped yet has ended)."""
    end = time.monotonic() + TIMEOUT_S
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


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.floats(-1e6, 1e6) | st.just("raise"), max_size=60), seed=st.integers(0, 99))
def test_each_comes_back_once_with_its_own_reward(pool: RewardPool, values: list[float | str], seed: int) -> None:
    """Submitting and polling in any order gives what scoring all at once gives, failures and repeats included."""
    rng = random.Random(seed)
    asked = [
        (Problem(f"p{n}", "q", "a", {"factor": 2}), value if value == "raise" else repr(value))
        for n, value in enumerate(values)
    ]
    asked += asked[::3]
    pool.reset()
    got: list[tuple[Hashable, RewardResult]] = []
    for number, (problem, text) in enumerate(asked):
        pool.submit(("key", number), problem, text)
        if rng.random() < 0.3:
            got += pool.poll(rng.choice([0.0, 0.01]))
        assert pool.unfinished == number + 1 - len(got)
    got += drain(pool)
    assert pool.unfinished == 0
    assert pool.poll(None) == []
    assert sorted(key for key, _ in got) == [("key", number) for number in range(len(asked))]  # type: ignore[type-var]
    assert [result for _, result in sorted(got, key=lambda each: each[0])] == pool.score(asked)  # type: ignore[arg-type, return-value]
    for (_, number), result in got:  # type: ignore[misc]
        value = asked[number][1]
        assert result.reward == (-1.0 if value == "raise" else 2 * float(value))


def test_problem_and_text_arrive_unchanged() -> None:
    text = "\u2028 \n \ud800 ü 😀 \0 \\"
    with RewardPool(RewardConfig(verifier="exact")) as exact:
        right, wrong = exact.score([(Problem("p", "q", f"a{text}a"), f"a{text}a"), (Problem("p", "q", text + "b"), text + "c")])
    assert (right.reward, wrong.reward) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("raise", "raised ValueError: invalid literal for int() with base 10: 'no number', at "),
        ("interrupt", "raised KeyboardInterrupt"),
        ("exit", "raised SystemExit: 3"),
        ("nan", "returned nan, not a finite number"),
        ("inf", "returned inf, not a finite number"),
        ("none", "returned NoneType, not a number"),
        ("text", "returned str, not a number"),
        ("spin", "longer than reward.timeout_s = 2 s"),
        ("hold", "longer than reward.timeout_s = 2 s"),
        ("sleep", "longer than reward.timeout_s = 2 s"),
        ("stop", "longer than reward.timeout_s = 2 s"),
        ("die", "process ended (signal 9)"),
        ("abort", "process ended (signal 6); a C library does this that gets no more memory"),
        ("memory 200000000", "needed more memory than reward.memory_mb = 100, at "),
        ("file 1100000", "(a verifier's files may have reward.file_mb = 1), at "),
        ("files 300", "(a verifier may have 256 files open)"),
    ],
)
def test_only_the_bad_response_suffers(tries: Path, bad: str, message: str) -> None:
    responses = [str(i) for i in range(40)]
    responses[3] = responses[4] = responses[39] = bad
    with pool_of(timeout_s=2.0 if bad in SLOW else 600.0, memory_mb=100, file_mb=1) as pool:
        results = pool.score(items(*responses))
        assert [result.reward for result in pool.score(items("5", "6"))] == [5.0, 6.0]
    for i, result in enumerate(results):
        if responses[i] == bad:
            assert result.reward == -1.0
            assert result.error is not None
            assert result.error.startswith(f"problem 'p{i}': the verifier")
            assert message in result.error
        else:
            assert (result.reward, result.error) == (float(i), None)


def test_the_limit_is_for_one_response_not_for_a_chunk(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\ndef judge(problem, response):\n    time.sleep(0.5 if response == 'slow' else 0.0)\n    return 1.0\n"
    )
    with RewardPool(RewardConfig(verifier=f"{tmp_path}/slow.py:judge", timeout_s=5.0)) as pool:
        # Of 48 responses 12 are sent at a time; the first of them take 6 s.
        responses = ["slow"] * 12 + ["x"] * 36
        assert [result.error for result in pool.score(items(*responses))] == [None] * 48


def test_standard_streams_are_not_the_protocol(pool: RewardPool) -> None:
    assert [result.reward for result in pool.score(items("print", "read", "2", "bool"))] == [1.0, 0.0, 2.0, 1.0]


def test_a_worker_that_dies_idle_costs_no_response(pool: RewardPool) -> None:
    pids = {int(result.reward) for result in pool.score(items(*["pid"] * 64))}
    assert 1 <= len(pids - {os.getpid()}) <= 2
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
    assert [(result.reward, result.error) for result in pool.score(items("1", "2"))] == [(1.0, None), (2.0, None)]


def test_load_errors_come_from_the_constructor(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    (tmp_path / "quitting.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(ValueError, match="did you mean last_word"):
        RewardPool(RewardConfig(verifier="lastword"))
    with pytest.raises(ValueError, match=r"broken\.py raised ModuleNotFoundError"):
        RewardPool(RewardConfig(verifier=f"{tmp_path}/broken.py:judge", workers=2))
    with pytest.raises(RuntimeError, match=r"did not start: .*exit status 7"):
        RewardPool(RewardConfig(verifier=f"{tmp_path}/quitting.py:judge"))


def test_a_closed_pool_takes_nothing(pool: RewardPool) -> None:
    pid = int(pool.score(items("pid"))[0].reward)
    pool.close()
    pool.close()
    assert gone(pid)
    for act in (lambda: pool.submit(1, Problem("p", "q", "a"), "1"), pool.poll, lambda: pool.score(items("1"))):
        with pytest.raises(RuntimeError, match="pool is closed"):
            act()


def test_math_in_a_worker() -> None:
    with RewardPool(RewardConfig(verifier="math", timeout_s=30)) as pool:
        results = pool.score([(Problem("p", "q", "1/2"), r"\boxed{0.5}"), (Problem("p", "q", "x"), "$y$")])
    assert [(result.reward, result.error) for result in results] == [(1.0, None), (0.0, None)]


# -- one by one


def test_what_fails_is_tried_once_also_where_it_comes_later(tries: Path, pool: RewardPool) -> None:
    for round_ in range(3):
        pool.submit(round_, Problem("p", "q", "a"), "raise")
        ((_, result),) = drain(pool)
        assert "raised ValueError" in str(result.error)
    assert tries.read_text().count("raise\n") == 1


def test_responses_that_a_verifier_can_tell_apart_are_each_tried(tries: Path, pool: RewardPool) -> None:
    problem, other = Problem("p", "q", "a"), Problem("p", "q", "a", {"factor": 3})
    kinds: list[tuple[tuple[int, ...], str]] = [((), "stop"), ((), "length"), ((5,), "stop"), ((6,), "stop")]
    texts = [ResponseText("raise", ids, reason) for ids, reason in kinds]
    for number, (one, text) in enumerate([*((problem, text) for text in texts), (other, texts[0])]):
        pool.submit(number, one, text)
    assert len(drain(pool)) == 5
    assert tries.read_text().count("raise\n") == 5


def test_a_reset_drops_what_is_under_way(tries: Path) -> None:
    with pool_of(timeout_s=2.0) as pool:
        for number in range(4):
            pool.submit(("old", number), Problem(f"p{number}", "q", "a"), "sleep")
        pool.submit(("old", 9), Problem("p9", "q", "a"), "5")
        pool.reset()
        assert pool.unfinished == 0
        pool.submit("new", Problem("p", "q", "a"), "7")
        assert drain(pool) == [("new", RewardResult(7.0))]
        assert pool.score(items("8")) == [RewardResult(8.0)]


def test_a_group_is_scored_when_it_is_whole() -> None:
    with pool_of("score_group") as pool:
        assert pool.scores_groups
        members = [(group, number) for group in "ab" for number in range(3)]
        random.Random(1).shuffle(members)
        for group, number in members:
            text = ResponseText(str(10 - number))
            pool.submit((group, number), Problem(f"p{group}", "q", "a"), text, group=group, group_size=3)
        pool.submit("early", Problem("pc", "q", "a"), "1", group="c", group_size=2)
        results = dict(drain(pool))
        assert {key: result.parts for key, result in results.items()} == {
            (group, number): {"rank": 2.0 - number, "size": 3.0} for group, number in members
        }
        assert results["a", 0].reward == 5.0
        assert pool.unfinished == 1
        pool.submit("late", Problem("pc", "q", "a"), "2", group="c", group_size=2)
        assert {key: result.parts["rank"] for key, result in drain(pool)} == {"early": 0.0, "late": 1.0}
        two = [(Problem("p", "q", "a"), "3"), (Problem("p", "q", "a"), "4")]
        assert [result.parts["size"] for result in pool.score(two)] == [1.0, 1.0]
        together = pool.score(two, ["one", "one"])
        assert [result.parts for result in together] == [{"rank": 0.0, "size": 2.0}, {"rank": 1.0, "size": 2.0}]


# -- the parent's end

PARENT = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts tests in the background has it ignored
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.tasks.reward.pool import RewardPool
from tepo_megatron.core.problem import Problem
pool = RewardPool(RewardConfig(verifier={f"{FILE}:judge"!r}, workers=1, timeout_s=300))
print(int(pool.score([(Problem("p", "q", "a"), "pid")])[0].reward), flush=True)
pool.score([(Problem("p", "q", "a"), sys.argv[1])])
"""


@pytest.mark.parametrize(
    ("work", "how"), [("sleep", signal.SIGKILL), ("spin", signal.SIGKILL), ("spin", signal.SIGTERM), ("sleep", signal.SIGINT)]
)
def test_workers_die_with_the_parent(tries: Path, work: str, how: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, work], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stderr is not None
    worker = int(parent.stdout.readline())
    while f" {work}\n" not in tries.read_text():
        time.sleep(0.02)
    parent.send_signal(how)
    assert gone(worker)
    parent.wait(timeout=TIMEOUT_S)
    shown = parent.stderr.read()
    # Only the parent may speak of the interruption.
    assert shown.count("Traceback") == (1 if how == signal.SIGINT else 0), shown
    assert "tasks/reward/worker.py" not in shown


def test_an_orphan_that_holds_the_lock_runs_out_of_processor_time(tries: Path) -> None:
    worker = WorkerProcess("tepo_megatron.tasks.reward.worker")
    limits = {"timeout_s": -5.97, "memory_mb": 1000, "file_mb": 1, "network": True, "run_code": False}
    worker.send({"verifier": f"{FILE}:judge", "kwargs": {}, "path": sys.path, **limits}, TIMEOUT_S)
    assert worker.receive()[0]["ready"]
    worker.send([[0, Problem("p", "q", "a").to_json(), [ResponseText("hold").to_json()]]], TIMEOUT_S)
    with pytest.raises(EOFError):
        worker.receive()
    assert worker.exit_status() == f"signal {signal.SIGPROF:d}"
    worker.close()

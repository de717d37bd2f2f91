"""Responses come back with their rewards, at once or as they come; only the bad ones suffer; workers take no more than they
may, and end with their parent. ``odd_verifiers.judge`` does what the response says.
"""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.worker_process import WorkerProcess
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.pool import RewardPool
from tests.support import odd_verifiers
from tests.support.processes import gone, numbers_above_1023
from tests.support.programs import TIMEOUT_S

FILE = odd_verifiers.__file__
SLOW = ("spin", "hold", "sleep", "stop", "child")
"""What takes for ever. Only where it is tried the limit is short: what is quick must meet it too, on a slow machine."""

PROBLEM = Problem("p", "q", "a")


def pool_of(function: str = "judge", custom: Any = None, **options: object) -> RewardPool:
    settings = {"timeout_s": 600.0, "failed_reward": -1.0, "network": False, "memory_mb": 100, "file_mb": 1, **options}
    return RewardPool(RewardConfig.model_validate({"verifier": f"{FILE}:{function}", **settings}), custom=custom)


@pytest.fixture
def tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which ``odd_verifiers`` note what they received."""
    monkeypatch.setenv("TRIES", str(tmp_path / "tries"))
    (tmp_path / "tries").touch()
    return tmp_path / "tries"


@pytest.fixture
def pool(tries: Path) -> Iterator[RewardPool]:
    with pool_of(workers=2) as pool:
        yield pool


def items(*responses: str) -> list[tuple[Problem, str]]:
    return [(Problem(f"p{i}", "q", "a"), response) for i, response in enumerate(responses)]


def drain(pool: RewardPool) -> list[tuple[Hashable, RewardResult]]:
    """Polls until nothing is under way."""
    results: list[tuple[Hashable, RewardResult]] = []
    while some := pool.poll(None):
        results += some
    return results


def error_of(pool: RewardPool, response: str) -> str:
    """Why this response failed; one beside it must not have suffered."""
    good, bad, other = pool.score([(PROBLEM, text) for text in ("good", response, "other")])
    assert (good.reward, other.reward) == (1.0, 1.0), (good, other)
    assert bad.reward == -1.0
    return str(bad.error)


def tried(tries: Path, response: str) -> list[int]:
    """The processes that were given a response, once for each time."""
    return [int(line.split(" ", 1)[0]) for line in tries.read_text().splitlines() if line.endswith(f" {response}")]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.floats(-1e6, 1e6) | st.just("raise"), max_size=60), seed=st.integers(0, 99))
def test_each_comes_back_once_with_its_own_reward(pool: RewardPool, values: list[float | str], seed: int) -> None:
    """Submitting and polling in any order gives what scoring all at once gives, failures and repeats included."""
    rng = random.Random(seed)
    asked = [(Problem(f"p{n}", "q", "a", {"factor": 2}), str(value)) for n, value in enumerate(values)]
    asked += asked[::3]
    pool.reset()
    got: list[tuple[Hashable, RewardResult]] = []
    for number, (problem, text) in enumerate(asked):
        pool.submit(number, problem, text)
        if rng.random() < 0.3:
            got += pool.poll(rng.choice([0.0, 0.01]))
        assert pool.unfinished == number + 1 - len(got)
    got += drain(pool)
    assert pool.unfinished == 0
    results = dict(got)
    assert len(got) == len(asked)
    assert [results[number] for number in range(len(asked))] == pool.score(asked)
    for number, (_, value) in enumerate(asked):
        assert results[number].reward == (-1.0 if value == "raise" else 2 * float(value))


def test_sets_have_the_same_order_in_each_worker(tries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pool_of() as one, pool_of() as other:
        assert one.score([(PROBLEM, "hash")])[0].reward == other.score([(PROBLEM, "hash")])[0].reward


def test_problem_and_text_arrive_unchanged() -> None:
    text = "\u2028 \n \ud800 ü 😀 \0 \\"
    with RewardPool(RewardConfig(verifier="exact")) as exact:
        right, wrong = exact.score([(Problem("p", "q", f"a{text}a"), f"a{text}a"), (Problem("p", "q", text + "b"), text + "c")])
    assert (right.reward, wrong.reward) == (1.0, 0.0)


BAD = {
    "raise": "raised ValueError: invalid literal for int() with base 10: 'no number', at ",
    "interrupt": "raised KeyboardInterrupt",
    "exit": "raised SystemExit: 3",
    "nan": "returned nan, not a finite number",
    "inf": "returned inf, not a finite number",
    "none": "returned NoneType, not a number",
    "text": "returned str, not a number",
    "die": "process ended (signal 9)",
    "abort": "process ended (signal 6); a C library does this that gets no more memory",
    "memory 200000000": "needed more memory than reward.memory_mb = 100, at ",
    "file 1100000": "(a verifier's files may have reward.file_mb = 1), at ",
    "files 300": "(a verifier may have 256 files open)",
    **dict.fromkeys(SLOW, "longer than reward.timeout_s = 2 s"),
}


@pytest.mark.parametrize("slow", [False, True])
def test_only_the_bad_responses_suffer(tries: Path, slow: bool) -> None:
    bad = [text for text in BAD if (text in SLOW) == slow]
    responses = [item for i, text in enumerate(bad) for item in (str(2 * i), text, str(2 * i + 1))] + bad[:3]
    with pool_of(timeout_s=2.0 if slow else 600.0, workers=2) as pool:
        results = pool.score(items(*responses))
        assert [result.reward for result in pool.score(items("5", "6"))] == [5.0, 6.0]
    for i, (response, result) in enumerate(zip(responses, results, strict=True)):
        if response not in BAD:
            assert (result.reward, result.error) == (float(response), None)
            continue
        assert result.reward == -1.0
        assert str(result.error).startswith(f"problem 'p{i}': the verifier")
        assert BAD[response] in str(result.error)
    if slow:  # what a verifier has started ends with it
        assert gone(int(tries.with_suffix(".child").read_text()))
    else:
        assert tries.with_suffix(".large").stat().st_size <= 10**6


def test_among_many_async_calls_only_the_bad_ones_fail(tries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one holds up or ends the process that the others are under way in."""
    monkeypatch.setattr("tepo_megatron.runtime.worker_process._EXTRA_TIME_S", 1.0)
    said = {"late": BAD["sleep"], **{text: BAD[text] for text in ("sleep", "raise", "exit", "die")}}
    responses = [*said, *map(str, range(8)), "die-once", *said]
    with pool_of("judge_async", concurrency=8, timeout_s=2.0, network=None) as pool:
        results = pool.score([(PROBLEM, response) for response in responses])
    for response, result in zip(responses, results, strict=True):
        if response in said:
            assert result.reward == -1.0
            assert str(result.error).startswith("problem 'p': the verifier")
            assert said[response] in str(result.error)
        else:
            assert (result.reward, result.error) == (1.0 if response == "die-once" else float(response), None)


def test_the_limit_is_for_one_response_not_for_a_chunk() -> None:
    def mine(problem: Problem, response: str) -> float:
        time.sleep(0.25 if response == "slow" else 0.0)
        return 1.0

    with pool_of(custom=mine, timeout_s=2.0) as pool:
        responses = ["slow"] * 12 + ["x"] * 36  # eleven are sent at a time
        assert [result.error for result in pool.score(items(*responses))] == [None] * 48


def test_standard_streams_are_not_the_protocol_and_there_are_no_core_dumps(pool: RewardPool) -> None:
    assert [result.reward for result in pool.score(items("print", "read", "2", "bool", "core"))] == [1.0, 0.0, 2.0, 1.0, 0.0]


def test_a_worker_that_dies_idle_costs_no_response(pool: RewardPool) -> None:
    pids = {int(result.reward or 0) for result in pool.score(items(*["pid"] * 64))}
    assert 1 <= len(pids - {os.getpid()}) <= 2
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
    assert [(result.reward, result.error) for result in pool.score(items("1", "2"))] == [(1.0, None), (2.0, None)]


@pytest.mark.parametrize("custom", [None, odd_verifiers.judge])
def test_a_worker_that_no_signal_ends_costs_no_other_response(tries: Path, custom: Any) -> None:
    """It waits for a dead disk, and the kernel keeps it."""
    with pool_of(custom=custom, timeout_s=2.0) as pool:
        process = pool._workers[0].process._process
        with patch.object(process, "wait", side_effect=subprocess.TimeoutExpired("a worker", 1.0)) as wait:
            assert [result.reward for result in pool.score(items("sleep", "7"))] == [-1.0, 7.0]
        assert all(call.args for call in wait.call_args_list)
        process.wait()


def test_a_worker_that_does_not_start_is_an_error_of_the_constructor(tmp_path: Path) -> None:
    (tmp_path / "quitting.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(RuntimeError, match=r"did not start: .*exit status 7"):
        RewardPool(RewardConfig(verifier=f"{tmp_path}/quitting.py:judge"))


def test_a_closed_pool_takes_nothing(pool: RewardPool) -> None:
    pid = int(pool.score(items("pid"))[0].reward or 0)
    pool.close()
    pool.close()
    assert gone(pid)
    for act in (lambda: pool.submit(1, PROBLEM, "1"), pool.poll, lambda: pool.score(items("1"))):
        with pytest.raises(RuntimeError, match="pool is closed"):
            act()


def test_responses_that_a_verifier_can_tell_apart_are_each_tried(tries: Path, pool: RewardPool) -> None:
    other = Problem("p", "q", "a", {"factor": 3})
    kinds: list[tuple[tuple[int, ...], str]] = [((), "stop"), ((), "length"), ((5,), "stop"), ((6,), "stop")]
    texts = [ResponseText("raise", ids, reason) for ids, reason in kinds]
    for number, (one, text) in enumerate([*((PROBLEM, text) for text in texts), (other, texts[0])]):
        pool.submit(number, one, text)
    assert len(drain(pool)) == 5
    assert len(tried(tries, "raise")) == 5


def test_a_reset_drops_what_is_under_way(tries: Path) -> None:
    with pool_of(timeout_s=2.0) as pool:
        for number in range(4):
            pool.submit(("old", number), Problem(f"p{number}", "q", "a"), "sleep")
        pool.submit(("old", 9), Problem("p9", "q", "a"), "5")
        pool.reset()
        assert pool.unfinished == 0
        pool.submit("new", PROBLEM, "7")
        assert drain(pool) == [("new", RewardResult(7.0))]
        assert pool.score(items("8")) == [RewardResult(8.0)]


def test_a_group_is_scored_when_it_is_whole() -> None:
    with pool_of("score_group") as pool:
        assert pool.scores_groups
        members = [(group, number) for group in "ab" for number in range(3)]
        random.Random(1).shuffle(members)
        for group, number in members:
            pool.submit((group, number), Problem(f"p{group}", "q", "a"), str(10 - number), group=group, group_size=3)
        pool.submit("early", Problem("pc", "q", "a"), "1", group="c", group_size=2)
        results = dict(drain(pool))
        assert {key: result.parts for key, result in results.items()} == {
            (group, number): {"rank": 2.0 - number, "size": 3.0} for group, number in members
        }
        assert results["a", 0].reward == 5.0
        assert pool.unfinished == 1
        pool.submit("late", Problem("pc", "q", "a"), "2", group="c", group_size=2)
        assert {key: result.parts["rank"] for key, result in drain(pool)} == {"early": 0.0, "late": 1.0}
        two = [(PROBLEM, "3"), (PROBLEM, "4")]
        assert [result.parts["size"] for result in pool.score(two)] == [1.0, 1.0]
        together = pool.score(two, ["one", "one"])
        assert [result.parts for result in together] == [{"rank": 0.0, "size": 2.0}, {"rank": 1.0, "size": 2.0}]


def test_a_worker_that_keeps_too_much_is_replaced_between_responses(tries: Path) -> None:
    """Ten times 20 MB are more than the limit of 100 MB, and none fails."""
    with pool_of() as pool:
        results = pool.score([(Problem(f"p{number}", "q", "a"), "keep 20000000") for number in range(10)])
    assert [result.error for result in results] == [None] * 10
    assert len(set(tried(tries, "keep 20000000"))) >= 4


def test_ones_own_verifier_has_a_network_unless_it_is_taken_and_those_that_ship_have_none() -> None:
    assert RewardConfig(verifier="math").cuts_network
    assert not RewardConfig(verifier="math", network=True).cuts_network
    assert not RewardConfig(verifier="mine.py:judge").cuts_network


def test_a_verifier_without_network_reaches_nobody(tries: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pool_of(network=True) as pool:
            assert pool.notice is None
            assert pool.score(items(f"connect {port}"))[0].reward == 1.0
        with pool_of() as pool:
            if pool.notice is not None:  # this kernel lets no process leave the network
                assert pool.notice.startswith("verifiers keep their network: ")
                return
            hint = "(this verifier has no network; reward.network=true gives it one)"
            assert hint in error_of(pool, f"connect {port}")
            assert hint in error_of(pool, "name")
            assert pool.score(items(f"owner {os.getuid()}"))[0].reward == 1.0  # the user and the files are the same


def test_the_same_hostile_response_costs_its_time_once(tries: Path) -> None:
    with pool_of(timeout_s=2.0) as pool:
        results = pool.score([(PROBLEM, text) for text in ["spin"] * 40 + ["good"]])
        assert {str(result.error) for result in results[:40]} == {f"problem 'p': the verifier took {BAD['spin']}"}
        assert results[40].reward == 1.0
        assert pool.score([(PROBLEM, "spin")])[0].error is not None
        assert len(tried(tries, "spin")) == 1
        assert pool.score([(Problem("another", "q", "a"), "spin")])[0].error is not None
        assert len(tried(tries, "spin")) == 2


def test_with_a_network_a_later_call_tries_again(tries: Path) -> None:
    with pool_of(network=True, workers=1) as pool:
        for number, text in enumerate(("until", "raise", "raise", "good", "good")):
            pool.submit(number, PROBLEM, text)
        tries.with_suffix(".go").touch()  # all of them wait by now
        results: dict[Any, Any] = {}
        while pool.unfinished:
            results |= pool.poll(None)
        assert [results[number].error is None for number in range(1, 5)] == [False, False, True, True]
        assert len(tried(tries, "raise")) == 1
        assert len(tried(tries, "good")) == 2  # a verifier need not give the same response the same reward
        assert pool.score([(PROBLEM, "raise")])[0].error is not None
        assert len(tried(tries, "raise")) == 2
        for tries_so_far in (3, 4):  # a window of groups has no steps, and is not reset
            pool.submit("key", PROBLEM, "raise")
            assert [result.error is None for _, result in pool.poll(None)] == [False]
            assert len(tried(tries, "raise")) == tries_so_far


def test_workers_that_others_kill_or_stop_cost_no_response(tries: Path) -> None:
    """Before a response of any length, too."""
    with pool_of(timeout_s=2.0, file_mb=10) as pool:
        assert pool.score(items("die-once", "good"))[0].reward == 1.0
        assert len(tried(tries, "die-once")) == 2
        error_of(pool, "stop")
        assert len(tried(tries, "stop")) == 2  # it may have been somebody else who stopped it
        pool.score(items("good"))
        os.kill(tried(tries, "good")[-1], signal.SIGSTOP)
        assert pool.score(items("x" * 3_000_000))[0].reward == 1.0


@pytest.mark.parametrize(
    ("function", "message", "line"),
    [
        ("judge", "raised ValueError: invalid literal for int() with base 10: 'no number'", 'return int("no number")'),
        ("three", "raised TypeError: three() missing 1 required positional argument: 'third'", "def three(problem"),
    ],
)
def test_a_verifier_that_cannot_work_is_refused_with_its_own_line(tries: Path, function: str, message: str, line: str) -> None:
    with pool_of(function) as pool:
        with pytest.raises(ValueError, match="cannot score the first 2 problems") as caught:
            pool.rehearse([Problem("p1", "q", "raise"), Problem("p2", "q", "raise again")])
        if function == "judge":
            pool.rehearse([Problem("p1", "q", "raise"), Problem("p2", "q", "good")])  # one is enough
            with pytest.raises(ValueError, match=r"another problem's answer as the response: .* NoneType"):
                pool.rehearse([*(Problem(f"p{number}", "q", "good") for number in range(4)), Problem("p5", "q", "none")])
    number, text = next((i, text) for i, text in enumerate(Path(FILE).read_text().splitlines(), start=1) if line in text)
    said = str(caught.value)
    assert f"problem 'p1': the verifier {message}, at {FILE}:{number}: \"{text.strip()}\"" in said
    assert said.startswith(f"the verifier '{FILE}:{function}' cannot score")
    takes = "; a reward takes (problem, response)" * (function == "three")
    assert said.endswith(f'"{takes}; correct the verifier, or the data')


# -- a verifier that is an object of this process: its workers are forks


def scored(verifier: Any, *responses: str, **options: Any) -> list[RewardResult]:
    with pool_of(custom=verifier, **options) as pool:
        return pool.score([(Problem("p", "q", "4"), response) for response in responses], [0] * len(responses))


def test_objects_of_this_process_score() -> None:
    table, under_way = {"a": 1.0, "b": 0.5}, []

    def closure(problem: Problem, response: str) -> float:
        return table[response] + float(problem.answer)

    async def together(problem: Problem, response: str) -> float:
        under_way.append(response)
        while len(under_way) < 3:
            await asyncio.sleep(0.001)
        return len(under_way)

    assert [result.reward for result in scored(closure, "a", "b", workers=2)] == [5.0, 4.5]
    groups = SimpleNamespace(score_group=odd_verifiers.score_group)
    assert [result.parts["rank"] for result in scored(groups, "7", "3")] == [1.0, 0.0]
    assert [result.reward for result in scored(together, "x", "y", "z")] == [3.0] * 3
    with pytest.raises(ValueError, match=r"has neither a method score nor score_group"):
        scored(4.0, "x")
    with pytest.raises(ValueError, match=r"give one function that returns \{name: value\}"):
        scored([closure, closure], "x")


def test_the_limits_of_forks_are_those_of_every_worker(tries: Path) -> None:
    def mine(problem: Problem, response: ResponseText) -> Any:
        return odd_verifiers.judge(problem, response)

    bad = ("raise", "spin", "exit", "die", "memory 200000000", "file 1100000")
    *failed, printed, good = scored(mine, *bad, "print", "good", timeout_s=2.0)
    for text, result in zip(bad, failed, strict=True):
        assert BAD[text].removesuffix(", at ") in str(result.error)
    assert (printed.reward, good.reward) == (1.0, 1.0)
    assert __file__ in str(failed[0].error)


def test_a_fork_has_no_handler_and_no_pipe_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ends when its pipe is closed must not be kept by a worker; Ctrl-C is for the parent."""
    read, write = os.pipe()
    monkeypatch.setattr("sys.stdout", None)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    busy = threading.Event()
    thread = threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(busy.is_set, True)], daemon=True)
    thread.start()

    def mine(problem: Problem, response: str) -> float:
        print("there is a standard output")
        return float(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and os.getsid(0) == os.getpid())

    try:
        with pool_of(custom=mine) as pool:
            (result,) = pool.score(items("x"))
            assert result.reward == 1.0, result.error
            os.close(write)
            assert os.read(read, 1) == b""  # the last end was ours
    finally:
        busy.set()
        signal.signal(signal.SIGTERM, before)
        os.close(read)


PARENT = f"""
import signal, sys
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.reward.pool import RewardPool
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts tests in the background has it ignored
pool = RewardPool(RewardConfig(verifier={f"{FILE}:judge"!r}, workers=1, timeout_s=300))
print(int(pool.score([(Problem("p", "q", "a"), "pid")])[0].reward), flush=True)
pool.score([(Problem("p", "q", "a"), sys.argv[1])])
"""


@pytest.mark.parametrize(("work", "how"), [("spin", signal.SIGKILL), ("sleep", signal.SIGINT)])
def test_workers_die_with_the_parent(tries: Path, work: str, how: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, work], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    while f" {work}\n" not in tries.read_text():
        time.sleep(0.02)
    parent.send_signal(how)
    assert gone(worker)
    _, shown = parent.communicate(timeout=TIMEOUT_S)
    # Only the parent may speak of the interruption.
    assert shown.count("Traceback") == (1 if how == signal.SIGINT else 0), shown
    assert "tasks/reward/worker.py" not in shown


LIMITS = {"timeout_s": TIMEOUT_S, "memory_mb": 1000, "file_mb": 1, "network": True, "run_code": False}
SETUP = {"verifier": f"{FILE}:judge", "kwargs": {}, "path": sys.path, **LIMITS}


def test_a_worker_ends_at_a_line_that_is_cut() -> None:
    """Its parent was killed while it wrote."""
    command = [sys.executable, "-m", "tepo_megatron.tasks.reward.worker"]
    text = json.dumps(SETUP) + "\n" + '[[0, {"id'
    subprocess.run(command, input=text.encode(), capture_output=True, check=True, timeout=TIMEOUT_S)


@contextmanager
def worker_with(response: str, timeout_s: float = TIMEOUT_S, stderr: IO[bytes] | None = None) -> Iterator[WorkerProcess]:
    """A worker that is alone, and has been sent the response."""
    worker = WorkerProcess("tepo_megatron.tasks.reward.worker", stderr=stderr)
    worker.send(SETUP | {"timeout_s": timeout_s}, TIMEOUT_S)
    assert worker.receive()[0]["ready"]
    worker.send([[0, PROBLEM.to_json(), [ResponseText(response).to_json()]]], TIMEOUT_S)
    yield worker
    worker.close()


def test_an_orphan_that_holds_the_lock_runs_out_of_processor_time(tries: Path) -> None:
    with worker_with("hold", timeout_s=-5.97) as worker:
        with pytest.raises(EOFError):
            worker.receive()
        assert worker.exit_status() == f"signal {signal.SIGPROF:d}"


def test_a_long_message_is_sent_whatever_number_its_pipe_has(tries: Path) -> None:
    with numbers_above_1023(), worker_with("7" + " " * 10**6) as worker:
        assert worker.receive()


def test_a_long_log_of_the_run_does_not_count(tries: Path) -> None:
    """Standard error is the run's, and may be a file that is larger than what a verifier may write."""
    log = tries.with_name("log")
    log.write_bytes(bytes(3 * 10**6))
    with log.open("ab") as file, worker_with("print " + "x" * 1000, stderr=file) as worker:
        assert worker.receive()[0][1] == [[1.0, None]]
    assert b"x" * 1000 in log.read_bytes()

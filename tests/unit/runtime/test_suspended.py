"""A job that is suspended as a whole continues as if nothing had been: the time is not counted against its workers."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import math_verify
import pytest
from math_verify.errors import TimeoutException

from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.reward import math_verifier
from tests.support.processes import eventually, family, python_programs, suspend

LIMIT_S = 15.0

JOB = f"""
import json, os, sys, time
from pathlib import Path
from tepo_megatron.config.reward import EnvironmentConfig, RewardConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.heartbeat import Heartbeat, watching
from tepo_megatron.tasks.environments.workers import EnvironmentWorkers
from tepo_megatron.tasks.reward.pool import RewardPool

what, code = sys.argv[1:]
limit = {{"timeout_s": {LIMIT_S}, "workers": 1, "run_code": True}}
if what == "environment":
    pool = EnvironmentWorkers(EnvironmentConfig(name=f"{{code}}:Turns", **limit))
    for call in (["reset", Problem("p", "", "").to_json(), 1, False], ["step", *ResponseText("1").to_json()]):
        pool.call(0, call)
        (answer,) = pool.poll(600.0)
    result = answer.answer.get("reward"), answer.error
    pool.close()
elif what == "rank":
    status = Path(code).parent / "status"
    if not (rank := os.fork()):
        heart = Heartbeat(status, hang_timeout_s={LIMIT_S})
        heart.start()
        (status.parent / "started").touch()
        while not (status.parent / "go").exists():
            heart.moved()
            time.sleep(0.01)
        os._exit(0)
    with watching(status, lambda sentence: print(sentence, file=sys.stderr)):
        ended = os.waitpid(rank, 0)[1]
    result = 1.0 - ended, None
else:
    verifier = {{"verifier": f"{{code}}:{{what}}"}}
    if what == "program":
        verifier = {{"verifier": "python_tests", "kwargs": {{"seconds": {LIMIT_S} - 1}}}}
    tests = {{"tests": ["import time\\ntime.sleep(6)"]}}
    pool = RewardPool(RewardConfig(**verifier, **limit))
    pool.submit(0, Problem("p", "", "", tests), "")
    ((_, answer),) = pool.poll(None)
    result = answer.reward, answer.error
    pool.close()
print(json.dumps(result))
"""

CODE = """
import asyncio, time
from pathlib import Path
from tepo_megatron.tasks.environments.protocol import StepResult

FOLDER = Path(__file__).parent

def waits(problem, response):
    (FOLDER / "started").touch()
    while not (FOLDER / "go").exists():
        time.sleep(0.01)
    return 1.0

async def waits_async(problem, response):
    (FOLDER / "started").touch()
    while not (FOLDER / "go").exists():
        await asyncio.sleep(0.01)
    return 1.0

class Turns:
    def reset(self, problem, seed):
        return None

    async def step(self, action):
        return StepResult(reward=await waits_async(None, ""), done=True)
"""


JOBS = ("waits", "waits_async", "environment", "program", "rank")


def stop_for_long(start: Callable[..., Any], what: str, folder: Path) -> Any:
    """What a job prints that is stopped for longer than its limit."""
    folder.mkdir()
    (folder / "code.py").write_text(CODE)
    job = start("-c", JOB, what, folder / "code.py")
    begun = (folder / "started").exists if what != "program" else lambda: len(family(job.pid)) == 4
    assert eventually(lambda: begun() or job.poll() is not None), what
    suspend(job.pid, LIMIT_S + 2, parent_first=what == "rank")
    time.sleep(2.5 if what == "rank" else 0.3)  # who counted the time now sees it
    (folder / "go").touch()
    out, err = job.communicate()
    return json.loads(out.splitlines()[-1]) if out else err


def test_time_in_which_the_whole_job_was_stopped_is_not_counted(tmp_path: Path) -> None:
    """All at once: most of the time they are stopped."""
    with python_programs({}, forks=True) as start, ThreadPoolExecutor(len(JOBS)) as pool:
        ends = {what: pool.submit(stop_for_long, start, what, tmp_path / what) for what in JOBS}
    assert {what: end.exception() or end.result() for what, end in ends.items()} == {what: [1.0, None] for what in JOBS}


def test_an_alarm_that_time_did_not_bring_is_not_the_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alarm goes on while the job is stopped."""
    alarms = [TimeoutException()]

    def parse(*args: Any, **kwargs: Any) -> Any:
        if alarms:
            raise alarms.pop()
        return math_verify.parse(*args, **kwargs)

    monkeypatch.setattr(math_verifier, "parse", parse)
    assert math_verifier.math(Problem("p", "", "4"), "$4$") == 1.0
    assert not alarms

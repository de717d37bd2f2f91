"""The table of hostile answers, against the math verifier as it is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tepo_megatron.tools.faults.input_faults import hostile_answers
from tests.support.programs import TIMEOUT_S

MEMORY_MB = 300
SCORE = f"""
import json, resource
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.tools.faults.input_faults import hostile_answers
from tepo_megatron.tasks.reward.pool import RewardPool
from tepo_megatron.core.problem import Problem

hostile = [(each.problem, each.response) for each in hostile_answers()]
with RewardPool(RewardConfig(verifier="math", workers=2, timeout_s=0.5, memory_mb={MEMORY_MB})) as pool:
    first = [(result.reward, result.error) for result in pool.score(hostile)]
    failed = [item for item, result in zip(hostile, first) if result[1]]
    again = [result.error for result in pool.score(failed * 8)]
    right = []
    while not any(right) and len(right) < 1000:  # half a second may be short where the machine is busy
        problem = Problem(f"right {{len(right)}}", "q", "1/2")
        right.append(pool.score([(problem, r"\\boxed{{0.5}}")])[0].reward == 1)
largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps([first, again, any(right), largest]))
"""


@pytest.mark.slow
def test_hostile_answers_are_wrong_or_fail_and_cost_nobody_else_anything() -> None:
    """Each within the limits, none right; scoring the ones that failed again, eight times each, takes no worker."""
    hostile = hostile_answers()
    assert len(hostile) >= 60
    assert len({each.name for each in hostile}) == len(hostile)
    done = subprocess.run([sys.executable, "-c", SCORE], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    first, again, right, largest = json.loads(done.stdout)
    assert len(first) == len(hostile)
    for each, (reward, error) in zip(hostile, first, strict=True):
        assert reward == 0 or (reward is None and error.startswith(f"problem 'hostile/{each.name}': the verifier")), each.name
    failed = [error for _, error in first if error]
    assert failed
    assert again == failed * 8
    assert right
    assert largest < (MEMORY_MB + 200) * 10**6  # what a worker has once math-verify is loaded is below 200

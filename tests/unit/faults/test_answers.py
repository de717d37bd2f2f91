"""What a hostile answer has cost the ones beside it, on a machine that is slow by itself."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.pool import RewardPool
from tepo_megatron.tasks.reward.worker import took_too_long
from tepo_megatron.tools.faults import answer_faults as answers
from tepo_megatron.tools.faults.answer_faults import ATTEMPTS, TIMEOUT_S, HostileAnswers
from tepo_megatron.tools.faults.workshop import Workshop

LATE = RewardResult(None, error=f"problem 'wrong': {took_too_long(TIMEOUT_S)}")
RIGHT, WRONG = RewardResult(1.0), RewardResult(0.0)
HOSTILE = RewardResult(None, error=took_too_long(TIMEOUT_S))


class Scores:
    """A pool that gives these, call by call."""

    def __init__(self, *scores: list[RewardResult]) -> None:
        self.scores = list(scores)

    def score(self, items: object) -> list[RewardResult]:
        return self.scores.pop(0)


@pytest.mark.parametrize(
    ("scores", "result"),
    [
        ([[RIGHT, HOSTILE, WRONG, RIGHT]], "refused"),
        ([[RIGHT, WRONG, LATE, RIGHT], [RIGHT, WRONG, WRONG, RIGHT]], "survived"),
        ([[LATE, HOSTILE, WRONG, RIGHT], [RIGHT, HOSTILE, LATE, RIGHT], [RIGHT, HOSTILE, WRONG, RIGHT]], "refused"),
        ([[RIGHT, HOSTILE, LATE, RIGHT]] * ATTEMPTS, "lost"),
        ([[RIGHT, HOSTILE, RewardResult(None, error="it ended"), RIGHT]], "lost"),
        ([[RIGHT, HOSTILE, RIGHT, RIGHT]], "lost"),
    ],
    ids=["its own response", "late once", "late twice", "late each time", "ended with it", "wrong taken for right"],
)
def test_an_honest_answer_may_be_late_but_not_each_time(
    scores: list[list[RewardResult]], result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_largest_worker_gib", lambda: 0.0)
    fault = HostileAnswers(cast(Workshop, SimpleNamespace(is_quick=True, folder=tmp_path)))
    fault._pool = cast(RewardPool, pool := Scores(*scores))
    assert fault.inject(0, random.Random(0)).result == result
    assert not pool.scores

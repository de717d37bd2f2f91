"""Each source's responses go to its own verifier, through one pool's methods."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tepo_megatron.config.data import DataConfig
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.reward.verifier_task import VerifierTask

MINE = """
def tell(problem, response):
    return {"source": float(problem.source == "own"), "messages": float(problem.messages == (("user", "q"),))}

def score_group(problem, responses):
    return [float(len(responses)) for _ in responses]
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    path = tmp_path_factory.mktemp("verifiers") / "mine.py"
    path.write_text(MINE)
    sources = [
        {"path": "a.jsonl", "name": "usual"},
        {"path": "b.jsonl", "name": "own", "verifier": f"{path}:tell", "verifier_weights": {"source": 2.0, "messages": 0.5}},
        {"path": "c.jsonl", "name": "groups", "verifier": f"{path}:score_group"},
    ]
    return DataConfig.model_validate({"train": sources, "heldout": [{"path": "d.jsonl", "name": "own"}]})


@pytest.fixture(scope="module")
def pool(data: DataConfig) -> Iterator[VerifierTask]:
    with VerifierTask(RewardConfig(verifier="exact"), data) as opened:
        yield opened


def problem(name: str, source: str) -> Problem:
    return Problem(name, "q", "a", {}, (("user", "q"),), source)


def test_each_verifier_scores_its_own(pool: VerifierTask) -> None:
    usual, own, groups, unknown = (problem(name, name) for name in ("usual", "own", "groups", ""))
    items = [(usual, "a"), (own, "x"), (groups, "x"), (usual, "b"), (groups, "y"), (unknown, "a")]
    results = pool.score(items, [0, 1, 2, 0, 2, 3])
    assert [result.reward for result in results] == [1.0, 2.5, 2.0, 0.0, 2.0, 1.0]
    assert results[1].parts == {"source": 1.0, "messages": 1.0}
    pool.rehearse([usual, own, groups])
    assert (pool.scores_groups, pool.unfinished, pool.notice) == (True, 0, pool.notice)


def test_answers_come_one_by_one_and_a_reset_forgets_the_rest(pool: VerifierTask) -> None:
    pool.reset()
    assert pool.poll(None) == []  # nothing is under way
    pool.submit("half", problem("groups", "groups"), "x", group=0, group_size=2)
    pool.submit("one", problem("own", "own"), "x")
    assert [(key, result.reward) for key, result in pool.poll(None)] == [("one", 2.5)]
    assert pool.poll(None) == []  # the group waits for its other response, and nothing works
    assert pool.unfinished == 1
    pool.reset()
    assert pool.unfinished == 0

"""What rank 0 does when the run goes back, or a server dies: other problems, fewer rows, and the time that was lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.run import servers
from tepo_megatron.run.display.progress import NoProgress
from tepo_megatron.run.metrics.metrics import read_metrics
from tepo_megatron.run.output.output import Output
from tepo_megatron.run.output.resume import Resumed
from tepo_megatron.run.rank0 import Rank0
from tepo_megatron.run.sampling import collector
from tepo_megatron.runtime.watch.heartbeat import Heartbeat
from tepo_megatron.sampler.protocol import ServerDied
from tepo_megatron.weights.storage.manifest import DamagedCheckpoint
from tests.support.fake_sampling import FakeFleet, FakeVerifiers


class MadeUpFleet(FakeFleet):
    addresses = ("http://127.0.0.1:1",)

    def __init__(self, *_given: Any, **_options: Any) -> None:
        super().__init__(0)

    def figures(self) -> dict[str, float]:
        return {}

    def start(self) -> None:
        pass

    def revive(self) -> None:
        time.sleep(0.01)


@pytest.fixture
def rank0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank0]:
    monkeypatch.setattr(servers, "make_sampler", MadeUpFleet)
    pool: Any = FakeVerifiers(0, lambda problem, text: 0.5)
    tokenizer = SimpleNamespace(eos_ids=(2,), encode=lambda text, **_options: (3, 4), decode=lambda ids: "text")
    problems = [Problem(f"p{at}", "1+1=", "2") for at in range(100)]
    config = RunConfig.model_validate({"output": tmp_path / "out", "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2}})
    monkeypatch.setattr(collector, "prompt_of", lambda environment, tokenizer, problem: (3, 4))
    inputs: Any = SimpleNamespace(
        tokenizer=tokenizer,
        train=problems,
        heldout=[],
        model_dir=tmp_path,
        spec=SimpleNamespace(vocab_size=50, max_positions=64),
    )
    output = Output(config, NoProgress())
    rank0 = Rank0(config, inputs, output, Heartbeat(), pool)
    rank0.collector.published(WeightsVersion(0, "w0"))
    yield rank0
    output.close()


def problems_of(rank0: Rank0, step: int) -> set[str]:
    return {rollout.problem_id for rollout in rank0.collect(step)}


def test_what_a_server_that_died_cost_is_accounted_for(rank0: Rank0) -> None:
    def die() -> None:
        raise ServerDied("http://127.0.0.1:1 is gone")

    assert rank0.servers.run_or_revive(lambda: 7) == (7, False)
    assert rank0.lost.split()["lost/server"] == 0
    assert rank0.servers.run_or_revive(die) == (None, True)
    assert rank0.lost.split()["lost/server"] >= 0.01
    assert rank0.servers.revive_or_wake(died=True)
    assert rank0.lost.split()["lost/server"] >= 0.01


def test_no_problem_comes_again_and_rows_and_time_are_accounted_for(rank0: Rank0, tmp_path: Path) -> None:
    seen = set()
    for step in range(3):
        seen |= problems_of(rank0, step)
        rank0.log(step + 1, {"response_tokens": 4.0, "update/skipped": 0.0})
    offending = problems_of(rank0, 3)
    assert problems_of(rank0, 3) == offending  # a server that dies repeats the step
    rank0.go_back(Resumed(tmp_path, {"step": 3}), "back to step 3")
    assert rank0.output.last_step == 3
    assert not problems_of(rank0, 3) & (seen | offending)
    rank0.go_back(Resumed(tmp_path, {"step": 1}), "back to step 1")
    assert rank0.output.last_step == 1
    seen |= offending | problems_of(rank0, 1)
    assert len(seen) == 20  # three steps', the offending one's, and the last one's: all different
    rank0.note_step(2, {"response_tokens": 4.0, "update/skipped": 0.0}, [], [])
    rank0.log(2, {"response_tokens": 4.0, "update/skipped": 0.0})
    row = read_metrics(rank0.output.folder / "metrics.jsonl")[-1]
    assert row["rollback/count"] == 2
    assert row["lost/rollback"] > 0


def test_damaged_checkpoints_are_said_and_set_aside_when_the_run_goes_back(rank0: Rank0) -> None:
    folder = rank0.config.output / "checkpoints"
    for step in (1, 2):
        (folder / f"step_{step:06d}").mkdir(parents=True)
    said: list[str] = []
    rank0.output.message = said.append  # type: ignore[method-assign, assignment]
    damaged = DamagedCheckpoint(folder / "step_000002", ["state.json is missing"])
    rank0.go_back(Resumed(folder / "step_000001", {"step": 1}, damaged=[damaged]), "back to step 1")
    assert said == ["step_000002 is damaged (state.json is missing); going back to step_000001", "back to step 1"]
    assert sorted(path.name for path in folder.iterdir()) == ["step_000001", "step_000002.damaged"]

"""The example with programs for a stack machine: two small steps on the reference backends; and whether it learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tepo_megatron.sampler.rollout_file import read_rollouts
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tepo_megatron.tasks.reward.programs import StackMachine
from tests.support.example_runs import ROOT, SMALL_RUN, greedy_accuracies, tepo
from tests.support.processes import assert_none_names
from tests.support.reference_runs import train_on_references

SMALL = (
    *SMALL_RUN,
    "rollout.prompts_per_step=16",
    "evaluate.problems=10",
    "evaluate.samples=2",
    "rollout.record=true",
)


@pytest.mark.slow
def test_what_is_sampled_is_run_and_several_programs_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    out = tmp_path / "out"
    trained = train_on_references("examples/stack_machine/run.yaml", out, *SMALL)
    problems = {problem.id: problem for problem in load_problems("builtin:stack-machine")}
    tokenizer, machine = load_tokenizer(resolve_model_path("builtin:stack-machine")), StackMachine()
    right: list[tuple[str, str]] = []
    for step, row in enumerate(trained[1:]):
        rewards = []
        for rollout in read_rollouts(out / "rollouts", step):
            program = tokenizer.decode(rollout.response_ids.tolist())
            rewards.append(machine.score(problems[rollout.problem_id], program))
            assert rollout.reward == rewards[-1]
            right += [(rollout.problem_id, program)] if rewards[-1] else []
        assert row["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert row["reward/failed"] == 0
    assert 0 < len(right) < 128
    assert any(program != problems[name].answer for name, program in right)
    assert {"accuracy/greedy", "accuracy/avg@k"} <= set(trained[0])


@pytest.mark.learns
def test_it_learns_what_its_readme_says(tmp_path: Path) -> None:
    """Held-out formulas, greedily; minutes, on two cores."""
    tepo("train", "examples/stack_machine/run.yaml", f"output={tmp_path}/out", timeout_s=7200)
    assert_none_names(tmp_path / "out")
    greedy = greedy_accuracies(tmp_path / "out")
    assert greedy[0] < 0.75
    assert greedy[-1] >= 0.85

"""The example with an environment of its own, on a real server: its README in a short form, and what it trains on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.sampler.rollout_file import read_rollouts
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tests.support.example_runs import ROOT, assert_replayed, check_learning, run, tepo
from tests.support.kills import rows
from tests.support.processes import assert_none_names

EXAMPLE = "examples/own_env"
NOTED = ("train.minibatches=2", "evaluate.every=2", "evaluate.problems=6", "rollout.record=true", "log.train_samples=4")
SMALL = (
    "train.steps=2",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.filter_groups.filters=[zero_variance]",
)
"""64 episodes, and beside them those of groups that are left out: dynamic sampling."""

THOUSAND = ("train.steps=3", "rollout.prompts_per_step=64", "rollout.samples_per_prompt=8")
"""1 536 episodes, so that a thousand have several turns: one in nine may be over with the first."""


def test_its_files_are_those_that_the_script_writes() -> None:
    for name, count in (("problems", 180), ("heldout", 36)):
        problems = load_problems(str(ROOT / EXAMPLE / f"{name}.jsonl"))
        assert len({problem.id for problem in problems}) == count
        assert {problem.answer for problem in problems} == {str(number) for number in range(1, 10)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "episodes", "several"),
    [(SMALL, 64, 33), pytest.param(THOUSAND, 1536, 1000, marks=[pytest.mark.learns, pytest.mark.timeout(7200)])],
)
def test_an_episode_trains_on_what_was_sampled_and_on_nothing_else(
    sizes: tuple[str, ...], episodes: int, several: int, tmp_path: Path
) -> None:
    """The environment notes the ids that it was given, and the record holds these and its own answers' alone; sampler and
    trainer agree on their log-probs; a replay of the record gives the same bits without servers or environments. At least
    ``several`` episodes have several turns.
    """
    start, out, heard = tmp_path / "start", tmp_path / "out", tmp_path / "heard.jsonl"
    run("examples/environments/make_warm_start.py", "own_env", str(start), "--steps", "8")
    noting = f"environment={{name: {ROOT}/tests/support/noting_environment.py:Noting, max_turns: 3, kwargs: {{path: {heard}}}}}"
    common = ("train", f"{EXAMPLE}/run.yaml", f"model.path={start}", *NOTED, *sizes)
    tepo(*common, noting, f"output={out}", timeout_s=3600)
    turns = check_episodes(out, heard)
    assert len(turns) == episodes
    assert sum(each > 1 for each in turns) >= several
    for row in rows(out)[1:]:
        assert row["canary/rollouts_max_gap"] < 1e-4
        assert 1 < row["environment/turns"] <= 3
        assert row["environment/tokens"] > 0
        assert row["reward/failed"] == row["environment/restarts"] == 0
        if sizes is SMALL:
            assert row["groups/kept"] == row["groups/drawn"] - row["groups/filtered"] == 8
            assert row["groups/zero_variance"] == 0
    gap = max(row["canary/rollouts_max_gap"] for row in rows(out)[1:])
    print(f"{sum(each > 1 for each in turns)} of {len(turns)} episodes with several turns; largest gap {gap:.2g}")
    assert rows(out)[-1]["heldout/reward_greedy"] >= 0
    shown = tepo("samples", str(out), "--train").stdout
    assert "  model:\n" in shown
    assert "  environment:\n" in shown
    assert_none_names(out)

    again = tmp_path / "again"
    tepo(*common, f"output={again}", f"rollout.replay={out / 'rollouts'}", "rollout.record=false", timeout_s=3600)
    assert_replayed(again, out)


def check_episodes(out: Path, heard: Path) -> list[int]:
    """Holds each recorded episode to what its environment has noted; the model's turns in each."""
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny"))
    noted: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in heard.read_text().splitlines():
        note = json.loads(line)
        noted.setdefault((note["problem"], str(note["turns"])), []).append(note)
    found = []
    for rollout in (each for step in range(len(rows(out)) - 1) for each in read_rollouts(out / "rollouts", step)):
        mask = [True] * rollout.response_ids.size if rollout.loss_mask is None else rollout.loss_mask.tolist()
        turns = [
            rollout.response_ids[at.start() : at.end()].tolist()
            for at in re.finditer("1+|0+", "".join("1" if own else "0" for own in mask))
        ]
        # The game is done with what the model writes, and answers with one character else.
        own, answers = turns[::2], turns[1::2]
        note = noted[rollout.problem_id, str(own)].pop()
        assert [tokenizer.encode(text) for text in note["answers"]] == answers
        assert rollout.prompt_ids.tolist() == tokenizer.prompt_ids("how far, 1-9?")
        assert rollout.reward == note["reward"]
        assert not rollout.sampler_logprobs[[not each for each in mask]].any()
        found.append(len(own))
    return found


@pytest.mark.learns
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("task", "config", "begins_below", "ends_above"),
    [
        ("guess_number", "examples/environments/guess_number.yaml", 0.65, 0.8),
        ("guess_number", "examples/own_agent/run.yaml", 0.65, 0.8),
        ("calculator", "examples/environments/calculator.yaml", 0.35, 0.8),
        ("own_env", "examples/own_env/run.yaml", 0.75, 0.85),
    ],
)
def test_it_learns_what_its_readme_says(task: str, config: str, begins_below: float, ends_above: float, tmp_path: Path) -> None:
    check_learning(task, config, tmp_path / "out", begins_below, ends_above, *(("--steps", "200") * (task == "own_env")))

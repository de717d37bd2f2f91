"""The example with an agent on OpenAI's own client, on a real server: what it trains on, and that it learns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tepo_megatron.sampler.rollout_file import read_rollouts
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tests.support.example_runs import assert_replayed, tepo
from tests.support.kills import rows
from tests.support.processes import assert_none_names

pytest.importorskip("openai")

EXAMPLE = "examples/own_agent/run.yaml"
SMALL = (
    *("train.steps=2", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.record=true"),
    "environment.timeout_s=600",  # no episode may fail, on a slow machine either
)


def test_an_agent_on_openais_client_trains_on_what_was_sampled_and_on_nothing_else(tmp_path: Path) -> None:
    """32 episodes of builtin:tiny, which writes other things than guesses too. In the record stand the model's own tokens, and
    between them what the agent says to such guesses; sampler and trainer agree on their log-probs.
    """
    out = tmp_path / "out"
    tepo("train", EXAMPLE, "model.path=builtin:tiny", f"output={out}", "evaluate.every=0", *SMALL)
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny"))
    problems = {problem.id: problem for problem in load_problems("builtin:guess-number")}
    episodes = [rollout for step in range(2) for rollout in read_rollouts(out / "rollouts", step)]
    assert len(episodes) == 32
    several = 0
    for rollout in episodes:
        problem = problems[rollout.problem_id]
        assert rollout.loss_mask is not None  # what the agent says first is behind the prompt, the token that texts begin with
        assert rollout.prompt_ids.tolist() == tokenizer.prompt_ids("")
        told, reward, turns = tokenizer.encode(problem.prompt), 0.0, 0
        for at in re.finditer("m+|c+", "".join("m" if own else "c" for own in rollout.loss_mask.tolist())):
            ids = rollout.response_ids[at.start() : at.end()].tolist()
            if at[0][0] == "c":
                assert ids == told
                continue
            turns += 1
            found = re.search(r"\d+", tokenizer.decode(ids))
            reward = float(found is not None and found[0] == problem.answer)
            below = found is not None and int(problem.answer) < int(found[0])
            told = tokenizer.encode("?" if found is None else "<" if below else ">")
        several += turns > 1
        assert reward == 1.0 or turns == 3
        assert rollout.reward == reward
        assert not rollout.sampler_logprobs[~rollout.loss_mask].any()
    assert several > 16
    for row in rows(out)[1:]:
        assert row["canary/rollouts_max_gap"] < 1e-4
        assert 1 < row["environment/turns"] <= 3
        assert row["reward/failed"] == row["environment/restarts"] == row["environment/new_histories"] == 0
    assert_none_names(out)


@pytest.mark.learns
def test_a_record_of_agents_replays_bit_for_bit(tmp_path: Path) -> None:
    """Without servers and agents; episodes of other environments are replayed in CI."""
    common = ("train", EXAMPLE, "model.path=builtin:tiny", "evaluate.every=2", "evaluate.problems=4")
    out, again = tmp_path / "out", tmp_path / "again"
    tepo(*common, f"output={out}", *SMALL)
    tepo(*common, f"output={again}", *SMALL, f"rollout.replay={out / 'rollouts'}", "rollout.record=false")
    assert_replayed(again, out)

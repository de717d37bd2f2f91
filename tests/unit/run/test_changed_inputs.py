"""Runs that continue with other data, another tokenizer or another model's record: nothing old is trained on without a word."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tepo_megatron.tasks.data.builtin import resolve_model_path
from tests.unit.run.conftest import Killed

Make = Callable[..., Any]

OVERLAP = {"train": {"steps": 2, "save_every": 1, "schedule": "overlap"}, "rollout.uncorrected": True}
SYNC: dict[str, Any] = {"train": {"steps": 2, "save_every": 1}}
SCHEDULES = pytest.mark.parametrize("schedule", [SYNC, OVERLAP], ids=["sync", "overlap"])


def write_problems(path: Path, prompts: Sequence[str], name: str = "p", **fields: Any) -> Path:
    rows = [{"id": f"{name}{number}", "prompt": prompt, "answer": "7", **fields} for number, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Kills:
    """In step 2: its rollouts are in the journal, and the newest checkpoint is that of step 1."""

    def on_rollouts(self, step: int, rollouts: object) -> None:
        if step == 2:
            raise Killed


def kill(run: Any) -> None:
    with pytest.raises(Killed):
        run.run()


OLD, NEW = [f"{number}+1=" for number in range(10, 30)], [f"{number}-1=" for number in range(10, 30)]


@pytest.mark.parametrize(("schedule", "name"), [(SYNC, "p"), (OVERLAP, "p"), (OVERLAP, "other")])
def test_a_run_resumed_with_other_data_samples_them(
    schedule: dict[str, Any], name: str, reference_run: Make, tmp_path: Path
) -> None:
    data = write_problems(tmp_path / "train.jsonl", OLD)
    settings = {**schedule, "data.train": str(data)}
    kill(reference_run(settings, callbacks=[Kills()]))
    write_problems(data, NEW, name=name)
    settings = {**settings, "train": {**settings["train"], "resume": True, "allow_change": ["data.train"]}}
    run = reference_run(settings).run()
    encode = run.loop.rank0._inputs.tokenizer.prompt_ids
    asked = {tuple(encode(prompt)) for prompt in NEW}
    assert {tuple(rollout.prompt_ids.tolist()) for rollout in run.rollouts[2]} <= asked
    assert {rollout.problem_id for rollout in run.rollouts[2]} <= {f"{name}{number}" for number in range(20)}
    assert not any("nothing differs in data.train" in text for text in run.said)


@SCHEDULES
def test_rollouts_of_a_problem_whose_metadata_changed_are_drawn_again(
    schedule: dict[str, Any], reference_run: Make, tmp_path: Path
) -> None:
    """The metadata decide what a verifier says, and the order of the problems does not depend on them."""
    data = write_problems(tmp_path / "train.jsonl", OLD, level=1)
    settings = {**schedule, "data.train": str(data)}
    kill(reference_run(settings, callbacks=[Kills()]))
    settings = {**settings, "train": {**settings["train"], "resume": True}}
    taken = "step 1 takes the rollouts that were drawn before the interruption"
    again = reference_run(settings, callbacks=[Kills()])
    kill(again)
    assert any(text.startswith(taken) for text in again.said)
    write_problems(data, OLD, level=2)
    assert not any(text.startswith(taken) for text in reference_run(settings).run().said)


@SCHEDULES
def test_another_end_token_of_generation_config_is_another_run(
    schedule: dict[str, Any], reference_run: Make, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(resolve_model_path("builtin:tiny"), tmp_path / "model"))
    data = write_problems(tmp_path / "train.jsonl", OLD)
    settings = {**schedule, "model.path": str(model), "data.train": str(data)}
    kill(reference_run(settings, callbacks=[Kills()]))
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 14], "transformers_version": "5"}')
    train = {**settings["train"], "resume": True}
    with pytest.raises(ValueError, match=r"generation_config.json: \[\] -> \[2, 14\]\n.*allow_change=\[model.path\]"):
        reference_run({**settings, "train": train}).run()
    run = reference_run({**settings, "train": {**train, "allow_change": ["model.path"]}}).run()
    assert not any("takes the rollouts" in text for text in run.said)


@pytest.fixture
def other_models_record(reference_run: Make, tmp_path: Path) -> Path:
    """Of a model of the same architecture, with other weights."""
    model = Path(shutil.copytree(resolve_model_path("builtin:tiny"), tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    save_file({name: weight * 2 for name, weight in weights.items()}, model / "model.safetensors")
    data = write_problems(tmp_path / "train.jsonl", OLD)
    settings = {"model.path": str(model), "data.train": str(data), "rollout.record": True, "output": str(tmp_path / "recorded")}
    return reference_run(settings).run().config.output / "rollouts"


def test_another_models_record_is_refused_or_said(other_models_record: Path, reference_run: Make) -> None:
    settings = {"rollout.replay": str(other_models_record)}
    run = reference_run(settings)
    with pytest.raises(ValueError, match=r"other weights than this run starts with .* rollout.replay_weights=any"):
        run.run()
    assert not run.noted("update")
    allowed = reference_run({**settings, "rollout.replay_weights": "any"}).run()
    assert [text for text in allowed.said if "other weights" in text] == [text for text in allowed.said if "step 1:" in text]
    assert allowed.noted("row") == ["row 0", "row 1", "row 2"]


def test_a_replay_says_once_when_its_weights_leave_the_recorded_ones(reference_run: Make, tmp_path: Path) -> None:
    sampling = {"temperature": 2.0, "max_new_tokens": 8}  # the first step has a gradient: a group's rewards differ
    settings = {"train.steps": 3, "rollout": {"samples_per_prompt": 8, "sampling": sampling}}
    recorded = reference_run({**settings, "rollout.record": True, "output": str(tmp_path / "recorded")}).run()
    assert len({version.digest for rollouts in recorded.rollouts.values() for _, version in rollouts[0].versions}) == 3
    replay = {**settings, "rollout.replay": str(recorded.config.output / "rollouts")}
    for lr, said in ((1e-3, []), (2e-3, ["step 2"])):
        replayed = reference_run({**replay, "optimizer.lr": lr, "output": str(tmp_path / f"{lr}")}).run()
        assert [text.partition(":")[0] for text in replayed.said if "other weights" in text] == said

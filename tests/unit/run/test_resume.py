"""What a run goes on from, what it says of it, and what it refuses before anything is started."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from tepo_megatron.cli import train as train_command
from tepo_megatron.cli.main import app
from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import ConfigError, dump_resolved, load_run
from tepo_megatron.core.problem import Problem
from tepo_megatron.run.output.resume import find_checkpoint
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.trainer.run_compatibility import describe_run
from tests.support.checkpoints import DAMAGES, ONLY_BY_READING, make_whole
from tests.support.fake_sampling import FakeFleet, FakeVerifiers, collector

MODEL = resolve_model_path("builtin:tiny")


def config(out: Path, *overrides: str) -> RunConfig:
    return load_run(None, [f"output={out}", "train.resume=true", *overrides])


def save(out: Path, *steps: int, overrides: tuple[str, ...] = (), **state: Any) -> list[Path]:
    """Checkpoints of a run with these overrides."""
    identity = describe_run(load_run(None, [f"output={out}", *overrides]), MODEL)
    return [make_whole(out / "checkpoints", step, identity=identity, **state) for step in steps]


QUICK = [kind for kind in DAMAGES if kind not in ONLY_BY_READING]


@pytest.mark.parametrize("kind", QUICK)
def test_a_damaged_newest_is_named_and_the_next_is_taken(kind: str, tmp_path: Path) -> None:
    _, whole, newest = save(tmp_path, 2, 4, 6)
    damage, words = DAMAGES[kind]
    damage(newest, whole)
    run = config(tmp_path)
    found = find_checkpoint(run, MODEL)
    assert found.folder == whole
    said = found.messages(run)
    assert said[0].startswith("step_000006 is damaged (")
    assert words in said[0]
    assert said[0].endswith("; resuming from step_000004")
    assert said[1] == f"resumed from {whole} at step 4"
    assert not found.accept(run)
    assert sorted(path.name for path in newest.parent.iterdir()) == ["step_000002", "step_000004", "step_000006.damaged"]


def test_none_whole_is_one_sentence_with_every_damage(tmp_path: Path) -> None:
    for folder in save(tmp_path, 2, 4):
        (folder / "state.json").unlink()
    with pytest.raises(ValueError, match=r"is whole: step_000004 is damaged .*; step_000002 is damaged .*Restore one"):
        find_checkpoint(config(tmp_path), MODEL)
    with pytest.raises(ValueError, match="has no finished checkpoint"):
        find_checkpoint(config(tmp_path / "other"), MODEL)


def test_an_older_one_is_chosen_and_the_future_is_set_aside(tmp_path: Path) -> None:
    _, chosen, *_ = save(tmp_path, 2, 4, 6, 8)
    run = config(tmp_path, "train.resume_from=step_000004")
    assert find_checkpoint(run, MODEL).folder == chosen
    assert find_checkpoint(config(tmp_path, f"train.resume_from={chosen}"), MODEL).folder == chosen
    find_checkpoint(run, MODEL).accept(run)
    present = ["step_000002", "step_000004", "step_000006.abandoned", "step_000008.abandoned"]
    assert sorted(path.name for path in chosen.parent.iterdir()) == present


def test_a_choice_that_cannot_be_is_refused(tmp_path: Path) -> None:
    folder, _ = save(tmp_path, 2, 4)
    with pytest.raises(ValueError, match=r"step_000003 is not there; in .* there are step_000002, step_000004"):
        find_checkpoint(config(tmp_path, "train.resume_from=step_000003"), MODEL)
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"step_000002 is damaged \(manifest.json is missing\); choose another"):
        find_checkpoint(config(tmp_path, "train.resume_from=step_000002"), MODEL)
    for wrong in ("train.resume_from=newest", "train.resume_from=step_000002.partial"):
        with pytest.raises(ConfigError, match="is no checkpoint"):
            config(tmp_path, wrong)
    with pytest.raises(ConfigError, match="has no effect without resume"):
        load_run(None, ["train.resume_from=step_000002"])


def test_steps_that_are_done_are_refused(tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 6)
    with pytest.raises(ValueError, match=r"train\.steps = 5, but .*step_000006 has 6 already"):
        find_checkpoint(config(tmp_path, "train.steps=5"), MODEL)
    # saved its last step, and was killed before it exported
    assert find_checkpoint(config(tmp_path, "train.steps=6"), MODEL).step == 6
    (tmp_path / "curves.png").touch()
    with pytest.raises(ValueError, match=r"the run has reached train\.steps = 6, and is complete"):
        find_checkpoint(config(tmp_path, "train.steps=6"), MODEL)
    os.utime(tmp_path / "curves.png", (0, 0))  # of an earlier end, before the steps were raised
    assert find_checkpoint(config(tmp_path, "train.steps=6"), MODEL).step == 6
    with pytest.raises(ValueError, match="is complete"):
        find_checkpoint(config(tmp_path / "new", f"train.resume_from={folder}", "train.steps=6"), MODEL)


def test_differences_are_refused_together_or_said(tmp_path: Path) -> None:
    save(tmp_path, 6)
    changed = ("optimizer.lr=2e-5", "rollout.sampling.temperature=0.5", "engine.parallel.dp=2")
    with pytest.raises(ValueError, match="would not be the same run") as caught:
        find_checkpoint(config(tmp_path, *changed), MODEL)
    assert "  optimizer.lr: 1e-06 -> 2e-05\n" in str(caught.value)
    assert "  rollout.sampling.temperature: 1.0 -> 0.5\n" in str(caught.value)
    assert "engine.parallel" not in str(caught.value)
    allowed = "train.allow_change=[optimizer, rollout.sampling.temperature, seed]"
    run = config(tmp_path, *changed, allowed)
    said = find_checkpoint(run, MODEL).messages(run)
    assert "differs from the checkpoint's run: optimizer.lr: 1e-06 -> 2e-05" in said
    assert "differs from the checkpoint's run: engine.parallel.dp: 1 -> 2" in said
    assert said[-1] == "train.allow_change: nothing differs in seed"


def test_a_checkpoint_of_the_first_format_is_taken_with_a_sentence(tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 6)
    (folder / "manifest.json").unlink()
    (folder / "state.json").write_text(json.dumps({"step": 6, "updates": 24, "sampler": {}}))
    run = config(tmp_path)
    assert find_checkpoint(run, MODEL).messages(run)[-1] == (
        "step_000006 has no manifest.json, as an earlier version wrote it: neither its bytes nor its run could be checked"
    )
    (folder / "state.json").write_text(json.dumps({"step": 6, "updates": -24}))
    with pytest.raises(ValueError, match="updates = -24"):
        find_checkpoint(run, MODEL)


def test_older_configurations_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 6)
    first = load_run(None, [f"output={tmp_path}"])
    (tmp_path / "resolved.yaml").write_text(dump_resolved(first))
    runs = [config(tmp_path), config(tmp_path), config(tmp_path, "train.steps=200")]
    for run in runs:
        find_checkpoint(run, MODEL).accept(run)
    assert load_run(tmp_path / "resolved.yaml") == runs[-1]
    assert load_run(tmp_path / "resolved.1.yaml") == first
    assert load_run(tmp_path / "resolved.2.yaml") == runs[0]
    assert not (tmp_path / "resolved.3.yaml").exists()


def test_the_order_of_problems_continues_or_starts_again_if_that_is_allowed(tmp_path: Path) -> None:
    def order(answers: str, *overrides: str) -> Any:
        problems = [Problem(id=answer, prompt=f"{answer}?", answer=answer) for answer in answers]
        return collector(config(tmp_path, *overrides), problems, FakeVerifiers(0, lambda problem, text: 0.0), FakeFleet(0))

    drawn = order("abc", "seed=1")
    drawn._buffer.order.next(2)
    state = {"sampler": drawn.state()}
    allow_seed, allow_data = "train.allow_change=[seed]", "train.allow_change=[data]"
    same = order("abc", "seed=1", allow_seed)
    assert (same.restore(state), same.state()) == ([], drawn.state())
    for answers, seed, allowed, problem in (("ax", 1, allow_seed, "not those of the"), ("abc", 2, allow_data, "has seed 1")):
        with pytest.raises(ValueError, match=problem):
            order(answers, f"seed={seed}", allowed).restore(state)
    other = order("ax", "seed=1", allow_data)
    assert (other.restore(state), other.state()["position"]) == (["data.train"], 0)
    assert order("abc", "seed=2", allow_seed).restore(state) == ["seed"]
    with pytest.raises(ValueError, match="was not written by a training run"):
        same.restore({})


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    """Of the same architecture, with other weights."""
    folder = shutil.copytree(MODEL, tmp_path / "other")
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight * 2 for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume", "model.path=OTHER"], "model.path's weights, which a resumed run does not train: \"builtin:tiny ("),
        (["train.resume=auto", "model.path=OTHER"], "train.allow_change=[model.path]"),
        (["--resume", "--from", "step_000005"], "step_000005 is not there"),
        (["--from", "step_000006"], "has no effect without resume"),
    ],
)
def test_the_command_refuses_before_it_starts_anything(
    arguments: list[str], words: str, tmp_path: Path, other_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [argument.replace("OTHER", str(other_model)) for argument in arguments]
    save(tmp_path, 6)
    (tmp_path / "resolved.yaml").write_text("as it was")
    (tmp_path / "run.yaml").write_text(f"output: {tmp_path}\n")
    monkeypatch.setattr(train_command, "start_ranks", lambda *given: pytest.fail(f"started ranks: {given}"))
    done = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml"), *arguments])
    assert (done.exit_code, done.stdout) == (1, "")
    assert words in done.stderr
    assert (tmp_path / "resolved.yaml").read_text() == "as it was"

"""Whole runs on the reference trainer and sampler that end with an error: what was trained is saved before."""

import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tepo_megatron.errors import is_ours
from tepo_megatron.run.loop import _WorkFailed
from tepo_megatron.runtime.preemption import StopRequested
from tepo_megatron.sampler.fleet.external import shared_key
from tests.support.reference_sampler import ReferenceSampler
from tests.support.reference_trainer import ReferenceCheckpoints, ReferenceTrainer

FAILED = ".{} raised OSError: no upload in on_checkpoint at step {}"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (OSError("the judge does not answer"), "4 of 4 rewards failed, .* the judge does not answer"),
        (-1.0, "a reward of the step is -1, and .*divide_by_mean"),
    ],
)
def test_steps_before_an_error_of_the_rewards_are_saved(
    fault: OSError | float, says: str, reference_run: Any, tmp_path: Path
) -> None:
    """The failed step, which is only too small to be trained on, is sampled and rewarded again."""
    gone = tmp_path / "gone"

    def judge(problem: Any, response: str) -> float:
        if gone.exists():
            if isinstance(fault, OSError):
                raise fault
            return fault
        return len(response) % 3

    class Ends:
        def on_step_end(self, step: int, row: Any) -> None:
            if step == 2:
                gone.touch()

        def on_checkpoint(self, step: int, folder: Path) -> None:
            raise OSError("no upload")

    train = {"steps": 3, "save_every": 0, "resume": "auto"}
    settings = {"train": train, "reward.max_failed": 1.0, "objective.preset": "max_rl"}
    whole = reference_run({**settings, "output": str(tmp_path / "whole")}, reward=judge).run()
    run = reference_run(settings, callbacks=[Ends()], reward=judge)
    with pytest.raises(RuntimeError, match=says) as caught:
        run.run()
    assert is_ours(caught.value)
    assert run.noted("save ") == ["save 2"]
    assert any(re.search(says, text) and text.endswith("; the run saves and ends") for text in run.said)
    assert "an error ends the run: saved step_000002; continue with the same command and --resume, without --from" in run.said
    assert FAILED.format("Ends", 2) in run.said[-1]
    gone.unlink()
    assert reference_run(settings, reward=judge).run().digest == whole.digest


def test_a_callback_that_fails_in_the_save_of_a_stopped_run_is_said(reference_run: Any) -> None:
    class Uploads:
        def on_checkpoint(self, step: int, folder: Path) -> None:
            raise OSError("no upload")

    run = reference_run({"train": {"steps": 3, "save_every": 0}}, callbacks=[Uploads()], stops_at=12)
    with pytest.raises(StopRequested):
        run.run()
    assert FAILED.format("Uploads", run.loop.step) in run.said[-1]


def test_an_error_is_said_before_a_save_under_way_fails(
    reference_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(problem: Any, response: str) -> float:
        if (tmp_path / "gone").exists():
            raise OSError("the judge does not answer")
        return len(response) % 3

    class Ends:
        def on_step_end(self, step: int, row: Any) -> None:
            if step == 2:
                (tmp_path / "gone").touch()
                monkeypatch.setattr(ReferenceCheckpoints, "finish", Mock(side_effect=RuntimeError("no room")))

    run = reference_run({"train": {"steps": 3, "save_every": 2}, "reward.max_failed": 1.0}, callbacks=[Ends()], reward=judge)
    with pytest.raises(RuntimeError, match="no room"):
        run.run(lambda loop: setattr(loop, "saves_beside_training", True))
    assert any(re.search("the judge does not answer.*; the run saves and ends", text) for text in run.said)


def test_steps_before_rollouts_that_make_no_batch_are_saved(reference_run: Any, tmp_path: Path) -> None:
    """The resumed run asks the corrected function again."""
    path, parts = tmp_path / "own.py", "{'right': 1.0, 'tool' if sampler.step == 3 and at else 'short': at % 2}"
    text = (
        "from dataclasses import replace\n"
        "def draw(problems, sampler):\n"
        "    drawn = [rollout for group in sampler.sample(problems) for rollout in group]\n"
        f"    return [replace(rollout, reward=1.0, reward_parts={parts}) for at, rollout in enumerate(drawn)]\n"
    )
    path.write_text(text)
    settings = {"train": {"steps": 3, "save_every": 0, "resume": "auto"}, "objective.preset": "gdpo"}
    run = reference_run({**settings, "rollout.collect": f"{path}:draw"})
    with pytest.raises(ValueError, match=r"has the reward's components .* the same") as caught:
        run.run()
    assert is_ours(caught.value)
    assert run.noted("save ") == ["save 2"]
    path.write_text(text.replace("== 3", "== 9"))
    assert reference_run({**settings, "rollout.collect": f"{path}:draw"}).run().noted("row ") == ["row 3"]


REFUSED: dict[str, dict[str, Any]] = {
    "sync": {},
    "filters": {"rollout.filter_groups": {"max_batches": 9}},
    "partial": {"rollout.partial": True, "rollout.oversample": 2.0, "rollout.uncorrected": True},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_rollouts_that_were_refused_are_drawn_again_after_a_resume(
    kind: str, reference_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps before are saved. What the condemned servers drew ahead is not trained on either."""
    settings = {"train": {"steps": 4, "save_every": 0, "resume": "auto"}, **REFUSED[kind]}
    whole = reference_run({**settings, "output": str(tmp_path / "whole")}).run()
    draw_token = ReferenceSampler.draw_token

    def draw_wrongly(self: Any, draw: Any, sampling: Any) -> Any:
        result = draw_token(self, draw, sampling)
        if self._version.step in (1, 2):
            draw.logprobs[-1] -= 9
        return result

    run = reference_run(settings)
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceSampler, "draw_token", draw_wrongly)
        with pytest.raises(RuntimeError, match="not drawn from the trainer's policy"):
            run.run()
    assert run.noted("save ", "row ")[-1] == run.noted("row ")[-1].replace("row", "save")
    assert any("its rollouts were refused" in text for text in run.said)
    resumed = reference_run(settings).run()
    assert resumed.noted("row ")[-1] == "row 4"
    assert resumed.digest == whole.digest


def test_steps_before_a_failed_canary_are_saved(reference_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt_logprobs = ReferenceSampler.prompt_logprobs

    def answer_wrongly(self: Any, prompt: Any) -> Any:
        shift = 9.0 if self._version.step == 2 else 0.0
        return {url: [value - shift for value in values] for url, values in prompt_logprobs(self, prompt).items()}

    settings = {"train": {"steps": 3, "save_every": 0, "resume": "auto"}}
    run = reference_run(settings)
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceSampler, "prompt_logprobs", answer_wrongly)
        with pytest.raises(RuntimeError, match="do not compute the same"):
            run.run()
    assert run.noted("save ", "row ") == ["row 0", "row 1", "save 2"]
    assert reference_run(settings).run().noted("row ") == ["row 2", "row 3"]


@pytest.mark.parametrize("is_sentence", [True, False])
@pytest.mark.parametrize(
    ("call", "fails", "saved"),
    [
        *(("weights 2", "revive", "save 2"), ("wake", "revive", "save 2"), ("sleep", "revive", "save 1")),
        ("", "update_weights_from_tensors", "save 2"),
    ],
)
def test_steps_before_servers_that_cannot_be_restarted_or_updated_are_saved(
    call: str, fails: str, saved: str, is_sentence: bool, reference_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canary's collective comes before the error: the other ranks take part in it, and end with an error of its kind."""

    def fail(*_: object) -> None:
        if is_sentence:
            shared_key(Path("/dev/null/registry"))  # any sentence
        os.listdir("/dev/null/registry")

    class Kills:
        def on_step_end(self, step: int, row: Any) -> None:
            if step == 1:
                run.deaths += [call]
                monkeypatch.setattr(ReferenceSampler, fails, fail)

    broadcast = Mock(side_effect=lambda value: value)
    monkeypatch.setattr(ReferenceTrainer, "broadcast_from_root", broadcast)
    shared = {"rollout.server.placement": "colocated"}
    run = reference_run({"train": {"steps": 3, "save_every": 0}, **shared}, callbacks=[Kills()])
    with pytest.raises((RuntimeError, NotADirectoryError), match="/dev/null/registry") as own:
        run.run()
    assert run.noted("save ") == [saved]
    (broadcast.return_value,) = (call.args[0] for call in broadcast.call_args_list if "/dev/null" in str(call))
    broadcast.side_effect = run.loop.rank0 = None
    with pytest.raises(_WorkFailed) as other:
        run.loop.checked(print)
    assert is_ours(own.value) == isinstance(other.value.error, RuntimeError) == is_sentence

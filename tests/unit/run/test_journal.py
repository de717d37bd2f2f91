"""The journal and the records of rollouts: what is taken was drawn by the same weights, settings and data, or it is said."""

import errno
import multiprocessing
import re
import resource
import shutil
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tepo_megatron.config.load import load_run
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.sampling import journal as journals
from tepo_megatron.run.sampling.journal import Journal
from tepo_megatron.runtime.preemption import StopRequested
from tepo_megatron.sampler.rollout_file import Record, record_path, write_rollouts
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.trainer.checkpoint_folder import checkpoint_name
from tests.support.checkpoints import make_whole
from tests.support.data_files import write_jsonl
from tests.support.fake_sampling import Killed
from tests.support.processes import files_of_at_most
from tests.support.programs import TIMEOUT_S

PROBLEMS = [Problem("p0", "1+1=", "2"), Problem("p1", "1+2=", "3")]
PROMPTS = [(1, 2), (3, 4)]
STEP = 3
VERSION = WeightsVersion(STEP, "ab")


def rollouts(step: int = STEP) -> list[Rollout]:
    version = WeightsVersion(step, "ab")
    return [
        Rollout(PROBLEMS[at // 2].id, at // 2, PROMPTS[at // 2], (5, 6 + at), (-0.1, -1 / 3), "stop", version, "é", at)
        for at in range(4)
    ]


class Said(list[str]):
    def __call__(self, *words: object) -> None:
        self.append(" ".join(map(str, words)))


def journal(folder: Path, said: Said | None = None, *overrides: str) -> Journal:
    said = Said() if said is None else said
    size = ("train.minibatches=2", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2")
    return Journal(load_run(None, [f"output={folder}", *size, *overrides]), said, said)


def identity(of: Journal, problems: Any = PROBLEMS, prompts: Any = PROMPTS, version: Any = VERSION) -> str:
    return of.identity(problems, prompts, version)


def find(of: Journal, drawn_by: str) -> Record | None:
    return of.find(STEP, lambda _: drawn_by)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_is_found(tmp_path: Path) -> None:
    """Also with settings that decide nothing, and unless it is switched off."""
    said = Said()
    first = journal(tmp_path, said)
    assert find(first, identity(first)) is None
    first.write(STEP, rollouts(), identity(first), failed_rewards=2)
    assert said == []
    again = journal(tmp_path, said, "reward.workers=3", "optimizer.lr=1", "rollout.server.count=2", "rollout.record=true")
    assert find(again, identity(again)) == Record(rollouts(), identity(first), 2)
    assert said == [
        f"step 3 takes the rollouts that were drawn before the interruption: {record_path(tmp_path / 'journal', 3)}"
    ]
    off = journal(tmp_path, None, "rollout.journal=false")
    assert find(off, identity(first)) is None
    off.write(STEP + 1, rollouts(), identity(off), 0)
    assert names(tmp_path / "journal") == ["step_0000003.jsonl"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["seed=1"],
        ["rollout.sampling.temperature=0.5"],
        ["rollout.sampling.max_new_tokens=7"],
        ["rollout.samples_per_prompt=4", "rollout.prompts_per_step=1"],
        ["reward.verifier=exact"],
        ["reward.failed_reward=-1"],
        ["reward.weights.correct=1"],
        ["rollout.server.dtype=float32"],
        ["rollout.server.head_dtype=float32"],
        ["rollout.server.routing_replay=true"],
    ],
    ids=str,
)
def test_rollouts_of_other_settings_are_not_taken(overrides: list[str], tmp_path: Path) -> None:
    first, said = journal(tmp_path, None, "model.dtype=bfloat16"), Said()
    first.write(STEP, rollouts(), identity(first), 0)
    other = journal(tmp_path, said, "model.dtype=bfloat16", *overrides)
    assert find(other, identity(other)) is None
    assert "was drawn by other weights or with other settings" in said[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"version": WeightsVersion(STEP, "ac")},
        {"version": WeightsVersion(STEP + 1, "ab")},
        {"problems": PROBLEMS[::-1]},
        {"problems": [PROBLEMS[0], replace(PROBLEMS[1], answer="4")]},
        {"problems": [PROBLEMS[0], replace(PROBLEMS[1], metadata={"level": 4})]},
        {"prompts": [(1, 2), (3, 5)]},
    ],
)
def test_rollouts_of_other_weights_or_prompts_are_not_taken(changes: dict[str, Any], tmp_path: Path) -> None:
    first = journal(tmp_path)
    first.write(STEP, rollouts(), identity(first), 0)
    assert find(first, identity(first, **changes)) is None


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Journal, Said, bytes]:
    """A journal with an entry, what it says, and the entry's file."""
    said = Said()
    one = journal(tmp_path_factory.mktemp("run"), said)
    one.write(STEP, rollouts(), identity(one), 1)
    return one, said, record_path(one.folder, STEP).read_bytes()


@given(data=st.data())
def test_a_damaged_entry_is_never_taken(data: st.DataObject, written: tuple[Journal, Said, bytes]) -> None:
    """Any byte changed, any piece cut out: then the step is sampled again, and that is said."""
    first, said, whole = written
    path = record_path(first.folder, STEP)
    at = data.draw(st.integers(0, len(whole) - 1))
    length = data.draw(st.integers(0, 40))
    put = data.draw(st.binary(max_size=2))
    damaged = whole[:at] + put + whole[at + length :]
    path.write_bytes(damaged)
    said.clear()
    found = find(first, identity(first))
    if found is None:
        assert damaged != whole
        (message,) = said
        assert str(path) in message
        assert message.startswith("step 3 is sampled again")
    else:  # no damage to what it says, such as a blank for a blank
        assert found == Record(rollouts(), identity(first), 1)
        assert damaged.split() == whole.split()


@pytest.mark.parametrize("kept", [True, False])
def test_records_are_kept_beside_it_without_a_second_copy(kept: bool, tmp_path: Path) -> None:
    for attempt in range(3):  # a step that is done again
        one = journal(tmp_path, None, f"rollout.journal={kept}", "rollout.record=true")
        if find(one, identity(one)) is None:
            one.write(STEP, rollouts(), identity(one), 0)
        if attempt == 1:
            (tmp_path / "rollouts" / "step_0000003.jsonl").unlink()
    assert Record.read(tmp_path / "rollouts", STEP).rollouts == rollouts()
    assert names(tmp_path / "rollouts") == ["step_0000003.jsonl"]
    if kept:
        assert record_path(tmp_path / "rollouts", STEP).stat().st_nlink == 2
        assert names(tmp_path / "journal") == ["step_0000003.jsonl"]


def test_entries_are_kept_since_the_oldest_checkpoint_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = journal(tmp_path)

    def write(*steps: int) -> list[int]:
        for step in steps:
            one.write(step, rollouts(step), "", 0)
        return [int(name[5:12]) for name in names(tmp_path / "journal")]

    assert write(0, 1, 2) == [0, 1, 2]
    for step in (2, 4):
        make_whole(tmp_path / "checkpoints", step)
        assert write(step + 1)[0] == 2
    monkeypatch.setattr(journals, "MAX_BYTES", 2 * record_path(tmp_path / "journal", 5).stat().st_size + 20)
    assert write(6, 7) == [5, 6, 7]
    assert write(4) == [4, 6, 7]  # resumed or rolled back: those of before the new one go first
    assert write(5) == [4, 5, 7]
    assert write(6, 7) == [5, 6, 7]
    monkeypatch.setattr(journals, "MAX_BYTES", 0)
    assert write(8) == [8]


def test_a_disk_that_is_full_or_away_costs_the_entry_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said()
    one = journal(tmp_path, said)
    with files_of_at_most(100):
        one.write(STEP, rollouts(), identity(one), 0)
    assert len(said) == 1
    assert "step_0000003.jsonl [Errno 27]" in said[0]
    assert names(tmp_path / "journal") == []
    one.write(STEP, rollouts(), identity(one), 0)
    with monkeypatch.context() as away:
        away.setattr(Path, "exists", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
        assert find(one, identity(one)) is None
    assert re.match("step 3 is sampled again.*Stale file handle", said[-1])
    assert find(one, identity(one)) == Record(rollouts(), identity(one))


def write_until_killed(folder: Path, room: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel kills who writes beyond the limit, within the write
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    for step in range(2):
        write_rollouts(folder, step, 50 * rollouts())


@pytest.mark.parametrize("room", [1, 5000])
def test_a_writer_that_is_killed_within_a_write_leaves_the_older_entry(room: int, tmp_path: Path) -> None:
    write_rollouts(tmp_path, 0, 50 * rollouts())
    writer = multiprocessing.get_context("fork").Process(target=write_until_killed, args=(tmp_path, room))
    writer.start()
    writer.join(TIMEOUT_S)
    assert writer.exitcode == -signal.SIGXFSZ
    assert len(Record.read(tmp_path, 0).rollouts) == 200
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".jsonl"] == ["step_0000000.jsonl"]


OVERLAP = {"train": {"steps": 2, "save_every": 1, "schedule": "overlap"}, "rollout.uncorrected": True}
SYNC: dict[str, Any] = {"train": {"steps": 2, "save_every": 1}}


def write_problems(path: Path, prompts: Sequence[str], name: str = "p", **fields: Any) -> str:
    rows = [{"id": f"{name}{number}", "prompt": prompt, "answer": "7", **fields} for number, prompt in enumerate(prompts)]
    return write_jsonl(path, rows)


OLD, NEW = [f"{number}+1=" for number in range(10, 30)], [f"{number}-1=" for number in range(10, 30)]


@pytest.mark.parametrize(
    ("schedule", "prompts", "name", "level"),
    [
        *((schedule, *changes) for schedule in (SYNC, OVERLAP) for changes in ((NEW, "p", 1), (OLD, "p", 2))),
        (OVERLAP, NEW, "other", 1),  # finds an entry's groups by their problems
    ],
)
def test_a_run_resumed_with_other_data_samples_them(
    schedule: dict[str, Any], prompts: list[str], name: str, level: int, reference_run: Any, tmp_path: Path
) -> None:
    """Also if only metadata differ, which may decide what a verifier says, and not the order of the problems."""
    data = write_problems(tmp_path / "train.jsonl", OLD, level=1)
    settings = {**schedule, "data.train": data}
    with pytest.raises(Killed):  # its rollouts are in the journal, and the newest checkpoint is that of step 1
        reference_run(settings, killed_at="rollouts 2").run()
    write_problems(Path(data), prompts, name=name, level=level)
    changed = [] if prompts == OLD else ["data.train"]
    run = reference_run({**settings, "train": {**settings["train"], "resume": True, "allow_change": changed}}).run()
    encode = run.loop.rank0._inputs.tokenizer.prompt_ids
    asked = {tuple(encode(prompt)) for prompt in prompts}
    assert {tuple(rollout.prompt_ids.tolist()) for rollout in run.rollouts[2]} <= asked
    assert {rollout.problem_id for rollout in run.rollouts[2]} <= {f"{name}{number}" for number in range(20)}
    assert not any("nothing differs in data.train" in text or "takes the rollouts" in text for text in run.said)


def test_another_end_token_of_generation_config_is_another_run(reference_run: Any, tmp_path: Path) -> None:
    model = Path(shutil.copytree(resolve_model_path("builtin:tiny"), tmp_path / "model"))
    data = write_problems(tmp_path / "train.jsonl", OLD)
    settings = {**SYNC, "model.path": str(model), "data.train": data}
    with pytest.raises(Killed):
        reference_run(settings, killed_at="rollouts 2").run()
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 14], "transformers_version": "5"}')
    train = {**settings["train"], "resume": True}
    with pytest.raises(ValueError, match=r"generation_config.json: \[\] -> \[2, 14\]\n.*allow_change=\[model.path\]"):
        reference_run({**settings, "train": train}).run()
    run = reference_run({**settings, "train": {**train, "allow_change": ["model.path"]}}).run()
    assert not any("takes the rollouts" in text for text in run.said)


def test_another_models_record_is_refused_or_said(reference_run: Any, tmp_path: Path) -> None:
    """Of a model of the same architecture, with other weights."""
    model = Path(shutil.copytree(resolve_model_path("builtin:tiny"), tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    save_file({name: weight * 2 for name, weight in weights.items()}, model / "model.safetensors")
    data = write_problems(tmp_path / "train.jsonl", OLD)
    recorded = tmp_path / "recorded"
    reference_run({"model.path": str(model), "data.train": data, "rollout.record": True, "output": str(recorded)}).run()
    settings = {"rollout.replay": str(recorded / "rollouts")}
    run = reference_run(settings)
    with pytest.raises(ValueError, match=r"other weights than this run starts with .* rollout.replay_weights=any"):
        run.run()
    assert not run.noted("update")
    allowed = reference_run({**settings, "rollout.replay_weights": "any"}).run()
    assert [text for text in allowed.said if "other weights" in text] == [text for text in allowed.said if "step 1:" in text]
    assert allowed.noted("row") == ["row 0", "row 1", "row 2"]


def test_a_replay_says_once_when_its_weights_leave_the_recorded_ones(reference_run: Any, tmp_path: Path) -> None:
    # Each step has a gradient: a group's rewards differ.
    settings = {"train.steps": 3, "rollout": {"samples_per_prompt": 4, "sampling": {"temperature": 2.0, "max_new_tokens": 4}}}
    recorded = reference_run({**settings, "rollout.record": True, "output": str(tmp_path / "recorded")}).run()
    assert len({version.digest for rollouts in recorded.rollouts.values() for _, version in rollouts[0].versions}) == 3
    replay = {**settings, "rollout.replay": str(recorded.config.output / "rollouts")}
    for lr, said in ((1e-3, []), (2e-3, ["step 2"])):
        replayed = reference_run({**replay, "optimizer.lr": lr, "output": str(tmp_path / f"{lr}")}).run()
        assert [text.partition(":")[0] for text in replayed.said if "other weights" in text] == said


@pytest.mark.parametrize("within_step", [False, True])
def test_a_run_that_leaves_a_replay_goes_on_in_the_order_of_its_problems(
    within_step: bool, reference_run: Any, tmp_path: Path
) -> None:
    train, saved = {"steps": 3, "save_every": 0}, 1 if within_step else 2
    whole = reference_run({"train": train, "rollout.record": True, "output": str(tmp_path / "whole")}).run()
    settings = {"train": {**train, "steps": 2}, "rollout.replay": str(tmp_path / "whole" / "rollouts")}
    replayed = reference_run({**settings, "output": str(tmp_path / "replayed")}).run()
    stopped = reference_run(settings, stops_at=replayed.calls.index("rollouts 2") if within_step else -1)
    with pytest.raises(StopRequested) if within_step else nullcontext():
        stopped.run()
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == [checkpoint_name(saved)]
    resumed = reference_run({"train": {**train, "resume": True, "allow_change": ["rollout.replay"]}}).run()
    assert resumed.drawn == whole.drawn[2 * saved :]

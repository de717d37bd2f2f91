"""The journal of rollouts: what is found in it is what was drawn, by the same weights and settings, or nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.sampling import journal as journals
from tepo_megatron.run.sampling.journal import Journal
from tepo_megatron.sampler.rollout_file import Record, read_record, record_path
from tests.support.disks import files_of_at_most
from tests.support.programs import TIMEOUT_S

PROBLEMS = [Problem("p0", "1+1=", "2"), Problem("p1", "1+2=", "3")]
PROMPTS = [(1, 2), (3, 4)]
STEP = 3
VERSION = WeightsVersion(STEP, "ab")


def config(folder: Path, **changes: Any) -> RunConfig:
    document: dict[str, Any] = {"output": str(folder), "train": {"minibatches": 2}}
    document["rollout"] = {"prompts_per_step": 2, "samples_per_prompt": 2}
    for path, value in changes.items():
        section, _, name = path.partition("__")
        if name:
            inner = document.setdefault(section, {})
            *outer, last = name.split("__")
            for each in outer:
                inner = inner.setdefault(each, {})
            inner[last] = value
        else:
            document[path] = value
    return RunConfig.model_validate(document)


def rollouts(step: int = STEP) -> list[Rollout]:
    return [
        Rollout(
            PROBLEMS[at // 2].id,
            at // 2,
            PROMPTS[at // 2],
            (5, 6 + at),
            (-0.1, -1 / 3),
            "stop",
            WeightsVersion(step, "ab"),
            "é",
            at,
        )
        for at in range(4)
    ]


class Said(list[str]):
    def __call__(self, *words: object) -> None:
        self.append(" ".join(map(str, words)))


def journal(folder: Path, said: Said | None = None, **changes: Any) -> Journal:
    said = Said() if said is None else said
    return Journal(config(folder, **changes), said, said)


def identity(of: Journal, problems: Any = PROBLEMS, prompts: Any = PROMPTS, version: Any = VERSION) -> str:
    return of.identity(problems, prompts, version)


def find(of: Journal, drawn_by: str) -> Record | None:
    return of.find(STEP, lambda _: drawn_by)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_is_found(tmp_path: Path) -> None:
    said = Said()
    first = journal(tmp_path, said)
    assert find(first, identity(first)) is None
    first.write(STEP, rollouts(), identity(first), failed_rewards=2)
    assert said == []
    again = journal(tmp_path, said)
    found = find(again, identity(again))
    assert found == Record(rollouts(), identity(first), 2)
    assert said == [
        f"step 3 takes the rollouts that were drawn before the interruption: {record_path(tmp_path / 'journal', 3)}"
    ]


OTHERS = [
    {"seed": 1},
    {"rollout__sampling__temperature": 0.5},
    {"rollout__sampling__max_new_tokens": 7},
    {"rollout__samples_per_prompt": 4, "rollout__prompts_per_step": 1},
    {"reward__verifier": "exact"},
    {"reward__failed_reward": -1.0},
    {"reward__weights": {"correct": 1.0}},
    {"rollout__server__dtype": "bfloat16"},
]


@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_rollouts_of_other_settings_are_not_taken(changes: dict[str, Any], tmp_path: Path) -> None:
    first, said = journal(tmp_path), Said()
    first.write(STEP, rollouts(), identity(first), 0)
    other = journal(tmp_path, said, **changes)
    assert find(other, identity(other)) is None
    assert "was drawn by other weights or with other settings" in said[0]


def test_rollouts_of_a_head_in_another_dtype_are_not_taken(tmp_path: Path) -> None:
    first, other = (
        journal(tmp_path, model__dtype="bfloat16", rollout__server__head_dtype=dtype) for dtype in ("model", "float32")
    )
    first.write(STEP, rollouts(), identity(first), 0)
    assert find(first, identity(first)) is not None
    assert find(other, identity(other)) is None


def test_rollouts_of_other_weights_or_prompts_are_not_taken(tmp_path: Path) -> None:
    first = journal(tmp_path)
    first.write(STEP, rollouts(), identity(first), 0)
    others = [
        identity(first, version=WeightsVersion(STEP, "ac")),
        identity(first, version=WeightsVersion(STEP + 1, "ab")),
        identity(first, problems=PROBLEMS[::-1]),
        identity(first, problems=[PROBLEMS[0], replace(PROBLEMS[1], answer="4")]),
        identity(first, prompts=[(1, 2), (3, 5)]),
        identity(first, problems=[PROBLEMS[0], replace(PROBLEMS[1], metadata={"level": 4})]),
    ]
    assert len({*others, identity(first)}) == 7
    assert [find(first, other) for other in others] == [None] * 6


def test_settings_that_decide_nothing_do_not_count(tmp_path: Path) -> None:
    first = journal(tmp_path)
    other = journal(
        tmp_path / "elsewhere", reward__workers=3, optimizer__lr=1.0, rollout__server__count=2, rollout__record=True
    )
    assert identity(first) == identity(other)


@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_a_damaged_entry_is_never_taken(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any byte changed, any piece cut out: then the step is sampled again, and that is said."""
    folder, said = tmp_path_factory.mktemp("run"), Said()
    first = journal(folder, said)
    first.write(STEP, rollouts(), identity(first), 1)
    path = record_path(folder / "journal", STEP)
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    length = data.draw(st.integers(0, 40))
    put = data.draw(st.binary(max_size=2))
    damaged = whole[:at] + put + whole[at + length :]
    path.write_bytes(damaged)
    found = find(first, identity(first))
    if found is None:
        assert damaged != whole
        assert f"{path}" in said[-1]
        assert said[-1].startswith("step 3 is sampled again")
    else:  # no damage to what it says, such as a blank for a blank
        assert found == Record(rollouts(), identity(first), 1)
        assert damaged.split() == whole.split()


def test_switched_off_it_writes_and_reads_nothing(tmp_path: Path) -> None:
    first = journal(tmp_path)
    first.write(STEP, rollouts(), identity(first), 0)
    off = journal(tmp_path / "off", rollout__journal=False)
    off.write(STEP, rollouts(), identity(off), 0)
    assert not (tmp_path / "off").exists()
    assert find(journal(tmp_path, rollout__journal=False), identity(first)) is None


@pytest.mark.parametrize("kept", [True, False])
def test_records_are_kept_beside_it_without_a_second_copy(kept: bool, tmp_path: Path) -> None:
    given: dict[str, Any] = {"rollout__journal": kept, "rollout__record": True}
    for _ in range(2):  # a step that is done again
        first = journal(tmp_path, **given)
        if find(first, identity(first)) is None:
            first.write(STEP, rollouts(), identity(first), 0)
    (tmp_path / "rollouts" / "step_0000003.jsonl").unlink()
    again = journal(tmp_path, **given)
    if find(again, identity(again)) is None:
        again.write(STEP, rollouts(), identity(again), 0)
    assert read_record(tmp_path / "rollouts", STEP).rollouts == rollouts()
    assert names(tmp_path / "rollouts") == ["step_0000003.jsonl"]
    if kept:
        assert record_path(tmp_path / "rollouts", STEP).stat().st_nlink == 2
        assert names(tmp_path / "journal") == ["step_0000003.jsonl"]


def finish_checkpoint(folder: Path, step: int) -> None:
    checkpoint = folder / "checkpoints" / f"step_{step:06d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")


def test_entries_are_kept_from_the_oldest_checkpoint_on(tmp_path: Path) -> None:
    one = journal(tmp_path)
    for step in range(3):
        one.write(step, rollouts(step), "", 0)
    finish_checkpoint(tmp_path, 2)
    one.write(3, rollouts(3), "", 0)
    finish_checkpoint(tmp_path, 4)
    one.write(4, rollouts(4), "", 0)
    assert names(tmp_path / "journal") == [f"step_000000{step}.jsonl" for step in (2, 3, 4)]


def test_a_journal_that_grows_large_loses_its_oldest_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = journal(tmp_path)
    one.write(0, rollouts(0), "", 0)
    size = record_path(tmp_path / "journal", 0).stat().st_size
    monkeypatch.setattr(journals, "MAX_BYTES", 2 * size + 20)
    for step in range(1, 6):
        one.write(step, rollouts(step), "", 0)
    assert names(tmp_path / "journal") == [f"step_000000{step}.jsonl" for step in (3, 4, 5)]
    monkeypatch.setattr(journals, "MAX_BYTES", 0)
    one.write(6, rollouts(6), "", 0)
    assert names(tmp_path / "journal") == ["step_0000006.jsonl"]


def test_a_disk_that_is_full_costs_the_entry_and_not_the_run(tmp_path: Path) -> None:
    said = Said()
    one = journal(tmp_path, said)
    with files_of_at_most(100):
        one.write(STEP, rollouts(), identity(one), 0)
    assert len(said) == 1
    assert "step_0000003.jsonl [Errno 27]" in said[0]
    assert names(tmp_path / "journal") == []
    one.write(STEP, rollouts(), identity(one), 0)
    assert find(one, identity(one)) == Record(rollouts(), identity(one))


WRITE = """
import resource, signal, sys
from pathlib import Path
from tepo_megatron.sampler.rollout_file import write_rollouts
from tepo_megatron.core.rollout import Rollout, WeightsVersion

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel kills who writes beyond the limit, within the write
rollouts = [Rollout("p", 0, (1,), (2,) * 300, (-0.25,) * 300, "stop", WeightsVersion(0))] * 50
write_rollouts(Path(sys.argv[1]), 0, rollouts)
print("written", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
for step in range(2):
    write_rollouts(Path(sys.argv[1]), step, rollouts)
"""


@pytest.mark.parametrize("room", [0, 1, 5000, 100000])
def test_a_writer_that_is_killed_within_a_write_leaves_the_older_entry(room: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITE, str(tmp_path), str(room)], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert (done.returncode, done.stdout) == (-signal.SIGXFSZ, "written\n")
    assert len(read_record(tmp_path, 0).rollouts) == 50
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".jsonl"] == ["step_0000000.jsonl"]

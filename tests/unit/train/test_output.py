"""What a resumed run finds in its folder, and leaves there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import RunConfig
from tepo_megatron.train.output import Output
from tepo_megatron.train.progress import NoProgress

LAST = 4


@given(rows=st.integers(0, LAST + 1), sampled=st.sets(st.integers(0, LAST)), checkpoint=st.integers(0, LAST))
def test_a_resumed_run_forgets_what_came_after_the_checkpoint_and_samples_without_a_row(
    rows: int, sampled: set[int], checkpoint: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run") / "out"
    leave(folder, rows, sampled)
    document = {"output": str(folder), "train": {"resume": True}, "log": {"tensorboard": False}}
    output = Output(RunConfig.model_validate(document), NoProgress())
    output.resume_from(checkpoint)
    kept = [step for step in range(rows) if step <= checkpoint]
    assert output.last_step == (kept[-1] if kept else None)
    assert steps(folder / "metrics.jsonl") == kept
    assert steps(folder / "samples.jsonl") == [step for step in sorted(sampled) if step in kept]
    output.write_row(checkpoint + 1, {})
    assert output.last_step == checkpoint + 1
    output.close()


@given(rows=st.integers(0, LAST), runs=st.integers(1, 3))
def test_a_run_that_is_started_again_without_a_checkpoint_begins_anew_and_keeps_the_old_rows(
    rows: int, runs: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run") / "out"
    document = {"output": str(folder), "train": {"resume": "auto"}, "log": {"tensorboard": False}}
    for _ in range(runs):
        output = Output(RunConfig.model_validate(document), NoProgress())
        assert not output.resumes
        assert output.last_step is None
        for step in range(rows + 1):
            output.write_row(step, {})
        output.write_samples(0, [{"text": "a"}])
        output.close()
    for kind in ("metrics", "samples"):
        kept = [folder / f"{kind}.jsonl", *(folder / f"{kind}.before-{number}.jsonl" for number in range(1, runs))]
        assert sorted(folder.glob(f"{kind}*")) == sorted(kept)
    (folder / "checkpoints" / "step_000001").mkdir(parents=True)
    (folder / "checkpoints" / "step_000001" / "state.json").write_text("{}")
    output = Output(RunConfig.model_validate(document), NoProgress())
    assert output.resumes
    assert output.last_step == rows
    output.close()


def leave(folder: Path, rows: int, sampled: set[int]) -> None:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(rows)))
    (folder / "samples.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in sorted(sampled)))


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]

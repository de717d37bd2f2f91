"""What a resumed run finds in its folder, and leaves there."""

import errno
import json
import shutil
import threading
import tracemalloc
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.load import load_run
from tepo_megatron.run.metrics import read_metrics, token_files
from tepo_megatron.run.output.output import Retention
from tepo_megatron.runtime.run_lock import FILE, RunLock
from tepo_megatron.trainer.checkpoint_folder import checkpoints, step_of
from tests.support.checkpoints import make_whole
from tests.support.data_files import write_jsonl
from tests.support.processes import files_of_at_most
from tests.support.report_runs import made_up_tokens
from tests.unit.run.conftest import open_output, scalars

LAST = 4
RESUMED = {"resume": True}


def write(path: Path, steps: Iterable[int]) -> None:
    write_jsonl(path, [{"step": step} for step in sorted(steps)])


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@given(
    rows=st.integers(0, LAST + 1),
    sampled=st.sets(st.integers(0, LAST)),
    trained=st.sets(st.integers(1, LAST)),
    checkpoint=st.integers(0, LAST),
)
def test_a_resumed_run_forgets_what_came_after_the_checkpoint_and_samples_without_a_row(
    rows: int, sampled: set[int], trained: set[int], checkpoint: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run") / "out"
    for name, present in (("metrics", range(rows)), ("samples", sampled), ("train_samples", trained)):
        write(folder / f"{name}.jsonl", present)
    output, _ = open_output(folder, train=RESUMED)
    output.resume_from(checkpoint)
    remaining = [step for step in range(rows) if step <= checkpoint]
    assert output.last_step == (remaining[-1] if remaining else None)
    assert steps(folder / "metrics.jsonl") == remaining
    assert steps(folder / "samples.jsonl") == [step for step in sorted(sampled) if step in remaining]
    assert steps(folder / "train_samples.jsonl") == [step for step in sorted(trained) if step <= checkpoint]
    output.write_row(checkpoint + 1, {})
    assert output.last_step == checkpoint + 1
    output.close()


def test_the_seconds_of_dropped_steps_have_those_that_were_lost_before(tmp_path: Path) -> None:
    lost = [{}, {"lost/resume": 3.0}, {"lost/rollback": 5.0}]
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": step, "time/step": 1.0, **row} for step, row in enumerate(lost)])
    output, _ = open_output(tmp_path, train=RESUMED)
    assert output.resume_from(0) == (10.0, 0)
    output.close()


def test_a_resumed_run_never_has_all_samples_in_memory(tmp_path: Path) -> None:
    for name in ("samples", "train_samples"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"step": step, "response": "a" * 100_000} for step in range(1, 101)])
    write(tmp_path / "metrics.jsonl", range(100))
    tracemalloc.start()
    output, _ = open_output(tmp_path, train=RESUMED)
    output.resume_from(90)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    output.close()
    assert peak < 0.25 * (tmp_path / "samples.jsonl").stat().st_size
    assert steps(tmp_path / "samples.jsonl") == steps(tmp_path / "train_samples.jsonl") == list(range(1, 91))


def test_a_run_that_is_started_again_without_a_checkpoint_begins_anew_and_keeps_the_old_rows(tmp_path: Path) -> None:
    for _ in range(3):
        output, _ = open_output(tmp_path, train={"resume": "auto"})
        assert (output.resumes, output.last_step) == (False, None)
        for step in range(5):
            output.write_row(step, {})
        output.write_samples(0, [{"text": "a"}])
        output.close()
    for kind in ("metrics", "samples"):
        files = sorted(path.name for path in tmp_path.glob(f"{kind}*"))
        assert files == [f"{kind}.before-1.jsonl", f"{kind}.before-2.jsonl", f"{kind}.jsonl"]
    make_whole(tmp_path / "checkpoints", 1)
    output, _ = open_output(tmp_path, train={"resume": "auto"})
    assert (output.resumes, output.last_step) == (True, 4)
    output.close()


@pytest.mark.parametrize("resume", [False, "auto"])
def test_only_a_run_that_may_resume_finds_the_journal_of_a_start_without_a_row(resume: bool | str, tmp_path: Path) -> None:
    names = ["step_0000000.json", "step_0000000.jsonl", "groups/step_0000004.jsonl"]
    for name in names:
        (tmp_path / "journal" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "journal" / name).touch()
    output, _ = open_output(tmp_path, train={"resume": resume})
    output.close()
    assert [(tmp_path / "journal" / name).exists() for name in names] == [resume == "auto"] * 3


def test_values_of_tokens_are_forgotten_beyond_the_checkpoint(tmp_path: Path) -> None:
    first, _ = open_output(tmp_path)
    for step in (1, 2, 3):
        first.tokens.write(made_up_tokens(step))
        first.write_row(step, {})
    first.close()
    again, _ = open_output(tmp_path, train=RESUMED)
    again.resume_from(2)
    assert list(token_files(tmp_path)) == [1, 2]
    again.close()


@pytest.mark.parametrize("resume", [False, "auto"])
def test_a_failed_start_leaves_nothing_to_the_next(resume: bool | str, tmp_path: Path) -> None:
    """It ended in its first step: the next run evaluates again."""
    first, _ = open_output(tmp_path, log={"tensorboard": True})
    first.write_samples(0, [{"response": "a"}])
    first.write_row(0, {"lr": 0.5})
    first.tokens.write(made_up_tokens(1))
    first.close()
    second, said = open_output(tmp_path, log={"tensorboard": True}, train={"resume": resume})
    assert (second.last_step, said, list((tmp_path / "tensorboard").iterdir()), token_files(tmp_path)) == (None, [], [], {})
    assert (tmp_path / "tokens.before-1" / "step_0000001.npz").exists() == (resume == "auto")
    second.write_samples(0, [{"response": "b"}])
    second.write_row(0, {"lr": 0.25})
    second.close()
    assert [json.loads(line)["response"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()] == ["b"]
    assert [row["lr"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0.25]


def test_lines_that_a_crash_cut_off_are_dropped_and_told(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2, "lo')
    (tmp_path / "samples.jsonl").write_text('{"step": 0, "response": "a\u2028b"}\n{"step": 1, "respon')
    output, said = open_output(tmp_path, train=RESUMED)
    assert said == [
        f"{tmp_path / name}: its last line was cut off when the run ended, and is dropped"
        for name in ("metrics.jsonl", "samples.jsonl")
    ]
    output.resume_from(1)
    output.close()
    assert steps(tmp_path / "metrics.jsonl") == [0, 1]
    assert (tmp_path / "samples.jsonl").read_text() == '{"step": 0, "response": "a\u2028b"}\n'


@pytest.mark.parametrize("line", ["nonsense", "[1]", "{}", '{"step": "1"}', "\udcff"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_damage_elsewhere_is_a_sentence_before_anything_is_changed(line: str, name: str, tmp_path: Path) -> None:
    for file in ("metrics.jsonl", "samples.jsonl"):
        write(tmp_path / file, [0, 1])
    path = tmp_path / name
    path.write_bytes((path.read_text() + line + "\n").encode("utf-8", "surrogateescape"))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"{name}:3: not "):
        open_output(tmp_path, train=RESUMED)
    assert path.read_bytes() == before
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(("preset", "has"), [("tepo", True), ("tepo_markov", False), ("grpo", False), ("clip_cov", True)])
def test_a_mask_that_is_not_there_has_no_column(preset: str, has: bool, tmp_path: Path) -> None:
    output, _ = open_output(tmp_path, objective={"preset": preset})
    output.write_row(1, {"mask/fraction": 0.0, "kl/masked": 0.0, "kl/mean": 0.25})
    output.close()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert ("mask/fraction" in row, "kl/masked" in row, row["kl/mean"]) == (has, has, 0.25)


@pytest.mark.parametrize("progress", ["plain", "none"])
def test_a_run_without_progress_prints_nothing(progress: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(open_output(tmp_path, log={"progress": progress})[0]) as output:
        output.write_row(0, {"lr": 0.5, "faults/servers": 1.0})
        output.finish()
    assert bool(capsys.readouterr().out) == (progress == "plain")


def test_a_full_disk_is_told_once_and_counted_and_costs_no_row(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No thread dies of it either, as that of TensorBoard's own writer would."""
    threads = set(threading.enumerate())
    output, said = open_output(tmp_path, log={"tensorboard": True})
    output.write_row(0, {"lr": 0.5})
    with files_of_at_most((tmp_path / "metrics.jsonl").stat().st_size + 10):
        for step in (1, 2):
            output.write_samples(step, [{"response": "long" * 50}])
            output.write_row(step, {"lr": step + 0.5})
        assert steps(tmp_path / "metrics.jsonl") == [0]
    output.write_row(3, {"lr": 3.5})
    (tmp_path / "curves.png").mkdir()
    output.finish()
    output.close()
    assert [(row["step"], row["lr"]) for row in read_metrics(tmp_path / "metrics.jsonl")] == [(at, at + 0.5) for at in range(4)]
    assert [row["log/failed"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 3, 2]
    assert steps(tmp_path / "samples.jsonl") == [1, 2]
    assert len(said) == 3
    assert said[0].startswith(f"{tmp_path / 'samples.jsonl'} cannot be written: File too large. The run continues;")
    assert said[-1].startswith("the run is complete, but its picture and table could not be made: ")
    assert scalars(tmp_path, "lr") == [(at, at + 0.5) for at in range(4)]
    assert "Traceback" not in capfd.readouterr().err
    assert not set(threading.enumerate()) - threads


def test_what_a_killed_save_left_goes_before_the_next_save(tmp_path: Path) -> None:
    """The disk may be full with it."""
    parent, remaining = tmp_path / "checkpoints", ["step_000002", "step_000003.damaged", "step_000003.partial"]
    for name in ("step_000004.partial", "step_000002.partial.1", *remaining[:2]):
        (parent / name).mkdir(parents=True)
    (parent / remaining[2]).symlink_to(tmp_path)
    output, said = open_output(tmp_path, train=RESUMED)
    output.close()
    assert sorted(path.name for path in parent.iterdir()) == remaining
    assert [sentence.partition(" is a link")[0] for sentence in said] == [str(parent / remaining[2])]


@pytest.mark.parametrize("look", ["exists", "is_dir", "is_symlink"])
def test_a_disk_that_is_away_for_a_moment_costs_no_row_and_no_checkpoint(
    look: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (output, _), said = open_output(tmp_path, log={"tensorboard": True}), list[str]()
    retention = Retention(load_run(None, [f"output={tmp_path}", "train.keep_checkpoints=1"]), said.append)
    for step in (1, 2):
        make_whole(tmp_path / "checkpoints", step, ranks=1)
    with monkeypatch.context() as away:
        away.setattr(Path, look, Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
        output.write_row(2, {"lr": 0.5})
        retention.after_row(2)
    assert [step_of(path) for path in checkpoints(tmp_path / "checkpoints")] == [1, 2]
    assert len(said) == 1
    assert "Stale file handle" in said[0]
    make_whole(tmp_path / "checkpoints", 3, ranks=1)
    retention.after_row(3)
    output.close()
    assert [step_of(path) for path in checkpoints(tmp_path / "checkpoints")] == [3]
    assert scalars(tmp_path, "lr") == [(2, 0.5)]


@pytest.mark.parametrize("has_room", [True, False])
def test_what_waits_for_room_when_a_run_stops_is_written_or_told_to_be_lost(has_room: bool, tmp_path: Path) -> None:
    output, said = open_output(tmp_path)
    logs = [tmp_path / name for name in ("metrics.jsonl", "samples.jsonl", "train_samples.jsonl", "tokens")]
    with files_of_at_most(10):
        output.write_samples(1, [{"response": "long"}])
        output.write_samples(1, [{"response": "long"}], trained=True)
        output.tokens.write(made_up_tokens(1))
        output.write_row(1, {})
        if not has_room:
            output.close()
    output.close()
    lost = [] if has_room else [f"{path}: 1 of its writes failed to the end: what they held is lost" for path in logs]
    assert [text for text in said if "lost" in text] == lost
    assert [steps(path) for path in logs[:3] if path.exists() and path.stat().st_size] == [[1]] * 3 * has_room
    assert list(token_files(tmp_path)) == [1] * has_room


def test_a_run_that_goes_back_forgets_what_waits_for_a_full_disk(tmp_path: Path) -> None:
    output, said = open_output(tmp_path, log={"tensorboard": True})
    tokens = tmp_path / "tokens"
    with files_of_at_most(10):
        for step in (1, 2, 3):
            output.tokens.write(made_up_tokens(step, seed=step))
            for trained in (False, True):
                output.write_samples(step, [{"response": "long"}] * step, trained=trained)
            output.write_samples(step, [])
            output.write_row(step, {"lr": step + 0.5})
        assert said[0].startswith(f"{tokens / 'step_0000001.npz'} cannot be written: File too large. The run continues;")
        assert not list(tokens.iterdir())
        output.resume_from(2)
        output.write_row(3, {"lr": 4.5})
    output.finish()
    output.close()
    assert [(row["step"], row["log/failed"]) for row in read_metrics(tmp_path / "metrics.jsonl")] == [(1, 4), (2, 6), (3, 3)]
    assert [path.read_bytes() for path in token_files(tmp_path).values()] == [
        made_up_tokens(step, seed=step).encode() for step in (1, 2)
    ]
    assert steps(tmp_path / "samples.jsonl") == steps(tmp_path / "train_samples.jsonl") == [1, 2, 2]
    assert scalars(tmp_path, "lr") == [(1, 1.5), (2, 2.5), (3, 4.5)]


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    output, said = open_output(folder, train={"resume": "auto"})
    output.write_row(0, {})
    shutil.rmtree(folder)
    output.write_row(1, {})
    assert said == [f"{folder}, with all that it held, was removed while the run went on; it is made again"]
    assert steps(folder / "metrics.jsonl") == [1]
    assert load_run(folder / "resolved.yaml").train.resume is False
    with pytest.raises(ValueError, match="is in use by"):
        RunLock(folder).take()
    output.close()
    assert RunLock(folder).holder() is None
    output, _ = open_output(folder, train=RESUMED)
    with files_of_at_most(10):
        output.write_samples(2, [{"response": "long"}])
    shutil.rmtree(folder)
    output.close()  # what ended it is said, and not that its rows are gone
    assert not folder.exists()


def test_a_run_whose_folder_another_took_stops_at_its_next_row(tmp_path: Path) -> None:
    output, _ = open_output(tmp_path)
    output.write_row(0, {})
    holder = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps(holder | {"token": "another", "host": "node7"}))
    with pytest.raises(RuntimeError, match=r"was taken over by process .* on node7"):
        output.write_row(1, {})
    output.close()
    assert steps(tmp_path / "metrics.jsonl") == [0]
    assert (tmp_path / FILE).exists()


def test_a_folder_that_became_a_file_is_told_and_survived(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    output, said = open_output(folder)
    output.write_row(0, {})
    folder.rename(tmp_path / "moved")
    folder.touch()
    output.write_row(1, {})
    output.write_row(2, {})
    assert said[0].startswith(f"{folder} cannot be written: File exists. The run continues;")
    with pytest.raises(ValueError, match=rf"^output {folder} cannot be written: .*; give another folder"):
        open_output(folder)
    folder.unlink()
    output.write_row(3, {})
    output.close()
    assert steps(folder / "metrics.jsonl") == [1, 2, 3]

"""What a run may begin in, continue from and keep in its folder."""

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import ConfigError, dump_resolved, load_run
from tepo_megatron.core.problem import Problem
from tepo_megatron.run.metrics import read_metrics
from tepo_megatron.run.output.output import Retention
from tepo_megatron.run.output.resume import Resumed, of_attempt, prepare_folder, resolve_dtype
from tepo_megatron.runtime.restarts import named_job
from tepo_megatron.runtime.run_lock import RunLock
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.trainer.checkpoint_folder import checkpoint_name, checkpoints, read_state, step_of
from tepo_megatron.trainer.run_compatibility import describe_run
from tests.support.checkpoints import DAMAGES, ONLY_BY_READING, make_whole
from tests.support.cli import invoke
from tests.support.fake_sampling import FakeFleet, FakeVerifiers, collector

ROW = '{"step": 1}\n'
FIRST_ROW = '{"step": 0, "accuracy/greedy": 0.5}\n'
RUN = Path(__file__).parents[3] / "examples" / "tiny" / "run.yaml"


def in_folder(folder: Path, **sections: Any) -> RunConfig:
    return RunConfig.model_validate({"output": str(folder), **sections})


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def content(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


@pytest.mark.parametrize("output", ["{tmp}/file", "{tmp}/file/out", "{tmp}/" + "long" * 100])
def test_what_is_no_folder_to_write_in_is_a_sentence(output: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    output = output.format(tmp=tmp_path)
    done = invoke("train", RUN, f"output={output}", code=1)
    assert done.stderr.startswith(f"error: output {output} cannot be written: ")
    assert "give another folder (output=…)" in done.stderr
    assert content(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "left",
    [{}, {"metrics.jsonl": ""}, {"metrics.jsonl": '{"step": 0'}, {"metrics.jsonl": FIRST_ROW}, {"resolved.yaml": "name: a"}],
)
def test_a_failed_start_is_no_run(left: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path, left)
    prepare_folder(in_folder(tmp_path))
    assert content(tmp_path) == sorted(left)
    prepare_folder(in_folder(tmp_path / "new" / "out"))
    assert not (tmp_path / "new" / "out").exists()


@pytest.mark.parametrize(
    ("left", "refusal"),
    [
        ({"metrics.jsonl": ROW + '{"st'}, "which --resume cannot continue, as it left no checkpoint, or remove .*--overwrite"),
        ({"checkpoints/step_000003/state.json": "{}"}, r"continue it \(--resume\), or remove .*--overwrite"),
    ],
)
def test_a_run_is_not_written_over_unless_that_is_asked_for(left: dict[str, str], refusal: str, tmp_path: Path) -> None:
    resumed = in_folder(tmp_path, train={"resume": True})
    write(tmp_path, left)
    with pytest.raises(ValueError, match=f"already holds a run; give another folder .*{refusal}"):
        prepare_folder(in_folder(tmp_path))
    prepare_folder(resumed)
    assert content(tmp_path) == sorted(left)
    prepare_folder(in_folder(tmp_path), overwrite=True)
    assert content(tmp_path) == []
    with pytest.raises(ValueError, match=r"starts again and train.resume = True continues"):
        prepare_folder(resumed, overwrite=True)
    for rows, advice in ((FIRST_ROW + ROW, " and with --overwrite"), (FIRST_ROW, "$")):
        write(tmp_path, {"metrics.jsonl": rows})
        with pytest.raises(ValueError, match=f"no finished checkpoint; start without --resume{advice}"):
            Resumed.find(resumed, tmp_path)


NAMES = (
    *("resolved.1.yaml", "samples.jsonl", "curves.png", "model/a/b", "adapter/a", "tensorboard/events.out.tfevents.1.h"),
    *("checkpoints/step_000001/state.json", "checkpoints/step_000002.partial/shards/a", "logs/server-0.log"),
    *("rollouts/step_0000000.jsonl", "journal/step_0000001.jsonl", "journal/step_0000002.jsonl.partial"),
    "journal/groups/step_0000003.jsonl",
)
MADE = {**dict.fromkeys(NAMES, "x"), "metrics.jsonl": ROW}
OTHERS = {
    **{"launch/run.yaml": "x", "servers/17.0/key": "x", "logs/ranks/17.0/0": "x", "notes.txt": "x", "model.txt": "x"},
    "resolved.yaml": "x",  # the new run may read it, and writes its own
}


def test_overwriting_removes_what_a_run_made_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing without a run, as in a home folder that was given by mistake; and nothing that the new run reads."""
    mistaken = {"model/mine": "x", "logs/server-9": "x"}
    write(tmp_path / "home", mistaken)
    prepare_folder(in_folder(tmp_path / "home"), overwrite=True)
    assert content(tmp_path / "home") == sorted(mistaken)
    folder = tmp_path / "out"
    write(folder, MADE | OTHERS)
    model = {"path": str(folder / "model")}
    for name, section in (
        ("rollout.replay", {"rollout": {"replay": str(folder / "rollouts")}}),
        ("model.path", {"model": model}),
        ("teachers.old.path", {"teachers": {"old": model}, "objective": {"distill": {"coefficient": 0.5}}}),
    ):
        with pytest.raises(ValueError, match=f"--overwrite would remove what {name} = "):
            prepare_folder(in_folder(folder, **section), overwrite=True)
    assert content(folder) == sorted(MADE | OTHERS)
    monkeypatch.chdir(folder)  # where builtin:addition is no file
    prepare_folder(in_folder(folder, reward={"verifier": f"{folder}/mine.py:score"}), overwrite=True)
    assert content(folder) == sorted(OTHERS)
    assert {path.name for path in folder.iterdir()} == {"launch", "servers", "logs", "notes.txt", "model.txt", "resolved.yaml"}


MODEL = resolve_model_path("builtin:tiny")


def config(out: Path, *overrides: str) -> RunConfig:
    return load_run(None, [f"output={out}", "train.resume=true", *overrides])


def save(out: Path, *steps: int, overrides: tuple[str, ...] = (), **state: Any) -> list[Path]:
    """Checkpoints of a run with these overrides."""
    identity = describe_run(load_run(None, [f"output={out}", *overrides]), MODEL)
    return [make_whole(out / "checkpoints", step, identity=identity, **state) for step in steps]


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind not in ONLY_BY_READING])
def test_a_damaged_newest_is_named_and_the_next_is_taken(kind: str, tmp_path: Path) -> None:
    _, whole, newest = save(tmp_path, 2, 4, 6)
    damage, words = DAMAGES[kind]
    damage(newest, whole)
    run = config(tmp_path)
    checkpoint = Resumed.find(run, MODEL)
    assert checkpoint.folder == whole
    damaged, resumed, *_ = checkpoint.messages(run)
    assert damaged.startswith("step_000006 is damaged (")
    assert words in damaged
    assert damaged.endswith("; resuming from step_000004")
    assert resumed == f"resumed from {whole} at step 4"
    assert not checkpoint.accept(run)
    assert sorted(path.name for path in newest.parent.iterdir()) == ["step_000002", "step_000004", "step_000006.damaged"]


def test_every_rank_resumes_from_what_the_first_sees(tmp_path: Path) -> None:
    """A disk may show a checkpoint to other machines later."""
    (newest,) = save(tmp_path / "out", 4)
    shared: Any = [[str(newest)], ""]
    engine = Mock(broadcast_from_root=lambda _: shared, reference_digest=None)
    engine.checkpoints.check = read_state
    assert Resumed.load(config(tmp_path / "empty"), engine, MODEL).folder == newest
    shared = [[], "there is nothing to resume"]
    with pytest.raises(ValueError, match="there is nothing to resume"):
        Resumed.load(config(tmp_path / "out"), engine, MODEL)


def test_an_older_one_is_chosen_and_the_future_is_set_aside(tmp_path: Path) -> None:
    _, chosen, *_ = save(tmp_path, 2, 4, 6, 8)
    run = config(tmp_path, "train.resume_from=step_000004")
    assert Resumed.find(run, MODEL).folder == chosen
    assert Resumed.find(config(tmp_path, f"train.resume_from={chosen}"), MODEL).folder == chosen
    Resumed.find(run, MODEL).accept(run)
    present = ["step_000002", "step_000004", "step_000006.abandoned", "step_000008.abandoned"]
    assert sorted(path.name for path in chosen.parent.iterdir()) == present


def test_restarted_ranks_take_their_jobs_checkpoints_and_before_the_first_start_as_at_first(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (2, 4):
        make_whole(folder, step)
    older = in_folder(tmp_path, train={"resume": True, "resume_from": "step_000002"})
    fresh = in_folder(tmp_path)
    with named_job("this one"), pytest.MonkeyPatch.context() as patch:
        assert (of_attempt(older), of_attempt(fresh)) == (older, fresh)
        patch.setenv("TEPO_ATTEMPT", "1")
        assert of_attempt(older) == older
        assert of_attempt(fresh).train.resume == "auto"
        make_whole(folder, 6, job="another")
        assert of_attempt(older) == older
        damaged = make_whole(folder, 8, job="this one")
        assert (of_attempt(older).train.resume, of_attempt(older).train.resume_from) == ("auto", None)
        (damaged / "state.json").write_text("{")
        assert of_attempt(older) == older


def test_a_job_that_slurm_starts_again_takes_its_checkpoints(tmp_path: Path) -> None:
    other, out = make_whole(tmp_path / "other" / "checkpoints", 2), tmp_path / "out"
    mine = make_whole(out / "checkpoints", 6, job="7")
    for restarts, refusal in (("0", f"{other} has 2 already"), ("1", f"{mine} has 6 already")):
        arguments = (f"output={out}", "train.steps=1", "--resume", "--from", other)
        env = {"TEPO_LAUNCHED_JOB": "7", "SLURM_RESTART_COUNT": restarts}
        assert refusal in invoke("train", RUN, *arguments, code=1, env=env).stderr


def test_restarted_ranks_train_on_builtin_data_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = load_run(None, [f"output={tmp_path}", "model.path=/m", "data.train=builtin:addition"])
    assert named.data.train == RunConfig().data.train
    monkeypatch.setenv("TEPO_ATTEMPT", "1")
    of_attempt(named).require_data()
    with pytest.raises(ValueError, match=r"data\.train is not given"):
        of_attempt(load_run(None, [f"output={tmp_path}", "model.path=/m"])).require_data()


def test_checkpoints_that_cannot_be_resumed_are_refused(tmp_path: Path) -> None:
    folders = save(tmp_path, 2, 4)
    for name, problem in (
        ("step_000003", r"step_000003 is not there; in .* there are step_000002, step_000004"),
        ("newest", "is no checkpoint"),
        ("step_000002.partial", "is no checkpoint"),
    ):
        with pytest.raises(ValueError, match=problem):
            Resumed.find(config(tmp_path, f"train.resume_from={name}"), MODEL)
    with pytest.raises(ConfigError, match="has no effect without resume"):
        load_run(None, ["train.resume_from=step_000002"])
    for folder in folders:
        (folder / "manifest.json").unlink()
    for choice, problem in (
        (["train.resume_from=step_000002"], r"step_000002 is damaged \(manifest.json is missing\); choose another"),
        ([], r"is whole: step_000004 is damaged .*; step_000002 is damaged .*Restore one"),
    ):
        with pytest.raises(ValueError, match=problem):
            Resumed.find(config(tmp_path, *choice), MODEL)


@pytest.mark.parametrize(
    ("arguments", "in_use", "words"),
    [
        (["--overwrite"], True, "is in use by process"),
        (["--overwrite", "model.path=/nowhere", "data.train=builtin:addition"], False, "/nowhere"),
        (["--resume"], True, "is in use by process"),
        (["--resume", "--from", "step_000005"], False, "step_000005 is not there"),
        (["train.resume=auto", "optimizer.lr=1"], False, "train.allow_change=[optimizer.lr]"),
    ],
)
def test_the_command_refuses_before_it_starts_ranks(
    arguments: list[str], in_use: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tepo_megatron.run.api.start_ranks", lambda *_: pytest.fail("ranks were started"))
    save(tmp_path, 6)
    write(tmp_path, {"resolved.yaml": "as it was", "metrics.jsonl": ROW})
    lock, before = RunLock(tmp_path), content(tmp_path)
    if in_use:
        lock.take()
    done = invoke("train", f"output={tmp_path}", "model.path=builtin:tiny", *arguments, code=1)
    if in_use:
        lock.release()
    assert (done.stdout, done.stderr.count("error:")) == ("", 1)
    assert words in done.stderr
    assert content(tmp_path) == before
    assert (tmp_path / "resolved.yaml").read_text() == "as it was"


def test_steps_that_are_done_are_refused(tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 6)
    with pytest.raises(ValueError, match=r"train\.steps = 5, but .*step_000006 has 6 already"):
        Resumed.find(config(tmp_path, "train.steps=5"), MODEL)
    # saved its last step, and was killed before it exported
    assert Resumed.find(config(tmp_path, "train.steps=6"), MODEL).step == 6
    (tmp_path / "curves.png").touch()  # 'tepo plot' drew it
    assert Resumed.find(config(tmp_path, "train.steps=6"), MODEL).step == 6
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match=r"the run has reached train\.steps = 6, and is complete"):
        Resumed.find(config(tmp_path, "train.steps=6"), MODEL)
    (tmp_path / "curves.png").unlink()
    with pytest.raises(ValueError, match="is complete"):
        Resumed.find(config(tmp_path, "train.steps=6", "log.curves=false"), MODEL)
    for reason in ("would not be the same run", "is complete"):  # an adapter is exported after the model
        with pytest.raises(ValueError, match=reason):
            Resumed.find(config(tmp_path, "train.steps=6", "log.curves=false", "model.lora.rank=4"), MODEL)
        (tmp_path / "adapter").mkdir(exist_ok=True)
    (tmp_path / "curves.png").touch()
    os.utime(tmp_path / "curves.png", (0, 0))  # of an earlier end, before the steps were raised
    assert Resumed.find(config(tmp_path, "train.steps=6"), MODEL).step == 6
    with pytest.raises(ValueError, match="is complete"):
        Resumed.find(config(tmp_path / "new", f"train.resume_from={folder}", "train.steps=6"), MODEL)


def test_differences_are_refused_together_or_said(tmp_path: Path) -> None:
    save(tmp_path, 6)
    changed = ("optimizer.lr=2e-5", "rollout.sampling.temperature=0.5", "engine.parallel.dp=2")
    with pytest.raises(ValueError, match="would not be the same run") as caught:
        Resumed.find(config(tmp_path, *changed), MODEL)
    assert "  optimizer.lr: 1e-06 -> 2e-05\n" in str(caught.value)
    assert "  rollout.sampling.temperature: 1.0 -> 0.5\n" in str(caught.value)
    assert "engine.parallel" not in str(caught.value)
    allowed = "train.allow_change=[optimizer, rollout.sampling.temperature, seed]"
    run = config(tmp_path, *changed, allowed)
    said = Resumed.find(run, MODEL).messages(run)
    assert "differs from the checkpoint's run: optimizer.lr: 1e-06 -> 2e-05" in said
    assert "differs from the checkpoint's run: engine.parallel.dp: 1 -> 2" in said
    assert said[-1] == "train.allow_change: nothing differs in seed"


def test_a_checkpoint_of_the_first_format_is_taken_with_a_sentence(tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 6)
    (folder / "manifest.json").unlink()
    (folder / "state.json").write_text(json.dumps({"step": 6, "updates": 24, "sampler": {}}))
    run = config(tmp_path)
    assert Resumed.find(run, MODEL).messages(run)[-1] == (
        "step_000006 has no manifest.json, as an earlier version wrote it: neither its bytes nor its run could be checked"
    )
    (folder / "state.json").write_text(json.dumps({"step": 6, "updates": -24}))
    with pytest.raises(ValueError, match="updates = -24"):
        Resumed.find(run, MODEL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dtype_that_is_left_to_the_machine_is_the_checkpoints_in_a_resumed_run(dtype: str, tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 6, overrides=(f"model.dtype={dtype}",))
    run = config(tmp_path)
    Resumed.find(run, MODEL)
    served: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tepo_megatron.sampler.fleet.external.serve_node", lambda config, **_: served.append(config.model.dtype))
        invoke("serve", str(RUN), f"output={tmp_path}", "train.resume=auto")
    assert served == [dtype]
    assert [resolve_dtype(run, gpus).model.dtype for gpus in (0, 8)] == [dtype, dtype]
    fresh = load_run(None, [f"output={tmp_path}"])
    assert [resolve_dtype(fresh, gpus).model.dtype for gpus in (0, 8)] == ["float32", "bfloat16"]
    assert resolve_dtype(load_run(None, ["engine.platform=cpu"]), 8).model.dtype == "float32"
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    with pytest.raises(ValueError, match=f'architecture.dtype: "{dtype}" -> "{other}"'):
        Resumed.find(config(tmp_path, f"model.dtype={other}"), MODEL)
    (folder / "manifest.json").unlink()  # the first format, whose default was float32
    (folder / "state.json").write_text(json.dumps({"step": 6, "updates": 24, "sampler": {}}))
    assert resolve_dtype(run, 8).model.dtype == "float32"
    with pytest.raises(ValueError, match=r"recipe = tensorwise with model.dtype = float32"):
        resolve_dtype(load_run(None, ["engine.fp8.recipe=tensorwise"]), gpus=0)


def test_older_configurations_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 6)
    first = load_run(None, [f"output={tmp_path}"])
    (tmp_path / "resolved.yaml").write_text(dump_resolved(first))
    for changed in (["train.resume_from=step_000006"], [], ["train.resume_from=step_000006", "train.steps=200"]):
        run = config(tmp_path, *changed)
        Resumed.find(run, MODEL).accept(run)
    # neither goes back again when it is resumed
    assert load_run(tmp_path / "resolved.yaml") == load_run(None, [f"output={tmp_path}", "train.steps=200"])
    assert load_run(tmp_path / "resolved.1.yaml") == first
    assert not (tmp_path / "resolved.2.yaml").exists()


def test_restarted_ranks_write_the_configuration_if_no_attempt_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 6)
    first, longer = (load_run(None, [f"output={tmp_path}", *more]) for more in ([], ["train.steps=200"]))
    (tmp_path / "resolved.yaml").write_text(dump_resolved(first))
    monkeypatch.setenv("TEPO_ATTEMPT", "1")
    for _ in range(2):
        run = of_attempt(longer)
        Resumed.find(run, MODEL).accept(run)
        assert load_run(tmp_path / "resolved.yaml") == longer
    assert sorted(path.name for path in tmp_path.glob("resolved*")) == ["resolved.1.yaml", "resolved.yaml"]


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


def run(out: Path, values: dict[int, float | None], *overrides: str, said: list[str] | None = None) -> list[int]:
    """The steps that are there after a run that saves at each of these steps, with the metric of each."""
    config = load_run(None, [f"output={out}", *overrides])
    retention = Retention(config, print if said is None else said.append)  # a checkpoint before it is an earlier run's
    for step, value in values.items():
        make_whole(out / "checkpoints", step, ranks=1)
        with (out / "metrics.jsonl").open("a") as file:
            row = {"step": step} | ({} if value is None else {"reward/mean": value})
            file.write(json.dumps(row) + "\n")
        retention.after_row(step, row)
    return [step_of(path) for path in checkpoints(out / "checkpoints")]


BEST = "train.keep_best.metric=reward/mean"


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ([], [8, 10]),
        (["train.keep_checkpoints=1"], [10]),
        (["train.keep_every=4"], [4, 8, 10]),
        ([BEST], [2, 8, 10]),
        ([BEST, "train.keep_best.mode=min"], [4, 8, 10]),
        ([BEST, "train.keep_best.mode=min", "train.keep_checkpoints=1", "train.keep_every=3"], [4, 6, 10]),
    ],
)
def test_the_newest_every_so_many_and_the_best_stay(overrides: list[str], kept: list[int], tmp_path: Path) -> None:
    assert run(tmp_path, {2: 0.9, 4: 0.1, 6: None, 8: 0.5, 10: 0.3}, *overrides) == kept


def test_the_best_is_the_newest_of_equals_also_of_an_earlier_run_and_a_metric_that_is_nowhere_is_said_once(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    assert run(tmp_path / "a", {1: 0.5, 2: 0.5, 3: 0.1}, BEST, "train.keep_checkpoints=1") == [2, 3]
    assert run(tmp_path / "a", {4: 0.2, 5: 0.3}, BEST, "train.keep_checkpoints=1") == [2, 5]
    assert run(tmp_path / "b", {1: None, 2: None, 3: None}, BEST, said=said) == [2, 3]
    assert said == ["train.keep_best.metric = reward/mean is in no row of a step that was saved: none is kept as the best"]


def test_rows_are_read_once_and_of_a_step_that_is_done_again_the_last_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Mock(wraps=read_metrics)
    monkeypatch.setattr("tepo_megatron.run.output.output.read_metrics", reads)
    retention = Retention(load_run(None, [f"output={tmp_path}", BEST, "train.keep_checkpoints=1"]), print)
    make_whole(tmp_path / "checkpoints", 1, ranks=1)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    for step, value, saves in ((2, 0.4, True), (3, 0.9, False), (3, 0.1, True), (4, math.inf, True)):
        if saves:
            make_whole(tmp_path / "checkpoints", step, ranks=1)
        retention.after_row(step, {"reward/mean": value})
    assert [step_of(path) for path in checkpoints(tmp_path / "checkpoints")] == [1, 4]
    assert reads.call_count == 1


def test_rows_that_cannot_be_read_are_said_once_and_cost_no_checkpoint(tmp_path: Path) -> None:
    rows, said = [json.dumps({"step": step, "reward/mean": 1 / step}) + "\n" for step in range(1, 5)], list[str]()
    retention = Retention(load_run(None, [f"output={tmp_path}", BEST, "train.keep_checkpoints=1"]), said.append)
    for step, written in enumerate([None, "nonsense\n", "nonsense\n", "".join(rows)], start=1):
        make_whole(tmp_path / "checkpoints", step, ranks=1)
        if written is not None:
            (tmp_path / "metrics.jsonl").write_text(written)
        retention.after_row(step)
        kept = [step_of(path) for path in checkpoints(tmp_path / "checkpoints")]
        assert kept == ([1, 4] if step == 4 else list(range(1, step + 1)))
    assert [text.partition(":")[0] for text in said] == ["no older checkpoint is removed"]


def test_a_row_without_a_checkpoint_deletes_nothing_and_leftovers_go(tmp_path: Path) -> None:
    parent = tmp_path / "checkpoints"
    for step in (1, 2):
        make_whole(parent, step, ranks=1)
    (parent / "step_000002.partial").mkdir()
    (parent / "step_000009.partial").mkdir()
    (parent / "step_000009.damaged").mkdir()
    retention = Retention(load_run(None, [f"output={tmp_path}"]), print)
    retention.after_row(2)
    assert len(list(parent.iterdir())) == 5
    make_whole(parent, 4, ranks=1)  # written beside the training of step 5
    retention.after_row(3)
    assert len(list(parent.iterdir())) == 6, "its row is not written"
    retention.after_row(5)
    kept = ["step_000002", "step_000004", "step_000009.damaged", "step_000009.partial"]  # the last one may be on its way
    assert sorted(path.name for path in parent.iterdir()) == kept


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_what_cannot_be_removed_is_said_and_no_longer_a_checkpoint(tmp_path: Path) -> None:
    parent, said = tmp_path / "checkpoints", list[str]()
    retention = Retention(load_run(None, [f"output={tmp_path}", "train.keep_checkpoints=1"]), said.append)
    for step in (1, 2):
        make_whole(parent, step, ranks=1)
    busy = parent / "step_000001.partial"
    busy.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(busy)], capture_output=True).returncode:
        pytest.skip("this machine mounts nothing")
    try:
        retention.after_row(2)
        assert [sentence.partition(" could not")[0] for sentence in said] == [str(busy)]
        assert "busy" in said[0]
        assert checkpoints(parent) == [parent / checkpoint_name(2)]
    finally:
        subprocess.run(["umount", str(busy)], check=True)

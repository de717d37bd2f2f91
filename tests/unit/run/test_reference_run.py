"""Whole runs of the loop on the reference trainer and sampler: order, schedules, faults, resume and replay."""

import json
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.errors import is_ours
from tepo_megatron.run import rank0, training
from tepo_megatron.run.display.progress import Progress
from tepo_megatron.run.metrics import Stopwatch
from tepo_megatron.run.output.status import run_status
from tepo_megatron.runtime.machine import Machine
from tepo_megatron.runtime.preemption import StopRequested, StopSignals
from tepo_megatron.runtime.run_lock import FILE
from tepo_megatron.sampler.rollout_file import Record
from tepo_megatron.tasks.protocol import Task
from tests.support.data_files import write_jsonl
from tests.support.fake_sampling import Killed

SHARED = {"rollout.server.placement": "colocated"}
PLACEMENTS = pytest.mark.parametrize("placement", [{}, SHARED], ids=["own GPUs", "shared GPUs"])
SYNC = ["wake", "canary"]
STEP = ["score", "score", "update", "update"]


@pytest.mark.slow
@PLACEMENTS
def test_the_order_of_a_run(placement: dict[str, Any], reference_run: Any) -> None:
    """On shared GPUs it is the same; trainer and sampler check who has the memory."""
    run = reference_run({"evaluate.every": 2, **placement}).run()
    first = ["start", "weights 0", *SYNC, "sample", "sample", "evaluation 0", "row 0"]
    one = ["sample", "rollouts 1", "sleep", "noise", *STEP, "save 1", "saved 1", "weights 1", *SYNC, "row 1"]
    two = ["sample", "rollouts 2", "sleep", *STEP, "save 2", "saved 2", "weights 2", *SYNC]
    assert run.calls == [*first, *one, *two, "sample", "sample", "evaluation 2", "row 2", "sleep"]


KEEPS = {
    "train": {"schedule": "overlap", "kv_cache": "keep"},
    "model.lora": {"rank": 3, "serve": "adapter"},
    "rollout.sampling.stop": ["x"],
    "rollout.uncorrected": True,
}


@pytest.mark.parametrize(("settings", "expected"), [(SHARED, (0, False, None, False)), (KEEPS, (4, True, 3, True))])
def test_what_a_run_gives_its_sampler(
    settings: dict[str, Any], expected: tuple[Any, ...], reference_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank0, "this_machine", lambda: Machine(gpus=8, has_nccl=True, local_ranks=4, ranks=4))
    run = reference_run({"seed": 7, **settings}, killed_at="start")
    with pytest.raises(Killed):
        run.run()
    options = run.loop.rank0.servers.sampler._options
    names = ("first_gpu", "keep_cache", "adapter_rank", "tokenizer", "trained", "seed")
    assert tuple(options[name] for name in names) == (*expected, True, 7)


def test_noise_and_canaries_are_due_every_so_many_steps(reference_run: Any) -> None:
    """Servers that have just started have one always."""
    run = reference_run(
        {"train.steps": 4, "rollout.canary.every": 3, "engine.noise_every": 2}, dies_at=["weights 1", "canary"]
    ).run()
    assert run.noted("noise", "canary", "row") == [
        *("canary", "canary", "row 0", "noise", "canary", "row 1", "row 2", "noise", "canary", "row 3", "row 4")
    ]


def test_verdicts_of_an_evaluation_are_progress(reference_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[Any] = []
    score = Task.score

    def note(self: Task, *args: Any, **options: Any) -> Any:
        moves.append(options.get("on_move"))
        return score(self, *args, **options)

    monkeypatch.setattr(Task, "score", note)
    run = reference_run({"evaluate.every": 2}).run()
    assert [move for move in moves if move] == [run.loop.rank0.heartbeat.moved] * 4  # greedy and sampled, twice


def test_the_last_step_is_saved_and_its_responses_are_written(reference_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if no save is due, and with the job; responses with their problems."""
    monkeypatch.setenv("TEPO_LAUNCHED_JOB", "7")
    run = reference_run({"train": {"steps": 1, "save_every": 0}, "log.train_samples": 3}).run()
    output = run.config.output
    assert run.noted("save ") == ["save 1"]
    assert json.loads((output / "checkpoints" / "step_000001" / "state.json").read_text())["job"] == "7"
    rows = [json.loads(line) for line in (output / "train_samples.jsonl").read_text().splitlines()]
    expected = [(1, r.problem_id, r.text, r.reward, len(r.response_ids), r.finish_reason, 0) for r in run.rollouts[1][:3]]
    names = ("step", "problem", "response", "reward", "tokens", "finish_reason", "weights_version")
    assert [tuple(row[name] for name in names) for row in rows] == expected
    assert all(row["prompt"].endswith("=") and row["answer"].isdecimal() for row in rows)


def test_a_save_is_due_by_the_clock_too(reference_run: Any) -> None:
    run = reference_run({"train": {"steps": 2, "save_every": 0, "save_minutes": 1e-9}}).run()
    assert run.noted("save ") == ["save 1", "save 2"]


def test_training_continues_during_a_save_and_the_run_ends_when_it_is_whole(reference_run: Any) -> None:
    run = reference_run({"train": {"steps": 3, "save_every": 2, "async_save": True, "keep_checkpoints": 1}}).run()
    assert run.noted("save", "update", "row") == [
        *("row 0", "update", "update", "row 1", "update", "update", "save 2", "row 2"),
        *("update", "update", "saved 2", "save 3", "row 3", "saved 3"),
    ]
    assert [path.name for path in (run.config.output / "checkpoints").iterdir()] == ["step_000003"]


def test_the_best_checkpoint_is_known_from_rows_that_were_never_read(reference_run: Any) -> None:
    train = {"steps": 2, "save_every": 1, "keep_checkpoints": 1, "keep_best": {"metric": "lr"}}
    run = reference_run({"train": train}).run()
    assert run.rows[1]["lr"] <= run.rows[2]["lr"]
    assert [path.name for path in (run.config.output / "checkpoints").iterdir()] == ["step_000002"]


@PLACEMENTS
def test_a_server_that_died_gets_the_weights_before_the_work_is_repeated(
    placement: dict[str, Any], reference_run: Any, tmp_path: Path
) -> None:
    settings = {"train.steps": 1, **placement}
    whole = reference_run(settings).run()
    weights = {"wake": "weights 0", "canary": "weights 0", "sample": "weights 0", "weights 1": "weights 1"}
    run = reference_run({**settings, "output": str(tmp_path / "dies")}, dies_at=list(weights)).run()
    after = {call: run.calls[run.calls.index(call) + 1 :][:2] for call in weights}  # where it first came, the server died
    assert after == {call: ["start", version] for call, version in weights.items()}
    assert run.noted("row") == ["row 0", "row 1"]
    assert (run.digest, run.drawn) == (whole.digest, whole.drawn)
    assert sum(row["lost/server"] for row in run.rows) > 0 == sum(row["lost/server"] for row in whole.rows)
    assert run.said.count("the reference sampler is gone; starting it again") == 4


def test_the_overlapped_schedule_trains_on_every_group_once_and_on_none_too_old(reference_run: Any) -> None:
    staleness = 2
    train = {"steps": 5, "schedule": "overlap", "max_staleness": staleness}
    run = reference_run({"train": train, "rollout.uncorrected": True}).run()
    assert run.noted("rollouts", "row") == [
        "row 0",
        *(f"{call} {step}" for step in range(1, 6) for call in ("rollouts", "row")),
    ]
    assert len(set(run.drawn)) == len(run.drawn) == 10
    for step, rollouts in run.rollouts.items():
        assert all(0 <= step - 1 - version.step <= staleness for rollout in rollouts for _, version in rollout.versions)
    assert all(row["staleness/max"] <= staleness for row in run.rows[1:])


def test_updates_that_are_not_finite_are_skipped_and_kept(reference_run: Any) -> None:
    run = reference_run({"train": {"steps": 5, "max_skipped": 2}}, skips=[2, 3, 6, 8]).run()
    assert [row["update/skipped"] for row in run.rows[1:]] == [1, 1, 1, 1, 0]
    folder, minibatches = run.config.output / "skipped", {1: 0, 2: 1, 3: 1}
    names = {f"step_{step:07d}{suffix}" for step in minibatches for suffix in (".json", ".jsonl")}
    assert {path.name for path in folder.iterdir()} == names  # the oldest went: a series that ends a run has room
    for step, minibatch in minibatches.items():
        assert Record.read(folder, step).rollouts == run.rollouts[step + 1]
        (entry,) = json.loads((folder / f"step_{step:07d}.json").read_text())["skipped"]
        assert (entry["minibatch"], entry["cause"]) == (minibatch, "planted")
    assert run.rows[1]["lost/skipped"] > 0
    assert "step 1: 1 of 2 optimizer steps skipped, a number was not finite: planted" in run.said[0]


@pytest.mark.parametrize(("skips", "saved"), [((5, 6), ["save 2"]), ((3, 4), ["save 1"]), ((4, 5, 6), ["save 2"]), ((6,), [])])
def test_steps_before_too_many_skipped_updates_are_saved(skips: tuple[int, ...], saved: list[str], reference_run: Any) -> None:
    """But not in the middle of a step, since the weights are then of none."""
    settings = {"steps": 3, "save_every": 0, "max_skipped": len(skips) - 1, "resume": "auto"}
    run = reference_run({"train": settings}, skips=skips)
    with pytest.raises(RuntimeError, match=r"a row were skipped|an optimizer step was skipped") as caught:
        run.run()
    assert is_ours(caught.value)
    assert run.noted("save ") == saved
    if saved:
        assert reference_run({"train": settings}).run().noted("load") == [f"load step_00000{saved[0][-1]}"]


def test_a_batch_is_trained_on_in_several_passes_and_scored_once(reference_run: Any) -> None:
    sampled = {"rollout.samples_per_prompt": 4, "rollout.sampling.temperature": 2.0}  # so that there are advantages
    settings = {**sampled, "log": {"token_samples": 1, "token_samples_every": 1}}
    run = reference_run({"train": {"steps": 2, "epochs_per_batch": 3}, **settings}).run()
    assert run.noted("score", "update", "row") == ["row 0", *(*STEP, *STEP[2:] * 2, "row 1"), *(*STEP, *STEP[2:] * 2, "row 2")]
    assert {key for key in run.rows[1] if key.startswith("clip/share_u")} == {f"clip/share_u{index}" for index in range(1, 7)}
    once = reference_run({"train": {"steps": 2}, **settings, "output": str(run.config.output.with_name("once"))}).run()
    assert run.rows[1]["ratio/max"] > once.rows[1]["ratio/max"]
    assert run.digest != once.digest


def rollback(**train: Any) -> dict[str, Any]:
    return {"train": {"steps": 3, "rollback": {"metric": "loss", "above": 20, "max_times": 1}, **train}}


class Damages:
    """Damages these checkpoints after step 2."""

    def __init__(self, output: Path, *damaged: int) -> None:
        self.folder, self.damaged = output / "checkpoints", damaged

    def on_step_end(self, step: int, metrics: object) -> None:
        for number in self.damaged if step == 2 else ():
            (self.folder / f"step_{number:06d}" / "state.json").unlink()


def count_time(loop: Any) -> None:
    """From 0, by one each time that somebody looks."""
    watch = loop.rank0.watch
    watch._clock = count().__next__
    watch._start = watch._mark = watch._clock()


@PLACEMENTS
def test_a_spike_undoes_the_step_and_trainer_and_servers_go_back(placement: dict[str, Any], reference_run: Any) -> None:
    run = reference_run({**rollback(save_every=2), **placement}, spikes=[6]).run(before=count_time)
    index = run.calls.index("load step_000002")
    assert run.calls[index - 6 : index] == ["rollouts 3", "sleep", *STEP]
    again = ["weights 2", *SYNC, "sample", "rollouts 3", "sleep", *STEP, "save 3", "saved 3", "weights 3", *SYNC, "row 3"]
    assert run.calls[index + 1 :] == [*again, "sleep"]
    assert len(set(run.drawn)) == len(run.drawn) == 8
    assert (run.rows[-1]["rollback/count"], run.rows[-1]["lost/rollback"] > 0) == (1, True)
    # no second twice, and one between row 0 and the first step in neither
    assert sum(row["time/step"] + row["lost/rollback"] for row in run.rows) == run.loop.rank0.watch._start - 1
    assert any("above train.rollback.above = 20; back to" in text for text in run.said)


def test_a_return_to_a_checkpoint_is_counted_though_a_later_one_drops_its_row(reference_run: Any) -> None:
    run = reference_run(
        rollback(steps=4, save_every=2, rollback={"metric": "loss", "above": 20, "max_times": 2}), spikes=[6, 10]
    )
    assert sum(row.get("rollback/count", 0) for row in run.run().rows) == 2


def test_a_spike_before_the_first_checkpoint_is_reported_and_too_many_end_the_run(reference_run: Any) -> None:
    run = reference_run(rollback(save_every=1), spikes=[1, 4, 6])
    with pytest.raises(RuntimeError, match=r"above .*, after 1 returns to a checkpoint \(train.rollback.max_times"):
        run.run()
    assert any("but there is no checkpoint yet to go back to" in text for text in run.said)
    assert run.noted("row") == ["row 0", "row 1"]


def test_a_damaged_checkpoint_is_passed_over_when_a_run_goes_back(reference_run: Any, tmp_path: Path) -> None:
    """If all are damaged, the run ends."""
    run = reference_run(rollback(save_every=1), spikes=[6], callbacks=[Damages(tmp_path / "out", 2)]).run()
    assert run.noted("load") == ["load step_000001"]
    assert any(text.startswith("step_000002 is damaged (") and text.endswith("going back to step_000001") for text in run.said)
    assert (run.config.output / "checkpoints" / "step_000002.damaged").is_dir()
    assert [row["step"] for row in run.rows] == [0, 1, 2, 3]
    settings = {**rollback(save_every=1), "output": str(tmp_path / "other")}
    with pytest.raises(RuntimeError, match=r"above .* cannot go back: no checkpoint in .* is whole: step_000002"):
        reference_run(settings, spikes=[6], callbacks=[Damages(tmp_path / "other", 1, 2)]).run()


def test_a_resumed_run_goes_back_where_the_whole_one_would_have(reference_run: Any) -> None:
    """The median of the steps before, and the number of returns, are in the checkpoint."""
    settings = {"rollback": {"metric": "ratio/max", "factor": 1000.0, "max_times": 1}, "save_every": 5, "resume": "auto"}
    reference_run({"train": {"steps": 5, **settings}}).run()
    resumed = reference_run({"train": {"steps": 6, **settings}}, spikes=[1]).run()
    assert resumed.noted("load") == ["load step_000005"] * 2


def test_other_problems_are_refused_before_servers_start(
    reference_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"train.steps": 1, "train.save_every": 1, "train.resume": "auto"}
    reference_run(settings).run()
    other = write_jsonl(tmp_path / "other.jsonl", [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(9)])
    monkeypatch.setattr(rank0, "make_sampler", lambda *_, **__: pytest.fail("servers are started"))
    with pytest.raises(ValueError, match=r"not those of the checkpoint, .* train\.allow_change=\[data\.train\]"):
        reference_run({**settings, "train.steps": 2, "data.train": other}).run()


RESUMED: dict[str, Any] = {"train": {"steps": 2, "save_every": 1, "resume": "auto"}, "evaluate.every": 2}


@pytest.mark.slow
def test_a_killed_run_that_is_resumed_has_the_same_bits(reference_run: Any, tmp_path: Path) -> None:
    """Killed in the sampling of either step, between updates, and before and after a save and its row."""
    whole = reference_run(RESUMED).run()
    for number in (8, 9, 14, 17, 22, 28):
        settings = {**RESUMED, "output": str(tmp_path / str(number))}
        with pytest.raises(Killed):
            reference_run(settings, killed_at=number).run()
        resumed = reference_run(settings).run()
        assert resumed.digest == whole.digest, whole.calls[number]
        assert resumed.figures == whole.figures, whole.calls[number]
        if whole.calls[number] in ("rollouts 1", "score", "rollouts 2"):
            assert any("takes the rollouts that were drawn before the interruption" in text for text in resumed.said)


@pytest.mark.slow
@PLACEMENTS
def test_a_signal_at_any_point_costs_no_trained_step(placement: dict[str, Any], reference_run: Any, tmp_path: Path) -> None:
    """What was trained is saved once, no step is half trained, and the resumed run continues as if nothing had been."""
    settings = {**RESUMED, "train": {**RESUMED["train"], "save_every": 0}, **placement}
    whole = reference_run(settings).run()
    for number in (8, 12, 17, 22) if placement else (1, 8, 12, 16, 20, 25):
        changed = {**settings, "output": str(tmp_path / str(number))}
        run = reference_run(changed, stops_at=number)
        with pytest.raises(StopRequested):
            run.run()
        assert run.calls.count("update") == 2 * run.loop.step
        assert run.noted("save ") == [f"save {step}" for step in (run.loop.step,) if step]
        name = f"step_{run.loop.step:06d}"
        assert run.said[-1] in (
            f"SIGTERM: saved {name}; continue with the same command and --resume, without --from",
            f"SIGTERM: nothing was trained since {name}; continue with the same command and --resume, without --from",
            "SIGTERM: ended before a step was trained; there is nothing to save",
        )
        resumed = reference_run(changed).run()
        assert (resumed.digest, resumed.figures) == (whole.digest, whole.figures), whole.calls[number]


@pytest.mark.parametrize(("fits", "step"), [(False, 1), (True, 2)])
def test_a_step_in_which_a_signal_comes_is_trained_on_if_there_is_time(fits: bool, step: int, reference_run: Any) -> None:
    run = reference_run({"train": {"steps": 3, "save_every": 0}}, stops_at=20)
    with pytest.raises(StopRequested):
        run.run(lambda loop: setattr(loop.stopping, "update_fits", lambda: fits))
    assert run.noted("score", "update", "save ") == [*STEP, *STEP[: 2 * step], f"save {step}"]


def test_ctrl_c_with_the_first_line_ends_with_a_sentence_and_leaves_no_lock(
    reference_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Progress, "start", lambda *_: signal.raise_signal(signal.SIGINT))
    run = reference_run()
    with StopSignals(ends=False).borrowed(), pytest.raises(StopRequested):
        training.train_model(run.config)
    assert run.said[-1] == "Ctrl-C: ended before the first step"
    assert not (run.config.output / FILE).exists()
    assert run_status(run.config.output)[0][0].startswith("run: interrupted before the first step, ")


def test_a_resumed_run_checks_its_servers_at_once_and_charges_no_step_with_its_start(reference_run: Any) -> None:
    """If the row of the checkpoint's step is missing, it is written without times, which nobody knows."""
    settings = {"rollout.canary.every": 3}
    reference_run({**settings, "train.steps": 1}).run()
    for logged in (True, False):
        resumed = reference_run({**settings, "train": {"steps": 3 - logged, "resume": True}})
        later = [0.0]

        def start_slowly(loop: Any, logged: bool = logged, later: list[float] = later) -> None:
            loop.rank0.watch = Stopwatch(lambda: time.perf_counter() + later[0])
            later[0] = 1e6
            if not logged:
                loop.rank0.output.resume_from(loop.step - 1)

        resumed.run(start_slowly)
        assert resumed.noted("start", "weights", "canary")[:3] == ["start", f"weights {2 - logged}", "canary"]
        times = [{name.split("/")[0] for name in row} & {"time", "idle"} for row in resumed.rows[-2:]]
        assert times == [{"time", "idle"} if logged else set(), {"time", "idle"}]
        assert all(row.get("time/step", 0.0) < 1e6 for row in resumed.rows[-2:])
        # Rows have figures of the canary at the steps that those of a run that was not interrupted have them.
        assert ["canary/max_logprob_gap" in row for row in resumed.rows[-2:]] == [False, not logged]


def test_recorded_rollouts_are_replayed_to_the_same_bits_without_servers(reference_run: Any, tmp_path: Path) -> None:
    """And without the verifier, which other runs try before anything starts."""

    def judge(problem: Any, response: str) -> float:
        return problem.grade

    with pytest.raises(ValueError, match=r"'Problem' object has no attribute 'grade', at .*test_reference_run.py:\d+"):
        reference_run(reward=judge).run()
    recorded = reference_run({"rollout.record": True, "output": str(tmp_path / "recorded")}).run()
    replayed = reference_run({"rollout.replay": str(tmp_path / "recorded" / "rollouts")}, reward=judge).run()
    assert replayed.digest == recorded.digest
    assert replayed.rollouts == recorded.rollouts
    assert not replayed.noted("start", "sample", "weights", "canary")


BY_LENGTH = {"objective": {"preset": "tepo", "trust_region": {"scale": "length", "low": "auto", "high": "auto", "share": 0.2}}}
VARIED = {"prompts_per_step": 4, "samples_per_prompt": 4, "sampling": {"temperature": 2.0, "max_new_tokens": 12}}


@pytest.mark.slow
def test_bounds_that_follow_the_ratios_survive_a_kill_and_a_replay(reference_run: Any, tmp_path: Path) -> None:
    train = {"steps": 4, "save_every": 1, "resume": "auto", "minibatches": 2}
    settings: dict[str, Any] = {**BY_LENGTH, "optimizer.lr": 1e-4, "train": train, "rollout": {**VARIED, "record": True}}
    whole = reference_run({**settings, "output": str(tmp_path / "whole")}).run()
    bounds = [(row["clip/bound_low"], row["clip/bound_high"]) for row in whole.rows[1:]]
    assert bounds[0] == (0.03, 0.03)
    assert len(set(bounds)) > 2
    state = json.loads((whole.config.output / "checkpoints" / "step_000004" / "state.json").read_text())
    assert tuple(state["clip_range"][:2]) not in bounds
    assert whole.rows[-1]["clip/slope_high"] != 0
    with pytest.raises(Killed):
        reference_run(settings, killed_at="rollouts 3").run()
    resumed = reference_run(settings).run()
    assert (resumed.digest, resumed.figures) == (whole.digest, whole.figures)
    settings["rollout"] = {**VARIED, "replay": str(whole.config.output / "rollouts")}
    replayed = reference_run({**settings, "train.resume": False, "output": str(tmp_path / "replayed")}).run()
    assert replayed.digest == whole.digest

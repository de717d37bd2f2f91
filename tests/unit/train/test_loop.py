"""The loop's order, with a recorder in place of engine and servers: real ones run in tests/dist and tests/e2e."""

from __future__ import annotations

import contextlib
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config import EngineConfig, EvaluateConfig, ObjectiveConfig, RolloutConfig, RunConfig, TrainConfig
from tepo_megatron.config.rollout import CanaryConfig, ServerConfig
from tepo_megatron.config.train import RollbackConfig
from tepo_megatron.engine.batch import pack
from tepo_megatron.engine.step import UpdateResult
from tepo_megatron.preemption import StopRequested, StopSignals
from tepo_megatron.train.leaving import Leaving
from tepo_megatron.train.loop import Loop
from tepo_megatron.train.minibatches import derive_seed, minibatches
from tepo_megatron.types import Batch, Rollout, WeightsVersion


def rollouts(count: int) -> list[Rollout]:
    return [
        Rollout(f"p{at // 2}", at // 2, (3,), (4, 5 + at), (-1.0, -1.0), "stop", WeightsVersion(0), reward=float(at % 2))
        for at in range(count)
    ]


class Calls(list[str]):
    """In the call with the number ``stops_at`` a signal comes; where rank 0 waits, it raises."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def append(self, call: str) -> None:
        if len(self) == self.recorder.stops_at:
            self.recorder.signals._note(signal.SIGTERM)
            if call.split()[0] in ("ready", "collect", "evaluate"):
                raise StopRequested(signal.SIGTERM)
        super().append(call)


class Recorder:
    """Engine, driver and publisher at once; ``dies_at`` names calls under which a server dies, once each.

    It keeps count of who has the GPU, where they are shared: two of trainer, servers' weights and servers' caches at most, and
    never the trainer's optimizer beside anything of a server.
    """

    def __init__(
        self,
        dies_at: tuple[str, ...] = (),
        *,
        shares_gpus: bool = False,
        row: int | None = None,
        stops_at: int = -1,
        skips: tuple[int, ...] = (),
        spikes: tuple[int, ...] = (),
        output: Path | None = None,
    ) -> None:
        self.calls: list[str] = Calls(self)
        self.stops_at = stops_at
        self.signals = StopSignals(grace_s=1000.0)
        self.waits = False
        self.row = row
        self.skips, self.updates = skips, 0
        self.spikes, self.output = spikes, output
        self.dies_at = list(dies_at)
        self.noted = 0
        self.shares_gpus = shares_gpus
        self.trainer, self.servers = "everything", "absent"

    def _check_gpus(self, *, trainer: str, servers: str) -> None:
        if self.shares_gpus:
            assert (self.trainer, self.servers) == (trainer, servers)

    # memory
    def offload(self) -> None:
        self._occupy("nothing")

    def onload(self) -> None:
        self._occupy("everything")

    def onload_weights_only(self) -> None:
        self._occupy("weights")

    def _occupy(self, what: str) -> None:
        self.trainer = what
        allowed = {
            "everything": ("absent", "asleep"),
            "weights": ("asleep",),
            "nothing": ("absent", "asleep", "weights", "gone"),
        }
        assert not self.shares_gpus or self.servers in allowed[what]

    def memory(self) -> dict[str, float]:
        return {"memory/peak_gib": 1.0}

    def sleep_servers(self) -> None:
        assert self.servers == "awake"
        self.servers = "asleep" if self.shares_gpus else "awake"

    def revive_or_wake(self, died: bool) -> bool:
        self._check_gpus(trainer="nothing", servers="gone" if died else "weights")
        dies = "wake" in self.dies_at and self._dies("wake")
        self.servers = "asleep" if died or dies else "awake"  # a server that was revived sleeps
        return died or dies

    def _dies(self, call: str) -> bool:
        self.calls.append(call)
        if call in self.dies_at:
            self.dies_at.remove(call)
            return True
        return False

    # engine
    def broadcast_from_root(self, value: Any) -> Any:
        return json.loads(json.dumps(value))

    def batch_from_root(self, given: list[Rollout]) -> Batch:
        return pack(given)

    def score(self, batch: Batch) -> Batch:
        self._check_gpus(trainer="everything", servers="asleep")
        self.calls.append(f"score {batch.num_sequences}")
        return batch

    def measure_noise(self, batch: Batch) -> dict[str, float]:
        self._check_gpus(trainer="everything", servers="asleep")
        self.calls.append("noise")
        return {"entropy/noise/p99": 0.25}

    spec = SimpleNamespace(vocab_size=50, max_positions=64)

    def weights_version(self, step: int) -> WeightsVersion:
        return WeightsVersion(step, f"{step:016x}")

    def prompt_logprobs(self, prompt: tuple[int, ...]) -> list[float]:
        assert self.trainer == "weights"
        assert len(prompt) == 32
        return [-1.0] * 31

    def update(self, batch: Batch, *, last: bool = True) -> UpdateResult:
        self.calls.append(f"update {batch.num_sequences}")
        self.updates += 1
        if self.updates in self.skips:
            return UpdateResult(float("nan"), float("nan"), 0.1, {}, {}, skipped=f"update {self.updates}")
        loss = 50.0 if self.updates in self.spikes else 1.0
        return UpdateResult(loss=loss, grad_norm=2.0, lr=0.1, sums={"entropy/mean": (3.0, 4.0)}, extrema={"ratio/max": 1.5})

    def save(self, folder: Any, *, step: int, state: dict[str, Any]) -> None:
        assert state == {"drawn": step}
        assert self.noted_row["reward/mean"] == 0.5  # a checkpoint has it before it is logged
        self._check_gpus(trainer="everything", servers="absent" if "close" in self.calls else "asleep")
        self.calls.append(f"save {step}")
        if self.output is not None:
            saved = folder / f"step_{step:06d}"
            saved.mkdir(parents=True, exist_ok=True)
            (saved / "state.json").write_text("{}")

    # driver
    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run_or_revive(self, work: Callable[[], Any]) -> tuple[Any, bool]:
        self._check_gpus(trainer="nothing", servers="awake")
        result = work()
        if result == "died":
            self.servers = "asleep"
            return None, True
        return result, False

    def wait_until_ready(self) -> None:
        self._check_gpus(trainer="nothing", servers="absent")
        self.servers = "asleep"
        self.calls.append("ready")

    def collect(self, step: int) -> Any:
        self.drawn = step + 1
        return "died" if self._dies(f"collect {step}") else rollouts(6)

    def update_weights(self, version: WeightsVersion, publisher: Any) -> bool:
        assert publisher is self
        assert version == self.weights_version(version.step)
        self._check_gpus(trainer="weights", servers="asleep")
        died = self._dies(f"update weights {version.step}")
        self.servers = "gone" if died else "weights"
        return died

    def load(self, folder: Path) -> dict[str, int]:
        self._check_gpus(trainer="everything", servers="asleep")
        self.calls.append(f"load {folder.name}")
        return {"step": int(folder.name.removeprefix("step_"))}

    def go_back(self, step: int, sentence: str) -> None:
        self.row = step
        self.calls.append(f"back {step}: {sentence.partition(';')[0]}")

    def keep_skipped(self, step: int, skipped: list[dict[str, Any]]) -> None:
        self.calls.append(f"keep {step} {[each['cause'] for each in skipped]}")

    def check_canary(self, step: int, prompt: tuple[int, ...], logprobs: list[float]) -> Any:
        assert len(logprobs) == len(prompt) - 1
        return "died" if self._dies(f"canary {step}") else None

    def check_rollouts(self, step: int, parts: list[Batch]) -> None:
        assert [part.num_sequences for part in parts] == [3, 3]
        assert self.calls[-2:] == ["score 3"] * 2  # all of them, and before the first update

    def evaluate(self, step: int) -> Any:
        return "died" if self._dies(f"evaluate {step}") else None

    def has_logged(self, step: int) -> bool:
        return self.row == step

    def note_row(self, row: dict[str, float]) -> None:
        self.noted_row = row

    def log(self, step: int, row: dict[str, float]) -> None:
        assert self.row is None or step > self.row
        self.row = step
        self.calls.append(f"log {step}")
        if row:
            assert row is self.noted_row
            assert row["reward/mean"] == 0.5
            assert row["entropy/mean"] == pytest.approx(0.75)
            assert row["ratio/max"] == 1.5
            assert row["memory/peak_gib"] == 1.0
            assert ("entropy/noise/p99" in row) == (self.calls.count("noise") > self.noted)
            self.noted = self.calls.count("noise")

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def drop_step(self, step: int) -> None:
        self.drawn = step

    def message(self, text: str) -> None:
        self.calls.append(text)

    def close(self) -> None:
        assert self.shares_gpus
        self.servers = "absent"
        self.calls.append("close")


def run(steps: int, *given: Any, **options: Any) -> list[str]:
    """The calls of a whole run of what :func:`make` makes."""
    loop, recorder = make(steps, *given, **options)
    loop.run()
    assert recorder.trainer == "everything"  # what is exported afterwards is there
    return recorder.calls


def make(
    steps: int,
    dies_at: tuple[str, ...] = (),
    every: int = 2,
    canary: int = 1,
    save_every: int = 1,
    shares_gpus: bool = False,
    noise_every: int = 50,
    resumed: int = 0,
    row: int | None = None,
    stops_at: int = -1,
    skips: tuple[int, ...] = (),
    spikes: tuple[int, ...] = (),
    output: Path | None = None,
) -> tuple[Loop, Recorder]:
    config = RunConfig(
        output=output or Path("nowhere"),
        engine=EngineConfig(noise_every=noise_every),
        objective=ObjectiveConfig(preset="grpo"),
        rollout=RolloutConfig(
            prompts_per_step=3,
            samples_per_prompt=2,
            canary=CanaryConfig(every=canary),
            server=ServerConfig(placement="colocated" if shares_gpus else "local"),
        ),
        train=TrainConfig(steps=steps, minibatches=2, save_every=save_every, rollback=ROLLBACK if output else None),
        evaluate=EvaluateConfig(every=every),
    )
    recorder = Recorder(dies_at, shares_gpus=shares_gpus, row=row, stops_at=stops_at, skips=skips, spikes=spikes, output=output)
    loop = Loop(config, recorder, recorder, recorder, step=resumed)  # type: ignore[arg-type]
    loop.leaving.signals = recorder.signals
    return loop, recorder


STEP = ["score 3", "score 3", "update 3", "update 3"]


@pytest.mark.parametrize("shares_gpus", [False, True])
def test_the_order_of_a_run(shares_gpus: bool) -> None:
    """On shared GPUs it is the same; who may be there when is what the recorder asserts."""
    first = ["ready", "update weights 0", "canary 0", "evaluate 0", "log 0"]
    one = ["collect 0", "noise", *STEP, "save 1", "update weights 1", "canary 1", "log 1"]
    two = ["collect 1", *STEP, "save 2", "update weights 2", "canary 2", "evaluate 2", "log 2"]
    assert run(2, shares_gpus=shares_gpus) == first + one + two


@pytest.mark.parametrize(("noise_every", "measured"), [(0, 0), (1, 4), (2, 2), (3, 2), (50, 1)])
def test_noise_is_measured_in_the_first_step_and_every_so_many(noise_every: int, measured: int) -> None:
    calls = run(4, noise_every=noise_every)
    assert calls.count("noise") == measured
    assert not measured or calls.index("noise") < calls.index("score 3")


def test_a_canary_is_due_by_the_count_of_syncs() -> None:
    """One that a server's death repeats is one sync."""
    calls = run(4, canary=3, dies_at=("update weights 1", "canary 3"))
    assert [call for call in calls if call.startswith("canary")] == ["canary 0", "canary 3", "canary 3"]


def test_a_resumed_run_checks_the_canary_after_the_same_steps() -> None:
    """And at once, since its servers have just started."""
    calls = run(6, canary=3, resumed=2, row=2)
    assert [call for call in calls if call.startswith("canary")] == ["canary 2", "canary 3", "canary 6"]


@pytest.mark.parametrize(("save_every", "saved"), [(0, [3]), (2, [2, 3]), (3, [3])])
def test_the_last_step_is_evaluated_and_saved_once(save_every: int, saved: list[int]) -> None:
    calls = run(3, save_every=save_every)
    assert calls[-2:] == ["evaluate 3", "log 3"]
    assert [int(call.split()[1]) for call in calls if call.startswith("save")] == saved


@pytest.mark.parametrize("shares_gpus", [False, True])
def test_a_resumed_run_goes_on_after_the_last_row(shares_gpus: bool) -> None:
    again = ["ready", "update weights 2", "canary 2"]
    assert run(2, resumed=2, row=2, shares_gpus=shares_gpus) == again
    third = ["collect 2", *STEP, "save 3", "update weights 3", "canary 3", "evaluate 3", "log 3"]
    assert run(3, resumed=2, row=2, shares_gpus=shares_gpus) == again + third


@pytest.mark.parametrize("steps", [2, 4])
def test_a_run_that_ended_between_checkpoint_and_row_is_evaluated_when_it_is_resumed(steps: int) -> None:
    calls = run(steps, resumed=2, row=1)
    assert calls[:5] == ["ready", "update weights 2", "canary 2", "evaluate 2", "log 2"]
    assert [call for call in calls if call.startswith("log")] == [f"log {step}" for step in range(2, steps + 1)]


@pytest.mark.parametrize(
    ("dies_at", "expected"),
    [
        (("collect 0",), ["collect 0", "update weights 0", "canary 0", "collect 0"]),
        (("evaluate 1",), ["evaluate 1", "update weights 1", "canary 1", "evaluate 1"]),
        (("update weights 1",), ["update weights 1", "update weights 1", "canary 1"]),
        (("canary 1",), ["update weights 1", "canary 1", "update weights 1", "canary 1", "evaluate 1"]),
        (("collect 0", "update weights 0"), ["collect 0", "update weights 0", "canary 0", "collect 0"]),
        (("wake",), ["update weights 0", "wake", "update weights 0", "canary 0"]),
    ],
)
@pytest.mark.parametrize("shares_gpus", [False, True])
def test_a_server_that_died_gets_the_weights_before_the_work_is_repeated(
    dies_at: tuple[str, ...], expected: list[str], shares_gpus: bool
) -> None:
    calls = run(1, dies_at=dies_at, every=1, shares_gpus=shares_gpus)
    text = " | ".join(calls)
    assert " | ".join(expected) in text
    assert calls.count("log 1") == 1


@pytest.mark.parametrize("shares_gpus", [False, True])
@settings(max_examples=50)
@given(stops_at=st.integers(0, 40), save_every=st.integers(0, 3), every=st.integers(0, 3), resumed=st.integers(0, 1))
def test_a_signal_at_any_point_costs_no_trained_step(
    shares_gpus: bool, stops_at: int, save_every: int, every: int, resumed: int
) -> None:
    """What was trained is saved, once; no step is half trained; and the resumed run goes on as if nothing had been."""
    steps = 4
    loop, recorder = make(
        steps,
        save_every=save_every,
        every=every,
        shares_gpus=shares_gpus,
        resumed=resumed,
        row=resumed or None,
        stops_at=stops_at,
    )
    calls = recorder.calls
    if stops_at >= len(run(steps, save_every=save_every, every=every, resumed=resumed, row=resumed or None)):
        return  # the run has ended before
    with pytest.raises(StopRequested):
        loop.run()
    assert calls.count("update 3") == 2 * (loop.step - resumed)
    saved = [int(call.split()[1]) for call in calls if call.startswith("save ")]
    assert saved == sorted(set(saved))
    assert max([resumed, *saved]) == loop.step
    name = f"step_{loop.step:06d}"
    assert calls[-1] in (
        f"SIGTERM: saved {name}; continue with --resume",
        f"SIGTERM: nothing was trained since {name}, so nothing more was saved; continue with --resume",
        "SIGTERM: ended before a step was trained; there is nothing to save",
    )
    assert ("there is nothing" in calls[-1]) == (loop.step == 0)
    rows = [int(call.split()[1]) for call in calls if call.startswith("log ")]
    rows += [
        int(call.split()[1])
        for call in run(steps, save_every=save_every, every=every, resumed=loop.step, row=recorder.row)
        if call.startswith("log ")
    ]
    assert rows == list(range(resumed + 1 if resumed else 0, steps + 1))


@given(update=st.floats(0, 100), save=st.none() | st.floats(0, 100), left=st.floats(0, 200))
def test_a_step_is_finished_where_its_updates_and_a_checkpoint_fit_twice(
    update: float, save: float | None, left: float
) -> None:
    leaving = Leaving(saved_step=0, signals=SimpleNamespace(seconds_left=lambda: left))  # type: ignore[arg-type]
    assert not leaving.update_fits()  # nobody knows how long the first updates take
    leaving.seconds = {"update": update} | ({} if save is None else {"save": save})
    assert leaving.update_fits() == (2 * (update + (update if save is None else save)) <= left)
    leaving.signals.seconds_left = lambda: math.inf  # type: ignore[method-assign]
    assert leaving.update_fits()


@given(saved=st.integers(0, 50), more=st.integers(1, 9))
def test_what_a_hard_end_would_lose_is_said_with_its_steps(saved: int, more: int) -> None:
    leaving = Leaving(saved_step=saved)
    assert leaving.at_risk(saved) == ""
    lost = f"step {saved + 1} is lost" if more == 1 else f"steps {saved + 1} to {saved + more} are lost"
    newest = f"the newest checkpoint is step_{saved:06d}" if saved else "there is no checkpoint"
    assert leaving.at_risk(saved + more) == f"{lost}; {newest}"


def test_a_checkpoint_is_due_when_the_last_one_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tepo_megatron.train.leaving.time.monotonic", lambda: now[0])
    leaving, seen = Leaving(saved_step=0), []
    for step in range(1, 9):
        now[0] += 60.0
        seen.append(leaving.save_is_due(3))
        assert not leaving.save_is_due(0)
        if seen[-1]:
            leaving.saved(step)
    assert seen == [False, False, True] * 2 + [False, False]


def test_a_step_with_skipped_updates_is_kept_and_the_run_goes_on() -> None:
    calls = run(2, skips=(2, 3))
    assert [call for call in calls if call.startswith(("keep", "log"))] == [
        "log 0",
        "keep 0 ['update 2']",
        "log 1",
        "keep 1 ['update 3']",
        "log 2",
    ]


ROLLBACK = RollbackConfig(metric="loss", above=20.0, max_times=1)


@pytest.mark.parametrize("shares_gpus", [False, True])
def test_a_spike_undoes_the_step_and_trainer_and_servers_go_back(tmp_path: Path, shares_gpus: bool) -> None:
    calls = run(3, spikes=(6,), every=0, save_every=2, output=tmp_path, shares_gpus=shares_gpus)
    at = calls.index("load step_000002")
    assert calls[at - 5 : at] == ["collect 2", *STEP]
    assert calls[at + 1 :] == [
        "back 2: step 3: loss is 25.5, above train.rollback.above = 20",
        "update weights 2",
        "canary 2",
        "collect 2",
        *STEP,
        "save 3",
        "update weights 3",
        "canary 3",
        "log 3",
    ]


def test_a_spike_before_the_first_checkpoint_is_said_and_too_many_stop_the_run(tmp_path: Path) -> None:
    calls = run(2, spikes=(1,), every=0, save_every=2, output=tmp_path / "one")
    assert "step 1: loss is 25.5, above train.rollback.above = 20, but there is no checkpoint yet to go back to" in str(calls)
    assert [call for call in calls if call.startswith("log")] == ["log 0", "log 1", "log 2"]
    with pytest.raises(
        RuntimeError, match=r"loss is 25.5, above .*, after 1 returns to a checkpoint \(train.rollback.max_times"
    ):
        run(3, spikes=(4, 6), every=0, save_every=1, output=tmp_path / "two")


def test_minibatches_divide_the_batch_and_depend_on_seed_and_step_alone() -> None:
    batch = pack(rollouts(7))

    def order(seed: int, step: int) -> list[list[int]]:
        return [part.tokens_T[2::3].tolist() for part in minibatches(batch, 3, seed=seed, step=step)]

    assert sorted(token for part in order(0, 0) for token in part) == sorted(batch.tokens_T[2::3].tolist())
    assert [len(part) for part in order(0, 0)] == [3, 2, 2]
    assert order(0, 0) == order(0, 0)
    assert len({str(order(seed, step)) for seed in range(3) for step in range(3)}) > 1


def test_seeds_differ_between_uses_steps_and_runs() -> None:
    seeds = {derive_seed(seed, step, use) for seed in range(3) for step in range(50) for use in ("rollout", "evaluate")}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_torch_generator_state_is_left_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(minibatches(pack(rollouts(4)), 2, seed=0, step=0))
    assert torch.equal(torch.get_rng_state(), before)

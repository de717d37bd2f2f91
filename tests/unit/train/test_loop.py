"""The loop's order, with a recorder in place of engine and servers: real ones run in tests/dist and tests/e2e."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tepo_megatron.config import EngineConfig, EvaluateConfig, ObjectiveConfig, RolloutConfig, RunConfig, TrainConfig
from tepo_megatron.config.rollout import CanaryConfig
from tepo_megatron.engine.batch import pack
from tepo_megatron.engine.step import UpdateResult
from tepo_megatron.train.loop import Loop
from tepo_megatron.train.minibatches import derive_seed, minibatches
from tepo_megatron.types import Batch, Rollout, WeightsVersion


def rollouts(count: int) -> list[Rollout]:
    return [
        Rollout(f"p{at // 2}", at // 2, (3,), (4, 5 + at), (-1.0, -1.0), "stop", WeightsVersion(0), reward=float(at % 2))
        for at in range(count)
    ]


class Recorder:
    """Engine, driver and publisher at once; ``dies_at`` names calls under which a server dies, once each.

    It keeps count of who has the GPU, where they are shared: two of trainer, servers' weights and servers' caches at most, and
    never the trainer's optimizer beside anything of a server.
    """

    def __init__(self, dies_at: tuple[str, ...] = (), *, shares_gpus: bool = False, row: int | None = None) -> None:
        self.calls: list[str] = []
        self.row = row
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
    def broadcast_from_root(self, value: bool) -> bool:
        return value

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

    def update(self, batch: Batch) -> UpdateResult:
        self.calls.append(f"update {batch.num_sequences}")
        return UpdateResult(loss=1.0, grad_norm=2.0, lr=0.1, sums={"entropy/mean": (3.0, 4.0)}, extrema={"ratio/max": 1.5})

    def save(self, folder: Any, *, step: int, state: dict[str, Any]) -> None:
        assert state == {"drawn": step}
        self._check_gpus(trainer="everything", servers="asleep")
        self.calls.append(f"save {step}")

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

    def log(self, step: int, row: dict[str, float]) -> None:
        assert self.row is None or step > self.row
        self.row = step
        self.calls.append(f"log {step}")
        if row:
            assert row["reward/mean"] == 0.5
            assert row["entropy/mean"] == pytest.approx(0.75)
            assert row["ratio/max"] == 1.5
            assert row["memory/peak_gib"] == 1.0
            assert ("entropy/noise/p99" in row) == (self.calls.count("noise") > self.noted)
            self.noted = self.calls.count("noise")

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn}


def run(
    steps: int,
    *,
    dies_at: tuple[str, ...] = (),
    every: int = 2,
    canary: int = 1,
    save_every: int = 1,
    shares_gpus: bool = False,
    noise_every: int = 50,
    resumed: int = 0,
    row: int | None = None,
) -> list[str]:
    config = RunConfig(
        engine=EngineConfig(noise_every=noise_every),
        objective=ObjectiveConfig(preset="grpo"),
        rollout=RolloutConfig(prompts_per_step=3, samples_per_prompt=2, canary=CanaryConfig(every=canary)),
        train=TrainConfig(steps=steps, minibatches=2, save_every=save_every),
        evaluate=EvaluateConfig(every=every),
    )
    recorder = Recorder(dies_at, shares_gpus=shares_gpus, row=row)
    Loop(config, recorder, recorder, recorder, step=resumed).run()  # type: ignore[arg-type]
    assert recorder.trainer == "everything"  # what is exported afterwards is there
    return recorder.calls


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

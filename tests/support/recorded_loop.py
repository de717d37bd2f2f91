"""A training loop with a recorder in place of trainer, rank 0 and servers, for tests of the order of what it does."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tepo_megatron.config import EngineConfig, EvaluateConfig, ObjectiveConfig, RolloutConfig, RunConfig, TrainConfig
from tepo_megatron.config.rollout import CanaryConfig
from tepo_megatron.config.rollout_server import ServerConfig
from tepo_megatron.config.train import RollbackConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.run.loop import Loop
from tepo_megatron.run.output.resume import Resumed
from tepo_megatron.runtime.preemption import StopRequested, StopSignals
from tepo_megatron.runtime.watch.heartbeat import Heartbeat
from tepo_megatron.trainer.packing import pack
from tepo_megatron.trainer.protocol import SavedCheckpoint, UpdateResult
from tepo_megatron.weights.storage.manifest import DamagedCheckpoint

ROLLBACK = RollbackConfig(metric="loss", above=20.0, max_times=1)
"""Of runs with an output folder."""

STEP = ["score 3", "score 3", "update 3", "update 3"]


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
    """Trainer, publisher and rank 0 with all its parts; ``dies_at`` names calls under which a server dies, once each.

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
        self.last_step = row
        self.servers = self.collector = self.output = self.checks = self
        self.callbacks: Any = SimpleNamespace(go_on=True)
        self.rollouts: list[Rollout] = []
        self.skips, self.updates = skips, 0
        self.spikes, self.folder = spikes, output
        self.damaged: tuple[str, ...] = ()
        """Names of checkpoints that are not whole."""
        self.saving: SavedCheckpoint | None = None
        self.dies_at = list(dies_at)
        self.noted = 0
        self.shares_gpus = shares_gpus
        self.trainer, self.server_memory = "everything", "absent"
        self.weights = SimpleNamespace(version=self._version)
        self.checkpoints = SimpleNamespace(begin=self._begin, finish=self._finish, check=self._check, load=self._load)

    def _check_gpus(self, *, trainer: str, servers: str) -> None:
        if self.shares_gpus:
            assert (self.trainer, self.server_memory) == (trainer, servers)

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
        assert not self.shares_gpus or self.server_memory in allowed[what]

    def memory(self) -> dict[str, float]:
        return {"memory/peak_gib": 1.0}

    def take_routing_metrics(self) -> dict[str, float]:
        return {}

    def sleep(self) -> None:
        assert self.server_memory == "awake"
        self.server_memory = "asleep" if self.shares_gpus else "awake"

    def revive_or_wake(self, died: bool) -> bool:
        self._check_gpus(trainer="nothing", servers="gone" if died else "weights")
        dies = "wake" in self.dies_at and self._dies("wake")
        self.server_memory = "asleep" if died or dies else "awake"  # a server that was revived sleeps
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

    def _version(self, step: int) -> WeightsVersion:
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

    def _begin(self, folder: Any, *, step: int, state: dict[str, Any], background: bool) -> None:
        assert self.saving is None
        assert state == {"drawn": step}
        assert self.noted_row["reward/mean"] == 0.5  # a checkpoint has it before it is logged
        self._check_gpus(trainer="everything", servers="absent" if "close" in self.calls else "asleep")
        self.saving = SavedCheckpoint(
            folder / f"step_{step:06d}", step, stage_s=1.0, write_s=2.0, waited_s=1.5 if background else 3.0
        )
        self.calls.append(f"save {step}")

    def _finish(self, *, wait: bool = True) -> SavedCheckpoint | None:
        """What is written beside training is whole when it is asked for the first time without waiting."""
        saved, self.saving = self.saving, None
        if saved is not None and saved.waited_s < saved.write_s:
            self.calls.append(f"saved {saved.step}" if wait else f"saved {saved.step} meanwhile")
        if saved is not None and self.folder is not None:
            saved.path.mkdir(parents=True, exist_ok=True)
            (saved.path / "state.json").write_text("{}")
        return saved

    # rank 0
    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run_or_revive(self, work: Callable[[], Any]) -> tuple[Any, bool]:
        self._check_gpus(trainer="nothing", servers="awake")
        result = work()
        if result == "died":
            self.server_memory = "asleep"
            return None, True
        return result, False

    def wait_until_ready(self) -> None:
        self._check_gpus(trainer="nothing", servers="absent")
        self.server_memory = "asleep"
        self.calls.append("ready")

    def collect(self, step: int) -> Any:
        self.drawn = step + 1
        return "died" if self._dies(f"collect {step}") else rollouts(6)

    def update_weights(self, version: WeightsVersion, publisher: Any) -> bool:
        assert publisher is self
        assert version == self._version(version.step)
        self._check_gpus(trainer="weights", servers="asleep")
        died = self._dies(f"update weights {version.step}")
        self.server_memory = "gone" if died else "weights"
        return died

    def _check(self, folder: Path) -> dict[str, int]:
        if folder.name in self.damaged:
            raise DamagedCheckpoint(folder, ["state.json was changed since it was written"])
        return {"step": int(folder.name.removeprefix("step_"))}

    def _load(self, folder: Path, checked: dict[str, int]) -> dict[str, int]:
        self._check_gpus(trainer="everything", servers="asleep")
        self.calls.append(f"load {folder.name}")
        return checked

    def go_back(self, found: Resumed, sentence: str) -> None:
        self.last_step = found.step
        self.calls.append(f"back {found.step}: {sentence.partition(';')[0]}")
        self.calls.extend(f"passed over {error.folder.name}" for error in found.damaged)

    def keep_skipped(self, step: int, skipped: list[dict[str, Any]]) -> None:
        self.calls.append(f"keep {step} {[each['cause'] for each in skipped]}")

    def check_canary(self, step: int, prompt: tuple[int, ...], logprobs: list[float]) -> Any:
        assert len(logprobs) == len(prompt) - 1
        return "died" if self._dies(f"canary {step}") else None

    def check_rollouts(self, step: int, parts: list[Batch], collected: list[Rollout]) -> None:
        assert [part.num_sequences for part in parts] == [3, 3]
        assert self.calls[-2:] == ["score 3"] * 2  # all of them, and before the first update

    def evaluate(self, step: int) -> Any:
        return "died" if self._dies(f"evaluate {step}") else None

    def note_step(self, step: int, row: dict[str, float], parts: list[Batch], updates: list[UpdateResult]) -> None:
        assert step == self.drawn
        assert [part.num_sequences for part in parts] == [3, 3]
        assert len(updates) == 2
        self.noted_row = row

    def log(self, step: int, row: dict[str, float]) -> None:
        assert self.last_step is None or step > self.last_step
        self.last_step = step
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
        self.server_memory = "absent"
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
    async_save: bool = False,
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
        train=TrainConfig(
            steps=steps,
            minibatches=2,
            save_every=save_every,
            async_save=async_save,
            rollback=ROLLBACK if output else None,
        ),
        evaluate=EvaluateConfig(every=every),
    )
    recorder = Recorder(dies_at, shares_gpus=shares_gpus, row=row, stops_at=stops_at, skips=skips, spikes=spikes, output=output)
    loop = Loop(config, recorder, recorder, recorder, Heartbeat(), step=resumed)  # type: ignore[arg-type]
    loop.leaving.signals = recorder.signals
    return loop, recorder

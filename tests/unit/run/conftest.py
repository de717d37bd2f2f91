"""A real loop on the reference trainer and sampler, in this process, whose calls are noted and in which faults are planted."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.run import rank0 as rank0_module
from tepo_megatron.run import training
from tepo_megatron.run.callbacks import Extensions
from tepo_megatron.run.display.progress import Progress
from tepo_megatron.run.loop import Loop
from tepo_megatron.run.metrics import read_metrics
from tepo_megatron.run.output.output import Output
from tepo_megatron.run.output.resume import resolve_dtype
from tepo_megatron.runtime.preemption import StopSignals
from tepo_megatron.sampler.protocol import CacheReading, ServerDied
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.trainer.protocol import UpdateResult, trainer_kind
from tests.support.data_files import write_jsonl
from tests.support.fake_sampling import Killed
from tests.support.reference_sampler import ReferenceSampler, ReferenceStream
from tests.support.reference_trainer import ReferenceCheckpoints, ReferenceTrainer

SMALL = {
    "train": {"steps": 2, "minibatches": 2, "save_every": 1},
    "rollout": {
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "sampling": {"max_new_tokens": 4},
        "server": {"transfer": "gather", "max_model_len": 32},
        "canary": {"every": 1},
    },
    "evaluate": {"every": 0, "problems": 3, "samples": 2},
    "objective.preset": "grpo",
    "reward.timeout_s": 600.0,  # of a busy machine
    "optimizer": {"lr": 1e-3, "warmup_steps": 0},
    "log": {"progress": "none", "tensorboard": False},
}


def open_output(folder: Path, *, log: Mapping[str, Any] | None = None, **sections: Any) -> tuple[Output, list[str]]:
    """Without TensorBoard, unless ``log`` has it. Also returns the list of what is said."""
    said: list[str] = []
    progress = Progress()
    progress.message = said.append  # type: ignore[method-assign, assignment]
    document = {"output": str(folder), "log": {"tensorboard": False, **(log or {})}, **sections}
    return Output(RunConfig.model_validate(document), progress), said


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


@dataclass
class ReferenceRun:
    """``dies_at``: calls in which the server dies, once each. ``stops_at``, ``killed_at``: before which call SIGTERM comes, or
    the process ends, by its number (from 0) or its name. ``skips``, ``spikes``: numbers of updates (from 1) that are skipped,
    or have a loss of 50 and a ratio of a million.
    """

    config: RunConfig
    dies_at: Sequence[str] = ()
    stops_at: int = -1
    killed_at: int | str = -1
    skips: Sequence[int] = ()
    spikes: Sequence[int] = ()
    callbacks: Sequence[object] = ()
    reward: Callable[..., float] = lambda problem, response: float(sum(map(ord, response)) % 2)
    calls: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    rollouts: dict[int, list[Rollout]] = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)
    """The problems of all groups, in the order of training; those of steps that were undone too."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    digest: str = ""

    def __post_init__(self) -> None:
        self.config = resolve_dtype(self.config, gpus=0)
        self.deaths = list(self.dies_at)
        self.shares_gpus = self.config.rollout.server.placement == "colocated"
        self.trainer_memory, self.sampler_awake = "everything", False

    def note(self, call: str) -> None:
        if self.killed_at in (len(self.calls), call):
            raise Killed
        stops = len(self.calls) == self.stops_at
        self.calls.append(call)
        if stops:
            signal.raise_signal(signal.SIGTERM)
        if call in self.deaths:
            self.deaths.remove(call)
            raise ServerDied("the reference sampler is gone")

    def noted(self, *starts: str) -> list[str]:
        return [call for call in self.calls if call.startswith(starts)]

    def check_memory(self, trainer: str, *, awake: bool) -> None:
        """On shared GPUs the trainer and the sampler take turns."""
        assert not self.shares_gpus or (self.trainer_memory, self.sampler_awake) == (trainer, awake)

    @property
    def figures(self) -> list[dict[str, Any]]:
        """The rows without what depends on the clock."""
        by_clock = ("time/", "tokens/s", "idle/", "lost/", "log/")
        return [{name: value for name, value in row.items() if not name.startswith(by_clock)} for row in self.rows]

    def on_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        self.rollouts[step] = list(rollouts)
        self.drawn += list({rollout.group: rollout.problem_id for rollout in rollouts}.values())
        self.note(f"rollouts {step}")

    def on_evaluation(self, step: int, result: object) -> None:
        self.note(f"evaluation {step}")

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.note(f"row {step}")

    def on_checkpoint(self, step: int, folder: Path) -> None:
        self.note(f"saved {step}")

    def run(self, before: Callable[[Loop], None] = lambda loop: None) -> ReferenceRun:
        """A whole run, resumed where ``train.resume`` says so; ``before`` it, the loop is passed."""
        try:
            with StopSignals(ends=False).borrowed() as signals, contextlib.ExitStack() as stack:
                model_dir = resolve_model_path(self.config.model.path)
                extensions = Extensions(callbacks=(self, *self.callbacks), reward=self.reward)
                loop = self.loop = training.open_loop(self.config, model_dir, extensions, stack)
                before(loop)
                signals.defer()
                loop.run()
                assert self.trainer_memory == "everything"  # what is exported afterwards
        finally:
            rows = self.config.output / "metrics.jsonl"
            self.rows = read_metrics(rows) if rows.exists() else []
        self.digest = loop.engine.weights.version(0).digest
        return self


class _Trainer(ReferenceTrainer):
    def __init__(self, run: ReferenceRun, model_dir: Path) -> None:
        super().__init__(run.config, model_dir)
        self.run, self.updates = run, 0
        self.checkpoints = _Checkpoints(self)

    def score(self, batch: Batch) -> Batch:
        self.run.check_memory("everything", awake=False)
        self.run.note("score")
        return super().score(batch)

    def measure_noise(self, batch: Batch) -> dict[str, float]:
        self.run.note("noise")
        return super().measure_noise(batch)

    def update(self, batch: Batch, *, last: bool = True) -> UpdateResult:
        self.run.check_memory("everything", awake=False)
        self.run.note("update")
        self.updates += 1
        if self.updates in self.run.skips:
            return self.skip("planted", float("nan"))
        result = super().update(batch, last=last)
        if self.updates in self.run.spikes:
            result = replace(result, loss=50.0, extrema={**result.extrema, "ratio/max": 1e6})
        return result

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        self.run.check_memory("weights", awake=False)
        return super().prompt_logprobs(prompt)

    def onload(self) -> None:
        assert not (self.run.shares_gpus and self.run.sampler_awake)
        self.run.trainer_memory = "everything"

    def onload_weights_only(self) -> None:
        assert not (self.run.shares_gpus and self.run.sampler_awake)
        self.run.trainer_memory = "weights"

    def offload(self) -> None:
        self.run.trainer_memory = "nothing"


class _Checkpoints(ReferenceCheckpoints):
    def begin(self, folder: Path, *, step: int, state: dict[str, Any], background: bool = False) -> None:
        self._trainer.run.check_memory("everything", awake=False)  # type: ignore[attr-defined]
        self._trainer.run.note(f"save {step}")  # type: ignore[attr-defined]
        super().begin(folder, step=step, state=state, background=background)

    def load(self, folder: Path, checked: dict[str, Any] | None = None) -> dict[str, Any]:
        self._trainer.run.note(f"load {folder.name}")  # type: ignore[attr-defined]
        return super().load(folder, checked)


class _Sampler(ReferenceSampler):
    """It sleeps only where it shares the trainer's GPUs, as the fleet does."""

    def __init__(self, run: ReferenceRun, config: Any, **options: Any) -> None:
        # Responses of several lengths: the model is not trained to end one.
        super().__init__(config, **{**options, "stop_token_ids": (*options["stop_token_ids"], *range(0, 60, 5))})
        self.run = run

    def _note(self, call: str) -> None:
        try:
            self.run.note(call)
        except ServerDied:
            self._weights, self._version = {}, None
            self.run.sampler_awake = self._is_awake = False
            raise

    def start(self) -> None:
        super().start()
        self._note("start")
        self.run.sampler_awake = self._is_awake = not self.run.shares_gpus

    def sleep(self) -> None:
        self._note("sleep")
        if self.run.shares_gpus:
            super().sleep()
            self.run.sampler_awake = False

    def wake_up(self) -> None:
        self._note("wake")
        super().wake_up()
        self.run.sampler_awake = True

    def stop(self) -> None:
        super().stop()
        self.run.sampler_awake = False

    def update_weights_from_tensors(self, version: WeightsVersion, manifest: Any, tensors: Any) -> None:
        assert self.run.trainer_memory == "weights"
        self._note(f"weights {version.step}")
        super().update_weights_from_tensors(version, manifest, tensors)

    def sample_stream(self, sampling: Any, **options: Any) -> ReferenceStream:
        self.run.check_memory("nothing", awake=True)
        self._note("sample")
        return super().sample_stream(sampling, **options)

    def prompt_logprobs(self, prompt: Sequence[int]) -> dict[str, list[float]]:
        self._note("canary")
        assert self._version is not None
        gap = 1e-5 * (1 + self._version.step)  # far from rounding, and another one at each step
        return {url: [value + gap for value in values] for url, values in super().prompt_logprobs(prompt).items()}

    def read_through_cache(self, prompt: Sequence[int], n: int) -> dict[str, CacheReading]:
        return {"reference": CacheReading([-1.0] * n, [-1.0] * n, 0)}  # it has no cache


@pytest.fixture(scope="session")
def few_problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run need not read and encode the thousands of the built-in ones."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    return Path(write_jsonl(path, [{"prompt": f"{a}+{a + 3}=", "answer": str(2 * a + 3)} for a in range(99)]))


@pytest.fixture
def reference_run(tmp_path: Path, few_problems: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ReferenceRun]:
    """Makes a run of two steps of two groups of two, changed by settings (sections or dotted names) and planted faults."""
    current: list[ReferenceRun] = []
    monkeypatch.setattr(trainer_kind(), "make_trainer", lambda config, model_dir, **_: _Trainer(current[-1], model_dir))
    monkeypatch.setattr(rank0_module, "make_sampler", lambda config, **options: _Sampler(current[-1], config, **options))
    monkeypatch.setattr(Progress, "message", lambda self, text: current[-1].said.append(text))

    def make(config: Mapping[str, Any] | None = None, **changes: Any) -> ReferenceRun:
        data = {"train": str(few_problems), "heldout": str(few_problems)}
        settings = [*SMALL.items(), ("data", data), ("output", str(tmp_path / "out")), *(config or {}).items()]
        overrides = [f"{name}={json.dumps(value)}" for name, value in settings]
        current.append(ReferenceRun(load_run(None, overrides), **changes))
        return current[-1]

    return make

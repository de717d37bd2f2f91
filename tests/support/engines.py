"""Engines that take a world of gloo ranks in turn, and what tests of them share: random models, rollouts, comparisons."""

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch, ObjectiveOutput, TokenScores
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.trainer.protocol import UpdateResult
from tepo_megatron.weights.geometry import Box, Shard
from tepo_megatron.weights.storage.stored import StoredWeights
from tepo_megatron.weights.transfer.digests import fingerprint
from tests.support.launch import end_model_parallel, run_dist
from tests.support.random_models import VOCABULARY


def make_engine(config: RunConfig | Mapping[str, Any], objective: Any = None, **options: Any) -> Any:
    """Splits the ranks again if an engine before it has split them."""
    from megatron.core import parallel_state

    from tepo_megatron.trainer.megatron.engine import Engine

    warnings.filterwarnings("ignore")
    if parallel_state.model_parallel_is_initialized():
        end_model_parallel()
    run = config if isinstance(config, RunConfig) else RunConfig.model_validate(config)
    path = run.model.path
    return Engine(run, resolve_model_path(path) if path.startswith("builtin:") else Path(path), objective, **options)


def save_checkpoint(engine: Any, folder: Path, *, step: int, state: dict[str, Any]) -> Path:
    engine.checkpoints.begin(folder, step=step, state=state)
    path: Path = engine.checkpoints.finish().path
    return path


@dataclass(frozen=True, kw_only=True)
class Split:
    """How an engine divides the ranks of a world. ``resumes``: the one from whose first checkpoint it continues."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    first: int | None = None
    last: int | None = None
    sp: bool = False
    distributed: bool = False
    resumes: Any = None

    @property
    def parallel(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name) for name in ("tp", "pp", "vpp", "dp", "cp", "ep", "etp")}
        ends = {"num_layers_in_first_pipeline_stage": self.first, "num_layers_in_last_pipeline_stage": self.last}
        return {**sizes, **ends, "sequence_parallel": self.sp}

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def name(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != getattr(type(self), name)}
        origin = changed.pop("resumes", None)
        words = [name if value is True else f"{name}{value}" for name, value in changed.items()]
        return "-".join([*words, *([f"from-{origin.name}"] if origin else [])]) or "one"


AnySplit = TypeVar("AnySplit", bound=Split)


class Worlds(Generic[AnySplit]):
    """Starts each world when it is first asked for, and those first from whose checkpoints it resumes. In a world
    ``work(split, folder)`` reports on one split after the other, on every rank. A world that failed is not started again.
    """

    def __init__(self, folder: Path, splits: Sequence[AnySplit], work: Callable[[AnySplit, Path], dict[str, Any]]) -> None:
        self.folder, self._splits, self._work = folder, splits, work
        self._started, self._failed = cache(self._start), dict[int, BaseException]()

    def _start(self, world: int) -> dict[AnySplit, list[dict[str, Any]]]:
        splits = [split for split in self._splits if split.world == world]
        for other in {split.resumes.world for split in splits if split.resumes} - {world}:
            self._started(other)
        if world in self._failed:
            raise self._failed[world]
        try:
            ranks = run_dist(world, _in_turn, self._work, self.folder, splits)
        except (Exception, pytest.fail.Exception) as error:  # the second one: pytest-timeout's
            self._failed[world] = error
            raise
        return {split: [reports[number] for reports in ranks] for number, split in enumerate(splits)}

    def ranks(self, split: AnySplit) -> list[dict[str, Any]]:
        return self._started(split.world)[split]

    def report(self, split: AnySplit) -> dict[str, Any]:
        return self.ranks(split)[0]

    def checkpoint(self, split: AnySplit, step: int = 1) -> Path:
        self.ranks(split)
        return self.folder / split.name / f"step_{step:06d}"


def _in_turn(
    _rank: int, _world: int, work: Callable[[AnySplit, Path], dict[str, Any]], folder: Path, splits: list[AnySplit]
) -> list[dict[str, Any]]:
    return [work(split, folder) for split in splits]


class MeanSurprise:
    """Minus the mean log-probability of the labels: a loss that any other library can compute."""

    needs_entropy_slope = False

    def __init__(self, *, needs_reference: bool = False) -> None:
        self.needs_reference = needs_reference

    def advantages(self, batch: Batch) -> Tensor:
        return torch.zeros(batch.num_sequences)

    def prepare(self, batch: Batch, **measured: object) -> Tensor:
        return batch.loss_mask_T.sum()

    def __call__(self, scores: TokenScores, batch: Batch, context: Tensor) -> ObjectiveOutput:
        return ObjectiveOutput(-scores.logprob[batch.loss_mask_T].sum(), context)


def figures(result: UpdateResult) -> dict[str, float]:
    means = {name: total / count for name, (total, count) in result.sums.items() if count}
    return {"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr, **result.extrema, **means}


def update_twice(engine: Any, batch: Batch, split: Split, folder: Path) -> list[list[float]]:
    """Saves after each update; a split that resumes loads a checkpoint instead of the first. Returns [loss, norm] of each."""
    updates = []
    for step in (1, 2):
        if split.resumes and step == 1:
            engine.checkpoints.load(folder / split.resumes.name / "step_000001")
            continue
        result = engine.update(batch)
        updates.append([result.loss, result.grad_norm])
        save_checkpoint(engine, folder / split.name, step=step, state={})
    return updates


def short_rollouts(*, routes: Callable[[torch.Generator, int], Any] | None = None, prompt: int = 1) -> list[Rollout]:
    """Responses of 1 to 29 tokens, so that data-parallel ranks have micro-batches of different sizes."""
    generator = torch.Generator().manual_seed(3)
    rollouts = []
    for number in range(8):
        length = int(torch.randint(1, 30, (1,), generator=generator))
        ids = torch.randint(0, VOCABULARY, (prompt + length,), generator=generator).tolist()
        recorded = {} if routes is None else {"routed_experts": routes(generator, len(ids))}
        made = (f"p{number}", number, tuple(ids[:prompt]), tuple(ids[prompt:]), (-1.0,) * length, "stop", WeightsVersion(0))
        rollouts.append(Rollout(*made, **recorded))
    return rollouts


def assert_first_moments(checkpoint: Path, gradients: Mapping[str, Tensor], *, norm: Tensor | float | None = None) -> None:
    """After one step Adam's first moment is a tenth of the gradient; to 1e-4 of its norm, or of ``norm``."""
    stored = StoredWeights.open_boxes(checkpoint, "exp_avg")
    assert stored.boxes.keys() == gradients.keys()
    for name, expected in gradients.items():
        moment = torch.empty(expected.shape)
        stored.read(name, Box.whole(expected.shape), moment)
        assert expected.norm() > 0, f"{name} has no gradient"
        error = (moment.double() / (1 - 0.9) - expected).norm() / (expected.norm() if norm is None else norm)
        assert error < 1e-4, f"{name}: the gradient is off by {error:.1e} of the norm"


def assert_moved_alike(before: Mapping[str, Tensor], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Two trainings from ``before`` ended at the same weights, to 2e-3 of the distance."""
    moved = torch.cat([(theirs[name] - before[name]).flatten() for name in before])
    apart = torch.cat([(ours[name] - theirs[name]).flatten() for name in before])
    assert apart.norm() < 2e-3 * moved.norm()


def whole_digest(tensors: Mapping[str, Tensor]) -> str:
    """The digest of a model's weights, of its tensors as its files have them."""
    shards = [Shard(name, box, name, box) for name, box in ((name, Box.whole(each.shape)) for name, each in tensors.items())]
    return f"{fingerprint(shards, tensors):016x}"


def bits_of(tensors: Mapping[str, Tensor]) -> str:
    """A digest of the names and of every bit."""
    digest = hashlib.blake2b()
    for name, tensor in tensors.items():
        digest.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def states_of(engine: Any) -> dict[str, Tensor]:
    """This rank's masters and Adam states."""
    from tepo_megatron.trainer.megatron.policy.optimizer_states import OptimizerStates

    held = OptimizerStates(engine.policy.optimizer).collect(engine.policy.trained)
    return {f"{name} {kind}": value for name, kind, value in held}


def score_with_and_without_replay(config: dict[str, Any], rollouts: list[Rollout], out: Path) -> dict[str, Any]:
    """Makes one step with the recorded experts, and saves it."""
    replay = {"sampling": {"temperature": 1.0}, "server": {"routing_replay": True}}
    engine = make_engine({**config, "rollout": replay}, MeanSurprise())
    batch = engine.batch_from_root(rollouts if engine.ranks.rank == 0 else None)
    own = engine.score(batch.with_(routed_experts_T=None))
    without = engine.take_routing_metrics()
    replayed = engine.score(batch)
    result = engine.update(replayed)
    report = {"own": own.old_logprobs_T, "replayed": replayed.old_logprobs_T, "without": without}
    report |= {"update": [result.loss, result.grad_norm], "routing": engine.take_routing_metrics()}
    save_checkpoint(engine, out, step=1, state={})
    return {**report, "nothing": engine.take_routing_metrics()}

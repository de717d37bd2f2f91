"""Both trainers keep the contract of ``tepo_megatron.trainer.protocol``, and the suite names what a broken one does wrong."""

import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.core.scores import rerounded
from tepo_megatron.core.types import Batch
from tepo_megatron.trainer.checkpoint_folder import read_state
from tepo_megatron.trainer.protocol import Trainer, trainer_kind
from tests.contracts.trainer_contract import CHECKS, digest, start, train
from tests.support import reference_trainer
from tests.support.launch import end_model_parallel, run_dist
from tests.support.programs import run_python


def make_megatron(
    config: RunConfig, model_dir: Path, *, teachers: Mapping[str, Path] = MappingProxyType({}), shares_gpus: bool = False
) -> Trainer:
    """Every trainer of a process splits the same world again."""
    from megatron.core import parallel_state

    from tepo_megatron.runtime.heartbeat import Heartbeat

    if parallel_state.model_parallel_is_initialized():
        end_model_parallel()
    options: dict[str, Any] = {"teachers": teachers, "shares_gpus": shares_gpus, "heartbeat": Heartbeat()}
    trainer = trainer_kind().make_trainer(config, model_dir, **options)
    trainer.close = lambda: None  # type: ignore[method-assign] # the world is run_dist's
    return trainer


def check_megatron(_rank: int, _world: int, folder: Path) -> dict[str, str]:
    warnings.filterwarnings("ignore")
    failed = {}
    for name, check in CHECKS.items():
        (folder / name).mkdir()
        try:
            check(make_megatron, folder / name)
        except Exception:
            failed[name] = traceback.format_exc()
    return failed


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All checks take one world in turn."""
    (failed,) = run_dist(1, check_megatron, tmp_path_factory.mktemp("megatron"))
    return failed


@pytest.mark.parametrize("name", CHECKS)
def test_megatron(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


@pytest.mark.parametrize("name", CHECKS)
def test_the_reference(name: str, tmp_path: Path) -> None:
    CHECKS[name](reference_trainer.make_trainer, tmp_path)


def test_the_registry_checks_a_config_without_loading_megatron() -> None:
    program = """
import sys
from tepo_megatron.config.load import load_run
from tepo_megatron.trainer.protocol import trainer_kind
config = load_run(None, ["engine.parallel.tp=2"])
trainer_kind().prepare_process(config)
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.weights.architecture import read_model_spec
trainer_kind().check_config(config, read_model_spec(resolve_model_path("builtin:tiny")), on_gpu=False, teachers={})
assert not {"megatron", "transformer_engine"} & set(sys.modules)
"""
    run_python("-c", program)
    with pytest.raises(ValueError, match="there is no trainer 'deepspeed'; it is one of megatron"):
        trainer_kind("deepspeed")


def resume_megatron(_rank: int, _world: int, folder: Path, checkpoint: Path) -> tuple[str, str]:
    """The digest of the first weights, and of those after another step from the checkpoint."""
    warnings.filterwarnings("ignore")
    trainer = start(make_megatron, folder)
    first = digest(trainer)
    trainer.checkpoints.load(checkpoint)
    loaded = digest(trainer)
    train(trainer, 1)
    return first, loaded


def test_megatron_continues_from_a_checkpoint_of_the_reference(tmp_path: Path) -> None:
    """Digests and checkpoints are formats, not an implementation's."""
    trainer = start(reference_trainer.make_trainer, tmp_path)
    first = digest(trainer)
    train(trainer, 0)
    trainer.checkpoints.begin(tmp_path / "checkpoints", step=1, state={})
    [found] = run_dist(1, resume_megatron, tmp_path, trainer.checkpoints.finish().path)
    assert found == (first, digest(trainer))


# -- faults, planted in the reference

Plant = Callable[[Any], None]


def planted(plant: Plant) -> Callable[..., Any]:
    """Makes the reference with a fault."""

    def make(config: RunConfig, model_dir: Path, **_options: Any) -> Any:
        trainer = reference_trainer.make_trainer(config, model_dir)
        plant(trainer)
        return trainer

    return make


def _wrap(owner: str, member: str, change: Callable[..., Any]) -> Plant:
    """``change(original, trainer, *args)`` replaces a member."""

    def plant(trainer: Any) -> None:
        part = getattr(trainer, owner) if owner else trainer
        original = getattr(part, member)
        setattr(part, member, lambda *args, **options: change(original, trainer, *args, **options))

    return plant


def _forget_moments(original: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> Any:
    state = original(*args, **options)
    for moments in trainer.adam.state.values():
        moments["exp_avg"].zero_()
    return state


def _step_anyway(original: Callable[..., Any], trainer: Any, cause: str, norm: float) -> Any:
    with torch.no_grad():
        trainer.params["lm_head.weight"] += 1e-3
    return original(cause, norm)


def _mean_of_means(trainer: Any) -> None:
    """Each micro-batch is prepared by itself."""
    objective, original = trainer.objective, type(trainer.objective).__call__

    class Prepared:
        needs_reference, needs_entropy_slope, advantages = False, False, objective.advantages

        def prepare(self, batch: Batch, **measured: Any) -> Any:
            return objective.prepare(batch, **measured)

        def __call__(self, scores: Any, micro: Batch, context: Any) -> Any:
            output = original(objective, scores, micro, objective.prepare(micro))
            return replace(output, denominator=output.denominator * 2)

    trainer.objective = Prepared()


def _noise_of(measured: bool) -> Plant:
    """The weights stay rounded again, or are not rounded."""

    def measure(original: Callable[..., Any], trainer: Any, batch: Batch) -> dict[str, float]:
        noise = original(batch)
        if not measured:
            return dict.fromkeys(noise, 0.0)
        trainer.rounding = rerounded(trainer.params.values())
        trainer.rounding.__enter__()
        return noise

    return _wrap("", "measure_noise", measure)


FAULTS: dict[str, tuple[Plant, str, str]] = {
    "no measure_noise": (lambda t: setattr(t, "measure_noise", None), "has_every_member", "Trainer.measure_noise"),
    "no export": (lambda t: setattr(t.weights, "export", None), "has_every_member", "WeightSource.export"),
    "noise of weights that were not rounded": (_noise_of(False), "reports_metrics", "Trainer.measure_noise must round"),
    "weights stay rounded again": (_noise_of(True), "reports_metrics", "Trainer.measure_noise must leave"),
    "no keyword background": (
        lambda t: setattr(t.checkpoints, "begin", lambda folder, *, step, state: None),
        "has_every_member",
        "Checkpoints.begin",
    ),
    "scores without the temperature": (
        _wrap("", "token_scores", lambda f, t, *a, **o: f(*a, **{**o, "temperature": 1.0})),
        "scores_as_a_dense_computation",
        "Trainer.score: old_logprobs_T",
    ),
    "prompts scored at the sampling temperature": (
        _wrap("", "token_scores", lambda f, t, *a, **o: f(*a, **{**o, "temperature": None})),
        "scores_prompts_at_temperature_one",
        "Trainer.prompt_logprobs",
    ),
    "scores rounded to bfloat16": (
        _wrap("", "score", lambda f, t, b: (s := f(b)).with_(old_logprobs_T=s.old_logprobs_T.bfloat16().float())),
        "updates_by_the_gradient",
        "Trainer.score: update of the same weights",
    ),
    "decayed norms": (lambda t: t.adam.param_groups[1].update(weight_decay=0.5), "updates_by_the_gradient", "Trainer.update"),
    "the last micro-batch is lost": (
        _wrap("", "micro_batches", lambda f, t, b: f(b)[: max(1, len(f(b)) - 1)]),
        "does_not_depend_on_micro_batches",
        "Trainer.update",
    ),
    "a mean of micro-batches' means": (_mean_of_means, "does_not_depend_on_micro_batches", "Trainer.update"),
    "a skipped step changes weights": (
        _wrap("", "skip", _step_anyway),
        "skips_what_is_not_finite",
        "Trainer.update changed weights",
    ),
    "moments are not restored": (_wrap("checkpoints", "load", _forget_moments), "resumes_bit_for_bit", "Checkpoints.load"),
    "a checkpoint's bytes are not read": (
        _wrap("checkpoints", "check", lambda f, t, folder: read_state(folder)),
        "refuses_a_damaged_checkpoint",
        "Checkpoints.check",
    ),
    "one digest for all weights": (
        _wrap("weights", "version", lambda f, t, step: WeightsVersion(step, "0" * 16)),
        "hands_out_weights",
        "WeightSource.version",
    ),
    "values are broadcast as they are": (
        _wrap("", "broadcast_from_root", lambda f, t, value: value),
        "broadcasts_json",
        "Trainer.broadcast_from_root",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_names_the_member_of_a_fault(fault: str, tmp_path: Path) -> None:
    plant, check, member = FAULTS[fault]
    with pytest.raises(AssertionError) as raised:
        CHECKS[check](planted(plant), tmp_path)
    assert str(raised.value).startswith(member)


CALLED = {
    "packs_rollouts_in_order": ["batch_from_root", "close"],
    "scores_as_a_dense_computation": ["score"],
    "scores_prompts_at_temperature_one": ["prompt_logprobs"],
    "updates_by_the_gradient": ["update", "weights.stream"],
    "broadcasts_json": ["broadcast_from_root"],
    "reports_metrics": ["measure_noise", "memory", "take_routing_metrics", "weights.version"],
    "keeps_bits_when_offloaded": ["offload", "onload", "onload_weights_only"],
    "resumes_bit_for_bit": ["checkpoints.begin", "checkpoints.finish", "checkpoints.load"],
    "refuses_a_damaged_checkpoint": ["checkpoints.check"],
    "hands_out_weights": ["weights.manifest", "weights.export"],
}
"""Check → members that it calls. Shards and adapters need a receiver: tests/e2e/test_sync.py."""

ERRORS = cycle((RuntimeError, KeyError, AssertionError))


@pytest.mark.parametrize(
    ("check", "path", "error"), [(check, path, next(ERRORS)) for check, paths in CALLED.items() for path in paths]
)
def test_a_member_that_raises_is_named(check: str, path: str, error: type[Exception], tmp_path: Path) -> None:
    owner, _, member = path.rpartition(".")

    def act(*_args: object, **_options: object) -> None:
        raise error("broken")

    act.__code__ = act.__code__.replace(co_qualname=f"Broken.{member}")

    def plant(trainer: Any) -> None:
        part = getattr(trainer, owner) if owner else trainer
        is_property = isinstance(getattr(type(part), member), property)
        part.__class__ = type("Broken", (type(part),), {member: property(act) if is_property else act})

    with pytest.raises(AssertionError) as raised:
        CHECKS[check](planted(plant), tmp_path)
    assert member in str(raised.value).split(" raised ")[0]

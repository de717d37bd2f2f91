"""Runs of the examples, as their READMEs start them."""

import importlib.util
from functools import partial
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest

import tepo_megatron
from tepo_megatron.config.load import load_run
from tepo_megatron.run import rank0
from tepo_megatron.run.sampling import served_teachers
from tepo_megatron.trainer.protocol import trainer_kind
from tests.support.programs import rows, run_python
from tests.support.reference_sampler import ReferenceSampler
from tests.support.reference_trainer import make_trainer

ROOT = Path(__file__).parents[2]
SMALL_RUN = (
    "train.steps=2",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "train.minibatches=2",
    "evaluate.every=2",
)
"""Over in seconds: two small steps, with an evaluation before and after."""
SHORT = "rollout.sampling.max_new_tokens=8"


run = partial(run_python, cwd=ROOT)
tepo = partial(run, "-m", "tepo_megatron")


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def greedy_accuracies(out: Path) -> list[float]:
    result = [row["accuracy/greedy"] for row in rows(out) if row.get("accuracy/greedy") is not None]
    print("held out, greedy:", result)
    return result


def check_learning(task: str, config: str, out: Path, begins_below: float, ends_above: float, *warm_start: str) -> None:
    """The mean reward of the samples in the first and the last five steps, and of greedy held-out games at the end; minutes."""
    start = out.with_name("start")
    run("examples/environments/make_warm_start.py", task, str(start), *warm_start, timeout_s=3600)
    tepo("train", config, f"model.path={start}", f"output={out}", timeout_s=7200)
    first, last = (fmean(row["reward/mean"] for row in some) for some in (rows(out)[1:6], rows(out)[-5:]))
    greedy = [row["heldout/reward_greedy"] for row in rows(out) if "heldout/reward_greedy" in row]
    print(f"reward {first:.3f} -> {last:.3f}; held out, greedy: {', '.join(f'{value:.3f}' for value in greedy)}")
    assert first < begins_below
    assert last > ends_above
    assert greedy[-1] > ends_above


ON_REFERENCES = (
    *("engine.parallel={tp: 1, sequence_parallel: false}", "rollout.server.transfer=gather"),
    *("log.progress=none", "log.curves=false", "log.tensorboard=false"),
)


def train_on_references(config: Path | str, output: Path, *overrides: str, **arguments: Any) -> list[dict[str, Any]]:
    """Returns the rows of metrics. ``arguments`` are those of :func:`tepo_megatron.train`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trainer_kind(),
            "make_trainer",
            lambda config, model_dir, teachers, **_: make_trainer(config, model_dir, teachers=teachers),
        )
        patch.setattr(rank0, "make_sampler", ReferenceSampler)
        patch.setattr(served_teachers, "make_sampler", ReferenceSampler)
        run = load_run(config, [f"output={output}", *ON_REFERENCES, *overrides])
        return [dict(row) for row in tepo_megatron.train(run, **arguments).rows]

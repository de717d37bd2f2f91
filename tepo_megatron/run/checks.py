"""Checks before a run, which raise ValueError: ``tepo train`` stops at the first failure, ``tepo doctor`` reports all."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tepo_megatron.config import RunConfig
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.run.loggers import Loggers
from tepo_megatron.run.output.resume import Resumed, resumes
from tepo_megatron.run.step.placement import Placement
from tepo_megatron.runtime.machine import is_root, this_machine
from tepo_megatron.sampler.protocol import sampler_spec
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tepo_megatron.trainer.protocol import trainer_kind
from tepo_megatron.weights.adapters import adapted_tensors, adapter_shapes
from tepo_megatron.weights.architecture import ModelSpec, read_model_spec
from tepo_megatron.weights.storage.convert import check_imported
from tepo_megatron.weights.storage.hf_folder import check_peft_folder
from tepo_megatron.weights.storage.stored import StoredWeights
from tepo_megatron.weights.table import tensor_shapes


@dataclass(frozen=True)
class RunSubject(Placement):
    @cached_property
    def model_dir(self) -> Path:
        return resolve_model_path(self.config.model.path)

    @cached_property
    def spec(self) -> ModelSpec:
        return read_model_spec(self.model_dir)

    def folders_of_teachers(self, place: str) -> dict[str, Path]:
        named = self.config.teachers.items()
        return {name: resolve_model_path(teacher.path) for name, teacher in named if teacher.place == place}

    @property
    def samples(self) -> bool:
        return self.config.rollout.replay is None


@dataclass(frozen=True)
class _NamedCheck:
    """``needs`` names requirements, such as "model"."""

    name: str
    verify: Callable[[RunSubject], object]
    """Raises ValueError with a sentence for the user."""
    needs: frozenset[str] = frozenset()
    applies: Callable[[RunSubject], bool] = lambda _: True


def check_model(config: RunConfig, *, machine: bool = True) -> Path:
    """Every rank calls. ``machine`` false leaves out what depends on this machine."""
    run = RunSubject(config, this_machine())
    model_dir = run.model_dir
    for check in RUN_CHECKS:
        if (machine or check.needs <= _MODEL) and check.applies(run):
            check.verify(run)
    return model_dir


def _check_trainer(run: RunSubject) -> None:
    teachers = {name: read_model_spec(folder) for name, folder in run.folders_of_teachers("ranks").items()}
    trainer_kind().check_config(run.config, run.spec, on_gpu=run.on_gpus, teachers=teachers)


def _check_teachers(run: RunSubject) -> None:
    tokenizer = load_tokenizer(run.model_dir)
    for name, teacher in run.config.teachers.items():
        other = load_tokenizer(resolve_model_path(teacher.path))
        if (difference := tokenizer.first_difference(other)) is not None:
            token, mine, theirs = difference
            raise ValueError(
                f"teachers.{name}: token {token} is {theirs!r} in the vocabulary of {teacher.path} and {mine!r} in that of "
                f"{run.config.model.path}; tokens are judged by their numbers, so take a model with the policy's tokenizer"
            )


def _check_lora(run: RunSubject) -> None:
    lora, shapes = run.config.model.lora, tensor_shapes(run.spec)
    assert lora is not None
    expected = adapter_shapes(shapes, adapted_tensors(shapes, lora.target_modules), lora.rank)
    if lora.serve == "adapter":
        run.spec.check_served_adapters()
    if lora.path is not None:
        check_peft_folder(lora.path, expected, rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora)


def _check_split(run: RunSubject) -> None:
    sampler_spec().check_model(run.server, run.spec)
    for name, folder in run.folders_of_teachers("server").items():
        _of_teacher(name, sampler_spec().check_model, run.config.teachers[name].served, folder)


def _check_server_machine(run: RunSubject) -> None:
    if run.server.placement != "external":
        sampler_spec().check_machine(run.server, run.spec)
    for name, folder in run.folders_of_teachers("server").items():
        if run.config.teachers[name].served.placement != "external":
            _of_teacher(name, sampler_spec().check_machine, run.config.teachers[name].served, folder)


def _of_teacher(name: str, check: Callable[[ServerConfig, ModelSpec], None], server: ServerConfig, folder: Path) -> None:
    try:
        check(server, read_model_spec(folder))
    except ValueError as error:
        raise ValueError(f"teachers.{name}: {str(error).replace('rollout.server.', f'teachers.{name}.server.')}") from error


def _check_length(run: RunSubject) -> None:
    assert run.server.max_model_len is not None
    run.spec.check_length(run.server.max_model_len, "rollout.server.max_model_len")


def _check_shards(run: RunSubject) -> None:
    assert run.config.model.shards is not None
    check_imported(run.config.model.shards, run.model_dir)


def _check_weights(run: RunSubject) -> None:
    """Reads headers. The ranks would refuse it when they load."""
    specs = {folder: read_model_spec(folder) for folder in run.folders_of_teachers("ranks").values()}
    if run.config.model.shards is None:  # the shards are compared with the model, which is checked for that
        specs[run.model_dir] = run.spec
    for folder, spec in specs.items():
        StoredWeights.open(folder).check(tensor_shapes(spec))


MODEL, TRAINER_MACHINE, SERVER_MACHINE = "model", "trainer machine", "server machine"
_MODEL, _TRAINER = frozenset({MODEL}), frozenset({TRAINER_MACHINE})

RUN_CHECKS: tuple[_NamedCheck, ...] = (
    _NamedCheck("placement", RunSubject.check, _TRAINER),
    _NamedCheck(
        "checkpoint", lambda run: Resumed.find(run.config, run.model_dir), _MODEL, lambda run: is_root() and resumes(run.config)
    ),
    _NamedCheck("trainer", _check_trainer, _MODEL),
    _NamedCheck("weights", _check_weights, _MODEL, lambda _: is_root()),
    _NamedCheck("teachers", _check_teachers, _MODEL, lambda run: bool(run.config.teachers)),
    _NamedCheck("model length", _check_length, _MODEL, lambda run: run.server.max_model_len is not None),
    _NamedCheck("routing replay", lambda run: run.spec.check_routing_replay(), _MODEL, lambda run: run.server.routing_replay),
    _NamedCheck("server split", _check_split, _MODEL, lambda run: run.samples),
    _NamedCheck("shards", _check_shards, _MODEL, lambda run: run.config.model.shards is not None),
    _NamedCheck("adapters", _check_lora, _MODEL, lambda run: run.config.model.lora is not None),
    _NamedCheck("memory", lambda run: run.check_memory(run.spec), _MODEL | _TRAINER),
    _NamedCheck("server machine", _check_server_machine, _MODEL | {SERVER_MACHINE}, lambda run: run.samples),
    _NamedCheck(
        "loggers",
        lambda run: Loggers.check_installed(run.config.log),
        applies=lambda run: run.config.log.wandb is not None or run.config.log.mlflow is not None,
    ),
)

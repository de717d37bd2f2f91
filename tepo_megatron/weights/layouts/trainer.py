"""Whether a model can be trained under ``engine.parallel``: the plan, a run before it starts anything, and the engine ask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts.megatron import pipeline_stages


class TrainerSizes(Protocol):
    """The fields of ``engine.parallel`` that a model must fit."""

    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def vpp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def cp_comm_type(self) -> str: ...
    @property
    def num_layers_in_first_pipeline_stage(self) -> int | None: ...
    @property
    def num_layers_in_last_pipeline_stage(self) -> int | None: ...
    @property
    def ep(self) -> int: ...
    @property
    def etp(self) -> int | None: ...
    @property
    def sequence_parallel(self) -> bool: ...


def check_trainer_split(spec: ModelSpec, parallel: TrainerSizes) -> tuple[tuple[range, ...], ...]:
    """Returns the layers of each chunk of each stage. Raises ValueError, naming the field to change, where Megatron could not
    train this model under these sizes."""
    spec.check_parallel(tp=parallel.tp, pp=1, ep=parallel.ep, etp=parallel.etp)  # stages may be uneven
    stages = pipeline_stages_of(spec, parallel)
    spec.check_training(tp=parallel.tp, ep=parallel.ep, etp=parallel.etp, sequence_parallel=parallel.sequence_parallel)
    if parallel.cp_comm_type == "a2a":
        spec.check_all_to_all(tp=parallel.tp, cp=parallel.cp)
    return stages


def pipeline_stages_of(spec: ModelSpec, parallel: TrainerSizes) -> tuple[tuple[range, ...], ...]:
    """Returns the layers of each chunk of each stage. Raises ValueError where the model's layers do not fit them."""
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    if first is None and last is None:
        spec.check_parallel(tp=1, pp=parallel.pp)
    try:
        return pipeline_stages(spec.num_layers, parallel.pp, chunks=parallel.vpp, first=first, last=last)
    except ValueError as error:
        asked = {
            "pp": parallel.pp,
            "vpp": parallel.vpp if parallel.vpp > 1 else None,
            "num_layers_in_first_pipeline_stage": first,
            "num_layers_in_last_pipeline_stage": last,
        }
        given = ", ".join(f"{name} = {value}" for name, value in asked.items() if value is not None)
        raise ValueError(f"engine.parallel does not fit the model with {given}: {error}") from None


def check_recompute(spec: ModelSpec, modules: Iterable[str], *, transformer_engine: bool) -> None:
    """Raises ValueError for the first of ``engine.recompute_modules`` that would do nothing, or fail, in this model.

    ``transformer_engine``: whether the layers are Transformer Engine's rather than Megatron's own.
    """
    for module in modules:
        reason = _cannot_recompute(spec, module, transformer_engine)
        if reason:
            raise ValueError(f"engine.recompute_modules has {module}, {reason}")


def check_balance(spec: ModelSpec, kind: str) -> None:
    """Raises ValueError where ``engine.moe_balance.kind`` has nothing to act on in this model."""
    if kind != "none" and spec.experts is None:
        raise ValueError(
            f"engine.moe_balance.kind = {kind} balances experts, and {spec.architecture} has none; leave engine.moe_balance out"
        )
    if kind == "expert_bias" and not (spec.experts and spec.experts.biased):
        raise ValueError(
            f"engine.moe_balance.kind = expert_bias moves a bias on each expert's score, and {spec.architecture} has none, in "
            "the rollout servers neither; set kind = aux_loss, or none"
        )


def _cannot_recompute(spec: ModelSpec, module: str, transformer_engine: bool) -> str | None:
    experts = spec.experts is not None
    if module == "mlp" and experts:
        return f"and every MLP of {spec.architecture} is one of experts; name moe instead"
    if module in ("moe", "moe_act") and not experts:
        return f"which is for models with experts, and {spec.architecture} has none; name mlp instead"
    if module == "moe_act" and not transformer_engine:
        return "which Megatron-Core has in Transformer Engine's layers alone (engine.layers = te); name moe instead"
    if module == "layernorm" and not transformer_engine:
        return "which Megatron-Core has with Transformer Engine alone; leave it out, or set engine.layers = te"
    if module == "layernorm" and not experts:
        return "but Transformer Engine computes the norms of a dense layer within its linears and keeps none; leave it out"
    return None

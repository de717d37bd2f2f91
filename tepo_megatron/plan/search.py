"""Searches for the smallest changes after which a run fits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.weights.architecture import ModelSpec

Settings = Mapping[str, Any]
"""Dotted field names → values."""

Knob = list[Settings]
"""Alternative settings of the same fields."""

MAX_KNOBS = 2

MAX_CHANGES_SHOWN = 4


@dataclass(frozen=True)
class _Change:
    """``needed``: bytes of the fullest rank; ``seconds``: training and scoring."""

    values: Settings
    config: RunConfig
    needed: float
    seconds: float

    @property
    def changes_rounding(self) -> bool:
        return "optimizer.exp_avg_dtype" in self.values

    def __str__(self) -> str:
        parts, before = [], None
        for path, value in self.values.items():
            section, _, name = path.rpartition(".")
            shown = f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value).lower()
            parts.append(f"{name if section == before else path} = {shown}")
            before = section
        return " and ".join(part for part in [", ".join(parts[:-1]), parts[-1]] if part)


def smallest_changes(
    config: RunConfig,
    spec: ModelSpec,
    longest: int,
    usable: float,
    measure: Callable[[RunConfig], tuple[float, float]],
) -> list[_Change]:
    """Changes the fewest knobs; more nodes are the last resort. Changes that compute the same come first, then the fastest.

    ``measure`` returns bytes and seconds of a run and raises ValueError if it cannot be laid out.
    """
    knobs = list(_knobs(config, spec, longest))
    groups_of_knobs = [[knob] for knob in knobs], list(map(list, combinations(knobs, MAX_KNOBS)))
    for groups in (*groups_of_knobs, [[knob] for knob in _more_nodes(config)]):
        changes = [
            change
            for group in groups
            for values in _products(group)
            if (change := _try(config, values, measure)) is not None and change.needed <= usable
        ]
        if changes:
            return sorted(changes, key=lambda change: (change.changes_rounding, change.seconds))[:MAX_CHANGES_SHOWN]
    return []


def _knobs(config: RunConfig, spec: ModelSpec, longest: int) -> Iterator[Knob]:
    engine, parallel = config.engine, config.engine.parallel
    yield from _optimizer_knobs(config)
    if not parallel.sequence_parallel:
        yield [{"engine.parallel.sequence_parallel": True}]
    smaller = max(engine.micro_batch_tokens // 2, longest)
    if smaller < engine.micro_batch_tokens:
        yield [{"engine.micro_batch_tokens": smaller}]
    if engine.head != "fused":
        yield [{"engine.head": "fused"}]
    if engine.recompute != "full":
        modules = ("core_attn", "moe" if spec.experts else "mlp")
        selective = {"engine.recompute": "selective", "engine.recompute_modules": modules}
        full = {"engine.recompute": "full", "engine.recompute_modules": ("core_attn",)}
        is_selective = engine.recompute == "selective"
        yield [selective, full if is_selective else {"engine.recompute": "full"}]
    for name in ("tp", "pp", "cp"):
        size = getattr(parallel, name)
        factors = [factor for factor in (2, 4, 8) if parallel.dp % factor == 0]
        if factors:
            yield [
                {f"engine.parallel.{name}": size * factor, "engine.parallel.dp": parallel.dp // factor} for factor in factors
            ]


def _optimizer_knobs(config: RunConfig) -> Iterator[Knob]:
    """One knob, since each setting needs the first."""
    optimizer = config.optimizer
    shared: Settings = {} if optimizer.distributed else {"optimizer.distributed": True}
    settings = [shared] if shared else []
    if not optimizer.own_masters and not config.engine.fp8.params:
        if config.model.dtype == "bfloat16" and config.engine.platform != "cpu":
            reduced = {"store_param_remainders": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
            settings.append({**shared, **{f"optimizer.{name}": value for name, value in reduced.items()}})
        settings.append({**shared, "optimizer.offload_fraction": 1.0})
    if settings:
        yield settings


def _more_nodes(config: RunConfig) -> Iterator[Knob]:
    parallel, nodes = config.engine.parallel, config.cluster.train_nodes
    for name in ("pp", "cp"):
        size = getattr(parallel, name)
        yield [{"cluster.train_nodes": nodes * factor, f"engine.parallel.{name}": size * factor} for factor in (2, 4, 8)]


def _products(knobs: list[Knob]) -> Iterator[Settings]:
    """Knobs that share a field, such as dp, are not combined."""
    if not knobs:
        yield {}
        return
    for rest in _products(knobs[1:]):
        yield from ({**rest, **values} for values in knobs[0] if not set(rest) & set(values))


def _try(config: RunConfig, values: Settings, measure: Callable[[RunConfig], tuple[float, float]]) -> _Change | None:
    raw = config.model_dump()
    for path, value in values.items():
        *sections, name = path.split(".")
        section = raw
        for key in sections:
            section = section[key]
        section[name] = value
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            changed = RunConfig.model_validate(raw)
        needed, seconds = measure(changed)
    except ValueError:
        return None
    return _Change(values, changed, needed, seconds)

"""Compares a run with the run that wrote a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.objective.custom import load_plugin
from tepo_megatron.versions import installed_version
from tepo_megatron.weights.architecture import generation_end_ids, read_model_spec
from tepo_megatron.weights.storage.manifest import sampled_digest

_TOKENIZER_FILES = (
    *("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.json", "merges.txt"),
)
_DISTRIBUTIONS = ("tepo-megatron", "torch", "megatron-core", "transformer-engine", "vllm")


class Kind(Enum):
    FREE = "free"  # results differ only by rounding
    RUN = "run"  # refused unless ``train.allow_change`` names the field
    ARCHITECTURE = "architecture"  # always refused


KINDS: Mapping[str, Kind] = {
    "name": Kind.FREE,
    "output": Kind.FREE,
    "seed": Kind.RUN,
    "model": Kind.FREE,  # compared by content: architecture, tokenizer, weights
    "model.lora": Kind.ARCHITECTURE,  # a checkpoint has the states of other tensors with it, without it, and of another rank
    "model.lora.alpha": Kind.RUN,
    "model.lora.rslora": Kind.RUN,
    "model.lora.serve": Kind.RUN,  # in bfloat16 it samples from another distribution
    "model.lora.path": Kind.FREE,  # compared by content: a resumed run does not read it
    "data": Kind.RUN,
    "data.train": Kind.FREE,  # paths; the sampler compares the problems themselves, and their sources' verifiers are compared
    "data.template": Kind.FREE,  # the sampler compares the prompts made with it
    "data.system_prompt": Kind.FREE,
    "data.fields": Kind.FREE,
    "data.filter": Kind.FREE,
    "data.order": Kind.FREE,
    "data.heldout": Kind.FREE,
    "rollout": Kind.FREE,
    "rollout.prompts_per_step": Kind.RUN,
    "rollout.samples_per_prompt": Kind.RUN,
    "rollout.sampling": Kind.RUN,
    "rollout.filter_groups": Kind.RUN,
    "rollout.oversample": Kind.RUN,
    "rollout.partial": Kind.RUN,
    "rollout.truncated": Kind.RUN,
    "rollout.overlong": Kind.RUN,
    "rollout.replay": Kind.RUN,
    "rollout.collect": Kind.RUN,
    "rollout.server.dtype": Kind.RUN,
    "rollout.server.head_dtype": Kind.RUN,
    "rollout.server.quantization": Kind.RUN,
    "rollout.server.speculative": Kind.RUN,
    "rollout.server.extra_args": Kind.RUN,  # anything may be in them
    "reward": Kind.FREE,
    "reward.verifier": Kind.RUN,
    "reward.kwargs": Kind.RUN,
    "reward.weights": Kind.RUN,
    "reward.failed_reward": Kind.RUN,
    "environment": Kind.FREE,
    "environment.name": Kind.RUN,
    "environment.kwargs": Kind.RUN,
    "environment.adapter": Kind.RUN,
    "environment.max_turns": Kind.RUN,
    "environment.max_tokens": Kind.RUN,
    "objective": Kind.RUN,
    "objective.preset": Kind.FREE,  # a name; the fields that it stands for are compared
    "objective.plugins": Kind.FREE,  # paths; contents are compared
    "engine": Kind.FREE,
    "engine.fp8": Kind.RUN,
    "engine.noise_every": Kind.RUN,  # the measurement is the objective's tolerance
    "engine.noise_sequences": Kind.RUN,
    "optimizer": Kind.RUN,
    "optimizer.distributed": Kind.FREE,
    "optimizer.offload_fraction": Kind.FREE,  # where the same Adam computes
    "train": Kind.FREE,
    "train.minibatches": Kind.RUN,
    "train.schedule": Kind.RUN,
    "train.max_staleness": Kind.RUN,
    "train.stale": Kind.RUN,
    "train.kv_cache": Kind.RUN,
    "evaluate": Kind.FREE,
    "log": Kind.FREE,
    "cluster": Kind.FREE,
}  # the longest dotted prefix decides

_OF_RESUMING = ("train.resume", "train.resume_from", "train.allow_change")


@dataclass(frozen=True)
class Difference:
    field: str
    old: Any
    new: Any
    kind: Kind
    what: str = ""

    def __str__(self) -> str:
        return f"{self.what or self.field}: {_show(self.old)} -> {_show(self.new)}"


def describe_run(config: RunConfig, model_dir: Path) -> dict[str, Any]:
    """Returns the ``identity`` of a run as JSON values."""
    architecture = {**asdict(read_model_spec(model_dir)), "dtype": config.model.dtype}
    fields = config.model_dump(mode="json")
    if config.rollout.replay is not None:
        fields["rollout"]["replay"] = str(config.rollout.replay.resolve())
    return {
        "architecture": architecture,
        "architecture_digest": _digest(json.dumps(architecture, sort_keys=True).encode()),
        "tokenizer": tokenizer_digest(model_dir),
        "end_tokens": sorted(set(generation_end_ids(model_dir))),
        "weights": sampled_digest(model_dir),
        "first_adapters": None if (lora := config.model.lora) is None or lora.path is None else sampled_digest(lora.path),
        "plugins": plugin_digests(config),
        "config": fields,
        "verifiers": source_verifiers(config),
        "versions": {name: installed_version(name) for name in _DISTRIBUTIONS},
    }


def source_verifiers(config: RunConfig) -> dict[str, Any]:
    return {
        source.called: [source.verifier, dict(source.verifier_kwargs), source.verifier_weights]
        for source in config.data.train_sources
        if source.verifier is not None
    }


def tokenizer_digest(model_dir: Path) -> str:
    parts = []
    for name in _TOKENIZER_FILES:
        if (model_dir / name).is_file():
            parts.append(f"{name} {_digest((model_dir / name).read_bytes())}\n")
    return _digest("".join(parts).encode())


def plugin_digests(config: RunConfig) -> dict[str, str]:
    return {PurePath(plugin.name).name: plugin.digest for plugin in map(load_plugin, config.objective.plugins)}


def compare_runs(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Difference]:
    differences = [
        Difference(f"architecture.{field}", old, new, Kind.ARCHITECTURE)
        for field, old, new in _differing(saved["architecture"], current["architecture"])
    ]
    if saved["tokenizer"] != current["tokenizer"]:
        what = "model.path's tokenizer, by its digest"
        differences.append(Difference("model.path", saved["tokenizer"], current["tokenizer"], Kind.RUN, what))
    end_tokens = saved.get("end_tokens", current["end_tokens"])  # older versions did not save them
    if end_tokens != current["end_tokens"]:
        what = "the end tokens of model.path's generation_config.json"
        differences.append(Difference("model.path", end_tokens, current["end_tokens"], Kind.RUN, what))
    if saved.get("verifiers", {}) != current.get("verifiers", {}):
        what = "the verifiers of data.train's sources"
        differences.append(Difference("data.train", saved.get("verifiers", {}), current.get("verifiers", {}), Kind.RUN, what))
    if sorted((then := saved.get("plugins", {})).values()) != sorted((now := current["plugins"]).values()):
        for name, old, new in _differing(then, now):
            differences.append(Difference("objective.plugins", old, new, Kind.RUN, f"objective.plugins' {name}, by its digest"))
    weights = [] if differences and differences[0].kind is Kind.ARCHITECTURE else list(_other_weights(saved, current))
    differences += weights
    reported = {*_OF_RESUMING, "model.dtype", *(difference.field for difference in weights)}
    defaults = RunConfig().model_dump(mode="json")
    for field, old, new in _differing(saved["config"], current["config"]):
        # A field unknown to the saving version had no effect then, as its default has none now.
        unknown_then = old is _ABSENT and new == _value(defaults, field)
        if field not in reported and not unknown_then:
            differences.append(Difference(field, old, new, kind_of(field, current["config"])))
    for name, old, new in _differing(saved["versions"], current["versions"]):
        differences.append(Difference(f"versions.{name}", old, new, Kind.FREE))
    return differences


def _other_weights(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[Difference]:
    (then, old), (now, new) = (_started_with(run, "weights", "model.path") for run in (saved, current))
    adapted = _value(current["config"], "model.lora") is not None
    if then is None or now is None:
        if old != new:
            what = "model.path, whose weights could not be compared (a resumed run trains its checkpoint's)"
            yield Difference("model.path", old, new, Kind.FREE, what)
    elif then != now:
        what = "which the checkpoint's adapters belong to" if adapted else "which a resumed run does not train"
        yield Difference("model.path", f"{old} ({then})", f"{new} ({now})", Kind.RUN, f"model.path's weights, {what}")
    if adapted and _value(saved["config"], "model.lora") not in (None, _ABSENT) and "first_adapters" in saved:
        (then, old), (now, new) = (_started_with(run, "first_adapters", "model.lora.path") for run in (saved, current))
        if now not in (None, then):
            began = None if then is None else f"{old} ({then})"
            what = "model.lora.path's adapters, which a resumed run does not train"
            yield Difference("model.lora.path", began, f"{new} ({now})", Kind.RUN, what)


def _started_with(run: Mapping[str, Any], digest: str, field: str) -> tuple[str | None, Any]:
    return run.get(digest), _value(run["config"], field)


def kind_of(field: str, config: Mapping[str, Any]) -> Kind:
    if field == "train.steps" and config["optimizer"]["schedule"] != "constant":
        return Kind.RUN
    parts = field.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((KINDS[prefix] for prefix in prefixes if prefix in KINDS), Kind.RUN)


def is_allowed(field: str, allowed: Sequence[str]) -> bool:
    return any(field == entry or field.startswith(f"{entry}.") for entry in allowed)


def refusal(differences: Sequence[Difference], allowed: Sequence[str]) -> str | None:
    refused = [
        difference for difference in differences if difference.kind is Kind.RUN and not is_allowed(difference.field, allowed)
    ]
    others = [difference for difference in differences if difference.kind is Kind.ARCHITECTURE]
    if not refused and not others:
        return None
    lines = [f"  {difference}" for difference in [*others, *refused]]
    if others:
        lines.append("it is another model, which nothing can let through; set model.path, model.dtype and model.lora back")
    if refused:
        fields = ",".join(dict.fromkeys(difference.field for difference in refused))
        lines.append(f"set back what was not meant, and let through what was: train.allow_change=[{fields}]")
        if any(difference.field in ("model.path", "model.lora.path") for difference in refused):
            lines.append("training that is to start from other weights or adapters is another run, with an output of its own")
    return "\n".join(["it would not be the same run:", *lines])


def idle_entries(changed: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """Entries that allow none of the ``changed`` fields."""
    return [entry for entry in allowed if not any(is_allowed(field, [entry]) for field in changed)]


class _Absent:
    def __repr__(self) -> str:
        return "(not known)"


_ABSENT = _Absent()


def _differing(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys([*old, *new]):
        ours, theirs = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            yield from _differing(ours, theirs, f"{prefix}{key}.")
        elif ours != theirs:
            yield prefix + key, ours, theirs


def _value(values: Any, field: str) -> Any:
    for key in field.split("."):
        values = values.get(key, _ABSENT) if isinstance(values, Mapping) else _ABSENT
    return values


def _show(value: Any) -> str:
    return repr(value) if value is _ABSENT else json.dumps(value, ensure_ascii=False)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]

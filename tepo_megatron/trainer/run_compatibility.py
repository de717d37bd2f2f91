"""Compares a run with the run that wrote a checkpoint."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tepo_megatron.config import RunConfig
from tepo_megatron.config.base import Section
from tepo_megatron.config.paths import absolute
from tepo_megatron.config.reward import AgentConfig
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.config.schema import longest_path
from tepo_megatron.versions import installed_version
from tepo_megatron.weights.architecture import TOKENIZER_FILES, Experts, ModelSpec, end_ids, read_model_spec, read_object
from tepo_megatron.weights.storage.manifest import sampled_digest

_DISTRIBUTIONS = ("tepo-megatron", "torch", "megatron-core", "transformer-engine", "vllm", "transformers", "math-verify")


_Kind = Literal["free", "run", "architecture"]
"""free: results differ only by rounding; run: refused unless ``train.allow_change`` names the field; else always refused."""

_FREE = (
    *("name", "output", "rollout", "reward", "engine", "train", "evaluate", "log", "cluster"),
    *("model", "model.lora.path"),  # compared by content
    # the sampler compares problems and prompts themselves, and the verifiers of sources are compared
    *("data.train", "data.template", "data.system_prompt", "data.fields", "data.filter", "data.order", "data.heldout"),
    *(f"environment.{name}" for name in ("workers", "concurrency", "servers", "key_file", "max_restarts")),
    *("environment.timeout_s", "environment.memory_mb", "environment.file_mb"),
    *(f"environment.agent.{name}" for name in ("port", "key_file", "max_request_mb")),
    *("objective.preset", "objective.plugins"),  # the fields of a preset and the contents of plugins are compared
    *("optimizer.distributed", "optimizer.offload_fraction"),  # where the same Adam computes
    *("teachers.NAME.threads", "teachers.NAME.server"),
)
_RUN = (
    *("seed", "data", "objective", "teachers", "optimizer", "environment"),
    *("model.lora.alpha", "model.lora.rslora", "model.lora.serve"),  # served in bfloat16 they sample from another distribution
    *("rollout.prompts_per_step", "rollout.samples_per_prompt", "rollout.sampling", "rollout.filter_groups"),
    *("rollout.oversample", "rollout.partial", "rollout.truncated", "rollout.overlong", "rollout.replay", "rollout.collect"),
    *("rollout.server.dtype", "rollout.server.head_dtype", "rollout.server.quantization", "rollout.server.speculative"),
    *("teachers.NAME.server.dtype", "teachers.NAME.server.head_dtype", "teachers.NAME.server.quantization"),
    *("rollout.server.extra_args", "teachers.NAME.server.extra_args"),  # anything may be in them
    *("reward.verifier", "reward.kwargs", "reward.weights", "reward.failed_reward"),
    *("engine.fp8", "engine.moe_balance", "engine.noise_every", "engine.noise_sequences"),  # noise: the objective's tolerance
    *("train.minibatches", "train.epochs_per_batch", "train.schedule", "train.max_staleness", "train.stale", "train.kv_cache"),
)
KINDS: Mapping[str, _Kind] = {
    **dict.fromkeys(_FREE, "free"),
    **dict.fromkeys(_RUN, "run"),
    "model.lora": "architecture",  # a checkpoint has the states of other tensors with it, without it, and of another rank
}
"""The longest dotted prefix decides; NAME stands for any."""

_OF_RESUMING = ("train.resume", "train.resume_from", "train.allow_change")


@dataclass(frozen=True)
class Difference:
    field: str
    old: Any
    new: Any
    kind: _Kind
    what: str = ""

    def __str__(self) -> str:
        return f"{self.what or self.field}: {_show(self.old)} -> {_show(self.new)}"


def describe_run(config: RunConfig, model_dir: Path) -> dict[str, Any]:
    config = absolute(config)
    architecture = {**asdict(read_model_spec(model_dir)), "dtype": config.model.dtype}
    files = [model_dir / name for name in TOKENIZER_FILES]
    tokenizer = [f"{file.name} {_digest(file.read_bytes())}\n" for file in files if file.is_file()]
    fields, settings = config.model_dump(mode="json"), model_dir / "tokenizer_config.json"
    if config.rollout.replay is not None:
        fields["rollout"]["replay"] = str(config.rollout.replay.resolve())
    return {
        "architecture": architecture,
        "architecture_digest": _digest(json.dumps(architecture, sort_keys=True).encode()),
        "tokenizer": _digest("".join(tokenizer).encode()),
        "chat_template": (model_dir / "chat_template.jinja").is_file() or "chat_template" in read_object(settings),
        "end_tokens": sorted(set(end_ids(model_dir / "generation_config.json"))),
        "weights": sampled_digest(model_dir),
        "first_adapters": None if (lora := config.model.lora) is None or lora.path is None else sampled_digest(lora.path),
        "plugins": config.objective.plugin_digests,
        "teachers": _teacher_digests(config),
        "config": fields,
        "verifiers": config.data.source_verifiers,
        "versions": {name: installed_version(name) or installed_version(f"{name}-cpu") for name in _DISTRIBUTIONS},
    }


def served_teachers(config: RunConfig) -> dict[str, Any]:
    """Those that decide rollouts: by source, the teacher's path and server, and the number of its top tokens."""
    named = {source.called: config.teacher_of(source.called) for source in config.data.train_sources}
    teachers = {source: config.teachers[name] for source, name in named.items() if name is not None}
    also = [config.objective.teacher_top_k] if config.objective.teacher_top_k else []
    return {name: [item.path, item.served.quantization, *also] for name, item in teachers.items() if item.place == "server"}


def _teacher_digests(config: RunConfig) -> dict[str, str | None]:
    """Of folders; those that are built in or come from a hub are known by their names."""
    folders = {name: Path(teacher.path) for name, teacher in config.teachers.items()}
    return {name: sampled_digest(folder) for name, folder in folders.items() if folder.is_dir()}


def compare_runs(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Difference]:
    saved = {**saved, **{key: absolute(saved[key]) for key in ("config", "verifiers") if key in saved}}  # once relative
    differences = [
        Difference(f"architecture.{field}", old, new, "architecture")
        for field, old, new in _differing(saved["architecture"], current["architecture"])
        if old is not _ABSENT or new != _architecture_default(field)  # the saving version computed with the default
    ]
    for key, field, what in (
        ("tokenizer", "model.path", "model.path's tokenizer, by its digest"),
        ("end_tokens", "model.path", "the end tokens of model.path's generation_config.json"),
        ("verifiers", "data.train", "the verifiers of data.train's sources"),
        ("teachers", "teachers", "the weights of teachers, by their digests"),
    ):
        new = current[key]
        old = saved.get(key, {} if key == "verifiers" else new)  # older versions did not save all
        if old != new:
            differences.append(Difference(field, old, new, "run", what))
    if sorted((then := saved.get("plugins", {})).values()) != sorted((now := current["plugins"]).values()):
        for name, old, new in _differing(then, now):
            differences.append(Difference("objective.plugins", old, new, "run", f"objective.plugins' {name}, by its digest"))
    weights = [] if differences and differences[0].kind == "architecture" else list(_other_weights(saved, current))
    differences += weights
    reported = {*_OF_RESUMING, "model.dtype", *(difference.field for difference in weights)}
    fields, now = _written_out(saved["config"]), _written_out(current["config"])
    with warnings.catch_warnings(action="ignore"):  # given when the run was read
        config = RunConfig.model_validate(now)
    environment, other = fields.get("environment"), now["environment"]
    if environment and other and "observations" not in environment:
        # text had no role then, nor has it without a template or of an agent
        plain = current["chat_template"] and environment["adapter"] != "agent"
        fields["environment"] = {**environment, "observations": "text" if plain else other["observations"]}
    same = saved.get("teachers", {}).items() & current["teachers"].items()
    reported |= {f"teachers.{name}.path" for name, digest in same if digest is not None}
    for field, old, new in _differing(fields, now):
        # A field unknown to the saving version had no effect then, as its default has none now.
        unknown_then = old is _ABSENT and new == _default(config, field)
        if field not in reported and not unknown_then:
            differences.append(Difference(field, old, new, _kind_of(field, current["config"])))
    for name, old, new in _differing(saved["versions"], current["versions"]):
        if old is not _ABSENT:  # of another list of packages
            differences.append(Difference(f"versions.{name}", old, new, "free"))
    return differences


def _written_out(fields: Mapping[str, Any]) -> dict[str, Any]:
    """With the sections that null stands for."""
    result = dict(fields)
    if (environment := fields.get("environment")) and environment["adapter"] == "agent":
        agent = environment.get("agent") or AgentConfig().model_dump(mode="json")
        result["environment"] = {**environment, "agent": agent}
    for name, teacher in (fields.get("teachers") or {}).items():
        if teacher["place"] == "server":
            server = teacher.get("server") or ServerConfig().model_dump(mode="json")
            result["teachers"] = {**result["teachers"], name: {**teacher, "server": server}}
    return result


def _default(section: Any, field: str) -> Any:
    """Of the class of the section that is there: a preset's value, or that of another kind, is no default."""
    *parents, name = field.split(".")
    for parent in parents:
        section = section[parent] if isinstance(section, Mapping) else getattr(section, parent)
    if not isinstance(section, Section):
        return _ABSENT
    return type(section).model_construct().model_dump(mode="json").get(name, _ABSENT)


def _architecture_default(field: str) -> Any:
    section, _, name = field.rpartition(".")
    return getattr({"": ModelSpec, "experts": Experts}.get(section), name, _ABSENT)


def _other_weights(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[Difference]:
    then, now = saved.get("weights"), current.get("weights")
    old, new = (_value(run["config"], "model.path") for run in (saved, current))
    adapted = _value(current["config"], "model.lora") is not None
    if then is None or now is None:
        if old != new:
            what = "model.path, whose weights could not be compared (a resumed run trains its checkpoint's)"
            yield Difference("model.path", old, new, "free", what)
    elif then != now:
        what = "which the checkpoint's adapters belong to" if adapted else "which a resumed run does not train"
        yield Difference("model.path", f"{old} ({then})", f"{new} ({now})", "run", f"model.path's weights, {what}")
    if adapted and _value(saved["config"], "model.lora") not in (None, _ABSENT) and "first_adapters" in saved:
        then, now = saved["first_adapters"], current.get("first_adapters")
        old, new = (_value(run["config"], "model.lora.path") for run in (saved, current))
        if now not in (None, then):
            began = None if then is None else f"{old} ({then})"
            what = "model.lora.path's adapters, which a resumed run does not train"
            yield Difference("model.lora.path", began, f"{new} ({now})", "run", what)


def _kind_of(field: str, config: Mapping[str, Any]) -> _Kind:
    if field == "train.steps" and config["optimizer"]["schedule"] != "constant":
        return "run"
    parts = field.split(".")
    if parts[0] == "teachers" and len(parts) > 2:
        parts[1] = "NAME"
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((KINDS[prefix] for prefix in prefixes if prefix in KINDS), "run")


def is_allowed(field: str, allowed: Sequence[str]) -> bool:
    return any(field == entry or field.startswith(f"{entry}.") for entry in allowed)


def refusal(differences: Sequence[Difference], allowed: Sequence[str]) -> str | None:
    others = [difference for difference in differences if difference.kind == "architecture"]
    refused = [item for item in differences if item.kind == "run" and not is_allowed(item.field, allowed)]
    if not refused and not others:
        return None
    lines = ["it would not be the same run:", *(f"  {difference}" for difference in [*others, *refused])]
    if others:
        lines.append("it is another model, which nothing can let through; set model.path, model.dtype and model.lora back")
    if refused:
        fields = dict.fromkeys(longest_path(difference.field) or difference.field for difference in refused)
        lines.append(
            "give the settings of the first command line again, or its OUTPUT/resolved.yaml; a change that is meant: "
            f"train.allow_change=[{','.join(fields)}]"
        )
        if {"model.path", "model.lora.path"} & set(fields):
            lines.append("training that is to start from other weights or adapters is another run, with an output of its own")
    return "\n".join(lines)


def idle_entries(changed: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """Entries that allow no ``changed`` field."""
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

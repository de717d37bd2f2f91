"""Words errors of YAML, ``${…}`` and pydantic as sentences."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from tepo_megatron.config.base import Section
from tepo_megatron.config.loading.schema import Place, allowed, discriminator, locate, schema_rows, show

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


_MOST_PROBLEMS = 40


def describe_yaml(error: yaml.YAMLError, subject: str = "") -> str:
    if not isinstance(error, yaml.MarkedYAMLError):
        return f"{subject}not valid YAML: {one_line(error)}"
    return f"{subject}not valid YAML: " + ", ".join(text for text in (error.context, error.problem) if text)


def describe_reference(error: OmegaConfBaseException) -> str:
    """One line about a ``${…}`` that could not be replaced."""
    what = str(error.msg or error).splitlines()[0]
    return f"{error.full_key}: {what}" if error.full_key else what


def describe_all(error: ValidationError) -> list[str]:
    """One line per place; union members that all refused a value share it."""
    details = error.errors()
    details = [item for item in details if not _is_of_another_form(item, details)]
    lines = list(dict.fromkeys(_describe(detail) for detail in details[:_MOST_PROBLEMS]))
    return [*lines, f"and {len(details) - _MOST_PROBLEMS} more"] if len(details) > _MOST_PROBLEMS else lines


def _is_of_another_form(detail: ErrorDetails, details: Sequence[ErrorDetails]) -> bool:
    """Whether other errors describe what is wrong in the list."""
    place = detail["loc"][:-1]
    others = (item["loc"] for item in details if len(item["loc"]) > len(detail["loc"]))
    return (
        detail["type"] == "string_type"
        and isinstance(detail["input"], list)
        and any(loc[: len(place)] == place for loc in others)
    )


def _describe(detail: ErrorDetails) -> str:
    place, raw = locate(detail["loc"]), detail["input"]
    kind = detail["type"]
    if kind == "extra_forbidden":
        return _describe_unknown(place, raw)
    if kind == "missing":
        return f"{place.path}: missing; allowed: {allowed(place.node)}"
    if kind == "union_tag_invalid":
        tags = discriminator(place.node)
        allowed_tags = ", ".join(show(tag) for tag in tags["mapping"])
        return f"{place.path}.{tags['propertyName']}: got {show(detail['ctx']['tag'])}; allowed: {allowed_tags}"
    if kind in ("value_error", "assertion_error"):
        text = " ".join(detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ").split())
        if text.startswith(place.path):
            return text
        return f"{place.path}: {text}" if isinstance(raw, dict | Section) else f"{place.path}: got {show(raw)}; {text}"
    if not place.node or allowed(place.node) == "any value":
        return f"{place.path}: got {show(raw)}; {detail['msg']}"
    line = f"{place.path}: got {show(raw)}; allowed: {allowed(place.node)}"
    if kind in ("string_too_short", "string_too_long"):
        line += f" of {place.node.get('minLength', 0)} to {place.node.get('maxLength', 'any number of')} characters"
    if kind == "string_type" and isinstance(raw, int | float) and "a list" not in line:
        line += f" (to give a number as text: {place.path}='\"{show(raw)}\"')"
    return line


def _describe_unknown(place: Place, raw: Any) -> str:
    near = _nearest_fields(place)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known keys here: {', '.join(place.siblings)}"
    return f"{place.path}: unknown key (got {show(raw)}); {hint}"


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


_BY_OTHER_NAMES = {
    "batch_size": ("rollout.prompts_per_step",),
    "train_batch_size": ("rollout.prompts_per_step",),
    "num_generations": ("rollout.samples_per_prompt",),
    "group_size": ("rollout.samples_per_prompt",),
    "n": ("rollout.samples_per_prompt", "evaluate.samples"),
    "learning_rate": ("optimizer.lr",),
    "max_steps": ("train.steps",),
    "epochs": ("train.steps",),
    "num_train_epochs": ("train.steps",),
    "max_tokens": ("rollout.sampling.max_new_tokens",),
    "max_completion_length": ("rollout.sampling.max_new_tokens",),
    "max_prompt_length": ("data.max_prompt_tokens",),
    "beta": ("objective.kl.coefficient",),
    "kl_coef": ("objective.kl.coefficient",),
    "clip_range": ("objective.trust_region.low", "objective.trust_region.high"),
    "algorithm": ("objective.preset",),
    "reward_fn": ("reward.verifier",),
    "reward_function": ("reward.verifier",),
    "save_steps": ("train.save_every",),
    "eval_steps": ("evaluate.every",),
    "output_dir": ("output",),
    "dataset": ("data.train",),
    "train_files": ("data.train",),
    "gradient_clipping": ("optimizer.clip_grad",),
    "max_grad_norm": ("optimizer.clip_grad",),
}
"""Other trainers' field names that spelling alone would not find."""


def _nearest_fields(place: Place) -> list[str]:
    """At most three fields: a typo in its section, the same key elsewhere, another trainer's name, then the nearest
    spelling."""
    parent, _, key = place.path.rpartition(".")
    prefix = f"{parent}." if parent else ""
    close = [f"{prefix}{name}" for name in difflib.get_close_matches(key, place.siblings, n=1, cutoff=0.75)]
    paths = list(dict.fromkeys(row.path for row in schema_rows() if ".NAME." not in row.path))
    same = [path for path in paths if path.rpartition(".")[2] == key]
    result = close or [*same, *_BY_OTHER_NAMES.get(key, ())]
    if not result:
        result = [f"{prefix}{name}" for name in difflib.get_close_matches(key, place.siblings, n=1, cutoff=0.5)]
    if not result:
        last = {path.rpartition(".")[2] for path in paths}
        near = difflib.get_close_matches(key, sorted(last), n=1, cutoff=0.75)
        result = [path for path in paths if path.rpartition(".")[2] in near]
    return list(dict.fromkeys(result))[:3]

"""No field does nothing: another legal value of it changes loss, gradient, weights or metrics, or is refused.

The fields are read from the JSON schema of the configuration, so that a field that is added is tested without being listed.
"""

import json
import warnings
from typing import Any

import pytest
from pydantic import ValidationError

from tepo_megatron.config.objective.presets import PRESETS
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.checking import ObjectiveChecks
from tepo_megatron.runtime.text import flat

pytestmark = pytest.mark.slow  # half a minute: every field of every preset

SCHEMA = ObjectiveConfig.model_json_schema()

REQUIRED = {
    "low": 0.1,
    "high": 0.15,
    "coefficient": 0.1,
    "target": 0.7,
    "max_tokens": 5,
    "buffer_tokens": 3,
    "p": 2.0,
    "Rejection.low": 0.3,
    "Rejection.high": 1.5,
    "measure": "tv",
    "threshold": 0.1,
}
"""Values for the fields that have no default; one section may need its own."""

NOT_WALKED = {"preset", "plugins", "mask", "penalty"}
"""What only a plugin has kinds of is tested with one, in test_checking.py."""

SAME = {("ratio", '{"kind": "sequence"}'), ("ratio", '{"kind": "sequence_token"}')}
"""Two names of one thing, wherever all tokens of a sequence weigh the same: see test_regions.py. (field, value as JSON)."""

WITH_AUTO = {"trust_region.share", "trust_region.initial"}
"""Fields of ``auto`` bounds, refused without them; seen to act in the cases "with auto"."""


IN_SCORES = {"distill.of", "distill.k", "distill.divergence", "distill.beta"}
"""What the scoring of the logits reads, and the objective does not: tests/dist/test_teachers.py."""


def _build(given: dict[str, Any]) -> ObjectiveConfig | str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ObjectiveConfig.model_validate(given)
        except ValidationError as error:
            return "; ".join(problem["msg"] for problem in error.errors())


def _follow(node: dict[str, Any]) -> dict[str, Any]:
    return SCHEMA["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node


def _kinds(node: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections that a field may hold, by kind; the only one has no kind."""
    options = [_follow(option) for option in node.get("anyOf") or node.get("oneOf") or [_follow(node)]]
    inner = [kind for option in options for kind in ([option] if "properties" in option else option.get("oneOf", []))]
    sections = [_follow(section) for section in inner]
    return {section["properties"].get("kind", {}).get("const", ""): section for section in sections}


def _section(kind: str, node: dict[str, Any], *, inner: bool = False) -> dict[str, Any]:
    """A section of a kind with its defaults, and values where there is no default; ``inner``: its own sections switched on."""
    title = node["title"]
    filled: dict[str, Any] = {name: REQUIRED.get(f"{title}.{name}", REQUIRED.get(name)) for name in node.get("required", [])}
    for name, raw in node["properties"].items() if inner else ():
        for label, section in _kinds(raw).items():
            filled[name] = _section(label, section)
    if not kind and not filled:  # an empty section is refused: it must say what it switches on
        defaults = {name: raw["default"] for name, raw in node["properties"].items() if raw.get("default") is not None}
        filled = dict(list(defaults.items())[:1])
    return {"kind": kind, **filled} if kind else filled


SLOTS = {name: _kinds(raw) for name, raw in SCHEMA["properties"].items() if name not in NOT_WALKED}
SECTIONS = {(name, kind): section for name, kinds in SLOTS.items() for kind, section in kinds.items()}


def _check(config: ObjectiveConfig, label: str) -> set[str]:
    """Another value of each field changes the outcome, and each other choice does so or is refused. The fields seen."""
    probe, seen, given = ObjectiveChecks(config), set(), config.model_dump()
    conditional = IN_SCORES if getattr(config.trust_region, "is_auto", False) else WITH_AUTO | IN_SCORES
    for name, section in config.sections.items():
        for field, _, tried in probe.fields(name, section):
            path, outcomes = f"{name}.{field}", set[str]()
            seen.add(path)
            for other, effect in tried:
                is_number = type(other) in (int, float)
                if not is_number or "acts" not in outcomes:  # one number that acts is enough
                    outcomes.add(outcome := effect())
                    silent = outcome == "nothing" and not is_number and path not in IN_SCORES
                    assert not silent, f"{label}: objective.{path} = {json.dumps(other)} does nothing"
            assert "acts" in outcomes or not outcomes or path in conditional, f"{label}: objective.{path} does nothing"
    for name, kinds in SLOTS.items():
        present = None if given[name] is None else given[name].get("kind", "")
        may_be_null = {"type": "null"} in SCHEMA["properties"][name].get("anyOf", [])
        others = [_section(kind, section) for kind, section in kinds.items() if kind != present]
        for value in [*others, None] if may_be_null and present is not None else others:
            changed = _build({**given, name: value})
            if isinstance(changed, str):
                assert len(changed.split()) > 3, f"{label}: {name} = {value} is refused with {changed!r}, which is no sentence"
            elif not probe.acts(changed):
                assert (name, json.dumps(value)) in SAME, f"{label}: objective.{name} = {json.dumps(value)} does nothing"
    return seen


BY_LENGTH = {"kind": "clip", "scale": "length", "low": "auto", "high": "auto", "share": 0.2, "initial": 0.05}
CASES: dict[str, dict[str, Any]] = {
    **{preset: {"preset": preset} for preset in PRESETS},
    **{
        f"{ratio} with auto": {"preset": "tepo", "ratio": {"kind": ratio}, "trust_region": BY_LENGTH}
        for ratio in ("sequence_token", "prefix")
    },
    **{f"{name} {kind}": {name: _section(kind, section, inner=True)} for (name, kind), section in SECTIONS.items()},
}


@pytest.mark.parametrize("case", CASES)
def test_every_field_acts_or_is_refused(case):
    """A kind that is in no preset is tried in the first preset that takes it."""
    built = (_build({"preset": preset, **CASES[case]}) for preset in ("grpo", *PRESETS))
    config = next(config for config in built if not isinstance(config, str))
    fields = flat({name: section.model_dump() for name, section in config.sections.items()})
    assert {path for path in fields if not path.endswith(".kind")} <= _check(config, case)

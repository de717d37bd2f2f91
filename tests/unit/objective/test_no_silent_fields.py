"""No field does nothing: another legal value of it changes loss, gradient, weights or metrics, or is refused.

The fields are read from the JSON schema of the configuration, so that a field that is added is tested without being listed.
"""

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from tepo_megatron.config.objective.presets import PRESETS
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.config.schema import schema_rows
from tepo_megatron.core.objective.checking import FieldProbe

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
"""Values for the fields that have no default, where another kind is tried; one section may need its own."""

NOT_WALKED = {"preset", "plugins", "mask", "penalty"}
"""What only a plugin has kinds of is tested with one, in test_checking.py; a ``kind`` is tried as another section."""

SAME = {("ratio", '{"kind": "sequence"}'), ("ratio", '{"kind": "sequence_token"}')}
"""Two names of one thing, wherever all tokens of a sequence weigh the same: see test_ratio.py. (field, value as JSON)."""


WITH_AUTO = {"trust_region.share", "trust_region.initial"}
"""Fields of ``auto`` bounds, refused without them; seen to act in test_every_field_of_a_clip_by_length_acts_or_is_refused."""


def is_choice(value: Any) -> bool:
    return isinstance(value, bool) or not isinstance(value, float | int)


def _build(given: dict[str, Any]) -> ObjectiveConfig | str:
    """The configuration, or why it is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ObjectiveConfig.model_validate(given)
        except ValidationError as error:
            return "; ".join(problem["msg"] for problem in error.errors())


def _follow(node: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in node:
        node = SCHEMA["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return node


def _kinds(node: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections that a field may hold, by kind; the only one has no kind."""
    options = [_follow(option) for option in node.get("anyOf") or node.get("oneOf") or [_follow(node)]]
    inner = [kind for option in options for kind in ([option] if "properties" in option else option.get("oneOf", []))]
    sections = [_follow(section) for section in inner]
    return {section["properties"].get("kind", {}).get("const", ""): section for section in sections}


def _may_be_null(node: dict[str, Any]) -> bool:
    return any(option.get("type") == "null" for option in node.get("anyOf", []))


def _section(kind: str, node: dict[str, Any], *, inner: bool = False) -> dict[str, Any]:
    """A section of a kind with its defaults, and values where there is no default; ``inner``: its own sections switched on."""
    filled: dict[str, Any] = {
        name: REQUIRED.get(f"{node['title']}.{name}", REQUIRED.get(name)) for name in node.get("required", [])
    }
    for name, raw in node["properties"].items() if inner else ():
        for label, section in _kinds(raw).items():
            filled[name] = _section(label, section)
    if not kind and not filled:  # an empty section is refused: it must say what it switches on
        filled = dict(
            [next((name, raw["default"]) for name, raw in node["properties"].items() if raw.get("default") is not None)]
        )
    return {"kind": kind, **filled} if kind else filled


def _scalars(node: dict[str, Any], value: Any) -> Iterator[Any]:
    """Other values of a field that is no section."""
    yield from FieldProbe.other_values(
        node | {"anyOf": [_follow(option) for option in node["anyOf"]]} if "anyOf" in node else node, value
    )


def _leaves(node: dict[str, Any], given: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every field below ``node`` with another value of it, as (dotted path, value); sections are entered."""
    for name, raw in node["properties"].items():
        if name == "kind" or f"{path}{name}" in NOT_WALKED:
            continue
        here, value = f"{path}{name}", given.get(name)
        kinds = _kinds(raw)
        if not kinds:
            yield from ((here, other) for other in _scalars(_follow(raw) | raw, value) if other != value)
            continue
        present = value.get("kind", "") if value is not None else None
        for kind, section in kinds.items():
            if kind != present:
                yield here, _section(kind, section)
        if value is not None:
            if _may_be_null(raw):
                yield here, None
            yield from _leaves(kinds[present], value, f"{here}.")


def _with(given: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {**given, head: _with(given[head], rest, value) if rest else value}


def _check(base: ObjectiveConfig, label: str) -> set[str]:
    """Another value of each field changes the outcome, and each other choice does so or is refused. The fields seen."""
    given = base.model_dump()
    probe = FieldProbe(base)
    conditional = set() if getattr(base.trust_region, "is_auto", False) else WITH_AUTO
    outcomes: dict[str, list[tuple[Any, str]]] = {}
    for path, value in _leaves(SCHEMA, given):
        changed = _build(_with(given, path, value))
        if isinstance(changed, str):
            assert len(changed.split()) > 3, f"{label}: {path} = {value} is refused with {changed!r}, which is no sentence"
            verdict = "refused"
        else:
            verdict = "acts" if probe.acts(changed) else "nothing"
        outcomes.setdefault(path, []).append((value, verdict))
    for path, seen in outcomes.items():
        acts = any(
            verdict == "acts" or (verdict == "refused" and (is_choice(value) or path in conditional)) for value, verdict in seen
        )
        assert acts, f"{label}: no other value of objective.{path} does anything: {seen}"
        for value, verdict in seen:
            if verdict == "nothing" and is_choice(value):
                assert (path, json.dumps(value)) in SAME, f"{label}: objective.{path} = {json.dumps(value)} does nothing"
    return set(outcomes)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_field_of_every_preset_acts_or_is_refused(preset):
    config = ObjectiveConfig(preset=preset)
    assert _paths(SCHEMA, config.model_dump()) <= _check(config, preset)


@pytest.mark.parametrize("ratio", ["sequence_token", "prefix"])
def test_every_field_of_a_clip_by_length_acts_or_is_refused(ratio):
    region = {"kind": "clip", "scale": "length", "low": "auto", "high": "auto", "share": 0.2, "initial": 0.05}
    config = ObjectiveConfig.model_validate({"ratio": {"kind": ratio}, "trust_region": region})
    assert _paths(SCHEMA, config.model_dump()) <= _check(config, f"{ratio} with auto")


SECTIONS = {(name, kind): section for name, raw in SCHEMA["properties"].items() for kind, section in _kinds(raw).items()}


@pytest.mark.parametrize(("name", "kind"), SECTIONS)
def test_every_field_of_every_kind_acts_or_is_refused(name, kind):
    """Also of those kinds that no preset has: in the first preset that takes them."""
    given = _section(kind, SECTIONS[name, kind], inner=True)
    built = ((preset, _build({"preset": preset, name: given})) for preset in ("grpo", *PRESETS))
    preset, config = next((preset, config) for preset, config in built if not isinstance(config, str))
    assert _paths(SECTIONS[name, kind], given, f"{name}.") <= _check(config, f"{preset} with {name} {kind}")


def _paths(node: dict[str, Any], given: dict[str, Any], path: str = "") -> set[str]:
    """Every field of the sections that are on, from the schema."""
    found = set()
    for name, raw in node["properties"].items():
        if name == "kind" or f"{path}{name}" in NOT_WALKED:
            continue
        found.add(f"{path}{name}")
        value = given.get(name)
        if isinstance(value, dict):
            found |= _paths(_kinds(raw)[value.get("kind", "")], value, f"{path}{name}.")
    return found


def test_all_fields_of_the_schema_are_tested():
    """What the tests above walk is what the configuration's schema lists below ``objective``."""
    walked = {f"objective.{name}" for name in SCHEMA["properties"]}
    for (name, kind), section in SECTIONS.items():
        walked |= {f"objective.{path}" for path in _paths(section, _section(kind, section, inner=True), f"{name}.")}
    rows = {row.path for row in schema_rows() if row.path.startswith("objective.") and not row.path.endswith(".kind")}
    assert rows - {f"objective.{name}" for name in NOT_WALKED} <= walked

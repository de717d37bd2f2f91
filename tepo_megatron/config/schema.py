"""Every field of a run, and a configuration's errors as sentences."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import yaml
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from tepo_megatron.config.base import Section
from tepo_megatron.config.objective.custom import CustomSlot, Plugin
from tepo_megatron.config.peers import peers
from tepo_megatron.config.run import RunConfig
from tepo_megatron.runtime.text import flat

Node = dict[str, Any]  # a JSON schema node with ``$ref`` followed

_TYPES = {
    "integer": "an integer",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
    "object": "a section",
}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}


class _SchemaRow(NamedTuple):
    """``default`` is JSON, ``when`` the section's variant (``kind = "…"``, or empty)."""

    path: str
    allowed: str
    default: str
    description: str
    when: str = ""


class _Place(NamedTuple):
    path: str
    node: Node  # empty if there is none
    siblings: tuple[str, ...]


_PLUGINS: ContextVar[tuple[str, ...]] = ContextVar("plugins", default=())
_ROOT: ContextVar[type[Section]] = ContextVar("root", default=RunConfig)


@contextmanager
def with_plugins(plugins: Sequence[str]) -> Iterator[None]:
    """The schema then includes the kinds of ``objective.plugins``."""
    token = _PLUGINS.set(tuple(Plugin.load(plugin).name for plugin in plugins))
    try:
        yield
    finally:
        _PLUGINS.reset(token)


def json_schema() -> Node:
    """For a run's YAML (draft 2020-12)."""
    if (root := _ROOT.get()) is not RunConfig:
        return _schema_of(root)
    return _schema(tuple((name, Plugin.load(name).digest) for name in _PLUGINS.get()))


class _SchemaGenerator(GenerateJsonSchema):
    """Names sections without their class's leading underscore."""

    def normalize_name(self, name: str) -> str:
        return super().normalize_name(name.removeprefix("_"))


@cache
def _schema_of(root: type[Section]) -> Node:
    return root.model_json_schema(schema_generator=_SchemaGenerator)


@cache
def _schema(plugins: tuple[tuple[str, str], ...]) -> Node:
    schema = RunConfig.model_json_schema(schema_generator=_SchemaGenerator)
    added = CustomSlot.schemas([name for name, _ in plugins], _SchemaGenerator)
    schema["$defs"] |= added.pop("$defs")
    fields = schema["$defs"]["ObjectiveConfig"]["properties"]
    for slot, node in added.items():
        usual = {key: value for key, value in fields[slot].items() if key not in ("anyOf", "oneOf", "discriminator")}
        fields[slot] = usual | ({"anyOf": [node, {"type": "null"}]} if "anyOf" in fields[slot] else node)
    return schema


def schema_rows(*, of_lists: bool = False, joined: bool = False) -> list[_SchemaRow]:
    """Returns them in order of declaration. ``of_lists``: also of sections in lists, such as ``data.train[].path``;
    ``joined``: one row for a field in several variants, in which what differs names its variants.
    """
    every = _rows(json_schema(), "", json_schema().get("default"), "")
    rows = [row for row in every if of_lists or "[]" not in row.path]
    if not joined:
        return rows
    groups: dict[str, list[_SchemaRow]] = {}
    for row in rows:
        groups.setdefault(row.path, []).append(row)
    return [_joined(group) for group in groups.values()]


def longest_path(field: str) -> str | None:
    """``field``, or the smallest section around it that the schema has; any name stands for NAME."""
    paths, parts = [row.path.split(".") for row in schema_rows()], field.split(".")
    known = {".".join(path[:length]) for path in paths for length in range(1, len(path) + 1)}
    named = [*parts[:1], "NAME", *parts[2:]] if f"{parts[0]}.NAME" in known and len(parts) > 1 else parts
    lengths = range(len(parts), 0, -1)
    return next((".".join(parts[:length]) for length in lengths if ".".join(named[:length]) in known), None)


def _joined(group: Sequence[_SchemaRow]) -> _SchemaRow:
    def text(column: str) -> str:
        variants: dict[str, list[str]] = {}
        for row in group:
            variants.setdefault(getattr(row, column), []).append(row.when)
        return "; ".join(variants if len(variants) == 1 else (f"{key} ({_either(whens)})" for key, whens in variants.items()))

    when = _either([row.when for row in group])
    return _SchemaRow(group[0].path, text("allowed"), text("default"), text("description"), when)


def _either(whens: Sequence[str]) -> str:
    first, *others = dict.fromkeys(whens)
    return ", ".join([first, *(when.partition(" = ")[2] for when in others)])


def _allowed(node: Node) -> str:
    node = _follow(node)
    if "discriminator" in node:
        tags = ", ".join(show(tag) for tag in node["discriminator"]["mapping"])
        return f"a section with {node['discriminator']['propertyName']} = {tags}"
    if options := node.get("anyOf") or node.get("oneOf"):
        return " or ".join(dict.fromkeys(_allowed(option) for option in options))
    if "enum" in node:
        return ", ".join(show(value) for value in node["enum"])
    if "const" in node:
        return show(node["const"])
    if "prefixItems" in node:
        return f"a list of {len(node['prefixItems'])}: " + ", ".join(_allowed(item) for item in node["prefixItems"])
    if node.get("type") == "array":
        return f"a list, each item {_allowed(node['items'])}" if node.get("items") else "a list"
    if node.get("format") in ("path", "file-path", "directory-path"):
        return "a path"
    bounds = " and ".join(f"{sign} {show(node[name])}" for name, sign in _BOUNDS.items() if name in node)
    text = _TYPES.get(node.get("type", ""), "any value")
    if "properties" in node:
        text += " with " + ", ".join(node["properties"])
    if "pattern" in node:
        text += f" that matches {node['pattern']}"
    return f"{text} {bounds}".strip()


def _locate(loc: tuple[int | str, ...]) -> _Place:
    node, path, siblings = _follow(json_schema()), "", ()
    for step in loc:
        options = _options(node)
        if isinstance(step, int):
            path += f"[{step}]"
            node = next((option for option in options.values() if option.get("type") == "array"), node)
            listed = node.get("prefixItems", [])
            node = _follow(listed[step] if step < len(listed) else node.get("items") or {})
            continue
        sections = {name: option for name, option in options.items() if "properties" in option}
        if len(options) > 1 and (step in options or not any(step in option["properties"] for option in sections.values())):
            node = options.get(step, node)
            continue
        section = next(iter(sections.values()), node)
        siblings = tuple(section.get("properties", ()))
        node = _follow(section.get("properties", {}).get(step) or _named(section))
        path = f"{path}.{step}" if path else step
    return _Place(path, node, siblings)


def show(value: Any, limit: int = 100) -> str:
    """As in YAML (true, null, "text"), cut to ``limit`` characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(item if item.isprintable() else f"\\u{ord(item):04x}" for item in text)


def _discriminator(node: Node) -> Node:
    result = node.get("discriminator")
    return result or next((item["discriminator"] for item in node.get("anyOf", []) if "discriminator" in item), {})


def _rows(node: Node, path: str, default: Any, when: str) -> Iterator[_SchemaRow]:
    tag_here = when.split(" ", 1)[0]
    for name, raw in node.get("properties", {}).items():
        if name == tag_here:
            continue
        child = _follow(raw)
        unset: Any = ... if name in node.get("required", ()) else {}  # a default that is made, {}, is not in the schema
        value = default[name] if isinstance(default, dict) and name in default else child.get("default", unset)
        here = f"{path}.{name}" if path else name
        if "properties" in _named(child):
            yield _SchemaRow(here, "sections by name", "none", _plain(child["description"]), when)
            yield from _rows(_named(child), f"{here}.NAME", None, when)
            continue
        options = {label: option for label, option in _options(child).items() if "properties" in option}
        if len(options) != 1 or "anyOf" in child:
            yield _SchemaRow(here, _allowed(child), _shown(value), _plain(child.get("description", "")), when)
        tag = _discriminator(child).get("propertyName")
        for label, option in options.items():
            inner = f"{tag} = {show(label)}" if tag else ""
            applies = isinstance(value, dict) and (not tag or value.get(tag) == label)
            yield from _rows(option, here, value if applies else None, inner)
        for listed in _options(child).values():
            if "properties" in (item := _follow(listed.get("items") or {})):
                yield from _rows(item, f"{here}[]", None, "")


def _shown(default: Any) -> str:
    if default is ...:
        return "required"
    if isinstance(default, dict):
        return f"kind = {show(default['kind'])}" if "kind" in default else "a section" if default else "{}"
    return show(default)


def _plain(docstring: str) -> str:
    return " ".join(docstring.replace("``", "`").split())


def _follow(node: Node) -> Node:
    """Keys next to ``$ref`` override those of its node."""
    while "$ref" in node:
        target = json_schema()["$defs"][node["$ref"].rsplit("/", 1)[1]]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    return node


def _options(node: Node) -> dict[str, Node]:
    if "discriminator" in node:
        return {tag: _follow({"$ref": ref}) for tag, ref in node["discriminator"]["mapping"].items()}
    members = [member for member in node.get("anyOf") or node.get("oneOf") or [node] if member.get("type") != "null"]
    resolved = [_follow(member) for member in members]
    if len(resolved) == 1:
        return _options(resolved[0]) if resolved[0] is not node else {"": node}
    return {option.get("title", f"option {i}"): option for i, option in enumerate(resolved)}


def _named(node: Node) -> Node:
    held = node.get("additionalProperties")
    return _follow(held) if isinstance(held, dict) else {}


_MOST_PROBLEMS = 40


def describe(error: Exception, above: tuple[str, ...] = (), root: type[Section] = RunConfig) -> list[str]:
    """Sentences for an error of pydantic, OmegaConf, PyYAML or a file; refusing union members share one. ``above``: the place
    of the section that was validated, in ``root``.
    """
    if isinstance(error, ValidationError):
        details = error.errors()
        for detail in details:
            detail["loc"] = (*above, *detail["loc"])
        details = [item for item in details if not _is_of_another_form(item, details)]
        token = _ROOT.set(root)
        try:
            lines = list(dict.fromkeys(_describe(detail) for detail in details[:_MOST_PROBLEMS]))
        finally:
            _ROOT.reset(token)
        return [*lines, f"and {len(details) - _MOST_PROBLEMS} more"] if len(details) > _MOST_PROBLEMS else lines
    if isinstance(error, OmegaConfBaseException):
        what = str(error.msg or error).splitlines()[0]
        return [f"{error.full_key}: {what}" if error.full_key else what]
    if isinstance(error, UnicodeDecodeError):
        return [f"not UTF-8 text (byte {error.start})"]
    if isinstance(error, OSError):
        return [f"cannot be read: {error.strerror or error}"]
    text = " ".join(str(error).split())
    if isinstance(error, yaml.MarkedYAMLError):
        text = ", ".join(part for part in (error.context, error.problem) if part)
    return [f"not valid YAML: {text}" if isinstance(error, yaml.YAMLError) else text]


def _is_of_another_form(detail: ErrorDetails, details: Sequence[ErrorDetails]) -> bool:
    """True if other errors describe what is wrong in the list."""
    place = detail["loc"][:-1]
    inner = [item["loc"] for item in details if len(item["loc"]) > len(place) + 1 and item["loc"][: len(place)] == place]
    return detail["type"] == "string_type" and isinstance(detail["input"], list) and bool(inner)


def _describe(detail: ErrorDetails) -> str:
    place, raw = _locate(detail["loc"]), detail["input"]
    kind = detail["type"]
    if kind == "extra_forbidden":
        return f"{place.path}: unknown key (got {show(raw)}); {_hint(place, raw)}"
    if kind == "missing":
        return f"{place.path}: missing; allowed: {_allowed(place.node)}"
    if kind == "union_tag_invalid":
        tags = _discriminator(place.node)
        allowed_tags = ", ".join(show(tag) for tag in tags["mapping"])
        return f"{place.path}.{tags['propertyName']}: got {show(detail['ctx']['tag'])}; allowed: {allowed_tags}"
    if kind in ("value_error", "assertion_error"):
        text = " ".join(detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ").split())
        if text.startswith(place.path):
            return text
        return f"{place.path}: {text}" if isinstance(raw, dict | Section) else f"{place.path}: got {show(raw)}; {text}"
    if not place.node or _allowed(place.node) == "any value":
        return f"{place.path}: got {show(raw)}; {detail['msg']}"
    line = f"{place.path}: got {show(raw)}; allowed: {_allowed(place.node)}"
    if kind in ("string_too_short", "string_too_long"):
        line += f" of {place.node.get('minLength', 0)} to {place.node.get('maxLength', 'any number of')} characters"
    if kind == "too_short" and len(raw) < (least := detail["ctx"]["min_length"]):
        line += f"; give {least} or more"
    if kind == "string_type" and isinstance(raw, int | float) and "a list" not in line:
        line += f" (to give a number as text: {place.path}='\"{show(raw)}\"')"
    return line


def _hint(place: _Place, raw: Any) -> str:
    """Names at most three fields: a typo in its section, the same key elsewhere, another trainer's name, then spelling."""
    parent, _, key = place.path.rpartition(".")
    prefix = f"{parent}." if parent else ""
    by_key: dict[str, list[str]] = {}
    for path in dict.fromkeys(row.path for row in schema_rows() if ".NAME." not in row.path and row.path != place.path):
        by_key.setdefault(path.rpartition(".")[2], []).append(path)

    def siblings(cutoff: float) -> list[str]:
        return [f"{prefix}{name}" for name in difflib.get_close_matches(key, place.siblings, n=1, cutoff=cutoff)]

    if hint := _peer_hint(place.path, raw, whole=True):
        return hint
    near = siblings(0.75) or by_key.get(key, [])
    if not near and (hint := _peer_hint(place.path, raw, whole=False)):
        return hint
    spelled = difflib.get_close_matches(key, sorted(by_key), n=1, cutoff=0.75)
    near = near or siblings(0.5) or [path for name in spelled for path in by_key[name]]
    near = list(dict.fromkeys(near))[:3]
    return f"did you mean {' or '.join(near)}?" if near else f"known keys here: {', '.join(place.siblings)}"


def _peer_hint(path: str, raw: Any, *, whole: bool) -> str:
    """Returns what an unknown key is here, or an empty text. ``whole``: the whole path must be a peer's."""
    if _ROOT.get() is not RunConfig:
        return ""
    for name, peer in peers().items():
        if isinstance(raw, Mapping) and (inner := [key for key in flat(raw, f"{path}.") if key in peer.keys]):
            return f"it is a section of {peer.title}, such as {inner[0]}: tepo config from-{name} FILE converts a file"
        last = path.rpartition(".")[2]
        for key, entry in peer.keys.items():
            if key == path or (not whole and key.rpartition(".")[2] == last):
                if entry.note:
                    return f"{peer.title}'s {key} has no field here: {entry.note}"
                return f"did you mean {' or '.join(entry.fields)}?"
    return ""

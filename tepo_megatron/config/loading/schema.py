"""Lists every field of a run with values, default and meaning, from pydantic's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

from tepo_megatron.config.objective.custom import load_plugin, plugin_schemas
from tepo_megatron.config.objective.section import usual_sections
from tepo_megatron.config.run import RunConfig

Node = dict[str, Any]
"""A JSON schema node with ``$ref`` followed."""

_TYPES = {
    "integer": "an integer",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
    "object": "a section",
}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}


@dataclass(frozen=True)
class SchemaRow:
    """One field; ``default`` is JSON, ``when`` the section's variant (``kind = "…"``, or empty)."""

    path: str
    allowed: str
    default: str
    description: str
    when: str = ""


@dataclass(frozen=True)
class Place:
    """A place in the schema: dotted path, node (empty if none), sibling keys."""

    path: str
    node: Node
    siblings: tuple[str, ...]


_PLUGINS: ContextVar[tuple[str, ...]] = ContextVar("plugins", default=())


@contextmanager
def with_plugins(plugins: Sequence[str]) -> Iterator[None]:
    """Within the block the schema includes the kinds of ``objective.plugins``."""
    token = _PLUGINS.set(tuple(load_plugin(plugin).name for plugin in plugins))
    try:
        yield
    finally:
        _PLUGINS.reset(token)


def json_schema() -> Node:
    """The JSON schema of a run's YAML (draft 2020-12)."""
    return _schema(tuple((name, load_plugin(name).digest) for name in _PLUGINS.get()))


@cache
def _schema(plugins: tuple[tuple[str, str], ...]) -> Node:
    schema = RunConfig.model_json_schema()
    added = plugin_schemas([name for name, _ in plugins], usual_sections())
    schema["$defs"] |= added.pop("$defs")
    fields = schema["$defs"]["ObjectiveConfig"]["properties"]
    for slot, node in added.items():
        usual = {key: value for key, value in fields[slot].items() if key not in ("anyOf", "oneOf", "discriminator")}
        fields[slot] = usual | ({"anyOf": [node, {"type": "null"}]} if "anyOf" in fields[slot] else node)
    return schema


def schema_rows(*, of_lists: bool = False) -> list[SchemaRow]:
    """Returns a row per field, in order of declaration, and for each variant of a section. ``of_lists``: also fields of
    sections in lists, such as ``data.train[].path``, which no override names."""
    rows = _rows(json_schema(), "", json_schema().get("default"), "")
    return [row for row in rows if of_lists or "[]" not in row.path]


def allowed(node: Node) -> str:
    """Allowed values in words: literals, type with bounds, or variants."""
    node = _follow(node)
    if "discriminator" in node:
        tags = ", ".join(show(tag) for tag in node["discriminator"]["mapping"])
        return f"a section with {node['discriminator']['propertyName']} = {tags}"
    if options := node.get("anyOf") or node.get("oneOf"):
        return " or ".join(dict.fromkeys(allowed(option) for option in options))
    if "enum" in node:
        return ", ".join(show(value) for value in node["enum"])
    if "const" in node:
        return show(node["const"])
    if node.get("type") == "array":
        return _allowed_list(node)
    if node.get("format") in ("path", "file-path", "directory-path"):
        return "a path"
    bounds = " and ".join(f"{sign} {show(node[name])}" for name, sign in _BOUNDS.items() if name in node)
    text = _TYPES.get(node.get("type", ""), "any value")
    if "properties" in node:
        text += " with " + ", ".join(node["properties"])
    if "pattern" in node:
        text += f" that matches {node['pattern']}"
    return f"{text} {bounds}".strip()


def locate(loc: tuple[int | str, ...]) -> Place:
    """Place of a pydantic error, without names of union members, which no user writes."""
    node, path, siblings = _follow(json_schema()), "", ()
    for step in loc:
        options = _options(node)
        if isinstance(step, int):
            path += f"[{step}]"
            node = _item(next((option for option in options.values() if option.get("type") == "array"), node), step)
            continue
        sections = {name: option for name, option in options.items() if "properties" in option}
        if len(options) > 1 and (step in options or not any(step in option["properties"] for option in sections.values())):
            node = options.get(step, node)
            continue
        section = next(iter(sections.values()), node)
        siblings = tuple(section.get("properties", ()))
        node = _follow(section.get("properties", {}).get(step) or _named(section))
        path = f"{path}.{step}" if path else step
    return Place(path, node, siblings)


def show(value: Any, limit: int = 100) -> str:
    """The value as in YAML (true, null, "text"), cut to ``limit`` characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(item if item.isprintable() else f"\\u{ord(item):04x}" for item in text)


def discriminator(node: Node) -> Node:
    """``propertyName`` and ``mapping`` of a section with variants, also if nullable; else empty."""
    result = node.get("discriminator")
    return result or next((item["discriminator"] for item in node.get("anyOf", []) if "discriminator" in item), {})


def _rows(node: Node, path: str, default: Any, when: str) -> Iterator[SchemaRow]:
    tag_here = when.split(" ", 1)[0]
    for name, raw in node.get("properties", {}).items():
        if name == tag_here:
            continue
        child = _follow(raw)
        value = default[name] if isinstance(default, dict) and name in default else child.get("default", ...)
        here = f"{path}.{name}" if path else name
        if "properties" in _named(child):
            yield SchemaRow(here, "sections by name", "none", _plain(child["description"]), when)
            yield from _rows(_named(child), f"{here}.NAME", None, when)
            continue
        options = {label: option for label, option in _options(child).items() if "properties" in option}
        if len(options) != 1 or "anyOf" in child:
            yield SchemaRow(here, allowed(child), _shown(value), _plain(child.get("description", "")), when)
        tag = discriminator(child).get("propertyName")
        for label, option in options.items():
            inner = f"{tag} = {show(label)}" if tag else ""
            applies = isinstance(value, dict) and (not tag or value.get(tag) == label)
            yield from _rows(option, here, value if applies else None, inner)
        for listed in _options(child).values():
            if "properties" in (item := _follow(listed.get("items") or {})):
                yield from _rows(item, f"{here}[]", None, "")


def _shown(default: Any) -> str:
    """Of a section only its kind, since its fields have their own rows."""
    if default is ...:
        return "required"
    if isinstance(default, dict):
        return f"kind = {show(default['kind'])}" if "kind" in default else "a section"
    return show(default)


def _plain(docstring: str) -> str:
    """One line, with single backticks."""
    return " ".join(docstring.replace("``", "`").split())


def _follow(node: Node) -> Node:
    """Keys next to ``$ref`` override those of its node."""
    while "$ref" in node:
        target = json_schema()["$defs"][node["$ref"].rsplit("/", 1)[1]]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    return node


def _options(node: Node) -> dict[str, Node]:
    """Union members by pydantic's label in an error's location; one entry if it is no union."""
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


def _item(node: Node, index: int) -> Node:
    listed = node.get("prefixItems", [])
    return _follow(listed[index] if index < len(listed) else node.get("items") or {})


def _allowed_list(node: Node) -> str:
    if "prefixItems" in node:
        return f"a list of {len(node['prefixItems'])}: " + ", ".join(allowed(item) for item in node["prefixItems"])
    return f"a list, each item {allowed(node['items'])}" if node.get("items") else "a list"

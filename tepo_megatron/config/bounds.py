"""Bounds on what a file of a few bytes can make of itself: depth, aliases, and ``${…}`` that refer to one another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

LARGEST_FILE = 2**20
"""In bytes; a run's configuration has a few thousand."""

_MOST_VALUES = 2000
_DEEPEST = 32
_LONGEST_NUMBER = 1000
_LONGEST_CHAIN = 32
_LARGEST_TEXT = 10**6

_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq")} | {"!"}
_NUMBER = re.compile(r"[-+]?(0[xX][0-9a-fA-F_]+|0[bo]?[0-7_]+|[0-9.][-+0-9_.:eE]*)")
_OPENING = re.compile(r"(?<!\\)(?:\\\\)*\$\{")


class RefusedYAMLError(yaml.MarkedYAMLError):
    """YAML that is valid, and more than a configuration may be."""


class BadReferenceError(ValueError):
    """A ``${…}`` that is no reference to another field, or makes too much of itself."""


@dataclass
class _Open:
    """A mapping or list of which the end has not come: how many values and levels it has so far, and its anchor."""

    anchor: str | None
    values: int = 1
    levels: int = 1


def check_yaml(text: str) -> None:
    """Raises RefusedYAMLError where the text goes too deep, has too many values (an alias counts as what it stands for), a
    tag beyond plain values, a number without end, ``???``, or a ``${…}`` that is no plain reference. Nothing is built yet.
    """
    stack = [_Open(None)]
    anchors: dict[str, tuple[int, int]] = {}
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise _refusal(event, f"the alias *{event.anchor} has no anchor that ends before it")
            _add(stack[-1], *anchors[event.anchor])
        elif isinstance(event, yaml.ScalarEvent):
            _check_scalar(event)
            _add(stack[-1], 1, 0)
            if event.anchor is not None:
                anchors[event.anchor] = (1, 0)
        elif isinstance(event, yaml.CollectionStartEvent):
            _check_tag(event)
            stack.append(_Open(event.anchor))
        elif isinstance(event, yaml.CollectionEndEvent):
            ended = stack.pop()
            _add(stack[-1], ended.values, ended.levels)
            if ended.anchor is not None:
                anchors[ended.anchor] = (ended.values, ended.levels)
        if len(stack) + stack[-1].levels > _DEEPEST:
            raise _refusal(event, f"more than {_DEEPEST} levels, one within the other")
        if stack[-1].values > _MOST_VALUES:
            raise _refusal(event, f"more than {_MOST_VALUES} values, aliases replaced by what they stand for")


def check_references(values: Mapping[str, Any]) -> None:
    """Raises BadReferenceError where ``${…}`` refer to themselves, or would grow beyond a million characters.

    ``values``: the whole configuration as it stands, nothing replaced. A reference to nothing is left to who replaces it.
    """
    known: dict[tuple[str, ...], int] = {}
    for path, text in _texts(values, ()):
        if references(text) and _size(values, path, (), known) > _LARGEST_TEXT:
            raise BadReferenceError(f"{'.'.join(path)}: its ${{…}} grow to a text of more than {_LARGEST_TEXT} characters")


def references(text: str) -> list[str]:
    """What stands within the ``${…}`` of a text. Raises BadReferenceError where it is not the path of another field."""
    found = []
    for opening in _OPENING.finditer(text):
        inner, closed, _ = text[opening.end() :].partition("}")
        if "${" in inner:
            raise BadReferenceError(f"${{{inner[:40]}: a ${{…}} within another one; name the field itself")
        if closed and ":" in inner:
            raise BadReferenceError(
                f"${{{inner[:40]}}}: only fields of this configuration can be referred to, since environments differ between "
                'nodes, and may hold what no log should; give the value on the command line, such as output="$HOME/run"'
            )
        found.append(inner.strip())
    return found


def _add(to: _Open, values: int, levels: int) -> None:
    to.values += values
    to.levels = max(to.levels, 1 + levels)


def _check_scalar(event: yaml.ScalarEvent) -> None:
    _check_tag(event)
    if len(event.value) > _LONGEST_NUMBER and _NUMBER.fullmatch(event.value):
        raise _refusal(event, f"a number of {len(event.value)} characters")
    if event.value == "???":
        raise _refusal(event, "??? stands for a value that is missing; give one, or leave the key out")
    try:
        references(event.value)
    except BadReferenceError as error:
        raise _refusal(event, str(error)) from error


def _check_tag(event: yaml.ScalarEvent | yaml.CollectionStartEvent) -> None:
    if event.tag is not None and event.tag not in _TAGS:
        tag = event.tag.replace("tag:yaml.org,2002:", "!!")
        raise _refusal(event, f"the tag {tag}; values are text, numbers, true, false, null, lists and sections")


def _refusal(event: Any, problem: str) -> RefusedYAMLError:
    return RefusedYAMLError(problem=problem, problem_mark=event.start_mark)


def _texts(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every text in nested mappings and lists, with its path."""
    if isinstance(value, str):
        yield path, value
    for key, inner in _children(value):
        yield from _texts(inner, (*path, key))


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(key), inner) for key, inner in value.items()]
    return [(str(index), inner) for index, inner in enumerate(value)] if isinstance(value, list) else []


def _size(values: Any, path: tuple[str, ...], above: Sequence[tuple[str, ...]], known: dict[tuple[str, ...], int]) -> int:
    """The characters of what is at ``path`` when all in it is replaced; ``above`` are the texts that led here."""
    if path in known:
        return known[path]
    if path in above or len(above) > _LONGEST_CHAIN:
        what = "refers to itself" if path in above else f"is the end of more than {_LONGEST_CHAIN} references in a row"
        raise BadReferenceError(f"{'.'.join(path)}: {what}; give it a value")
    total = 0
    for inner, text in _texts(_at(values, path), path):
        targets = [_target(reference, inner) for reference in references(text)]
        total += len(text) + sum(_size(values, target, (*above, path, inner), known) for target in targets)
    known[path] = total
    return total


def _target(reference: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """The path that a reference within the text at ``path`` names; each leading dot is one level up."""
    name = reference.lstrip(".")
    dots = len(reference) - len(name)
    start = path[:-dots] if dots else ()
    return (*start, *(part for part in re.split(r"[.\[\]]+", name) if part))


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        value = dict(_children(value)).get(step)
    return value

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.text import read_json

_OF_A_LINE = ("id", "prompt", "answer", "response", "responses", "finish_reason")


RecordedGroup = tuple[Problem, list[ResponseText]]


def read_recorded(path: Path) -> list[RecordedGroup]:
    """A line is a row of ``samples.jsonl``, or an object with ``prompt``, ``answer``, ``response`` or ``responses``; other
    keys are metadata. Raises ValueError, with file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines(): JSON may have other line separators in it
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    groups: list[RecordedGroup] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = read_json(line.encode(), "the line")
            if not isinstance(entry, dict):
                raise ValueError("not a JSON object")
            groups += _groups(entry, f"{path.stem}:{number}")
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    if not groups:
        raise ValueError(f"{path} has no response in it")
    return groups


def _groups(entry: Mapping[str, Any], default_id: str) -> Iterator[RecordedGroup]:
    if "greedy" in entry or "sampled" in entry:
        metadata, sampled = entry.get("metadata") or {}, entry.get("sampled") or []
        if not isinstance(metadata, dict) or not isinstance(sampled, list):
            raise ValueError("a sample's metadata are an object, and its sampled responses a list")
        source = str(entry.get("source", ""))
        problem = Problem(_text(entry, "problem"), _text(entry, "prompt"), _text(entry, "answer"), metadata, source=source)
        rows = [[entry["greedy"]] if entry.get("greedy") else [], sampled]
        for group in rows:
            if group:
                yield problem, [_response(row) for row in group]
        return
    metadata = {key: value for key, value in entry.items() if key not in _OF_A_LINE}
    identity = str(entry["id"]) if entry.get("id") is not None else default_id
    problem = Problem(identity, _text(entry, "prompt"), _text(entry, "answer"), metadata)
    texts = entry["responses"] if "responses" in entry else [entry.get("response")]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("give the text of a response as 'response', or a list of texts as 'responses'")
    yield problem, [ResponseText(text, (), entry.get("finish_reason", "stop")) for text in texts]


def _response(row: Any) -> ResponseText:
    if not isinstance(row, dict) or not isinstance(row.get("response"), str):
        raise ValueError("a sample has no text under 'response'")
    return ResponseText(row["response"], (), row.get("finish_reason", "stop"))


def _text(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str | int | float):
        raise ValueError(f"{key!r} is missing (the keys are: {', '.join(entry) or 'none'})")
    return str(value)

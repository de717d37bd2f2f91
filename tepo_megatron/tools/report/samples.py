from __future__ import annotations

import base64
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from tepo_megatron.run.metrics import TokenSamples, read_tokens, token_files
from tepo_megatron.runtime.files import parse_samples, read_lines


@dataclass
class SampleGroup:
    """``kind`` is ``heldout``, ``train`` or ``tokens``; ``cost`` counts tokens, or characters."""

    run: int
    kind: str
    step: int
    problem: str
    prompt: str
    answer: str
    responses: list[dict[str, Any]]
    cost: int
    source: str = ""
    origin: Any = field(default=None, repr=False)  # of tokens: the file, the samples' numbers, the lengths of all in it

    @staticmethod
    def read(run: int, folder: Path, kind: str) -> list[SampleGroup]:
        """Skips a half-written last line. Raises ValueError for damaged files."""
        if kind == "tokens":
            return _token_groups(run, folder)
        path = folder / FILES[kind]
        rows: list[Row] = list(parse_samples(path, read_lines(path))) if path.is_file() else []
        try:
            if kind == "heldout":
                return [_group(run, kind, row, _evaluated(row)) for row in rows]
            groups = groupby(rows, lambda row: (row.get("step", 0), row.get("group"), row.get("problem")))
            together = [list(members) for _, members in groups]
            return [_group(run, kind, members[0], [_response(row) for row in members]) for members in together]
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path} has a line that is not a sample: {error}; remove it") from error


def evenly(groups: Sequence[SampleGroup], responses: int, room: int) -> list[SampleGroup]:
    """First groups of all steps come before second ones, spread evenly. Keeps the order."""
    ranks = defaultdict[int, list[int]](list)
    seen = Counter[tuple[int, int]]()
    for index, group in enumerate(groups):
        ranks[seen[group.run, group.step]].append(index)
        seen[group.run, group.step] += 1
    taken: list[int] = []
    for rank in sorted(ranks):
        for index in _spread(ranks[rank]):
            count, cost = len(groups[index].responses), groups[index].cost
            if count <= responses and cost <= room:
                taken.append(index)
                responses, room = responses - count, room - cost
    return [groups[index] for index in sorted(taken)]


def _spread(places: Sequence[int]) -> list[int]:
    """Every prefix is spread evenly: last, first, middle, quarters …"""
    if len(places) < 3:
        return list(reversed(places))
    order, step = [len(places) - 1, 0], len(places) - 1
    while step > 1:
        half = step / 2
        order += [round(half + k * step) for k in range(int((len(places) - 1 - half) / step) + 1)]
        step = -(-step // 2)
    return [places[index] for index in dict.fromkeys([*order, *range(len(places))]) if index < len(places)]


Row = Mapping[str, Any]
FILES = {"heldout": "samples.jsonl", "train": "train_samples.jsonl"}


def _evaluated(row: Row) -> list[dict[str, Any]]:
    greedy = [_response(row["greedy"], "greedy")] if row.get("greedy") else []
    return greedy + [_response(item, f"sample {index}") for index, item in enumerate(row.get("sampled") or [], start=1)]


def _response(row: Row, name: str = "") -> dict[str, Any]:
    result = {"text": str(row.get("response") or ""), "reward": row.get("reward"), "tokens": row.get("tokens")}
    result["finish"] = row.get("finish_reason")
    also = {"name": name, "error": row.get("error"), "version": row.get("weights_version"), "correct": row.get("correct")}
    also |= {"turns": [[str(turn.get("by")), str(turn.get("text"))] for turn in row.get("turns") or ()]}
    also |= {"components": row.get("components")}
    return result | {key: value for key, value in also.items() if value not in (None, "", [], {})}


def _group(run: int, kind: str, row: Row, responses: list[dict[str, Any]]) -> SampleGroup:
    texts = [str(row.get("prompt") or ""), *(response["text"] for response in responses)]
    turns = [text for response in responses for _, text in response.get("turns", ())]
    return SampleGroup(
        run,
        kind,
        step=int(row.get("step", 0)),
        problem=str(row.get("problem", "")),
        prompt=texts[0],
        answer="" if row.get("answer") is None else str(row["answer"]),
        responses=responses,
        cost=sum(map(len, texts + turns)),
        source=str(row.get("set") or row.get("source") or ""),
    )


FLAG_TRAINED, FLAG_MASKED = 1, 2  # a token's bits: the model trains on it; an objective's term (TEPO's KL mask) selected it
Array = np.ndarray[Any, np.dtype[Any]]

COLUMNS: Mapping[str, Callable[[TokenSamples], Array]] = {
    "logprob": lambda samples: samples.logprob_sampler,
    "gap": lambda samples: samples.logprob_trainer - samples.logprob_sampler,
    "entropy": lambda samples: samples.entropy,
    "entropy_change": lambda samples: samples.entropy_change,
    "advantage": lambda samples: samples.advantage,
    "ratio": lambda samples: samples.ratio - 1,
    "divergence": lambda samples: samples.divergence,
    "token_ratio": lambda samples: np.expm1(samples.logprob_update - samples.logprob_trainer),
}  # float32 [T] per file; ratios minus 1, which rounding would blur


def _token_groups(run: int, folder: Path) -> list[SampleGroup]:
    result: list[SampleGroup] = []
    for path in token_files(folder).values():
        try:
            samples = read_tokens(path, values=False)
        except FileNotFoundError:
            continue
        groups = defaultdict[int, list[int]](list)
        for index, group in enumerate(samples.group.tolist()):
            groups[group].append(index)
        result += [_token_group(run, path, samples, tuple(members)) for members in groups.values()]
    return result


def _token_group(run: int, path: Path, samples: TokenSamples, members: tuple[int, ...]) -> SampleGroup:
    prompt = samples.prompts[int(samples.prompt[members[0]])]
    responses: list[dict[str, Any]] = [
        {
            "reward": float(samples.reward[index]),
            "tokens": int(samples.lengths[index]),
            "finish": "length" if samples.truncated[index] else "stop",
            "update": int(samples.update[index]),
        }
        for index in members
    ]
    texts = {"problem": prompt.problem, "prompt": prompt.text, "answer": prompt.answer or "", "source": prompt.source}
    cost = sum(response["tokens"] for response in responses)
    origin = (path, members, samples.lengths)
    return SampleGroup(run, "tokens", samples.step, responses=responses, cost=cost, origin=origin, **texts)


def _with_values(groups: Sequence[SampleGroup]) -> Iterator[tuple[SampleGroup, TokenSamples]]:
    """Leaves out those of replaced files: the run went back."""
    for path, of_file in groupby(groups, lambda group: group.origin[0]):
        with suppress(FileNotFoundError):
            samples = read_tokens(path)
            yield from ((group, samples) for group in of_file if np.array_equal(group.origin[2], samples.lengths))


def pack(groups: Sequence[SampleGroup]) -> dict[str, Any]:
    """Sets ``at``, the first token, in each response; in none if a group's file is gone."""
    parts: dict[str, list[Array]] = {name: [] for name in ("id", "flags", "version", *COLUMNS)}
    pieces: dict[str, int] = {}
    index = 0
    for group, samples in _with_values(groups):
        taken = [samples.tokens_of(member) for member in group.origin[1]]
        for response in group.responses:
            response["at"], index = index, index + response["tokens"]
        of_group = {name: column(samples) for name, column in COLUMNS.items()}
        texts = (samples.pieces[token] for item in taken for token in samples.ids[item].tolist())
        of_group["id"] = np.array([pieces.setdefault(text, len(pieces)) for text in texts], np.uint32)
        of_group["flags"] = samples.loss_mask * FLAG_TRAINED + samples.masked * FLAG_MASKED
        of_group["version"] = samples.version
        for name, values in of_group.items():
            parts[name] += [values] if name == "id" else [values[item].copy() for item in taken]  # frees the file's arrays
    joined = {name: np.concatenate(values) if values else np.zeros(0) for name, values in parts.items()}
    columns = {name: _encode(joined[name], np.dtype(np.uint32)) for name in ("id", "version")}
    columns["flags"] = _encode(joined["flags"], np.dtype(np.uint8))
    known = [name for name in COLUMNS if np.isfinite(joined[name]).any()]
    columns |= {name: _encode(_bfloat16(joined[name]), np.dtype(np.uint16)) for name in known}
    return {"tokens": index, "pieces": list(pieces), "columns": columns}


def _bfloat16(values: Array) -> Array:
    """Upper halves of float32, uint16 [N], rounded to nearest; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _encode(values: Array, dtype: np.dtype[Any]) -> str:
    """Base64 of little-endian integers: all lowest bytes, then the next."""
    planes = np.ascontiguousarray(values.astype(dtype.newbyteorder("<"))).view(np.uint8).reshape(len(values), dtype.itemsize)
    return base64.b64encode(planes.T.tobytes()).decode("ascii")

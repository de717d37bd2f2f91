"""Samples token by token, from the files that a run writes with ``log.token_samples``, packed small for a page.

In a page floats are bfloat16, which keeps two to three digits over the whole range and NaN; all bytes of one significance lie
together, since gzip makes little of them then. What is shown as the gap between trainer and sampler is their difference in
float32, made before anything is rounded.
"""

from __future__ import annotations

import base64
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tepo_megatron.report.choose import SampleGroup

FOLDER = "tokens"
FORMAT = 1

FLAG_TRAINED, FLAG_MASKED = 1, 2
"""Bits of a token: it is the model's own and trained on; TEPO's mask held it back."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class TokenFile:
    """One step's file: ``arrays`` by name (values of all responses one after the other), ``meta``, and where responses begin."""

    path: Path
    arrays: Mapping[str, Array]
    meta: Mapping[str, Any]
    offsets: Array

    def column(self, name: str, start: int, end: int) -> Array | None:
        values = self.arrays.get(name)
        return None if values is None else values[start:end]


def read_token_file(path: Path) -> TokenFile:
    """Reads ``tokens/step_0000030.npz``. Raises ValueError for a file that is damaged or of another format."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(str(arrays.pop("meta")))
        offsets = np.concatenate([[0], np.cumsum(arrays["lengths"])])
        short = [name for name in ("ids", "loss_mask") if len(arrays[name]) != offsets[-1]]
        counted = [name for name in ("prompt", "group", "reward", "truncated") if len(arrays[name]) + 1 != len(offsets)]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no file of per-token values: {error}; remove it") from error
    if meta.get("format") != FORMAT:
        raise ValueError(f"{path} has the format {meta.get('format')!r}; this version reads {FORMAT}")
    if short or counted:
        raise ValueError(f"{path}: {', '.join(short + counted)} and lengths do not agree; remove it")
    return TokenFile(path, arrays, meta, offsets)


def read_tokens(run: int, folder: Path) -> list[SampleGroup]:
    """Every recorded group of a run, by step. Their tokens are packed by :func:`pack`, once it is known which are shown.

    A response has ``reward``, ``tokens`` (their number), ``finish``; :func:`pack` adds ``at``, its first token in the columns.
    """
    found: list[SampleGroup] = []
    for path in sorted((folder / FOLDER).glob("step_*.npz")):
        file = read_token_file(path)
        members: dict[int, list[int]] = {}
        for at, group in enumerate(file.arrays["group"].tolist()):
            members.setdefault(group, []).append(at)
        found += [_group(run, file, responses) for responses in members.values()]
    return found


def _group(run: int, file: TokenFile, members: Sequence[int]) -> SampleGroup:
    prompt = file.meta["prompts"][int(file.arrays["prompt"][members[0]])]
    rewards, truncated = file.arrays["reward"], file.arrays["truncated"]
    lengths = file.arrays["lengths"]
    responses = [
        {
            "reward": float(rewards[at]) if np.isfinite(rewards[at]) else None,
            "tokens": int(lengths[at]),
            "finish": "length" if truncated[at] else "stop",
        }
        for at in members
    ]
    answer = prompt.get("answer")
    return SampleGroup(
        run,
        "tokens",
        step=int(file.meta["step"]),
        problem=str(prompt.get("problem") or ""),
        prompt=str(prompt.get("text") or ""),
        answer="" if answer is None else str(answer),
        responses=responses,
        cost=int(sum(lengths[at] for at in members)),
        source=str(prompt.get("source") or ""),
        origin=(file, tuple(members)),
    )


def pack(groups: Sequence[SampleGroup]) -> dict[str, Any]:
    """The tokens of a run's groups, one behind the other, as the page decodes them; sets ``at`` in each response.

    ``pieces``: texts; ``id``: which of them each token is; ``flags``, ``version``; and of ``logprob``, ``gap``, ``entropy``,
    ``entropy_change``, ``advantage`` and ``ratio`` (less 1, which rounding would blur) those with any finite number.
    """
    parts: dict[str, list[Array]] = {name: [] for name in ("id", "flags", "version", *_FLOATS)}
    pieces: dict[str, int] = {}
    at = 0
    for group in groups:
        file, members = group.origin
        for response, member in zip(group.responses, members, strict=True):
            start, end = int(file.offsets[member]), int(file.offsets[member + 1])
            response["at"], at = at, at + end - start
            parts["id"].append(_pieces_of(file, start, end, pieces))
            parts["flags"].append(_flags(file, start, end))
            version = file.column("version", start, end)
            parts["version"].append(np.zeros(end - start, np.uint32) if version is None else version.astype(np.uint32))
            for name, source in _FLOATS.items():
                parts[name].append(_floats(file, source, start, end))
    joined = {name: np.concatenate(values) if values else np.zeros(0) for name, values in parts.items()}
    columns = {name: encode(joined[name], np.dtype(np.uint32)) for name in ("id", "version")}
    columns["flags"] = encode(joined["flags"], np.dtype(np.uint8))
    columns |= {name: encode(bfloat16(joined[name]), np.dtype(np.uint16)) for name in _FLOATS if np.isfinite(joined[name]).any()}
    return {"tokens": at, "pieces": list(pieces), "columns": columns}


_FLOATS = {
    "logprob": "logprob_sampler",
    "gap": "",
    "entropy": "entropy",
    "entropy_change": "entropy_change",
    "advantage": "advantage",
    "ratio": "ratio",
}
"""Columns of the page, and the arrays that they are; the gap is computed."""


def _floats(file: TokenFile, source: str, start: int, end: int) -> Array:
    if not source:
        trainer, sampler = file.column("logprob_trainer", start, end), file.column("logprob_sampler", start, end)
        values = None if trainer is None or sampler is None else trainer - sampler
    else:
        values = file.column(source, start, end)
        values = values - 1 if values is not None and source == "ratio" else values
    return np.full(end - start, np.nan, np.float32) if values is None else values.astype(np.float32)


def _flags(file: TokenFile, start: int, end: int) -> Array:
    flags = np.where(file.arrays["loss_mask"][start:end], FLAG_TRAINED, 0)
    masked, weight = file.column("masked", start, end), file.column("kl_weight", start, end)
    held = masked if masked is not None else weight > 0 if weight is not None else np.zeros(end - start, bool)
    return (flags + np.where(held, FLAG_MASKED, 0)).astype(np.uint8)


def _pieces_of(file: TokenFile, start: int, end: int, pieces: dict[str, int]) -> Array:
    """Places in ``pieces``, which grows by the texts that are new."""
    texts = file.meta["pieces"]
    ids = file.arrays["ids"][start:end].tolist()
    return np.array([pieces.setdefault(str(texts.get(str(id), f"⟨{id}⟩")), len(pieces)) for id in ids], np.uint32)


def bfloat16(values: Array) -> Array:
    """The upper halves of float32, uint16 [N], rounded to the nearest; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def encode(values: Array, dtype: np.dtype[Any]) -> str:
    """Base64 of the values as little-endian integers, all lowest bytes first, then the next ones."""
    planes = np.ascontiguousarray(values.astype(dtype.newbyteorder("<"))).view(np.uint8).reshape(len(values), dtype.itemsize)
    return base64.b64encode(planes.T.tobytes()).decode("ascii")

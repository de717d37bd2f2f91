"""Samples token by token, from the files of ``log.token_samples``, packed for a page.

Floats become bfloat16 (two to three digits, full range, NaN), with bytes of equal significance together for gzip. Differences
are computed in float32 before rounding.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tepo_megatron.run.metrics.token_file import TokenSamples, read_tokens, token_files
from tepo_megatron.tools.report.samples import SampleGroup

FLAG_TRAINED, FLAG_MASKED = 1, 2
"""Bits of a token: the model wrote it and trains on it; an objective's term selected it (TEPO's KL mask)."""

Array = np.ndarray[Any, np.dtype[Any]]

COLUMNS: Mapping[str, Callable[[TokenSamples], Array]] = {
    "logprob": lambda samples: samples.logprob_sampler,
    "gap": lambda samples: samples.logprob_trainer - samples.logprob_sampler,
    "entropy": lambda samples: samples.entropy,
    "entropy_change": lambda samples: samples.entropy_change,
    "advantage": lambda samples: samples.advantage,
    "ratio": lambda samples: samples.ratio - 1,
    "token_ratio": lambda samples: np.expm1(samples.logprob_update - samples.logprob_trainer),
}
"""Float columns of the page, float32 [T] per file. Ratios have 1 subtracted, which rounding would blur."""


def token_groups(run: int, folder: Path) -> list[SampleGroup]:
    """All recorded groups by step. :func:`pack` packs their tokens after the choice of groups.

    A response has ``reward``, ``tokens`` (a count), ``finish``, ``update``; :func:`pack` adds ``at``, its first token. Raises
    ValueError for an unreadable file; skips files that a resumed run removes.
    """
    result: list[SampleGroup] = []
    for path in token_files(folder).values():
        try:
            samples = read_tokens(path)
        except FileNotFoundError:
            continue
        members: dict[int, list[int]] = {}
        for index, group in enumerate(samples.group.tolist()):
            members.setdefault(group, []).append(index)
        result += [_group(run, samples, responses) for responses in members.values()]
    return result


def _group(run: int, samples: TokenSamples, members: Sequence[int]) -> SampleGroup:
    prompt = samples.prompts[int(samples.prompt[members[0]])]
    responses = [
        {
            "reward": float(samples.reward[index]),
            "tokens": int(samples.lengths[index]),
            "finish": "length" if samples.truncated[index] else "stop",
            "update": int(samples.update[index]),
        }
        for index in members
    ]
    return SampleGroup(
        run,
        "tokens",
        step=samples.step,
        problem=prompt.problem,
        prompt=prompt.text,
        answer=prompt.answer or "",
        responses=responses,
        cost=int(samples.lengths[list(members)].sum()),
        source=prompt.source,
        origin=(samples, tuple(members)),
    )


def pack(groups: Sequence[SampleGroup]) -> dict[str, Any]:
    """Concatenate a run's tokens as the page decodes them; set ``at`` in each response.

    ``pieces``: texts; ``columns``: ``id`` (index of the piece), ``flags``, ``version``, and the ``COLUMNS`` with finite
    values.
    """
    parts: dict[str, list[Array]] = {name: [] for name in ("id", "flags", "version", *COLUMNS)}
    pieces: dict[str, int] = {}
    index = 0
    for group in groups:
        samples, members = group.origin
        taken = [samples.tokens_of(member) for member in members]
        for response in group.responses:
            response["at"], index = index, index + response["tokens"]
        of_group = {name: column(samples) for name, column in COLUMNS.items()}
        of_group["id"] = np.array([pieces.setdefault(text, len(pieces)) for text in _texts(samples, taken)], np.uint32)
        of_group["flags"] = samples.loss_mask * FLAG_TRAINED + samples.masked * FLAG_MASKED
        of_group["version"] = samples.version
        for name, values in of_group.items():
            parts[name] += [values] if name == "id" else [values[item] for item in taken]
    joined = {name: np.concatenate(values) if values else np.zeros(0) for name, values in parts.items()}
    columns = {name: encode(joined[name], np.dtype(np.uint32)) for name in ("id", "version")}
    columns["flags"] = encode(joined["flags"], np.dtype(np.uint8))
    known = [name for name in COLUMNS if np.isfinite(joined[name]).any()]
    columns |= {name: encode(bfloat16(joined[name]), np.dtype(np.uint16)) for name in known}
    return {"tokens": index, "pieces": list(pieces), "columns": columns}


def _texts(samples: TokenSamples, taken: Sequence[slice]) -> list[str]:
    return [samples.pieces[token] for item in taken for token in samples.ids[item].tolist()]


def bfloat16(values: Array) -> Array:
    """Upper halves of float32, uint16 [N], rounded to nearest; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def encode(values: Array, dtype: np.dtype[Any]) -> str:
    """Base64 of little-endian integers, all lowest bytes first, then the next."""
    planes = np.ascontiguousarray(values.astype(dtype.newbyteorder("<"))).view(np.uint8).reshape(len(values), dtype.itemsize)
    return base64.b64encode(planes.T.tobytes()).decode("ascii")

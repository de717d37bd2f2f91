"""The form of drawn responses between server and client: a stream of frames, one for each response as it finishes.

A frame is the length of its head (4 bytes), the head as JSON, token ids as int32, log-probs as float32, all little-endian.
Optional: the experts, with ``"routes": [rows, layers, k, bytes of each]`` in the head; and the sampling mask, with ``"kept":
n``: int32 counts of the other possible tokens at each position, then their n int32 ids. A response's head is ``{"sample": 3,
"tokens": 17, "logprobs": 17, "finish_reason": "stop", "versions": [[0, "4:ab"]]}``, with (first token, the server's name for
the weights). The last head is ``{"end": 8}``, the number of responses, or ``{"error": "…", "status": 500}``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

SAMPLES = "/tepo/samples"
"""Draws responses."""

ABORT = "/tepo/samples/abort"
"""Ends responses in progress; their parts are answered."""

_IDS, _LOGPROBS = np.dtype("<i4"), np.dtype("<f4")
_ROUTES: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2")}
_LENGTH = 4
MOST_HEAD_BYTES = 2**20
MOST_TOKENS = 2**26
"""Most tokens of a valid response."""
MOST_ROUTE_BYTES = 2**34
MOST_KEPT_TOKENS = 2**32


class BadFrame(ValueError):  # noqa: N818
    ...


@dataclass(frozen=True)
class Frame:
    """The arrays are read-only."""

    head: dict[str, Any]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    routes: NDArray[Any] | None = None
    """uint8 or uint16 [rows, layers, k]."""
    kept: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
    """Counts and ids of the sampling mask."""


def response_frame(
    sample: int,
    ids: ArrayLike,
    logprobs: ArrayLike,
    finish_reason: str | None,
    versions: Sequence[tuple[int, str]],
    routes: NDArray[Any] | None = None,
    kept: tuple[ArrayLike, ArrayLike] | None = None,
) -> bytes:
    """``kept``: counts and ids of the sampling mask."""
    ids, logprobs = np.asarray(ids, _IDS), np.asarray(logprobs, _LOGPROBS)
    head: dict[str, Any] = {
        "sample": sample,
        "tokens": ids.size,
        "logprobs": logprobs.size,
        "finish_reason": finish_reason,
        "versions": list(versions),
    }
    parts = [ids.tobytes(), logprobs.tobytes()]
    if routes is not None:
        head |= {"routes": [*routes.shape, routes.itemsize]}
        parts.append(routes.astype(_ROUTES[routes.itemsize], copy=False).tobytes())
    if kept is not None:
        counts, others = (np.asarray(each, _IDS) for each in kept)
        head |= {"kept": others.size}
        parts += [counts.tobytes(), others.tobytes()]
    return b"".join([head_frame(head), *parts])


def end_frame(responses: int) -> bytes:
    """The last frame of an answer."""
    return head_frame({"end": responses})


def error_frame(message: str, status: int) -> bytes:
    """For an answer that fails after its start."""
    return head_frame({"error": message, "status": status})


def head_frame(head: dict[str, Any]) -> bytes:
    text = json.dumps(head).encode()
    return len(text).to_bytes(_LENGTH, "little") + text


class FrameReader:
    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._need = _LENGTH

    def feed(self, piece: bytes) -> Iterator[Frame]:
        """Yields the frames that end within this piece. Raises BadFrame for invalid ones."""
        self._pieces.append(piece)
        self._size += len(piece)
        while self._size >= self._need:  # join only when there is something to read: a response may have hundreds of pieces
            data = b"".join(self._pieces)
            frame, used = self._read(data)
            self._pieces, self._size = [data[used:]], len(data) - used
            if frame is not None:
                self._need = _LENGTH
                yield frame

    def _read(self, data: bytes) -> tuple[Frame | None, int]:
        start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        if not _LENGTH + 2 <= start <= _LENGTH + MOST_HEAD_BYTES:
            raise BadFrame(f"{data[:60]!r}")
        self._need = start
        if len(data) < start:
            return None, 0
        try:
            head = json.loads(data[_LENGTH:start])
            tokens, logprobs = (head.get(name, 0) for name in ("tokens", "logprobs"))
            routes, kept = _sizes_of_routes(head.get("routes")), head.get("kept")
        except (ValueError, AttributeError) as error:
            raise BadFrame(f"{data[_LENGTH : _LENGTH + 60]!r}") from error
        if any(type(count) is not int or not 0 <= count <= MOST_TOKENS for count in (tokens, logprobs)):
            raise BadFrame(f"a response of {tokens!r} tokens with {logprobs!r} log-probs")
        if kept is not None and (type(kept) is not int or not 0 <= kept <= MOST_KEPT_TOKENS):
            raise BadFrame(f"a sampling mask of {kept!r} tokens")
        middle = start + tokens * _IDS.itemsize
        last = middle + logprobs * _LOGPROBS.itemsize
        masked = last + math.prod(routes)
        end = self._need = masked + (0 if kept is None else (tokens + kept) * _IDS.itemsize)
        if len(data) < end:
            return None, 0
        ids = np.frombuffer(data[start:middle], _IDS).astype(np.int32, copy=False)
        values = np.frombuffer(data[middle:last], _LOGPROBS).astype(np.float32, copy=False)
        experts = None
        if head.get("routes") is not None:
            *shape, itemsize = routes
            experts = np.frombuffer(data[last:masked], _ROUTES[itemsize]).reshape(shape)
        others = None
        if kept is not None:
            numbers = np.frombuffer(data[masked:end], _IDS).astype(np.int32, copy=False)
            others = (numbers[:tokens], numbers[tokens:])
        return Frame(head, ids, values, experts, others), end


def _sizes_of_routes(given: object) -> list[int]:
    """Rows, layers, experts per token and bytes of each. Raises ValueError for anything else."""
    if given is None:
        return [0, 0, 0, 1]
    if not isinstance(given, list) or len(given) != 4 or any(type(size) is not int or size < 0 for size in given):
        raise ValueError("no sizes of routes")
    if given[3] not in _ROUTES or math.prod(given) > MOST_ROUTE_BYTES:
        raise ValueError("no routes of one response")
    return [int(size) for size in given]

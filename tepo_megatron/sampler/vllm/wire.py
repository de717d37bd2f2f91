"""Drawn responses between server and client: a stream of frames, one for each response as it finishes.

A frame is the length of its head (4 bytes), the head as JSON, token ids as int32, log-probs as float32, all little-endian.
Optional: the experts, with ``"routes": [rows, layers, k, bytes of each]`` in the head; and the sampling mask, with ``"kept":
n``: int32 counts of the other possible tokens at each position, then their n int32 ids. A response's head is ``{"sample": 3,
"tokens": 17, "logprobs": 17, "finish_reason": "stop", "versions": [[0, "4:ab"]]}``, with (first token, the server's name for
the weights). The last head is ``{"end": 8}``, the number of responses, or ``{"error": "…", "status": 500}``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tepo_megatron.core.rollout import Response, Routes, SamplingMask, Spans, TokenIds, WeightsVersion
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.routes import routes_dtype, routes_fault

SAMPLES = "/tepo/samples"

ABORT = "/tepo/samples/abort"  # answered with the parts

_IDS, _LOGPROBS = np.dtype("<i4"), np.dtype("<f4")
_ROUTES: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2")}
_LENGTH = 4
_MAX_HEAD_BYTES = 2**20
_MAX_TOKENS = 2**26
_MAX_ROUTE_BYTES = 2**34
_MAX_MASK_TOKENS = 2**32
_ROUNDING = 1e-3  # nats above 0 that log-softmax may round to


class BadAnswer(ValueError):  # noqa: N818
    """The message continues the server's address."""


class OtherWeights(ValueError):  # noqa: N818
    """The client does not expect these weights."""


class FailedAnswer(ValueError):  # noqa: N818
    """``status`` would have been the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _Frame(NamedTuple):
    """``routes`` are uint8 or uint16 [rows, layers, k]; ``mask`` are counts and ids."""

    head: dict[str, Any]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    routes: NDArray[Any] | None
    mask: tuple[NDArray[np.int32], NDArray[np.int32]] | None


def response_frame(
    sample: int,
    ids: ArrayLike,
    logprobs: ArrayLike,
    finish_reason: str | None,
    versions: Sequence[tuple[int, str]],
    routes: NDArray[Any] | None = None,
    mask: tuple[ArrayLike, ArrayLike] | None = None,
) -> bytes:
    """``mask`` has counts and ids."""
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
    if mask is not None:
        counts, others = (np.asarray(part, _IDS) for part in mask)
        head |= {"kept": others.size}
        parts += [counts.tobytes(), others.tobytes()]
    return b"".join([head_frame(head), *parts])


def head_frame(head: dict[str, Any]) -> bytes:
    text = json.dumps(head).encode()
    return len(text).to_bytes(_LENGTH, "little") + text


def split_frames(pieces: Iterable[bytes]) -> Iterator[_Frame]:
    """Raises BadAnswer for an invalid frame."""
    waiting: list[bytes] = []
    size, needed = 0, _LENGTH
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        while size >= needed:  # join only when there is something to read: a response may have hundreds of pieces
            data = b"".join(waiting)
            frame, end = _read_frame(data)
            needed, used = (end, 0) if frame is None else (_LENGTH, end)
            waiting, size = [data[used:]], len(data) - used
            if frame is not None:
                yield frame


def _read_frame(data: bytes) -> tuple[_Frame | None, int]:
    """Returns no frame if ``data`` needs more bytes."""
    start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    if not _LENGTH + 2 <= start <= _LENGTH + _MAX_HEAD_BYTES:
        raise _no_response(repr(data[:60]))
    if len(data) < start:
        return None, start
    try:
        head = json.loads(data[_LENGTH:start])
        tokens, logprobs = (head.get(name, 0) for name in ("tokens", "logprobs"))
        routes, others = _route_sizes(head.get("routes")), head.get("kept")
    except (ValueError, AttributeError) as error:
        raise _no_response(repr(data[_LENGTH : _LENGTH + 60])) from error
    if any(type(count) is not int or not 0 <= count <= _MAX_TOKENS for count in (tokens, logprobs)):
        raise _no_response(f"a response of {tokens!r} tokens with {logprobs!r} log-probs")
    if others is not None and (type(others) is not int or not 0 <= others <= _MAX_MASK_TOKENS):
        raise _no_response(f"a sampling mask of {others!r} tokens")
    middle = start + tokens * _IDS.itemsize
    last = middle + logprobs * _LOGPROBS.itemsize
    masked = last + math.prod(routes)
    end = masked + (0 if others is None else (tokens + others) * _IDS.itemsize)
    if len(data) < end:
        return None, end
    ids = np.frombuffer(data[start:middle], _IDS).astype(np.int32, copy=False)
    values = np.frombuffer(data[middle:last], _LOGPROBS).astype(np.float32, copy=False)
    experts = mask = None
    if head.get("routes") is not None:
        *shape, itemsize = routes
        experts = np.frombuffer(data[last:masked], _ROUTES[itemsize]).reshape(shape)
    if others is not None:
        numbers = np.frombuffer(data[masked:end], _IDS).astype(np.int32, copy=False)
        mask = (numbers[:tokens], numbers[tokens:])
    return _Frame(head, ids, values, experts, mask), end


def _no_response(detail: object) -> BadAnswer:
    return BadAnswer(f"answered with something else than responses: {detail}")


def _route_sizes(sizes: object) -> list[int]:
    """Returns rows, layers, experts per token and bytes of each."""
    if sizes is None:
        return [0, 0, 0, 1]
    if not isinstance(sizes, list) or len(sizes) != 4 or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError("no sizes of routes")
    if sizes[3] not in _ROUTES or math.prod(sizes) > _MAX_ROUTE_BYTES:
        raise ValueError("no routes of one response")
    return sizes


def read_frames(pieces: Iterable[bytes], samples: Sequence[int]) -> Iterator[_Frame]:
    """Raises BadAnswer for a wrong frame or response, FailedAnswer for a server's error."""
    missing = set(samples)
    for frame in split_frames(pieces):
        if "error" in frame.head:
            raise FailedAnswer(str(frame.head["error"])[:2000], int(frame.head.get("status", 500)))
        if "end" in frame.head:
            if missing or frame.head["end"] != len(samples):
                raise BadAnswer(f"returned {len(samples) - len(missing)} responses of {len(samples)} that were asked for")
            return
        sample = frame.head.get("sample")
        if not isinstance(sample, int) or sample not in samples:
            raise BadAnswer(f"returned a response to sample {sample!r}, which was not asked for")
        if sample not in missing:
            raise BadAnswer(f"returned the response to sample {sample} again")
        missing.remove(sample)
        yield frame
    raise BadAnswer(f"stopped after {len(samples) - len(missing)} responses of {len(samples)}")


def read_response(
    frame: _Frame,
    *,
    max_new_tokens: int,
    vocab_size: int | None,
    labels: Mapping[str, WeightsVersion],
    part: bool,
    routed: tuple[ModelSpec, int] | None = None,
    sampling_mask: bool = False,
) -> Response | None:
    """Returns None if the response was aborted before its first token, which ``part`` allows.

    ``labels``: the weights that may draw tokens, by the server's names, oldest first. ``routed``: the model, and the number of
    tokens before the response. Raises BadAnswer or OtherWeights.
    """
    head, ids, logprobs = frame.head, frame.ids, frame.logprobs
    if ids.size != logprobs.size:
        raise BadAnswer(f"returned {logprobs.size} log-probs for {ids.size} tokens; every token needs one")
    aborted = part and head.get("finish_reason") == "abort"
    if aborted and not ids.size:
        return None
    if not 1 <= ids.size <= max_new_tokens:
        raise BadAnswer(f"returned a response of {ids.size} tokens; there may be 1 to {max_new_tokens}")
    _check_ids(ids, vocab_size)
    wrong = ~((logprobs > -math.inf) & (logprobs <= _ROUNDING))  # also nan
    if wrong.any():
        index = int(wrong.argmax())
        raise BadAnswer(
            f"returned {logprobs[index]} as the log-prob of the token at position {index}; it must be finite and at most 0"
        )
    try:
        spans = _read_spans([(start, label) for start, label in head["versions"]], ids.size, labels)
    except (BadAnswer, OtherWeights):
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise _no_response(repr(error)) from error
    if head.get("finish_reason") not in ("stop", "length") and not aborted:
        raise BadAnswer(f"returned a response that it did not finish: finish_reason = {head.get('finish_reason')!r}")
    routes = None if routed is None else _read_routes(frame, *routed)
    mask = _read_mask(frame, vocab_size) if sampling_mask else None
    return Response(ids, logprobs, head["finish_reason"], spans, routes, sampling_mask=mask)


def _read_spans(spans: Sequence[tuple[Any, Any]], tokens: int, labels: Mapping[str, WeightsVersion]) -> Spans:
    if not spans or any(label not in labels for _, label in spans):
        raise OtherWeights(" and ".join(sorted({str(label) for _, label in spans})) or "of no version")
    starts = [start for start, _ in spans]
    if any(type(start) is not int for start in starts) or starts[0] != 0 or any(b <= a for a, b in pairwise([*starts, tokens])):
        raise BadAnswer(f"says that weights change at the tokens {starts} of {tokens}, which is no order")
    order, versions = list(labels), [labels[label] for _, label in spans]
    if any(order.index(a) > order.index(b) for (_, a), (_, b) in pairwise(spans)):
        raise BadAnswer(f"says that older weights drew tokens after newer ones: {', '.join(label for _, label in spans)}")
    return tuple(zip(starts, versions, strict=True))


def _read_routes(frame: _Frame, spec: ModelSpec, tokens_before: int) -> Routes:
    if frame.routes is None:
        raise BadAnswer("returned a response without the experts that its tokens passed; start it with routing_replay = true")
    if fault := routes_fault(frame.routes, spec, tokens_before + frame.ids.size):
        raise BadAnswer(f"returned a response that {fault}")
    routes: Routes = frame.routes.astype(routes_dtype(spec), copy=False)
    return routes


def _read_mask(frame: _Frame, vocab_size: int | None) -> SamplingMask:
    if frame.mask is None:
        raise BadAnswer("returned a response without the tokens that could have been drawn")
    try:
        mask = SamplingMask(*frame.mask)
    except ValueError as error:
        raise BadAnswer(f"returned {error}") from error
    _check_ids(mask.ids, vocab_size)
    if (mask.ids == np.repeat(frame.ids, mask.counts)).any():
        raise BadAnswer("returned a sampling mask that names a drawn token beside itself")
    return mask


def _check_ids(ids: TokenIds, vocab_size: int | None) -> None:
    wrong = (ids < 0) if vocab_size is None else (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        index = int(wrong.argmax())
        raise BadAnswer(f"returned {ids[index]} at position {index}, which is no token of the vocabulary of {vocab_size}")

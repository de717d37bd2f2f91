"""Names that server and client share, and the stream of drawn responses, a frame for each.

A frame is the length of its head (4 bytes), the head as JSON, and arrays of the dtypes and shapes in the head; numbers are
little-endian. A response's head is ``{"sample": 3, "finish_reason": "stop", "versions": [[0, "4:ab"]], "arrays": {"ids":
["<i4", [17]], "logprobs": ["<f4", [17]]}}``, with (first token, the server's name for the weights). Optional arrays: ``routes``
[rows, layers, k], and ``counts`` and ``others`` of the sampling mask. The last head is ``{"end": 8}``, the number of responses,
or ``{"error": "…", "status": 500}``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from tepo_megatron.core.rollout import Response, SamplingMask, Spans, WeightsVersion
from tepo_megatron.sampler.sampling import Sample, response_faults
from tepo_megatron.weights.architecture import ModelSpec

SAMPLES = "/tepo/samples"
ABORT = "/tepo/samples/abort"  # answered with the parts
PROGRESS = "/progress"
FACTS = "/tepo/facts"
READ_BACK = "/tepo/read_back"
USE_ADAPTER = "/use_adapter"

KEY_VARIABLE = "VLLM_API_KEY"
# Set for a server if …
AWAITS_VARIABLE = "TEPO_AWAITS_WEIGHTS"  # its first weights must not sample
ADAPTER_VARIABLE = "TEPO_ADAPTERS"  # the trainer sends adapters alone
FORK_VARIABLE = "TEPO_SERVER_FORKS"  # its processes are forks
ROUTES_VARIABLE = "TEPO_SERVER_ROUTES"  # it must return the chosen experts
SPECULATES_VARIABLE = "TEPO_SERVER_SPECULATES"  # it decodes speculatively

DUMMY_FORMAT = "tepo_dummy"  # vLLM's --load-format of servers without weights
ADAPTER_NAME = "adapter"
ADAPTER_PATH = "memory:adapter"  # plugin.patches recognises it

_INITIAL_LABEL = "default"  # vLLM's name for the weights before any update
_LENGTH = 4
_MAX_HEAD_BYTES = 2**20
_MAX_ARRAY_BYTES = 2**34


class BadAnswer(Exception):  # noqa: N818
    """The message follows the server's address. ``repeat``: another try may succeed."""

    def __init__(self, message: str, *, repeat: bool = True) -> None:
        super().__init__(message)
        self.repeat = repeat


class _Head(BaseModel):
    model_config = ConfigDict(strict=True)
    sample: int | None = None
    finish_reason: str | None = None
    versions: list[tuple[int, str]] = []
    cached: int | None = None
    arrays: dict[
        Literal["ids", "logprobs", "routes", "counts", "others"],
        tuple[Literal["<i4", "<f4", "|u1", "<u2"], list[Annotated[int, Ge(0)]]],
    ] = {}
    end: int | None = None
    error: str | None = None
    status: int = 500


def named_tokens(top_k: int) -> int:
    """vLLM keeps ties, which are frequent in bfloat16."""
    return top_k + 8 + top_k // 8


def response_frame(
    sample: int,
    ids: ArrayLike,
    logprobs: ArrayLike,
    finish_reason: str | None,
    versions: Sequence[tuple[int, str]],
    routes: NDArray[Any] | None = None,
    mask: tuple[ArrayLike, ArrayLike] | None = None,
    cached: int | None = None,
) -> bytes:
    """``mask`` has counts and ids. ``cached``: tokens of the prompt that came from the prefix cache."""
    arrays = {"ids": np.asarray(ids, "<i4"), "logprobs": np.asarray(logprobs, "<f4")}
    if routes is not None:
        arrays["routes"] = np.asarray(routes, f"<u{routes.itemsize}")
    if mask is not None:
        arrays |= {"counts": np.asarray(mask[0], "<i4"), "others": np.asarray(mask[1], "<i4")}
    head = {"sample": sample, "finish_reason": finish_reason, "versions": list(versions), "cached": cached}
    sizes = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    return b"".join([head_frame(head | {"arrays": sizes}), *(array.tobytes() for array in arrays.values())])


def head_frame(head: dict[str, Any]) -> bytes:
    text = json.dumps(head).encode()
    return len(text).to_bytes(_LENGTH, "little") + text


def _read_frames(pieces: Iterable[bytes]) -> Iterator[tuple[_Head, dict[str, NDArray[Any]]]]:
    """Raises BadAnswer for an invalid frame. One that ``pieces`` do not finish is left out."""
    source, data = iter(pieces), bytearray()

    def take(size: int) -> bytes:
        while len(data) < size:
            if (piece := next(source, None)) is None:
                raise EOFError
            data.extend(piece)
        taken = bytes(data[:size])
        del data[:size]
        return taken

    with suppress(EOFError):
        while True:
            length = take(_LENGTH)
            size = int.from_bytes(length, "little")
            if not 2 <= size <= _MAX_HEAD_BYTES:
                raise _no_response(length + data[:56])
            text = take(size)
            try:
                head = _Head.model_validate_json(text)
            except ValidationError as error:
                raise _no_response(text[:60]) from error
            arrays: dict[str, NDArray[Any]] = {}
            for name, (dtype, shape) in head.arrays.items():
                count = math.prod(shape) * np.dtype(dtype).itemsize
                if count > _MAX_ARRAY_BYTES:
                    raise _no_response(f"{name} of the sizes {shape}")
                arrays[name] = np.frombuffer(take(count), dtype).reshape(shape)
            yield head, arrays


def _no_response(detail: object) -> BadAnswer:
    return BadAnswer(f"answered with something else than responses: {detail}")


def read_responses(
    pieces: Iterable[bytes],
    samples: Mapping[int, Sample],
    versions: Callable[[], Sequence[WeightsVersion]],
    *,
    prompt_tokens: int = 0,
    vocab_size: int | None = None,
    routed: ModelSpec | None = None,
    sampling_mask: bool = False,
    cached: list[int] | None = None,
    is_aborted: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, Response]]:
    """Yields (sample, response), except those aborted before their first token. Raises BadAnswer for impossible values.

    ``cached`` gets the frames' counts of cached tokens.
    """
    missing = set(samples)
    for head, arrays in _read_frames(pieces):
        if head.error is not None:
            raise BadAnswer(f"failed with status {head.status}: {head.error[:2000]}", repeat=head.status >= 500)
        if head.end is not None:
            if missing or head.end != len(samples):
                raise BadAnswer(f"returned {len(samples) - len(missing)} responses of {len(samples)} that were asked for")
            return
        if head.sample not in samples:
            raise BadAnswer(f"returned a response to sample {head.sample!r}, which was not asked for")
        if head.sample not in missing:
            raise BadAnswer(f"returned the response to sample {head.sample} again")
        missing.remove(head.sample)
        sample, aborted = samples[head.sample], is_aborted() and head.finish_reason == "abort"
        if aborted and not arrays.get("ids", np.empty(0)).size:
            continue
        if head.finish_reason not in ("stop", "length") and not aborted:
            raise BadAnswer(f"returned a response that it did not finish: finish_reason = {head.finish_reason!r}")
        response = _response(head, arrays, sample, versions(), prompt_tokens, routed, sampling_mask)
        for fault in response_faults(response, response.logprobs, vocab_size or 2**31):
            raise BadAnswer(f"returned a response that cannot be right: {fault}")
        if cached is not None:
            if head.cached is None:
                raise BadAnswer("returned a response without the number of tokens from its prefix cache", repeat=False)
            cached.append(head.cached)
        yield head.sample, response
    raise BadAnswer(f"stopped after {len(samples) - len(missing)} responses of {len(samples)}")


def _response(
    head: _Head,
    arrays: Mapping[str, NDArray[Any]],
    sample: Sample,
    versions: Sequence[WeightsVersion],
    prompt_tokens: int,
    routed: ModelSpec | None,
    sampling_mask: bool,
) -> Response:
    try:
        ids, logprobs = arrays["ids"], arrays["logprobs"]
        if not 1 <= ids.size <= sample.max_new_tokens:
            raise BadAnswer(f"returned a response of {ids.size} tokens; there may be 1 to {sample.max_new_tokens}")
        routes = mask = None
        if routed is not None:
            routes = arrays.get("routes")
            if routes is None:
                raise BadAnswer(
                    "returned a response without the experts that its tokens passed; start it with routing_replay = true"
                )
            if fault := routed.routes_fault(routes, prompt_tokens + sample.prefix.size + ids.size):
                raise BadAnswer(f"returned a response that {fault}")
            routes = routes.astype(routed.routes_dtype, copy=False)
        if sampling_mask:
            if "counts" not in arrays:
                raise BadAnswer("returned a response without the tokens that could have been drawn")
            mask = SamplingMask(arrays["counts"], arrays["others"])
            if len(mask) == ids.size and (mask.ids == np.repeat(ids, mask.counts)).any():
                raise BadAnswer("returned a sampling mask that names a drawn token beside itself")
        spans = _spans(head.versions, versions)
        return Response(ids, logprobs, head.finish_reason or "", spans, routes, sampling_mask=mask)
    except (KeyError, ValueError) as error:
        raise _no_response(error) from error


def _spans(spans: Sequence[tuple[int, str]], versions: Sequence[WeightsVersion]) -> Spans:
    labels = {version.label: version for version in versions}
    if versions[0] == WeightsVersion(0):
        labels = {_INITIAL_LABEL: versions[0]} | labels
    if not spans or any(name not in labels for _, name in spans):
        others = " and ".join(sorted({name for _, name in spans})) or "of no version"
        sent = " and ".join(version.label for version in versions)
        raise BadAnswer(
            f"drew a response with weights {others}, but this run gave it {sent} (step:digest): "
            "another run updates this server, or an update was lost. Give every run servers of its own, and start this one "
            "again with --resume",
            repeat=False,
        )
    order = [versions.index(labels[name]) for _, name in spans]
    if order != sorted(order):
        raise BadAnswer(f"says that older weights drew tokens after newer ones: {', '.join(name for _, name in spans)}")
    return tuple((start, labels[name]) for start, name in spans)

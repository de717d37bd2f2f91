"""Reads a server's answers; no wrong one may reach the trainer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tepo_megatron.core.rollout import Logprobs, Response, Routes, Spans, TokenIds, WeightsVersion
from tepo_megatron.core.sampling_mask import SamplingMask
from tepo_megatron.sampler.vllm.wire import BadFrame, Frame, FrameReader
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.expert_routes import routes_dtype, routes_fault

FINISHED = ("stop", "length")
"""``error`` is a server's fault, ``abort`` was requested."""

ABORTED = "abort"

ROUNDING = 1e-3
"""Nats by which a log-prob may be above 0, since log-softmax rounds."""

Labels = Mapping[str, WeightsVersion]
"""The weights that may draw tokens, oldest first, under each name that the server may have for them."""


class BadAnswer(ValueError):  # noqa: N818
    """The message continues the server's address."""


class OtherWeights(ValueError):  # noqa: N818
    ...


class FailedAnswer(ValueError):  # noqa: N818
    """A server failed after it had started to answer; ``status`` is the HTTP status that it would have sent."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def read_frames(pieces: Iterable[bytes], wanted: Sequence[int]) -> Iterator[Frame]:
    """Yields the frames of the samples ``wanted`` as they come.

    Raises BadAnswer for a malformed frame and for an unrequested, repeated or missing response; FailedAnswer for a server's
    error.
    """
    missing, reader = set(wanted), FrameReader()
    try:
        for piece in pieces:
            for frame in reader.feed(piece):
                if "error" in frame.head:
                    raise FailedAnswer(str(frame.head["error"])[:2000], int(frame.head.get("status", 500)))
                if "end" in frame.head:
                    if missing or frame.head["end"] != len(wanted):
                        raise BadAnswer(f"returned {len(wanted) - len(missing)} responses of {len(wanted)} that were asked for")
                    return
                sample = frame.head.get("sample")
                if not isinstance(sample, int) or sample not in wanted:
                    raise BadAnswer(f"returned a response to sample {sample!r}, which was not asked for")
                if sample not in missing:
                    raise BadAnswer(f"returned the response to sample {sample} again")
                missing.remove(sample)
                yield frame
    except BadFrame as error:
        raise BadAnswer(f"answered with something else than responses: {error}") from error
    raise BadAnswer(f"stopped after {len(wanted) - len(missing)} responses of {len(wanted)}")


@dataclass(frozen=True)
class Routed:
    """The model and the tokens before the response, for its record of experts."""

    spec: ModelSpec
    before: int


def read_response(
    frame: Frame,
    *,
    max_new_tokens: int,
    vocab_size: int | None,
    labels: Labels,
    part: bool,
    routed: Routed | None = None,
    sampling_mask: bool = False,
) -> Response | None:
    """Returns None if the response was aborted before its first token, which ``part`` allows. ``routed``, ``sampling_mask``: it
    must have these records.

    Raises BadAnswer for a wrong response, OtherWeights for weights that are not in ``labels``. ``vocab_size`` None: unknown.
    """
    head, ids, logprobs = frame.head, frame.ids, frame.logprobs
    if ids.size != logprobs.size:
        raise BadAnswer(f"returned {logprobs.size} log-probs for {ids.size} tokens; every token needs one")
    aborted = part and head.get("finish_reason") == ABORTED
    if aborted and not ids.size:
        return None
    if not 1 <= ids.size <= max_new_tokens:
        raise BadAnswer(f"returned a response of {ids.size} tokens; there may be 1 to {max_new_tokens}")
    _check_ids(ids, vocab_size)
    _check_logprobs(logprobs)
    try:
        spans = read_spans([(start, label) for start, label in head["versions"]], ids.size, labels)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, BadAnswer | OtherWeights):
            raise
        raise BadAnswer(f"answered with something else than responses: {error!r}") from error
    if head.get("finish_reason") not in FINISHED and not aborted:
        raise BadAnswer(f"returned a response that it did not finish: finish_reason = {head.get('finish_reason')!r}")
    routes = None if routed is None else _routes(frame, routed)
    mask = _mask(frame, vocab_size) if sampling_mask else None
    return Response(ids, logprobs, head["finish_reason"], spans, routes, sampling_mask=mask)


def read_spans(spans: Sequence[tuple[Any, Any]], tokens: int, labels: Labels) -> Spans:
    """Reads ``spans`` of (first token, the server's name for the weights).

    Raises OtherWeights for names that are not in ``labels``, BadAnswer for a wrong order.
    """
    if not spans or any(label not in labels for _, label in spans):
        raise OtherWeights(" and ".join(sorted({str(label) for _, label in spans})) or "of no version")
    starts = [start for start, _ in spans]
    if any(type(start) is not int for start in starts) or starts[0] != 0 or any(b <= a for a, b in pairwise([*starts, tokens])):
        raise BadAnswer(f"says that weights change at the tokens {starts} of {tokens}, which is no order")
    order, versions = list(labels), [labels[label] for _, label in spans]
    if any(order.index(a) > order.index(b) for (_, a), (_, b) in pairwise(spans)):
        raise BadAnswer(f"says that older weights drew tokens after newer ones: {', '.join(label for _, label in spans)}")
    return tuple(zip(starts, versions, strict=True))


def _routes(frame: Frame, routed: Routed) -> Routes:
    if frame.routes is None:
        raise BadAnswer("returned a response without the experts that its tokens passed; start it with routing_replay = true")
    if fault := routes_fault(frame.routes, routed.spec, routed.before + frame.ids.size):
        raise BadAnswer(f"returned a response that {fault}")
    routes: Routes = frame.routes.astype(routes_dtype(routed.spec), copy=False)
    return routes


def _mask(frame: Frame, vocab_size: int | None) -> SamplingMask:
    if frame.kept is None:
        raise BadAnswer("returned a response without the tokens that could have been drawn")
    try:
        mask = SamplingMask(*frame.kept)
    except ValueError as error:
        raise BadAnswer(f"returned {error}") from error
    _check_ids(mask.ids, vocab_size)
    if (mask.ids == np.repeat(frame.ids, mask.counts)).any():
        raise BadAnswer("returned a sampling mask that names a drawn token beside itself")
    return mask


def _check_ids(ids: TokenIds, vocab_size: int | None) -> None:
    wrong = (ids < 0) if vocab_size is None else (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        at = int(wrong.argmax())
        raise BadAnswer(f"returned {ids[at]} at position {at}, which is no token of the vocabulary of {vocab_size}")


def _check_logprobs(logprobs: Logprobs) -> None:
    wrong = ~((logprobs > -math.inf) & (logprobs <= ROUNDING))  # also nan
    if wrong.any():
        at = int(wrong.argmax())
        raise BadAnswer(
            f"returned {logprobs[at]} as the log-prob of the token at position {at}; it must be finite and at most 0"
        )


def read_prompt_logprobs(reply: Any, prompt: Sequence[int]) -> list[float]:
    """Natural log-probs of all tokens but the first. Raises BadAnswer if they belong to another prompt."""
    try:
        scored = reply["prompt_logprobs"][1:]
        return [float(scores[str(token)]["logprob"]) for token, scores in zip(prompt[1:], scored, strict=True)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswer(f"answered with something else than the log-probs of the prompt: {error!r}") from error

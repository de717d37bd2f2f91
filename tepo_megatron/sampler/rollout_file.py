"""A step's rollouts as JSON lines, written whole or not at all.

The first line has format, step, number of rollouts, and a digest of the rest. Token ids are base64 of little-endian int32,
log-probs of float32, ``teacher_top`` of both in turn; ``versions`` are (first token, step, digest); ``loss_mask`` has a bit per
response token, 1 for the model's. Formats 1 and 2 are read too.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from tepo_megatron.core.problem import reward_fault
from tepo_megatron.core.rollout import TOP_TOKEN, Rollout, SamplingMask, WeightsVersion
from tepo_megatron.runtime.files import write_atomically
from tepo_megatron.runtime.text import parse_json
from tepo_megatron.sampler.sampling import response_faults

FORMAT = 3
_FORMATS = (1, 2, FORMAT)

_IDS, _LOGPROBS = "<i4", "<f4"
_ROUTES = ("|u1", "<i2")


def _decode(text: object, dtype: DTypeLike) -> np.ndarray:
    if not isinstance(text, str):
        raise ValueError("not base64 text")
    return np.frombuffer(b64decode(text, validate=True), dtype)


def _read_routes(value: object) -> Any:
    if not isinstance(value, dict) or value.get("dtype") not in _ROUTES or not isinstance(value.get("shape"), list):
        raise ValueError("not a routing record: shape, dtype and data")
    if any(type(n) is not int or not 0 <= n < 2**31 for n in value["shape"]):
        raise ValueError("not a shape of a routing record")
    return _decode(value.get("data"), value["dtype"]).reshape(value["shape"])


def _read_sampling_mask(value: object) -> Any:
    if not isinstance(value, dict):
        raise ValueError("not a sampling mask: counts and ids")
    return SamplingMask(*(_decode(value.get(name), _IDS) for name in ("counts", "ids")))


def _read_top(value: object) -> Any:
    if not isinstance(value, dict) or type(value.get("k")) is not int or value["k"] < 1:
        raise ValueError("not a teacher's top tokens: k and data")
    return _decode(value.get("data"), TOP_TOKEN).reshape(-1, value["k"])


_Ids = Annotated[np.ndarray, BeforeValidator(lambda text: _decode(text, _IDS))]
_Logprobs = Annotated[np.ndarray, BeforeValidator(lambda text: _decode(text, _LOGPROBS))]
_Bits = Annotated[np.ndarray, BeforeValidator(lambda text: np.unpackbits(_decode(text, np.uint8)))]


class _Common(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)
    problem_id: str
    group: int
    finish_reason: str
    text: str
    reward: float | None
    reward_parts: dict[str, float] = {}


class _Line(_Common):
    prompt_ids: _Ids
    response_ids: _Ids
    sampler_logprobs: _Logprobs
    versions: list[tuple[int, int, str]]
    routed_experts: Annotated[np.ndarray, BeforeValidator(_read_routes)] | None = None
    loss_mask: _Bits | None = None
    sampling_mask: Annotated[SamplingMask, BeforeValidator(_read_sampling_mask)] | None = None
    teacher_logprobs: _Logprobs | None = None
    teacher_top: Annotated[np.ndarray, BeforeValidator(_read_top)] | None = None

    def rollout(self) -> Rollout:
        spans = tuple((start, WeightsVersion(step, digest)) for start, step, digest in self.versions)
        bits, tokens = self.loss_mask, self.response_ids.size
        if bits is not None and bits.size != -(-tokens // 8) * 8:
            raise ValueError(f"loss_mask has {bits.size} bits for {tokens} response tokens")
        mask = None if bits is None else bits[:tokens].astype(np.bool_)
        return Rollout(**{**dict(self), "versions": spans, "loss_mask": mask})


class _Version(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    step: int
    digest: str


class _OldLine(_Common):
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    weights_version: _Version

    def rollout(self) -> Rollout:
        values = dict(self)
        version = values.pop("weights_version")
        return Rollout(**values, versions=WeightsVersion(version.step, version.digest))


@dataclass(frozen=True)
class Record:
    """``drawn_by`` names weights and settings, as numbered by the writer."""

    rollouts: list[Rollout]
    drawn_by: str = ""
    failed_rewards: int = 0

    @classmethod
    def read(cls, folder: Path, step: int) -> Record:
        """Raises ValueError with file and line."""
        path = record_path(folder, step)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: the recorded rollouts of step {step} cannot be read: {error}") from error
        lines = text.split("\n")
        if lines.pop():  # every line ends with a line feed, so the last piece is empty
            raise ValueError(f"{path}, line {len(lines) + 1}: the file ends within a line; record the step again")
        head = _head(path, lines, step)
        if len(lines) - 1 != head["rollouts"]:
            raise ValueError(
                f"{path}, line {len(lines)}: the file ends after {len(lines) - 1} rollouts, but its first line announces "
                f"{head['rollouts']}; record the step again"
            )
        kind = _Line if head["format"] == FORMAT else _OldLine
        rollouts = [_rollout(path, number, line, kind) for number, line in enumerate(lines[1:], start=2)]
        rest = {key: value for key, value in head.items() if key != "sha256"}
        if head["format"] != 1 and head.get("sha256") != _digest(rest, text.partition("\n")[2].encode()):
            raise ValueError(f"{path}, line 1: the file was changed or damaged after it was written; record the step again")
        return cls(rollouts, drawn_by=str(head.get("drawn_by", "")), failed_rewards=head.get("failed_rewards", 0))


def record_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:07d}.jsonl"


def write_rollouts(
    folder: Path, step: int, rollouts: Sequence[Rollout], *, drawn_by: str = "", failed_rewards: int = 0, flush: bool = True
) -> Path:
    """The file gets its name when whole and, with ``flush``, on disk."""
    path = record_path(folder, step)
    head = {"format": FORMAT, "step": step, "rollouts": len(rollouts), "drawn_by": drawn_by, "failed_rewards": failed_rewards}
    body = "".join(_line(rollout) for rollout in rollouts).encode()
    first = json.dumps(head | {"sha256": _digest(head, body)}) + "\n"
    write_atomically(path, first.encode() + body, sync=flush)
    return path


def _head(path: Path, lines: Sequence[str], step: int) -> dict[str, Any]:
    head = None
    with suppress(ValueError, IndexError):
        head = parse_json(lines[0], path)
    if not isinstance(head, dict) or head.get("format") not in _FORMATS or head.get("step") != step or not _is_counted(head):
        raise ValueError(f"{path}, line 1: not the head of a record of step {step} in format {FORMAT}")
    return head


def _is_counted(head: dict[str, Any]) -> bool:
    return type(head.get("rollouts")) is int and type(head.get("failed_rewards", 0)) is int


def _digest(head: dict[str, Any], body: bytes) -> str:
    digest = sha256(json.dumps(head).encode() + b"\n")
    digest.update(body)
    return digest.hexdigest()


def _line(rollout: Rollout) -> str:
    line: dict[str, Any] = {
        "problem_id": rollout.problem_id,
        "group": rollout.group,
        "prompt_ids": _encode(rollout.prompt_ids),
        "response_ids": _encode(rollout.response_ids),
        "sampler_logprobs": _encode(rollout.sampler_logprobs, _LOGPROBS),
        "finish_reason": rollout.finish_reason,
        "versions": [(start, version.step, version.digest) for start, version in rollout.versions],
        "text": rollout.text,
        "reward": rollout.reward,
        **({"reward_parts": dict(rollout.reward_parts)} if rollout.reward_parts else {}),
    }
    if (routes := rollout.routed_experts) is not None:
        dtype = _ROUTES[routes.itemsize - 1]
        line["routed_experts"] = {"shape": routes.shape, "dtype": dtype, "data": _encode(routes, dtype)}
    if rollout.teacher_logprobs is not None:
        line["teacher_logprobs"] = _encode(rollout.teacher_logprobs, _LOGPROBS)
    if (top := rollout.teacher_top) is not None:
        line["teacher_top"] = {"k": top.shape[1], "data": _encode(top, TOP_TOKEN)}
    if rollout.loss_mask is not None:
        line["loss_mask"] = _encode(np.packbits(rollout.loss_mask), np.uint8)
    if (mask := rollout.sampling_mask) is not None:
        line["sampling_mask"] = {"counts": _encode(mask.counts), "ids": _encode(mask.ids)}
    return json.dumps(line) + "\n"


def _encode(values: NDArray[Any], dtype: DTypeLike = _IDS) -> str:
    return b64encode(values.astype(dtype, copy=False).tobytes()).decode()


def _rollout(path: Path, number: int, line: str, kind: type[_Line] | type[_OldLine]) -> Rollout:
    try:
        return kind.model_validate_json(line).rollout()
    except ValueError as error:
        fault = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            fault = f"{'.'.join(map(str, first['loc'])) or 'the line'}: {first['msg']}"
        raise ValueError(f"{path}, line {number}: not a rollout: {fault}") from error


def check_rollouts(
    path: Path,
    rollouts: Sequence[Rollout],
    *,
    step: int,
    prompts: int,
    samples: int,
    vocab_size: int | None = None,
    stalest: int = 0,
) -> None:
    """Raises ValueError with ``path``, line and fault.

    Expects ``samples`` responses to each of ``prompts`` prompts, group by group, by weights up to ``stalest`` steps old, with
    finite log-probs and rewards (or None).
    """
    for number, rollout in enumerate(rollouts):
        faults = _faults(rollout, step, stalest, vocab_size)
        for fault in chain(faults, _group_faults(rollout, rollouts[number - number % samples], number // samples, samples)):
            raise ValueError(f"{path}, line {number + 2}: {fault}; record the step again")
    if len(rollouts) != prompts * samples:
        raise ValueError(
            f"{path}, line {len(rollouts) + 1}: the file ends after {len(rollouts)} rollouts, but rollout.prompts_per_step = "
            f"{prompts} × rollout.samples_per_prompt = {samples} are {prompts * samples}; set what recorded it"
        )


def rollout_fault(rollout: Rollout, step: int, *, vocab_size: int, stalest: int = 0) -> str | None:
    return next(_faults(rollout, step, stalest, vocab_size), None)


def _faults(rollout: Rollout, step: int, stalest: int, vocab_size: int | None) -> Iterator[str]:
    for drawn in (version.step for _, version in rollout.versions):
        if not step - stalest <= drawn <= step:
            before = f", nor of one of the {stalest} before it" if stalest else ""
            yield f"drawn by the weights of step {drawn}, not of step {step}, for which the file is{before}"
    logprobs, trained = rollout.sampler_logprobs, rollout.reward is not None
    if not rollout.prompt_ids.size or (trained and not rollout.response_ids.size):
        yield "the prompt or the response has no token"
    yield from response_faults(rollout, logprobs, vocab_size)
    if (mask := rollout.loss_mask) is not None:
        if trained and not mask.any():
            yield "the model wrote none of the response tokens"
        for index in np.flatnonzero(~mask & (logprobs != 0) if logprobs.size == mask.size else ()):
            yield f"response token {index} has the log-prob {logprobs[index]}, not 0, and the model did not write it"
    if (judged := rollout.teacher_logprobs) is not None and (judged.size != logprobs.size or not np.isfinite(judged).all()):
        yield f"the teacher's log-probs are {judged.size}, and some may not be finite, for {logprobs.size} tokens"
    if (top := rollout.teacher_top) is not None:
        ids, highest = np.sort(top["id"], 1), 2**31 if vocab_size is None else vocab_size
        if len(top) != logprobs.size or not np.isfinite(top["logprob"]).all():
            yield f"the teacher's top tokens are of {len(top)}, and some may not be finite, for {logprobs.size} tokens"
        elif (ids < 0).any() or (ids >= highest).any() or (ids[:, 1:] == ids[:, :-1]).any():
            yield f"some of the teacher's top tokens are not among the model's {highest}, or twice at one place"
    parts = {f"reward's component {name!r}": part for name, part in rollout.reward_parts.items()}
    for name, reward in {"reward": rollout.reward, **parts}.items():
        if reward is not None and (fault := reward_fault(reward)):
            yield f"the {name} is {fault}"
    if vocab_size is not None:
        for token in rollout.prompt_ids[(rollout.prompt_ids < 0) | (rollout.prompt_ids >= vocab_size)]:
            yield f"token {token} is not one of the model's {vocab_size}"


def _group_faults(rollout: Rollout, first: Rollout, group: int, samples: int) -> Iterator[str]:
    if rollout.group != group:
        yield (
            f"group {rollout.group} where group {group} is due; the groups of a step come in order from 0, each with "
            f"rollout.samples_per_prompt = {samples} rollouts"
        )
    if rollout.problem_id != first.problem_id or not np.array_equal(rollout.prompt_ids, first.prompt_ids):
        yield f"another problem or prompt than the first rollout of group {group} has"

"""A step's rollouts as JSON lines: written whole or not at all, read back exactly.

The first line says what follows, ``{"format": 2, "step": 12, "rollouts": 512, …, "sha256": "…"}``; then comes one rollout per
line. The digest is over all the rest of the file, the first line included. Format 1 has none, and is read too.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tepo_megatron.bridge.storage.manifest import sync_folder
from tepo_megatron.types import Rollout

FORMAT = 2
_FORMATS = (1, FORMAT)

_ROLLOUT = TypeAdapter(Rollout)

_ROUNDING = 1e-3
"""Nats by which a log-prob may be above 0."""


@dataclass(frozen=True)
class Record:
    """A step's rollouts in their order. ``drawn_by`` names weights and settings that they come of, as whoever wrote them counts
    them; ``failed_rewards`` says how many verifiers failed on them.
    """

    rollouts: list[Rollout]
    drawn_by: str = ""
    failed_rewards: int = 0


def record_path(folder: Path, step: int) -> Path:
    """Where the rollouts of a step lie, such as ``<folder>/step_0000012.jsonl``."""
    return folder / f"step_{step:07d}.jsonl"


def write_rollouts(
    folder: Path, step: int, rollouts: Sequence[Rollout], *, drawn_by: str = "", failed_rewards: int = 0
) -> Path:
    """Write the rollouts of a step, in their order, and return the file; it appears under its name only when it is whole, and
    is on disk then.

    Floats are written so that they are read back to the last bit. Raises OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = record_path(folder, step)
    head = {"format": FORMAT, "step": step, "rollouts": len(rollouts), "drawn_by": drawn_by, "failed_rewards": failed_rewards}
    # Not asdict(rollout): it copies every token by itself.
    lines = (json.dumps(vars(rollout) | {"weights_version": vars(rollout.weights_version)}) for rollout in rollouts)
    body = "".join(line + "\n" for line in lines).encode()
    first = json.dumps(head | {"sha256": _digest(head, body)}) + "\n"
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            file.write(first.encode())
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):  # what there is of it takes room on a disk that may be full
            partial.unlink()
        raise
    sync_folder(folder)
    return path


def link_record(path: Path, folder: Path) -> None:
    """Puts a record into another folder, too, without a second copy where the file system can. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / path.name
    if target.exists() and target.samefile(path):
        return
    partial = target.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    try:
        os.link(path, partial)
    except OSError:
        shutil.copyfile(path, partial)
    partial.replace(target)


def read_rollouts(folder: Path, step: int) -> list[Rollout]:
    """What :func:`write_rollouts` wrote. Raises ValueError with file and line if it is missing, cut or damaged."""
    return read_record(folder, step).rollouts


def read_record(folder: Path, step: int) -> Record:
    """As :func:`read_rollouts`, with what the first line says."""
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
    rollouts = [_rollout(path, number, line) for number, line in enumerate(lines[1:], start=2)]
    if head["format"] != 1:
        _check_digest(path, head, text.partition("\n")[2].encode())
    return Record(rollouts, drawn_by=str(head.get("drawn_by", "")), failed_rewards=int(head.get("failed_rewards", 0)))


def check_rollouts(
    path: Path, rollouts: Sequence[Rollout], *, step: int, prompts: int, samples: int, vocab_size: int | None = None
) -> None:
    """Raises ValueError with ``path``, line and fault where these are not what a step is trained on: ``samples`` responses to
    each of ``prompts`` prompts, group by group, drawn by the weights of the step, with a finite log-prob for every token and a
    finite reward, or None for one that could not be scored.
    """
    for number, rollout in enumerate(rollouts):
        for fault in _faults(rollout, step, vocab_size):
            raise ValueError(f"{path}, line {number + 2}: {fault}; record the step again")
        first = rollouts[number - number % samples]
        for fault in _group_faults(rollout, first, number // samples, samples):
            raise ValueError(f"{path}, line {number + 2}: {fault}; record the step again")
    if len(rollouts) != prompts * samples:
        raise ValueError(
            f"{path}, line {len(rollouts) + 1}: the file ends after {len(rollouts)} rollouts, but rollout.prompts_per_step = "
            f"{prompts} × rollout.samples_per_prompt = {samples} are {prompts * samples}; set what recorded it"
        )


def _faults(rollout: Rollout, step: int, vocab_size: int | None) -> Iterator[str]:
    """What is wrong with a rollout by itself."""
    drawn = rollout.weights_version.step
    if drawn != step:
        yield f"drawn by the weights of step {drawn}, not of step {step}, for which the file is"
    if not rollout.prompt_ids or not rollout.response_ids:
        yield "the prompt or the response has no token"
    if len(rollout.sampler_logprobs) != len(rollout.response_ids):
        yield f"{len(rollout.sampler_logprobs)} log-probs for {len(rollout.response_ids)} response tokens"
    for at, logprob in enumerate(rollout.sampler_logprobs):
        if not -math.inf < logprob <= _ROUNDING:
            yield f"the log-prob of response token {at} is {logprob}, not a finite number of at most 0"
    if rollout.reward is not None and not math.isfinite(rollout.reward):
        yield f"the reward is {rollout.reward}, not a finite number"
    if vocab_size is not None:
        for token in (*rollout.prompt_ids, *rollout.response_ids):
            if not 0 <= token < vocab_size:
                yield f"token {token} is not one of the model's {vocab_size}"


def _group_faults(rollout: Rollout, first: Rollout, group: int, samples: int) -> Iterator[str]:
    """What is wrong with its place, where ``first`` is the first rollout of the group that belongs there."""
    if rollout.group != group:
        yield (
            f"group {rollout.group} where group {group} is due; the groups of a step come in order from 0, each with "
            f"rollout.samples_per_prompt = {samples} rollouts"
        )
    if (rollout.problem_id, rollout.prompt_ids) != (first.problem_id, first.prompt_ids):
        yield f"another problem or prompt than the first rollout of group {group} has"


def _head(path: Path, lines: Sequence[str], step: int) -> dict[str, Any]:
    try:
        head = json.loads(lines[0]) if lines else None
    except ValueError:
        head = None
    if not isinstance(head, dict) or head.get("format") not in _FORMATS or head.get("step") != step:
        raise ValueError(f"{path}, line 1: not the head of a record of step {step} in format {FORMAT}")
    return head


def _check_digest(path: Path, head: dict[str, Any], body: bytes) -> None:
    rest = {key: value for key, value in head.items() if key != "sha256"}
    if head.get("sha256") != _digest(rest, body):
        raise ValueError(f"{path}, line 1: the file was changed or damaged after it was written; record the step again")


def _digest(head: dict[str, Any], body: bytes) -> str:
    digest = sha256(json.dumps(head).encode() + b"\n")
    digest.update(body)
    return digest.hexdigest()


def _rollout(path: Path, number: int, line: str) -> Rollout:
    try:
        return _ROLLOUT.validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the line"
        raise ValueError(f"{path}, line {number}: not a rollout: {where}: {first['msg']}") from error

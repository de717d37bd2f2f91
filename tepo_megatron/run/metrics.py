import io
import itertools
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepo_megatron.runtime.files import Failed, LogFile, write_atomically
from tepo_megatron.runtime.text import valid_text

PHASES = ("rollout", "reward", "journal", "score", "update", "sync", "eval")


class MetricsWriter(LogFile):
    """Rank 0 only. Non-finite numbers become ``null``. Writes rows that failed with the next one."""

    def __init__(self, output: Path, tensorboard: bool, failed: Failed | None = None) -> None:
        output.mkdir(parents=True, exist_ok=True)
        super().__init__(output / "metrics.jsonl", failed)
        self.last_step: int | None = None
        self._events = _EventsFile(output / "tensorboard", failed) if tensorboard else None
        self.path.touch()
        self.cut = self.is_cut()
        self._rewrite(list(self.read("row of metrics")))

    def write(self, step: int, row: Mapping[str, float]) -> None:
        numbers = {key: value if isinstance(value, int) else float(value) for key, value in row.items() if key != "step"}
        finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        # One write of a whole line: a crash cuts a line off, and never mixes two.
        self.append((json.dumps({"step": step, **finite}) + "\n").encode())
        self.last_step = step
        if self._events is not None:
            self._events.add_scalars(step, {key: value for key, value in finite.items() if value is not None})

    def truncate_after(self, step: int) -> list[int]:
        """Keeps each step's last row. Returns the steps before without one; that of ``step`` may come later."""
        self.forget_after(step)
        rows = {row["step"]: row for row in (read_metrics(self.path) if self.path.exists() else [])}
        self._rewrite([rows[number] for number in sorted(rows) if number <= step])
        if self._events is not None:
            self._events.hide_from(step + 1)
        return [number for number in range(step) if number not in rows]

    def close(self) -> None:
        self.flush()
        if self._events is not None:
            self._events.flush()

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        self.last_step = rows[-1]["step"] if rows else None
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if self.path.exists() and self.path.read_bytes() != text.encode():
            write_atomically(self.path, text)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Drops a last line that a crash cut off. Raises ValueError for other malformed lines."""
    rows = list(LogFile(path).read("row of metrics"))
    for number, row in enumerate(rows, start=1):
        for name, value in row.items():
            is_huge = isinstance(value, int) and abs(value) > sys.float_info.max
            if is_huge or (value is not None and not isinstance(value, int | float)):
                raise ValueError(f"{path}:{number}: not a row of metrics: {name[:60]!r} is no number; remove the line")
    return rows


def key_in(row: Mapping[str, Any], name: str) -> str | None:
    """Returns the key of a metric. ``accuracy/avg@k`` is that of any k, and in rows of earlier versions the only name."""
    family, _, k = name.partition("@")
    if name in row or not k or not name.startswith("accuracy/"):
        return name if name in row else None
    return next((key for key in row if key == f"{family}@k" or (k == "k" and key.startswith(f"{family}@"))), None)


def value_in(row: Mapping[str, Any], name: str) -> Any:
    key = key_in(row, name)
    return None if key is None else row[key]


class Stopwatch:
    """An inner phase stops the outer one's clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open: list[str] = []
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._start = self._mark = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def split(self) -> dict[str, float]:
        """Returns seconds since the last call as ``time/<phase>``, ``time/other``, ``time/step``."""
        now = self._charge()
        step = now - self._start
        split = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        # The sum of the parts can pass the whole by rounding.
        split["time/other"] = max(0.0, step - sum(self._seconds.values()))
        split["time/step"] = step
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._start = now
        return split

    def _charge(self) -> float:
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] += now - self._mark
        self._mark = now
        return now


_NUMBERS = itertools.count()


class _EventsFile(LogFile):
    def __init__(self, folder: Path, failed: Failed | None) -> None:
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS):06d}"
        super().__init__(folder / name, failed)

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=valid_text(tag), simple_value=value) for tag, value in values.items()]
        self._add(step=step, summary=Summary(value=points))

    def hide_from(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._add(step=step, session_log=SessionLog(status=SessionLog.START))

    def _add(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        piece = io.BytesIO()
        writer = RecordWriter(piece)
        now = time.time()
        if not os.path.exists(self.path):  # not Path.exists, which raises if the disk is away
            writer.write(Event(wall_time=now, step=event["step"], file_version="brain.Event:2").SerializeToString())
        writer.write(Event(wall_time=now, **event).SerializeToString())
        self.append(piece.getvalue())


FOLDER, _FORMAT = "tokens", 2


@dataclass(frozen=True)
class TokenPrompt:
    """``text`` is the model's input, special tokens as ``⟦name⟧``."""

    text: str
    answer: str | None  # None for a replayed problem that the run lacks
    source: str = ""
    problem: str = ""


@dataclass(frozen=True, eq=False)
class TokenSamples:
    """Values of S responses of one training step, with T tokens concatenated. Logarithms are natural.

    Missing floats are NaN: the trainer's for untrained tokens (an environment's, a masked cut response's), the update's if
    skipped.
    """

    step: int  # completed steps: the row's number in metrics.jsonl
    prompts: tuple[TokenPrompt, ...]
    pieces: Mapping[int, str]
    """Has every token id's text. Bytes of a divided character are ``⟨xx⟩``, special tokens ``⟦name⟧``."""

    lengths: NDArray[np.int32]  # [S]: number of tokens
    prompt: NDArray[np.int32]  # [S]: index in prompts
    group: NDArray[np.int32]  # [S]: number of the group in the step; groups are whole
    update: NDArray[np.int32]  # [S]: number, from 1, of the optimizer step that trained on it; 0: none
    reward: NDArray[np.float32]  # [S]: the verifier's, without the penalty of overlong responses
    truncated: NDArray[np.bool_]  # [S]: cut at the longest allowed response

    ids: NDArray[np.int32]  # [T]
    version: NDArray[np.int32]  # [T]: the step of the weights that drew the token
    logprob_sampler: NDArray[np.float32]  # [T]: log π_sampler
    logprob_trainer: NDArray[np.float32]  # [T]: log π_old, by the trainer with the weights before the step
    logprob_update: NDArray[np.float32]  # [T]: log π_θ in the token's update
    entropy: NDArray[np.float32]  # [T]: H(π_old), in nats
    entropy_change: NDArray[np.float32]  # [T]: H(π_θ) − H(π_old) in that update, ΔH of TEPO's mask if ``measured``
    advantage: NDArray[np.float32]  # [T]
    ratio: NDArray[np.float32]  # [T]: the objective's, in TEPO one per response
    divergence: NDArray[np.float32]  # [T]: from the teacher, in that update
    loss_mask: NDArray[np.bool_]  # [T]: written by the model, not by an environment
    masked: NDArray[np.bool_]  # [T]: selected in that update by a term such as TEPO's KL mask

    def __post_init__(self) -> None:
        for name, kind in _ARRAYS.items():
            array = getattr(self, name)
            rows = self.lengths.size if name in _OF_RESPONSES else self.ids.size
            if array.shape != (rows,) or array.dtype != kind:
                raise ValueError(f"{name} is {array.dtype} of shape {array.shape}, not {kind.__name__} of shape ({rows},)")
        if (self.lengths < 0).any() or int(self.lengths.sum()) != self.ids.size:
            raise ValueError(f"lengths has {int(self.lengths.sum())} tokens in all, and ids {self.ids.size}")
        if not np.isin(self.prompt, np.arange(len(self.prompts))).all():
            raise ValueError(f"prompt names one that is not among the {len(self.prompts)} prompts")

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """[S + 1]: where responses start, and the end."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def encode(self) -> bytes:
        """Equal values are equal bytes."""
        prompts = [vars(prompt) for prompt in self.prompts]
        pieces = {str(token): text for token, text in sorted(self.pieces.items())}
        meta = {"format": _FORMAT, "step": self.step, "prompts": prompts, "pieces": pieces}
        file = io.BytesIO()
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        np.savez_compressed(file, meta=np.array(json.dumps(meta)), **arrays)
        return file.getvalue()

    def tokens_of(self, response: int) -> slice:
        return slice(int(self.offsets[response]), int(self.offsets[response + 1]))


_OF_RESPONSES: dict[str, type[np.generic]] = {
    **dict.fromkeys(("lengths", "prompt", "group", "update"), np.int32),
    **{"reward": np.float32, "truncated": np.bool_},
}
_ARRAYS = _OF_RESPONSES | {
    **dict.fromkeys(("ids", "version"), np.int32),
    **dict.fromkeys(("logprob_sampler", "logprob_trainer", "logprob_update"), np.float32),
    **dict.fromkeys(("entropy", "entropy_change", "advantage", "ratio", "divergence"), np.float32),
    **dict.fromkeys(("loss_mask", "masked"), np.bool_),
}


def token_file(folder: Path, step: int) -> Path:
    return folder / FOLDER / f"step_{step:07d}.npz"


def token_files(folder: Path) -> dict[int, Path]:
    files = {path.stem.removeprefix("step_"): path for path in (folder / FOLDER).glob("step_*.npz")}
    return dict(sorted((int(name), path) for name, path in files.items() if name.isdecimal()))


def read_tokens(path: Path, *, values: bool = True) -> TokenSamples:
    """Without ``values`` it reads only what is of responses; tokens' are 0. Raises FileNotFoundError, or ValueError for an
    unreadable file or another kind.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            meta: Any = json.loads(str(archive["meta"][()]))
            written = meta["format"]
            if written in (1, _FORMAT):
                tokens = int(archive["lengths"].sum())
                unread = () if values else _ARRAYS.keys() - _OF_RESPONSES.keys()
                made = {name: np.broadcast_to(_ARRAYS[name](), tokens) for name in unread}
                if written == 1:
                    made["divergence"] = np.broadcast_to(np.float32(np.nan), tokens)  # it has none
                return TokenSamples(
                    step=int(meta["step"]),
                    prompts=tuple(TokenPrompt(**prompt) for prompt in meta["prompts"]),
                    pieces={int(token): str(text) for token, text in meta["pieces"].items()},
                    **{name: made[name] if name in made else archive[name] for name in _ARRAYS},
                )
    except FileNotFoundError:
        raise
    except Exception as error:  # of zipfile, zlib, numpy and json, for whatever bytes
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} holds no token values that can be read: {why}; remove it") from error
    raise ValueError(
        f"{path} is of format {written}, and this version reads format {_FORMAT}; read it with the version that wrote"
    )

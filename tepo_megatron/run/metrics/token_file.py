"""Files of per-token values, ``OUTPUT/tokens/step_0000030.npz``: what they hold, how they are written and read. No torch.

A file holds the responses of the first groups of one training step, S of them, with their T tokens one behind the other. It is
NumPy's archive of arrays, without pickle: one array for each field of :class:`TokenSamples` that is an array, and ``meta``, a
string of JSON with the rest. ``format`` in it is 1; a change that older readers would get wrong raises it.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from tepo_megatron.runtime.files import Failed, write_atomically

FOLDER = "tokens"
"""Where a run writes its files, below its output folder."""

FORMAT = 1

_NAME = re.compile(r"step_(\d+)\.npz")

_PER_RESPONSE: dict[str, type[np.generic]] = {
    **dict.fromkeys(("lengths", "prompt", "group", "update"), np.int32),
    "reward": np.float32,
    "truncated": np.bool_,
}
_FLOATS = ("logprob_sampler", "logprob_trainer", "logprob_update", "entropy", "entropy_change", "advantage", "ratio")
_PER_TOKEN: dict[str, type[np.generic]] = {
    **dict.fromkeys(("ids", "version"), np.int32),
    **dict.fromkeys(_FLOATS, np.float32),
    **dict.fromkeys(("loss_mask", "masked"), np.bool_),
}
_ARRAYS = {**_PER_RESPONSE, **_PER_TOKEN}
"""The arrays of a file → their dtypes."""


@dataclass(frozen=True)
class TokenPrompt:
    """What a group of responses answers. ``text`` is what the model read; special tokens in it stand as ``⟦name⟧``."""

    text: str
    answer: str | None
    """What the verifier compared with; None of a replayed step whose problem is not among the run's."""
    source: str = ""
    """The source of the problem, by name, where the run has several."""
    problem: str = ""
    """The problem's id."""


@dataclass(frozen=True, eq=False)
class TokenSamples:
    """The token values of some responses of one training step. S responses, T tokens of all of them one behind the other.

    Floats are NaN where there is no such value: of the trainer where it trained on no such token (a token that an environment
    wrote, a response that was cut under ``rollout.truncated: mask``), of the update where that was skipped.
    """

    step: int
    """Steps done after it: the number of the step's row in ``metrics.jsonl``."""
    prompts: tuple[TokenPrompt, ...]
    pieces: Mapping[int, str]
    """The text of every token id that occurs. Bytes of a character that is divided among tokens stand as ``⟨xx⟩``, special
    tokens as ``⟦name⟧``."""

    lengths: NDArray[np.int32]
    """[S]: the tokens of each response."""
    prompt: NDArray[np.int32]
    """[S]: which of ``prompts`` it answers."""
    group: NDArray[np.int32]
    """[S]: the number of its group in the step. All responses of a group are there."""
    update: NDArray[np.int32]
    """[S]: in which optimizer step of the training step it was trained on, from 1; 0 in none."""
    reward: NDArray[np.float32]
    """[S]: as the verifier gave it; what ``rollout.truncated: penalise`` takes off is in the advantage alone."""
    truncated: NDArray[np.bool_]
    """[S]: whether it was cut at the longest response allowed."""

    ids: NDArray[np.int32]
    """[T]."""
    loss_mask: NDArray[np.bool_]
    """[T]: whether the model wrote the token, and not an environment."""
    version: NDArray[np.int32]
    """[T]: the step after which the weights that drew the token were taken."""
    logprob_sampler: NDArray[np.float32]
    """[T]: log π_sampler, natural like all logarithms here."""
    logprob_trainer: NDArray[np.float32]
    """[T]: log π_old, by the trainer with the weights before the step."""
    logprob_update: NDArray[np.float32]
    """[T]: log π_θ in the update that the token was trained in: with the weights that its gradient was taken at."""
    entropy: NDArray[np.float32]
    """[T]: H(π_old) of the token's position, in nats."""
    entropy_change: NDArray[np.float32]
    """[T]: H(π_θ) − H(π_old) in that update, ΔH of TEPO's mask where it is ``measured``."""
    advantage: NDArray[np.float32]
    """[T]: that of the token's response."""
    ratio: NDArray[np.float32]
    """[T]: the ratio that the objective multiplied the advantage with (``ratio/mean``): TEPO's is one for a whole response;
    exp(logprob_update − logprob_trainer) is the token's own."""
    masked: NDArray[np.bool_]
    """[T]: whether a term of the objective singled the token out in that update (``mask/fraction``): TEPO's KL mask, or
    another mechanism."""

    def __post_init__(self) -> None:
        """Raises ValueError where shapes, dtypes or indices do not fit together."""
        for name, kind in _ARRAYS.items():
            array = getattr(self, name)
            rows = self.lengths.size if name in _PER_RESPONSE else self.ids.size
            if array.shape != (rows,) or array.dtype != kind:
                raise ValueError(f"{name} is {array.dtype} of shape {array.shape}, not {kind.__name__} of shape ({rows},)")
        if (self.lengths < 0).any() or int(self.lengths.sum()) != self.ids.size:
            raise ValueError(f"lengths has {int(self.lengths.sum())} tokens in all, and ids {self.ids.size}")
        if not np.isin(self.prompt, np.arange(len(self.prompts))).all():
            raise ValueError(f"prompt names one that is not among the {len(self.prompts)} prompts")

    def __eq__(self, other: object) -> bool:
        """Whether all values are the same to the last bit."""
        if not isinstance(other, TokenSamples):
            return NotImplemented
        arrays = all(getattr(self, name).tobytes() == getattr(other, name).tobytes() for name in _ARRAYS)
        about = (self.step, self.prompts, dict(self.pieces)) == (other.step, other.prompts, dict(other.pieces))
        return arrays and about

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """[S + 1]: where the tokens of each response begin, and where the last one's end."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def tokens_of(self, response: int) -> slice:
        """Where the tokens of a response stand in the arrays of tokens."""
        return slice(int(self.offsets[response]), int(self.offsets[response + 1]))

    def text_of(self, response: int) -> str:
        """A response as its tokens are written, one by one."""
        return "".join(self.pieces[token] for token in self.ids[self.tokens_of(response)].tolist())


def token_file(folder: Path, step: int) -> Path:
    """The file of a step below a run's output folder."""
    return folder / FOLDER / f"step_{step:07d}.npz"


def token_files(folder: Path) -> dict[int, Path]:
    """The files below a run's output folder by their steps, in the order of the steps."""
    found = {int(name[1]): path for path in (folder / FOLDER).glob("step_*.npz") if (name := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def encode_tokens(samples: TokenSamples) -> bytes:
    """The bytes of the file; the same for the same values."""
    meta = {
        "format": FORMAT,
        "step": samples.step,
        "prompts": [vars(prompt) for prompt in samples.prompts],
        "pieces": {str(token): text for token, text in sorted(samples.pieces.items())},
    }
    file = io.BytesIO()
    arrays = {name: getattr(samples, name) for name in _ARRAYS}
    np.savez_compressed(file, meta=np.array(json.dumps(meta)), **arrays)
    return file.getvalue()


def read_tokens(path: Path) -> TokenSamples:
    """Reads one file. Raises ValueError, a sentence with its path, where it cannot be read or is none; FileNotFoundError."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        meta: Any = json.loads(str(arrays.pop("meta")[()]))
        written = meta["format"]
        if written == FORMAT:
            return TokenSamples(
                step=int(meta["step"]),
                prompts=tuple(TokenPrompt(**prompt) for prompt in meta["prompts"]),
                pieces={int(token): str(text) for token, text in meta["pieces"].items()},
                **{name: arrays[name] for name in _ARRAYS},
            )
    except FileNotFoundError:
        raise
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        EOFError,
        RuntimeError,
        BadZipFile,
        zlib.error,
    ) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} holds no token values that can be read: {why}; remove it") from error
    raise ValueError(
        f"{path} is of format {written}, and this version reads format {FORMAT}; read it with the version that wrote"
    )


class TokenLog:
    """A file for each step that is recorded, whole or not there. What cannot be written waits, and is tried again with the
    next.
    """

    def __init__(self, folder: Path, failed: Failed) -> None:
        """``folder``: the run's output folder."""
        self._folder, self._failed = folder, failed
        self._waiting: dict[int, bytes] = {}

    def write(self, samples: TokenSamples) -> None:
        """A file of the same step is replaced."""
        self._waiting[samples.step] = encode_tokens(samples)
        self.flush()

    def flush(self) -> None:
        """Tries to write what waits."""
        for step in list(self._waiting):
            path = token_file(self._folder, step)
            try:
                write_atomically(path, self._waiting[step])
            except OSError as error:
                self._failed(path, error)
                return
            del self._waiting[step]

    def forget_after(self, step: int) -> None:
        """Removes the values of later steps, which are trained again. Raises OSError."""
        self._waiting = {at: data for at, data in self._waiting.items() if at <= step}
        for at, path in token_files(self._folder).items():
            if at > step:
                path.unlink()

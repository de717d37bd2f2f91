"""Files of per-token values, ``OUTPUT/tokens/step_0000030.npz``. Imports no torch.

NumPy's archive, without pickle: the arrays of :class:`TokenSamples`, and ``meta``, a JSON string with the rest. ``format`` is
1; incompatible changes raise it.
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
"""Folder below a run's output folder."""

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


@dataclass(frozen=True)
class TokenPrompt:
    """The prompt of a group. ``text`` is what the model read, special tokens as ``⟦name⟧``."""

    text: str
    answer: str | None
    """What the verifier compared with; None for a replayed problem that the run lacks."""
    source: str = ""
    """The name of the problem's source, if the run has several."""
    problem: str = ""


@dataclass(frozen=True, eq=False)
class TokenSamples:
    """Token values of S responses of one training step, with T tokens concatenated.

    Missing floats are NaN: the trainer's for untrained tokens (an environment's, a masked cut response's), the update's if
    skipped.
    """

    step: int
    """Completed steps: the number of the step's row in ``metrics.jsonl``."""
    prompts: tuple[TokenPrompt, ...]
    pieces: Mapping[int, str]
    """Text of every token id that occurs. Bytes of a divided character stand as ``⟨xx⟩``, special tokens as ``⟦name⟧``."""

    lengths: NDArray[np.int32]
    """[S]: number of tokens."""
    prompt: NDArray[np.int32]
    """[S]: index in ``prompts``."""
    group: NDArray[np.int32]
    """[S]: number of the group in the step; groups are whole."""
    update: NDArray[np.int32]
    """[S]: number, from 1, of the optimizer step that trained on it; 0: none."""
    reward: NDArray[np.float32]
    """[S]: the verifier's, without the penalty of ``rollout.truncated: penalise``, which is in the advantage alone."""
    truncated: NDArray[np.bool_]
    """[S]: whether it was cut at the longest response allowed."""

    ids: NDArray[np.int32]
    """[T]."""
    loss_mask: NDArray[np.bool_]
    """[T]: whether the model, not an environment, wrote the token."""
    version: NDArray[np.int32]
    """[T]: the step of the weights that drew the token."""
    logprob_sampler: NDArray[np.float32]
    """[T]: log π_sampler, natural like all logarithms here."""
    logprob_trainer: NDArray[np.float32]
    """[T]: log π_old, by the trainer with the weights before the step."""
    logprob_update: NDArray[np.float32]
    """[T]: log π_θ in the token's update, with the weights of its gradient."""
    entropy: NDArray[np.float32]
    """[T]: H(π_old) at the token's position, in nats."""
    entropy_change: NDArray[np.float32]
    """[T]: H(π_θ) − H(π_old) in that update, ΔH of TEPO's mask if ``measured``."""
    advantage: NDArray[np.float32]
    """[T]: that of the token's response."""
    ratio: NDArray[np.float32]
    """[T]: the objective's ratio (``ratio/mean``), in TEPO one per response; the token's own is exp(logprob_update −
    logprob_trainer).
    """
    masked: NDArray[np.bool_]
    """[T]: whether a term of the objective, such as TEPO's KL mask, singled the token out in that update (``mask/fraction``).
    """

    def __post_init__(self) -> None:
        """Raises ValueError if shapes, dtypes or indices are inconsistent."""
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
        """Compares all values to the last bit."""
        if not isinstance(other, TokenSamples):
            return NotImplemented
        arrays = all(getattr(self, name).tobytes() == getattr(other, name).tobytes() for name in _ARRAYS)
        about = (self.step, self.prompts, dict(self.pieces)) == (other.step, other.prompts, dict(other.pieces))
        return arrays and about

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """[S + 1]: first token of each response, and the end of the last."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def tokens_of(self, response: int) -> slice:
        return slice(int(self.offsets[response]), int(self.offsets[response + 1]))

    def text_of(self, response: int) -> str:
        return "".join(self.pieces[token] for token in self.ids[self.tokens_of(response)].tolist())


def token_file(folder: Path, step: int) -> Path:
    return folder / FOLDER / f"step_{step:07d}.npz"


def token_files(folder: Path) -> dict[int, Path]:
    found = {int(name[1]): path for path in (folder / FOLDER).glob("step_*.npz") if (name := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def encode_tokens(samples: TokenSamples) -> bytes:
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
    """Raises ValueError, with the path, if the file cannot be read or is no such file; FileNotFoundError."""
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
    """Writes a file for each recorded step, atomically. What cannot be written is retried with the next."""

    def __init__(self, folder: Path, failed: Failed) -> None:
        self._folder, self._failed = folder, failed
        self._waiting: dict[int, bytes] = {}

    def write(self, samples: TokenSamples) -> None:
        self._waiting[samples.step] = encode_tokens(samples)
        self.flush()

    def flush(self) -> None:
        for step in list(self._waiting):
            path = token_file(self._folder, step)
            try:
                write_atomically(path, self._waiting[step])
            except OSError as error:
                self._failed(path, error)
                return
            del self._waiting[step]

    def forget_after(self, step: int) -> None:
        """Removes the files of later steps, which are trained again. Raises OSError."""
        self._waiting = {at: data for at, data in self._waiting.items() if at <= step}
        for at, path in token_files(self._folder).items():
            if at > step:
                path.unlink()

"""The files of per-token values while a run writes them. Rank 0 only."""

from __future__ import annotations

from pathlib import Path

from tepo_megatron.run.metrics.token_file import TokenSamples, encode_tokens, token_file, token_files
from tepo_megatron.runtime.files import Failed, write_atomically


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

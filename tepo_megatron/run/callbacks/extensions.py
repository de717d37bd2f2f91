"""What a caller in Python gives a run beside its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Extensions:
    """Objects of this process, on rank 0. ``callbacks`` come after those of ``train.callbacks``.
    ``reward``: the verifier, where it is no name that others can import; its workers are forks of this process.
    ``collect``: a generation step (``rollout.collect``) of the same kind.
    """

    callbacks: Sequence[object] = ()
    reward: Any = None
    collect: Any = None


NO_EXTENSIONS = Extensions()
"""Of a run that its configuration describes."""

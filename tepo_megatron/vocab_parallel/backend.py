"""The implementations of the two sweeps over a shard of logits, behind one name."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from tepo_megatron.vocab_parallel import sweep
from tepo_megatron.vocab_parallel.combine import RowScores
from tepo_megatron.vocab_parallel.shard import LocalLabels

BackendName = Literal["torch"]


class Backend(Protocol):
    """What `sweep` does in torch; its functions say what is read and written."""

    def forward(self, logits_TV: Tensor, rows_R: Tensor | None, temperature: float, stats_R4: Tensor) -> None: ...

    def backward(
        self,
        logits_TV: Tensor,
        rows_R: Tensor | None,
        temperature: float,
        scores: RowScores,
        labels: LocalLabels,
        grad_logprob_R: Tensor,
        grad_entropy_R: Tensor | None,
        out_TV: Tensor,
    ) -> None: ...


def get_backend(name: BackendName) -> Backend:
    """The backend of that name.

    Raises:
        ValueError: the name is unknown.
    """
    if name != "torch":
        raise ValueError(f"backend = {name!r} is unknown; known: torch")
    return sweep

"""The implementations of the two sweeps over a shard of logits, behind one name."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from tepo_megatron.vocab_parallel import native, sweep
from tepo_megatron.vocab_parallel.combine import RowScores
from tepo_megatron.vocab_parallel.shard import LocalLabels

BackendName = Literal["torch", "cpp"]


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


def get_backend(name: BackendName, device: torch.device) -> Backend:
    """``torch`` works everywhere; ``cpp`` is for logits on CPU and needs a C++ compiler on its first use.

    Raises:
        ValueError: the name is unknown, or the backend is not for this device.
    """
    if name == "torch":
        return sweep
    if name != "cpp":
        raise ValueError(f"backend = {name!r} is unknown; known: torch, cpp")
    if device.type != "cpu":
        raise ValueError(f"backend = 'cpp' is for logits on CPU, these are on {device}; use backend = 'torch'")
    return native

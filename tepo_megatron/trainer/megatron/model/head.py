"""The head of the model on the last pipeline stage, where the logits of a micro-batch are not to be held (``engine.head``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model
from torch import Tensor


class FusedHead(torch.nn.Module):
    """Takes the place of GPTModel's output layer, with the same weight under the same name, and gives the hidden states on.

    Their product with the weight is computed together with the scores, a chunk of tokens at a time
    (``core/scores/fused_linear.py``). Where the head is tied to an embedding of the same rank, ``weight`` is None.
    """

    def __init__(self, output_layer: torch.nn.Module) -> None:
        super().__init__()
        self.register_parameter("weight", output_layer.weight)  # type: ignore[arg-type] # a parameter or None
        self.sequence_parallel = bool(output_layer.sequence_parallel)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Returns ``input_`` [T, 1, H] (under sequence parallelism [T/tp, 1, H]), and no bias. The other two are Megatron's."""
        return input_, None


class HeadWeight(NamedTuple):
    """What the scores need of a fused head."""

    weight_VpH: Tensor
    """This rank's rows of the head: its own, or those of the embedding that it is tied to."""

    sequence_parallel: bool
    """Whether the hidden states are this rank's share of the tokens."""


def fuse_head(model: GPTModel) -> None:
    """Has the model give hidden states instead of logits, on the last stage; changes nothing on the others."""
    if model.post_process:
        model.output_layer = FusedHead(model.output_layer)


def fused_head(model: torch.nn.Module) -> HeadWeight | None:
    """Returns the fused head of a model, in Megatron's wrappers or without; None where it gives logits. For the last stage."""
    gpt: Any = unwrap_model(model)
    head = gpt.output_layer
    if not isinstance(head, FusedHead):
        return None
    tied = gpt.share_embeddings_and_output_weights
    weight: Any = gpt.shared_embedding_or_output_weight() if tied else head.weight
    return HeadWeight(weight, head.sequence_parallel)

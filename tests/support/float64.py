"""What transformers computes in float64 of a batch, to compare trainers with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tepo_megatron.bridge.layouts.table import EXPERT_NAMES
from tepo_megatron.types import Batch


@dataclass(frozen=True)
class Oracle:
    """Log-probs of the labels, their negative mean, and its gradients under the names of the tensors on disk."""

    logprobs_T: Tensor
    loss: float
    gradients: dict[str, Tensor]

    @property
    def norm(self) -> float:
        return float(torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm())


def oracle_of(folder: Path, batch: Batch) -> Oracle:
    """Runs the model of a folder forward and backward."""
    import transformers

    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    logits = [oracle(tokens[None]).logits[0] for tokens in batch.tokens_T.split(batch.lengths_S.tolist())]
    logprobs_T = torch.cat(logits).log_softmax(-1).gather(1, batch.labels_T[:, None])[:, 0]
    loss = -logprobs_T[batch.loss_mask_T].mean()
    loss.backward()
    gradients: dict[str, Tensor] = {}
    for name, param in oracle.named_parameters():
        gradients |= _as_on_disk(name, param.grad, type(oracle).__name__)
    return Oracle(logprobs_T.detach(), loss.item(), gradients)


def _as_on_disk(name: str, gradient: Tensor, architecture: str) -> dict[str, Tensor]:
    """Transformers fuses the matrices of experts when it reads them."""
    if architecture not in EXPERT_NAMES:
        return {name: gradient}
    names = EXPERT_NAMES[architecture]
    stem = name.replace(".mlp.", f".{names.block}.")
    found: dict[str, Tensor] = {}
    if name.endswith("gate_up_proj"):
        for expert, (gate, up) in enumerate(each.chunk(2) for each in gradient):
            prefix = stem.removesuffix("gate_up_proj") + str(expert)
            found |= {f"{prefix}.{names.gate}.weight": gate, f"{prefix}.{names.up}.weight": up}
    elif name.endswith("experts.down_proj"):
        prefix = stem.removesuffix("down_proj")
        found |= {f"{prefix}{expert}.{names.down}.weight": each for expert, each in enumerate(gradient)}
    else:
        found[stem] = gradient
    return found

"""What transformers computes in float64 of a batch, to compare trainers with."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.core.rollout import not_recorded
from tepo_megatron.core.types import Batch
from tepo_megatron.weights.architecture import EXPERT_BIAS
from tepo_megatron.weights.table import EXPERT_NAMES
from tests.support.dense_scores import dense_logprob_and_entropy


@dataclass(frozen=True)
class Oracle:
    """Log-probs of the labels, entropies, the log-probs' negative mean, and its gradients under the tensors' names on disk."""

    logprobs_T: Tensor
    entropy_T: Tensor
    loss: float
    gradients: dict[str, Tensor]
    choices: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Where experts were replayed, by layer: [T, k] those that the router would have chosen, and those that it took."""
    loads: dict[str, Tensor] = field(default_factory=dict)
    """Where a layer's experts have biases, by the name of that tensor: int64 [experts], how many tokens each got."""
    aux_loss: float = 0.0
    """What ``loss`` lacks, and the gradients have."""

    @property
    def norm(self) -> float:
        return float(torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm())


def load(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")


def packed_logits(model: Any, batch: Batch) -> Tensor:
    return torch.cat([model(tokens[None]).logits[0] for tokens in batch.tokens_T.split(batch.lengths_S.tolist())])


@torch.no_grad()
def token_scores(
    folder: Path, batch: Batch, *, temperature: float, weights: dict[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs of the labels and entropies, [T] each, by the model of a folder, or by other weights of it."""
    model = load(folder)
    if weights is not None:
        model.load_state_dict({name: tensor.double() for name, tensor in weights.items()})
    scores = dense_logprob_and_entropy(packed_logits(model, batch), batch.labels_T, temperature=temperature)
    return scores.logprob, scores.entropy


@torch.no_grad()
def prompt_logprobs(folder: Path, prompt: list[int]) -> list[float]:
    """Of every token but the first, at temperature 1."""
    logprobs_TV: Tensor = load(folder)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    return logprobs_TV[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()


def oracle_of(folder: Path, batch: Batch, *, aux_loss: float = 0.0) -> Oracle:
    """Runs the model of a folder forward and backward, with the experts of ``batch.routed_experts_T`` where it has them.

    ``aux_loss``: the coefficient of each layer's load-balancing loss over the whole batch, with such experts.
    """
    oracle = load(folder)
    lengths = batch.lengths_S.tolist()
    routers: list[_Replayed] = []
    if batch.routed_experts_T is not None:
        for layer, block in enumerate(oracle.model.layers):
            routers.append(_Replayed(block.mlp.gate, [part[:, layer] for part in batch.routed_experts_T.split(lengths)]))
            block.mlp.gate.forward = routers[-1]
    biased = {f"{name}.{EXPERT_BIAS}": module for name, module in oracle.named_modules() if hasattr(module, EXPERT_BIAS)}
    loads = {name: torch.zeros(gate.num_experts, dtype=torch.int64) for name, gate in biased.items()}
    for name, gate in biased.items():
        gate.register_forward_hook(partial(_count, loads[name]))
    scores = dense_logprob_and_entropy(packed_logits(oracle, batch), batch.labels_T)
    loss = -scores.logprob[batch.loss_mask_T].mean()
    balance = aux_loss * sum((router.balance for router in routers), torch.zeros((), dtype=torch.float64))
    (loss + balance).backward()
    gradients: dict[str, Tensor] = {}
    for name, param in oracle.named_parameters():
        gradients |= _as_on_disk(name, param.grad, type(oracle).__name__)
    choices = [(torch.cat(router.own), torch.cat(router.chosen)) for router in routers]
    return Oracle(scores.logprob.detach(), scores.entropy.detach(), loss.item(), gradients, choices, loads, balance.item())


def _count(load_E: Tensor, _module: torch.nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
    load_E += torch.bincount(output[2].flatten(), minlength=load_E.numel())


class _Replayed:
    """A router of transformers that takes recorded experts, sequence by sequence, and weighs them by its own probabilities."""

    def __init__(self, gate: torch.nn.Module, routes: list[Tensor]) -> None:
        self.gate, self.routes = gate, routes
        self.own: list[Tensor] = []
        self.chosen: list[Tensor] = []
        self.probabilities: list[Tensor] = []

    @property
    def balance(self) -> Tensor:
        """Experts · Σ share of the choices · mean probability: of Switch Transformers, over all tokens."""
        probabilities_TE, chosen_Tk = torch.cat(self.probabilities), torch.cat(self.chosen)
        count = probabilities_TE.shape[1]
        share_E = torch.bincount(chosen_Tk.flatten(), minlength=count).double() / chosen_Tk.numel()
        return count * (share_E * probabilities_TE.mean(0)).sum()

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate: Any = self.gate
        routes = self.routes[len(self.own)]
        logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
        probabilities = logits.softmax(-1)
        own = probabilities.topk(gate.top_k).indices
        recorded = routes[:, :1] != not_recorded(routes.itemsize)
        chosen = torch.where(recorded, routes.long(), own)
        self.own.append(own)
        self.chosen.append(chosen)
        self.probabilities.append(probabilities)
        weights = probabilities.gather(1, chosen)
        if getattr(gate, "norm_topk_prob", True):  # Mixtral's always are
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen


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

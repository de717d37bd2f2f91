"""What the KL mask finds of the tokens whose entropy falls, if entropies are rounded as on a GPU.

    tepo train examples/tiny/run.yaml output=out/masks rollout.record=true train.steps=2 evaluate.every=0
    python -m scripts.studies.mask_noise out/masks/rollouts

A step of Adam's first update (every weight by the learning rate, along the sign of GRPO's gradient) changes the built-in model.
Truth: the entropies of both master weights in float64. Measured: those of bfloat16 weights and arithmetic, with normal noise
added to every logit, as large as the last place of bfloat16 at logits of another model. Candidates: positive advantage.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from scripts.studies.options import study_parser
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.scores import logprob_and_entropy, noise_quantiles, rerounded
from tepo_megatron.core.types import Batch, TokenScores
from tepo_megatron.sampler.rollout_file import Record
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tools.results import Report, Table
from tepo_megatron.trainer.packing import pack

RATES = (1e-6, 5e-6, 2e-5, 1e-4)
LOGIT_NOISE = {"none": 0.0, "0.016": 0.016, "0.06": 0.06}  # half a unit of bfloat16's last place at logits of 4 and of 16


class _Row(NamedTuple):
    rate: float
    noise: str
    way: str
    chosen: float
    precision: float
    recall: float
    precision_by_size: float
    recall_by_size: float

    def cells(self) -> tuple[str, ...]:
        return f"{self.rate:g}", self.noise, self.way, *(f"{value:.1%}" for value in self[3:])


class _Model:
    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._model: Any = AutoModelForCausalLM.from_pretrained(resolve_model_path("builtin:tiny"), attn_implementation="eager")
        self._model.eval()
        self.weights = {name: param.detach().clone() for name, param in self._model.named_parameters()}

    def gradient_signs(self, advantages_T: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            logprob_T = self.scores(self.weights, torch.float32).logprob
            (-(advantages_T * logprob_T)[self._batch.loss_mask_T].mean()).backward()
        return {name: param.grad.sign() for name, param in self._model.named_parameters()}

    def scores(
        self, weights: Mapping[str, Tensor], dtype: torch.dtype, noise: float = 0.0, seed: int = 0, *, again: bool = False
    ) -> TokenScores:
        """``again``: of weights that are rounded once more."""
        model, batch = self._model.to(dtype), self._batch
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(weights[name])
        sequences = batch.tokens_T.split(batch.cu_seqlens.diff().tolist())
        ids, real = (pad_sequence(rows, batch_first=True) for rows in (sequences, [ids >= 0 for ids in sequences]))
        with rerounded(param.data for param in model.parameters()) if again else contextlib.nullcontext():
            logits_TV = model(ids).logits[real]
        if noise:
            generator = torch.Generator().manual_seed(seed)
            logits_TV = logits_TV.float() + noise * torch.randn(logits_TV.shape, generator=generator)
        return logprob_and_entropy(logits_TV, batch.labels_T, mask_T=batch.loss_mask_T, entropy_slope=True, backend="torch")


@torch.no_grad()
def study(batch: Batch) -> Iterator[_Row]:
    objective, model, mask_T = build_objective(ObjectiveConfig()), _Model(batch), batch.loss_mask_T
    advantages_T = objective.advantages(batch)[batch.sequence_index_T]
    able_T = mask_T & (advantages_T > 0)
    signs, before = model.gradient_signs(advantages_T), model.scores(model.weights, torch.float64)
    covariance_T = (before.logprob - before.logprob[mask_T].mean()) * (advantages_T - advantages_T[mask_T].mean())
    for noise, size in LOGIT_NOISE.items():
        old = model.scores(model.weights, torch.bfloat16, size, 1)
        rounded = model.scores(model.weights, torch.bfloat16, size, 2, again=True)
        levels = noise_quantiles(old, rounded, batch)
        for rate in RATES:
            moved = {name: weight - rate * signs[name] for name, weight in model.weights.items()}
            truth_A = (model.scores(moved, torch.float64).entropy - before.entropy)[able_T]
            change_T = model.scores(moved, torch.bfloat16, size, 3).entropy - old.entropy
            ways = {
                "measured, below 0": change_T < -1e-5,
                "measured, median of the noise": change_T < -levels["entropy/noise/p50"],
                "measured, 90th percentile": change_T < -levels["entropy/noise/p90"],
                "measured, twice the 99th percentile": change_T < -2 * levels["entropy/noise/p99"],
                "covariance": covariance_T > 0,
                "first_order": advantages_T * (old.entropy_slope if old.entropy_slope is not None else 0) < 0,
            }
            for way, chosen_T in ways.items():
                yield _Row(rate, noise, way, *_quality(truth_A, chosen_T[able_T]))


def _quality(truth_A: Tensor, chosen_A: Tensor) -> tuple[float, ...]:
    """Share chosen, precision, recall, and the last two weighted by the size of the true change."""
    falls_A, size_A = truth_A < 0, truth_A.abs()
    right_A = falls_A & chosen_A
    counts = [(right_A.sum() / part.sum()).item() for part in (chosen_A, falls_A)]
    sizes = [(size_A[right_A].sum() / size_A[part].sum()).item() for part in (chosen_A, falls_A)]
    return (chosen_A.double().mean().item(), *counts, *sizes)


def _main() -> None:
    parser = study_parser(__doc__, step=(1, "recorded step"))
    parser.add_argument("rollouts", type=Path, help="folder of recorded rollouts")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = list(study(pack(Record.read(args.rollouts, args.step).rollouts)))
    head = ("learning rate", "noise of logits", "way", "chosen", "precision", "recall", "precision by size", "recall by size")
    table = Table(head, [row.cells() for row in rows])
    Report("mask-noise", {"results": [row._asdict() for row in rows]}, [table], "built-in model, one step").show(args.output)


if __name__ == "__main__":
    _main()

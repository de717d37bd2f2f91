"""How far the three interpretations of "the entropy falls" agree on a run's recorded rollouts.

    tepo train examples/tiny/run.yaml output=out/tiny rollout.record=true train.steps=10
    python -m scripts.studies.compare_masks out/tiny --steps 10

It repeats the run's first steps on one rank without servers. All three ways of `objective.kl_mask.falling` choose tokens.
Shares are of tokens with a positive advantage, the only candidates.
"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.studies.options import study_parser
from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.config.objective.choices import ClipRange
from tepo_megatron.config.objective.terms import KLMask
from tepo_megatron.core.objective.compose import Objective, StepContext
from tepo_megatron.core.objective.mechanisms import entropy_falls
from tepo_megatron.core.types import Batch, ObjectiveOutput, TokenScores
from tepo_megatron.run.step.minibatches import minibatches
from tepo_megatron.sampler.rollout_file import Record
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tools.results import Report, Table

WAYS = ("measured", "covariance", "first_order")


@dataclass(frozen=True)
class _Watched(Objective):
    noted: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of A tokens with positive advantage per micro-batch: bool [3, A], π_old's entropy [A]."""

    noises: list[float] = field(default_factory=list)  # nats, of each optimizer step

    @property
    def needs_entropy_slope(self) -> bool:
        return True

    def prepare(self, batch: Batch, *, entropy_noise: float = 0.0, clip_range: ClipRange | None = None) -> StepContext:
        self.noises.append(entropy_noise)
        return super().prepare(batch, entropy_noise=entropy_noise, clip_range=clip_range)

    def __call__(self, scores: TokenScores, batch: Batch, context: StepContext, **options: Any) -> ObjectiveOutput:
        with torch.no_grad():
            values = self.token_values(scores, batch, context)
            able_T = values.mask_T & (values.advantage_T > 0)
            tolerance = (self.config.kl_mask or KLMask()).tolerance
            terms = (KLMask(tolerance=tolerance), KLMask(falling="covariance"), KLMask(falling="first_order"))
            masks = [entropy_falls(term, self.noises[-1], values) for term in terms]
            chosen_3T = able_T & torch.stack(masks)
            assert batch.old_entropy_T is not None
            self.noted.append((chosen_3T[:, able_T].cpu(), batch.old_entropy_T[able_T].cpu()))
        return super().__call__(scores, batch, context, **options)


def _replay(config: RunConfig, rollouts: Path, steps: int) -> list[list[tuple[Tensor, Tensor]]]:
    from tepo_megatron.trainer.megatron.engine import Engine

    watched = _Watched(config.objective)
    engine = Engine(config, resolve_model_path(config.model.path), watched)
    by_update: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(config.train.minibatches)]
    for step in range(steps):
        batch = engine.batch_from_root(Record.read(rollouts, step).rollouts)
        if config.engine.noise_every and step % config.engine.noise_every == 0:
            engine.measure_noise(batch)
        parts = [engine.score(part) for part in minibatches(batch, config.train.minibatches, seed=config.seed, step=step)]
        for number, part in enumerate(parts):
            watched.noted.clear()
            engine.update(part)
            by_update[number].append(_join(watched.noted))
    engine.close()
    return by_update


def _join(noted: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    chosen, entropy = zip(*noted, strict=True)
    return torch.cat(chosen, 1), torch.cat(entropy)


def _describe(chosen_3A: Tensor, entropy_A: Tensor) -> dict[str, Any]:
    """Shares are NaN without tokens."""
    named = dict(zip(WAYS, chosen_3A, strict=True))
    pairs = {f"{a} / {b}": (named[a], named[b]) for a, b in combinations(WAYS, 2)}
    return {
        "tokens": entropy_A.numel(),
        "entropy": [float(entropy_A.min()), float(entropy_A.max())] if entropy_A.numel() else [math.nan] * 2,
        "masked": {way: float(chosen.double().mean()) for way, chosen in named.items()},
        "alike": {pair: float((a == b).double().mean()) for pair, (a, b) in pairs.items()},
        "overlap": {pair: float((a & b).sum() / (a | b).sum()) for pair, (a, b) in pairs.items()},
    }


def by_entropy(chosen_3A: Tensor, entropy_A: Tensor, quantiles: int) -> list[dict[str, Any]]:
    order = entropy_A.argsort(stable=True)
    return [_describe(chosen_3A[:, part], entropy_A[part]) for part in order.tensor_split(quantiles)]


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{share:.1%}"


def _tables(updates: Sequence[dict[str, Any]], later: dict[str, Any], quantiles: Sequence[dict[str, Any]]) -> list[Table]:
    def shares(first: str, title: str, results: Iterable[tuple[str, dict[str, Any]]]) -> Table:
        head = (first, "tokens", *(f"masked: {way}" for way in WAYS), *(f"alike: {pair}" for pair in later["alike"]))
        rows = [
            (name, str(result["tokens"]), *map(_percent, [*result["masked"].values(), *result["alike"].values()]))
            for name, result in results
        ]
        return Table(head, rows, title)

    def matrix(kind: str, title: str) -> Table:
        values = {tuple(pair.split(" / ")): _percent(value) for pair, value in later[kind].items()}
        rows = [[a, *(values.get((a, b)) or values.get((b, a), "–") for b in WAYS)] for a in WAYS]
        return Table(("", *WAYS), rows, title)

    since = "from update 2 on:"
    ranges = [(f"{result['entropy'][0]:.3f} … {result['entropy'][1]:.3f}", result) for result in quantiles]
    first = "All shares are of the response tokens with a positive advantage.\n\nBy the update within its step:"
    return [
        shares("update", first, [(str(number), result) for number, result in enumerate(updates, 1)]),
        matrix("alike", f"Decided alike, {since}"),
        matrix("overlap", f"Masked by both, of the tokens that either masks, {since}"),
        shares("entropy, nats", f"By the policy's entropy before the update, {since}", ranges),
    ]


def _main() -> None:
    parser = study_parser(
        __doc__, steps=(10, "steps to go through, from the first"), quantiles=(4, "parts of the tokens by entropy")
    )
    parser.add_argument("run", type=Path, help="folder of a run with rollout.record=true")
    parser.add_argument("--dtype", help="float32 or bfloat16; default: the run's")
    args = parser.parse_args()
    layout = {"tp": "1", "pp": "1", "dp": "1", "ep": "1", "etp": "null", "sequence_parallel": "false"}
    changes = [f"engine.parallel.{name}={value}" for name, value in layout.items()]
    changes += [f"model.dtype={args.dtype}"] if args.dtype else []
    config = load_run(args.run / "resolved.yaml", changes)
    config = config.with_dtype(config.dtype(torch.cuda.device_count()))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    by_update = [_join(steps) for steps in _replay(config, args.run / "rollouts", args.steps)]
    later = _join(by_update[1:] or by_update)
    updates, quantiles = [_describe(*result) for result in by_update], by_entropy(*later, args.quantiles)
    record = {"run": config.name, "dtype": config.model.dtype, "steps": args.steps}
    record |= {"updates": updates, "later_updates": _describe(*later), "by_entropy": quantiles}
    note = f"{config.name} · {config.model.dtype} · {args.steps} steps of {config.train.minibatches} updates"
    tables = _tables(updates, record["later_updates"], quantiles)
    Report(f"masks-{config.model.dtype}", record, tables, note).show(args.output)


if __name__ == "__main__":
    _main()

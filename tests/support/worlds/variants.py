"""What every rank does where settings are compared that must not change a result; started by torchrun: variants CASE.json.

Takes one configuration after the other on the same ranks. Each trains three steps of two mini-batches, of more micro-batches
each time. Between the two of the
second step it scores with the weights as the first one left them, between those of the third it reads them. ``nan_at``: the
number of the update, from 0, that meets a gradient that is NaN.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.config import RunConfig
from tests.support.model_worlds import bits_of, in_turn
from tests.support.small_llama import draw_rollouts

LENGTHS = [5, 17, 6, 9, 8, 5, 12, 6]


def one_variant(run: dict[str, Any]) -> Any:
    """Trains, and writes what the tests compare. Returns the engine."""
    from tepo_megatron.run.step.minibatches import minibatches
    from tepo_megatron.trainer.megatron.engine import Engine

    config = RunConfig.model_validate(run["config"])
    engine = Engine(config, Path(config.model.path))
    root = engine.ranks.rank == 0
    seen: dict[str, Any] = {"updates": [], "weights": [], "pending": []}
    seen |= {"early": reductions_under_way(engine), "calls": calls_of_modules(engine)}
    number = 0
    for step in range(3):
        batch = engine.batch_from_root(draw_rollouts(LENGTHS * (step + 1)) if root else None)
        parts = [engine.score(part) for part in minibatches(batch, 2, seed=0, step=step)]
        for at, part in enumerate(parts, start=1):
            last = at == len(parts)
            result = update(engine, part, last=last, nan=number == run["nan_at"])
            seen["updates"].append([result.skipped, result.grad_norm, result.loss])
            if step == 1 and not last:
                seen["between"] = engine.score(part).old_logprobs_T.tolist()
            if step == 2 or last:
                held = bits_of(engine.policy.params)
                seen["pending"].append(held != bits_of(engine.weights.params))
            number += 1
        seen["weights"].append(engine.weights.version(step).digest)
    seen["own"] = bits_of(engine.weights.params)
    Path(run["out"], f"rank{engine.ranks.rank}.json").write_text(json.dumps(seen))
    return engine


def update(engine: Any, part: Any, *, last: bool, nan: bool) -> Any:
    """An update; with ``nan`` the gradient of one weight is NaN on rank 0."""
    param = next(iter(engine.policy.params.values()))
    handle = param.register_hook(lambda gradient: gradient * torch.nan) if nan and engine.ranks.rank == 0 else None
    result = engine.update(part, last=last)
    if handle is not None:
        handle.remove()
    return result


def reductions_under_way(engine: Any) -> list[bool]:
    """For each update, whether the reduction of every bucket had begun when Megatron came to finish it."""
    early: list[bool] = []
    chunks = engine.policy.ddp
    groups = [group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
    finish = chunks[0].finish_grad_sync

    def noted(*args: Any, **kwargs: Any) -> None:
        early.append(all(group.grad_reduce_handle is not None for group in groups))
        finish(*args, **kwargs)

    chunks[0].finish_grad_sync = noted
    return early


def calls_of_modules(engine: Any) -> dict[str, int]:
    """How often the first layer's MLP (of experts: the router) and attention were computed, counted on."""
    calls = {"mlp": 0, "core_attention": 0}
    layer = engine.policy.chunks[0].decoder.layers[0]
    for name, module in (
        ("mlp", getattr(layer.mlp, "router", layer.mlp)),
        ("core_attention", layer.self_attention.core_attention),
    ):

        def count(*_: Any, name: str = name) -> None:
            calls[name] += 1

        module.register_forward_hook(count)
    return calls


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    in_turn(json.loads(Path(sys.argv[1]).read_text())["runs"], one_variant)


if __name__ == "__main__":
    main()

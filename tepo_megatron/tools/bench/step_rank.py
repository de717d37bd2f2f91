"""One rank of ``tepo bench step``, as a script that uses only what both versions have: its package may be another
checkout's.

Requests are JSON lines on standard input, answers on standard output.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion

if TYPE_CHECKING:
    from tepo_megatron.tools.bench.megatron_step import MegatronStep
    from tepo_megatron.trainer.megatron.engine import Engine

R = TypeVar("R")


class _Ours:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def load(self, rollouts: list[Rollout]) -> Any:
        return self.engine.batch_from_root(rollouts)

    def score(self, data: Any) -> tuple[Any, float | None]:
        """Returns ``update``'s input, and the mean negative log-prob of response tokens if known."""
        scored = self.engine.score(data)
        assert scored.old_logprobs_T is not None
        return scored, -float(scored.old_logprobs_T[scored.loss_mask_T].double().mean())

    def update(self, scored: Any) -> None:
        result = self.engine.update(scored)
        if not math.isfinite(result.grad_norm):
            raise RuntimeError(f"the gradient norm is {result.grad_norm}")


def make_rollouts(lengths: Sequence[int], vocab_size: int, *, group: int, prompt: int, logprob: float = 0.0) -> list[Rollout]:
    generator = torch.Generator().manual_seed(1)
    rollouts = []
    for number, length in enumerate(lengths):
        ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
        rollouts.append(
            Rollout(
                f"group {number // group}",  # by position: some fields had other names
                number // group,
                tuple(ids[:prompt]),
                tuple(ids[prompt:]),
                (logprob,) * (length - prompt),
                "length",
                WeightsVersion(0),
                reward=float(number % 2),
            )
        )
    return rollouts


def peak_bytes(work: Callable[[], object]) -> int:
    """Counts what torch allocates during ``work``, beyond earlier bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    held, peak = 0, 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def _timed(work: Callable[[], R]) -> tuple[R, float]:
    dist.barrier()
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def _make_method(name: str, engine: Engine) -> _Ours | MegatronStep:
    if name.startswith("tepo_megatron"):
        return _Ours(engine)
    from tepo_megatron.tools.bench.megatron_step import MegatronStep  # an older checkout does not have it

    return MegatronStep(engine, rows="rows" in name)


def _main(arguments: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to the log
    warnings.simplefilter("ignore")  # Megatron's, about accelerators that are not measured here
    from tepo_megatron.trainer.megatron.engine import Engine

    os.environ["KINETO_LOG_LEVEL"] = "99"
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(arguments["store"], world)  # type: ignore[attr-defined] # torch exports it without saying so
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    engine = Engine(RunConfig.model_validate(arguments["config"]), Path(arguments["model"]))
    methods: dict[str, _Ours | MegatronStep] = {}
    loaded: dict[tuple[str, str], Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name, ratio = request["method"], request["ratio"]
        if name not in methods:
            methods[name] = _make_method(name, engine)
        if (name, ratio) not in loaded:
            sizes = {name: arguments[name] for name in ("group", "prompt")}
            rollouts = make_rollouts(arguments["lengths"][ratio], engine.spec.vocab_size, **sizes)
            loaded[name, ratio] = methods[name].load(rollouts)
        print(json.dumps(_step(methods[name], loaded[name, ratio], memory=request["memory"])), file=answers, flush=True)
    engine.close()


def _step(method: _Ours | MegatronStep, data: Any, *, memory: bool) -> dict[str, float]:
    if memory:
        method.update(method.score(data)[0])  # allocates what stays: optimizer states, buffers of collectives
        # The least of three: a buffer that a collective's thread frees late adds to a step's peak by chance.
        return {"peak_bytes": min(peak_bytes(lambda: method.update(method.score(data)[0])) for _ in range(3))}
    (scored, loss), score_s = _timed(lambda: method.score(data))
    _, update_s = _timed(lambda: method.update(scored))
    return {"score_s": score_s, "update_s": update_s} | ({} if loss is None else {"loss": loss})


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))

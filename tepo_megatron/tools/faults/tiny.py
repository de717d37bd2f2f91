"""The tiny run of the faults: this package's model on two-digit sums, and how two such runs are compared."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.reward.verifiers import last_word

LIVE = (
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.sampling.max_new_tokens=24",
    "rollout.server.tp=2",
    "rollout.server.max_restarts=1000",
    "rollout.server.start_timeout_s=1800",  # limits for a busy machine
    "rollout.server.request_timeout_s=600",
    "rollout.server.transfer_timeout_s=600",
    "rollout.record=true",
    "engine.parallel.tp=2",
    "engine.parallel.sequence_parallel=true",
    "reward.verifier=tepo_megatron.tools.faults.tiny:slow_last_word",
    "reward.timeout_s=10",
    "evaluate.every=2",
    "evaluate.problems=4",
    "evaluate.samples=0",
    "train.minibatches=2",
    "train.save_every=1",
    "train.grace_s=3600",  # shows processes that do not end by themselves
    "optimizer.lr=5.0e-5",
    "log.tensorboard=false",
    "log.progress=plain",
)
"""Two ranks and a server with two workers, so that every kind of process exists."""

SHORT_TIMEOUTS = ("rollout.server.request_timeout_s=20", "rollout.server.transfer_timeout_s=20")
"""For servers that are stopped; on a busy machine, slow servers would be restarted again and again."""

REPLAYED = (
    "rollout.sampling.max_new_tokens=24",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "evaluate.every=0",
    "train.minibatches=2",
    "train.save_every=1",
    "train.keep_checkpoints=3",
    "optimizer.lr=5.0e-5",
    "log.tensorboard=false",
    "log.progress=plain",
)

_NOT_COMPARED = ("time/", "idle/", "tokens/s", "reward/failed", "faults/", "lost/", "servers/", "requests/", "log/", "memory/")


def slow_last_word(problem: Problem, response: str) -> float:
    """``last_word``, slow enough for a fault to come in between."""
    time.sleep(0.005)
    return last_word(problem, response)


def write_run(folder: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text("name: faults\nmodel: {path: builtin:tiny}\n")
    return path


def rows(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1] if line]


def last_step(out: Path) -> int:
    result = rows(out)
    return result[-1]["step"] if result else -1


def differences(out: Path, reference: Path) -> str:
    """What differs by any bit from the undisturbed run: metrics, rollouts with weight digests, exported weights if the run has
    ended."""
    expected = {row["step"]: _figures(row) for row in rows(reference)}
    seen: list[int] = []
    for row in rows(out):
        step = row["step"]
        seen.append(step)
        wrong = [key for key, value in _figures(row).items() if expected[step].get(key) != value]
        if wrong or _figures(row).keys() != expected[step].keys():
            missing = sorted(expected[step].keys() - row.keys())
            return f"row {step} of metrics.jsonl differs in {', '.join(wrong or missing)}"
    if seen != list(range(len(seen))):
        return f"metrics.jsonl has the steps {seen}"
    for path in sorted((out / "rollouts").glob("step_*.jsonl")):
        if path.read_bytes() != (reference / "rollouts" / path.name).read_bytes():
            return f"the rollouts in {path.name} differ"
    mine, theirs = out / "model/model.safetensors", reference / "model/model.safetensors"
    if mine.exists() and mine.read_bytes() != theirs.read_bytes():
        return "the exported weights differ"
    return ""


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(_NOT_COMPARED)}

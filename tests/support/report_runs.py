"""Folders of made-up runs for ``tepo report``, with what a real one has: curves that learn, samples, tokens with their values.

The task is the tiny run's: two-digit sums with a chain of thought, a token a character.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tepo_megatron.run.metrics import TokenPrompt, TokenSamples, token_file

HOSTILE = '</script><img src=x onerror="window.attacked = 1"><script>window.attacked = 2</script>'
"""What a model may write to take over the page that shows it."""

SETTINGS = {"name": "made up", "seed": 0, "optimizer": {"lr": 5e-05}, "train": {"steps": 90}, "evaluate": {"samples": 4}}
PHASES = {"rollout": 1.0, "reward": 0.01, "journal": 0.01, "score": 0.5, "update": 1.2, "sync": 0.3, "eval": 0.0, "other": 0.06}
LEARNT_AT = 25.0
"""After so many steps about two thirds of what is learnt is learnt."""


def write_run(
    folder: Path,
    *,
    steps: int = 90,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    recorded: Sequence[int] = (),
    groups: int = 4,
    samples: int = 8,
    hostile: bool = False,
) -> Path:
    """A run's folder. ``recorded``: the steps whose tokens are written, so many groups of so many samples each; ``hostile``:
    a prompt and a response of each are code that attacks the page.
    """
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump({**SETTINGS, "output": str(folder), "seed": seed, **(settings or {})}, sort_keys=False)
    (folder / "resolved.yaml").write_text(text, encoding="utf-8")
    rows = [metrics_row(step, draw) for step in range(steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    evaluated = [heldout(step, draw, at) for step in range(0, steps + 1, 30) for at in range(8)]
    if hostile:
        evaluated[-1]["prompt"] = evaluated[-1]["greedy"]["response"] = HOSTILE
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluated), encoding="utf-8")
    for step in recorded:
        path = token_file(folder, step)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(token_samples(step, draw, groups, samples, hostile=hostile).encode())
    return folder


def skill(step: int) -> float:
    return 0.95 - 0.7 * float(np.exp(-step / LEARNT_AT))


def metrics_row(step: int, draw: np.random.Generator) -> dict[str, Any]:
    """Row 0 is an evaluation alone; every tenth has one; at step 65 a server was lost."""
    row: dict[str, Any] = {"step": step}
    reward = float(np.clip(skill(step) - 0.06 + draw.normal(0, 0.02), 0, 1))
    if step:
        row |= {
            "reward/mean": reward,
            "entropy/mean": 0.06 + 0.13 * float(np.exp(-step / 30)) + draw.normal(0, 0.004),
            "mask/fraction": 0.3 - 0.2 * float(np.exp(-step / 10)) + draw.normal(0, 0.01),
            "kl/mean": abs(draw.normal(4e-4, 1e-4)),
            "grad_norm": abs(draw.normal(1.8, 0.3)),
            "lr": 5e-05 * min(1, step / 10),
            "response_len/mean": 18.5 + draw.normal(0, 0.05),
            "groups/zero_variance": 0.1 + 0.2 * reward,
            "mismatch/kl": 1e-13 * draw.random(),
            "tokens/s": draw.normal(3000, 300),
            "idle/trainer": float(np.clip(draw.normal(0.32, 0.02), 0, 1)),
            "idle/servers": float(np.clip(draw.normal(0.67, 0.02), 0, 1)),
        }
    if step % 10 == 0:
        row |= {
            "accuracy/greedy": skill(step),
            "accuracy/avg@k": skill(step) - 0.15,
            "accuracy/pass@k": min(1.0, skill(step) + 0.05),
        }
    seconds = {f"time/{name}": mean * abs(draw.normal(1, 0.08)) for name, mean in PHASES.items()}
    seconds["time/eval"] = 2.5 if step % 10 == 0 else 0.0
    row |= {**seconds, "time/step": sum(seconds.values()) + (0 if step else 9.0)}
    return row | {"servers/restarts": float(step == 65), "lost/server": 9.5 * (step == 65), "update/skipped": 0.0}


def heldout(step: int, draw: np.random.Generator, at: int) -> dict[str, Any]:
    a, b = 10 + 7 * at, 89 - 3 * at
    answers = [response_text(a, b, draw.random() < skill(step), draw) for _ in range(5)]
    found = [
        {"response": text, "reward": float(right), "correct": right, "tokens": len(text) + 1, "finish_reason": "stop"}
        for text, right in answers
    ]
    return {
        "step": step,
        "problem": f"{a}+{b}",
        "prompt": f"{a}+{b}=",
        "answer": str(a + b),
        "greedy": found[0],
        "sampled": found[1:],
    }


def response_text(a: int, b: int, right: bool, draw: np.random.Generator) -> tuple[str, bool]:
    ones, said = a % 10 + b % 10, a + b if right else a + b + int(draw.choice([-10, -1, 1, 10]))
    carry = ones // 10
    return f"{a % 10}+{b % 10}={ones} {a // 10}+{b // 10}+{carry}={a // 10 + b // 10 + carry} {said}", right


def token_samples(step: int, draw: np.random.Generator, groups: int, samples: int, *, hostile: bool = False) -> TokenSamples:
    """The tokens of a step's first groups, with values as a TEPO run has them; the end token is ``⟦</s>⟧``."""
    prompts, texts, rewards = [], [], []
    for _ in range(groups):
        a, b = draw.integers(10, 99, 2).tolist()
        prompts.append(TokenPrompt(f"{a}+{b}=", str(a + b), problem=f"{a}+{b}"))
        for _ in range(samples):
            text, right = response_text(a, b, bool(draw.random() < skill(step)), draw)
            texts.append([*text, "⟦</s>⟧"])
            rewards.append(float(right))
    if hostile:
        prompts[0] = TokenPrompt(HOSTILE, HOSTILE, source=HOSTILE, problem=HOSTILE)
        texts[0] = [HOSTILE, *texts[0]]
    number = {piece: at for at, piece in enumerate(sorted({piece for text in texts for piece in text}))}
    lengths = np.array([len(text) for text in texts], np.int32)
    of_token = np.repeat(np.arange(len(texts)), lengths)
    reward = np.array(rewards, np.float32)
    by_group = reward.reshape(groups, samples)
    advantage = ((by_group - by_group.mean(1, keepdims=True)) / (by_group.std(1, ddof=1, keepdims=True) + 1e-6)).ravel()
    tokens = int(lengths.sum())
    unsure = draw.beta(0.3, 6, tokens)
    logprob = np.where(draw.random(tokens) < 0.9, np.log1p(-unsure), np.log(unsure + 1e-4))
    entropy = -(unsure * np.log(unsure + 1e-9) + (1 - unsure) * np.log1p(-unsure + 1e-9))
    trainer = logprob + draw.normal(0, 2e-7, tokens)
    update = trainer + draw.normal(0, 0.02, tokens) * np.sqrt(unsure)
    change = draw.normal(0, 0.02, tokens) * entropy
    ratio = np.exp(np.array([(update - trainer)[of_token == at].mean() for at in range(len(texts))]))[of_token]

    def floats(values: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.asarray(values, np.float32)

    return TokenSamples(
        step=step,
        prompts=tuple(prompts),
        pieces={at: piece for piece, at in number.items()},
        lengths=lengths,
        prompt=np.repeat(np.arange(groups, dtype=np.int32), samples),
        group=np.repeat(np.arange(groups, dtype=np.int32), samples),
        update=draw.integers(1, 5, len(texts), dtype=np.int32),
        reward=reward,
        truncated=np.zeros(len(texts), bool),
        ids=np.array([number[piece] for text in texts for piece in text], np.int32),
        loss_mask=np.ones(tokens, bool),
        version=np.full(tokens, step - 1, np.int32),
        logprob_sampler=floats(logprob),
        logprob_trainer=floats(trainer),
        logprob_update=floats(update),
        entropy=floats(entropy),
        entropy_change=floats(change),
        advantage=floats(advantage[of_token]),
        ratio=floats(ratio),
        masked=(change < 0) & (advantage[of_token] > 0),
    )

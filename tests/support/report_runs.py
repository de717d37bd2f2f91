"""Folders of made-up runs for ``tepo report``, with what a real one has: curves that learn, samples, tokens with their values.

The task is the tiny run's: two-digit sums with a chain of thought, a token a character.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    if step:
        usual = {"entropy/mean": 0.1, "mask/fraction": 0.1, "kl/mean": 4e-4, "grad_norm": 1.8, "lr": 5e-5, "tokens/s": 3000.0}
        usual |= {"response_len/mean": 18.5, "groups/zero_variance": 0.2, "mismatch/kl": 1e-13}
        usual |= {"idle/trainer": 0.3, "idle/servers": 0.6, "reward/mean": skill(step)}
        row |= {name: value * draw.uniform(0.8, 1.05) for name, value in usual.items()}
    if step % 10 == 0:
        row |= {"accuracy/greedy": skill(step), "accuracy/avg@4": skill(step) - 0.15, "accuracy/pass@4": skill(step) + 0.05}
    seconds = {f"time/{name}": mean * draw.uniform(0.9, 1.1) for name, mean in PHASES.items()}
    row |= {**seconds, "time/eval": 2.5 * (step % 10 == 0), "time/step": sum(seconds.values()) + (0 if step else 9.0)}
    return row | {"servers/restarts": float(step == 65), "lost/server": 9.5 * (step == 65), "update/skipped": 0.0}


def heldout(step: int, draw: np.random.Generator, number: int) -> dict[str, Any]:
    a, b = 10 + 7 * number, 89 - 3 * number
    answers = [response_text(a, b, draw.random() < skill(step), draw) for _ in range(5)]
    greedy, *sampled = [
        {"response": text, "reward": float(right), "correct": right, "tokens": len(text) + 1, "finish_reason": "stop"}
        for text, right in answers
    ]
    question = {"problem": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)}
    return {"step": step, **question, "greedy": greedy, "sampled": sampled}


def response_text(a: int, b: int, right: bool, draw: np.random.Generator) -> tuple[str, bool]:
    ones, said = a % 10 + b % 10, a + b if right else a + b + int(draw.choice([-10, -1, 1, 10]))
    carry = ones // 10
    return f"{a % 10}+{b % 10}={ones} {a // 10}+{b // 10}+{carry}={a // 10 + b // 10 + carry} {said}", right


def token_samples(step: int, draw: np.random.Generator, groups: int, samples: int, *, hostile: bool = False) -> TokenSamples:
    """The tokens of a step's first groups; the end token is ``⟦</s>⟧``."""
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
    pieces = sorted({piece for text in texts for piece in text})
    drawn = made_up_tokens(step, [len(text) for text in texts], seed=step, unknown=0)
    of_prompt = np.repeat(np.arange(groups, dtype=np.int32), samples)
    return replace(
        drawn,
        prompts=tuple(prompts),
        pieces=dict(enumerate(pieces)),
        prompt=of_prompt,
        group=of_prompt,
        reward=np.array(rewards, np.float32),
        ids=np.array([pieces.index(piece) for text in texts for piece in text], np.int32),
        logprob_sampler=-np.abs(drawn.logprob_sampler),
        entropy=np.abs(drawn.entropy),
        version=np.full_like(drawn.version, step - 1),
        advantage=np.repeat(draw.normal(size=len(texts)).astype(np.float32), drawn.lengths),
        ratio=np.repeat(draw.uniform(0.99, 1.01, len(texts)).astype(np.float32), drawn.lengths),
    )


def made_up_tokens(
    step: int = 30, lengths: Sequence[int] = (3, 0, 5, 2), *, seed: int = 0, unknown: float = 1 / 3
) -> TokenSamples:
    """Responses of these lengths, two to a prompt, with drawn values; this share of the floats is NaN."""
    draw = np.random.default_rng(seed)
    responses, tokens = len(lengths), sum(lengths)

    def floats(count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        values = draw.normal(size=count).astype(np.float32)
        values[draw.random(count) < unknown] = np.nan
        return values

    groups = np.arange(responses, dtype=np.int32) // 2
    ids = draw.integers(0, 40, tokens, dtype=np.int32)
    return TokenSamples(
        step=step,
        prompts=tuple(TokenPrompt(f"{group}+1=", str(group + 1), "sums", f"p{group}") for group in range(responses)),
        pieces={token: f"⟨{token:02X}⟩" if token % 3 else f" w{token}" for token in set(ids.tolist())},
        lengths=np.array(lengths, dtype=np.int32),
        prompt=groups,
        group=groups,
        update=draw.integers(0, 3, responses, dtype=np.int32),
        reward=draw.random(responses, dtype=np.float32),
        truncated=draw.random(responses) < 0.5,
        ids=ids,
        loss_mask=draw.random(tokens) < 0.8,
        version=draw.integers(step - 3, step, tokens, dtype=np.int32),
        logprob_sampler=floats(tokens),
        logprob_trainer=floats(tokens),
        logprob_update=floats(tokens),
        entropy=floats(tokens),
        entropy_change=floats(tokens),
        advantage=floats(tokens),
        ratio=floats(tokens),
        divergence=floats(tokens),
        masked=draw.random(tokens) < 0.2,
    )

"""Per-token values of made-up responses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tepo_megatron.run.metrics import TokenPrompt, TokenSamples


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
        masked=draw.random(tokens) < 0.2,
    )

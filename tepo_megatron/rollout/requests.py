"""How prompts become requests: greedy ones share them, a sampled one has its own, with a seed of its own (decision 006)."""

from __future__ import annotations

import hashlib

GREEDY_PROMPTS_PER_REQUEST = 64


def split_prompts(total: int, *, greedy: bool) -> list[range]:
    """The prompts of each request, in order."""
    size = GREEDY_PROMPTS_PER_REQUEST if greedy else 1
    return [range(first, min(first + size, total)) for first in range(0, total, size)]


def prompt_seed(seed: int, prompt: int) -> int:
    """A seed of 62 bits for the prompt's group, unrelated to those of its neighbours."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{prompt}".encode(), digest_size=8).digest()) >> 2

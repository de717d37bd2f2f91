"""How prompts become requests: one for each, with a seed of its own (decision 006)."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class Request(NamedTuple):
    """Samples ``first`` to ``first`` + ``n`` of the group of prompt number ``prompt``."""

    prompt: int
    first: int
    n: int


def split_groups(prompts: int, n: int, most: int) -> list[Request]:
    """The requests for ``n`` samples of each of ``prompts`` prompts, in order; a request takes at most ``most`` samples."""
    return [Request(prompt, first, min(most, n - first)) for prompt in range(prompts) for first in range(0, n, most)]


def prompt_seed(seed: int, prompt: int) -> int:
    """A seed of 62 bits for the prompt's group, unrelated to those of its neighbours."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{prompt}".encode(), digest_size=8).digest()) >> 2


def server_seed(seed: int, index: int) -> int:
    """The seed of server number ``index``: vLLM takes 32 bits. Requests for samples bring seeds of their own."""
    return (seed + index) % 2**32

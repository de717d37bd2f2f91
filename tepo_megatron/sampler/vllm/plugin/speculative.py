"""What vLLM's speculative decoding needs on a CPU: its own expansion of temperatures to tokens leaves them unwritten there.

vLLM 0.32 takes a copy of the output as whole numbers, writes into that, and drops it: what follows divides logits by memory
that nobody wrote. ``tests/unit/sampler/test_speculative.py`` fails when it does so no longer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tepo_megatron.versions import VLLM_RANGE, in_range

SPECULATES_VARIABLE = "TEPO_SERVER_SPECULATES"
"""Environment: set where a server decodes speculatively."""


def mend_expansion() -> None:
    """Has vLLM's rejection sampler expand by :func:`expand_batch_to_tokens`, on CPUs, in the versions that we know."""
    import vllm
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and in_range(vllm.__version__, VLLM_RANGE):
        from vllm.v1.sample import rejection_sampler

        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Each value of ``x`` [batch] as often as its request has tokens: [num_tokens]. ``cu_num_tokens`` [batch] are the requests'
    ends; values equal to ``replace_from`` become ``replace_to``. Names and meaning are vLLM's.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(values, counts, output_size=num_tokens)

"""Random steps for tests, with what the package checks objectives by: as a whole, and cut into micro-batches."""

from functools import partial

import torch
from hypothesis import strategies as st

from tepo_megatron.core.objective.checking import make_step as make_batch
from tepo_megatron.core.objective.checking import pick, summary, whole

__all__ = ["VALUES", "assert_same", "make_batch", "masks", "pick", "summary", "whole"]

VALUES = (
    "tokens_T",
    "labels_T",
    "loss_mask_T",
    "sampler_logprobs_T",
    "old_logprobs_T",
    "old_entropy_T",
    "reference_logprobs_T",
)


def masks(min_sequences=1, max_sequences=6):
    """Loss masks of a step with at least one response token: prompts, responses, holes, and sequences without any."""
    sequence = st.lists(st.booleans(), min_size=1, max_size=7)
    return st.lists(sequence, min_size=min_sequences, max_size=max_sequences).filter(lambda rows: any(map(any, rows)))


def assert_same(left, right, rtol=1e-9):
    for a, b in zip(left, right, strict=True):
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for name in a:
                torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=1e-12, msg=partial("{}: {}".format, name))
        elif isinstance(a, tuple):
            assert_same(a, b, rtol)
        else:
            torch.testing.assert_close(a, b, rtol=rtol, atol=1e-12)

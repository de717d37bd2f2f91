"""What the plugin mends of speculative decoding on CPUs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.sampler.vllm.plugin.patches import mend_expansion


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.5, -1.0]), st.integers(0, 4)), min_size=1, max_size=6))
def test_each_value_is_there_as_often_as_its_request_has_tokens(requests: list[tuple[float, int]]) -> None:
    pytest.importorskip("vllm")
    values, counts = zip(*requests, strict=True)
    ends = torch.tensor(counts).cumsum(0).int()
    from vllm.v1.sample import rejection_sampler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejection_sampler, "expand_batch_to_tokens", rejection_sampler.expand_batch_to_tokens)
        mend_expansion()
        expand = rejection_sampler.expand_batch_to_tokens
    found = expand(torch.tensor(values), ends, sum(counts), replace_from=-1.0, replace_to=1)
    assert found.dtype == torch.float32
    assert found.tolist() == [1.0 if value == -1 else value for value, count in requests for _ in range(count)]


def test_vllm_still_needs_it() -> None:
    """When this fails, vLLM expands temperatures on CPUs by itself: then ``mend_expansion`` can go."""
    import vllm._custom_ops  # noqa: F401 # vLLM's operators for this machine
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    output = torch.full((3,), torch.nan)
    _expand_kernel_impl(output, torch.tensor([0.5, 2.0]), torch.tensor([1, 3], dtype=torch.int32), 0, 1)
    assert output.isnan().all()

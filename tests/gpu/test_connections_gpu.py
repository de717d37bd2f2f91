"""The driver's answer about the GPU, which a rank asks before it starts CUDA, is torch's."""

from __future__ import annotations

import pytest
import torch

from tepo_megatron.trainer.megatron.gpu import gpu_capability

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]


def test_the_capability_is_known_before_cuda_starts() -> None:
    assert gpu_capability() == torch.cuda.get_device_capability(0)

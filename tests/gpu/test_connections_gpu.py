"""The driver's answer about the GPU, which a rank asks before it starts CUDA, is torch's."""

from __future__ import annotations

import os

import pytest
import torch

from tepo_megatron.config.load import load_run
from tepo_megatron.trainer.megatron.gpu import CONNECTIONS_VARIABLE, prepare_process

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]


def test_the_capability_is_known_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONNECTIONS_VARIABLE, "")  # so that it is as before afterwards
    monkeypatch.delenv(CONNECTIONS_VARIABLE)
    prepare_process(load_run(None, ["engine.parallel.tp=2"]))
    expected = "1" if torch.cuda.get_device_capability(0) < (10, 0) else None
    assert os.environ.get(CONNECTIONS_VARIABLE) == expected

"""The patches that let Megatron run on a CPU: together they are enough, and none is there for nothing."""

from __future__ import annotations

import json

import pytest
import torch

from tepo_megatron.engine import platform_cpu
from tests.support.programs import run_program


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(model)
    return json.loads(run_program("patch_probe", model).splitlines()[-1])


def test_with_all_patches_megatron_trains(outcomes: dict[str, str | None]) -> None:
    assert outcomes["none"] is None


@pytest.mark.parametrize("patch", [*(patch.key for patch in platform_cpu.patches()), "torch function mode"])
def test_without_a_patch_megatron_fails(outcomes: dict[str, str | None], patch: str) -> None:
    """If this fails, upstream no longer needs the patch: remove it."""
    assert outcomes[patch] is not None


def test_a_megatron_that_was_not_tried_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform_cpu, "version", lambda _: "0.17.0")
    with pytest.raises(RuntimeError, match=r"megatron-core 0\.17\.0 was not tried on CPU; install 0\.16\.x"):
        platform_cpu.install()


def test_a_machine_with_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="this machine has a GPU"):
        platform_cpu.install()

"""Servers that start with weights that mean nothing: the first update brings the trainer's, so that none are read from disk."""

from __future__ import annotations

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from tepo_megatron.sampler.vllm.plugin.gate import DUMMY_FORMAT


@register_model_loader(DUMMY_FORMAT)  # type: ignore[untyped-decorator, unused-ignore]  # vllm's types are not followed, here and below
class DummyWeights(DummyModelLoader):  # type: ignore[misc]
    """As vLLM's ``dummy``, which overwrites buffers too where a state dict would have them. No update brings these again, as
    they are in no checkpoint: tables of angles, scales of the KV cache. Here they stay as the model made them.
    """

    def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
        kept = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
        super().load_weights(model, model_config)
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)

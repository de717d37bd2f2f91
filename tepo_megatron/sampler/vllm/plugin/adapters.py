"""LoRA adapters from the trainer, in the memory of every vLLM worker. vLLM forgets them when a weight update ends, and loads
them again from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.worker_manager import WorkerLoRAManager

from tepo_megatron.sampler.vllm.plugin.middleware import ADAPTER_PATH


@dataclass
class Held:
    """A PEFT folder's settings, and its tensors without PEFT's prefix."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


_held: list[Held] = []


def hold(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    _held[:] = [Held(settings, tensors)]


def load_from_memory() -> None:
    """Makes vLLM's workers take ``ADAPTER_PATH`` from memory."""
    from_folder = WorkerLoRAManager._load_adapter

    def load(manager: Any, request: Any) -> Any:
        return _from_memory(manager, request) if request.lora_path == ADAPTER_PATH else from_folder(manager, request)

    WorkerLoRAManager._load_adapter = load


def _from_memory(manager: Any, request: Any) -> Any:
    """Raises if a layer cannot take its adapter."""
    if not _held:
        raise RuntimeError("this worker holds no adapters yet; the trainer sends them with the first weight update")
    held, inner = _held[0], manager._adapter_manager
    helper = PEFTHelper.from_dict(dict(held.settings))
    helper.validate_legal(manager.lora_config)
    mapper = getattr(inner.model, "hf_to_vllm_mapper", None)
    found = LoRAModel.from_lora_tensors(
        request.lora_int_id,
        # vLLM multiplies the scale into B in place
        {name: tensor.clone() for name, tensor in held.tensors.items()},
        peft_helper=helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    packed = inner.packed_modules_mapping
    known = {part for name in inner.supported_lora_modules for part in packed.get(name, [name])}
    unknown = sorted(name for name in found.loras if name.rpartition(".")[2] not in known)
    if unknown:
        raise RuntimeError(f"vLLM has no place for the adapters of {', '.join(unknown[:4])}; set model.lora.serve = merged")
    return found

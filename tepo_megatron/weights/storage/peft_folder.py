"""Reads and writes LoRA adapters as PEFT does: ``adapter_config.json`` and ``adapter_model.safetensors`` in a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tepo_megatron.weights.geometry import ShardLayout
from tepo_megatron.weights.storage.files import atomic_folder
from tepo_megatron.weights.storage.stored import open_safetensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts before the names of the model's own modules."""

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "fan_in_fan_out": (False,),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
}
"""Settings of PEFT that make something else than one A and B per layer, with the values that do not."""


@dataclass(frozen=True)
class AdapterSettings:
    """What a PEFT folder says of its adapters. ``targets``: the names of the layers that have one."""

    rank: int
    alpha: float
    rslora: bool
    dropout: float
    targets: tuple[str, ...]

    def as_peft(self) -> dict[str, Any]:
        """The same under PEFT's names."""
        return {
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.rslora,
            "target_modules": sorted(self.targets),
        }


def write_peft_folder(out: Path, tensors: Mapping[str, Tensor], settings: AdapterSettings, *, base_model: str) -> None:
    """Writes adapters, by the names of ``bridge.layouts.adapters``. One process calls; a folder that was there is replaced.

    ``base_model``: the name or folder of the model that they belong to, which PEFT shows and may load.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        **settings.as_peft(),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    with atomic_folder(out) as partial:
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        held = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(held, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / WEIGHTS).chmod(0o644)


def check_peft_folder(folder: Path, shapes: Mapping[str, tuple[int, ...]], *, rank: int, alpha: float, rslora: bool) -> None:
    """Raises ValueError unless the folder holds adapters of exactly these tensors and settings, naming all that differs.

    Reads the settings and the header of the weights.
    """
    config = _read_config(folder)
    problems = [
        f"{name} = {config[name]!r} is not supported (only {values[0]!r})"
        for name, values in _PLAIN.items()
        if name in config and config[name] not in values
    ]
    for name, field, ours in (("r", "rank", rank), ("lora_alpha", "alpha", alpha), ("use_rslora", "rslora", rslora)):
        theirs = config.get(name, False if name == "use_rslora" else None)
        if theirs != ours:
            problems.append(f"{name} is {theirs!r}, and model.lora.{field} is {ours!r}")
    if not problems:
        problems = _wrong_tensors(folder, shapes)
    if problems:
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(
            f"model.lora.path = {folder} does not hold this run's adapters; change model.lora, or give another folder:\n  "
            + "\n  ".join(problems[:8])
            + more
        )


def load_adapters(folder: Path, layout: ShardLayout, params: Mapping[str, Tensor]) -> None:
    """Copies this rank's parts of a folder's adapters into its parameters, in place, reading no other bytes."""
    with torch.no_grad(), open_safetensors(folder / WEIGHTS) as handle:
        for shard in layout.shards:
            params[shard.param][shard.at.slices].copy_(handle.get_slice(PREFIX + shard.tensor)[shard.box.slices])


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file() or not (folder / WEIGHTS).is_file():
        raise ValueError(f"model.lora.path = {folder} has no {CONFIG} and {WEIGHTS}; give a folder that PEFT has saved")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); save or copy the adapters again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is damaged (it is no object); save or copy the adapters again")
    return config


def _wrong_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    with open_safetensors(folder / WEIGHTS) as handle:
        stored = {key: tuple(handle.get_slice(key).get_shape()) for key in handle.keys()}  # noqa: SIM118
    expected = {PREFIX + name: shape for name, shape in shapes.items()}
    missing = [f"missing: {name}" for name in expected if name not in stored]
    unexpected = [f"not of this model, or not in model.lora.target_modules: {name}" for name in stored if name not in expected]
    misshapen = [
        f"misshapen: {name} is {stored[name]}, and this model needs {shape}"
        for name, shape in expected.items()
        if name in stored and stored[name] != shape
    ]
    # the first of each kind before the rest, since only the first few are shown
    kinds = [missing, unexpected, misshapen]
    return [kind[0] for kind in kinds if kind] + [problem for kind in kinds for problem in kind[1:]]

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tepo_megatron.runtime.files import partial_path, sync_to_disk
from tepo_megatron.runtime.hub import HUB, split_source
from tepo_megatron.runtime.text import parse_json
from tepo_megatron.weights.architecture import TOKENIZER_FILES, is_always_fp32
from tepo_megatron.weights.geometry import ShardLayout
from tepo_megatron.weights.storage.stored import first_problems, open_safetensors, tensor_batches

SHARD_BYTES = 4 * 2**30

_PART = "part-{:05d}.safetensors"  # until the number of parts is known

_PEFT_CONFIG, _PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

PEFT_PREFIX = "base_model.model."

_SUPPORTED_PEFT: dict[str, tuple[Any, ...]] = {
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
    "init_lora_weights": (True, False, "gaussian", "eva"),  # others, such as pissa, also change the base's weights
}
"""With these values every layer has one plain A and B, beside the base's weights."""


def write_model(
    out: Path, tensors: Iterable[tuple[str, Tensor]], *, source: Path, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES
) -> None:
    """One process calls; whenever it ends, ``out`` is whole or not there. Raises RuntimeError if a file cannot be written."""
    with _atomic_folder(out) as partial:
        copy_description(source, partial, dtype)
        cast = ((name, tensor.to(torch.float32 if is_always_fp32(name) else dtype)) for name, tensor in tensors)
        written: list[dict[str, int]] = []
        for batch in tensor_batches(cast, shard_bytes):
            written.append({name: tensor.nbytes for name, tensor in batch.items()})
            _save(batch, partial / _PART.format(len(written)))
            batch.clear()
        for number in range(1, len(written) + 1):
            (partial / _PART.format(number)).rename(partial / model_file_name(number, len(written)))
        write_index(partial, written)


def copy_description(source: Path, out: Path, dtype: torch.dtype | None) -> None:
    """``dtype`` None keeps the source's."""
    config = json.loads((source / "config.json").read_text())
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:  # SafetensorError also wraps the system's errors
        raise RuntimeError(
            f"{path} could not be written: {error}; {shutil.disk_usage(path.parent).free:,} bytes are free. Nothing was "
            "replaced. Make room, and do it again (a run goes on with --resume)"
        ) from error
    path.chmod(0o644)


def model_file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, files: Sequence[Mapping[str, int]]) -> None:
    if len(files) == 1:
        return
    weight_map = {name: model_file_name(number, len(files)) for number, sizes in enumerate(files, 1) for name in sizes}
    index = {"metadata": {"total_size": sum(sum(sizes.values()) for sizes in files)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


@contextmanager
def _atomic_folder(out: Path) -> Iterator[Path]:
    partial = partial_path(out)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            sync_to_disk(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    replaced = out.with_name(out.name + ".replaced")
    _remove(replaced)
    if os.path.lexists(out):
        out.rename(replaced)
    partial.rename(out)
    sync_to_disk(out.parent)
    _remove(replaced)


def _remove(path: Path) -> None:
    """Of a link, what it names stays."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class AdapterSettings:
    rank: int
    alpha: float
    rslora: bool
    dropout: float
    targets: tuple[str, ...]

    def as_peft(self) -> dict[str, Any]:
        return {
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.rslora,
            "target_modules": sorted(self.targets),
        }

    def write(self, out: Path, tensors: Mapping[str, Tensor], *, base_model: str, folder: Path) -> None:
        """One process calls. PEFT opens ``base_model`` (``model.path``) if it is of the hub, else ``folder``."""
        name, revision = split_source(base_model)
        of_hub = base_model.startswith(HUB)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": name if of_hub else str(folder.resolve()),
            "revision": revision if of_hub and revision else None,
            **self.as_peft(),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
        }
        with _atomic_folder(out) as partial:
            (partial / _PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            stored = {PEFT_PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            _save(stored, partial / _PEFT_WEIGHTS)


def check_peft_folder(folder: Path, shapes: Mapping[str, tuple[int, ...]], *, rank: int, alpha: float, rslora: bool) -> None:
    config = _read_config(folder)
    problems = [
        f"{name} = {config[name]!r} is not supported (only {values[0]!r})"
        for name, values in _SUPPORTED_PEFT.items()
        if name in config and config[name] not in values
    ]
    for name, field, expected in (("r", "rank", rank), ("lora_alpha", "alpha", alpha), ("use_rslora", "rslora", rslora)):
        stored = config.get(name, False if name == "use_rslora" else None)
        if stored != expected:
            problems.append(f"{name} is {stored!r}, and model.lora.{field} is {expected!r}")
    named = first_problems(problems) or first_problems(*_wrong_tensors(folder, shapes))
    if named:
        raise ValueError(
            f"model.lora.path = {folder} does not hold this run's adapters; change model.lora, or give another folder:\n"
            f"  {named}"
        )


def load_adapters(folder: Path, layout: ShardLayout, params: Mapping[str, Tensor]) -> None:
    with torch.no_grad(), open_safetensors(folder / _PEFT_WEIGHTS) as handle:
        for shard in layout.shards:
            params[shard.param][shard.param_box.slices].copy_(handle.get_slice(PEFT_PREFIX + shard.tensor)[shard.box.slices])


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / _PEFT_CONFIG
    if not path.is_file() or not (folder / _PEFT_WEIGHTS).is_file():
        raise ValueError(
            f"model.lora.path = {folder} has no {_PEFT_CONFIG} and {_PEFT_WEIGHTS}; give a folder that PEFT has saved"
        )
    try:
        config = parse_json(path.read_bytes(), path.name, dict)
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); save or copy the adapters again") from None
    return {name: value for name, value in config.items() if value is not None}  # null switches a feature off


def _wrong_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[list[str], list[str], list[str]]:
    with open_safetensors(folder / _PEFT_WEIGHTS) as handle:
        stored = {key: tuple(handle.get_slice(key).get_shape()) for key in handle.keys()}  # noqa: SIM118
    expected = {PEFT_PREFIX + name: shape for name, shape in shapes.items()}
    missing = [f"missing: {name}" for name in expected if name not in stored]
    unexpected = [f"not of this model, or not in model.lora.target_modules: {name}" for name in stored if name not in expected]
    misshapen = [
        f"misshapen: {name} is {stored[name]}, and this model needs {shape}"
        for name, shape in expected.items()
        if name in stored and stored[name] != shape
    ]
    return missing, unexpected, misshapen

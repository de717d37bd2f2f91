"""Weights on disk: Hugging Face folders of safetensors, read by the box and written by the tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tepo_megatron.types import ShardLayout

SHARD_BYTES = 4 * 2**30
"""Size at which an exported file is closed and the next one begun."""

TOKENIZER_FILES = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


def load_into(folder: Path, layout: ShardLayout, params: Mapping[str, Tensor]) -> None:
    """Copies this rank's boxes of the folder's tensors into its parameters, in place; every rank reads only its own bytes.

    Rows of a parameter that no tensor covers (padding of the vocabulary) become zero. Raises ValueError, before anything is
    written, that names every missing, unexpected and misshapen tensor at once, or the damaged file.
    """
    where = _index(folder)
    _check_against(folder, where, layout)
    with torch.no_grad():
        for param in {shard.param for shard in layout.shards}:
            params[param].zero_()
        by_file: dict[str, list[int]] = {}
        for at, shard in enumerate(layout.shards):
            by_file.setdefault(where[shard.tensor], []).append(at)
        for file, members in by_file.items():
            with open_safetensors(folder / file) as handle:
                for at in members:
                    shard = layout.shards[at]
                    part = handle.get_slice(shard.tensor)[shard.box.slices]
                    params[shard.param][shard.at.slices].copy_(part)


def _index(folder: Path) -> dict[str, str]:
    """Tensor name → file name."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            return dict(json.loads(index.read_text())["weight_map"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is damaged ({error}); export or download the model again") from None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no *.safetensors; give a Hugging Face model folder with its weights")
    names: dict[str, str] = {}
    for path in files:
        with open_safetensors(path) as handle:
            names.update(dict.fromkeys(handle.keys(), path.name))
    return names


@contextmanager
def open_safetensors(path: Path) -> Iterator[safe_open]:
    """``safe_open`` whose errors are ValueErrors that name the file and say what to do."""
    try:
        with safe_open(path, framework="pt") as handle:
            yield handle
    except FileNotFoundError:
        raise ValueError(f"{path} is named by the index but is not there; the model folder is incomplete") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); copy or download it again") from None


def _check_against(folder: Path, where: Mapping[str, str], layout: ShardLayout) -> None:
    problems = [f"missing: {name}" for name in layout.shapes if name not in where]
    # Old exports keep RoPE's constants as buffers, and a tied head as a copy; both are derived, not weights of their own.
    derived = {name for name in where if name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"}
    problems += [f"unexpected: {name}" for name in where if name not in layout.shapes and name not in derived]
    for file in sorted(set(where.values())):
        with open_safetensors(folder / file) as handle:
            for name in handle.keys():  # noqa: SIM118 (safe_open has keys() but is no mapping)
                expected = layout.shapes.get(name)
                found = tuple(handle.get_slice(name).get_shape())
                if expected is not None and found != tuple(expected):
                    problems.append(f"misshapen: {name} is {found}, config.json makes it {tuple(expected)}")
    if problems:
        raise ValueError(f"{folder} does not hold the model that its config.json describes:\n  " + "\n  ".join(problems))


def write_model(
    out: Path, tensors: Iterable[tuple[str, Tensor]], *, source: Path, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes a Hugging Face folder from a stream of full tensors, with config and tokenizer copied from ``source``.

    One process calls. At most ``shard_bytes`` are held at a time. The folder is written beside its place and moved there
    whole, so that a folder at ``out`` is always complete; one that was there before is replaced.
    """
    with atomic_folder(out) as partial:
        config = json.loads((source / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name in TOKENIZER_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, partial / name)
        cast = ((name, tensor.to(dtype)) for name, tensor in tensors)
        _name_as_hugging_face(partial, write_stream(partial, "part", cast, shard_bytes=shard_bytes))


def write_stream(
    folder: Path, stem: str, tensors: Iterable[tuple[str, Tensor]], *, shard_bytes: int = SHARD_BYTES
) -> list[tuple[Path, dict[str, int]]]:
    """Writes tensors as they come into ``stem-00001.safetensors`` and so on, holding at most ``shard_bytes`` (or one tensor).

    Returns each file with the bytes of each tensor in it.
    """
    written: list[tuple[Path, dict[str, int]]] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        if held:
            path = folder / f"{stem}-{len(written) + 1:05d}.safetensors"
            save_file(held, path, metadata={"format": "pt"})
            path.chmod(0o644)
            written.append((path, {name: tensor.nbytes for name, tensor in held.items()}))
            held.clear()

    for name, tensor in tensors:
        if sum(kept.nbytes for kept in held.values()) + tensor.nbytes > shard_bytes:
            flush()
        held[name] = tensor.detach().cpu().contiguous()
    flush()
    return written


def _name_as_hugging_face(folder: Path, written: list[tuple[Path, dict[str, int]]]) -> None:
    """``model.safetensors``, or numbered parts with an index."""
    if len(written) == 1:
        written[0][0].rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, (path, sizes) in enumerate(written, 1):
        name = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        path.rename(folder / name)
        weight_map.update(dict.fromkeys(sizes, name))
    total = sum(sum(sizes.values()) for _, sizes in written)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, moved to ``out`` if the block ends well and removed if it does not."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)

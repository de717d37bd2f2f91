"""Loads a rank's boxes from a folder of weights, and writes Hugging Face folders tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tepo_megatron.weights.families import kept_in_fp32
from tepo_megatron.weights.geometry import ShardLayout
from tepo_megatron.weights.storage.stored import open_weights

SHARD_BYTES = 4 * 2**30
"""Size in bytes at which an exported file is closed and the next one begun."""

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
    """Copies this rank's boxes of a folder's tensors into its parameters, in place; every rank reads only its own bytes.

    ``folder`` is a Hugging Face folder or one of ``tepo import``. Rows of a parameter that no tensor covers (padding of the
    vocabulary) become zero. Raises ValueError, before anything is written, that names every missing, unexpected and misshapen
    tensor at once, or the damaged file.
    """
    weights = open_weights(folder)
    weights.check(layout.shapes)
    with torch.no_grad():
        for param in {shard.param for shard in layout.shards}:
            params[param].zero_()
        for shard in layout.shards:
            weights.read(shard.tensor, shard.box, params[shard.param][shard.at.slices])


def write_model(
    out: Path, tensors: Iterable[tuple[str, Tensor]], *, source: Path, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes a Hugging Face folder from a stream of full tensors, with config and tokenizer copied from ``source``.

    One process calls. At most ``shard_bytes`` are held at a time. The folder is written beside its place and moved there
    whole, so that a folder at ``out`` is always complete; one that was there before is replaced. RuntimeError where a file
    cannot be written.
    """
    with atomic_folder(out) as partial:
        copy_description(source, partial, dtype)
        cast = ((name, tensor.to(torch.float32 if kept_in_fp32(name) else dtype)) for name, tensor in tensors)
        _name_as_hugging_face(partial, write_stream(partial, "part", cast, shard_bytes=shard_bytes))


def copy_description(source: Path, out: Path, dtype: torch.dtype | None) -> None:
    """Copies config and tokenizer; the config names ``dtype``, or the source's own for None."""
    config = json.loads((source / "config.json").read_text())
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)


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
            try:
                save_file(held, path, metadata={"format": "pt"})
            except (OSError, SafetensorError) as error:  # of its own kind, also for what the system says
                raise RuntimeError(
                    f"{path} could not be written: {error}; {shutil.disk_usage(folder).free:,} bytes are free. Nothing was "
                    "replaced. Make room, and do it again (a run goes on with --resume)"
                ) from error
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
    """Renames one file to ``model.safetensors``, or several to numbered names, with an index."""
    for number, (path, _) in enumerate(written, 1):
        path.rename(folder / model_file_name(number, len(written)))
    write_index(folder, [sizes for _, sizes in written])


def model_file_name(number: int, count: int) -> str:
    """Returns Hugging Face's name of file ``number`` (from 1) of ``count``."""
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, files: Sequence[Mapping[str, int]]) -> None:
    """Writes the index of several files, given the bytes of each tensor in each; a single file has no index."""
    if len(files) == 1:
        return
    weight_map = {name: model_file_name(number, len(files)) for number, sizes in enumerate(files, 1) for name in sizes}
    index = {"metadata": {"total_size": sum(sum(sizes.values()) for sizes in files)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Yields a folder to write into, which is renamed to ``out`` if the block succeeds, and removed if it raises."""
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

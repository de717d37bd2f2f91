from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from tepo_megatron.runtime.hub import HUB, hub_folder
from tepo_megatron.runtime.text import parse_json
from tepo_megatron.runtime.user_code import unknown
from tepo_megatron.weights.storage.manifest import model_files

_BUILTIN = "builtin:"


def resolve_model_path(source: str) -> Path:
    """Takes a folder, ``hub:ORGANISATION/NAME`` or ``builtin:NAME``. Raises ValueError with all faults."""
    if source.startswith(HUB):
        folder = hub_folder(source, "model")
    elif source.startswith(_BUILTIN):
        folder = _builtin_folder(source.removeprefix(_BUILTIN))
    else:
        folder = Path(source).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"the model folder {source} does not exist; give a Hugging Face folder on this machine, hub:ORGANISATION/NAME, "
            "which is downloaded, or builtin:tiny"
        )
    if wrong := list(_faults(folder)):
        raise ValueError(f"the model folder {source} cannot be used: {'; '.join(wrong)}")
    return folder


def _builtin_folder(name: str) -> Path:
    root = Path(str(files("tepo_megatron.tasks.data").joinpath("builtin")))
    known = sorted(folder.name for folder in root.iterdir() if folder.is_dir())
    if name not in known:
        raise unknown("built-in model", name, known, prefix=_BUILTIN)
    return root / name


def _faults(folder: Path) -> Iterator[str]:
    if not (folder / "config.json").is_file():
        yield "it has no config.json"
    else:
        try:
            parse_json((folder / "config.json").read_bytes(), "it", dict)
        except ValueError as error:
            yield f"its config.json is damaged ({error})"
    yield from _weight_faults(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.model", "tokenizer.json", "vocab.json")):
        yield "it has no tokenizer (tokenizer.model or tokenizer.json)"


def _weight_faults(folder: Path) -> Iterator[str]:
    from safetensors import SafetensorError, safe_open

    try:
        names = model_files(folder)
    except ValueError as error:
        yield f"its model.safetensors.index.json is damaged ({error})"
        return
    if missing := [name for name in names if not (folder / name).exists()]:
        yield f"{len(missing)} of {len(names)} weight files are missing ({', '.join(missing[:3])})"
        return
    if not names:
        yield "it has no weights (*.safetensors)"
    for name in names:
        try:
            with safe_open(str(folder / name), framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            yield f"its {name} is damaged ({error})"

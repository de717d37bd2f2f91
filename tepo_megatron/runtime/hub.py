"""Folders of the Hugging Face hub: ``hub:ORGANISATION/NAME``, of data also with ``/FOLDER``; ``@REVISION`` if not main."""

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

from tepo_megatron.errors import describe

HUB = "hub:"
_FILES = {
    "model": ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"),
    "dataset": ("*.jsonl", "*.json", "*.parquet", "*.csv", "*.tsv"),
}
_OTHER_FORMATS = ["*/*", "consolidated*"]
_Kind = Literal["model", "dataset"]
_NAME = r"[\w-][\w.-]*"


def split_source(source: str) -> tuple[str, str]:
    """Returns the name, and the revision or ""."""
    name, _, revision = source.removeprefix(HUB).partition("@")
    return name, revision


def download_advice(source: str, kind: _Kind, where: str) -> str:
    name, revision = split_source(source)
    organisation, _, rest = name.partition("/")
    repository, slash, below = rest.partition("/")
    options = " --repo-type dataset" * (kind == "dataset") + f" --revision {revision}" * bool(revision)
    return f"run 'hf download {organisation}/{repository}{options} --local-dir FOLDER' {where}, and name FOLDER{slash}{below}"


def hub_folder(source: str, kind: _Kind, *, files: Sequence[str] = ()) -> Path:
    """Downloads ``files`` (default: all that are used) that the hub's cache lacks; a rank takes what its launcher has
    downloaded. Raises ValueError.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

    name, revision = split_source(source)
    match = re.fullmatch(rf"({_NAME}/{_NAME})((?:/{_NAME})*)", name)
    if match is None or (match[2] and kind == "model"):
        raise ValueError(f"{source!r} names nothing on the Hugging Face hub; write hub:ORGANISATION/NAME, or a folder's path")
    repository, below = match[1], match[2].removeprefix("/")
    in_rank = "RANK" in os.environ
    try:
        folder = snapshot_download(
            repository,
            repo_type=kind,
            revision=revision or None,
            allow_patterns=[str(PurePosixPath(below, file)) for file in files or _FILES[kind]],
            ignore_patterns=_OTHER_FORMATS if kind == "model" else None,
            local_files_only=in_rank,
        )
    except GatedRepoError as error:
        raise ValueError(
            f"{source} is gated: accept its terms on the hub, and log in with 'hf auth login', or set HF_TOKEN"
        ) from error
    except LocalEntryNotFoundError as error:
        why = "a rank downloads nothing" if in_rank else "the hub cannot be reached from here"
        raise ValueError(
            f"{source} is not in this machine's cache, and {why}; {download_advice(source, kind, 'where the hub is')}"
        ) from error
    except Exception as error:  # those of the hub, of its HTTP library, and of the disk
        said = " ".join(describe(error).split())[:300]
        raise ValueError(f"{source} cannot be downloaded from the Hugging Face hub: {said}") from error
    return Path(folder, below)

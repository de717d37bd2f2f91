"""Finds the source of an older version of this project."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def own_root() -> Path:
    return Path(__file__).parents[4]


@contextmanager
def source_of(state: str) -> Iterator[Path | None]:
    """A folder with the package as of ``state``, a folder or a git revision (extracted to a temporary folder); None for
    ``none``.

    Raises ValueError for a missing folder or revision.
    """
    if state == "none":
        yield None
    elif Path(state).is_dir():
        if not (Path(state) / "tepo_megatron" / "__init__.py").is_file():
            raise ValueError(f"--before {state} has no package tepo_megatron; give the root of a checkout")
        yield Path(state).resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="tepo-before-") as folder:
            with tarfile.open(fileobj=io.BytesIO(_archive(state))) as files:
                files.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and later have it
                files.extractall(folder)  # noqa: S202  # our own checkout's files
            yield Path(folder)


def _archive(revision: str) -> bytes:
    command = ["git", "-C", str(own_root()), "archive", "--format=tar", revision, "tepo_megatron"]
    try:
        result = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        raise ValueError(f"--before {revision} is no folder, and there is no git here; give a folder, or none") from None
    if result.returncode:
        raise ValueError(
            f"--before {revision} is neither a folder nor a revision that git finds in {own_root()} "
            f"({result.stderr.decode().strip().splitlines()[-1]}); give another, or --before none"
        )
    return result.stdout

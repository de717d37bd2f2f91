"""``tepo data prepare`` converts published benchmark files to problems, with checked digests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from tepo_megatron.runtime.files import write_atomically
from tepo_megatron.tasks.data.benchmarks.registry import BENCHMARKS, Benchmark, as_lines, convert, find_benchmark
from tepo_megatron.tasks.data.rows import file_digest, read_rows

LOCK = "digests.json"

SETS = "benchmarks.yaml"


@dataclass(frozen=True)
class Prepared:
    """``recorded``: its source's digest was unknown before and is recorded now."""

    name: str
    path: Path
    problems: int
    source: Path
    source_sha256: str
    recorded: bool


def prepare(
    name: str, folder: Path, *, source: Path | None = None, family: str | None = None, accept_changed: bool = False
) -> Prepared:
    """``source``: the published file or a folder with it; None: download the pinned revision from the Hugging Face hub.
    ``family``: whose prompts are used (``templates.yaml``); None: as before, or ``instruct``. ``accept_changed``: record a
    file with another digest.

    Raises ValueError: an unknown benchmark or family; a file that cannot be downloaded or read; an unexpected digest or number
    of problems.
    """
    benchmark = find_benchmark(name)
    families = templates()
    if family is not None and family not in families:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(families)}")
    path = _fetch(benchmark) if source is None else _find(benchmark, source)
    digest = file_digest(path)
    lock = _read_lock(folder)
    expected = lock.get(name, {}).get("sha256") or benchmark.sha256
    if expected is not None and digest != expected and not accept_changed:
        whence = f"recorded in {folder / LOCK}" if name in lock else f"of {benchmark.repository} at {benchmark.revision[:12]}"
        raise ValueError(
            f"{path} has the SHA-256 {digest}, but {expected} is {whence}: another file, of which figures are not comparable; "
            "give that one, or take this one from now on (--accept-changed)"
        )
    rows = list(read_rows(path))
    try:
        problems = convert(name, benchmark, (row.values() for row in rows))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if len(problems) != benchmark.problems and not accept_changed:
        raise ValueError(
            f"{path} has {len(problems)} problems, and {benchmark.title} has {benchmark.problems}; give the whole file, or "
            "take this one (--accept-changed)"
        )
    family = family or lock.get(name, {}).get("family") or "instruct"
    content = as_lines(problems)
    target = folder / f"{name}.jsonl"
    lock[name] = {
        "title": benchmark.title,
        "repository": benchmark.repository,
        "revision": benchmark.revision if source is None else None,
        "file": benchmark.file,
        "sha256": digest,
        "problems": len(problems),
        "prepared_sha256": sha256(content).hexdigest(),
        "family": family,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(target, content)
    write_atomically(folder / LOCK, (json.dumps(lock, indent=2, sort_keys=True) + "\n").encode())
    write_atomically(folder / SETS, sets_yaml(folder, lock).encode())
    return Prepared(name, target, len(problems), path, digest, recorded=expected is None)


def sets_yaml(folder: Path, lock: Mapping[str, Mapping[str, Any]]) -> str:
    sets = {}
    for name in (known for known in BENCHMARKS if known in lock):
        benchmark, entry = BENCHMARKS[name], lock[name]
        value = templates()[entry["family"]]
        sets[name] = {
            "path": str((folder / f"{name}.jsonl").absolute()),
            "sha256": entry["prepared_sha256"],
            "verifier": benchmark.verifier,
            "samples": benchmark.samples,
            **value.get(benchmark.prompts, {}),
            **value.get(name, {}),
        }
    head = "# Written by tepo data prepare: tepo eval MODEL --run benchmarks.yaml, or base: benchmarks.yaml in a run.\n"
    return head + yaml.safe_dump({"data": {"heldout": None}, "evaluate": {"sets": sets}}, sort_keys=False, allow_unicode=True)


@cache
def templates() -> Mapping[str, Mapping[str, Any]]:
    """Model family → fields of an evaluation set, for benchmarks of answers (``all``), of programs (``code``), or one name."""
    text = files("tepo_megatron.tasks.data.benchmarks").joinpath("templates.yaml").read_text(encoding="utf-8")
    result: Mapping[str, Mapping[str, Any]] = yaml.safe_load(text)
    return result


def _read_lock(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / LOCK
    if not path.is_file():
        return {}
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): dict(entry) for name, entry in result.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}; restore it, or prepare into another folder") from error


def _fetch(benchmark: Benchmark) -> Path:
    try:
        return _download(benchmark)
    except Exception as error:  # errors of the hub, the network or a missing package
        why = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ValueError(
            f"{benchmark.repository} {benchmark.file} cannot be fetched: {why}; fetch it where there is a network (hf download "
            f"{benchmark.repository} {benchmark.file} --repo-type dataset --revision {benchmark.revision} --local-dir FOLDER), "
            "and give --from FOLDER"
        ) from error


def _download(benchmark: Benchmark) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(benchmark.repository, benchmark.file, repo_type="dataset", revision=benchmark.revision))


def _find(benchmark: Benchmark, source: Path) -> Path:
    candidates: Sequence[Path] = [source] if source.is_file() else [source / benchmark.file, source / Path(benchmark.file).name]
    for path in candidates:
        if path.is_file():
            return path
    raise ValueError(
        f"{source} has no {benchmark.file} of {benchmark.repository}; give the file itself, or the folder that "
        f"'hf download {benchmark.repository} --repo-type dataset --local-dir' has made"
    )

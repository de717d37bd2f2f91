"""``tepo checkpoint``: what checkpoints a run has, whether they are whole, and which to delete. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from time import time
from typing import Annotated, Any

import typer

from tepo_megatron.cli.console import show_table
from tepo_megatron.cli.errors import user_errors
from tepo_megatron.cli.options import AsJson

app = typer.Typer(no_args_is_help=True, help="A run's checkpoints: list them, read them through, make room.")

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A run's output folder, or its checkpoints folder.")]

_SETTLED_S = 60.0
"""Seconds without a change after which an unfinished checkpoint is taken for one that nobody is writing."""


@app.callback()
def _group() -> None:
    """A run's checkpoints: list them, read them through, make room."""


@app.command("list")
def list_command(folder: Folder, as_json: AsJson = False) -> None:
    """Print a run's checkpoints: step, age, size, layout, and whether their files are all there.

    It is quick, since no shard is read. What saves that were cut off have left is listed too.

    [dim]tepo checkpoint list out/tiny[/]
    """
    from tepo_megatron.trainer.checkpoints.folder import checkpoints, leftovers

    with user_errors():
        parent = _parent(folder)
        rows = [_row(path) for path in checkpoints(parent)]
        rows += [[path.name, "", _age(path), _size(_bytes_below(path)), "", "no checkpoint"] for path in leftovers(parent)]
        if not rows:
            raise ValueError(f"{parent} has no checkpoint")
        show_table(["checkpoint", "updates", "written", "size", "tp × pp × dp", "state"], rows, as_json=as_json)


@app.command("verify")
def verify_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run's output folder, or one checkpoint.")],
    as_json: AsJson = False,
) -> None:
    """Read every byte of a run's checkpoints and compare it with the digests that were written; exit code 1 if any differs.

    [dim]tepo checkpoint verify out/tiny[/]

    [dim]tepo checkpoint verify out/tiny/checkpoints/step_000040[/]
    """
    from tepo_megatron.trainer.checkpoints.folder import checkpoints

    with user_errors():
        one = folder.name.startswith("step_") and folder.is_dir()
        chosen = [folder] if one else checkpoints(_parent(folder))
        if not chosen:
            raise ValueError(f"{_parent(folder)} has no checkpoint")
        rows, whole = [], True
        for path in chosen:
            found, problems = _verify(path)
            whole = whole and not problems
            rows += [[path.name, problem] for problem in problems] or [[path.name, found]]
        show_table(["checkpoint", "found"], rows, as_json=as_json)
    raise typer.Exit(0 if whole else 1)


@app.command("prune")
def prune_command(
    folder: Folder,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Keep so many of the newest whole checkpoints.")] = 2,
    every: Annotated[int, typer.Option("--every", min=0, help="Also keep those of steps that are multiples of this.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted; delete nothing.")] = False,
) -> None:
    """Delete older checkpoints, and what saves that were cut off have left. A damaged one is not counted, and stays.

    The newest ones, which are kept, are read to the last byte first: the only whole one is never deleted for a damaged one.

    An unfinished checkpoint that changed within the last minute stays too: a run may be writing it.

    [dim]tepo checkpoint prune out/tiny --keep 1 --dry-run[/]

    [dim]tepo checkpoint prune out/tiny --keep 2 --every 1000[/]
    """
    from tepo_megatron.trainer.checkpoints.folder import checkpoints, leftovers, remove, retained, step_of

    with user_errors():
        parent = _parent(folder)
        whole: dict[int, Path] = {}
        damaged: list[str] = []
        for path in reversed(checkpoints(parent)):
            damage = _damage(path, thoroughly=len(whole) < keep)
            if damage is None:
                whole[step_of(path)] = path
            else:
                damaged.append(damage)
        kept = retained(whole, newest=keep, every=every)
        busy = [path for path in leftovers(parent) if ".partial" in path.name and time() - _changed(path) < _SETTLED_S]
        doomed = [path for path in leftovers(parent) if path not in busy]
        doomed += [path for step, path in whole.items() if step not in kept]
        freed, failed = 0, []
        for path in doomed:
            size = _bytes_below(path)
            failure = None if dry_run else remove(path)
            if failure is None:
                freed += size
                typer.echo(f"{'would delete' if dry_run else 'deleted'} {path} ({_size(size)})")
            else:
                failed.append(failure)
        for path in busy:
            typer.echo(f"left {path}, which changed within the last minute: a run may be writing it")
        for damage in reversed(damaged):
            typer.echo(f"left: {damage}")
        typer.echo(f"{_size(freed)} {'would be ' if dry_run else ''}freed; {len(kept)} checkpoints kept")
        if failed:
            raise RuntimeError("; ".join(failed))


def _parent(folder: Path) -> Path:
    from tepo_megatron.trainer.checkpoints.folder import checkpoints_in

    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give a run's output folder")
    return checkpoints_in(folder)


def _row(path: Path) -> list[str]:
    from tepo_megatron.trainer.checkpoints.folder import manifest_of, read_state
    from tepo_megatron.weights.storage.manifest import DamagedCheckpoint

    size = _size(_bytes_below(path))
    try:
        state = read_state(path)
        condition = "files are there" if manifest_of(path) is not None else "first format, without digests"
    except DamagedCheckpoint as error:
        return [path.name, "", _age(path), size, "", f"damaged: {'; '.join(error.problems)}"]
    return [path.name, str(state["updates"]), _age(path), size, _layout(state), condition]


def _layout(state: dict[str, Any]) -> str:
    if "identity" not in state:
        return ""
    parallel = state["identity"]["config"]["engine"]["parallel"]
    return " × ".join(str(parallel[name]) for name in ("tp", "pp", "dp"))


def _verify(path: Path) -> tuple[str, tuple[str, ...]]:
    """What was found, and what is wrong."""
    from tepo_megatron.trainer.checkpoints.folder import manifest_of
    from tepo_megatron.weights.storage.manifest import DamagedCheckpoint, check_whole

    try:
        if manifest_of(path) is None:
            return "first format: it has no digests to compare with", ()
        manifest = check_whole(path)
    except DamagedCheckpoint as error:
        return "", error.problems
    return f"whole: {len(manifest.files)} files, {_size(manifest.bytes)}", ()


def _damage(path: Path, *, thoroughly: bool) -> str | None:
    """What is wrong with a checkpoint, if anything; ``thoroughly``: its shards are read too."""
    from tepo_megatron.trainer.checkpoints.folder import manifest_of
    from tepo_megatron.weights.storage.manifest import DamagedCheckpoint, check_whole

    try:
        if manifest_of(path) is not None and thoroughly:
            check_whole(path)
    except DamagedCheckpoint as error:
        return str(error)
    return None


def _files(path: Path) -> Iterator[Path]:
    return (each for each in path.rglob("*") if each.is_file())


def _bytes_below(path: Path) -> int:
    return sum(each.stat().st_size for each in _files(path))


def _changed(path: Path) -> float:
    """When a folder or anything in it last changed, in seconds since 1970."""
    return max(each.stat().st_mtime for each in [path, *path.rglob("*")])


def _age(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"

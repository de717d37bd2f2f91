"""``tepo checkpoint``, ``tepo import`` and ``tepo export``. Listing and deleting checkpoints needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from time import time
from typing import Annotated, Any

import typer

from tepo_megatron.cli.console import show_table, user_errors
from tepo_megatron.cli.options import AsJson

app = typer.Typer(no_args_is_help=True, help="A run's checkpoints: list them, read them through, make room.")

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A run's output folder, or its checkpoints folder.")]

_SETTLED_S = 60.0
"""Seconds without a change after which an unfinished checkpoint counts as abandoned."""


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
            result, problems = _verify(path)
            whole = whole and not problems
            rows += [[path.name, problem] for problem in problems] or [[path.name, result]]
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
    """(findings, damage), in words."""
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
    """Damage of a checkpoint, if any; ``thoroughly`` also reads its shards."""
    from tepo_megatron.trainer.checkpoints.folder import manifest_of
    from tepo_megatron.weights.storage.manifest import DamagedCheckpoint, check_whole

    try:
        if manifest_of(path) is not None and thoroughly:
            check_whole(path)
    except DamagedCheckpoint as error:
        return str(error)
    return None


def _files(path: Path) -> Iterator[Path]:
    return (item for item in path.rglob("*") if item.is_file())


def _bytes_below(path: Path) -> int:
    return sum(item.stat().st_size for item in _files(path))


def _changed(path: Path) -> float:
    """Time of the last change in a folder, in seconds since 1970."""
    return max(item.stat().st_mtime for item in [path, *path.rglob("*")])


def _age(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


class _Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def import_command(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="A Hugging Face folder: config.json and safetensors.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make; give it to a run as model.shards.")],
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel size of the run.")] = 1,
    pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline-parallel size of the run.")] = 1,
    vpp: Annotated[int, typer.Option("--vpp", min=1, help="Virtual stages per rank of the run.")] = 1,
    first_layers: Annotated[int | None, typer.Option(min=1, help="Layers of the first stage, if not as the others'.")] = None,
    last_layers: Annotated[int | None, typer.Option(min=1, help="The same of the last stage.")] = None,
) -> None:
    """Cut a model's weights into files per rank, so that the ranks of a cluster do not all read the same big files.

    After an interruption the same command continues where it stopped.

    [dim]tepo import models/llama-8b shards/llama-8b-tp4 --tp 4[/]

    [dim]tepo train run.yaml model.path=models/llama-8b model.shards=shards/llama-8b-tp4 engine.parallel.tp=4[/]
    """
    from tepo_megatron.weights.storage.convert import import_model

    with user_errors(), _progress(f"import {source}") as report:
        import_model(source, out, tp=tp, pp=pp, vpp=vpp, first_layers=first_layers, last_layers=last_layers, report=report)
    typer.echo(f"wrote {out}")


def export_command(
    source: Annotated[Path, typer.Argument(metavar="CKPT", help="A checkpoint, step_XXXXXX, saved under any layout.")],
    out: Annotated[Path, typer.Argument(metavar="OUT_HF_DIR", help="The Hugging Face folder to make.")],
    model: Annotated[
        Path | None, typer.Option("--model", metavar="HF_DIR", help="Config and tokenizer; default: what was trained.")
    ] = None,
    dtype: Annotated[_Dtype | None, typer.Option("--dtype", help="Of the weights; default: what the config says.")] = None,
) -> None:
    """Make a Hugging Face folder of a checkpoint, to evaluate, serve or share it.

    After an interruption the same command continues where it stopped.

    [dim]tepo export out/tiny/checkpoints/step_000100 out/tiny-100[/]

    [dim]tepo export out/tiny/checkpoints/step_000100 out/tiny-bf16 --dtype bfloat16[/]
    """
    import torch

    from tepo_megatron.weights.storage.convert import export_model

    kept: torch.dtype | None = getattr(torch, dtype.value) if dtype else None
    with user_errors(), _progress(f"export {source}") as report:
        export_model(source, out, model=model, dtype=kept, report=report)
    typer.echo(f"wrote {out}")


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(escape(title), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

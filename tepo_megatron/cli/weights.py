from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from tepo_megatron.cli.console import AsJson, show, show_table
from tepo_megatron.runtime.run_lock import RunLock
from tepo_megatron.runtime.text import echo
from tepo_megatron.trainer.checkpoint_folder import checkpoints, leftovers, read_state, remove, retained, step_of
from tepo_megatron.weights.storage.manifest import CheckpointManifest, DamagedCheckpoint

app = typer.Typer()
checkpoint_app = typer.Typer()

_Folder = Annotated[Path, Argument(metavar="FOLDER", help="A run's output folder, or its checkpoints folder.")]

_SETTLED_S = 60.0  # seconds without a change after which an unfinished checkpoint counts as abandoned


def _is_held(output: Path) -> bool:
    """An unfinished checkpoint of a run may rest for minutes: it gets its name after the next step."""
    try:
        RunLock.check_free(output)
    except ValueError:
        return True
    return False


@checkpoint_app.command("list")
def _list_command(folder: _Folder, as_json: AsJson = False) -> None:
    """Print a run's checkpoints: step, age, size, layout, and whether their files are all there.

    Reads no shard, so it is quick. Also lists the remains of interrupted saves.

    [dim]tepo checkpoint list out/tiny[/]
    """
    parent = _parent(folder)
    rows = [_row(path) for path in checkpoints(parent)]
    rows += [[path.name, "", _age(path), _size(_bytes_below(path)), "", "no checkpoint"] for path in leftovers(parent)]
    if not rows:
        raise ValueError(f"{parent} has no checkpoint")
    show_table(["checkpoint", "updates", "written", "size", "tp × pp × dp", "state"], rows, as_json=as_json)


@checkpoint_app.command("verify")
def _verify_command(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="A run's output folder, or one checkpoint.")],
    as_json: AsJson = False,
) -> None:
    """Read every byte of a run's checkpoints and compare it with the written digests; exit code 1 if any differs.

    [dim]tepo checkpoint verify out/tiny/checkpoints/step_000040[/]
    """
    one = folder.name.startswith("step_") and folder.is_dir() and not (folder / "checkpoints").is_dir()
    chosen = [folder] if one else checkpoints(_parent(folder))
    if not chosen:
        raise ValueError(f"{_parent(folder)} has no checkpoint")
    rows, whole = [], True
    for path in chosen:
        try:
            manifest = _check(path)
            state = "first format: it has no digests to compare with"
            if manifest is not None:
                state = f"whole: {len(manifest.files)} files, {_size(manifest.bytes)}"
            rows.append([path.name, state])
        except DamagedCheckpoint as error:
            whole = False
            rows += [[path.name, problem] for problem in error.problems]
    show_table(["checkpoint", "found"], rows, as_json=as_json)
    raise typer.Exit(0 if whole else 1)


@checkpoint_app.command("prune")
def _prune_command(
    folder: _Folder,
    keep: Annotated[int, Option(min=1, help="Keep so many of the newest whole checkpoints.")] = 2,
    every: Annotated[
        int | None, Option(min=0, help="Also keep those of steps that are multiples of this; default: train.keep_every.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Say what would be deleted; delete nothing.")] = False,
) -> None:
    """Delete older checkpoints, and the remains of interrupted saves. A damaged one and the best by train.keep_best stay.

    Checks every byte of the newest first: the only whole checkpoint is never deleted for a damaged one.

    An unfinished checkpoint stays too while a run holds the folder, or if it changed within the last minute.

    [dim]tepo checkpoint prune out/tiny --keep 1 --dry-run[/]

    [dim]tepo checkpoint prune out/tiny --keep 2 --every 1000[/]
    """
    parent = _parent(folder)
    if parent != folder and parent.is_symlink():
        raise ValueError(f"{parent} is a link; give {parent.resolve()} itself if its checkpoints may be deleted")
    whole: dict[int, Path] = {}
    damaged: list[str] = []
    for path in reversed(checkpoints(parent)):
        try:
            _check(path, thoroughly=len(whole) < keep)
            whole[step_of(path)] = path
        except DamagedCheckpoint as error:
            damaged.append(str(error))
    retained_steps = _retained(parent.resolve().parent, whole, keep, every)
    runs = _is_held(parent.resolve().parent)
    left = leftovers(parent)
    busy = [path for path in left if ".partial" in path.name and (runs or time.time() - _changed(path) < _SETTLED_S)]
    doomed = [path for path in left if path not in busy]
    doomed += [path for step, path in whole.items() if step not in retained_steps]
    freed, failed = 0, []
    for path in doomed:
        size = _bytes_below(path)
        failure = None if dry_run and not path.is_symlink() else remove(path)
        if failure is None:
            freed += size
            echo(f"{'would delete' if dry_run else 'deleted'} {path} ({_size(size)})")
        else:
            failed.append(failure)
    for path in busy:
        echo(f"left {path}, which changed within the last minute: a run may be writing it")
    for damage in reversed(damaged):
        echo(f"left: {damage}")
    echo(f"{_size(freed)} {'would be ' if dry_run else ''}freed; {len(retained_steps)} checkpoints kept")
    if failed:
        raise RuntimeError("; ".join(failed))


def _retained(output: Path, steps: Iterable[int], keep: int, every: int | None) -> set[int]:
    from tepo_megatron.config import RunConfig
    from tepo_megatron.config.base import read_yaml
    from tepo_megatron.config.train import TrainConfig

    file, best, train = output / "resolved.yaml", None, TrainConfig()
    if file.is_file():  # of any version, whose plugins may be gone
        written = read_yaml(file)
        if not isinstance(written, dict) or not isinstance(written := written.get("train", {}), dict):
            raise ValueError(f"{file} is no configuration of a run, and says what the run keeps; put it back")
        train = TrainConfig.model_validate({key: written[key] for key in ("keep_best", "keep_every") if key in written})
    if train.keep_best is not None:
        from tepo_megatron.run.output.output import Retention

        if not (output / "metrics.jsonl").is_file():
            raise ValueError(f"{output / 'metrics.jsonl'} is missing, which says what train.keep_best keeps; put it back")
        best = Retention(RunConfig().model_copy(update={"output": output, "train": train}), echo).best(steps)  # it may be moved
    return retained(steps, newest=keep, every=train.keep_every if every is None else every, best=best)


def _parent(folder: Path) -> Path:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give a run's output folder")
    return inner if (inner := folder / "checkpoints").is_dir() else folder


def _row(path: Path) -> list[str]:
    size = _size(_bytes_below(path))
    try:
        state = read_state(path)
        condition = "files are there" if state.get("format") else "first format, without digests"
    except DamagedCheckpoint as error:
        return [path.name, "", _age(path), size, "", f"damaged: {'; '.join(error.problems)}"]
    parallel = state["identity"]["config"]["engine"]["parallel"] if "identity" in state else {}
    layout = " × ".join(str(parallel[name]) for name in ("tp", "pp", "dp") if parallel)
    return [path.name, str(state["updates"]), _age(path), size, layout, condition]


def _check(path: Path, *, thoroughly: bool = True) -> CheckpointManifest | None:
    """``thoroughly`` also reads its shards. None for the first format, without digests. Raises DamagedCheckpoint."""
    if not read_state(path).get("format"):
        return None
    return CheckpointManifest.read_whole(path) if thoroughly else CheckpointManifest.read(path)


def _bytes_below(path: Path) -> int:
    return sum(item.stat().st_size for item in path.rglob("*") if item.is_file())


def _changed(path: Path) -> float:
    return max(item.lstat().st_mtime for item in [path, *path.rglob("*")])


def _age(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")


def _size(count: int) -> str:
    unit, factor = next(((unit, factor) for unit, factor in (("GB", 1e9), ("MB", 1e6)) if count >= factor), ("kB", 1e3))
    return f"{count / factor:.1f} {unit}"


@app.command("import")
def _import_command(
    source: Annotated[Path, Argument(metavar="HF_DIR", help="A Hugging Face folder: config.json and safetensors.")],
    out: Annotated[Path, Argument(metavar="OUT", help="The folder to make; give it to a run as model.shards.")],
    tp: Annotated[int, Option(min=1, help="Tensor-parallel size of the run.")] = 1,
    pp: Annotated[int, Option(min=1, help="Pipeline-parallel size of the run.")] = 1,
    vpp: Annotated[int, Option(min=1, help="Virtual stages per rank of the run.")] = 1,
    first_layers: Annotated[int | None, Option(min=1, help="Layers of the first stage, if not as the others'.")] = None,
    last_layers: Annotated[int | None, Option(min=1, help="The same of the last stage.")] = None,
) -> None:
    """Cut a model's weights into files per rank, so that the ranks of a cluster do not all read the same big files.

    After an interruption the same command continues.

    [dim]tepo import models/llama-8b shards/llama-8b-tp4 --tp 4[/]

    [dim]tepo train run.yaml model.path=models/llama-8b model.shards=shards/llama-8b-tp4 engine.parallel.tp=4[/]
    """
    from tepo_megatron.weights.storage.convert import import_model

    with _progress(f"import {source}") as report:
        import_model(source, out, tp=tp, pp=pp, vpp=vpp, first_layers=first_layers, last_layers=last_layers, report=report)
    echo(f"wrote {out}")


@app.command("export")
def _export_command(
    source: Annotated[Path, Argument(metavar="CKPT", help="A checkpoint, step_XXXXXX, saved under any layout.")],
    out: Annotated[Path, Argument(metavar="OUT_HF_DIR", help="The Hugging Face folder to make.")],
    model: Annotated[Path | None, Option(metavar="HF_DIR", help="Config and tokenizer; default: what was trained.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, Option(help="Of the weights; default: what the config says.")
    ] = None,
) -> None:
    """Make a Hugging Face folder of a checkpoint, to evaluate, serve or share it.

    After an interruption the same command continues.

    [dim]tepo export out/tiny/checkpoints/step_000100 out/tiny-bf16 --dtype bfloat16[/]
    """
    import torch

    from tepo_megatron.weights.storage.convert import export_model

    weights_dtype: torch.dtype | None = getattr(torch, dtype) if dtype else None
    with _progress(f"export {source}") as report:
        export_model(source, out, model=model, dtype=weights_dtype, report=report)
    echo(f"wrote {out}")


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from tepo_megatron.runtime.terminal import Terminal

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Terminal(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(escape(title), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


reshard_app = typer.Typer()


@reshard_app.command("plan")
def _plan_command(
    model: Annotated[str, Argument(metavar="MODEL", help="A folder with config.json (no weights needed), or a known name.")],
    tp: Annotated[int, Option(min=1, help="The trainer's tensor-parallel size.")] = 1,
    pp: Annotated[int, Option(min=1, help="Its pipeline stages.")] = 1,
    vpp: Annotated[int, Option(min=1, help="Model chunks per stage (interleaved pipeline).")] = 1,
    dp: Annotated[int, Option(min=1, help="Its data-parallel copies.")] = 1,
    ep: Annotated[int, Option(min=1, help="Its expert-parallel size.")] = 1,
    etp: Annotated[int | None, Option(min=1, help="Ranks that split each expert, if not tp.")] = None,
    first_layers: Annotated[int | None, Option(min=1, help="Layers of the first stage, if not as the others'.")] = None,
    last_layers: Annotated[int | None, Option(min=1, help="The same of the last stage.")] = None,
    servers: Annotated[int, Option(min=1, help="vLLM servers, each with a whole model.")] = 1,
    server_tp: Annotated[int, Option(min=1, help="A server's tensor-parallel size.")] = 1,
    server_pp: Annotated[int, Option(min=1, help="Its pipeline stages.")] = 1,
    itemsize: Annotated[int, Option(min=1, help="Bytes of a weight on the wire: 2 for bf16.")] = 2,
    shared: Annotated[bool, Option("--shared", help="The servers run on the trainer's GPUs.")] = False,
    gpus_per_node: Annotated[int, Option(min=1, help="GPUs of a node.")] = 8,
    nvlink: Annotated[float, Option(min=1e-3, help="10⁹ bytes/s within a node, per GPU and direction.")] = 450.0,
    network: Annotated[float, Option(min=1e-3, help="The same between nodes; 50 is 400 Gbit/s.")] = 50.0,
    efficiency: Annotated[float, Option(min=1e-3, max=1, help="Which part of these rates is reached.")] = 0.7,
    save: Annotated[Path | None, Option(metavar="FILE", help="Write the plan itself, as JSON.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print for tools.")] = False,
) -> None:
    """Print the bytes that a weight sync puts on each kind of link, and a lower bound of its time.

    [dim]tepo reshard plan Llama-3.3-70B-Instruct --tp 8 --pp 4 --vpp 5 --servers 4 --server-tp 8[/]
    """
    from tepo_megatron.plan.shapes import resolve_spec
    from tepo_megatron.plan.time import Links
    from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel, pipeline_stages
    from tepo_megatron.weights.reshard import reshard_plan
    from tepo_megatron.weights.transfer.move import count_messages
    from tepo_megatron.weights.transfer.transports import find_transport

    spec, assumption = resolve_spec(model)
    stages = pipeline_stages(spec.num_layers, pp, chunks=vpp, first=first_layers, last=last_layers)
    links = Links(gpus_per_node, nvlink * efficiency, network * efficiency, shared)
    source = MegatronParallel(tp, pp, dp, stages, ep=ep, etp=etp)
    destination = VllmParallel(server_tp, server_pp, servers)
    started = time.perf_counter()
    plan = reshard_plan(spec, source, destination, links.local(source.world_size, destination.world_size))
    built = time.perf_counter() - started
    summary = links.summarize(plan, itemsize, built_in_seconds=built)
    worker = plan.num_sources
    messages = {name: count_messages(plan, worker, itemsize, find_transport(name)) for name in ("gloo", "nccl")}
    if save is not None:
        save.write_text(json.dumps(asdict(plan)) + "\n")
    if as_json:
        echo(json.dumps({**asdict(summary), "messages_and_rounds": messages}))
        return
    named = {"device": "within a GPU", "nvlink": "within a node", "network": "between nodes"}
    rows = []
    for link in summary.links:
        sizes = [f"{size / 1e9:,.2f}" for size in (link.total, link.busiest_sender, link.busiest_receiver)]
        rows.append([named[link.link], str(link.pairs), *sizes, f"{link.seconds:.3f}"])
    show_table(["link", "pairs", "GB in all", "GB sent by one GPU", "GB received by one GPU", "seconds"], rows)
    show(
        f"{summary.sources} trainer ranks to {summary.destinations} workers of servers: {summary.moves:,} moves, "
        f"made and proved complete in {summary.built_in_seconds:.1f} s. Plan {summary.digest[:12]}.\n"
        f"A worker gets up to {summary.received_by_each / 1e9:.2f} GB. The busiest trainer rank sends "
        f"{summary.imbalance:.2f} times the mean. At least {summary.seconds:.2f} s: all GPUs at once, both directions, "
        "no latency.\nThe first worker gets "
        + ", ".join(f"{count:,} messages in {rounds:,} rounds over {name}" for name, (count, rounds) in messages.items())
        + ".",
        highlight=False,
    )
    if assumption:
        echo(assumption)

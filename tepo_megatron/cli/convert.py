"""``tepo import`` and ``tepo export``, with their progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tepo_megatron.cli.errors import user_errors


class Dtype(StrEnum):
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
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Of the weights; default: what the config says.")] = None,
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
    """A progress bar on a terminal, removed at the end; nothing in a file or a pipe."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(escape(title), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

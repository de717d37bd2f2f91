"""``tepo plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tepo_megatron.cli.errors import user_errors


def plot(
    outputs: Annotated[list[Path], typer.Argument(metavar="OUT", help="Output folders of runs, or their metrics.jsonl.")],
    png: Annotated[Path | None, typer.Option("--png", help="Where to; default: OUT/curves.png or comparison.png.")] = None,
    title: Annotated[str | None, typer.Option("--title", help="Above the picture; default: the folders' names.")] = None,
) -> None:
    """Draw the curves of a run, or of several in one picture to compare them.

    [dim]tepo plot out/tiny[/]

    [dim]tepo plot out/tepo out/grpo --png tepo-grpo.png[/]
    """
    from tepo_megatron.run.display.plots import plot_comparison, plot_curves

    files = [path / "metrics.jsonl" if path.is_dir() else path for path in outputs]
    with user_errors():
        for path, file in zip(outputs, files, strict=True):
            if not file.is_file():
                raise ValueError(f"{path} has no metrics.jsonl; give the output folder of a run")
        names = _distinct_names(files)
        if len(files) == 1:
            target = png or files[0].with_name("curves.png")
            plot_curves(files[0], target, title or names[0])
        else:
            target = png or Path("comparison.png")
            plot_comparison(dict(zip(names, files, strict=True)), target, title or " · ".join(names))
    typer.echo(f"wrote {target}")


def _distinct_names(files: list[Path]) -> list[str]:
    """The names of the folders, or their paths where two names are the same."""
    folders = [file.resolve().parent for file in files]
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(file.parent) for file in files]

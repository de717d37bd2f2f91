"""The arguments that many commands share: a run's file and dotted overrides, and the configuration that they give."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tepo_megatron.rank import speaks_first

if TYPE_CHECKING:
    from tepo_megatron.config import RunConfig

Overrides = Annotated[list[str] | None, typer.Argument(metavar="a.b=c", help="Dotted overrides, such as train.steps=10.")]
RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run's configuration.")]


def load_config(run: Path | None, overrides: Sequence[str]) -> RunConfig:
    """``load_run``, with its warnings as sentences, said by one process of a run."""
    from tepo_megatron.config.load import load_run

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        config = load_run(run, overrides)
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        warnings.filterwarnings("ignore", message=re.escape(text))  # it is said here: not once more where a section is replaced
        if speaks_first():
            typer.echo(f"warning: {text}", err=True)
    return config

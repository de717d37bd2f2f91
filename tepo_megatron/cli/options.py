"""Arguments of many commands: a run's file, dotted overrides, their configuration; ``--json``."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tepo_megatron.runtime.rank import speaks_first

if TYPE_CHECKING:
    from tepo_megatron.config import RunConfig


def complete_setting(incomplete: str) -> list[str]:
    """Completions for a shell: ``optimizer.l`` → ``optimizer.lr=``; after ``=`` the possible values."""
    from tepo_megatron.config.loading.schema import schema_rows

    name, equals, _ = incomplete.partition("=")
    rows = {row.path: row.allowed for row in schema_rows()}
    if not equals:
        return [f"{path}=" for path in rows if path.startswith(name)]
    choices = [choice.strip('"') for choice in rows.get(name, "").replace(" or ", ", ").split(", ")]
    return [f"{name}={choice}" for choice in choices if " " not in choice and f"{name}={choice}".startswith(incomplete)]


_SETTINGS_HELP = "Dotted overrides, such as train.steps=10."
Overrides = Annotated[list[str] | None, typer.Argument(metavar="a.b=c", help=_SETTINGS_HELP, autocompletion=complete_setting)]
RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run's configuration.")]
RunOrSetting = Annotated[
    Path | None, typer.Argument(metavar="[RUN.yaml]", help="The run's configuration; settings alone will do.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For tools.")]


def split_run(run: Path | None, overrides: Sequence[str] | None) -> tuple[Path | None, list[str]]:
    """The run's file, if any, and the overrides: a first word such as ``model.path=…`` is an override.

    Raises ValueError if neither is given.
    """
    given = list(overrides or ())
    if run is not None and "=" in str(run) and not run.exists():
        return None, [str(run), *given]
    if run is None and not given:
        raise ValueError(
            "neither a run's file nor settings; give RUN.yaml ('tepo init' writes one), or settings such as model.path=FOLDER "
            "data.train=FILE reward.verifier=NAME"
        )
    return run, given


def load_config(run: Path | None, overrides: Sequence[str]) -> RunConfig:
    """``load_run`` with warnings as sentences, printed by one process only."""
    from tepo_megatron.config.loading.load import load_run

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        config = load_run(run, overrides)
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        warnings.filterwarnings("ignore", message=re.escape(text))  # printed here; do not repeat it when a section is replaced
        if speaks_first():
            typer.echo(f"warning: {text}", err=True)
    return config

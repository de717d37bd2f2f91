"""``tepo objective list``: every preset as its four choices and what stands beside them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from tepo_megatron.cli.console import show
from tepo_megatron.config.objective import ObjectiveConfig
from tepo_megatron.config.objective_presets import PRESETS

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(no_args_is_help=True, help="Objectives: what there is to choose from.")


@app.callback()
def _group() -> None:  # keeps `list` a sub-command while it is the only one
    """Objectives: what there is to choose from."""


@app.command("list")
def list_presets() -> None:
    """Print each preset as its four choices and regularisers.

    [dim]tepo objective list[/]
    """
    show(preset_table())


def preset_table() -> Table:
    """One row for each preset. Field names are those of the configuration below ``objective``."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("preset", "advantage", "ratio", "trust_region", "aggregation", "beside them"):
        table.add_column(column, overflow="fold", no_wrap=column == "preset")
    for name in PRESETS:
        config = ObjectiveConfig(preset=name).model_dump(exclude_none=True)
        del config["preset"]
        choices = [_say(config.pop(choice)) for choice in ("advantage", "ratio", "trust_region", "aggregation")]
        beside = [f"{key}: {_say(section)}" for key, section in config.items()]
        table.add_row(f"[bold]{name}[/]", *choices, "\n".join(beside) or "–")
    return table


def _say(section: Mapping[str, Any]) -> str:
    """A section of the configuration in a few words: its kind, then its other fields."""
    values = [
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in section.items() if key != "kind"
    ]
    kind = section.get("kind")
    if not values:
        return str(kind)
    return f"{kind} ({', '.join(values)})" if kind else ", ".join(values)

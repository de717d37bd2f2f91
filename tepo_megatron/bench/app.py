"""``tepo bench``: the measurements, as sub-commands."""

from __future__ import annotations

import typer

from tepo_megatron.bench.reshard import reshard
from tepo_megatron.bench.scores import scores

app = typer.Typer(no_args_is_help=True, help="Measure parts of the system on this machine.")
app.command("scores")(scores)
app.command("reshard")(reshard)

"""``tepo bench``: the measurements, as sub-commands."""

from __future__ import annotations

import typer

from tepo_megatron.bench.gpu import gpu
from tepo_megatron.bench.reshard import reshard
from tepo_megatron.bench.scores import scores
from tepo_megatron.bench.step import step

app = typer.Typer(no_args_is_help=True, help="Measure parts of the system on this machine.")
app.command("scores")(scores)
app.command("reshard")(reshard)
app.command("step")(step)
app.command("gpu")(gpu)

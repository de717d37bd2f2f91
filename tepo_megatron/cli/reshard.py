"""``tepo reshard plan``: the traffic of a weight sync on each link, from the sync's own plan."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tepo_megatron.cli.console import console, user_errors
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel, pipeline_stages
from tepo_megatron.weights.reshard.cost import Cluster, PlanSummary, summarize_plan
from tepo_megatron.weights.reshard.plan import plan_to_json, reshard_plan

if TYPE_CHECKING:
    from rich.table import Table


app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:  # keeps `plan` a sub-command while it is the only one
    """Weights from Megatron's shards to vLLM's."""


@app.command("plan")
def plan_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder with config.json (no weights needed), or a known name.")
    ],
    tp: Annotated[int, typer.Option(min=1, help="The trainer's tensor-parallel size.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Its pipeline stages.")] = 1,
    vpp: Annotated[int, typer.Option(min=1, help="Model chunks per stage (interleaved pipeline).")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Its data-parallel copies.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Its expert-parallel size.")] = 1,
    etp: Annotated[int | None, typer.Option(min=1, help="Ranks that split each expert, if not tp.")] = None,
    first_layers: Annotated[int | None, typer.Option(min=0, help="Layers of the first stage, if not as the others'.")] = None,
    last_layers: Annotated[int | None, typer.Option(min=0, help="The same of the last stage.")] = None,
    servers: Annotated[int, typer.Option(min=1, help="vLLM servers, each with a whole model.")] = 1,
    server_tp: Annotated[int, typer.Option(min=1, help="A server's tensor-parallel size.")] = 1,
    server_pp: Annotated[int, typer.Option(min=1, help="Its pipeline stages.")] = 1,
    itemsize: Annotated[int, typer.Option(min=1, help="Bytes of a weight on the wire: 2 for bf16.")] = 2,
    shared: Annotated[bool, typer.Option("--shared", help="The servers run on the trainer's GPUs.")] = False,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    nvlink: Annotated[float, typer.Option(min=1e-3, help="10⁹ bytes/s within a node, per GPU and direction.")] = 450.0,
    network: Annotated[float, typer.Option(min=1e-3, help="The same between nodes; 50 is 400 Gbit/s.")] = 50.0,
    efficiency: Annotated[float, typer.Option(min=1e-3, max=1, help="Which part of these rates is reached.")] = 0.7,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan itself, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print for tools.")] = False,
) -> None:
    """Print the bytes that a weight sync puts on each kind of link, and a lower bound of its time.

    [dim]tepo reshard plan Llama-3.3-70B-Instruct --tp 8 --pp 4 --vpp 5 --servers 4 --server-tp 8[/]
    """
    from tepo_megatron.plan.shapes import resolve_spec

    with user_errors():
        spec, assumption = resolve_spec(model)
        stages = pipeline_stages(spec.num_layers, pp, chunks=vpp, first=first_layers, last=last_layers)
        cluster = Cluster(gpus_per_node, nvlink * efficiency, network * efficiency, shared)
        source = MegatronParallel(tp, pp, dp, stages, ep=ep, etp=etp)
        destination = VllmParallel(server_tp, server_pp, servers)
        started = time.perf_counter()
        plan = reshard_plan(spec, source, destination, cluster.local(source.world_size, destination.world_size))
        built = time.perf_counter() - started
    summary = summarize_plan(plan, itemsize, cluster, built_in_seconds=built)
    if save is not None:
        save.write_text(plan_to_json(plan) + "\n")
    if as_json:
        typer.echo(json.dumps(asdict(summary)))
        return
    _show(summary)
    if assumption:
        typer.echo(assumption)


LINKS = {"device": "within a GPU", "nvlink": "within a node", "network": "between nodes"}


def _show(summary: PlanSummary) -> None:
    out = console()
    out.print(_table(summary))
    out.print(
        f"{summary.sources} trainer ranks to {summary.destinations} workers of servers: {summary.moves:,} moves, "
        f"made and proved complete in {summary.built_in_seconds:.1f} s. Plan {summary.digest[:12]}.\n"
        f"A worker gets up to {summary.received_by_each / 1e9:.2f} GB. The busiest trainer rank sends "
        f"{summary.imbalance:.2f} times the mean. At least {summary.seconds:.2f} s: all GPUs at once, both directions, "
        "no latency.",
        highlight=False,
    )


def _table(summary: PlanSummary) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(("link", "pairs", "GB in all", "GB sent by one GPU", "GB received by one GPU", "seconds")):
        table.add_column(name, justify="right" if number else "left")
    for link in summary.links:
        sizes = [f"{size / 1e9:,.2f}" for size in (link.total, link.busiest_sender, link.busiest_receiver)]
        table.add_row(LINKS[link.link], str(link.pairs), *sizes, f"{link.seconds:.3f}")
    return table

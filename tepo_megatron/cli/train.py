"""``tepo train``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tepo_megatron.cli.errors import user_errors
from tepo_megatron.cli.options import Overrides, RunFile, load_config
from tepo_megatron.torchrun import launch, run_rank, under_torchrun


def train(
    run: RunFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of the output folder.")] = False,
) -> None:
    """Train a model: sample, reward, score, update, sync, as often as the run says.

    Checks the configuration, then starts as many ranks as engine.parallel needs; under torchrun's agent, this is one of them.

    [dim]tepo train examples/tiny/run.yaml train.steps=20 output=out/short[/]

    [dim]python -m tepo_megatron.rendezvous --nproc-per-node 2 -m tepo_megatron train examples/tiny/run.yaml[/]
    """
    given = [*(overrides or ()), *(["train.resume=true"] if resume else [])]
    with user_errors():
        config = load_config(run, given)
    if not under_torchrun():
        raise typer.Exit(launch(["train", str(run), *given], config.engine.parallel.world_size))

    def work(config: Any) -> None:
        from tepo_megatron.train.training import train_model

        train_model(config)

    raise typer.Exit(run_rank(config, work))

"""``tepo train``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tepo_megatron.cli.errors import user_errors
from tepo_megatron.cli.options import Overrides, RunOrSetting, load_config, split_run
from tepo_megatron.run.start import prepare_run, start_ranks, train_as_rank
from tepo_megatron.runtime.rank import print_error, under_torchrun


def train(
    run: RunOrSetting = None,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint of the output folder.")
    ] = False,
    resume_from: Annotated[
        str | None, typer.Option("--from", metavar="step_N|PATH", help="With --resume: go on from this checkpoint.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove the run that the output folder holds.")] = False,
) -> None:
    """Train a model: sample, reward, score, update, sync, as often as the run says.

    Checks the configuration, then starts as many ranks as engine.parallel needs; under torchrun's agent, this is one of them.

    [dim]tepo train examples/tiny/run.yaml train.steps=20 output=out/short[/]

    [dim]tepo train model.path=models/mine data.train=train.jsonl reward.verifier=last_number output=out/mine[/]

    [dim]python -m tepo_megatron.runtime.torchrun --nproc-per-node 2 -m tepo_megatron train examples/tiny/run.yaml[/]

    [dim]tepo train examples/tiny/run.yaml output=out/short --resume --from step_000010[/]
    """
    with user_errors():
        file, given = split_run(run, overrides)
        given += ["train.resume=true"] if resume else []
        given += [] if resume_from is None else [f"train.resume_from={json.dumps(resume_from)}"]
        config = load_config(file, given)
        prepare_run(config, overwrite=overwrite)
    if under_torchrun():
        raise typer.Exit(train_as_rank(config))
    code, message = start_ranks(config, [str(file), *given] if file is not None else given)
    if message:
        print_error(message)
    raise typer.Exit(code)

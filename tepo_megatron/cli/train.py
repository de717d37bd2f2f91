"""``tepo train``."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from tepo_megatron.cli.errors import user_errors
from tepo_megatron.cli.options import Overrides, RunOrSetting, load_config, split_run
from tepo_megatron.run.rank import run_rank
from tepo_megatron.runtime.rank import is_restart, speaks_first, under_torchrun
from tepo_megatron.runtime.torchrun import launch


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
        if speaks_first() and not is_restart():
            from tepo_megatron.run.output.run_folder import prepare_folder

            prepare_folder(config, overwrite=overwrite)
        if config.train.resume and not under_torchrun():
            from tepo_megatron.run.output.resume import find_checkpoint, resumes
            from tepo_megatron.tasks.data.builtin import resolve_model_path

            if resumes(config):
                find_checkpoint(config, resolve_model_path(config.model.path))
    if not under_torchrun():
        status = config.output / "status"  # as run/step/heartbeat_limits.py has it
        words = [str(file), *given] if file is not None else given
        raise typer.Exit(launch(["train", *words], config.engine.parallel.world_size, status=status))

    def work(config: Any) -> None:
        from tepo_megatron.run.training import train_model

        train_model(config)

    raise typer.Exit(run_rank(config, work))

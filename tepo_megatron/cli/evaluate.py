"""``tepo eval``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tepo_megatron.cli.errors import user_errors
from tepo_megatron.cli.options import Overrides, load_config


def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face folder, such as a run's exported model.")],
    overrides: Overrides = None,
    run: Annotated[Path | None, typer.Option("--run", metavar="RUN.yaml", help="The run to take the rest from.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME", help="Only this set of evaluate.sets; may be repeated.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an evaluation that was ended: what was answered is not asked again.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures for tools, and no table.")] = False,
) -> None:
    """Evaluate a model on held-out problems and evaluation sets: greedy, and avg@k, pass@k and maj@k from samples.

    Without --run the problems must be given: data.heldout=FILE or evaluate.sets.NAME.path=FILE, and a verifier for them.

    [dim]tepo eval out/tiny/model --run examples/tiny/run.yaml evaluate.samples=8[/]

    [dim]tepo eval models/mine data.heldout=heldout.jsonl reward.verifier=math --json[/]

    [dim]tepo eval models/mine --run benchmarks.yaml --set aime --set gsm8k[/]
    """
    with user_errors():
        config = load_config(run, overrides or ())
        given = "heldout" in config.data.model_fields_set or config.evaluate.sets
        if run is None and not str(model).startswith("builtin:") and not given:
            raise ValueError(
                f"{model} would be examined in the demonstration's sums; give data.heldout=FILE, or the run that it comes from "
                "(--run RUN.yaml)"
            )
        from tepo_megatron.tasks.evaluate.standalone import evaluate_model

        result = evaluate_model(config, model, table=not as_json, sets=sets, resume=resume)
        folder = config.output / "eval"
        if as_json:
            heldout = {"k": result.k, "problems": result.num_problems} if result.num_problems else {}
            typer.echo(json.dumps({**result.metrics, **heldout, "wrote": str(folder)}))
        else:
            typer.echo(f"wrote {folder / 'metrics.json'}, and {folder / 'samples.jsonl'}: tepo samples {folder}")

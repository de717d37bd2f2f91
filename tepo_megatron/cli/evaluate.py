"""``tepo eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tepo_megatron.cli.errors import user_errors
from tepo_megatron.cli.options import Overrides, load_config


def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face folder, such as a run's exported model.")],
    overrides: Overrides = None,
    run: Annotated[Path | None, typer.Option("--run", metavar="RUN.yaml", help="The run to take the rest from.")] = None,
) -> None:
    """Evaluate a model on held-out problems: greedy, and avg@k and pass@k from samples.

    [dim]tepo eval out/tiny/model --run examples/tiny/run.yaml evaluate.samples=8[/]
    """
    with user_errors():
        config = load_config(run, overrides or ())
        from tepo_megatron.evaluate.standalone import evaluate_model

        evaluate_model(config, model)

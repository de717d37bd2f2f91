from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from tepo_megatron.cli.console import user_errors
from tepo_megatron.runtime.text import echo

app = typer.Typer()


@app.command("init")
def _init(
    file: Annotated[Path, Argument(metavar="[RUN.yaml]", help="The file to write.")] = Path("run.yaml"),
    model: Annotated[str | None, Option(metavar="FOLDER", help="Hugging Face folder of the model.")] = None,
    train: Annotated[str | None, Option(metavar="PATH", help="Problems: JSON lines, JSON, CSV, Parquet, or a folder.")] = None,
    heldout: Annotated[str | None, Option(metavar="PATH", help="The same, to evaluate on; - for none.")] = None,
    split: Annotated[str | None, Option(metavar="NAME", help="Of a folder: the split to train on.")] = None,
    heldout_split: Annotated[str | None, Option(metavar="NAME", help="The split to evaluate on.")] = None,
    prompt_column: Annotated[
        str | None, Option(metavar="NAME", help="Where the prompt is, if not in prompt or messages.")
    ] = None,
    answer_column: Annotated[str | None, Option(metavar="NAME", help="Where the answer is, if not in answer.")] = None,
    chat_template: Annotated[
        bool | None, Option("--chat-template/--no-chat-template", help="Whether a prompt is a user's message.")
    ] = None,
    verifier: Annotated[str | None, Option(metavar="NAME", help="A built-in one, or file.py:function.")] = None,
    gpus: Annotated[int | None, Option(min=0, help="GPUs of a node; 0: on the CPU.")] = None,
    nodes: Annotated[int | None, Option(min=1, help="Nodes of a Slurm cluster; 1: this machine.")] = None,
    output: Annotated[Path | None, Option(help="The run's folder; default: out/ and the model's name.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Write over the file if it is there.")] = False,
) -> None:
    """Ask what you have (model, data, verifier, GPUs), and write a run's file that passes tepo doctor --run.

    Options answer their questions.

    [dim]tepo init[/]

    [dim]tepo init mine.yaml --model models/mine --train train.csv --heldout test.csv --verifier last_number --gpus 0[/]
    """
    with user_errors():
        from tepo_megatron.cli.new_run import NewRun

        if file.exists() and not overwrite:
            raise ValueError(f"{file} is there already; give another name, or --overwrite")
        new = NewRun(model)
        new.ask_data(train, split, prompt_column, answer_column)
        new.ask_heldout(heldout, heldout_split)
        new.ask_template(chat_template)
        new.ask_verifier(verifier)
        new.ask_machines(gpus, nodes)
        text = new.text(output)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    launch = "tepo launch" if new.nodes > 1 else "tepo train"
    echo(f"wrote {file}; next: tepo doctor --run {file}, then {launch} {file}")

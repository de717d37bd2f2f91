"""``tepo init``: asks questions and writes a run's file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tepo_megatron.cli.console import user_errors
from tepo_megatron.cli.init.data import DataOptions, ask, ask_data
from tepo_megatron.cli.init.file import Answers, run_text

if TYPE_CHECKING:
    from tepo_megatron.core.problem import Problem
    from tepo_megatron.tasks.data.tokenizer import Tokenizer

_VERIFIERS = "exact (the whole response), last_word, last_number, math, judge, or your own as file.py:function"


def init(
    file: Annotated[Path, typer.Argument(metavar="[RUN.yaml]", help="The file to write.")] = Path("run.yaml"),
    model: Annotated[str | None, typer.Option("--model", metavar="FOLDER", help="Hugging Face folder of the model.")] = None,
    train: Annotated[
        str | None, typer.Option("--train", metavar="PATH", help="Problems: JSON lines, JSON, CSV, Parquet, or a folder.")
    ] = None,
    heldout: Annotated[
        str | None, typer.Option("--heldout", metavar="PATH", help="The same, to evaluate on; - for none.")
    ] = None,
    split: Annotated[str | None, typer.Option("--split", metavar="NAME", help="Of a folder: the split to train on.")] = None,
    heldout_split: Annotated[
        str | None, typer.Option("--heldout-split", metavar="NAME", help="The split to evaluate on.")
    ] = None,
    prompt_column: Annotated[
        str | None, typer.Option("--prompt-column", metavar="NAME", help="Where the prompt is, if not in prompt or messages.")
    ] = None,
    answer_column: Annotated[
        str | None, typer.Option("--answer-column", metavar="NAME", help="Where the answer is, if not in answer.")
    ] = None,
    chat_template: Annotated[
        bool | None, typer.Option("--chat-template/--no-chat-template", help="Whether a prompt is a user's message.")
    ] = None,
    verifier: Annotated[
        str | None, typer.Option("--verifier", metavar="NAME", help="A built-in one, or file.py:function.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, help="GPUs of a node; 0: on the CPU.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes of a Slurm cluster; 1: this machine.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="The run's folder; default: out/ and the model's name.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write over the file if it is there.")] = False,
) -> None:
    """Ask what you have (model, data, verifier, GPUs), and write a run's file that passes tepo doctor --run.

    What an option says is not asked.

    [dim]tepo init[/]

    [dim]tepo init mine.yaml --model models/mine --train train.csv --heldout test.csv --verifier last_number --gpus 0[/]
    """
    with user_errors():
        from tepo_megatron.tasks.data.builtin import resolve_model_path
        from tepo_megatron.tasks.data.tokenizer import load_tokenizer

        if file.exists() and not overwrite:
            raise ValueError(f"{file} is there already; give another name, or --overwrite")
        folder = ask("Model: a Hugging Face folder, or builtin:tiny", model, "--model", _model)
        tokenizer = load_tokenizer(resolve_model_path(folder))
        options = DataOptions(train, heldout, split, heldout_split, prompt_column, answer_column, chat_template)
        data = ask_data(options, tokenizer)
        typer.echo(f"  the model reads: {_read(tokenizer, data.train[0])}")
        name = ask(f"Verifier: {_VERIFIERS}", verifier, "--verifier", _verifier(data.train))
        item = ask("GPUs of this machine, or of a node (0: CPU)", gpus, "--gpus", _at_least(0), default=str(_gpus_here()))
        count = ask("Nodes of a cluster (1: this machine)", nodes, "--nodes", _at_least(1), default="1") if item else 1
        text = run_text(Answers(folder, data.section, [*data.train, *data.heldout], name, item, count, output))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    launch = "tepo launch" if count > 1 else "tepo train"
    typer.echo(f"wrote {file}; next: tepo doctor --run {file}, then {launch} {file}")


def _read(tokenizer: Tokenizer, problem: Problem) -> str:
    from tepo_megatron.tasks.data.prompts import encode_prompt

    return tokenizer.show(encode_prompt(tokenizer, problem))[:200].replace("\n", "\\n")


def _model(answer: str) -> str:
    from tepo_megatron.tasks.data.builtin import resolve_model_path

    resolve_model_path(answer)
    return answer


def _verifier(problems: Sequence[Problem]) -> Callable[[str], str]:
    def check(answer: str) -> str:
        from tepo_megatron.tasks.reward.verifiers import check_reachable, resolve_verifier

        resolve_verifier(answer)
        lost = check_reachable(answer, problems)
        if lost:
            typer.echo(
                f"  warning: {answer} refuses the answers of {lost} problems themselves: no response solves them", err=True
            )
        return answer

    return check


def _at_least(least: int) -> Callable[[str], int]:
    def check(answer: str) -> int:
        if not answer.isdecimal() or int(answer) < least:
            raise ValueError(f"{answer!r} is no number of {least} or more")
        return int(answer)

    return check


def _gpus_here() -> int:
    return sum(name.removeprefix("nvidia").isdecimal() for name in os.listdir("/dev") if name.startswith("nvidia"))

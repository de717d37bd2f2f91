"""``tepo init``: asks questions and writes a run's file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tepo_megatron.cli.console import user_errors
from tepo_megatron.runtime.text import echo, printable

if TYPE_CHECKING:
    from tepo_megatron.core.problem import Problem
    from tepo_megatron.tasks.data.tokenizer import Tokenizer

_NONE = "-"  # the answer for no held-out problems

_EVALUATED = ("test", "validation", "valid", "dev", "eval")  # names of held-out splits, in order of preference


@dataclass(frozen=True)
class _DataOptions:
    """None is asked."""

    train: str | None
    heldout: str | None
    split: str | None
    heldout_split: str | None
    prompt: str | None
    answer: str | None
    chat_template: bool | None


@dataclass(frozen=True)
class _FoundData:
    section: dict[str, Any]
    train: list[Problem]
    heldout: list[Problem]


def _ask_data(options: _DataOptions, tokenizer: Tokenizer) -> _FoundData:
    """Raises ValueError for unreadable problems."""
    what = "a file (JSON lines, JSON, CSV, Parquet), a folder of a data set, or builtin:addition"
    path = _ask(f"Training problems: {what}", options.train, "--train", _path)
    split = _ask_split(path, options.split, "--split", default=None)
    fields = _ask_columns(path, split, options)
    train = _loaded(_source(path, split), fields)
    _say(train)
    held = _ask_heldout(options, path, split)
    heldout = [] if held is None else _loaded(held, fields)
    if held is not None:
        _say(heldout, also_trained_on=len({item.prompt for item in train} & {item.prompt for item in heldout}))
    section: dict[str, Any] = {"train": _source(path, split), "heldout": held}
    section |= {"fields": fields} if fields else {}
    if _ask_template(options.chat_template, tokenizer, [*train, *heldout]):
        section["chat_template"] = True
        train = _loaded(section["train"], fields, chat_template=True)
        heldout = [] if held is None else _loaded(held, fields, chat_template=True)
    return _FoundData(section, train, heldout)


def _path(answer: str) -> str:
    """Checks only existence and format; rows are read once their columns are known."""
    from tepo_megatron.tasks.data.problems import load_problems
    from tepo_megatron.tasks.data.rows import splits_of

    if answer.startswith("builtin:") or not Path(answer).expanduser().exists():
        load_problems(answer)  # raises with the reason
    else:
        splits_of(Path(answer).expanduser())
    return answer


def _ask_split(path: str, value: str | None, option: str, *, default: str | None) -> str | None:
    from tepo_megatron.tasks.data.rows import splits_of

    splits = [] if path.startswith("builtin:") else splits_of(Path(path).expanduser())
    if len(splits) < 2 and value is None:
        return None
    return _ask(f"Split of {path} ({', '.join(splits)})", value, option, _one_of(splits, f"split of {path}"), default=default)


def _ask_columns(path: str, split: str | None, options: _DataOptions) -> dict[str, str]:
    from tepo_megatron.tasks.data.rows import first_columns

    columns = [] if path.startswith("builtin:") else first_columns(Path(path).expanduser(), split)
    result = {}
    for field, value, usual in (
        ("prompt", options.prompt, {"prompt", "messages"}),
        ("answer", options.answer, {"answer"}),
    ):
        if value is not None or (columns and not usual & set(columns)):
            question = f"Which column is the {field} ({', '.join(columns)})"
            result[field] = _ask(question, value, f"--{field}-column", _one_of(columns, f"column of {path}"))
    return {field: column for field, column in result.items() if column != field}


def _ask_heldout(options: _DataOptions, train: str, split: str | None) -> str | list[dict[str, str]] | None:
    """Proposes another split if the training problems are a split."""
    from tepo_megatron.tasks.data.rows import splits_of

    others = [] if split is None else [item for item in splits_of(Path(train).expanduser()) if item != split]
    proposed = next((name for name in _EVALUATED if name in others), others[0] if others else None)

    def check(answer: str) -> str:
        if answer == train and split is None:
            raise ValueError(f"{answer} is trained on; give other problems, or {_NONE} for none")
        return answer if answer == _NONE else _path(answer)

    question = f"Held-out problems to evaluate on ({_NONE}: none)"
    path = _ask(question, options.heldout, "--heldout", check, default=train if others else _NONE)
    if path == _NONE:
        return None
    chosen = _ask_split(path, options.heldout_split, "--heldout-split", default=proposed if path == train else None)
    if path == train and chosen == split:
        raise ValueError(f"the split {split} of {path} is trained on; hold another one out")
    return _source(path, chosen)


def _ask_template(value: bool | None, tokenizer: Tokenizer, problems: Sequence[Problem]) -> bool:
    plain = next((problem for problem in problems if not problem.messages), None)
    if plain is None:
        return False
    if value is None:
        try:
            tokenizer.chat_ids((("user", plain.prompt),))
        except ValueError:
            return False
    question = "The tokenizer has a chat template: is each prompt a user's message in it (yes, no)"
    option = None if value is None else "yes" if value else "no"
    answer = _ask(question, option, "--chat-template", _one_of(["yes", "no", "y", "n"], "answer"), default="yes")
    return answer.startswith("y")


def _one_of(known: Sequence[str], what: str) -> Callable[[str], str]:
    """A column may be a key within one, ``a.b``."""

    def check(answer: str) -> str:
        if answer not in known and answer.partition(".")[0] not in known:
            raise ValueError(f"{answer!r} is no {what}; {', '.join(known) or 'there is none'}")
        return answer

    return check


def _source(path: str, split: str | None) -> str | list[dict[str, str]]:
    return path if split is None else [{"path": path, "split": split}]


def _loaded(source: str | list[dict[str, str]], fields: dict[str, str], *, chat_template: bool = False) -> list[Problem]:
    from tepo_megatron.config import DataConfig
    from tepo_megatron.tasks.data.problems import load_problems

    data = DataConfig.model_validate({"train": source, "fields": fields, "chat_template": chat_template})
    return [problem for item in data.train_sources for problem in load_problems(item)]


def _say(problems: Sequence[Problem], *, also_trained_on: int = 0) -> None:
    first = problems[0]
    echo(f"  {len(problems)} problems; the first: {first.prompt[:80]!r}, answer {first.answer[:40]!r}")
    if also_trained_on:
        echo(f"  warning: {also_trained_on} of their prompts are trained on, too", err=True)


T = TypeVar("T")


def _ask(question: str, value: object, option: str, check: Callable[[str], T], *, default: str | None = None) -> T:
    """Asks until the answer is valid. If nobody answers: the default, or ValueError."""
    if value is not None:
        return check(str(value))
    while True:
        try:
            answer = typer.prompt(printable(question), default=default)
        except typer.Abort:
            if default is None:
                raise ValueError(f"{option} is not given, and nobody answers; give it") from None
            return check(default)
        try:
            return check(answer)
        except ValueError as error:
            echo(f"  {error}", err=True)


_LONGEST_RESPONSE = 1024  # tokens, for models that allow more; the first setting to change for a task

_SMALL = 100_000_000  # smaller models hardly learn with a learning rate meant for billions of parameters

_COMMENTS = {
    "model": "a Hugging Face folder: config.json, safetensors, tokenizer",
    "data": "tepo data show prints what the model reads; several sources, templates, filters: docs/guides/data.md",
    "reward": "or your own function (problem, response) -> float, as file.py:function: docs/guides/rewards.md",
    "rollout": "a step has prompts_per_step × samples_per_prompt responses of at most max_new_tokens",
    "optimizer": "lr is the first field to turn where the reward stays flat: docs/reference/metrics.md",
    "train": "a run that is stopped saves first, and goes on with --resume",
}


@dataclass(frozen=True)
class _Answers:
    """``data`` is that section of the run's file, ``problems`` its problems."""

    model: str
    data: Mapping[str, Any]
    problems: Sequence[Problem]
    verifier: str
    gpus: int
    nodes: int
    output: Path | None = None


def _run_text(answers: _Answers) -> str:
    """Raises ValueError for a prompt too long for the model, GPUs without a simple layout, and a run that the model does not
    allow.
    """
    from tepo_megatron.config import RunConfig
    from tepo_megatron.plan.shapes import model_parameters
    from tepo_megatron.run.checks import check_model
    from tepo_megatron.tasks.data.builtin import resolve_model_path
    from tepo_megatron.tasks.data.problems import encode_prompt
    from tepo_megatron.tasks.data.tokenizer import check_tokenizer, load_tokenizer
    from tepo_megatron.weights.architecture import read_model_spec

    folder = resolve_model_path(answers.model)
    spec, tokenizer = read_model_spec(folder), load_tokenizer(folder)
    check_tokenizer(tokenizer, folder)
    longest = max(len(encode_prompt(tokenizer, problem)) for problem in answers.problems)
    if longest >= spec.max_positions:
        raise ValueError(
            f"the longest prompt has {longest} tokens, and {answers.model} takes {spec.max_positions}, the response included; "
            "shorten the prompts, or take another model"
        )
    new = min(_LONGEST_RESPONSE, spec.max_positions - longest)
    name = os.path.basename(os.path.abspath(answers.model.removeprefix("builtin:"))) or "run"
    on_gpus = answers.gpus > 0
    run: dict[str, Any] = {
        "name": name,
        "output": str(answers.output or Path("out") / name),
        "model": {"path": answers.model, "dtype": "bfloat16" if on_gpus else "float32"},
        "data": dict(answers.data),
        "reward": {"verifier": answers.verifier},
        "rollout": {
            "prompts_per_step": 64,
            "samples_per_prompt": 8,
            "sampling": {"max_new_tokens": new},
            "server": {"max_model_len": longest + new},
        },
        "engine": {"platform": "cuda" if on_gpus else "cpu", "micro_batch_tokens": max(4096, longest + new)},
        "optimizer": {"lr": 5e-5 if model_parameters(spec) < _SMALL else 1e-6, "warmup_steps": 10},
        "train": {"steps": 100, "minibatches": 4, "save_every": 20},
        "evaluate": {"every": 10 if answers.data["heldout"] else 0},
    }
    run = _first_that_fits(run, answers) if on_gpus else run
    check_model(RunConfig.model_validate(run), machine=False)
    return _as_yaml(run)


def _first_that_fits(run: dict[str, Any], answers: _Answers) -> dict[str, Any]:
    """Fewest tensor-parallel ranks for which the plan fits trainer and servers."""
    from tepo_megatron.config import RunConfig
    from tepo_megatron.plan import make_plan

    why = "give 1, 2, 4 or 8 GPUs"
    for tp in (size for size in (1, 2, 4, 8) if size <= answers.gpus):
        laid_out = _laid_out(run, tp, gpus=answers.gpus, nodes=answers.nodes)
        if laid_out is None:
            continue
        try:
            problems = make_plan(RunConfig.model_validate(laid_out)).problems
        except ValueError as error:
            problems = (str(error),)
        if not problems:
            return laid_out
        why = "; ".join(problems)
    raise ValueError(f"no simple layout on {answers.nodes} × {answers.gpus} GPUs takes {answers.model}: {why}")


def _laid_out(run: dict[str, Any], tp: int, *, gpus: int, nodes: int) -> dict[str, Any] | None:
    """Half of the GPUs, or nodes, train, the others serve; a single GPU does both in turn. None if ``tp`` does not divide
    them.
    """
    training = gpus * (nodes // 2) if nodes > 1 else max(1, gpus // 2)
    serving = gpus * nodes - training
    if training % tp or serving % tp:
        return None
    server = {**run["rollout"]["server"], "tp": tp, "count": max(1, serving // tp)}
    if not serving:
        server["placement"] = "colocated"
    cluster = {"gpus_per_node": gpus}
    if nodes > 1:
        cluster |= {"train_nodes": nodes // 2, "rollout_nodes": nodes - nodes // 2}
    return {
        **run,
        "rollout": {**run["rollout"], "server": server},
        "engine": {**run["engine"], "parallel": {"tp": tp, "dp": training // tp, "sequence_parallel": tp > 1}},
        "optimizer": {**run["optimizer"], "distributed": training > tp},
        "cluster": cluster,
    }


def _as_yaml(run: dict[str, Any]) -> str:
    lines = ["# Written by tepo init. tepo config schema explains every field; what is not here has its default."]
    for name, value in run.items():
        lines += [f"# {_COMMENTS[name]}"] if name in _COMMENTS else []
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"  {key}: {_value(item)}" for key, item in value.items())]
        else:
            lines.append(f"{name}: {_value(value)}")
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """JSON, which YAML reads if 5e-05 has a point (5.0e-05)."""
    return f"{value:.1e}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


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

    Options answer their questions.

    [dim]tepo init[/]

    [dim]tepo init mine.yaml --model models/mine --train train.csv --heldout test.csv --verifier last_number --gpus 0[/]
    """
    with user_errors():
        from tepo_megatron.tasks.data.builtin import resolve_model_path
        from tepo_megatron.tasks.data.problems import encode_prompt
        from tepo_megatron.tasks.data.tokenizer import load_tokenizer

        if file.exists() and not overwrite:
            raise ValueError(f"{file} is there already; give another name, or --overwrite")
        folder = _ask("Model: a Hugging Face folder, or builtin:tiny", model, "--model", _check_model)
        tokenizer = load_tokenizer(resolve_model_path(folder))
        options = _DataOptions(train, heldout, split, heldout_split, prompt_column, answer_column, chat_template)
        data = _ask_data(options, tokenizer)
        read = tokenizer.show(encode_prompt(tokenizer, data.train[0]))[:200].replace("\n", "\\n")
        echo(f"  the model reads: {read}")
        name = _ask(f"Verifier: {_VERIFIERS}", verifier, "--verifier", _check_verifier(data.train))
        here = sum(name.removeprefix("nvidia").isdecimal() for name in os.listdir("/dev") if name.startswith("nvidia"))
        item = _ask("GPUs of this machine, or of a node (0: CPU)", gpus, "--gpus", _at_least(0), default=str(here))
        count = _ask("Nodes of a cluster (1: this machine)", nodes, "--nodes", _at_least(1), default="1") if item else 1
        text = _run_text(_Answers(folder, data.section, [*data.train, *data.heldout], name, item, count, output))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    launch = "tepo launch" if count > 1 else "tepo train"
    echo(f"wrote {file}; next: tepo doctor --run {file}, then {launch} {file}")


def _check_model(answer: str) -> str:
    from tepo_megatron.tasks.data.builtin import resolve_model_path

    resolve_model_path(answer)
    return answer


def _check_verifier(problems: Sequence[Problem]) -> Callable[[str], str]:
    def check(answer: str) -> str:
        from tepo_megatron.tasks.reward.verifiers import check_reachable, resolve_verifier

        resolve_verifier(answer)
        lost = check_reachable(answer, problems)
        if lost:
            echo(f"  warning: {answer} refuses the answers of {lost} problems themselves: no response solves them", err=True)
        return answer

    return check


def _at_least(least: int) -> Callable[[str], int]:
    def check(answer: str) -> int:
        if not answer.isdecimal() or int(answer) < least:
            raise ValueError(f"{answer!r} is no number of {least} or more")
        return int(answer)

    return check

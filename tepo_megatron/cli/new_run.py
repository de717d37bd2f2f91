"""The questions of ``tepo init``, and what follows from the answers."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import typer
from pydantic import ValidationError

from tepo_megatron.config import DataConfig, RewardConfig, RunConfig
from tepo_megatron.config.base import Section, merge_sections
from tepo_megatron.config.load import escape_references
from tepo_megatron.config.paths import seen_from
from tepo_megatron.config.schema import describe
from tepo_megatron.core.problem import Problem
from tepo_megatron.plan import make_plan
from tepo_megatron.plan.shapes import model_parameters
from tepo_megatron.run.checks import check_model
from tepo_megatron.runtime.text import echo, printable
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import encode_prompt, load_problems
from tepo_megatron.tasks.data.rows import DataFiles
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tepo_megatron.tasks.reward.pool import RewardPool
from tepo_megatron.tasks.reward.verifiers import check_reachable, resolve_verifier
from tepo_megatron.weights.architecture import read_model_spec

_NONE = "-"  # the answer for no held-out problems

_EVALUATED = ("test", "validation", "valid", "dev", "eval")  # names of held-out splits, in order of preference

_VERIFIERS = "exact (the whole response), last_word, last_number, math, or your own as file.py:function"

_NEEDS = {"judge": "reward.kwargs, with its model's address", "python_tests": "reward.run_code = true"}

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

_Answer = TypeVar("_Answer")
_S = TypeVar("_S", bound=Section)


def _ask(question: str, value: object, option: str, check: Callable[[str], _Answer], *, default: str | None = None) -> _Answer:
    """Asks until the answer is valid, but not for an option with a ``value``. If nobody answers: the default, or ValueError."""
    if value is not None:
        return check(str(value))
    while True:
        try:
            answer = typer.prompt(printable(question), default=default)
        except typer.Abort as abort:
            if isinstance(abort.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            if default is None:
                raise ValueError(f"{option} is not given, and nobody answers; give it") from None
            return check(default)
        try:
            return check(answer)
        except ValueError as error:
            echo(f"  {error}", err=True)


def _at_least(least: int) -> Callable[[str], int]:
    def check(answer: str) -> int:
        if not answer.isdecimal() or int(answer) < least:
            raise ValueError(f"{answer!r} is no number of {least} or more")
        return int(answer)

    return check


class NewRun:
    """Methods take options and ask for those that are None; they raise ValueError for unusable ones."""

    def __init__(self, model: str | None) -> None:
        self._model = _ask("Model: a Hugging Face folder, or builtin:tiny", model, "--model", _model)
        self._folder = resolve_model_path(self._model)
        self._tokenizer = load_tokenizer(self._folder)
        self._data: dict[str, Any] = {}  # that section of the run's file
        self._train: list[Problem] = []
        self._heldout: list[Problem] = []
        self._path, self._split, self._verifier = "", "", ""
        self._gpus, self.nodes = 0, 1

    def ask_data(self, train: str | None, split: str | None, prompt: str | None, answer: str | None) -> None:
        what = "a file (JSON lines, JSON, CSV, Parquet), a folder of a data set, or builtin:addition"
        self._path = path = _ask(f"Training problems: {what}", train, "--train", _path)
        self._split = _ask_split(path, split, "--split", default=None)
        fields = _ask_fields(path, self._split, prompt, answer, like={})
        self._data = {"train": _source(path, self._split), "heldout": None, **({"fields": fields} if fields else {})}
        self._load()
        _say(self._train)

    def ask_heldout(self, heldout: str | None, split: str | None, prompt: str | None, answer: str | None) -> None:
        others = [item for item in _splits(self._path) if item != self._split] if self._split else []
        proposed = next((name for name in _EVALUATED if name in others), others[0] if others else None)

        def check(answer: str) -> str:
            if answer == self._path and not self._split:
                raise ValueError(f"{answer} is trained on; give other problems, or {_NONE} for none")
            return answer if answer == _NONE else _path(answer)

        question = f"Held-out problems to evaluate on ({_NONE}: none)"
        path = _ask(question, heldout, "--heldout", check, default=self._path if others else _NONE)
        if path == _NONE:
            return
        chosen = _ask_split(path, split, "--heldout-split", default=proposed if path == self._path else None)
        if path == self._path and chosen == self._split:
            raise ValueError(f"the split {chosen} of {path} is trained on; hold another one out")
        trained = self._data.get("fields", {})
        fields = _ask_fields(path, chosen, prompt, answer, like=trained, prefix="heldout-")
        differing = {} if fields == trained or path.startswith("builtin:") else fields or {"prompt": "prompt"}
        self._data["heldout"] = _source(path, chosen, differing)
        self._load()
        _say(self._heldout)
        if both := len({item.prompt for item in self._train} & {item.prompt for item in self._heldout}):
            echo(f"  warning: {both} of their prompts are trained on, too", err=True)

    def ask_template(self, value: bool | None) -> None:
        plain = next((problem for problem in [*self._train, *self._heldout] if not problem.messages), None)
        if plain is not None and (value is not None or self._has_template(plain)):
            question = "The tokenizer has a chat template: is each prompt a user's message in it (yes, no)"
            option = None if value is None else "yes" if value else "no"
            check = _one_of(["yes", "no", "y", "n"], "answer")
            if _ask(question, option, "--chat-template", check, default="yes").startswith("y"):
                self._data["chat_template"] = True
                self._load()
        read = self._tokenizer.show(encode_prompt(self._tokenizer, self._train[0]))[:200].replace("\n", "\\n")
        echo(f"  the model reads: {read}")

    def ask_verifier(self, value: str | None) -> None:
        def check(answer: str) -> str:
            resolve_verifier(answer)
            if answer in _NEEDS:
                raise ValueError(f"{answer} needs {_NEEDS[answer]}; give exact, and write both into the file")
            if lost := check_reachable(answer, self._train):
                refuses = f"{answer} refuses the answers of {lost} problems themselves"
                echo(f"  warning: {refuses}: no response solves them", err=True)
            try:
                with RewardPool(RewardConfig(verifier=answer)) as pool:
                    pool.rehearse([*self._train, *self._heldout])
            except ValueError as error:
                if "no kwargs" not in str(error):
                    raise
                raise ValueError(f"{error}; give exact, and write it and its reward.kwargs into the file") from error
            if self._heldout and pool.components:
                parts = ", ".join(pool.components)
                echo(f"  warning: set evaluate.correct to the component that says what is correct: {parts}", err=True)
            return answer

        self._verifier = _ask(f"Verifier: {_VERIFIERS}", value, "--verifier", check)

    def ask_machines(self, gpus: int | None, nodes: int | None) -> None:
        here = sum(name.removeprefix("nvidia").isdecimal() for name in os.listdir("/dev") if name.startswith("nvidia"))
        question = "GPUs of this machine, or of a node (0: CPU)"
        self._gpus = _ask(question, gpus, "--gpus", _at_least(0), default=str(here))
        if not self._gpus and nodes not in (None, 1):
            raise ValueError(f"--nodes {nodes} is for GPUs, and --gpus is 0; leave one of them out")
        if self._gpus:
            self.nodes = _ask("Nodes of a cluster (1: this machine)", nodes, "--nodes", _at_least(1), default="1")

    def text(self, file: Path, output: Path | None) -> str:
        """Raises ValueError for too long a prompt, GPUs without a simple layout, and a run that is refused."""
        spec = read_model_spec(self._folder)
        self._tokenizer.check_model()
        longest = max(len(encode_prompt(self._tokenizer, problem)) for problem in [*self._train, *self._heldout])
        if longest >= spec.max_positions:
            raise ValueError(
                f"the longest prompt has {longest} tokens, and {self._model} takes {spec.max_positions}, the response "
                "included; shorten the prompts, or take another model"
            )
        new = min(_LONGEST_RESPONSE, spec.max_positions - longest)
        name = os.path.basename(os.path.abspath(self._model.removeprefix("builtin:"))) or "run"
        run: dict[str, Any] = {
            "name": name,
            "output": str(output or Path("out") / name),
            "model": {"path": self._model, "dtype": "bfloat16" if self._gpus else "float32"},
            "data": self._data,
            "reward": {"verifier": self._verifier},
            "rollout": {
                "prompts_per_step": 64,
                "samples_per_prompt": 8,
                "sampling": {"max_new_tokens": new},
                "server": {"max_model_len": longest + new},
            },
            "engine": {"platform": "cuda" if self._gpus else "cpu", "micro_batch_tokens": max(4096, longest + new)},
            "optimizer": {"lr": 5e-5 if model_parameters(spec) < _SMALL else 1e-6, "warmup_steps": 10},
            "train": {"steps": 100, "minibatches": 4, "save_every": 20},
            "evaluate": {"every": 10 if self._heldout else 0},
        }
        run = _first_that_fits(run, self._gpus, self.nodes) if self._gpus else run
        check_model(_validated(RunConfig, run), machine=not self._gpus)
        return _as_yaml(seen_from(run, file.parent))

    def _load(self) -> None:
        data = _validated(DataConfig, self._data)
        self._train = [problem for source in data.train_sources for problem in load_problems(source)]
        self._heldout = [problem for source in data.heldout_sources for problem in load_problems(source)]

    def _has_template(self, problem: Problem) -> bool:
        try:
            self._tokenizer.chat_ids((("user", problem.prompt),))
        except ValueError:
            return False
        return True


def _model(answer: str) -> str:
    resolve_model_path(answer)
    return answer


def _path(answer: str) -> str:
    """Checks only existence and format, since the columns are not known yet."""
    if answer.startswith("builtin:") or not Path(answer).expanduser().exists():
        load_problems(answer)  # raises with the reason
    else:
        _splits(answer)
    return answer


def _splits(path: str) -> list[str]:
    return [] if path.startswith("builtin:") else DataFiles.splits(Path(path).expanduser())


def _ask_split(path: str, value: str | None, option: str, *, default: str | None) -> str:
    splits = _splits(path)
    if len(splits) < 2 and value is None:
        return ""
    return _ask(f"Split of {path} ({', '.join(splits)})", value, option, _one_of(splits, f"split of {path}"), default=default)


def _ask_fields(
    path: str, split: str, prompt: str | None, answer: str | None, *, like: dict[str, str], prefix: str = ""
) -> dict[str, str]:
    """``data.fields`` of ``path``, without its defaults. Columns of ``like`` are taken where they are, and the usual ones."""
    columns: list[str] = []
    if not path.startswith("builtin:"):
        columns = list(next((row.written for row in DataFiles.find(Path(path).expanduser(), split or None).rows()), ()))
    fields: dict[str, str] = {}
    for field, value, usual in (("prompt", prompt, {"prompt", "messages"}), ("answer", answer, {"answer"})):
        column = like.get(field, field)
        if value is not None or (columns and column.partition(".")[0] not in columns):
            if value is None and usual & set(columns):
                continue
            question = f"Which column of {path} is the {field} ({', '.join(columns)})"
            column = _ask(question, value, f"--{prefix}{field}-column", _one_of(columns, f"column of {path}"))
        fields |= {field: column} if column != field else {}
    return fields


def _one_of(known: Sequence[str], what: str) -> Callable[[str], str]:
    def check(answer: str) -> str:
        if answer not in known and answer.partition(".")[0] not in known:
            raise ValueError(f"{answer!r} is no {what}; {', '.join(known) or 'there is none'}")
        return answer

    return check


def _source(path: str, split: str, fields: dict[str, str] | None = None) -> str | list[dict[str, Any]]:
    options = {**({"split": split} if split else {}), **({"fields": fields} if fields else {})}
    return [{"path": path, **options}] if options else path


def _say(problems: Sequence[Problem]) -> None:
    first = problems[0]
    echo(f"  {len(problems)} problems; the first: {first.prompt[:80]!r}, answer {first.answer[:40]!r}")


def _first_that_fits(run: dict[str, Any], gpus: int, nodes: int) -> dict[str, Any]:
    why = "give 1, 2, 4 or 8 GPUs"
    for tp in (size for size in (1, 2, 4, 8) if size <= gpus):
        laid_out = _laid_out(run, tp, gpus=gpus, nodes=nodes)
        if laid_out is None:
            continue
        try:
            problems = make_plan(_validated(RunConfig, laid_out)).problems
        except ValueError as error:
            problems = (str(error),)
        if not problems:
            return laid_out
        why = "; ".join(problems)
    raise ValueError(f"no simple layout on {nodes} × {gpus} GPUs takes {run['model']['path']}: {why}")


def _laid_out(run: dict[str, Any], tp: int, *, gpus: int, nodes: int) -> dict[str, Any] | None:
    """Half of the GPUs, or nodes, train, the others serve; a single GPU does both."""
    training = gpus * (nodes // 2) if nodes > 1 else max(1, gpus // 2)
    serving = gpus * nodes - training
    if training % tp or serving % tp:
        return None
    server = {"tp": tp, "count": max(1, serving // tp), **({} if serving else {"placement": "colocated"})}
    several = {"train_nodes": nodes // 2, "rollout_nodes": nodes - nodes // 2} if nodes > 1 else {}
    layout = {
        "rollout": {"server": server},
        "engine": {"parallel": {"tp": tp, "dp": training // tp, "sequence_parallel": tp > 1}},
        "optimizer": {"distributed": training > tp},
        "cluster": {"gpus_per_node": gpus, **several},
    }
    return merge_sections(run, layout)


def _validated(kind: type[_S], values: dict[str, Any]) -> _S:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ValueError("; ".join(describe(error, () if kind is RunConfig else ("data",)))) from error


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
    r"""JSON; YAML needs a point in 5.0e-05, and ``${`` is text."""
    if isinstance(value, float):
        return f"{value:.1e}"
    return json.dumps(escape_references(value), ensure_ascii=False)

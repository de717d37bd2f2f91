"""The command line, as a user meets it: help, configurations, settings, completions, tables for tools; prompts as the model
reads them, what was answered, and why it got its reward.
"""

import errno
import json
import re
import shutil
import sys
import threading
import tomllib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from weakref import WeakValueDictionary

import numpy as np
import pytest
import yaml

from tepo_megatron.cli import after_run
from tepo_megatron.config import RunConfig
from tepo_megatron.config.reward import EnvironmentConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.output.token_samples import train_samples
from tepo_megatron.runtime.files import parse_samples, read_lines
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.environments.service import EnvironmentService
from tests.support.chat_tokenizer import write_chat_tokenizer
from tests.support.checkpoints import make_whole
from tests.support.cli import invoke
from tests.support.data_files import write_jsonl, write_parquet
from tests.support.programs import TIMEOUT_S, run_python

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("name: tiny\nengine: {parallel: {tp: 2}}\n")
    return path


COMMANDS = """
  train, serve, eval, config, config show, config schema, doctor, plot, plan, import, export, objective list, objective show,
  checkpoint, checkpoint list, checkpoint verify, checkpoint prune
"""


def test_help_teaches_without_torch(tmp_path: Path) -> None:
    """Nor do commands for checkpoints need it."""
    for step in (2, 4, 6):
        make_whole(tmp_path / "checkpoints", step)
    commands = [command.split() for command in COMMANDS.split(",")]
    probe = (
        "import sys\nfrom typer.testing import CliRunner\nfrom tepo_megatron.cli.main import app\n"
        f"for command in [[], *{commands!r}]:\n"
        "    result = CliRunner().invoke(app, [*command, '--help'])\n"
        "    shown = ' '.join(result.output.split())\n"
        "    assert result.exit_code == 0, command\n"
        "    assert command in ([], ['config'], ['checkpoint']) or shown.count(' '.join(['tepo', *command])) > 1, command\n"
        "    assert not {'torch', 'numpy', 'matplotlib', 'omegaconf'} & set(sys.modules), command\n"
        "for command in ('list', 'verify', 'prune'):\n"
        f"    assert CliRunner().invoke(app, ['checkpoint', command, {str(tmp_path)!r}]).exit_code == 0, command\n"
        "assert not {'torch', 'megatron'} & set(sys.modules)"
    )
    run_python("-c", probe)


def test_the_examples_of_eval_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with held-out problems alone: an evaluation reads no training problems."""
    loaded: list[RunConfig] = []

    def evaluate_model(config: RunConfig, *_: object, **__: object) -> SimpleNamespace:
        loaded.append(config)
        return SimpleNamespace(metrics={}, k=0, num_problems=0)

    monkeypatch.setattr("tepo_megatron.tasks.evaluate.standalone.evaluate_model", evaluate_model)
    examples = re.findall(r"^ tepo (eval .*?) *$", invoke("eval", "--help").stdout, re.M)
    monkeypatch.chdir(tmp_path)
    for name in ("benchmarks.yaml", "examples/tiny/run.yaml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("name: tiny\n")
    assert len(examples) > 1
    for example in examples:
        invoke(*example.split())
    assert "heldout.jsonl" in [config.data.heldout for config in loaded]


def test_environments_are_served_to_this_machine_alone_by_default() -> None:
    shown = invoke("environment", "serve", "--help").output
    assert "[default: 127.0.0.1]" in " ".join(shown.replace("│", " ").split())


def test_a_second_signal_within_the_first_ends_served_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tepo_megatron.tasks.environments.service.EnvironmentWorkers", Mock())
    service = EnvironmentService(EnvironmentConfig(name="guess_number"), host="127.0.0.1", port=0, key="")

    def signal_again(*_: object) -> Any:
        service.stop()
        return signal_again

    def stop() -> None:
        sys.settrace(signal_again)  # at each line, of this thread alone
        service.stop()

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    service.serve()


def test_show_prints_the_whole_run_or_what_differs(run_yaml: Path) -> None:
    show = partial(invoke, "config", "show", run_yaml, "optimizer.lr=1e-5")
    assert set(yaml.safe_load(show().stdout)) == set(RunConfig.model_fields)
    assert yaml.safe_load(show("--diff").stdout) == {**yaml.safe_load(run_yaml.read_text()), "optimizer": {"lr": 1e-5}}


def test_schema_is_a_table_of_all_fields_or_of_a_part_or_json() -> None:
    schema = partial(invoke, "config", "schema")
    whole, part = schema().stdout, schema("train").stdout
    assert "train.steps" in part
    assert "optimizer.lr" in whole
    assert "optimizer.lr" not in part
    assert "train" in json.loads(schema("--json").stdout)["properties"]
    defaults = {words[0]: words[1] for line in whole.splitlines() if len(words := line.split()) > 1 and line[1:2].isalpha()}
    assert {defaults[name] for name in ("environment.kwargs", "log.mlflow.tags", "data.train[].verifier_kwargs")} == {"{}"}
    assert {defaults[name] for name in ("environment.name", "train.keep_best.metric", "objective.ratio.p")} == {"required"}
    assert [line.split()[:1] for line in whole.splitlines()].count(["objective.trust_region.low"]) == 1
    assert 'only with kind = "clip", "clip_cov"' in schema("objective.trust_region.low").stdout


SLIP = "engine.parallel.pt: unknown key (got 2); did you mean engine.parallel.tp?"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((f"{command} run.yaml engine.parallel.pt=2", SLIP) for command in ("train", "config show", "eval somewhere --run")),
        ("train", "neither a run's file nor settings"),
        ("train model.path=models/mine engine.parallel.dp=2", "data.train is not given"),
        ("config schema nothing", "no field is nothing or below it"),
        ("plot .", "has no metrics.jsonl"),
        ("objective show grpo --png run.yaml/x.png", "cannot use run.yaml: File exists"),
        ("reshard plan Llama-3.1-8B --save nowhere/x.json", "cannot use nowhere/x.json: No such file or directory"),
        ("bench scores --tokens abc", "--tokens abc has other than numbers"),
    ],
)
def test_what_a_command_cannot_use_is_a_sentence_and_exit_code_1(
    words: str, said: str, run_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_yaml.parent)
    result = invoke(*words.split(), code=1)
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_a_write_finds_full_is_a_sentence(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes, unlike opening, raise errors without a file's name."""
    monkeypatch.setattr("typer.core.TyperGroup.invoke", Mock(side_effect=OSError(code, "it is full")))
    assert invoke("config", code=1).stderr.startswith("error: a file cannot be written: it is full; make room and repeat")


def test_a_package_that_submitting_does_not_need_is_missing_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that requirements/launch.txt leaves out of the dependencies."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    installed = re.findall(r"^([\w-]+)==", (ROOT / "requirements/launch.txt").read_text().lower(), re.M)
    lacking = {re.match(r"[\w-]+", text)[0] for text in asked} - set(installed)
    assert lacking >= {"megatron-core", "safetensors", "torch"}
    for module in (name.removesuffix("-core").replace("-", "_") for name in lacking):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.setattr("typer.core.TyperGroup.invoke", lambda *_, module=module: import_module(module))
        assert f"error: this command needs {module}, which an environment" in invoke("config", code=1).stderr
    monkeypatch.undo()
    probe = "import sys; sys.modules['safetensors'] = None; from tepo_megatron.cli.main import main; main()"
    missing = run_python("-c", probe, "import", "no-model", "shards", code=1).stderr
    assert missing.startswith("error: this command needs safetensors, which ")


EARLY = """
import signal, sys

class Interrupt:
    def find_spec(name, *_):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts tests in the background has it ignored
sys.meta_path.insert(0, Interrupt)
from tepo_megatron.cli import main
main.app = lambda: signal.raise_signal(signal.SIGINT)  # as while Typer makes the commands
main.main()
"""


@pytest.mark.parametrize("module", ["typer", "tepo_megatron.cli.doctor", "none"])
def test_ctrl_c_while_the_program_starts_prints_nothing(module: str) -> None:
    done = run_python("-c", EARLY, module, code=130)
    assert (done.stdout, done.stderr) == ("", "")


def test_ctrl_c_in_a_later_import_ends_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 makes it a RuntimeError where a class names its attributes."""

    class Interrupt:
        def __set_name__(self, *_: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr("typer.core.TyperGroup.invoke", lambda *_: type("Interrupted", (), {"attribute": Interrupt()}))
    assert "Error" not in invoke("config", code=130).output


STOPPED = """
import signal, sys
from types import SimpleNamespace

number = getattr(signal, sys.argv.pop(1))
signal.signal(signal.SIGINT, signal.default_int_handler)
stopped = SimpleNamespace(evaluate_model=lambda *_, **__: signal.raise_signal(number))
sys.modules["tepo_megatron.tasks.evaluate.standalone"] = stopped
from tepo_megatron.cli.main import main
main()
"""


@pytest.mark.parametrize(("number", "name", "code"), [("SIGINT", "Ctrl-C", 130), ("SIGTERM", "SIGTERM", 75)])
def test_a_stopped_evaluation_says_how_to_continue(number: str, name: str, code: int, tmp_path: Path) -> None:
    """A callback of a rank may have started it: the launcher's signals stay the rank's."""
    environment = {"TEPO_RANKS_FOLDER": str(tmp_path), "RANK": "0"}
    arguments = ("eval", "builtin:tiny", f"output={tmp_path}")
    done = run_python("-c", STOPPED, number, *arguments, code=code, environment=environment)
    said = f"{name}: the evaluation ends; continue with the same command and --resume\n"
    assert (done.stdout, done.stderr) == ("", said)
    assert not list(tmp_path.glob("rank-*"))


def test_train_starts_the_ranks_that_a_file_or_settings_need(run_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is changed, or was a pipe, does not matter to ranks, nor to those that start again."""
    started: list[tuple[RunConfig, int, Path, int]] = []

    def run_ranks(arguments: list[str], world_size: int, *, status: Path, max_restarts: int, **_: Any) -> tuple[int, str]:
        run_yaml.unlink(missing_ok=True)
        done = invoke("config", "show", *arguments[1:])
        started.append((RunConfig.model_validate(yaml.safe_load(done.stdout)), world_size, status, max_restarts))
        return 7, "rank 1 failed"

    monkeypatch.setattr("tepo_megatron.run.api.run_ranks", run_ranks)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(run_yaml.parent)
    make_whole(Path("out/run/checkpoints"), 2)
    assert invoke("train", run_yaml, "train.steps=3", "--resume", code=7).stderr == "error: rank 1 failed\n"
    settings = ["model.path=builtin:tiny", "data.train=mine.jsonl", "reward.verifier=exact", "evaluate.every=0"]
    invoke("train", *settings, "output=out/new", "engine.parallel.dp=3", code=7)
    assert [rest for _, *rest in started] == [[2, Path("out/run/status"), 0], [3, Path("out/new/status"), 0]]
    first, second = (config for config, *_ in started)
    assert (first.name, first.train.steps, first.train.resume, first.model.dtype) == ("tiny", 3, True, "auto")
    assert second.data.train == str(run_yaml.with_name("mine.jsonl"))
    monkeypatch.setenv("HOME", str(run_yaml.parent))
    assert invoke("train", *settings, "output=~/out/run", "--resume", code=7)
    assert started[-1][0].output / "status" == started[-1][2]
    refused = invoke("train", "output=out/run", "--resume", "--from", "step_🙂", code=1)
    assert "resume_from = 'step_🙂' is no checkpoint" in refused.stderr
    assert "train: mine.jsonl" in invoke("config", "show", *settings, "--diff").stdout
    address = "http://localhost/" + 300 * "x"  # neither normalised nor looked up as a file
    assert address in invoke("config", "show", f"reward.kwargs={{base_url: {address}}}").stdout
    Path("a=b.yaml").write_text("name: odd\n")
    assert "name: odd" in invoke("config", "show", "a=b.yaml", "train.steps=3", "--diff").stdout


def test_a_warning_of_the_configuration_is_a_sentence(run_yaml: Path) -> None:
    result = invoke("config", "show", run_yaml, "objective.trust_region.low=0.2")
    assert result.stderr.startswith("warning: objective.trust_region.low = 0.2 with scale = length")
    assert "cli.py" not in result.stderr


def test_plot_draws_one_run_beside_its_metrics_and_several_where_it_is_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_jsonl(tmp_path / name / "metrics.jsonl", [{"step": 1, "reward/mean": 0.5}])
    invoke("plot", tmp_path / "a")
    assert (tmp_path / "a" / "curves.png").is_file()
    invoke("plot", tmp_path / "a", tmp_path / "b", "--png", tmp_path / "ab.png")
    assert (tmp_path / "ab.png").is_file()


def as_json(*words: object) -> Any:
    return json.loads(invoke(*words, "--json").stdout)


def samples(*words: object) -> str:
    return invoke("samples", *words).stdout


def test_tables_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_whole(tmp_path / "checkpoints", 2)
    assert [each["checkpoint"] for each in as_json("checkpoint", "list", tmp_path)] == ["step_000002"]
    assert as_json("checkpoint", "verify", tmp_path)[0]["found"].startswith("whole")
    objectives = as_json("objective", "list")
    assert objectives["presets"]["grpo"]["objective"]["trust_region"] == {
        **{"kind": "clip", "low": 0.2, "high": 0.2, "scale": "fixed"},
        **dict.fromkeys(("share", "initial", "dual")),
    }
    assert objectives["corrections"]
    (tmp_path / "resolved.yaml").write_text("name: mine\noutput: out\ntrain: {steps: 9}\nevaluate: {samples: 2}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "accuracy/greedy": 0.5}\n{"step": 1, "reward/mean": 0.25}\n')
    read = Mock(wraps=read_lines)
    monkeypatch.setattr("tepo_megatron.runtime.files.read_lines", read)
    as_json("report", tmp_path)
    status = as_json("status", tmp_path)
    assert [call.args[0].name for call in read.mock_calls] == ["metrics.jsonl"] * 2  # once each: what they say agrees
    assert (status["name"], status["runs"], status["step"], status["steps"]) == ("mine", False, 1, 9)
    assert status["last_evaluation"] == {"step": 0, "accuracy/greedy": 0.5}
    (tmp_path / "resolved.yaml").write_text("name: mine\noutput: out\n")
    for command in ("status", "report"):
        assert "resolved.yaml lacks name, output or train.steps" in invoke(command, tmp_path, code=1).output


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("checkp", {"checkpoint"}),
        ("train run.yaml optimizer.l", {"optimizer.lr="}),
        ("train run.yaml model.dtype=b", {"model.dtype=bfloat16"}),
        ("train run.yaml train.save_e", {"train.save_every="}),
    ],
)
def test_a_shell_completes_settings_and_commands(words: str, completions: set[str]) -> None:
    count = str(len(words.split()))
    environment = {"_TEPO_COMPLETE": "complete_bash", "COMP_WORDS": f"tepo {words}", "COMP_CWORD": count}
    assert set(invoke(env=environment, prog_name="tepo").stdout.split()) == completions


VARIABLE = "data.chat_template_kwargs={thinks: false}"


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """A model with a chat template, and two sources: messages, and Parquet with a template of its own."""
    model = Path(shutil.copytree(resolve_model_path("builtin:tiny"), tmp_path / "model"))
    (model / "tokenizer.model").unlink()
    write_chat_tokenizer(model)
    talk = [{"messages": [{"role": "user", "content": text}], "answer": "2"} for text in ("the sum", "<|end|>", "the sum")]
    one = write_jsonl(tmp_path / "talk.jsonl", talk)
    two = write_parquet(tmp_path / "sums.parquet", [{"q": "1+1", "answer": 2}, {"q": "1" * 99, "answer": 3}])
    sources = f"[{{path: {one}, weight: 3}}, {{path: {two}, name: sums, template: '{{q}}=', fields: {{prompt: q}}}}]"
    return [f"model.path={model}", f"data.train={sources}", "data.filter=[unique]", "data.max_prompt_tokens=60"]


def test_prompts_counts_and_what_is_left_out(settings: list[str]) -> None:
    assert "thinks is no variable" in invoke("data", "show", *settings, VARIABLE, code=1).stderr
    shown = as_json("data", "show", *settings)
    talk, sums = shown["sources"]
    assert (talk["source"], talk["share"], talk["problems"], talk["used"]) == ("talk", 0.75, 3, 2)
    assert talk["left_out"] == {"refused by the filter unique": 1}
    assert (sums["source"], sums["used"], sums["tokens"]["max"]) == ("sums", 1, 4)
    assert sums["left_out"] == {"longer than data.max_prompt_tokens": 1}
    assert [(row["id"], row["prompt"], row["tokens"], row["answer"]) for row in shown["prompts"]] == [
        ("talk:1", "⟦<|user|>⟧the sum⟦<|end|>⟧⟦<|assistant|>⟧", 5, "2"),
        ("talk:2", "⟦<|user|>⟧<|end|>⟦<|end|>⟧⟦<|assistant|>⟧", shown["prompts"][1]["tokens"], "2"),
        ("sums:1", "1+1=", 4, "2"),
    ]
    left = as_json("data", "show", *settings, "--left-out", "--source", "sums")
    assert [(row["id"], row["tokens"], row["left_out"]) for row in left["prompts"]] == [
        ("sums:2", 100, "longer than data.max_prompt_tokens")
    ]
    text = invoke("data", "show", *settings, "--limit", 1).stdout
    assert "talk:1: 5 tokens, answer '2'\n  ⟦<|user|>⟧the sum⟦<|end|>⟧⟦<|assistant|>⟧\n" in text
    assert "talk.jsonl: 1 problem left out, refused by the filter unique\n" in text


def test_sources_that_are_not_there(settings: list[str]) -> None:
    for more, message in (
        (["--source", "other"], "there is no source other; the run has talk, sums"),
        (["--heldout"], "there are no held-out problems to show"),
    ):
        assert message in invoke("data", "show", *settings, *more, code=1).stderr


def response(text: str, reward: float | None, **more: Any) -> dict[str, Any]:
    correct = reward is not None and reward >= 1
    return {"response": text, "reward": reward, "correct": correct, "tokens": 7, "finish_reason": "stop", **more}


def row(step: int, problem: str, greedy: dict[str, Any], *sampled: dict[str, Any]) -> dict[str, Any]:
    return {"step": step, "problem": problem, "prompt": "1+1=", "answer": "2", "greedy": greedy, "sampled": [*sampled]}


ROWS = [
    row(0, "a", response("3", 0.0)),
    row(10, "a", response("so 2", 1.0, components={"right": 1.0, "short": 0.25}), response("so\n2", 1.0)),
    row(10, "b", response("2", 1.0), response("1 1", 0.25, finish_reason="length"), response("x", None, error="it raised: no")),
]


def test_the_newest_evaluation_says_what_was_answered_and_why(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "samples.jsonl", ROWS)
    said = samples(tmp_path)
    assert "step 0" not in said
    for part in (
        "step 10 · problem b · answer 2",
        "    1+1=",
        "greedy: reward 1 · correct · 7 tokens",
        "    so\n    2",
        "greedy: reward 1 (right 1, short 0.25) · correct",
        "sample 1: reward 0.25 · wrong · 7 tokens · cut at rollout.sampling.max_new_tokens",
        "sample 2: no reward · wrong · 7 tokens · failed: it raised: no",
    ):
        assert part in said


def test_rows_are_chosen_by_step_problem_and_verdict(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "eval" / "samples.jsonl", ROWS)

    def problems(*words: str) -> list[tuple[int, str]]:
        return [(each["step"], each["problem"]) for each in as_json("samples", tmp_path, *words)]

    assert problems() == [(10, "a"), (10, "b")]
    assert problems("--step", "0") == [(0, "a")]
    assert problems("--wrong") == [(10, "b")]
    write_jsonl(tmp_path / "sets" / "samples.jsonl", [*ROWS, {"set": "aime", **row(10, "c", response("2", 1.0))}])
    assert "step 10 · aime · problem c" in samples(tmp_path / "sets", "--set", "aime")
    assert "problem a" not in samples(tmp_path / "sets", "--set", "aime")
    refused = invoke("samples", tmp_path / "sets", "--set", "amc", code=1)
    assert "has no set 'amc'; it has aime" in " ".join(refused.stderr.split())
    assert problems("--problem", "a") == [(0, "a"), (10, "a")]
    assert as_json("samples", path) == ROWS[1:]
    assert as_json("samples", path, "--limit", "1") == ROWS[1:2]


def test_no_more_rows_than_those_of_a_step_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(step, problem, response("3", 0.0)) for step in range(20) for problem in "abc"]
    held, counts = WeakValueDictionary[int, Any](), []

    def watched(*args: Any) -> Iterator[dict[str, Any]]:
        for index, item in enumerate(parse_samples(*args)):
            held[index] = result = OrderedDict(item)  # a plain dict takes no weak reference
            counts.append(len(held))
            yield result

    monkeypatch.setattr(after_run, "parse_samples", watched)
    write_jsonl(tmp_path / "samples.jsonl", rows)
    assert as_json("samples", tmp_path) == rows[-3:]
    assert max(counts) <= 3 + 2  # those before and after it are in hand


def test_a_training_response_says_its_source_and_who_wrote_what(tmp_path: Path) -> None:
    rollout = Rollout("talk:3", 0, [1], [5, 6, 7, 8], [-1, 0, 0, -1], "stop", WeightsVersion(0), "5 6 7 8", 1.0)
    rollout = replace(rollout, loss_mask=np.array([True, False, False, True]))
    problem = Problem("talk:3", "2+3=", "5", source="talk")
    (written,) = train_samples([rollout], {"talk:3": problem}, 1, lambda ids: " ".join(map(str, ids)))
    write_jsonl(tmp_path / "train_samples.jsonl", [{"step": 1, **written}, {"step": 1, **written, "problem": "17"}])
    said = samples(tmp_path, "--train")
    heads = [line for line in said.splitlines() if "step 1" in line]
    assert heads == ["── step 1 · problem talk:3 · answer 5", "── step 1 · talk · problem 17 · answer 5"]
    assert "4 tokens, 2 of them the model's\n  model:\n    5\n  environment:\n    6 7\n  model:\n    8" in said


@pytest.mark.parametrize(
    ("left", "words", "message"),
    [
        (None, [], "has no samples.jsonl; a run writes it at its first evaluation"),
        (None, ["--train"], "has no train_samples.jsonl; set log.train_samples"),
        (ROWS, ["--step", "5"], "has no step 5; it has 0, 10"),
        (ROWS, ["--problem", "z"], "has no problem 'z'; it has a, b"),
        ([], [], "has no sample yet"),
    ],
)
def test_samples_that_are_not_there(left: Any, words: list[str], message: str, tmp_path: Path) -> None:
    if left is not None:
        write_jsonl(tmp_path / "samples.jsonl", left)
    assert message in invoke("samples", tmp_path, *words, code=1).stderr


def test_a_teacher_is_served_with_its_own_path_and_server_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    serve_node = "tepo_megatron.sampler.fleet.external.serve_node"
    monkeypatch.setattr(serve_node, lambda config, **options: served.append((config, options["logs"])))
    server = f"{{placement: external, registry: {tmp_path}, max_model_len: 64}}"
    model = shutil.copytree(resolve_model_path("builtin:tiny"), tmp_path / "big")
    teacher = f"teachers.big={{path: {model}, place: server, server: {server}}}"
    settings = ["examples/tiny/run.yaml", f"output={tmp_path}", teacher, "objective.distill.coefficient=0.5"]
    invoke("serve", *settings, "model.lora={rank: 2}", "--teacher", "big")
    ((config, logs),) = served
    assert logs == tmp_path / "logs" / "teacher-big"  # which the trainer names
    assert (config.model.path, config.adapter_rank) == (str(model), None)
    assert config.rollout.server.load_format == "model"
    assert (config.rollout.server.registry, config.rollout.server.max_model_len) == (tmp_path, 64)
    result = invoke("serve", *settings, "--teacher", "small", code=1)
    assert "--teacher small is not one of this run's teachers: big" in " ".join(result.output.split())

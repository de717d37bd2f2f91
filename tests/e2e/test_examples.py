"""The examples with a model, an environment, an agent and a loop of one's own, on real servers: short, and whole where they are
to learn (pytest -m learns).
"""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tepo_megatron.core.rollout import Rollout
from tepo_megatron.run.metrics import read_tokens, token_files
from tepo_megatron.sampler.rollout_file import Record
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tests.support.example_runs import ROOT, SMALL_RUN, check_learning, greedy_accuracies, run, script, tepo
from tests.support.processes import assert_none_names
from tests.support.programs import TIMEOUT_S, rows, same_bytes

ENVIRONMENT = {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
NOTEBOOK = "examples/notebook/tiny.ipynb"
OWN_MODEL = ROOT / "examples" / "own_model"
START = "out/own_model_start"

NOTED = ("train.minibatches=2", "evaluate.every=2", "evaluate.problems=6", "rollout.record=true", "log.train_samples=4")
SMALL = (
    "train.steps=2",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.filter_groups.filters=[zero_variance]",
)
"""64 episodes, and beside them those of groups that are left out: dynamic sampling."""

THOUSAND = ("train.steps=3", "rollout.prompts_per_step=64", "rollout.samples_per_prompt=8")
"""1 536 episodes, so that a thousand have several turns: one in nine may be over with the first."""


def spans_of(rollout: Rollout) -> Iterator[tuple[bool, list[int]]]:
    """Spans of a response, each with whether the model wrote it. What it did not write has no log-prob."""
    mask = np.ones(rollout.response_ids.size, bool) if rollout.loss_mask is None else rollout.loss_mask
    assert not rollout.sampler_logprobs[~mask].any()
    for ids, own in zip(*(np.split(a, np.flatnonzero(np.diff(mask)) + 1) for a in (rollout.response_ids, mask)), strict=True):
        yield bool(own[0]), ids.tolist()


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "episodes", "several"),
    [(SMALL, 64, 33), pytest.param(THOUSAND, 1536, 1000, marks=[pytest.mark.learns, pytest.mark.timeout(7200)])],
)
def test_an_episode_trains_on_what_was_sampled_and_on_nothing_else(
    sizes: tuple[str, ...], episodes: int, several: int, tmp_path: Path
) -> None:
    """The environment notes the ids that it was given, and the record holds these and its own answers' alone; sampler and
    trainer agree on their log-probs; a replay of the record gives the same bits without servers or environments. At least
    ``several`` episodes have several turns.
    """
    start, out, heard = tmp_path / "start", tmp_path / "out", tmp_path / "heard.jsonl"
    run("examples/environments/make_warm_start.py", "own_env", str(start), "--steps", "8")
    noting = f"environment={{name: {ROOT}/tests/support/noting_environment.py:Noting, max_turns: 3, kwargs: {{path: {heard}}}}}"
    common = ("train", "examples/own_env/run.yaml", f"model.path={start}", *NOTED, *sizes)
    tepo(*common, noting, f"output={out}", timeout_s=3600)
    turns = check_episodes(out, heard)
    assert len(turns) == episodes
    assert sum(count > 1 for count in turns) >= several
    check_rows_of_episodes(out)
    for row in rows(out)[1:]:
        assert row["environment/tokens"] > 0
        if sizes is SMALL:
            assert row["groups/kept"] == row["groups/drawn"] - row["groups/filtered"] == 8
            assert row["groups/zero_variance"] == 0
    assert rows(out)[-1]["heldout/reward_greedy"] >= 0
    shown = tepo("samples", str(out), "--train").stdout
    assert "  model:\n" in shown
    assert "  environment:\n" in shown

    again = tmp_path / "again"
    tepo(*common, f"output={again}", f"rollout.replay={out / 'rollouts'}", "rollout.record=false", timeout_s=3600)
    figures = ("loss", "grad_norm", "reward/mean", "entropy/mean", "environment/turns", "canary/rollouts_max_gap")
    assert [[row[name] for name in figures] for row in rows(again)[1:]] == [
        [row[name] for name in figures] for row in rows(out)[1:]
    ]
    same_bytes(again, out, "model/model.safetensors")


def check_episodes(out: Path, heard: Path) -> list[int]:
    """Compares each recorded episode with what its environment has noted; the model's turns in each."""
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny"))
    noted: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in heard.read_text().splitlines():
        note = json.loads(line)
        noted.setdefault((note["problem"], str(note["turns"])), []).append(note)
    turns = []
    for rollout in (rollout for step in range(len(rows(out)) - 1) for rollout in Record.read(out / "rollouts", step).rollouts):
        spans = list(spans_of(rollout))  # the game ends with what the model writes, and answers with one character else
        own, answers = [ids for _, ids in spans[::2]], [ids for _, ids in spans[1::2]]
        note = noted[rollout.problem_id, str(own)].pop()
        assert [tokenizer.encode(text) for text in note["answers"]] == answers
        assert rollout.prompt_ids.tolist() == tokenizer.prompt_ids("how far, 1-9?")
        assert rollout.reward == note["reward"]
        turns.append(len(own))
    return turns


def check_rows_of_episodes(out: Path) -> None:
    for row in rows(out)[1:]:
        assert row["canary/rollouts_max_gap"] < 1e-4
        assert 1 < row["environment/turns"] <= 3
        assert row["reward/failed"] == row["environment/restarts"] == row.get("environment/new_histories", 0) == 0
    assert_none_names(out)


@pytest.mark.long
def test_an_agent_on_openais_client_trains_on_what_was_sampled_and_on_nothing_else(tmp_path: Path) -> None:
    """32 episodes of builtin:tiny, which writes other things than guesses too. In the record stand the model's own tokens, and
    between them what the agent says to such guesses.
    """
    pytest.importorskip("openai")
    out, sizes = tmp_path / "out", ("train.steps=2", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4")
    agent = ("train", "examples/own_agent/run.yaml", "model.path=builtin:tiny", "evaluate.every=0", "rollout.record=true")
    tepo(*agent, f"output={out}", *sizes, "environment.timeout_s=600")  # no episode may fail on a slow machine
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny"))
    problems = {problem.id: problem for problem in load_problems("builtin:guess-number")}
    episodes = [rollout for step in range(2) for rollout in Record.read(out / "rollouts", step).rollouts]
    assert len(episodes) == 32
    several = 0
    for rollout in episodes:
        problem = problems[rollout.problem_id]
        # what the agent says first follows the prompt, the token that texts begin with
        assert rollout.prompt_ids.tolist() == tokenizer.prompt_ids("")
        told, reward, turns = tokenizer.encode(problem.prompt), 0.0, 0
        for own, ids in spans_of(rollout):
            if not own:
                assert ids == told
                continue
            turns += 1
            guess = re.search(r"\d+", tokenizer.decode(ids))
            reward = float(guess is not None and guess[0] == problem.answer)
            below = guess is not None and int(problem.answer) < int(guess[0])
            told = tokenizer.encode("?" if guess is None else "<" if below else ">")
        several += turns > 1
        assert reward == 1.0 or turns == 3
        assert rollout.reward == reward
    assert several > 16
    check_rows_of_episodes(out)


@pytest.mark.learns
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("task", "config", "begins_below", "ends_above"),
    [
        ("guess_number", "examples/environments/guess_number.yaml", 0.65, 0.8),
        ("guess_number", "examples/own_agent/run.yaml", 0.65, 0.8),
        ("calculator", "examples/environments/calculator.yaml", 0.45, 0.8),
        ("own_env", "examples/own_env/run.yaml", 0.75, 0.85),
    ],
)
def test_it_learns_what_its_readme_says(task: str, config: str, begins_below: float, ends_above: float, tmp_path: Path) -> None:
    check_learning(task, config, tmp_path / "out", begins_below, ends_above, *(("--steps", "200") * (task == "own_env")))


def run_notebook(out: Path, timeout_s: float = TIMEOUT_S, **parameters: Any) -> list[dict[str, Any]]:
    parameters |= {"output": str(out)}
    run("-m", "tests.support.worlds.notebook", NOTEBOOK, json.dumps(parameters), timeout_s=timeout_s, environment=ENVIRONMENT)
    assert_none_names(out)
    assert (out / "notebook.png").read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load((out / "resolved.yaml").read_text())["reward"]["verifier"] == "(python):last_word_is_the_sum"
    return rows(out)


def run_loop(out: Path, *overrides: str, timeout_s: float = TIMEOUT_S) -> list[tuple[float, ...]]:
    command = ("examples/own_loop/loop.py", f"output={out}", *overrides)
    printed = run(*command, timeout_s=timeout_s, environment=ENVIRONMENT).stdout
    assert_none_names(out)
    assert (out / "model" / "model.safetensors").exists()
    return [
        tuple(map(float, re.findall(r"\d\.\d+", line))) for line in printed.splitlines() if "reward" in line or "held" in line
    ]


@pytest.mark.long
def test_the_loop_runs_as_it_stands(tmp_path: Path) -> None:
    small = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "train.minibatches=2", "evaluate.problems=4")
    lines = run_loop(tmp_path / "out", "train.steps=2", "evaluate.every=2", *small)
    assert [len(line) for line in lines] == [1, 1, 2]  # held out; reward; both


@pytest.mark.long
def test_a_teacher_beside_the_reward_runs_as_it_stands(tmp_path: Path) -> None:
    """On two tensor-parallel ranks. ``tepo report`` has the divergence of every token of a sample."""
    out, shown = tmp_path / "out", ("log.token_samples=4", "log.token_samples_every=1")
    tepo("train", "examples/distill/run.yaml", f"output={out}", *SMALL_RUN, "evaluate.problems=4", *shown)
    assert all(row["distill/divergence"] > 0 for row in rows(out)[1:])
    for path in token_files(out).values():
        divergence = read_tokens(path).divergence
        assert (divergence[np.isfinite(divergence)] > -1e-5).all()
        assert np.nanmax(divergence) > 0.01
    tepo("report", str(out))


@pytest.mark.long
def test_the_notebook_runs_as_it_stands(tmp_path: Path) -> None:
    trained = run_notebook(tmp_path / "out", steps=2, prompts=4, heldout=4)
    assert [row["step"] for row in trained] == [0, 1, 2]
    assert all(0 <= row["reward/mean"] <= 1 for row in trained[1:])


def test_the_notebook_has_no_outputs_and_no_magic() -> None:
    """Outputs are a reader's own; what the tests run is plain Python."""
    cells = [cell for cell in json.loads((ROOT / NOTEBOOK).read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    for cell in cells:
        compile("".join(cell["source"]), NOTEBOOK, "exec")


@pytest.mark.learns
@pytest.mark.timeout(7200)
def test_the_loop_learns(tmp_path: Path) -> None:
    greedy = [line[-1] for line in run_loop(tmp_path / "out", timeout_s=7000) if len(line) == 2]
    print("held out, greedy:", greedy)
    assert max(greedy) >= 0.75


@pytest.mark.learns
@pytest.mark.timeout(7200)
def test_the_notebook_learns(tmp_path: Path) -> None:
    run_notebook(tmp_path / "out", timeout_s=7000)
    assert max(greedy_accuracies(tmp_path / "out")) >= 0.85


def init_own_model(folder: Path, until: float) -> Path:
    """The first two commands of its README; the file of the second is the one that the example has."""
    script(OWN_MODEL / "make_model.py").make(folder / START, until=until)
    command = re.search(r"^\.venv/bin/tepo (init (?:.*\\\n)*.*)$", (OWN_MODEL / "README.md").read_text(), re.M)
    said = tepo(*shlex.split(command[1].replace("\\\n", " ")), cwd=folder).stdout
    assert "the model reads: ⟦<|user|>⟧Sort " in said
    assert (folder / "own.yaml").read_text() == (OWN_MODEL / "run.yaml").read_text()
    return folder / "out" / "sorter"


@pytest.mark.long
def test_a_model_of_transformers_with_a_tokenizer_of_its_own_is_trained(tmp_path: Path) -> None:
    """Not one line is written by hand. Trainer and server agree on every token, and what is shown is what the server read."""
    out = init_own_model(tmp_path, until=0)
    tepo("train", "own.yaml", *SMALL_RUN, "evaluate.problems=4", "evaluate.show=4", cwd=tmp_path)
    assert_none_names(out)
    assert [row["step"] for row in rows(out)] == [0, 1, 2]
    for row in rows(out)[1:]:
        assert row["canary/rollouts_max_gap"] < 1e-4
        assert row["reward/failed"] == 0
    shown = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert all(row["prompt"].startswith("Sort ") for row in shown)
    assert json.loads((out / "model" / "config.json").read_text())["model_type"] == "qwen2"
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (out / "model" / name).read_bytes() == (tmp_path / START / "sorter" / name).read_bytes()


@pytest.mark.learns
def test_the_model_learns(tmp_path: Path) -> None:
    out = init_own_model(tmp_path, until=0.8)
    tepo("train", "own.yaml", "objective.preset=grpo", "optimizer.lr=1.0e-4", "train.steps=60", cwd=tmp_path)
    averages = [row["accuracy/avg@4"] for row in rows(out) if row.get("accuracy/avg@4") is not None]
    assert 0.15 < averages[0] < 0.6
    assert averages[-1] > averages[0] + 0.25

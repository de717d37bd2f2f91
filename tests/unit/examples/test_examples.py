"""The examples: what their scripts write, two small steps of each on the reference backends, and whether they learn, which
takes minutes; every file of the paper's is a run that fits, and its page says what plan, registry and results say.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from examples.paper import results
from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.plan import make_plan
from tepo_megatron.sampler.rollout_file import Record
from tepo_megatron.tasks.data.benchmarks import BENCHMARKS, sets_yaml
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tepo_megatron.tasks.reward.programs import StackMachine
from tepo_megatron.tools.sweep import read_sweep, runs_of
from tests.support.cli import invoke
from tests.support.data_files import write_jsonl
from tests.support.example_runs import ROOT, SHORT, SMALL_RUN, greedy_accuracies, script, tepo, train_on_references
from tests.support.processes import assert_none_names
from tests.support.programs import rows

DATA = "examples/own_data"
SMALL_DATA = (*SMALL_RUN, SHORT, "evaluate.problems=10", "evaluate.show=10", "rollout.record=true")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    script(ROOT / DATA / "make_model.py").write(folder)
    return folder


def test_the_files_of_own_data_are_those_that_the_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(ROOT / DATA / "make_data.py").write(tmp_path)
    monkeypatch.chdir(ROOT)
    data = load_run(f"{DATA}/run.yaml").data
    sources = [*data.train_sources, *data.heldout_sources]
    for source in sources:
        again = source.model_copy(update={"path": source.path.replace(DATA, str(tmp_path))})
        assert load_problems(again) == load_problems(source)
    training, held = ({each.prompt for source in some for each in load_problems(source)} for some in (sources[:2], sources[2:]))
    assert not {prompt.rstrip("=") for prompt in training} & {prompt.rstrip("=") for prompt in held}


@pytest.mark.slow
def test_own_data_trains_on_both_sources(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    trained = train_on_references(f"{DATA}/run.yaml", tmp_path / "out", f"model.path={model}", *SMALL_DATA)
    for row in trained[1:]:
        assert (row["source/sums/share"], row["source/talk/share"], row["reward/failed"]) == (0.75, 0.25, 0)
        weighed = 0.75 * row["source/sums/reward"] + 0.25 * row["source/talk/reward"]
        assert row["reward/mean"] == pytest.approx(weighed, abs=1e-6)
    recorded = (tmp_path / "out" / "rollouts" / "step_0000000.jsonl").read_text().splitlines()[1:]
    ids = [json.loads(line)["problem_id"] for line in recorded]
    assert [name.split(":")[0] for name in dict.fromkeys(ids)].count("sums") == 3
    shown = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert {(row["problem"].split(":")[0], row["source"]) for row in shown} == {("sums", "sums")}  # the first 10 held-out
    assert all(row["prompt"].endswith("=") for row in shown)


@pytest.mark.learns
def test_own_data_learns_both_sources(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tepo("train", f"{DATA}/run.yaml", f"output={out}", f"model.path={model}")
    assert_none_names(out)
    trained = rows(out)
    assert trained[-1]["accuracy/greedy"] > trained[0]["accuracy/greedy"] + 0.15
    for name in ("sums", "talk"):
        first, last = (sum(row[f"source/{name}/reward"] for row in some) / 5 for some in (trained[1:6], trained[-5:]))
        assert last > first + 0.15


REWARD = "examples/own_reward"
COMPONENTS = ("correct", "carry", "brief")
GDPO = ("objective.preset=gdpo", "objective.advantage.weights=[1.0,0.2,0.1]")
SMALL_REWARD = (*SMALL_RUN, *GDPO, SHORT, "evaluate.problems=4", "evaluate.samples=2")


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    """The judge of the README, on a free port; its base URL."""
    command = [sys.executable, f"{REWARD}/judge_server.py", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        yield process.stdout.readline().split()[-1]
        process.kill()


def test_the_problems_of_own_reward_have_their_carries() -> None:
    problems, heldout = (load_problems(str(ROOT / REWARD / f"{name}.jsonl")) for name in ("problems", "heldout"))
    assert not {problem.id for problem in problems} & {problem.id for problem in heldout}
    for problem in (*problems, *heldout):
        a, b = map(int, problem.prompt.removesuffix("=").split("+"))
        assert (problem.metadata["carry"], int(problem.answer)) == (int(a % 10 + b % 10 >= 10), a + b)


@pytest.mark.slow
def test_the_verifier_of_own_reward_by_itself(judge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tepo reward try`: components, a failure where nobody answers, and a table of them."""
    monkeypatch.chdir(ROOT)
    line = {"prompt": "37+58=", "answer": "95", "carry": 1, "responses": ["7+8=15 3+5+1=9 95", "7+8=15 3+5+0=8 85", "95"]}
    arguments = ("reward", "try", write_jsonl(tmp_path / "mine.jsonl", [line]), "--run", f"{REWARD}/run.yaml")
    done = invoke(*arguments, f"reward.kwargs.base_url={judge}", "--json")
    shown = json.loads(done.stdout)
    assert [row["components"] for row in shown["responses"]] == [
        {"correct": 1.0, "carry": 1.0, "brief": 1.0},
        {"correct": 0.0, "carry": 0.0, "brief": 1.0},
        {"correct": 1.0, "carry": 0.0, "brief": 1.0},
    ]
    assert [row["reward"] for row in shown["responses"]] == pytest.approx([1.3, 0.1, 1.1])
    assert (shown["failed"], shown["mean"]) == (0, pytest.approx(2.5 / 3))
    outage = invoke(*arguments, "reward.kwargs.base_url=http://127.0.0.1:9/v1", "reward.kwargs.retries=0", code=1)
    assert "failed: problem 'mine:1': the verifier raised JudgeError: the judge at http://127.0.0.1:9/v1" in outage.stdout
    assert "3 responses, 3 failed" in outage.stdout


@pytest.mark.slow
def test_own_reward_trains_on_its_components(judge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    monkeypatch.chdir(ROOT)
    trained = train_on_references(f"{REWARD}/run.yaml", out, f"reward.kwargs.base_url={judge}", *SMALL_REWARD)
    for row in trained[1:]:
        weighed = sum(weight * row[f"reward/{name}"] for name, weight in zip(COMPONENTS, (1.0, 0.2, 0.1), strict=True))
        assert row["reward/mean"] == pytest.approx(weighed, abs=1e-6)
        assert row["reward/failed"] == 0
    sample = json.loads((out / "samples.jsonl").read_text().splitlines()[0])
    assert set(sample["greedy"]["components"]) == set(COMPONENTS)
    assert set(sample["metadata"]) == {"carry"}
    again = invoke(
        "reward", "try", str(out / "samples.jsonl"), "--run", f"{REWARD}/run.yaml", f"reward.kwargs.base_url={judge}"
    )
    assert all(name in again.stdout for name in COMPONENTS)


OBJECTIVE = ROOT / "examples/own_objective"
COMMANDS = re.findall(r"^\.venv/bin/tepo (.*)$", (OBJECTIVE / "README.md").read_text(), re.M)
SMALL_OBJECTIVE = (*SMALL_RUN, SHORT, "evaluate.problems=4")


@pytest.mark.parametrize("command", [each for each in COMMANDS if not each.startswith("train")])
def test_what_own_objective_shows_and_checks(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = invoke(*command.split(), code=int("mean_of_means" in command))
    if "mean_of_means" in command:
        shown = re.search(r"the loss is \S+ in one piece, \S+ in micro-batches", (OBJECTIVE / "README.md").read_text())
        assert shown[0] in done.stdout
    elif command.startswith("objective check"):
        assert done.stdout.count(" 0 broken") == 5  # three kinds over grpo, and two presets


def test_every_run_of_own_objective_begins_as_the_readme_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    runs = [each.split()[1:] for each in COMMANDS if each.startswith("train")]
    kinds = []
    for words in runs:
        kinds += re.findall(r"kind: (gate|geometric_mean)", invoke("config", "show", *words).stdout)
    assert kinds == ["gate", "gate", "geometric_mean"]


@pytest.mark.slow
def test_own_objective_trains_and_is_not_resumed_with_another(tmp_path: Path) -> None:
    folder, out = tmp_path / "mine", tmp_path / "out"
    shutil.copytree(OBJECTIVE, folder)
    trained = train_on_references(folder / "run.yaml", out, *SMALL_OBJECTIVE, "train.save_every=1")
    assert [row["step"] for row in trained] == [0, 1, 2]
    assert not [name for name in trained[-1] if name.startswith("clip/")]  # it marks no bounds: not measured
    assert f"- {folder}/my_objective.py" in (out / "resolved.yaml").read_text()
    plugin = folder / "my_objective.py"
    plugin.write_text(plugin.read_text().replace("4 / tau_T", "5 / tau_T"))
    with pytest.raises(ValueError, match=r"objective\.plugins' my_objective\.py, by its digest: ") as refused:
        train_on_references(folder / "run.yaml", out, *SMALL_OBJECTIVE, "train.steps=3", "train.resume=true")
    assert "a change that is meant: train.allow_change=[objective.plugins]" in str(refused.value)
    broken = r"mean_of_means\.py, breaks a rule \(micro-batches\): the loss is \S+ in one piece, \S+ in micro"
    with pytest.raises(ValueError, match=broken):
        train_on_references(
            folder / "run.yaml", tmp_path / "wrong", *SMALL_OBJECTIVE, f"objective.preset={folder}/mean_of_means.yaml"
        )
    assert not (tmp_path / "wrong").exists()


SMALL_MACHINE = (*SMALL_RUN, "rollout.prompts_per_step=16", "evaluate.problems=10", "evaluate.samples=2", "rollout.record=true")


@pytest.mark.slow
def test_programs_of_stack_machine_are_run_and_several_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    out = tmp_path / "out"
    trained = train_on_references("examples/stack_machine/run.yaml", out, *SMALL_MACHINE)
    problems = {problem.id: problem for problem in load_problems("builtin:stack-machine")}
    tokenizer, machine = load_tokenizer(resolve_model_path("builtin:stack-machine")), StackMachine()
    right: list[tuple[str, str]] = []
    for step, row in enumerate(trained[1:]):
        rewards = []
        for rollout in Record.read(out / "rollouts", step).rollouts:
            program = tokenizer.decode(rollout.response_ids.tolist())
            rewards.append(machine.score(problems[rollout.problem_id], program))
            assert rollout.reward == rewards[-1]
            right += [(rollout.problem_id, program)] if rewards[-1] else []
        assert row["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert row["reward/failed"] == 0
    assert 0 < len(right) < 128
    assert any(program != problems[name].answer for name, program in right)
    assert {"accuracy/greedy", "accuracy/avg@2"} <= set(trained[0])


@pytest.mark.learns
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("example", "begins_below", "ends_at", "gain", "last"),
    [("own_objective", 1.0, 0.0, 0.2, 2), ("stack_machine", 0.75, 0.85, 0.1, 1)],
)
def test_examples_learn_what_their_readmes_say(
    example: str, begins_below: float, ends_at: float, gain: float, last: int, tmp_path: Path
) -> None:
    """Held-out problems, greedily, by the mean of the last evaluations; minutes, on two cores."""
    tepo("train", f"examples/{example}/run.yaml", f"output={tmp_path}/out", timeout_s=7000)
    assert_none_names(tmp_path / "out")
    greedy = greedy_accuracies(tmp_path / "out")
    assert greedy[0] < begins_below
    assert fmean(greedy[-last:]) >= max(ends_at, greedy[0] + gain)


KIT = Path(__file__).parents[3] / "examples/paper"
FILES = sorted(KIT.glob("*.yaml"))
PAGE = (KIT / "README.md").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_run_fits_and_differs_from_its_first_by_its_objective(path: Path) -> None:
    config = load_run(path)
    assert make_plan(config).problems == ()
    assert config.output == Path("out/paper") / path.stem
    first = load_run(KIT / f"{path.stem.partition('-')[0]}.yaml")
    differing = {name for name in RunConfig.model_fields if getattr(config, name) != getattr(first, name)}
    allowed = {"name", "output", "objective", "rollout"} if path.stem.endswith("dapo") else {"name", "output", "objective"}
    assert differing <= allowed
    assert path == KIT / f"{first.output.name}.yaml" or "objective" in differing


def test_the_list_of_data_is_the_registrys() -> None:
    listed = json.loads((KIT / "data.json").read_text())
    assert set(listed) == {row.name for row in results.ROWS}
    for name, fields in listed.items():
        assert fields == {field: getattr(BENCHMARKS[name], field) for field in fields}
    (prepared,) = re.findall(r"^tepo data prepare (.*) --family base$", PAGE, re.M)
    assert set(prepared.split()) == set(listed)


def commands(folder: Path) -> list[list[str]]:
    """The words of each ``tepo`` command, as bash makes them of the page's blocks."""
    (folder / "examples/paper").mkdir(parents=True)
    stubs = 'tepo() { printf "%s\\n" "$@" "--end--"; }; hf() { :; }; python() { :; }\n'
    script = stubs + "".join(re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S))
    result = subprocess.run(["bash", "-euc", script], cwd=folder, capture_output=True, text=True, check=True)
    return [text.strip().split("\n") for text in result.stdout.split("--end--")[:-1]]


def test_every_command_of_the_page_is_a_run_or_an_evaluation(tmp_path: Path) -> None:
    """Each run with both seeds, into a folder of its own; each evaluation with the benchmarks and lengths of its size."""
    lock = {name: {"family": "base", "prepared_sha256": "0" * 64} for name in json.loads((KIT / "data.json").read_text())}
    (tmp_path / "benchmarks.yaml").write_text(sets_yaml(tmp_path, lock))
    trained, evaluated = [], []
    exported = set()
    for command, first, *rest in commands(tmp_path):
        if command in ("train", "launch"):
            settings = [word for word in rest if not word.startswith("--")]
            trained.append((Path(first).stem, load_run(KIT / Path(first).name, settings)))
        if command == "export":
            exported.add(rest[0])
        if command == "eval":
            size = Path(first).parent.name.partition("-")[0]
            config = load_run(tmp_path / "benchmarks.yaml", [f"model.path={first}", *rest[2:]])
            assert Path(first) == config.output / "model"
            assert rest[:2] == ["--run", f"data/benchmarks{'-reasoning' if size == '14b' else ''}/benchmarks.yaml"]
            assert set(config.evaluate.sets) == set(lock)
            of_training = load_run(KIT / f"{size}.yaml").rollout
            assert config.rollout.sampling.max_new_tokens == of_training.sampling.max_new_tokens
            assert config.rollout.server.max_model_len == of_training.server.max_model_len
            evaluated.append(config.output)
    seeds = {(name, config.seed) for name, config in trained}
    assert {(path.stem, seed) for path in FILES if not path.stem.startswith("70b") for seed in (0, 1)} <= seeds
    assert {name for name, _ in trained} == {path.stem for path in FILES}
    folders = {config.output for _, config in trained}
    assert len(folders) == len(seeds)
    assert {*folders, *(Path(model).parent for model in exported)} == set(evaluated)
    assert sorted(folder.name for folder in evaluated) == sorted(results.FOLDERS)


def test_the_costs_of_the_page_are_those_of_the_plan() -> None:
    for name in ("7b", "14b", "70b"):
        config = load_run(KIT / f"{name}.yaml")
        gpus, steps = 8 * (config.cluster.train_nodes + config.cluster.rollout_nodes), config.train.steps
        sync, overlap = (item.seconds for item in make_plan(config).time.schedules(is_colocated=False))
        hours = sync * steps / 3600
        cells = [name, gpus, steps, round(sync), f"{hours:.1f}", round(gpus * hours), round(overlap)]
        assert f"| {' | '.join(map(str, [*cells, round(overlap * steps / 3600 * gpus)]))} |\n" in PAGE


def test_the_table_is_empty_until_results_fill_it(tmp_path: Path) -> None:
    assert (KIT / "results.md").read_text() == results.table(None)
    assert results.table(None).count(results.NOT_RUN) == 1 + len(results.LINES)
    assert {line.run for line in results.LINES} == {path.stem for path in FILES}
    for row in results.ROWS:
        write(tmp_path / "7b-p1", row.name, samples=4)
        write(tmp_path / "7b-p1-seed1", row.name, samples=4, rewards=(0.5, 0.25))
    write(tmp_path / "7b-step72", "math500", samples=0)
    (tmp_path / "7b-grpo").mkdir()  # trained, not evaluated
    lines = [line.strip("| ").split(" | ") for line in results.table(tmp_path).splitlines() if line.startswith("|")]
    rows = {tuple(cells[:2]): dict(zip(lines[0][2:], cells[2:], strict=False)) for cells in lines[2:]}
    assert rows["`7b`", "72"]["seeds"] == "0"
    assert rows["`7b`", "72"]["MATH-500"].startswith("100.0 (")
    assert rows["`7b`", "72"]["AIME 2024"] == rows["`7b`", "72"]["average"] == "–"
    both = rows["`7b-p1`", "132"]
    assert both["seeds"] == "0, 1"
    assert both["Omni-MATH"].startswith("50.0 (62.5, 37.5)")
    assert both["average"] == "50.0 (62.5, 37.5)"
    assert rows["`7b-grpo`", "132"]["seeds"] == results.NOT_RUN
    assert rows["P2", "–"]["AMC 2023"] == "66.41"


def write(folder: Path, name: str, *, samples: int, rewards: tuple[float, float] = (1.0, 0.25)) -> None:
    """What ``tepo eval`` leaves of a benchmark of two problems."""
    place = folder / "eval/results"
    figures: list[dict[str, Any]] = [{f"avg@{samples}": reward} for reward in rewards] if samples else [{"greedy": 1.0}] * 2
    rows = [{"problem": str(index), "digest": str(index), "figures": item} for index, item in enumerate(figures)]
    write_jsonl(place / f"{name}.jsonl", rows)
    (place / f"{name}.json").write_text(json.dumps({"settings": {"samples": samples}}))


DISTILL = ROOT / "examples/distill"
SMALL_DISTILL = ("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "train.minibatches=1", "train.steps=1")


@pytest.mark.slow
@pytest.mark.parametrize("by", ["teacher-all", "off-policy"])
def test_a_teacher_alone_trains_on_what_the_name_of_the_run_says(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run = next(run for run in runs_of(read_sweep(DISTILL / "compare.yaml"), tmp_path) if run.choices["by"] == by)
    settings = [item for item in run.overrides if not item.startswith(("output=", "log.", "evaluate."))]
    quick = (*SMALL_DISTILL, "evaluate.every=0", "rollout.record=true")
    (row,) = train_on_references("examples/tiny/run.yaml", tmp_path / "out", *settings, *quick)[1:]
    rollouts = Record.read(tmp_path / "out" / "rollouts", 0).rollouts
    problems = {problem.id: problem for problem in load_problems("builtin:addition")}
    right = [rollout.text.endswith(f" {problems[rollout.problem_id].answer}") for rollout in rollouts]
    assert row["distill/divergence"] > 0
    assert row["reward/mean"] == 0
    assert all(right) == (by == "off-policy")
    assert all(np.exp(rollout.sampler_logprobs).prod() > 0.5 for rollout in rollouts) == (by == "off-policy")

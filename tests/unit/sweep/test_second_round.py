"""The second round of the evidence: its files are what the plan writes, and its rules are those of its page."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.evidence.second import plan, split
from examples.evidence.second.plan import METHODS, RANGES, RATES, TASKS, Chosen
from tepo_megatron.config.load import load_run
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tools.sweep import SweepFile, read_sweep, runs_of

ROOT = Path(__file__).parents[3]
NAMES = sorted(path.name for path in plan.FOLDER.glob("*.yaml"))
RESOLVED = [name for name in NAMES if (plan.FOLDER / read_sweep(plan.FOLDER / name).run).is_file()]
CHOICES = st.fixed_dictionaries(
    {name: st.builds(Chosen, st.sampled_from(RANGES), st.sampled_from([*RATES])) for name in METHODS}
)


def sweep_of(name: str) -> SweepFile:
    return read_sweep(plan.FOLDER / name)


def test_the_files_are_what_the_plan_writes() -> None:
    """A sweep that somebody edits by hand is no longer the one that was registered."""
    texts = plan.sweeps(plan.read_chosen())
    assert sorted(texts) == NAMES
    assert all((plan.FOLDER / name).read_text() == text for name, text in texts.items())


@pytest.mark.parametrize("name", RESOLVED)
def test_every_run_of_a_first_seed_is_a_configuration(name: str) -> None:
    sweep = sweep_of(name)
    configs = [load_run(sweep.run, run.overrides) for run in runs_of(sweep) if run.seed == sweep.seeds[0]]
    assert len({repr(config.model_dump(exclude={"output"})) for config in configs}) == len(configs)
    work = {(item.train.steps, item.rollout.prompts_per_step, item.rollout.samples_per_prompt) for item in configs}
    assert len(work) == 1


def test_every_method_has_the_same_number_of_settings_and_no_seed_is_used_twice() -> None:
    runs = runs_of(sweep_of("tuning.yaml"))
    assert Counter(run.choices["method"].partition("-")[0] for run in runs) == dict.fromkeys(METHODS, 12)
    first_round = set(read_sweep(ROOT / "examples/evidence/tiny.yaml").seeds)
    fresh = {seed for name in NAMES if name != "tuning.yaml" for seed in sweep_of(name).seeds}
    assert not first_round & set(sweep_of("tuning.yaml").seeds)
    assert not fresh & (first_round | set(sweep_of("tuning.yaml").seeds))


def test_the_validation_split_is_neither_trained_on_nor_in_the_test() -> None:
    assert split.FILE.read_text() == split.validation()
    problems, heldout = load_problems("builtin:addition"), {item.prompt for item in load_problems("builtin:addition-heldout")}
    left_out = {item.prompt for item in problems if not split.is_trained(item)}
    assert len(left_out) == split.PROBLEMS
    assert not left_out & heldout
    for name in RESOLVED:
        sweep = sweep_of(name)
        config = load_run(sweep.run, runs_of(sweep)[0].overrides)
        tested = [item.path for item in config.data.heldout_sources] + [item.path for item in config.evaluate.sets.values()]
        assert ("builtin:addition-heldout" in tested) == ("tiny/run.yaml" in str(sweep.run) and name != "tuning.yaml")
        if "tiny/run.yaml" in str(sweep.run):
            assert config.data.filter == ("examples/evidence/second/split.py:is_trained",)


@given(CHOICES, st.sampled_from([*TASKS]))
def test_a_bound_of_a_sequence_goes_with_the_root_of_the_length(chosen: dict[str, Chosen], task: str) -> None:
    for name, method in METHODS.items():
        text = plan.region(name, chosen[name].range, TASKS[task].tokens)
        scale = (plan.SUM_TOKENS / TASKS[task].tokens) ** (0.5 if method.sequence else 0.0)
        expected = [value * scale for value in method.ranges[RANGES.index(chosen[name].range)] if value is not None]
        assert [float(value) for value in re.findall(r"\d[\d.e-]*", text)] == pytest.approx(expected, rel=5e-3)


def test_the_setting_with_the_largest_mean_is_chosen_and_near_ties_go_to_the_first(tmp_path: Path) -> None:
    """GRPO's best is its third range at the double rate. All else is equal up to 0.001, and has the first of all."""
    means = {"grpo-third-double": 0.9, "dapo-second-usual": 0.8006}
    runs = runs_of(sweep_of("tuning.yaml"), tmp_path)
    for run in runs:
        (run.folder / "model").mkdir(parents=True)
        accuracy = means.get("-".join(run.choices.values()), 0.8) + (0.1 if run.seed == 5 else -0.1)
        rows = [{"step": step, plan.VALIDATED: accuracy} for step in (0, 60)]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plan.choose(tmp_path) == {name: Chosen() for name in METHODS} | {"grpo": Chosen("third", "double")}
    (runs[7].folder / "model").rmdir()
    with pytest.raises(ValueError, match=rf"1 of 72 runs are not done, such as {runs[7].name}"):
        plan.choose(tmp_path)


def test_what_is_chosen_is_what_is_compared(tmp_path: Path) -> None:
    chosen = {name: Chosen("second", "double") for name in METHODS}
    plan.write(chosen, tuned=True, folder=tmp_path)
    text = (tmp_path / "compare-tiny.yaml").read_text().replace("../../", f"{ROOT}/examples/")
    (tmp_path / "compare-tiny.yaml").write_text(text)
    sweep = read_sweep(tmp_path / "compare-tiny.yaml")
    runs = [run for run in runs_of(sweep) if run.seed == sweep.seeds[0]]
    configs = {run.choices["objective"]: load_run(sweep.run, run.overrides) for run in runs}
    assert {config.optimizer.lr for config in configs.values()} == {1e-4}
    region = configs["tepo"].objective.trust_region
    assert (region.low, region.high) == (6e-3, 8e-3)  # type: ignore[union-attr]
    assert configs["cispo"].objective.trust_region.high == 1.0  # type: ignore[union-attr]
    assert configs["dapo"].rollout.filter_groups is not None
    assert json.loads((tmp_path / "chosen.json").read_text())["tuned"] is True

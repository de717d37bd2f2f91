"""Files and overrides become a run, or sentences; the schema has every field, with what it takes and what it means."""

import math
import warnings
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tepo_megatron.config import DataConfig, RunConfig
from tepo_megatron.config.load import ConfigError, dump_diff, dump_resolved, load_objective, load_run, override
from tepo_megatron.config.objective.presets import PRESETS
from tepo_megatron.config.paths import absolute
from tepo_megatron.config.schema import schema_rows
from tepo_megatron.tools.faults.input_faults import malformed_config

LEAVES = [row.path for row in schema_rows() if not row.when]


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path | None, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides)
    return caught.value.problems


printable = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=30).filter(lambda s: s != "???")
awkward = st.sampled_from(
    ["1e-5", "null", "true", "0x1f", "007", "1:30", "${seed}", "\\${seed}", "a: b", "~", "", " x ", "- y", "1_0"]
)
names = (printable | awkward).filter(lambda text: text.isprintable() and text != "" and "/" not in text)
finite = st.floats(min_value=1e-12, max_value=1e12)
decays = st.floats(min_value=0, max_value=1, exclude_max=True)


@st.composite
def runs(draw: st.DrawFn) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": draw(names),
            "output": "/out/run",
            "seed": draw(st.integers(0, 2**31 - 1)),
            "optimizer": {"lr": draw(finite), "betas": [draw(decays), draw(decays)]},
            "rollout": {
                "replay": draw(st.none() | st.just("/recorded/${seed}")),
                "server": {"extra_args": draw(st.lists(printable | awkward, max_size=3))},
            },
            "train": {"minibatches": draw(st.integers(1, 4))},
            "engine": {"parallel": {"dp": draw(st.integers(1, 2))}},
            "objective": {
                "preset": draw(st.sampled_from(sorted(PRESETS))),
                "advantage": {"kind": draw(st.sampled_from(["group", "no_std", "leave_one_out"]))},
                "kl_mask": draw(st.none() | st.just({"tolerance": 0.25})),
            },
        }
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=40)
@given(config=runs())
def test_what_is_dumped_loads_as_the_same_run(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("dump")
    complete = load_run(write(folder, dump_resolved(config)))
    differing = load_run(write(folder, dump_diff(config), "diff.yaml"))
    assert complete == differing == config


@pytest.mark.parametrize(
    "given",
    [
        ["environment.name=calculator"],
        ["environment={name: mine.py:Game, max_turns: 2}", "reward.failed_reward=0"],
        ["rollout.server.speculative={draft_model: small}"],
    ],
)
def test_a_complete_configuration_names_defaults_that_cannot_be_set_and_loads(given: list[str], tmp_path: Path) -> None:
    """The verifier beside an environment, lengths of n-grams beside a draft model; as ranks that a program starts read it."""
    config = load_run(None, given)
    assert load_run(write(tmp_path, dump_resolved(config))) == absolute(config)


def test_the_difference_to_the_defaults_is_only_that() -> None:
    assert load_run(None, ["name=x"]).model_fields_set == {"name"}
    assert dump_diff(RunConfig()) == ""
    assert dump_diff(load_run(None, ["train.steps=7"])) == "train:\n  steps: 7\n"


def test_numbers_in_overrides_are_yaml_with_plain_exponents() -> None:
    steps = ["train.steps=3", "train.steps=4"]
    config = load_run(None, ["optimizer.lr=1e-5", *steps, "optimizer.betas=[0.8, 0.9]", "name='1e-5'"])
    assert (config.optimizer.lr, config.train.steps, config.optimizer.betas, config.name) == (1e-5, 4, (0.8, 0.9), "1e-5")


def test_bases_lie_under_their_file_and_overrides_over_both(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    write(tmp_path / "shared", "name: root\nseed: 1\ntrain: {steps: 5, minibatches: 2}\n", "root.yaml")
    write(tmp_path / "shared", "base: root.yaml\nname: middle\ntrain: {steps: 6}\n", "middle.yaml")
    config = load_run(write(tmp_path, "base: shared/middle.yaml\ntrain: {save_every: 3}\n"), ["seed=9"])
    assert (config.name, config.seed) == ("middle", 9)
    assert (config.train.steps, config.train.minibatches, config.train.save_every) == (6, 2, 3)


def test_references_reach_other_fields_and_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "name: tiny\noutput: out/${name}/${train.minibatches}\n")
    config = load_run(path)
    assert config.output == tmp_path / "out" / "tiny" / str(RunConfig().train.minibatches)
    assert problems(path, "output=${nme}") == ("output: Interpolation key 'nme' not found",)
    region = "objective.trust_region"
    chosen = load_run(None, ["objective.preset=grpo", f"{region}.high=${{{region}.low}}"]).objective.trust_region.model_dump()
    assert (chosen["low"], chosen["high"]) == (0.2, 0.2)  # the preset's, not TEPO's


def test_a_presets_file_is_judged_with_the_runs_own_settings(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("preset: grpo\nratio: {kind: sequence}\n")
    own = "objective: {preset: mine.yaml, trust_region: {low: 3.0e-4, high: 3.0e-4}}\n"
    with warnings.catch_warnings(action="error"):
        assert load_run(write(tmp_path, own)).objective.trust_region.model_dump()["low"] == 3e-4


def test_arguments_of_users_code_are_the_same_in_a_resolved_run(tmp_path: Path) -> None:
    """Ranks, and jobs that are launched, read it."""
    text = "reward: {verifier: 'mine.py:score', kwargs: {levels: {1: 0.5, 2: .inf}, shares: [[1, 2], {true: null}]}}\n"
    config = load_run(write(tmp_path, text))
    assert config.reward.kwargs == {"levels": {1: 0.5, 2: math.inf}, "shares": [[1, 2], {True: None}]}
    assert load_run(write(tmp_path, dump_resolved(config))).reward.kwargs == config.reward.kwargs


def test_a_section_of_another_kind_replaces_the_one_below(tmp_path: Path) -> None:
    path = write(tmp_path, "objective: {preset: grpo, trust_region: {kind: clip, low: 0.1, high: 0.3}}\n")
    assert load_run(path, ["objective.trust_region.kind=none"]).objective.trust_region.model_dump() == {"kind": "none"}
    wider = load_run(path, ["objective.trust_region.high=3", "objective.trust_region.kind=clip_weight"])
    assert wider.objective.trust_region.model_dump() == {"kind": "clip_weight", "low": None, "high": 3.0}
    # also where the kind is that of a preset
    tuned = write(tmp_path, "objective: {trust_region: {low: 0.026, high: 0.035}}\n", "tuned.yaml")
    higher = write(tmp_path, "base: tuned.yaml\nobjective: {trust_region: {kind: clip_weight, high: 3}}\n")
    for path, overrides in ((tuned, ["objective.trust_region.kind=clip_weight"]), (higher, [])):
        region = load_run(path, overrides).objective.trust_region.model_dump()
        assert region == {"kind": "clip_weight", "low": None, "high": 3.0 if path == higher else 4.0}
    assert load_run(higher, ["objective.trust_region.low=0.5"]).objective.trust_region.model_dump()["low"] == 0.5
    assert load_run(higher, ["objective.preset=cispo"]).objective.trust_region.model_dump()["high"] == 3
    for preset, kind in {"cispo": "clip_weight", "gmpo": "log_clip"}.items():
        (problem,) = problems(tuned, f"objective.preset={preset}")
        assert problem.startswith(f"objective.trust_region.low was given for the kind clip, and objective.preset = {preset} ")
        region = load_run(
            tuned, [f"objective.preset={preset}", "objective.trust_region.high=9"]
        ).objective.trust_region.model_dump()
        assert region == {"kind": kind, "low": load_objective(preset).trust_region.model_dump()["low"], "high": 9}


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {steps: 0, bogus: 1}\n")
    found = problems(path, "steps", "optimizer.lr=fast", "log.progress=loud")
    named = ['override "steps"', "optimizer.lr", "train.steps", "train.bogus", "log.progress"]
    assert [line.split(":")[0] for line in found] == named
    message = r"run\.yaml: 2 problems in the configuration\n  train\.steps: got 0.*\n  train\.bogus"
    with pytest.raises(ConfigError, match=message):
        load_run(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"train:\n  steps: [1\n", "run.yaml:3:1: not valid YAML"),
        (b"name: a\nname: b\n", "run.yaml:2:1: not valid YAML: while constructing a mapping, found duplicate key name"),
        (b"- 1\n", "the top level is a list"),
        (b"base: [a, b]\n", "base: got"),
        (b"base: none.yaml\n", "none.yaml: cannot be read: No such file"),
        (b"base: run.yaml\n", "run.yaml is its own base"),
        (b"base: .\n", "cannot be read: Is a directory"),
        (b"name: \xff\n", "not UTF-8 text (byte 6)"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_with_its_place(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    assert expected in problems(tmp_path / "run.yaml")[0]


@settings(max_examples=40)
@given(path=st.sampled_from(LEAVES), data=st.data())
def test_one_slip_of_the_finger_is_met_with_the_key_that_was_meant(path: str, data: st.DataObject) -> None:
    parent, _, key = path.rpartition(".")
    at = data.draw(st.integers(0, len(key)))
    letter = data.draw(st.sampled_from("abcxyz_"))
    slip = f"{key[:at]}{letter}{key[at:]}"
    known = {row.path for row in schema_rows()}
    prefix = f"{parent}." if parent else ""
    if f"{prefix}{slip}" in known or len(key) < 3:
        return
    assert any(f"did you mean {prefix}{key}?" in line for line in problems(None, f"{prefix}{slip}=1"))


@settings(max_examples=80)
@given(seed=st.integers(0, 2**63), number=st.integers(0, 50))
def test_each_is_valid_or_refused_in_sentences(seed: int, number: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One that is accepted is written and read back as the same run."""
    damaged = malformed_config(number, Random(seed))
    path = tmp_path_factory.mktemp("malformed") / "run.yaml"
    path.write_bytes(damaged.text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = load_run(path, damaged.overrides)
        except ConfigError as error:
            problems = error.problems
        else:
            problems = () if damaged.kind in {"a tag", "deep lists", "not UTF-8", "too large"} else ("accepted",)
            path.write_text(dump_resolved(config), encoding="utf-8")
            assert load_run(path) == absolute(config)
    assert problems, damaged.kind
    assert all(problem and problem.isprintable() and len(problem) < 1500 for problem in problems)


NO_NOISE = ("objective.kl_mask.tolerance=1e-3", "objective.kl_mask.falling=covariance", "objective.preset=grpo")


@pytest.mark.parametrize(
    "overrides",
    [
        *(["output=/dev/shm/run"], ["seed=2147483647"], ["objective.kl_mask={}"], ["output=out/${name}"]),
        *(["engine.noise_every=0", override] for override in NO_NOISE),
    ],
)
def test_what_can_be_meant_is_accepted(overrides: list[str]) -> None:
    load_run(None, overrides)


def test_an_environment_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A secret of the environment would be in resolved.yaml."""
    monkeypatch.setenv("TOKEN", "secret")
    for text in ("name: ${oc.env:TOKEN}\n", "base: ${oc.env:TOKEN}\n", "data: {train: 'a/${ oc.env : TOKEN }'}\n"):
        assert "secret" not in "".join(problems(write(tmp_path, text)))
    config = load_run(write(tmp_path, "name: \\${oc.env:TOKEN}\n"))  # text, as dump_resolved writes it
    assert config.name == load_run(write(tmp_path, dump_resolved(config))).name == "${oc.env:TOKEN}"


def load(*overrides: str) -> tuple[RunConfig, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = load_run(None, overrides)
    return config, [str(each.message) for each in caught]


@pytest.mark.parametrize("given", [(), ("data.heldout=null",)])
def test_without_held_out_problems_nothing_is_evaluated_and_that_is_said(given: tuple[str, ...], tmp_path: Path) -> None:
    assert load()[1] == []  # the demonstration has its own
    config, said = load("data.train=mine.jsonl", *given)
    assert (config.data.heldout, config.evaluate.every) == (None, 0)
    assert len(said) == 1
    assert said[0].startswith("no held-out problems (data.heldout): nothing is evaluated.")
    assert load("data.train=mine.jsonl", "evaluate.every=0", *given)[1] == []
    resolved = write(tmp_path, dump_resolved(config))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_run(resolved) == absolute(config)
        own = write(tmp_path, "data: {train: mine.jsonl}\nevaluate: {every: 0}\n", "own.yaml")
        for file, every in ((resolved, ["evaluate.every=5"]), (resolved, ["evaluate.every=0"]), (own, [])):  # 0 on purpose
            load_run(file, ["data.heldout=h.jsonl", *every])
    for late in (partial(load_run, resolved), partial(override, config)):
        with pytest.warns(UserWarning, match=r"data\.heldout is given over a run that had none and has evaluate\.every = 0"):
            assert late(["data.heldout=h.jsonl"]).evaluate.every == 0
    with pytest.warns(UserWarning, match="nothing is evaluated"):  # a section that a program built
        assert RunConfig(data=DataConfig(train="mine.jsonl")).evaluate.every == 0
    sets = load_run(None, ["data.heldout=null", "evaluate.sets.s={path: x, every: 7}"]).evaluate
    assert [step for step in range(30) if sets.any_due(step, 29, heldout=False)] == [0, 7, 14, 21, 28, 29]
    assert sets.any_due(10, 29, heldout=True)


def test_samples_of_tokens_are_written_in_a_run_of_fewer_steps_than_usual_between_them(tmp_path: Path) -> None:
    for steps, every in ((4, 4), (40, 10)):
        config = load_run(None, ["log.token_samples=4", f"train.steps={steps}"])
        assert config.log.token_samples_every == every
        assert load_run(write(tmp_path, dump_resolved(config))) == absolute(config)


def test_ones_own_model_is_not_trained_on_sums_by_an_oversight() -> None:
    own: dict[str, Any] = {"model": {"path": "models/mine"}}
    with_data = [{**own, "data": {"train": "builtin:addition"}}, {**own, "rollout": {"replay": "recorded"}}]
    for accepted in (*with_data, {"model": {"path": "builtin:tiny"}}, {}):
        RunConfig.model_validate(accepted).require_data()
    for refused in (own, {**own, "data": {"max_prompt_tokens": 9}}):
        with pytest.raises(ValueError, match=r"data.train is not given, and model.path = models/mine is a model of your own"):
            RunConfig.model_validate(refused).require_data()


def leaves(model: BaseModel, prefix: str = "") -> set[str]:
    """Every dotted path of a configuration, found by walking its values."""
    found = set()
    for name in type(model).model_fields:
        value = getattr(model, name)
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else {prefix + name}
    return found


def test_every_field_of_a_run_has_a_row_with_its_default_and_its_meaning() -> None:
    """The meaning is a string literal below the field."""
    rows = {row.path: row for row in schema_rows()}
    tags = {path for path in leaves(RunConfig()) if path.rpartition(".")[2] == "kind" and path not in rows}
    assert leaves(RunConfig()) - tags <= set(rows)
    assert all(path.rpartition(".")[0] in rows for path in tags)
    assert (rows["optimizer.lr"].default, rows["optimizer.lr"].allowed) == ("1e-06", "a number > 0")
    assert rows["engine.parallel.tp"].description.startswith("Tensor-parallel size")
    assert [row.path for row in schema_rows() if not row.description.strip()] == []
    of_variants = {row.when for row in schema_rows() if row.path == "objective.trust_region.low"}
    assert {'kind = "clip"', 'kind = "clip_weight"'} <= of_variants


@pytest.mark.parametrize(
    ("written", "expected"),
    [("24:00:00", "24:00:00"), ("00:30:05", "00:30:05"), ("200:00:00", "8-08:00:00"), ("1:00:00", "01:00:00")],
)
def test_a_time_that_yaml_reads_as_a_number_is_a_time(written: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"cluster: {{time_limit: {written}}}")
    for config in (load_run(None, [f"cluster.time_limit={written}"]), load_run(tmp_path / "run.yaml")):
        assert config.cluster.time_limit == expected
    with pytest.raises(ConfigError, match=r"cluster\.time_limit: got 60; allowed: text"):  # minutes for Slurm
        load_run(None, ["cluster.time_limit=60"])

"""Kinds of the user's own: they compute what the package's do, are checked like them, and are read without torch."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron import OwnRatio, OwnTrustRegion
from tepo_megatron.config.load import ConfigError, dump_resolved, load_run
from tepo_megatron.config.objective.custom import Plugin
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.config.schema import json_schema, schema_rows, with_plugins
from tepo_megatron.core.objective.compose import build_objective
from tests.support.objective_batches import assert_same, make_batch, masks, whole
from tests.support.programs import run_python

ROOT = Path(__file__).parents[3]
PLUGIN = str(ROOT / "tests/support/own_kinds.py")
EXAMPLE = ROOT / "examples/own_objective"

OWN: dict[str, Any] = {"preset": "grpo", "plugins": [PLUGIN]}
LOG_CLIP = {"kind": "log_clip", "low": 0.1, "high": 0.1}
COPIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "advantage": ({"advantage": {"kind": "centred"}}, {"advantage": {"kind": "no_std"}}),
    "ratio": ({"ratio": {"kind": "plain"}}, {}),
    "ratio under log_clip": ({"ratio": {"kind": "plain"}, "trust_region": LOG_CLIP}, {"trust_region": LOG_CLIP}),
    "trust region": ({"trust_region": {"kind": "band", "high": 0.1}}, {"trust_region": {"high": 0.1}}),
    "trust region under a mask": ({"trust_region": {"kind": "band"}, "opsm": {"delta": 0.01}}, {"opsm": {"delta": 0.01}}),
    "aggregation": ({"aggregation": {"kind": "by_response"}}, {}),
    "mismatch": ({"mismatch": {"kind": "capped", "cap": 1.1}}, {"mismatch": {"cap": 1.1}}),
    "mask": ({"mask": {"kind": "farthest", "threshold": 0.02}}, {"m2po": {"threshold": 0.02}}),
    "penalty": ({"penalty": {"kind": "pull", "coefficient": 0.3}}, {"kl": {"coefficient": 0.3}}),
}


@pytest.mark.parametrize("slot", COPIES)
@settings(max_examples=10)
@given(rows=masks(), seed=st.integers(0, 99))
def test_a_kind_of_ones_own_computes_what_the_packages_does(slot, rows, seed):
    own, usual = COPIES[slot]
    batch, scores = make_batch(rows, seed=seed)
    mine, ours = (
        build_objective(ObjectiveConfig.model_validate(each)) for each in ({**OWN, **own}, {"preset": "grpo", **usual})
    )
    assert mine.needs_reference == ours.needs_reference
    assert mine.config.selects_tokens == ours.config.selects_tokens
    assert_same(whole(mine, batch, scores), whole(ours, batch, scores), rtol=1e-6 if slot == "advantage" else 1e-12)


@pytest.mark.parametrize("preset", ["luspo", "sapo"])
@settings(max_examples=15)
@given(rows=masks(), seed=st.integers(0, 99), spread=st.sampled_from([1e-3, 0.3, 1.5]))
def test_the_examples_are_the_presets(preset, rows, seed, spread):
    """Without the clip's metrics, which an own region without marks has not measured."""
    batch, scores = make_batch(rows, seed=seed, spread=spread)
    own, builtin = (
        whole(build_objective(ObjectiveConfig(preset=name)), batch, scores)
        for name in (str(EXAMPLE / f"my_{preset}.yaml"), preset)
    )
    metrics = {name: value for name, value in builtin.metrics.items() if name in own.metrics or not name.startswith("clip/")}
    assert_same(own, builtin._replace(metrics=metrics), rtol=1e-12)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


HEAD = "from typing import Literal\nfrom tepo_megatron import OwnRatio, OwnTrustRegion\n"
MINE = HEAD + (
    'class Mine(OwnTrustRegion):\n    """r A."""\n    kind: Literal["mine"] = "mine"\n'
    '    tau: float = 1.0\n    """A factor."""\n'
    "    def surrogate(self, ratio_T, values):\n        return self.tau * ratio_T * values.advantage_T\n"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torhc\n", r"importing /.*/bad\.py, line 1 raised ModuleNotFoundError: No module named 'torhc'; what it"),
        ("x = 1\ny = zz\n", r"bad\.py, line 2 raised NameError: name 'zz' is not defined"),
        ("def f(:\n", r"bad\.py, line 1 raised SyntaxError"),
        ("raise SystemExit('gone')\n", "raised SystemExit: gone"),
        ("x = 1\n", "defines no kind; a kind is a subclass of one of OwnAdvantage, OwnRatio"),
        (HEAD + "class A(OwnRatio):\n    pass\n", r'A does not say what it is called; .* such as kind: Literal\["a"\]'),
        (HEAD + 'class A(OwnRatio):\n    kind: Literal["a"] = "a"\n', "A has no method log_ratio, which a subclass of"),
        (MINE.replace('"mine"', '"clip"'), "and the package both have a kind 'clip' of objective.trust_region; rename one"),
        (MINE + MINE.replace("class Mine", "class Other"), "both have a kind 'mine' of objective.trust_region; rename one"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_one_sentence(text, message, tmp_path):
    path = write(tmp_path, "bad.py", text)
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(plugins=[str(path)], trust_region={"kind": "mine"})


def test_what_it_imports_beside_it_or_in_the_current_folder_is_not_found(tmp_path, monkeypatch):
    """A name that was not given runs nothing."""
    write(tmp_path, "beside.py", "raise SystemExit('beside.py was run')\n")
    path = write(tmp_path, "mine.py", "import beside\n" + MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    with pytest.raises(ValueError, match="No module named 'beside'; what it imports has to be installed"):
        Plugin.load(str(path))
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])  # as python -m does
    with pytest.raises(ValueError, match="importing beside raised ModuleNotFoundError: No module named 'beside'"):
        Plugin.load("beside")


def test_an_installed_module_is_a_plugin_by_its_name(tmp_path, monkeypatch):
    write(tmp_path, "site/installed_kinds/__init__.py", "from installed_kinds.inner import Mine\n")
    inner = write(tmp_path, "site/installed_kinds/inner.py", MINE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    config = ObjectiveConfig(preset="grpo", plugins=["installed_kinds"], trust_region={"kind": "mine", "tau": 2.0})
    assert config.plugins == ("installed_kinds",)
    assert config.trust_region.model_dump()["tau"] == 2.0
    before = Plugin.load("installed_kinds").digest
    inner.write_text(MINE + "# another\n")
    with pytest.raises(ValueError, match=r"^objective\.plugins: installed_kinds was edited since it was imported: restart the"):
        Plugin.load("installed_kinds")
    for name in ("installed_kinds", "installed_kinds.inner"):
        monkeypatch.delitem(sys.modules, name)  # as a new program
    assert Plugin.load("installed_kinds").digest != before


RUN = "objective:\n  preset: grpo\n  plugins: [mine.py]\n  trust_region: {kind: mine, tau: 2.0}\n"


def test_paths_are_relative_to_the_file_that_names_them(tmp_path, monkeypatch):
    """Also in what a run writes down, which is the same run."""
    write(tmp_path, "runs/mine.py", MINE)
    run = write(tmp_path, "runs/run.yaml", RUN)
    elsewhere = write(tmp_path, "other/over.yaml", "base: ../runs/run.yaml\nobjective: {trust_region: {tau: 3.0}}\n")
    config = load_run(run)
    assert config.objective.plugins == (str(tmp_path / "runs/mine.py"),)
    monkeypatch.chdir(tmp_path / "other")
    resolved = load_run(write(tmp_path, "out/resolved.yaml", dump_resolved(config)))
    assert load_run(run).objective == resolved.objective == config.objective
    assert load_run(elsewhere).objective.trust_region.model_dump()["tau"] == 3.0
    assert config.model_copy(update={"seed": 3}).objective.trust_region.kind == "mine"
    monkeypatch.chdir(tmp_path / "runs")  # an override's path is relative to where the command runs
    config = load_run(None, ["objective.preset=grpo", "objective.plugins=[mine.py]", "objective.trust_region={kind: mine}"])
    assert config.objective.trust_region.model_dump()["tau"] == 1.0


def test_a_preset_of_ones_own_is_laid_over_one_that_is_there(tmp_path):
    write(tmp_path, "mine.py", MINE)
    write(tmp_path, "mine.yaml", "preset: dapo\nplugins: [mine.py]\ntrust_region: {kind: mine, tau: 2.0}\nformula: r A\n")
    run = write(tmp_path, "run.yaml", "objective: {preset: mine.yaml, aggregation: {kind: sequence_mean}}\n")
    objective = load_run(run).objective
    assert objective.trust_region.model_dump() == {"kind": "mine", "tau": 2.0}
    assert (objective.preset, objective.aggregation.kind, objective.ratio.kind) == ("dapo", "sequence_mean", "token")
    assert objective.kl_mask is None
    # a plugin that nothing is left of goes too
    assert load_run(run, ["objective.trust_region={kind: none}"]).objective.plugins == ()
    # a section without a kind has the implied one, and gives way to another
    write(tmp_path, "capped.yaml", "preset: grpo\nmismatch: {cap: 3.0}\n")
    for overrides, kind in (([], "truncate"), (["objective.mismatch={kind: mask}"], "mask")):
        capped = load_run(None, [f"objective.preset={tmp_path}/capped.yaml", *overrides]).objective
        assert capped.mismatch.kind == kind
    plain = write(tmp_path, "plain.yaml", "preset: grpo\nkl: {coefficient: 0.1}\n")
    assert ObjectiveConfig(preset=str(plain)) == ObjectiveConfig(preset="grpo", kl={"coefficient": 0.1})


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("preset: other.yaml\n", r"its own preset = 'other.yaml' must be one of tepo, "),
        ("- a\n", "a preset's file has the keys of an objective section"),
        ("objective: {kl: {coefficient: 0.1}}\n", "without 'objective:'; is it a run's file"),
        ("kl: [\n", "not valid YAML"),
        ("kl: {coefficient: 0.1, coefficient: 0.2}\n", "not valid YAML: duplicate key coefficient"),
        ("formula: [1]\n", "formula is a text"),
        ("preset: grpo\n" + "# too much\n" * 100_000, "larger than 1048576 bytes; this is no preset"),
        ("kl_: {coefficient: 0.1}\n", r"objective\.kl_: unknown key .*did you mean objective\.kl"),
        ("plugins: [gone.py]\n", r"objective\.plugins: there is no file /.*/gone\.py"),
        (None, r"objective\.preset = /.*/mine\.yaml: /.*/mine\.yaml cannot be read: No such file"),
    ],
)
def test_a_preset_that_cannot_be_used_is_one_sentence(preset, message, tmp_path):
    if preset is not None:
        write(tmp_path, "mine.yaml", preset)
    run = write(tmp_path, "run.yaml", "objective: {preset: mine.yaml}\n")
    with pytest.raises(ConfigError, match=message):
        load_run(run)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{kind: mine, tua: 2.0}", r"trust_region\.tua: unknown key \(got 2\.0\); did you mean objective\.trust_region\.tau"),
        ("{kind: mine, tau: high}", r'objective\.trust_region\.tau: got "high"; allowed: a number'),
        ("{kind: mien}", r'objective\.trust_region\.kind: got "mien"; allowed: .*"mine"'),
        ("{kind: clip, low: 0.2, high: 0.2}", r"plugins names /.*/mine\.py, and nothing of it is used; set objective\."),
    ],
)
def test_a_section_of_ones_own_is_checked_like_any_other(section, message, tmp_path):
    write(tmp_path, "mine.py", MINE)
    run = write(tmp_path, "run.yaml", RUN.replace("{kind: mine, tau: 2.0}", section))
    with pytest.raises(ConfigError, match=message):
        load_run(run)


def test_a_field_of_ones_own_may_be_allowed_to_change(tmp_path):
    write(tmp_path, "mine.py", MINE)
    run = write(tmp_path, "run.yaml", RUN)
    load_run(run, ["train.allow_change=[objective.trust_region.tau]"])
    with pytest.raises(ConfigError, match=r"train\.allow_change: .*did you mean objective\.trust_region\.tau"):
        load_run(run, ["train.allow_change=[objective.trust_region.taus]"])


def test_the_schema_has_the_kinds_of_plugins_where_they_are_asked_for():
    usual = [row.path for row in schema_rows()]
    with with_plugins([PLUGIN]):
        rows = {(row.path, row.when): row for row in schema_rows()}
        assert rows["objective.trust_region.low", 'kind = "band"'].description == "Below 1."
        assert rows["objective.mismatch.cap", 'kind = "capped"'].default == "2.0"
        assert '"centred"' in rows["objective.advantage", ""].allowed
        sections = [json_schema(), *(section for section in json_schema()["$defs"].values() if "properties" in section)]
        assert all(section["additionalProperties"] is False for section in sections)
    assert [row.path for row in schema_rows()] == usual


def test_a_field_of_ones_own_is_not_taken_for_the_packages(recwarn):
    class Mine(OwnRatio):
        kind: str = "mine"
        length_normalized: bool = True

        def log_ratio(self, values):
            return values.delta_T

    ObjectiveConfig(preset="grpo", ratio=Mine(), trust_region={"kind": "clip", "low": 0.2, "high": 0.2})
    assert not recwarn.list


def test_an_instance_of_a_class_in_hand_needs_no_file():
    class Half(OwnTrustRegion):
        kind: str = "half"

        def surrogate(self, ratio_T, values):
            return ratio_T * values.advantage_T / 2

    mine, ours = (ObjectiveConfig(preset="grpo", trust_region=region) for region in (Half(), {"kind": "none"}))
    batch, scores = make_batch([[True, True], [True]])
    half, loss = (whole(build_objective(each), batch, scores)[0] for each in (mine, ours))
    torch.testing.assert_close(half, loss / 2)
    with pytest.raises(ValueError, match=r"Half is a kind of objective\.trust_region, not of objective\.ratio"):
        ObjectiveConfig(ratio=Half())
    with pytest.raises(ValueError, match=r"no kinds of it but those of plugins; name one in objective\.plugins that defines"):
        ObjectiveConfig(mask={"kind": "mine"})


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("values.delta_T.sum()", r"Mine.log_ratio gave shape \(\) for 3 tokens; give one value per token, since sums and"),
        ("1.0", "gave float; give a tensor with one value per token"),
        ("values.mask_T", "gave torch.bool; give floating-point numbers"),
    ],
)
def test_what_a_method_gives_is_looked_at(returned, message):
    class Mine(OwnRatio):
        kind: str = "mine"

        def log_ratio(self, values):
            return eval(returned, {"values": values})

    objective = build_objective(ObjectiveConfig(preset="grpo", ratio=Mine()))
    batch, scores = make_batch([[True, True], [True]])
    with pytest.raises(ValueError, match=message):
        whole(objective, batch, scores)


def test_a_login_node_without_torch_reads_plans_and_launches_a_run_with_plugins(tmp_path, monkeypatch):
    """And says what to do where a plugin imports torch at its top."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import tepo_megatron\n"
        "config = tepo_megatron.load_run(None, sys.argv[1:])\n"
        "tepo_megatron.make_plan(config)\n"
        "from tepo_megatron.launch.job import Job, on_nodes\n"
        "print(Job(on_nodes(config)).mounts, len(Job(on_nodes(config)).roles))\n"
    )
    given = [f"objective.preset={EXAMPLE}/my_sapo.yaml", f"output={tmp_path}", "rollout.sampling.max_new_tokens=32"]
    assert f"{EXAMPLE}:{EXAMPLE}" in run_python("-c", script, *given, cwd=ROOT).stdout
    heavy = write(tmp_path, "heavy.py", "import torch\n" + MINE)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match="there is no torch here, as on a login node: import it within the methods that use"):
        Plugin.load(str(heavy))

"""Paths in a file are relative to the file, on the command line to the current folder, wherever the command starts."""

import os
from pathlib import Path

import pytest
import yaml

from tepo_megatron.config.load import ConfigError, dump_resolved, load_run
from tepo_megatron.config.paths import absolute, paths_in
from tepo_megatron.config.schema import schema_rows
from tepo_megatron.launch.job import on_nodes
from tepo_megatron.tools.sweep import read_sweep, runs_of

EVERY_PATH = """
output: made
model: {path: a/model, shards: a/shards, lora: {path: a/adapters}}
data:
  train:
    - {path: a/train.jsonl, verifier: "code/own.py:score", verifier_kwargs: {file: "kept.py:as_written"}}
    - {path: a/two.jsonl}
  heldout: a/heldout.jsonl
  order: code/own.py:length
  filter: [code/own.py:keep]
  system_prompt: "kept.py:as_written"
rollout:
  replay: a/record
  collect: code/own.py:collect
  filter_groups: {filters: ["code/own.py:group"]}
  sampling: {stop: ["kept.py:as_written"]}
  server: {registry: a/servers, placement: external, speculative: {draft_model: a/draft}}
teachers:
  template: {path: a/teacher, server: {registry: a/judges, placement: external, speculative: {draft_model: a/judge}}}
environment: {name: "code/own.py:play", agent: {key_file: a/agents}, key_file: a/key}
evaluate: {sets: {template: {path: a/set.jsonl}, kwargs: {path: a/kwargs.jsonl, verifier: "code/own.py:score"}}}
train: {callbacks: ["code/own.py:Watch"], resume_from: a/checkpoints/step_000010}
cluster: {ssh_identity: a/identity, setup: ["kept.py:as_written"]}
"""


def test_every_field_of_a_path_is_known() -> None:
    known = paths_in(yaml.safe_load(EVERY_PATH))
    rows = {row.path.replace("[]", "[0]").replace("NAME", "template"): row.allowed for row in schema_rows(of_lists=True)}
    assert {field for field, allowed in rows.items() if "a path" in allowed} <= known.keys()
    assert "kept.py" not in known.values()
    code = {field.partition("[")[0] for field, path in known.items() if path == "code/own.py"}
    assert {*code, "reward.verifier"} >= {row.path for row in schema_rows() if "path/file.py" in row.description}


@pytest.mark.parametrize("start", ["project", ".", "elsewhere"])
@pytest.mark.parametrize("as_absolute", [False, True])
def test_a_file_means_the_same_wherever_the_command_starts(
    tmp_path: Path, start: str, as_absolute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "project" / "run.yaml"
    (tmp_path / "elsewhere").mkdir()
    file.parent.mkdir()
    base = "output: made\ndata: {train: a/train.jsonl, heldout: [../heldout.jsonl], order: 'own.py:length'}\n"
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "base.yaml").write_text(base)
    file.write_text("base: ../bases/base.yaml\nmodel: {path: models/x}\nreward: {verifier: 'own.py:score'}\n")
    monkeypatch.chdir(tmp_path / start)
    named = file if as_absolute else Path(os.path.relpath(file))
    config = load_run(named, ["rollout.replay=recorded", "engine.platform=cuda"])
    assert paths_in(absolute(config)) == {
        "output": f"{tmp_path}/bases/made",
        "data.train": f"{tmp_path}/bases/a/train.jsonl",
        "data.heldout[0].path": f"{tmp_path}/heldout.jsonl",
        "data.order": f"{tmp_path}/bases/own.py",
        "model.path": f"{tmp_path}/project/models/x",
        "reward.verifier": f"{tmp_path}/project/own.py",
        "rollout.replay": str(Path.cwd() / "recorded"),
    }
    assert absolute(on_nodes(config)) == absolute(config)
    there = tmp_path / "elsewhere" / "resolved.yaml"
    there.write_text(dump_resolved(config))
    assert load_run(there) == absolute(config)


def test_a_path_that_only_the_other_rule_finds_is_refused_with_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    file = Path("runs/run.yaml")
    file.write_text("output: out/x\ndata: {train: train.jsonl}\nreward: {verifier: 'own.py:score'}\n")
    assert load_run(file).data.train == "runs/train.jsonl"  # not there by either rule: whoever reads it says so
    for name in ("train.jsonl", "own.py", "out/x/resolved.yaml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    with pytest.raises(ConfigError) as caught:
        load_run(file)
    said = "\n".join(caught.value.problems)
    for field, path in (("output", "out/x"), ("data.train", "train.jsonl"), ("reward.verifier", "own.py")):
        assert f"{field}: there is no runs/{path}: '{path}' in runs/run.yaml is relative to that file" in said
        assert f"write ../{path}" in said
    with pytest.raises(ConfigError, match=r"data.train: there is no run.yaml: on the command line .* write runs/run.yaml"):
        load_run(file, ["output=y", "data.train=run.yaml", "reward.verifier=exact"])
    assert load_run(file, ["output=y", "data.train=train.jsonl", "reward.verifier=own.py:score"]).output == Path("y")


def test_the_settings_of_a_sweep_are_relative_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sweeps").mkdir()
    Path("run.yaml").write_text("name: x\n")
    file = Path("sweeps/one.yaml")
    file.write_text(
        "run: ../run.yaml\noutput: made\noverrides: ['data.filter=[own.py:keep]', optimizer.lr=1e-5]\n"
        "axes: {data: {mine: ['data.train=mine.jsonl', 'objective.preset=mine.yaml'], "
        "sums: ['data.train=builtin:addition', 'data.order=own.py:f']}}\n"
    )
    Path("sweeps/mine.yaml").write_text("trust_region: {kind: clip, low: 0.125, high: 0.25}\n")
    mine, sums = runs_of(sweep := read_sweep(file))
    assert mine.folder == Path("sweeps/made/mine-seed0")
    configs = [load_run(sweep.run, run.overrides) for run in (mine, sums)]
    assert [config.data.filter for config in configs] == [("sweeps/own.py:keep",)] * 2
    assert [config.data.train for config in configs] == ["sweeps/mine.jsonl", "builtin:addition"]
    assert configs[0].objective.trust_region.model_dump()["low"] == 0.125
    assert (configs[1].data.order, configs[1].optimizer.lr) == ("sweeps/own.py:f", 1e-5)


def test_paths_of_another_machine_stay_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    file = Path("runs/run.yaml")
    file.write_text("data: {train: ../train.jsonl}\ncluster: {ssh: me@login}\n")
    with pytest.raises(ValueError, match=r"data\.train = '\.\./train.jsonl' is relative, but with cluster.ssh"):
        on_nodes(load_run(file, ["output=/out"]))

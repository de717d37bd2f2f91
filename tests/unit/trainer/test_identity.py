"""Which differences make a resumed run another run: named field by field, refused or let through."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tepo_megatron.config.load import ConfigError, load_run
from tepo_megatron.config.schema import schema_rows
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.trainer.run_compatibility import (
    KINDS,
    compare_runs,
    describe_run,
    idle_entries,
    refusal,
)

MODEL = resolve_model_path("builtin:tiny")
BASE = ("optimizer.lr=1e-4",)


def stored(*overrides: str, model: Path = MODEL) -> dict[str, Any]:
    """As it comes back from a checkpoint's JSON."""
    return json.loads(json.dumps(describe_run(load_run(None, [*BASE, *overrides]), model)))


def compare(*overrides: str, saved: tuple[str, ...] = (), model: Path = MODEL):
    return compare_runs(stored(*saved), describe_run(load_run(None, [*BASE, *overrides]), model))


def changed_model(folder: Path, **changes: Any) -> Path:
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optimizer.lr=2e-4", "optimizer.lr: 0.0001 -> 0.0002"),
        ("optimizer.betas=[0.9,0.99]", "optimizer.betas: [0.9, 0.95] -> [0.9, 0.99]"),
        ("optimizer.schedule=cosine", 'optimizer.schedule: "constant" -> "cosine"'),
        ("objective.trust_region.low=0.01", "objective.trust_region.low: 0.0003 -> 0.01"),
        ("objective.kl.coefficient=0.1", "objective.kl: null -> {"),
        ("rollout.sampling.temperature=0.7", "rollout.sampling.temperature: 1.0 -> 0.7"),
        ("rollout.samples_per_prompt=16", "rollout.samples_per_prompt: 8 -> 16"),
        ("train.minibatches=2", "train.minibatches: 4 -> 2"),
        ("data.chat_template=true", "data.chat_template: false -> true"),
        ("reward.verifier=exact", 'reward.verifier: "last_word" -> "exact"'),
        ("seed=3", "seed: 0 -> 3"),
    ],
)
def test_another_run_is_refused_and_let_through(override: str, line: str) -> None:
    found = compare(override)
    text = refusal(found, ())
    assert text is not None
    assert line in text
    field = line.partition(":")[0]
    assert f"train.allow_change=[{field}" in text
    for entry in (field, field.partition(".")[0]):
        assert refusal(found, (entry,)) is None
        assert idle_entries([difference.field for difference in found], (entry, "evaluate")) == ["evaluate"]
    assert refusal(found, (field[:-1],)) == text


def test_all_differences_are_in_one_message() -> None:
    text = str(refusal(compare("optimizer.lr=2e-4", "seed=3", "train.steps=7", "log.tensorboard=false"), ()))
    assert "train.steps" not in text
    assert "train.allow_change=[seed,optimizer.lr]" in text


@pytest.mark.parametrize(
    "override",
    [
        *("engine.parallel.dp=4", "engine.micro_batch_tokens=17", "optimizer.distributed=true", "train.save_every=3"),
        *("train.steps=1000", "output=elsewhere", "name=other", "log.progress=none", "evaluate.every=7", "reward.workers=3"),
        *("rollout.server.count=2", "data.heldout=null", "cluster.train_nodes=1", "engine.score_backend=torch"),
    ],
)
def test_the_same_run_elsewhere_or_longer_is_let_through(override: str) -> None:
    assert refusal(compare(override), ()) is None


def test_the_number_of_steps_counts_where_the_learning_rate_falls_until_the_last() -> None:
    differences = compare("optimizer.schedule=cosine", "train.steps=60", saved=("optimizer.schedule=cosine", "train.steps=50"))
    assert "train.steps: 50 -> 60" in str(refusal(differences, ()))
    assert refusal(differences, ("train.steps",)) is None


@pytest.mark.parametrize(
    ("changes", "overrides", "line"),
    [
        ({"num_hidden_layers": 1}, (), "architecture.num_layers: "),
        ({"rope_theta": 5e5, "rope_parameters": None}, (), "architecture.rope_theta: "),
        ({"rms_norm_eps": 1e-3}, (), "architecture.norm_eps: "),
        ({"vocab_size": 99}, (), "architecture.vocab_size: "),
        ({"intermediate_size": 8}, (), "architecture.ffn_size: "),
        ({}, ("model.dtype=bfloat16",), 'architecture.dtype: "float32" -> "bfloat16"'),
    ],
)
def test_another_model_is_never_let_through(
    changes: dict[str, Any], overrides: tuple[str, ...], line: str, tmp_path: Path
) -> None:
    text = str(refusal(compare(*overrides, model=changed_model(tmp_path / "model", **changes)), ("model", "objective")))
    assert line in text
    assert "nothing can let through" in text
    assert text.count("dtype") == (2 if overrides else 1)


LORA = ("model.lora.rank=8", "model.lora.target_modules=[q_proj]")


@pytest.mark.parametrize(
    ("saved", "current", "line"),
    [
        ((), LORA, "model.lora: null -> {"),
        (LORA, (), "model.lora: {"),
        (LORA, ("model.lora.rank=4", LORA[1]), "model.lora.rank: 8 -> 4"),
        (LORA, (LORA[0],), 'model.lora.target_modules: ["q_proj"] -> ["all-linear"]'),
    ],
)
def test_other_adapters_are_never_let_through(saved: tuple[str, ...], current: tuple[str, ...], line: str) -> None:
    text = str(refusal(compare(*current, saved=saved), ("model",)))
    assert line in text
    assert "nothing can let through; set model.path, model.dtype and model.lora back" in text


def test_another_scale_of_adapters_is_let_through_and_where_they_came_from_does_not_count() -> None:
    assert refusal(compare(*LORA, "model.lora.path=elsewhere", saved=LORA), ()) is None
    found = compare(*LORA, "model.lora.alpha=8", saved=LORA)
    assert "train.allow_change=[model.lora.alpha]" in str(refusal(found, ()))
    assert refusal(found, ("model.lora.alpha",)) is None


def test_a_checkpoint_of_a_version_without_lora_has_none() -> None:
    saved = stored()
    del saved["config"]["model"]["lora"]
    assert not compare_runs(saved, stored())
    assert refusal(compare_runs(saved, stored(*LORA)), ("model",)) is not None


def test_a_copy_of_the_model_elsewhere_is_the_same_and_another_tokenizer_is_not(tmp_path: Path) -> None:
    copy = changed_model(tmp_path / "copy")
    assert compare(f"model.path={copy}", model=copy)[0].kind == "free"
    assert refusal(compare(f"model.path={copy}", model=copy), ()) is None
    (copy / "added_tokens.json").write_text("{}")
    text = refusal(compare(model=copy), ())
    assert text is not None
    assert "model.path's tokenizer" in text
    assert refusal(compare(model=copy), ("model.path",)) is None


def with_other_weights(folder: Path, file: str = "model.safetensors") -> Path:
    weights = load_file(folder / file)
    name = next(iter(weights))
    save_file({**weights, name: weights[name] + np.float32(1)}, folder / file)
    return folder


NOT_TRAINED = "model.path's weights, which a resumed run does not train: "


def test_other_weights_are_refused_with_both_folders_and_let_through_by_name(tmp_path: Path) -> None:
    model = with_other_weights(changed_model(tmp_path / "other"))
    found = compare(f"model.path={model}", model=model)
    text = refusal(found, ())
    assert text is not None
    (line,) = (line for line in text.splitlines() if "model.path's" in line)
    assert line.startswith(f'  {NOT_TRAINED}"builtin:tiny (')
    assert f'-> "{model} (' in line
    assert "train.allow_change=[model.path]" in text
    assert text.endswith("training that is to start from other weights or adapters is another run, with an output of its own")
    assert refusal(found, ("model.path",)) is None
    assert len(found) == 1
    # also where the path is what it was, and not where there is a worse difference
    assert NOT_TRAINED in str(refusal(compare(model=model), ()))
    assert NOT_TRAINED not in str(refusal(compare("model.dtype=bfloat16", model=model), ()))
    assert "the checkpoint's adapters belong to" in str(refusal(compare(*LORA, saved=LORA, model=model), ()))


def test_of_a_version_without_digests_of_weights_another_path_is_said_and_let_through() -> None:
    saved = stored()
    del saved["weights"], saved["first_adapters"]
    assert not compare_runs(saved, stored())
    (found,) = compare_runs(saved, stored("model.path=elsewhere"))
    assert str(found).startswith("model.path, whose weights could not be compared (a resumed run trains its checkpoint's): ")
    assert refusal([found], ()) is None


def test_adapters_that_a_resumed_run_would_not_read_are_refused(tmp_path: Path) -> None:
    first, copy, other = (tmp_path / name for name in ("first", "copy", "other"))
    for folder in (first, copy, other):
        folder.mkdir()
        save_file({"a": np.zeros(5, np.float32)}, folder / "adapter_model.safetensors")
    with_other_weights(other, "adapter_model.safetensors")
    saved = (*LORA, f"model.lora.path={first}")
    for same in (saved, (*LORA, f"model.lora.path={copy}"), LORA):
        assert refusal(compare(*same, saved=saved), ()) is None
    for then, began in ((saved, f'"{first} ('), (LORA, "null ->")):
        text = str(refusal(compare(*LORA, f"model.lora.path={other}", saved=then), ()))
        assert f"model.lora.path's adapters, which a resumed run does not train: {began}" in text
        assert "train.allow_change=[model.lora.path]" in text


def test_a_field_that_the_saving_version_did_not_know_counts_if_it_is_set() -> None:
    saved = stored()
    del saved["config"]["optimizer"]["eps"]
    assert not compare_runs(saved, stored())
    (found,) = compare_runs(saved, stored("optimizer.eps=1e-5"))
    assert (found.field, found.kind) == ("optimizer.eps", "run")


def test_what_another_version_computes_with_is_told_and_let_through() -> None:
    saved = stored()
    saved["versions"]["torch"] = "1.0"
    (found,) = compare_runs(saved, stored())
    assert str(found).startswith('versions.torch: "1.0" -> ')
    assert refusal([found], ()) is None


def test_every_field_has_its_kind_and_every_line_of_the_table_a_field() -> None:
    paths = [row.path for row in schema_rows()]
    sections = {path.split(".")[0] for path in paths}
    assert sections <= set(KINDS)
    assert not [prefix for prefix in KINDS if not any(path == prefix or path.startswith(f"{prefix}.") for path in paths)]
    saved = stored()
    saved["config"]["objective"]["another"] = saved["config"]["rollout"]["server"]["another"] = 1
    kinds = {difference.field: difference.kind for difference in compare_runs(saved, stored())}
    assert kinds == {"objective.another": "run", "rollout.server.another": "free"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("optimizer.lrr", r'train\.allow_change: "optimizer\.lrr" is no field of a run.*optimizer\.lr'),
        ("trian", r'train\.allow_change: "trian" is no field of a run.*train'),
        ("nothing.at.all", r'train\.allow_change: "nothing\.at\.all" is no field of a run'),
        ("model.dtype", r"model\.dtype is of the model's architecture"),
    ],
)
def test_an_entry_that_can_allow_nothing_is_refused(entry: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run(None, [f"train.allow_change=[{entry}]"])


def test_fields_of_any_kind_of_section_can_be_allowed() -> None:
    load_run(None, ["train.allow_change=[objective, objective.trust_region.low, optimizer.lr, data.train, seed]"])

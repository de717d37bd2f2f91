"""Which differences make a resumed run another run: named field by field, refused or let through; plugins on every rank."""

import json
import re
import shutil
from dataclasses import asdict, replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tepo_megatron.config.load import ConfigError, load_run
from tepo_megatron.config.schema import schema_rows, with_plugins
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.trainer.run_compatibility import KINDS, Difference, compare_runs, describe_run, refusal
from tepo_megatron.weights.architecture import ModelSpec
from tests.support.engines import make_engine
from tests.support.launch import run_dist
from tests.support.reshard_models import MOE, small_spec

PLUGIN = Path(__file__).parents[3] / "examples/own_objective/my_objective.py"
MODEL = resolve_model_path("builtin:tiny")


def with_plugin(path: Path) -> tuple[str, ...]:
    return "objective.preset=grpo", f"objective.plugins=[{path}]", "objective.trust_region={kind: gate}"


PLUGGED = with_plugin(PLUGIN)
LORA = ("model.lora.rank=8", "model.lora.target_modules=[q_proj]")
OTHER_MODEL = "nothing can let through; set model.path, model.dtype and model.lora back"


def described(*overrides: str, model: Path = MODEL) -> dict[str, Any]:
    return describe_run(load_run(None, ["optimizer.lr=1e-4", *overrides]), model)


@cache
def in_json(*overrides: str) -> str:
    return json.dumps(described(*overrides))


def stored(*overrides: str) -> dict[str, Any]:
    """As it comes back from a checkpoint."""
    return json.loads(in_json(*overrides))


def compare(*overrides: str, saved: tuple[str, ...] = (), model: Path = MODEL) -> list[Difference]:
    return compare_runs(stored(*saved), described(*overrides, model=model))


def changed_model(folder: Path, **changes: Any) -> Path:
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_the_form_of_an_architecture_is_that_of_earlier_checkpoints(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {**llama3, "original_max_position_embeddings": 8192}
    model = changed_model(tmp_path / "llama3", rope_theta=5e5, rope_parameters=None, rope_scaling=scaling)
    assert described(model=model)["architecture"]["rope_scaling"] == {"factor": 8.0}


COSINE = ("optimizer.schedule=cosine", "train.steps=50")


@pytest.mark.parametrize(
    ("saved", "override", "line"),
    [
        ((), "optimizer.lr=2e-4", "optimizer.lr: 0.0001 -> 0.0002"),
        ((), "optimizer.betas=[0.9,0.99]", "optimizer.betas: [0.9, 0.95] -> [0.9, 0.99]"),
        ((), "optimizer.schedule=cosine", 'optimizer.schedule: "constant" -> "cosine"'),
        (COSINE, "train.steps=60", "train.steps: 50 -> 60"),  # where the learning rate falls until the last
        ((), "objective.kl.coefficient=0.1", "objective.kl: null -> {"),
        ((), "rollout.sampling.temperature=0.7", "rollout.sampling.temperature: 1.0 -> 0.7"),
        ((), "rollout.samples_per_prompt=16", "rollout.samples_per_prompt: 8 -> 16"),
        ((), "train.minibatches=2", "train.minibatches: 4 -> 2"),
        ((), "engine.moe_balance.kind=aux_loss", 'engine.moe_balance.kind: "none" -> "aux_loss"'),
        ((), "data.chat_template=true", "data.chat_template: false -> true"),
        ((), "reward.verifier=exact", 'reward.verifier: "last_word" -> "exact"'),
        ((), "environment.name=guess_number", "environment: null -> {"),
        ((), "seed=3", "seed: 0 -> 3"),
        (LORA, "model.lora.alpha=8", "model.lora.alpha: 32.0 -> 8.0"),
    ],
)
def test_another_run_is_refused_and_let_through(saved: tuple[str, ...], override: str, line: str) -> None:
    differences = compare(*saved, override, saved=saved)
    text = str(refusal(differences, ()))
    assert line in text
    field = line.partition(":")[0]
    assert f"train.allow_change=[{field}" in text
    for entry in (field, field.partition(".")[0]):
        assert refusal(differences, (entry,)) is None
    assert refusal(differences, (field[:-1],)) == text


GAME = ("environment.name=guess_number",)
SERVED = ("objective.distill={coefficient: 1, of: top_k}", "teachers.a={path: t, place: server}")
WEIGHED = ("reward.verifier=a.py:f", "reward.weights.format=1")
GATE = "objective.trust_region.tau_positive"  # PLUGIN's


@pytest.mark.parametrize(
    ("saved", "overrides", "field", "entry"),
    [
        ((), ("reward.kwargs={x: 2}",), "reward.kwargs.x", "reward.kwargs"),
        (WEIGHED, ("reward.weights.format=2",), "reward.weights.format", "reward.weights"),
        ((*GAME, "environment.kwargs.high=5"), ("environment.kwargs.high=9",), "environment.kwargs.high", "environment.kwargs"),
        (SERVED, ("teachers.a.server.dtype=float32",), "teachers.a.server.dtype", "teachers.a.server.dtype"),
        (PLUGGED, (f"{GATE}=2",), GATE, GATE),
    ],
)
def test_the_entry_that_a_refusal_names_lets_the_difference_through(
    saved: tuple[str, ...], overrides: tuple[str, ...], field: str, entry: str
) -> None:
    differences = compare(*saved, *overrides, saved=saved)
    with with_plugins([str(PLUGIN)]):
        text = str(refusal(differences, ()))
    assert f"  {field}: " in text
    assert text.endswith(f"train.allow_change=[{entry}]")
    allowed = load_run(None, [*saved, *overrides, f"train.allow_change=[{entry}]"]).train.allow_change
    assert refusal(differences, allowed) is None


def test_all_differences_that_count_are_in_one_message() -> None:
    text = refusal(compare("optimizer.lr=2e-4", "seed=3", "train.steps=7", "log.tensorboard=false"), ())
    assert "train.allow_change=[seed,optimizer.lr]" in text


@pytest.mark.parametrize(
    "override",
    [
        *("engine.parallel.dp=4", "engine.micro_batch_tokens=17", "optimizer.distributed=true", "train.save_every=3"),
        *("train.steps=1000", "output=elsewhere", "name=other", "log.progress=none", "evaluate.every=7", "reward.workers=3"),
        *("rollout.server.count=2", "data.heldout=null", "cluster.train_nodes=1", "engine.score_backend=torch"),
        "model.lora.path=elsewhere",
    ],
)
def test_the_same_run_elsewhere_or_longer_is_let_through(override: str) -> None:
    saved = LORA if "lora" in override else ()
    assert refusal(compare(*saved, override, saved=saved), ()) is None


@pytest.mark.parametrize(
    ("model", "saved", "current", "line"),
    [
        ({"num_hidden_layers": 1}, (), (), "architecture.num_layers: "),
        ({"rope_theta": 5e5, "rope_parameters": None}, (), (), "architecture.rope_theta: "),
        ({"vocab_size": 99}, (), (), "architecture.vocab_size: "),
        ({}, ("model.dtype=float32",), ("model.dtype=bfloat16",), 'architecture.dtype: "float32" -> "bfloat16"'),
        ({}, (), LORA, "model.lora: null -> {"),
        ({}, LORA, (), "model.lora: {"),
        ({}, LORA, ("model.lora.rank=4", LORA[1]), "model.lora.rank: 8 -> 4"),
        ({}, LORA, (LORA[0],), 'model.lora.target_modules: ["q_proj"] -> ["all-linear"]'),
    ],
)
def test_another_model_and_other_adapters_are_never_let_through(
    model: dict[str, Any], saved: tuple[str, ...], current: tuple[str, ...], line: str, tmp_path: Path
) -> None:
    differences = compare(*current, saved=saved, model=changed_model(tmp_path / "model", **model))
    text = str(refusal(differences, ("model", "objective")))
    assert line in text
    assert OTHER_MODEL in text
    assert text.count("dtype") == (2 if "model.dtype=bfloat16" in current else 1)


def test_a_copy_of_the_model_elsewhere_is_the_same_and_another_tokenizer_is_not(tmp_path: Path) -> None:
    copy = changed_model(tmp_path / "copy")
    assert compare(f"model.path={copy}", model=copy)[0].kind == "free"
    assert refusal(compare(f"model.path={copy}", model=copy), ()) is None
    (copy / "added_tokens.json").write_text("{}")
    assert "model.path's tokenizer" in str(refusal(compare(model=copy), ()))
    assert refusal(compare(model=copy), ("model.path",)) is None


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        ("special_tokens=true", True),
        ("kwargs={high: 9}", True),
        ("agent.verifier=exact", True),
        ("agent={port: 8400, max_request_mb: 9}", False),
        ("workers=2", False),
        ("timeout_s=20", False),
    ],
)
def test_another_environment_is_another_run_and_where_it_runs_does_not_count(override: str, refused: bool) -> None:
    agent = ("environment.adapter=agent", "environment.name=my.py:agent") if "agent" in override else ()
    saved = stored("environment.name=guess_number", *agent)
    del saved["config"]["environment"]["max_tokens"]  # as an older version saved it
    differences = compare_runs(saved, described("environment.name=guess_number", *agent, f"environment.{override}"))
    assert differences
    assert (refusal(differences, ()) is not None) == refused
    assert refusal(differences, ("environment",)) is None


def test_a_run_from_before_observations_had_a_role_is_not_continued_with_one_unasked(tmp_path: Path) -> None:
    game, chat = ("environment.name=guess_number",), changed_model(tmp_path / "chat")
    saved = stored(*game)
    del saved["config"]["environment"]["observations"]
    assert refusal(compare_runs(saved, described(*game, model=chat)), ()) is None
    (chat / "chat_template.jinja").write_text("")
    (role,) = (item for item in compare_runs(saved, described(*game, model=chat)) if item.field == "environment.observations")
    assert (str(role), role.kind) == ('environment.observations: "text" -> "auto"', "run")
    assert "observations" not in str(compare_runs(saved, described(*game, "environment.observations=text", model=chat)))


def with_other_weights(folder: Path, file: str = "model.safetensors") -> Path:
    weights = load_file(folder / file)
    name = next(iter(weights))
    save_file({**weights, name: weights[name] + np.float32(1)}, folder / file)
    return folder


NOT_TRAINED = "model.path's weights, which a resumed run does not train: "


def test_other_weights_are_refused_with_both_folders_and_let_through_by_name(tmp_path: Path) -> None:
    model = with_other_weights(changed_model(tmp_path / "other"))
    differences = compare(f"model.path={model}", model=model)
    text = str(refusal(differences, ()))
    (line,) = (line for line in text.splitlines() if "model.path's" in line)
    assert line.startswith(f'  {NOT_TRAINED}"builtin:tiny (')
    assert f'-> "{model} (' in line
    assert "train.allow_change=[model.path]" in text
    assert text.endswith("training that is to start from other weights or adapters is another run, with an output of its own")
    assert refusal(differences, ("model.path",)) is None
    assert len(differences) == 1
    # also where the path is what it was, and not where there is a worse difference
    assert NOT_TRAINED in str(refusal(compare(model=model), ()))
    assert NOT_TRAINED not in str(refusal(compare("model.dtype=bfloat16", model=model), ()))
    assert "the checkpoint's adapters belong to" in str(refusal(compare(*LORA, saved=LORA, model=model), ()))


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


def without(*paths: str, given: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a version saved that did not know these."""
    saved = stored(*given)
    for path in paths:
        *sections, name = path.split(".")
        del reduce(lambda section, key: section[key], sections, saved)[name]
    return saved


@pytest.mark.parametrize(
    ("unknown", "overrides", "line", "refused"),
    [
        (("config.optimizer.eps",), ("optimizer.eps=1e-5",), "optimizer.eps: (not known) -> 1e-05", True),
        (("config.model.lora",), LORA, "model.lora: (not known) -> {", True),
        (("plugins", "config.objective.plugins", "config.objective.mask"), PLUGGED, "by its digest: (not known) -> ", True),
        (("weights", "first_adapters"), ("model.path=elsewhere",), "model.path, whose weights could not be compared", False),
    ],
)
def test_what_the_saving_version_did_not_know_counts_if_it_is_set(
    unknown: tuple[str, ...], overrides: tuple[str, ...], line: str, refused: bool
) -> None:
    assert not compare_runs(without(*unknown), described())
    differences = compare_runs(without(*unknown), described(*overrides))
    assert line in "\n".join(map(str, differences))
    assert (refusal(differences, ()) is not None) == refused


PLAIN = MOE["MixtralForCausalLM"]
MIXTRAL = small_spec(experts=PLAIN)


@pytest.mark.parametrize(
    ("spec", "lines"),
    [
        (MIXTRAL, []),
        (replace(MIXTRAL, rotary_fraction=0.5), ["architecture.rotary_fraction: (not known) -> 0.5"]),
        (small_spec(experts=replace(PLAIN, shared_ffn_size=8)), ["architecture.experts.shared_ffn_size: (not known) -> 8"]),
    ],
)
def test_a_version_that_did_not_know_a_field_of_the_architecture_computed_with_its_default(
    spec: ModelSpec, lines: list[str]
) -> None:
    saved, current = stored(), described()
    saved["architecture"], current["architecture"] = asdict(MIXTRAL), asdict(spec)
    del saved["architecture"]["rotary_fraction"], saved["architecture"]["experts"]["shared_ffn_size"]
    assert [str(item) for item in compare_runs(saved, current)] == lines


def test_where_the_same_teacher_scores_does_not_count(tmp_path: Path) -> None:
    copies = [changed_model(tmp_path / name) for name in ("a", "b")]
    taught = ("objective.distill.coefficient=1", "objective.distill.of=top_k")
    first, moved = ((*taught, f"teachers.a={{path: {copy}, place: server}}") for copy in copies)
    slower = "teachers.a.server={start_timeout_s: 900, count: 2, gpu_memory_utilization: 0.5}"
    for same in ((*first, "teachers.a.server={}"), (*moved, "teachers.a.threads=4", slower)):
        assert refusal(compare(*same, saved=first), ()) is None
    for field, value in {"dtype": "float32", "extra_args": "[--enforce-eager]"}.items():
        text = str(refusal(compare(*first, f"teachers.a.server.{field}={value}", saved=first), ()))
        assert f"train.allow_change=[teachers.a.server.{field}]" in text
    with_other_weights(copies[1])
    assert "the weights of teachers, by their digests" in str(refusal(compare(*moved, saved=first), ()))


FULL = (
    *(*LORA, "objective.preset=dppo_tv", "objective.kl.coefficient=0.1", "objective.advantage={kind: whitened}"),
    *("teachers.a={path: t, place: server, server: {}}", "objective.distill={coefficient: 1, of: top_k}"),
    *("environment={name: a.py:agent, adapter: agent, agent: {}}", "rollout.filter_groups.max_batches=3"),
    *("rollout.server.speculative={num_speculative_tokens: 3, prompt_lookup_max: 4}", "evaluate.every=0", "data.heldout=null"),
)


@pytest.mark.parametrize(
    "field",
    [
        *("model.lora.dropout", "model.lora.serve", "objective.trust_region.cap", "objective.kl.weight", "objective.distill.k"),
        *("objective.advantage.over", "teachers.a.threads", "environment.max_tokens", "environment.agent.max_request_mb"),
        *("rollout.filter_groups.reward_range", "rollout.server.speculative.prompt_lookup_min"),
    ],
)
def test_a_default_of_an_optional_section_or_of_another_kind_is_no_difference(field: str) -> None:
    assert not compare_runs(without(f"config.{field}", given=FULL), described(*FULL))


@pytest.mark.parametrize("preset", ["tepo", "grpo", "dapo", "gspo", "dr_grpo"])
def test_a_run_from_before_scale_had_fixed_bounds(preset: str) -> None:
    given = (f"objective.preset={preset}", "objective.trust_region={low: 0.02, high: 0.03}")
    saved = without("config.objective.trust_region.scale", given=given)
    lines = [str(item) for item in compare_runs(saved, described(*given))]
    assert lines == ['objective.trust_region.scale: (not known) -> "length"'] * (preset == "tepo")


@pytest.mark.parametrize("name", ["torch", "vllm", "transformers", "math-verify"])
def test_what_another_version_computes_with_is_told_and_let_through(name: str) -> None:
    saved = stored()
    saved["versions"][name] = "1.0"
    (difference,) = compare_runs(saved, described())
    assert re.match(rf'versions\.{name}: "1\.0" -> "[\d.]+', str(difference))
    assert refusal([difference], ()) is None
    del saved["versions"][name]  # an older version did not save it
    assert not compare_runs(saved, described())


def test_every_field_has_its_kind_and_every_line_of_the_table_a_field() -> None:
    paths = [row.path for row in schema_rows()]
    assert {path.split(".")[0] for path in paths} <= set(KINDS)
    assert not [prefix for prefix in KINDS if not any(path == prefix or path.startswith(f"{prefix}.") for path in paths)]
    saved = stored()
    saved["config"]["objective"]["another"] = saved["config"]["rollout"]["server"]["another"] = 1
    differences = compare_runs(saved, described())
    kinds = {difference.field: difference.kind for difference in differences}
    assert kinds == {"objective.another": "run", "rollout.server.another": "free"}
    assert str(refusal(differences, ())).endswith("train.allow_change=[objective]")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("optimizer.lrr", r'train\.allow_change: "optimizer\.lrr" is no field of a run.*optimizer\.lr'),
        ("", r'train\.allow_change: "" is no field of a run'),
        ("teachers.a.server.dtypes", "is no field of a run; did you mean teachers.NAME.server.dtype"),
        ("reward.kwargs.x", "is no field of a run; did you mean reward.kwargs"),
        ("nothing.at.all", r'train\.allow_change: "nothing\.at\.all" is no field of a run'),
        ("model.dtype", r"model\.dtype is of the model's architecture"),
    ],
)
def test_an_entry_that_can_allow_nothing_is_refused(entry: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run(None, [f"train.allow_change=['{entry}']"])
    load_run(None, ["train.allow_change=[objective, objective.trust_region.low, optimizer.lr, data.train, seed]"])


def write_plugin(path: Path, more: str = "") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(PLUGIN.read_text() + more)
    return path


def test_a_changed_plugin_is_another_run_and_the_same_one_elsewhere_is_not(tmp_path: Path) -> None:
    path = write_plugin(tmp_path / "my_objective.py")
    saved = stored(*with_plugin(path))
    assert refusal(compare_runs(saved, described(*with_plugin(write_plugin(tmp_path / "renamed.py")))), []) is None
    write_plugin(path, "\n# another\n")
    (difference,) = compare_runs(saved, described(*with_plugin(path)))
    assert refusal([difference], []) is not None
    digest = saved["plugins"]["my_objective.py"]
    assert f'objective.plugins\' my_objective.py, by its digest: "{digest}" -> ' in str(difference)
    assert refusal([difference], ["objective.plugins"]) is None


def start(rank: int, world: int, folder: Path) -> None:
    """An engine whose plugin may differ on the last rank."""
    plugin = folder / f"rank{rank}" / "my_objective.py"
    given = with_plugin(plugin) if plugin.exists() else [f"model.dtype={('auto', 'bfloat16')[rank]}"]
    make_engine(load_run(None, [*given, f"engine.parallel.dp={world}"]))


def test_ranks_compare_their_bytes_and_dtypes(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"model.dtype: rank 1 on .* has bfloat16 and rank 0 on .* float32, as auto takes"):
        run_dist(2, start, tmp_path)
    for rank in range(2):
        write_plugin(tmp_path / f"rank{rank}" / "my_objective.py", "\n# another\n" * rank)
    message = r"rank 1 on .* has other bytes of my_objective\.py than rank 0 on .* \(digest [0-9a-f]+ and [0-9a-f]+"
    with pytest.raises(RuntimeError, match=message):
        run_dist(2, start, tmp_path)

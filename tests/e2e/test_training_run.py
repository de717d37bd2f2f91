"""The main job as a user starts it: `tepo train` with two trainer ranks and a real vLLM server, small."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tepo_megatron.run.metrics import read_tokens, token_files
from tepo_megatron.run.output.resume import MADE_BY_A_RUN
from tepo_megatron.sampler.rollout_file import Record
from tests.support.launch import run_world
from tests.support.processes import assert_none_names
from tests.support.programs import FEW_BLOCKS, RUN, rows, run_program, run_python, same_bytes, without_times

STEPS, HALF = 6, 3
SMALL = [
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "evaluate.problems=8",
    "evaluate.samples=2",
    f"evaluate.every={HALF}",
    f"train.steps={STEPS}",
    "train.minibatches=2",
    f"rollout.server.extra_args=[{FEW_BLOCKS}]",
]
KEYS = {
    *("step", "weights_version/min", "weights_version/max", "reward/mean", "reward/std", "response_len/mean"),
    *("groups/zero_variance", "entropy/mean"),
    *("entropy/delta", "kl/masked", "mask/fraction", "ratio/mean", "ratio/min", "ratio/max", "clip/low", "clip/high"),
    *("mismatch/kl", "grad_norm", "lr", "tokens/s"),
    *(f"time/{phase}" for phase in ("rollout", "reward", "score", "update", "sync", "eval", "other", "step")),
}
EVALUATION_KEYS = {"accuracy/greedy", "accuracy/avg@2", "accuracy/pass@2", "heldout/reward_greedy", "heldout/reward_sampled"}
TOKENS = ["log.token_samples=8", f"log.token_samples_every={HALF}"]
"""All of a step's groups."""

NAMED = set(re.findall(r"`([a-z][\w/@]*)`", (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text()))
EXPLAINED = [re.compile(re.escape(key).replace("NAME", r"[\w/@]+").replace("@k", r"@\d+")) for key in NAMED]
CANARY = "canary/max_logprob_gap"
CACHE_CANARY = "canary/cache_gap"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("run") / "out"
    settings = (*SMALL, "rollout.record=true", f"train.save_every={HALF}", "log.train_samples=2", *TOKENS)
    done = run_python("-m", "tepo_megatron", "train", RUN, f"output={folder}", *settings)
    (folder.parent / "printed.txt").write_text(done.stdout)
    yield folder
    assert_none_names(folder)


def test_a_run_leaves_what_it_promises(trained: Path) -> None:
    printed = (trained.parent / "printed.txt").read_text()
    assert f"step {STEPS}/{STEPS}" in printed
    assert "\x1b" not in printed
    assert "Warning" not in printed
    assert [row["step"] for row in rows(trained)] == list(range(STEPS + 1))
    for row in rows(trained)[1:]:
        assert set(row) >= KEYS
        assert set(row) >= EVALUATION_KEYS or row["step"] % HALF
        unexplained = [key for key in row if not any(pattern.fullmatch(key) for pattern in EXPLAINED)]
        assert not unexplained, "add a line to the table 'Every metric' of docs/reference/metrics.md for each of these"
    assert (trained / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((trained / "tensorboard").glob("events.out.tfevents.*"))
    assert (trained / "checkpoints" / f"step_{STEPS:06d}" / "state.json").exists()
    samples = [json.loads(line) for line in (trained / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {0, HALF, STEPS}
    assert all(sample["prompt"].endswith("=") for sample in samples)
    trained_on = [json.loads(line) for line in (trained / "train_samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in trained_on] == [step for step in range(1, STEPS + 1) for _ in range(2)]
    assert all(sample["prompt"].endswith("=") and sample["reward"] in (0, 1) for sample in trained_on)
    assert "EngineDeadError" not in (trained / "logs" / "server-0.log").read_text()  # a run that went well ends in order
    assert not list(trained.rglob("*.partial"))
    assert {path.name for path in trained.iterdir()} <= {made.partition("/")[0] for made in MADE_BY_A_RUN}
    journal = sorted(path.name for path in (trained / "journal").iterdir())
    assert journal == [f"step_{step:07d}.jsonl" for step in range(HALF, STEPS)]  # since the older of its two checkpoints


def test_the_exported_model_loads_in_transformers_and_was_trained(trained: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tepo_megatron.tasks.data.builtin import resolve_model_path

    model = AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    ids = tokenizer("37+58=", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    before = load_file(resolve_model_path("builtin:tiny") / "model.safetensors")
    after = load_file(trained / "model" / "model.safetensors")
    assert set(after) == set(before)
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_sampler_and_trainer_agree_on_every_rollout(trained: Path) -> None:
    assert max(abs(row["mismatch/kl"]) for row in rows(trained)[1:]) < 1e-6
    assert max(row[CANARY] for row in rows(trained)) < 1e-4
    assert [row["canary/drift"] for row in rows(trained)[:1]] == [1.0]
    assert {row["canary/read_back"] for row in rows(trained)} == {1.0}, "all weights there are the trainer's, bit by bit"
    assert max(row[CACHE_CANARY] for row in rows(trained)) < 1e-4
    assert max(row["canary/rollouts_max_gap"] for row in rows(trained)[1:]) < 1e-4


def test_recorded_rollouts_carry_the_version_that_sampled_them(trained: Path) -> None:
    for step in range(STEPS):
        rollouts = Record.read(trained / "rollouts", step).rollouts
        assert len(rollouts) == 32
        assert {rollout.weights_version.step for rollout in rollouts} == {step}
        (digest,) = {rollout.weights_version.digest for rollout in rollouts}
        if step == HALF:
            state = json.loads((trained / "checkpoints" / f"step_{HALF:06d}" / "state.json").read_text())
            assert digest == state["weights_digest"]
        row = rows(trained)[step + 1]
        assert (row["weights_version/min"], row["weights_version/max"]) == (step, step)


def test_values_of_single_tokens_are_those_of_rollouts_and_rows(trained: Path) -> None:
    files = token_files(trained)
    assert list(files) == [HALF, STEPS]
    for step, path in files.items():
        found, drawn, row = read_tokens(path), Record.read(trained / "rollouts", step - 1).rollouts, rows(trained)[step]
        assert [found.ids[found.tokens_of(at)].tolist() for at in range(32)] == [each.response_ids.tolist() for each in drawn]
        assert found.logprob_sampler.tolist() == [value for each in drawn for value in each.sampler_logprobs.tolist()]
        assert found.reward.tolist() == [each.reward for each in drawn]
        assert [found.prompts[at].problem for at in found.prompt] == [each.problem_id for each in drawn]
        texts = ["".join(found.pieces[id_] for id_ in found.ids[found.tokens_of(at)].tolist()) for at in range(len(drawn))]
        assert [text.removesuffix("⟦<eos>⟧") for text in texts] == [each.text for each in drawn]
        assert set(found.version.tolist()) == {step - 1}
        assert np.abs(found.logprob_trainer - found.logprob_sampler).max() < 1e-4
        first = np.repeat(found.update, found.lengths) == 1
        assert sorted(np.unique(found.update)) == [1, 2]
        assert not found.entropy_change[first].any()
        assert (found.ratio[first] == 1).all()
        assert not found.masked[first].any()
        assert ((found.advantage > 0) & (found.entropy_change < 0))[found.masked].all()
        for name, values in {
            "ratio/mean": found.ratio,
            "mask/fraction": found.masked,
            "entropy/delta": found.entropy_change,
        }.items():
            assert values.mean(dtype=np.float64) == pytest.approx(row[name], rel=1e-4), name
        assert row["mask/fraction"] > 0


def test_replayed_rollouts_reproduce_the_run_to_the_last_bit_also_when_it_is_resumed(trained: Path, tmp_path: Path) -> None:
    """Metrics and weights are those of the first run, which recorded values of tokens. The replay had written a checkpoint, and
    not yet the row of that step, which the checkpoint has too.
    """
    replay = f"rollout.replay={trained / 'rollouts'}"
    out = tmp_path / "resumed"
    settings = (f"output={out}", *SMALL, replay, "log.curves=false", "log.tensorboard=false")
    run_world("train", 2, RUN, *settings, "train.steps=2")
    metrics = out / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    tokens = ["log.token_samples=8", f"log.token_samples_every={STEPS}"]
    run_world("train", 2, RUN, *settings, "train.resume=true", *tokens)
    assert [row["step"] for row in rows(out)] == list(range(STEPS + 1))
    gaps = {f"canary/{name}" for name in ("mean_logprob_gap", "p90_logprob_gap", "drift", "read_back")}
    asked = EVALUATION_KEYS | {CANARY, CACHE_CANARY} | gaps  # what only servers can answer
    assert without_times(out) == [{k: v for k, v in row.items() if k not in asked} for row in without_times(trained)]
    same_bytes(out, trained, "model/model.safetensors")
    (found,) = token_files(out).values()
    assert found.read_bytes() == token_files(trained)[STEPS].read_bytes()


@pytest.mark.long
def test_a_run_that_takes_turns_with_its_servers_is_the_same_run(trained: Path, tmp_path: Path) -> None:
    """As on shared GPUs: servers sleep while the trainer works, the trainer's memory is away while they sample, a checkpoint
    between two steps. What neither does on a CPU: servers that give memory up.
    """
    out = tmp_path / "colocated"
    given = [f"output={out}", *SMALL, "train.steps=4", "train.save_every=2", "rollout.server.placement=colocated"]
    run_program("colocated", *given, ranks=2)

    def figures(folder: Path) -> list[dict[str, Any]]:
        return [{name: row[name] for name in row if name not in EVALUATION_KEYS} for row in without_times(folder)[:5]]

    assert figures(out) == figures(trained)
    assert_none_names(out)


def test_the_trained_model_is_evaluated_by_its_command(trained: Path, tmp_path: Path) -> None:
    """And gives the figure that the run itself saw last: the exported weights are those that the server had. A set beside
    them has sampling of its own.
    """
    heldout = "builtin:addition-heldout"
    settings = ["evaluate.problems=8", "evaluate.samples=0", f"output={tmp_path / 'eval'}", f"data.heldout={heldout}"]
    settings.append(f"rollout.server.extra_args=[{FEW_BLOCKS}]")
    of_set = {"path": heldout, "problems": 16, "samples": 4, "sampling.temperature": 0.3, "sampling.max_new_tokens": 12}
    settings += [f"evaluate.sets.sums.{name}={value}" for name, value in of_set.items()]
    run_python("-m", "tepo_megatron", "eval", trained / "model", "--run", RUN, *settings)
    found = json.loads((tmp_path / "eval" / "eval" / "metrics.json").read_text())
    assert found["accuracy/greedy"] == rows(trained)[-1]["accuracy/greedy"]
    lines = (tmp_path / "eval" / "eval" / "results" / "sums.jsonl").read_text().splitlines()
    sampled = [each for line in lines for each in json.loads(line)["sampled"]]
    assert (len(lines), len(sampled)) == (16, 64)
    assert max(each["tokens"] for each in sampled) == 12, "the set's own length cuts responses that the run's would not"
    assert found["eval/sums/truncated"] == sum(each["finish_reason"] == "length" for each in sampled) / 64
    assert found["eval/sums/maj@4"] <= found["eval/sums/pass@4"]

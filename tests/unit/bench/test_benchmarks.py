"""The benchmarks on the CPU: all methods compute the same on the same tokens, tables by hand, and refusals."""

import itertools
import json
import math
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scripts.studies import mask_noise
from scripts.studies.compare_masks import by_entropy
from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import dump_resolved
from tepo_megatron.sampler.rollout_file import write_rollouts
from tepo_megatron.tools.bench.divergences import DIVERGENCES, FUSED, PEERS, PRODUCTS, TOP_K, part_of
from tepo_megatron.tools.bench.recipes import SIZES, RecipeSetting, make_model
from tepo_megatron.tools.bench.rollouts import RolloutSetting
from tepo_megatron.tools.bench.scores import FLOOR, MEGATRON, SLOPE, ScoreMeasurement, ScoreSetting
from tepo_megatron.tools.bench.step import OLDER, OURS, PACKED, ROOT, ROWS, StepSetting, source_of
from tepo_megatron.tools.bench.step_rank import make_rollouts
from tepo_megatron.trainer.packing import pack
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.table import tensor_shapes
from tests.support.cli import invoke
from tests.support.launch import run_dist
from tests.support.programs import run_python
from tests.support.random_models import draw_rollouts

RECIPE = RecipeSetting("tiny", steps=3, sequences=8, length=20, dtype="float32", micro_batch_tokens=100)
STEP = StepSetting(("pp2",), (3.0,), "tiny", sequences=8, mean_length=16, micro_batch_tokens=64, repeats=1)


@pytest.mark.parametrize(
    ("setting", "arguments", "message"),
    [
        (replace(RECIPE, size="2b"), [["none"]], "--size 2b is unknown; known: tiny, 1b, 8b"),
        (replace(RECIPE, sequences=6), [["none"]], "--sequences 6 must be a multiple of 4"),
        (ScoreSetting(2, "cpu", 1), [8, 7, "bf16"], "--vocab 7 cannot be split into 2 equal shards"),
        (ScoreSetting(2, "cpu", 1), [8, 8, "fp8"], "--dtype fp8 is unknown; give bf16, fp32 or both"),
        (ScoreSetting(99, "cuda", 1), [8, 8, "bf16"], "99 GPUs"),
        (replace(STEP, size="2b"), ["none"], "--size 2b is unknown; known: tiny, small"),
        (replace(STEP, layouts=("tq2",)), ["none"], "--layouts tq2 is not made of sizes such as tp2"),
        (replace(STEP, ratios=(8.0,)), ["none"], "--ratios 8 is no longest length over the mean of 8 sequences"),
        (replace(STEP, sequences=6), ["none"], "--sequences 6 must be a multiple of 4"),
        (STEP, ["no-such-state"], "--before no-such-state is neither a folder nor a revision that git finds"),
    ],
)
def test_what_cannot_be_measured_is_refused(setting: Any, arguments: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        setting.run(*arguments)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forks of a process that has the imports; tests/dist/test_reshard.py has fresh ones, as the commands."""
    for module in ("recipes", "rollouts", "scores"):
        monkeypatch.setattr(f"tepo_megatron.tools.bench.{module}.in_processes", in_forks)


def in_forks(worker: Callable[..., Any], count: int, *arguments: Any, backend: str = "") -> Any:
    return run_dist(count, as_rank, worker, arguments)[0]


def as_rank(rank: int, world: int, worker: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    with mock.patch("tepo_megatron.trainer.megatron.engine.Engine.close"):  # run_dist ends the group
        return worker(rank, *arguments)


# -- recipes


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_recipe_repeated_gives_the_same_policy() -> None:
    first, second = RECIPE.run(["none", "none"])
    assert first.drift(second) == 0
    assert first.grad_norms == second.grad_norms
    # small random weights: every token is about as likely as any other
    assert first.logprobs[0] == pytest.approx(-math.log(SIZES["tiny"]["vocab_size"]), abs=0.05)
    assert len(set(first.logprobs)) == 3
    assert all(norm > 0 for norm in first.grad_norms)


@pytest.mark.parametrize(("size", "parameters"), [("1b", 1_235_814_400), ("8b", 8_030_261_248)])
def test_the_models_are_as_large_as_published(size: str, parameters: int) -> None:
    assert sum(math.prod(shape) for shape in tensor_shapes(ModelSpec.of(SIZES[size], size)).values()) == parameters


# -- rollouts


@pytest.mark.usefixtures("forks")
def test_rank_0_is_measured_both_ways_and_the_table_has_ratios_of_draws_that_follow_each_other() -> None:
    said: list[str] = []
    setting = RolloutSetting("tiny", prompts=1, samples=1, new_tokens=1, repeats=3, responses=10, length=300)
    rank0 = setting.measure_rank0(said.append)
    assert said == ["rank 0: 10 responses of 300 tokens", "rank 0: the older path, 8 responses"]
    assert min(rank0.values()) > 0
    shares = [{"client": 0.1, "engine core": 0.5, "worker": 0.25}] * 3
    ours = {"side": "ours", "seconds": [1.0, 2.0, 1.0], "tokens": [100] * 3, "shares": shares}
    offline = {"side": "offline", "seconds": [0.5, 2.0, 0.8], "tokens": [100] * 3, "shares": []}
    draws, of_rank0 = setting.report([ours, offline], rank0).tables
    assert draws.rows == [("ours", "100", "0.80 (0.50–1.00)", "10%", "0%", "75%"), ("offline", "125", "1", "", "", "")]
    names = ("read off the wire and checked", "packed", "both", "written to the journal", "sent to another rank (gloo)")
    assert [row[0] for row in of_rank0.rows] == [f"{name}, 10 × 300" for name in names]


# -- scores


def measure(path: Path, *options: str) -> dict[str, dict[str, Any]]:
    """Method → what ``tepo bench scores`` wrote of it into this file."""
    size = ("--tp", "1", "--tokens", "64", "--vocab", "512", "--dtype", "fp32", "--repeats", "1")
    invoke("bench", "scores", *size, *options, "--output", path.parent)
    record = json.loads(path.read_text())
    assert record["arguments"] == {"tp": 1, "device": "cpu", "repeats": 1, "teacher": "--teacher" in options}
    return {row["method"]: row for row in record["results"]}


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_scores_are_measured(tmp_path: Path) -> None:
    rows = measure(tmp_path / "scores-cpu-tp1.json")
    assert {MEGATRON, "tepo_megatron, in place, C++" + SLOPE} <= rows.keys()
    row = rows["tepo_megatron, in place, C++"]
    assert (row["forward_collectives"], row["backward_collectives"], row["shard_bytes"]) == (1, 0, 64 * 512 * 4)
    assert all(other["copy_gbps"] == row["copy_gbps"] > 0 for other in rows.values())
    table = (tmp_path / "scores-cpu-tp1.md").read_text().splitlines()
    assert table[2].startswith("| shape | method | forward ms")
    assert len(table) == 4 + len(rows)


_PEER = """
class DistributedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, teacher, group, inference_only):
        return logits.sum(-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.unsqueeze(1).expand(-1, 512), None, None, None
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_divergences_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "nemo_rl" / "distributed").mkdir(parents=True)
    (folder / "model_utils.py").write_text(_PEER)
    monkeypatch.syspath_prepend(tmp_path)
    rows = measure(tmp_path / "teacher-cpu-tp1.json", "--teacher")
    ours = [rows[f"tepo_megatron, in place, {kind}"] for kind in DIVERGENCES]
    assert [(row["forward_collectives"], row["backward_collectives"]) for row in ours] == [(1, 0), (1, 0), (2, 0)]
    peer = f"{PEERS[2]}, forward_kl"
    assert {FLOOR, PRODUCTS, peer, f"tepo_megatron, in place, {TOP_K}"} <= rows.keys()
    (table,) = ScoreSetting(1, "cpu", 1, teacher=True).report([ScoreMeasurement(**row) for row in rows.values()]).tables
    shown = {cells[table.columns.index("method")]: cells[table.columns.index("× best peer")] for cells in table.rows}
    assert shown[peer] == "1.00"
    total_ms = {method: row["forward_ms"] + row["backward_ms"] for method, row in rows.items()}
    fused = f"{FUSED}, forward_kl"
    assert shown[fused] == f"{total_ms[fused] / (total_ms[peer] + total_ms[PRODUCTS]):.2f}"


def test_a_peers_function_is_read_without_the_imports_of_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    method = "class Trainer:\n    @staticmethod\n    def loss(x: Tensor) -> int:\n        return 3\n"
    (tmp_path / "peer.py").write_text(f"import no_such_package\n{method}")
    monkeypatch.syspath_prepend(tmp_path)
    assert (peer := part_of("peer.py", "loss")) is not None
    assert peer.loss(1) == 3
    assert part_of("none.py", "loss") is None


def test_scores_are_ratios_to_the_methods_of_the_same_shape_and_to_a_copys_bandwidth() -> None:
    """Total times of 4 ms without the slope, 5 ms with it, 10 ms for Megatron and 2 ms for the floor; no such peer: a dash."""

    def cells(*rows: ScoreMeasurement) -> list[dict[str, str]]:
        (table,) = ScoreSetting(1, "cpu", repeats=1).report(rows).tables
        return [dict(zip(table.columns, row, strict=True)) for row in table.rows]

    def row(method: str, total: float, tokens: int = 64) -> ScoreMeasurement:
        return ScoreMeasurement(tokens, 512, "fp32", method, total / 2, total / 2, 0.0, 1, 0, 10**6, copy_gbps=10.0)

    rows = (row("own", 4.0), row("own" + SLOPE, 5.0), row(MEGATRON, 10.0), row(FLOOR, 2.0), row("own", 4.0, tokens=8))
    first, second, *_, alone = cells(*rows)
    assert (second["× Megatron"], second["× floor"], second["× without slope"]) == ("0.50", "2.50", "1.25")
    assert (alone["shape"], alone["× floor"]) == ("T 8, V 512, fp32", "–")
    assert (first["shape"], first["× without slope"], second["shape"]) == ("T 64, V 512, fp32", "", "")
    # 2 GB read in 1 ms; 2 GB read and as much written in 2.5 ms; a copy moves 4 000 GB/s
    (shown,) = cells(ScoreMeasurement(8192, 16032, "bf16", "Triton", 1.0, 2.5, 0.004, 1, 0, 2 * 10**9, copy_gbps=4000.0))
    assert (shown["GB/s forward / backward"], shown["of a copy's"]) == ("2000 / 1600", "50% / 40%")


# -- training steps


@pytest.mark.slow
def test_ours_megatrons_and_an_older_state_compute_the_same() -> None:
    results = STEP.run(str(ROOT))
    assert [row.method for row in results] == [OURS, PACKED, ROWS, OLDER]
    ours, packed, rows, older = results
    assert older.losses == ours.losses
    assert older.peak_bytes == pytest.approx(ours.peak_bytes, rel=0.1)
    assert packed.losses == pytest.approx(ours.losses, abs=1e-5)
    assert rows.losses == pytest.approx(ours.losses, abs=1e-5)
    assert all(len(figures) == 1 for row in results for figures in (row.score_s, row.update_s))
    assert {row.tokens for row in results} == {sum(STEP.draw_lengths(3.0))}
    assert all(row.peak_bytes > 0 for row in results)


class FakeWorld:
    """Answers with figures that it was given, in turn."""

    def __init__(self, peak: float, score_s: list[float], update_s: list[float], losses: list[float]) -> None:
        self.peak, self.steps = peak, zip(score_s, update_s, losses, strict=True)

    def step(self, method: str, ratio: float, *, memory: bool) -> dict[str, float]:
        if memory:
            return {"peak_bytes": self.peak}
        return dict(zip(("score_s", "update_s", "loss"), next(self.steps), strict=True))


def test_methods_that_do_not_compute_the_same_are_not_compared() -> None:
    same, other = (FakeWorld(1.0, [1.0] * 2, [3.0] * 2, losses) for losses in ([4.0, 4.0], [4.0, 4.002]))
    with pytest.raises(RuntimeError, match=r"tp2, longest/mean 3: .* they do not compute the same"):
        replace(STEP, repeats=2).compare("tp2", 3.0, {OURS: same, PACKED: other})


def test_ratios_are_medians_of_the_pairs_of_each_repeat() -> None:
    setting = replace(STEP, repeats=3, ratios=(1.0,))
    ours = FakeWorld(2.0**20, [1.0, 1.0, 2.0], [1.0, 2.0, 2.0], [4.0] * 3)
    other = FakeWorld(2.0**21, [1.0, 1.0, 1.0], [2.0, 2.0, 1.0], [4.0] * 3)
    (table,) = setting.report(setting.compare("tp2", 1.0, {OURS: ours, PACKED: other}), "none").tables
    first, second = table.rows
    assert len(first) == len(second) == len(table.columns)
    assert first == ("tp2", "1", OURS, "64", "43", "", "", "0.50 (0.50–0.67)", "1.0")  # of 8 × 16 tokens
    assert second == ("", "", PACKED, "64", "43", *("1.00 (0.50–2.00)", "1.00 (0.50–1.50)", "0.67 (0.25–1.00)"), "2.0")


@given(st.integers(2, 60).map(lambda groups: 4 * groups), st.floats(1, 7), st.integers(64, 512))
def test_lengths_have_the_ratio_that_was_asked_for(sequences: int, ratio: float, mean: int) -> None:
    lengths = replace(STEP, sequences=sequences, mean_length=mean).draw_lengths(ratio)
    assert len(lengths) == sequences
    assert min(lengths) > 4  # the prompt
    assert max(lengths) == pytest.approx(ratio * mean, abs=1)
    assert sum(lengths) / sequences >= mean - 1  # short ones are longer than drawn: a response has a token


def test_an_older_state_is_a_revision_as_it_was_committed_or_a_folder_that_has_what_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--before .* has no package tepo_megatron"):
        STEP.run(str(tmp_path))
    package = tmp_path / "tepo_megatron"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('an old state that does not start')")
    with pytest.raises(ValueError, match=r"--before .* is from before the package's folders moved"):
        STEP.run(str(tmp_path))
    with (
        pytest.raises(RuntimeError, match="tp1: rank 0 ended with exit code 1: RuntimeError: an old state that does not start"),
        STEP.start(tmp_path, tmp_path, "tp1") as world,
    ):
        world.step(OURS, 3.0, memory=False)
    if not subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, check=False).returncode:
        with source_of("HEAD") as folder:
            assert folder is not None
            assert (folder / "tepo_megatron" / "__init__.py").is_file()
        assert not folder.exists()


# -- the ways to tell falling entropy


def test_shares_of_masks_by_hand_and_in_parts_by_entropy() -> None:
    """Tokens 1 and 3 have the least entropy, 0 and 2 the most; a part without tokens has no shares."""
    chosen = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    entropy = torch.tensor([0.3, 0.1, 0.4, 0.2])
    (found,) = by_entropy(chosen, entropy, 1)
    assert (found["tokens"], found["entropy"]) == (4, pytest.approx([0.1, 0.4]))
    assert found["masked"] == {"measured": 0.25, "covariance": 0.5, "first_order": 0.75}
    pairs = ("measured / covariance", "measured / first_order", "covariance / first_order")
    assert found["alike"] == dict(zip(pairs, (0.75, 0.5, 0.75), strict=True))
    assert found["overlap"] == pytest.approx(dict(zip(pairs, (1 / 2, 1 / 3, 2 / 3), strict=True)))
    low, high, empty = by_entropy(chosen, entropy, 2) + by_entropy(chosen[:, :0], entropy[:0], 1)
    assert (low["entropy"], low["masked"]["first_order"], low["masked"]["measured"]) == (pytest.approx([0.1, 0.2]), 0.5, 0.0)
    assert (high["entropy"], high["masked"]["first_order"], high["masked"]["measured"]) == (pytest.approx([0.3, 0.4]), 1.0, 0.5)
    assert math.isnan(empty["masked"]["measured"])


def test_a_mask_with_the_median_of_the_noise_finds_more_than_with_twice_its_99th_percentile() -> None:
    rows = {(row.rate, row.noise, row.way): row for row in mask_noise.study(pack(draw_rollouts([24] * 16)))}
    assert len(rows) == 6 * len(mask_noise.RATES) * len(mask_noise.LOGIT_NOISE)
    for rate, noise in itertools.product(mask_noise.RATES, mask_noise.LOGIT_NOISE):
        median, twice = (rows[rate, noise, f"measured, {way}"] for way in ("median of the noise", "twice the 99th percentile"))
        assert median.recall >= twice.recall
        assert 0 < median.recall_by_size <= 1


@pytest.mark.slow
def test_masks_of_a_recorded_run(tmp_path: Path) -> None:
    """Half of the responses have a positive advantage; in a first update nothing has been measured yet, and the others act."""
    run = tmp_path / "run"
    make_model(tmp_path / "model", SIZES["tiny"])
    (tmp_path / "model" / "tokenizer.json").touch()  # a model folder without a tokenizer is refused; nothing reads this one
    for step in range(2):
        write_rollouts(run / "rollouts", step, make_rollouts([36] * 8, SIZES["tiny"]["vocab_size"], group=4, prompt=16))
    document = {
        "name": "two steps",
        "output": str(run),
        "model": {"path": str(tmp_path / "model")},
        "engine": {"parallel": {"tp": 2, "sequence_parallel": True}, "micro_batch_tokens": 50},
        "optimizer": {"lr": 1e-3, "warmup_steps": 0},
        "train": {"steps": 2, "minibatches": 2},
    }
    (run / "resolved.yaml").write_text(dump_resolved(RunConfig.model_validate(document)))
    run_python("-m", "scripts.studies.compare_masks", run, "--steps", 2, "--output", tmp_path, cwd=ROOT)
    record = json.loads((tmp_path / "masks-float32.json").read_text())
    first, second = record["updates"]
    assert first["tokens"] + second["tokens"] == 2 * 8 * 20 / 2
    assert first["masked"]["measured"] == 0
    assert 0 < first["masked"]["first_order"] < 1
    assert 0 < second["masked"]["measured"] < 1
    assert [found["tokens"] for found in record["by_entropy"]] == [second["tokens"] // 4] * 4
    table = (tmp_path / "masks-float32.md").read_text()
    assert "| measured | – |" in table
    assert "two steps · float32 · 2 steps of 2 updates" in table

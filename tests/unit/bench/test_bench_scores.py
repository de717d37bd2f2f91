"""``tepo bench scores``: a small run on CPU, and how a GPU's would be shown."""

import json

import pytest
from typer.testing import CliRunner

from tepo_megatron.cli.bench import app
from tepo_megatron.tools.bench.score_methods import FLOOR, MEGATRON, SLOPE
from tepo_megatron.tools.bench.scores import ScoreMeasurement, ScoreSetting


@pytest.mark.slow
def test_a_small_run(tmp_path):
    options = ["--tp", "1", "--tokens", "64", "--vocab", "512", "--dtype", "fp32", "--repeats", "1"]
    done = CliRunner().invoke(app, ["scores", *options, "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "scores-cpu-tp1.json").read_text())
    assert record["arguments"] == {"tp": 1, "device": "cpu", "repeats": 1}
    rows = {row["method"]: row for row in record["results"]}
    own = rows["tepo_megatron, in place, C++"]
    assert (own["forward_collectives"], own["backward_collectives"]) == (1, 0)
    assert own["shard_bytes"] == 64 * 512 * 4
    assert all(row["copy_gbps"] == own["copy_gbps"] > 0 for row in record["results"])
    assert own["method"] + SLOPE in rows
    table = (tmp_path / "scores-cpu-tp1.md").read_text().splitlines()
    assert table[2].startswith("| shape | method | forward ms")
    assert len(table) == 4 + len(rows)
    assert MEGATRON in rows


def cells(*rows: ScoreMeasurement) -> list[dict[str, str]]:
    (table,) = ScoreSetting(1, "cpu", repeats=1).report(rows).tables
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_share_of_a_copys_bandwidth():
    """2 GB read in 1 ms; 2 GB read and as much written in 2.5 ms; a copy moves 4 000 GB/s."""
    (shown,) = cells(ScoreMeasurement(8192, 16032, "bf16", "Triton", 1.0, 2.5, 0.004, 1, 0, 2 * 10**9, copy_gbps=4000.0))
    assert (shown["GB/s forward / backward"], shown["of a copy's"]) == ("2000 / 1600", "50% / 40%")


def test_ratios_are_to_the_methods_of_the_same_shape():
    """Total times of 4 ms without the slope, 5 ms with it, 10 ms for Megatron and 2 ms for the floor; no such peer: a dash."""

    def row(method, total, tokens=64):
        return ScoreMeasurement(tokens, 512, "fp32", method, total / 2, total / 2, 0.0, 1, 0, 10**6, copy_gbps=10.0)

    first, second, *_, alone = cells(
        row("own", 4.0), row("own" + SLOPE, 5.0), row(MEGATRON, 10.0), row(FLOOR, 2.0), row("own", 4.0, tokens=8)
    )
    assert (second["× Megatron"], second["× floor"], second["× without slope"]) == ("0.50", "2.50", "1.25")
    assert (alone["shape"], alone["× floor"]) == ("T 8, V 512, fp32", "–")
    assert (first["shape"], first["× without slope"], second["shape"]) == ("T 64, V 512, fp32", "", "")


@pytest.mark.parametrize(
    ("setting", "shape", "message"),
    [
        (ScoreSetting(2, "cpu", 1), (8, 7, "bf16"), "--vocab 7 cannot be split into 2 equal shards"),
        (ScoreSetting(2, "cpu", 1), (8, 8, "fp8"), "--dtype fp8 is unknown; give bf16, fp32 or both"),
        (ScoreSetting(99, "cuda", 1), (8, 8, "bf16"), "99 GPUs"),
    ],
)
def test_impossible_grids_are_refused(setting, shape, message):
    with pytest.raises(ValueError, match=message):
        setting.run([shape])

"""``tepo bench scores``: a small run on CPU, and how a GPU's would be shown."""

import json

import pytest
from typer.testing import CliRunner

from tepo_megatron.cli.bench import app
from tepo_megatron.tools.bench.score_methods import FLOOR, MEGATRON, SLOPE
from tepo_megatron.tools.bench.scores import COLUMNS, ScoreMeasurement, cells, run


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


def test_share_of_a_copys_bandwidth():
    """2 GB read in 1 ms; 2 GB read and as much written in 2.5 ms; a copy moves 4 000 GB/s."""
    row = ScoreMeasurement(8192, 16032, "bf16", "Triton", 1.0, 2.5, 0.004, 1, 0, shard_bytes=2 * 10**9, copy_gbps=4000.0)
    assert row.gbps == (2000.0, 1600.0)
    assert cells(row, [row])[-2:] == ("2000 / 1600", "50% / 40%")


def test_ratios_are_to_the_methods_of_the_same_shape():
    """Total times of 4 ms without the slope, 5 ms with it, 10 ms for Megatron and 2 ms for the floor; no such peer: a dash."""

    def row(method, total):
        return ScoreMeasurement(64, 512, "fp32", method, total / 2, total / 2, 0.0, 1, 0, shard_bytes=10**6, copy_gbps=10.0)

    peers = [row("own", 4.0), row("own" + SLOPE, 5.0), row(MEGATRON, 10.0), row(FLOOR, 2.0)]
    named = dict(zip(COLUMNS, cells(peers[1], peers), strict=True))
    assert (named["× Megatron"], named["× floor"], named["× without slope"]) == ("0.50", "2.50", "1.25")
    assert dict(zip(COLUMNS, cells(peers[0], peers[:1]), strict=True))["× floor"] == "–"
    assert dict(zip(COLUMNS, cells(peers[0], peers), strict=True))["× without slope"] == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shapes": [(8, 7, "bf16")]}, "--vocab 7 cannot be split into 2 equal shards"),
        ({"device": "cuda", "tp": 99}, "99 GPUs"),
    ],
)
def test_impossible_grids_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        run(**{"tp": 2, "device": "cpu", "shapes": [(8, 8, "bf16")], "repeats": 1} | changes)

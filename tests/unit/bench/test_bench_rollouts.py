"""The benchmark of rollouts: both ways of rank 0 do the whole work, and the table is of what was measured."""

from __future__ import annotations

from tepo_megatron.tools.bench.rollouts import OFFLINE, OURS, DrawMeasurement, RolloutSetting


def test_rank_0_is_measured_both_ways_and_the_table_has_ratios_of_draws_that_follow_each_other() -> None:
    said: list[str] = []
    setting = RolloutSetting("tiny", prompts=1, samples=1, new_tokens=1, repeats=3, responses=10, length=300)
    rank0 = setting.measure_rank0(said.append)
    assert said == ["rank 0: 10 responses of 300 tokens", "rank 0: the older path, 8 responses"]
    assert min(rank0.values()) > 0
    ours = DrawMeasurement(OURS, [1.0, 2.0, 1.0], [100] * 3, [{"client": 0.1, "engine core": 0.5, "worker": 0.25}] * 3)
    offline = DrawMeasurement(OFFLINE, [0.5, 2.0, 0.8], [100] * 3)
    draws, of_rank0 = setting.report([ours, offline], rank0).tables
    assert draws.rows == [
        (OURS, "100", "0.80 (0.50–1.00)", "10%", "0%", "75%"),
        (OFFLINE, "125", "1", "", "", ""),
    ]
    names = ("read off the wire and checked", "packed", "both", "written to the journal", "sent to another rank (gloo)")
    assert [row[0] for row in of_rank0.rows] == [f"{name}, 10 × 300" for name in names]

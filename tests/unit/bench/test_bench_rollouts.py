"""The benchmark of rollouts: both ways of rank 0 do the whole work, and the table is of what was measured."""

from __future__ import annotations

from tepo_megatron.tools.bench.rollouts import OFFLINE, OURS, DrawMeasurement, measure_rank0, table


def test_rank_0_is_measured_on_whole_responses_both_ways() -> None:
    said: list[str] = []
    found = measure_rank0(10, 300, said.append)
    assert said == ["rank 0: 10 responses of 300 tokens", "rank 0: the older path, 8 responses"]
    assert [name for name, *_ in found.table()] == [
        f"{name}, 10 × 300"
        for name in (
            *("read off the wire and checked", "packed", "both"),
            *("written to the journal", "sent to another rank (gloo)"),
        )
    ]


def test_the_table_has_ratios_of_draws_that_follow_each_other() -> None:
    ours = DrawMeasurement(OURS, [1.0, 2.0, 1.0], [100] * 3, [{"client": 0.1, "engine core": 0.5, "worker": 0.25}] * 3)
    offline = DrawMeasurement(OFFLINE, [0.5, 2.0, 0.8], [100] * 3)
    assert table([ours, offline]) == [
        (OURS, "100", "0.80 (0.50–1.00)", "10%", "0%", "75%"),
        (OFFLINE, "125", "1", "", "", ""),
    ]

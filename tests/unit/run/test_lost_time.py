"""What faults cost."""

from __future__ import annotations

import pytest

from tepo_megatron.run.display.figures import COUNTED, LOST, LostTime, fault_lines


def revive_in_vain(lost: LostTime) -> None:
    with lost.if_in_vain("lost/server") as in_vain:
        in_vain()
        raise RuntimeError


def test_time_is_lost_by_cause_and_only_where_it_was_in_vain() -> None:
    clock = iter([10.0, 14.0, 20.0, 30.0, 35.0])
    lost = LostTime(lambda: next(clock))
    with lost.if_in_vain("lost/server") as in_vain:
        in_vain()
    with lost.if_in_vain("lost/server"):
        pass
    with pytest.raises(RuntimeError):
        revive_in_vain(lost)
    lost.add("lost/resume", 2.0)
    assert lost.split() == {**dict.fromkeys(LOST, 0.0), "lost/server": 9.0, "lost/resume": 2.0}
    assert lost.split() == dict.fromkeys(LOST, 0.0)


def test_a_run_without_faults_says_nothing_of_them() -> None:
    row = {**dict.fromkeys(COUNTED, 0.0), **dict.fromkeys(LOST, 0.0), "step": 1}
    assert fault_lines([row, {"step": 2, "update/skipped": None}]) == []
    for key in (*COUNTED, *LOST):
        assert len(fault_lines([row, {**row, key: 3.0}])) == 1

"""What a report reads of runs: folders, sweeps, runs that go on, settings that differ."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.tools.report.runs import Run, changes, compared, find_runs, flat, run_groups
from tepo_megatron.tools.report.samples import read_samples
from tests.support.report_runs import write_run


def test_runs_are_found_by_themselves_in_a_sweep_and_by_their_metrics(tmp_path: Path) -> None:
    for name in ("a-seed10", "a-seed9", "b-seed0"):
        write_run(tmp_path / "sweep" / name, steps=2)
    write_run(tmp_path / "other" / "a-seed9", steps=2)
    (tmp_path / "sweep" / "logs").mkdir()
    assert list(find_runs([tmp_path / "sweep"])) == ["a-seed9", "a-seed10", "b-seed0"]
    assert find_runs([tmp_path / "sweep" / "a-seed9" / "metrics.jsonl"]) == {"a-seed9": tmp_path / "sweep" / "a-seed9"}
    assert list(find_runs([tmp_path])) == ["other/a-seed9", "sweep/a-seed9", "sweep/a-seed10", "sweep/b-seed0"]
    twice = find_runs([tmp_path / "sweep" / "b-seed0", tmp_path / "sweep"])
    assert list(twice) == ["b-seed0", "a-seed9", "a-seed10"]
    with pytest.raises(ValueError, match="logs holds no run"):
        find_runs([tmp_path / "sweep" / "logs"])


def test_runs_that_differ_in_their_seed_alone_are_a_group(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"tepo-seed{seed}", steps=1, seed=seed)
    write_run(tmp_path / "fast-seed0", steps=1, settings={"optimizer": {"lr": 1e-4}})
    runs = [Run.read(name, folder) for name, folder in find_runs([tmp_path]).items()]
    assert [(label, [runs[at].name for at in members]) for label, members in run_groups(runs)] == [
        ("fast-seed0", ["fast-seed0"]),
        ("tepo", ["tepo-seed0", "tepo-seed1"]),
    ]
    (tmp_path / "tepo-seed1" / "resolved.yaml").unlink()  # then nothing is known of its settings
    runs = [Run.read(name, folder) for name, folder in find_runs([tmp_path]).items()]
    assert [members for _, members in run_groups(runs)] == [(0,), (1,), (2,)]


def test_a_run_is_read_while_it_writes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"step": 4, "reward/me')
    (folder / "status").mkdir()
    run = Run.read("run", folder)
    assert [row["step"] for row in run.rows] == [0, 1, 2, 3]
    assert len(read_samples(0, folder, "heldout")) == 8
    assert run.said.startswith("ended at step 3 of 90")
    beat: dict[str, Any] = {"rank": 0, "world": 1, "pid": 1, "started": 1, "time": 4e9, "beats": 1, "moves": 1, "moved_at": 4e9}
    beat |= {"phase": "rollout", "since": 4e9, "step": 3, "waits_for": "", "passive": False, "allowance_s": 0.0, "done": 0}
    beat |= {"total": 0, "hang_timeout_s": 1.0, "ended": "", "facts": {}, "host": f"not-{socket.gethostname()}"}
    (folder / "status" / "rank-00000.json").write_text(json.dumps(beat))
    run = Run.read("run", folder)
    assert run.goes_on
    assert run.said.startswith("runs, step 3 of 90 done")
    (folder / "status" / "rank-00000.json").unlink()
    (folder / "metrics.jsonl").write_text("")
    assert Run.read("run", folder).rows == []
    (folder / "metrics.jsonl").unlink()
    assert (Run.read("run", folder).said, Run.read("run", folder).goes_on) == ("begins", True)
    os.utime(folder / "resolved.yaml", (1e9, 1e9))
    assert (Run.read("run", folder).rows, Run.read("run", folder).goes_on) == ([], False)


def test_faults_hangs_and_what_a_resumption_changed_are_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=70)
    (folder / "resolved.1.yaml").write_text((folder / "resolved.yaml").read_text().replace("5.0e-05", "1.0e-06"))
    (folder / "logs").mkdir()
    (folder / "logs" / "hang-20260101.txt").write_text("rank 3 waits for rank 0\n")
    run = Run.read("run", folder)
    assert run.events == [(65, "rollout servers started again", 1.0), (65, "until a server was there again", 9.5)]
    assert run.faults == ["1 rollout servers started again", "9.5 s lost until a server was there again"]
    assert run.hangs == [("hang-20260101.txt", "rank 3 waits for rank 0\n")]
    assert [(name, changes(before, run.settings)) for name, before in run.earlier] == [
        ("resolved.1.yaml", [("optimizer.lr", "1e-06", "5e-05")])
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [("metrics.jsonl", "no row\n"), ("samples.jsonl", "[1]\n"), ("samples.jsonl", "{\n"), ("resolved.yaml", "[1, 2]\n")],
)
def test_what_is_damaged_is_named(name: str, text: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    (folder / name).write_text(text)
    with pytest.raises((ValueError, TypeError), match=name):
        [Run.read("run", folder), read_samples(0, folder, "heldout")]


def test_settings_beside_each_other_say_what_is_not_the_default() -> None:
    first = flat({"seed": 1, "optimizer": {"lr": 5e-5, "clip_grad": 1}, "reward": {"kwargs": {}}, "model": {"path": "x"}})
    second = flat({"seed": 2, "optimizer": {"lr": 5e-5, "clip_grad": 1.0}, "model": {"path": "x"}})
    rows = {row["path"]: row for row in compared([first, second])}
    assert rows["seed"] == {"path": "seed", "values": ["1", "2"], "differs": True, "usual": True}
    assert rows["reward.kwargs"]["values"] == ["{}", None]
    assert not rows["model.path"]["usual"]
    for path, differs in {"optimizer.clip_grad": False, "model.path": False, "optimizer.lr": False}.items():
        assert rows[path]["differs"] == differs
    assert rows["optimizer.clip_grad"]["usual"]
    assert changes(first, second)[:2] == [("seed", "1", "2"), ("optimizer.clip_grad", "1", "1.0")]


def test_a_setting_that_an_older_version_did_not_have_does_not_differ_from_its_default() -> None:
    old, new = {"optimizer.lr": "5e-5"}, {"optimizer.lr": "5e-05", "optimizer.clip_grad": "1.0", "optimizer.eps": "0.5"}
    assert {row["path"]: row["differs"] for row in compared([old, new])} == {
        "optimizer.lr": False,
        "optimizer.clip_grad": False,
        "optimizer.eps": True,  # not the default
    }
    without, with_ = {"model.lora": "null"}, {"model.lora.rank": "8", "model.lora.alpha": "16"}
    assert all(row["differs"] for row in compared([without, with_]))  # a section that is left out is no older version


def test_every_value_of_a_configuration_has_its_path() -> None:
    section = {"a": {"b": {"c": None, "d": [1, {"e": 2}]}, "f": {}}, "g": "é"}
    assert flat(section) == {"a.b.c": "null", "a.b.d": '[1, {"e": 2}]', "a.f": "{}", "g": '"é"'}
    assert flat({}) == {}


def test_samples_of_training_are_together_by_their_group(tmp_path: Path) -> None:
    rows = [
        {"step": step, "problem": f"p{group}", "prompt": "1+1=", "answer": 2, "group": group, "response": f"{step} {at}"}
        | {"reward": None if at else 1.0, "tokens": 3, "finish_reason": "length", "weights_version": step - 1}
        for step in (1, 2)
        for group in (0, 1)
        for at in range(3)
    ]
    turns = [{"by": "model", "text": "a"}, {"by": "environment", "text": "b"}]
    rows[0] |= {"turns": turns, "components": {"short": 0.5}}
    (tmp_path / "train_samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    groups = read_samples(7, tmp_path, "train")
    assert [(group.run, group.step, group.problem, group.answer, len(group.responses)) for group in groups] == [
        (7, step, f"p{group}", "2", 3) for step in (1, 2) for group in (0, 1)
    ]
    first = {"text": "1 0", "reward": 1.0, "tokens": 3, "finish": "length", "version": 0, "components": {"short": 0.5}}
    assert groups[0].responses[0] == {**first, "turns": [["model", "a"], ["environment", "b"]]}
    assert groups[3].responses[1]["reward"] is None
    assert groups[0].cost == len("1+1=") + 3 * len("1 0")

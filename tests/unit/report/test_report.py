"""What a report reads of runs (folders, sweeps, settings, tokens), and the file that it writes: only its script runs."""

import base64
import gzip
import hashlib
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tepo_megatron.cli import after_run as command
from tepo_megatron.run.metrics import TokenSamples, read_tokens, token_file
from tepo_megatron.tools.report import SCRIPTS, write_report
from tepo_megatron.tools.report.runs import Run, changes, compared, run_groups, settings_of
from tepo_megatron.tools.report.samples import COLUMNS, SampleGroup, evenly, pack
from tests.support.cli import invoke
from tests.support.report_runs import HOSTILE, made_up_tokens, write_run


def test_runs_are_found_by_themselves_in_a_sweep_and_by_their_metrics(tmp_path: Path) -> None:
    for name in ("a-seed10", "a-seed9", "b-seed0"):
        write_run(tmp_path / "sweep" / name, steps=2)
    write_run(tmp_path / "other" / "a-seed9", steps=2)
    (tmp_path / "sweep" / "logs").mkdir()
    assert list(Run.find([tmp_path / "sweep"])) == ["a-seed9", "a-seed10", "b-seed0"]
    assert Run.find([tmp_path / "sweep" / "a-seed9" / "metrics.jsonl"]) == {"a-seed9": tmp_path / "sweep" / "a-seed9"}
    assert list(Run.find([tmp_path])) == ["other/a-seed9", "sweep/a-seed9", "sweep/a-seed10", "sweep/b-seed0"]
    twice = Run.find([tmp_path / "sweep" / "b-seed0", tmp_path / "sweep"])
    assert list(twice) == ["b-seed0", "a-seed9", "a-seed10"]
    with pytest.raises(ValueError, match="logs holds no run"):
        Run.find([tmp_path / "sweep" / "logs"])


def test_runs_that_differ_in_their_seed_alone_are_a_group(tmp_path: Path) -> None:
    for seed, resume in enumerate((False, True)):  # one was resumed, and each logs under its own name
        settings = {"train": {"steps": 90, "resume": resume}, "log": {"wandb": {"name": str(seed)} if seed else None}}
        write_run(tmp_path / f"tepo-seed{seed}", steps=1, seed=seed, settings=settings)
    write_run(tmp_path / "fast-seed0", steps=1, settings={"optimizer": {"lr": 1e-4}})
    runs = [Run.read(name, folder) for name, folder in Run.find([tmp_path]).items()]
    assert [(label, [runs[at].name for at in members]) for label, members in run_groups(runs)] == [
        ("fast-seed0", ["fast-seed0"]),
        ("tepo", ["tepo-seed0", "tepo-seed1"]),
    ]
    rows = compared([run.settings for run in runs])
    assert {row["path"] for row in rows if row["differs"] and not row["beside"]} == {"seed", "optimizer.lr"}
    (tmp_path / "tepo-seed1" / "resolved.yaml").unlink()  # then nothing is known of its settings
    runs = [Run.read(name, folder) for name, folder in Run.find([tmp_path]).items()]
    assert [members for _, members in run_groups(runs)] == [(0,), (1,), (2,)]


def test_a_run_is_read_while_it_writes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"step": 4, "reward/me')
    (folder / "status").mkdir()
    run = Run.read("run", folder)
    assert [row["step"] for row in run.rows] == [0, 1, 2, 3]
    assert len(SampleGroup.read(0, folder, "heldout")) == 8
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
    assert run.events == [(65, "servers started again", 1.0), (65, "until a server was there again", 9.5)]
    assert run.faults == ["1 servers started again", "9.5 s lost until a server was there again"]
    assert run.hangs == [("hang-20260101.txt", "rank 3 waits for rank 0\n")]
    assert [changes(before, run.settings) for before in run.earlier] == [[("optimizer.lr", "1e-06", "5e-05")]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("metrics.jsonl", "no row\n"), ("samples.jsonl", "[1]\n"), ("samples.jsonl", "{\n"), ("resolved.yaml", "[1, 2]\n")),
        ("metrics.jsonl", f'{{"step": 1, "x": {10**400}}}\n'),  # no float is as large
        ("tokens/step_0000001.npz", "PK\x03\x04 and no more"),
    ],
)
def test_what_is_damaged_is_named(name: str, text: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1, recorded=[1])
    (folder / name).write_text(text)
    with pytest.raises((ValueError, TypeError), match=name):
        [Run.read("run", folder), SampleGroup.read(0, folder, "heldout"), SampleGroup.read(0, folder, "tokens")]


def test_settings_beside_each_other_say_what_is_not_the_default() -> None:
    section = {"a": {"b": {"c": None, "d": [1, {"e": 2}]}, "f": {}}, "g": "é"}
    assert settings_of(section) == {"a.b.c": "null", "a.b.d": '[1, {"e": 2}]', "a.f": "{}", "g": '"é"'}
    first = settings_of(
        {"seed": 1, "optimizer": {"lr": 5e-5, "clip_grad": 1}, "reward": {"kwargs": {}}, "model": {"path": "x"}}
    )
    second = settings_of({"seed": 2, "optimizer": {"lr": 5e-5, "clip_grad": 1.0}, "model": {"path": "x"}})
    rows = {row["path"]: row for row in compared([first, second])}
    assert rows["seed"] == {"path": "seed", "values": ["1", "2"], "differs": True, "usual": True, "beside": False}
    assert rows["reward.kwargs"]["values"] == ["{}", None]
    assert not rows["model.path"]["usual"]
    assert not any(rows[path]["differs"] for path in ("optimizer.clip_grad", "model.path", "optimizer.lr"))
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
    groups = SampleGroup.read(7, tmp_path, "train")
    assert [(group.run, group.step, group.problem, group.answer, len(group.responses)) for group in groups] == [
        (7, step, f"p{group}", "2", 3) for step in (1, 2) for group in (0, 1)
    ]
    first = {"text": "1 0", "reward": 1.0, "tokens": 3, "finish": "length", "version": 0, "components": {"short": 0.5}}
    assert groups[0].responses[0] == {**first, "turns": [["model", "a"], ["environment", "b"]]}
    assert groups[3].responses[1]["reward"] is None
    assert groups[0].cost == len("1+1=") + 3 * len("1 0") + len("ab")


def decode(text: str, width: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """As the page does: planes of bytes, the lowest first."""
    planes = np.frombuffer(base64.b64decode(text), np.uint8).reshape(width, -1).astype(np.uint32)
    return np.asarray(sum(plane << (8 * at) for at, plane in enumerate(planes)), np.uint32)


def as_floats(text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (decode(text, 2) << 16).view(np.float32)


def write_tokens(folder: Path, samples: TokenSamples) -> Path:
    path = token_file(folder, samples.step)
    path.parent.mkdir()
    path.write_bytes(samples.encode())
    return folder


def packed(folder: Path, **values: Any) -> dict[str, Any]:
    """Columns of six tokens with these values in place of made-up ones."""
    samples = made_up_tokens(10, [2, 4])
    for name, value in values.items():
        getattr(samples, name)[:] = value
    return pack(SampleGroup.read(0, write_tokens(folder, samples), "tokens"))["columns"]


FLOATS = st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False) | st.sampled_from([math.nan, math.inf, -math.inf])


@given(arrays.arrays(np.float32, 6, elements=FLOATS))
def test_floats_come_back_to_two_digits(values: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    values.view(np.uint32)[np.isnan(values)] = 0x7FFFFFFF  # a NaN that rounding would carry over into −0
    with TemporaryDirectory() as folder:
        columns = packed(Path(folder), entropy=values)
    if np.isfinite(values).any():
        np.testing.assert_allclose(as_floats(columns["entropy"]), values, rtol=2.0**-8)
    else:
        assert "entropy" not in columns


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=7), seed=st.integers(0, 99), chosen=st.integers(1, 2**7))
def test_the_tokens_of_chosen_groups_lie_where_the_page_looks(
    lengths: list[int], seed: int, chosen: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    samples = made_up_tokens(30, lengths, seed=seed)
    folder = write_tokens(tmp_path_factory.mktemp("run"), samples)
    groups = [group for at, group in enumerate(SampleGroup.read(3, folder, "tokens")) if chosen >> at & 1]
    columns = pack(groups)
    assert columns["tokens"] == sum(group.cost for group in groups)
    ids = decode(columns["columns"]["id"], 4)
    flags, versions = decode(columns["columns"]["flags"], 1), decode(columns["columns"]["version"], 4)
    for group in groups:
        for response, at in zip(group.responses, group.origin[1], strict=True):
            there, here = samples.tokens_of(at), slice(response["at"], response["at"] + response["tokens"])
            text = "".join(samples.pieces[token] for token in samples.ids[there].tolist())
            assert "".join(columns["pieces"][piece] for piece in ids[here]) == text
            assert (flags[here] & 1).astype(bool).tolist() == samples.loss_mask[there].tolist()
            assert (flags[here] >> 1).astype(bool).tolist() == samples.masked[there].tolist()
            assert versions[here].tolist() == samples.version[there].tolist()
            assert response["reward"] == float(samples.reward[at])
            for name, column in COLUMNS.items():
                wanted = column(samples)[there]
                if name in columns["columns"]:
                    np.testing.assert_allclose(as_floats(columns["columns"][name])[here], wanted, rtol=2**-7)
                else:
                    assert np.isnan(wanted).all()


def test_small_differences_survive_the_rounding(tmp_path: Path) -> None:
    """A gap of 1e-6 between log-probs of −1, a sequence ratio of 1.0003: rounded first, both would be nothing."""
    columns = packed(tmp_path, logprob_sampler=-1.0, logprob_trainer=-1.0 + 1e-6, ratio=1.0003)
    np.testing.assert_allclose(as_floats(columns["gap"]), 1e-6, rtol=0.1)
    np.testing.assert_allclose(as_floats(columns["ratio"]), 3e-4, rtol=0.01)


def group(step: int, responses: int, cost: int) -> SampleGroup:
    return SampleGroup(0, "train", step, "", "", "", [{} for _ in range(responses)], cost)


@given(
    steps=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(0, 9)), max_size=40),
    responses=st.integers(0, 60),
    room=st.integers(0, 200),
)
def test_no_more_is_chosen_than_there_is_room_for(steps: list[tuple[int, int, int]], responses: int, room: int) -> None:
    groups = [group(*each) for each in sorted(steps)]
    chosen = evenly(groups, responses, room)
    assert sum(len(each.responses) for each in chosen) <= responses
    assert sum(each.cost for each in chosen) <= room
    places = [next(at for at, each in enumerate(groups) if each is one) for one in chosen]
    assert places == sorted(set(places))
    if sum(len(each.responses) for each in groups) <= responses and sum(each.cost for each in groups) <= room:
        assert chosen == groups


@pytest.mark.parametrize("take", [1, 2, 3, 5, 10, 90, 100, 400])
def test_what_is_chosen_lies_evenly_over_the_steps(take: int) -> None:
    groups = [group(step, 8, 1) for step in range(1, 91) for _ in range(4)]
    found = [each.step for each in evenly(groups, 8 * take, 10**6)]
    assert (len(found), max(found)) == (min(take, 360), 90)  # the newest is always there
    counts = [found.count(step) for step in range(1, 91)]
    assert max(counts) - min(counts) <= 1
    if 3 <= take <= 90:
        assert max(after - before for before, after in pairwise(found)) <= 2.1 * 89 / (take - 1) + 1


WEB = Path(command.__file__).parents[1] / "tools" / "report" / "web"


def data(page: Path, name: str) -> Any:
    found = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', page.read_text())
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def test_nothing_in_the_page_is_run_or_loaded_but_its_own_script(tmp_path: Path) -> None:
    """What models write is base64 alone; the policy names the digests of script and style."""
    folder = write_run(tmp_path / "run", steps=30, recorded=[30], hostile=True, settings={"name": HOSTILE})
    page = tmp_path / "a.html"
    write_report([folder], page)
    html = page.read_text()
    assert "onerror" not in html.replace("img src=x onerror=&quot;", "")  # the title, escaped
    assert html.count("<script") == html.count("</script>") == 3
    groups = data(page, "samples")["groups"]
    assert any(group["prompt"] == HOSTILE for group in groups)
    assert any(response.get("text") == HOSTILE for group in groups for response in group["responses"])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy[1].startswith("default-src 'none';")
    for kind in ("script", "style"):
        (only,) = re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.S)
        digest = base64.b64encode(hashlib.sha256(only.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy[1]
    assert set(re.findall(r"https?://[^\s'\"]+", html)) == {"http://www.w3.org/2000/svg"}  # the name of a kind of element
    assert not re.search(r"\{\{|innerHTML|insertAdjacentHTML|document\.write|eval\(", html)
    assert {path.stem for path in WEB.glob("*.js")} == set(SCRIPTS)


def test_a_folder_without_a_name_in_unicode_has_a_report(tmp_path: Path) -> None:
    folder, page = tmp_path / os.fsdecode(b"run\xff"), tmp_path / "page.html"
    write_run(folder, steps=1, settings={"output": "run"})
    assert write_report([folder], page).bytes == page.stat().st_size
    assert data(page, "figures")["runs"][0]["name"] == folder.name


def test_numbers_that_are_missing_or_not_finite_are_null(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[1] |= {"grad_norm": math.nan, "kl/mean": math.inf, "lr": 0.1 + 0.2}
    rows.append({"step": 3, "new": 7})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report([folder], tmp_path / "page.html")
    (run,) = data(tmp_path / "page.html", "figures")["runs"]
    assert run["x"] == [0, 1, 2, 3]
    assert run["columns"]["grad_norm"][:2] == [None, None]
    assert run["columns"]["kl/mean"][1] is None
    assert run["columns"]["lr"][1] == 0.3
    assert run["columns"]["new"] == [None, None, None, 7]


def test_runs_of_different_settings_and_metrics_go_into_one_page(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"tepo-seed{seed}", steps=3, seed=seed)
    settings = {"optimizer": {"lr": 1e-4}, "reward": {"kwargs": {"api_key": "sk-0123"}}}
    other = write_run(tmp_path / "grpo-seed0", steps=2, settings=settings)
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    (other / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": row["step"], "loss": 1.5, "lost/resume": 9.0}) + "\n" for row in rows)
    )
    written = write_report([tmp_path], tmp_path / "page.html", metrics=("loss", "reward/*"))
    figures = data(tmp_path / "page.html", "figures")
    assert (written.runs, figures["title"]) == (3, f"3 runs of {tmp_path.name}")
    assert "sk-0123" not in json.dumps(figures)
    assert sorted(figures["metrics"]) == ["loss", "reward/mean"]
    columns = [[name for name in run["columns"] if "time/" not in name] for run in figures["runs"]]
    assert columns == [["loss", "lost/resume"], *[["idle/trainer", "idle/servers", "reward/mean"]] * 2]
    assert "time/step" in figures["runs"][1]["columns"]  # the clock of every curve, as what was lost
    assert [run["group"] for run in figures["runs"]] == [0, 1, 1]
    assert {row["path"]: row["values"] for row in figures["settings"]}["optimizer.lr"] == ["0.0001", "5e-05", "5e-05"]
    with pytest.raises(ValueError, match=r"no metric is called nothing; there are .*, entropy/mean,"):
        write_report([tmp_path / "tepo-seed0"], tmp_path / "page.html", metrics=("nothing",))


def test_a_run_of_90_steps_with_3000_samples_is_under_5_mb(tmp_path: Path) -> None:
    """And so are samples whose values gzip cannot make smaller, of which the page takes what it has room for."""
    folder = write_run(tmp_path / "run", recorded=range(1, 91), groups=5, samples=8)
    written = write_report([folder], tmp_path / "page.html")
    samples = data(tmp_path / "page.html", "samples")
    tokens = [len(group["responses"]) for group in samples["groups"] if group["kind"] == "tokens"]
    assert sum(tokens) == 3000
    assert samples["recorded"] == {"tokens": 3600, "train": 0, "heldout": 160}
    assert written.bytes == (tmp_path / "page.html").stat().st_size < 2e6
    small = write_report([folder], tmp_path / "page.html", megabytes=0.5)
    assert small.bytes < 0.6e6
    assert small.samples < written.samples


def test_only_files_of_chosen_samples_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of those that a run removes or replaces meanwhile, which goes back, nothing is shown."""
    folder = write_run(tmp_path / "run", recorded=range(1, 31), groups=5, samples=8)
    whole: list[int] = []

    def read(path: Path, **options: bool) -> TokenSamples:
        step, values = int(path.stem.removeprefix("step_")), options.get("values", True)
        whole.extend([step] if values else [])
        if values and step == 1:
            path.unlink()
        elif values and step == 30:
            path.write_bytes(made_up_tokens(step, [2, 4]).encode())
        return read_tokens(path, **options)

    monkeypatch.setattr("tepo_megatron.tools.report.samples.read_tokens", read)
    write_report([folder], tmp_path / "page.html", most_samples=24)
    groups = [group for group in data(tmp_path / "page.html", "samples")["groups"] if group["kind"] == "tokens"]
    assert (whole, [(group["step"], len(group["responses"])) for group in groups]) == ([1, 15, 30], [(15, 8)])


def test_the_command_writes_beside_the_run_or_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    assert "1 run, 40 samples" in invoke("report", folder).stdout
    assert (folder / "report.html").is_file()
    monkeypatch.chdir(tmp_path)
    done = invoke("report", folder, folder, "--samples", 0, "--json")
    size = (tmp_path / "report.html").stat().st_size
    assert json.loads(done.stdout) == {"path": "report.html", "bytes": size, "runs": 1, "samples": 0, "goes_on": False}
    assert "holds no run" in invoke("report", tmp_path / "nothing", code=1).stderr
    assert "Megabytes of samples" in invoke("report", "--help").stdout


def in_place_of_sleep(act: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: int, really: Callable[[float], None] = time.sleep) -> None:
        (act if threading.current_thread() is threading.main_thread() else really)(seconds)

    monkeypatch.setattr("tepo_megatron.cli.after_run.time.sleep", sleep)


def test_watching_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the run; while that goes on the page loads itself again; the last page does not."""
    folder, page = tmp_path / "run", tmp_path / "run" / "report.html"
    states, seen = iter([True, True, False]), []
    state = "tepo_megatron.tools.report.runs.run_status"
    monkeypatch.setattr(state, lambda folder, **_: (["made up: so it stands"], next(states)))

    def sleep(seconds: int) -> None:
        if not folder.exists():  # the command is there before the run
            write_run(folder, steps=2)
        else:
            seen.append((seconds, data(page, "figures")["refresh"]))

    in_place_of_sleep(sleep, monkeypatch)
    done = invoke("report", folder, "--watch", 7)
    assert seen == [(7, 7), (7, 7)]
    assert done.stderr == f"waits for a run in {folder}\n"
    assert data(page, "figures")["refresh"] == 0
    assert [line.count("which goes on") for line in done.stdout.splitlines()] == [1, 0]


def test_watching_a_sweep_outlasts_the_time_between_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its first run there is only the row of the first evaluation, which lacks the requested metric."""
    page, seen = tmp_path / "report.html", list[tuple[int, int, int]]()
    monkeypatch.setattr("tepo_megatron.tools.report.runs.run_status", lambda folder, **_: (["made up: so it stands"], not seen))
    write_run(tmp_path / "a-seed0", steps=0)

    def sleep(seconds: int) -> None:
        figures = data(page, "figures")
        seen.append((len(figures["runs"]), len(figures["metrics"]), figures["refresh"]))
        if len(seen) < 3:
            write_run(tmp_path / f"a-seed{len(seen) - 1}", steps=2)
        else:
            for path in tmp_path.glob("*/*"):
                os.utime(path, (1e9, 1e9))

    in_place_of_sleep(sleep, monkeypatch)
    invoke("report", tmp_path, "--watch", 7, "--metrics", "grad_norm")
    assert seen == [(1, 0, 7), (1, 1, 7), (2, 1, 7)]
    assert data(page, "figures")["refresh"] == 0

"""The file that ``tepo report`` writes: nothing in it is run or loaded but its own script, and it is small."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tepo_megatron.cli import after_run as command
from tepo_megatron.cli.main import app
from tepo_megatron.tools.report import SCRIPTS, write_report
from tests.support.report_runs import HOSTILE, write_run

runner = CliRunner()
WEB = Path(command.__file__).parents[1] / "tools" / "report" / "web"


def data(page: Path, name: str) -> Any:
    found = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', page.read_text())
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def test_nothing_in_the_page_is_run_or_loaded_but_its_own_script(tmp_path: Path) -> None:
    """What models write is base64 alone; the policy names the digests of script and style."""
    folder, page = (
        write_run(tmp_path / "run", steps=30, recorded=[30], hostile=True, settings={"name": HOSTILE}),
        tmp_path / "a.html",
    )
    write_report([folder], page)
    html = page.read_text()
    assert "onerror" not in html.replace("img src=x onerror=&quot;", "")  # the title, escaped
    assert html.count("<script") == html.count("</script>") == 3
    groups = data(page, "samples")["groups"]
    assert any(group["prompt"] == HOSTILE for group in groups)
    assert any(response.get("text") == HOSTILE for group in groups for response in group["responses"])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert policy[1].startswith("default-src 'none';")
    for kind in ("script", "style"):
        (only,) = re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.S)
        digest = base64.b64encode(hashlib.sha256(only.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy[1]
    assert set(re.findall(r"https?://[^\s'\"]+", html)) == {"http://www.w3.org/2000/svg"}  # the name of a kind of element
    assert not re.search(r"\{\{|innerHTML|insertAdjacentHTML|document\.write|eval\(", html)
    assert {path.stem for path in WEB.glob("*.js")} == set(SCRIPTS)


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
    other = write_run(tmp_path / "grpo-seed0", steps=2, settings={"optimizer": {"lr": 1e-4}})
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    (other / "metrics.jsonl").write_text("".join(json.dumps({"step": row["step"], "loss": 1.5}) + "\n" for row in rows))
    written = write_report([tmp_path], tmp_path / "page.html", metrics=("loss", "reward/*"))
    figures = data(tmp_path / "page.html", "figures")
    assert (written.runs, figures["title"]) == (3, f"3 runs of {tmp_path.name}")
    assert sorted(figures["metrics"]) == ["loss", "reward/mean"]
    assert [list(run["columns"]) for run in figures["runs"]] == [["loss"], ["reward/mean"], ["reward/mean"]]
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


def test_the_command_writes_beside_the_run_or_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    done = runner.invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    assert (folder / "report.html").is_file()
    assert "1 run, 40 samples" in done.stdout
    monkeypatch.chdir(tmp_path)
    done = runner.invoke(app, ["report", str(folder), str(folder), "--samples", "0", "--json"])
    size = (tmp_path / "report.html").stat().st_size
    assert json.loads(done.stdout) == {"path": "report.html", "bytes": size, "runs": 1, "samples": 0, "goes_on": False}
    done = runner.invoke(app, ["report", str(tmp_path / "nothing")])
    assert (done.exit_code, "holds no run" in done.stderr) == (1, True)


def test_watching_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the run; while that goes on the page loads itself again; the last page does not."""
    from tepo_megatron.tools.report import runs

    folder, page = tmp_path / "run", tmp_path / "run" / "report.html"
    states, seen = iter([True, True, False]), []
    monkeypatch.setattr(runs, "run_status", lambda folder: (["made up: so it stands"], next(states)))

    def sleep(seconds: int) -> None:
        if not folder.exists():  # the command is there before the run
            write_run(folder, steps=2)
        else:
            seen.append((seconds, data(page, "figures")["refresh"]))

    monkeypatch.setattr("tepo_megatron.cli.after_run.time.sleep", sleep)
    done = runner.invoke(app, ["report", str(folder), "--watch", "7"])
    assert done.exit_code == 0, done.output
    assert seen == [(7, 7), (7, 7)]
    assert done.stderr == f"waits for a run in {folder}\n"
    assert data(page, "figures")["refresh"] == 0
    assert [line.count("which goes on") for line in done.stdout.splitlines()] == [1, 0]

"""The runner of the checks that need a GPU: what it says without one, and that nothing which did not run counts as passed."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.cli.bench import _finish
from tepo_megatron.tools import results
from tepo_megatron.tools.bench.gpu import PARTS, Gpu, Part, check
from tepo_megatron.tools.results import Report, Table, select
from tests.support.cli import invoke
from tests.support.processes import eventually, files_of_at_most, gone
from tests.support.shell import bash, write_script

ROOT = Path(__file__).parents[3]
NAMED = {part.name: part for part in PARTS}
H200 = Gpu("NVIDIA H200", 139.8, "9.0", "13.0")


def part(*command: str, figures: Any = lambda folder, printed: {"printed": printed.strip()}, **changes: Any) -> Part:
    return Part("a part", "what it does", command, figures, **changes)


def test_without_a_gpu_the_script_ends_with_a_sentence_and_status_3(tmp_path: Path) -> None:
    """nvidia-smi, if there is one, is not found."""
    for tool in ("bash", "dirname", "grep"):
        (tmp_path / tool).symlink_to(next(path for path in map(Path, ("/bin", "/usr/bin")) if (path / tool).exists()) / tool)
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": str(tmp_path)})
    sentence = "gpu check: this machine has no NVIDIA GPU (nvidia-smi lists none); nothing was checked\n"
    assert (done.returncode, done.stdout, done.stderr) == (3, "", sentence)


KIT, REST = "*version_info*) ;; *torch.__version__*) echo", "*pip*) ;; *) cat >/dev/null; exit 7 ;; esac"


@pytest.mark.parametrize(
    ("python", "sentence"),
    [
        ("exit 1", "its wheels are for Python 3.12, and PYTHON is "),
        (
            '[[ $2 == *version_info* ]] && exit 0; echo "no torch" >&2; exit 1',
            "PYTHON has no torch, which the machine must bring",
        ),
        ("exit 0", "the torch of PYTHON was built without CUDA"),
        (
            f"case $* in *capability*) echo 90 ;; {KIT} 2.12.1 ;; {REST}",
            "te-2.11.0-sm90.tar.xz was built for another torch than this machine's 2.12.1; without it",
        ),
        (
            f"case $* in *capability*) echo 80 ;; {KIT} 2.11.0 ;; {REST}",
            "te-2.11.0-sm90.tar.xz has code for sm_90, and this GPU is sm_80; without it. ARCHITECTURES=80 bash",
        ),
    ],
)
def test_a_kit_for_another_machine_says_so(tmp_path: Path, python: str, sentence: str) -> None:
    done = install_kit(tmp_path, python, TEPO_KIT_SITE=str(tmp_path / "site"))
    assert done.returncode != 0
    assert sentence.replace("PYTHON", str(tmp_path / "python")) in done.stderr


def install_kit(checkout: Path, python: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The installation in a checkout whose kit is empty, with a script in place of Python."""
    for name in ("scripts", "gpu-kit"):
        (checkout / name).mkdir(exist_ok=True)
    for name in ("scripts/gpu_kit_install.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout / name)
    for name in (".small", "te-2.11.0-sm90.tar.xz"):
        (checkout / "gpu-kit" / name).touch()
    return bash(f". {checkout}/scripts/gpu_kit_install.sh", PYTHON=write_script(checkout / "python", python), **environment)


def test_a_kit_fills_a_folder_of_this_user_once_and_again_if_it_changes(tmp_path: Path) -> None:
    """Python imports what lies there; a folder in /tmp may be of another user."""
    python = "case $* in *torch.__v*) echo 2.12.1 ;; *capability*) ;; *pip*) echo installed ;; *'import '*) ;; *) cat ;; esac"
    site, cache = tmp_path / "home/.cache/tepo-kit", {"HOME": str(tmp_path / "home")}

    def install(python: str = python, **environment: str) -> tuple[int, bool, bool]:
        done = install_kit(tmp_path, python, **environment)
        return done.returncode, "installed" in done.stdout, "TEPO_KIT_SITE=/path names " in done.stderr

    assert [install(**cache), install(**cache)] == [(0, True, False), (0, False, False)]
    assert site.stat().st_mode & 0o777 == 0o700
    (site / "of the other kit").touch()
    (tmp_path / "gpu-kit" / "other.whl").touch()
    assert [install(**cache), install(**cache)] == [(0, True, False), (0, False, False)]
    assert [path.name for path in site.iterdir()] == [".done"]
    assert install(python.replace("*'import ", "*tepo*) exit 1 ;; *'import "), **cache) == (1, False, True)
    assert [install(TMPDIR=str(tmp_path)), install(TMPDIR=str(tmp_path))] == [(0, True, False), (0, False, False)]
    (tmp_path / "link").symlink_to(site)
    for refused in (tmp_path / "link", tmp_path / "scripts", tmp_path / "python"):
        assert install(TEPO_KIT_SITE=str(refused)) == (1, False, True)


@pytest.mark.skipif(not isinstance(Gpu.find(), str), reason="this machine has a GPU")
def test_so_does_the_command(tmp_path: Path) -> None:
    assert "nothing was checked" in invoke("bench", "gpu", "--output", tmp_path, code=3).stderr
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_ends_well_passes_with_its_figures() -> None:
    outcome = part("base64", "-t").run(H200, print)  # its self-test prints three lines
    assert (outcome["state"], "Aladdin" in outcome["figures"]["printed"]) == ("passed", True)
    command = ("zipfile", "-c", "{out}/archive.zip", __file__)
    outcome = part(*command, figures=lambda folder, _: {"size": (folder / "archive.zip").stat().st_size}).run(H200, print)
    assert outcome["figures"]["size"] > 100  # the output folder is the part's own


@pytest.mark.parametrize(
    ("what", "state", "reason"),
    [
        (part("json.tool", "/nonexistent"), "failed", r"ended with status \d+\n[\s\S]*/nonexistent"),
        (part("base64", "-t", figures=NAMED["step 1b"].figures), "failed", "[\\s\\S]*wrote no recipes-"),
        (part("base64", packages=("json", "no_such_package")), "not run", "no_such_package not installed"),
        (part("base64", "-t", memory_gib=160), "not run", "needs about 160 GiB, this GPU has 140"),
    ],
)
def test_a_part_that_fails_or_cannot_run_says_why(what: Part, state: str, reason: str) -> None:
    outcome = what.run(H200, print)
    assert outcome["state"] == state
    assert re.match(reason, outcome["reason"])


def with_a_child(pid: Path, then: str) -> Part:
    """A part whose child sleeps; its process id is in the file."""
    code = "import os, pathlib, signal, subprocess, time; child = subprocess.Popen(['sleep', '100000']); "
    return part("timeit", "-n1", "-r1", f"{code}pathlib.Path({str(pid)!r}).write_text(str(child.pid)); {then}; child.wait()")


def test_a_part_that_hangs_is_failed_and_its_children_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over when the child is there."""
    pid, communicate = tmp_path / "pid", subprocess.Popen.communicate

    def run_out_of_time(process: subprocess.Popen[str], timeout: float | None = None) -> Any:
        if timeout is None:
            return communicate(process)
        assert eventually(lambda: pid.exists() and bool(pid.read_text()))
        raise subprocess.TimeoutExpired("timeit", timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", run_out_of_time)
    outcome = with_a_child(pid, "pass").run(H200, print)
    assert (outcome["state"], outcome["reason"]) == ("failed", "not done after 540 s")
    assert gone(int(pid.read_text()))


def test_ctrl_c_ends_the_part_that_runs_and_its_children(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        with_a_child(tmp_path / "pid", "time.sleep(1); os.kill(os.getppid(), signal.SIGINT)").run(H200, print)
    assert gone(int((tmp_path / "pid").read_text()))


def test_the_report_tells_what_was_not_run(tmp_path: Path) -> None:
    parts = [part("base64", "-t"), part("base64", packages=("no_such_package",))]
    report, passed = check(parts, H200, tmp_path, print)
    assert passed
    assert not check([part("json.tool", "/nonexistent")], H200, tmp_path / "other", print)[1]
    (written,) = (tmp_path / "nvidia-h200").glob("20*Z.json")  # it is there without the caller
    assert f"nvidia-h200/{written.stem}" == report.stem
    record = json.loads(written.read_text())
    assert [entry["state"] for entry in record["parts"]] == ["passed", "not run"]
    assert record["gpu"] == {"name": "NVIDIA H200", "memory_gib": 139.8, "capability": "9.0", "cuda": "13.0"}
    lines = written.with_suffix(".md").read_text().splitlines()
    assert lines[-1] == "| a part | not run | – | no_such_package not installed (docs/reference/gpu.md) |"


def test_every_part_ends_within_the_ten_minutes_of_a_lent_machine_and_is_listed() -> None:
    assert all(0 < part.limit_s <= 540 for part in PARTS)
    listed = json.loads(invoke("bench", "gpu", "--list", "--json").stdout)
    assert [row["part"] for row in listed] == [part.name for part in PARTS]


@pytest.mark.parametrize("tables", [1, 2])
def test_a_benchmark_prints_one_document(tables: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(["a", "b"], [["1", "2"]])
    _finish(Report("x", {}, [table] * tables, ""), tmp_path, as_json=True)
    records = [{"a": "1", "b": "2"}]
    assert json.loads(capsys.readouterr().out) == (records if tables == 1 else [records, records])
    before = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    with files_of_at_most(10), pytest.raises(OSError, match="File too large"):
        Report("x", {}, [], "").write(tmp_path)
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == before


def test_what_passed_is_not_run_again_when_the_check_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = replace(part("json.tool", "/nonexistent"), name="other")
    check([part("base64", "-t"), fails], H200, tmp_path, print)
    (tmp_path / H200.folder / "runs-2026-11-27.json").write_text('{"runs": []}')  # written by hand
    never, said = part("json.tool", "/nonexistent"), list[str]()
    _report, passed = check([never, replace(fails, command=("base64", "-t"))], H200, tmp_path, said.append, resume=True)
    assert passed
    assert check([never], H200, tmp_path, print, resume=True)[1]  # from an older report
    assert [line.partition(":")[0] for line in said] == ["other", "other"]
    with monkeypatch.context() as patch:
        patch.setattr(results, "installed_version", lambda name: "9.9" if name == "torch" else None)
        assert not check([never], H200, tmp_path, print, resume=True)[1]
    assert not check([never], H200, tmp_path, print)[1]


def test_a_part_of_several_commands_ends_with_the_first_that_fails(tmp_path: Path) -> None:
    second, third = ("json.tool", "/nonexistent"), ("base64", "-t")
    once, twice, stopped = (part("base64", "-t", more=more).run(H200, print) for more in ((), (third,), (second, third)))
    assert len(twice["figures"]["printed"]) > len(once["figures"]["printed"])
    assert stopped["state"] == "failed"
    assert stopped["reason"].count("Aladdin") == once["figures"]["printed"].count("Aladdin")
    assert "scripts/gpu_kit.sh --rollouts" in part("base64", recorded=tmp_path / "no").run(H200, print)["reason"]


def test_parts_are_chosen_by_name() -> None:
    assert select("kernels, replay", NAMED, "part") == [NAMED["kernels"], NAMED["replay"]]
    assert select("", NAMED, "part") == list(PARTS)
    with pytest.raises(ValueError, match="--only kernel: no such part; known: tests triton, tests transport"):
        select("kernel", NAMED, "part")


def test_figures_are_counts_of_tests_and_shares_of_a_copys_bandwidth_or_refused(tmp_path: Path) -> None:
    tests, kernels = NAMED["tests triton"].figures, NAMED["kernels"].figures
    assert tests(Path(), "....\n3 passed, 1 skipped in 2.00s") == {"passed": 3, "skipped": 1}
    row = {"tokens": 8192, "vocab": 16032, "dtype": "bf16", "peak_extra": 0.004, "forward_collectives": 0}
    row |= {"backward_collectives": 0, "shard_bytes": 4e9, "copy_gbps": 4000.0, "forward_ms": 1.25, "backward_ms": 2.5}
    other, file = {**row, "method": "dense"}, tmp_path / "scores-cuda-tp1.json"
    file.write_text(json.dumps({"results": [{**row, "method": "triton"}, other]}))
    shown = {"of a copy": [0.8, 0.8], "forward ms": 1.25, "backward ms": 2.5, "peak extra": 0.004}
    assert kernels(tmp_path, "") == {"V 16032, triton": shown, "V 16032, dense": shown}
    file.write_text(json.dumps({"results": [other]}))
    for figures, printed, message in (
        (tests, "5 skipped in 0.10s", "no test passed"),
        (tests, "Segmentation fault", "no counts"),
        (kernels, "", "no Triton kernels"),
    ):
        with pytest.raises(ValueError, match=message):
            figures(tmp_path, printed)

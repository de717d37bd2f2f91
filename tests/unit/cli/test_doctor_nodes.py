"""The doctor asks nodes for their clocks, through an ``ssh`` and an ``srun`` that are scripts of ours."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tepo_megatron.cli import doctor
from tepo_megatron.cli.machine_checks import Diagnosis, node_checks, node_names
from tepo_megatron.cli.main import app
from tests.support.programs import TIMEOUT_S

SHARED = """\
#!/bin/sh
# $node is asked to run "$@"
cd "${0%/*}" || exit
tell() { exec date -d "$1 seconds" "$last"; }
for last; do :; done
echo "$node: $*" >>asked
case $node in
  even) "$@" ;;
  chatty) echo "Welcome to node 7"; "$@" ;;
  ahead) tell +120 ;;
  behind) tell -120 ;;
  slow) sleep 0.15; date -d "+1.1 seconds" "$last"; sleep 0.15 ;;
  better)
    date +%s%N >>starts
    if [ "$(wc -l <starts)" -lt 3 ]; then exec "$@"; fi
    end=$(($(tail -n 1 starts) * 2 - $(head -n 1 starts)))
    while [ "$(date +%s%N)" -lt "$end" ]; do :; done
    tell +120 ;;
  left|right)
    touch "$node.here"
    while [ ! -e left.here ] || [ ! -e right.here ]; do sleep 0.02; done
    "$@" ;;
  hung) sleep 60 >alive; true ;;
  mute) exit 7 ;;
  poor) echo 1763631062.%N ;;
  *) echo "debug1: connecting" >&2; echo "ssh: Could not resolve hostname $node: Name or service not known" >&2; exit 255 ;;
esac
"""
SSH = SHARED.replace("cd ", 'while [ "$1" = -o ]; do shift 2; done; node=$1; shift\ncd ', 1)
SRUN = SHARED.replace("cd ", 'echo "srun $*" >>"${0%/*}/asked"; shift 3; node=${1#--nodelist=}; shift\ncd ', 1)


@pytest.fixture
def reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the two scripts, first on PATH, outside an allocation."""
    for name, text in (("ssh", SSH), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return tmp_path


def checked(*nodes: str, timeout_s: float = TIMEOUT_S) -> dict[str, Diagnosis]:
    checks = node_checks(nodes, timeout_s)
    assert [check.name for check in checks] == [f"node {node}" for node in nodes]
    assert all(check.needed for check in checks)
    return dict(zip(nodes, checks, strict=True))


@pytest.mark.parametrize(
    ("node", "status"),
    [("even", "ok"), ("chatty", "ok"), ("slow", "ok"), ("better", "ok"), ("ahead", "warn"), ("behind", "warn")],
)
def test_clocks_that_differ_are_reported_with_what_they_break(reach: Path, node: str, status: str) -> None:
    """slow: 1.1 s ahead, but the answer came at least 0.15 s after the clock was read: less than 1 s are sure. better: the
    third answer is 120 s off, and takes longer than the first two together: the quickest counts.
    """
    check = checked(node)[node]
    assert check.status == status, check.detail
    assert (reach / "asked").read_text().count(f"{node}: date +%s.%N") == 3
    if status == "warn":
        assert f" s {node}" in check.detail
        assert all(word in check.advice for word in ("rendezvous", "log lines", "chrony"))


def test_nodes_are_asked_in_parallel(reach: Path) -> None:
    """Each of the two answers only once the other has been asked."""
    assert {check.status for check in checked("left", "right").values()} == {"ok"}


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("gone", "unreachable: ssh: Could not resolve hostname gone: Name or service not known"),
        ("mute", "unreachable: ssh ended with exit code 7"),
        ("poor", "unreachable: it answers '1763631062.%N' instead of its time"),
    ],
)
def test_a_node_that_does_not_answer_is_a_fault_with_its_error(reach: Path, node: str, said: str) -> None:
    check = checked(node)[node]
    assert (check.status, check.detail) == ("fail", said)
    assert f"ssh -o BatchMode=yes {node}" in check.advice


def test_a_node_that_hangs_is_given_up_with_all_that_it_started(reach: Path) -> None:
    """The script's ``sleep`` holds the FIFO open as long as it lives."""
    os.mkfifo(reach / "alive")
    alive = os.open(reach / "alive", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert checked("hung", timeout_s=0.5)["hung"].detail == "unreachable: no answer to ssh within 0.5 s"
        deadline = time.monotonic() + TIMEOUT_S
        while is_open_for_writing(alive):
            assert time.monotonic() < deadline, "sleep lives on"
            time.sleep(0.02)
    finally:
        os.close(alive)


def is_open_for_writing(fifo: int) -> bool:
    try:
        return os.read(fifo, 1) != b""
    except BlockingIOError:
        return True


def test_inside_an_allocation_slurm_is_asked(reach: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    found = checked("even", "gone")
    assert (found["even"].status, found["gone"].status) == ("ok", "fail")
    assert "SLURM_JOB_NODELIST" in found["gone"].advice
    assert "srun --overlap --nodes=1 --ntasks=1 --nodelist=even date +%s.%N\n" in (reach / "asked").read_text()


def test_a_missing_ssh_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert checked("even")["even"].detail == "unreachable: ssh is not installed here"


@given(st.lists(st.from_regex(r"[a-z0-9]([a-z0-9.@-]{0,9})", fullmatch=True), min_size=1))
def test_names_are_taken_once_in_order(names: list[str]) -> None:
    found = node_names(" , ".join(names) + ",")
    assert sorted(found, key=names.index) == found
    assert set(found) == set(names)


@pytest.mark.parametrize("text", ["", ",", "n[1-2]", "n[1,3]", "-oProxyCommand=x", "n1;n2", "n1 n2"])
def test_what_is_no_list_of_nodes_is_one_sentence(text: str) -> None:
    result = CliRunner().invoke(app, ["doctor", "--launch", f"--nodes={text}"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        f"error: --nodes = {text!r} is not a list of nodes such as n1,n2; 'scontrol show hostnames' writes out Slurm's n[1-2]\n"
    )


@pytest.mark.parametrize(("nodes", "code"), [("even,ahead", 0), ("even,gone", 1)])
def test_the_command_fails_where_a_node_does(reach: Path, monkeypatch: pytest.MonkeyPatch, nodes: str, code: int) -> None:
    monkeypatch.setattr(doctor, "LAUNCH_CHECKS", {})  # they depend on the environment
    result = CliRunner().invoke(app, ["doctor", "--launch", "--json", "--nodes", nodes])
    assert result.exit_code == code
    assert [check["name"] for check in json.loads(result.stdout)["checks"]] == [f"node {name}" for name in nodes.split(",")]
    table = CliRunner().invoke(app, ["doctor", "--launch", "--nodes", nodes])
    assert ("still needs: node gone" in table.stdout) == bool(code)

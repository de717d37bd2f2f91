"""The doctor finds planted faults of nodes, whose clocks it asks through an ``ssh`` and an ``srun`` that are our scripts."""

import json
import os
import re
import select
from pathlib import Path

import pytest

from tepo_megatron.cli import doctor
from tepo_megatron.cli.machine_checks import Finding, node_checks
from tepo_megatron.tools.faults.processes import wait_until
from tests.support.cli import invoke
from tests.support.programs import TIMEOUT_S
from tests.support.shell import write_script

SHARED = """\
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
  hung) sleep 100000 >alive; true ;;
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
        write_script(tmp_path / name, text)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def checked(*nodes: str, timeout_s: float = TIMEOUT_S) -> dict[str, Finding]:
    checks = node_checks(f" {' , '.join(nodes)},{nodes[0]},", timeout_s)  # a name that comes twice is asked once
    assert [check.name for check in checks] == [f"node {node}" for node in nodes]
    assert all(check.needed for check in checks)
    return dict(zip(nodes, checks, strict=True))


@pytest.mark.parametrize(
    ("node", "status", "detail"),
    [
        *((node, "ok", "reachable; clock .*") for node in ("even", "chatty", "slow", "better")),
        ("ahead", "warn", r"reachable; clock 1[12]\d\.\d+ s ahead of .*"),
        ("behind", "warn", r"reachable; clock 1[12]\d\.\d+ s behind .*"),
        ("gone", "fail", "unreachable: ssh: Could not resolve hostname gone: Name or service not known"),
        ("mute", "fail", "unreachable: ssh ended with exit code 7"),
        ("poor", "fail", r"unreachable: it answers '1763631062\.%N' instead of its time"),
    ],
)
def test_clocks_that_differ_and_nodes_that_do_not_answer_are_reported(reach: Path, node: str, status: str, detail: str) -> None:
    """slow: 1.1 s ahead, but the answer came at least 0.15 s after the clock was read: less than 1 s are sure. better: the
    third answer is 120 s off, and takes longer than the first two together: the quickest counts.
    """
    check = checked(node)[node]
    assert (check.status, re.fullmatch(detail, check.detail) is not None) == (status, True), check.detail
    advice = {"ok": "", "warn": r".*log lines.*rendezvous.*chrony.*", "fail": f".*ssh -o BatchMode=yes {node}.*"}
    assert re.fullmatch(advice[status], check.advice)
    assert status == "fail" or (reach / "asked").read_text().count(f"{node}: date +%s.%N") == 3


def test_nodes_are_asked_in_parallel(reach: Path) -> None:
    """Each of the two answers only once the other has been asked."""
    assert {check.status for check in checked("left", "right").values()} == {"ok"}


def test_a_node_that_hangs_is_given_up_with_all_that_it_started(reach: Path) -> None:
    """The script's ``sleep`` holds the FIFO open as long as it lives."""
    os.mkfifo(reach / "alive")
    alive = os.open(reach / "alive", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert checked("hung", timeout_s=0.5)["hung"].detail == "unreachable: no answer to ssh within 0.5 s"
        os.close(os.open(reach / "alive", os.O_WRONLY | os.O_NONBLOCK))  # the script may have been ended before it opened it
        wait_until(lambda: select.select([alive], [], [], 0)[0], TIMEOUT_S, "sleep ends")  # readable: nobody has it open
    finally:
        os.close(alive)


def test_inside_an_allocation_slurm_is_asked(reach: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    found = checked("even", "gone")
    assert (found["even"].status, found["gone"].status) == ("ok", "fail")
    assert "SLURM_JOB_NODELIST" in found["gone"].advice
    assert "srun --overlap --nodes=1 --ntasks=1 --nodelist=even date +%s.%N\n" in (reach / "asked").read_text()


def test_a_missing_ssh_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checked("even")["even"].detail == "unreachable: ssh is not installed here"


@pytest.mark.parametrize("text", ["", ",", "n[1-2]", "n[1,3]", "-oProxyCommand=x", "n1;n2", "n1 n2"])
def test_what_is_no_list_of_nodes_is_one_sentence(text: str) -> None:
    result = invoke("doctor", "--launch", f"--nodes={text}", code=1)
    assert result.stdout == ""
    assert result.stderr == (
        f"error: --nodes = {text!r} is not a list of nodes such as n1,n2; 'scontrol show hostnames' writes out Slurm's n[1-2]\n"
    )


def test_the_command_fails_where_a_node_does(reach: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LAUNCH_CHECKS", {})  # they depend on the environment
    result = invoke("doctor", "--launch", "--json", "--nodes", "even,gone", code=1)
    checks = json.loads(result.stdout)["checks"]
    assert [(check["name"], check["status"]) for check in checks] == [("node even", "ok"), ("node gone", "fail")]

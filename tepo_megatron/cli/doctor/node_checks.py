"""Checks of ``tepo doctor --nodes n1,n2``: each node's answer, and its clock's offset from this machine's."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tepo_megatron.cli.doctor.diagnosis import Diagnosis

_ATTEMPTS = 3
_SKEW_S = 1.0
_NAME = re.compile(r"\w[\w.@-]*")
_TIME = re.compile(r"\d+\.\d+")


@dataclass(frozen=True)
class _ClockOffset:
    """A node's clock minus this machine's, in seconds, ± ``uncertainty``."""

    seconds: float
    uncertainty: float


def node_names(text: str) -> list[str]:
    """The distinct names in ``n1,n2``. Raises ValueError for anything else, such as Slurm's host lists."""
    names = list(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    if not names or not all(_NAME.fullmatch(name) for name in names):
        raise ValueError(
            f"--nodes = {text!r} is not a list of nodes such as n1,n2; 'scontrol show hostnames' writes out Slurm's n[1-2]"
        )
    return names


def node_checks(nodes: Sequence[str], timeout_s: float = 5.0) -> list[Diagnosis]:
    """Check all nodes in parallel; one result each.

    A node's time comes from GNU ``date``, through ``srun`` inside a Slurm allocation (``SLURM_JOB_ID``), else through ``ssh``.
    ``timeout_s`` limits one answer.
    """
    with ThreadPoolExecutor(max_workers=min(32, len(nodes))) as pool:
        return list(pool.map(lambda node: _check(node, timeout_s), nodes))


def _check(node: str, timeout_s: float) -> Diagnosis:
    command = _command(node, timeout_s)
    try:
        offset = min((_offset(command, timeout_s) for _ in range(_ATTEMPTS)), key=lambda offset: offset.uncertainty)
    except (OSError, RuntimeError) as error:
        return Diagnosis(f"node {node}", "fail", f"unreachable: {error}", _advice(node), needed=True)
    side = "ahead of" if offset.seconds > 0 else "behind"
    detail = f"reachable; clock {abs(offset.seconds):.3f} s {side} this machine's, ± {offset.uncertainty:.3f} s"
    if abs(offset.seconds) - offset.uncertainty > _SKEW_S:
        advice = (
            "log lines and times of files fall out of order, Slurm's munge and torchrun's elastic rendezvous turn nodes away "
            "as late: keep clocks by NTP ('chronyc tracking' on the node says whether chrony does)"
        )
        return Diagnosis(f"node {node}", "warn", detail, advice, needed=True)
    return Diagnosis(f"node {node}", "ok", detail, needed=True)


def _command(node: str, timeout_s: float) -> list[str]:
    if _in_allocation():
        reach = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
    else:
        # A shared connection that stays open would keep our pipes open, too.
        options = ("BatchMode=yes", f"ConnectTimeout={max(1, round(timeout_s))}", "ControlMaster=no")
        reach = ["ssh", *(word for option in options for word in ("-o", option)), node]
    return [*reach, "date", "+%s.%N"]


def _advice(node: str) -> str:
    if _in_allocation():
        return f"is it one of this job's nodes ($SLURM_JOB_NODELIST), and up? 'scontrol show node {node}' says"
    return f"'ssh -o BatchMode=yes {node} date' must work without a question, or run the doctor inside an allocation of Slurm"


def _in_allocation() -> bool:
    return "SLURM_JOB_ID" in os.environ


def _offset(command: Sequence[str], timeout_s: float) -> _ClockOffset:
    """The node read its clock between start and end of the command: assume the middle, as NTP does."""
    start = time.time()
    answer = _output(command, timeout_s)
    end = time.time()
    # Output of the node's shell comes first.
    last = (answer.splitlines() or [""])[-1].strip()
    if not _TIME.fullmatch(last):
        raise RuntimeError(f"it answers {last!r} instead of its time")
    return _ClockOffset(float(last) - (start + end) / 2, (end - start) / 2)


def _output(command: Sequence[str], timeout_s: float) -> str:
    """Raises RuntimeError with the last line of a command that fails, hangs or is not installed."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise RuntimeError(f"{command[0]} is not installed here") from error
    with process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            # The whole group: a child such as a ProxyCommand would otherwise survive.
            os.killpg(process.pid, signal.SIGKILL)
            raise RuntimeError(f"no answer to {command[0]} within {timeout_s:g} s") from error
    if process.returncode:
        lines = errors.strip().splitlines()
        raise RuntimeError(lines[-1].strip() if lines else f"{command[0]} ended with exit code {process.returncode}")
    return output

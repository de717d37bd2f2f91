"""Ranks on this machine: real processes, started by torchrun's agent, whose work is a few lines."""

import fcntl
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron import errors
from tepo_megatron.config.load import load_run
from tepo_megatron.runtime.preemption import RANKS_FOLDER
from tepo_megatron.runtime.proc import STOPPED, Process
from tepo_megatron.runtime.run_lock import flock
from tepo_megatron.sampler.vllm.resources import reserve_port
from tepo_megatron.tools.faults.processes import CTRL_Z, Terminal, wait_gone, wait_until
from tepo_megatron.versions import in_range
from tests.support.processes import gone, python_programs
from tests.support.programs import TIMEOUT_S

RANK = """
import errno, os, signal, subprocess, sys, time
from contextlib import ExitStack
from pathlib import Path
from tepo_megatron.runtime import rank as runtime_rank
from tepo_megatron.runtime.rank import report_before_leaving
from tepo_megatron.runtime.heartbeat import Heartbeat, RankRecord
from tepo_megatron.runtime.proc import STOPPED, Process
from tepo_megatron.runtime.restarts import attempt

os.environ.setdefault("NODE", "0")
what, folder, rank = sys.argv[1], Path(sys.argv[2]), os.environ["RANK"]

def started(rank):
    return folder / f"started{rank}{f'.{attempt()}' if attempt() else ''}"

def runs(rank):
    # or has not started yet
    file = started(rank)
    text = file.read_text() if file.exists() else ""
    return not text or ((state := Process.read(int(text))) is not None and state.alive)

def leave():
    (folder / "left0").touch()
    time.sleep(1)

def hold_the_agent():
    # It looks at its ranks ten times a second: what one does of another's death comes in between, or too late. Now it looks
    # when rank 0 is gone, too.
    agent = os.getppid()
    go_on = "import os, signal, sys, time\\nwhile os.getppid() == int(sys.argv[1]): time.sleep(0.01)\\n"
    go_on += "os.kill(int(sys.argv[2]), signal.SIGCONT)"
    subprocess.Popen([sys.executable, "-c", go_on, str(os.getpid()), str(agent)])
    os.kill(agent, signal.SIGSTOP)
    while Process.read(agent).state != STOPPED:
        time.sleep(0.01)
    (folder / "held").touch()

def act():
    started(rank).write_text(str(os.getpid()))
    if what == "leaving" and rank == "1":
        while not (folder / "left0").exists():
            time.sleep(0.05)
        {}["the peer is gone"]
    if what == "leaving":
        with ExitStack() as stack:
            stack.callback(leave)
            stack.push(report_before_leaving)
            load_run(None, ["train.steps=0"])
    if what == "group":
        import atexit
        from datetime import timedelta
        import torch.distributed as dist
        from tepo_megatron.runtime.rendezvous import rank_store
        dist.init_process_group("gloo", store=rank_store(2, timedelta(seconds=1000)), rank=int(rank), world_size=2)
        atexit.register(os.abort)  # as gloo's threads may, once in some hundred ends
        load_run(None, ["train.steps=0"])
    if what.startswith("once"):
        (folder / f"attempt{attempt()}-rank{rank}-node{os.environ['NODE']}").touch()
        while not attempt() and not list(folder.glob("attempt0-rank0-*")):
            time.sleep(0.05)
        if attempt():
            return
        if rank == "1" and what != "once, the agent":
            os.kill(os.getpid(), 9)
        if rank == "1":
            time.sleep(0.5)
            os.kill(os.getppid(), 9)
        time.sleep(1000)
    if what == "ok":
        return
    if what == "asked":
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        (folder / f"asked{rank}").touch()
        time.sleep(1000)
    if what in ("hang", "still"):
        limit = 2.0 if what == "still" and rank == "1" else 1000.0
        beats = Heartbeat(folder / "status", int(rank), 2, hang_timeout_s=limit)
        while rank == "1" and not (folder / f"beats0.{attempt()}").exists():  # rank 0 removes what others have written before
            time.sleep(0.05)
        beats.phase("score")
        beats.start()
        while (int(rank), "score") not in [(each.rank, each.phase) for each in RankRecord.read_all(folder / "status")]:
            time.sleep(0.05)
        (folder / f"beats{rank}.{attempt()}").touch()
        while not (folder / "never").exists():
            time.sleep(0.05)
            if what == "still" and rank == "0":
                beats.moved()
            if not runs(1) or not runs(0):
                raise RuntimeError("connection closed by peer")
    if what == "broken" and rank == "0":
        hold_the_agent()
        while not (folder / "started1").exists() or runs(1):
            time.sleep(0.01)
        {}["connection closed by peer"]
    while not (folder / ("held" if what == "broken" else "started0")).exists():
        time.sleep(0.05)
    if what == "full":
        def fill(*_):
            raise OSError(errno.ENOSPC, "No space left on device")
        runtime_rank.json.dump = fill
    if rank == "1" and what in ("sentence", "full"):
        load_run(None, ["train.steps=0"])
    if rank == "1" and what == "bug, later":
        (folder / "checkpoints" / f"step_{attempt():06d}").mkdir(parents=True)
    if rank == "1" and what in ("bug", "bug, later"):
        {}["missing"]
    if rank == "1" and what == "bugs":
        {}[f"missing{attempt()}"]
    if rank == "1" and what in ("kill", "broken"):
        os.kill(os.getpid(), 9)
    time.sleep(1000)

def work(config):
    try:
        act()
    finally:
        if what == "stop" and rank == "0":
            time.sleep(3)  # as servers and loggers need it
        while what == "save" and rank == "1" and not (folder / "cleaned0").exists():
            time.sleep(0.05)
        (folder / f"cleaned{rank}").touch()

if what != "group":
    runtime_rank.refuse_pickles = lambda: None  # two seconds, to import the torch that these ranks have no use for
if what == "orphan":
    starter = os.getppid()
    (folder / f"importing{rank}").write_text(str(os.getpid()))
    while os.getppid() == starter:
        time.sleep(0.01)
if what in ("ok", "world", "sentence", "full", "leaving", "group", "once"):
    from tepo_megatron.config.load import load_run
    from tepo_megatron.run.api import run_rank

    sys.exit(run_rank(load_run(None, sys.argv[3:]), work))
sys.exit(runtime_rank.run_rank(lambda: work(None), grace_s=60.0, warning_s=300.0))  # which imports no configuration
"""
PARENT = """
import sys
from pathlib import Path
from tepo_megatron.runtime import torchrun
from tepo_megatron.runtime.rank import print_error
from tepo_megatron.runtime import heartbeat

heartbeat.STOPPED_S, heartbeat.INTERVAL_S = 3.0, 0.2
stops = []
status = Path(sys.argv[2], "status")
code, message = torchrun.run_ranks(sys.argv[1:], 2, module="made_up_rank", status=status, stops=stops)
assert stops or code not in (75, 130)
if message:
    print_error(message)
sys.exit(code)
"""
AGENT = """
import sys
from tepo_megatron.runtime import heartbeat, torchrun

heartbeat.STOPPED_S, heartbeat.INTERVAL_S = 3.0, 0.2
options = ["--nnodes", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", "0"]
sys.exit(torchrun.run_node(["--status", f"{sys.argv[2]}/status", *options, "-m", "made_up_rank", *sys.argv[1:]]))
"""

PARENT_RESTARTS = PARENT.replace("status=status", "max_restarts=2, status=status")
AGENT_RESTARTS = AGENT.replace('"-m", "made', '"--max-restarts", "2", "-m", "made')
IN_A_THREAD = "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor(1).submit(exec, {!r}, {{}}).result()\n"
NODE = """
import os, pathlib, sys, time, torch
from tepo_megatron.runtime import restarts, torchrun

restarts.POLL_INTERVAL_S, restarts.SILENT_S, restarts.GATHER_S, torchrun._MEET_S = 0.1, 3.0, 10.0, float(sys.argv.pop())
node, port = sys.argv.pop(), sys.argv.pop()
os.environ["NODE"] = node
pathlib.Path(sys.argv[2], f"imported{node}").touch()
while len(list(pathlib.Path(sys.argv[2]).glob("imported*"))) < 2:  # time runs from here on
    time.sleep(0.01)
options = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port]
sys.exit(torchrun.run_node(["--spares", "1", *options, "--max-restarts", "2", "-m", "made_up_rank", *sys.argv[1:]]))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts a parent of two ranks."""
    (tmp_path / "made_up_rank.py").write_text(RANK)
    with python_programs({"PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)}, forks=True) as started:

        def start_parent(
            what: str, override: str = "engine.parallel.dp=2", parent: str = PARENT, *args: str, **options: Any
        ) -> Any:
            return started("-c", parent, what, tmp_path, override, *args, **options)

        yield start_parent


def started_ranks(folder: Path, name: str = "started") -> list[int]:
    """Their process ids."""
    files = [folder / f"{name}{rank}" for rank in (0, 1)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), TIMEOUT_S, "the ranks start")
    return [int(file.read_text()) for file in files]


WRONG_FIELD = "error: overrides: 1 problem in the configuration\n  train.steps: got 0; allowed: an integer > 0\n"
NO_TRACEBACK = "(?:(?!Traceback).)*"
ONE_TRACEBACK = f"{NO_TRACEBACK}Traceback{NO_TRACEBACK}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "program", "code", "restarts", "printed"),
    [
        ("ok", PARENT, 0, 0, ""),
        ("ok", IN_A_THREAD.format(PARENT), 0, 0, ""),
        ("world", PARENT, 1, 0, ".* = 4 × 1 × 1 × 1 = 4 ranks, but WORLD_SIZE is 2; start torchrun with --nproc-per-node 4.*"),
        ("sentence", PARENT_RESTARTS, 1, 0, WRONG_FIELD),
        ("full", PARENT_RESTARTS, 1, 0, f"{WRONG_FIELD}error: rank 1 ended with exit code 1; what it wrote last is above\n"),
        ("leaving", PARENT, 1, 0, WRONG_FIELD),
        ("group", PARENT, 1, 0, f".*{WRONG_FIELD}"),
        (
            *("bug", PARENT_RESTARTS, 1, 1),
            rf"{ONE_TRACEBACK}rank 1: KeyError: 'missing'\. The ranks are .* \(restart 1 of at most 2, train\.max_restarts\)\n"
            rf"{ONE_TRACEBACK}error: rank 1: KeyError: 'missing'\n",
        ),
        ("bug, later", PARENT_RESTARTS, 1, 2, ".*error: rank 1: KeyError: 'missing'\n"),
        ("once", PARENT_RESTARTS, 0, 1, r"rank 1 was ended by SIGKILL.* \(restart 1 of at most 2, train.max_restarts\)\n"),
        ("kill", PARENT_RESTARTS, 128 + signal.SIGKILL, 2, ".*\nerror: rank 1 was ended by SIGKILL[^\n]*\n"),
        (
            *("broken", PARENT, 128 + signal.SIGKILL, 0),
            r".*error: rank 1 was ended by SIGKILL; the kernel does this when memory runs out[^\n]*\. Then the others failed: "
            r"rank 0: KeyError: 'connection closed by peer'\n",
        ),
    ],
)
def test_the_cause_is_printed_once_and_last_and_lost_ranks_start_again(
    start, tmp_path: Path, what: str, program: str, code: int, restarts: int, printed: str
) -> None:
    """Not after the user's own error, nor after a bug that comes twice with no checkpoint between. full: no report can be
    written. leaving: rank 1 fails because of what rank 0 does on its way out, and ends first. group: nobody has left the
    group, and its threads run while the interpreter ends. broken: rank 0 fails because rank 1 was killed.
    """
    parent = start(what, f"engine.parallel.tp={4 if what == 'world' else 2}", program)
    out, err = parent.communicate(timeout=TIMEOUT_S)
    assert (parent.returncode, out) == (code, "")
    assert re.fullmatch(printed, err, re.S), err
    assert err.count("The ranks are started again") == restarts
    assert not list(tmp_path.glob("tepo-*"))
    assert not list(tmp_path.glob("torchelastic_*"))
    assert what != "sentence" or (tmp_path / "cleaned0").exists()
    attempts = {f"attempt{attempt}-rank{rank}-node0" for attempt in (0, 1) for rank in (0, 1)}
    assert {path.name for path in tmp_path.glob("attempt*")} == (attempts if what == "once" else set())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux's")
def test_ranks_whose_starter_was_killed_while_they_imported_do_not_run(start, tmp_path: Path) -> None:
    parent, ranks = start("orphan"), started_ranks(tmp_path, "importing")
    parent.kill()
    assert all(map(gone, ranks))
    assert not list(tmp_path.glob("started*"))


@pytest.fixture
def start_nodes(start) -> Iterator[Callable[..., list[Any]]]:
    with reserve_port("127.0.0.1") as held:  # so that no other process is given it
        port = held.getsockname()[1]

        def start_agents(what: str, nodes: int = 3, meet_s: float = TIMEOUT_S) -> list[Any]:
            return [start(what, "engine.parallel.dp=2", NODE, port, node, meet_s) for node in range(nodes)]

        yield start_agents


@pytest.mark.slow
@pytest.mark.parametrize("what", ["once, the rank", "once, the agent"])
def test_a_spare_node_takes_the_place_of_one_whose_rank_or_agent_was_killed(start_nodes, tmp_path: Path, what: str) -> None:
    ends = [(agent.communicate(timeout=TIMEOUT_S)[1], agent.returncode) for agent in start_nodes(what)]
    assert [code for _, code in ends] == [0, -signal.SIGKILL if what == "once, the agent" else 0, 0], ends
    ran = {path.name for path in tmp_path.glob("attempt*")}
    assert ran == {"attempt0-rank0-node0", "attempt0-rank1-node1", "attempt1-rank0-node0", "attempt1-rank1-node2"}
    cause = "node 1 is gone" if what == "once, the agent" else "node 1: rank 1 was ended by SIGKILL"
    assert [line.partition(cause)[1] for line in ends[0][0].splitlines() if "started again" in line] == [cause], ends


@pytest.mark.slow
@pytest.mark.parametrize(("what", "errors"), [("bug", ["'missing'"]), ("bugs", ["'missing0'", "'missing1'"])])
def test_an_error_on_another_node_than_the_first_is_named_and_ends_the_job_when_it_comes_twice(
    start_nodes, what: str, errors: list[str]
) -> None:
    ends = [(agent.communicate(timeout=TIMEOUT_S)[1], agent.returncode) for agent in start_nodes(what)]
    again = [line.partition(". The ranks are started again")[0] for line in ends[0][0].splitlines() if "started again" in line]
    assert again == [f"rank 1: KeyError: {error}" for error in errors], ends
    assert [bool(code) for _, code in ends[:2]] == [True, True], ends


@pytest.mark.slow
@pytest.mark.parametrize(("what", "asked"), [("stop", (0, 1, 2)), ("stop", (1,)), ("save", (1,))])
def test_a_stop_ends_every_node_with_its_code(start_nodes, tmp_path: Path, what: str, asked: tuple[int, ...]) -> None:
    """Also one that comes to another node than the first, whose ranks may end only when rank 0 does, as in a save.

    None waits at torch's exit barrier for those that have left, and none kills those that leave later.
    """
    agents = start_nodes(what)
    wait_until(lambda: all((tmp_path / f"started{rank}").exists() for rank in (0, 1)), TIMEOUT_S, "the ranks")
    for node in asked:
        agents[node].send_signal(signal.SIGUSR1)
    ends = [(agent.communicate(timeout=TIMEOUT_S)[1], agent.returncode) for agent in agents]
    assert [code for _, code in ends[:2]] == [75, 75], ends
    assert_cleaned_up(tmp_path)
    assert not any("is gone" in text for text, _ in ends), ends


@pytest.mark.slow
def test_a_spare_node_that_is_not_there_is_a_sentence_before_anything_starts(start_nodes, tmp_path: Path) -> None:
    for agent in start_nodes("once", nodes=2, meet_s=10.0):
        assert agent.communicate(timeout=TIMEOUT_S)[1] == "error: node 2 of 3, spares included, did not come within 10 s\n"
        assert agent.returncode == 1
    assert not list(tmp_path.glob("attempt*"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize(("what", "victim", "program"), [("hang", 0, PARENT), ("hang", 1, AGENT), ("still", 1, PARENT)])
def test_a_rank_that_is_stopped_or_does_not_go_on_ends_the_job_with_one_sentence(
    start, tmp_path: Path, what: str, victim: int, program: str
) -> None:
    parent = start(what, parent=program)
    if what == "hang":
        wait_until(lambda: all((tmp_path / f"beats{rank}.0").exists() for rank in (0, 1)), TIMEOUT_S, "the heartbeats")
        os.kill(int((tmp_path / f"started{victim}").read_text()), signal.SIGSTOP)
    _, err = parent.communicate(timeout=TIMEOUT_S)
    assert parent.returncode == (1 if program is AGENT else 128 + signal.SIGKILL)
    (report,) = (tmp_path / "logs").glob("hang-*.txt")
    (sentence,) = [line for line in err.splitlines() if line.startswith(f"error: rank {victim} (process ")]
    cause = "is stopped (state T: SIGSTOP, SIGTSTP) for " if what == "hang" else "(train.hang_timeout_s = 2), in phase score"
    assert cause in sentence
    assert f"The stacks of this machine's processes are in {report}. The job is ended; go on from its newest" in sentence
    text = report.read_text()
    assert re.search(rf"^== rank {1 - victim} \(process \d+ on .*\), in phase score ", text, re.M)
    assert len(re.findall(r"^== rank .*(?:\n(?!==).*)* in act$", text, re.M)) == (1 if what == "hang" else 2)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_ranks_that_hang_start_again_also_where_no_report_can_be_written(start, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where a folder should be")
    parent = start("still", parent=PARENT.replace("status=status", "max_restarts=1, status=status"))
    _, err = parent.communicate(timeout=TIMEOUT_S)
    assert parent.returncode == 128 + signal.SIGKILL
    again, last = [line for line in err.splitlines() if "(train.hang_timeout_s = 2), in phase score" in line]
    assert again.endswith("(restart 1 of at most 1, train.max_restarts)")
    assert "The job is ended" not in again
    assert "The report of what hangs could not be written: " in last
    assert last.endswith(". The job is ended; go on from its newest checkpoint with --resume")


@pytest.mark.slow
@pytest.mark.parametrize("program", [PARENT_RESTARTS, AGENT_RESTARTS])
def test_ranks_that_die_of_a_stop_request_do_not_start_again(start, tmp_path: Path, program: str) -> None:
    """As one that crashes while it saves."""
    parent = start("asked", parent=program)
    wait_until(lambda: len(list(tmp_path.glob("asked*"))) == 2, TIMEOUT_S, "the ranks")
    parent.send_signal(signal.SIGTERM)
    _, err = parent.communicate(timeout=TIMEOUT_S)
    assert parent.returncode not in (0, 75)
    assert "SIGKILL" in err
    assert sorted(path.name for path in tmp_path.glob("started*")) == ["started0", "started1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "program", "nohup"),
    [
        (signal.SIGINT, 130, PARENT, True),
        (signal.SIGTERM, 75, AGENT, False),
        (signal.SIGUSR1, 75, AGENT, True),
        (signal.SIGHUP, 75, PARENT, False),
    ],
)
def test_a_signal_ends_every_rank_after_it_cleaned_up(
    start, tmp_path: Path, number: signal.Signals, code: int, program: str, nohup: bool
) -> None:
    """On a machine alone, and on a node of a cluster. With ``nohup`` SIGHUP before it ends neither the parent nor a rank.

    A host's cleaner of old temporary files leaves the ranks' own files alone, since their folder is locked.
    """
    options = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)} if nohup else {}
    parent = start("wait", parent=program, **options)
    for pid in (parent.pid, *started_ranks(tmp_path)) if nohup else ():
        os.kill(pid, signal.SIGHUP)
    folder = Process.environment(started_ranks(tmp_path)[0])[RANKS_FOLDER]
    handle = os.open(folder, os.O_RDONLY)
    assert flock(handle, fcntl.LOCK_SH) is False
    os.close(handle)
    parent.send_signal(number)
    out, err = parent.communicate(timeout=TIMEOUT_S)
    assert (parent.returncode, out, err) == (code, "", "")
    assert not os.path.exists(folder)
    assert_cleaned_up(tmp_path)


def assert_cleaned_up(folder: Path) -> None:
    assert {path.name for path in folder.glob("cleaned*")} == {"cleaned0", "cleaned1"}


def has_stopped(pid: int, expected: bool) -> bool:
    return (Process.read(pid).state == STOPPED) == expected


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_ctrl_z_stops_the_ranks_too_and_a_connection_that_closes_lets_them_save(start, tmp_path: Path) -> None:
    """In a shell on a terminal, which closes while the job is stopped."""
    environment = {"PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"])), "TMPDIR": str(tmp_path)}
    with Terminal(tmp_path, **environment) as terminal:
        terminal.press(shlex.join([sys.executable, "-c", PARENT, "wait", str(tmp_path), "engine.parallel.dp=2"]) + "\n")
        ranks = started_ranks(tmp_path)
        (parent,) = Process.children(terminal.pid)
        for keys, stopped in ((CTRL_Z, True), ("fg\n", False), (CTRL_Z, True)):
            terminal.press(keys)
            for pid in (*ranks, parent.pid):
                wait_until(partial(has_stopped, pid, stopped), TIMEOUT_S, keys)
            if stopped:
                terminal.wait_for("Stopped", TIMEOUT_S)
        terminal.hang_up()
        assert not wait_gone([parent.pid, *ranks], TIMEOUT_S)
    assert_cleaned_up(tmp_path)


@pytest.mark.slow
def test_ctrl_backslash_ends_the_job_at_once_with_a_sentence(start, tmp_path: Path) -> None:
    parent, ranks = start("wait"), started_ranks(tmp_path)
    parent.send_signal(signal.SIGQUIT)
    _, err = parent.communicate(timeout=TIMEOUT_S)
    assert (parent.returncode, err) == (
        128 + signal.SIGQUIT,
        "error: SIGQUIT: the job is ended at once, without saving; go on from its newest checkpoint with --resume\n",
    )
    assert not wait_gone(ranks, 0.0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_ranks_do_not_outlive_a_parent_that_was_killed(start, tmp_path: Path) -> None:
    parent, ranks = start("wait"), started_ranks(tmp_path)
    parent.kill()
    assert not wait_gone(ranks, TIMEOUT_S)
    assert_cleaned_up(tmp_path)


def test_only_what_this_package_raises_is_a_sentence() -> None:
    """An error of a library is none, also if one of our functions called it."""

    def caught(action: Callable[[], object]) -> BaseException:
        with pytest.raises(ValueError) as info:  # noqa: PT011
            action()
        return info.value

    ours, by_test = caught(lambda: load_run(None, ["x"])), caught(lambda: int("x"))
    assert errors.is_ours(ours)
    assert errors.describe(ours) == str(ours)
    assert not errors.is_ours(by_test)
    assert errors.describe(by_test) == "ValueError: invalid literal for int() with base 10: 'x'"
    assert not errors.is_ours(caught(lambda: in_range("1", "no range")))

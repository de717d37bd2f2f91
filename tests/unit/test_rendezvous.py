"""Where ranks meet, and what another user of the machine gets there: real processes, and a stranger without any right."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tepo_megatron.runtime import rendezvous, torchrun
from tepo_megatron.runtime.preemption import PREEMPTED
from tepo_megatron.sampler.vllm.resources import reserve_port
from tepo_megatron.tools.faults.processes import wait_until
from tepo_megatron.trainer.megatron.parallel.collectives import all_gather_json, objects_as_json
from tests.support import stranger
from tests.support.launch import run_dist
from tests.support.processes import listeners, python_programs
from tests.support.programs import TIMEOUT_S

RANK = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
from tepo_megatron.config.load import load_run
from tepo_megatron.run.api import run_rank

folder, rank = Path(sys.argv[1]), os.environ["RANK"]

def work(config):
    import torch
    import torch.distributed as dist
    from tepo_megatron.runtime.rendezvous import rank_store

    store = rank_store(2, timedelta(seconds=1000))
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=store, rank=int(rank), world_size=2)
    dist.all_reduce(total := torch.tensor([int(rank) + 1]))
    (folder / f"started{rank}").write_text(str(int(total)))
    while not (folder / "end").exists():
        time.sleep(0.05)
    dist.destroy_process_group()  # an interpreter that ends beside gloo's threads may abort

sys.exit(run_rank(load_run(None, ["engine.parallel.dp=2"]), work))
"""
PARENT = """
import sys
from tepo_megatron.runtime import torchrun
code, message = torchrun.run_ranks(sys.argv[1:], 2, module="waiting_rank")
sys.stderr.write(message)
sys.exit(code)
"""
MEETS = """
import pathlib, sys
from tepo_megatron.runtime import torchrun

file, meet = pathlib.Path(sys.argv.pop(1)), torchrun._meet
torchrun._meet = lambda *args: (file.write_text("meets"), meet(*args))[1]
sys.exit(torchrun.run_node(sys.argv[1:]))
"""
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts programs that find the module of the ranks."""
    (tmp_path / "waiting_rank.py").write_text(RANK)
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    with python_programs({"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}, forks=True) as started:
        yield started


def wait_for(process: subprocess.Popen[str], *files: Path) -> None:
    def written() -> bool:
        assert process.poll() is None, process.communicate()
        return all(file.exists() and (file.suffix == ".empty" or file.read_text()) for file in files)

    wait_until(written, TIMEOUT_S, f"{files}")


@as_root
@pytest.mark.slow
def test_the_proof_is_one_torchruns_own_rendezvous_runs_the_strangers_code(start: Any, tmp_path: Path) -> None:
    """A control, without which the test below and tests/e2e/test_strangers.py prove nothing. Its pickle makes an empty file."""
    proof, up = tmp_path / "proof.empty", tmp_path / "up.empty"
    (tmp_path / "sleeper.py").write_text("import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)")
    process = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "sleeper", up)
    wait_for(process, up)
    keys = stranger.poison_stores(proof, *(each.port for each in listeners(process.pid)))
    assert any(key.startswith("torch.rendezvous.") for key in keys)
    wait_until(proof.exists, TIMEOUT_S, "the proof")


@pytest.mark.slow
def test_ranks_whose_agent_was_killed_leave_no_folder(start: Any, tmp_path: Path) -> None:
    parent = start("-c", PARENT, tmp_path)
    wait_for(parent, tmp_path / "started0", tmp_path / "started1")
    ranks = psutil.Process(parent.pid).children()
    folder = Path(next(rank.environ()[rendezvous.FOLDER_VARIABLE] for rank in ranks if "RANK" in rank.environ()))
    assert folder.stat().st_mode & 0o777 == 0o700
    parent.kill()
    wait_until(lambda: not folder.exists(), TIMEOUT_S, "the end of the ranks")


def test_a_rank_that_leaves_first_takes_the_store_from_nobody(start: Any, tmp_path: Path) -> None:
    """Rank 0 speaks to the store when it ends its servers, at a time when the others may have gone."""
    rank_code = """
import os, pathlib, sys, time
from datetime import timedelta
from tepo_megatron.runtime.rendezvous import rank_store
store, agent = rank_store(2, timedelta(seconds=1000)), os.getppid()
pathlib.Path(sys.argv[1]).touch()
while os.getppid() == agent:
    time.sleep(0.01)
"""
    agent_code = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
"""
    folder = tmp_path / "ranks"
    folder.mkdir(mode=0o700)
    for rank, stays in (("1", True), ("0", False)):
        told = f"import os; os.environ |= {{'RANK': {rank!r}, {rendezvous.FOLDER_VARIABLE!r}: {str(folder)!r}}}\n"
        agent = start("-c", told + agent_code, rank_code, tmp_path / f"ready{rank}")
        agent.communicate(timeout=TIMEOUT_S)  # until the rank, which has inherited the pipes, has ended, too
        assert folder.exists() == stays


@as_root
@pytest.mark.slow
def test_a_stranger_can_disturb_the_store_of_several_nodes_and_nothing_more(start: Any, tmp_path: Path) -> None:
    """Two agents, as on two nodes. Their store listens on the address that they were given, and holds no pickle."""
    with reserve_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        flags = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", "--rdzv-id=7.0"]
        agents = [
            start("-m", "tepo_megatron.runtime.torchrun", *flags, f"--node-rank={n}", "-m", "waiting_rank", tmp_path)
            for n in (0, 1)
        ]
        for agent, file in zip(agents, ("started0", "started1"), strict=True):
            wait_for(agent, tmp_path / file)
    everywhere = {each for agent in agents for each in listeners(agent.pid)}
    assert {each.address for each in everywhere} == {"127.0.0.1"}
    assert port in {each.port for each in everywhere}
    keys = stranger.poison_stores(tmp_path / "proof", *(each.port for each in everywhere))
    assert "7.0/torchelastic/role_info/0" in keys
    (tmp_path / "end").touch()
    assert [agent.wait(TIMEOUT_S) for agent in agents] == [0, 0]
    assert (tmp_path / "started1").read_text() == "3"
    assert not (tmp_path / "proof").exists()


@pytest.mark.slow
def test_ranks_of_a_dynamic_rendezvous_are_refused(start: Any, tmp_path: Path) -> None:
    process = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "waiting_rank", tmp_path)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "write 'python -m tepo_megatron.runtime.torchrun' in place of 'torchrun'" in err
    assert not (tmp_path / "started0").exists()


@pytest.mark.slow
def test_torchruns_own_static_rendezvous_is_taken(start: Any, tmp_path: Path) -> None:
    (tmp_path / "end").touch()
    with reserve_port("127.0.0.1") as held:
        place = ("--master-addr=127.0.0.1", f"--master-port={held.getsockname()[1]}")
        process = start("-m", "torch.distributed.run", "--nproc-per-node=2", *place, "-m", "waiting_rank", tmp_path)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    assert (tmp_path / "started1").read_text() == "3"


@pytest.mark.parametrize("flag", ["--standalone", "--rdzv-backend=c10d", "--rdzv-backend=etcd", "--nnodes=1:4"])
def test_flags_for_a_dynamic_rendezvous_are_refused(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "")  # which it sets
    with pytest.raises(ValueError, match="ranks meet by a static rendezvous"):
        torchrun.run_node([flag, "-m", "whatever"])


OPEN = "and whether TCP between nodes is open (docs/guides/cluster.md)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "node", "message"),
    [
        ("192.0.2.1", 0, "the first node cannot listen on 192.0.2.1:{} for the others"),
        ("127.0.0.1", 1, f"the first node did not answer at 127.0.0.1:{{}} within 2 s; see its log, {OPEN}"),
        ("127.0.0.1", 0, f"not all of 2 nodes came at 127.0.0.1:{{}} within 1 s; see the logs of the others, {OPEN}"),
    ],
)
def test_nodes_that_do_not_meet_end_with_one_sentence(start: Any, tmp_path: Path, host: str, node: int, message: str) -> None:
    with reserve_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        flags = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", f"--master-addr={host}", f"--master-port={port}"]
        flags += [*(["--rdzv-conf=timeout=2"] if node else []), "-m", "waiting_rank"]
        process = start("-c", MEETS.replace("file,", "torchrun._MEET_S = 1\nfile,"), tmp_path / "meets", *flags, tmp_path)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert f"error: {message.format(port)}" in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize(("node", "options"), [(0, []), (1, []), (1, ["--max-restarts=1"])])
def test_a_signal_ends_a_node_that_waits_for_others(start: Any, tmp_path: Path, node: int, options: list[str]) -> None:
    with reserve_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        flags = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        process = start("-c", MEETS, tmp_path / "meets", *flags, *options, "-m", "waiting_rank", tmp_path)
        wait_for(process, tmp_path / "meets")
        time.sleep(1.0)  # it waits by now
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, "Traceback" in err) == (PREEMPTED, False)


def test_ranks_do_not_meet_where_others_may_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rendezvous.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    tmp_path.chmod(0o700)
    store = rendezvous.rank_store(1, timedelta(seconds=5))
    store.set("key", "value")
    tmp_path.chmod(0o750)
    with pytest.raises(RuntimeError, match="other users may enter it"):
        rendezvous.rank_store(1, timedelta(seconds=5))


def exchange(rank: int, world: int) -> Any:
    keys = [((("lr", 1e-3 / 3), ("wd", rank)), False), (None, True)]
    found: list[Any] = [None] * world
    with objects_as_json(torch.device("cpu")):
        dist.all_gather_object(found, keys)
    plain: list[Any] = [None] * world
    dist.all_gather_object(plain, keys)  # torch's own, after the block
    everyone = all_gather_json({"rank": rank, "text": "é" * rank}, device=torch.device("cpu"))
    rendezvous.refuse_pickles()
    with pytest.raises(RuntimeError, match="would unpickle what another process sent"):
        dist.all_gather_object(plain, keys)
    return found == plain, everyone


def test_ranks_exchange_json_and_refuse_pickles() -> None:
    expected = [{"rank": 0, "text": ""}, {"rank": 1, "text": "é"}, {"rank": 2, "text": "éé"}]
    assert run_dist(3, exchange) == [(True, expected)] * 3

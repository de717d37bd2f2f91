"""A Slurm cluster of two nodes on this machine, out of a temporary folder, and the environment that submits to it."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.programs import TIMEOUT_S

ROOT = Path(__file__).parents[2]

CONF = """\
ClusterName=tepo-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=60
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus}
PartitionName=test Nodes=n1,n2 Default=YES State=UP MaxTime=INFINITE
"""


Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Cluster:
    """``environment`` is what its commands need."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, timeout: float = TIMEOUT_S) -> Done:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False)

    def ask(self, *command: str, answered: Callable[[str], bool] = bool) -> str:
        """What a command of Slurm answers. On a busy machine the controller is late, and the command fails or says nothing: it
        is asked again until ``answered``, and given up only when it hangs.
        """
        return self._repeat(command, lambda done: answered(done.stdout)).stdout

    def do(self, *command: str) -> None:
        """Runs a command of Slurm that changes something, again until it succeeds."""
        self._repeat(command, lambda done: done.returncode == 0)

    def _repeat(self, command: Sequence[str], enough: Callable[[Done], bool]) -> Done:
        deadline = time.monotonic() + TIMEOUT_S
        while not enough(done := self.run(*command)):
            assert time.monotonic() < deadline, f"{command} gave {done.stdout!r}, and on standard error {done.stderr!r}"
            time.sleep(0.5)
        return done

    def cancel_all(self) -> None:
        """Ends every job, and returns when none is left on a node or in the queue."""
        self.do("scancel", f"--user={getpass.getuser()}")
        self._repeat(("squeue", "--noheader"), lambda done: done.returncode == 0 and not done.stdout.strip())


@pytest.fixture(scope="session")
def tepo() -> str:
    """The ``tepo`` of an environment with NeMo-Run and without torch."""
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "setup_launch.sh")], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        pytest.skip(f"no environment with NeMo-Run: {done.stderr.strip().splitlines()[-1]}")
    return str(ROOT / ".venv-launch" / "bin" / "tepo")


@pytest.fixture(autouse=True)
def no_job_is_left(cluster: Cluster) -> Iterator[None]:
    """A job that a test left behind would block the next one's."""
    yield
    cluster.cancel_all()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.getuid() != 0:
        pytest.skip("slurmd starts jobs as their owner: it needs root")
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "setup_slurm_test.sh")], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        environment = _start(folder, daemons)
        yield Cluster(folder, environment)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _start(folder: Path, daemons: list[subprocess.Popen[bytes]]) -> dict[str, str]:
    """Munge, the controller, and a daemon for each node, all in the foreground of processes of ours."""
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "state").mkdir()
    host = socket.gethostname().split(".")[0]
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, host=host, ports=_free_ports(3), cpus=os.cpu_count()))
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    munge = {name: folder / f"munge.{name}" for name in ("key", "socket", "pid", "log", "seed")}

    def start(*command: str) -> None:
        with (folder / "daemons.log").open("ab") as log:
            daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))

    start(
        *("munged", "--foreground", "--force", "--num-threads=1", f"--key-file={munge['key']}", f"--socket={munge['socket']}"),
        *(f"--pid-file={munge['pid']}", f"--log-file={munge['log']}", f"--seed-file={munge['seed']}"),
    )
    _wait(lambda: munge["socket"].exists(), folder)
    start("slurmctld", "-D", "-f", str(conf))
    for node in ("n1", "n2"):
        start("slurmd", "-D", "-N", node, "-f", str(conf))

    def idle() -> bool:
        seen = subprocess.run(
            ["sinfo", "-h", "-o", "%T %D"], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        return seen.stdout.strip() == "idle 2"

    _wait(idle, folder)
    return environment


def _wait(condition: object, folder: Path) -> None:
    assert callable(condition)
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(
                f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}" for path in sorted(folder.glob("*.log"))
            )
            pytest.fail(f"the test cluster did not come up\n{logs}")
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports

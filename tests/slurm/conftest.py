"""A Slurm cluster of three nodes on this machine, out of a temporary folder, and the environment that submits to it."""

import getpass
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.launcher import ROOT, launcher
from tests.support.programs import TIMEOUT_S

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
MessageTimeout=100
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus}
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs={cpus}
PartitionName=test Nodes=n1,n2,n3 Default=YES State=UP MaxTime=INFINITE
"""


Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Cluster:
    """``environment`` is what its commands need."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, timeout: float = TIMEOUT_S) -> Done:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False)

    def repeat(self, *command: str, until: Callable[[Done], bool] = lambda done: done.returncode == 0) -> str:
        """What a command of Slurm answers. On a busy machine the controller is late, and the command fails or says nothing: it
        is asked again, and given up only when it hangs.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while not until(done := self.run(*command)):
            assert time.monotonic() < deadline, f"{command} gave {done.stdout!r}, and on standard error {done.stderr!r}"
            time.sleep(0.5)
        return done.stdout

    def cancel_all(self) -> None:
        """Ends every job, and returns when none is left on a node or in the queue."""
        self.repeat("scancel", f"--user={getpass.getuser()}")
        self.repeat("squeue", "--noheader", until=lambda done: done.returncode == 0 and not done.stdout.strip())


@pytest.fixture(scope="session")
def tepo() -> str:
    return str(launcher() / "tepo")


@pytest.fixture(autouse=True)
def no_job_is_left(cluster: Cluster) -> Iterator[None]:
    """A job that a test left behind would block the next one's."""
    yield
    cluster.cancel_all()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.getuid() != 0:
        pytest.skip("slurmd starts jobs as their owner: it needs root")
    done = subprocess.run(["bash", ROOT / "scripts/setup_slurm_test.sh"], capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        pytest.skip(f"setup_slurm_test.sh: {done.stderr.strip().splitlines()[-1]}")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        yield _start(folder, daemons)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _start(folder: Path, daemons: list[subprocess.Popen[bytes]]) -> Cluster:
    """Munge, the controller, and a daemon for each node, all in the foreground of processes of ours."""
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "state").mkdir()
    host = socket.gethostname().split(".")[0]
    conf = folder / "slurm.conf"
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    conf.write_text(
        CONF.format(folder=folder, host=host, ports=[probe.getsockname()[1] for probe in probes], cpus=os.cpu_count())
    )
    for probe in probes:
        probe.close()
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
    for node in ("n1", "n2", "n3"):
        start("slurmd", "-D", "-N", node, "-f", str(conf))

    cluster = Cluster(folder, environment)
    _wait(lambda: cluster.run("sinfo", "-h", "-o", "%T %D").stdout.strip() == "idle 3", folder)
    return cluster


def _wait(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            logs = (f"\n{path.name}:\n{path.read_text(errors='replace')[-2000:]}" for path in sorted(folder.glob("*.log")))
            pytest.fail(f"the test cluster did not come up{''.join(logs)}")
        time.sleep(0.2)

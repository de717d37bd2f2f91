"""A run on one machine, two trainer ranks and a real vLLM server of two workers, and another user who tries its ports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tepo_megatron.runtime.rendezvous import FOLDER_VARIABLE
from tests.support import stranger
from tests.support.kills import RUN, last_step, wait_for_rows
from tests.support.processes import assert_none_names
from tests.support.programs import TIMEOUT_S
from tests.support.server_routes import assert_routes_need_the_key
from tests.support.sockets import Listener, family, listeners, unix_sockets

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

SMALL = [
    *("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.sampling.max_new_tokens=4"),
    *("rollout.server.tp=2", "evaluate.every=0", "train.steps=100000", "log.tensorboard=false"),
]


@dataclass(frozen=True)
class Run:
    process: subprocess.Popen[str]
    out: Path
    server: psutil.Process
    key: str
    url: str
    private: Path
    """The folder in which the ranks meet, and below which the servers' sockets and temporary files are."""

    def wait_for_steps(self, more: int) -> None:
        wait_for_rows(self.process, self.out, last_step(self.out) + 1 + more)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    out = tmp_path_factory.mktemp("run") / "out"
    command = [sys.executable, "-m", "tepo_megatron", "train", str(RUN), f"output={out}", *SMALL]
    with (out.parent / "printed").open("w") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=printed, text=True, start_new_session=True)
    try:
        wait_for_rows(process, out, 3)  # the weights have travelled, and do again
        (server,) = [each for each in family(process.pid) if "vllm.entrypoints.openai.api_server" in each.cmdline()[:4]]
        environment, arguments = server.environ(), server.cmdline()
        url = f"http://{arguments[arguments.index('--host') + 1]}:{arguments[arguments.index('--port') + 1]}"
        rank = next(each for each in family(process.pid) if "RANK" in each.environ())
        found = Run(process, out, server, environment["VLLM_API_KEY"], url, Path(rank.environ()[FOLDER_VARIABLE]))
        yield found
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
        assert found.key not in (out.parent / "printed").read_text()
        assert not found.private.exists()
    finally:
        process.kill()
        assert_none_names(out)


def ports(run: Run) -> set[Listener]:
    found = listeners(run.process.pid)
    assert found
    return found


def test_every_port_is_on_the_loopback_address(run: Run) -> None:
    assert {each.address for each in ports(run)} == {"127.0.0.1"}


def test_no_port_is_a_store(run: Run, tmp_path: Path) -> None:
    assert stranger.ask("poison_stores", tmp_path / "proof", *(each.port for each in ports(run))) == []
    assert not (tmp_path / "proof").exists()


def test_every_route_of_the_server_asks_for_the_key(run: Run) -> None:
    assert_routes_need_the_key(run.url)
    assert (
        httpx.get(run.url + "/v1/models", headers={"Authorization": f"Bearer {run.key}"}, timeout=TIMEOUT_S).status_code == 200
    )
    run.wait_for_steps(1)


def test_the_run_goes_on_when_a_stranger_sends_garbage_to_its_ports(run: Run) -> None:
    numbers = sorted({each.port for each in ports(run)})
    for _ in range(5):
        assert sorted(stranger.ask("send_garbage", *numbers)) == numbers
    run.wait_for_steps(2)


def private_parents(path: Path) -> list[Path]:
    """The folders above a file that this user alone may enter."""
    return [each for each in path.parents if each.stat().st_mode & 0o077 == 0 and each.stat().st_uid == os.getuid()]


def test_sockets_and_temporary_files_are_in_a_folder_that_a_stranger_cannot_enter(run: Run) -> None:
    sockets = unix_sockets(run.process.pid)
    assert sockets, "vLLM's processes speak through some"
    folders = {run.private, *(folder for path in sockets for folder in private_parents(Path(path)))}
    assert all(any(Path(path).is_relative_to(folder) for folder in folders) for path in sockets)
    below = [path for folder in folders for path in folder.rglob("*") if not path.is_dir()]
    assert any("vllm_dist" in path.name for path in below)
    assert stranger.ask("read_files", *below, *sockets, run.private / "attempt-0", RUN) == [str(RUN)]


def test_shared_memory_is_for_the_runs_user_alone(run: Run) -> None:
    mapped = {
        each.path for process in family(run.process.pid) for each in process.memory_maps() if each.path.startswith("/dev/shm/")
    }
    assert mapped, "the workers of one server share some"
    assert stranger.ask("read_files", *mapped, RUN) == [str(RUN)]


def content(path: Path) -> bytes:
    """Of a file that the run, which goes on, may have removed meanwhile."""
    with suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def files_below(folder: Path) -> Iterator[Path]:
    """Skips files that are removed meanwhile."""
    for parent, _, names in os.walk(folder):
        yield from (path for name in names if (path := Path(parent, name)).is_file() and not path.is_symlink())


def test_the_key_is_in_no_file_and_on_no_command_line(run: Run) -> None:
    key = run.key.encode()
    assert len(key) > 30
    holders = [path for folder in (run.out, run.private) for path in files_below(folder) if key in content(path)]
    assert holders == []
    lines = [Path(f"/proc/{process.pid}/cmdline").read_bytes() for process in family(run.process.pid)]
    assert len(lines) > 5
    assert not any(key in line for line in lines)
    assert stranger.ask("read_files", *(f"/proc/{process.pid}/environ" for process in family(run.process.pid))) == []

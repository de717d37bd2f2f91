"""Another user of the machine tries the ports and files of a run with two ranks and a real vLLM server of two workers, which
Ctrl-C ends, and of ``tepo serve`` before a trainer uses it.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
import pytest

from tepo_megatron.runtime.rendezvous import FOLDER_VARIABLE
from tepo_megatron.sampler.vllm.wire import ABORT, SAMPLES, USE_ADAPTER
from tepo_megatron.tools.faults.strangers import _ask_routes, _can_open, _ports_that_take, content, plain_files
from tests.support import stranger
from tests.support.processes import assert_none_names, eventually, family, listeners, unix_sockets
from tests.support.programs import FEW_BLOCKS, RUN, TIMEOUT_S, last_step, rows, wait_for_rows

SMALL = [
    *("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.sampling.max_new_tokens=4"),
    *("rollout.server.tp=2", f"rollout.server.extra_args=[{FEW_BLOCKS}]"),
    *("evaluate.every=0", "train.steps=100000", "log.tensorboard=false"),
]


SLOW = """
import time

def one(problem, response):
    time.sleep(1.0)
    return 1.0
"""
"""A verifier, so that the run leaves the processors to the stranger."""


@dataclass(frozen=True)
class Run:
    process: subprocess.Popen[str]
    out: Path
    server: psutil.Process
    key: str
    port: int
    private: Path
    """The folder in which the ranks meet, and below which the servers' sockets and temporary files are."""

    def wait_for_steps(self, more: int) -> None:
        wait_for_rows(self.process, self.out, last_step(self.out) + 1 + more)


def start(command: str, out: Path, *settings: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tepo_megatron", command, str(RUN), f"output={out}", *settings]
    with (out.parent / "printed").open("w") as printed:
        return subprocess.Popen(words, stdout=printed, stderr=printed, text=True, start_new_session=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    out = tmp_path_factory.mktemp("run") / "out"
    (out.parent / "slow.py").write_text(SLOW)
    process = start("train", out, *SMALL, f"reward.verifier={out.parent}/slow.py:one")
    try:
        wait_for_rows(process, out, 3)  # the weights have travelled, and do again
        (server,) = [each for each in family(process.pid) if "vllm.entrypoints.openai.api_server" in each.cmdline()[:4]]
        environment, arguments = server.environ(), server.cmdline()
        port = int(arguments[arguments.index("--port") + 1])
        rank = next(each for each in family(process.pid) if "RANK" in each.environ())
        yield Run(process, out, server, environment["VLLM_API_KEY"], port, Path(rank.environ()[FOLDER_VARIABLE]))
    finally:
        process.kill()
        assert_none_names(out)


def models(port: int, key: str) -> int:
    """The status of a route that asks for the key."""
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=headers, timeout=TIMEOUT_S).status_code


def test_a_node_that_serves_gives_a_stranger_nothing(tmp_path: Path) -> None:
    registry, out = tmp_path / "servers", tmp_path / "out"
    tmp_path.chmod(0o755)  # so that it is the registry itself that keeps the key
    given = ["placement=external", f"registry={registry}", "interface=lo", f"extra_args=[{FEW_BLOCKS}]"]
    process = start("serve", out, *(f"rollout.server.{each}" for each in given))
    try:
        assert eventually(lambda: any(registry.glob("server-*.json")) or process.poll() is not None), "no server registered"
        assert process.poll() is None, (tmp_path / "printed").read_text()
        (key_file,) = [path for path in registry.iterdir() if path.is_file() and path.suffix != ".json"]
        key = key_file.read_text()
        assert {each.address for each in listeners(process.pid)} == {"127.0.0.1"}
        (port,) = {each.port for each in listeners(process.pid) if "api_server" in each.program}
        refused = stranger.ask(_ask_routes, port, [("POST", SAMPLES), ("POST", "/update_weights")])
        assert {status for *_, status in refused} == {401}
        assert models(port, key) == 200
        ports = {each.port for each in listeners(process.pid)}
        assert stranger.poison_stores(tmp_path / "proof", *ports) == []
        environments = [f"/proc/{each.pid}/environ" for each in family(process.pid)]
        assert stranger.ask(_can_open, [key_file, *unix_sockets(process.pid), *environments, RUN]) == [str(RUN)]
        assert not any(key.encode() in Path(f"/proc/{each.pid}/cmdline").read_bytes() for each in family(process.pid))
        holders = [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
        assert holders == [key_file]
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
    finally:
        process.kill()
        assert_none_names(out)


def test_ports_are_on_the_loopback_address_and_none_is_a_store(run: Run, tmp_path: Path) -> None:
    ports = listeners(run.process.pid)
    assert {each.address for each in ports} == {"127.0.0.1"}
    assert stranger.poison_stores(tmp_path / "proof", *(each.port for each in ports)) == []
    assert not (tmp_path / "proof").exists()


def routes() -> list[tuple[str, str]]:
    """Every route that the source of vLLM's servers names, whether or not this server has it, and some that it has not."""
    spec = find_spec("vllm")
    assert spec.origin is not None
    stated = re.compile(r"""\.(get|post|put|delete|patch|head|options|websocket|mount)\(\s*["'](/[^"']*)["']""")
    found = {
        ({"mount": "get"}.get(method, method).upper(), re.sub(r"\{[^}]*\}", "1", path))
        for source in (Path(spec.origin).parent / "entrypoints").rglob("*.py")
        for method, path in stated.findall(source.read_text())
    }
    found |= {("POST", SAMPLES), ("POST", ABORT), ("POST", USE_ADAPTER)}
    paths = ("/", "/metrics", "/openapi.json", "/docs", "/nowhere", "/health/", "//health", "/health/1")
    found |= {("GET", path) for path in paths}
    return sorted(found)


def test_every_route_of_the_server_asks_for_the_key(run: Run) -> None:
    asked = routes()
    assert {("POST", "/update_weights"), ("POST", "/collective_rpc"), ("POST", "/inference/v1/generate")} < set(asked)
    assert len(asked) > 40
    for method, path, header, status in stranger.ask(_ask_routes, run.port, asked):
        # it says only whether the engine works; the trainer asks it before it has a reason to send the key
        expected = (200, 405) if path == "/health" else (403,) if method == "WEBSOCKET" else (401,)
        assert status in expected, (method, path, header)
    assert models(run.port, run.key) == 200
    run.wait_for_steps(1)


def test_the_run_goes_on_when_a_stranger_sends_garbage_to_its_ports(run: Run) -> None:
    numbers = sorted({each.port for each in listeners(run.process.pid)})
    assert numbers
    for _ in range(2):
        assert stranger.ask(_ports_that_take, bytes(8) + os.urandom(4096), numbers) == numbers
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
    assert stranger.ask(_can_open, [*below, *sockets, run.private / "attempt-0", RUN]) == [str(RUN)]


def test_shared_memory_is_for_the_runs_user_alone(run: Run) -> None:
    mapped = {
        each.path for process in family(run.process.pid) for each in process.memory_maps() if each.path.startswith("/dev/shm/")
    }
    assert mapped, "the workers of one server share some"
    assert stranger.ask(_can_open, [*mapped, RUN]) == [str(RUN)]


def test_the_key_is_in_no_file_and_on_no_command_line(run: Run) -> None:
    key = run.key.encode()
    assert len(key) > 30
    holders = [path for folder in (run.out, run.private) for path in plain_files(folder) if key in content(path)]
    assert holders == []
    lines = [Path(f"/proc/{process.pid}/cmdline").read_bytes() for process in family(run.process.pid)]
    assert len(lines) > 5
    assert not any(key in line for line in lines)
    assert stranger.ask(_can_open, [f"/proc/{process.pid}/environ" for process in family(run.process.pid)]) == []


def test_ctrl_c_saves_the_run_and_ends_everything(run: Run) -> None:
    """The last test here: the run is over."""
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.process.wait(TIMEOUT_S) == 130
    assert_none_names(run.out)
    assert not run.private.exists()
    printed = (run.out.parent / "printed").read_text()
    assert run.key not in printed
    assert "Traceback" not in printed
    (said,) = re.findall(r"Ctrl-C: saved step_(\d{6}); continue with the same command and --resume", printed)
    assert (run.out / "checkpoints" / f"step_{said}" / "state.json").exists()
    trained = rows(run.out)[1:]
    assert trained[-1]["step"] in (int(said), int(said) - 1)  # the row of a step that was cut short waits in the checkpoint
    assert max(abs(row["mismatch/kl"]) for row in trained) < 1e-6

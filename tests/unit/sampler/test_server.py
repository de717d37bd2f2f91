"""Ports, cores, processes and logs of a server, without vLLM."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.runtime.machine import read_cores
from tepo_megatron.sampler.vllm.resources import cores_of_servers, listens_as_this_user, reserve_port, worker_cores
from tepo_megatron.sampler.vllm.server import Server
from tests.support.processes import eventually, gone
from tests.support.programs import TIMEOUT_S

HOST = "127.0.0.1"


def free_port(host: str, first: int = 0, taken: Collection[int] = ()) -> int:
    with reserve_port(host, first, taken) as reserved:
        return int(reserved.getsockname()[1])


# -- ports and cores


def test_a_taken_port_gives_the_next_free_one() -> None:
    with reserve_port(HOST) as held:  # so that no other process is given it
        first = held.getsockname()[1]
        with socket.create_server((HOST, first)):
            found = free_port(HOST, first)
            assert found > first
            assert first < free_port(HOST, first, taken={found}) != found
        assert free_port(HOST, first) == first


def test_a_reserved_port_is_given_to_nobody_but_who_asks_for_it() -> None:
    with reserve_port(HOST) as held:
        port = held.getsockname()[1]
        assert port not in {free_port(HOST) for _ in range(200)}
        with socket.create_server((HOST, port)), socket.create_connection((HOST, port)):
            pass


LISTEN = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
server = socket.socket(socket.AF_INET6 if ":" in sys.argv[3] else socket.AF_INET)
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind((sys.argv[3], int(sys.argv[1])))
server.listen()
print("listening", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can be another user")
def test_another_user_who_listens_where_a_server_starts_is_not_the_server() -> None:
    with reserve_port(HOST) as held:
        port = held.getsockname()[1]
        assert listens_as_this_user(HOST, port)
        cases = [(65534, HOST, False), (0, HOST, True), (65534, "127.0.0.2", True)]
        for user, host, is_ours in cases + [(65534, "::ffff:127.0.0.1", False)] * Path("/proc/net/tcp6").exists():
            command = [sys.executable, "-c", LISTEN, str(port), str(user), host]
            with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as listener:
                assert listener.stdout is not None
                assert listener.stdout.readline() == "listening\n"
                assert listens_as_this_user(HOST, port) == is_ours
                assert listens_as_this_user("0.0.0.0", port) == (user == 0)


@pytest.mark.parametrize(
    ("host", "first", "message"),
    [
        (HOST, 65535, r"no free port from 65535 on at 127.0.0.1; set rollout.server.port"),
        ("no.such.host.invalid", 0, r"rollout.server.host = 'no.such.host.invalid'"),
    ],
)
def test_no_port_is_an_error_that_names_the_field(host: str, first: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        free_port(host, first, taken={65535})


@given(
    servers=st.integers(1, 5),
    tp=st.integers(1, 4),
    available=st.sets(st.integers(0, 200), min_size=1, max_size=32),
    threads=st.sampled_from(["auto", "all"]),
)
def test_workers_get_a_core_or_equal_parts_and_share_only_if_they_must(
    servers: int, tp: int, available: set[int], threads: str
) -> None:
    cores, config = sorted(available), ServerConfig(count=servers, tp=tp, cpu_threads=threads)
    bound = [read_cores(one) for one in worker_cores(config, servers, cores)]
    assert [len(one) for one in bound] == [tp] * servers
    parts = [worker for one in bound for worker in one]
    assert {len(part) for part in parts} == {max(1, len(cores) // len(parts)) if threads == "all" else 1}
    used = [core for part in parts for core in part]
    assert set(used) <= available
    assert len(set(used)) == min(len(used), len(available))
    assert cores_of_servers(config, cores) == set(used)
    assert cores_of_servers(ServerConfig(cpu_threads="nobind"), cores) == available


# -- processes: a stand-in for vLLM that has a child, as vLLM has, and notes both process ids

STAND_IN = """
import os, signal, subprocess, sys, time
if {deaf}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
open({pids!r}, "w").write(f"{{os.getpid()}} {{child.pid}}\\n")
time.sleep(600)
"""


def stand_in(pids: Path, deaf: bool = False) -> list[str]:
    return [sys.executable, "-c", STAND_IN.format(pids=str(pids), deaf=deaf)]


def read_pids(path: Path) -> list[int]:
    assert eventually(lambda: path.exists() and path.read_text().endswith("\n"))
    return [int(pid) for pid in path.read_text().split()]


def test_servers_die_with_a_killed_trainer_even_if_a_fork_holds_the_pipe(tmp_path: Path) -> None:
    """A starter that closes the pipe: test_leftovers.py."""
    trainer_code = textwrap.dedent("""
        import os, subprocess, sys, time
        supervisor = subprocess.Popen([sys.executable, "-m", "tepo_megatron.runtime.supervise", "--", *sys.argv[2:]],
                                      stdin=subprocess.PIPE, start_new_session=True)
        os.fork() or time.sleep(600)
        open(sys.argv[1], "w").write("up\\n")
        time.sleep(600)
    """)
    command = [sys.executable, "-c", trainer_code, str(tmp_path / "up"), *stand_in(tmp_path / "pids")]
    trainer = subprocess.Popen(command, start_new_session=True)
    try:
        pids = read_pids(tmp_path / "pids")
        assert eventually(lambda: (tmp_path / "up").exists())
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
        assert all(gone(pid) for pid in pids)
    finally:
        os.killpg(trainer.pid, signal.SIGKILL)


# -- the server object around them


class StandIn(Server):
    """A server whose processes are those of ``line``."""

    line: Sequence[str] = ()

    def command(self, *, on_gpu: bool) -> list[str]:
        return list(self.line)


def server(tmp_path: Path, command: Sequence[str], timeout_s: float = TIMEOUT_S) -> StandIn:
    config, log = ServerConfig(start_timeout_s=timeout_s), tmp_path / "logs" / "server.log"
    result = StandIn(config, model_dir=tmp_path, dtype="float32", cores="0", key="the-key", log=log)
    result.line = command
    return result


@pytest.mark.parametrize(("deaf", "killed"), [(False, False), (True, False), (False, True)])
def test_stop_ends_every_process_and_may_be_repeated(tmp_path: Path, deaf: bool, killed: bool) -> None:
    one = server(tmp_path, stand_in(tmp_path / "pids", deaf=deaf))
    one.start()
    pids = read_pids(tmp_path / "pids")
    assert one.alive
    if killed:
        one._process.kill()
        assert eventually(lambda: not one.alive)
    one.stop()
    assert not one.alive
    assert all(gone(pid) for pid in pids)  # the kernel needs a moment for what was killed
    one.stop()


def test_a_server_that_dies_at_start_is_reported_with_the_first_error_and_the_end_of_its_log(tmp_path: Path) -> None:
    one = server(tmp_path, [sys.executable, "-c", "print('OldError: of the first start')"])
    one.start()
    assert eventually(lambda: not one.alive)
    fails = "print('RuntimeError: the cause', *range(100), sep='\\n'); raise SystemExit('LateError: no')"
    one.line = [sys.executable, "-c", fails]
    one.start()
    with pytest.raises(RuntimeError, match="ended before it was ready") as caught:
        one.wait_ready()
    message = str(caught.value)
    assert str(one.log) in message
    assert "  RuntimeError: the cause\n" in message
    assert "OldError" not in message
    assert "  99\n" in message
    assert "  5\n" not in message
    assert one.log_end(2).splitlines()[-2:] == [
        "  LateError: no", "  supervisor: the server ended by itself with exit code 1"
    ]  # fmt: skip
    one.stop()


@pytest.mark.parametrize("load", [41.6, 3.9])
def test_a_server_that_takes_too_long_is_stopped(load: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    loads = "import time; print('still loading', flush=True); time.sleep(600)"
    one = server(tmp_path, [sys.executable, "-c", loads], timeout_s=0.5)
    one.start()
    assert eventually(lambda: "still loading" in one.log.read_text())
    said = r"not ready within 0.5 s \(rollout.server.start_timeout_s\)(?s:.*)still loading"
    with pytest.raises(RuntimeError, match=said) as why:
        one.wait_ready()
    busy = " This machine's load is 42 on 2 cores: end other work"
    assert (busy in str(why.value).splitlines()[0]) == ("machine's load" in str(why.value)) == (load > 4)
    assert not one.alive


def test_the_environment_carries_the_key_and_nothing_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "7")  # Megatron's wish for the trainer's ranks
    monkeypatch.setenv("UNRELATED", "kept")
    shown = "e['UNRELATED'], e['VLLM_API_KEY'], e['OMP_WAIT_POLICY']"
    show = f"import os; e = os.environ; print(sorted(k for k in e if e[k] == '7'), {shown})"
    one = server(tmp_path, [sys.executable, "-c", show])
    one.start()
    assert eventually(lambda: not one.alive)
    assert "[] kept the-key passive" in one.log.read_text()
    one.stop()


LOGS = Path(__file__).parent / "vllm_logs"


def first_error(lines: list[str]) -> list[str]:
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        log.write_text("\n".join(lines))
        shown = Server(ServerConfig(), model_dir=Path("m"), dtype="float32", cores="0", key="k", log=log).log_end(1).split("\n")
    return [line.removeprefix("  ") for line in shown[1 : shown.index(f"The last lines of {log}:")]]


def read(name: str) -> list[str]:
    return (LOGS / f"{name}.txt").read_text().splitlines()


CAUSES = {
    "impossible_tp": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
        "  Value error, Total number of attention heads (4) must be divisible by tensor parallel size (3).",
        "    For further information visit",
    ),
    "damaged_weights_two_workers": (
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata",
    ),
    "no_memory": ("OSError: [Errno 12] Cannot allocate memory",),
    "unknown_argument": ("api_server.py: error: unrecognized arguments: --no-such-flag",),
    "healthy": (),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_first_error_of_a_real_log_is_its_cause(name: str) -> None:
    found = first_error(read(name))
    assert [line[: len(start)] for line, start in zip(found, CAUSES[name], strict=True)] == list(CAUSES[name])


@given(st.data())
def test_tracebacks_that_are_written_through_one_another_are_told_apart(data: st.DataObject) -> None:
    log = read("damaged_weights_two_workers")
    first, second = ([line for line in log if line.startswith(f"(Worker_TP{rank} ")] for rank in (1, 0))
    mixed: list[str] = []
    while first or second:
        source = first if not second or (first and data.draw(st.booleans())) else second
        mixed.append(source.pop(0))
    (found,) = first_error(mixed)
    assert found.startswith("safetensors._safetensors_rust.SafetensorError: Error while deserializing header")


TRACEBACK = ["Traceback (most recent call last):", '  File "a.py", line 1, in f']
CORE = "(EngineCore pid=7) ERROR 11-25 16:00:00 [core.py:1] "
SUMMARY = [
    "Traceback (most recent call last):",
    '  File "/venv/vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup',
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}",
]
DIED = "(EngineCore pid=9) ERROR 11-21 23:05:17 [multiproc_executor.py:287] Worker proc VllmWorker-0 died unexpectedly"
ENDED = "terminate called after throwing an instance of 'std::system_error': error: Resource temporarily unavailable"
CHAIN = [*TRACEBACK, "KeyError: 'w'", "", "The above exception was the direct cause of the following exception:", ""]
CHAIN += [*TRACEBACK, "    raise", "RuntimeError: layer 3 has no weight 'w'", *TRACEBACK, "ValueError: a consequence"]
RESOURCES, EXPIRED = "triton.runtime.errors.OutOfResources: out of resource: shared memory", "subprocess.TimeoutExpired: nvcc"


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (CHAIN, "RuntimeError: layer 3 has no weight 'w'"),
        # an exception of another name
        *(([*TRACEBACK, error, "ValueError: a consequence"], error) for error in (RESOURCES, EXPIRED)),
        *(([CORE + line for line in ["failed to start.", *TRACEBACK, error]], error) for error in (RESOURCES, EXPIRED)),
        # what vLLM says of its other processes, only where those say nothing
        (SUMMARY, SUMMARY[-1]),
        ([DIED, *SUMMARY], SUMMARY[-1]),
        ([DIED, ENDED, *SUMMARY], ENDED),
        ([*SUMMARY, "(Worker pid=3) ERROR 11-21 23:05:17 [worker.py:3] the GPU fell off the bus"], "the GPU fell off the bus"),
        # a log that ends within a traceback
        ([CORE + "EngineCore failed", "Traceback (most recent call last):", "  File"], "EngineCore failed"),
    ],
)
def test_of_several_errors_the_cause_is_shown(log: list[str], shown: str) -> None:
    assert first_error(log) == [shown]


@given(st.lists(st.text(st.characters(blacklist_categories=["Cs"]), max_size=60), max_size=20))
def test_any_text_is_read(lines: list[str]) -> None:
    lines = [part for line in lines for part in line.splitlines()]
    assert all(any(line in given for given in lines) for line in first_error(lines))

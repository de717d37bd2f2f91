from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Unpack
from urllib.parse import urlsplit

from tepo_megatron.config.rollout import MOST_KEPT, ServerConfig
from tepo_megatron.runtime.machine import available_cores, read_cores
from tepo_megatron.runtime.proc import Process, visible_gpus
from tepo_megatron.runtime.rendezvous import FOLDER_VARIABLE
from tepo_megatron.runtime.supervise import sweep
from tepo_megatron.runtime.text import parse_json
from tepo_megatron.sampler.protocol import SamplerOptions
from tepo_megatron.sampler.vllm import resources, wire
from tepo_megatron.weights.architecture import read_model_spec
from tepo_megatron.weights.transfer.transport import BACKEND

HEALTH_TIMEOUT_S = 30.0  # a busy server is slow; a dead one refuses at once
IDLE_CONNECTION_S = 30.0  # the server waits four times as long, so that no connection closes while it is reused
MODEL_NAME = "policy"
_STOP_TIMEOUT_S = 10.0
_LOG_LINES = 20
_PLUGIN = "tepo_megatron.sampler.vllm.plugin"
_FLAGS = ("--enable-scale-out", "--disable-log-stats", "--disable-uvicorn-access-log", "--disable-fastapi-docs")
_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # --max-lora-rank in vLLM 0.32

_OF_RANKS = (
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", FOLDER_VARIABLE),
    "CUDA_DEVICE_MAX_CONNECTIONS",  # Megatron's (``trainer/megatron/gpu.py``)
)
"""vLLM's process groups must not meet at the trainer's address."""
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_TORCHRUN_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")


@dataclass(eq=False)
class Server:
    """A vLLM server that never outlives its starter.

    ``cores`` is ``VLLM_CPU_OMP_THREADS_BIND``; ``gpus`` are indices (default: all); ``key`` protects every path but /health.
    Sampling waits for weights with ``dummy``, for adapters with ``adapter_rank``.
    """

    config: ServerConfig
    _: KW_ONLY
    model_dir: Path
    dtype: str
    cores: str
    key: str = field(repr=False)
    log: Path
    seed: int = 0
    gpus: Sequence[int] = ()
    dummy: bool = False
    adapter_rank: int | None = None
    tokenizer: bool = False
    port: int = 0
    _log_start: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _reserved: socket.socket | None = None

    def __post_init__(self) -> None:
        resources.check_quantization(self.config.quantization)
        if self.config.speculative is None or (draft := self.config.speculative.draft_model) is None:
            return
        field = f"rollout.server.speculative.draft_model = {draft}"
        if not (draft / "config.json").is_file():
            raise ValueError(f"{field} is no folder with a model: it has no config.json; name one in Hugging Face's format")
        size, draft_size = resources.read_vocab_size(self.model_dir), resources.read_vocab_size(draft)
        if size != draft_size:
            raise ValueError(
                f"{field} has a vocabulary of {draft_size} tokens, and the model in {self.model_dir} one of {size}: its "
                "guesses would be other tokens; name a model with the same tokenizer"
            )

    @property
    def url(self) -> str:
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.port}"

    def start(self, taken: Collection[int] = ()) -> None:
        """Raises RuntimeError if no port is free."""
        self.stop()
        self._reserved = resources.reserve_port(self.config.host, self.config.port, taken)
        self.port = self._reserved.getsockname()[1]
        on_gpu = _has_gpu()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tepo_megatron.runtime.supervise", "--", *self.command(on_gpu=on_gpu)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(on_gpu=on_gpu),
                start_new_session=True,  # a Ctrl-C at the terminal is the trainer's; it stops its servers itself
            )

    def wait_ready(self) -> None:
        """Raises RuntimeError with the log's end."""
        timeout_s = self.config.start_timeout_s
        deadline = time.monotonic() + timeout_s
        while not self.healthy():
            if not self.alive:
                raise RuntimeError(f"the vLLM server at {self.url} ended before it was ready.\n{self.log_end()}")
            if time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(
                    f"the vLLM server at {self.url} was not ready within {timeout_s:g} s "
                    f"(rollout.server.start_timeout_s) and was stopped.{_load_hint()}\n{self.log_end()}"
                )
            time.sleep(0.2)
        self._release_port()

    def _release_port(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def healthy(self) -> bool:
        return self.alive and self.is_healthy(self.url) and resources.listens_as_this_user(self.config.host, self.port)

    def stop(self) -> None:
        """Waits seconds between SIGTERM and SIGKILL."""
        self._release_port()
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        process.terminate()  # the supervisor ends the group; a forked relative of this process may hold the pipe open
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, when only zombies are left
            os.killpg(process.pid, signal.SIGKILL)  # needed only if the supervisor itself was killed
        # Later processes may need its memory and GPU, and cannot remove its files while it lives.
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while Process.in_group(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        sweep()

    def log_end(self, lines: int = _LOG_LINES) -> str:
        """Returns the log's path, first error (the likely cause) and last lines."""
        try:
            with self.log.open(errors="replace") as log:
                log.seek(self._log_start)
                text = log.read().splitlines()
        except OSError as error:
            return f"Its log {self.log} cannot be read: {error.strerror}"
        parts = [f"The last lines of {self.log}:", *(f"  {line}" for line in text[-lines:])]
        if cause := _first_error(text):
            parts = [f"The first error in {self.log}:", *(f"  {line}" for line in cause), *parts]
        return "\n".join(parts)

    def command(self, *, on_gpu: bool) -> list[str]:
        """It contains no secrets."""
        config, forks = self.config, self._forks(on_gpu)
        rank, sleeps = self.adapter_rank, config.placement == "colocated"
        options: dict[str, str | int | float | None] = {  # None: vLLM's default
            "--model": str(self.model_dir),
            "--served-model-name": MODEL_NAME,
            "--host": config.host,
            "--port": self.port,
            "--dtype": self.dtype,
            "--tensor-parallel-size": config.tp,
            "--max-num-seqs": config.max_num_seqs,
            "--gpu-memory-utilization": config.gpu_memory_utilization,
            "--seed": self.seed,
            "--scheduling-policy": "priority",  # in the order of their arrival, but for the canary's requests
            "--weight-transfer-config": f'{{"backend": "{BACKEND}"}}',
            "--logprobs-mode": "processed_logprobs",  # of the sampled distribution, with its temperature
            "--generation-config": "vllm",  # a top-p in the model's folder must not bend what is sampled
            "--max-logprobs": wire.named_tokens(MOST_KEPT),  # a sampling mask is made of them
            "--middleware": f"{_PLUGIN}.middleware.Middleware",
            "--quantization": None if config.quantization == "none" else config.quantization,
            "--hf-overrides": None if config.head_dtype == "model" else json.dumps({"head_dtype": config.head_dtype}),
            "--speculative-config": self._speculative_options(),
            "--max-model-len": config.max_model_len,
            "--load-format": wire.DUMMY_FORMAT if self.dummy else None,
            "--max-lora-rank": None if rank is None else next(size for size in _LORA_RANKS if size >= rank),
            "--max-loras": None if rank is None else 1,
            "--max-cpu-loras": None if rank is None else 1,
            "--sleep-preserve-parameter-names": "draft.*" if sleeps and config.drafts else None,  # no update sends them again
            # with one worker the engine core's process is the worker's; by its short name vLLM would take "mp" for it
            "--distributed-executor-backend": _ONE_PROCESS if forks and config.tp == 1 else None,
            "--worker-cls": f"{_PLUGIN}.workers.Worker" if forks or (config.routing_replay and not on_gpu) else None,
        }
        flags = {
            **dict.fromkeys(_FLAGS, True),
            "--skip-tokenizer-init": not self.tokenizer,
            "--enable-sleep-mode": sleeps,
            "--enable-lora": rank is not None,
            # vLLM rewinds a seeded request's generator between the chunks of its prompt, which a CPU generator cannot do
            "--enforce-eager": not on_gpu,
            "--no-enable-chunked-prefill": not on_gpu,
            "--enable-return-routed-experts": config.routing_replay,
        }
        pairs = [str(part) for pair in options.items() if pair[1] is not None for part in pair]
        chosen = [name for name, is_set in flags.items() if is_set]
        start = [f"{_PLUGIN}.start"] if forks else []
        return [sys.executable, "-m", *start, "vllm.entrypoints.openai.api_server", *pairs, *chosen, *config.extra_args]

    def _speculative_options(self) -> str | None:
        config = self.config.speculative
        if config is None:
            return None
        options: dict[str, object] = {"method": "ngram", "num_speculative_tokens": config.num_speculative_tokens}
        if config.draft_model is None:
            options |= {"prompt_lookup_min": config.prompt_lookup_min, "prompt_lookup_max": config.prompt_lookup_max}
        else:
            draft = {"model": str(config.draft_model), "draft_tensor_parallel_size": self.config.tp}
            options |= {"method": "draft_model", **draft}
        return json.dumps(options)

    def _forks(self, on_gpu: bool) -> bool:
        """On CPUs, workers with own cores are forks of the first process."""
        if on_gpu or sys.platform != "linux":
            return False
        with suppress(ValueError):  # vLLM decides, with nobind for example
            return len(read_cores(self.cores)) == self.config.tp
        return False

    def environment(self, *, on_gpu: bool) -> dict[str, str]:
        """Includes the key."""
        environment = {k: v for k, v in os.environ.items() if k not in _OF_RANKS and not k.startswith(_TORCHRUN_PREFIXES)}
        if environment.get(_ALLOCATOR) == "expandable_segments:True":  # ``train.sh``; it breaks vLLM's own all-reduce
            del environment[_ALLOCATOR]
        settings: dict[str, str | None] = {  # None: as it is
            wire.KEY_VARIABLE: self.key,
            "VLLM_SERVER_DEV_MODE": "1",  # the weight-update routes; the plugin's middleware guards them
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": self.config.host,
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(round(4 * IDLE_CONNECTION_S)),
            "PYTHONUNBUFFERED": "1",
            # vLLM's own groups: a server's workers are all on this machine. Ours offer an address (GlooGroup).
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else None,
            "NCCL_SOCKET_IFNAME": self.config.interface,  # it goes between the machines, and must choose as the trainer's does
            "CUDA_VISIBLE_DEVICES": visible_gpus(self.gpus, "a rollout server") if on_gpu and self.gpus else None,
        }
        if not on_gpu:
            settings |= {
                "VLLM_CPU_KVCACHE_SPACE": str(self.config.cpu_kv_cache_gib),
                "VLLM_CPU_OMP_THREADS_BIND": self.cores,
                "OMP_NUM_THREADS": "1",  # of the processes around the workers
                "TORCHDYNAMO_DISABLE": "1",  # the first requests would wait for the compilation of a few small functions
            }
            environment.setdefault("OMP_WAIT_POLICY", "passive")  # the trainer's ranks use the same cores
        # 300 is vLLM's default; with tp > 1 a longer step ends its engine
        environment.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", str(max(300, math.ceil(self.config.request_timeout_s))))
        switches = {
            wire.FORK_VARIABLE: self._forks(on_gpu),
            wire.SPECULATES_VARIABLE: self.config.speculative is not None,
            wire.ROUTES_VARIABLE: self.config.routing_replay,
            wire.AWAITS_VARIABLE: self.dummy or self.adapter_rank is not None,
            wire.ADAPTER_VARIABLE: self.adapter_rank is not None,
        }
        environment |= {name: value for name, value in settings.items() if value is not None}
        return environment | {name: "1" for name, is_set in switches.items() if is_set}

    @staticmethod
    def make_all(config: ServerConfig, numbers: Sequence[int], *, key: str, **options: Unpack[SamplerOptions]) -> list[Server]:
        """Servers get ``config.tp`` GPUs each from ``first_gpu`` on. Raises ValueError for too few resources."""
        model_dir, adapter_rank, first_gpu = options["model_dir"], options.get("adapter_rank"), options.get("first_gpu", 0)
        weights_bytes, on_gpu = sum(file.stat().st_size for file in model_dir.glob("*.safetensors")), _has_gpu()
        graphs = on_gpu and options.get("trained") and not config.argument_among("--enforce-eager")
        if graphs and config.quantization == "fp8_per_channel" and read_model_spec(model_dir).experts is not None:
            raise ValueError(
                "rollout.server.quantization = fp8_per_channel with experts: vLLM's CUDA graphs read memory of the experts' "
                "kernels, which an update frees; set fp8_per_block or fp8_per_tensor, or put --enforce-eager in extra_args"
            )
        resources.check_machine(config, len(numbers), weights_bytes=weights_bytes, on_gpu=on_gpu)
        gpus = range(first_gpu, first_gpu + len(numbers) * config.tp)
        bound = resources.worker_cores(config, len(numbers), options.get("cores"))
        return [
            Server(
                config,
                model_dir=model_dir,
                dtype=config.served_dtype(options["dtype"]),
                cores=cores,
                key=key,
                log=options["log_dir"] / f"server-{number}.log",
                seed=(options.get("seed", 0) + number) % 2**32,  # vLLM takes 32 bits
                gpus=gpus[slot * config.tp : (slot + 1) * config.tp],
                dummy=adapter_rank is None and config.starts_with_dummies(trained=options.get("trained", False)),
                adapter_rank=adapter_rank,
                tokenizer=options.get("tokenizer", False),
            )
            for slot, (number, cores) in enumerate(zip(numbers, bound, strict=True))
        ]

    @staticmethod
    def is_healthy(url: str) -> bool:
        return _get(url, "/health") is not None

    @staticmethod
    def is_usable(url: str, key: str) -> bool:
        """False within a weight update, or if one was broken off."""
        reply = _get(url, wire.PROGRESS, {"Authorization": f"Bearer {key}"})
        with suppress(ValueError):
            return reply is not None and parse_json(reply, wire.PROGRESS, dict).get("updating") is False
        return False


def _get(url: str, path: str, headers: Mapping[str, str] | None = None) -> bytes | None:
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", path, headers=headers or {})
        reply = connection.getresponse()
        return reply.read() if reply.status == 200 else None
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


_LINE = re.compile(
    r"(?:\((?P<process>[^)]* pid=\d+)\) )?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] ?)?"
    r"(?P<text>.*)"
)
# a class that is named with its module may have any name: triton's OutOfResources, subprocess.TimeoutExpired
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)\b(: .*|$)|([a-z_]\w*\.)+[A-Z]\w*(: .*|$)|.*\berror: \S.*")
_CHAIN = re.compile("During handling of the above exception|The above exception was the direct cause")
_CONSEQUENCES = re.compile(
    r"WorkerProc initialization failed due to an exception in a background process"
    r"|Engine core initialization failed"
    r"|Worker ?proc\S* .*died unexpectedly"
    r"|EngineDeadError|EngineCore encountered an issue"
    r"|KeyError: '/(psm_|mp-|sem)"  # Python's resource tracker
)
"""It is shown only without another error."""


def _first_error(log: Sequence[str]) -> list[str]:
    """Later errors are consequences; healthy servers log tracebacks as warnings. Of a chain of exceptions the last counts."""
    errors: list[list[str]] = []
    newest: dict[str | None, list[str]] = {}  # by process
    chained: set[str | None] = set()
    messages: list[list[str]] = []
    last: str | None = ""  # the process that wrote an error just before
    for line in log:
        match = _LINE.fullmatch(line)
        assert match is not None  # every part may be empty
        process, level, text = match.groups()
        if level not in (None, "ERROR", "CRITICAL"):
            last = ""
        elif _CHAIN.search(text):
            chained.add(process)
            last = ""
        elif _ERROR.fullmatch(text):
            if process in chained and process in newest:
                newest[process][:] = [text]
            else:
                newest[process] = [text]
                errors.append(newest[process])
            chained.discard(process)
            last = process
        elif text.startswith("  ") and process == last:
            newest[process].append(text)
        else:
            last = ""
            if level and text and not text.startswith((" ", "Traceback")):
                messages.append([text])
    causes = [lines for lines in (*errors, *messages) if not _CONSEQUENCES.search(lines[0])]
    return next(iter([*causes, *errors]), [])


def _load_hint() -> str:
    load, cores = os.getloadavg()[0], len(available_cores())
    return "" if load <= 2 * cores else f" This machine's load is {load:.0f} on {cores} cores: end other work, or allow more."

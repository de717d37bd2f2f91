"""One vLLM server: its command line and environment, its process group, its log."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TypeVar

from tepo_megatron.bridge.transfer.transport import BACKEND
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.config.sampling import MOST_KEPT
from tepo_megatron.rendezvous import FOLDER_VARIABLE
from tepo_megatron.rollout.cores import read_cores
from tepo_megatron.rollout.plugin import ROUTES_VARIABLE
from tepo_megatron.rollout.plugin.adapter_route import ADAPTER_VARIABLE
from tepo_megatron.rollout.plugin.forks import FORK_VARIABLE
from tepo_megatron.rollout.plugin.gate import AWAITS_VARIABLE, DUMMY_FORMAT
from tepo_megatron.rollout.plugin.samples import named_tokens
from tepo_megatron.rollout.plugin.speculative import SPECULATES_VARIABLE
from tepo_megatron.rollout.quantization import check_quantization
from tepo_megatron.rollout.resources import load_hint, reserve_port, visible_gpus
from tepo_megatron.rollout.scratch import group_members, sweep
from tepo_megatron.rollout.server_log import first_error
from tepo_megatron.rollout.speculation import check_draft, vllm_options

T = TypeVar("T")

MODEL_NAME = "policy"
"""What requests call the served model."""

STOP_TIMEOUT_S = 10.0
HEALTH_TIMEOUT_S = 30.0
"""A server on a busy machine may be slow to answer; one that is gone refuses at once."""

IDLE_CONNECTION_S = 30.0
"""After so long a client gives an unused connection up. The server, which by vLLM's default would do so after 5 s, about
the length of a step, waits four times as long: a connection that one side closes while the other takes it up is an error.
"""

LOG_LINES = 20

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What ``--max-lora-rank`` takes, in vLLM 0.32."""

_TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    FOLDER_VARIABLE,
)
_TORCHRUN_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
_OF_RANKS = (*_TORCHRUN, "CUDA_DEVICE_MAX_CONNECTIONS")
"""What the trainer's ranks have for torchrun's and for Megatron's sake (``engine/connections.py``)."""


class Server:
    """A vLLM server that runs from :meth:`start` to :meth:`stop`, and never longer than the process that started it.

    ``dtype`` is that of the weights (``float32``, ``bfloat16``); ``cores`` binds the workers as ``VLLM_CPU_OMP_THREADS_BIND``
    does and is ignored where there is a GPU; ``gpus`` numbers those that it may use, by default all; ``key`` protects every
    path but /health and travels in the environment only. Output of all processes is appended to ``log``. With ``dummy`` it
    reads no weights, and refuses to sample until it was given some; with ``adapter_rank`` until it was given adapters up to
    that rank, for the weights that it has read. With ``tokenizer`` it loads the one in ``model_dir``, which stop strings and
    bad words need.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        model_dir: Path,
        dtype: str,
        cores: str,
        key: str,
        log: Path,
        seed: int = 0,
        gpus: Sequence[int] = (),
        dummy: bool = False,
        adapter_rank: int | None = None,
        tokenizer: bool = False,
    ) -> None:
        """Raises ValueError where this machine cannot serve the config's quantization, or the draft model is none."""
        check_quantization(config.quantization)
        check_draft(config.speculative, model_dir)
        self.config = config
        self.log = log
        self.port = 0
        self._log_start = 0
        self._model, self._dtype, self._cores, self._key, self._seed = str(model_dir), dtype, cores, key, seed
        self._gpus, self._dummy, self._adapter_rank, self._tokenizer = tuple(gpus), dummy, adapter_rank, tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._reserved: socket.socket | None = None

    @property
    def url(self) -> str:
        """The address, such as ``http://127.0.0.1:8000``; valid after start()."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.port}"

    def start(self, taken: Collection[int] = ()) -> None:
        """Start the processes, on the first free port that is not in ``taken``; does not wait until they serve.

        Raises RuntimeError if no port is free.
        """
        self.stop()
        self._reserved = reserve_port(self.config.host, self.config.port, taken)
        self.port = self._reserved.getsockname()[1]
        on_gpu = has_gpu()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tepo_megatron.rollout.supervise", "--", *self._command(on_gpu)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(on_gpu),
                start_new_session=True,  # a Ctrl-C at the terminal is the trainer's; it stops its servers itself
            )

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return when the server answers; raises RuntimeError with the end of its log if it dies or takes too long."""
        timeout_s = self.config.start_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while not self.healthy():
            if not self.alive:
                raise RuntimeError(f"the vLLM server at {self.url} ended before it was ready.\n{self.log_end()}")
            if time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(
                    f"the vLLM server at {self.url} was not ready within {timeout_s:g} s "
                    f"(rollout.server.start_timeout_s) and was stopped.{load_hint()}\n{self.log_end()}"
                )
            time.sleep(0.2)
        self._release_port()

    def _release_port(self) -> None:
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            reserved.close()

    @property
    def alive(self) -> bool:
        """Whether the processes run; they may not answer yet, or no longer."""
        return self._process is not None and self._process.poll() is None

    def healthy(self) -> bool:
        """Whether the server runs and says that its engine works."""
        return self.alive and is_healthy(self.config.host, self.port)

    def stop(self) -> None:
        """End every process of the server: SIGTERM, a wait of seconds, SIGKILL. Does nothing if there is none."""
        self._release_port()
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        process.terminate()  # the supervisor ends the group; a forked relative of this process may hold the pipe open
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, when only zombies are left
            os.killpg(process.pid, signal.SIGKILL)  # there is something left only if the supervisor itself was killed
        # What follows the server may need its memory and its GPU, and cannot remove its files while it lives.
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while group_members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        sweep()

    def log_end(self, lines: int = LOG_LINES) -> str:
        """The log's path, its first error since the start, which is the likely cause, and its last lines; for messages."""
        try:
            with self.log.open(errors="replace") as log:
                log.seek(self._log_start)
                text = log.read().splitlines()
        except OSError as error:
            return f"Its log {self.log} cannot be read: {error.strerror}"
        parts = [f"The last lines of {self.log}:", *(f"  {line}" for line in text[-lines:])]
        if cause := first_error(text):
            parts = [f"The first error in {self.log}:", *(f"  {line}" for line in cause), *parts]
        return "\n".join(parts)

    def _command(self, on_gpu: bool) -> list[str]:
        config = self.config
        options: dict[str, str | int | float] = {
            "--model": self._model,
            "--served-model-name": MODEL_NAME,
            "--host": config.host,
            "--port": self.port,
            "--dtype": self._dtype,
            "--tensor-parallel-size": config.tp,
            "--max-num-seqs": config.max_num_seqs,
            "--gpu-memory-utilization": config.gpu_memory_utilization,
            "--seed": self._seed,
            "--scheduling-policy": "priority",  # in the order of their arrival, but for the canary's requests
            "--weight-transfer-config": f'{{"backend": "{BACKEND}"}}',
            "--logprobs-mode": "processed_logprobs",  # of the distribution that was sampled from: under the temperature
            "--generation-config": "vllm",  # a top-p in the model's folder must not bend what is sampled
            "--max-logprobs": named_tokens(MOST_KEPT),  # a sampling mask is made of them
        }
        if config.quantization != "none":
            options["--quantization"] = config.quantization
        if config.speculative is not None:
            options["--speculative-config"] = vllm_options(config.speculative, config.tp)
        if config.max_model_len is not None:
            options["--max-model-len"] = config.max_model_len
        if self._dummy:
            options["--load-format"] = DUMMY_FORMAT
        if self._adapter_rank is not None:
            options |= {"--max-lora-rank": served_rank(self._adapter_rank), "--max-loras": 1, "--max-cpu-loras": 1}
        flags = [
            *("--middleware", "tepo_megatron.rollout.plugin.adapter_route.UseAdapter"),
            *("--middleware", "tepo_megatron.rollout.plugin.progress.Progress"),
            *("--middleware", "tepo_megatron.rollout.plugin.quiet_end.QuietEnd"),
            *("--middleware", "tepo_megatron.rollout.plugin.samples.Samples"),
            *("--middleware", "tepo_megatron.rollout.plugin.gate.RequireWeights"),
            *("--middleware", "tepo_megatron.rollout.plugin.auth.RequireKey"),  # the last one is asked first
            "--enable-scale-out",
            *([] if self._tokenizer else ["--skip-tokenizer-init"]),
            "--disable-log-stats",
            "--disable-uvicorn-access-log",
            "--disable-fastapi-docs",
        ]
        if config.placement == "colocated":
            flags.append("--enable-sleep-mode")
        if self._adapter_rank is not None:
            flags.append("--enable-lora")
        if not on_gpu:
            # vLLM rewinds a seeded request's generator between the chunks of its prompt, which a CPU generator cannot do
            flags += ["--enforce-eager", "--no-enable-chunked-prefill"]
        if config.routing_replay:
            flags.append("--enable-return-routed-experts")
        pairs = [str(part) for pair in options.items() for part in pair]
        start = []
        if self._forks(on_gpu):
            start = ["tepo_megatron.rollout.plugin.start"]
            flags += ["--worker-cls", "tepo_megatron.rollout.plugin.bound_worker.BoundWorker"]
            if config.tp == 1:  # the engine core's process is the worker's; by its short name vLLM would take "mp" for it
                flags += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
        elif config.routing_replay and not on_gpu:
            flags += ["--worker-cls", "tepo_megatron.rollout.plugin.routed_worker.RoutedWorker"]
        return [sys.executable, "-m", *start, "vllm.entrypoints.openai.api_server", *pairs, *flags, *config.extra_args]

    def _forks(self, on_gpu: bool) -> bool:
        """Whether the processes are forks of the first one: on CPUs, where each worker has its own cores (``plugin.forks``)."""
        if on_gpu or sys.platform != "linux":
            return False
        with suppress(ValueError):  # vLLM does as it would, nobind for example
            return len(read_cores(self._cores)) == self.config.tp
        return False

    def _environment(self, on_gpu: bool) -> dict[str, str]:
        environment = _without_torchrun(os.environ)
        environment |= {
            "VLLM_API_KEY": self._key,
            "VLLM_SERVER_DEV_MODE": "1",  # the weight-update routes; the plugin's middleware guards them
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": self.config.host,
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(round(4 * IDLE_CONNECTION_S)),
            "PYTHONUNBUFFERED": "1",
        }
        if sys.platform == "linux":
            # vLLM's own groups: a server's workers are all on this machine. Ours offer an address (GlooGroup).
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        if self.config.interface is not None:  # NCCL goes between the machines, and must choose as the trainer's does
            environment["NCCL_SOCKET_IFNAME"] = self.config.interface
        if on_gpu and self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = visible_gpus(self._gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if not on_gpu:
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(self.config.cpu_kv_cache_gib)
            environment["VLLM_CPU_OMP_THREADS_BIND"] = self._cores
            environment["OMP_NUM_THREADS"] = "1"  # of the processes around the workers
            environment["TORCHDYNAMO_DISABLE"] = "1"  # a few small functions, for whose compilation the first requests wait
        if self._forks(on_gpu):
            environment[FORK_VARIABLE] = "1"
        if self.config.speculative is not None:
            environment[SPECULATES_VARIABLE] = "1"
        if self.config.routing_replay:
            environment[ROUTES_VARIABLE] = "1"
        if self._dummy or self._adapter_rank is not None:
            environment[AWAITS_VARIABLE] = "1"
        if self._adapter_rank is not None:
            environment[ADAPTER_VARIABLE] = "1"
        return environment


def served_rank(rank: int) -> int:
    """The smallest rank that vLLM takes and that adapters of this rank fit into."""
    return next(each for each in LORA_RANKS if each >= rank)


def is_healthy(host: str, port: int) -> bool:
    """Whether a server there says that its engine works."""
    connection = HTTPConnection(host, port, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def for_all_at_once(servers: Sequence[T], action: Callable[[T], None]) -> None:
    """Do it to all servers at once; raises the first error when one fails, without waiting for the others."""
    pool = ThreadPoolExecutor(len(servers), thread_name_prefix="server")
    try:
        requests = [pool.submit(action, server) for server in servers]
        for request in wait(requests, return_when=FIRST_EXCEPTION).done:
            request.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """vLLM's own process groups must not meet at the trainer's address."""
    return {k: v for k, v in environment.items() if k not in _OF_RANKS and not k.startswith(_TORCHRUN_PREFIXES)}


def has_gpu() -> bool:
    """Whether servers of this machine run on GPUs."""
    import torch

    return torch.cuda.is_available()

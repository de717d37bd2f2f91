"""The command line and environment of a vLLM server."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tepo_megatron.config.rollout_server import ServerConfig
from tepo_megatron.config.sampling import MOST_KEPT
from tepo_megatron.runtime.cores import read_cores
from tepo_megatron.runtime.rendezvous import FOLDER_VARIABLE
from tepo_megatron.sampler.vllm.plugin import ROUTES_VARIABLE
from tepo_megatron.sampler.vllm.plugin.forks import FORK_VARIABLE
from tepo_megatron.sampler.vllm.plugin.middleware import ADAPTER_VARIABLE, AWAITS_VARIABLE, DUMMY_FORMAT
from tepo_megatron.sampler.vllm.plugin.patches import SPECULATES_VARIABLE
from tepo_megatron.sampler.vllm.plugin.samples import named_tokens
from tepo_megatron.sampler.vllm.server.checks import vllm_options
from tepo_megatron.sampler.vllm.server.resources import visible_gpus
from tepo_megatron.weights.transfer.transport import BACKEND

MODEL_NAME = "policy"
"""The served model's name in requests."""

IDLE_CONNECTION_S = 30.0
"""Seconds until a client closes an unused connection. The server waits four times as long, since a connection that one side
closes while the other reuses it is an error.
"""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of ``--max-lora-rank`` in vLLM 0.32."""

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
"""Variables for torchrun and Megatron (``trainer/megatron/platform/gpu.py``)."""


@dataclass(frozen=True)
class ServerProgram:
    """The arguments are those of :class:`~tepo_megatron.sampler.vllm.server.server.Server`."""

    config: ServerConfig
    model_dir: Path
    dtype: str
    cores: str
    key: str = field(repr=False)
    seed: int = 0
    gpus: Sequence[int] = ()
    dummy: bool = False
    adapter_rank: int | None = None
    tokenizer: bool = False

    def command(self, *, on_gpu: bool, port: int = 0) -> list[str]:
        """It contains no secrets."""
        config = self.config
        options: dict[str, str | int | float] = {
            "--model": str(self.model_dir),
            "--served-model-name": MODEL_NAME,
            "--host": config.host,
            "--port": port,
            "--dtype": self.dtype,
            "--tensor-parallel-size": config.tp,
            "--max-num-seqs": config.max_num_seqs,
            "--gpu-memory-utilization": config.gpu_memory_utilization,
            "--seed": self.seed,
            "--scheduling-policy": "priority",  # in the order of their arrival, but for the canary's requests
            "--weight-transfer-config": f'{{"backend": "{BACKEND}"}}',
            "--logprobs-mode": "processed_logprobs",  # of the sampled distribution, with its temperature
            "--generation-config": "vllm",  # a top-p in the model's folder must not bend what is sampled
            "--max-logprobs": named_tokens(MOST_KEPT),  # a sampling mask is made of them
        }
        if config.quantization != "none":
            options["--quantization"] = config.quantization
        if config.speculative is not None:
            options["--speculative-config"] = vllm_options(config.speculative, config.tp)
        if config.max_model_len is not None:
            options["--max-model-len"] = config.max_model_len
        if self.dummy:
            options["--load-format"] = DUMMY_FORMAT
        if self.adapter_rank is not None:
            options |= {"--max-lora-rank": served_rank(self.adapter_rank), "--max-loras": 1, "--max-cpu-loras": 1}
        flags = [
            *("--middleware", "tepo_megatron.sampler.vllm.plugin.middleware.UseAdapter"),
            *("--middleware", "tepo_megatron.sampler.vllm.plugin.middleware.Progress"),
            *("--middleware", "tepo_megatron.sampler.vllm.plugin.middleware.QuietEnd"),
            *("--middleware", "tepo_megatron.sampler.vllm.plugin.samples.Samples"),
            *("--middleware", "tepo_megatron.sampler.vllm.plugin.middleware.RequireWeights"),
            *("--middleware", "tepo_megatron.sampler.vllm.plugin.middleware.RequireKey"),  # the last one is asked first
            "--enable-scale-out",
            *([] if self.tokenizer else ["--skip-tokenizer-init"]),
            "--disable-log-stats",
            "--disable-uvicorn-access-log",
            "--disable-fastapi-docs",
        ]
        if config.placement == "colocated":
            flags.append("--enable-sleep-mode")
        if self.adapter_rank is not None:
            flags.append("--enable-lora")
        if not on_gpu:
            # vLLM rewinds a seeded request's generator between the chunks of its prompt, which a CPU generator cannot do
            flags += ["--enforce-eager", "--no-enable-chunked-prefill"]
        if config.routing_replay:
            flags.append("--enable-return-routed-experts")
        pairs = [str(part) for pair in options.items() for part in pair]
        start = []
        if self.forks(on_gpu):
            start = ["tepo_megatron.sampler.vllm.plugin.start"]
            flags += ["--worker-cls", "tepo_megatron.sampler.vllm.plugin.workers.BoundWorker"]
            if config.tp == 1:  # the engine core's process is the worker's; by its short name vLLM would take "mp" for it
                flags += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
        elif config.routing_replay and not on_gpu:
            flags += ["--worker-cls", "tepo_megatron.sampler.vllm.plugin.workers.RoutedWorker"]
        return [sys.executable, "-m", *start, "vllm.entrypoints.openai.api_server", *pairs, *flags, *config.extra_args]

    def forks(self, on_gpu: bool) -> bool:
        """Whether the processes are forks of the first one: on CPUs, if each worker has its own cores (``plugin.forks``)."""
        if on_gpu or sys.platform != "linux":
            return False
        with suppress(ValueError):  # vLLM decides, with nobind for example
            return len(read_cores(self.cores)) == self.config.tp
        return False

    def environment(self, *, on_gpu: bool) -> dict[str, str]:
        """The whole environment, with the key."""
        environment = _without_torchrun(os.environ)
        environment |= {
            "VLLM_API_KEY": self.key,
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
        if on_gpu and self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = visible_gpus(self.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if not on_gpu:
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(self.config.cpu_kv_cache_gib)
            environment["VLLM_CPU_OMP_THREADS_BIND"] = self.cores
            environment["OMP_NUM_THREADS"] = "1"  # of the processes around the workers
            environment["TORCHDYNAMO_DISABLE"] = (
                "1"  # the first requests would wait for the compilation of a few small functions
            )
        if self.forks(on_gpu):
            environment[FORK_VARIABLE] = "1"
        if self.config.speculative is not None:
            environment[SPECULATES_VARIABLE] = "1"
        if self.config.routing_replay:
            environment[ROUTES_VARIABLE] = "1"
        if self.dummy or self.adapter_rank is not None:
            environment[AWAITS_VARIABLE] = "1"
        if self.adapter_rank is not None:
            environment[ADAPTER_VARIABLE] = "1"
        return environment


def served_rank(rank: int) -> int:
    """The smallest of ``LORA_RANKS`` that fits."""
    return next(each for each in LORA_RANKS if each >= rank)


def _without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """vLLM's own process groups must not meet at the trainer's address."""
    return {k: v for k, v in environment.items() if k not in _OF_RANKS and not k.startswith(_TORCHRUN_PREFIXES)}

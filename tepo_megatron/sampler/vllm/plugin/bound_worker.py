"""vLLM's worker on a CPU, bound to its cores by itself: OpenMP, which vLLM has do it, looks at the environment only once."""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs

from tepo_megatron.sampler.vllm.plugin.forks import take_cores
from tepo_megatron.sampler.vllm.plugin.routed_worker import RoutedWorker


class BoundWorker(RoutedWorker):
    """As vLLM's. Runs, with the threads that its process starts from now on, on the cores that ``VLLM_CPU_OMP_THREADS_BIND``
    has for it (``3``, ``0-3``, or ``0|1`` for two workers), with as many of torch's threads.
    """

    def __init__(self, vllm_config: Any, local_rank: int, *args: Any, **kwargs: Any) -> None:
        torch.set_num_threads(take_cores(envs.VLLM_CPU_OMP_THREADS_BIND, local_rank))
        super().__init__(vllm_config, local_rank, *args, **kwargs)

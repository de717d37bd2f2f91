"""What runs inside vLLM, loaded through its entry point ``vllm.general_plugins``: receiver of weights, the weights that a
server starts with, checks of the key; and on CPUs how its processes start.
"""

import os
from functools import cache

from tepo_megatron.sampler.vllm.plugin.forks import FORK_VARIABLE, fork_processes, resume_collector
from tepo_megatron.sampler.vllm.plugin.middleware import ADAPTER_VARIABLE, AWAITS_VARIABLE, KEY_VARIABLE
from tepo_megatron.sampler.vllm.plugin.patches import SPECULATES_VARIABLE, mend_expansion, sign_objects
from tepo_megatron.weights.transfer.transport import BACKEND

ROUTES_VARIABLE = "TEPO_SERVER_ROUTES"
"""Environment: set where a server is to return the experts that it chose."""


@cache
def register() -> None:
    """Announce the weight-transfer engine to vLLM, have workers sign what they exchange, where the run has a key, have
    processes fork, a CPU return experts, and mend speculative decoding on CPUs, where the server is to do so.

    Called by vLLM in each of its processes, once or more.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "tepo_megatron.sampler.vllm.plugin.engine", "TransferEngine")
    if os.environ.get(ROUTES_VARIABLE):
        from tepo_megatron.sampler.vllm.plugin.workers import allow_on_cpu

        allow_on_cpu()
    if os.environ.get(AWAITS_VARIABLE):
        from tepo_megatron.sampler.vllm.plugin import engine as engine  # registers the loader
    if os.environ.get(ADAPTER_VARIABLE):
        from tepo_megatron.sampler.vllm.plugin.adapters import load_from_memory

        load_from_memory()
    if os.environ.get(FORK_VARIABLE):
        fork_processes()
        resume_collector()
    if os.environ.get(SPECULATES_VARIABLE):
        mend_expansion()
    if key := os.environ.get(KEY_VARIABLE):
        sign_objects(key)

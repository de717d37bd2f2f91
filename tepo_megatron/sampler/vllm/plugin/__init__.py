"""vLLM loads this through its entry point ``vllm.general_plugins``."""

import os
from functools import cache

from tepo_megatron.sampler.vllm.plugin.middleware import ADAPTER_VARIABLE, AWAITS_VARIABLE, KEY_VARIABLE
from tepo_megatron.sampler.vllm.plugin.patches import (
    FORK_VARIABLE,
    SPECULATES_VARIABLE,
    fork_processes,
    load_adapters_from_memory,
    mend_expansion,
    resume_collector,
    sign_objects,
)
from tepo_megatron.weights.transfer.transport import BACKEND

ROUTES_VARIABLE = "TEPO_SERVER_ROUTES"  # set if a server must return the chosen experts


@cache
def register() -> None:
    """vLLM calls it in each of its processes, maybe repeatedly."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "tepo_megatron.sampler.vllm.plugin.engine", "TransferEngine")
    if os.environ.get(ROUTES_VARIABLE):
        from tepo_megatron.sampler.vllm.plugin.workers import allow_on_cpu

        allow_on_cpu()
    if os.environ.get(AWAITS_VARIABLE):
        from tepo_megatron.sampler.vllm.plugin import engine as engine  # registers the loader
    if os.environ.get(ADAPTER_VARIABLE):
        load_adapters_from_memory()
    if os.environ.get(FORK_VARIABLE):
        fork_processes()
        resume_collector()
    if os.environ.get(SPECULATES_VARIABLE):
        mend_expansion()
    if key := os.environ.get(KEY_VARIABLE):
        sign_objects(key)

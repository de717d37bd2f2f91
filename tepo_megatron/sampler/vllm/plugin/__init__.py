"""vLLM loads this through its entry point ``vllm.general_plugins``."""

import gc
import os
from functools import cache

from tepo_megatron.sampler.vllm import wire
from tepo_megatron.sampler.vllm.plugin import patches
from tepo_megatron.weights.transfer.transport import BACKEND


@cache
def register() -> None:
    """vLLM calls it in each of its processes, maybe repeatedly."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "tepo_megatron.sampler.vllm.plugin.engine", "TransferEngine")
    if os.environ.get(wire.ROUTES_VARIABLE):
        from vllm.config import VllmConfig
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            VllmConfig._verify_aux_output_compatibility = lambda _: None
    if os.environ.get(wire.AWAITS_VARIABLE):
        from tepo_megatron.sampler.vllm.plugin import engine as engine  # registers the loader
    if os.environ.get(wire.ADAPTER_VARIABLE):
        patches.load_adapters_from_memory()
    if os.environ.get(wire.FORK_VARIABLE):
        patches.fork_processes()
        patches.rest_while_waiting()
        if not gc.isenabled():  # see start.py
            gc.freeze()
            gc.enable()
    if os.environ.get(wire.SPECULATES_VARIABLE):
        patches.mend_expansion()
    if key := os.environ.get(wire.KEY_VARIABLE):
        patches.sign_objects(key)

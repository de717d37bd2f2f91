"""What runs inside vLLM, loaded through its entry point ``vllm.general_plugins``: receiver of weights, checks of the key."""

import os
from functools import cache

from tepo_megatron.bridge.transfer.transport import BACKEND
from tepo_megatron.rollout.plugin.auth import KEY_VARIABLE
from tepo_megatron.rollout.plugin.signed import sign_objects


@cache
def register() -> None:
    """Announce the weight-transfer engine to vLLM, and have workers sign what they exchange, where the run has a key.

    Called by vLLM in each of its processes, once or more.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "tepo_megatron.rollout.plugin.engine", "TransferEngine")
    if key := os.environ.get(KEY_VARIABLE):
        sign_objects(key)

"""What runs inside vLLM, loaded through its entry point ``vllm.general_plugins``: receiver of weights, check of the key."""

from functools import cache

from tepo_megatron.bridge.transfer.transport import BACKEND


@cache
def register() -> None:
    """Announce the weight-transfer engine to vLLM; called by vLLM in each of its processes, once or more."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "tepo_megatron.rollout.plugin.engine", "TransferEngine")

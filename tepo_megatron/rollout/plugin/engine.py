"""The receiving end of a weight update, in every vLLM worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from tepo_megatron.bridge import transport


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vllm's types are not followed, here and below
    """Where the group meets: ``rank_offset`` is the rank of this server's first worker."""

    host: str
    port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The manifest of one update: [name, shape, dtype name] of every tensor, under Hugging Face names, in order."""

    manifest: list[tuple[str, list[int], str]]


class GlooBroadcastEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads full Hugging Face tensors, as the trainer broadcasts them, through the model's own ``load_weights``.

    An update runs inside vLLM's layerwise reload, because some back ends (the CPU's linear layers for one) repack weights after
    loading, so that the live parameters could not be written in place.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    _group: transport.TransferGroup | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Enter the trainer's group; a group that was joined before is left."""
        self.shutdown()
        store = transport.connect(init_info.host, init_info.port, init_info.timeout_s)
        rank = init_info.rank_offset + self.parallel_config.rank
        self._group = transport.TransferGroup(store, init_info.host, rank, init_info.world_size, init_info.timeout_s)

    def start_weight_update(self) -> None:
        """Prepare the model for tensors in the checkpoint's layout."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load every tensor of the manifest. Raises RuntimeError where the transfer or the loading of a tensor fails."""
        if self._group is None:
            raise RuntimeError("this worker is in no weight-transfer group; call /init_weight_transfer_engine first")
        current = ["the first tensor"]

        def stream(group: transport.TransferGroup) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in transport.receive(group, update_info.manifest):
                current[0] = repr(name)
                yield name, tensor

        try:
            with torch.no_grad():
                self.model.load_weights(stream(self._group))
        except BaseException as error:
            self.shutdown()  # closes the connections, so that the trainer's broadcast fails at once
            raise RuntimeError(f"the weight update failed at {current[0]}: {error}") from error

    def finish_weight_update(self) -> None:
        """Let every layer process its new weights."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None

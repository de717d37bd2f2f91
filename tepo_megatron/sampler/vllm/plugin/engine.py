"""The receiving end of a weight update, in every vLLM worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from tepo_megatron.sampler.vllm.plugin.middleware import DUMMY_FORMAT
from tepo_megatron.sampler.vllm.plugin.shards import ShardLoader
from tepo_megatron.weights.transfer import full_tensors, move
from tepo_megatron.weights.transfer.sender import ReceiveOrder, decode_order, order_key
from tepo_megatron.weights.transfer.transport import TransferGroup, connect, local_address
from tepo_megatron.weights.transfer.transports import Member, join
from tepo_megatron.weights.transfer.transports.gloo import GlooGroup


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vllm's types are not followed, here and below
    """``rank_offset`` is the rank of this server's first worker. ``sharded``: trainer ranks send shards by the plan in the
    rendezvous store; otherwise rank 0 broadcasts full tensors, or LoRA's with ``adapters``.
    """

    host: str
    place: str
    rank_offset: int
    world_size: int
    timeout_s: float
    sharded: bool
    adapters: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """[Hugging Face name, shape, dtype name] of each full tensor, in order; with adapters, a PEFT folder's settings."""

    manifest: list[tuple[str, list[int], str]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


class TransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Receives shards in vLLM's layout, or full Hugging Face tensors, inside vLLM's layerwise reload, since some back ends
    repack weights after loading.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    _group: TransferGroup | None = None
    _loader: ShardLoader | None = None
    _order: ReceiveOrder | None = None
    _adapters = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Leaves an earlier group first. Raises RuntimeError if the orders do not fit the model."""
        self.shutdown()
        store = connect(init_info.host, init_info.place, init_info.timeout_s)
        rank = init_info.rank_offset + self.parallel_config.rank
        address = local_address(init_info.host)
        self._adapters = init_info.adapters
        if init_info.sharded:
            self._order = decode_order(store.get(order_key(rank)))
            self._loader = ShardLoader(self.model, self._order.incoming)
            name = f"worker {self.parallel_config.rank} of a rollout server (rank {rank} of the group)"
            senders, routes = self._order.same_gpu_senders, self._order.routes
            member = Member(rank, init_info.world_size, self.device, address, name, same_gpu_senders=senders, routes=routes)
            self._group = join(self._order.transport, store, member, init_info.timeout_s, or_gloo=self._order.or_gloo)
        else:
            self._group = GlooGroup(store, address, rank, init_info.world_size, init_info.timeout_s)

    def start_weight_update(self) -> None:
        self._joined()
        if self._adapters:
            return  # the weights stay
        _pack_experts_again(self.model)
        if self._loader is None:
            initialize_layerwise_reload(self.model)
        else:
            self._loader.start()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises RuntimeError if the transfer or the loading of a tensor fails."""
        group = self._joined()
        try:
            with torch.no_grad():
                if self._adapters:
                    from tepo_megatron.sampler.vllm.plugin.adapters import hold  # only here: it imports all of vLLM's LoRA

                    assert isinstance(group, GlooGroup)
                    hold(update_info.settings, dict(full_tensors.receive(group, update_info.manifest)))
                elif self._loader is None:
                    assert isinstance(group, GlooGroup)
                    self._receive_tensors(group, update_info)
                else:
                    self._receive_shards(group, self._loader)
        except BaseException:
            self.shutdown()  # closes the connections, so that the trainer's end fails at once
            raise

    def _joined(self) -> TransferGroup:
        if self._group is None:
            raise RuntimeError("this worker is in no weight-transfer group; call /init_weight_transfer_engine first")
        return self._group

    def _receive_tensors(self, group: GlooGroup, update_info: UpdateInfo) -> None:
        current = ["the first tensor"]

        def stream() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in full_tensors.receive(group, update_info.manifest):
                current[0] = repr(name)
                yield name, tensor

        try:
            self.model.load_weights(stream())
        except Exception as error:
            raise RuntimeError(f"the weight update failed at {current[0]}: {error}") from error

    def _receive_shards(self, group: TransferGroup, loader: ShardLoader) -> None:
        assert self._order is not None
        try:
            move.receive(group, self._order.incoming, loader, self._order.wire, loader.complete)
        except Exception as error:
            worker = self.parallel_config.rank
            raise RuntimeError(f"the weight update failed in worker {worker} of this server: {error}") from error

    def finish_weight_update(self) -> None:
        if self._adapters:
            return
        if self._loader is not None:
            with torch.no_grad():
                self._loader.finish()
        finalize_layerwise_reload(self.model, self.model_config)
        if self._loader is None:
            _process_tied_heads(self.model)

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = self._loader = self._order = None


def _process_tied_heads(model: torch.nn.Module) -> None:
    """vLLM's reload would keep what a tied head packed of the old weight."""
    plain = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and isinstance(module.quant_method, UnquantizedEmbeddingMethod)
    ]
    for head in plain:
        if isinstance(head, ParallelLMHead) and any(other is not head and other.weight is head.weight for other in plain):
            head.quant_method.process_weights_after_loading(head)


def _pack_experts_again(model: torch.nn.Module) -> None:
    """On CPUs, before an update: makes every layer build its kernel again. vLLM 0.32 packs expert weights only then, and a
    kernel would use unpacked weights as packed ones.
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


@register_model_loader(DUMMY_FORMAT)  # type: ignore[untyped-decorator, unused-ignore]  # vllm's types are not followed, here and below
class DummyWeights(DummyModelLoader):  # type: ignore[misc]
    """vLLM's ``dummy`` weights, but buffers stay as the model made them, since no update sends them."""

    def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
        kept = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
        super().load_weights(model, model_config)
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)

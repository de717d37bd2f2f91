from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers import vocab_parallel_embedding as embedding
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.online import fp8
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_layer
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.platforms import current_platform
from vllm.utils.nccl import unpinned_nccl_env
from vllm.v1.worker.worker_base import WorkerBase

from tepo_megatron.sampler.vllm.plugin.patches import hold_adapters
from tepo_megatron.sampler.vllm.wire import DUMMY_FORMAT
from tepo_megatron.weights.transfer import full_tensors, move
from tepo_megatron.weights.transfer.move import Queues
from tepo_megatron.weights.transfer.sender import ReceiveOrder
from tepo_megatron.weights.transfer.transport import TransferGroup, connect, local_address
from tepo_megatron.weights.transfer.transports import Member, join
from tepo_megatron.weights.transfer.transports.gloo import GlooGroup


@dataclass
class _InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vllm's types are not followed, here and below
    """``rank_offset`` is that of the server's first worker. ``sharded``: trainer ranks send shards by the plan in the
    rendezvous store; otherwise rank 0 broadcasts.
    """

    host: str
    place: str
    rank_offset: int
    world_size: int
    timeout_s: float
    sharded: bool
    adapters: bool = False


@dataclass
class _UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Full tensors have [Hugging Face name, shape, dtype name]."""

    manifest: list[tuple[str, list[int], str]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


class TransferEngine(WeightTransferEngine[_InitInfo, _UpdateInfo]):  # type: ignore[misc]
    """Works inside vLLM's layerwise reload, since some back ends repack weights."""

    init_info_cls = _InitInfo
    update_info_cls = _UpdateInfo
    supports_draft_weight_update = False
    _group: TransferGroup | None = None
    _loader: ShardLoader | None = None
    _order: ReceiveOrder | None = None
    _arrived: dict[int, Tensor] | None = None
    _adapters = False

    def init_transfer_engine(self, init_info: _InitInfo) -> None:
        """Raises RuntimeError if the orders do not fit the model."""
        self.shutdown()
        store = connect(init_info.host, init_info.place, init_info.timeout_s)
        rank = init_info.rank_offset + self.parallel_config.rank
        address = local_address(init_info.host)
        self._adapters = init_info.adapters
        if init_info.sharded:
            self._order = order = ReceiveOrder.decode(store.get(ReceiveOrder.key(rank)))
            self._loader = ShardLoader(self.model, order.incoming)
            name = f"worker {self.parallel_config.rank} of a rollout server (rank {rank} of the group)"
            member = Member(rank, init_info.world_size, self.device, address, name, writers=order.writers)
            with unpinned_nccl_env():  # trainer ranks have none of the settings that vLLM pins for batch invariance
                self._group = join(order.transport, store, member, init_info.timeout_s, or_gloo=order.or_gloo)
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

    def receive_weights(self, update_info: _UpdateInfo) -> None:
        group = self._joined()
        try:
            with torch.no_grad():
                if self._adapters:
                    assert isinstance(group, GlooGroup)
                    hold_adapters(update_info.settings, dict(full_tensors.receive(group, update_info.manifest)))
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

    def _receive_tensors(self, group: GlooGroup, update_info: _UpdateInfo) -> None:
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
            self._arrived = move.receive(group, self._order.incoming, loader, self._order.wire, loader.complete)
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

    @torch.no_grad()
    def read_back(self) -> tuple[list[str], float]:
        """Returns the names of parameters whose values are not those of the last update, and the share of elements compared."""
        if self._arrived is None or self._loader is None or self._order is None:
            return [], 0.0
        plain, share = self._loader.plain()
        return move.changed_since(self._arrived, self._order.incoming, plain, self._order.wire), share

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = self._loader = self._order = self._arrived = None


# The server's own route calls it in every worker by this name.
WorkerBase.tepo_read_back = lambda worker: worker.weight_transfer_engine.read_back()


def _process_tied_heads(model: torch.nn.Module) -> None:
    """vLLM's reload would keep a tied head's packed old weight."""
    embeddings = (module for module in model.modules() if isinstance(module, embedding.VocabParallelEmbedding))
    plain = [module for module in embeddings if isinstance(module.quant_method, embedding.UnquantizedEmbeddingMethod)]
    for head in (module for module in plain if isinstance(module, embedding.ParallelLMHead)):
        if any(other is not head and other.weight is head.weight for other in plain):
            head.quant_method.process_weights_after_loading(head)


def _pack_experts_again(model: torch.nn.Module) -> None:
    """On CPUs vLLM 0.32 packs expert weights only when it builds kernels, which misread unpacked ones."""
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


@register_model_loader(DUMMY_FORMAT)  # type: ignore[untyped-decorator, unused-ignore]  # vllm's types are not followed, here and below
class _DummyWeights(DummyModelLoader):  # type: ignore[misc]
    """Buffers keep their values: no update sends them."""

    def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
        kept = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
        super().load_weights(model, model_config)
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


Place = tuple[torch.nn.Module, str]

_MOST_UNPACKED = 2**32  # multiplications: under a second
_PLAIN = (UnquantizedLinearMethod, embedding.UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
_ONLINE = (fp8.OnlineLinearBase, OnlineMoEMethodBase)
_ONLINE_WITHIN_A_SHARD = (fp8.Fp8PerBlockOnlineLinearMethod, fp8.Fp8PerBlockOnlineMoEMethod)


class ShardLoader(Mapping[str, Tensor]):
    """The model's unprocessed parameters by name, each written between ``start`` and ``complete``; all workers of a server take
    part.

    Raises RuntimeError if parameters differ from ``incoming``, or the checkpoint is quantised.
    """

    def __init__(self, model: torch.nn.Module, incoming: Queues) -> None:
        _refuse_quantised_checkpoints(model)
        self._model = model
        self._places = _places(model)
        self._given = _elements(incoming)
        self._materialized: set[str] = set()
        self._waiting: set[str] = set()
        self._check()

    def start(self) -> None:
        self._materialized.clear()
        self._waiting.clear()
        initialize_layerwise_reload(self._model)
        for layer in self._model.modules():
            for _, param in layer.named_parameters(recurse=False):
                param.weight_loader = default_weight_loader  # type: ignore[attr-defined]
            initialize_online_processing(layer)

    def __getitem__(self, name: str) -> Tensor:
        module, attribute = self._places[name][0]
        if name not in self._materialized:
            self._materialized.add(name)
            materialize_layer(module, get_layerwise_info(module))
            if self._given[name] < getattr(module, attribute).numel():
                getattr(module, attribute).data.zero_()  # rows that pad the vocabulary
        param = getattr(module, attribute)
        return param.data.flatten(0, 1) if param.dim() == 3 else param  # experts: one below the other, as the layouts have them

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def complete(self, name: str) -> None:
        """A layer with scales over all workers, which get shards in different orders, waits for ``finish``."""
        if any(_agrees_with_other_workers(module) for module, _ in self._places[name]):
            self._waiting.add(name)
        else:
            self._load(name)

    def finish(self) -> None:
        """Call it when all workers have all parameters: processes layers that waited, in the model's order."""
        for name in self._places:
            if name in self._waiting:
                self._load(name)
        self._waiting.clear()

    def _load(self, name: str) -> None:
        first, *others = self._places[name]
        data = getattr(*first).data
        for module, attribute in others:
            materialize_layer(module, get_layerwise_info(module))
            getattr(module, attribute).data.copy_(data)
        for module, attribute in (first, *others):
            param = getattr(module, attribute)
            param.weight_loader(param, param.data)  # a copy onto itself: what counts is that vLLM counts it

    def plain(self) -> tuple[dict[str, Tensor], float]:
        """Returns the parameters that the model computes with as they arrived, and their share of all elements."""
        plain: dict[str, Tensor] = {}
        room = _MOST_UNPACKED
        for name, places in self._places.items():
            module, attribute = places[0]
            if isinstance(getattr(module, "quant_method", None), (UnquantizedFusedMoEMethod, *_ONLINE)):
                continue  # kernels may want experts in another order
            param, original = getattr(module, attribute), get_layerwise_info(module).restore_metadata[0].get(attribute)
            if original is None or param.shape == original.shape:
                plain[name] = param
            elif current_platform.is_cpu() and original.dim() == 2 and original.numel() * original.shape[1] <= room:
                room -= original.numel() * original.shape[1]
                # A packed weight: what a linear computes of the unit vectors. It loses the sign of zeros.
                units = torch.eye(original.shape[1], dtype=original.dtype)
                linear: Any = module.cpu_linear
                weight = linear(units, param, None).T
                if weight.all():
                    plain[name] = weight
        return plain, sum(self._given[name] for name in plain) / sum(self._given.values())

    def _check(self) -> None:
        wanted = {name: _wanted(places[0]) for name, places in self._places.items()}
        problems = [f"the model has no {name}" for name in self._given if name not in wanted]
        for name, elements in wanted.items():
            if self._given.get(name, 0) != elements:
                problems.append(f"{name} would get {self._given.get(name, 0)} of {elements} elements")
        configs: list[Any] = [module.moe_config for module in self._model.modules() if hasattr(module, "moe_config")]
        sizes = {(moe.intermediate_size_per_partition_unpadded, moe.intermediate_size_per_partition) for moe in configs}
        problems += [
            f"vLLM pads each expert from {size} to {padded} here; set rollout.server.transfer = gather, or a tp that leaves a "
            "multiple of 128"
            for size, padded in sizes
            if padded != size
        ]
        if any(moe.moe_parallel_config.use_ep for moe in configs):
            problems.append("its workers have whole experts (expert parallelism); set rollout.server.transfer = gather")
        if problems:
            raise RuntimeError(f"the trainer's plan does not fit this worker's model: {'; '.join(problems)}")


def _refuse_quantised_checkpoints(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        online = isinstance(method, _ONLINE) and getattr(method, "requantization_source", None) is None
        if method is not None and not online and not isinstance(method, _PLAIN):
            raise RuntimeError(
                f"{name} holds weights that were quantised before they were loaded ({type(method).__name__}), which shards in "
                "full precision cannot replace; serve the model's full-precision folder, and set rollout.server.quantization"
            )


def _agrees_with_other_workers(module: torch.nn.Module) -> bool:
    """If quantising takes the largest weight of all workers, all must do it at one point."""
    method = getattr(module, "quant_method", None)
    if isinstance(method, _ONLINE_WITHIN_A_SHARD):
        return False
    if isinstance(method, fp8.OnlineLinearBase):  # a scale per row needs no other worker's columns
        return fp8._is_tp_sharded(module, reduces_output_dim=not isinstance(method, fp8.Fp8PtpcOnlineLinearMethod))
    return isinstance(method, OnlineMoEMethodBase) and get_tensor_model_parallel_world_size() > 1


def _places(model: torch.nn.Module) -> dict[str, list[Place]]:
    """A parameter has several modules if a tied head shares it."""
    names: dict[int, str] = {}
    places: dict[str, list[Place]] = {}
    for prefix, module in model.named_modules():
        unprocessed = get_layerwise_info(module).restore_metadata[0].keys() | SKIP_TENSORS
        for attribute, param in module.named_parameters(recurse=False):
            if attribute not in unprocessed:
                continue
            name = names.setdefault(id(param), f"{prefix}.{attribute}" if prefix else attribute)
            places.setdefault(name, []).append((module, attribute))
    return places


def _elements(incoming: Queues) -> dict[str, int]:
    total = Counter[tuple[str, int]]()
    for segment in (segment for queue in incoming.values() for message in queue for segment in message):
        total[segment.end.param, segment.end.units] += segment.numel
    return {name: elements // units for (name, units), elements in total.items()}


def _wanted(place: Place) -> int:
    module, attribute = place
    original = get_layerwise_info(module).restore_metadata[0].get(attribute)
    shape = (original if original is not None else getattr(module, attribute)).shape  # a bias is never taken away
    rows = module.shard_indices.num_org_elements if isinstance(module, embedding.VocabParallelEmbedding) else shape[0]
    return rows * shape[1:].numel()

"""Moves the trainer's memory to the host and back on GPUs shared with servers, by whole storages: views stay valid."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from tepo_megatron.trainer.megatron.policy import Policy
from tepo_megatron.trainer.megatron.policy.optimizer_states import OptimizerStates, adam_tensors

Part = Literal["weights", "optimizer", "gradients"]

CHUNK_BYTES = 2**24  # torch pins powers of two only


class OffloadedStorages:
    """``frozen``: nobody writes to the tensors, so that each is copied to the host once."""

    def __init__(self, device: torch.device, *, frozen: bool = False) -> None:
        self._device, self._frozen = device, frozen
        self._offloaded: list[tuple[Tensor, list[Tensor]]] = []
        self._copied: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._spare: dict[int, list[Tensor]] = {}

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for _, chunks in self._offloaded for chunk in chunks)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        assert not self._offloaded, "offloaded already"
        for identity, storage in _storages(tensors, self._device).items():
            self._offloaded.append(self._copied[identity] if identity in self._copied else self._copy(storage))
        self._synchronize()
        for raw, _ in self._offloaded:
            raw.untyped_storage().resize_(0)

    def onload(self) -> None:
        for raw, copies in self._offloaded:
            raw.untyped_storage().resize_(sum(chunk.numel() for chunk in copies))
            for target, chunk in zip(raw.split(CHUNK_BYTES), copies, strict=True):
                target.copy_(chunk, non_blocking=True)
        self._synchronize()
        if self._frozen:
            self._copied = {_identity(raw): (raw, copies) for raw, copies in self._offloaded}
        else:
            for chunk in (chunk for _, copies in self._offloaded for chunk in copies):
                self._spare.setdefault(chunk.numel(), []).append(chunk)
        self._offloaded = []

    def _copy(self, storage: torch.UntypedStorage) -> tuple[Tensor, list[Tensor]]:
        raw = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        chunks = raw.split(CHUNK_BYTES)
        return raw, [self._host_memory(chunk.numel()).copy_(chunk, non_blocking=True) for chunk in chunks]

    def _host_memory(self, size: int) -> Tensor:
        spare = self._spare.get(size)
        return spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class HostCopies:
    """Copies tensors to pageable host memory through two pinned chunks: without, a copy has a third of the bus's speed, and the
    pinned memory of a whole tensor would be a power of two.
    """

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._on_gpu = device.type == "cuda"
        self._chunks = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(2)]

    def copy(self, tensor: Tensor) -> Tensor:
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        size = self._chunks[0].numel()
        sources, targets = ([*flat.reshape(-1).view(torch.uint8).split(size)] for flat in (tensor, result))
        arrived: list[torch.cuda.Event] = []
        for index in range(len(sources) + 1):
            if index < len(sources):
                self._chunks[index % 2][: sources[index].numel()].copy_(sources[index], non_blocking=True)
                if self._on_gpu:
                    arrived.append(torch.cuda.current_stream().record_event())
            if index:  # while the next chunk arrives
                if self._on_gpu:
                    arrived[index - 1].synchronize()
                targets[index - 1].copy_(self._chunks[(index - 1) % 2][: targets[index - 1].numel()])
        return result


class Offloader:
    """Every rank calls in the same order. ``frozen`` models count as optimizer state."""

    def __init__(
        self, policy: Policy, device: torch.device, barrier: Callable[[], None], frozen: Iterable[torch.nn.Module] = ()
    ) -> None:
        self._policy, self._device, self._barrier = policy, device, barrier
        self._model = torch.nn.ModuleList(policy.chunks)
        self._frozen = torch.nn.ModuleList(frozen)
        self._weights, self._state = OffloadedStorages(device), OffloadedStorages(device)
        self._frozen_weights = OffloadedStorages(device, frozen=True)
        self._on_device: set[Part] = {"weights", "optimizer", "gradients"}
        self.most_offloaded = 0  # bytes

    def keep(self, *parts: Part) -> None:
        """Nothing is onloaded before all ranks have called; on return all have offloaded."""
        coming, leaving = {*parts} - self._on_device, self._on_device - {*parts}
        self._on_device = {*parts}
        if "gradients" in leaving:
            for ddp in self._policy.ddp:
                ddp.offload_grad_buffers(synchronize=self._on_gpu, empty_cache=False)
        if "optimizer" in leaving:
            weights = _storages(_parameters(self._model), self._device)
            held = chain.from_iterable(adam_tensors(inner.optimizer) for inner in OptimizerStates(self._policy.optimizer).inner)
            state = (tensor for tensor in held if _identity(tensor) not in weights)
            self._state.offload(state)
            self._frozen_weights.offload(_parameters(self._frozen))
            drop_fp8_copies(self._frozen)
        if "weights" in leaving:
            self._weights.offload(_parameters(self._model))
            drop_fp8_copies(self._model)
        offloaded = self._weights.nbytes + self._state.nbytes + self._frozen_weights.nbytes
        self.most_offloaded = max(self.most_offloaded, offloaded)
        if leaving and self._on_gpu:
            torch.cuda.empty_cache()
        if coming or leaving:
            self._barrier()
        if "weights" in coming:
            self._weights.onload()
        if "optimizer" in coming:
            self._state.onload()
            self._frozen_weights.onload()
        if "gradients" in coming:
            for ddp in self._policy.ddp:
                ddp.restore_grad_buffers(synchronize=self._on_gpu)

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"


def _parameters(model: torch.nn.Module) -> Iterator[Tensor]:
    return (param.detach() for param in model.parameters())


def drop_fp8_copies(model: torch.nn.Module) -> None:
    for module in model.modules():
        getattr(module, "_fp8_workspaces", {}).clear()


def _storages(tensors: Iterable[Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    storages = {_identity(tensor): tensor.untyped_storage() for tensor in tensors if tensor.device == device}
    return {identity: storage for identity, storage in storages.items() if storage.nbytes()}


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

"""The trainer's memory on GPUs that it shares with rollout servers: offloaded to the host, and onloaded again bit for bit.

Whole storages are offloaded, so that all views of them stay what they are: parameters in Megatron's parameter buffer, shards
of the distributed optimizer, a tied head. An offloaded storage has size 0 on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Literal

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor

from tepo_megatron.trainer.megatron.optimizer import adam_states
from tepo_megatron.trainer.megatron.policy.policy import Policy

OnDevice = Literal["everything", "weights", "nothing"]

_PARTS: dict[OnDevice, frozenset[str]] = {
    "everything": frozenset({"weights", "optimizer", "gradients"}),
    "weights": frozenset({"weights"}),
    "nothing": frozenset(),
}


CHUNK_BYTES = 2**24
"""Size of a host buffer. torch pins powers of two only, so that one buffer for a whole storage could take twice its size."""


class OffloadedStorages:
    """Storages of one device that are offloaded together; their bytes lie in chunks of host memory (pinned for a GPU).

    Host memory is kept for the next time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._offloaded: list[tuple[Tensor, list[Tensor]]] = []
        self._spare: dict[int, list[Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are offloaded."""
        return sum(chunk.nbytes for _, kept in self._offloaded for chunk in kept)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copies the storages of ``tensors`` to the host and frees them; each once, whatever looks at it."""
        assert not self._offloaded, "offloaded already"
        for storage in _storages(tensors, self._device).values():
            raw = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            chunks = raw.split(CHUNK_BYTES)
            kept = [self._host_memory(chunk.numel()).copy_(chunk, non_blocking=True) for chunk in chunks]
            self._offloaded.append((raw, kept))
        self._synchronize()
        for raw, _ in self._offloaded:
            raw.untyped_storage().resize_(0)

    def onload(self) -> None:
        """Gives every storage its device memory and its bytes back."""
        for raw, kept in self._offloaded:
            raw.untyped_storage().resize_(sum(chunk.numel() for chunk in kept))
            for target, chunk in zip(raw.split(CHUNK_BYTES), kept, strict=True):
                target.copy_(chunk, non_blocking=True)
        self._synchronize()
        for chunk in (chunk for _, kept in self._offloaded for chunk in kept):
            self._spare.setdefault(chunk.numel(), []).append(chunk)
        self._offloaded = []

    def _host_memory(self, size: int) -> Tensor:
        spare = self._spare.get(size)
        return spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Offloader:
    """Which of weights, optimizer state and gradients is on the device. Every rank has one and calls it in step.

    The policy is trained and sent. The optimizer's state is its fp32 masters and moments; masters that are the model's
    parameters themselves count as weights, and ``frozen`` models, which are not sent, as optimizer state. Gradients are not
    kept: they are zero between updates. ``barrier`` returns when all ranks have called it.
    """

    def __init__(
        self,
        policy: Policy,
        device: torch.device,
        barrier: Callable[[], None],
        frozen: Iterable[torch.nn.Module] = (),
    ) -> None:
        self._policy, self._device, self._barrier = policy, device, barrier
        self._model = torch.nn.ModuleList(policy.chunks)
        self._frozen = torch.nn.ModuleList(frozen)
        self._weights, self._state = OffloadedStorages(device), OffloadedStorages(device)
        self._on_device = _PARTS["everything"]
        self.most_offloaded = 0
        """The most bytes that were ever offloaded at once."""

    def onload_only(self, what: OnDevice) -> None:
        """Onloads ``what`` and offloads everything else. Every rank calls.

        Nothing is onloaded before all ranks have called, since rank 0 puts the servers to sleep first; and when this returns,
        all ranks have offloaded what they should.
        """
        coming, leaving = _PARTS[what] - self._on_device, self._on_device - _PARTS[what]
        self._on_device = _PARTS[what]
        if "gradients" in leaving:
            for ddp in self._policy.ddp:
                ddp.offload_grad_buffers(synchronize=self._on_gpu, empty_cache=False)
        if "optimizer" in leaving:
            weights = _storages(_parameters(self._model), self._device)
            state = (tensor for tensor in _state(self._policy.optimizer) if _identity(tensor) not in weights)
            self._state.offload(chain(state, _parameters(self._frozen)))
            _drop_copies(self._frozen)
        if "weights" in leaving:
            self._weights.offload(_parameters(self._model))
            _drop_copies(self._model)
        self.most_offloaded = max(self.most_offloaded, self._weights.nbytes + self._state.nbytes)
        if leaving and self._on_gpu:
            torch.cuda.empty_cache()
        if coming or leaving:
            self._barrier()
        if "weights" in coming:
            self._weights.onload()
        if "optimizer" in coming:
            self._state.onload()
        if "gradients" in coming:
            for ddp in self._policy.ddp:
                ddp.restore_grad_buffers(synchronize=self._on_gpu)

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"


def _parameters(model: torch.nn.Module) -> Iterator[Tensor]:
    return (param.detach() for param in model.parameters())


def _drop_copies(model: torch.nn.Module) -> None:
    """Forgets the FP8 copies of weights that Transformer Engine keeps, and makes again in the next first micro-batch."""
    for module in model.modules():
        getattr(module, "_fp8_workspaces", {}).clear()


def _state(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Masters and moments, of every optimizer in a chain."""
    if isinstance(optimizer, ChainedOptimizer):
        for inner in optimizer.chained_optimizers:
            yield from _state(inner)
        return
    yield from adam_states.tensors(optimizer.optimizer)


def _storages(tensors: Iterable[Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """Their storages on the device, by identity; empty ones have nothing to leave behind."""
    found = {_identity(tensor): tensor.untyped_storage() for tensor in tensors if tensor.device == device}
    return {identity: storage for identity, storage in found.items() if storage.nbytes()}


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

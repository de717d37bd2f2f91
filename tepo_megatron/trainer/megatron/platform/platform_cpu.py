"""Makes Megatron-Core run on a machine without a GPU, by patching every place where it requires CUDA.

Upstream has no interface for this. There are no other patches in the project (docs/decisions/005-cpu-patches.md).
``install()`` is called explicitly, once per process, before a model is built; nothing is patched on import. Each patch says why
it is there, and a test leaves it out and expects Megatron to fail, so that a patch that upstream no longer needs is found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tepo_megatron.versions import MEGATRON_LINE, MEGATRON_RANGE, in_range


@dataclass(frozen=True)
class Patch:
    """Replaces ``owner.name`` by ``replacement``; ``why`` says what needs it."""

    owner: Any
    name: str
    replacement: Any
    why: str

    @property
    def key(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name}"


def _random_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def patches() -> list[Patch]:
    """Returns every patch, in order. Imports megatron.core, and changes nothing."""
    import megatron.core.optimizer as megatron_optimizer
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    from tepo_megatron.trainer.megatron.platform.hybrid_cpu import HostStream, HybridOnCpu

    return [
        Patch(torch.cuda, "current_device", lambda: torch.device("cpu"), "the device of new parameters and buffers"),
        Patch(torch.cuda, "get_rng_state", _random_state, "the tracker of model-parallel random states"),
        Patch(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor, "tied embeddings on the first and last stage"),
        Patch(
            megatron_random, "_get_cuda_rng_state", _random_state, "recomputation, which would replay dropout; there is none"
        ),
        Patch(torch.cuda, "synchronize", lambda *_, **__: None, "after pipeline sends; gloo's are already complete"),
        Patch(megatron_optimizer, "HybridDeviceOptimizer", HybridOnCpu, "states on the host: which tensors are offloaded"),
        Patch(distrib_optimizer, "HybridDeviceOptimizer", HybridOnCpu, "the same, for the shards of the distributed optimizer"),
        Patch(optimizer_config, "is_te_min_version", lambda *_: False, "states on the host: Transformer Engine's version"),
        Patch(torch.cuda, "Stream", HostStream, "the streams in which gradients go to the host and weights come back"),
        Patch(torch.cuda, "current_stream", lambda *_: HostStream(), "what those streams wait for"),
    ]


def install() -> None:
    """Patches torch.cuda and Megatron in this process. A second call changes nothing.

    Raises RuntimeError on a machine with a GPU, where it would break real CUDA, and for a Megatron-Core version on which
    the patches were not tried.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "engine.platform = cpu patches torch.cuda, and this machine has a GPU; hide it (CUDA_VISIBLE_DEVICES=)"
        )
    found = version("megatron-core")
    if not in_range(found, MEGATRON_RANGE):
        raise RuntimeError(
            f"megatron-core {found} was not tried on CPU; install {MEGATRON_LINE}.x "
            f"(pip install 'megatron-core{MEGATRON_RANGE}')"
        )
    for patch in patches():
        setattr(patch.owner, patch.name, patch.replacement)


class _CudaToCpu(TorchFunctionMode):
    """Makes tensors on the CPU that Megatron makes with a literal ``device="cuda"``, and has ``Tensor.type()`` answer what the
    type checks of its optimizers expect.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


@contextlib.contextmanager
def cuda_means_cpu() -> Iterator[None]:
    """A context for calls into Megatron that make tensors on a literal "cuda"."""
    with _CudaToCpu():
        yield

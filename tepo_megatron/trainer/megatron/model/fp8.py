"""Translates ``engine.fp8`` to Megatron-Core's configs, and checks FP8's needs."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from packaging.version import Version
from torch import Tensor

from tepo_megatron.config import Fp8Config
from tepo_megatron.weights.geometry import ShardLayout
from tepo_megatron.weights.storage.stored import StoredWeights

_Capability = tuple[int, int]  # (major, minor)


@dataclass(frozen=True)
class _Needs:
    """``cuda``: on GPUs up to ``cuda_up_to``. ``below``: first capability without kernels."""

    te: str
    capability: _Capability
    gpus: str
    probe: str = "is_fp8_available"
    cuda: str | None = None
    cuda_up_to: _Capability | None = None
    below: _Capability | None = None

    def is_in(self, te: str) -> bool:
        return Version(te) >= Version(f"{self.te}.dev0")  # a development build of the version has it already

    def runs_on(self, capability: _Capability) -> bool:
        return self.capability <= capability and (self.below is None or capability < self.below)


_PER_TENSOR: dict[str, Any] = {"capability": (8, 9), "gpus": "Ada, Hopper or newer", "cuda": "12.1", "cuda_up_to": (8, 9)}
_NEEDS = {
    "delayed": _Needs(te="1.8", **_PER_TENSOR),
    "tensorwise": _Needs(te="2.2", **_PER_TENSOR),
    "blockwise": _Needs(
        te="2.3", capability=(9, 0), gpus="Hopper or newer", probe="is_fp8_block_scaling_available", cuda="12.9"
    ),
    "mxfp8": _Needs(te="2.1", capability=(10, 0), gpus="Blackwell B200 or B300", probe="is_mxfp8_available", below=(12, 0)),
}
"""Megatron-Core requires these Transformer Engines."""


def layer_options(fp8: Fp8Config) -> dict[str, Any]:
    if not fp8.enabled:
        return {"fp8": None}
    return {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "fp8_param": fp8.params,
        "fp8_margin": fp8.margin or 0,
        "fp8_amax_history_len": fp8.amax_history_len or 1024,
        "fp8_amax_compute_algo": fp8.amax_compute_algo or "max",
        "first_last_layers_bf16": bool(fp8.first_layers_bf16 or fp8.last_layers_bf16),
        "num_layers_at_start_in_bf16": fp8.first_layers_bf16,
        "num_layers_at_end_in_bf16": fp8.last_layers_bf16,
    }


def gather_options(fp8: Fp8Config) -> dict[str, Any]:
    return {"fp8_param_gather": fp8.params, "reuse_grad_buf_for_mxfp8_param_ag": fp8.params and fp8.recipe == "mxfp8"}


def optimizer_options(fp8: Fp8Config) -> dict[str, Any]:
    reuse = fp8.params and fp8.recipe == "mxfp8"
    return {"fp8_recipe": fp8.recipe if fp8.params else None, "reuse_grad_buf_for_mxfp8_param_ag": reuse}


def check_gpu(fp8: Fp8Config, *, capability: _Capability, te: str, cuda: str) -> None:
    if not fp8.enabled:
        return
    needs, asked = _NEEDS[fp8.recipe], f"engine.fp8.recipe = {fp8.recipe}"
    if not needs.is_in(te):
        known = ", ".join(["none", *(name for name, other in _NEEDS.items() if other.is_in(te))])
        raise ValueError(
            f"{asked} is unknown to the installed Transformer Engine {te}, {needs.te} or newer is needed; upgrade it, or "
            f"choose one of {known}"
        )
    if not needs.runs_on(capability):
        here, least = (f"{major}.{minor}" for major, minor in (capability, needs.capability))
        problem = f"has no kernels for GPUs of compute capability {here} yet (only {needs.gpus})"
        if capability < needs.capability:
            problem = f"needs a GPU of compute capability {least} or more ({needs.gpus}), and this one has {here}"
        possible = [name for name, other in _NEEDS.items() if other.runs_on(capability)] or ["none"]
        raise ValueError(f"{asked} {problem}; choose " + " or ".join(f"engine.fp8.recipe = {name}" for name in possible))
    concerns = needs.cuda_up_to is None or capability <= needs.cuda_up_to
    if needs.cuda is not None and concerns and Version(cuda) < Version(needs.cuda):
        instead = "tensorwise" if needs.cuda_up_to is None else "none"
        raise ValueError(
            f"{asked} needs CUDA {needs.cuda} or newer on this GPU, and torch was built for {cuda}; install a torch for a "
            f"newer CUDA, or choose engine.fp8.recipe = {instead}"
        )


def ask_transformer_engine(fp8: Fp8Config) -> None:
    """Raises ValueError with Transformer Engine's reason."""
    if not fp8.enabled:
        return
    state = importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager
    available, reason = getattr(state, _NEEDS[fp8.recipe].probe)()
    if not available:
        raise ValueError(f"engine.fp8.recipe = {fp8.recipe} is refused by Transformer Engine: {reason}")


class LazyWeights(Mapping[str, Tensor]):
    """Applies ``read`` to a name and parameter at each access."""

    def __init__(self, params: Mapping[str, Tensor], read: Callable[[str, Tensor], Tensor]) -> None:
        self._params, self._read = params, read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name, self._params[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


def plain_weights(params: Mapping[str, Tensor]) -> LazyWeights:
    return LazyWeights(params, lambda _, param: dequantize_fp8_tensor(param.detach()) if is_float8tensor(param) else param)


def load_weights(
    folder: Path, layout: ShardLayout, params: Mapping[str, Tensor], on_move: Callable[[], None] = lambda: None
) -> dict[str, Tensor]:
    """Returns FP8 parameters' values before rounding, on the CPU, for fp32 masters."""
    # The bridge writes parts of a parameter, and one in FP8 takes only the whole: it is read into a plain tensor first.
    unrounded = {name: torch.empty(param.shape, dtype=param.dtype) for name, param in params.items() if is_float8tensor(param)}
    StoredWeights.load(folder, layout, {**params, **unrounded}, on_move)
    with torch.no_grad():
        for name, values in unrounded.items():
            params[name].copy_(values)
    return unrounded

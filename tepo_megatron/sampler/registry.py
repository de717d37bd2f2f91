"""The samplers by name. To add one, enter it in ``_SAMPLERS``."""

from __future__ import annotations

from importlib import import_module
from typing import Unpack

from tepo_megatron.config.rollout_server import ServerConfig
from tepo_megatron.sampler.protocol import Sampler, SamplerOptions, SamplerSpec

_SAMPLERS = {"vllm": "tepo_megatron.sampler.fleet.fleet"}

_DEFAULT = "vllm"


def make_sampler(config: ServerConfig, *, name: str = _DEFAULT, **options: Unpack[SamplerOptions]) -> Sampler:
    """Makes the sampler of ``rollout.server``, not started yet. Raises ValueError if this machine cannot run it."""
    return sampler_spec(name).make(config, **options)


def sampler_spec(name: str = _DEFAULT) -> SamplerSpec:
    """Raises ValueError if there is no sampler of this name."""
    if name not in _SAMPLERS:
        raise ValueError(f"there is no sampler {name!r}; there is {', '.join(_SAMPLERS)}")
    spec: SamplerSpec = import_module(_SAMPLERS[name]).SAMPLER
    return spec

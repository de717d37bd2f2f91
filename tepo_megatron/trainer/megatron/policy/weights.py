from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.runtime.heartbeat import Heartbeat
from tepo_megatron.trainer.megatron.model.fp8 import plain_weights
from tepo_megatron.trainer.megatron.policy import Policy
from tepo_megatron.weights.architecture import ModelSpec, is_always_fp32
from tepo_megatron.weights.geometry import ShardLayout
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel
from tepo_megatron.weights.reshard import reshard_plan
from tepo_megatron.weights.storage.hf_folder import AdapterSettings, write_model
from tepo_megatron.weights.transfer.digests import fingerprint
from tepo_megatron.weights.transfer.full_tensors import GatherPlan, TensorManifest
from tepo_megatron.weights.transfer.sender import ShardSender

T = TypeVar("T")


@dataclass
class PolicyWeights:
    """``layouts``: every rank's. ``model_dir``: tokenizer and config for exports."""

    config: RunConfig
    spec: ModelSpec
    policy: Policy
    split: MegatronParallel
    layouts: Sequence[ShardLayout]
    model_dir: Path
    rank: int
    device: torch.device
    broadcast_from_root: Callable[[Any], Any]
    heartbeat: Heartbeat

    @cached_property
    def _sources(self) -> GatherPlan:
        return GatherPlan(self.layouts)

    @property
    def trained_sources(self) -> GatherPlan:
        return self._sources if self.policy.lora is None else self.policy.lora.sources

    @property
    def trained_layout(self) -> ShardLayout:
        return self.layouts[self.rank] if self.policy.lora is None else self.policy.lora.layout

    @property
    def params(self) -> dict[str, Any]:
        self.policy.finish_gather()
        return self.policy.params

    @property
    def merged(self) -> Mapping[str, Tensor]:
        """Returns plain tensors: for one reading."""
        self.policy.finish_gather()
        return self.policy.weights

    def version(self, step: int) -> WeightsVersion:
        return WeightsVersion(step, self.digest(self.merged))

    def adapters_digest(self) -> str:
        """That of ``merged`` may depend on the split: a product's bits depend on its shape."""
        assert self.policy.lora is not None
        return self.digest(self.policy.lora.params, self.trained_sources)

    def digest(self, weights: Mapping[str, Tensor], sources: GatherPlan | None = None) -> str:
        """Returns 64 bits, in hex. Every rank calls."""
        local = fingerprint((sources or self._sources).shards_of(self.rank), weights)
        total = torch.tensor(local - 2**64 * (local >= 2**63), device=self.device)
        dist.all_reduce(total)  # int64 wraps around: modulo 2^64
        return f"{int(total) % 2**64:016x}"

    @property
    def manifest(self) -> TensorManifest:
        shapes = self.layouts[0].shapes
        dtype = self.config.model.dtype
        return [(name, shape, "float32" if is_always_fp32(name) else dtype) for name, shape in shapes.items()]

    def stream(self) -> Iterator[tuple[str, Tensor | None]]:
        return self._sources.gather_to_root(self.merged)

    def make_shard_sender(
        self,
        servers: VllmParallel,
        *,
        local: Mapping[int, int],
        dtype: torch.dtype,
        transport: str,
        timeout_s: float,
        or_gloo: bool = False,
    ) -> ShardSender:
        self.heartbeat.phase("servers")  # with the time of their start: a plan for a thousand workers takes many minutes
        params, lora = self.params, self.policy.lora
        return ShardSender(
            reshard_plan(self.spec, self.split, servers, local),
            plain_weights(params) if lora is None else lora.merged(params, remember=False),
            rank=self.rank,
            dtype=dtype,
            broadcast_from_root=self.broadcast_from_root,
            timeout_s=timeout_s,
            device=self.device,
            transport=transport,
            or_gloo=or_gloo,
        )

    def export(self, out: Path) -> None:
        self.heartbeat.phase("export")
        tensors = ((name, tensor) for name, tensor in self.watched(self.stream()) if tensor is not None)
        if self.rank == 0:
            write_model(out, tensors, source=self.model_dir, dtype=getattr(torch, self.config.model.dtype))
        deque(tensors, maxlen=0)  # the other ranks send

    def export_adapters(self, out: Path) -> None:
        if self.policy.lora is None:
            return
        self.heartbeat.phase("export")
        tensors = {name: tensor for name, tensor in self.watched(self.stream_adapters()) if tensor is not None}
        if self.rank == 0:
            self.adapter_settings.write(out, tensors, base_model=self.config.model.path, folder=self.model_dir)

    @property
    def adapter_manifest(self) -> TensorManifest:
        return [(name, shape, self.config.model.dtype) for name, shape in self.trained_layout.shapes.items()]

    @property
    def adapter_settings(self) -> AdapterSettings:
        assert self.policy.lora is not None
        return self.policy.lora.settings()

    def stream_adapters(self) -> Iterator[tuple[str, Tensor | None]]:
        assert self.policy.lora is not None
        self.policy.finish_gather()
        return self.trained_sources.gather_to_root(self.policy.lora.params)

    def watched(self, stream: Iterable[T]) -> Iterator[T]:
        for item in stream:
            self.heartbeat.moved()
            yield item

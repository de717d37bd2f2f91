"""A policy's weights in all forms that others read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.runtime.heartbeat import Heartbeat
from tepo_megatron.trainer.megatron.model.fp8 import PlainWeights
from tepo_megatron.trainer.megatron.policy import Policy
from tepo_megatron.trainer.protocol import TensorMeta
from tepo_megatron.weights.architecture import ModelSpec, is_always_fp32
from tepo_megatron.weights.geometry import ShardLayout
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel
from tepo_megatron.weights.reshard import reshard_plan
from tepo_megatron.weights.storage.hf_folder import AdapterSettings, write_model
from tepo_megatron.weights.transfer.digests import fingerprint
from tepo_megatron.weights.transfer.full_tensors import GatherPlan
from tepo_megatron.weights.transfer.sender import ShardSender
from tepo_megatron.weights.transfer.transport import TransportName

T = TypeVar("T")


class PolicyWeights:
    def __init__(
        self,
        config: RunConfig,
        spec: ModelSpec,
        policy: Policy,
        split: MegatronParallel,
        layouts: Sequence[ShardLayout],
        *,
        model_dir: Path,
        rank: int,
        device: torch.device,
        broadcast_from_root: Callable[[Any], Any],
        heartbeat: Heartbeat,
    ) -> None:
        """``layouts``: of every rank. ``model_dir``: tokenizer and config for exports."""
        self._config, self._spec, self._policy, self._layouts = config, spec, policy, layouts
        self.split = split
        self._model_dir, self._rank, self._device = model_dir, rank, device
        self._broadcast_from_root, self._heartbeat = broadcast_from_root, heartbeat
        self._sources = GatherPlan(layouts)
        lora = policy.lora
        self.trained_sources = self._sources if lora is None else lora.sources
        self.trained_layout = layouts[rank] if lora is None else lora.layout

    @property
    def params(self) -> dict[str, Any]:
        self._policy.param_gather.finish()
        return self._policy.params

    @property
    def merged(self) -> Mapping[str, Tensor]:
        """Returns plain tensors: for one reading."""
        self._policy.param_gather.finish()
        return self._policy.weights

    def version(self, step: int) -> WeightsVersion:
        return WeightsVersion(step, self.digest(self.merged))

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        """Returns 64 bits, in hex. Every rank calls."""
        local = fingerprint(self._sources.shards_of(self._rank), weights)
        total = torch.tensor(local - 2**64 * (local >= 2**63), device=self._device)
        dist.all_reduce(total)  # int64 wraps around: modulo 2^64
        return f"{int(total) % 2**64:016x}"

    @property
    def manifest(self) -> list[TensorMeta]:
        shapes = self._layouts[0].shapes
        dtype = self._config.model.dtype
        return [TensorMeta(name, tuple(shape), "float32" if is_always_fp32(name) else dtype) for name, shape in shapes.items()]

    def stream(self) -> Iterator[tuple[str, Tensor | None]]:
        return self._sources.gather_to_root(self.merged)

    def make_shard_sender(
        self,
        servers: VllmParallel,
        *,
        local: Mapping[int, int],
        dtype: torch.dtype,
        transport: TransportName,
        timeout_s: float,
        or_gloo: bool = False,
    ) -> ShardSender:
        params, lora = self.params, self._policy.lora
        return ShardSender(
            reshard_plan(self._spec, self.split, servers, local),
            PlainWeights(params) if lora is None else lora.merged(params, remember=False),
            rank=self._rank,
            dtype=dtype,
            broadcast_from_root=self._broadcast_from_root,
            timeout_s=timeout_s,
            device=self._device,
            transport=transport,
            or_gloo=or_gloo,
        )

    def export(self, out: Path) -> None:
        self._heartbeat.phase("export")
        stream = self._watched(self.stream())
        if self._rank == 0:
            dtype: torch.dtype = getattr(torch, self._config.model.dtype)
            write_model(out, ((n, t) for n, t in stream if t is not None), source=self._model_dir, dtype=dtype)
        else:
            for _ in stream:
                continue

    def export_adapters(self, out: Path) -> None:
        if self._policy.lora is None:
            return
        self._heartbeat.phase("export")
        tensors = {name: tensor for name, tensor in self._watched(self.stream_adapters()) if tensor is not None}
        if self._rank == 0:
            self.adapter_settings.write(out, tensors, base_model=self._config.model.path)

    @property
    def adapter_manifest(self) -> list[TensorMeta]:
        return [TensorMeta(name, shape, self._config.model.dtype) for name, shape in self.trained_layout.shapes.items()]

    @property
    def adapter_settings(self) -> AdapterSettings:
        assert self._policy.lora is not None
        return self._policy.lora.settings()

    def stream_adapters(self) -> Iterator[tuple[str, Tensor | None]]:
        assert self._policy.lora is not None
        self._policy.param_gather.finish()
        return self._policy.lora.stream()

    def _watched(self, stream: Iterator[T]) -> Iterator[T]:
        for item in stream:
            self._heartbeat.moved()
            yield item

"""Sends the trainer's weights to the servers, as shards or as full tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.run.step.placement import choose_transport, shared_gpus
from tepo_megatron.runtime.machine import this_machine
from tepo_megatron.weights.layouts import VllmParallel
from tepo_megatron.weights.transfer.sender import ShardSender

if TYPE_CHECKING:
    from tepo_megatron.sampler.protocol import WeightReceiver
    from tepo_megatron.trainer.protocol import WeightSource


class WeightPublisher:
    """Every rank creates one; ``fleet`` is None except on rank 0. Raises ValueError if vLLM cannot split the model."""

    def __init__(self, config: RunConfig, weights: WeightSource, fleet: WeightReceiver | None) -> None:
        self._weights, self._fleet = weights, fleet
        self._has_servers = config.rollout.replay is None
        self._sender: ShardSender | None = None
        self._serves_adapters = config.adapter_rank is not None
        if self._has_servers and not self._serves_adapters and config.rollout.server.transfer == "reshard":
            self._sender = make_shard_sender(config, weights)

    def update_weights(self, version: WeightsVersion) -> None:
        """Every rank calls; rank 0 raises ServerDied, RuntimeError or ValueError."""
        if not self._has_servers:
            return
        if self._serves_adapters:
            self._send_adapters(version)
        elif self._sender is not None:
            self._send_shards(self._sender, version)
        else:
            self._send_tensors(version)

    def _send_shards(self, sender: ShardSender, version: WeightsVersion) -> None:
        if self._fleet is None:
            sender.update_as_non_root()
        else:
            self._fleet.update_weights_from_shards(version, sender)

    def _send_tensors(self, version: WeightsVersion) -> None:
        stream = self._weights.stream()
        if self._fleet is None:
            _exhaust(stream)
            return
        manifest = [(meta.name, meta.shape, meta.dtype) for meta in self._weights.manifest]
        tensors = (tensor for _, tensor in stream if tensor is not None)
        self._fleet.update_weights_from_tensors(version, manifest, tensors)

    def _send_adapters(self, version: WeightsVersion) -> None:
        stream = self._weights.stream_adapters()
        if self._fleet is None:
            _exhaust(stream)
            return
        manifest = [(meta.name, meta.shape, meta.dtype) for meta in self._weights.adapter_manifest]
        tensors = (tensor for _, tensor in stream if tensor is not None)
        self._fleet.update_adapters(version, manifest, tensors, self._weights.adapter_settings.as_peft())


def make_shard_sender(config: RunConfig, weights: WeightSource) -> ShardSender:
    server = config.rollout.server
    return weights.make_shard_sender(
        VllmParallel(tp=server.tp, replicas=server.count),
        local=shared_gpus(config),
        dtype=getattr(torch, server.served_dtype(config.model.dtype)),
        transport=choose_transport(config, this_machine()),
        or_gloo=server.transport == "auto",
        timeout_s=server.transfer_timeout_s,
    )


def _exhaust(stream: Iterable[object]) -> None:
    for _ in stream:
        continue

"""Sends weights to the servers, as shards or full tensors."""

from __future__ import annotations

from collections import deque

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.run.step.placement import Placement
from tepo_megatron.runtime.machine import this_machine
from tepo_megatron.sampler.protocol import WeightReceiver
from tepo_megatron.trainer.protocol import WeightSource
from tepo_megatron.weights.layouts import VllmParallel
from tepo_megatron.weights.transfer.sender import ShardSender


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
        """Every rank calls; rank 0 raises ServerDied, RuntimeError, ValueError or OSError."""
        weights, fleet, sender = self._weights, self._fleet, self._sender
        if not self._has_servers:
            return
        if sender is not None:
            if fleet is None:
                sender.update_as_non_root()
            else:
                fleet.update_weights_from_shards(version, sender)
            return
        adapters = self._serves_adapters
        tensors = (tensor for _, tensor in (weights.stream_adapters() if adapters else weights.stream()) if tensor is not None)
        if fleet is None:
            deque(tensors, maxlen=0)  # the other ranks take part in the gathers of all tensors
            return
        if adapters:
            fleet.update_adapters(version, weights.adapter_manifest, tensors, weights.adapter_settings.as_peft())
        else:
            fleet.update_weights_from_tensors(version, weights.manifest, tensors)


def make_shard_sender(config: RunConfig, weights: WeightSource) -> ShardSender:
    server, placement = config.rollout.server, Placement(config, this_machine())
    return weights.make_shard_sender(
        VllmParallel(tp=server.tp, replicas=server.count),
        local=placement.shared_gpus,
        dtype=getattr(torch, server.served_dtype(config.model.dtype)),
        transport=placement.transport,
        or_gloo=server.transport == "auto",
        timeout_s=server.transfer_timeout_s,
    )

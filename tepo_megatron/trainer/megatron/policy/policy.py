"""Builds the trained model and its optimizer on this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tepo_megatron.config import EngineConfig, RunConfig
from tepo_megatron.trainer.megatron.model import fp8
from tepo_megatron.trainer.megatron.model.fp8 import PlainWeights, load_weights
from tepo_megatron.trainer.megatron.model.layers import Layers
from tepo_megatron.trainer.megatron.model.lora import Lora, build_lora
from tepo_megatron.trainer.megatron.model.model import build_model, transformer_config
from tepo_megatron.trainer.megatron.platform.parallel import Ranks
from tepo_megatron.trainer.megatron.platform.platform import Platform
from tepo_megatron.trainer.megatron.policy.optimizer import build_optimizer, build_schedule
from tepo_megatron.trainer.megatron.policy.optimizer_states import set_master
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.geometry import ShardLayout


@dataclass
class _ParamGather:
    """With ``overlapped`` the next forward pass gathers each bucket; other readers must call :meth:`finish` first.

    Every rank calls the methods in the same order.
    """

    ddp: Sequence[DistributedDataParallel]
    overlapped: bool
    pending: bool = False

    def after_step(self) -> None:
        self.pending = self.overlapped

    def finish(self) -> None:
        """Completes the weights. Every rank calls."""
        if not self.pending:
            return
        for chunk in self.ddp:
            # The last bucket has the first layers, and finishing one starts the next. Megatron's start_param_sync(force_sync)
            # would not make the copies that FP8 weights need.
            for group in reversed([*chunk.expert_parallel_bucket_groups, *chunk.bucket_groups]):
                group.finish_param_sync()
        self.pending = False


@dataclass(frozen=True)
class Policy:
    """Interleaved stages have several chunks."""

    chunks: Sequence[GPTModel]
    ddp: Sequence[DistributedDataParallel]
    """One per chunk."""

    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    params: dict[str, Any] = field(repr=False)
    """By the layouts' names, with experts' biases, which are no parameters. Complete after ``param_gather.finish()``."""

    param_gather: _ParamGather = field(repr=False)

    lora: Lora | None = None

    @property
    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        if self.lora is not None:
            return self.lora.params
        return {name: param for name, param in self.params.items() if isinstance(param, torch.nn.Parameter)}

    @property
    def expert_biases(self) -> Mapping[str, Tensor]:
        """fp32, the same on all ranks with the layer. Only ``engine.moe_balance.kind = expert_bias`` changes them."""
        return {name: param for name, param in self.params.items() if not isinstance(param, torch.nn.Parameter)}

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Returns plain tensors, with adapters merged: for one reading of all."""
        return PlainWeights(self.params) if self.lora is None else self.lora.merged(self.params)


@dataclass(frozen=True)
class PolicyBuilder:
    """Every rank calls, in the same order."""

    config: RunConfig
    spec: ModelSpec
    weights: Path
    """Hugging Face folder, or folder of ``tepo import``."""

    platform: Platform
    layers: Layers
    ranks: Ranks
    layouts: Sequence[ShardLayout]

    @property
    def layout(self) -> ShardLayout:
        return self.layouts[self.ranks.rank]

    def policy(self) -> Policy:
        """Raises ValueError for weights that are not this model's."""
        with self.platform.megatron():
            megatron, chunks = self._chunks()
            params = named_weights(chunks)
            unrounded = load_weights(self.weights, self.layout, params)
            config = self.config
            lora = None
            if config.model.lora is not None:
                lora = build_lora(config.model.lora, chunks, params, self.layouts, rank=self.ranks.rank, seed=config.seed)
            options = self._ddp_config()
            # As in Megatron's own loop: backward ends with the first chunk, so that its gradients alone gain by being reduced
            # bucket by bucket.
            ddp = [
                DistributedDataParallel(megatron, options, chunk, disable_bucketing=number > 0)
                for number, chunk in enumerate(chunks)
            ]
            optimizer = build_optimizer(config.optimizer, config.model, config.engine.fp8, ddp)
            for name, values in unrounded.items():
                set_master(optimizer, params[name], values)
            schedule = build_schedule(config.optimizer, optimizer, total_steps=config.train.steps * config.train.minibatches)
            megatron.finalize_model_grads_func = partial(
                finalize_gradients, afterwards=(lambda: None) if lora is None else lora.sum_gradients
            )
            megatron.grad_scale_func = optimizer.scale_loss
            _reduce_in_last_micro_batch(megatron, ddp, config.engine)
        gather = _ParamGather(ddp, config.engine.overlap_param_gather)
        return Policy(chunks, ddp, optimizer, schedule, params, gather, lora)

    def reference(self) -> list[GPTModel]:
        with self.platform.megatron():
            _, chunks = self._chunks()
        load_weights(self.weights, self.layout, named_weights(chunks))
        return [chunk.requires_grad_(False) for chunk in chunks]

    def _chunks(self) -> tuple[TransformerConfig, list[GPTModel]]:
        config = self.config
        megatron = transformer_config(self.spec, config.model, config.engine, self.platform, self.layers)
        if config.model.lora is not None:
            # It adds weight gradients to a buffer, and neither frozen nor merged weights have one.
            megatron.gradient_accumulation_fusion = False
        head, numbers = config.engine.head, range(self.ranks.vpp)
        return megatron, [build_model(self.spec, megatron, self.ranks, self.layers, number, head=head) for number in numbers]

    def _ddp_config(self) -> DistributedDataParallelConfig:
        return DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=self.config.optimizer.distributed,
            overlap_grad_reduce=self.config.engine.overlap_grad_reduce,
            overlap_param_gather=self.config.engine.overlap_param_gather,
            bucket_size=self.config.engine.bucket_size,
            **fp8.gather_options(self.config.engine.fp8),
        )


def named_weights(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Names start with the chunk if there are several."""
    prefixes = [f"model{number}." for number in range(len(chunks))] if len(chunks) > 1 else [""]
    weights: dict[str, Any] = {}
    for prefix, chunk in zip(prefixes, chunks, strict=True):
        weights |= {prefix + name: param for name, param in chunk.named_parameters()}
        weights |= {prefix + name: buffer for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias")}
    return weights


def finalize_gradients(
    model: list[torch.nn.Module], num_tokens: Tensor | None, *, afterwards: Callable[[], None], **kwargs: Any
) -> None:
    """Reduces like Megatron, without its division (``step/update.py``); then calls ``afterwards``."""
    del num_tokens
    finalize_model_grads(model, None, **kwargs)
    afterwards()


def _reduce_in_last_micro_batch(
    megatron: TransformerConfig, ddp: Sequence[DistributedDataParallel], engine: EngineConfig
) -> None:
    """In the first update Megatron learns which gradients complete a bucket."""
    if engine.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in ddp]
        megatron.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

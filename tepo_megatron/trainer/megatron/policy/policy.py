"""What is trained on this rank: the chunks of the model, and what makes steps on them."""

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

from tepo_megatron.config import RunConfig
from tepo_megatron.trainer.megatron.model import fp8
from tepo_megatron.trainer.megatron.model.fp8_weights import PlainWeights, load_weights
from tepo_megatron.trainer.megatron.model.layers import Layers
from tepo_megatron.trainer.megatron.model.lora import Lora, build_lora
from tepo_megatron.trainer.megatron.model.model import build_model, transformer_config
from tepo_megatron.trainer.megatron.optimizer.optimizer import build_optimizer, build_schedule
from tepo_megatron.trainer.megatron.optimizer.optimizer_state import set_master
from tepo_megatron.trainer.megatron.platform.overlap import ParamGather, ddp_options, reduce_in_last_micro_batch
from tepo_megatron.trainer.megatron.platform.parallel import Ranks
from tepo_megatron.trainer.megatron.platform.platform import Platform
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.geometry import ShardLayout


@dataclass(frozen=True)
class Policy:
    """The model that is trained, and its optimizer. A rank has one chunk of it, or several where stages are interleaved."""

    chunks: Sequence[GPTModel]
    ddp: Sequence[DistributedDataParallel]
    """Megatron's wrapper of each chunk, which holds the gradients."""

    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    params: dict[str, Any] = field(repr=False)
    """By the names that the bridge's layouts have for them, with the experts' biases, which are no parameters. Whole on every
    rank once ``param_gather`` is finished."""

    param_gather: ParamGather = field(repr=False)

    lora: Lora | None = None
    """The adapters that are trained while the parameters stay as they are; None: the parameters are trained."""

    @property
    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        """What the optimizer changes, by the names of its layout."""
        if self.lora is not None:
            return self.lora.params
        return {name: param for name, param in self.params.items() if isinstance(param, torch.nn.Parameter)}

    @property
    def expert_biases(self) -> Mapping[str, Tensor]:
        """Of this rank's layers, fp32; all ranks that have a layer have the same. An update moves them with
        ``engine.moe_balance.kind = expert_bias``, and otherwise nothing does."""
        return {name: param for name, param in self.params.items() if not isinstance(param, torch.nn.Parameter)}

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The model as it computes, as plain tensors by the names of ``params``: for one reading of all."""
        return PlainWeights(self.params) if self.lora is None else self.lora.merged(self.params)


@dataclass(frozen=True)
class PolicyBuilder:
    """Builds models of this run on this rank, with the weights that it starts from. Every rank calls, in the same order."""

    config: RunConfig
    spec: ModelSpec
    weights: Path
    """The folder, or shards, that weights are read from (``bridge.storage.files.load_into``)."""

    platform: Platform
    layers: Layers
    ranks: Ranks
    layouts: Sequence[ShardLayout]
    """Of every rank."""

    @property
    def layout(self) -> ShardLayout:
        """This rank's."""
        return self.layouts[self.ranks.rank]

    def policy(self) -> Policy:
        """Builds the model that is trained, with its optimizer. Raises ValueError for weights that are not this model's."""
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
            reduce_in_last_micro_batch(megatron, ddp, config.engine)
        gather = ParamGather(ddp, config.engine.overlap_param_gather)
        return Policy(chunks, ddp, optimizer, schedule, params, gather, lora)

    def reference(self) -> list[GPTModel]:
        """Builds a frozen copy of the first weights, for objectives with a KL term against them."""
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
            **ddp_options(self.config.engine),
            **fp8.gather_options(self.config.engine.fp8),
        )


def named_weights(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Returns all parameters, and the biases of experts, under the names of the bridge's layouts, which say the chunk where
    there are several."""
    prefixes = [f"model{number}." for number in range(len(chunks))] if len(chunks) > 1 else [""]
    found: dict[str, Any] = {}
    for prefix, chunk in zip(prefixes, chunks, strict=True):
        found |= {prefix + name: param for name, param in chunk.named_parameters()}
        found |= {prefix + name: buffer for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias")}
    return found


def finalize_gradients(
    model: list[torch.nn.Module], num_tokens: Tensor | None, *, afterwards: Callable[[], None], **kwargs: Any
) -> None:
    """Does Megatron's reductions over data-parallel, sequence-parallel and tied-embedding ranks, without its division, as
    ``step/step.py`` explains; then ``afterwards``."""
    del num_tokens
    finalize_model_grads(model, None, **kwargs)
    afterwards()

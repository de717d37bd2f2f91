import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tepo_megatron.config import Fp8Config, ModelConfig, OptimizerConfig, RunConfig
from tepo_megatron.runtime.machine import variable
from tepo_megatron.trainer.megatron.model import fp8
from tepo_megatron.trainer.megatron.model.fp8 import load_weights, optimizer_options, plain_weights
from tepo_megatron.trainer.megatron.model.lora import Lora
from tepo_megatron.trainer.megatron.model.model import Layers, build_model, transformer_config
from tepo_megatron.trainer.megatron.parallel.collectives import objects_as_json
from tepo_megatron.trainer.megatron.parallel.platform import Platform, Ranks
from tepo_megatron.trainer.megatron.policy.optimizer_states import OptimizerStates
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.geometry import ShardLayout
from tepo_megatron.weights.storage.stored import batches


@dataclass
class Policy:
    chunks: Sequence[GPTModel]
    ddp: Sequence[DistributedDataParallel]  # one per chunk
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    params: dict[str, Any] = field(repr=False)
    """Includes experts' biases, not parameters. Complete after ``finish_gather``."""

    overlaps_gather: bool = False  # then the next forward pass after a step gathers each bucket
    lora: Lora | None = None
    gather_pending: bool = False

    def finish_gather(self) -> None:
        """Every rank calls before anything but a forward pass reads parameters."""
        for group in self._bucket_groups() if self.gather_pending else ():
            group.finish_param_sync()
        self.gather_pending = False

    def spread(self, states: OptimizerStates) -> None:
        """Copies restored masters into all ranks' parameters. Every rank calls."""
        states.copy_masters()
        if self.overlaps_gather:  # Megatron's start_param_sync(force_sync) would not make the copies that FP8 weights need
            for group in self._bucket_groups():
                group.param_gather_dispatched = False
            self.gather_pending = True
            self.finish_gather()
        elif states.distributed:
            for chunk in self.ddp:
                chunk.start_param_sync(force_sync=True)

    def _bucket_groups(self) -> Iterator[Any]:
        for chunk in self.ddp:  # the last bucket has the first layers, and finishing one starts the next
            yield from reversed([*chunk.expert_parallel_bucket_groups, *chunk.bucket_groups])

    @property
    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        if self.lora is not None:
            return self.lora.params
        return {name: param for name, param in self.params.items() if isinstance(param, torch.nn.Parameter)}

    @property
    def expert_biases(self) -> Mapping[str, Tensor]:
        """fp32, equal on all ranks with the layer."""
        return {name: param for name, param in self.params.items() if not isinstance(param, torch.nn.Parameter)}

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Returns plain tensors, adapters merged, for one reading."""
        return plain_weights(self.params) if self.lora is None else self.lora.merged(self.params)


@dataclass(frozen=True)
class PolicyBuilder:
    config: RunConfig
    spec: ModelSpec
    weights: Path  # Hugging Face folder, or folder of ``tepo import``
    platform: Platform
    layers: Layers
    ranks: Ranks
    layouts: Sequence[ShardLayout]
    on_move: Callable[[], None] = lambda: None

    def policy(self) -> Policy:
        """Raises ValueError for another model's weights."""
        with self.platform.megatron():
            megatron, chunks = self._chunks()
            params = named_weights(chunks)
            unrounded = load_weights(self.weights, self.layouts[self.ranks.rank], params, self.on_move)
            config = self.config
            lora = None
            if config.model.lora is not None:
                lora = Lora.build(config.model.lora, chunks, params, self.layouts, rank=self.ranks.rank, seed=config.seed)
            options = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=config.optimizer.distributed,
                overlap_grad_reduce=config.engine.overlap_grad_reduce,
                overlap_param_gather=config.engine.overlap_param_gather,
                bucket_size=config.engine.bucket_size,
                **fp8.gather_options(config.engine.fp8),
            )
            # As in Megatron's own loop: backward ends with the first chunk, so that its gradients alone gain by being reduced
            # bucket by bucket.
            ddp = [
                DistributedDataParallel(megatron, options, chunk, disable_bucketing=number > 0)
                for number, chunk in enumerate(chunks)
            ]
            _correct_places(ddp)
            optimizer = _build_optimizer(config.optimizer, config.model, config.engine.fp8, ddp)
            for name, values in unrounded.items():
                OptimizerStates(optimizer).set_master(params[name], values)
            schedule = _build_schedule(
                config.optimizer, optimizer, total_steps=config.train.steps * config.train.updates_per_step
            )
            megatron.finalize_model_grads_func = partial(_finalize_gradients, lora=lora)
            megatron.grad_scale_func = optimizer.scale_loss
            if config.engine.overlap_grad_reduce:  # in the first update Megatron learns which gradients complete a bucket
                no_sync = [chunk.no_sync for chunk in ddp]
                megatron.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        return Policy(chunks, ddp, optimizer, schedule, params, config.engine.overlap_param_gather, lora)

    def reference(self) -> list[GPTModel]:
        with self.platform.megatron():
            _, chunks = self._chunks()
        load_weights(self.weights, self.layouts[self.ranks.rank], named_weights(chunks), self.on_move)
        return [chunk.requires_grad_(False) for chunk in chunks]

    def _chunks(self) -> tuple[TransformerConfig, list[GPTModel]]:
        config = self.config
        megatron = transformer_config(self.spec, config.model, config.engine, self.platform, self.layers)
        fuses = config.model.lora is None  # neither frozen nor merged weights have a buffer for their gradients
        megatron.gradient_accumulation_fusion &= fuses
        fused, numbers = config.engine.head == "fused", range(self.ranks.vpp)
        chunks = [build_model(self.spec, megatron, self.ranks, self.layers, number, fused=fused) for number in numbers]
        for module in (module for chunk in chunks for module in chunk.modules()):
            if hasattr(module, "fuse_wgrad_accumulation"):  # Transformer Engine's, which does not need apex for it
                module.fuse_wgrad_accumulation = fuses
        return megatron, chunks


def named_weights(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    prefixes = [f"model{number}." for number in range(len(chunks))] if len(chunks) > 1 else [""]
    weights: dict[str, Any] = {}
    for prefix, chunk in zip(prefixes, chunks, strict=True):
        weights |= {prefix + name: param for name, param in chunk.named_parameters()}
        weights |= {prefix + name: buffer for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias")}
    return weights


def _finalize_gradients(model: list[torch.nn.Module], num_tokens: Tensor | None, *, lora: Lora | None, **kwargs: Any) -> None:
    # like Megatron's, without its division (``update.py``)
    del num_tokens
    finalize_model_grads(model, None, **kwargs)
    if lora is not None:
        lora.sum_gradients()


def _correct_places(ddp: Sequence[DistributedDataParallel]) -> None:
    # Where MXFP8's gather reads a parameter. Megatron forgets that it pads their beginnings to 64 elements.
    for buffer in (buffer for chunk in ddp for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)):
        for param, (start, end, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            bucket.param_to_index[param] = (start - bucket.offset, end - bucket.offset)


def _build_optimizer(
    config: OptimizerConfig, model: ModelConfig, fp8: Fp8Config, ddp: Sequence[DistributedDataParallel]
) -> MegatronOptimizer:
    """Every rank calls."""
    device = next(ddp[0].parameters()).device
    options = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=model.dtype == "bfloat16",
        use_distributed_optimizer=config.distributed,
        **optimizer_options(fp8),
        **_state_options(config, on_gpu=device.type == "cuda"),
    )
    if config.offload_fraction:
        # On the host all states are fp32. This leaves the masters to Adam: without it they stay on the GPU too. As an argument
        # it would need Transformer Engine.
        options.use_precision_aware_optimizer = options.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    with objects_as_json(device):
        optimizer = get_megatron_optimizer(options, list(ddp))
    for early in optimizer.chained_optimizers[:-1]:
        early.model_chunks = []  # or else each gathers all weights after its step, and MXFP8's are 0 at the second time
    for inner in OptimizerStates(optimizer).inner:
        _adapt_steps(inner.optimizer, config, on_gpu=device.type == "cuda")
    if config.offload_fraction:
        gc.collect()  # Megatron makes its hybrid optimizer twice; the first, a reference cycle, has a copy of all weights
    return optimizer


def _adapt_steps(adam: Any, config: OptimizerConfig, *, on_gpu: bool) -> None:
    if config.precision_aware:
        adam.step = partial(_step_in_parts, adam, adam.step)
    elif config.offload_fraction and on_gpu:
        cores = len(os.sched_getaffinity(0)) // variable("LOCAL_WORLD_SIZE", 1)
        adam.step = partial(_step_with_threads, adam.step, max(1, cores))


def _step_with_threads(step: Callable[[], None], threads: int) -> None:
    # ranks start with one torch thread, which is enough while a GPU computes
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        step()
    finally:
        torch.set_num_threads(before)


_STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.uint8}


def _state_options(config: OptimizerConfig, *, on_gpu: bool) -> dict[str, Any]:
    if config.offload_fraction:
        return {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": config.offload_fraction,
            "overlap_cpu_optimizer_d2h_h2d": True,
            "pin_cpu_grads": on_gpu,
            "pin_cpu_params": on_gpu,
        }
    if config.precision_aware:
        return {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": _STATE_DTYPES[config.exp_avg_dtype],
            "exp_avg_sq_dtype": _STATE_DTYPES[config.exp_avg_sq_dtype],
            "store_param_remainders": config.store_param_remainders,
        }
    return {}


def _build_schedule(config: OptimizerConfig, optimizer: MegatronOptimizer, *, total_steps: int) -> OptimizerParamScheduler:
    """Call its ``step`` before the optimizer's: the first update then has a learning rate above 0."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(total_steps, config.warmup_steps + 1),  # Megatron asserts that it is more than the warm-up
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


PART_ELEMENTS = 2**26  # elements with fp32 states at once in a step, or those of one larger tensor


def _step_in_parts(adam: Any, step: Callable[[], Any]) -> None:
    """Adam makes all of a group's states fp32: more memory than fewer bits save."""
    whole = adam.param_groups
    try:
        for group in whole:
            for part in batches(group["params"], torch.numel, PART_ELEMENTS):
                adam.param_groups = [{**group, "params": part}]
                step()
            if group["params"]:
                group["step"] = adam.param_groups[0]["step"]
    finally:
        adam.param_groups = whole

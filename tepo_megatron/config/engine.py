"""``engine`` and ``model``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from tepo_megatron.config.base import Section


class ParallelConfig(Section):
    tp: PositiveInt = 1
    """Tensor-parallel size: ranks that share heads, MLP and vocabulary."""

    pp: PositiveInt = 1
    """Pipeline-parallel size: stages that share the layers."""

    dp: PositiveInt = 1
    """Data-parallel size. The world is tp × pp × cp × dp processes."""

    vpp: PositiveInt = 1
    """Virtual pipeline stages: alternating chunks of a rank's layers (interleaved 1F1B). Divides idle time and multiplies
    transfers by vpp. Above 1 it needs pp > 1 and at least dp × pp sequences per mini-batch.
    """

    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first stage (with the embedding); middle stages share evenly. Default: as others."""

    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last stage (with the head). Default: as others."""

    cp: PositiveInt = 1
    """Context-parallel size: ranks that share every sequence's tokens (docs/reference/context.md)."""

    cp_comm_type: Literal["p2p", "a2a"] = "p2p"
    """Context-parallel exchange in Transformer Engine's attention: ``p2p`` passes keys and values in a ring, ``a2a`` trades
    tokens for heads (cp must divide a rank's key/value heads). CPUs gather keys and values. Not run on a GPU yet.
    """

    ep: PositiveInt = 1
    """Expert-parallel size: ranks, of tp × cp × dp, that share the experts."""

    etp: PositiveInt | None = None
    """Expert-tensor-parallel size: ranks that share each expert. Default: tp."""

    sequence_parallel: bool = False
    """Split activations outside attention and MLP over tensor-parallel ranks (Megatron's SP)."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def even(self) -> ParallelConfig:
        """For a model of another depth: every stage has as many layers."""
        stages = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        return self.model_copy(update=dict.fromkeys(stages))

    @property
    def micro_batch_group(self) -> int:
        """A rank's number of micro-batches is a multiple of this."""
        return self.pp if self.vpp > 1 else 1

    def _faults(self) -> Iterator[str]:
        if self.sequence_parallel and self.tp == 1:
            yield "sequence_parallel = true needs tp > 1; set tp, or sequence_parallel = false"
        if self.cp == 1 and self.cp_comm_type != "p2p":
            yield f"cp_comm_type = {self.cp_comm_type} is for context parallelism, and cp = 1; set cp, or unset it"
        etp, ranks = self.tp if self.etp is None else self.etp, self.tp * self.cp * self.dp
        if ranks % (self.ep * etp):
            yield f"ep × etp = {self.ep} × {etp} does not divide the {ranks} ranks of a pipeline stage (tp × cp × dp); lower ep"
        if self.vpp > 1 and self.pp == 1:
            yield f"vpp = {self.vpp} divides pipeline stages further and needs pp > 1; set pp, or vpp = 1"
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            layers = getattr(self, name)
            if layers is not None and self.pp == 1:
                yield f"{name} = {layers} needs stages to differ from, and pp = 1; set pp, or leave {name} out"
            if layers is not None and layers % self.vpp:
                yield f"vpp = {self.vpp} does not divide {name} = {layers} into equal chunks; use a multiple, or lower vpp"


Recipe = Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"]

_FP8_TOKENS = {"none": 1, "delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}


class Fp8Config(Section):
    recipe: Recipe = "none"
    """FP8 scaling of layers' matrix products. ``delayed``: per tensor, from earlier steps; ``tensorwise``: per tensor, from its
    values; ``blockwise``: per 128 values (Hopper); ``mxfp8``: per 32 values (Blackwell), not run on a GPU yet.
    """

    format: Literal["e4m3", "hybrid"] = "hybrid"
    """``e4m3`` everywhere; ``hybrid``: E4M3 forward, E5M2 (more range) for gradients."""

    amax_history_len: PositiveInt | None = None
    """``delayed`` only: remembered steps. Default: 1024."""

    amax_compute_algo: Literal["max", "most_recent"] | None = None
    """``delayed`` only: which remembered value counts. Default: max."""

    margin: int | None = Field(default=None, ge=0)
    """``delayed`` only: powers of two below the largest possible scale. Default: 0."""

    first_layers_bf16: NonNegativeInt = 0
    """First layers in bfloat16."""

    last_layers_bf16: NonNegativeInt = 0
    """Last layers in bfloat16."""

    params: bool = False
    """Keep and gather layers' weights in FP8 only (masters: fp32); needs optimizer.distributed."""

    @property
    def enabled(self) -> bool:
        return self.recipe != "none"

    def _faults(self) -> Iterator[str]:
        if not self.enabled:
            if idle := self._changed(*type(self).model_fields):
                yield f"{', '.join(idle)} has no effect while recipe = none; choose a recipe, or leave it out"
        elif self.recipe != "delayed":
            yield from self._idle(("amax_history_len", "amax_compute_algo", "margin"), "recipe", "delayed")
        elif in_bf16 := self.first_layers_bf16 + self.last_layers_bf16:
            yield (
                f"{in_bf16} layers in bfloat16 do not go with recipe = delayed, with one history for all layers; leave them "
                "out, or set recipe = tensorwise"
            )
        elif self.params:
            yield "params = true does not go with recipe = delayed, whose history no checkpoint has; set recipe = tensorwise"


class MoeBalanceConfig(Section):
    kind: Literal["none", "aux_loss", "expert_bias"] = "none"
    """``aux_loss``: a loss on routers. ``expert_bias``: a bias per expert, moved against load (DeepSeek-V3)."""

    coefficient: Annotated[float, Field(gt=0, le=1)] = 1e-3
    """``aux_loss`` only: factor of a layer's loss, 1 at even load. Usual: 1e-3 to 1e-2."""

    update_rate: Annotated[float, Field(gt=0, le=1)] = 1e-3
    """``expert_bias`` only: change of a bias per update (scores: 0 to 1). DeepSeek-V3: 1e-3."""

    def _faults(self) -> Iterator[str]:
        yield from self._idle(["coefficient"], "kind", "aux_loss")
        yield from self._idle(["update_rate"], "kind", "expert_bias")


RecomputeModule = Literal["core_attn", "mlp", "moe", "moe_act", "layernorm"]


class EngineConfig(Section):
    platform: Literal["auto", "cpu", "cuda"] = "auto"
    """Trainer's device; ``auto`` is CUDA if torch sees a GPU, and on a cluster."""

    cpu_threads: PositiveInt | Literal["auto"] | None = None
    """CPU threads per rank. ``auto``: an equal share of cores with ``train.schedule = sync``, of those that servers leave with
    ``overlap``. Default: ``OMP_NUM_THREADS``, else 1. Changes rounding.
    """

    layers: Literal["auto", "te", "local"] = "auto"
    """``te``: Transformer Engine's layers (GPU only). ``local``: Megatron-Core's. ``auto``: ``te`` on GPUs, else ``local``."""

    fp8: Fp8Config = Fp8Config()
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of a GPU's memory that the trainer may allocate."""

    check_memory: bool = True
    """Refuse a run that its plan finds too large (docs/reference/plan.md). ``false``: only warn."""

    parallel: ParallelConfig = ParallelConfig()

    moe_balance: MoeBalanceConfig = MoeBalanceConfig()

    micro_batch_tokens: PositiveInt = 4096
    """Most tokens per micro-batch, over context-parallel ranks, or one longer sequence."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in backward: ``selective`` those of ``recompute_modules``, ``full`` all layers'."""

    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    """Megatron-Core's modules for ``recompute = selective``. ``core_attn``: attention without projections; ``mlp``: dense; with
    experts ``moe`` (router, experts, exchange), or, with Transformer Engine, ``moe_act`` (activation) and ``layernorm`` (before
    the router).
    """

    overlap_grad_reduce: bool = False
    """Reduce gradients by buckets during the last micro-batch's backward. Not run on a GPU yet."""

    overlap_param_gather: bool = False
    """Gather updated weights during the next forward. Needs ``overlap_grad_reduce``. Not run on a GPU yet."""

    bucket_size: PositiveInt | None = None
    """Parameters per bucket of ``overlap_grad_reduce``. Default: max(40 million, a million per data-parallel rank)."""

    head: Literal["logits", "fused"] = "logits"
    """``fused`` computes head and scores by chunks: less memory, but the product twice."""

    score_backend: Literal["auto", "torch", "cpp", "triton"] = "auto"
    """Computes log-probs and entropies: ``cpp`` (CPU), ``triton`` (GPU) or ``torch``. ``auto``: the fastest."""

    noise_every: NonNegativeInt = 50
    """Steps between measurements of rounding noise (``…/noise``): a few sequences are scored twice. 0: never."""

    noise_sequences: PositiveInt = 8
    """Sequences scored twice, shortest to longest; a multiple of the data-parallel size."""

    @property
    def recomputed(self) -> tuple[RecomputeModule, ...]:
        """Empty if whole layers are computed again."""
        return self.recompute_modules if self.recompute == "selective" else ()

    @property
    def wants_gpus(self) -> bool:
        return self.platform != "cpu"  # ``auto`` counts as GPUs

    @property
    def token_multiple(self) -> int:
        """A micro-batch, over context-parallel ranks, is padded to a multiple of this."""
        parallel = self.parallel
        share = (parallel.tp if parallel.sequence_parallel else 1) * _FP8_TOKENS[self.fp8.recipe]
        return parallel.cp * math.lcm(2, share) if parallel.cp > 1 else share

    def _faults(self) -> Iterator[str]:
        if self.recompute == "selective" and not self.recompute_modules:
            yield "recompute = selective with no recompute_modules computes nothing again; set recompute = none"
        yield from self._idle(["recompute_modules"], "recompute", "selective")
        if not self.noise_every:
            yield from self._idle(["noise_sequences"], "noise_every", 50)
        yield from self._idle(["overlap_param_gather", "bucket_size"], "overlap_grad_reduce", True)
        if self.overlap_grad_reduce and self.parallel.dp * self.parallel.cp == 1:
            yield "overlap_grad_reduce = true hides a reduction, and with dp × cp = 1 there is none; leave it out, or raise dp"
        if self.cpu_threads is not None and self.platform == "cuda":
            yield f"cpu_threads = {self.cpu_threads} acts where the trainer runs on a CPU, and platform = cuda; leave it out"
        if self.layers == "te" and self.platform == "cpu":
            yield "layers = te needs a GPU, and platform = cpu; set layers = local, or another platform"
        cp, exchange, recipe = self.parallel.cp, self.parallel.cp_comm_type, f"fp8.recipe = {self.fp8.recipe}"
        if self.layers == "local" or self.platform == "cpu":
            instead = "layers = local" if self.layers == "local" else "platform = cpu"
            if self.fp8.enabled:
                yield f"{recipe} needs Transformer Engine's layers on a GPU, but {instead}; leave it out, or set layers = te"
            if exchange != "p2p":
                yield f"parallel.cp_comm_type = {exchange} is Transformer Engine's, and {instead} gathers keys; leave it out"
        if self.fp8.recipe == "delayed" and (again := {"moe_act", "layernorm"}.intersection(self.recomputed)):
            yield f"recompute_modules = {', '.join(sorted(again))} with {recipe}, which Megatron-Core lacks; leave it out"
        if cp > 1 and self.fp8.recipe in ("delayed", "tensorwise"):
            yield (
                f"parallel.cp = {cp} with {recipe}: a token of padding may have the value that scales the tensor; set "
                "fp8.recipe = blockwise (on Hopper) or mxfp8 (on Blackwell), or parallel.cp = 1"
            )


ALL_LINEAR = "all-linear"


class LoraConfig(Section):
    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Inner dimension of adapters: A is [rank, in], B is [out, rank]. Usual for RL: 8 to 32."""

    alpha: Annotated[float, Field(gt=0)] = 32.0
    """An adapter adds alpha / rank · B · A to its weight. Usual: twice the rank."""

    rslora: bool = False
    """alpha is divided by the square root of the rank instead."""

    dropout: float = 0.0
    """Must be 0, so that scores can be repeated."""

    target_modules: tuple[Annotated[str, Field(min_length=1)], ...] = (ALL_LINEAR,)
    """Layers with adapters, by Hugging Face names such as q_proj, also of every expert."""

    path: Path | None = None
    """PEFT folder of adapters to train further. None: A from the seed, B = 0."""

    serve: Literal["merged", "adapter"] = "merged"
    """What servers receive. ``merged``: weights with adapters, rounded as the trainer's. ``adapter``: only A and B, applied
    next to ``model.path``: fewer bytes. Equal in float32; bfloat16 rounds differently. For dense models up to rank 512, with
    servers on other GPUs or a CPU. Not run on a GPU yet.
    """

    @field_validator("target_modules", mode="before")
    @classmethod
    def _text_is_one_name(cls, raw: Any) -> Any:
        return (raw,) if isinstance(raw, str) else raw

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def _faults(self) -> Iterator[str]:
        names = self.target_modules
        if self.dropout != 0:
            yield "dropout must be 0: a training step draws no random numbers, so that log-probs can be compared; leave it out"
        if not names:
            yield "model.lora.target_modules is empty, so that nothing would be trained; name layers, or all-linear"
        if len(set(names)) < len(names):
            yield f"model.lora.target_modules names a layer twice: {', '.join(names)}; name each once"
        if ALL_LINEAR in names and len(names) > 1:
            yield "model.lora.target_modules: all-linear already means every layer; leave the other names out"


class ModelConfig(Section):
    path: str = "builtin:tiny"
    """Hugging Face folder with config.json, safetensors and tokenizer; ``hub:ORGANISATION/NAME``, downloaded at the start;
    ``builtin:tiny`` is this package's.
    """

    shards: Path | None = None
    """``tepo import`` writes this folder from ``path``."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Trainer's dtype; servers' default. ``auto``: bfloat16 on GPUs, float32 on a CPU; a resumed run keeps its checkpoint's."""

    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights."""

"""``engine``: the trainer on Megatron-Core."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from tepo_megatron.config.base import Section


class ParallelConfig(Section):
    tp: PositiveInt = 1
    """Tensor-parallel size: ranks that share heads, MLP and vocabulary."""

    pp: PositiveInt = 1
    """Pipeline-parallel size: stages that share the layers."""

    dp: PositiveInt = 1
    """Data-parallel size. The world is tp × pp × cp × dp processes."""

    vpp: PositiveInt = 1
    """Virtual pipeline stages: a rank's layers are cut into this many alternating chunks (interleaved 1F1B). Divides idle time
    by vpp and multiplies transfers by it. More than 1 needs pp > 1 and at least dp × pp sequences per mini-batch."""

    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first stage (with the embedding); middle stages share the rest evenly. Default: as every other stage."""

    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last stage (with the head). Default: as every other stage."""

    cp: PositiveInt = 1
    """Context-parallel size: ranks that share the tokens of every sequence, for long responses (docs/reference/context.md).
    Sequences are padded to a multiple of 2 cp."""

    cp_comm_type: Literal["p2p", "a2a"] = "p2p"
    """Exchange of context-parallel ranks in Transformer Engine's attention. ``p2p``: keys and values pass round a ring during
    the computation. ``a2a``: ranks trade tokens for heads; cp must divide a rank's key/value heads. A CPU gathers keys and
    values. Not run on a GPU yet."""

    ep: PositiveInt = 1
    """Expert-parallel size: ranks, of tp × cp × dp, that share the experts."""

    etp: PositiveInt | None = None
    """Expert-tensor-parallel size: ranks that share each expert. Default: tp, as in Megatron-Core."""

    sequence_parallel: bool = False
    """Split activations outside attention and MLP over the tensor-parallel ranks (Megatron's SP)."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def micro_batch_group(self) -> int:
        """A rank's number of micro-batches is a multiple of this."""
        return self.pp if self.vpp > 1 else 1

    @model_validator(mode="after")
    def _sequence_parallel_needs_tp(self) -> "ParallelConfig":
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel = true needs tp > 1; set tp, or sequence_parallel = false")
        return self

    @model_validator(mode="after")
    def _the_exchange_can_act(self) -> "ParallelConfig":
        if self.cp == 1 and self.cp_comm_type != "p2p":
            raise ValueError(f"cp_comm_type = {self.cp_comm_type} is for context parallelism, and cp = 1; set cp, or unset it")
        return self

    @model_validator(mode="after")
    def _experts_fit_a_stage(self) -> "ParallelConfig":
        etp, ranks = self.tp if self.etp is None else self.etp, self.tp * self.cp * self.dp
        if ranks % (self.ep * etp):
            raise ValueError(
                f"ep × etp = {self.ep} × {etp} does not divide the {ranks} ranks of a pipeline stage (tp × cp × dp); "
                "lower ep, or raise dp"
            )
        return self

    @model_validator(mode="after")
    def _virtual_stages_need_stages(self) -> "ParallelConfig":
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp = {self.vpp} divides pipeline stages further and needs pp > 1; set pp, or vpp = 1")
        return self

    @model_validator(mode="after")
    def _uneven_stages_need_stages(self) -> "ParallelConfig":
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            layers = getattr(self, name)
            if layers is not None and self.pp == 1:
                raise ValueError(f"{name} = {layers} needs stages to differ from, and pp = 1; set pp, or leave {name} out")
            if layers is not None and layers % self.vpp:
                raise ValueError(
                    f"vpp = {self.vpp} does not divide {name} = {layers} into equal chunks; use a multiple of {self.vpp}, or "
                    "lower vpp"
                )
        return self


Recipe = Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"]


class Fp8Config(Section):
    recipe: Recipe = "none"
    """FP8 scaling of the layers' matrix products. ``delayed``: one scale per tensor, from earlier steps; ``tensorwise``: one
    per tensor, from its values; ``blockwise``: one per 128 values (Hopper); ``mxfp8``: one per 32 values (Blackwell); ``none``:
    no FP8. Not run on a GPU yet."""

    format: Literal["e4m3", "hybrid"] = "hybrid"
    """``e4m3`` for everything; ``hybrid``: E4M3 forward, and E5M2 (more range) for gradients."""

    amax_history_len: PositiveInt | None = None
    """``delayed`` only: remembered steps. Default: 1024."""

    amax_compute_algo: Literal["max", "most_recent"] | None = None
    """``delayed`` only: which remembered value counts. Default: max."""

    margin: int | None = Field(default=None, ge=0)
    """``delayed`` only: powers of two between the scale and the largest possible one. Default: 0."""

    first_layers_bf16: NonNegativeInt = 0
    """First layers that stay in bfloat16."""

    last_layers_bf16: NonNegativeInt = 0
    """Last layers that stay in bfloat16."""

    params: bool = False
    """Keep the layers' weights in FP8 only (masters stay fp32), and gather them so; needs optimizer.distributed."""

    @property
    def enabled(self) -> bool:
        return self.recipe != "none"

    @model_validator(mode="after")
    def _nothing_is_set_without_effect(self) -> "Fp8Config":
        if not self.enabled:
            idle = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
            if idle:
                raise ValueError(f"{', '.join(idle)} has no effect while recipe = none; choose a recipe, or leave it out")
            return self
        history = [name for name in ("amax_history_len", "amax_compute_algo", "margin") if getattr(self, name) is not None]
        if history and self.recipe != "delayed":
            raise ValueError(
                f"{', '.join(history)} is for recipe = delayed; {self.recipe} computes its scales from the values at hand. "
                "Leave it out, or set recipe = delayed"
            )
        return self

    @model_validator(mode="after")
    def _delayed_scaling_is_for_all_layers(self) -> "Fp8Config":
        kept = self.first_layers_bf16 + self.last_layers_bf16
        if self.recipe == "delayed" and kept:
            raise ValueError(
                f"{kept} layers in bfloat16 do not go with recipe = delayed, which reduces its history for all layers at once "
                "(Megatron-Core refuses it); set first_layers_bf16 = last_layers_bf16 = 0, or recipe = tensorwise"
            )
        if self.recipe == "delayed" and self.params:
            raise ValueError(
                "params = true does not go with recipe = delayed: a checkpoint carries no history, so that weights which are "
                "read would be rounded under a scale of 1, far from theirs; set recipe = tensorwise, or params = false"
            )
        return self


_KIND_OF = {"coefficient": "aux_loss", "update_rate": "expert_bias"}


class MoeBalanceConfig(Section):
    kind: Literal["none", "aux_loss", "expert_bias"] = "none"
    """``none``: no balance. ``aux_loss``: an auxiliary loss on the routers, over the mini-batch. ``expert_bias``: a bias per
    expert, moved against its load after each update (DeepSeek-V3), for families whose servers have it too."""

    coefficient: Annotated[float, Field(gt=0, le=1)] = 1e-3
    """``aux_loss`` only: factor of each layer's loss, 1 at even load. It competes with the objective; pre-training uses 1e-3 to
    1e-2."""

    update_rate: Annotated[float, Field(gt=0, le=1)] = 1e-3
    """``expert_bias`` only: change of a bias per update; scores are between 0 and 1. 1e-3 is DeepSeek-V3's."""

    @model_validator(mode="after")
    def _settings_act(self) -> "MoeBalanceConfig":
        for name, kind in _KIND_OF.items():
            value = getattr(self, name)
            if self.kind != kind and value != type(self).model_fields[name].default:
                raise ValueError(f"{name} = {value} does nothing with kind = {self.kind}; set kind = {kind}, or leave it out")
        return self


RecomputeModule = Literal["core_attn", "mlp", "moe", "moe_act", "layernorm"]


class EngineConfig(Section):
    platform: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainer; ``auto`` is CUDA if torch sees a GPU. CUDA has not been run on a GPU yet."""

    cpu_threads: PositiveInt | Literal["auto"] | None = None
    """Torch's threads per rank on a CPU. ``auto``: an equal share of the cores with ``train.schedule = sync``; with ``overlap``
    of those that servers leave. Default: ``OMP_NUM_THREADS``, else 1. The number changes rounding."""

    layers: Literal["auto", "te", "local"] = "auto"
    """``te``: Transformer Engine's fused layers (GPU only; the run stops without the library). ``local``: Megatron-Core's
    layers with torch's attention and norm. ``auto``: ``te`` on a GPU, ``local`` on a CPU."""

    fp8: Fp8Config = Fp8Config()
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of a GPU's memory that the trainer may allocate; ``memory/peak_gib`` is its use. Sleeping colocated servers keep
    some memory too."""

    check_memory: bool = True
    """Refuse a run that needs more memory than its GPUs have, before building it (docs/reference/plan.md). ``false``: only
    warn."""

    parallel: ParallelConfig = ParallelConfig()

    moe_balance: MoeBalanceConfig = MoeBalanceConfig()

    micro_batch_tokens: PositiveInt = 4096
    """Most tokens per micro-batch, over all context-parallel ranks; a longer sequence gets its own."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass instead of stored: ``selective`` those of ``recompute_modules``, ``full``
    every layer's. Saves memory, costs time."""

    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    """Modules of ``recompute = selective``, by Megatron-Core's names. ``core_attn``: attention without projections; ``mlp``: a
    dense MLP; with experts ``moe`` (router, experts, exchange), or, with Transformer Engine, ``moe_act`` (the experts'
    activation) and ``layernorm`` (before the router)."""

    overlap_grad_reduce: bool = False
    """Reduce gradients between data-parallel ranks by buckets during the last micro-batch's backward pass. Not run on a GPU
    yet."""

    overlap_param_gather: bool = False
    """Gather the distributed optimizer's updated weights during the next mini-batch's forward pass, but at once after a step's
    last update. Needs ``overlap_grad_reduce`` and ``optimizer.distributed``. Not run on a GPU yet."""

    bucket_size: PositiveInt | None = None
    """Parameters per bucket of ``overlap_grad_reduce``. Default: Megatron's max(40 million, a million per data-parallel
    rank)."""

    head: Literal["logits", "fused"] = "logits"
    """``logits``: scores follow from a whole micro-batch's logits. ``fused``: head and scores run together on chunks of tokens:
    no rank holds ``micro_batch_tokens`` × vocabulary / ``tp`` logits, but the backward pass repeats the product. ``logits`` is
    faster if memory suffices."""

    score_backend: Literal["auto", "torch", "cpp", "triton"] = "auto"
    """Implementation of log-probs and entropies: ``cpp`` (CPU with a C++ compiler), ``triton`` (GPU) or ``torch``. ``auto``:
    ``triton`` or ``cpp`` if available, else ``torch``. They agree to fp32 rounding; each repeats its bits."""

    noise_every: NonNegativeInt = 50
    """Steps between measurements of rounding noise, from the first step: a few sequences are scored twice. Gives
    ``entropy/noise``, ``ratio/noise`` and ``sequence_ratio/noise``. 0: never."""

    noise_sequences: PositiveInt = 8
    """Sequences scored twice, from shortest to longest; a multiple of the data-parallel size."""

    @property
    def recomputed(self) -> tuple[RecomputeModule, ...]:
        """Modules whose activations are computed again; empty with whole layers."""
        return self.recompute_modules if self.recompute == "selective" else ()

    @model_validator(mode="after")
    def _recomputed_modules_act(self) -> "EngineConfig":
        if self.recompute == "selective" and not self.recompute_modules:
            raise ValueError("recompute = selective with no recompute_modules computes nothing again; set recompute = none")
        if self.recompute != "selective" and self.recompute_modules != ("core_attn",):
            raise ValueError(
                f"recompute_modules = {list(self.recompute_modules)} acts with recompute = selective alone, and recompute = "
                f"{self.recompute}; set recompute = selective, or leave recompute_modules out"
            )
        return self

    @model_validator(mode="after")
    def _overlap_has_what_it_needs(self) -> "EngineConfig":
        copies = self.parallel.dp * self.parallel.cp
        if self.overlap_grad_reduce and copies == 1:
            raise ValueError(
                "overlap_grad_reduce = true hides a reduction between data-parallel ranks, and with dp × cp = 1 there is none; "
                "leave it out, or raise parallel.dp"
            )
        for name, value in (("overlap_param_gather", self.overlap_param_gather), ("bucket_size", self.bucket_size)):
            if value and not self.overlap_grad_reduce:
                raise ValueError(
                    f"{name} acts with overlap_grad_reduce = true alone, which cuts gradients and weights into buckets; set "
                    f"it, or leave {name} out"
                )
        return self

    @model_validator(mode="after")
    def _threads_are_a_cpus(self) -> "EngineConfig":
        if self.cpu_threads is not None and self.platform == "cuda":
            raise ValueError(
                f"cpu_threads = {self.cpu_threads} acts where the trainer runs on a CPU, and platform = cuda; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _layers_fit_the_platform(self) -> "EngineConfig":
        if self.layers == "te" and self.platform == "cpu":
            raise ValueError("layers = te needs a GPU, and platform = cpu; set layers = local, or another platform")
        if self.fp8.enabled and (self.layers == "local" or self.platform == "cpu"):
            instead = "layers = local" if self.layers == "local" else "platform = cpu"
            raise ValueError(
                f"fp8.recipe = {self.fp8.recipe} needs Transformer Engine's layers on a GPU, but {instead}; set fp8.recipe = "
                "none, or layers = te on a GPU"
            )
        return self

    @model_validator(mode="after")
    def _context_parallelism_fits(self) -> "EngineConfig":
        cp, exchange = self.parallel.cp, self.parallel.cp_comm_type
        if exchange != "p2p" and (self.layers == "local" or self.platform == "cpu"):
            instead = "layers = local" if self.layers == "local" else "platform = cpu"
            raise ValueError(
                f"parallel.cp_comm_type = {exchange} is of Transformer Engine's attention, and {instead} gathers keys and "
                "values; leave it out"
            )
        if cp > 1 and self.fp8.recipe in ("delayed", "tensorwise"):
            raise ValueError(
                f"parallel.cp = {cp} with fp8.recipe = {self.fp8.recipe}: the recipe scales whole tensors by their largest "
                "value, which may be that of a token that only pads a sequence to a multiple of 2 cp; set fp8.recipe = "
                "blockwise (on Hopper) or mxfp8 (on Blackwell), or parallel.cp = 1"
            )
        return self

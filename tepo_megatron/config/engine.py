"""``engine``: the trainer on Megatron-Core."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from tepo_megatron.config.base import Section
from tepo_megatron.config.fp8 import Fp8Config
from tepo_megatron.config.moe_balance import MoeBalanceConfig
from tepo_megatron.config.parallel import ParallelConfig

RecomputeModule = Literal["core_attn", "mlp", "moe", "moe_act", "layernorm"]


class EngineConfig(Section):
    platform: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer runs; ``auto`` is CUDA if torch sees a GPU. The CUDA path has not been run on a GPU yet."""

    cpu_threads: PositiveInt | Literal["auto"] | None = None
    """On a CPU: torch's threads in each rank. ``auto``: with ``train.schedule = sync`` this machine's cores over its ranks, as
    servers wait meanwhile; with ``overlap`` the cores that its servers leave. Default: ``OMP_NUM_THREADS``, which is 1 where it
    is not set, as results are rounded otherwise by another number of threads."""

    layers: Literal["auto", "te", "local"] = "auto"
    """``te``: Transformer Engine's fused layers, on a GPU; ``local``: Megatron-Core's own with torch's attention and norm,
    anywhere. ``auto`` is ``te`` on a GPU and ``local`` on a CPU; a run that should have ``te`` and cannot stops."""

    fp8: Fp8Config = Fp8Config()
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The part of a GPU's memory that the trainer may allocate; beyond it an allocation fails. The metric ``memory/peak_gib``
    is what it used. In the colocated placement servers that sleep keep some memory too."""

    check_memory: bool = True
    """Refuse a run on GPUs that needs more memory than they have (docs/reference/plan.md), before anything is built on them,
    and say what to change. ``false``: warn, and try it."""

    parallel: ParallelConfig = ParallelConfig()

    moe_balance: MoeBalanceConfig = MoeBalanceConfig()

    micro_batch_tokens: PositiveInt = 4096
    """Upper bound on the tokens packed into one micro-batch; a longer sequence gets a micro-batch of its own. It counts the
    tokens of all context-parallel ranks: each holds 1/cp of them."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Which activations are computed again in the backward pass rather than kept, as in Megatron-Core: ``selective`` those of
    ``recompute_modules``, ``full`` every layer's. More of it takes less memory and more time."""

    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    """What ``recompute = selective`` computes again, by Megatron-Core's names. ``core_attn``: attention without projections;
    ``mlp``: the MLP of a dense model; for models with experts ``moe`` (router, experts and their exchange), or, with
    Transformer Engine's layers, ``moe_act`` (the experts' activation alone) and ``layernorm`` (the norm before the router)."""

    overlap_grad_reduce: bool = False
    """Reduce gradients between data-parallel ranks while the backward pass of the last micro-batch goes on, bucket by bucket.
    Not run on a GPU yet."""

    overlap_param_gather: bool = False
    """Gather the weights that the distributed optimizer has updated while the next mini-batch's forward pass goes on. After a
    step's last update nothing is left to overlap with, and they are gathered at once. Needs ``overlap_grad_reduce`` and
    ``optimizer.distributed``. Not run on a GPU yet."""

    bucket_size: PositiveInt | None = None
    """Parameters in a bucket of ``overlap_grad_reduce``; default: Megatron's, the larger of 40 million and a million for each
    data-parallel rank."""

    head: Literal["logits", "fused"] = "logits"
    """``logits``: the head gives the logits of a whole micro-batch, from which scores are computed. ``fused``: head and scores
    are computed together, a chunk of tokens at a time, so that no rank ever holds the logits of a micro-batch, which are
    ``micro_batch_tokens`` × vocabulary / ``tp`` numbers; the backward pass computes the head's product once more. ``logits`` is
    the default because it takes less time where its memory is there."""

    score_backend: Literal["auto", "torch", "cpp", "triton"] = "auto"
    """What sweeps the logits for log-probs and entropies: ``cpp`` on a CPU with a C++ compiler, ``triton`` on a GPU, ``torch``
    anywhere. ``auto`` is ``triton`` on a GPU where Triton is installed, ``cpp`` on a CPU where it can be compiled, else
    ``torch``. They agree to fp32 rounding; the same one gives the same bits."""

    noise_every: NonNegativeInt = 50
    """Steps from one measurement of the rounding noise to the next, the first included: a few sequences are scored twice, in
    different micro-batches. It gives ``entropy/noise``, ``ratio/noise`` and ``sequence_ratio/noise``. 0: never."""

    noise_sequences: PositiveInt = 8
    """How many of the step's sequences are scored twice, from the shortest to the longest; a multiple of the data-parallel
    size."""

    @property
    def recomputed(self) -> tuple[RecomputeModule, ...]:
        """The modules whose activations are computed again where not whole layers are; none where nothing is."""
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
        for name, given in (("overlap_param_gather", self.overlap_param_gather), ("bucket_size", self.bucket_size)):
            if given and not self.overlap_grad_reduce:
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

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from tepo_megatron.config.base import Seconds, Section
from tepo_megatron.config.engine import EngineConfig
from tepo_megatron.config.objective.choices import Clip
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.config.rollout import RolloutConfig


class _RollbackConfig(Section):
    """Returns to a checkpoint if a metric explodes."""

    metric: str
    """A figure of the updates, such as ``grad_norm``, ``mismatch/kl`` or ``ratio/max``."""

    above: float | None = None
    """Largest value allowed."""

    factor: Annotated[float, Field(gt=1)] | None = None
    """Largest multiple of a positive median of the last 20 steps, from the sixth on; infinity is above it."""

    max_times: PositiveInt = 3
    """Most rollbacks; one more stops the run."""

    def _faults(self) -> Iterator[str]:
        if (self.above is None) == (self.factor is None):
            yield "give one of above (a bound) and factor (times the running median), not both and not none"


class _KeepBestConfig(Section):
    metric: str = Field(min_length=1)
    """Key of ``metrics.jsonl``, such as ``accuracy/greedy``; let ``save_every`` be a multiple of ``evaluate.every``."""

    mode: Literal["max", "min"] = "max"
    """Of equal values the newest counts."""


class _CallbackConfig(Section):
    callback: str = Field(min_length=1)
    """``early_stopping``, or a custom class: ``path/file.py:Class`` or ``package.module:Class``."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class. No secrets: the run's folder keeps them."""


class TrainConfig(Section):
    steps: PositiveInt = 100
    """Steps, with one batch of rollouts each."""

    minibatches: PositiveInt = 4
    """K, optimizer steps per pass over a batch, each on an equal part of the responses."""

    epochs_per_batch: PositiveInt = 1
    """Passes over a batch: PPO's epochs, TRL's ``num_iterations``. Ratios are to the policy before the first."""

    schedule: Literal["sync", "overlap"] = "sync"
    """``sync``: trainer and servers take turns. ``overlap``: servers sample ahead; ``objective.mismatch`` corrects it."""

    max_staleness: Annotated[int, Field(ge=1, le=64)] = 1
    """``overlap`` only: largest age of the weights that drew a token, in steps."""

    stale: Literal["drop", "keep"] = "drop"
    """``overlap`` only: groups above ``max_staleness``. ``drop``: slow prompts count less. ``keep``: trained on, corrected."""

    kv_cache: Literal["recompute", "keep"] = "recompute"
    """``overlap`` only: keys and values of unfinished responses at a weight update. ``recompute``: with new weights. ``keep``:
    faster, but later tokens follow no single policy.
    """

    max_skipped: NonNegativeInt = 8
    """Most consecutive skips for a non-finite loss or gradient, saved in ``<output>/skipped``; then the run stops."""

    hang_timeout_s: Annotated[float, Field(ge=60, le=30 * 24 * 3600)] = 1800.0
    """Seconds without progress of a trainer rank before the job ends, with a report in ``<output>/logs/hang-….txt``. Progress:
    a phase, micro-batch, answered prompt, or server's tokens; time-outs of awaited servers and verifiers are added. It must
    exceed a micro-batch, a checkpoint, and a rank's start. 30 for a rank stopped by a signal.
    """

    max_restarts: NonNegativeInt = 0
    """Most restarts of the ranks within the job, from the newest checkpoint, if one is killed, hangs, or fails unexpectedly.
    Servers keep running, unless ``placement`` is ``colocated`` (docs/guides/operations.md).
    """

    save_every: NonNegativeInt = 0
    """Steps between checkpoints; the end always writes one. 0: none by count."""

    async_save: bool | Literal["auto"] = "auto"
    """A thread writes checkpoints from host memory (12 bytes a parameter); a kill before its end loses one. ``auto``: on GPUs,
    if that is at most half of a node's free memory.
    """

    save_minutes: NonNegativeFloat = 30.0
    """Minutes after which a step ends with a checkpoint, whatever ``save_every``. 0: never."""

    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints kept; an older one is deleted when a newer one has its row of metrics."""

    keep_every: NonNegativeInt = 0
    """Never delete checkpoints of steps that are multiples of this. 0: none."""

    keep_best: _KeepBestConfig | None = None
    """Keeps the best checkpoint too."""

    resume: bool | Literal["auto"] = False
    """Continue from the newest whole checkpoint in the output folder. auto: if there is one."""

    callbacks: tuple[str | _CallbackConfig, ...] = ()
    """Custom code on rank 0, which may end the run: ``early_stopping``, or ``path/file.py:Class``; with arguments ``{callback:
    early_stopping, kwargs: {patience: 3}}`` (docs/guides/from-python.md).
    """

    grace_s: Seconds = 60.0
    """Seconds from SIGTERM to the end, with a checkpoint. At most the time before SIGKILL (Slurm: KillWait, GraceTime)."""

    warning_s: Seconds = 300.0
    """The same for SIGUSR1, Slurm's warning, which ``tepo launch`` requests half a minute earlier."""

    rollback: _RollbackConfig | None = None
    """Return to the newest checkpoint, without the batch, if a metric explodes. Needs ``save_every``."""

    resume_from: str | None = None
    """A name in the output folder (``step_000040``) or a path. Later checkpoints are set aside. Default: newest."""

    allow_change: tuple[str, ...] = ()
    """Fields or sections that may differ from the checkpoint's, such as ``[seed, objective.kl]``."""

    def saves_beside_training(self, staged: float, host: float, *, on_gpu: bool) -> bool:
        """``staged``, ``host``: a node's bytes."""
        return on_gpu and 2 * staged <= host if self.async_save == "auto" else self.async_save

    @property
    def updates_per_step(self) -> int:
        return self.minibatches * self.epochs_per_batch

    def never_written(
        self, objective: ObjectiveConfig, rollout: RolloutConfig, engine: EngineConfig, *, teaches: bool, plays: bool
    ) -> Iterator[tuple[str, str]]:
        """Yields patterns of metrics, and why the run has none."""
        if not objective.needs_reference:
            yield "kl/reference", "the objective has no reference model"
        if not teaches:
            yield "distill/|source/.+/divergence", "teachers names none"
        if objective.mismatch is None:
            yield "mismatch/(weight|dropped)", "objective.mismatch is null"
        if not (isinstance(objective.trust_region, Clip) and objective.trust_region.is_auto):
            yield "clip/(bound|slope|length)", "objective.trust_region has no auto bound"
        if objective.trust_region.kind == "none":
            yield "clip/(low|high|share)", "objective.trust_region.kind = none"
        if rollout.replay is not None:
            drawn = "groups/(carried|drawn|filtered|kept)|staleness/dropped"
            yield f"accuracy/|canary/|eval/|heldout/|idle/|{drawn}", "rollout.replay starts no server"
        if not rollout.canary.every:
            yield "canary/", "rollout.canary.every = 0"
        of = None if objective.distill is None else objective.distill.of
        if of not in ("all", "top_k"):
            yield "distill/agreement", "objective.distill.of is neither all nor top_k"
        if of != "top_k":
            yield "distill/mass", "objective.distill.of is not top_k"
        numbers = "|".join(map(str, range(1, self.updates_per_step + 1)))
        yield rf"clip/share_u(?!({numbers})$)", f"a step has {self.updates_per_step} updates"
        if not objective.selects_tokens:
            yield "mask/fraction|kl/masked|entropy/delta_(un)?masked", "the objective selects no tokens"
        if not rollout.sampling.truncates:
            yield "sampling/", "rollout.sampling leaves every token possible"
        if not engine.noise_every:
            yield "(entropy|ratio|sequence_ratio)/noise/", "engine.noise_every = 0"
        if engine.moe_balance.kind != "aux_loss":
            yield "moe/aux_loss", f"engine.moe_balance.kind = {engine.moe_balance.kind}"
        if not rollout.server.routing_replay:
            yield r"moe/(layer_\d+/)?replay_differs", "rollout.server.routing_replay = false"
        if not plays and rollout.collect is None and rollout.replay is None:
            yield "environment/", "the run has no environment"
        if self.schedule == "sync":
            yield "staleness/dropped", "train.schedule = sync"
        else:
            yield r"groups/(carried|carried_in|drawn|kept|filtered/.+)$", "train.schedule = overlap"
        if rollout.filter_groups is None and (self.schedule == "overlap" or not rollout.partial):
            yield r"groups/(carried|carried_in|drawn|filtered|kept)(/|$)", "rollout.filter_groups is null"

    def _faults(self) -> Iterator[str]:
        if self.rollback is not None and not self.save_every:
            yield "rollback goes back to a checkpoint, but save_every = 0 writes none on the way; set save_every"
        yield from self._idle(("max_staleness", "stale", "kv_cache"), "schedule", "overlap")
        if self.resume_from is not None and not self.resume:
            yield f"resume_from = {self.resume_from} has no effect without resume; set train.resume = true"
        if self.resume_from is not None and not re.fullmatch(r"(.*/)?step_\d{6,}/?", self.resume_from):
            yield f"resume_from = {self.resume_from!r} is no checkpoint; give a name such as step_000040, or a path to it"


Decay = Annotated[float, Field(ge=0, lt=1)]
MomentDtype = Literal["float32", "bfloat16", "float16", "fp8"]

STALLS_AT: Mapping[MomentDtype, float] = MappingProxyType(
    {"float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11, "fp8": 2**-4}
)
"""Half of a dtype's largest relative step: a running mean that loses less per step may never change."""


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-6
    """Adam's learning rate after warm-up. The default suits billions of parameters; the tiny example uses 5e-5."""

    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear rise from 0 to ``lr``."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: ``constant``, or a line or half cosine down to ``min_lr`` at the end."""

    min_lr: NonNegativeFloat = 0.0
    """Final learning rate of ``linear`` and ``cosine``; at most ``lr``."""

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay per optimizer step of Adam's means of the gradient and its square. Usual for language models: 0.95."""

    eps: PositiveFloat = 1e-8
    """Adam's ε, added to the root of the mean square."""

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled (AdamW), not of norms and biases. 0, since RL is short and starts from a trained model."""

    clip_grad: NonNegativeFloat = 1.0
    """Bounds the whole gradient's norm. 0: no clipping."""

    distributed: bool = False
    """Shard optimizer states over data- and context-parallel ranks (Megatron's). Fields below need it."""

    exp_avg_dtype: MomentDtype = "float32"
    """Dtype of Adam's mean gradient between steps. Needs a GPU and Transformer Engine."""

    exp_avg_sq_dtype: MomentDtype = "float32"
    """As ``exp_avg_dtype``, for the mean square."""

    store_param_remainders: bool = False
    """Store only the 16 bits of an fp32 weight that bfloat16 lacks. Needs Transformer Engine."""

    offload_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of weights that Adam updates in host memory, 20 bytes each: Megatron's hybrid."""

    @property
    def precision_aware(self) -> bool:
        """True if Transformer Engine's Adam keeps states below fp32."""
        return self.store_param_remainders or (self.exp_avg_dtype, self.exp_avg_sq_dtype) != ("float32", "float32")

    @property
    def own_masters(self) -> bool:
        """True if fp32 weights are in Adam itself, not in Megatron's optimizer."""
        return self.precision_aware or self.offload_fraction > 0

    def _faults(self) -> Iterator[str]:
        if self.min_lr > self.lr:
            yield f"min_lr = {self.min_lr:g} is more than lr = {self.lr:g}; lower min_lr, or raise lr"
        if self.schedule == "constant":
            yield from self._idle(["min_lr"], "schedule", "linear")
        if not self.own_masters:
            return
        name = "offload_fraction" if self.offload_fraction else self.reduced_fields[0]
        if not self.distributed:
            yield f"{name} = {getattr(self, name)} needs optimizer.distributed = true; set it, or leave {name} out"
        if self.offload_fraction and self.precision_aware:
            yield f"{self.reduced_fields[0]} with offload_fraction, whose states are fp32 on the host; leave one of them out"
        for number, name in enumerate(("exp_avg_dtype", "exp_avg_sq_dtype")):
            dtype: MomentDtype = getattr(self, name)
            lost = 1 - self.betas[number]
            if dtype != "float32" and lost <= STALLS_AT[dtype]:
                beta = f"betas[{number}]"
                yield (
                    f"{name} = {dtype} with {beta} = {self.betas[number]:g}: {dtype} rounds a step of {lost:.2g} of the mean "
                    f"away, so that it never falls; set {name} to more bits, or {beta} below {1 - STALLS_AT[dtype]:g}"
                )

    @property
    def reduced_fields(self) -> tuple[str, ...]:
        dtypes = [name for name in ("exp_avg_dtype", "exp_avg_sq_dtype") if getattr(self, name) != "float32"]
        return (*dtypes, *(["store_param_remainders"] if self.store_param_remainders else []))


Name = Annotated[str, Field(min_length=1, max_length=250)]
Tag = Annotated[str, Field(min_length=1, max_length=64)]


class _WandbConfig(Section):
    """A Weights & Biases run of ``metrics.jsonl`` and the configuration without secrets. Needs ``tepo-megatron[wandb]``, and
    ``wandb login`` or WANDB_API_KEY.
    """

    project: Annotated[str, Field(min_length=1, max_length=128)]
    """W&B project of the run."""

    entity: Name | None = None
    """User or team that owns the project. null: W&B's default."""

    name: Name | None = None
    """Run name in W&B. null: the run's ``name``."""

    group: Name | None = None
    """Group in W&B, such as the seeds of one setting."""

    tags: tuple[Tag, ...] = ()
    """Tags of the run."""

    mode: Literal["online", "offline"] | None = None
    """``offline``: in ``OUT/wandb`` until ``wandb sync``. ``online``: sent at once, offline if W&B is never reached. null:
    WANDB_MODE or ``wandb offline``, else ``online``."""

    def _faults(self) -> Iterator[str]:
        if wrong := [character for character in "/\\#?%:" if character in self.project]:
            yield f"W&B takes no {' '.join(wrong)} in the name of a project; leave it out, and name a team in entity"


class _MlflowConfig(Section):
    """An MLflow run: the rows of ``metrics.jsonl``, the configuration as parameters. Needs ``tepo-megatron[mlflow]``."""

    experiment_name: Name
    """MLflow experiment; made if missing."""

    run_name: Name | None = None
    """Run name in MLflow. null: the run's ``name``."""

    tracking_uri: str | None = None
    """Server, or database such as ``sqlite:////shared/mlflow.db``. null: MLFLOW_TRACKING_URI, else ``OUT/mlflow/mlflow.db``."""

    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the run."""

    @field_validator("tracking_uri")
    @classmethod
    def _uri_has_a_scheme_and_no_password(cls, uri: str | None) -> str | None:
        if uri is None:
            return uri
        try:
            parts = urlsplit(uri)
            password = parts.password
        except ValueError as error:
            raise ValueError(f"{uri!r} is no address: {error}") from error
        if password is not None:
            raise ValueError(
                "an address with a password in it would be kept in the run's folder; give the password by "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or the whole by MLFLOW_TRACKING_URI"
            )
        if not parts.scheme or parts.scheme == "file":
            raise ValueError(
                f"{uri!r} is a folder, which MLflow 3 cannot write to; give a database (sqlite:////path/mlflow.db) or a server"
            )
        return uri


class LogConfig(Section):
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """``live``: redraws itself; ``plain``: a line per step; ``none``: errors only. ``auto``: live on a terminal, else plain."""

    tensorboard: bool = True
    """Write TensorBoard events to ``<output>/tensorboard``."""

    curves: bool = True
    """Draw ``<output>/curves.png`` at the end, which takes seconds; ``tepo plot`` draws it at any time."""

    wandb: _WandbConfig | None = None
    """Also log to Weights & Biases. null: off."""

    mlflow: _MlflowConfig | None = None
    """Also log to MLflow. null: off."""

    finish_timeout_s: Seconds = 30.0
    """Seconds that the end waits for W&B and MLflow; rows not accepted stay in ``metrics.jsonl``."""

    train_samples: NonNegativeInt = 0
    """A step's first responses in ``train_samples.jsonl``. 0: none; ``rollout.record`` keeps all, with tokens."""

    token_samples: NonNegativeInt = 0
    """A step's first groups, by token, in ``<output>/tokens``, for ``tepo report``: log-probs of sampler and trainer, entropy
    and its change, advantage, mask, ratio, version. About 20 bytes a token; 0: none.
    """

    token_samples_every: PositiveInt = 10
    """Steps between files of ``token_samples``."""

    def records_tokens(self, step: int) -> bool:
        """``step``: completed steps, as in its row."""
        return bool(self.token_samples) and step % self.token_samples_every == 0


_METRICS = """
    canary/cache_gap|drift|max_logprob_gap|mean_logprob_gap|p90_logprob_gap|read_back
    canary/rollouts_max_gap|rollouts_mean_gap|rollouts_worst_group
    clip/bound_high|bound_low|high|length|low|share|share_q1|share_q2|share_q3|share_q4|slope_high|slope_low
    distill/agreement|divergence|divergence_q1|divergence_q2|divergence_q3|divergence_q4|mass
    entropy/delta|delta_masked|delta_unmasked|mean|noise/p50|noise/p90|noise/p99
    environment/new_histories|restarts|seconds|tokens|tool_errors|turns ess grad_norm
    groups/carried|carried_in|drawn|dropped|filtered|kept|zero_variance idle/servers|trainer kl/masked|mean|reference log/failed
    loss lost/resume|rollback|server|skipped lr mask/fraction memory/offloaded_gib|peak_gib mismatch/dropped|kl|weight
    moe/aux_loss|load_entropy|max_violation|max_violation/worst|replay_differs
    ratio/max|mean|min|noise/p50|noise/p90|noise/p99|sigma requests/retried response_len/mean|truncated response_tokens
    reward/failed|mean|overlong|std rollback/count sampling/kept_max|kept_mean sequence_ratio/noise/p50|noise/p90|noise/p99
    servers/restarts|timeouts staleness/dropped|max|mean|versions
    time/canary|eval|journal|other|reward|rollout|save_stage|save_waited|save_write|score|step|sync|update tokens/s
    update/skipped weights_version/max|min
"""
TRAINING = {
    f"{head}{slash}{name}"
    for head, slash, names in (item.partition("/") for item in _METRICS.split())
    for name in names.split("|")
}
OF_UPDATES = re.compile(
    r"(clip|distill|entropy|kl|mask|mismatch|ratio|sampling)/(?!noise/).+|reward/(mean|std)|response_len/mean|response_tokens"
    r"|groups/zero_variance|ess|grad_norm|loss|lr|update/skipped"
)
NUMBERED = re.compile(
    r"source/.+/(divergence|reward|share)|groups/filtered/.+|clip/share_u\d+|moe/layer_\d+/.+|staleness/kl_\d+"
)

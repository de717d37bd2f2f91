"""A whole run's configuration, with checks across sections."""

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, field_validator

from tepo_megatron.config.base import Section
from tepo_megatron.config.cluster import ClusterConfig
from tepo_megatron.config.data import BUILTIN, DataConfig, EvaluateConfig, Sources
from tepo_megatron.config.engine import EngineConfig, ModelConfig
from tepo_megatron.config.objective.choices import Clip, GDPOAdvantage
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.config.reward import EnvironmentConfig, RewardConfig
from tepo_megatron.config.rollout import RolloutConfig, ServerConfig
from tepo_megatron.config.teachers import TeacherConfig
from tepo_megatron.config.train import NUMBERED, OF_UPDATES, TRAINING, LogConfig, OptimizerConfig, TrainConfig

_MAX_SERVED_RANK = 512  # vLLM 0.32's limit


class RunConfig(Section):
    """All settings of a run: the sections of its YAML. Made by `load_run`, immutable, checked as a whole."""

    name: Annotated[str, Field(min_length=1, max_length=200)] = "run"
    """Name in progress views, pictures and plans: printable, without slash."""

    output: Path = Path("out/run")
    """The run's folder; not in /proc, /sys or /dev, except /dev/shm."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of everything random. On CPUs equal seed and rollouts give equal weights, bit for bit."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig | None = None
    """Default: none; responses are one turn, scored by ``reward.verifier``."""

    objective: ObjectiveConfig = ObjectiveConfig()
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Frozen models by name. A source of ``data.train`` names its own if there are several."""

    engine: EngineConfig = EngineConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    log: LogConfig = LogConfig()
    cluster: ClusterConfig = ClusterConfig()

    def teacher_logs(self, name: str) -> Path:
        return self.output / "logs" / f"teacher-{name}"

    def teacher_of(self, source: str) -> str | None:
        only = next(iter(self.teachers)) if len(self.teachers) == 1 else None
        return next((item.teacher for item in self.data.train_sources if item.called == source and item.teacher), only)

    @property
    def teacher_workers(self) -> int:
        return sum(teacher.local_workers for teacher in self.teachers.values())

    @property
    def adapter_rank(self) -> int | None:
        """None if servers get merged weights."""
        lora = self.model.lora
        return lora.rank if lora is not None and lora.serve == "adapter" and self.rollout.replay is None else None

    def dtype(self, gpus: int = 1) -> str:
        """``model.dtype``; ``auto`` by the machine's GPUs, which a plan assumes."""
        automatic = "bfloat16" if self.engine.platform == "cuda" or (gpus and self.engine.wants_gpus) else "float32"
        return automatic if self.model.dtype == "auto" else self.model.dtype

    def with_dtype(self, dtype: str) -> Self:
        """Raises ValueError if other fields need another one."""
        if dtype == self.model.dtype:
            return self
        changed = self.model_copy(update={"model": self.model.model_copy(update={"dtype": dtype})})
        for fault in changed._faults():
            raise ValueError(fault)
        return changed

    @property
    def is_colocated(self) -> bool:
        return self.rollout.server.placement == "colocated" and self.rollout.replay is None

    @property
    def fewest_sequences(self) -> int:
        """A group of micro-batches per data-parallel rank, for all mini-batches."""
        parallel = self.engine.parallel
        return self.train.minibatches * parallel.dp * parallel.micro_batch_group

    def most_stale(self, step: int) -> int:
        train = self.train
        if train.schedule == "sync":
            return step if self.rollout.oversample > 1 else 0  # groups carried over may be of any age
        return train.max_staleness if train.stale == "drop" else step

    def require_data(self) -> None:
        """Raises ValueError if a user's model would train on built-in problems that the user did not name."""
        own_model = not self.model.path.startswith(BUILTIN)
        if own_model and self.rollout.replay is None and "train" not in self.data.model_fields_set:
            raise ValueError(
                f"data.train is not given, and model.path = {self.model.path} is a model of your own: it would be trained on "
                f"the demonstration's sums; give data.train = FILE (docs/guides/bring-your-own.md), or data.train = "
                f"{_show_paths(self.data.train)} if you mean them"
            )

    def model_post_init(self, _: Any) -> None:
        """Without held-out problems ``evaluate.every`` is 0; custom training problems bring no built-in ones."""
        data, evaluate, log = self.data, self.evaluate, self.log
        if "heldout" not in data.model_fields_set and _is_custom(data.train):
            data = data.model_copy(update={"heldout": None})
        if data.heldout is None and "every" not in evaluate.model_fields_set and not evaluate.sets:
            evaluate = evaluate.model_copy(update={"every": 0})
            warnings.warn(
                "no held-out problems (data.heldout): nothing is evaluated. Give a file of problems that are not trained on, "
                "or set evaluate.every = 0 to say that you mean it",
                stacklevel=2,
            )
        if log.token_samples and "token_samples_every" not in log.model_fields_set:
            log = log.model_copy(update={"token_samples_every": min(log.token_samples_every, self.train.steps)})
        self.__dict__.update(data=data, evaluate=evaluate, log=log)  # the model is frozen

    @field_validator("name")
    @classmethod
    def _name_can_be_shown(cls, name: str) -> str:
        wrong = next((item for item in name if not item.isprintable() or item == "/"), None)
        if wrong is not None:
            raise ValueError(f"a name has printable characters but the slash, not U+{ord(wrong):04X}; output names the folder")
        return name

    @field_validator("output")
    @classmethod
    def _output_is_on_a_disk(cls, output: Path) -> Path:
        parts = Path(os.path.realpath(output)).parts
        if parts[1:2] in [("proc",), ("sys",), ("dev",)] and parts[:3] != ("/", "dev", "shm"):
            raise ValueError(f"a run cannot write to the system's own /{parts[1]}; name a folder on a disk")
        return output

    def _training_faults(self) -> Iterator[str]:
        train, heldout = self.data.train, self.data.heldout
        if heldout is not None and _is_custom(train) != _is_custom(heldout):
            yield (
                f"data.train = {_show_paths(train)} with data.heldout = {_show_paths(heldout)}: one is your own, the other the "
                "demonstration's; give both, or data.heldout = null"
            )
        if self.train.keep_best is not None:
            yield from self.metric_faults("train.keep_best.metric", self.train.keep_best.metric)
        if self.train.rollback is not None:
            yield from self.metric_faults("train.rollback.metric", self.train.rollback.metric)
        for callback in self.train.callbacks:
            name, kwargs = (callback, {}) if isinstance(callback, str) else (callback.callback, callback.kwargs)
            if name == "early_stopping":
                yield from self.metric_faults("the metric of early_stopping", str(kwargs.get("metric", "accuracy/greedy")))

    def metric_faults(self, field: str, metric: str) -> Iterator[str]:
        """Yields why no row of this run can have the metric, which ``field`` names."""
        names = self.reward.weights or ()
        verifiers = [self.reward.verifier, *(item.verifier or "" for item in self.data.train_sources)]
        # whose components are not known yet
        others = (
            self.environment is not None or ":" in "".join(verifiers) or self.rollout.collect is not None or self.rollout.replay
        )
        any_name = (not names and others) or any(source.verifier_weights for source in self.data.train_sources)
        known = TRAINING | _evaluated(self) | {f"reward/{name}" for name in names}
        of_updates = field == "train.rollback.metric"  # it is looked at before the step is evaluated and its row is whole
        if of_updates:
            known = {name for name in known if OF_UPDATES.fullmatch(name)}
        elif any_name and re.fullmatch(r"reward/\w+", metric):
            return
        is_later = of_updates and metric in TRAINING - known  # of a row, but not looked at by a rollback
        has = {"teaches": bool(self.teachers), "plays": self.environment is not None}
        never = () if is_later else self.train.never_written(self.objective, self.rollout, self.engine, **has)
        for pattern, reason in never:
            if re.match(pattern, metric):
                yield f"{field} = {metric} is in no row, since {reason}; name another metric"
        if NUMBERED.fullmatch(metric) and (not of_updates or metric.startswith("clip/")):
            return
        evaluate, measured = self.evaluate, f"{field} = {metric} is measured"
        if metric.startswith("eval/"):
            name = metric.split("/")[1]
            if name not in evaluate.sets:
                yield f"{measured} on evaluate.sets.{name}, which is not given"
                return
            if not evaluate.every_of(name):
                yield f"{measured} on evaluate.sets.{name}, which is never evaluated; set its every"
        if metric.startswith(("accuracy/", "heldout/")):
            if self.data.heldout is None:
                yield f"{measured} on data.heldout, which is not given; give it, or another metric"
            if not evaluate.every:
                yield f"{measured} by evaluations, but evaluate.every = 0 makes none; set evaluate.every, or another metric"
        if metric not in known:
            near = get_close_matches(metric, sorted(name for name in known if "@k" not in name), n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else "docs/reference/metrics.md has them"
            what = "figure of the updates" if of_updates else "metric of this run"
            yield f"{field} = {metric} is no {what}; {hint}"

    def _faults(self) -> Iterator[str]:
        yield from _engine_faults(self)
        yield from _cluster_faults(self)
        yield from _optimizer_faults(self)
        yield from _objective_faults(self)
        yield from TeacherConfig.faults_among(self.teachers, self.objective, self.data, self.rollout)
        yield from _evaluation_faults(self)
        yield from _reward_faults(self)
        yield from _rollout_faults(self)
        if self.environment is not None and self.rollout.replay is None:
            yield from _environment_faults(self, self.environment)
        if self.model.lora is not None and self.model.lora.serve == "adapter":
            yield from _adapter_faults(self.rollout.server, self.model.lora.rank)


def _is_custom(sources: Sources) -> bool:
    paths = [sources] if isinstance(sources, str) else [source.path for source in sources]
    return not all(path.startswith(BUILTIN) for path in paths)


def _show_paths(value: Sources) -> str:
    return value if isinstance(value, str) else ", ".join(source.path for source in value)


def _engine_faults(run: RunConfig) -> Iterator[str]:
    parallel, fp8, dtype = run.engine.parallel, run.engine.fp8, run.dtype()
    if run.engine.moe_balance.kind == "expert_bias" and run.model.lora is not None:
        yield "engine.moe_balance.kind = expert_bias moves biases of the model, which model.lora leaves as it is; leave one out"
    sequences = run.rollout.responses_per_step
    if sequences < run.fewest_sequences:
        group = f", {parallel.pp} for each, as engine.parallel.vpp = {parallel.vpp} needs" if parallel.vpp > 1 else ""
        yield (
            f"{sequences} rollouts a step cannot fill train.minibatches = {run.train.minibatches} on engine.parallel.dp = "
            f"{parallel.dp} ranks{group}; raise rollout.prompts_per_step or samples_per_prompt, or lower train.minibatches"
        )
    has_te = run.engine.layers == "te" or (run.engine.layers == "auto" and run.engine.platform == "cuda")
    if dtype == "float32" and has_te:
        yield (
            "model.dtype = float32, which Transformer Engine multiplies in TF32, coarser than the bounds on float32; "
            "set model.dtype = bfloat16, or engine.layers = local"
        )
    if fp8.enabled and dtype != "bfloat16":
        yield f"engine.fp8.recipe = {fp8.recipe} with model.dtype = {dtype}: FP8 layers take bfloat16; set that"
    if fp8.enabled and run.model.lora is not None:
        yield f"model.lora with engine.fp8.recipe = {fp8.recipe}, which would not quantise merged weights again; leave one out"
    if fp8.params and not run.optimizer.distributed:
        yield "engine.fp8.params = true needs optimizer.distributed = true, whose fp32 masters make FP8 weights; set it"
    if fp8.params and run.is_colocated:
        yield f"engine.fp8.params = true with {_COLOCATED}: FP8 weights {_STAY_ON_GPU}; set it to false, or another placement"


_COLOCATED = "rollout.server.placement = colocated"
_STAY_ON_GPU = "cannot leave the GPU for the servers' turn"


def _cluster_faults(run: RunConfig) -> Iterator[str]:
    spares = f"cluster.spare_nodes = {run.cluster.spare_nodes}"
    if run.cluster.spare_nodes and not run.train.max_restarts:
        yield f"{spares} replace a node when the ranks start again, and train.max_restarts = 0; set it to 3"
    if run.cluster.spare_nodes and run.cluster.train_nodes == 1:
        yield f"{spares} cannot replace the first node, and cluster.train_nodes = 1; set cluster.spare_nodes to 0"
    cluster, server, name = run.cluster, run.rollout.server, f"cluster.executor = {run.cluster.executor}"
    if run.engine.platform == "cpu":
        return
    if cluster.skypilot is not None and cluster.skypilot.gpus is None:
        yield f"{name} needs the name of the GPU; set cluster.skypilot.gpus, such as H100"
    gpus = run.engine.parallel.world_size + server.tp * server.count + run.teacher_workers
    if cluster.is_one_machine and cluster.rollout_nodes and gpus > cluster.gpus_per_node:
        yield (
            f"{name} and cluster.gpus_per_node = {cluster.gpus_per_node}, but ranks and workers of servers need {gpus}; "
            "make them fewer, or set cluster.rollout_nodes to 0 and rollout.server.placement to colocated"
        )


def _optimizer_faults(run: RunConfig) -> Iterator[str]:
    optimizer, engine, dtype = run.optimizer, run.engine, run.dtype()
    name = "offload_fraction" if optimizer.offload_fraction else next(iter(optimizer.reduced_fields), "")
    if optimizer.own_masters and engine.fp8.params:
        yield f"optimizer.{name} with engine.fp8.params = true, which needs masters outside of Adam; leave one of them out"
    if optimizer.precision_aware and engine.platform == "cpu":
        yield f"optimizer.{name} needs Transformer Engine's Adam on a GPU, and engine.platform = cpu; leave it out"
    if optimizer.own_masters and dtype != "bfloat16":
        yield f"optimizer.{name} with model.dtype = {dtype}: its Adam has fp32 masters of bfloat16 weights; set that dtype"
    if run.is_colocated and "fp8" in (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype):
        yield f"optimizer.exp_avg_dtype or exp_avg_sq_dtype = fp8 with {_COLOCATED}: FP8 {_STAY_ON_GPU}; use bfloat16"
    if engine.overlap_param_gather and not optimizer.distributed:
        yield "engine.overlap_param_gather = true gathers weights, and only optimizer.distributed = true shares them; set it"
    if engine.overlap_param_gather and engine.fp8.params and engine.fp8.recipe == "mxfp8":
        yield (
            "engine.overlap_param_gather = true with engine.fp8.params = true and recipe = mxfp8: Megatron-Core gathers these "
            "weights in the gradients' memory, which the next update clears first; set it to false"
        )


def _objective_faults(run: RunConfig) -> Iterator[str]:
    objective, once = run.objective, run.train.updates_per_step == 1
    if "entropy_noise" in objective.needs and not run.engine.noise_every:
        yield "objective.kl_mask.tolerance = auto takes measured noise, and engine.noise_every = 0 measures none; set it to 50"
    has_overlong = getattr(objective.advantage, "overlong", None) is not None
    if run.rollout.truncated == "penalise" and has_overlong:
        yield (
            "objective.advantage.overlong and rollout.overlong would each subtract DAPO's penalty; leave the first out, or set "
            "rollout.truncated = train and rollout.overlong = null"
        )
    if run.rollout.truncated == "mask" and has_overlong:
        yield (
            "objective.advantage.overlong counts trained tokens, and rollout.truncated = mask trains on no cut response: the "
            "longest would not be penalised; set rollout.truncated = train, or leave overlong out"
        )
    if once and isinstance(objective.trust_region, Clip) and objective.trust_region.is_auto:
        yield "objective.trust_region has auto bounds, and with one update a step every ratio is 1; set train.minibatches = 4"
    for name, reason in objective.idle_in_first_update() if once else ():
        warnings.warn(
            f"objective.{name} adds nothing with train.minibatches = 1 and one pass: at a step's only update "
            f"{reason}; 4 is usual",
            stacklevel=2,
        )


def _evaluation_faults(run: RunConfig) -> Iterator[str]:
    evaluate, log = run.evaluate, run.log
    if run.data.heldout is None and evaluate.every and not evaluate.sets:
        yield f"evaluate.every = {evaluate.every}, but there are no held-out problems; give data.heldout or evaluate.sets"
    if run.rollout.samples_per_prompt == 1 and run.objective.compares_responses:
        yield "rollout.samples_per_prompt = 1: an advantage compares the responses to one prompt; set 2 or more, 8 is usual"
    if log.token_samples and log.token_samples_every > run.train.steps:
        yield f"log.token_samples_every = {log.token_samples_every} is more than train.steps = {run.train.steps}; lower it"
    if run.rollout.server.speculative is not None:
        values = {"rollout": run.rollout.sampling.min_p}
        values |= {f"evaluate.sets.{name}": item.sampling.min_p or 0.0 for name, item in evaluate.sets.items()}
        for field, value in values.items():
            if value:
                yield f"{field}.sampling.min_p = {value:g}, which vLLM refuses with rollout.server.speculative; leave one out"


def _evaluated(run: RunConfig) -> set[str]:
    def sampled(n: int, ks: Iterable[int], names: Iterable[str]) -> set[str]:
        return {f"avg@{n}", *(f"{name}@{k}" for k in ks for name in names if k > 1 or name == "pass")} if n else set()

    samples = run.evaluate.samples
    names = {f"accuracy/{name}" for name in {"greedy", *sampled(samples, [samples], ["pass"])}}
    names |= {"accuracy/avg@k", "accuracy/pass@k"} if samples else set()
    names |= {"heldout/reward_greedy", *(["heldout/reward_sampled"] if samples else [])}
    for name, item in run.evaluate.sets.items():
        n = samples if item.samples is None else item.samples
        programs = item.majority == "auto" and (item.verifier or run.reward.verifier) in ("python_tests", "stack_machine")
        votes = [] if programs or item.majority == "none" else ["maj"]
        figures = {"response_len", "truncated", "failed", *sampled(n, item.k or (n,), ["pass", *votes])}
        figures |= {"reward_sampled"} if n else set()
        names |= {f"eval/{name}/{figure}" for figure in figures | ({"greedy", "reward_greedy"} if item.greedy else set())}
    return names


_READS_NO_PENALTY = {
    "gdpo": "needs a component of its own for length",
    "divide_by_mean": "divides by their mean",
    "teacher": "does not read them",
}


def _reward_faults(run: RunConfig) -> Iterator[str]:
    advantage, data = run.objective.advantage, run.data
    if isinstance(advantage, GDPOAdvantage):
        yield from _gdpo_faults(run, advantage.weights, run.reward.weights)
    if run.rollout.truncated == "penalise" and advantage.kind in _READS_NO_PENALTY:
        reason = _READS_NO_PENALTY[advantage.kind]
        yield (
            f"rollout.truncated = penalise makes rewards lower, or negative, and objective.advantage.kind = {advantage.kind} "
            f"{reason}; set rollout.truncated = mask, or another advantage"
        )
    failed = run.reward.failed_reward
    if failed is not None and failed < 0 and advantage.kind == "divide_by_mean":
        yield (
            f"reward.failed_reward = {failed:g} is negative, and objective.advantage.kind = divide_by_mean "
            f"{_READS_NO_PENALTY[advantage.kind]}; set it to 0 or more, or set another advantage"
        )
    verifiers = {"reward.verifier": run.reward.verifier}
    verifiers |= {f"evaluate.sets.{name}.verifier": item.verifier or "" for name, item in run.evaluate.sets.items()}
    for item in (*data.train_sources, *data.heldout_sources):
        verifiers[f"the verifier of the source {item.called}"] = item.verifier or ""
    judged = [] if run.environment is not None else [f"data.heldout = {path}" for path in data.heldout_without_verifier]
    judged += [f"evaluate.sets.{name}" for name, item in run.evaluate.sets.items() if item.verifier is None]
    all_have_one = run.environment is not None or len(data.source_verifiers) == len(data.train_sources)
    if judged and all_have_one and "verifier" not in run.reward.model_fields_set:
        yield (
            f"{judged[0]} has no verifier, and nothing of data.train is scored by reward.verifier: its default, "
            f"{run.reward.verifier}, would score it; give it a verifier, or without an environment reward.verifier"
        )
    field = next((field for field, verifier in verifiers.items() if verifier == "python_tests"), None)
    if field is not None and not run.reward.run_code:
        yield f"{field} = python_tests runs programs that the model writes; set reward.run_code = true if you mean it"
    if field is not None and run.reward.network:
        yield f"{field} = python_tests has no network; leave reward.network out"


def _gdpo_faults(run: RunConfig, over: tuple[float, ...] | None, weights: Mapping[str, float] | None) -> Iterator[str]:
    """GDPO weighs normalised components by ``over``, a plain reward raw ones by ``weights``."""
    if source := next(iter(run.data.source_verifiers), None):
        yield (
            f"objective.advantage.kind = gdpo weighs the components that one verifier returns, and the source {source} of "
            "data.train has a verifier of its own; set another advantage, or reward.verifier for all sources"
        )
    if over is None:
        if weights is not None and len(set(weights.values())) > 1:
            values = ", ".join(f"{weight:g}" for weight in weights.values())
            yield (
                "reward.weights differ, but objective.advantage.kind = gdpo without weights weighs all components the "
                f"same; set objective.advantage.weights=[{values}], in this order, or reward.weights to 1 each"
            )
    elif len(weights or ()) != len(over):
        named = f"{len(weights)} components: {', '.join(weights)}" if weights else "none"
        yield (
            f"objective.advantage.weights has {len(over)} entries, and reward.weights names {named}; a run has one reward for "
            "each response unless reward.weights names the components that reward.verifier returns: give an entry for each, in "
            "this order, or leave the entries out"
        )


def _rollout_faults(run: RunConfig) -> Iterator[str]:
    rollout, server, overlap = run.rollout, run.rollout.server, run.train.schedule == "overlap"
    uncorrected = run.objective.mismatch is None and not rollout.uncorrected
    remedy = "set objective.mismatch.kind = truncate, or rollout.uncorrected = true to train without a correction"
    biases = f"which biases the gradient; {remedy}"
    if rollout.oversample > 1 and uncorrected:
        yield f"rollout.oversample = {rollout.oversample:g} trains on older weights' groups, {biases}"
    if run.adapter_rank is None:
        yield from rollout.shard_faults()
    if run.train.rollback is not None and rollout.replay is not None:
        yield "train.rollback with rollout.replay: the same rollouts would be read again; leave one of them out"
    if overlap and server.placement == "colocated":
        yield f"train.schedule = overlap with {_COLOCATED}, whose servers take turns with the trainer; set another placement"
    if overlap and uncorrected:
        yield (
            f"objective.mismatch = null with train.schedule = overlap: train.max_staleness = {run.train.max_staleness} lets "
            f"older weights draw the rollouts, which preset {run.objective.preset} does not correct; {remedy}"
        )
    servers = {"rollout.server": server}
    servers |= {f"teachers.{name}.server": item.served for name, item in run.teachers.items() if item.place == "server"}
    for field, item in servers.items():
        if overlap and item.cpu_threads == "all" and item.placement == "local":
            yield f"{field}.cpu_threads = all with train.schedule = overlap leaves the trainer no core; name some, such as 0"
        dtype, bfloat16 = item.served_dtype(run.dtype()), f"set {field}.dtype = bfloat16"
        if item.head_dtype == dtype:
            yield f"{field}.head_dtype = {item.head_dtype} does nothing for servers in {dtype}; leave it out, or {bfloat16}"
        if item.quantization != "none" and dtype != "bfloat16":
            yield f"{field}.quantization = {item.quantization} takes servers in bfloat16, not {dtype}; {bfloat16}"
    if server.quantization != "none" and uncorrected:
        yield f"rollout.server.quantization = {server.quantization} samples from another distribution, {biases}"


def _environment_faults(run: RunConfig, environment: EnvironmentConfig) -> Iterator[str]:
    default, name = RewardConfig(), f"environment.name = {environment.name}"
    judged = "rewards come from the environment; leave"
    if (run.reward.verifier, run.reward.kwargs) != (default.verifier, default.kwargs):  # resolved.yaml names the default too
        yield f"reward.verifier = {run.reward.verifier} with {name}: {judged} reward.verifier and reward.kwargs out"
    if source := next(iter(run.data.source_verifiers), None):
        yield f"the source {source} of data.train has a verifier, with {name}: {judged} it out"
    if run.rollout.partial:
        yield "rollout.partial = true with environment: an episode cannot be put aside; leave partial out"
    if run.rollout.truncated == "penalise":
        yield "rollout.truncated = penalise with environment: max_new_tokens bounds a turn; set rollout.truncated = mask"
    if environment.max_tokens is not None and environment.max_tokens < 2:
        yield "environment.max_tokens = 1 leaves no room for an answer behind a turn; raise it"
    if run.rollout.collect is not None:
        yield f"rollout.collect = {run.rollout.collect} draws single responses, and {name} plays episodes; leave one out"
    overlaps = run.train.schedule == "overlap" and run.data.heldout is not None and run.evaluate.every
    if overlaps and (port := environment.agent_settings.port) and not environment.servers:
        yield f"train.schedule = overlap: evaluations cannot share environment.agent.port = {port}; set evaluate.every = 0"


def _adapter_faults(server: ServerConfig, rank: int) -> Iterator[str]:
    adapter, merged = "model.lora.serve = adapter", "set model.lora.serve = merged"
    if rank > _MAX_SERVED_RANK:
        yield f"{adapter} takes ranks up to {_MAX_SERVED_RANK}, and model.lora.rank = {rank}; {merged}"
    if server.placement == "colocated":
        yield f"{adapter} needs servers that keep their weights, and those of {_COLOCATED} free them; {merged}"
    if server.quantization != "none":
        yield f"{adapter} is for full precision, and rollout.server.quantization = {server.quantization}; {merged}"
    if server.drafts:
        yield f"{adapter} with rollout.server.speculative.draft_model has not been tested; {merged}, or leave the model out"
    if server.load_format == "dummy":
        yield f"{adapter} never sends the weights under the adapters; set rollout.server.load_format = auto instead of dummy"

"""Memory, traffic and time of a run before a GPU is requested, and its problems (docs/reference/plan.md). No torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations, product
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.plan.memory import GIB, HostMemory, RankMemory, TrainingRanks
from tepo_megatron.plan.shapes import model_parameters, resolve_spec
from tepo_megatron.plan.time import Lengths, ScheduleTime, ServerMemory, StepTime, SyncTraffic
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts import check_server_split, check_trainer_models

_DEFAULT_PROMPT_TOKENS = 512  # if ``data.max_prompt_tokens`` is unset

_USABLE = 0.9  # the allocator's gaps need the rest

_MAX_CHANGES_SHOWN = 4

_Settings = Mapping[str, Any]  # by dotted field names

_Knob = list[_Settings]  # alternative settings of the same fields


@dataclass(frozen=True)
class Plan:
    """Estimates are computed when first read. ``substitute``: an assumption about the model's shapes. ``servers_elsewhere``:
    ``config.cluster`` does not describe the GPUs of ``rollout.server``.
    """

    config: RunConfig
    spec: ModelSpec
    lengths: Lengths
    substitute: str | None = None
    servers_elsewhere: bool = False

    @classmethod
    def of(cls, config: RunConfig, spec: ModelSpec, *, servers_elsewhere: bool = False) -> Plan:
        return cls(config, spec, _lengths(spec, config, None, None), servers_elsewhere=servers_elsewhere)

    @cached_property
    def ranks(self) -> TrainingRanks:
        return TrainingRanks(self.spec, self.config)

    @property
    def parameters(self) -> int:
        return model_parameters(self.spec)

    @property
    def stage_parameters(self) -> tuple[int, ...]:
        """Counts one rank's parameters, by pipeline stage."""
        return tuple(count.total for count in self.ranks.split.stages())

    @cached_property
    def stages(self) -> tuple[RankMemory, ...]:
        stages = range(self.config.engine.parallel.pp)
        longest, tokens = self.lengths.longest, self._step_tokens
        return tuple(self.ranks.memory(stage, longest=longest, step_tokens=tokens) for stage in stages)

    @property
    def hosts(self) -> tuple[HostMemory, ...]:
        tokens = self._step_tokens
        return tuple(self.ranks.host_memory(stage, memory, step_tokens=tokens) for stage, memory in enumerate(self.stages))

    @cached_property
    def server(self) -> ServerMemory:
        return ServerMemory.of(self.spec, self.config, longest=self.lengths.longest, mean=self.lengths.mean)

    @cached_property
    def sync(self) -> SyncTraffic | None:
        return SyncTraffic.of(self.ranks) if self.config.rollout.replay is None else None

    @cached_property
    def time(self) -> StepTime:
        return self._time(self.sync)

    @property
    def worst(self) -> RankMemory:
        return max(self.stages, key=lambda memory: memory.total)

    @property
    def schedules(self) -> list[ScheduleTime]:
        return self.time.schedules(is_colocated=self.config.rollout.server.placement == "colocated")

    @property
    def usable_memory(self) -> float | None:
        """Bytes of a GPU; None on CPUs."""
        cluster, engine = self.config.cluster, self.config.engine
        return cluster.gpu_memory_gib * GIB * min(_USABLE, engine.gpu_memory_fraction) if engine.wants_gpus else None

    @cached_property
    def problems(self) -> tuple[str, ...]:
        return tuple(self._problems())

    @property
    def assumptions(self) -> tuple[str, ...]:
        return tuple(_assumptions(self))

    def check_exact(self) -> list[list[int]]:
        """Returns parameters as Megatron builds them, ``[pp_rank][tp_rank]``, in ten seconds for 70B.

        Raises RuntimeError if Megatron cannot run here, or a count differs from the formula.
        """
        parallel = self.config.engine.parallel
        request = {"spec": asdict(self.spec), "parallel": parallel.model_dump()}
        done = subprocess.run(
            [sys.executable, "-m", "tepo_megatron.trainer.megatron.model.parameter_count"],
            input=json.dumps(request),
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(
                f"--exact builds the model with Megatron-Core, which failed here ({why}); run it in the trainer's environment, "
                "or leave --exact out"
            )
        counts: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
        for pp_rank, (expected, row) in enumerate(zip(self.stage_parameters, counts, strict=True)):
            for tp_rank, count in enumerate(row):
                if count != expected:
                    raise RuntimeError(
                        f"Megatron builds {count:,} parameters on tp rank {tp_rank} of pipeline stage {pp_rank}, but the "
                        f"formula of this plan says {expected:,}; report this: the plan's memory is off by as much"
                    )
        return counts

    @property
    def _step_tokens(self) -> float:
        return self.config.rollout.responses_per_step * self.lengths.mean

    def _time(self, sync: SyncTraffic | None) -> StepTime:
        return StepTime.of(self.ranks, self.lengths, self.server, sync, self.hosts)

    @property
    def _host_problem(self) -> str | None:
        return self.ranks.host_problem(self.hosts, self._step_tokens)

    @property
    def _update_problem(self) -> str | None:
        stays = max(memory.weights + memory.context + memory.server for memory in self.stages)
        return self.server.update_problem(self.config, self.spec, stays)

    def _problems(self) -> Iterator[str]:
        config, worst, usable = self.config, self.worst, self.usable_memory
        if usable is not None:
            if worst.total > usable:
                largest = max(worst.terms, key=lambda name: worst.terms[name])
                yield (
                    f"a training rank needs {worst.total / GIB:.1f} GiB, {(worst.total - usable) / GIB:.1f} GiB more than the "
                    f"{usable / GIB:.1f} GiB usable of cluster.gpu_memory_gib = {config.cluster.gpu_memory_gib:g}; the largest "
                    f"term is {largest} with {worst.terms[largest] / GIB:.1f} GiB. {self._suggest(usable)}"
                )
            share, memory = config.rollout.server.gpu_memory_utilization, config.cluster.gpu_memory_gib * GIB
            if config.is_colocated and share * memory + worst.context > memory:
                yield (
                    f"a colocated server takes rollout.server.gpu_memory_utilization = {share:g} of a GPU, and the trainer "
                    f"keeps {worst.context / GIB:.1f} GiB of its {memory / GIB:g} for CUDA and NCCL; lower it to "
                    f"{int(100 * (1 - worst.context / memory)) / 100:g}"
                )
            if problem := self._host_problem:
                yield problem
        if config.rollout.replay is None:
            longest = self.lengths.longest
            if not self.servers_elsewhere:
                yield from self._server_problems("rollout.server", config.rollout.server, self.spec, self.server, longest)
                if problem := self._update_problem:
                    yield problem
            for field, served, spec in _served_teachers(config):
                path = config.teachers[field.split(".")[1]].path
                worker = ServerMemory.of(spec, config, longest=longest, mean=self.lengths.mean, server=served, path=path)
                # it scores a response only if its model could write one more token
                yield from self._server_problems(field, served, spec, worker, longest + 1)

    def _server_problems(
        self, field: str, server: ServerConfig, spec: ModelSpec, memory: ServerMemory, longest: int
    ) -> Iterator[str]:
        """vLLM starts only with a cache for one sequence of ``max_model_len``."""
        limit = server.max_model_len or spec.max_positions
        if memory.capacity >= limit:
            return
        share = f"{field}.{'gpu_memory_utilization' if self.config.engine.wants_gpus else 'cpu_kv_cache_gib'}"
        has = (
            f"a vLLM worker with {field}.tp = {server.tp} has {memory.kv_cache / GIB:.1f} GiB for its KV cache after "
            f"{(memory.weights + memory.draft) / GIB:.1f} GiB of weights"
        )
        if memory.capacity < longest:
            missing = longest * memory.kv_bytes_per_token - memory.kv_cache
            yield (
                f"{has}, which is {missing / GIB:.1f} GiB too little for one sequence of {longest} tokens; raise {field}.tp to "
                f"{2 * server.tp}, or {share}"
            )
        else:
            yield (
                f"{has}, which is {memory.capacity:.0f} tokens, and vLLM starts only with room for one sequence of "
                f"{field}.max_model_len, here {limit}; set that to {longest}, or raise {field}.tp or {share}"
            )

    def _suggest(self, usable: float) -> str:
        knobs = list(_knobs(self.config, self.spec, self.lengths.longest))
        for groups in ([(knob,) for knob in knobs], combinations(knobs, 2), [(knob,) for knob in _more_nodes(self.config)]):
            changes = [
                (values, plan)
                for group in groups
                for values in _settings_of(group)
                if (plan := self._changed(values)) is not None and plan.worst.total <= usable
            ]
            if changes:
                changes.sort(key=lambda change: ("optimizer.exp_avg_dtype" in change[0], change[1]._time(None).trainer_seconds))
                shown = (
                    f"{_shown(values)} ({plan.worst.total / GIB:.1f} GiB)" for values, plan in changes[:_MAX_CHANGES_SHOWN]
                )
                return f"It fits with {' or with '.join(shown)}"
        why = "No change of one or two fields makes it fit, not on four times the nodes either"
        return f"{why}; use larger GPUs or a smaller model"

    def _changed(self, values: _Settings) -> Plan | None:
        try:
            config = self.config.with_values(values)
            plan = Plan(config, self.spec, self.lengths)
            check_placement(config)
            _check_layout(plan.ranks)
        except ValueError:
            return None
        no_update = plan._update_problem and not self._update_problem
        return None if plan._host_problem or no_update else plan


def make_plan(config: RunConfig, *, prompt_tokens: float | None = None, response_tokens: float | None = None) -> Plan:
    """``prompt_tokens`` and ``response_tokens`` are means (default: half the longest).

    Raises ValueError for a run that cannot be laid out; if it does not fit, ``Plan.problems`` says why.
    """
    check_placement(config)
    spec, substitute = resolve_spec(config.model.path)
    _check_layout(TrainingRanks(spec, config))
    lengths = _lengths(spec, config, prompt_tokens, response_tokens)
    spec.check_length(lengths.longest, "data.max_prompt_tokens and rollout.sampling.max_new_tokens together")
    if config.rollout.replay is None:
        for field, server, served in (("rollout.server", config.rollout.server, spec), *_served_teachers(config)):
            check_server_split(served, server.tp, field, server.quantization, server.transfer)
    if config.rollout.server.routing_replay:
        spec.check_routing_replay()
    if config.model.lora is not None and config.model.lora.serve == "adapter":
        spec.check_served_adapters()
    if config.rollout.server.max_model_len is not None:
        spec.check_length(config.rollout.server.max_model_len, "rollout.server.max_model_len")
    return Plan(config, spec, lengths, substitute)


def _check_layout(ranks: TrainingRanks) -> None:
    spec, engine, teachers = ranks.spec, ranks.config.engine, {name: split.spec for name, split in ranks.teachers.items()}
    compares_logits = "divergence" in ranks.config.objective.needs
    check_trainer_models(spec, teachers, engine.parallel, engine.fp8, compares_logits=compares_logits)
    spec.check_recompute(engine.recomputed, transformer_engine=ranks.has_te)
    spec.check_balance(engine.moe_balance.kind)


def _served_teachers(config: RunConfig) -> Iterator[tuple[str, ServerConfig, ModelSpec]]:
    for name, teacher in config.teachers.items():
        if teacher.local_workers:
            yield f"teachers.{name}.server", teacher.served, resolve_spec(teacher.path, f"teachers.{name}.path")[0]


def check_plan(plan: Plan) -> None:
    """Raises ValueError with the plan's problems, or warns with ``engine.check_memory = false``."""
    sentence = f"the run does not fit: {'; '.join(plan.problems)}"
    if plan.problems and plan.config.engine.check_memory:
        raise ValueError(f"{sentence}; engine.check_memory = false tries it all the same ('tepo plan' shows each term)")
    if plan.problems:
        warnings.warn(sentence, stacklevel=2)


def _lengths(spec: ModelSpec, config: RunConfig, prompt: float | None, response: float | None) -> Lengths:
    turn, environment = config.rollout.sampling.max_new_tokens, config.environment
    bound = config.rollout.server.max_model_len
    limit = min(bound or spec.max_positions, spec.max_positions)
    longest_prompt = config.data.max_prompt_tokens or min(_DEFAULT_PROMPT_TOKENS, max(1, limit - turn))
    longest_response = turn
    if environment is not None:
        longest_response = min(environment.max_tokens or environment.max_turns * turn, max(turn, limit - longest_prompt))
    longest = longest_prompt + longest_response
    prompt = longest_prompt / 2 if prompt is None else prompt
    response = longest_response / 2 if response is None else response
    for option, value, most in (("--prompt-tokens", prompt, longest_prompt), ("--response-tokens", response, longest_response)):
        if not 0 < value <= most:
            raise ValueError(f"{option} = {value:g} must lie above 0 and not above the longest, {most}")
    if bound is not None and bound < longest:
        raise ValueError(
            f"rollout.server.max_model_len = {bound} is less than the longest prompt and response, {longest_prompt} + "
            f"{longest_response}; raise it to {longest}, or lower data.max_prompt_tokens or rollout.sampling.max_new_tokens"
        )
    return Lengths(prompt, response, longest, longest_response)


def _assumptions(plan: Plan) -> Iterator[str]:
    config, cluster, ranks, lengths = plan.config, plan.config.cluster, plan.ranks, plan.lengths
    if plan.substitute:
        yield plan.substitute
    if (unknown := ServerMemory.draft_spec(config.rollout.server)[1]) is not None:
        yield unknown
    if config.rollout.server.speculative is not None:
        yield "sampling takes as long as without speculative decoding: how many guesses hold is not known"
    if config.data.max_prompt_tokens is None:
        assumed = lengths.longest - lengths.longest_response
        yield f"data.max_prompt_tokens is not set; prompts are taken to have at most {assumed} tokens"
    yield f"prompts of {lengths.prompt:g} and responses of {lengths.response:g} tokens on average"
    if config.environment is not None and config.environment.max_tokens is None:
        yield (
            f"environment.max_tokens is not set; an episode is taken to have at most {lengths.longest_response} tokens after "
            "its prompt, those of max_turns turns, and the environment's own are not counted"
        )
    yield f"micro-batches of {ranks.micro_batch_tokens(lengths.longest)} tokens per rank; {_USABLE:.0%} of a GPU is usable"
    top_k = config.rollout.sampling.top_k
    if config.rollout.sampling.truncates and top_k is not None:
        tokens = config.rollout.responses_per_step * lengths.response
        yield (
            f"sampling masks (rollout.sampling.top_k = {top_k}): at most {4 * top_k * tokens / GIB:,.2f} GiB more of each "
            "rank's host, far less where top_p or min_p leave few tokens; not in the sums"
        )
    if plan.spec.experts:
        yield "every expert gets as many tokens as any other; handing tokens to experts and back takes no time"
    if config.dtype() == "float32" and config.engine.wants_gpus:
        yield "model.dtype = float32 computes at a fifteenth of cluster.gpu_tflops; bfloat16 at all of it"
    yield f"GPU: {cluster.gpu_tflops:g} TFLOP/s in bf16, {cluster.gpu_memory_gib:g} GiB at {cluster.gpu_memory_gb_per_s:g} GB/s"
    yield (
        f"MFU {cluster.train_mfu:.0%} in training and {cluster.score_mfu:.0%} without gradient while a GPU computes; it also "
        "waits for tensor-parallel ranks and the next stage"
    )
    yield f"decoding reads memory at {cluster.decode_bandwidth:.0%} of its peak; one sequence of every wave is the longest"
    yield (
        f"links at {cluster.link_efficiency:.0%} of {cluster.network_gb_per_s:g} GB/s between nodes and "
        f"{cluster.nvlink_gb_per_s:g} GB/s within; rewards, evaluations and start-up take no time"
    )
    if ranks.tensor_ranks_straddle:
        tp, gpus = config.engine.parallel.tp, cluster.gpus_per_node
        yield (
            f"engine.parallel.tp = {tp} does not divide cluster.gpus_per_node = {gpus}, "
            "so that some tensor-parallel ranks share no node; in every layer they talk over the network"
        )
    if config.train.save_every:
        size, rank_size = ranks.checkpoint_bytes / 1e9, ranks.rank_checkpoint_bytes / 1e9
        how = "written beside training" if ranks.saves_beside_training else f"written at {cluster.storage_gb_per_s:g} GB/s"
        yield f"a checkpoint of {size:,.0f} GB every {config.train.save_every} steps, {rank_size:,.1f} GB a rank at most, {how}"


def check_placement(config: RunConfig) -> None:
    """Raises ValueError if ranks or servers do not fit the cluster's GPUs."""
    cluster, samples = config.cluster, config.rollout.replay is None
    for field, size in (("engine.parallel.tp", config.engine.parallel.tp), ("rollout.server.tp", config.rollout.server.tp)):
        if size > cluster.gpus_per_node and (samples or field == "engine.parallel.tp"):
            raise ValueError(
                f"{field} = {size} is more than cluster.gpus_per_node = {cluster.gpus_per_node}; tensor-parallel ranks talk in "
                "every layer and must share a node: lower it"
            )
    _check_trainer(config)
    if samples:
        _check_servers(config)


def _check_trainer(config: RunConfig) -> None:
    parallel, cluster = config.engine.parallel, config.cluster
    gpus = cluster.train_nodes * cluster.gpus_per_node
    replica = parallel.tp * parallel.pp * parallel.cp
    if cluster.train_nodes == 1 and parallel.world_size > gpus:
        raise ValueError(
            f"engine.parallel needs {parallel.world_size} ranks, but cluster.train_nodes = 1 has {gpus} GPUs; "
            f"raise cluster.train_nodes to {-(-parallel.world_size // gpus)}, or lower engine.parallel"
        )
    if cluster.train_nodes > 1 and gpus % replica:
        fitting = [
            nodes for nodes in range(1, cluster.train_nodes + replica + 1) if nodes * cluster.gpus_per_node % replica == 0
        ]
        below = [nodes for nodes in fitting if nodes < cluster.train_nodes][-1:]
        above = [nodes for nodes in fitting if nodes > cluster.train_nodes][:1]
        raise ValueError(
            f"cluster.train_nodes = {cluster.train_nodes} × gpus_per_node = {cluster.gpus_per_node} = {gpus} GPUs, which "
            f"tp × pp × cp = {parallel.tp} × {parallel.pp} × {parallel.cp} = {replica} does not divide; use "
            f"{' or '.join(map(str, below + above))} nodes, or change engine.parallel"
        )
    if cluster.train_nodes > 1 and parallel.world_size != gpus:
        raise ValueError(
            f"engine.parallel needs {parallel.world_size} ranks, but cluster.train_nodes = {cluster.train_nodes} has {gpus} "
            f"GPUs; set engine.parallel.dp = {gpus // replica}, or change cluster.train_nodes"
        )


def _check_servers(config: RunConfig) -> None:
    cluster, server, ranks = config.cluster, config.rollout.server, config.engine.parallel.world_size
    if server.placement == "colocated":
        if cluster.rollout_nodes or cluster.train_nodes > 1:
            raise ValueError(
                "rollout.server.placement = colocated puts the servers on the GPUs of one training node, but "
                f"cluster.train_nodes = {cluster.train_nodes} and rollout_nodes = {cluster.rollout_nodes}; set them to 1 and "
                "0, or leave placement out"
            )
        where, room = f"what the trainer's ranks use ({ranks} GPUs)", ranks // server.tp
    elif cluster.rollout_nodes:
        where = f"cluster.rollout_nodes = {cluster.rollout_nodes} of {cluster.gpus_per_node} GPUs"
        room = cluster.rollout_nodes * (cluster.gpus_per_node // server.tp)
    else:
        free = cluster.train_nodes * cluster.gpus_per_node - ranks
        where = f"what engine.parallel leaves of the training node ({free} GPUs, as cluster.rollout_nodes = 0)"
        room = free // server.tp
    if server.count > room:
        raise ValueError(
            f"rollout.server.count = {server.count} servers of tp = {server.tp} do not fit: {where} has room for {room}; lower "
            "rollout.server.count, or raise cluster.rollout_nodes"
        )
    if cluster.rollout_nodes and server.count % cluster.rollout_nodes:
        below = server.count - server.count % cluster.rollout_nodes
        counts = " or ".join(str(count) for count in (below, below + cluster.rollout_nodes) if count)
        raise ValueError(
            f"rollout.server.count = {server.count} servers cannot be spread evenly over cluster.rollout_nodes = "
            f"{cluster.rollout_nodes} nodes; set it to {counts}"
        )
    beside = server.tp * server.count if server.placement == "local" and not cluster.rollout_nodes else 0
    left = cluster.gpus_per_node - min(ranks, cluster.gpus_per_node) - beside
    if config.teacher_workers > left:
        raise ValueError(
            f"served teachers take {config.teacher_workers} GPUs of the first training node, and {left} are left there; serve "
            "them elsewhere (teachers.NAME.server.placement = external, and tepo serve RUN --teacher NAME), or set "
            "teachers.NAME.place = ranks"
        )


def _shown(values: _Settings) -> str:
    parts, before = [], None
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        shown = f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value).lower()
        parts.append(f"{name if section == before else path} = {shown}")
        before = section
    return " and ".join(part for part in [", ".join(parts[:-1]), parts[-1]] if part)


def _settings_of(knobs: Sequence[_Knob]) -> Iterator[_Settings]:
    for chosen in product(*reversed(knobs)):
        values = {path: value for settings in chosen for path, value in settings.items()}
        if len(values) == sum(map(len, chosen)):  # knobs that share a field, such as dp, are not combined
            yield values


def _knobs(config: RunConfig, spec: ModelSpec, longest: int) -> Iterator[_Knob]:
    engine, parallel = config.engine, config.engine.parallel
    yield from _optimizer_knobs(config)
    if not parallel.sequence_parallel:
        yield [{"engine.parallel.sequence_parallel": True}]
    smaller = max(engine.micro_batch_tokens // 2, longest)
    if smaller < engine.micro_batch_tokens:
        yield [{"engine.micro_batch_tokens": smaller}]
    if engine.head != "fused":
        yield [{"engine.head": "fused"}]
    if engine.recompute != "full":
        modules = ("core_attn", "moe" if spec.experts else "mlp")
        selective = {"engine.recompute": "selective", "engine.recompute_modules": modules}
        full = {"engine.recompute": "full", "engine.recompute_modules": ("core_attn",)}
        is_selective = engine.recompute == "selective"
        yield [selective, full if is_selective else {"engine.recompute": "full"}]
    for name in ("tp", "pp", "cp"):
        size = getattr(parallel, name)
        factors = [factor for factor in (2, 4, 8) if parallel.dp % factor == 0]
        if factors:
            yield [
                {f"engine.parallel.{name}": size * factor, "engine.parallel.dp": parallel.dp // factor} for factor in factors
            ]


def _optimizer_knobs(config: RunConfig) -> Iterator[_Knob]:
    # one knob, since each setting needs the first
    optimizer = config.optimizer
    shared: _Settings = {} if optimizer.distributed else {"optimizer.distributed": True}
    settings = [shared] if shared else []
    if not optimizer.own_masters and not config.engine.fp8.params:
        if config.dtype() == "bfloat16" and config.engine.wants_gpus:
            reduced = {"store_param_remainders": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
            settings.append({**shared, **{f"optimizer.{name}": value for name, value in reduced.items()}})
        settings.append({**shared, "optimizer.offload_fraction": 1.0})
    if settings:
        yield settings


def _more_nodes(config: RunConfig) -> Iterator[_Knob]:
    parallel, nodes = config.engine.parallel, config.cluster.train_nodes
    for name in ("pp", "cp"):
        size = getattr(parallel, name)
        yield [{"cluster.train_nodes": nodes * factor, f"engine.parallel.{name}": size * factor} for factor in (2, 4, 8)]

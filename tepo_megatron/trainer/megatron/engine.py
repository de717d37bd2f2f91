import contextlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.objective.trust_region import next_clip_range
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.scores.backend import get_backend
from tepo_megatron.core.types import Batch
from tepo_megatron.errors import NotFiniteError, is_ours
from tepo_megatron.runtime.heartbeat import Heartbeat
from tepo_megatron.trainer.megatron.forward import Forward
from tepo_megatron.trainer.megatron.gpu import check_config
from tepo_megatron.trainer.megatron.model.fp8 import plain_weights
from tepo_megatron.trainer.megatron.model.model import Layers
from tepo_megatron.trainer.megatron.model.routers import Routers
from tepo_megatron.trainer.megatron.parallel.batch import broadcast
from tepo_megatron.trainer.megatron.parallel.collectives import RootSignal, all_gather_json, broadcast_json
from tepo_megatron.trainer.megatron.parallel.platform import collective_timeout, select_platform
from tepo_megatron.trainer.megatron.policy import PolicyBuilder, named_weights
from tepo_megatron.trainer.megatron.policy.checkpoints import MegatronCheckpoints
from tepo_megatron.trainer.megatron.policy.offload import Offloader, Part
from tepo_megatron.trainer.megatron.policy.weights import PolicyWeights
from tepo_megatron.trainer.megatron.teachers import Teachers
from tepo_megatron.trainer.megatron.update import StepObjective, update
from tepo_megatron.trainer.packing import check_judged, check_recorded, pack
from tepo_megatron.trainer.protocol import UpdateResult
from tepo_megatron.trainer.run_compatibility import describe_run
from tepo_megatron.weights.architecture import read_model_spec
from tepo_megatron.weights.layouts import check_trainer_split

T = TypeVar("T")


class Engine:
    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        objective: StepObjective | None = None,
        *,
        teachers: Mapping[str, Path] = MappingProxyType({}),
        shares_gpus: bool = False,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        """``objective`` replaces the config's. ``teachers``: folders of those on the trainer's ranks."""
        self.heartbeat = heartbeat or Heartbeat()
        self.model_dir = model_dir
        self.spec = read_model_spec(model_dir)
        layout = config.engine.parallel
        split = check_trainer_split(self.spec, layout)
        self.objective: StepObjective = objective or build_objective(config.objective)
        self._reads_parts = objective is not None or "reward_parts" in config.objective.needs
        self.platform = select_platform(config.engine)
        self.config = config = config.with_dtype(config.dtype(self.platform.kind == "cuda"))
        get_backend(config.engine.score_backend, self.platform.device)  # raises before anything is built
        self.layers = Layers.choose(config.engine, self.platform, config.model.dtype)
        specs = {name: read_model_spec(folder) for name, folder in teachers.items()}
        check_config(config, self.spec, on_gpu=self.platform.kind == "cuda", teachers=specs)
        timeout = collective_timeout(config)
        self.ranks = self.platform.initialize(layout, seed=config.seed, timeout=timeout)
        _check_same_everywhere(config, self.platform.device)
        self.root_signal = RootSignal()
        self.heartbeat.start()
        self.heartbeat.phase("model")
        self.split = replace(split, fused_norms=self.layers.kind == "te")
        self.layouts = self.split.layouts(self.spec)
        weights = config.model.shards or model_dir
        on_move = self.heartbeat.moved
        builder = PolicyBuilder(config, self.spec, weights, self.platform, self.layers, self.ranks, self.layouts, on_move)
        self.policy = builder.policy()
        self.routers: Routers | None = None
        if self.spec.experts is not None:
            self.routers = Routers(self.policy.chunks, self.spec, ranks=self.ranks, balance=config.engine.moe_balance)
        self.forward = Forward(
            config.engine,
            self.spec,
            self.ranks,
            self.platform,
            temperature=config.rollout.sampling.temperature,
            token_multiple=config.engine.token_multiple,
            on_progress=on_move,
            entropy_slope=self.objective.needs_entropy_slope,
            routers=self.routers,
        )
        self.weights = PolicyWeights(
            config,
            self.spec,
            self.policy,
            self.split,
            self.layouts,
            model_dir,
            self.ranks.rank,
            self.platform.device,
            self.broadcast_from_root,
            self.heartbeat,
        )
        self._build_frozen(builder, teachers)
        self._unscored: list[str] = []
        self._moves: list[Tensor] = []
        self.host_group = self.platform.host_group(timeout)
        about = {
            "model": str(model_dir.resolve()),
            "reference_digest": self.reference_digest,
            "identity": describe_run(config, model_dir) if self.ranks.rank == 0 else {},
        }
        self.checkpoints = MegatronCheckpoints(self.weights, group=self.host_group, about=about)
        self.counters = self.checkpoints.counters
        self.offloader: Offloader | None = None
        if shares_gpus:
            barrier = partial(dist.barrier, self.host_group)
            frozen = [*(self.reference or ()), *(self.teachers.chunks if self.teachers is not None else ())]
            self.offloader = Offloader(self.policy, self.platform.device, barrier, frozen)

    def _build_frozen(self, builder: PolicyBuilder, teachers: Mapping[str, Path]) -> None:
        needs_reference = self.objective.needs_reference
        # with adapters, the policy without them is the reference
        self.reference = builder.reference() if needs_reference and self.policy.lora is None else None
        self.reference_digest: str | None = None
        if needs_reference and not self.config.engine.fp8.params:  # their scales depend on how tensors are cut
            params = self.policy.params if self.reference is None else named_weights(self.reference)
            self.reference_digest = self.weights.digest(plain_weights(params))
        self.teachers: Teachers | None = None
        if (distill := self.config.objective.distill) is not None and distill.of == "top_k":
            self.forward = replace(self.forward, divergence=Teachers.divergence_of(distill))
        if teachers:
            self.teachers = Teachers(self.config, teachers, self.forward, self.layers)
            heads, divergence = self.teachers.heads, self.teachers.divergence
            self.forward = replace(self.forward, teacher_heads=heads, divergence=divergence)

    def batch_from_root(self, rollouts: list[Rollout] | None, teachers: Sequence[int] | None = None) -> Batch:
        self._unscored.clear()
        packed, refused = None, None
        try:
            packed = None if rollouts is None else self._pack(rollouts, teachers)
        except ValueError as error:
            if not is_ours(error):
                raise
            refused = error
        if (sentence := self.broadcast_from_root(refused and str(refused))) is not None:
            raise refused or ValueError(sentence)
        return broadcast(packed, self.platform.device)

    def _pack(self, rollouts: list[Rollout], teachers: Sequence[int] | None) -> Batch:
        rollout = self.config.rollout
        replays, truncates = rollout.server.routing_replay, rollout.sampling.truncates
        kinds = {frozenset(item.reward_parts) for item in rollouts if item.reward_parts}
        is_mixed = len(kinds) > 1 and self.config.environment is None and self.config.objective.advantage.kind != "gdpo"
        check_judged(rollouts, teachers, self.config)
        check_recorded(rollouts, routes_of=self.spec if replays else None, sampling_masks=truncates)
        packed = pack(
            rollouts,
            mask_truncated=rollout.truncated == "mask",
            routes=replays,
            sampling_masks=truncates,
            top_tokens=self.config.objective.teacher_top_k > 0,
            reward_parts=self._reads_parts and not is_mixed,  # of several verifiers, where columns would change between steps
            cut_episodes=self.config.environment is not None,
        )
        packed = packed if teachers is None else packed.with_(teachers_S=torch.tensor(teachers))
        # here and not on every rank, whose GPU may add in another order
        return packed.with_(advantages_S=self.objective.advantages(packed), reward_parts_SK=None)

    def score(self, batch: Batch) -> Batch:
        try:
            with contextlib.nullcontext() if self.routers is None else self.routers.counted():
                scores = self.forward.score(self.policy.chunks, batch)
            load_LE = None if self.routers is None else self.routers.load()
            batch = batch.with_(old_logprobs_T=scores.logprob, old_entropy_T=scores.entropy, expert_load_LE=load_LE)
            if self.objective.needs_reference:
                batch = batch.with_(reference_logprobs_T=self._score_by_reference(batch))
            if self.teachers is not None:
                batch = self.teachers.score(batch, self.forward.micro_batches(batch))
        except NotFiniteError as error:
            self._unscored.append(str(error))
            names = ["old_logprobs_T", "old_entropy_T", *(["reference_logprobs_T"] if self.objective.needs_reference else [])]
            names += ["teacher_logprobs_T"] if self.teachers is not None else []
            batch = batch.with_(**dict.fromkeys(names, torch.full_like(batch.sampler_logprobs_T, torch.nan)))
        return batch

    def _score_by_reference(self, batch: Batch) -> Tensor:
        batch = batch.with_(routed_experts_T=None)  # another model, which chooses its experts itself
        if self.reference is not None:
            return self.forward.score(self.reference, batch).logprob
        assert self.policy.lora is not None
        with self.policy.lora.switched_off():
            return self.forward.score(self.policy.chunks, batch).logprob

    def take_routing_metrics(self) -> dict[str, float]:
        return {} if self.routers is None else self.routers.take_metrics()

    def measure_noise(self, batch: Batch) -> dict[str, float]:
        try:
            noise = self.forward.measure_noise(self.policy.chunks, batch, self.config.engine.noise_sequences)
        except NotFiniteError:  # the step's own scores raise it too and are skipped
            return {}
        self.counters.entropy_noise = noise["entropy/noise/p50"]
        return noise

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        rest = prompt[1:]
        rollout = Rollout("canary", 0, prompt[:1], rest, (0.0,) * len(rest), "length", WeightsVersion(0))
        # each data-parallel rank needs so many sequences
        copies = self.ranks.dp * self.config.engine.parallel.micro_batch_group
        batch = pack([rollout] * copies).to(self.platform.device)
        at_one = replace(self.forward, temperature=1.0)
        return at_one.score(self.policy.chunks, batch).logprob[: len(rest)].tolist()

    def update(self, batch: Batch, *, last: bool = True) -> UpdateResult:
        result = update(self.forward, self.policy, self.objective, batch, self.counters)
        if result.moves is not None:
            self._moves.append(result.moves)
        if last:
            if self._moves:
                region, moves = self.config.objective.trust_region, torch.stack(self._moves).sum(0)
                self.counters.clip_range = next_clip_range(region, moves, self.counters.clip_range)
                self._moves.clear()
            self.policy.finish_gather()
        if result.skipped:
            self.counters.updates_skipped += 1
            if self._unscored and not result.not_finite and batch.old_logprobs_T.isnan().all():  # type: ignore[union-attr]
                # the reason why there are no scores
                result = replace(result, skipped=self._unscored.pop(0))
        else:
            self.counters.updates += 1
        return result

    def onload(self) -> None:
        self._keep_on_gpu("weights", "optimizer", "gradients")

    def onload_weights_only(self) -> None:
        self._keep_on_gpu("weights")

    def offload(self) -> None:
        self._keep_on_gpu()

    def _keep_on_gpu(self, *parts: Part) -> None:
        if self.offloader is not None:
            self.offloader.keep(*parts)

    def memory(self) -> dict[str, float]:
        if self.platform.kind == "cpu":
            return {}
        offloaded = 0 if self.offloader is None else self.offloader.most_offloaded
        most = torch.tensor([torch.cuda.max_memory_allocated(), offloaded])
        torch.cuda.reset_peak_memory_stats()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.host_group)
        return dict(zip(("memory/peak_gib", "memory/offloaded_gib"), (most / 2**30).tolist(), strict=True))

    def broadcast_from_root(self, value: T) -> T:
        """Other ranks wait on the host, so that a server can use their GPUs."""
        with contextlib.nullcontext() if self.ranks.rank == 0 else self.heartbeat.waiting("rank 0"):
            self.root_signal.pass_on()
        return broadcast_json(value, source=0, device=torch.device("cpu"), group=self.host_group)

    def close(self) -> None:
        self.platform.destroy()


def _check_same_everywhere(config: RunConfig, device: torch.device) -> None:
    """Every rank calls; all raise ValueError if the dtype that ``auto`` became, or plugins' bytes, differ."""
    everyone = all_gather_json([socket.gethostname(), config.model.dtype, config.objective.plugin_digests], device=device)
    (first_host, first_dtype, first), *_ = everyone
    for rank, (host, dtype, digests) in enumerate(everyone):
        if dtype != first_dtype:
            raise ValueError(
                f"model.dtype: rank {rank} on {host} has {dtype} and rank 0 on {first_host} {first_dtype}, as auto takes it "
                "from GPUs and from a resumed run's checkpoints; set model.dtype"
            )
        for name in dict.fromkeys([*first, *digests]):
            if first.get(name) != digests.get(name):
                raise ValueError(
                    f"objective.plugins: rank {rank} on {host} has other bytes of {name} than rank 0 on {first_host} (digest "
                    f"{digests.get(name)} and {first.get(name)}); put the same file on every node, or on a disk that all share"
                )

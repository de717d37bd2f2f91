"""The trainer, as the loop sees it: score, update, stream weights, save, load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor

from tepo_megatron.bridge.architecture import read_model_spec
from tepo_megatron.bridge.files import load_into, write_model
from tepo_megatron.bridge.gather import gather_to_root, sources
from tepo_megatron.bridge.layouts import MegatronParallel, VllmParallel, megatron_layout
from tepo_megatron.bridge.plan import reshard_plan
from tepo_megatron.bridge.sender import ShardSender
from tepo_megatron.config import RunConfig
from tepo_megatron.engine import checkpoint, parallel
from tepo_megatron.engine.batch import broadcast, pack
from tepo_megatron.engine.collectives import broadcast_json
from tepo_megatron.engine.forward import Forward
from tepo_megatron.engine.model import build_model, transformer_config
from tepo_megatron.engine.optimizer import build_optimizer, build_schedule
from tepo_megatron.engine.platform import select_platform
from tepo_megatron.engine.score import score
from tepo_megatron.engine.step import StepObjective, UpdateResult, finalize_gradients, update
from tepo_megatron.objective import build_objective
from tepo_megatron.types import Batch, Rollout, ShardLayout

T = TypeVar("T")


@dataclass(frozen=True)
class TensorMeta:
    name: str
    shape: tuple[int, ...]
    dtype: str


class Engine:
    """Model, optimizer and objective on this rank. Every rank makes one, and calls every method in the same order."""

    def __init__(self, config: RunConfig, model_dir: Path, objective: StepObjective | None = None) -> None:
        """Builds process groups, model and optimizer. Weights come from ``config.model.shards`` where it is set, else from
        ``model_dir``, a Hugging Face folder. ``objective`` replaces the config's.

        Raises ValueError for a model that does not fit the parallel layout or a folder that is not the model that it describes.
        """
        self.config = config
        self.model_dir = model_dir
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.spec = read_model_spec(model_dir)
        layout = config.engine.parallel
        self.spec.check_parallel(tp=layout.tp, pp=layout.pp)
        self.objective: StepObjective = objective or build_objective(config.objective)
        self.platform = select_platform(config.engine)
        self.ranks = parallel.initialize(layout, self.platform, seed=config.seed)
        self.layouts = [self._layout_of(rank) for rank in range(self.ranks.world)]
        self.sources = sources(self.layouts)
        self.forward = Forward(
            ranks=self.ranks,
            platform=self.platform,
            vocab_size=self.spec.vocab_size,
            temperature=config.rollout.sampling.temperature,
            micro_batch_tokens=config.engine.micro_batch_tokens,
            token_multiple=layout.tp if layout.sequence_parallel else 1,
        )
        with self.platform.megatron():
            self._build()
        self.reference = self._build_reference() if self.objective.needs_reference else None
        self.updates = 0

    def _layout_of(self, rank: int) -> ShardLayout:
        tp_rank, pp_rank, _ = self.ranks.coordinates(rank)
        return megatron_layout(
            self.spec,
            tp=self.ranks.tp,
            tp_rank=tp_rank,
            pp=self.ranks.pp,
            pp_rank=pp_rank,
            fused_norms=self.platform.kind == "cuda",
        )

    def _build(self) -> None:
        config = self.config
        megatron = transformer_config(self.spec, config.model, config.engine, self.platform)
        self.model = build_model(self.spec, megatron, self.ranks, self.platform)
        self.params = dict(self.model.named_parameters())
        load_into(self.config.model.shards or self.model_dir, self.layouts[self.ranks.rank], self.params)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=config.optimizer.distributed, overlap_grad_reduce=False
        )
        self.ddp = DistributedDataParallel(megatron, ddp, self.model)
        self.optimizer = build_optimizer(config.optimizer, config.model, self.ddp)
        self.schedule = build_schedule(
            config.optimizer, self.optimizer, total_steps=config.train.steps * config.train.minibatches
        )
        megatron.finalize_model_grads_func = finalize_gradients
        megatron.grad_scale_func = self.optimizer.scale_loss

    def _build_reference(self) -> torch.nn.Module:
        """A second, frozen copy of the first weights, for objectives with a KL term against them."""
        with self.platform.megatron():
            megatron = transformer_config(self.spec, self.config.model, self.config.engine, self.platform)
            model = build_model(self.spec, megatron, self.ranks, self.platform)
        load_into(self.config.model.shards or self.model_dir, self.layouts[self.ranks.rank], dict(model.named_parameters()))
        return model.requires_grad_(False)

    # -- the algorithm ---------------------------------------------------------------------------------------------------

    def share(self, rollouts: list[Rollout] | None) -> Batch:
        """Rank 0's rollouts as one packed batch with advantages, on every rank."""
        batch = broadcast(None if rollouts is None else pack(rollouts), self.platform.device)
        return batch.with_(advantages_S=self.objective.advantages(batch))

    def score(self, batch: Batch) -> Batch:
        """Adds log-probs and entropies of the policy as it stands (and log-probs of the reference, where the objective
        asks).
        """
        scores = score(self.forward, self.model, batch)
        batch = batch.with_(old_logprobs_T=scores.logprob, old_entropy_T=scores.entropy)
        if self.reference is not None:
            batch = batch.with_(reference_logprobs_T=score(self.forward, self.reference, batch).logprob)
        return batch

    def update(self, batch: Batch) -> UpdateResult:
        """One optimizer step on a mini-batch that ``score`` has seen."""
        result = update(self.forward, self.ddp, self.optimizer, self.schedule, self.objective, batch)
        self.updates += 1
        return result

    # -- weights ---------------------------------------------------------------------------------------------------------

    @property
    def manifest(self) -> list[TensorMeta]:
        """What ``stream_weights`` yields, in its order."""
        shapes = self.layouts[0].shapes
        return [TensorMeta(name, tuple(shape), self.config.model.dtype) for name, shape in shapes.items()]

    def stream_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Full tensors under their Hugging Face names, on rank 0; None elsewhere. Every rank must exhaust it."""
        return gather_to_root(self.sources, self.layouts[0].shapes, self.params)

    @cached_property
    def sender(self) -> ShardSender:
        """This rank's end of the way from shard to shard. Every rank makes it, on first use.

        Raises ValueError where vLLM could not split the model over the workers of a server.
        """
        server, ranks = self.config.rollout.server, self.ranks
        fused_norms = self.platform.kind == "cuda"
        plan = reshard_plan(
            self.spec,
            MegatronParallel(tp=ranks.tp, pp=ranks.pp, dp=ranks.dp, fused_norms=fused_norms),
            VllmParallel(tp=server.tp, replicas=server.count),
        )
        return ShardSender(
            plan,
            self.params,
            rank=ranks.rank,
            dtype=self.dtype if server.dtype == "auto" else getattr(torch, server.dtype),
            told=self.told,
            timeout_s=server.transfer_timeout_s,
        )

    def export(self, out: Path) -> None:
        """Writes a Hugging Face folder. Every rank calls; rank 0 writes."""
        stream = self.stream_weights()
        if self.ranks.rank == 0:
            write_model(out, ((n, t) for n, t in stream if t is not None), source=self.model_dir, dtype=self.dtype)
        else:
            for _ in stream:
                continue

    # -- checkpoints -----------------------------------------------------------------------------------------------------

    def save(self, folder: Path, *, step: int, state: dict[str, Any]) -> Path:
        """Writes a checkpoint that any parallel layout can resume from. Every rank calls."""
        return checkpoint.save(
            folder,
            step=step,
            state={"updates": self.updates, "model": str(self.model_dir.resolve()), **state},
            optimizer=self.optimizer,
            params=self.params,
            layout=self.layouts[self.ranks.rank],
            owns_weights=self.ranks.owns_weights,
            keep=self.config.train.keep_checkpoints,
        )

    def load(self, folder: Path) -> dict[str, Any]:
        """Restores weights, optimizer and schedule; returns what was given to ``save`` as ``state``, and ``step``."""
        state = checkpoint.load(folder, optimizer=self.optimizer, params=self.params, layout=self.layouts[self.ranks.rank])
        self.updates = state["updates"]
        self.schedule.num_steps = 0
        self.schedule.step(increment=self.updates)
        return state

    def told(self, value: T) -> T:
        """Rank 0's value, on every rank: anything that JSON carries. Every rank calls; only rank 0's argument is read."""
        return broadcast_json(value, source=0, device=self.platform.device)

    def close(self) -> None:
        parallel.destroy()

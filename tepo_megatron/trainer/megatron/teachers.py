"""Teachers on the trainer's ranks: frozen models, split as the policy is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.config.objective.terms import Distill
from tepo_megatron.core.types import Batch, Divergence
from tepo_megatron.trainer.megatron.forward import Forward, MicroBatches
from tepo_megatron.trainer.megatron.model.model import Layers, fused_head
from tepo_megatron.trainer.megatron.policy import PolicyBuilder
from tepo_megatron.trainer.megatron.policy.offload import HostCopies, OffloadedStorages, drop_fp8_copies
from tepo_megatron.weights.architecture import read_model_spec
from tepo_megatron.weights.layouts import check_trainer_split


@dataclass(frozen=True)
class _Teacher:
    chunks: Sequence[GPTModel]
    forward: Forward
    layers: OffloadedStorages  # all but the head, which updates use

    @classmethod
    def build(
        cls,
        config: RunConfig,
        folder: Path,
        forward: Forward,
        layers: Layers,
        *,
        keep_output: Callable[[Tensor], Tensor] | None,
    ) -> _Teacher:
        """Every rank calls. Raises ValueError for another model than ``check_config`` accepts."""
        spec = read_model_spec(folder)
        settings = {"parallel": config.engine.parallel.even, "head": "fused", "recompute": "none"}
        settings["fp8"] = config.engine.fp8.model_copy(update={"params": False})  # weights in FP8 cannot leave the GPU
        engine = config.engine.model_copy(update=settings)
        model = config.model.model_copy(update={"lora": None, "shards": None})
        config = config.model_copy(update={"engine": engine, "model": model})
        split = replace(check_trainer_split(spec, config.engine.parallel), fused_norms=layers.kind == "te")
        layouts = split.layouts(spec)
        builder = PolicyBuilder(config, spec, folder, forward.platform, layers, forward.ranks, layouts, forward.on_progress)
        chunks = builder.reference()
        forward = replace(forward, engine=config.engine, spec=spec, entropy_slope=False, routers=None, keep_output=keep_output)
        teacher = cls(chunks, forward, OffloadedStorages(forward.platform.device, frozen=True))
        teacher.offload()
        return teacher

    @property
    def head(self) -> Tensor | None:
        """[V/tp, G]; None but on the last stage."""
        heads = [fused_head(chunk) for chunk in self.chunks if chunk.post_process]
        return heads[0][0].detach() if heads and heads[0] is not None else None

    def offload(self) -> None:
        if self.forward.platform.kind == "cuda":
            head = self.head
            held = (param.detach() for chunk in self.chunks for param in chunk.parameters())
            self.layers.offload(param for param in held if head is None or param.data_ptr() != head.data_ptr())
            for chunk in self.chunks:
                drop_fp8_copies(chunk)
            torch.cuda.empty_cache()

    def score(self, batch: Batch, micro_batches: MicroBatches) -> tuple[Tensor, list[Tensor]]:
        """Returns log-probs of the labels, [T], and of each micro-batch the last stage's hidden states. Every rank calls."""
        self.layers.onload()
        try:
            scores, states = self.forward.score_parts(self.chunks, batch.with_(routed_experts_T=None), micro_batches)
        finally:
            self.offload()
        return scores.logprob, states


class Teachers:
    """Keeps the order of ``config.teachers``."""

    def __init__(self, config: RunConfig, folders: Mapping[str, Path], forward: Forward, layers: Layers) -> None:
        self.numbers = {name: number for number, name in enumerate(config.teachers)}
        distill = config.objective.distill
        self.divergence = self.divergence_of(distill) if distill is not None and distill.of == "all" else None
        keep = None
        if self.divergence is not None:
            device = forward.platform.device
            keep = HostCopies(device).copy if device.type == "cuda" else Tensor.cpu
        self.by_name = {
            name: _Teacher.build(config, folder, forward, layers, keep_output=keep) for name, folder in folders.items()
        }

    @staticmethod
    def divergence_of(distill: Distill) -> Divergence:
        return Divergence(distill.divergence, 0.5 if distill.beta is None else distill.beta)

    @property
    def heads(self) -> list[Tensor]:
        return [head for teacher in self.by_name.values() if (head := teacher.head) is not None]

    @property
    def chunks(self) -> Iterator[GPTModel]:
        return (chunk for teacher in self.by_name.values() for chunk in teacher.chunks)

    def score(self, batch: Batch, micro_batches: MicroBatches) -> Batch:
        """Adds ``teacher_logprobs_T`` and, for ``distill.of = all``, ``teacher_states``. Every rank calls."""
        logprobs_T = (
            torch.zeros_like(batch.sampler_logprobs_T) if batch.teacher_logprobs_T is None else batch.teacher_logprobs_T
        )
        states: list[list[Tensor]] = []
        for name, teacher in self.by_name.items():
            scored_T, states_of_teacher = teacher.score(batch, micro_batches)
            logprobs_T = torch.where(batch.of_teacher(self.numbers[name]), scored_T, logprobs_T)
            states.append(states_of_teacher)
        if self.divergence is None:
            return batch.with_(teacher_logprobs_T=logprobs_T)
        return batch.with_(teacher_logprobs_T=logprobs_T, teacher_states=tuple(zip(*states, strict=True)))

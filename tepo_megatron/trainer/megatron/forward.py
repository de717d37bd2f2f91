"""Runs a batch through Megatron's schedule, for scores and their rounding noise."""

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor

from tepo_megatron.config import EngineConfig
from tepo_megatron.core.scores import fused_linear_logprob_and_entropy, logprob_and_entropy, noise_quantiles, rerounded
from tepo_megatron.core.scores.shard import all_gather
from tepo_megatron.core.types import Batch, Checks, Divergence, TeacherHead, TeacherLogits, TeacherTopK, TokenScores
from tepo_megatron.errors import NotFiniteError
from tepo_megatron.trainer.megatron.model.model import fused_head
from tepo_megatron.trainer.megatron.model.routers import Routers
from tepo_megatron.trainer.megatron.parallel.batch import Share
from tepo_megatron.trainer.megatron.parallel.collectives import broadcast_json
from tepo_megatron.trainer.megatron.parallel.partition import attention_length, partition
from tepo_megatron.trainer.megatron.parallel.platform import Platform, Ranks
from tepo_megatron.weights.architecture import ModelSpec

MicroBatches = Sequence[Sequence[int]]  # this rank's: indices of sequences of the batch
_LossFunction = Callable[[TokenScores, Batch], tuple[Tensor, dict[str, Any]]]  # (scalar to differentiate, values)


NOT_FINITE = "not_finite"


class _Stages(P2PCommunicator):  # type: ignore[misc] # Megatron has no types
    """Knows the ``lengths`` of activations and of gradients. Megatron's asks for each shape, and waits for the device."""

    def _communicate(self, *, recv_prev: bool, recv_next: bool, tensor_shape: Any, **sends: Any) -> Any:
        if recv_prev or recv_next:  # never both (decision 017)
            tensor_shape = [next(self.lengths[recv_next]), *tensor_shape[1:]]
        return super()._communicate(recv_prev=recv_prev, recv_next=recv_next, tensor_shape=tensor_shape, **sends)


class _Part(NamedTuple):
    """A micro-batch's share, and by teacher (one entry without): its tokens, their number, and the teacher's states."""

    share: Share
    masks: Sequence[Tensor]
    counts: Sequence[int]
    states: Sequence[Tensor]


def _disjoint_sum(scores: Sequence[TokenScores]) -> TokenScores:
    """Of calls that score different tokens of the same logits."""
    present = {name: value for name, value in vars(scores[0]).items() if isinstance(value, Tensor)}
    sums = {name: torch.stack([getattr(part, name) for part in scores]).sum(0) for name in present}
    return TokenScores(**{name: total.to(present[name].dtype) for name, total in sums.items()}, checks=scores[0].checks)


@dataclass(frozen=True)
class Forward:
    engine: EngineConfig
    spec: ModelSpec
    ranks: Ranks
    platform: Platform
    temperature: float
    token_multiple: int  # parallelism divides tokens evenly, and FP8 needs 16 or more per rank
    on_progress: Callable[[], None]
    entropy_slope: bool
    routers: Routers | None
    teacher_heads: Sequence[Tensor] = ()  # [V/tp, G], on the last stage
    divergence: Divergence | None = None  # of training: from ``Batch.teacher_states``, or a served teacher's top k
    keep_output: Callable[[Tensor], Tensor] | None = None  # copies it to host memory

    def micro_batches(self, batch: Batch) -> list[list[int]]:
        parts = partition(
            batch.lengths_S.tolist(),
            ranks=self.ranks.dp,
            max_tokens=self.engine.micro_batch_tokens,
            attention_length=attention_length(self.spec),
            multiple=self.engine.parallel.micro_batch_group,
        )
        return parts[self.ranks.dp_rank]

    def run(
        self, chunks: Sequence[torch.nn.Module], batch: Batch, micro_batches: MicroBatches, loss: _LossFunction, *, train: bool
    ) -> list[dict[str, Any]]:
        """Every rank calls. Returns ``loss``'s values of each micro-batch, on the last pipeline stage.

        Values of a micro-batch that is not finite have the reason as ``NOT_FINITE``. Raises ValueError, at the end for labels.
        """
        offsets = batch.cu_seqlens.tolist()
        lengths = [[offsets[s + 1] - offsets[s] for s in sequences] for sequences in micro_batches]
        tokens = [Share.padded_tokens(of_micro, self.ranks.cp) for of_micro in lengths]
        sizes = [-(-count // self.token_multiple) * self.token_multiple for count in tokens]
        if self.engine.parallel.ep > 1 and self.platform.kind == "cpu":
            # Ranks that share experts gather tokens, and their groups may overlap others.
            most = torch.tensor(sizes, device=self.platform.device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            sizes = most.tolist()
        members = [batch.select(sequences, offsets) for sequences in micro_batches]
        shares = [Share.cut(*micro, self.ranks) for micro in zip(members, lengths, sizes, strict=True)]
        compares = train and self.divergence is not None
        masks = [share.masks(max(1, len(self.teacher_heads)) if compares else 1) for share in shares]
        counts = torch.stack([torch.stack([mask_t.sum() for mask_t in of_share]) for of_share in masks]).tolist()
        states = batch.teacher_states if compares else None
        parts = [_Part(*part) for part in zip(shares, masks, counts, states or [()] * len(shares), strict=True)]
        with self.platform.megatron():
            results: list[dict[str, Any]] = get_forward_backward_func()(
                forward_step_func=lambda data, module: self._step(next(data), module, loss, train=train),
                # every chunk asks for each micro-batch
                data_iterator=[enumerate(parts) for _ in chunks],
                model=list(chunks),
                num_microbatches=len(shares),
                # for Megatron a packed micro-batch is one sequence over all context-parallel ranks
                seq_length=sizes[0],
                micro_batch_size=1,
                forward_only=not train,
                **(self._stages(chunks, sizes) if self.ranks.pp > 1 else {}),
            )
        if self.routers is not None:
            self.routers.end_run()
        for number, error in enumerate(Checks.first_errors([values.pop("checks") for values in results])):
            if isinstance(error, NotFiniteError):  # other ranks do not know: they agree afterwards (``update.py``)
                results[number][NOT_FINITE] = f"micro-batch {number}: {error}"
            elif error is not None:
                raise ValueError(f"micro-batch {number}: {error}") from error
        return results

    def _stages(self, chunks: Sequence[torch.nn.Module], sizes: Sequence[int]) -> dict[str, Any]:
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "cp", "dp_cp", "embd", "pos_embd"])
        stages = _Stages(groups.pp, get_model_config(chunks[0]))
        divisor = self.ranks.cp * (self.ranks.tp if self.engine.parallel.sequence_parallel else 1)
        order = get_schedule_table(len(sizes), self.ranks.vpp, self.ranks.pp)
        # the first stage receives no activations for its first chunk, the last no gradients for its last
        ends = (self.ranks.pp_rank == 0, self.ranks.is_last_stage)
        stages.lengths = [iter([sizes[i] // divisor for i, chunk in order if chunk >= end]) for end in ends]
        return {"p2p_communicator": stages, "pg_collection": groups}

    def _step(
        self, numbered: tuple[int, _Part], model: torch.nn.Module, loss: _LossFunction, *, train: bool
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Any]]]]:
        number, part = numbered
        share = part.share
        self.on_progress()
        routed: AbstractContextManager[None] = nullcontext()
        if self.routers is not None:
            routed = self.routers.forward_pass(share, train=train)
        with routed:
            output = model(share.tokens_t[None], share.positions_t[None], None, packed_seq_params=share.packed)
        if self.engine.fp8.enabled and not train:
            _empty_recompute_queues()

        def reduce(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            try:  # squeezed, not indexed: the gradient of an index is a second tensor of the logits' size
                scores = share.gather(self._local_scores(output.squeeze(0), fused_head(model), part, train=train))
                value, values = loss(scores, share.micro)
            except ValueError as error:
                raise ValueError(f"micro-batch {number}: {error}") from error
            # Megatron expects (loss, number of tokens to divide by, values to keep); nothing is divided there (update.py)
            values = {**values, "checks": scores.checks}
            if self.keep_output is not None:
                values["output"] = self.keep_output(output.squeeze(0))
            return value, torch.zeros((), dtype=torch.int, device=value.device), values

        return output, reduce

    def _local_scores(self, output: Tensor, head: tuple[Tensor, bool] | None, part: _Part, *, train: bool) -> TokenScores:
        """``output``: logits [t, V/tp], or hidden states [t, H] with a fused head."""
        share = part.share
        options: dict[str, Any] = {
            "tp_group": self.ranks.tp_group,
            "temperature": self.temperature,
            "vocab_size": self.spec.vocab_size,
            "entropy_slope": train and self.entropy_slope,
            "kept_TK": None if share.kept_tK is None else share.kept_tK.to(output.device, non_blocking=True),
            "checks": Checks(),
            "backend": self.engine.score_backend,
        }
        if train and self.divergence is not None and share.top_ids_tK is not None and share.top_logprobs_tK is not None:
            options["teacher"] = TeacherTopK(share.top_ids_tK, share.top_logprobs_tK, self.divergence)
        scores = []
        for number, (mask_t, scored) in enumerate(zip(part.masks, part.counts, strict=True)):
            options |= {"mask_T": mask_t, "scored": scored}
            if part.states:
                options["teacher"] = self._teacher(number, part.states[number].to(output), fused=head is not None)
            if head is None:  # nothing reads the logits after the loss
                alone = len(part.masks) == 1
                scores.append(logprob_and_entropy(output, share.labels_t, inplace_backward=alone, **options))
            else:
                options |= {"sequence_parallel": head[1], "gradient_accumulation_fusion": True}
                scores.append(fused_linear_logprob_and_entropy(output, head[0], share.labels_t, **options))
        return scores[0] if len(scores) == 1 else _disjoint_sum(scores)

    def _teacher(self, number: int, hidden_tG: Tensor, *, fused: bool) -> TeacherHead | TeacherLogits:
        assert self.divergence is not None
        weight_VpG = self.teacher_heads[number]
        if fused:
            return TeacherHead(hidden_tG, weight_VpG, self.divergence)
        if self.engine.parallel.sequence_parallel and self.ranks.tp_group is not None:
            hidden_tG = all_gather(hidden_tG, self.ranks.tp_group)
        return TeacherLogits(hidden_tG @ weight_VpG.t(), self.divergence)

    def score(self, chunks: Sequence[torch.nn.Module], batch: Batch) -> TokenScores:
        """Returns float32, detached, 0 outside the mask. Every rank calls; all raise the same NotFiniteError."""
        return self.score_parts(chunks, batch, self.micro_batches(batch))[0]

    def score_parts(
        self, chunks: Sequence[torch.nn.Module], batch: Batch, micro_batches: MicroBatches
    ) -> tuple[TokenScores, list[Tensor]]:
        """As ``score``, with what ``keep_output`` made of the outputs."""

        def keep(scores: TokenScores, micro: Batch) -> tuple[Tensor, dict[str, Any]]:
            return scores.logprob.sum(), {"scores": torch.stack([scores.logprob, scores.entropy])}

        with torch.no_grad():
            results = self.run(chunks, batch, micro_batches, keep, train=False)
        failed = torch.zeros(self.ranks.world, device=batch.tokens_T.device)
        reasons = [scores[NOT_FINITE] for scores in results if NOT_FINITE in scores]
        failed[self.ranks.rank] = len(reasons)
        dist.all_reduce(failed)
        if failed.any():
            first = int(failed.nonzero()[0])
            reason = broadcast_json(reasons[0] if reasons else None, source=first, device=failed.device)
            raise NotFiniteError(f"rank {first}: {reason}")
        offsets = batch.cu_seqlens.tolist()
        places = [batch.token_index(sequences, offsets) for sequences in micro_batches]
        scores = TokenScores(*self.on_every_rank(places, [micro["scores"] for micro in results], (2, batch.num_tokens)))
        return scores, [micro["output"] for micro in results if self.keep_output is not None]

    def measure_noise(self, chunks: Sequence[torch.nn.Module], batch: Batch, sequences: int) -> dict[str, float]:
        """Returns `noise_quantiles` of a few sequences in the same micro-batches before and after `rerounded`.

        Every rank calls. FP8 weights stay: their neighbours are too far apart.
        """
        group, trained = self.ranks.dp * self.engine.parallel.micro_batch_group, set(batch.trained_sequences)
        count = max(min(sequences, len(trained)) // group, 1) * group
        by_length = [index for index in batch.lengths_S.argsort(stable=True).tolist() if index in trained]
        few = batch.select([by_length[index * (len(by_length) - 1) // max(count - 1, 1)] for index in range(count)])
        first = self.score(chunks, few)
        with rerounded(param for chunk in chunks for param in chunk.parameters() if not is_float8tensor(param)):
            second = self.score(chunks, few)
        return noise_quantiles(first, second, few)

    def on_every_rank(self, places: Sequence[Tensor], values_of: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
        """Returns float32 [n, tokens], 0 where missing. Every rank calls.

        ``places``: positions of local tokens, on the host; ``values_of``: [n, t], empty except on the last pipeline stage.
        """
        result = torch.zeros(shape, device=self.platform.device)
        # Tensor- and context-parallel ranks have the same values; of the pipeline only the last stage has some.
        if self.ranks.tp_rank == 0 and self.ranks.cp_rank == 0:
            for place, values in zip(places, values_of, strict=False):
                result[:, place.to(result.device, non_blocking=True)] = values
        # Each token was computed by one data-parallel rank; adding zeros brings it to all, unchanged.
        dist.all_reduce(result)
        return result


def _empty_recompute_queues() -> None:
    # In 2.9 to 2.11 a checkpoint of Transformer Engine queues without gradients too. Only a recomputation takes out, the oldest
    # first: it would use the scales of the pass that was only scored.
    importlib.import_module("transformer_engine.pytorch.distributed").activation_recompute_forward._is_first_fp8_module.clear()
    state = importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager
    for scales in state.fp8_tensors_recompute_buffer:  # of delayed scaling; modules know their places, which stay
        scales.clear()

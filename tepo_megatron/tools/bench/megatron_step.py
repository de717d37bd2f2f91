"""Makes Megatron-Core's training step, as in ``pretrain_gpt.py``, on an engine's model and data.

Megatron's local attention takes no packed sequences: a step is packed with this project's attention, or padded right with
Megatron's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tepo_megatron.core.rollout import Rollout
from tepo_megatron.core.types import Batch
from tepo_megatron.trainer.megatron.engine import Engine
from tepo_megatron.trainer.megatron.policy import PolicyBuilder


@dataclass(frozen=True)
class _MicroBatch:
    tokens: Tensor
    labels: Tensor
    positions: Tensor
    loss_mask: Tensor
    attention_mask: Tensor | None
    packed: PackedSeqParams | None


class _PackedBuilder(PolicyBuilder):
    """A mean loss, as in pretrain_gpt; ours is a sum (``update.py``)."""

    def _chunks(self) -> tuple[TransformerConfig, list[GPTModel]]:
        megatron, chunks = super()._chunks()
        megatron.calculate_per_token_loss = False
        megatron.variable_seq_lengths = True
        megatron.apply_rope_fusion = False
        return megatron, chunks


class _RowsBuilder(_PackedBuilder):
    def _chunks(self) -> tuple[TransformerConfig, list[GPTModel]]:
        megatron, chunks = super()._chunks()
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                attention = DotProductAttention(megatron, layer.layer_number, AttnMaskType.causal, "self")
                layer.self_attention.core_attention = attention
        return megatron, chunks


class MegatronStep:
    def __init__(self, engine: Engine, *, rows: bool) -> None:
        self.engine, self.rows = engine, rows
        builder = _RowsBuilder if rows else _PackedBuilder
        self.policy = builder(
            engine.config, engine.spec, engine.model_dir, engine.platform, engine.layers, engine.ranks, engine.layouts
        ).policy()
        for ddp in self.policy.ddp:
            ddp.ddp_config.check_for_nan_in_grad = True  # pretrain_gpt's default
            ddp.config.finalize_model_grads_func = finalize_model_grads
        torch.cuda.synchronize = lambda *_: None  # on a CPU, after each exchange of shapes; our stages need none

    def load(self, rollouts: list[Rollout]) -> list[_MicroBatch]:
        batch = self.engine.batch_from_root(rollouts)
        make = _rows if self.rows else _packed
        return [make(batch.select(sequences)) for sequences in self.engine.forward.micro_batches(batch)]

    def score(self, data: list[_MicroBatch]) -> tuple[list[_MicroBatch], float | None]:
        with torch.no_grad():
            retained = self._run(data, forward_only=True)
        return data, self._mean_loss(retained)

    def update(self, scored: list[_MicroBatch]) -> None:
        for ddp in self.policy.ddp:
            ddp.zero_grad_buffer()
        self.policy.optimizer.zero_grad()
        retained = self._run(scored, forward_only=False)
        with self.engine.platform.megatron():
            successful, grad_norm, _ = self.policy.optimizer.step()
        group = parallel_state.get_model_parallel_group()
        flag, norm = torch.tensor([float(successful)]), torch.tensor([float(grad_norm)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        if not flag.item():
            raise RuntimeError("Megatron's optimizer made no step")
        self.policy.schedule.step(increment=1)
        self._mean_loss(retained)

    def _run(self, data: list[_MicroBatch], *, forward_only: bool) -> list[dict[str, Tensor]]:
        with self.engine.platform.megatron():
            return get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=[iter(data) for _ in self.policy.ddp],
                model=list(self.policy.ddp),
                num_microbatches=len(data),
                seq_length=data[0].tokens.size(1),
                micro_batch_size=data[0].tokens.size(0),
                forward_only=forward_only,
            )

    def _forward_step(self, data: Iterator[_MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
        micro = next(data)
        output = model(micro.tokens, micro.positions, micro.attention_mask, labels=micro.labels, packed_seq_params=micro.packed)

        def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            """pretrain_gpt's ``loss_func``; keeps token losses."""
            total, count = (losses.view(-1) * micro.loss_mask.view(-1)).sum(), micro.loss_mask.sum().int()
            return total, count, {"report": torch.stack([total.detach(), count.to(total.dtype)]), "losses": losses.detach()}

        return output, loss

    def _mean_loss(self, retained: list[dict[str, Tensor]]) -> float | None:
        if not retained:
            return None
        report = torch.stack([micro["report"] for micro in retained]).sum(0)
        dist.all_reduce(report, group=parallel_state.get_data_parallel_group())
        return float(report[0] / report[1])


def _packed(micro: Batch) -> _MicroBatch:
    longest, cu_seqlens = int(micro.lengths_S.max()), micro.cu_seqlens.int()
    packed = PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)
    mask = micro.loss_mask_T[None].float()
    return _MicroBatch(micro.tokens_T[None], micro.labels_T[None], micro.positions_T[None], mask, None, packed)


def _rows(micro: Batch) -> _MicroBatch:
    lengths = micro.lengths_S.tolist()

    def rows(values_T: Tensor) -> Tensor:
        return pad_sequence(list(values_T.split(lengths)), batch_first=True)

    tokens = rows(micro.tokens_T)
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    attention_mask = torch.ones(1, 1, tokens.size(1), tokens.size(1), dtype=torch.bool).triu(1)  # True is not attended to
    return _MicroBatch(tokens, rows(micro.labels_T), positions, rows(micro.loss_mask_T.float()), attention_mask, None)

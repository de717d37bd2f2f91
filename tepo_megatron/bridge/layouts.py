"""How each Hugging Face tensor lies in Megatron-Core's parameters: one declarative table, expanded into boxes.

Megatron fuses: q, k and v interleave per key/value group (all queries of a group, its key, its value); gate and up are
stacked inside each tensor-parallel shard; embedding and head are padded to a multiple of tp rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tepo_megatron.bridge.architecture import ModelSpec
from tepo_megatron.types import Box, Shard, ShardLayout

Placement = Literal["replicated", "columns", "vocab", "gate", "up", "query", "key", "value"]
"""How a tensor is split over tensor-parallel ranks, and where it lands in a fused parameter."""


@dataclass(frozen=True)
class Entry:
    tensor: str
    param: str
    placement: Placement


LLAMA_LAYER = (
    Entry("input_layernorm.weight", "input_layernorm.weight", "replicated"),
    Entry("self_attn.q_proj.weight", "self_attention.linear_qkv.weight", "query"),
    Entry("self_attn.k_proj.weight", "self_attention.linear_qkv.weight", "key"),
    Entry("self_attn.v_proj.weight", "self_attention.linear_qkv.weight", "value"),
    Entry("self_attn.o_proj.weight", "self_attention.linear_proj.weight", "columns"),
    Entry("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", "replicated"),
    Entry("mlp.gate_proj.weight", "mlp.linear_fc1.weight", "gate"),
    Entry("mlp.up_proj.weight", "mlp.linear_fc1.weight", "up"),
    Entry("mlp.down_proj.weight", "mlp.linear_fc2.weight", "columns"),
)
FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Transformer Engine's layers keep a norm's weight inside the linear that follows it."""

EMBEDDING = Entry("model.embed_tokens.weight", "embedding.word_embeddings.weight", "vocab")
FINAL_NORM = Entry("model.norm.weight", "decoder.final_layernorm.weight", "replicated")
HEAD = Entry("lm_head.weight", "output_layer.weight", "vocab")


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor of the model with its shape, in streaming order: embedding, layers, norm, head."""
    layers = [entry for layer in range(spec.num_layers) for entry in _layer_entries(layer, layer, fused_norms=False)]
    head = [] if spec.tied_embeddings else [HEAD]
    return {entry.tensor: _shape(entry, spec) for entry in [EMBEDDING, *layers, FINAL_NORM, *head]}


def megatron_layout(spec: ModelSpec, *, tp: int, tp_rank: int, pp: int, pp_rank: int, fused_norms: bool = False) -> ShardLayout:
    """What the rank at (tp_rank, pp_rank) holds, stages being even. With tied embeddings the last stage of a pipeline holds a
    second copy of the embedding, as Megatron does.
    """
    per_stage = spec.num_layers // pp
    entries = [
        entry
        for local in range(per_stage)
        for entry in _layer_entries(pp_rank * per_stage + local, local, fused_norms=fused_norms)
    ]
    if pp_rank == 0:
        entries.insert(0, EMBEDDING)
    if pp_rank == pp - 1:
        entries.append(FINAL_NORM)
        if not spec.tied_embeddings:
            entries.append(HEAD)
        elif pp > 1:
            entries.append(Entry(EMBEDDING.tensor, HEAD.param, "vocab"))
    shards = tuple(shard for entry in entries for shard in _shards(entry, spec, tp, tp_rank))
    return ShardLayout(shapes=tensor_shapes(spec), shards=shards)


def _layer_entries(layer: int, local: int, *, fused_norms: bool) -> Iterator[Entry]:
    for entry in LLAMA_LAYER:
        param = FUSED_NORMS.get(entry.param, entry.param) if fused_norms else entry.param
        yield Entry(f"model.layers.{layer}.{entry.tensor}", f"decoder.layers.{local}.{param}", entry.placement)


def _shape(entry: Entry, spec: ModelSpec) -> tuple[int, ...]:
    hidden, heads, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if entry.tensor.endswith("norm.weight"):
        return (hidden,)
    by_placement = {
        "vocab": (spec.vocab_size, hidden),
        "query": (heads, hidden),
        "key": (kv, hidden),
        "value": (kv, hidden),
        "gate": (spec.ffn_size, hidden),
        "up": (spec.ffn_size, hidden),
    }
    if entry.placement == "columns":
        return (hidden, heads if "o_proj" in entry.tensor else spec.ffn_size)
    return by_placement[entry.placement]


def _shards(entry: Entry, spec: ModelSpec, tp: int, rank: int) -> Iterator[Shard]:
    shape = _shape(entry, spec)
    if entry.placement == "replicated":
        whole = Box((0,) * len(shape), shape)
        yield Shard(entry.tensor, whole, entry.param, whole)
    elif entry.placement == "columns":
        rows, width = shape[0], shape[1] // tp
        yield Shard(entry.tensor, Box((0, rank * width), (rows, (rank + 1) * width)), entry.param, Box((0, 0), (rows, width)))
    else:
        for start, stop, at in _row_runs(entry.placement, shape[0], spec, tp, rank):
            columns = shape[1]
            box, place = Box((start, 0), (stop, columns)), Box((at, 0), (at + stop - start, columns))
            yield Shard(entry.tensor, box, entry.param, place)


def _row_runs(placement: Placement, rows: int, spec: ModelSpec, tp: int, rank: int) -> Iterator[tuple[int, int, int]]:
    """Runs of rows that stay together: (first row, last row + 1) of the tensor, first row of the parameter."""
    if placement == "vocab":
        per_rank = spec.padded_vocab_size(tp) // tp
        start, stop = rank * per_rank, min((rank + 1) * per_rank, rows)
        if start < stop:
            yield start, stop, 0
    elif placement in ("gate", "up"):
        per_rank = rows // tp
        yield rank * per_rank, (rank + 1) * per_rank, per_rank if placement == "up" else 0
    else:
        queries = spec.num_heads // spec.num_kv_heads * spec.head_dim
        group_rows = queries + 2 * spec.head_dim
        size = queries if placement == "query" else spec.head_dim
        offset = {"query": 0, "key": queries, "value": queries + spec.head_dim}[placement]
        groups = spec.num_kv_heads // tp
        for local in range(groups):
            group = rank * groups + local
            yield group * size, (group + 1) * size, local * group_rows + offset

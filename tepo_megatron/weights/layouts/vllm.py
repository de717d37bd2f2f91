"""Layout of a model over the workers of vLLM servers (docs/reference/reshard.md).

Embedding and head are padded to a multiple of 64 rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.geometry import ShardLayout
from tepo_megatron.weights.layouts.table import (
    EMBEDDING,
    EXPERT_NAMES,
    FINAL_NORM,
    HEAD,
    ParamMapping,
    RowBlock,
    Split,
    applies,
    lay_out,
    layer_mappings,
    tensor_shapes,
)

VOCAB_PADDING = 64


@dataclass(frozen=True)
class VllmParallel:
    """Each of ``replicas`` servers has a whole model. Ranks count tp fastest, then pp, then servers."""

    tp: int = 1
    pp: int = 1
    replicas: int = 1

    @property
    def server_size(self) -> int:
        return self.tp * self.pp

    @property
    def world_size(self) -> int:
        return self.server_size * self.replicas


def vllm_layers(num_layers: int, pp: int) -> tuple[range, ...]:
    """Remaining layers go one each to the stages before the last, from the back."""
    counts = [num_layers // pp] * pp
    for extra in range(num_layers % pp):
        counts[pp - 2 - extra] += 1
    ends = [sum(counts[: stage + 1]) for stage in range(pp)]
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def vllm_layout(
    spec: ModelSpec,
    *,
    tp: int,
    tp_rank: int,
    pp: int = 1,
    pp_rank: int = 0,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> ShardLayout:
    return lay_out(
        spec,
        shapes=tensor_shapes(spec) if shapes is None else shapes,
        mappings=[(mapping, mapping.vllm) for mapping in _stage_mappings(spec, pp, pp_rank)],
        split=lambda _: Split(tp, tp_rank),
        row_blocks=lambda mapping, rows: _row_blocks(mapping, rows, spec, tp, tp_rank),
        vocab_rows=_padded_vocab_size(spec) // tp,
        first_row=lambda mapping: _first_row(mapping, spec, tp),
    )


def vllm_ranks(spec: ModelSpec, parallel: VllmParallel) -> list[ShardLayout]:
    """Raises ValueError if vLLM cannot split the model so."""
    check_vllm_parallel(spec, tp=parallel.tp, pp=parallel.pp)
    shapes = tensor_shapes(spec)
    server = [
        vllm_layout(spec, tp=parallel.tp, tp_rank=tp_rank, pp=parallel.pp, pp_rank=pp_rank, shapes=shapes)
        for pp_rank in range(parallel.pp)
        for tp_rank in range(parallel.tp)
    ]
    return server * parallel.replicas


def check_vllm_parallel(spec: ModelSpec, *, tp: int, pp: int) -> None:
    """Raises ValueError with every reason if vLLM cannot split this model so."""
    heads = spec.num_kv_heads
    problems = [
        f"tp = {tp} does not divide the model's {size} {name}; use a divisor of {size}"
        for name, size in (
            ("attention heads", spec.num_heads),
            *(() if spec.experts is None else (("MLP size of an expert", spec.ffn_size),)),
            *spec.mlp_sizes.items(),
            (f"rows of the vocabulary (padded to a multiple of {VOCAB_PADDING})", _padded_vocab_size(spec)),
        )
        if size % tp
    ]
    if heads % tp and tp % heads:
        problems.append(f"tp = {tp} neither divides the model's {heads} key/value heads nor is a multiple of them")
    if pp > spec.num_layers:
        problems.append(f"pp = {pp} is more than the model's {spec.num_layers} layers")
    if problems:
        raise ValueError("the rollout servers cannot split the model so:\n  " + "\n  ".join(problems))


def _padded_vocab_size(spec: ModelSpec) -> int:
    return -(-spec.vocab_size // VOCAB_PADDING) * VOCAB_PADDING


def _stage_mappings(spec: ModelSpec, pp: int, pp_rank: int) -> Iterator[ParamMapping]:
    everywhere = spec.experts is not None and EXPERT_NAMES[spec.architecture].ends_everywhere
    is_first, is_last = (pp_rank == end or everywhere for end in (0, pp - 1))
    if is_first or (is_last and spec.tied_embeddings):
        yield EMBEDDING
    for layer in vllm_layers(spec.num_layers, pp)[pp_rank]:
        yield from layer_mappings(spec, layer, layer)
    if is_last:
        yield FINAL_NORM
        if applies(HEAD, spec):
            yield HEAD


def _first_row(mapping: ParamMapping, spec: ModelSpec, tp: int) -> int:
    if mapping.expert is None:
        return 0
    return mapping.expert * (spec.hidden_size if mapping.split_kind == "columns" else 2 * spec.ffn_size // tp)


def _row_blocks(mapping: ParamMapping, rows: int, spec: ModelSpec, tp: int, rank: int) -> Iterator[RowBlock]:
    if mapping.split_kind == "vocab":
        per_rank = _padded_vocab_size(spec) // tp
        yield RowBlock(rank * per_rank, min((rank + 1) * per_rank, rows), 0)
    elif mapping.split_kind in ("gate", "up"):
        per_rank = rows // tp
        yield RowBlock(rank * per_rank, (rank + 1) * per_rank, per_rank if mapping.split_kind == "up" else 0)
    elif mapping.split_kind == "query":
        per_rank = rows // tp
        yield RowBlock(rank * per_rank, (rank + 1) * per_rank, 0)
    else:
        per_rank = max(spec.num_kv_heads // tp, 1) * spec.head_dim
        # With more ranks than key/value heads, tp / num_kv_heads neighbouring ranks hold the same head.
        first = rank * spec.num_kv_heads // tp if tp > spec.num_kv_heads else rank
        queries = spec.num_heads // tp * spec.head_dim
        yield RowBlock(first * per_rank, (first + 1) * per_rank, queries + (per_rank if mapping.split_kind == "value" else 0))

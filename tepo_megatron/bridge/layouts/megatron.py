"""How Megatron-Core lays out a model over tensor- and pipeline-parallel ranks.

Megatron fuses: q, k and v interleave per key/value group (all queries of a group, its key, its value); gate and up are
stacked inside each tensor-parallel shard; embedding and head are padded to a multiple of tp rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tepo_megatron.bridge.architecture import ModelSpec
from tepo_megatron.bridge.layouts.shards import Run, lay_out
from tepo_megatron.bridge.layouts.table import EMBEDDING, FINAL_NORM, HEAD, Entry, applies, layer_entries, tensor_shapes
from tepo_megatron.types import ShardLayout

Stages = Sequence[Sequence[range]]
"""For every pipeline stage the layers of each of its model chunks; one chunk unless the pipeline is interleaved (VPP)."""


@dataclass(frozen=True)
class MegatronParallel:
    """How the trainer splits the model. Global ranks are numbered tp innermost, then dp, pp outermost.

    ``stages`` None means even stages without interleaving. ``fused_norms``: the layers are Transformer Engine's.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    stages: tuple[tuple[range, ...], ...] | None = None
    fused_norms: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


def pipeline_stages(
    num_layers: int, pp: int, *, chunks: int = 1, first: int | None = None, last: int | None = None
) -> tuple[tuple[range, ...], ...]:
    """The stages that Megatron makes of its settings: ``chunks`` per stage (its virtual pipeline size), and the layers of the
    first and the last stage where they differ from the rest.

    Raises ValueError where layers are left over.
    """
    if chunks > 1 and pp == 1:
        raise ValueError(f"a virtual pipeline size of {chunks} needs a pipeline; set pp, or leave one chunk")
    given = {stage: layers for stage, layers in ((0, first), (pp - 1, last)) if layers is not None}
    rest, others = num_layers - sum(given.values()), pp - len(given)
    if rest < 0 or (rest % others if others else rest):
        raise ValueError(
            f"{num_layers} layers do not split over {pp} pipeline stages"
            + (f" with {first} in the first and {last} in the last" if given else "")
            + "; change pp, or the layers of the first and the last stage"
        )
    counts = [given.get(stage, rest // others if others else 0) for stage in range(pp)]
    uneven = [count for count in counts if count % chunks or not count]
    if uneven:
        raise ValueError(
            f"{chunks} chunks do not divide a pipeline stage of {uneven[0]} layers; change the virtual pipeline size"
        )
    stages: list[list[range]] = [[] for _ in range(pp)]
    layer = 0
    for _ in range(chunks):
        for stage, count in enumerate(counts):
            stages[stage].append(range(layer, layer + count // chunks))
            layer += count // chunks
    return tuple(tuple(stage) for stage in stages)


def megatron_layout(
    spec: ModelSpec,
    *,
    tp: int,
    tp_rank: int,
    pp: int,
    pp_rank: int,
    fused_norms: bool = False,
    stages: Stages | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> ShardLayout:
    """What the rank at (tp_rank, pp_rank) holds; stages are even unless given.

    With tied embeddings the last stage of a pipeline holds a second copy of the embedding, as Megatron does. In a stage of
    several chunks the parameters of chunk v are named ``model<v>.``…, as Megatron's checkpoints name them. ``shapes`` is
    ``tensor_shapes(spec)`` where the caller has it already.
    """
    stages = stages or pipeline_stages(spec.num_layers, pp)
    entries = list(_entries(spec, stages, pp_rank, fused_norms=fused_norms))
    return lay_out(
        spec,
        shapes=tensor_shapes(spec) if shapes is None else shapes,
        placed=[(entry, entry.megatron) for entry in entries],
        tp=tp,
        runs=lambda entry, rows: _row_runs(entry, rows, spec, tp, tp_rank),
        vocab_rows=spec.padded_vocab_size(tp) // tp,
        tp_rank=tp_rank,
    )


def megatron_ranks(spec: ModelSpec, parallel: MegatronParallel) -> list[ShardLayout]:
    """The layout of every rank of the trainer. Raises ValueError where Megatron could not split the model so."""
    spec.check_parallel(tp=parallel.tp, pp=1)
    stages = parallel.stages or pipeline_stages(spec.num_layers, parallel.pp)
    _check_stages(stages, spec, parallel.pp)
    shapes = tensor_shapes(spec)
    ranks: list[ShardLayout] = []
    for pp_rank in range(parallel.pp):
        replica = [
            megatron_layout(
                spec,
                tp=parallel.tp,
                tp_rank=tp_rank,
                pp=parallel.pp,
                pp_rank=pp_rank,
                fused_norms=parallel.fused_norms,
                stages=stages,
                shapes=shapes,
            )
            for tp_rank in range(parallel.tp)
        ]
        ranks += replica * parallel.dp
    return ranks


def _check_stages(stages: Stages, spec: ModelSpec, pp: int) -> None:
    held = sorted(layer for stage in stages for chunk in stage for layer in chunk)
    if len(stages) != pp or held != list(range(spec.num_layers)):
        raise ValueError(
            f"the pipeline stages {[list(map(str, stage)) for stage in stages]} must be {pp}, and hold each of the model's "
            f"{spec.num_layers} layers once"
        )


def _entries(spec: ModelSpec, stages: Stages, pp_rank: int, *, fused_norms: bool) -> Iterator[Entry]:
    """The tensors of one stage, with the names of Megatron's parameters."""
    chunks = stages[pp_rank]
    prefixes = [f"model{number}." for number in range(len(chunks))] if len(chunks) > 1 else [""]

    def named(entry: Entry, prefix: str) -> Entry:
        return replace(entry, megatron=prefix + entry.megatron)

    if pp_rank == 0:
        yield named(EMBEDDING, prefixes[0])
    for prefix, chunk in zip(prefixes, chunks, strict=True):
        for local, layer in enumerate(chunk):
            for entry in layer_entries(spec, layer, local, fused_norms=fused_norms):
                yield named(entry, prefix)
    if pp_rank == len(stages) - 1:
        yield named(FINAL_NORM, prefixes[-1])
        if applies(HEAD, spec):
            yield named(HEAD, prefixes[-1])
        elif len(stages) > 1:
            yield named(replace(EMBEDDING, megatron=HEAD.megatron), prefixes[-1])


def _row_runs(entry: Entry, rows: int, spec: ModelSpec, tp: int, rank: int) -> Iterator[Run]:
    if entry.placement == "vocab":
        per_rank = spec.padded_vocab_size(tp) // tp
        yield Run(rank * per_rank, min((rank + 1) * per_rank, rows), 0)
    elif entry.placement in ("gate", "up"):
        per_rank = rows // tp
        yield Run(rank * per_rank, (rank + 1) * per_rank, per_rank if entry.placement == "up" else 0)
    else:
        queries = spec.num_heads // spec.num_kv_heads * spec.head_dim
        group_rows = queries + 2 * spec.head_dim
        size = queries if entry.placement == "query" else spec.head_dim
        offset = {"query": 0, "key": queries, "value": queries + spec.head_dim}[entry.placement]
        groups = spec.num_kv_heads // tp
        for local in range(groups):
            group = rank * groups + local
            yield Run(group * size, (group + 1) * size, local * group_rows + offset)

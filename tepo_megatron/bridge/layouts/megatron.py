"""How Megatron-Core lays out a model over tensor-, pipeline- and expert-parallel ranks.

Megatron fuses: q, k and v interleave per key/value group (all queries of a group, its key, its value); gate and up are
stacked inside each tensor-parallel shard; embedding and head are padded to a multiple of tp rows. An expert-parallel rank holds
every matrix of consecutive experts, or its expert-tensor-parallel part of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tepo_megatron.bridge.architecture import ModelSpec
from tepo_megatron.bridge.geometry import ShardLayout
from tepo_megatron.bridge.layouts.shards import Run, Split, lay_out
from tepo_megatron.bridge.layouts.table import EMBEDDING, FINAL_NORM, HEAD, Entry, applies, layer_entries, tensor_shapes


class Place(NamedTuple):
    """A rank's coordinates: in the groups of the dense weights and, last, in those of the experts'."""

    tp_rank: int
    dp_rank: int
    pp_rank: int
    etp_rank: int
    ep_rank: int
    expert_dp_rank: int


Stages = Sequence[Sequence[range]]
"""For every pipeline stage the layers of each of its model chunks; one chunk unless the pipeline is interleaved (VPP)."""


@dataclass(frozen=True)
class MegatronParallel:
    """How the trainer splits the model. Global ranks are numbered tp innermost, then dp, pp outermost.

    The same tp × dp ranks of a stage are numbered once more for the experts, as Megatron does: etp innermost, then ep, then the
    copies. ``etp`` None means tp. ``stages`` None means even stages without interleaving. ``fused_norms``: the layers are
    Transformer Engine's, experts included.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    stages: tuple[tuple[range, ...], ...] | None = None
    fused_norms: bool = False
    ep: int = 1
    etp: int | None = None

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ranks over which each matrix of an expert is split."""
        return self.tp if self.etp is None else self.etp

    def place(self, rank: int) -> Place:
        """Where a global rank stands in each of its groups."""
        pp_rank, in_stage = divmod(rank, self.tp * self.dp)
        expert_dp_rank, in_copy = divmod(in_stage, self.expert_tp * self.ep)
        return Place(
            tp_rank=in_stage % self.tp,
            dp_rank=in_stage // self.tp,
            pp_rank=pp_rank,
            etp_rank=in_copy % self.expert_tp,
            ep_rank=in_copy // self.expert_tp,
            expert_dp_rank=expert_dp_rank,
        )

    def check(self, spec: ModelSpec) -> None:
        """Raises ValueError where Megatron could not split this model so, whatever its stages."""
        spec.check_parallel(tp=self.tp, pp=1, ep=self.ep, etp=self.etp)
        if self.tp * self.dp % (self.expert_tp * self.ep):
            raise ValueError(
                f"the experts' split, ep × etp = {self.ep} × {self.expert_tp}, does not divide the tp × dp = {self.tp} × "
                f"{self.dp} ranks of a pipeline stage; change engine.parallel"
            )


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
    spec: ModelSpec, parallel: MegatronParallel, rank: int, *, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> ShardLayout:
    """What a global rank holds.

    With tied embeddings the last stage of a pipeline holds a second copy of the embedding, as Megatron does. In a stage of
    several chunks the parameters of chunk v are named ``model<v>.``…, as Megatron's checkpoints name them. ``shapes`` is
    ``tensor_shapes(spec)`` where the caller has it already.
    """
    place, tp = parallel.place(rank), parallel.tp
    dense, expert = Split(tp, place.tp_rank), Split(parallel.expert_tp, place.etp_rank)

    def split(entry: Entry) -> Split:
        return dense if entry.expert is None else expert

    entries = list(_entries(spec, parallel, place))
    return lay_out(
        spec,
        shapes=tensor_shapes(spec) if shapes is None else shapes,
        placed=[(entry, entry.megatron) for entry in entries],
        split=split,
        runs=lambda entry, rows: _row_runs(entry, rows, spec, *split(entry)),
        vocab_rows=spec.padded_vocab_size(tp) // tp,
    )


def megatron_ranks(spec: ModelSpec, parallel: MegatronParallel) -> list[ShardLayout]:
    """The layout of every rank of the trainer. Raises ValueError where Megatron could not split the model so."""
    parallel.check(spec)
    _check_stages(parallel.stages or pipeline_stages(spec.num_layers, parallel.pp), spec, parallel.pp)
    shapes = tensor_shapes(spec)
    same: dict[tuple[int, ...], ShardLayout] = {}
    ranks: list[ShardLayout] = []
    for rank in range(parallel.world_size):
        place = parallel.place(rank)
        key = (place.pp_rank, place.tp_rank) + ((place.ep_rank, place.etp_rank) if spec.experts else ())
        if key not in same:
            same[key] = megatron_layout(spec, parallel, rank, shapes=shapes)
        ranks.append(same[key])
    return ranks


def _check_stages(stages: Stages, spec: ModelSpec, pp: int) -> None:
    held = sorted(layer for stage in stages for chunk in stage for layer in chunk)
    if len(stages) != pp or held != list(range(spec.num_layers)):
        raise ValueError(
            f"the pipeline stages {[list(map(str, stage)) for stage in stages]} must be {pp}, and hold each of the model's "
            f"{spec.num_layers} layers once"
        )


def _entries(spec: ModelSpec, parallel: MegatronParallel, place: Place) -> Iterator[Entry]:
    """The tensors of one rank, with the names of Megatron's parameters."""
    stages = parallel.stages or pipeline_stages(spec.num_layers, parallel.pp)
    chunks, pp_rank = stages[place.pp_rank], place.pp_rank
    each = spec.experts.count // parallel.ep if spec.experts else 0
    experts = range(place.ep_rank * each, (place.ep_rank + 1) * each)
    prefixes = [f"model{number}." for number in range(len(chunks))] if len(chunks) > 1 else [""]

    def named(entry: Entry, prefix: str) -> Entry:
        return replace(entry, megatron=prefix + entry.megatron)

    if pp_rank == 0:
        yield named(EMBEDDING, prefixes[0])
    for prefix, chunk in zip(prefixes, chunks, strict=True):
        for local, layer in enumerate(chunk):
            for entry in layer_entries(spec, layer, local, fused_norms=parallel.fused_norms, experts=experts):
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

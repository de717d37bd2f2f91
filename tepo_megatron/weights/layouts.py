"""Layout of a model over ranks of Megatron-Core and vLLM (docs/reference/reshard.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from tepo_megatron.weights import table
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.geometry import Box, Shard, ShardLayout
from tepo_megatron.weights.table import ParamMapping, SplitKind

_Stages = tuple[tuple[range, ...], ...]
"""Layers of each chunk of each stage."""


class _RankCoordinates(NamedTuple):
    tp_rank: int
    pp_rank: int
    etp_rank: int
    ep_rank: int


@dataclass(frozen=True)
class MegatronParallel:
    """Global ranks count tp fastest, then dp, then pp; for experts etp, then ep, then copies.

    ``dp`` includes context parallelism. ``etp`` None means tp, ``stages`` None even stages. ``fused_norms``: layers are
    Transformer Engine's.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    stages: _Stages | None = None
    fused_norms: bool = False
    ep: int = 1
    etp: int | None = None

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    def coordinates(self, rank: int) -> _RankCoordinates:
        pp_rank, in_stage = divmod(rank, self.tp * self.dp)
        ep_rank, etp_rank = divmod(in_stage % (self.expert_tp * self.ep), self.expert_tp)
        return _RankCoordinates(in_stage % self.tp, pp_rank, etp_rank, ep_rank)

    def check(self, spec: ModelSpec) -> None:
        spec.check_parallel(tp=self.tp, ep=self.ep, etp=self.etp)
        if self.tp * self.dp % (self.expert_tp * self.ep):
            raise ValueError(
                f"the experts' split, ep × etp = {self.ep} × {self.expert_tp}, does not divide the tp × dp = {self.tp} × "
                f"{self.dp} ranks of a pipeline stage; change engine.parallel"
            )
        stages = self.stages_of(spec)
        layers = sorted(layer for stage in stages for chunk in stage for layer in chunk)
        if len(stages) != self.pp or layers != list(range(spec.num_layers)):
            raise ValueError(
                f"the pipeline stages {[list(map(str, stage)) for stage in stages]} must be {self.pp}, and hold each of the "
                f"model's {spec.num_layers} layers once"
            )

    def stages_of(self, spec: ModelSpec) -> _Stages:
        return self.stages or pipeline_stages(spec.num_layers, self.pp)

    def layout(self, spec: ModelSpec, rank: int) -> ShardLayout:
        """``rank`` is global. With several chunks, parameters of chunk v are named ``model<v>.``…."""
        coordinates, tp = self.coordinates(rank), self.tp
        dense, expert = (tp, coordinates.tp_rank), (self.expert_tp, coordinates.etp_rank)
        return _lay_out(
            spec,
            mappings=_rank_mappings(spec, self, coordinates),
            split=lambda mapping: dense if mapping.expert is None else expert,
            head_blocks=lambda kind: _megatron_head_blocks(kind, spec, *dense),
            vocab_rows=spec.padded_vocab_size(tp) // tp,
        )

    def layouts(self, spec: ModelSpec) -> list[ShardLayout]:
        self.check(spec)
        # data-parallel copies share one layout
        ranks = map(self.coordinates, range(self.world_size))
        places = [(rank.pp_rank, rank.tp_rank, *((rank.ep_rank, rank.etp_rank) if spec.experts else ())) for rank in ranks]
        layouts = {place: self.layout(spec, places.index(place)) for place in dict.fromkeys(places)}
        return [layouts[place] for place in places]


def pipeline_stages(num_layers: int, pp: int, *, chunks: int = 1, first: int | None = None, last: int | None = None) -> _Stages:
    """``chunks``: Megatron's virtual pipeline size; ``first``, ``last``: layers of the end stages if they differ."""
    if chunks > 1 and pp == 1:
        raise ValueError(f"a virtual pipeline size of {chunks} needs a pipeline; set pp, or leave one chunk")
    fixed = {stage: layers for stage, layers in ((0, first), (pp - 1, last)) if layers is not None}
    remaining_layers, remaining_stages = num_layers - sum(fixed.values()), pp - len(fixed)
    if (
        remaining_layers < 0
        or bool(remaining_layers) != bool(remaining_stages)
        or (remaining_stages and remaining_layers % remaining_stages)
    ):
        ends = [f"{layers} in the {end}" for end, layers in (("first", first), ("last", last)) if layers is not None]
        raise ValueError(
            f"{num_layers} layers do not split over {pp} pipeline stages"
            + (f" with {' and '.join(ends)}" if ends else "")
            + "; change pp, or the layers of the first and the last stage"
        )
    counts = [fixed.get(stage, remaining_layers // remaining_stages if remaining_stages else 0) for stage in range(pp)]
    uneven = [count for count in counts if count % chunks or not count]
    if uneven:
        raise ValueError(
            f"{chunks} chunks do not divide a pipeline stage of {uneven[0]} layers; change the virtual pipeline size"
        )
    # An interleaved pipeline goes through all stages once for each chunk, so that a stage holds distant layers.
    layers = _consecutive([count // chunks for count in counts] * chunks)
    return tuple(layers[stage::pp] for stage in range(pp))


def _consecutive(counts: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True))


def _rank_mappings(spec: ModelSpec, parallel: MegatronParallel, coordinates: _RankCoordinates) -> Iterator[_NamedMapping]:
    stages = parallel.stages_of(spec)
    chunks, pp_rank = stages[coordinates.pp_rank], coordinates.pp_rank
    experts_per_rank = spec.experts.count // parallel.ep if spec.experts else 0
    experts = range(coordinates.ep_rank * experts_per_rank, (coordinates.ep_rank + 1) * experts_per_rank)
    prefixes = [f"model{number}." for number in range(len(chunks))] if len(chunks) > 1 else [""]
    if pp_rank == 0:
        yield table.EMBEDDING, prefixes[0] + table.EMBEDDING.megatron
    for prefix, chunk in zip(prefixes, chunks, strict=True):
        for local, layer in enumerate(chunk):
            for mapping in table.layer_mappings(spec, layer, local, fused_norms=parallel.fused_norms, experts=experts):
                yield mapping, prefix + mapping.megatron
    if pp_rank == len(stages) - 1:
        yield table.FINAL_NORM, prefixes[-1] + table.FINAL_NORM.megatron
        if table.HEAD.applies(spec) or len(stages) > 1:  # a tied head on one stage is the embedding itself
            yield table.HEAD if table.HEAD.applies(spec) else table.EMBEDDING, prefixes[-1] + table.HEAD.megatron


def _megatron_head_blocks(kind: SplitKind, spec: ModelSpec, tp: int, rank: int) -> Iterator[_RowBlock]:
    # A group is the query heads that share a key/value head, then that key, then that value.
    queries = spec.num_heads // spec.num_kv_heads * spec.head_dim
    size = queries if kind == "query" else spec.head_dim
    offset = {"query": 0, "key": queries, "value": queries + spec.head_dim}[kind]
    groups = spec.num_kv_heads // tp
    for local in range(groups):
        group = rank * groups + local
        yield group * size, (group + 1) * size, local * (queries + 2 * spec.head_dim) + offset


class _TrainerSizes(Protocol):
    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def vpp(self) -> int: ...
    @property
    def dp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def cp_comm_type(self) -> str: ...
    @property
    def num_layers_in_first_pipeline_stage(self) -> int | None: ...
    @property
    def num_layers_in_last_pipeline_stage(self) -> int | None: ...
    @property
    def ep(self) -> int: ...
    @property
    def etp(self) -> int | None: ...
    @property
    def sequence_parallel(self) -> bool: ...
    @property
    def even(self) -> _TrainerSizes: ...


def check_trainer_split(spec: ModelSpec, parallel: _TrainerSizes) -> MegatronParallel:
    tp, cp, ep, etp = parallel.tp, parallel.cp, parallel.ep, parallel.etp
    spec.check_parallel(tp=tp, ep=ep, etp=etp)
    stages = pipeline_stages_of(spec, parallel)
    if spec.experts is not None and tp > 1 and not parallel.sequence_parallel:
        raise ValueError(
            f"engine.parallel.tp = {tp} with experts needs sequence parallelism (Megatron routes each token on one rank only); "
            "set engine.parallel.sequence_parallel = true"
        )
    if spec.experts is not None and ep == 1 and etp not in (None, tp):
        raise ValueError(
            f"engine.parallel.etp = {etp} differs from tp = {tp}, which Megatron trains right only with ep > 1 (otherwise it "
            "sums the experts' gradients over the dense weights' ranks); raise ep, or unset etp"
        )
    for name, heads in (("attention heads", spec.num_heads), ("key/value heads", spec.num_kv_heads)):
        if parallel.cp_comm_type == "a2a" and heads // tp % cp:
            raise ValueError(
                f"engine.parallel.cp = {cp} with cp_comm_type = a2a does not divide the {heads // tp} {name} that a rank has "
                f"with tp = {tp}; set cp_comm_type = p2p, or another cp"
            )
    return MegatronParallel(tp, parallel.pp, parallel.dp * cp, stages, ep=ep, etp=etp)


def pipeline_stages_of(spec: ModelSpec, parallel: _TrainerSizes) -> _Stages:
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    try:
        return pipeline_stages(spec.num_layers, parallel.pp, chunks=parallel.vpp, first=first, last=last)
    except ValueError as error:
        names = ("pp", "vpp", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        settings = {name: getattr(parallel, name) for name in names if name != "vpp" or parallel.vpp > 1}
        shown = ", ".join(f"{name} = {value}" for name, value in settings.items() if value is not None)
        raise ValueError(f"engine.parallel does not fit the model with {shown}: {error}") from None


class _Fp8Settings(Protocol):
    @property
    def recipe(self) -> str: ...
    @property
    def first_layers_bf16(self) -> int: ...
    @property
    def last_layers_bf16(self) -> int: ...


_FP8_MULTIPLES = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
_GATHERED_BLOCK = 128  # tokens and columns, in which Transformer Engine gathers activations for "blockwise"; it asserts both


def _check_fp8(spec: ModelSpec, parallel: _TrainerSizes, fp8: _Fp8Settings) -> None:
    """Raises ValueError. Embedding and head are not FP8."""
    if fp8.recipe == "none":
        return
    recipe, multiple = fp8.recipe, _FP8_MULTIPLES[fp8.recipe]
    wrong = [f"{width} ({name})" for name, width in _fp8_widths(spec, parallel) if width % multiple]
    if wrong:
        raise ValueError(
            f"engine.fp8.recipe = {recipe} needs matrices whose sizes on a rank are multiples of {multiple}, and under "
            f"tp = {parallel.tp} this model has {', '.join(wrong)}; lower engine.parallel.tp, or set engine.fp8.recipe = none"
        )
    if recipe == "blockwise" and parallel.sequence_parallel and spec.hidden_size % _GATHERED_BLOCK:
        raise ValueError(
            f"engine.fp8.recipe = {recipe} gathers activations in blocks of {_GATHERED_BLOCK} under sequence parallelism, and "
            f"the model's hidden size is {spec.hidden_size}; set engine.parallel.sequence_parallel = false, or another recipe"
        )
    per_stage = spec.num_layers // parallel.pp
    for name, count in (("first", fp8.first_layers_bf16), ("last", fp8.last_layers_bf16)):
        if count > per_stage:
            raise ValueError(
                f"engine.fp8.{name}_layers_bf16 = {count} is more than the {per_stage} layers of a pipeline stage, which is as "
                "far as Megatron-Core goes; lower it"
            )
    if fp8.first_layers_bf16 + fp8.last_layers_bf16 >= spec.num_layers:
        raise ValueError(
            f"engine.fp8 keeps all {spec.num_layers} layers in bfloat16; lower first_layers_bf16 or last_layers_bf16, or set "
            "recipe = none"
        )


def _fp8_widths(spec: ModelSpec, parallel: _TrainerSizes) -> Iterator[tuple[str, int]]:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    mlp_ranks = parallel.tp if spec.experts is None or parallel.etp is None else parallel.etp
    yield "hidden size", spec.hidden_size
    yield "queries, keys and values of a rank", (queries + 2 * keys) // parallel.tp
    yield "attention output of a rank", queries // parallel.tp
    yield "MLP size of a rank", spec.ffn_size // mlp_ranks
    if spec.experts is not None:
        yield from ((f"{name} on a rank", size // parallel.tp) for name, size in spec.mlp_sizes.items())


def check_trainer_models(
    spec: ModelSpec, teachers: Mapping[str, ModelSpec], parallel: _TrainerSizes, fp8: _Fp8Settings, *, compares_logits: bool
) -> None:
    """``teachers``: those on its ranks."""
    for name, teacher in teachers.items():
        try:
            check_trainer_split(teacher, parallel.even)
            _check_fp8(teacher, parallel.even, fp8)
        except ValueError as error:
            raise ValueError(
                f"teachers.{name} is split as the policy is: {error}; or set teachers.{name}.place = server"
            ) from error
        if compares_logits and teacher.vocab_size != spec.vocab_size:
            raise ValueError(
                f"teachers.{name} has {teacher.vocab_size} logits and the policy {spec.vocab_size}, which "
                "objective.distill.of = all compares one by one; set of = sampled, or take another teacher"
            )
    check_trainer_split(spec, parallel)
    _check_fp8(spec, parallel, fp8)


_VOCAB_PADDING = 64


@dataclass(frozen=True)
class VllmParallel:
    """Ranks count tp fastest, then pp, then the ``replicas`` servers."""

    tp: int = 1
    pp: int = 1
    replicas: int = 1

    @property
    def server_size(self) -> int:
        return self.tp * self.pp

    @property
    def world_size(self) -> int:
        return self.server_size * self.replicas

    def stages(self, num_layers: int) -> tuple[range, ...]:
        """Remaining layers go one each to stages before the last, from the back."""
        counts = [num_layers // self.pp] * self.pp
        for extra in range(num_layers % self.pp):
            counts[self.pp - 2 - extra] += 1
        return _consecutive(counts)

    def check(self, spec: ModelSpec) -> None:
        tp, heads = self.tp, spec.num_kv_heads
        sizes = {
            "attention heads": spec.num_heads,
            **({} if spec.experts is None else {"MLP size of an expert": spec.ffn_size}),
            **spec.mlp_sizes,
            f"rows of the vocabulary (padded to a multiple of {_VOCAB_PADDING})": spec.padded_vocab_size(_VOCAB_PADDING),
        }
        problems = [
            f"tp = {tp} does not divide the model's {size} {name}; use a divisor of {size}"
            for name, size in sizes.items()
            if size % tp
        ]
        if heads % tp and tp % heads:
            problems.append(f"tp = {tp} neither divides the model's {heads} key/value heads nor is a multiple of them")
        if self.pp > spec.num_layers:
            problems.append(f"pp = {self.pp} is more than the model's {spec.num_layers} layers")
        if problems:
            raise ValueError("the rollout servers cannot split the model so:\n  " + "\n  ".join(problems))

    def pads_blocks(self, spec: ModelSpec) -> bool:
        return spec.experts is not None and (spec.ffn_size // self.tp % 128 > 0 or spec.hidden_size % 128 > 0)

    def layouts(self, spec: ModelSpec) -> list[ShardLayout]:
        self.check(spec)
        ranks = [self._layout(spec, tp_rank, pp_rank) for pp_rank in range(self.pp) for tp_rank in range(self.tp)]
        return ranks * self.replicas

    def _layout(self, spec: ModelSpec, tp_rank: int, pp_rank: int) -> ShardLayout:
        split = self.tp, tp_rank

        def first_row(mapping: ParamMapping) -> int:
            rows = spec.hidden_size if mapping.split_kind == "columns" else 2 * spec.ffn_size // self.tp
            return rows * (mapping.expert or 0)

        return _lay_out(
            spec,
            mappings=((mapping, mapping.vllm) for mapping in _stage_mappings(spec, self, pp_rank)),
            split=lambda _: split,
            head_blocks=lambda kind: _vllm_head_blocks(kind, spec, *split),
            vocab_rows=spec.padded_vocab_size(_VOCAB_PADDING) // self.tp,
            first_row=first_row,
        )


def check_server_split(spec: ModelSpec, tp: int, field: str, quantization: str, transfer: str) -> None:
    try:
        VllmParallel(tp=tp).check(spec)
    except ValueError as error:
        raise ValueError(f"{field}.tp = {tp} does not fit this model: {error}") from None
    if quantization == "fp8_per_block" and transfer == "reshard" and VllmParallel(tp=tp).pads_blocks(spec):
        raise ValueError(
            f"{field}.quantization = fp8_per_block: a worker's part of an expert is {spec.ffn_size // tp} × "
            f"{spec.hidden_size}, which vLLM pads to multiples of 128; set {field}.transfer = gather, or another "
            "quantization or tp"
        )


def _stage_mappings(spec: ModelSpec, parallel: VllmParallel, pp_rank: int) -> Iterator[ParamMapping]:
    everywhere = spec.experts is not None and table.EXPERT_NAMES[spec.architecture].ends_everywhere
    is_first, is_last = (pp_rank == end or everywhere for end in (0, parallel.pp - 1))
    if is_first or (is_last and spec.tied_embeddings):
        yield table.EMBEDDING
    for layer in parallel.stages(spec.num_layers)[pp_rank]:
        yield from table.layer_mappings(spec, layer, layer)
    if is_last:
        yield table.FINAL_NORM
        if table.HEAD.applies(spec):
            yield table.HEAD


def _vllm_head_blocks(kind: SplitKind, spec: ModelSpec, tp: int, rank: int) -> Iterator[_RowBlock]:
    queries = spec.num_heads // tp * spec.head_dim
    if kind == "query":
        yield rank * queries, (rank + 1) * queries, 0
    else:
        per_rank = max(spec.num_kv_heads // tp, 1) * spec.head_dim
        # With more ranks than key/value heads, tp / num_kv_heads neighbouring ranks hold the same head.
        first = rank * spec.num_kv_heads // tp if tp > spec.num_kv_heads else rank
        yield first * per_rank, (first + 1) * per_rank, queries + (per_rank if kind == "value" else 0)


_NamedMapping = tuple[ParamMapping, str]  # and the name of this rank's parameter

_RowBlock = tuple[int, int, int]
"""Has the first row, the end, and the first row's place in the parameter."""


def _lay_out(
    spec: ModelSpec,
    *,
    mappings: Iterable[_NamedMapping],
    split: Callable[[ParamMapping], tuple[int, int]],
    head_blocks: Callable[[SplitKind], Iterable[_RowBlock]],
    vocab_rows: int,
    first_row: Callable[[ParamMapping], int] = lambda _: 0,
) -> ShardLayout:
    """``split``: number of ranks, and this one's; ``head_blocks``: its rows of queries, keys or values; ``first_row``: a
    tensor's place in its parameter.
    """

    def row_blocks(kind: SplitKind, rows: int, size: int, rank: int) -> Iterable[_RowBlock]:
        if kind in ("replicated", "columns"):
            return [(0, rows, 0)]
        if kind == "vocab":
            return [(rank * vocab_rows, min((rank + 1) * vocab_rows, rows), 0)]
        if kind in ("gate", "up"):
            per_rank = rows // size
            return [(rank * per_rank, (rank + 1) * per_rank, per_rank if kind == "up" else 0)]
        return head_blocks(kind)

    shards: list[Shard] = []
    params: dict[str, tuple[int, ...]] = {}
    for mapping, param in mappings:
        kind, shape, (size, rank), first = mapping.split_kind, mapping.shape_in(spec), split(mapping), first_row(mapping)
        extent = (vocab_rows, *shape[1:]) if kind == "vocab" else (0,) * len(shape)
        columns = Box.whole(shape[1:])
        if kind == "columns":
            columns = Box((rank * (shape[1] // size),), ((rank + 1) * (shape[1] // size),))
        for start, stop, row in row_blocks(kind, shape[0], size, rank):
            if start < stop:  # empty on a rank whose rows are all padding
                param_box = Box((first + row, *(0,) * len(columns.shape)), (first + row + stop - start, *columns.shape))
                shards.append(Shard(mapping.tensor, Box((start, *columns.start), (stop, *columns.stop)), param, param_box))
                extent = tuple(map(max, extent, param_box.stop))
        # Several tensors may share a fused parameter.
        params[param] = tuple(map(max, extent, params.get(param, extent)))
    return ShardLayout(table.tensor_shapes(spec), tuple(shards), params)

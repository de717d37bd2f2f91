"""``engine.parallel``: how the model is split over ranks."""

from typing import Literal

from pydantic import PositiveInt, model_validator

from tepo_megatron.config.base import Section


class ParallelConfig(Section):
    tp: PositiveInt = 1
    """Tensor-parallel size: heads, MLP and vocabulary are split over so many ranks."""

    pp: PositiveInt = 1
    """Pipeline-parallel size: layers are split over so many stages."""

    dp: PositiveInt = 1
    """Data-parallel size. The world is tp × pp × cp × dp processes."""

    vpp: PositiveInt = 1
    """Virtual pipeline stages per rank: the layers of a stage are cut into so many chunks, which take turns (interleaved 1F1B).
    The pipeline idles a vpp-th of the time, and activations travel vpp times as often. More than 1 needs pp > 1, and at least
    dp × pp sequences in a mini-batch, since micro-batches pass the stages in groups of pp."""

    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first stage, which has the embedding too; those that it and the last stage leave are divided evenly among
    the others. Named as in Megatron-Core. Default: as many as every other stage."""

    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last stage, which has the head and the logits too. Default: as many as every other stage."""

    cp: PositiveInt = 1
    """Context-parallel size: the tokens of every sequence are split over so many ranks, for responses whose activations one
    rank cannot hold (docs/reference/context.md). Each sequence is padded to a multiple of 2 cp."""

    cp_comm_type: Literal["p2p", "a2a"] = "p2p"
    """How Transformer Engine's attention exchanges what lies on other context-parallel ranks: ``p2p`` passes keys and values
    round in a ring, behind the computation; ``a2a`` trades tokens for heads, so that cp must divide the key/value heads of a
    tensor-parallel rank. Not run on a GPU yet. On a CPU keys and values are gathered."""

    ep: PositiveInt = 1
    """Expert-parallel size: the experts of a mixture-of-experts model are split over so many ranks, taken out of tp × cp ×
    dp."""

    etp: PositiveInt | None = None
    """Expert-tensor-parallel size: each expert is split over so many ranks. Default: tp, as in Megatron-Core."""

    sequence_parallel: bool = False
    """Split activations outside attention and MLP over the tensor-parallel ranks (Megatron's SP)."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def micro_batch_group(self) -> int:
        """A rank's number of micro-batches is a multiple of this: interleaved stages pass them on in groups of pp."""
        return self.pp if self.vpp > 1 else 1

    @model_validator(mode="after")
    def _sequence_parallel_needs_tp(self) -> "ParallelConfig":
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel = true needs tp > 1; set tp, or sequence_parallel = false")
        return self

    @model_validator(mode="after")
    def _the_exchange_can_act(self) -> "ParallelConfig":
        if self.cp == 1 and self.cp_comm_type != "p2p":
            raise ValueError(f"cp_comm_type = {self.cp_comm_type} is for context parallelism, and cp = 1; set cp, or unset it")
        return self

    @model_validator(mode="after")
    def _experts_fit_a_stage(self) -> "ParallelConfig":
        etp, ranks = self.tp if self.etp is None else self.etp, self.tp * self.cp * self.dp
        if ranks % (self.ep * etp):
            raise ValueError(
                f"ep × etp = {self.ep} × {etp} does not divide the {ranks} ranks of a pipeline stage (tp × cp × dp); "
                "lower ep, or raise dp"
            )
        return self

    @model_validator(mode="after")
    def _virtual_stages_need_stages(self) -> "ParallelConfig":
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp = {self.vpp} divides pipeline stages further and needs pp > 1; set pp, or vpp = 1")
        return self

    @model_validator(mode="after")
    def _uneven_stages_need_stages(self) -> "ParallelConfig":
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            layers = getattr(self, name)
            if layers is not None and self.pp == 1:
                raise ValueError(f"{name} = {layers} needs stages to differ from, and pp = 1; set pp, or leave {name} out")
            if layers is not None and layers % self.vpp:
                raise ValueError(
                    f"vpp = {self.vpp} does not divide {name} = {layers} into equal chunks; use a multiple of {self.vpp}, or "
                    "lower vpp"
                )
        return self

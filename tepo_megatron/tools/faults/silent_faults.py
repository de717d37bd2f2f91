"""The faults that no digest sees: what they do to a vLLM worker, as data that ``in_worker.py`` carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Server = Literal["dense", "dense bf16", "experts", "two workers"]


@dataclass(frozen=True)
class SilentFault:
    """``kind`` is what ``in_worker.py`` does to the parameters whose name ends with ``param`` (all where it is empty), or to
    what is no parameter. ``server``: the one that it is injected into. ``scales``: whether the size of the error can be chosen;
    where not, there is only the whole error.
    """

    name: str
    kind: str
    param: str = ""
    server: Server = "dense"
    scales: bool = True


SILENT_FAULTS: tuple[SilentFault, ...] = (
    SilentFault("halves of gate/up swapped in one MLP", "swap halves", "layers.1.mlp.gate_up_proj.weight"),
    SilentFault("an update that never took place, and says it did", "stale"),
    SilentFault("a stale prefix cache", "stale cache", scales=False),
    SilentFault("a wrong temperature in the sampler", "temperature"),
    SilentFault("a rotary buffer lost (sleep level 2)", "buffer lost"),
    SilentFault("one layer not loaded", "stale", "layers.2."),
    SilentFault("weights of the step before, at every step", "one behind"),
    SilentFault("a wrong rotary base", "rotary base"),
    SilentFault("a square weight transposed", "transpose", "layers.1.self_attn.o_proj.weight"),
    SilentFault("two query heads exchanged", "exchange heads", "layers.0.self_attn.qkv_proj.weight"),
    SilentFault("a norm's weight zeroed in one layer", "zero", "layers.3.input_layernorm.weight"),
    SilentFault("rows of the head beyond a boundary of the vocabulary stale", "stale rows", "lm_head.weight"),
    SilentFault("an update that never took place, without its label", "no label", scales=False),
    SilentFault("halves of gate/up swapped in one expert", "swap halves of an expert", "experts.w13_weight", "experts"),
    SilentFault("a tied head not updated", "stale head", "embed_tokens.weight", "experts"),
    SilentFault("one worker of two stale", "stale in worker 1", "", "two workers"),
)
"""In the order in which ``--quick`` takes them; those of other servers than the first come last."""

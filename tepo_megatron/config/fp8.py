"""``engine.fp8``: FP8 layers of Transformer Engine: every knob, and which of them go together (docs/reference/fp8.md)."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from tepo_megatron.config.base import Section

Recipe = Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"]


class Fp8Config(Section):
    recipe: Recipe = "none"
    """How the inputs of the layers' matrix products are scaled into FP8. ``delayed``: one scale for a tensor, from the largest
    values of earlier steps; ``tensorwise``: one scale, from the tensor itself; ``blockwise``: one for each 128 values (Hopper);
    ``mxfp8``: one for each 32 values (Blackwell). ``none``: no FP8. Not run on a GPU yet."""

    format: Literal["e4m3", "hybrid"] = "hybrid"
    """``e4m3`` for everything, or ``hybrid``: E4M3 forward and E5M2, with more range, for gradients."""

    amax_history_len: PositiveInt | None = None
    """``delayed`` only: how many steps' largest values are remembered. Default: 1024."""

    amax_compute_algo: Literal["max", "most_recent"] | None = None
    """``delayed`` only: which of the remembered values counts. Default: max."""

    margin: int | None = Field(default=None, ge=0)
    """``delayed`` only: powers of two that the scale stays below the largest possible. Default: 0."""

    first_layers_bf16: NonNegativeInt = 0
    """So many layers at the start of the model stay in bfloat16."""

    last_layers_bf16: NonNegativeInt = 0
    """So many layers at the end of the model stay in bfloat16."""

    params: bool = False
    """Keep the weights of the layers in FP8 only (masters stay fp32), and gather them in FP8 over the data-parallel ranks;
    needs optimizer.distributed."""

    @property
    def enabled(self) -> bool:
        return self.recipe != "none"

    @model_validator(mode="after")
    def _nothing_is_set_without_effect(self) -> "Fp8Config":
        if not self.enabled:
            idle = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
            if idle:
                raise ValueError(f"{', '.join(idle)} has no effect while recipe = none; choose a recipe, or leave it out")
            return self
        history = [name for name in ("amax_history_len", "amax_compute_algo", "margin") if getattr(self, name) is not None]
        if history and self.recipe != "delayed":
            raise ValueError(
                f"{', '.join(history)} is for recipe = delayed; {self.recipe} computes its scales from the values at hand. "
                "Leave it out, or set recipe = delayed"
            )
        return self

    @model_validator(mode="after")
    def _delayed_scaling_is_for_all_layers(self) -> "Fp8Config":
        kept = self.first_layers_bf16 + self.last_layers_bf16
        if self.recipe == "delayed" and kept:
            raise ValueError(
                f"{kept} layers in bfloat16 do not go with recipe = delayed, which reduces its history for all layers at once "
                "(Megatron-Core refuses it); set first_layers_bf16 = last_layers_bf16 = 0, or recipe = tensorwise"
            )
        if self.recipe == "delayed" and self.params:
            raise ValueError(
                "params = true does not go with recipe = delayed: a checkpoint carries no history, so that weights which are "
                "read would be rounded under a scale of 1, far from theirs; set recipe = tensorwise, or params = false"
            )
        return self

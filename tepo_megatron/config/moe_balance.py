"""``engine.moe_balance``: what keeps the experts of a model evenly loaded (docs/reference/moe.md)."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tepo_megatron.config.base import Section

_KIND_OF = {"coefficient": "aux_loss", "update_rate": "expert_bias"}


class MoeBalanceConfig(Section):
    kind: Literal["none", "aux_loss", "expert_bias"] = "none"
    """``none``: nothing, so that updates follow the objective alone. ``aux_loss``: an auxiliary loss on the routers, over the
    whole mini-batch. ``expert_bias``: no loss; each expert has a bias that is added to its score where experts are chosen, and
    is moved against its load after each update (DeepSeek-V3's balance), for families whose servers have the bias too."""

    coefficient: Annotated[float, Field(gt=0, le=1)] = 1e-3
    """``aux_loss`` only: what the loss of each layer is multiplied by, which is 1 where experts are evenly loaded. The product
    is added to the objective's loss, and competes with it: pre-training takes 1e-3 to 1e-2."""

    update_rate: Annotated[float, Field(gt=0, le=1)] = 1e-3
    """``expert_bias`` only: by how much a bias rises or falls in an update, beside scores between 0 and 1. 1e-3 is
    DeepSeek-V3's."""

    @model_validator(mode="after")
    def _settings_act(self) -> "MoeBalanceConfig":
        for name, kind in _KIND_OF.items():
            value = getattr(self, name)
            if self.kind != kind and value != type(self).model_fields[name].default:
                raise ValueError(f"{name} = {value} does nothing with kind = {self.kind}; set kind = {kind}, or leave it out")
        return self

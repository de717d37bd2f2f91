"""The auxiliary loss that keeps experts evenly loaded: of the whole mini-batch, however it is cut.

Of a layer with E experts of which a token takes k, over the T tokens of a mini-batch on all ranks:

    loss = coefficient · E · Σ_i f_i · P_i,    f_i = (tokens sent to expert i) / (k T),    P_i = (Σ_t p_ti) / T

with p_ti the router's probability of expert i for token t (its score as a part of all scores, where these are sigmoids). It
is ``coefficient`` where all experts get as many tokens. The f_i carry no gradient; they are counted when the mini-batch is
scored, and the loss is then a sum over tokens: it is the same in every micro-batch, on every rank, and in any order.
Megatron-Core's own auxiliary losses count within the micro-batch, or as far as the micro-batches have come, and so depend on
how a mini-batch is cut (docs/decisions/037-expert-balance.md).
"""

from __future__ import annotations

from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler
from torch import Tensor

from tepo_megatron.weights.architecture import Experts


def auxiliary_loss(logits_tE: Tensor, load_E: Tensor, real_t: Tensor, experts: Experts, coefficient: float) -> Tensor:
    """This rank's part of a layer's loss, fp32: of its t tokens, but for the padding. ``load_E``: the mini-batch's tokens at
    each expert."""
    if experts.biased:
        score_tE = logits_tE.float().sigmoid()
        probability_tE = score_tE / (score_tE.sum(-1, keepdim=True) + 1e-20)
    else:
        probability_tE = logits_tE.float().softmax(-1)
    tokens = load_E.sum() / experts.per_token
    share_E = (load_E / load_E.sum()).to(probability_tE)
    return coefficient * experts.count / tokens * (probability_tE @ share_E)[real_t].sum()


def attach(probabilities: Tensor, loss: Tensor) -> Tensor:
    """Returns ``probabilities`` as they are; whoever differentiates them differentiates ``loss`` too, with the weight of the
    objective's own."""
    attached: Tensor = MoEAuxLossAutoScaler.apply(probabilities, loss)
    return attached

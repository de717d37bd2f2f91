"""Routers with rollout routing replay (docs/decisions/027-routing-replay.md) and the auxiliary loss (037-expert-balance.md).

A layer's is coefficient · E · Σ_i f_i · P_i, with f_i = (tokens at expert i) / (k T), without gradient, over the mini-batch's T
tokens on all ranks, and P_i the mean router probability.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler, TopKRouter
from torch import Tensor

from tepo_megatron.config import MoeBalanceConfig
from tepo_megatron.core.rollout import not_recorded
from tepo_megatron.trainer.megatron.parallel.batch import Share
from tepo_megatron.trainer.megatron.parallel.platform import Ranks
from tepo_megatron.weights.architecture import Experts, ModelSpec

_TopK = Callable[..., tuple[Tensor, Tensor]]


class Routers:
    """Megatron's ``RouterReplay`` would mix policy and reference."""

    def __init__(self, chunks: Sequence[torch.nn.Module], spec: ModelSpec, *, ranks: Ranks, balance: MoeBalanceConfig) -> None:
        assert spec.experts is not None
        self._ranks, self._experts, self._balance = ranks, spec.experts, balance
        self._now: tuple[Share, bool] | None = None
        self._counting = self._has_loss = False
        device = next(chunks[0].parameters()).device
        self._loads_LE = torch.zeros(spec.num_layers, spec.experts.count, dtype=torch.int64, device=device)
        self._before_LE = self._loads_LE
        self._aux_loss = torch.zeros(2, dtype=torch.float64, device=device)  # sum, number of updates
        # tokens with a record; those that differ
        self._replayed_L2 = torch.zeros(spec.num_layers, 2, dtype=torch.int64, device=device)
        self._choices: list[_Choice] = []
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.router_replay = _Choice(self, module.layer_number - 1)
                    self._choices.append(module.router_replay)
                    module.routing = partial(module.router_replay.route, module.routing)
                    module._apply_expert_bias = partial(_count_for_bias, module)

    @contextmanager
    def forward_pass(self, share: Share, *, train: bool) -> Iterator[None]:
        self._now = share, train
        try:
            yield
        finally:
            self._now = None

    def share(self, waiting: deque[Share]) -> Share | None:
        """Backward recomputes ``waiting`` in forward order."""
        if self._now is None:
            return waiting.popleft() if waiting else None
        share, train = self._now
        if train:
            waiting.append(share)
        return share

    def local(self, values_t: Tensor) -> Tensor:
        """Returns this tensor-parallel rank's part; routers need sequence parallelism."""
        return values_t.view(self._ranks.tp, -1, *values_t.shape[1:])[self._ranks.tp_rank]

    def end_run(self) -> None:
        for choice in self._choices:
            choice.waiting.clear()
        self._aux_loss[1] += self._has_loss
        self._has_loss = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        self._counting, self._before_LE = True, self._loads_LE.clone()
        try:
            yield
        finally:
            self._counting = False

    def load(self) -> Tensor | None:
        """Returns int64 [layers, experts]: tokens in the last ``counted``, over all ranks. Every rank calls."""
        if self._balance.kind != "aux_loss":
            return None
        load_LE = self._loads_LE - self._before_LE
        dist.all_reduce(load_LE)
        return load_LE

    def add_loss(self, layer: int, share: Share, probabilities: Tensor, logits_tE: Tensor) -> Tensor:
        load_LE = share.micro.expert_load_LE
        if load_LE is None or not torch.is_grad_enabled():
            return probabilities
        loss = _auxiliary_loss(logits_tE, load_LE[layer], self.local(share.real_t), self._experts, self._balance.coefficient)
        self._aux_loss[0] += loss.detach()
        self._has_loss = True
        return MoEAuxLossAutoScaler.apply(probabilities, loss)

    def count(self, layer: int, share: Share, experts_tk: Tensor, router_choice_tk: Tensor, recorded_t: Tensor | None) -> None:
        if not self._counting:
            return
        real_t = self.local(share.real_t)
        self._loads_LE[layer].scatter_add_(0, experts_tk.flatten(), real_t.repeat_interleave(experts_tk.shape[1]).long())
        if recorded_t is not None:
            differs_t = (experts_tk.sort().values != router_choice_tk.sort().values).any(1)
            self._replayed_L2[layer] += torch.stack([recorded_t.sum(), (differs_t & recorded_t).sum()])

    def take_metrics(self) -> dict[str, float]:
        """Returns metrics since the last call. Every rank calls.

        ``moe/max_violation``: the busiest expert's tokens over the mean, minus 1 (MaxVio). ``moe/replay_differs``: share of
        recorded choices that the trainer's router would not make.
        """
        counts = torch.cat([self._loads_LE, self._replayed_L2], dim=1)
        self._loads_LE, self._replayed_L2 = torch.zeros_like(self._loads_LE), torch.zeros_like(self._replayed_L2)
        dist.all_reduce(counts)
        loads_LE, replayed_L2 = counts[:, :-2].double().cpu(), counts[:, -2:].double().cpu()
        layers = loads_LE.any(1).nonzero()[:, 0].tolist()  # those with experts
        if not layers:
            return {}
        loads_LE, replayed_L2 = loads_LE[layers], replayed_L2[layers]
        share_LE = loads_LE / loads_LE.sum(1, keepdim=True)
        columns = {
            "moe/max_violation": share_LE.amax(1) * self._experts.count - 1,
            "moe/load_entropy": torch.special.entr(share_LE).sum(1) / torch.tensor(float(self._experts.count)).log(),
        }
        if replayed_L2.any():
            columns["moe/replay_differs"] = replayed_L2[:, 1] / replayed_L2[:, 0]
        metrics = {name: float(values.mean()) for name, values in columns.items()}
        metrics["moe/max_violation/worst"] = float(columns["moe/max_violation"].max())
        for name, values in columns.items():
            measure = name.removeprefix("moe/")
            metrics |= {f"moe/layer_{layer:02}/{measure}": value for layer, value in zip(layers, values.tolist(), strict=True)}
        if self._balance.kind == "aux_loss":
            loss, updates = self._aux_loss.split(1)
            self._aux_loss = torch.zeros_like(self._aux_loss)
            dist.all_reduce(loss)
            dist.all_reduce(updates, dist.ReduceOp.MAX)  # a stage may have no layer with experts
            metrics |= {"moe/aux_loss": float(loss) / float(updates)} if updates else {}
        return metrics


class _Choice:
    def __init__(self, routers: Routers, layer: int) -> None:
        self.waiting: deque[Share] = deque()
        self._routers, self._layer = routers, layer
        self._share: Share | None = None

    def route(
        self, routing: Callable[..., tuple[Tensor, Tensor]], logits: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """logits [t, 1, experts] → weights and choice, both [t, experts]."""
        self._share = share = self._routers.share(self.waiting)
        if share is not None and padding_mask is None:
            padding_mask = ~self._routers.local(share.real_t)  # Megatron's count for the biases leaves these out
        weights_tE, chosen_tE = routing(logits, padding_mask=padding_mask)
        if share is not None:
            weights_tE = self._routers.add_loss(self._layer, share, weights_tE, logits.flatten(0, -2))
        return weights_tE, chosen_tE

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: _TopK
    ) -> tuple[Tensor, Tensor]:
        """[t, k] each. Differentiable in ``scores`` [t, experts]. Routers choose for sequences' last tokens and padding."""
        values_tk, router_choice_tk = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        share = self._share
        if share is None:
            return values_tk, router_choice_tk
        experts_tk, recorded_t = router_choice_tk, None
        if share.chosen_tLk is not None:
            chosen_tLk = self._routers.local(share.chosen_tLk)
            recorded_t = chosen_tLk[:, 0, 0] != not_recorded(chosen_tLk.itemsize)
            experts_tk = torch.where(recorded_t[:, None], chosen_tLk[:, self._layer].long(), router_choice_tk)
            values_tk = scores.gather(1, experts_tk)
        self._routers.count(self._layer, share, experts_tk, router_choice_tk, recorded_t)
        return values_tk, experts_tk


def _count_for_bias(router: TopKRouter, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    """Megatron's (0.16) does not broadcast the mask [t] over the map [t, experts], and calls torch.compile."""
    if router.enable_expert_bias and torch.is_grad_enabled():
        real = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
        router.local_tokens_per_expert += real.sum(dim=0)


def _auxiliary_loss(logits_tE: Tensor, load_E: Tensor, real_t: Tensor, experts: Experts, coefficient: float) -> Tensor:
    """Returns float32, this rank's part."""
    if experts.biased:
        score_tE = logits_tE.float().sigmoid()
        probability_tE = score_tE / (score_tE.sum(-1, keepdim=True) + 1e-20)
    else:
        probability_tE = logits_tE.float().softmax(-1)
    tokens = load_E.sum() / experts.per_token
    share_E = (load_E / load_E.sum()).to(probability_tE)
    return coefficient * experts.count / tokens * (probability_tE @ share_E)[real_t].sum()

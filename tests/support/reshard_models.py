"""Small models and splits for the tests of the plan, drawn at random, and the values that their parameters hold."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from tepo_megatron.weights.architecture import Experts, ModelSpec
from tepo_megatron.weights.geometry import ShardLayout
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel, pipeline_stages


def small_spec(**changes: object) -> ModelSpec:
    """A decoder of odd sizes, 4 layers deep."""
    sizes: dict[str, object] = {
        "architecture": "LlamaForCausalLM",
        "num_layers": 4,
        "hidden_size": 6,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 3,
        "ffn_size": 16,
        "vocab_size": 13,
        "tied_embeddings": False,
        "norm_eps": 1e-5,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "max_positions": 64,
    }
    return ModelSpec(**(sizes | changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    spec: ModelSpec
    source: MegatronParallel
    destination: VllmParallel
    local: dict[int, int]


MOE = {
    "MixtralForCausalLM": Experts(4, 2, renormalize=True),
    "Qwen3MoeForCausalLM": Experts(4, 3, renormalize=False),
    "Glm4MoeForCausalLM": Experts(4, 2, renormalize=True, biased=True, shared_ffn_size=8),
}
"""For each family with experts, few of them."""


def expert_splits(tp: int, dp: int, experts: int) -> list[dict[str, int | None]]:
    """Every ep and etp that fit these ranks of a stage and this many experts, in powers of 2."""
    return [
        {"ep": ep, "etp": etp}
        for ep in (1, 2, 4)
        for etp in (None, 1, 2, 4)
        if experts % ep == 0 and tp * dp % (ep * (etp or tp)) == 0
    ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Anything that both sides can split, with up to 16 ranks on each."""
    source_tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    chunks = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    server_tp, server_pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 1, 2, 3]))
    kv_heads = source_tp * draw(st.integers(1, 2))
    if kv_heads % server_tp and server_tp % kv_heads:
        server_tp = 1
    layers = [chunks * draw(st.integers(1, 2)), chunks * draw(st.integers(1, 2)), chunks * draw(st.integers(1, 2))]
    num_layers = layers[0] + max(pp - 2, 0) * layers[1] + (layers[2] if pp > 1 else 0)
    ends = {"first": layers[0], "last": layers[2]} if pp > 1 else {}
    family = draw(st.sampled_from([*MOE, "LlamaForCausalLM"]))
    dense_layers = draw(st.integers(0, num_layers - 1)) if family == "Glm4MoeForCausalLM" else 0
    spec = small_spec(
        architecture=family,
        dense_layers=dense_layers,
        dense_ffn_size=12 if dense_layers else 0,
        experts=MOE.get(family),
        num_layers=num_layers,
        num_kv_heads=kv_heads,
        num_heads=math.lcm(kv_heads, server_tp) * draw(st.integers(1, 2)),
        head_dim=draw(st.integers(1, 3)),
        ffn_size=(4 if family in MOE else math.lcm(source_tp, server_tp)) * draw(st.integers(1, 3)),
        vocab_size=draw(st.integers(1, 70)),
        tied_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    dp = draw(st.integers(1, 4)) if source_tp * pp <= 4 else 1
    splits = expert_splits(source_tp, dp, spec.experts.count) if spec.experts else [{}]
    source = MegatronParallel(
        tp=source_tp,
        pp=pp,
        dp=dp,
        **draw(st.sampled_from(splits)),
        stages=pipeline_stages(num_layers, pp, chunks=chunks, **ends),
        fused_norms=draw(st.booleans()),
    )
    destination = VllmParallel(server_tp, min(server_pp, num_layers), draw(st.integers(1, 3)))
    ranks = st.tuples(st.integers(0, destination.world_size - 1), st.integers(0, source.world_size - 1))
    local = dict(draw(st.lists(ranks, max_size=4))) if draw(st.booleans()) else {}
    return Case(spec, source, destination, local)


def numbered_model(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The whole model in Hugging Face's tensors, no two elements with the same value, none zero."""
    ends = torch.tensor([math.prod(shape) for shape in shapes.values()]).cumsum(0).tolist()
    return {
        name: torch.arange(end - math.prod(shape), end).view(shape) + 1
        for (name, shape), end in zip(shapes.items(), ends, strict=True)
    }


def parameters(layouts: Sequence[ShardLayout], model: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """What every rank holds of the model; zero where a parameter is padding."""
    ranks = []
    for layout in layouts:
        params = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in layout.params.items()}
        for shard in layout.shards:
            params[shard.param][shard.param_box.slices] = model[shard.tensor][shard.box.slices]
        ranks.append(params)
    return ranks

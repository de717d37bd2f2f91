"""What follows from the choice of layers and of ``engine.fp8`` (their modules: test_built_layers.py); attention; adapters."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_align_size, is_first_last_bf16_layer
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import linear

from tepo_megatron.config import EngineConfig, Fp8Config, LoraConfig, ModelConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.run.checks import RUN_CHECKS
from tepo_megatron.trainer.megatron import gpu as packages
from tepo_megatron.trainer.megatron.engine import Engine
from tepo_megatron.trainer.megatron.forward import Forward
from tepo_megatron.trainer.megatron.gpu import Packages
from tepo_megatron.trainer.megatron.model import attention_cpu, fp8
from tepo_megatron.trainer.megatron.model.attention_cpu import PackedDotProductAttention
from tepo_megatron.trainer.megatron.model.lora import Lora
from tepo_megatron.trainer.megatron.model.model import Layers, transformer_config
from tepo_megatron.trainer.megatron.parallel.platform import Platform
from tepo_megatron.trainer.megatron.parallel.positions import rotate_packed
from tepo_megatron.weights.adapters import AdapterBlock
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts import MegatronParallel
from tepo_megatron.weights.table import tensor_shapes
from tests.support.reshard_models import MOE, small_spec

SPEC = ModelSpec("LlamaForCausalLM", 1, 8, 2, 1, 4, 16, 5, False, 1e-5, 1e4, None, 64)


@pytest.mark.parametrize(("kind", "wgrad"), [("te", True), ("te", False), ("local", True)])
def test_fusions_are_asked_for_where_their_kernels_are(kind: Any, wgrad: bool) -> None:
    options = Layers(kind, Packages(te="2.11.0", apex=wgrad, wgrad=wgrad)).kernel_options
    te = kind == "te"
    assert (options["bias_activation_fusion"], options["persist_layer_norm"]) == (te, te)
    assert options["gradient_accumulation_fusion"] == (te and wgrad)
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    silu: dict[str, Any] = {"gated_linear_unit": True, "add_bias_linear": False, "activation_func": torch.nn.functional.silu}
    TransformerConfig(**{**sizes, **silu, **options})


@pytest.mark.parametrize(("platform", "function"), [("cpu", rotate_packed), ("cuda", None)])
def test_packed_sequences_are_turned_at_once_where_a_function_can(platform: Any, function: Any) -> None:
    where = Platform(platform, torch.device("cpu"), "gloo")
    with mock.patch.object(rope_utils, "fused_apply_rotary_pos_emb_thd", function):
        config = transformer_config(SPEC, ModelConfig(dtype="float32"), EngineConfig(), where, Layers("local"))
    assert config.apply_rope_fusion is (function is not None)


# -- whose kernels -------------------------------------------------------------------------------------------------------------


def test_packages_are_found_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's apex is told from its namesake by its parts."""
    assert Packages.installed() == Packages()
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise ImportError('was imported')")
    (tmp_path / f"{packages.WGRAD}.py").write_text("raise ImportError('was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert Packages.installed() == Packages(wgrad=True)
    for part in ("optimizers", "multi_tensor_apply"):
        (tmp_path / "apex" / part).mkdir(parents=True)
    assert Packages.installed() == Packages(apex=True, wgrad=True)


def test_whose_adam_is_in_megatrons_own_order_and_here_what_megatron_takes() -> None:
    from megatron.core import optimizer

    assert Packages(te="2.11.0", apex=True).adam[0] == "Transformer Engine's"
    assert Packages(apex=True).adam[0] == "apex'"
    assert Packages().adam[0] == "torch's"
    assert (Packages.installed().adam[0] == "torch's") is issubclass(optimizer.Adam, torch.optim.Adam)


# -- FP8 weights ---------------------------------------------------------------------------------------------------------------


class Rounded(torch.Tensor):
    """Stands in for a parameter that Transformer Engine keeps in FP8: copied to as a whole, rounding; read by dequantize()."""

    @staticmethod
    def of(values: torch.Tensor) -> Rounded:
        return torch.Tensor._make_subclass(Rounded, torch.zeros_like(values)).copy_(values)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Rounded:
        self.held = source.to(self.dtype).to(torch.float8_e4m3fn)
        return self

    def detach(self) -> Rounded:
        return self

    def dequantize(self) -> torch.Tensor:
        return self.held.to(torch.float32)

    def __getitem__(self, _: Any) -> torch.Tensor:
        raise AssertionError("an FP8 parameter was read or written in part")

    def zero_(self) -> torch.Tensor:
        raise AssertionError("an FP8 parameter was written in place")


def test_fp8_parameters_are_loaded_whole_and_their_masters_unrounded(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(fp8, "is_float8tensor", lambda tensor: isinstance(tensor, Rounded))
    monkeypatch.setattr(fp8, "dequantize_fp8_tensor", lambda tensor: tensor.dequantize())
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(SPEC).items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (layout,) = MegatronParallel(fused_norms=True).layouts(SPEC)
    plain = {name: torch.zeros(shape) for name, shape in layout.params.items()}
    fp8.load_weights(tmp_path, layout, plain)

    fc1 = "decoder.layers.0.mlp.linear_fc1.weight"
    params = {name: torch.zeros(shape) for name, shape in layout.params.items()}
    params[fc1] = Rounded.of(torch.zeros(layout.params[fc1]))
    unrounded = fp8.load_weights(tmp_path, layout, params)
    assert list(unrounded) == [fc1]
    assert torch.equal(unrounded[fc1], plain[fc1])

    seen = fp8.plain_weights(params)
    assert list(seen) == list(params)
    assert len(seen) == len(params)
    for name, value in plain.items():
        expected = value.to(torch.float8_e4m3fn).float() if name == fc1 else value
        assert type(seen[name]) is torch.Tensor
        assert torch.equal(seen[name], expected), name
    assert not torch.equal(seen[fc1], plain[fc1])


@pytest.mark.parametrize("rounds", [False, True])
def test_references_of_fp8_weights_have_no_digest_as_scales_depend_on_the_split(rounds: bool) -> None:
    chunk = torch.nn.Linear(2, 2)
    config = SimpleNamespace(
        engine=SimpleNamespace(fp8=Fp8Config(recipe="tensorwise", params=rounds)), objective=ObjectiveConfig()
    )
    engine = mock.Mock(config=config, objective=mock.Mock(needs_reference=True), policy=mock.Mock(lora=None))
    engine.weights.digest = list  # names
    Engine._build_frozen(engine, mock.Mock(reference=lambda: [chunk]), {})
    assert engine.reference == [chunk]
    assert engine.reference_digest == (None if rounds else ["weight", "bias"])


RECIPES = ["delayed", "tensorwise", "blockwise", "mxfp8"]


def megatron(config: Fp8Config) -> TransformerConfig:
    """Upstream's own class, with its checks; none of them needs Transformer Engine for these fields."""
    sizes = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4}
    return TransformerConfig(**sizes, bf16=True, params_dtype=torch.bfloat16, **fp8.layer_options(config))


@pytest.mark.parametrize(("recipe", "params"), [("delayed", False), *product(RECIPES[1:], [False, True])])
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_every_recipe_reaches_megatron(recipe: str, form: str, params: bool) -> None:
    config = Fp8Config(recipe=recipe, format=form, params=params)
    layers = megatron(config)
    assert (layers.fp8, layers.fp8_recipe, layers.fp8_param) == (form, Fp8Recipe(recipe), params)
    gather = DistributedDataParallelConfig(use_distributed_optimizer=True, **fp8.gather_options(config))
    optimizer = MegatronOptimizerConfig(bf16=True, use_distributed_optimizer=True, **fp8.optimizer_options(config))
    assert gather.fp8_param_gather is params
    assert optimizer.fp8_recipe == (recipe if params else None)
    # MXFP8 weights are gathered as bfloat16, in the gradients' buffer: both sides must know
    assert gather.reuse_grad_buf_for_mxfp8_param_ag is optimizer.reuse_grad_buf_for_mxfp8_param_ag
    assert gather.reuse_grad_buf_for_mxfp8_param_ag is (params and recipe == "mxfp8")


def test_without_a_recipe_megatron_has_no_fp8() -> None:
    layers = megatron(Fp8Config())
    assert layers.fp8 is None
    assert not layers.fp8_param
    assert fp8.gather_options(Fp8Config()) == {"fp8_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False}


def test_the_knobs_of_delayed_scaling() -> None:
    default = megatron(Fp8Config(recipe="delayed"))
    assert (default.fp8_amax_history_len, default.fp8_amax_compute_algo, default.fp8_margin) == (1024, "max", 0)
    chosen = megatron(Fp8Config(recipe="delayed", amax_history_len=16, amax_compute_algo="most_recent", margin=2))
    assert (chosen.fp8_amax_history_len, chosen.fp8_amax_compute_algo, chosen.fp8_margin) == (16, "most_recent", 2)


@given(st.sampled_from(RECIPES[1:]), st.integers(0, 4), st.integers(0, 3))
def test_layers_in_bfloat16_are_the_first_and_the_last(recipe: str, first: int, last: int) -> None:
    layers = megatron(Fp8Config(recipe=recipe, first_layers_bf16=first, last_layers_bf16=last))
    kept = [layer for layer in range(8) if is_first_last_bf16_layer(layers, layer)]
    assert kept == [*range(first), *range(8 - last, 8)]


@given(st.sampled_from(RECIPES), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_every_rank_gets_tokens_that_suit_fp8(recipe: str, tp: int, split: bool) -> None:
    parallel = {"tp": tp, "sequence_parallel": split and tp > 1}
    multiple = EngineConfig.model_validate({"parallel": parallel, "fp8": {"recipe": recipe}}).token_multiple
    on_a_rank = multiple // (tp if parallel["sequence_parallel"] else 1)
    assert on_a_rank % get_fp8_align_size(Fp8Recipe(recipe)) == 0
    assert on_a_rank % {"blockwise": 128, "mxfp8": 32}.get(recipe, 16) == 0
    without = EngineConfig.model_validate({"parallel": parallel}).token_multiple
    assert without == (tp if parallel["sequence_parallel"] else 1)


@pytest.mark.parametrize("train", [False, True])
def test_scoring_leaves_nothing_to_recompute(train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's checkpoints queue in every forward pass, and the queues are emptied by backward passes alone."""
    firsts, scales = [True], deque([[torch.ones(3), torch.ones(1)]])
    stand_ins: Any = {name: ModuleType(name) for name in ("distributed", "fp8")}
    stand_ins["distributed"].activation_recompute_forward = SimpleNamespace(_is_first_fp8_module=firsts)
    stand_ins["fp8"].FP8GlobalStateManager = SimpleNamespace(fp8_tensors_recompute_buffer=[scales])
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, f"transformer_engine.pytorch.{name}", module)
    engine = EngineConfig(fp8=Fp8Config(recipe="delayed"))
    forward: Any = SimpleNamespace(engine=engine, on_progress=lambda: None, routers=None)
    Forward._step(forward, (0, mock.MagicMock()), mock.MagicMock(), mock.MagicMock(), train=train)
    assert (len(firsts), len(scales)) == ((1, 1) if train else (0, 0))


seeds = st.integers(0, 2**31)
lengths_of = st.lists(st.integers(1, 9) | st.integers(30, 60), min_size=1, max_size=6)
"""Short and long ones come into blocks of their own."""


def block_causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """[T, heads, d] in float64, every query over the earlier keys of its own sequence."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(sum(lengths))
    allowed = (sequence[:, None] == sequence) & (position[:, None] >= position)
    repeats = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.size(-1) ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), value).flatten(1)


@settings(max_examples=30)
@given(lengths_of, st.integers(1, 3), st.integers(1, 2), seeds)
def test_attention_and_its_gradients_match_the_dense_oracle(lengths: list[int], repeats: int, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens, dim = sum(lengths), 4
    shapes = [(tokens, groups * repeats, dim), (tokens, groups, dim), (tokens, groups, dim)]
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    single = [tensor.detach().float().requires_grad_() for tensor in exact]
    upstream = torch.randn(tokens, groups * repeats * dim, generator=generator, dtype=torch.float64)

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    packed = PackedSeqParams("thd", offsets, offsets, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    attention = PackedDotProductAttention(config)
    out = attention(*single, None, packed_seq_params=packed)
    expected = block_causal(exact[0], exact[1], exact[2], lengths)

    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    out.backward(upstream.float())
    expected.backward(upstream)
    for ours, oracle in zip(single, exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), oracle.grad, atol=1e-5, rtol=1e-5)


def test_all_that_a_context_parallel_attention_moves_is_where_its_queries_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """``layers = local`` is for GPUs too: a CUDA index selects from no tensor of the host."""
    moved: list[Tensor] = []
    right = attention_cpu._Move.apply

    def apply(values: Tensor, *args: Any) -> Tensor:
        moved.append(values)
        return right(values, *args)

    monkeypatch.setattr(attention_cpu._Move, "apply", apply)
    monkeypatch.setattr(attention_cpu, "gather_from_sequence_parallel_region", lambda local, group: torch.cat([local, local]))
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
    attention = PackedDotProductAttention(config)
    attention.cp, attention.cp_group = 2, SimpleNamespace(rank=lambda: 1)
    packed = PackedSeqParams("thd", *[torch.tensor([0, 8, 12], dtype=torch.int32)] * 2, max_seqlen_q=8, max_seqlen_kv=8)
    heads = [torch.empty(6, count, 4, device="meta") for count in (2, 1, 1)]
    assert attention(*heads, None, packed_seq_params=packed).shape == (6, 8)
    assert [values.device.type for values in moved] == ["meta"] * 5  # queries, keys, values, positions, result


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([1, 2, 3]), st.integers(0, 3), seeds)
def test_the_rotation_and_its_gradient_match_the_complex_oracle(chunks: list[int], cp: int, rest: int, seed: int) -> None:
    """Dimensions i and i + half of a token at position p are turned by p · f_i; ``rest`` dimensions stay."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [2 * cp * chunk for chunk in chunks] if cp > 1 else chunks
    position = torch.cat([torch.arange(length) for length in lengths])
    numbers = torch.arange(len(position)).split(lengths)
    inverse = torch.tensor([1.0, 0.3])
    freqs = torch.outer(torch.arange(max(lengths)), torch.cat([inverse, inverse]))[:, None, None]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    for rank in range(cp):
        local = position
        if cp > 1:  # a rank has chunks r and 2 cp - 1 - r of each sequence
            local = position[torch.cat([part.chunk(2 * cp)[i] for part in numbers for i in (rank, 2 * cp - 1 - rank)])]
        exact = torch.randn(len(local), 3, 4 + rest, generator=generator, dtype=torch.float64).requires_grad_()
        single = exact.detach().float().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()  # not contiguous
        turned = torch.complex(exact[..., :2], exact[..., 2:4]) * torch.exp(1j * torch.outer(local, inverse.double()))[:, None]
        expected = torch.cat([turned.real, turned.imag, exact[..., 4:]], -1)
        result = rotate_packed(single, offsets, freqs, cp_size=cp, cp_rank=rank)
        torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)
        upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        result.backward(upstream.float())
        expected.backward(upstream)
        torch.testing.assert_close(single.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)


BLOCKS = [
    [AdapterBlock(slice(0, 2), slice(0, 2)), AdapterBlock(slice(2, 4), slice(3, 5))],  # as the queries of two groups
    [AdapterBlock(slice(0, 1), slice(2, 3))],
]
LORA = LoraConfig(rank=2, alpha=3)


class Layer(torch.nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.used: list[Any] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.used.append(weakref.ref(self.weight))
        return linear(inputs, self.weight)


def adapted(dtype: torch.dtype) -> tuple[Layer, torch.nn.Module, Lora]:
    torch.manual_seed(0)
    pairs = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in [(2, 7), (4, 2), (2, 7), (1, 2)]]
    layer, lora = Layer(torch.randn(6, 7, dtype=dtype)), Lora(LORA, [], None, None, {})
    lora.add("weight", BLOCKS, pairs)
    lora.attach([layer], {"weight": layer.weight})
    return layer, lora.adapters["weight"], lora


def test_a_merged_weight_is_rounded_once() -> None:
    layer, made, lora = adapted(torch.bfloat16)
    a1, b1, a2, b2 = (param.double() for param in made.parameters())
    first, second, zero = 1.5 * b1 @ a1, 1.5 * b2 @ a2, torch.zeros(7)
    expected = layer.weight.double() + torch.stack([first[0], first[1], second[0], first[2], first[3], zero])
    assert torch.equal(lora.merged({"weight": layer.weight})["weight"], expected.to(torch.bfloat16))


def test_no_merged_weight_waits_for_the_backward_pass() -> None:
    layer, _, _ = adapted(torch.float32)
    found = layer(torch.randn(5, 7, requires_grad=True))
    assert layer.used[-1]() is None
    found.sum().backward()


def test_each_tensor_of_a_layer_of_many_experts_is_looked_at_once(monkeypatch: Any) -> None:
    (_, made, _), lora, layer = adapted(torch.float32), Lora(LORA, [], None, None, {}), torch.nn.Module()
    names = [f"weight{number}" for number in range(20)]
    for name in names:
        layer.register_parameter(name, torch.nn.Parameter(torch.randn(6, 7), requires_grad=False))
        lora.add(name, BLOCKS, list(made.parameters()))
    layer.forward = lambda inputs: [linear(inputs, getattr(layer, name)) for name in names]  # as a grouped linear
    lora.attach([layer], dict(layer.named_parameters()))
    looks = mock.Mock(side_effect=Tensor.untyped_storage)
    monkeypatch.setattr(Tensor, "untyped_storage", lambda tensor: looks(tensor))
    layer(torch.randn(5, 7, requires_grad=True))
    assert looks.call_count == 3 * len(names), "a merged weight, and the weight and inputs that autograd saves"


class SavesTwice(torch.autograd.Function):
    """Transformer Engine's linears save the weight as it is and as it is multiplied with: without FP8 the same.

    The one with a norm also has it as an attribute, which no backward pass reads.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, recalled: list[StorageWeakRef]) -> Tensor:
        ctx.recalled, ctx.weight = recalled, weight
        ctx.save_for_backward(inputs, weight, weight)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        assert all(storage.expired() for storage in ctx.recalled), "the merged weight of a layer outlives its backward pass"
        inputs, weight, same = ctx.saved_tensors
        ctx.recalled.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (weight, same))
        return grad @ weight, grad.t() @ inputs, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_saved_twice_is_merged_once_a_backward_pass(monkeypatch: Any, dtype: torch.dtype) -> None:
    recalled: list[StorageWeakRef] = []
    monkeypatch.setattr(f"{__name__}.linear", lambda inputs, weight: SavesTwice.apply(inputs, weight, recalled))
    layers, adapters, _ = zip(*[adapted(dtype) for _ in range(3)], strict=True)
    inputs, params = torch.randn(5, 7, dtype=dtype), [param for made in adapters for param in made.parameters()]

    def loss(forwards: Iterable[Callable[[Tensor], Tensor]]) -> Tensor:
        values = inputs
        for forward in forwards:
            values = torch.nn.functional.pad(forward(values), (0, 1))
        return values.square().sum()

    plain = [lambda values, i=i: values @ adapters[i](layers[i].weight).t() for i in range(3)]
    expected = torch.autograd.grad(loss(plain), params)
    merges: list[torch.nn.Module] = []
    for made in adapters:
        made.register_forward_hook(lambda module, *_: merges.append(module))
    value = loss(layers)
    assert [layer.used[-1]() for layer in layers] == [None] * 3
    for _ in range(2):
        merges.clear()
        found = torch.autograd.grad(value, params, retain_graph=True)
        assert all(map(torch.equal, found, expected))
        assert merges == list(reversed(adapters))
        assert all(storage.expired() for storage in recalled)


def test_a_failure_within_a_layer_leaves_its_weight_as_it_was() -> None:
    layer, _, _ = adapted(torch.float32)
    weight = layer.weight
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(5, 3))
    assert layer.weight is weight


def test_scales_are_those_of_peft() -> None:
    assert LoraConfig(rank=16, alpha=32).scale == 2
    assert LoraConfig(rank=16, alpha=32, rslora=True).scale == 8


def test_adapters_of_experts_are_served_merged_alone() -> None:
    spec = small_spec(architecture="MixtralForCausalLM", experts=MOE["MixtralForCausalLM"])
    (check,) = [check for check in RUN_CHECKS if check.name == "adapters"]
    for serve, problem in (("merged", ""), ("adapter", "serve = adapter is for dense models")):
        run: Any = SimpleNamespace(config=load_run(None, [f"model.lora.serve={serve}"]), spec=spec)
        with pytest.raises(ValueError, match=problem) if problem else nullcontext():
            check.verify(run)

"""What follows from the choice of layers (what Megatron builds from it: test_built_layers.py); whose kernels there are; FP8
weights beside plain ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file

from tepo_megatron.trainer.megatron import gpu as packages
from tepo_megatron.trainer.megatron.gpu import Packages
from tepo_megatron.trainer.megatron.model import fp8 as fp8_weights
from tepo_megatron.trainer.megatron.model.model import Layers
from tepo_megatron.trainer.megatron.optimizer_states import STATES, OptimizerStates
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts import MegatronParallel, megatron_ranks
from tepo_megatron.weights.table import tensor_shapes

SPEC = ModelSpec("LlamaForCausalLM", 1, 8, 2, 1, 4, 16, 5, False, 1e-5, 1e4, None, 64)


@pytest.mark.parametrize(("kind", "wgrad"), [("te", True), ("te", False), ("local", True)])
def test_fusions_are_asked_for_where_their_kernels_are(kind: Any, wgrad: bool) -> None:
    options = Layers(kind, Packages(te="2.11.0", apex=wgrad, wgrad=wgrad)).kernel_options
    te = kind == "te"
    assert (options["bias_activation_fusion"], options["apply_rope_fusion"], options["persist_layer_norm"]) == (te, te, te)
    assert options["gradient_accumulation_fusion"] == (te and wgrad)
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    silu: dict[str, Any] = {"gated_linear_unit": True, "add_bias_linear": False, "activation_func": torch.nn.functional.silu}
    # Megatron takes all but the rotation's, which needs Transformer Engine
    TransformerConfig(**{**sizes, **silu, **options, "apply_rope_fusion": False})


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


@pytest.mark.parametrize(
    ("found", "whose"),
    [
        (Packages(te="2.11.0", apex=True), "Transformer Engine's"),
        (Packages(apex=True), "apex'"),
        (Packages(), "torch's"),
    ],
)
def test_whose_adam_is_megatrons_own_order(found: Packages, whose: str) -> None:
    assert found.adam[0] == whose


def test_what_is_said_of_adam_here_is_what_megatron_does() -> None:
    from megatron.core import optimizer

    torchs = Packages.installed().adam[0] == "torch's"
    assert torchs is issubclass(optimizer.Adam, torch.optim.Adam)


# -- FP8 weights ---------------------------------------------------------------------------------------------------------------


class Rounded(torch.Tensor):
    """Stands in for a parameter that Transformer Engine keeps in FP8: copied to as a whole, rounding; read by dequantize()."""

    @staticmethod
    def of(values: torch.Tensor) -> Rounded:
        made = torch.Tensor._make_subclass(Rounded, torch.zeros_like(values))
        made.held = values.to(torch.float8_e4m3fn)
        return made

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


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_weights, "is_float8tensor", lambda tensor: isinstance(tensor, Rounded))
    monkeypatch.setattr(fp8_weights, "dequantize_fp8_tensor", lambda tensor: tensor.dequantize())


def test_fp8_parameters_are_loaded_whole_and_their_masters_unrounded(stand_in: None, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(SPEC).items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (layout,) = megatron_ranks(SPEC, MegatronParallel(fused_norms=True))
    plain = {name: torch.zeros(shape) for name, shape in layout.params.items()}
    fp8_weights.load_weights(tmp_path, layout, plain)

    fc1 = "decoder.layers.0.mlp.linear_fc1.weight"
    params = {name: torch.zeros(shape) for name, shape in layout.params.items()}
    params[fc1] = Rounded.of(torch.zeros(layout.params[fc1]))
    unrounded = fp8_weights.load_weights(tmp_path, layout, params)
    assert list(unrounded) == [fc1]
    assert torch.equal(unrounded[fc1], plain[fc1])

    seen = fp8_weights.plain_weights(params)
    assert list(seen) == list(params)
    assert len(seen) == len(params)
    for name, value in plain.items():
        expected = value.to(torch.float8_e4m3fn).float() if name == fc1 else value
        assert type(seen[name]) is torch.Tensor
        assert torch.equal(seen[name], expected), name
    assert not torch.equal(seen[fc1], plain[fc1])


# -- fused Adam ----------------------------------------------------------------------------------------------------------------


class GroupCounting(torch.optim.Optimizer):
    """Counts steps as Transformer Engine's and apex' Adam do: per group, from 1 where there is no count."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


@given(st.integers(0, 1000))
def test_a_resumed_fused_adam_counts_on(updates: int) -> None:
    """Or else its bias correction would start anew under moments that did not: a jump of the weights at every resume."""
    param = torch.nn.Parameter(torch.zeros(3))
    wrapped = object.__new__(FP32Optimizer)
    wrapped.optimizer = GroupCounting([param])
    values = {state: torch.full((3,), float(number)) for number, state in enumerate(STATES, 1)}
    OptimizerStates(wrapped).restore(param, values, updates=updates)
    wrapped.optimizer.step()
    assert wrapped.optimizer.param_groups[0]["step"] == updates + 1
    assert torch.equal(param, torch.ones(3))
    assert set(wrapped.optimizer.state[param]) == {"exp_avg", "exp_avg_sq"}


def test_a_master_is_set_where_it_is_held() -> None:
    param = torch.nn.Parameter(torch.zeros(2, 3))
    wrapped = object.__new__(FP32Optimizer)
    wrapped.optimizer = torch.optim.AdamW([param])
    value = torch.arange(6.0).view(2, 3)
    OptimizerStates(wrapped).set_master(param, value)
    assert torch.equal(param, value)

"""Refusals of the trainer: settings, GPUs, packages and models that do not suffice."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec as ImportSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import EngineConfig, Fp8Config, OptimizerConfig, ParallelConfig, RunConfig
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.trainer.megatron import engine
from tepo_megatron.trainer.megatron.gpu import INDUCTOR_VARIABLE, Packages, check_config, prepare_process
from tepo_megatron.trainer.megatron.model import fp8, model
from tepo_megatron.trainer.megatron.parallel.platform import Platform
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts import check_trainer_split, pipeline_stages_of
from tests.support.programs import run_python

GPUS = {
    "A100": ((8, 0), set()),
    "L40S": ((8, 9), {"delayed", "tensorwise"}),
    "H100": ((9, 0), {"delayed", "tensorwise", "blockwise"}),
    "B200": ((10, 0), {"delayed", "tensorwise", "blockwise", "mxfp8"}),
    "B300": ((10, 3), {"delayed", "tensorwise", "blockwise", "mxfp8"}),
    "RTX 5090": ((12, 0), {"delayed", "tensorwise", "blockwise"}),
}
"""By NVIDIA's published capabilities, and what Transformer Engine 2.11 answers for each with CUDA 12.9."""

ENGINES = {
    "1.14": {"delayed"},
    "2.1.0": {"delayed", "mxfp8"},
    "2.2.0.dev0": {"delayed", "mxfp8", "tensorwise"},
    "2.3.0+abc": {"delayed", "mxfp8", "tensorwise", "blockwise"},
    "2.11.0": {"delayed", "mxfp8", "tensorwise", "blockwise"},
}
"""Which recipes Megatron-Core 0.16.1 would make with which Transformer Engine."""

CUDAS = {"12.0": set(), "12.1": {"ada"}, "12.8": {"ada"}, "12.9": {"ada", "blockwise"}, "13.0": {"ada", "blockwise"}}
RECIPES = ["delayed", "tensorwise", "blockwise", "mxfp8"]
SPEC = ModelSpec("LlamaForCausalLM", 8, 256, 8, 4, 32, 512, 61, False, 1e-5, 1e4, None, 512)


@given(st.sampled_from([*GPUS]), st.sampled_from([*ENGINES]), st.sampled_from([*CUDAS]), st.sampled_from(RECIPES))
def test_a_recipe_is_taken_where_gpu_te_and_cuda_have_it(gpu: str, te: str, cuda: str, recipe: str) -> None:
    capability, supported = GPUS[gpu]
    fits = recipe in supported and recipe in ENGINES[te]
    fits = fits and (recipe != "blockwise" or "blockwise" in CUDAS[cuda]) and (gpu != "L40S" or "ada" in CUDAS[cuda])

    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match=f"engine.fp8.recipe = {recipe} "):
        fp8.check_gpu(Fp8Config(recipe=recipe), capability=capability, te=te, cuda=cuda)
    fp8.check_gpu(Fp8Config(), capability=capability, te=te, cuda=cuda)


@pytest.mark.parametrize(
    ("recipe", "facts", "message"),
    [
        ("delayed", {"capability": (8, 0)}, r"needs a GPU of compute capability 8\.9 or more .*, and this one has 8\.0"),
        ("mxfp8", {}, r"10\.0 or more \(Blackwell B200 or B300\), .* has 9\.0; choose engine.fp8.recipe = delayed or "),
        ("mxfp8", {"capability": (12, 0)}, r"has no kernels for GPUs of compute capability 12\.0 yet"),
        ("blockwise", {"cuda": "12.8"}, r"needs CUDA 12\.9 or newer on this GPU, and torch was built for 12\.8"),
        ("blockwise", {"te": "2.2.0"}, r"unknown to the installed Transformer Engine 2\.2\.0, 2\.3 or newer is needed"),
        ("tensorwise", {"te": "2.1.0"}, r"or choose one of none, delayed, mxfp8"),
    ],
)
def test_a_refusal_says_what_is_there_and_what_is_needed(recipe: str, facts: dict[str, Any], message: str) -> None:
    here = {"capability": (9, 0), "te": "2.11.0", "cuda": "12.9", **facts}
    with pytest.raises(ValueError, match=message):
        fp8.check_gpu(Fp8Config(recipe=recipe), **here)


@pytest.mark.parametrize("recipe", RECIPES)
def test_transformer_engine_has_the_last_word(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """The names that it has had from 2.3 to 2.11; a name that does not exist would fail here."""
    names = ("is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available")
    module: Any = ModuleType("transformer_engine.pytorch.fp8")
    manager = module.FP8GlobalStateManager = Mock(spec=names, **{f"{name}.return_value": (True, "") for name in names})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    fp8.ask_transformer_engine(Fp8Config(recipe=recipe))
    asked = {"blockwise": names[1], "mxfp8": names[2]}.get(recipe, names[0])
    getattr(manager, asked).return_value = (False, "cuBLASLt is too old")
    with pytest.raises(ValueError, match=f"{recipe} is refused by Transformer Engine: cuBLASLt is too old"):
        fp8.ask_transformer_engine(Fp8Config(recipe=recipe))
    fp8.ask_transformer_engine(Fp8Config())
    assert [name for name, *_ in manager.method_calls] == [asked] * 2


@pytest.mark.parametrize(
    ("recipe", "changes", "parallel", "message"),
    [
        ({"first_layers_bf16": 3}, {}, {"pp": 4}, "first_layers_bf16 = 3 is more than the 2 layers of a pipeline stage"),
        ({"first_layers_bf16": 5, "last_layers_bf16": 3}, {}, {}, "keeps all 8 layers in bfloat16"),
        ("delayed", {"ffn_size": 344}, {"tp": 1}, r"multiples of 16, .* 344 \(MLP size of a rank\)"),
        ("mxfp8", {}, {"tp": 4, "dp": 1}, None),
        ("mxfp8", {"head_dim": 24}, {"tp": 4}, r"96 \(queries, keys and values of a rank\)|48 \(attention output of a rank\)"),
        ("tensorwise", {"hidden_size": 200}, {}, r"200 \(hidden size\)"),
        ("blockwise", {"vocab_size": 61}, {"tp": 4}, None),  # embedding and head are not in FP8
        ("tensorwise", {}, {"pp": 4}, None),
        ("blockwise", {"hidden_size": 192}, {"tp": 2, "sequence_parallel": True}, "blocks of 128 .* hidden size is 192"),
        ("blockwise", {"hidden_size": 192}, {"tp": 2}, None),
        ("blockwise", {}, {"tp": 2, "sequence_parallel": True}, None),
    ],
)
def test_a_model_that_fp8_matrix_products_do_not_fit_is_refused(
    recipe: str | dict[str, Any], changes: dict[str, Any], parallel: dict[str, Any], message: str | None
) -> None:
    """Of the policy and of a teacher, before any rank starts."""
    fp8 = {"recipe": recipe} if isinstance(recipe, str) else {"recipe": "tensorwise", **recipe}
    run = RunConfig.model_validate({"engine": {"platform": "cuda", "parallel": parallel, "fp8": fp8}})
    spec, fitting = replace(SPEC, **changes), replace(SPEC, hidden_size=256, num_layers=16)
    for judged in ((spec, {}), (fitting, {"wise": spec})):
        with pytest.raises(ValueError, match=message) if message is not None else contextlib.nullcontext():
            check_config(run, judged[0], on_gpu=True, teachers=judged[1])


A2A = {"cp": 2, "cp_comm_type": "a2a"}
CPU, CUDA = Platform("cpu", torch.device("cpu"), "gloo"), Platform("cuda", torch.device("cuda", 0), "nccl")


@pytest.mark.parametrize(
    ("engine_section", "platform", "te", "expected"),
    [
        ({"layers": "auto"}, CPU, True, "local"),
        ({"layers": "local"}, CPU, False, "local"),
        ({"layers": "auto"}, CUDA, True, "te"),
        ({"layers": "te"}, CUDA, True, "te"),
        ({"layers": "local"}, CUDA, True, "local"),
        ({"layers": "local"}, CUDA, False, "local"),
        ({"layers": "te"}, CPU, True, r"engine\.layers = te needs a GPU, .*set layers = local, .*auto is cpu here"),
        ({"fp8": {"recipe": "tensorwise"}}, CPU, True, r"engine\.fp8\.recipe = tensorwise needs .* on a GPU, .* auto is cpu"),
        ({"parallel": A2A}, CPU, True, r"engine\.parallel\.cp_comm_type = a2a is .* auto is cpu here"),
        ({"parallel": A2A}, CUDA, True, "te"),
        ({"layers": "te"}, CUDA, False, r"engine.layers = te, but .* cannot be imported \(ModuleNotFoundError.*; install it"),
        ({}, CUDA, False, r"engine.layers = auto means Transformer Engine on a GPU, but .* set engine.layers=local"),
    ],
)
def test_layers_are_chosen_by_config_and_never_by_accident(
    engine_section: dict[str, Any], platform: Platform, te: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("pytorch") if te else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    config = EngineConfig.model_validate(engine_section)
    taken = expected in ("te", "local")
    with contextlib.nullcontext() if taken else pytest.raises((ValueError, RuntimeError), match=expected):
        assert model.Layers.choose(config, platform, "bfloat16").kind == expected


@pytest.mark.parametrize(
    ("capability", "flash_attn", "warns"),
    [
        ((8, 0), False, True),
        ((8, 0), True, False),
        ((9, 0), False, False),
        ((10, 0), False, False),
        ((12, 0), False, True),
        ((12, 0), True, False),
    ],
)
def test_attention_that_holds_all_scores_is_warned_of(
    capability: tuple[int, int], flash_attn: bool, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine's cuDNN attention takes packed sequences from compute capability 9.0, but not on 12.0."""
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("pytorch"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    module = ModuleType("flash_attn")
    module.__spec__ = ImportSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", module if flash_attn else None)
    monkeypatch.setattr(Packages, "installed", lambda: Packages(te="2.11.0"))
    with pytest.warns(UserWarning, match="; install flash-attn for long") if warns else contextlib.nullcontext():
        assert model.Layers.choose(EngineConfig(), CUDA, "bfloat16").kind == "te"
    with pytest.raises(ValueError, match=r"flash-attn, or set engine\.parallel\.cp to") if warns else contextlib.nullcontext():
        model.Layers.choose(EngineConfig(parallel=ParallelConfig(cp=2)), CUDA, "bfloat16")
    monkeypatch.setattr(Packages, "installed", lambda: Packages(te="2.10.0"))
    with pytest.raises(ValueError, match=r"2\.10\.0 has no attention here: ") if warns else contextlib.nullcontext():
        model.Layers.choose(EngineConfig(), CUDA, "bfloat16")
    with pytest.raises(ValueError, match=r"multiplies in TF32, .* set model\.dtype = bfloat16, or engine\.layers = local"):
        model.Layers.choose(EngineConfig(), CUDA, "float32")
    assert model.Layers.choose(EngineConfig(layers="local"), CUDA, "float32").kind == "local"


@pytest.mark.parametrize(("te", "fits"), [("2.9.0", False), ("2.10.0", True), (None, True)])
def test_a2a_with_an_old_transformer_engine_is_refused(te: str | None, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("pytorch"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(Packages, "installed", lambda: Packages(te=te))
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match=r"2\.10 or newer, and 2\.9\.0 is installed"):
        model.Layers.choose(EngineConfig(parallel=ParallelConfig.model_validate(A2A)), CUDA, "bfloat16")


@pytest.mark.slow
def test_a_broken_transformer_engine_does_not_stop_local_layers(tmp_path: Path) -> None:
    """Megatron-Core imports it wherever it is installed, and survives an ImportError only. W&B, which it would import too, is
    left to others.
    """
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("raise OSError('undefined symbol')\n")
    (tmp_path / "wandb.py").touch()
    program = (
        "import sys\n"
        "from tepo_megatron.trainer.megatron import TRANSFORMER_ENGINE, engine, gpu\n"
        "print('wandb' in sys.modules)\n"
        "import wandb\n"
        "print(TRANSFORMER_ENGINE.problem)\n"
        "print(gpu.Packages.installed().te)\n"
        "import torch, megatron.core.fusions.fused_bias_swiglu\n"
        "print('torch._inductor' in sys.modules, torch.version.cuda is not None, torch.compile.__module__)\n"
    )
    result = run_python("-c", program, environment={"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"})
    assert result.stdout.splitlines()[:-1] == ["False", "OSError: undefined symbol", "None"]
    assert result.stdout.splitlines()[-1] in ("False False torch", "True True torch")  # without CUDA nothing is compiled


@pytest.mark.parametrize(
    ("section", "capability", "message"),
    [({}, None, "cannot be imported"), ({"fp8": {"recipe": "mxfp8"}}, (9, 0), "this one has 9.0")],
)
def test_the_engine_stops_before_any_process_group(
    monkeypatch: pytest.MonkeyPatch, section: dict[str, Any], capability: tuple[int, int] | None, message: str
) -> None:
    """As on a machine with a GPU, of the given capability where Transformer Engine is installed."""
    monkeypatch.setattr(engine, "select_platform", lambda _: CUDA)
    if capability is not None:
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("pytorch"))
        monkeypatch.setattr(Packages, "installed", lambda: Packages(te="2.11.0"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    config = RunConfig.model_validate({"model": {"dtype": "bfloat16"}, "engine": section})
    with pytest.raises((ValueError, RuntimeError), match=message):
        engine.Engine(config, resolve_model_path("builtin:tiny"))
    assert not dist.is_initialized()


@given(st.sampled_from(["bfloat16", "float16"]), st.floats(0.5, 1, exclude_max=True), st.floats(1, 2))
def test_a_mean_that_is_accepted_falls(dtype: str, beta: float, start: float) -> None:
    """Where gradients have become 0 a running mean must go there too."""
    kept = getattr(torch, dtype)
    mean = torch.tensor(start, dtype=kept)
    if (mean.float() * beta).to(kept) < mean:
        return
    with pytest.raises(ValueError, match="so that it never falls"):
        OptimizerConfig(distributed=True, betas=(beta, 0.5), exp_avg_dtype=dtype)


@pytest.mark.parametrize(("tp", "cp", "heads"), [(1, 8, "4 key/value"), (2, 4, "2 key/value"), (1, 3, "8 attention")])
def test_heads_that_ranks_cannot_trade_are_refused(tp: int, cp: int, heads: str) -> None:
    parallel = EngineConfig(parallel={"tp": tp, "cp": cp, "cp_comm_type": "a2a"}).parallel
    with pytest.raises(ValueError, match=rf"cp = {cp} with cp_comm_type = a2a does not divide the {heads} heads"):
        check_trainer_split(SPEC, parallel)
    check_trainer_split(SPEC, parallel.model_copy(update={"cp_comm_type": "p2p"}))


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp": 3}, r"engine.parallel does not fit the model with pp = 3: 8 layers do not split over 3 pipeline stages"),
        ({"pp": 2, "vpp": 3}, r"pp = 2, vpp = 3: 3 chunks do not divide a pipeline stage of 4 layers"),
        ({"pp": 2, FIRST: 3, LAST: 4}, rf"pp = 2, {FIRST} = 3, {LAST} = 4: 8 layers do not split over 2"),
        ({"pp": 4, FIRST: 1}, rf"pp = 4, {FIRST} = 1: 8 layers do not split over 4 pipeline stages with 1 in the first"),
    ],
)
def test_stages_that_do_not_fit_the_layers_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline_stages_of(SPEC, ParallelConfig.model_validate(changes))


@pytest.mark.parametrize(
    "take",
    [
        lambda folder: folder.chmod(0o777),
        lambda folder: folder.rename(folder.with_name("moved")).chmod(0o700) or folder.symlink_to("moved"),
        lambda folder: folder.rmdir() or folder.touch(mode=0o600),
        pytest.param(
            lambda folder: os.chown(folder, 65534, -1), marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
        ),
    ],
    ids=["mode", "link", "file", "user"],
)
def test_torch_keeps_compiled_code_where_no_other_user_writes(
    take: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INDUCTOR_VARIABLE, "")  # so that it is as before afterwards
    monkeypatch.delenv(INDUCTOR_VARIABLE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    prepare_process(RunConfig())
    folder = Path(os.environ[INDUCTOR_VARIABLE])
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    take(folder)
    prepare_process(RunConfig())  # what is set stays
    del os.environ[INDUCTOR_VARIABLE]
    with pytest.raises(RuntimeError, match=f"{folder}.*set {INDUCTOR_VARIABLE} to a folder of yours"):
        prepare_process(RunConfig())

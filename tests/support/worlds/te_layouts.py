"""Builds real Transformer Engine layers, and holds their parameters against the bridge's table: te_layouts MODELS.json.

Without a GPU torch.cuda's answers are replaced first: parameters are made on the CPU, and nothing is computed. Prints JSON:
model and recipe → parameters whose shape is not the table's, each with both.
"""

import contextlib
import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tepo_megatron.config import EngineConfig, RunConfig
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.layouts import MegatronParallel

RECIPES = ("none", "delayed", "tensorwise", "blockwise")


def pretend_a_hopper() -> None:
    """What Megatron-Core and Transformer Engine ask while they make a layer."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    cuda.Stream = cuda.Event = cuda.current_stream = lambda *_, **__: None


def differences(built: dict[str, tuple[int, ...]], table: dict[str, tuple[int, ...]]) -> dict[str, list[Any]]:
    return {
        name: [built.get(name), table.get(name)] for name in built.keys() | table.keys() if built.get(name) != table.get(name)
    }


def main() -> None:
    warnings.filterwarnings("ignore")
    from tepo_megatron.trainer.megatron.model.model import Layers, build_model, transformer_config
    from tepo_megatron.trainer.megatron.parallel import platform
    from tepo_megatron.trainer.megatron.parallel.platform import Platform
    from tepo_megatron.trainer.megatron.policy import named_weights

    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        platform.select_platform(EngineConfig(platform="cpu"))
    cuda = Platform("cuda", torch.device("cuda" if has_gpu else "cpu"), "nccl" if has_gpu else "gloo")
    here = cuda if has_gpu else Platform("cpu", torch.device("cpu"), "gloo")
    ranks = here.initialize(RunConfig().engine.parallel, seed=0)
    if not has_gpu:
        pretend_a_hopper()
    found = {}
    for name, raw in json.loads(Path(sys.argv[1]).read_text()).items():
        spec = ModelSpec.of(raw, name)
        table = MegatronParallel(fused_norms=True).layouts(spec)[0].params
        for recipe in RECIPES:
            run = RunConfig.model_validate({"model": {"dtype": "bfloat16"}, "engine": {"fp8": {"recipe": recipe}}})
            config = transformer_config(spec, run.model, run.engine, cuda, Layers("te"))
            config.use_cpu_initialization = not has_gpu
            with here.megatron() if not has_gpu else contextlib.nullcontext():
                model = build_model(spec, config, ranks, Layers("te"))
            built = {key: tuple(value.shape) for key, value in named_weights([model]).items()}
            found[f"{name} {recipe}"] = differences(built, dict(table))
    here.destroy()
    print(json.dumps(found))


if __name__ == "__main__":
    main()

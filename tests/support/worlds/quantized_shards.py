"""Two workers of vLLM's, gloo between them, with a model that quantises weights as it loads: quantized_shards MODELS OUT.

For each quantisation Q, OUT/loaded-Q-RANK.safetensors holds the live tensors of a model that loaded MODELS/new from disk, and
OUT/updated-Q-RANK.safetensors those of one that loaded MODELS/old and was then given the shards of MODELS/new, in another order
on each worker. OUT/waiting-Q-RANK.txt names that model's linear layers that were still unprocessed when all shards were there.
OUT/refused-RANK.txt is what the loader says to a checkpoint that is quantised already.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.config import ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.model_executor.layers.quantization.online import fp8
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.utils import get_model_architecture

from tepo_megatron.sampler.vllm.plugin.engine import ShardLoader
from tepo_megatron.weights.architecture import read_model_spec
from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel
from tepo_megatron.weights.reshard import reshard_plan
from tepo_megatron.weights.transfer.move import MoveEnd, Queues, queues

WORKERS = 2
QUANTISATIONS = ("fp8_per_channel", "fp8_per_tensor", "fp8_per_block")


class NoKernel:
    """In place of a matrix product that this CPU has none of: nothing is computed with the weights here."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        return None


def quantize_per_tensor(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """In place of vLLM's operator, which its CPU build has not."""
    return (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def config(folder: Path, quantization: str | None) -> VllmConfig:
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", quantization=quantization)
    return VllmConfig(model_config=model, parallel_config=ParallelConfig(tensor_parallel_size=WORKERS))


def loaded(folder: Path, quantization: str) -> tuple[Any, ModelConfig]:
    vllm_config = config(folder, quantization)
    with set_current_vllm_config(vllm_config):
        return get_model(vllm_config=vllm_config), vllm_config.model_config


def unprocessed(folder: Path) -> dict[str, Tensor]:
    """This worker's shards, as vLLM cuts them out of the checkpoint."""
    vllm_config = config(folder, None)
    model_class, _ = get_model_architecture(vllm_config.model_config)
    with set_current_vllm_config(vllm_config):
        model = model_class(vllm_config=vllm_config)
    model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    return {name: param.detach() for name, param in model.named_parameters()}


def incoming(folder: Path, rank: int) -> Queues:
    plan = reshard_plan(read_model_spec(folder), MegatronParallel(tp=1), VllmParallel(tp=WORKERS))
    return queues(MoveEnd.of(plan, plan.num_sources + rank), itemsize=2, limit=2**20)


@torch.no_grad()
def update(model: torch.nn.Module, shards: dict[str, Tensor], queue: Queues, *, backwards: bool) -> list[str]:
    loader = ShardLoader(model, queue)
    loader.start()
    for name in reversed(list(loader)) if backwards else loader:
        loader[name].copy_(shards[name])
        loader.complete(name)
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, LinearBase)]
    waiting = [name.rpartition(".")[2] for name, module in linears if module.weight.dtype == torch.bfloat16]
    loader.finish()
    return waiting


def main() -> None:
    models, out = map(Path, sys.argv[1:])
    rank = int(os.environ["RANK"])
    torch._dynamo.config.disable = True  # vLLM compiles its quantiser of blocks, which takes longer than all else here
    torch.set_default_dtype(torch.bfloat16)
    os.environ["VLLM_DIST_IDENT"] = str(rank)  # names differ: no shared memory between the two, only gloo
    with set_current_vllm_config(config(models / "new", None)):
        init_distributed_environment(backend="gloo")
        initialize_model_parallel(WORKERS, backend="gloo")
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker has it
    ops.scaled_fp8_quant = quantize_per_tensor
    shards, queue = unprocessed(models / "new"), incoming(models / "new", rank)
    for quantization in QUANTISATIONS:
        if quantization != "fp8_per_channel":
            fp8.init_fp8_linear_kernel = lambda **_: NoKernel()
        for kind, folder in (("loaded", models / "new"), ("updated", models / "old")):
            model, model_config = loaded(folder, quantization)
            if kind == "updated":
                waiting = update(model, shards, queue, backwards=rank == 1)
                (out / f"waiting-{quantization}-{rank}.txt").write_text(" ".join(waiting))
                finalize_layerwise_reload(model, model_config)
            tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
            save_file(tensors, out / f"{kind}-{quantization}-{rank}.safetensors")
    model.model.layers[0].mlp.down_proj.quant_method = Fp8LinearMethod.__new__(Fp8LinearMethod)
    try:
        ShardLoader(model, queue)
    except RuntimeError as error:
        (out / f"refused-{rank}.txt").write_text(str(error))

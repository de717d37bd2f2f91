"""What vLLM's own model classes declare and load, for the tests of the layouts: vllm_oracle JOB.json OUT.

No process group: only the answers to "how many ranks, which one am I" are given, so that every rank of any world can be asked.
Writes ``OUT/<name>.json`` (parameter → shape) for models on the meta device, ``OUT/<name>.safetensors`` (the loaded parameters)
for those with weights, and ``OUT/pp.json`` with vLLM's division of layers.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.model_executor.models import registry


def be_rank(tp: int, tp_rank: int, pp: int, pp_rank: int) -> None:
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    parallel_state._DP = parallel_state._PCP = alone
    group = SimpleNamespace(size=lambda: tp, rank=lambda: tp_rank)
    parallel_state._EP = SimpleNamespace(world_size=tp, rank_in_group=tp_rank, device_group=group)
    parallel_state._TP = SimpleNamespace(world_size=tp, rank_in_group=tp_rank)
    parallel_state._PP = SimpleNamespace(
        world_size=pp, rank_in_group=pp_rank, is_first_rank=pp_rank == 0, is_last_rank=pp_rank == pp - 1
    )


def build(folder: str, device: str) -> Any:
    config = VllmConfig(model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32"))
    model_class, _ = get_model_architecture(config.model_config)
    with set_current_vllm_config(config), torch.device(device):
        return model_class(vllm_config=config)


def main(job: Path, out: Path) -> None:
    torch.set_default_dtype(torch.float32)
    # vLLM asks a process of its own about every class that its cache does not know; here they are imported in any case.
    registry._run_in_subprocess = lambda ask: ask()
    todo = json.loads(job.read_text())
    for case in todo["declared"]:
        be_rank(*case["rank"])
        shapes = {name: list(param.shape) for name, param in build(case["folder"], "meta").named_parameters()}
        (out / f"{case['name']}.json").write_text(json.dumps(shapes))
    for case in todo["loaded"]:
        be_rank(*case["rank"])
        model = build(case["folder"], "cpu")
        model.load_weights(iter(load_file(Path(case["folder"]) / "model.safetensors").items()))
        params = {name: param.detach().contiguous() for name, param in model.named_parameters()}
        save_file(params, out / f"{case['name']}.safetensors")
    stages = [[list(get_pp_indices(layers, rank, pp)) for rank in range(pp)] for layers, pp in todo["pp"]]
    (out / "pp.json").write_text(json.dumps(stages))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Makes a small Mixtral of the warm start, which computes the same at first: ``python examples/tiny/make_experts.py OUT``.

Every expert is a copy of the dense MLP, with a little noise, and a router with small random weights chooses two of them for
each token. Its probabilities for the two sum to 1, so that without noise the output would be the MLP's own (sparse upcycling).
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tepo_megatron.tasks.data.builtin import resolve_model_path

MLP = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def upcycle(tensors: dict[str, Tensor], experts: int, noise: float, seed: int) -> dict[str, Tensor]:
    """A Mixtral's tensors from a Llama's; ``noise`` is relative to each matrix's standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        before, is_mlp, rest = name.partition(".mlp.")
        if not is_mlp:
            found[name] = tensor
            continue
        part = MLP[rest.removesuffix(".weight")]
        for expert in range(experts):
            drawn = torch.randn(tensor.shape, generator=generator) * tensor.std() * noise
            found[f"{before}.block_sparse_moe.experts.{expert}.{part}.weight"] = (tensor + drawn).contiguous()
        if part == "w1":
            found[f"{before}.block_sparse_moe.gate.weight"] = 0.02 * torch.randn(experts, tensor.shape[1], generator=generator)
    return found


def main() -> None:
    """Writes a Hugging Face folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="builtin:tiny", help="a Llama")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--noise", type=float, default=0.01)
    arguments = parser.parse_args()
    source, out = resolve_model_path(arguments.model), arguments.out
    config = json.loads((source / "config.json").read_text())
    if config["architectures"] != ["LlamaForCausalLM"]:
        raise SystemExit(f"{source} is a {config['architectures'][0]}; give a Llama")
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and "index" not in file.name:
            shutil.copy(file, out)
    for name in ("attention_bias", "mlp_bias", "pretraining_tp"):
        config.pop(name, None)
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
    config |= {"num_local_experts": arguments.experts, "num_experts_per_tok": 2}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    dense = {name: tensor for file in sorted(source.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    save_file(upcycle(dense, arguments.experts, arguments.noise, seed=0), out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()

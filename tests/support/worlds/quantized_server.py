"""A float32 trainer and a real vLLM server in FP8: quantized_server OUT.

Writes OUT/report.json: the server's log-probs of the canary prompt as it loaded the model from disk, after an update to other
weights by full tensors, which vLLM's own loaders take apart, and after updates to the first and the other weights again, from
shard to shard; and how far the trainer's are from the last.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.run.consistency_checks import Canary, Tolerances
from tepo_megatron.run.weights import make_shard_sender
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.tasks.data.builtin import resolve_model_path

SERVER = {"quantization": "fp8_per_channel", "dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 8}


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    out, model_dir = Path(sys.argv[1]), resolve_model_path("builtin:tiny")
    document = {"rollout": {"server": SERVER}, "objective": {"mismatch": {"kind": "truncate"}}}
    config = RunConfig.model_validate(document)
    prompt = Canary.prompt(64, 64)
    with Fleet(config.rollout.server, model_dir=model_dir, dtype="float32", stop_token_ids=[2], log_dir=out) as fleet:
        from tepo_megatron.trainer.megatron.engine import Engine

        engine = Engine(config, model_dir)
        sender = make_shard_sender(config, engine.weights)
        torch.manual_seed(0)
        first = {name: param.detach().clone() for name, param in engine.policy.params.items()}
        other = {name: values * (1 + 0.05 * torch.randn(values.shape)) for name, values in first.items()}

        def answer() -> list[float]:
            (logprobs,) = fleet.prompt_logprobs(prompt).values()
            return logprobs

        def become(weights: dict[str, torch.Tensor]) -> None:
            for name, param in engine.policy.params.items():
                param.data.copy_(weights[name])

        report = {"first_from_disk": answer()}
        become(other)
        manifest = [(meta.name, meta.shape, meta.dtype) for meta in engine.weights.manifest]
        tensors = (tensor for _, tensor in engine.weights.stream() if tensor is not None)
        fleet.update_weights_from_tensors(engine.weights.version(1), manifest, tensors)
        report["other_by_tensors"] = answer()
        become(first)
        fleet.update_weights_from_shards(engine.weights.version(2), sender)
        report["first_by_shards"] = answer()
        become(other)
        fleet.update_weights_from_shards(engine.weights.version(3), sender)
        report["other_by_shards"], trainer = answer(), engine.prompt_logprobs(prompt)
        gap = Canary(Tolerances.of(config).token).check(3, prompt, trainer, {fleet._servers[0].url: report["other_by_shards"]})
    (out / "report.json").write_text(json.dumps({**report, "gap": gap}))
    engine.close()


if __name__ == "__main__":
    main()

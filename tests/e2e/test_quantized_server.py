"""A real vLLM server in FP8 takes a float32 trainer's shards, quantises them itself, and says nearly what the trainer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.run.consistency_checks import Canary, Tolerances
from tepo_megatron.run.weights import make_shard_sender
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tests.support.engines import make_engine
from tests.support.launch import run_dist

SERVER = {"quantization": "fp8_per_channel", "dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 8}


def serve(_rank: int, _world: int, out: Path) -> dict[str, Any]:
    """The server's log-probs of the canary prompt as it loaded the model from disk, after an update to other weights by full
    tensors, which vLLM's own loaders take apart, and after updates to the first and the other weights again, from shard to
    shard; and how far the trainer's are from the last.
    """
    config = RunConfig.model_validate({"rollout": {"server": SERVER}, "objective": {"mismatch": {"kind": "truncate"}}})
    model_dir, prompt = resolve_model_path(config.model.path), Canary.prompt(64, 64)
    with Fleet(config.rollout.server, model_dir=model_dir, dtype="float32", stop_token_ids=[2], log_dir=out) as fleet:
        engine = make_engine(config)
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

        report: dict[str, Any] = {"first_from_disk": answer()}
        become(other)
        manifest = [(meta.name, meta.shape, meta.dtype) for meta in engine.weights.manifest]
        tensors = (tensor for _, tensor in engine.weights.stream() if tensor is not None)
        fleet.update_weights_from_tensors(engine.weights.version(1), manifest, tensors)
        report["other_by_tensors"] = answer()
        for step, (name, weights) in enumerate({"first": first, "other": other}.items(), start=2):
            become(weights)
            fleet.update_weights_from_shards(engine.weights.version(step), sender)
            report[f"{name}_by_shards"] = answer()
        said = {fleet.addresses[0]: report["other_by_shards"]}
        report["gap"] = Canary(Tolerances.of(config).token).check(3, prompt, engine.prompt_logprobs(prompt), said)
    sender.close()
    return report


def test_shards_are_quantised_as_full_tensors_are_and_the_canary_passes(tmp_path: Path) -> None:
    (said,) = run_dist(1, serve, tmp_path)
    # To the last bit: the same FP8 weights and the same scales, whoever took the tensors apart.
    assert said["first_by_shards"] == said["first_from_disk"]
    assert said["other_by_shards"] == said["other_by_tensors"]
    moved = max(abs(a - b) for a, b in zip(said["first_from_disk"], said["other_by_shards"], strict=True))
    assert moved > 2 * said["gap"]
    assert 0.01 < said["gap"] < 1.0  # far above what float32 shows: it does compute in FP8

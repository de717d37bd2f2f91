"""A trainer at TP2 hands its weights to a real vLLM server and says what each side then computes: sync OUT KIND.

KIND is ``full``, or one of LoRA's: ``adapter`` (adapters alone are sent), ``merged-bf16``.

Writes OUT/report.json: per sync the server's greedy tokens, the largest difference between the log-probs that it sampled with
and the trainer's for the same tokens, and what the canary says of it; and OUT/model-N, the weights of sync N.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.run.consistency_checks import Canary, Tolerances
from tepo_megatron.run.weights import WeightPublisher
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.tokenizer import load_tokenizer

TEMPERATURE = 0.8

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "adapter": {"lora": {"rank": 4, "alpha": 8, "serve": "adapter"}},
    "merged-bf16": {"dtype": "bfloat16", "lora": {"rank": 4, "alpha": 8}},
}
"""``model`` of the run."""


def sample(fleet: Fleet, prompts: list[tuple[int, ...]], seed: int) -> list[Rollout]:
    groups = fleet.generate(prompts, n=4, temperature=TEMPERATURE, max_new_tokens=24, seed=seed)
    return [
        Rollout(
            problem_id=str(group),
            group=group,
            prompt_ids=prompts[group],
            response_ids=response.response_ids,
            sampler_logprobs=response.logprobs,
            finish_reason=response.finish_reason,
            versions=response.versions,
            reward=float(at % 2),
        )
        for group, responses in enumerate(groups)
        for at, response in enumerate(responses)
    ]


def ask(canary: Canary, engine: Any, fleet: Fleet | None, step: int) -> float | str:
    """The canary's largest difference, or what it stops the run with; every rank calls, rank 0 gets it."""
    prompt = Canary.prompt(engine.spec.vocab_size, engine.spec.max_positions)
    logprobs = engine.prompt_logprobs(prompt)
    if fleet is None:
        return 0.0
    try:
        return canary.check(step, prompt, logprobs, fleet.prompt_logprobs(prompt))
    except RuntimeError as error:
        return str(error)


def ask_with_a_permuted_tensor(engine: Any, fleet: Fleet | None) -> float | str:
    """As it would be if one projection had come to the servers with its rows in another order."""
    weight = engine.policy.params["decoder.layers.0.self_attention.linear_proj.weight"].data
    kept = weight.clone()
    weight.copy_(kept.roll(1, 0))
    said = ask(Canary(Tolerances.of(engine.config).token), engine, fleet, 2)
    weight.copy_(kept)
    return said


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    out, kind = Path(sys.argv[1]), sys.argv[2]
    config = RunConfig.model_validate(
        {
            "model": KINDS[kind],
            "engine": {"parallel": {"tp": 2, "sequence_parallel": True}},
            # Far larger than in a real run, so that stale weights could not pass for new ones.
            "optimizer": {"lr": 3e-3 if kind == "full" else 3e-2},
            "rollout": {"sampling": {"temperature": TEMPERATURE}},
        }
    )
    model_dir = resolve_model_path("builtin:tiny")
    from tepo_megatron.trainer.megatron.engine import Engine

    engine = Engine(config, model_dir)
    tokenizer = load_tokenizer(model_dir)
    prompts = [tuple(tokenizer.prompt_ids(problem.prompt)) for problem in load_problems("builtin:addition-heldout")[:8]]
    fleet = None
    if engine.ranks.rank == 0:
        fleet = Fleet(
            config.rollout.server,
            model_dir=model_dir,
            dtype=config.model.dtype,
            stop_token_ids=tokenizer.eos_ids,
            log_dir=out,
            trained=True,
            adapter_rank=config.adapter_rank,
        )
        fleet.start()
        urls = [server.url for server in fleet._servers]
    publisher = WeightPublisher(config, engine.weights, fleet)
    report: list[dict[str, Any]] = []
    refused = ask(Canary(Tolerances.of(config).token), engine, fleet, 0)
    try:
        canary = Canary(Tolerances.of(config).token)
        for sync in range(3):
            version = engine.weights.version(sync)
            publisher.update_weights(version)
            canary_gap = ask(canary, engine, fleet, sync)
            engine.weights.export(out / f"model-{sync}")
            rollouts = sample(fleet, prompts, seed=sync) if fleet is not None else None
            batch = engine.score(engine.batch_from_root(rollouts))
            assert batch.old_logprobs_T is not None
            gap = (batch.old_logprobs_T - batch.sampler_logprobs_T)[batch.loss_mask_T]
            if fleet is not None:
                greedy = fleet.generate(prompts, n=1, temperature=0.0, max_new_tokens=24, seed=0)
                report.append(
                    {
                        "greedy": [group[0].response_ids.tolist() for group in greedy],
                        "version": greedy[0][0].weights_version.step,
                        "digest": greedy[0][0].weights_version.digest,
                        "canary": canary_gap,
                        "logprob_gap": float(gap.abs().max()),
                        "mismatch_kl": float((gap.exp() - gap - 1).mean()),
                    }
                )
            permuted = ask_with_a_permuted_tensor(engine, fleet) if sync == 2 else 0.0
            engine.update(batch)
        stale = ask(canary, engine, fleet, 3)
    finally:
        if fleet is not None:
            fleet.stop()
    if engine.ranks.rank == 0:
        wrong = {"permuted": permuted, "stale": stale, "refused": refused, "urls": urls}
        (out / "report.json").write_text(json.dumps({"prompts": prompts, "eos": tokenizer.eos_ids, "syncs": report, **wrong}))
    engine.close()


if __name__ == "__main__":
    main()

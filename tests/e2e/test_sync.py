"""After every sync the server's weights are the trainer's: a canary in greedy tokens, and the log-probs of real rollouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tepo_megatron.core.rollout import Rollout
from tepo_megatron.run.consistency_checks import Canary, Tolerances
from tepo_megatron.run.weights import WeightPublisher
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tests.support.engines import make_engine, whole_digest
from tests.support.launch import run_dist
from tests.support.programs import FEW_BLOCKS
from tests.support.random_models import rollouts_of

MODEL = resolve_model_path("builtin:tiny")
TOKENIZER = load_tokenizer(MODEL)
PROMPTS = [tuple(TOKENIZER.prompt_ids(problem.prompt)) for problem in load_problems("builtin:addition-heldout")[:8]]
TEMPERATURE = 0.8
ADAPTERS: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8, "serve": "adapter"}}
MERGED: dict[str, Any] = {"dtype": "bfloat16", "lora": {"rank": 4, "alpha": 8}}
"""``model`` of a run; with ``ADAPTERS`` the server gets these alone. Weights in fp32: test_training_run.py."""


def sample(fleet: Fleet, seed: int) -> list[Rollout]:
    return rollouts_of(fleet.generate(PROMPTS, n=4, temperature=TEMPERATURE, max_new_tokens=24, seed=seed), PROMPTS)


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
    original = weight.clone()
    weight.copy_(original.roll(1, 0))
    said = ask(Canary(Tolerances.of(engine.config).token), engine, fleet, 2)
    weight.copy_(original)
    return said


def sync(rank: int, _world: int, out: Path, model: dict[str, Any]) -> dict[str, Any]:
    """By sync the server's greedy tokens, the largest difference between the log-probs that it sampled with and the trainer's
    for the same tokens, and the canary's; ``out/model-N`` has the weights of sync N.
    """
    document: dict[str, Any] = {
        "model": model,
        "engine": {"parallel": {"tp": 2, "sequence_parallel": True}},
        # Far larger than in a real run, so that stale weights could not pass for new ones.
        "optimizer": {"lr": 3e-2},
        "rollout": {"sampling": {"temperature": TEMPERATURE}, "server": {"extra_args": (FEW_BLOCKS,)}},
    }
    engine = make_engine(document)
    config = engine.config
    fleet: Fleet | None = None
    report: dict[str, Any] = {"syncs": [], "urls": []}
    if rank == 0:
        options: Any = {"dtype": config.model.dtype, "stop_token_ids": TOKENIZER.eos_ids, "adapter_rank": config.adapter_rank}
        fleet = Fleet(config.rollout.server, model_dir=MODEL, log_dir=out, trained=True, **options)
        fleet.start()
        report["urls"] = fleet.addresses
    publisher = WeightPublisher(config, engine.weights, fleet)
    tolerance = Tolerances.of(config).token
    canary = Canary(tolerance)
    try:
        report["refused"] = ask(Canary(tolerance), engine, fleet, 0)
        for step in range(3):
            publisher.update_weights(engine.weights.version(step))
            canary_gap = ask(canary, engine, fleet, step)
            engine.weights.export(out / f"model-{step}")
            batch = engine.score(engine.batch_from_root(sample(fleet, seed=step) if fleet is not None else None))
            gap = (batch.old_logprobs_T - batch.sampler_logprobs_T)[batch.loss_mask_T]
            if fleet is not None:
                greedy = fleet.generate(PROMPTS, n=1, temperature=0.0, max_new_tokens=24, seed=0)
                version = greedy[0][0].weights_version
                seen: dict[str, Any] = {"greedy": [group[0].response_ids.tolist() for group in greedy], "canary": canary_gap}
                seen |= {"step": version.step, "digest": version.digest, "read back": fleet.read_back()}
                report["syncs"].append(
                    seen | {"logprob_gap": float(gap.abs().max()), "mismatch_kl": float((gap.exp() - gap - 1).mean())}
                )
            if step == 2:
                report["permuted"] = ask_with_a_permuted_tensor(engine, fleet)
            engine.update(batch)
        report["stale"] = ask(canary, engine, fleet, 3)
    finally:
        if fleet is not None:
            fleet.stop()
    return report


World = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The server keeps its weights and gets adapters; the rest must be as if it got weights."""
    out = tmp_path_factory.mktemp("sync")
    return out, run_dist(2, sync, out, ADAPTERS)[0]


def test_greedy_tokens_are_those_of_transformers_on_the_exported_weights(world: World) -> None:
    from transformers import LlamaForCausalLM

    out, report = world
    for number, seen in enumerate(report["syncs"]):
        model = LlamaForCausalLM.from_pretrained(out / f"model-{number}", dtype=torch.float32)
        for prompt, response in zip(PROMPTS, seen["greedy"], strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == response
            assert response[-1] in TOKENIZER.eos_ids or len(response) == 24
    first, second, third = (seen["greedy"] for seen in report["syncs"])
    assert first != second != third, "without a change the canary could not fail"


def test_logprobs_of_server_and_trainer_agree_on_real_rollouts_and_on_the_canarys_prompt(world: World) -> None:
    for seen in world[1]["syncs"]:
        assert list(seen["read back"].values()) == [([], 0.0)]  # adapters are not compared
        assert seen["logprob_gap"] < 3e-4  # the largest of all tokens, in fp32: 1.01e-4 was seen on an AMD EPYC
        assert seen["mismatch_kl"] < 1e-6
        assert seen["canary"] < 1e-4


def test_nothing_is_computed_before_the_first_sync(world: World) -> None:
    assert "status 409" in world[1]["refused"]
    assert "has no weights yet" in world[1]["refused"]


def test_merged_adapters_in_bfloat16_are_what_the_server_computes_with(tmp_path: Path) -> None:
    """Both sides have the same rounded weights, and differ by the rounding of activations alone: docs/reference/numerics.md."""
    report = run_dist(2, sync, tmp_path, MERGED)[0]
    assert len({str(seen["greedy"]) for seen in report["syncs"]}) == 3
    for seen in report["syncs"]:
        assert list(seen["read back"].values()) == [([], 1.0)], "all weights there are those that the trainer sent, bit by bit"
        assert seen["canary"] < 0.25  # of the tolerance, 0.5
        assert seen["mismatch_kl"] < 1e-2
    assert isinstance(report["stale"], str)


@pytest.mark.parametrize("fault", ["stale", "permuted"])
def test_the_canary_stops_at_old_weights_and_at_permuted_ones(world: World, fault: str) -> None:
    """Stale: the trainer made one more step that the server was not told of."""
    said = world[1][fault]
    assert isinstance(said, str), said
    assert f"{world[1]['urls'][0]} gives token" in said
    assert "the trainer -" in said


def test_responses_carry_the_step_and_digest_of_the_weights_that_gave_them(world: World) -> None:
    """A trainer at TP2 says the same as the file that it exports, whole tensors."""
    out, report = world
    assert [seen["step"] for seen in report["syncs"]] == [0, 1, 2]
    assert len({seen["digest"] for seen in report["syncs"]}) == 3
    for number, seen in enumerate(report["syncs"]):
        assert seen["digest"] == whole_digest(load_file(out / f"model-{number}" / "model.safetensors"))

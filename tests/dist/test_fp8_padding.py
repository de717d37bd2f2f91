"""What FP8 layers change around themselves: micro-batches are padded, unseen by scores, loss and gradients; and whatever the
layers compute in, scores are fp32 of upcast logits.

FP8 is emulated on the CPU: the inputs of every linear are rounded through torch's E4M3 under one scale for the whole tensor, as
``recipe = tensorwise`` does. Transformer Engine itself is not here.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.dense_scores import dense_logprob_and_entropy
from tests.support.engines import make_engine, save_checkpoint
from tests.support.launch import run_dist
from tests.support.random_models import draw_rollouts, write_llama

TEMPERATURE = 0.7
LENGTHS = (5, 17, 3, 26, 11, 9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("padding"))


def build(model: Path, world: int, **changes: Any) -> Any:
    return make_engine(
        {
            "model": {"path": str(model), **changes},
            "engine": {"parallel": {"tp": world, "sequence_parallel": world > 1}, "micro_batch_tokens": 40},
            "rollout": {"sampling": {"temperature": TEMPERATURE}},
        }
    )


def round_inputs(engine: Any, ranks: int) -> None:
    """Every linear of the layers reads its input through E4M3, scaled by its largest value (rounded up a little, so that the
    last bit of a sum decides nothing).
    """

    def quantise(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        largest = args[0].detach().abs().max()
        if ranks > 1:
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        scale = 448 / (torch.ceil(largest * 16) / 16)
        # straight through: the gradient is that of the unrounded input
        rounded = (args[0] * scale).to(torch.float8_e4m3fn).to(args[0].dtype) / scale
        return (args[0] + (rounded - args[0]).detach(), *args[1:])

    for name, module in engine.policy.chunks[0].decoder.named_modules():
        if name.rsplit(".", 1)[-1].startswith("linear_"):
            module.register_forward_pre_hook(quantise)


def run_padded(engine: Any, batch: Any, multiple: int) -> dict[str, Any]:
    """Scores, loss, gradients and the sizes that the model saw, with micro-batches padded to ``multiple``."""
    forward = replace(engine.forward, token_multiple=multiple)
    sizes: list[int] = []
    hook = engine.policy.chunks[0].register_forward_pre_hook(lambda _, args: sizes.append(args[0].size(1)))
    scores = forward.score(engine.policy.chunks, batch)
    scored = batch.with_(old_logprobs_T=scores.logprob, old_entropy_T=scores.entropy)
    context = engine.objective.prepare(scored)

    def loss(scores: Any, micro: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        output = engine.objective(scores, micro, context)
        value = output.numerator / output.denominator + 0.01 * scores.entropy.sum()
        return value, {"loss": value.detach()}

    engine.policy.ddp[0].zero_grad_buffer()
    kept = forward.run(engine.policy.ddp, scored, forward.micro_batches(scored), loss, train=True)
    hook.remove()
    return {
        "sizes": sizes,
        "logprobs": scored.old_logprobs_T,
        "entropy": scored.old_entropy_T,
        "loss": sum(float(micro["loss"]) for micro in kept),
        "gradients": {name: param.main_grad.clone() for name, param in engine.policy.params.items()},
    }


def padded(rank: int, world: int, model: Path, multiples: list[int]) -> list[list[dict[str, Any]]]:
    """Without and with rounded inputs, by multiple."""
    engine = build(model, world)
    batch = engine.batch_from_root(draw_rollouts(LENGTHS))
    plain = [run_padded(engine, batch, multiple) for multiple in multiples]
    round_inputs(engine, world)
    return [plain, [run_padded(engine, batch, multiple) for multiple in multiples]]


@pytest.mark.parametrize(("world", "multiples"), [(1, [1, 16, 32, 128]), (2, [2, 32, 64])])
def test_padding_is_unseen_also_where_fp8_scales_whole_tensors(world: int, multiples: list[int], model: Path) -> None:
    """Equal to fp32 rounding. Where inputs are rounded to FP8, the last bit of a sum may now and then decide a rounding: then
    on average. Padding with token 0 moves the means by 0.05 and more.
    """
    for plain, rounded in run_dist(world, padded, model, multiples):
        assert (rounded[0]["logprobs"] - plain[0]["logprobs"]).abs().max() > 1e-3, "the emulation rounds nothing"
        assert_unseen(plain, multiples, mean=1e-6, largest=3e-5, loss=1e-5, gradient=2e-5)
        assert_unseen(rounded, multiples, mean=1e-3, largest=0.2, loss=1e-2, gradient=2e-2)


def assert_unseen(
    reports: list[dict[str, Any]], multiples: list[int], *, mean: float, largest: float, loss: float, gradient: float
) -> None:
    reference = reports[0]
    assert any(size % 16 for size in reference["sizes"])
    for multiple, report in zip(multiples, reports, strict=True):
        assert all(size % multiple == 0 for size in report["sizes"])
        errors = torch.cat([report[name] - reference[name] for name in ("logprobs", "entropy")]).abs()
        assert errors.mean() < mean
        assert errors.max() < largest
        assert report["loss"] == pytest.approx(reference["loss"], rel=loss, abs=1e-6)
        for name, expected in reference["gradients"].items():
            error = (report["gradients"][name] - expected).norm()
            assert error <= gradient * expected.norm(), f"{name}, padded to {multiple}: off by {error:.2e}"


def scored(rank: int, world: int, model: Path, folder: Path) -> dict[str, Any]:
    """A bfloat16 model with rounded inputs: the logits that its head gives, and the scores that an objective gets."""
    engine = build(model, world, dtype="bfloat16")
    round_inputs(engine, world)
    batch = engine.batch_from_root(draw_rollouts(LENGTHS))
    logits: list[torch.Tensor] = []
    engine.policy.chunks[0].output_layer.register_forward_hook(lambda _, __, output: logits.append(output[0].detach().clone()))
    larger = engine.config.engine.model_copy(update={"micro_batch_tokens": 4096})
    forward = replace(engine.forward, engine=larger)
    seen: list[Any] = []

    def keep(scores: Any, micro: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        seen.append((scores, micro))
        return scores.logprob.sum(), {}

    with torch.no_grad():
        forward.run(engine.policy.chunks, batch, forward.micro_batches(batch), keep, train=False)
    engine.update(engine.score(batch))
    saved = save_checkpoint(engine, folder, step=1, state={})
    assert engine.checkpoints.load(saved)["step"] == 1
    ((scores, micro),) = seen
    norms = {param.dtype for name, param in engine.policy.params.items() if "norm" in name}
    report = {"logits": logits[0][:, 0], "labels": micro.labels_T, "mask": micro.loss_mask_T, "norms": norms}
    return {**report, "logprob": scores.logprob, "entropy": scores.entropy}


def test_logits_of_a_rounded_bfloat16_body_are_scored_in_fp32(model: Path, tmp_path: Path) -> None:
    (report,) = run_dist(1, scored, model, tmp_path)
    assert report["logits"].dtype == torch.bfloat16
    assert report["logprob"].dtype == report["entropy"].dtype == torch.float32
    assert report["norms"] == {torch.bfloat16}
    exact = dense_logprob_and_entropy(report["logits"], report["labels"], temperature=TEMPERATURE, mask_T=report["mask"])
    for name in ("logprob", "entropy"):  # bfloat16 arithmetic would be off by about 1e-2
        torch.testing.assert_close(report[name].double(), getattr(exact, name), atol=1e-5, rtol=1e-5)

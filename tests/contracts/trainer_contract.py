"""What every trainer must do: :mod:`tepo_megatron.trainer.protocol` as checks.

``CHECKS`` maps a name to a function that is called with ``make(config, model_dir, shares_gpus=False)`` and an empty folder, in
a world of one rank. A check raises BrokenContract, which names the member at fault.
"""

from __future__ import annotations

import inspect
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.rollout import TOP_TOKEN, Rollout, WeightsVersion
from tepo_megatron.core.types import Batch, Divergence, TeacherTopK, TokenScores
from tepo_megatron.trainer import protocol
from tepo_megatron.trainer.checkpoint_folder import checkpoint_name, checkpoints, leftovers, read_state
from tepo_megatron.trainer.protocol import Trainer, UpdateResult
from tepo_megatron.weights.storage.manifest import DamagedCheckpoint
from tests.contracts.naming import naming_members
from tests.support.dense_scores import dense_divergence, dense_logprob_and_entropy
from tests.support.engines import figures as numbers
from tests.support.random_models import VOCABULARY, random_family

Make = Callable[..., Trainer]
TEMPERATURE = 0.7
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
PARTS = {"trainer": protocol.Trainer, "weights": protocol.WeightSource, "checkpoints": protocol.Checkpoints}
FORMAT = {"updates", "weights_digest", "model", "identity", "reference_digest"}
"""What ``state.json`` must have for a run to resume."""


class BrokenContract(AssertionError):  # noqa: N818
    """A sentence that begins with the member."""


def require(condition: object, sentence: str) -> None:
    if not condition:
        raise BrokenContract(sentence)


# -- the case: a small random Llama, two groups of rollouts of uneven lengths


@cache
def _saved_model() -> TemporaryDirectory[str]:
    folder = TemporaryDirectory()
    other = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "tie_word_embeddings": False}
    random_family("Llama", {**SIZES, **other}, scale=0.15).save_pretrained(folder.name)
    return folder


def make_model(folder: Path) -> Path:
    out = folder / "model"
    return out if out.exists() else shutil.copytree(_saved_model().name, out)


def make_config(folder: Path, **changes: Any) -> RunConfig:
    """eps is large, so that a small gradient's rounding does not decide the sign of a step."""
    sections: dict[str, Any] = {
        "output": folder / "run",
        "model": {"path": str(make_model(folder)), "dtype": "float32"},
        "engine": {"platform": "cpu", "micro_batch_tokens": 24},
        "objective": {"preset": "grpo"},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2, "weight_decay": 0.1, "eps": 1e-3, "clip_grad": 1.0},
        "rollout": {"sampling": {"temperature": TEMPERATURE}},
        "train": {"steps": 10, "minibatches": 1},
    }
    for name, section in changes.items():
        sections[name] = {**sections.get(name, {}), **section}
    return RunConfig.model_validate(sections)


def draw_rollouts(seed: int = 0) -> list[Rollout]:
    generator = torch.Generator().manual_seed(seed)

    def draw(size: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCABULARY, (size,), generator=generator).tolist())

    rollouts = []
    for group in range(2):
        prompt = draw(2 + group)
        for sample, length in enumerate((5, 9, 1, 7)):
            logprobs = (-2.0,) * length
            reward = float(sample % 2) + 0.5 * group * sample
            rollouts.append(
                Rollout(f"p{group}", group, prompt, draw(length), logprobs, "stop", WeightsVersion(0), reward=reward)
            )
    return rollouts


def start(make: Make, folder: Path, **changes: Any) -> Trainer:
    config = make_config(folder, **changes)
    return make(config, Path(config.model.path))


def train(trainer: Trainer, *seeds: int) -> UpdateResult:
    for seed in seeds:
        result = trainer.update(trainer.score(trainer.batch_from_root(draw_rollouts(seed))))
    return result


def tensors(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in trainer.weights.stream()}


def digest(trainer: Trainer) -> str:
    return trainer.weights.version(0).digest


# -- a dense float64 computation


class Dense:
    """transformers in float64: scores by log_softmax, gradients by autograd, AdamW by its formula."""

    def __init__(self, folder: Path, model: Path | None = None) -> None:
        import transformers

        path = make_model(folder) if model is None else model
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        self.params = dict(self.model.named_parameters())
        self.mean = {name: torch.zeros_like(param) for name, param in self.params.items()}
        self.square = {name: torch.zeros_like(param) for name, param in self.params.items()}
        self.updates = 0

    def logits(self, batch: Batch) -> Tensor:
        return torch.cat([self.model(tokens[None]).logits[0] for tokens in batch.tokens_T.split(batch.lengths_S.tolist())])

    def scores(self, batch: Batch, temperature: float = TEMPERATURE) -> TokenScores:
        return dense_logprob_and_entropy(self.logits(batch), batch.labels_T, temperature=temperature)

    def update(self, config: RunConfig, batch: Batch) -> tuple[float, float]:
        objective = build_objective(config.objective)
        output = objective(self.scores(batch), batch, objective.prepare(batch))
        loss = output.numerator / output.denominator
        gradients = dict(zip(self.params, torch.autograd.grad(loss, list(self.params.values())), strict=True))
        norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        self.updates += 1
        options = config.optimizer
        (first, second), scale = options.betas, min(1.0, options.clip_grad / norm)
        lr = options.lr * min(1.0, self.updates / options.warmup_steps)
        for name, param in self.params.items():
            self.mean[name].lerp_(scale * gradients[name], 1 - first)
            self.square[name].lerp_((scale * gradients[name]) ** 2, 1 - second)
            mean = self.mean[name] / (1 - first**self.updates)
            root = (self.square[name] / (1 - second**self.updates)).sqrt()
            decay = options.weight_decay if param.dim() > 1 else 0.0
            param.data -= lr * (mean / (root + options.eps) + decay * param.data)
        return loss.item(), norm


# -- the checks


def has_every_member(make: Make, folder: Path) -> None:
    trainer = start(make, folder)
    for name, contract in PARTS.items():
        part = trainer if name == "trainer" else getattr(trainer, name, None)
        for member in (name for name in vars(contract) if not name.startswith("_")):
            label = f"{contract.__name__}.{member}"
            expected = inspect.getattr_static(contract, member)
            if isinstance(expected, property):
                require(member in dir(part), f"{label} is missing")
            else:
                require(callable(getattr(part, member, None)), f"{label} is missing")
                _require_parameters(label, expected, getattr(part, member))
    trainer.close()


def _require_parameters(label: str, expected: Any, actual: Any) -> None:
    """The call of the protocol with all its parameters fits."""
    parameters = list(inspect.signature(expected).parameters.values())[1:]
    positional = [None for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    keywords = {parameter.name: None for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    try:
        inspect.signature(actual).bind(*positional, **keywords)
    except TypeError as error:
        raise BrokenContract(f"{label} cannot be called as the protocol does: {error}") from None


def packs_rollouts_in_order(make: Make, folder: Path) -> None:
    trainer, rollouts = start(make, folder), draw_rollouts()
    batch = trainer.batch_from_root(rollouts)
    ids = [token for rollout in rollouts for token in (*rollout.prompt_ids, *rollout.response_ids)]
    require(batch.tokens_T.tolist() == ids, "Trainer.batch_from_root: prompts and responses must be packed in order")
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    per_sequence = [int(part.sum()) for part in batch.loss_mask_T.split(batch.lengths_S.tolist())]
    require(per_sequence == lengths, "Trainer.batch_from_root: the loss mask must have one label per response token")
    advantages_S = build_objective(make_config(folder).objective).advantages(batch)
    require(batch.advantages_S is not None, "Trainer.batch_from_root: advantages_S are missing")
    require(torch.equal(batch.advantages_S, advantages_S), "Trainer.batch_from_root: advantages_S are not the objective's")
    trainer.close()


def scores_as_a_dense_computation(make: Make, folder: Path) -> None:
    trainer, dense = start(make, folder), Dense(folder)
    batch = trainer.score(trainer.batch_from_root(draw_rollouts()))
    expected, mask_T = dense.scores(batch), batch.loss_mask_T
    for name, actual, value in (
        ("old_logprobs_T", batch.old_logprobs_T, expected.logprob),
        ("old_entropy_T", batch.old_entropy_T, expected.entropy),
    ):
        require(actual is not None and actual.dtype == torch.float32, f"Trainer.score: {name} must be float32")
        difference = float((actual - value.detach())[mask_T].abs().max())
        require(difference < 2e-5, f"Trainer.score: {name} is off by {difference:.2g} nats from float64")
    trainer.close()


def scores_prompts_at_temperature_one(make: Make, folder: Path) -> None:
    trainer, dense = start(make, folder), Dense(folder)
    batch = trainer.batch_from_root(draw_rollouts()).select([1])
    prompt = batch.tokens_T.tolist()
    expected = dense.scores(batch, temperature=1.0).logprob.detach()[:-1]
    actual = trainer.prompt_logprobs(prompt)
    require(len(actual) == len(prompt) - 1, "Trainer.prompt_logprobs: one value for each token but the first")
    difference = float((torch.tensor(actual) - expected).abs().max())
    require(difference < 2e-5, f"Trainer.prompt_logprobs is off by {difference:.2g} nats from float64 at temperature 1")
    same = start(make, folder, rollout={"sampling": {"temperature": 1.0}})
    scored = same.score(same.batch_from_root(draw_rollouts())).select([1])
    mask_T = scored.loss_mask_T[:-1]
    difference = float((torch.tensor(actual) - scored.old_logprobs_T[:-1])[mask_T].abs().max())
    require(difference < 2e-5, f"Trainer.prompt_logprobs differs from Trainer.score by {difference:.2g} nats")
    same.close()


def updates_by_the_gradient(make: Make, folder: Path) -> None:
    """Three AdamW steps, two of them on one mini-batch, so that the second has ratios other than 1."""
    trainer, dense, config = start(make, folder), Dense(folder), make_config(folder)
    before = tensors(trainer)
    for seed, repeats in ((0, 2), (1, 1)):
        batch = trainer.score(trainer.batch_from_root(draw_rollouts(seed)))
        for repeat in range(repeats):
            result = trainer.update(batch)
            require(not result.skipped, f"Trainer.update skipped a finite update: {result.skipped}")
            if repeat == 0:
                exact = result.extrema["ratio/min"] == result.extrema["ratio/max"] == 1.0
                require(exact, "Trainer.score: update of the same weights must compute the same bits (ratios of exactly 1)")
            loss, norm = dense.update(config, batch)
            lr = config.optimizer.lr * min(1.0, dense.updates / 2)
            require(
                math.isclose(result.loss, loss, rel_tol=1e-4, abs_tol=1e-6), f"Trainer.update: loss {result.loss}, not {loss}"
            )
            require(math.isclose(result.grad_norm, norm, rel_tol=1e-4), f"Trainer.update: norm {result.grad_norm}, not {norm}")
            require(math.isclose(result.lr, lr, rel_tol=1e-6), f"Trainer.update: lr {result.lr}, not {lr}")
    after = tensors(trainer)
    require(set(after) == set(dense.params), "WeightSource.stream must yield the Hugging Face tensors")
    for name, param in dense.params.items():
        moved, expected = after[name] - before[name], param.detach() - before[name]
        error = float((moved - expected).norm() / expected.norm())
        require(error < 2e-3, f"Trainer.update: {name} moved {error:.1%} off the AdamW step in float64")
    trainer.close()


def does_not_depend_on_micro_batches(make: Make, folder: Path) -> None:
    results = []
    for micro_batch_tokens in (16, 4096):
        trainer = start(make, folder, engine={"micro_batch_tokens": micro_batch_tokens})
        result = train(trainer, 0, 1)
        results.append((numbers(result), tensors(trainer)))
        trainer.close()
    (cut, cut_weights), (whole, whole_weights) = results
    require(cut.keys() == whole.keys(), "Trainer.update: metrics depend on the division into micro-batches")
    for name, value in whole.items():
        close = math.isclose(cut[name], value, rel_tol=1e-4, abs_tol=2e-6)
        require(close, f"Trainer.update: {name} is {cut[name]} in small micro-batches and {value} in one")
    for name, tensor in whole_weights.items():
        difference = float((cut_weights[name] - tensor).abs().max())
        require(difference < 1e-5, f"Trainer.update: {name} differs by {difference:.2g} with the size of micro-batches")


def skips_what_is_not_finite(make: Make, folder: Path) -> None:
    trainer, undisturbed = start(make, folder), start(make, folder)
    first = train(trainer, 0)
    batch = trainer.score(trainer.batch_from_root(draw_rollouts(1)))
    version = digest(trainer)
    mask_T = batch.loss_mask_T
    plants = {
        "a NaN log-prob": batch.with_(old_logprobs_T=torch.where(mask_T, torch.nan, batch.old_logprobs_T)),
        "an infinite advantage": batch.with_(advantages_S=torch.full_like(batch.advantages_S, torch.inf)),
    }
    for what, planted in plants.items():
        result = trainer.update(planted)
        require(result.skipped, f"Trainer.update made a step with {what}")
        require(digest(trainer) == version, f"Trainer.update changed weights in a step that it skipped ({what})")
        require(result.lr == first.lr, f"Trainer.update moved the learning rate in a step that it skipped ({what})")
        empty = not (result.sums or result.extrema or result.token_values)
        require(empty, f"Trainer.update reported metrics of a step that it skipped ({what})")
    result = trainer.update(batch)
    train(undisturbed, 0, 1)
    require(not result.skipped, f"Trainer.update: after a skipped step the next one was skipped: {result.skipped}")
    require(digest(trainer) == digest(undisturbed), "Trainer.update: a skipped step changed the optimizer's states")
    undisturbed.close()


def returns_recorded_token_values(make: Make, folder: Path) -> None:
    trainer = start(make, folder)
    batch = trainer.score(trainer.batch_from_root(draw_rollouts()))
    recorded_S = torch.full_like(batch.groups_S, -1)
    recorded_S[1], recorded_S[6] = 1, 6
    values = trainer.update(batch.with_(recorded_S=recorded_S)).token_values
    chosen = batch.select([1, 6])
    require("ratio" in values, "Trainer.update: token_values of recorded sequences are missing")
    for name, value in values.items():
        require(value.shape == (chosen.num_tokens,), f"Trainer.update: token_values[{name}] are not those of the recorded")
    ratio_T = values["ratio"].cpu()[chosen.loss_mask_T.cpu()]
    require(torch.equal(ratio_T, torch.ones_like(ratio_T)), "Trainer.update: token_values are in another order")
    trainer.close()


def resumes_bit_for_bit(make: Make, folder: Path) -> None:
    for background in (False, True):
        parent = folder / f"checkpoints-{background}"
        trainer = start(make, folder)
        train(trainer, 0, 1)
        trainer.checkpoints.begin(parent, step=2, state={"note": [1.5, None]}, background=background)
        saved_digest = digest(trainer)
        if background:  # training continues
            result = train(trainer, 2)
        require(not checkpoints(parent), "Checkpoints.begin: the checkpoint has its name before finish")
        saved = trainer.checkpoints.finish()
        require(saved is not None, "Checkpoints.finish returned None after begin")
        expected = parent / checkpoint_name(2)
        require((saved.path, saved.step) == (expected, 2), f"Checkpoints.finish: {saved} is not {expected}")
        require(not leftovers(parent), "Checkpoints.finish left a .partial folder")
        require(trainer.checkpoints.finish() is None, "Checkpoints.finish must return None if nothing was begun")
        if not background:
            result = train(trainer, 2)
        state = read_state(saved.path)
        require(not FORMAT - set(state), f"Checkpoints.begin: state.json lacks {FORMAT - set(state)}")
        require(state["note"] == [1.5, None], "Checkpoints.begin: state.json must hold the caller's state")
        require(state["weights_digest"] == saved_digest, "Checkpoints.begin: weights_digest is not that of begin's weights")
        continued = digest(trainer)
        trainer.close()
        resumed = start(make, folder)
        require(resumed.checkpoints.check(saved.path) == state, "Checkpoints.check must return the saved state")
        require(resumed.checkpoints.load(saved.path) == state, "Checkpoints.load must return the saved state")
        require(digest(resumed) == saved_digest, "Checkpoints.load did not restore the weights")
        again = train(resumed, 2)
        require(numbers(again) == numbers(result), "Checkpoints.load: the next update's numbers are others")
        require(digest(resumed) == continued, "Checkpoints.load: the next update leads to other weights")
        # A return to it in place, as after a bad update.
        resumed.checkpoints.load(saved.path, checked=state)
        train(resumed, 2)
        require(digest(resumed) == continued, "Checkpoints.load: a trained trainer was not restored completely")
        resumed.close()


def refuses_a_damaged_checkpoint(make: Make, folder: Path) -> None:
    trainer = start(make, folder)
    train(trainer, 0)
    trainer.checkpoints.begin(folder / "checkpoints", step=1, state={})
    path = trainer.checkpoints.finish().path
    shard = max((path / "shards").iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    train(trainer, 1)
    before = digest(trainer)
    for name, read in (("check", trainer.checkpoints.check), ("load", trainer.checkpoints.load)):
        try:
            read(path)
        except DamagedCheckpoint:
            require(digest(trainer) == before, f"Checkpoints.{name} restored a part of a damaged checkpoint")
        else:
            raise BrokenContract(f"Checkpoints.{name} accepted a checkpoint with a flipped bit")
    trainer.close()


def hands_out_weights(make: Make, folder: Path) -> None:
    trainer = start(make, folder)
    first = trainer.weights.version(3)
    require(first == trainer.weights.version(3), "WeightSource.version is not the same for the same weights")
    require(first.step == 3, "WeightSource.version must have the step")
    train(trainer, 0)
    require(digest(trainer) != first.digest, "WeightSource.version did not change with an update")
    streamed = tensors(trainer)
    manifest = {name: (tuple(shape), dtype) for name, shape, dtype in trainer.weights.manifest}
    actual = {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in streamed.items()}
    require(manifest == actual, "WeightSource.manifest is not what WeightSource.stream yields")
    require(list(manifest) == list(actual), "WeightSource.manifest has another order than WeightSource.stream")
    trainer.weights.export(folder / "export")
    trainer.weights.export_adapters(folder / "adapter")
    require(not (folder / "adapter").exists(), "WeightSource.export_adapters wrote a folder without adapters")
    version = digest(trainer)
    trainer.close()
    again = make(make_config(folder), folder / "export")
    require(digest(again) == version, "WeightSource.export: a trainer of the exported model has another digest")
    loaded = tensors(again)
    require(all(torch.equal(loaded[name], streamed[name]) for name in streamed), "WeightSource.export changed a weight")
    again.close()


def scores_the_reference_model(make: Make, folder: Path) -> None:
    plain = start(make, folder)
    require(plain.reference_digest is None, "Trainer.reference_digest must be None without a reference model")
    first = digest(plain)
    plain.close()
    trainer = start(make, folder, objective={"kl": {"against": "reference"}})
    require(trainer.reference_digest == first, "Trainer.reference_digest is not that of the first weights")
    train(trainer, 0)
    batch = trainer.score(trainer.batch_from_root(draw_rollouts()))
    expected = Dense(folder).scores(batch).logprob.detach()
    require(batch.reference_logprobs_T is not None, "Trainer.score: reference_logprobs_T are missing")
    difference = float((batch.reference_logprobs_T - expected)[batch.loss_mask_T].abs().max())
    require(difference < 2e-5, f"Trainer.score: reference_logprobs_T are off by {difference:.2g} nats from float64")
    trainer.close()


def asks_the_teachers(make: Make, folder: Path) -> None:
    folders = {name: folder / name for name in ("first", "second")}
    for seed, path in enumerate(folders.values(), start=1):
        other = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "tie_word_embeddings": False}
        random_family("Llama", {**SIZES, **other, "num_hidden_layers": 3}, scale=0.15, seed=seed).save_pretrained(path)
    config = make_config(
        folder,
        objective={"distill": {"of": "all", "divergence": "jsd", "beta": 0.25}},
        teachers={name: {"path": str(path)} for name, path in folders.items()},
        data={"train": [{"path": "builtin:addition", "name": name, "teacher": name} for name in folders], "heldout": None},
        evaluate={"every": 0},
    )
    trainer = make(config, Path(config.model.path), teachers=folders)
    numbers_S = [0, 1, 0, 0, 1, 1, 0, 1]
    batch = trainer.score(trainer.batch_from_root(draw_rollouts(), numbers_S))
    require(batch.teacher_logprobs_T is not None, "Trainer.score: teacher_logprobs_T are missing")
    is_first_T1 = (torch.tensor(numbers_S) == 0)[batch.sequence_index_T][:, None]
    with torch.no_grad():
        first_TV, second_TV = (Dense(folder, path).logits(batch) for path in folders.values())
        logq_TV = (torch.where(is_first_T1, first_TV, second_TV) / TEMPERATURE).log_softmax(-1)
        logp_TV = (Dense(folder).logits(batch) / TEMPERATURE).log_softmax(-1)
    expected_T = logq_TV.gather(1, batch.labels_T[:, None])[:, 0]
    difference = float((batch.teacher_logprobs_T - expected_T)[batch.loss_mask_T].abs().max())
    require(difference < 2e-5, f"Trainer.score: teacher_logprobs_T are off by {difference:.2g} nats from float64")
    divergence_T = dense_divergence(logp_TV, logq_TV, Divergence("jsd", 0.25))
    total, count = trainer.update(batch).sums["distill/divergence"]
    expected = float(divergence_T[batch.loss_mask_T].mean())
    error = abs(total / count - expected)
    require(error < 2e-5, f"Trainer.update: distill/divergence is off by {error:.2g} nats from float64")
    trainer.close()


def compares_with_a_served_teachers_top_k(make: Make, folder: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    rollouts = []
    for rollout in draw_rollouts():
        best = torch.randn(rollout.response_ids.size, VOCABULARY, generator=generator).log_softmax(-1).topk(6)
        top = np.empty(best.indices.shape, TOP_TOKEN)
        top["id"], top["logprob"] = best.indices.numpy(), best.values.numpy()
        rollouts.append(replace(rollout, teacher_logprobs=top["logprob"][:, 0], teacher_top=top))
    distill = {"of": "top_k", "k": 6, "divergence": "jsd", "beta": 0.25}
    served = {"served": {"path": "unread", "place": "server"}}
    changes = {"objective": {"distill": distill}, "teachers": served, "rollout": {"sampling": {"temperature": 1.0}}}
    trainer = start(make, folder, **changes)
    batch = trainer.score(trainer.batch_from_root(rollouts))
    require(batch.top_ids_TK is not None and batch.top_logprobs_TK is not None, "Trainer.score dropped the teacher's top k")
    teacher = TeacherTopK(batch.top_ids_TK, batch.top_logprobs_TK, Divergence("jsd", 0.25))
    scores = dense_logprob_and_entropy(Dense(folder).logits(batch), batch.labels_T, mask_T=batch.loss_mask_T, teacher=teacher)
    expected = {
        "divergence": scores.divergence,
        "agreement": scores.agreement,
        "mass": torch.cat([torch.tensor(rollout.teacher_top["logprob"]) for rollout in rollouts]).exp().sum(1),
    }
    sums = trainer.update(batch).sums
    for name, values in expected.items():
        total, count = sums[f"distill/{name}"]
        error = abs(total - float(values.detach().sum()))
        require(count == int(batch.loss_mask_T.sum()), f"Trainer.update: distill/{name} does not count the response tokens")
        require(error < 2e-5 * count, f"Trainer.update: distill/{name} is off by {error / count:.2g} from float64")
    trainer.close()


def broadcasts_json(make: Make, folder: Path) -> None:
    trainer = start(make, folder)
    value = {"a": [1, 0.1, None, True, "ü"], "b": (1, 2)}
    expected = {**value, "b": [1, 2]}
    require(trainer.broadcast_from_root(value) == expected, "Trainer.broadcast_from_root must return the value as JSON has it")
    pair: Any = (1, 2)
    require(isinstance(trainer.broadcast_from_root(pair), list), "Trainer.broadcast_from_root must return lists for tuples")
    trainer.close()


def reports_metrics(make: Make, folder: Path) -> None:
    trainer = start(make, folder)
    batch = trainer.batch_from_root(draw_rollouts())
    before, scores = digest(trainer), trainer.score(batch)
    noise = trainer.measure_noise(batch)
    for name in ("entropy", "ratio", "sequence_ratio"):
        levels = [noise.get(f"{name}/noise/{level}", -1.0) for level in ("p50", "p90", "p99")]
        require(
            0 <= levels[0] <= levels[1] <= levels[2] < 1e-3,
            f"Trainer.measure_noise: {name}/noise must have rising quantiles p50, p90, p99 of rounding, and has {levels}",
        )
    require(noise["ratio/noise/p99"] > 0, "Trainer.measure_noise must round the weights again: scores did not move")
    after = trainer.score(batch)
    same = torch.equal(scores.old_logprobs_T, after.old_logprobs_T) and digest(trainer) == before
    require(same, "Trainer.measure_noise must leave the weights as they were, to the bit")
    one = batch.with_(loss_mask_T=batch.loss_mask_T & (batch.sequence_index_T == batch.lengths_S.argmax()))
    noise = trainer.measure_noise(one)
    moved = noise["sequence_ratio/noise/p50"] > 0
    require(moved, "Trainer.measure_noise must choose among the sequences with a loss token: of most here nothing is trained")
    require(trainer.memory() == {}, "Trainer.memory must be empty on a CPU")
    require(trainer.take_routing_metrics() == {}, "Trainer.take_routing_metrics must be empty for a dense model")
    require(trainer.spec.vocab_size == VOCABULARY, "Trainer.spec is not that of config.json")
    trainer.close()


def keeps_bits_when_offloaded(make: Make, folder: Path) -> None:
    config = make_config(folder, rollout={"server": {"placement": "colocated"}})
    digests = []
    for moves in (False, True):
        trainer = make(config, Path(config.model.path), shares_gpus=moves)
        for seed in (0, 1):
            trainer.offload()
            trainer.onload_weights_only()
            before = digest(trainer)
            trainer.offload()
            trainer.offload()
            trainer.onload()
            require(digest(trainer) == before, "Trainer.onload: the weights are not those of Trainer.offload")
            train(trainer, seed)
        digests.append(digest(trainer))
        trainer.close()
    require(digests[0] == digests[1], "Trainer.offload: training differs from training without it")


CHECKS: dict[str, Callable[[Make, Path], None]] = {
    check.__name__: naming_members(check, "Trainer", BrokenContract)
    for check in (
        has_every_member,
        packs_rollouts_in_order,
        scores_as_a_dense_computation,
        scores_prompts_at_temperature_one,
        updates_by_the_gradient,
        does_not_depend_on_micro_batches,
        skips_what_is_not_finite,
        returns_recorded_token_values,
        resumes_bit_for_bit,
        refuses_a_damaged_checkpoint,
        hands_out_weights,
        scores_the_reference_model,
        asks_the_teachers,
        compares_with_a_served_teachers_top_k,
        broadcasts_json,
        reports_metrics,
        keeps_bits_when_offloaded,
    )
}

"""What every trainer must do: :mod:`tepo_megatron.trainer.protocol` as checks.

``CHECKS`` maps a name to a function that is called with ``make(config, model_dir, shares_gpus=False)`` and an empty folder, in
a world of one rank. A check raises AssertionError, which names the member at fault.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.objective.trust_region import next_clip_range
from tepo_megatron.core.rollout import TOP_TOKEN, Rollout, WeightsVersion
from tepo_megatron.core.types import Batch, Divergence, TeacherTopK
from tepo_megatron.trainer.checkpoint_folder import checkpoint_name, checkpoints, leftovers, read_state
from tepo_megatron.trainer.protocol import Checkpoints, Trainer, UpdateResult, WeightSource
from tepo_megatron.weights.storage.manifest import DamagedCheckpoint
from tests.contracts.naming import have_members, naming_members, refused
from tests.support.dense_scores import dense_divergence, dense_logprob_and_entropy
from tests.support.engines import figures
from tests.support.float64 import load, packed_logits, prompt_logprobs, token_scores
from tests.support.random_models import VOCABULARY, random_family

Make = Callable[..., Trainer]
Check = Callable[[Make, Path], None]
TEMPERATURE = 0.7
TOLERANCE = 2e-5
"""Nats, in float32."""
FORMAT = {"updates", "weights_digest", "model", "identity", "reference_digest"}
"""What ``state.json`` must have for a run to resume."""

CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Registers a check, after which the trainers that it made are closed."""

    @wraps(function)
    def checked(make: Make, folder: Path) -> None:
        trainers: list[Trainer] = []

        def remember(*args: Any, **options: Any) -> Trainer:
            trainers.append(make(*args, **options))
            return trainers[-1]

        function(remember, folder)
        for trainer in trainers:
            trainer.close()

    CHECKS[function.__name__] = naming_members(checked, "Trainer")
    return function


# -- the case: a small random Llama, two groups of rollouts of uneven lengths


@cache
def random_llama(*, layers: int = 2, seed: int = 0) -> Any:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    other = {"max_position_embeddings": 128, "tie_word_embeddings": False}
    return random_family("Llama", {**sizes, **heads, **other}, scale=0.15, seed=seed)


def make_model(folder: Path) -> Path:
    out = folder / "model"
    if not out.exists():
        random_llama().save_pretrained(out)
    return out


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
            reward, version = float(sample % 2) + 0.5 * group * sample, WeightsVersion(0)
            rollouts.append(Rollout(f"p{group}", group, prompt, draw(length), logprobs, "stop", version, reward=reward))
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


def assert_near(what: str, actual: Any, expected: Any) -> None:
    difference = float((torch.as_tensor(actual) - expected).detach().abs().max())
    assert difference < TOLERANCE, f"{what} is off by {difference:.2g} from float64"


class Dense:
    """transformers in float64, with torch's AdamW."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = load(make_model(folder))
        self.params = dict(self.model.named_parameters())
        self.config, self.updates = make_config(folder), 0
        options = self.config.optimizer
        decay = options.weight_decay
        groups = [{"params": [param], "weight_decay": decay * (param.dim() > 1)} for param in self.params.values()]
        self.adam = torch.optim.AdamW(groups, betas=options.betas, eps=options.eps)

    def update(self, batch: Batch) -> dict[str, float]:
        objective, options = build_objective(self.config.objective), self.config.optimizer
        scores = dense_logprob_and_entropy(packed_logits(self.model, batch), batch.labels_T, temperature=TEMPERATURE)
        output = objective(scores, batch, objective.prepare(batch))
        loss = output.numerator / output.denominator
        self.adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.params.values(), options.clip_grad)
        self.updates += 1
        lr = options.lr * min(1.0, self.updates / options.warmup_steps)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        return {"loss": loss.item(), "grad_norm": norm.item(), "lr": lr}


# -- the checks


@check
def has_every_member(make: Make, folder: Path) -> None:
    trainer = start(make, folder)
    have_members(trainer, Trainer)
    have_members(trainer.weights, WeightSource)
    have_members(trainer.checkpoints, Checkpoints)


@check
def packs_rollouts_in_order(make: Make, folder: Path) -> None:
    trainer, rollouts = start(make, folder), draw_rollouts()
    batch = trainer.batch_from_root(rollouts)
    ids = [token for rollout in rollouts for token in (*rollout.prompt_ids, *rollout.response_ids)]
    assert batch.tokens_T.tolist() == ids, "Trainer.batch_from_root: prompts and responses must be packed in order"
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    per_sequence = [int(part.sum()) for part in batch.loss_mask_T.split(batch.lengths_S.tolist())]
    assert per_sequence == lengths, "Trainer.batch_from_root: the loss mask must have one label per response token"
    advantages_S = build_objective(make_config(folder).objective).advantages(batch)
    assert batch.advantages_S is not None, "Trainer.batch_from_root: advantages_S are missing"
    assert torch.equal(batch.advantages_S, advantages_S), "Trainer.batch_from_root: advantages_S are not the objective's"


@check
def scores_as_a_dense_computation(make: Make, folder: Path) -> None:
    trainer = start(make, folder)
    batch = trainer.score(trainer.batch_from_root(draw_rollouts()))
    expected, mask_T = token_scores(make_model(folder), batch, temperature=TEMPERATURE), batch.loss_mask_T
    for name, expected_T in zip(("old_logprobs_T", "old_entropy_T"), expected, strict=True):
        actual_T = getattr(batch, name)
        assert actual_T.dtype == torch.float32, f"Trainer.score: {name} must be float32"
        assert_near(f"Trainer.score: {name}", actual_T[mask_T], expected_T[mask_T])


@check
def scores_prompts_at_temperature_one(make: Make, folder: Path) -> None:
    trainer = start(make, folder)
    prompt = trainer.batch_from_root(draw_rollouts()).select([1]).tokens_T.tolist()
    actual = trainer.prompt_logprobs(prompt)
    assert len(actual) == len(prompt) - 1, "Trainer.prompt_logprobs: one value for each token but the first"
    assert_near("Trainer.prompt_logprobs at temperature 1", actual, torch.tensor(prompt_logprobs(make_model(folder), prompt)))


@check
def updates_by_the_gradient(make: Make, folder: Path) -> None:
    """Three AdamW steps, two of them on one mini-batch, so that the second has ratios other than 1."""
    trainer, dense = start(make, folder), Dense(folder)
    before = tensors(trainer)
    for seed, repeats in ((0, 2), (1, 1)):
        batch = trainer.score(trainer.batch_from_root(draw_rollouts(seed)))
        for repeat in range(repeats):
            result = trainer.update(batch)
            assert not result.skipped, f"Trainer.update skipped a finite update: {result.skipped}"
            if repeat == 0:
                exact = result.extrema["ratio/min"] == result.extrema["ratio/max"] == 1.0
                assert exact, "Trainer.score: update of the same weights must compute the same bits (ratios of exactly 1)"
            for name, expected in dense.update(batch).items():
                actual = getattr(result, name)
                close = math.isclose(actual, expected, rel_tol=1e-6 if name == "lr" else 1e-4, abs_tol=1e-6)
                assert close, f"Trainer.update: {name} {actual}, not {expected}"
    after = tensors(trainer)
    assert set(after) == set(dense.params), "WeightSource.stream must yield the Hugging Face tensors"
    for name, param in dense.params.items():
        moved, wanted = after[name] - before[name], param.detach() - before[name]
        error = float((moved - wanted).norm() / wanted.norm())
        assert error < 2e-3, f"Trainer.update: {name} moved {error:.1%} off the AdamW step in float64"


@check
def does_not_depend_on_micro_batches(make: Make, folder: Path) -> None:
    results = []
    for micro_batch_tokens in (16, 4096):
        trainer = start(make, folder, engine={"micro_batch_tokens": micro_batch_tokens})
        results.append((figures(train(trainer, 0, 1)), tensors(trainer)))
    (cut, cut_weights), (whole, whole_weights) = results
    assert cut.keys() == whole.keys(), "Trainer.update: metrics depend on the division into micro-batches"
    for name, value in whole.items():
        close = math.isclose(cut[name], value, rel_tol=1e-4, abs_tol=2e-6)
        assert close, f"Trainer.update: {name} is {cut[name]} in small micro-batches and {value} in one"
    for name, tensor in whole_weights.items():
        difference = float((cut_weights[name] - tensor).abs().max())
        assert difference < 1e-5, f"Trainer.update: {name} differs by {difference:.2g} with the size of micro-batches"


@check
def skips_what_is_not_finite(make: Make, folder: Path) -> None:
    trainer, undisturbed = start(make, folder), start(make, folder)
    first = train(trainer, 0)
    batch = trainer.score(trainer.batch_from_root(draw_rollouts(1)))
    version = digest(trainer)
    plants = {
        "a NaN log-prob": batch.with_(old_logprobs_T=torch.full_like(batch.old_logprobs_T, torch.nan)),
        "an infinite advantage": batch.with_(advantages_S=torch.full_like(batch.advantages_S, torch.inf)),
    }
    for what, planted in plants.items():
        result = trainer.update(planted)
        assert result.skipped, f"Trainer.update made a step with {what}"
        assert digest(trainer) == version, f"Trainer.update changed weights in a step that it skipped ({what})"
        assert result.lr == first.lr, f"Trainer.update moved the learning rate in a step that it skipped ({what})"
        empty = not (result.sums or result.extrema or result.token_values)
        assert empty, f"Trainer.update reported metrics of a step that it skipped ({what})"
    result = trainer.update(batch)
    train(undisturbed, 0, 1)
    assert not result.skipped, f"Trainer.update: after a skipped step the next one was skipped: {result.skipped}"
    assert digest(trainer) == digest(undisturbed), "Trainer.update: a skipped step changed the optimizer's states"


@check
def returns_recorded_token_values(make: Make, folder: Path) -> None:
    trainer = start(make, folder)
    batch = trainer.score(trainer.batch_from_root(draw_rollouts()))
    recorded_S = torch.full_like(batch.groups_S, -1)
    recorded_S[1], recorded_S[6] = 1, 6
    values = trainer.update(batch.with_(recorded_S=recorded_S)).token_values
    chosen = batch.select([1, 6])
    assert "ratio" in values, "Trainer.update: token_values of recorded sequences are missing"
    for name, value in values.items():
        assert value.shape == (chosen.num_tokens,), f"Trainer.update: token_values[{name}] are not those of the recorded"
    ratio_T = values["ratio"].cpu()[chosen.loss_mask_T.cpu()]
    assert torch.equal(ratio_T, torch.ones_like(ratio_T)), "Trainer.update: token_values are in another order"


@check
def moves_bounds_after_the_last_update_of_a_step(make: Make, folder: Path) -> None:
    objective = {"preset": "tepo", "trust_region": {"scale": "length", "low": "auto", "high": "auto"}}
    config: Any = make_config(folder, objective=objective, train={"minibatches": 2})
    trainer, region = make(config, Path(config.model.path)), config.objective.trust_region
    batch = trainer.score(trainer.batch_from_root(draw_rollouts()))
    updates = [trainer.update(batch, last=last) for last in (False, True, True, True)]
    first = next_clip_range(region, updates[0].moves + updates[1].moves, None)
    for update, clip_range in zip(updates, (None, None, first, next_clip_range(region, updates[2].moves, first)), strict=True):
        total, count = update.sums["clip/bound_high"]
        close = math.isclose(total / count, region.bounds(clip_range)[1], rel_tol=1e-6)
        assert close, f"Trainer.update: {total / count} does not follow the moves of all updates of the steps before"


@check
def resumes_bit_for_bit(make: Make, folder: Path) -> None:
    for background in (False, True):
        parent = folder / f"checkpoints-{background}"
        trainer = start(make, folder)
        train(trainer, 0, 1)
        trainer.checkpoints.begin(parent, step=2, state={"note": [1.5, None]}, background=background)
        saved_digest = digest(trainer)
        if background:  # training continues
            result = train(trainer, 2)
        assert not checkpoints(parent), "Checkpoints.begin: the checkpoint has its name before finish"
        saved = trainer.checkpoints.finish()
        assert saved is not None, "Checkpoints.finish returned None after begin"
        expected = parent / checkpoint_name(2)
        assert (saved.path, saved.step) == (expected, 2), f"Checkpoints.finish: {saved} is not {expected}"
        assert not leftovers(parent), "Checkpoints.finish left a .partial folder"
        assert trainer.checkpoints.finish() is None, "Checkpoints.finish must return None if nothing was begun"
        if not background:
            result = train(trainer, 2)
        state = read_state(saved.path)
        assert not FORMAT - set(state), f"Checkpoints.begin: state.json lacks {FORMAT - set(state)}"
        assert state["note"] == [1.5, None], "Checkpoints.begin: state.json must hold the caller's state"
        assert state["weights_digest"] == saved_digest, "Checkpoints.begin: weights_digest is not that of begin's weights"
        continued = digest(trainer)
        resumed = start(make, folder)
        assert resumed.checkpoints.check(saved.path) == state, "Checkpoints.check must return the saved state"
        assert resumed.checkpoints.load(saved.path) == state, "Checkpoints.load must return the saved state"
        assert digest(resumed) == saved_digest, "Checkpoints.load did not restore the weights"
        again = train(resumed, 2)
        assert figures(again) == figures(result), "Checkpoints.load: the next update's numbers are others"
        assert digest(resumed) == continued, "Checkpoints.load: the next update leads to other weights"
        # A return to it in place, as after a bad update.
        resumed.checkpoints.load(saved.path, checked=state)
        train(resumed, 2)
        assert digest(resumed) == continued, "Checkpoints.load: a trained trainer was not restored completely"


@check
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
        refused(f"Checkpoints.{name} of a checkpoint with a flipped bit", DamagedCheckpoint, partial(read, path))
        assert digest(trainer) == before, f"Checkpoints.{name} restored a part of a damaged checkpoint"


@check
def hands_out_weights(make: Make, folder: Path) -> None:
    trainer = start(make, folder)
    first = trainer.weights.version(3)
    assert first == trainer.weights.version(3), "WeightSource.version is not the same for the same weights"
    assert first.step == 3, "WeightSource.version must have the step"
    train(trainer, 0)
    assert digest(trainer) != first.digest, "WeightSource.version did not change with an update"
    streamed = tensors(trainer)
    described = [(name, tuple(shape), f"torch.{dtype}") for name, shape, dtype in trainer.weights.manifest]
    actual = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in streamed.items()]
    assert described == actual, "WeightSource.manifest must describe WeightSource.stream's tensors in their order"
    trainer.weights.export(folder / "export")
    trainer.weights.export_adapters(folder / "adapter")
    assert not (folder / "adapter").exists(), "WeightSource.export_adapters wrote a folder without adapters"
    version = digest(trainer)
    again = make(make_config(folder), folder / "export")
    assert digest(again) == version, "WeightSource.export: a trainer of the exported model has another digest"
    loaded = tensors(again)
    assert all(torch.equal(loaded[name], streamed[name]) for name in streamed), "WeightSource.export changed a weight"


@check
def scores_the_reference_model(make: Make, folder: Path) -> None:
    plain = start(make, folder)
    assert plain.reference_digest is None, "Trainer.reference_digest must be None without a reference model"
    first = digest(plain)
    trainer = start(make, folder, objective={"kl": {"against": "reference"}})
    assert trainer.reference_digest == first, "Trainer.reference_digest is not that of the first weights"
    train(trainer, 0)
    batch = trainer.score(trainer.batch_from_root(draw_rollouts()))
    assert batch.reference_logprobs_T is not None, "Trainer.score: reference_logprobs_T are missing"
    expected_T, _ = token_scores(make_model(folder), batch, temperature=TEMPERATURE)
    mask_T = batch.loss_mask_T
    assert_near("Trainer.score: reference_logprobs_T", batch.reference_logprobs_T[mask_T], expected_T[mask_T])


@check
def asks_the_teachers(make: Make, folder: Path) -> None:
    folders = {name: folder / name for name in ("first", "second")}
    for seed, path in enumerate(folders.values(), start=1):
        random_llama(layers=3, seed=seed).save_pretrained(path)
    config = make_config(
        folder,
        objective={"distill": {"of": "all", "divergence": "jsd", "beta": 0.25}},
        teachers={name: {"path": str(path)} for name, path in folders.items()},
        data={"train": [{"path": "builtin:addition", "name": name, "teacher": name} for name in folders], "heldout": None},
        evaluate={"every": 0},
    )
    trainer = make(config, make_model(folder), teachers=folders)
    numbers_S = torch.tensor([0, 1, 0, 0, 1, 1, 0, 1])
    batch = trainer.score(trainer.batch_from_root(draw_rollouts(), numbers_S.tolist()))
    assert batch.teacher_logprobs_T is not None, "Trainer.score: teacher_logprobs_T are missing"
    with torch.no_grad():
        first_TV, second_TV, own_TV = (
            (packed_logits(load(path), batch) / TEMPERATURE).log_softmax(-1) for path in (*folders.values(), make_model(folder))
        )
    mask_T = batch.loss_mask_T
    teacher_TV = torch.where((numbers_S == 0)[batch.sequence_index_T][:, None], first_TV, second_TV)
    expected_T = teacher_TV.gather(1, batch.labels_T[:, None])[:, 0]
    assert_near("Trainer.score: teacher_logprobs_T", batch.teacher_logprobs_T[mask_T], expected_T[mask_T])
    total, count = trainer.update(batch).sums["distill/divergence"]
    expected = dense_divergence(own_TV, teacher_TV, Divergence("jsd", 0.25))[mask_T].mean()
    assert_near("Trainer.update: distill/divergence", total / count, expected)


@check
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
    assert batch.top_ids_TK is not None, "Trainer.score dropped the teacher's top k"
    teacher = TeacherTopK(batch.top_ids_TK, batch.top_logprobs_TK, Divergence("jsd", 0.25))
    logits_TV = packed_logits(load(make_model(folder)), batch)
    scores = dense_logprob_and_entropy(logits_TV, batch.labels_T, mask_T=batch.loss_mask_T, teacher=teacher)
    mass = torch.cat([torch.tensor(rollout.teacher_top["logprob"]) for rollout in rollouts]).exp().sum(1)
    sums = trainer.update(batch).sums
    for name, values in (("divergence", scores.divergence), ("agreement", scores.agreement), ("mass", mass)):
        total, count = sums[f"distill/{name}"]
        error = abs(total - float(values.detach().sum()))
        assert count == int(batch.loss_mask_T.sum()), f"Trainer.update: distill/{name} does not count the response tokens"
        assert error < 2e-5 * count, f"Trainer.update: distill/{name} is off by {error / count:.2g} from float64"


@check
def broadcasts_json(make: Make, folder: Path) -> None:
    value = {"a": [1, 0.1, None, True, "ü"], "b": (1, 2)}
    result = start(make, folder).broadcast_from_root(value)
    assert result == {**value, "b": [1, 2]}, "Trainer.broadcast_from_root must return the value as JSON has it"


@check
def reports_metrics(make: Make, folder: Path) -> None:
    trainer = start(make, folder)
    batch = trainer.batch_from_root(draw_rollouts())
    before, scores = digest(trainer), trainer.score(batch)
    noise = trainer.measure_noise(batch)
    for name in ("entropy", "ratio", "sequence_ratio"):
        levels = [noise.get(f"{name}/noise/{level}", -1.0) for level in ("p50", "p90", "p99")]
        assert 0 <= levels[0] <= levels[1] <= levels[2] < 1e-3, (
            f"Trainer.measure_noise: {name}/noise must have rising quantiles p50, p90, p99 of rounding, and has {levels}"
        )
    assert noise["ratio/noise/p99"] > 0, "Trainer.measure_noise must round the weights again: scores did not move"
    after = trainer.score(batch)
    is_same = torch.equal(scores.old_logprobs_T, after.old_logprobs_T) and digest(trainer) == before
    assert is_same, "Trainer.measure_noise must leave the weights as they were, to the bit"
    one = batch.with_(loss_mask_T=batch.loss_mask_T & (batch.sequence_index_T == batch.lengths_S.argmax()))
    noise = trainer.measure_noise(one)
    assert noise["sequence_ratio/noise/p50"] > 0, "Trainer.measure_noise must choose among sequences with a loss token"
    assert trainer.memory() == {}, "Trainer.memory must be empty on a CPU"
    assert trainer.take_routing_metrics() == {}, "Trainer.take_routing_metrics must be empty for a dense model"
    assert trainer.spec.vocab_size == VOCABULARY, "Trainer.spec is not that of config.json"


@check
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
            assert digest(trainer) == before, "Trainer.onload: the weights are not those of Trainer.offload"
            train(trainer, seed)
        digests.append(digest(trainer))
    assert digests[0] == digests[1], "Trainer.offload: training differs from training without it"

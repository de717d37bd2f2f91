"""A second trainer, small enough to read: transformers in float32 in one process, with the package's objective and scores.

It shows what ``tepo_megatron.trainer.protocol`` needs, and that the contract tests accept more than Megatron's trainer. It
trains dense models on the CPU, without adapters, sampling masks and shard transfer.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.config.objective.choices import ClipRange
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.objective.trust_region import next_clip_range
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.scores import logprob_and_entropy, noise_quantiles, rerounded
from tepo_megatron.core.types import Batch, Divergence, ObjectiveOutput, TeacherLogits, TeacherTopK, TokenScores
from tepo_megatron.errors import NotFiniteError
from tepo_megatron.trainer.checkpoint_folder import checkpoint_name, read_state
from tepo_megatron.trainer.packing import check_judged, pack
from tepo_megatron.trainer.protocol import SavedCheckpoint, UpdateResult
from tepo_megatron.trainer.run_compatibility import describe_run
from tepo_megatron.weights.architecture import read_model_spec
from tepo_megatron.weights.geometry import Box
from tepo_megatron.weights.storage.hf_folder import write_model
from tepo_megatron.weights.storage.manifest import FORMAT, STATE, CheckpointManifest, FileRecord
from tepo_megatron.weights.storage.stored import StoredWeights, box_key, write_boxes
from tepo_megatron.weights.transfer.full_tensors import TensorManifest
from tests.support.engines import whole_digest

T = TypeVar("T")


def make_trainer(
    config: RunConfig, model_dir: Path, *, teachers: Mapping[str, Path] = MappingProxyType({}), shares_gpus: bool = False
) -> ReferenceTrainer:
    if config.rollout.sampling.truncates or config.model.lora is not None or config.optimizer.schedule != "constant":
        raise ValueError("the reference trainer knows no truncated sampling, adapters, or schedules but constant")
    return ReferenceTrainer(config, model_dir, teachers)


def divergence_of(distill: Any) -> Divergence:
    return Divergence(distill.divergence, distill.beta or 0.5)


class ReferenceTrainer:
    def __init__(self, config: RunConfig, model_dir: Path, teachers: Mapping[str, Path] = MappingProxyType({})) -> None:
        import transformers

        self.config, self.model_dir = config, model_dir
        self.spec = read_model_spec(model_dir)
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_dir, **options).eval()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.teachers = [load(folder, **options).eval() for folder in teachers.values()]
        self.params: dict[str, torch.nn.Parameter] = dict(self.model.named_parameters())
        self.objective = build_objective(config.objective)
        self.counters: dict[str, Any] = {"updates": 0, "updates_skipped": 0, "entropy_noise": 0.0, "clip_range": None}
        self.moves: list[Tensor] = []
        self.lr = 0.0
        optimizer = config.optimizer
        groups = [
            {"params": [param for param in self.params.values() if param.dim() > 1], "weight_decay": optimizer.weight_decay},
            {"params": [param for param in self.params.values() if param.dim() == 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, betas=optimizer.betas, eps=optimizer.eps)
        self.weights = ReferenceWeights(self)
        self.checkpoints = ReferenceCheckpoints(self)
        self.reference: Any = copy.deepcopy(self.model) if self.objective.needs_reference else None
        self.reference_digest = self.weights.version(0).digest if self.objective.needs_reference else None

    # -- scores and updates

    def batch_from_root(self, rollouts: list[Rollout] | None, teachers: Sequence[int] | None = None) -> Batch:
        assert rollouts is not None
        check_judged(rollouts, teachers, self.config)
        reads_parts = "reward_parts" in self.config.objective.needs
        batch = pack(rollouts, mask_truncated=self.config.rollout.truncated == "mask", reward_parts=reads_parts)
        batch = batch if teachers is None else batch.with_(teachers_S=torch.tensor(teachers))
        return batch.with_(advantages_S=self.objective.advantages(batch), reward_parts_SK=None)

    def score(self, batch: Batch) -> Batch:
        nothing_T = torch.full_like(batch.sampler_logprobs_T, torch.nan)
        scores, reference_T = TokenScores(nothing_T, nothing_T), nothing_T
        try:
            with torch.no_grad():
                found = self.token_scores(self.model, batch)
                if self.reference is not None:
                    reference_T = self.token_scores(self.reference, batch).logprob
                scores = found
        except NotFiniteError:
            pass
        batch = batch.with_(old_logprobs_T=scores.logprob, old_entropy_T=scores.entropy)
        if self.teachers:
            with torch.no_grad():
                judged = [self.token_scores(teacher, batch).logprob for teacher in self.teachers]
            of_teacher = [torch.where(batch.of_teacher(number), judged_T, 0.0) for number, judged_T in enumerate(judged)]
            batch = batch.with_(teacher_logprobs_T=torch.stack(of_teacher).sum(0))
        return batch if self.reference is None else batch.with_(reference_logprobs_T=reference_T)

    def token_scores(self, model: Any, batch: Batch, *, temperature: float | None = None, train: bool = False) -> TokenScores:
        """Sequence by sequence, so that no value depends on the division into micro-batches."""
        logits = self.logits(model, batch)
        distill: Any = self.config.objective.distill
        teacher: TeacherLogits | TeacherTopK | None = None
        if train and self.config.objective.teacher_top_k:
            assert batch.top_ids_TK is not None
            assert batch.top_logprobs_TK is not None
            teacher = TeacherTopK(batch.top_ids_TK, batch.top_logprobs_TK, divergence_of(distill))
        if train and "divergence" in self.config.objective.needs:
            with torch.no_grad():
                others = [
                    torch.where(batch.of_teacher(n)[:, None], self.logits(t, batch), 0.0) for n, t in enumerate(self.teachers)
                ]
            teacher = TeacherLogits(torch.stack(others).sum(0), divergence_of(distill))
        return logprob_and_entropy(
            logits,
            batch.labels_T,
            teacher=teacher,
            temperature=temperature or self.config.rollout.sampling.temperature,
            mask_T=batch.loss_mask_T,
            entropy_slope=train and self.objective.needs_entropy_slope,
            backend="torch",
        )

    @staticmethod
    def logits(model: Any, batch: Batch) -> Tensor:
        return torch.cat([model(tokens[None]).logits[0] for tokens in batch.tokens_T.split(batch.lengths_S.tolist())])

    def update(self, batch: Batch, *, last: bool = True) -> UpdateResult:
        result = self._update(batch)
        self.moves += [] if result.moves is None else [result.moves]
        if last and self.moves:
            before = self.counters["clip_range"]
            region = self.config.objective.trust_region
            self.counters["clip_range"] = next_clip_range(region, torch.stack(self.moves).sum(0), before)
            self.moves = []
        return result

    def _update(self, batch: Batch) -> UpdateResult:
        self.adam.zero_grad()
        outputs: list[ObjectiveOutput] = []
        micro_batches = [batch.select(sequences) for sequences in self.micro_batches(batch)]
        try:
            measured = {name: self.counters[name] for name in ("entropy_noise", "clip_range")}
            context = self.objective.prepare(batch, **measured)
            for micro in micro_batches:
                output = self.objective(self.token_scores(self.model, micro, train=True), micro, context)
                (output.numerator / output.denominator).backward()
                outputs.append(output)
        except NotFiniteError as error:
            return self.skip(str(error), math.nan)
        loss = float(sum(output.numerator.detach() / output.denominator for output in outputs))
        limit = self.config.optimizer.clip_grad or math.inf
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.params.values(), limit))
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            return self.skip(f"the loss is {loss}, the gradient norm {grad_norm}", grad_norm)
        self.counters["updates"] += 1
        warmup = self.config.optimizer.warmup_steps
        self.lr = self.config.optimizer.lr * (min(1.0, self.counters["updates"] / warmup) if warmup else 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.lr
        self.adam.step()
        sums = {
            name: (sum(float(o.metrics[name][0]) for o in outputs), sum(float(o.metrics[name][1]) for o in outputs))
            for name in outputs[0].metrics
        }
        extrema = {
            name: (max if name.endswith("/max") else min)(float(output.extrema[name]) for output in outputs)
            for name in outputs[0].extrema
        }
        values = _recorded(micro_batches, outputs)
        counts = [output.moves for output in outputs if output.moves is not None]
        moves = torch.stack(counts).sum(0) if counts else None
        return UpdateResult(loss, grad_norm, self.lr, sums, extrema, token_values=values, moves=moves)

    def skip(self, cause: str, grad_norm: float) -> UpdateResult:
        self.counters["updates_skipped"] += 1
        return UpdateResult(math.nan, grad_norm, self.lr, {}, {}, skipped=cause)

    def micro_batches(self, batch: Batch) -> list[list[int]]:
        """Neighbouring sequences of up to ``engine.micro_batch_tokens`` tokens."""
        parts: list[list[int]] = []
        room = 0
        for sequence, length in enumerate(batch.lengths_S.tolist()):
            if length > room:
                parts.append([])
                room = self.config.engine.micro_batch_tokens
            parts[-1].append(sequence)
            room -= length
        return parts

    def measure_noise(self, batch: Batch) -> dict[str, float]:
        few = batch.select(batch.trained_sequences[: self.config.engine.noise_sequences])
        try:
            with torch.no_grad():
                first = self.token_scores(self.model, few)
                with rerounded(self.params.values()):
                    second = self.token_scores(self.model, few)
        except NotFiniteError:
            return {}
        noise = noise_quantiles(first, second, few)
        self.counters["entropy_noise"] = noise["entropy/noise/p50"]
        return noise

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        rest = tuple(prompt[1:])
        rollout = Rollout("prompt", 0, tuple(prompt[:1]), rest, (0.0,) * len(rest), "length", WeightsVersion(0), reward=0.0)
        with torch.no_grad():
            return self.token_scores(self.model, pack([rollout]), temperature=1.0).logprob[:-1].tolist()

    # -- one process on the CPU

    def onload(self) -> None: ...

    def onload_weights_only(self) -> None: ...

    def offload(self) -> None: ...

    def memory(self) -> dict[str, float]:
        return {}

    def take_routing_metrics(self) -> dict[str, float]:
        return {}

    def broadcast_from_root(self, value: T) -> T:
        return json.loads(json.dumps(value))

    def close(self) -> None: ...


def _recorded(micro_batches: Sequence[Batch], outputs: Sequence[ObjectiveOutput]) -> dict[str, Tensor]:
    if micro_batches[0].recorded_S is None:
        return {}
    chosen = [(micro.recorded_S >= 0)[micro.sequence_index_T] for micro in micro_batches]
    return {
        name: torch.cat([output.token_values[name][chosen_T] for output, chosen_T in zip(outputs, chosen, strict=True)])
        for name in outputs[0].token_values
    }


class ReferenceWeights:
    def __init__(self, trainer: ReferenceTrainer) -> None:
        self._trainer = trainer

    def version(self, step: int) -> WeightsVersion:
        return WeightsVersion(step, whole_digest(self._trainer.params))

    @property
    def manifest(self) -> TensorManifest:
        return [(name, tuple(param.shape), "float32") for name, param in self._trainer.params.items()]

    def stream(self) -> Iterator[tuple[str, Tensor | None]]:
        yield from ((name, param.detach()) for name, param in self._trainer.params.items())

    def make_shard_sender(self, *_: Any, **__: Any) -> Any:
        raise ValueError("the reference trainer sends full tensors only; set rollout.server.transfer = gather")

    def export(self, out: Path) -> None:
        write_model(out, self._trainer.params.items(), source=self._trainer.model_dir, dtype=torch.float32)

    def export_adapters(self, out: Path) -> None: ...

    @property
    def adapter_manifest(self) -> TensorManifest:
        return []

    @property
    def adapter_settings(self) -> Any:
        raise NotImplementedError

    def stream_adapters(self) -> Iterator[tuple[str, Tensor | None]]:
        return iter(())


class ReferenceCheckpoints:
    """In the package's format: float32 boxes, which trainers of any layout read."""

    def __init__(self, trainer: ReferenceTrainer) -> None:
        self._trainer = trainer
        self._begun: tuple[Path, int] | None = None

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yields (kind, name, tensor); before the first update the moments are zeros."""
        for name, param in self._trainer.params.items():
            state: Mapping[str, Tensor] = self._trainer.adam.state.get(param, {})
            yield "master", name, param.detach()
            for kind in ("exp_avg", "exp_avg_sq"):
                yield kind, name, state.get(kind, torch.zeros_like(param))

    def begin(self, folder: Path, *, step: int, state: dict[str, Any], background: bool = False) -> None:
        self.finish()
        trainer, out = self._trainer, folder / checkpoint_name(step)
        partial = out.with_name(out.name + ".partial")
        (partial / "shards").mkdir(parents=True)
        boxes = ((box_key(kind, name, Box.whole(tensor.shape)), tensor) for kind, name, tensor in self.states())
        written = write_boxes(partial, "rank00000", boxes, metadata={"step": str(step)})
        if written.error is not None:
            raise RuntimeError(written.error)
        about = {
            "format": FORMAT,
            "step": step,
            "weights_digest": trainer.weights.version(step).digest,
            "model": str(trainer.model_dir.resolve()),
            "identity": describe_run(trainer.config, trainer.model_dir),
            "reference_digest": trainer.reference_digest,
        }
        record = FileRecord.write(partial / STATE, json.dumps({**about, **trainer.counters, **state}))
        CheckpointManifest.write(partial, step, {**written.files, STATE: record})
        self._begun = out, step

    def finish(self, *, wait: bool = True) -> SavedCheckpoint | None:
        if self._begun is None:
            return None
        out, step = self._begun
        self._begun = None
        out.with_name(out.name + ".partial").rename(out)
        return SavedCheckpoint(out, step, stage_s=0.0, write_s=0.0, waited_s=0.0)

    def check(self, folder: Path) -> dict[str, Any]:
        state = read_state(folder)
        CheckpointManifest.read_whole(folder)
        return state

    def load(self, folder: Path, checked: dict[str, Any] | None = None) -> dict[str, Any]:
        trainer, state = self._trainer, checked or self.check(folder)
        trainer.counters = {name: state[name] for name in trainer.counters}
        if trainer.counters["clip_range"]:
            trainer.counters["clip_range"] = ClipRange(*trainer.counters["clip_range"])
        trainer.moves = []
        stored = {kind: StoredWeights.open_boxes(folder, kind) for kind in ("master", "exp_avg", "exp_avg_sq")}
        for kind, name, _ in list(self.states()):
            param = trainer.params[name]
            into = param.detach() if kind == "master" else torch.zeros_like(param)
            stored[kind].read(name, Box.whole(param.shape), into)
            if kind != "master":
                trainer.adam.state[param][kind] = into
                trainer.adam.state[param]["step"] = torch.tensor(float(state["updates"]))
        if trainer.weights.version(0).digest != state["weights_digest"]:
            raise RuntimeError(f"{folder}: the weights that were read are not those that were saved")
        return state

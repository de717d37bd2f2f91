"""One world a number of ranks that takes one layout of an engine after the other; what a rank sees of each.

Sizes divide nothing by chance (61 tokens of vocabulary, 6 heads in 2 groups), and the micro-batches of every layout have other
lengths.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.config.objective.presets import PRESETS
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch
from tepo_megatron.trainer.packing import pack
from tepo_megatron.trainer.protocol import UpdateResult
from tests.support.float64 import prompt_logprobs, token_scores
from tests.support.launch import end_model_parallel, run_dist
from tests.support.model_worlds import save_random_model
from tests.support.small_llama import draw_rollouts

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "four": ("Llama", {"num_hidden_layers": 4}),
    "tied": ("Llama", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "eight": ("Llama", {"num_hidden_layers": 8}),
    "qwen3": ("Qwen3", {"num_hidden_layers": 4}),  # norms of queries and keys
    "experts": ("Mixtral", {"num_hidden_layers": 4, "num_local_experts": 4}),
}
KL = {"preset": "grpo", "kl": {"against": "reference", "coefficient": 0.1}}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "tepo": {"preset": "tepo"},
    "grpo": {"preset": "grpo"},  # weighs sequences: its denominator must not depend on who computes which sequence
    "gspo": {"preset": "gspo"},
    "kl": KL,
    "slope": {"kl_mask": {"falling": "first_order"}},  # needs a value more of the scores, in updates only
    "auto": {"trust_region": {"scale": "length", "low": "auto", "high": "auto"}, "kl_mask": None},
    # the slope takes one, entropies have a gradient, and a frozen model is scored
    "entropy": {
        "kl_mask": {"falling": "first_order"},
        "entropy": {"kind": "fixed", "coefficient": 0.1},
        "kl": {"against": "reference"},
    },
    "prefix": {"ratio": {"kind": "prefix"}, "trust_region": {"scale": "length", "low": 0.003, "high": "auto"}},
}
# its lottery is drawn by the last bits of log-probs, and so all candidates win
CLIP_COV = {"preset": "clip_cov", "trust_region": {"kind": "clip_cov", "cov_low": 0.1, "fraction": 1.0}}
EVERY: list[dict[str, Any]] = [{"preset": name} for name in PRESETS if name != "clip_cov"] + [CLIP_COV, KL, OBJECTIVES["slope"]]
TEMPERATURE, STEPS = 0.7, 2
PROMPT = [7, 60, 1, 33, 0, 12, 12, 58]
NOISE = 0.125
"""A tolerance that goes into checkpoints, as if it had been measured."""


@dataclass(frozen=True)
class Layout:
    """One engine of a world. ``moves``: its memory is offloaded and onloaded before each update. ``resumes``: the layout whose
    checkpoint, written after the first update, it loads, writes again, and continues from. ``every``: then all presets.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    first: int | None = None
    last: int | None = None
    sp: bool = False
    distributed: bool = False
    model: str = "four"
    objective: str = "tepo"
    head: str = "logits"
    recompute: str = "none"
    dtype: str = "float32"
    tokens: int = 30
    moves: bool = False
    every: bool = False
    resumes: Layout | None = None

    @property
    def parallel(self) -> dict[str, Any]:
        split = {name: getattr(self, name) for name in ("tp", "pp", "vpp", "dp", "cp", "ep")}
        ends = {"num_layers_in_first_pipeline_stage": self.first, "num_layers_in_last_pipeline_stage": self.last}
        return {**split, **ends, "sequence_parallel": self.sp}

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def single(self) -> Layout:
        return Layout(model=self.model, objective=self.objective, every=self.every)

    @property
    def name(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != getattr(Layout, name)}
        changed |= {"resumes": self.resumes.name} if self.resumes else {}
        return "-".join(f"{name}{value}" for name, value in changed.items()) or "one"


VPP, DISTRIBUTED = Layout(pp=2, vpp=2), Layout(dp=2, distributed=True)
TP_PP, CP_DP = Layout(tp=2, pp=2, tokens=60), Layout(cp=2, dp=2, distributed=True)
TP = Layout(tp=2, resumes=VPP)
PRESET_CP = Layout(cp=2, model="qwen3", objective="kl", every=True)
COARSE = [Layout(dtype="bfloat16", head=head, tokens=40) for head in ("logits", "fused")]
INTERLEAVED = Layout(tp=2, pp=2, vpp=2)
OTHERS = [
    Layout(tokens=4096),
    Layout(resumes=DISTRIBUTED),
    *(Layout(head="fused", objective="entropy", model=model) for model in ("four", "tied")),
    # two ranks
    Layout(tp=2),
    Layout(tp=2, head="fused", objective="entropy"),
    Layout(tp=2, sp=True, tokens=50, head="fused", objective="entropy"),
    Layout(tp=2, sp=True, model="tied", head="fused", objective="entropy"),
    Layout(pp=2, tokens=40, head="fused", objective="entropy"),
    Layout(dp=2, distributed=True, head="fused", objective="entropy"),
    DISTRIBUTED,
    *(Layout(pp=2, vpp=2, objective=name, moves=name == "kl") for name in ("tepo", "grpo", "gspo", "kl")),
    Layout(pp=2, vpp=2, model="tied", head="fused", objective="entropy"),
    Layout(pp=2, vpp=2, first=2, model="eight"),
    Layout(pp=2, last=1, model="tied"),
    Layout(pp=2, last=1, model="tied", head="fused", objective="entropy"),
    PRESET_CP,
    Layout(cp=2, head="fused", objective="entropy"),
    Layout(cp=2, ep=2, model="experts"),
    TP,
    Layout(pp=2, vpp=2, resumes=TP),
    Layout(dp=2, distributed=True, resumes=TP_PP),
    Layout(dp=2, distributed=True, resumes=CP_DP),
    # four ranks
    TP_PP,
    *(Layout(tp=2, pp=2, vpp=2, sp=name == "grpo", objective=name) for name in ("tepo", "grpo", "gspo", "kl")),
    *(Layout(tp=2, dp=2, sp=True, objective=name) for name in ("slope", "auto", "prefix")),
    Layout(tp=2, pp=2, model="tied"),
    Layout(tp=2, pp=2, vpp=2, model="tied"),
    Layout(dp=2, pp=2, vpp=2, distributed=True),
    Layout(dp=2, pp=2, vpp=2, ep=2, model="experts"),
    Layout(pp=4, vpp=2, model="eight"),
    Layout(pp=4, first=1, last=1, model="eight"),
    CP_DP,
    Layout(cp=2, pp=2, vpp=2, model="tied"),
    Layout(cp=2, pp=2, recompute="full", model="qwen3"),
    Layout(cp=2, tp=2, sp=True, model="qwen3"),
    Layout(cp=2, tp=2, sp=True, model="qwen3", head="fused"),
    Layout(cp=4, recompute="selective", model="qwen3"),
]
SINGLE = list(dict.fromkeys([Layout(), *(layout.single for layout in OTHERS), *COARSE]))
RECORDED_AND_NOT = [
    *(Layout(), VPP, Layout(pp=2, last=1, model="tied"), INTERLEAVED, Layout(dp=2, pp=2, vpp=2, distributed=True)),
    Layout(cp=2, pp=2, vpp=2, model="tied"),
]
"""Those that repeat their second update without recording."""


def rollouts(layout: Layout, step: int) -> list[Rollout]:
    """Four groups of three, of uneven lengths and rewards. In tied models and with a KL term gradients of these nearly cancel
    and leave rounding alone: there, three groups of four, no two of equal length.
    """
    generator = torch.Generator().manual_seed(1 + step)
    others = layout.model == "tied" or layout.objective == "kl"

    def draw(low: int, high: int, size: int) -> tuple[int, ...]:
        return tuple(torch.randint(low, high, (size,), generator=generator).tolist())

    made: list[Rollout] = []
    prompt: tuple[int, ...] = ()
    for number in range(12):
        group, sample = divmod(number, 4 if others else 3)
        if others:
            ids = draw(3, 61, 1 + group + 3 + (7 * number) % 17)
            prompt, response = ids[: 1 + group], ids[1 + group :]
            logprobs = tuple((-4 * torch.rand(len(response), generator=generator)).tolist())
            reward = float(number % 3 == 0)
        else:
            prompt = draw(3, 61, draw(1, 6, 1)[0]) if sample == 0 else prompt
            response = draw(3, 61, draw(1, 18, 1)[0])
            logprobs = tuple(-value / 7 for value in draw(1, 30, len(response)))
            reward = float((sample + group) % 2) if group else 1.0
        made.append(Rollout(f"p{group}", group, prompt, response, logprobs, "stop", WeightsVersion(0), reward=reward))
    return made


def figures(result: UpdateResult) -> dict[str, float]:
    means = {name: total / count for name, (total, count) in result.sums.items() if count}
    return {"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr, **result.extrema, **means}


def start(layout: Layout, folder: Path) -> Any:
    from tepo_megatron.trainer.megatron.engine import Engine

    # With this ε a step does not turn the sign of a gradient that is nothing but rounding into a move.
    optimizer = {"lr": 1e-3, "eps": 3e-3} if layout.every else {"lr": 1e-4, "warmup_steps": 2, "weight_decay": 0.01}
    engine = {"parallel": layout.parallel, "micro_batch_tokens": layout.tokens, "head": layout.head}
    config = {
        "model": {"path": str(folder / layout.model), "dtype": layout.dtype},
        "engine": {"platform": "cpu", "recompute": layout.recompute, **engine},
        "optimizer": {"distributed": layout.distributed, **optimizer},
        "objective": OBJECTIVES[layout.objective],
        "rollout": {"sampling": {"temperature": TEMPERATURE}, "server": {"placement": "colocated"}},
        "train": {"minibatches": 2, "steps": STEPS},
    }
    return Engine(RunConfig.model_validate(config), folder / layout.model, shares_gpus=layout.moves)


def train(layout: Layout, folder: Path) -> dict[str, Any]:
    """Loads, scores, and makes two steps of two updates, with a checkpoint after the first; what the tests look at."""
    from tepo_megatron.run.step.minibatches import minibatches

    engine = start(layout, folder)
    params = {name: tuple(param.shape) for name, param in engine.policy.params.items()}
    assert params == dict(engine.layouts[engine.ranks.rank].params)
    random_state, is_root = torch.get_rng_state(), engine.ranks.rank == 0
    report: dict[str, Any] = {"initial": dict(engine.weights.stream()), "updates": [], "tokens": []}
    report["digest"] = engine.weights.version(0).digest
    batch = engine.batch_from_root(rollouts(layout, 0) if is_root else None)
    forwarded: list[int] = []
    hook = engine.policy.chunks[-1].register_forward_pre_hook(lambda _, inputs: forwarded.append(inputs[0].numel()))
    whole = engine.score(batch)
    hook.remove()
    report |= {"forwarded": forwarded, "logprobs": whole.old_logprobs_T, "entropy": whole.old_entropy_T}
    report |= {"reference": whole.reference_logprobs_T, "params": list(params), "widths": set(), "in place": set()}
    watch_outputs(engine, report)
    report["prompt"] = engine.prompt_logprobs(PROMPT)
    report["noise"] = engine.measure_noise(batch)["entropy/noise/p99"]
    engine.counters.entropy_noise = 0.0
    for step in range(STEPS):
        batch = engine.batch_from_root(rollouts(layout, step) if is_root else None)
        batch = batch.with_(recorded_S=torch.where(batch.groups_S == 0, -1, torch.arange(batch.num_sequences)))
        parts = [engine.score(part) for part in minibatches(batch, 2, seed=0, step=step)]
        for number, part in enumerate(parts, start=2 * step):
            if layout.resumes is not None and number == 0:
                load(engine, folder / layout.resumes.name / "step_000001", report)
            else:
                if layout.moves:
                    engine.offload()
                    engine.onload()
                result = engine.update(part)
                assert not result.skipped
                report["updates"].append(figures(result))
                report["tokens"].append((number, part, result.token_values))
            if number == 0:
                engine.counters.entropy_noise = NOISE
                engine.checkpoints.save(folder / layout.name, step=1, state={"note": "kept"})
                engine.counters.entropy_noise = 0.0
                report["saved prompt"] = engine.prompt_logprobs(PROMPT)
                report["between"] = dict(engine.weights.stream()) if layout.world == 1 else None
            if number == 1 and layout in RECORDED_AND_NOT:
                digest = engine.weights.version(0).digest
                load(engine, folder / layout.name / "step_000001", {})
                plain = engine.update(part.with_(recorded_S=None))
                assert not plain.token_values
                report["without"] = (figures(plain), engine.weights.version(0).digest)
                report["with"] = (report["updates"][-1], digest)
    report["trained"] = dict(engine.weights.stream())
    report["drew random numbers"] = not torch.equal(torch.get_rng_state(), random_state)
    if layout.every:
        report["every preset"] = list(updates_of_every_preset(engine))
    end_model_parallel()
    return report


def watch_outputs(engine: Any, report: dict[str, Any]) -> None:
    """Notes the widths of the chunks' outputs, and whether these have the memory of their gradients."""

    def watch(_module: object, _inputs: object, output: torch.Tensor) -> None:
        report["widths"].add(output.shape[-1])
        if output.requires_grad:
            place = output.data_ptr()
            output.register_hook(lambda gradient: report["in place"].add(gradient.data_ptr() == place))

    for chunk in engine.policy.chunks:
        chunk.register_forward_hook(watch)


def load(engine: Any, checkpoint: Path, report: dict[str, Any]) -> None:
    engine.checkpoints.load(checkpoint)
    report["restored"] = (engine.weights.version(0).digest, engine.counters.entropy_noise)
    report["bytes read"] = engine.checkpoints.bytes_read
    engine.counters.entropy_noise = 0.0


def updates_of_every_preset(engine: Any) -> Iterator[dict[str, float]]:
    """One update for each. Old log-probs and entropies are moved a little: no ratio is 1, and masks act."""
    reference, sampled = engine.reference, draw_rollouts((3, 31, 5, 17, 24, 4, 40, 8))
    for choice in EVERY:
        engine.objective = build_objective(ObjectiveConfig.model_validate(choice))
        engine.forward = replace(engine.forward, entropy_slope=engine.objective.needs_entropy_slope)
        engine.reference = reference if engine.objective.needs_reference else None  # to save time
        batch: Batch = engine.score(engine.batch_from_root(sampled if engine.ranks.rank == 0 else None))
        assert batch.old_logprobs_T is not None
        assert batch.old_entropy_T is not None
        moves_T = 0.05 * torch.sin(12.9898 * torch.arange(batch.num_tokens))
        moved = {"old_logprobs_T": batch.old_logprobs_T + moves_T, "old_entropy_T": batch.old_entropy_T + moves_T.roll(1)}
        yield figures(engine.update(batch.with_(**moved)))
    engine.reference = reference


def trained_in_turn(rank: int, world: int, folder: Path, layouts: list[Layout]) -> list[dict[str, Any]]:
    warnings.filterwarnings("ignore")
    os.environ["WORLD_SIZE"] = str(world)
    return [train(layout, folder) for layout in layouts]


class Worlds:
    """Starts each world when it is first asked for; those first from whose checkpoints its layouts resume."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ranks = cache(self._start)
        sizes = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 128}
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
        for name, (family, settings) in MODELS.items():
            save_random_model(family, {**sizes, **heads, **settings}, folder / name, seed=0)

    def _start(self, world: int) -> dict[Layout, list[dict[str, Any]]]:
        layouts = [layout for layout in (*SINGLE, *OTHERS) if layout.world == world]
        for larger in {layout.resumes.world for layout in layouts if layout.resumes} - {world}:
            self._ranks(larger)
        ranks = run_dist(world, trained_in_turn, self.folder, layouts)
        return {layout: [reports[number] for reports in ranks] for number, layout in enumerate(layouts)}

    def ranks(self, layout: Layout) -> list[dict[str, Any]]:
        return self._ranks(layout.world)[layout]

    @cache  # noqa: B019 (it lives as long as its module)
    def oracle(self, single: Layout) -> dict[str, Any]:
        """Log-probs and entropies of the rollouts, and log-probs of the prompt, by transformers in float64."""
        folder = self.folder / single.model
        logprobs, entropy = token_scores(folder, pack(rollouts(single, 0)), temperature=TEMPERATURE)
        return {"logprobs": logprobs, "entropy": entropy, "prompt": prompt_logprobs(folder, PROMPT)}

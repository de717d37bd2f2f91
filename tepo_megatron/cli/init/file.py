"""``tepo init``'s run file: a layout that fits, lengths that the model takes, a comment at each choice."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tepo_megatron.core.problem import Problem

_LONGEST_RESPONSE = 1024
"""Limit on the response for models that allow more; the first setting to change for your own task."""

_SMALL = 100_000_000
"""Smaller models hardly learn with a learning rate meant for billions of parameters."""

_COMMENTS = {
    "model": "a Hugging Face folder: config.json, safetensors, tokenizer",
    "data": "tepo data show prints what the model reads; several sources, templates, filters: docs/guides/data.md",
    "reward": "or your own function (problem, response) -> float, as file.py:function: docs/guides/rewards.md",
    "rollout": "a step has prompts_per_step × samples_per_prompt responses of at most max_new_tokens",
    "optimizer": "lr is the first field to turn where the reward stays flat: docs/reference/metrics.md",
    "train": "a run that is stopped saves first, and goes on with --resume",
}


@dataclass(frozen=True)
class Answers:
    """``data`` is that section of the run's file, ``problems`` its problems."""

    model: str
    data: Mapping[str, Any]
    problems: Sequence[Problem]
    verifier: str
    gpus: int
    nodes: int
    output: Path | None = None


def run_text(answers: Answers) -> str:
    """Raises ValueError for a prompt too long for the model, GPUs without a simple layout, and a run that the model does not
    allow."""
    from tepo_megatron.config import RunConfig
    from tepo_megatron.plan.shapes import model_parameters
    from tepo_megatron.run.checks import verify_model
    from tepo_megatron.tasks.data.builtin import resolve_model_path
    from tepo_megatron.tasks.data.prompts import encode_prompt
    from tepo_megatron.tasks.data.tokenizer import check_tokenizer, load_tokenizer
    from tepo_megatron.weights.architecture import read_model_spec

    folder = resolve_model_path(answers.model)
    spec, tokenizer = read_model_spec(folder), load_tokenizer(folder)
    check_tokenizer(tokenizer, folder)
    longest = max(len(encode_prompt(tokenizer, problem)) for problem in answers.problems)
    if longest >= spec.max_positions:
        raise ValueError(
            f"the longest prompt has {longest} tokens, and {answers.model} takes {spec.max_positions}, the response included; "
            "shorten the prompts, or take another model"
        )
    new = min(_LONGEST_RESPONSE, spec.max_positions - longest)
    name = os.path.basename(os.path.abspath(answers.model.removeprefix("builtin:"))) or "run"
    on_gpus = answers.gpus > 0
    run: dict[str, Any] = {
        "name": name,
        "output": str(answers.output or Path("out") / name),
        "model": {"path": answers.model, "dtype": "bfloat16" if on_gpus else "float32"},
        "data": dict(answers.data),
        "reward": {"verifier": answers.verifier},
        "rollout": {
            "prompts_per_step": 64,
            "samples_per_prompt": 8,
            "sampling": {"max_new_tokens": new},
            "server": {"max_model_len": longest + new},
        },
        "engine": {"platform": "cuda" if on_gpus else "cpu", "micro_batch_tokens": max(4096, longest + new)},
        "optimizer": {"lr": 5e-5 if model_parameters(spec) < _SMALL else 1e-6, "warmup_steps": 10},
        "train": {"steps": 100, "minibatches": 4, "save_every": 20},
        "evaluate": {"every": 10 if answers.data["heldout"] else 0},
    }
    run = _first_that_fits(run, answers) if on_gpus else run
    verify_model(RunConfig.model_validate(run))
    return _as_yaml(run)


def _first_that_fits(run: dict[str, Any], answers: Answers) -> dict[str, Any]:
    """Fewest tensor-parallel ranks for which the plan fits trainer and servers."""
    from tepo_megatron.config import RunConfig
    from tepo_megatron.plan import make_plan

    why = "give 1, 2, 4 or 8 GPUs"
    for tp in (size for size in (1, 2, 4, 8) if size <= answers.gpus):
        laid_out = _laid_out(run, tp, gpus=answers.gpus, nodes=answers.nodes)
        if laid_out is None:
            continue
        try:
            problems = make_plan(RunConfig.model_validate(laid_out)).problems
        except ValueError as error:
            problems = (str(error),)
        if not problems:
            return laid_out
        why = "; ".join(problems)
    raise ValueError(f"no simple layout on {answers.nodes} × {answers.gpus} GPUs takes {answers.model}: {why}")


def _laid_out(run: dict[str, Any], tp: int, *, gpus: int, nodes: int) -> dict[str, Any] | None:
    """Half of the GPUs, or nodes, train, the others serve; a single GPU does both in turn. None if ``tp`` does not divide
    them."""
    training = gpus * (nodes // 2) if nodes > 1 else max(1, gpus // 2)
    serving = gpus * nodes - training
    if training % tp or serving % tp:
        return None
    server = {**run["rollout"]["server"], "tp": tp, "count": max(1, serving // tp)}
    if not serving:
        server["placement"] = "colocated"
    cluster = {"gpus_per_node": gpus}
    if nodes > 1:
        cluster |= {"train_nodes": nodes // 2, "rollout_nodes": nodes - nodes // 2}
    return {
        **run,
        "rollout": {**run["rollout"], "server": server},
        "engine": {**run["engine"], "parallel": {"tp": tp, "dp": training // tp, "sequence_parallel": tp > 1}},
        "optimizer": {**run["optimizer"], "distributed": training > tp},
        "cluster": cluster,
    }


def _as_yaml(run: dict[str, Any]) -> str:
    lines = ["# Written by tepo init. tepo config schema explains every field; what is not here has its default."]
    for name, value in run.items():
        lines += [f"# {_COMMENTS[name]}"] if name in _COMMENTS else []
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"  {key}: {_value(item)}" for key, item in value.items())]
        else:
            lines.append(f"{name}: {_value(value)}")
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """JSON, which YAML reads if 5e-05 has a point (5.0e-05)."""
    return f"{value:.1e}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)

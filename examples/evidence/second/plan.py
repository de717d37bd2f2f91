"""Writes the sweeps of the evidence's second round (docs/results/evidence-plan.md) from one list of methods and ranges.

    python examples/evidence/second/plan.py                                # from the settings in chosen.json
    python examples/evidence/second/plan.py out/evidence-second/tuning     # first choose them by the runs of tuning.yaml

Before the tuning chosen.json holds each method's published range and the lower learning rate, and says so.
"""

import json
import math
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tepo_megatron.run.metrics import read_metrics
from tepo_megatron.tools.sweep import area, read_sweep, runs_of

FOLDER = Path(__file__).parent
PROBE = "kl_mask: {coefficient: 1.0e-9}"  # records what TEPO's mask would choose, and adds nothing (../tiny.yaml)
DYNAMIC_SAMPLING = "rollout.filter_groups={filters: [zero_variance], max_batches: 20}"
RATES = {"usual": "5e-5", "double": "1e-4"}
RANGES = ("published", "second", "third")
SUM_TOKENS = 19.0  # mean response of the warm start on sums, where ranges are tuned
LONG_TOKENS = 132.0  # of the warm start of examples/long_arithmetic
LONG_HELDOUT = "builtin:long-addition-heldout"
TIE = 1e-3


Axes = Mapping[str, Mapping[str, list[str]]]  # axis → choice → its settings


@dataclass(frozen=True)
class Method:
    """``ranges`` holds lower and upper bounds, the published range first. ``sequence``: they bound a whole sequence's ratio."""

    parts: str
    kind: str
    ranges: tuple[tuple[float | None, float], ...]
    sequence: bool = False
    others: tuple[str, ...] = ()


METHODS: Mapping[str, Method] = {
    "tepo": Method("preset: tepo", "clip", ((3e-4, 4e-4), (6e-3, 8e-3), (2e-2, 2.7e-2)), sequence=True),
    "grpo": Method(f"preset: grpo, {PROBE}", "clip", ((0.2, 0.2), (0.1, 0.1), (0.4, 0.4))),
    "dapo": Method(f"preset: dapo, {PROBE}", "clip", ((0.2, 0.28), (0.1, 0.14), (0.4, 0.56)), others=(DYNAMIC_SAMPLING,)),
    "gspo": Method(f"preset: gspo, {PROBE}", "clip", ((3e-4, 4e-4), (6e-3, 8e-3), (2e-2, 2.7e-2)), sequence=True),
    "luspo": Method(f"preset: luspo, {PROBE}", "clip", ((2e-3, 2.5e-3), (6e-3, 7.5e-3), (2e-2, 2.5e-2)), sequence=True),
    "cispo": Method(f"preset: cispo, {PROBE}", "clip_weight", ((None, 4.0), (None, 1.0), (None, 0.28))),
}


@dataclass(frozen=True)
class Chosen:
    range: str = "published"
    rate: str = "usual"


@dataclass(frozen=True)
class Task:
    """``every``: steps from one evaluation to the next, of greedy and of sampled answers."""

    run: str
    tokens: float
    heldout: str
    filter: str | None = None
    steps: int = 60
    every: tuple[int, int] = (2, 30)


TASKS = {
    "tiny": Task("../../tiny/run.yaml", SUM_TOKENS, "builtin:addition-heldout", "split.py:is_trained", 40, (2, 20)),
    "stack_machine": Task("../../stack_machine/run.yaml", 8.0, "builtin:stack-machine-heldout"),
    "long_arithmetic": Task("../../long_arithmetic/run.yaml", LONG_TOKENS, LONG_HELDOUT, None, 40, (4, 40)),
}
TUNING_SEEDS, FRESH_SEEDS = (5, 6), tuple(range(10, 18))
SAMPLE_AHEAD = ("train.schedule=overlap", "objective.mismatch={kind: truncate}", "rollout.server.cpu_threads=auto")
REGIMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "updates": {"u8": ("train.minibatches=8",), "u16": ("train.minibatches=16",)},
    "overlap": {f"k{steps}": (*SAMPLE_AHEAD, f"train.max_staleness={steps}") for steps in (1, 4)},
}


def region(name: str, chosen: str, tokens: float = SUM_TOKENS) -> str:
    """The range on a task with responses of so many tokens: a bound of a sequence's ratio goes with 1/√tokens."""
    method = METHODS[name]
    scale = math.sqrt(SUM_TOKENS / tokens) if method.sequence else 1.0
    low, high = (None if bound is None else float(f"{bound * scale:.3g}") for bound in method.ranges[RANGES.index(chosen)])
    bounds = f"high: {high}" if low is None else f"low: {low}, high: {high}"
    fixed = "scale: fixed, " if method.kind == "clip" else ""  # TEPO's own bounds follow the length
    return f"trust_region: {{kind: {method.kind}, {fixed}{bounds}}}"


def settings(name: str, chosen: Chosen, tokens: float = SUM_TOKENS) -> list[str]:
    method = METHODS[name]
    objective = f"objective={{{method.parts}, {region(name, chosen.range, tokens)}}}"
    return [objective, f"optimizer.lr={RATES[chosen.rate]}", *method.others]


def tuning() -> str:
    choices = {
        f"{name}-{label}": settings(name, Chosen(label, "usual"))[:1] + list(method.others)
        for name, method in METHODS.items()
        for label in RANGES
    }
    axes: Axes = {"method": choices, "lr": {label: [f"optimizer.lr={rate}"] for label, rate in RATES.items()}}
    head = "Equal tuning: three ranges and two learning rates for each method, two seeds, judged on the validation split."
    return sweep("tuning", head, TASKS["tiny"], axes, TUNING_SEEDS, validates=True)


def compare(task: str, chosen: Mapping[str, Chosen]) -> str:
    methods = {name: settings(name, chosen[name], TASKS[task].tokens) for name in METHODS}
    axes: Axes = {"objective": methods, "lr": {"tuned": []}}
    return sweep(f"compare-{task}", "Each method at its best, eight fresh seeds.", TASKS[task], axes, FRESH_SEEDS)


def regime(name: str, chosen: Mapping[str, Chosen]) -> str:
    axes = {
        "objective": {method: settings(method, chosen[method]) for method in ("tepo", "grpo", "dapo")},
        "regime": {label: list(changes) for label, changes in REGIMES[name].items()},
    }
    head = "Further from the policy that sampled. Four updates and no overlap are compare-tiny's, with the same seeds."
    return sweep(name, head, TASKS["tiny"], axes, FRESH_SEEDS[:5], jobs=1 if name == "overlap" else 2)


def parts(chosen: Mapping[str, Chosen]) -> str:
    tuned = chosen["tepo"]
    of_tepo, rate = region("tepo", tuned.range), [f"optimizer.lr={RATES[tuned.rate]}"]
    axes = {
        "objective": {
            "no-mask": [f"objective={{preset: tepo_markov, {PROBE}, {of_tepo}}}", *rate],
            "no-likelihood": [
                f"objective={{preset: tepo, ratio: {{kind: token}}, {region('dapo', chosen['dapo'].range)}}}",
                *rate,
            ],
            "sequence-mean": [f"objective={{preset: tepo, aggregation: {{kind: sequence_mean}}, {of_tepo}}}", *rate],
            "dynamic-sampling": [f"objective={{preset: tepo, {of_tepo}}}", *rate, DYNAMIC_SAMPLING],
        }
    }
    head = "TEPO's parts, one at a time, at its tuned range. TEPO itself is compare-tiny's, with the same seeds."
    return sweep("parts", head, TASKS["tiny"], axes, FRESH_SEEDS)


def coefficient(chosen: Mapping[str, Chosen]) -> str:
    of_tepo, rate = region("tepo", chosen["tepo"].range), f"optimizer.lr={RATES[chosen['tepo'].rate]}"
    choices = {}
    for against in ("old", "reference"):
        for value in (1, 10, 30, 100):
            if (against, value) != ("old", 1):
                mask = f"kl_mask: {{coefficient: {value}.0, against: {against}}}"
                choices[f"{against}-{value}"] = [f"objective={{preset: tepo, {mask}, {of_tepo}}}", rate]
    head = "The mask's coefficient, against the old policy and the reference. 1 against the old policy is compare-tiny's tepo."
    return sweep("coefficient", head, TASKS["tiny"], {"objective": choices}, FRESH_SEEDS[:4])


VALIDATION = (
    "data.heldout=null",
    "evaluate.every=2",
    "evaluate.sets={validation: {path: validation.jsonl, samples: 0, majority: none}}",
)
VALIDATED = "eval/validation/greedy"


def _test(task: Task) -> tuple[str, ...]:
    greedy, sampled = task.every
    answers = f"{{path: {task.heldout}, greedy: false, samples: 16, k: [1, 4, 16], majority: none, every: {sampled}}}"
    return (
        f"data.heldout={task.heldout}",
        f"evaluate.every={greedy}",
        "evaluate.samples=0",
        f"evaluate.sets={{sampled: {answers}}}",
    )


def sweep(
    name: str, head: str, task: Task, axes: Axes, seeds: tuple[int, ...], *, jobs: int = 2, validates: bool = False
) -> str:
    overrides = [
        *("engine.parallel.tp=1", "engine.parallel.sequence_parallel=false", "engine.cpu_threads=auto"),
        *("rollout.server.cpu_threads=all", "rollout.journal=false", "rollout.canary.every=10"),
        *(f"train.steps={task.steps}", "train.save_every=0"),
        *([f"data.filter=[{task.filter}]"] if task.filter else []),
        *(VALIDATION if validates else _test(task)),
        *("evaluate.show=4", "log.progress=plain", "log.tensorboard=false"),
    ]
    lines = [f"# {head}", f"# Written by plan.py: tepo sweep examples/evidence/second/{name}.yaml --jobs {jobs}"]
    lines += [f"run: {task.run}", f"output: ../../../out/evidence-second/{name}", "overrides:"]
    lines += [f"  - {json.dumps(setting)}" for setting in overrides]
    lines.append("axes:")
    for axis, choices in axes.items():
        lines.append(f"  {axis}:")
        for choice, changes in choices.items():
            lines += [
                f"    {choice}:" if changes else f"    {choice}: []",
                *(f"      - {json.dumps(change)}" for change in changes),
            ]
    greedy = VALIDATED if validates else "accuracy/greedy"
    sampled = "" if validates else "eval/sampled/avg@16, eval/sampled/pass@16, "
    lines += [
        f"seeds: {list(seeds)}",
        f"figures: [{greedy}, {sampled}entropy/mean, grad_norm, mask/fraction, time/step]",
        f"area: [{greedy}, entropy/mean]",
        "reach:",
        f"  - {{figure: {greedy}, at: [0.7, 0.8, 0.9]}}",
    ]
    return "\n".join(lines) + "\n"


def sweeps(chosen: Mapping[str, Chosen]) -> dict[str, str]:
    """File → text."""
    texts = {"tuning": tuning(), **{f"compare-{task}": compare(task, chosen) for task in TASKS}}
    texts |= {**{name: regime(name, chosen) for name in REGIMES}, "parts": parts(chosen), "coefficient": coefficient(chosen)}
    return {f"{name}.yaml": text for name, text in texts.items()}


def choose(folder: Path) -> dict[str, Chosen]:
    """The fixed rule: the largest mean over the seeds of the area under the greedy curve on the validation split. Of settings
    within 0.001 of it the lower learning rate, and then the first range as listed. Raises ValueError unless all runs are done.
    """
    runs = runs_of(read_sweep(FOLDER / "tuning.yaml"), folder)
    missing = [run.name for run in runs if not run.is_done]
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} of {len(runs)} runs are not done, such as {missing[0]}; run the sweep again"
        )
    scores: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        rows = read_metrics(run.folder / "metrics.jsonl")
        curve = [(row["step"], row[VALIDATED]) for row in rows if VALIDATED in row]
        value = area(curve)
        if value is None:
            raise ValueError(f"{run.folder}: fewer than two evaluations; remove the run and repeat it")
        scores.setdefault((run.choices["method"], run.choices["lr"]), []).append(value)
    means = {setting: statistics.fmean(values) for setting, values in scores.items()}
    result = {}
    for name in METHODS:
        candidates = [Chosen(label, rate) for rate in RATES for label in RANGES]
        best = max(means[f"{name}-{item.range}", item.rate] for item in candidates)
        result[name] = next(item for item in candidates if means[f"{name}-{item.range}", item.rate] >= best - TIE)
    return result


def read_chosen() -> dict[str, Chosen]:
    document = json.loads((FOLDER / "chosen.json").read_text(encoding="utf-8"))
    return {name: Chosen(**document["settings"][name]) for name in METHODS}


def write(chosen: Mapping[str, Chosen], *, tuned: bool, folder: Path = FOLDER) -> None:
    document = {"tuned": tuned, "settings": {name: vars(item) for name, item in chosen.items()}}
    (folder / "chosen.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for name, text in sweeps(chosen).items():
        (folder / name).write_text(text, encoding="utf-8")


def _main(arguments: list[str]) -> None:
    if arguments:
        write(choose(Path(arguments[0])), tuned=True)
    else:
        tuned = json.loads((FOLDER / "chosen.json").read_text(encoding="utf-8"))["tuned"]
        write(read_chosen(), tuned=tuned)


if __name__ == "__main__":
    _main(sys.argv[1:])

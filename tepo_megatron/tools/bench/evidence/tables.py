"""Markdown tables of docs/results/evidence.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tepo_megatron.tools.bench.evidence.claims import claims, summary
from tepo_megatron.tools.bench.evidence.figures import FIGURES, Estimate, Figures, interval
from tepo_megatron.tools.bench.evidence.record import Evidence
from tepo_megatron.tools.results import markdown

LEARNING = ("70", "80", "90", "area", "greedy", "avg", "pass4", "pass16")
DYNAMICS = ("entropy", "entropy90", "masked", "unmasked", "mask", "kl", "gradient", "spike", "clipped", "jitter", "fall")
COMPARED = ("80", "90", "area", "greedy", "avg", "entropy", "gradient")
TIMES = ("rollout", "score", "update", "step", "drawn")
OVERHEAD = ("score", "update", "rollout", "step")
BASELINE = "grpo"


SECOND = "second-"


def make_tables(tiny: Evidence, second: Evidence, overhead: Evidence) -> dict[str, str]:
    rates = list(tiny.sweep.axes["lr"])
    result = {"state": state({"tiny": tiny, "stack_machine": second, "overhead": overhead})}
    figures = Figures(tiny)
    result |= _comparison(figures)
    for rate in rates:
        result[f"against-{rate}"] = _against(figures, rate)
        result[f"dynamics-{rate}"] = _by_objective(figures, rate, DYNAMICS)
    result["overhead"] = _overhead(Figures(overhead))
    result["time"] = _by_objective(figures, rates[0], TIMES)
    return result | {SECOND + name: table for name, table in _comparison(Figures(second)).items()}


def _comparison(figures: Figures) -> dict[str, str]:
    rates = list(figures.evidence.sweep.axes["lr"])
    learning = {f"learning-{rate}": _by_objective(figures, rate, LEARNING) for rate in rates}
    return {"summary": summary(figures, rates), "claims": claims(figures, rates), **learning, "parts": _parts(figures, rates)}


def state(sweeps: Mapping[str, Evidence]) -> str:
    """Finished runs of each sweep, with dates and machines; of an unfinished sweep, the seeds of each combination."""
    parts, counts = [], []
    for name, evidence in sweeps.items():
        keys, seeds = evidence.keys, len(evidence.sweep.seeds)
        done, of = sum(len(evidence.seeds(key)) for key in keys), len(keys) * seeds
        missing = "all are done" if done == of else f"**{of - done} are missing**, and the same commands go on with them"
        when = f" Ended from {min(evidence.dates.values())} to {max(evidence.dates.values())}." if evidence.dates else ""
        machines = Counter(evidence.machines.values())
        counted = (f"{machine} ({count} runs)" if len(machines) > 1 else machine for machine, count in machines.most_common())
        where = f" Collected on {'; '.join(counted)}." if machines else ""
        listed = ", ".join(map(str, evidence.sweep.seeds))
        parts.append(f"`examples/evidence/{name}.yaml`: {done} of {of} runs, seeds {listed}; {missing}.{when}{where}\n")
        if done < of:
            counts += [[name, key[0], *_done(evidence, key[0])] for key in dict.fromkeys((key[0],) for key in keys)]
    if counts:
        parts.append(markdown(["sweep", "objective", "seeds done"], counts))
    return "\n".join(parts)


def _done(evidence: Evidence, objective: str) -> list[str]:
    seeds = len(evidence.sweep.seeds)
    done = {key: f"{len(evidence.seeds(key))} of {seeds}" for key in evidence.keys if key[0] == objective}
    return [", ".join(f"lr {evidence.rate(key[1])}: {text}" if key[1:] else text for key, text in done.items())]


def _by_objective(figures: Figures, rate: str, names: Sequence[str]) -> str:
    rows = [
        [
            objective,
            str(len(figures.evidence.seeds((objective, rate)))),
            *(figures.cell(name, (objective, rate)) for name in names),
        ]
        for objective in figures.evidence.sweep.axes["objective"]
        if figures.evidence.seeds((objective, rate))
    ]
    return _table(["objective", "seeds", *(FIGURES[name].name for name in names)], rows)


def _against(figures: Figures, rate: str) -> str:
    rows = []
    for objective in figures.evidence.sweep.axes["objective"]:
        result = [figures.against(name, (objective, rate), (BASELINE, rate)) for name in COMPARED]
        if objective != BASELINE and any(item.seeds for item in result):
            cells = [item.text(FIGURES[name], ratio=FIGURES[name].ratio) for name, item in zip(COMPARED, result, strict=True)]
            rows.append([objective, str(max(item.seeds for item in result)), *cells])
    heads = [f"{FIGURES[name].name}{', ratio' if FIGURES[name].ratio else ', difference'}" for name in COMPARED]
    return _table(["beside GRPO", "pairs", *heads], rows)


def _parts(figures: Figures, rates: Sequence[str]) -> str:
    corners = {(True, True): "tepo", (True, False): "no-mask", (False, True): "no-likelihood", (False, False): "neither"}
    rows = []
    for rate in rates:
        for name in ("area", "greedy", "avg", "entropy"):
            values = {corner: figures.of(name, (objective, rate)) for corner, objective in corners.items()}
            seeds = [
                seed for seed in figures.evidence.sweep.seeds if all(item.get(seed) is not None for item in values.values())
            ]
            effects = _effects([{corner: float(item[seed] or 0.0) for corner, item in values.items()} for seed in seeds])
            if seeds:
                cells = [effect.text(FIGURES[name]) for effect in effects]
                rows.append([figures.evidence.rate(rate), FIGURES[name].name, str(len(seeds)), *cells])
    return _table(["lr", "figure", "seeds", "of the likelihood", "of the mask", "together, beyond their sum"], rows)


def _effects(values: Sequence[Mapping[tuple[bool, bool], float]]) -> tuple[Estimate, Estimate, Estimate]:
    """Of a 2 × 2 design, over seeds: mean effect of each factor, and their interaction."""
    first = [(v[True, True] + v[True, False] - v[False, True] - v[False, False]) / 2 for v in values]
    second = [(v[True, True] + v[False, True] - v[True, False] - v[False, False]) / 2 for v in values]
    both = [v[True, True] - v[True, False] - v[False, True] + v[False, False] for v in values]
    return interval(first), interval(second), interval(both)


def _overhead(figures: Figures) -> str:
    rows = []
    for objective in figures.evidence.sweep.axes["objective"]:
        key = (objective,)
        if not figures.evidence.seeds(key):
            continue
        cells = [figures.cell(name, key) for name in OVERHEAD]
        ratio = figures.against("step", key, (BASELINE,))
        beside = "1" if objective == BASELINE else ratio.text(FIGURES["step"], ratio=True)
        rows.append([objective, str(len(figures.evidence.seeds(key))), *cells, beside])
    return _table(["objective", "seeds", *(FIGURES[name].name for name in OVERHEAD), "step, ratio to GRPO's"], rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "Not run yet.\n"
    used = [index for index in range(len(columns)) if any(row[index] != "–" for row in rows)]
    return markdown([columns[index] for index in used], [[row[index] for index in used] for row in rows])

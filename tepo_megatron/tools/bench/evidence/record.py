"""Raw metrics of a sweep as small text files in the repository, one per combination of choices."""

from __future__ import annotations

import csv
import datetime
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

from tepo_megatron.run.metrics.metrics import read_metrics
from tepo_megatron.tools.results import describe_machine
from tepo_megatron.tools.sweep.file import SweepFile, SweepRun, read_sweep, runs_of
from tepo_megatron.tools.sweep.runner import is_done

COLUMNS = (
    *("accuracy/greedy", "eval/sampled/avg@16", "eval/sampled/pass@1", "eval/sampled/pass@4", "eval/sampled/pass@16"),
    *("reward/mean", "reward/std", "response_len/mean", "response_len/truncated", "groups/zero_variance"),
    *("groups/drawn", "groups/kept", "loss", "grad_norm", "lr", "update/skipped", "entropy/mean", "entropy/delta"),
    *("entropy/delta_masked", "entropy/delta_unmasked", "mask/fraction", "kl/mean", "kl/masked", "ratio/mean", "ratio/min"),
    *("ratio/max", "clip/low", "clip/high", "mismatch/kl", "canary/rollouts_max_gap", "time/step", "time/rollout"),
    *("time/score", "time/update", "time/sync", "time/eval", "tokens/s"),
)
"""Columns kept of ``metrics.jsonl`` (docs/reference/metrics.md), with six digits."""

EvidenceRow = Mapping[str, float]
Key = tuple[str, ...]
"""Choices in the order of the sweep's axes."""


@dataclass(frozen=True)
class Evidence:
    """``runs``: combination → seed → rows."""

    sweep: SweepFile
    runs: Mapping[Key, Mapping[int, Sequence[EvidenceRow]]]
    dates: Mapping[str, str] = field(default_factory=dict)
    machines: Mapping[str, str] = field(default_factory=dict)
    """Run's name → machine and versions."""

    @property
    def keys(self) -> list[Key]:
        return list(dict.fromkeys(_key_of(run) for run in runs_of(self.sweep)))

    def seeds(self, key: Key) -> list[int]:
        return [seed for seed in self.sweep.seeds if seed in self.runs.get(key, {})]

    def rows(self, key: Key) -> list[Sequence[EvidenceRow]]:
        return [self.runs[key][seed] for seed in self.seeds(key)]

    def rate(self, name: str) -> str:
        return self.sweep.axes["lr"][name][0].partition("=")[2]


def _key_of(run: SweepRun) -> Key:
    return tuple(run.choices.values())


def collect(file: Path, folder: Path, results: Path) -> list[str]:
    """Copy the metrics of every finished run in ``folder`` into ``results``, keeping others; return the runs' names.

    Raises ValueError if ``results`` holds other settings, or a run's rows do not cover all steps.
    """
    sweep = read_sweep(file)
    settings = _settings(sweep)
    before = _read_head(results)
    if before and before["settings"] != settings:
        raise ValueError(f"{results} holds runs of other settings than {file} has; remove that folder to begin it anew")
    done = [run for run in runs_of(sweep, folder) if is_done(run)]
    known = dict(read(file, results).runs)
    dates = dict(before["dates"]) if before else {}
    machines = _by_run(before["machines"]) if before else {}
    here = _this_machine()
    for run in done:
        source = run.folder / "metrics.jsonl"
        rows = [_kept(row) for row in read_metrics(source)]
        if [row["step"] for row in rows] != list(range(len(rows))) or len(rows) < 2:
            raise ValueError(f"{source}: its rows are not those of the steps from 0 on; remove the run and repeat it")
        known[_key_of(run)] = {**known.get(_key_of(run), {}), run.seed: rows}
        ended = datetime.datetime.fromtimestamp(source.stat().st_mtime, datetime.UTC)
        date = ended.isoformat(timespec="minutes").removesuffix("+00:00") + "Z"
        if dates.get(run.name) != date:  # else it was collected earlier, on the machine where it ran
            dates[run.name], machines[run.name] = date, here
    results.mkdir(parents=True, exist_ok=True)
    for key, runs in known.items():
        (results / f"{'-'.join(key)}.csv").write_text(_as_csv(runs), encoding="utf-8")
    named: dict[str, list[str]] = {}
    for name, machine in sorted(machines.items()):
        named.setdefault(machine, []).append(name)
    head = {"machines": named, "seeds": list(sweep.seeds), "settings": settings, "dates": dict(sorted(dates.items()))}
    (results / "sweep.json").write_text(json.dumps(head, indent=1) + "\n", encoding="utf-8")
    return [run.name for run in done]


def read(file: Path, results: Path) -> Evidence:
    sweep = read_sweep(file)
    head = _read_head(results)
    if head is None:
        return Evidence(sweep, {})
    result = {}
    for key in dict.fromkeys(_key_of(run) for run in runs_of(sweep)):
        path = results / f"{'-'.join(key)}.csv"
        if path.is_file():
            result[key] = _from_csv(path.read_text(encoding="utf-8"))
    return Evidence(sweep, result, head["dates"], _by_run(head["machines"]))


def _this_machine() -> str:
    versions = {name: version(name) for name in ("torch", "megatron-core", "tepo-megatron")}
    versions["python"] = platform.python_version()
    return ", ".join([describe_machine().partition(", load")[0], *(f"{name} {number}" for name, number in versions.items())])


def _by_run(machines: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {name: machine for machine, names in machines.items() for name in names}


def _settings(sweep: SweepFile) -> dict[str, list[str]]:
    """Combination → overrides except seed and output, which must be equal for seeds of one combination."""
    own = ("seed=", "output=")
    return {"-".join(_key_of(run)): [item for item in run.overrides if not item.startswith(own)] for run in runs_of(sweep)}


def _read_head(results: Path) -> dict[str, Any] | None:
    path = results / "sweep.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _kept(row: Mapping[str, Any]) -> EvidenceRow:
    result = {name: float(row[name]) for name in COLUMNS if row.get(name) is not None}
    return {"step": int(row["step"]), **result}


def _as_csv(runs: Mapping[int, Sequence[EvidenceRow]]) -> str:
    used = [name for name in COLUMNS if any(name in row for rows in runs.values() for row in rows)]
    text = StringIO(newline="")
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["seed", "step", *used])
    for seed in sorted(runs):
        for row in runs[seed]:
            out.writerow([seed, row["step"], *(f"{row[name]:.6g}" if name in row else "" for name in used)])
    return text.getvalue()


def _from_csv(text: str) -> dict[int, list[EvidenceRow]]:
    result: dict[int, list[EvidenceRow]] = {}
    for line in csv.DictReader(StringIO(text)):
        result.setdefault(int(line["seed"]), []).append(dict(_numbers(line)))
    return result


def _numbers(line: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if name == "step":
            yield name, int(value)
        elif name != "seed" and value:
            yield name, float(value)

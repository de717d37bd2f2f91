"""Builds a report: one HTML file that loads nothing else.

Data is base64 of gzipped JSON, which HTML cannot misread; the script inserts texts as text, and the content security policy
permits only this script.
"""

import base64
import gzip
import hashlib
import html
import itertools
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

from tepo_megatron.runtime.files import write_atomically
from tepo_megatron.tasks.evaluate.estimators import T_975
from tepo_megatron.tools.report.runs import Run, changes, compared, run_groups
from tepo_megatron.tools.report.samples import FILES, SampleGroup, evenly, pack

SCRIPTS = (
    *("base", "scales", "plot", "chart", "overview", "curves", "compare", "time", "settings", "faults"),
    *("tokens", "samples", "main"),
)

_TOKENS_A_MEGABYTE, _CHARACTERS_A_MEGABYTE = 60_000, 400_000  # room for samples with per-token values, and as text


@dataclass(frozen=True)
class _Written:
    path: Path
    bytes: int
    runs: int
    samples: int
    goes_on: bool


def write_report(
    paths: Sequence[Path],
    output: Path,
    *,
    title: str = "",
    metrics: Sequence[str] = (),
    most_samples: int = 3000,
    megabytes: float = 5.0,
    refresh: int = 0,
) -> _Written:
    """``metrics``: patterns, empty for all. ``refresh``: seconds, 0: never. Raises ValueError if a path holds no run or a
    damaged file, or no metric matches.
    """
    runs = [Run.read(name, folder) for name, folder in Run.find(paths).items()]
    alone = {path.parent if path.name == "metrics.jsonl" else path for path in paths}
    in_sweep = [run for run in runs if run.folder not in alone]  # between two of these none goes on
    goes_on = any(run.goes_on for run in runs) or (refresh > 0 and any(run.wrote_lately for run in in_sweep))
    figures = _runs_data(runs, title, metrics, refresh if goes_on else 0)
    samples = _samples_data(runs, most_samples, megabytes)
    text = _render(figures["title"], figures, samples)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, text)
    count = sum(len(group["responses"]) for group in samples["groups"])
    return _Written(output, output.stat().st_size, len(runs), count, goes_on)


def _render(title: str, figures: Mapping[str, Any], samples: Mapping[str, Any]) -> str:
    web = resources.files("tepo_megatron.tools.report") / "web"
    style = (web / "style.css").read_text(encoding="utf-8")
    script = "\n".join((web / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    parts = {
        "title": html.escape(title),
        "policy": (
            f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:;"
            f" script-src '{_digest(script)}'; style-src '{_digest(style)}'"
        ),
        "style": style,
        "script": script,
        "figures": _packed(figures),
        "samples": _packed(samples),
    }
    template = (web / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda result: parts[result[1]], template)


def _packed(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("utf-8", "backslashreplace"), 6, mtime=0)).decode("ascii")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _runs_data(runs: Sequence[Run], title: str, metrics: Sequence[str], refresh: int) -> dict[str, Any]:
    names = dict.fromkeys(key for run in runs for row in run.rows for key in row if key != "step")
    shown = [name for name in names if not metrics or any(fnmatchcase(name, item) for item in metrics)]
    begins = any(run.goes_on and not any(row["step"] for row in run.rows) for run in runs)
    if metrics and names and not shown and not begins:  # row 0 lacks most
        raise ValueError(f"no metric is called {' or '.join(metrics)}; there are {', '.join(sorted(names))}")
    clock = ("time/", "idle/", "lost/resume", "lost/rollback")  # for hours and the tab Time
    packed = [name for name in names if name in shown or name.startswith(clock)]
    groups = run_groups(runs)
    place = {index: number for number, (_, members) in enumerate(groups) for index in members}
    return {
        "title": title or _title(runs),
        "made": round(time.time()),
        "refresh": refresh,
        "metrics": shown,
        "groups": [{"label": label, "runs": members} for label, members in groups],
        "runs": [{**_run_data(run, packed), "group": place[index]} for index, run in enumerate(runs)],
        "settings": compared([run.settings for run in runs]),
        "t": T_975,
    }


def _title(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        name = json.loads(runs[0].settings.get("name", '""'))
        return f"{runs[0].name}: {name}" if name else runs[0].name
    names = [run.name for run in runs[:4]] + ([f"{len(runs) - 4} more"] if len(runs) > 4 else [])
    parents = {run.folder.resolve().parent.name for run in runs}
    return f"{len(runs)} runs of {parents.pop()}" if len(parents) == 1 else " · ".join(names)


def _run_data(run: Run, metrics: Sequence[str]) -> dict[str, Any]:
    columns = {name: [_number(row.get(name)) for row in run.rows] for name in metrics}
    return {
        "name": run.name,
        "folder": str(run.folder),
        "said": run.said,
        "goes_on": run.goes_on,
        "steps": json.loads(run.settings.get("train.steps", "null")),
        "x": [row["step"] for row in run.rows],
        "columns": {name: values for name, values in columns.items() if any(value is not None for value in values)},
        "faults": run.faults,
        "events": [(step, text, _number(value)) for step, text, value in run.events],
        "hangs": run.hangs,
        "changes": [changes(*pair) for pair in itertools.pairwise([*run.earlier, run.settings])],
    }


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _samples_data(runs: Sequence[Run], most: int, megabytes: float) -> dict[str, Any]:
    chosen: list[SampleGroup] = []
    recorded: dict[str, int] = {}
    for kind in ("tokens", *FILES):
        room = int(megabytes * (_TOKENS_A_MEGABYTE if kind == "tokens" else _CHARACTERS_A_MEGABYTE))
        groups = [group for index, run in enumerate(runs) for group in SampleGroup.read(index, run.folder, kind)]
        recorded[kind] = sum(len(group.responses) for group in groups)
        chosen += evenly(groups, most, room)
    with_tokens = (group for group in chosen if group.kind == "tokens")  # run by run
    tokens = {run: pack(list(groups)) for run, groups in itertools.groupby(with_tokens, lambda group: group.run)}
    chosen = [group for group in chosen if group.kind != "tokens" or "at" in group.responses[0]]
    names = ("run", "kind", "step", "problem", "prompt", "answer", "source")
    data = [{name: getattr(group, name) for name in names} | {"responses": _finite(group.responses)} for group in chosen]
    return {"groups": data, "recorded": recorded, "tokens": tokens}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return _number(value) if isinstance(value, float) else value

"""The tables of ``tepo faults``, for terminal and Markdown."""

from __future__ import annotations

import datetime
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tepo_megatron.tools.faults.run import CLASSES, ENDING
from tepo_megatron.tools.faults.silent import CHECKS
from tepo_megatron.tools.faults.workshop import OutcomeLog
from tepo_megatron.tools.results import describe_machine, markdown

COLUMNS = ("faults", "injected", "survived", "refused", "lost", "recovery, median", "longest")
SILENT_COLUMNS = ("silent fault", "caught by", "prompt", "cache", "rollouts", "smallest error caught, as a share of the whole")


LONGEST = 64

INTRODUCTION = """# Faults, injected

The command `tepo faults` injects faults into tiny runs: the model of this package, two trainer ranks and a server with two
workers on a CPU, or one rank that replays rollouts; in two lanes side by side, of which one has the kills. It wrote this
page. *survived*: the run went on, or was resumed, and its metrics, rollouts and weights are those of a run that nothing
disturbed, to the last bit. *refused*: it stopped, or did not begin, with a sentence, and nothing is damaged. *lost*: anything
else, also a traceback, or a process that is left. What a user sees of each fault, and what to do, is in
[operations](../guides/operations.md).
"""
SILENT_INTRODUCTION = """## Silent faults

Digests see what happens to weights on their way. These faults come behind them: inside a vLLM worker, between the arrival
of a parameter and its use, or in what is no parameter at all. Three canaries can see them ([numerics](numerics.md)): the
fixed *prompt*, the prompt through the prefix *cache*, and the *rollouts* that are trained on; and the *version* that a
server says with every response. In the columns, in nats: the worst token of the prompt, the difference through the cache,
the mean difference in the worst group of rollouts, all with the whole error. An error of size s is right + s · (wrong −
right), of weights, buffers or temperature; sizes were tried from 1 down by tens until none was seen. What is stale is one
optimizer step old, on 32 responses at a learning rate of 5e-5: the nats depend on how far a step goes. A false alarm would
be a line without a fault that was caught.
"""
_ESCAPED = str.maketrans({"|": "\\|", "<": "&lt;", "`": "'", "*": "\\*", "_": "\\_", "[": "\\[", "]": "\\]"})


def table(record: OutcomeLog) -> list[tuple[str, ...]]:
    rows, all_entries = [], list[dict[str, Any]]()
    for kind in CLASSES:
        entries = list(record.outcomes(kind.name))
        if entries:
            rows.append(_row(f"{kind.name}: {kind.title}", entries))
            all_entries += entries
    endings = list(record.outcomes(ENDING))
    if endings:
        rows.append(_row("the end of the live run after all of them: weights and metrics, bit for bit", endings))
    return [*rows, _row("all", [*all_entries, *endings])]


def lost(record: OutcomeLog) -> list[str]:
    """One line per fault neither survived nor refused."""
    names = [*(kind.name for kind in CLASSES), ENDING]
    entries = [(name, entry) for name in names for entry in record.outcomes(name)]
    return [f"{name}: {entry['fault']}: {entry['said']}" for name, entry in entries if entry["result"] == "lost"]


def _row(name: str, entries: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    results = Counter(entry["result"] for entry in entries)
    seconds = [entry["recovery_s"] for entry in entries if entry["recovery_s"] is not None]
    times = (f"{statistics.median(seconds):.1f} s", f"{max(seconds):.1f} s") if seconds else ("–", "–")
    counts = (str(results[result]) for result in ("survived", "refused", "lost"))
    return (name, str(len(entries)), *counts, *times)


def silent_table(record: OutcomeLog) -> list[tuple[str, ...]]:
    """The check that found each silent fault, differences in nats at the whole error, and the smallest error found."""
    rows = []
    for entry in record.outcomes("silent"):
        details = entry["details"]
        if not details:
            continue
        whole = details["found"][0]
        figures = whole.get("figures", {})
        caught = [check for check in CHECKS if check in whole["caught"]]
        cells = [f"{figures[name]:.1e}" if name in figures else "–" for name in ("prompt", "cache", "rollouts")]
        smallest = [f"{check} {size:g}" for check, size in details["smallest"].items() if size is not None]
        rows.append((entry["fault"], ", ".join(caught) or "–", *cells, ", ".join(smallest) or "–"))
    return rows


def write_markdown(record: OutcomeLog, path: Path, *, command: str) -> Path:
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    parts = [INTRODUCTION, f"`{command}`, {date}, {describe_machine()}.", "", markdown(COLUMNS, table(record))]
    if missing := [kind.name for kind in CLASSES if not any(record.outcomes(kind.name))]:
        parts += [f"Not injected in this record: {', '.join(missing)}.", ""]
    if rows := lost(record):
        parts += ["Lost:", "", *(f"- {_shown(row, record)}" for row in rows), ""]
    if silent := silent_table(record):
        parts += [SILENT_INTRODUCTION, markdown(SILENT_COLUMNS, silent)]
    parts += ["## Every fault", ""]
    for kind in CLASSES:
        if entries := list(record.outcomes(kind.name)):
            shown = entries if len(entries) <= LONGEST else [entry for entry in entries if entry["result"] == "lost"]
            parts += [
                f"### {kind.name}",
                "",
                *([f"Of {len(entries)} those that were lost."] if shown is not entries else []),
                "",
            ]
            cells = [
                (_shown(entry["fault"], record), entry["result"], _seconds(entry), _shown(entry["said"], record))
                for entry in shown
            ]
            parts += [markdown(("fault", "result", "recovery", "what was said"), cells)]
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


def _shown(text: str, record: OutcomeLog) -> str:
    for folder, name in ((record.path.parent, "OUT"), (Path(__file__).parents[2], "tepo_megatron")):
        for form in (str(folder.resolve()), str(folder)):
            text = text.replace(form, name)
    return re.sub(r"\s+", " ", text)[:240].translate(_ESCAPED)


def _seconds(entry: dict[str, Any]) -> str:
    return "–" if entry["recovery_s"] is None else f"{entry['recovery_s']:.1f} s"

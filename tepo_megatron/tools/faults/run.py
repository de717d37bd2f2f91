"""``tepo faults`` injects every class in parallel lanes and resumes an interrupted call."""

from __future__ import annotations

import datetime
import json
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tepo_megatron.runtime.files import LogFile
from tepo_megatron.runtime.text import echo
from tepo_megatron.tools.faults import (
    borders,
    input_faults,
    machine_faults,
    record_faults,
    run_faults,
    silent,
    stop_faults,
    strangers,
)
from tepo_megatron.tools.faults.processes import end_tree, wait_until
from tepo_megatron.tools.faults.workshop import FaultClass, FaultOutcome, Workshop
from tepo_megatron.tools.results import Report, Table, markdown

FaultClasses = Sequence[type[FaultClass]]
Say = Callable[[str], None]
_KILLS, _HANGS, _RESTARTS = run_faults.LIVE
_LIVE = (_KILLS, *record_faults.LIVE, _HANGS, _RESTARTS, *run_faults.SERVED, *strangers.FAULTS)
_REPLAYED = (*stop_faults.FAULTS, *record_faults.REPLAYED, *machine_faults.FAULTS)
CLASSES: Mapping[str, type[FaultClass]] = {
    kind.name: kind for kind in (*input_faults.FAULTS, *borders.FAULTS, *_REPLAYED, *silent.FAULTS, *_LIVE)
}
_ENDING = "ending"


def run(classes: FaultClasses, folder: Path, *, seed: int, quick: bool, say: Say) -> _OutcomeLog:
    """Raises ValueError if the record has another seed, RuntimeError if a lane ends early."""
    record = _OutcomeLog(folder, seed=seed, quick=quick)
    shutil.rmtree(folder / "begun", ignore_errors=True)
    (folder / "begun").mkdir()
    live = [kind for kind in classes if kind in _LIVE]
    first = live if quick else live[:1]  # quick: one live run serves all
    others = sorted((kind for kind in classes if kind not in _LIVE), key=lambda kind: kind not in _REPLAYED)  # long ones first
    own = {"first": first, "second": live[len(first) :], "third": others}
    chosen = {name: kinds for name, kinds in own.items() if kinds}
    if len(chosen) < 2:
        _run_lane(next(iter(chosen), "first"), classes, record, say)
        return record
    # A lane that has done its own goes on with what no other has begun.
    _side_by_side({name: [*kinds, *own["third"][::-1]] for name, kinds in chosen.items()}, folder, seed=seed, quick=quick)
    return _OutcomeLog(folder, seed=seed, quick=quick)


def _side_by_side(chosen: dict[str, list[type[FaultClass]]], folder: Path, *, seed: int, quick: bool) -> None:
    running: dict[str, subprocess.Popen[bytes]] = {}
    program = f"import runpy; runpy.run_module({__name__!r}, run_name='__main__')"  # -m: a replay's fork would import it again
    try:
        for lane, kinds in chosen.items():
            only = ",".join(dict.fromkeys(kind.name for kind in kinds))
            arguments = json.dumps({"lane": lane, "only": only, "folder": str(folder), "seed": seed, "quick": quick})
            command = [sys.executable, "-c", program, arguments]
            running[lane] = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        wait_until(lambda: all(process.poll() is not None for process in running.values()), 86400.0, "the end of the lanes")
    finally:
        for process in running.values():
            end_tree(process)
    if failed := [f"{lane} (exit code {process.returncode})" for lane, process in running.items() if process.returncode]:
        raise RuntimeError(f"not all faults were injected: the lane {' and '.join(failed)} ended early; what it said is above")


def _run_lane(lane: str, classes: FaultClasses, record: _OutcomeLog, say: Say) -> None:
    workshop = Workshop(record.folder / "work", lane=lane, quick=record.quick, say=say)
    try:
        for kind in classes:
            numbers = range(kind.count(quick=record.quick))
            try:
                (record.folder / "begun" / kind.name).touch(exist_ok=False)
            except FileExistsError:
                continue  # another lane's
            if missing := [number for number in numbers if not record.has(kind.name, number)]:
                say(f"{kind.name}: {len(missing)} of {len(numbers)} to inject: {kind.title}")
                _inject(kind(workshop), missing, record, say)
        number = int(lane != "first")
        if not record.has(_ENDING, number) and (wrong := workshop.finish_run()) is not None:
            record.add(_ENDING, number, FaultOutcome("the end of the live run", "lost" if wrong else "survived", wrong))
    finally:
        workshop.close()


def _inject(faults: FaultClass, numbers: Sequence[int], record: _OutcomeLog, say: Say) -> None:
    with closing(faults):
        for number in numbers:
            start = time.monotonic()
            try:
                outcome = faults.inject(number, random.Random(f"{record.seed}/{faults.name}/{number}"))
            except Exception as error:  # any error counts as a lost fault; try the next one
                echo(traceback.format_exc(), err=True)
                said = f"the harness came to no end: {type(error).__name__}: {error}"
                outcome = FaultOutcome(f"number {number}", "lost", said)
            record.add(faults.name, number, outcome)
            seconds = time.monotonic() - start
            say(f"  {faults.name} {number + 1}: {outcome.fault}: {outcome.result} after {seconds:.0f} s. {outcome.said[:200]}")


_LONGEST = 18
_INTRODUCTION = """# Faults, injected

`tepo faults` wrote this page. *survived*: metrics, rollouts and weights are those of an undisturbed run, to the last bit.
*refused*: the run stopped, or did not begin, with a sentence, and nothing is damaged. *lost*: anything else, also a traceback,
or a process that is left. What a user sees of each fault, and what to do, is in [operations](../guides/operations.md).
"""
_SILENT_INTRODUCTION = """## Silent faults

They come after the digests, in a vLLM worker; the checks that can show them are in [numerics](../reference/numerics.md). In the
columns, in nats: the worst token of the prompt, the difference through the cache, the mean difference in the worst group of
rollouts. An error of size s is right + s · (wrong − right); sizes were tried from 1 down by tens until none was seen. What is
stale is one optimizer step old. A false alarm would be a line without a fault that was caught.
"""
_ESCAPED = str.maketrans({"|": "\\|", "<": "&lt;", "`": "'", "*": "\\*", "_": "\\_", "[": "\\[", "]": "\\]"})


class _OutcomeLog:
    """Raises ValueError if the folder holds another seed or count."""

    def __init__(self, folder: Path, *, seed: int, quick: bool) -> None:
        self.folder, self.seed, self.quick = folder, seed, quick
        self._path = folder / "outcomes.jsonl"
        self._done: dict[tuple[str, int], dict[str, Any]] = {}
        head = {"seed": seed, "quick": quick}
        if not self._path.exists():
            self._append(head)
        text = self._path.read_text(encoding="utf-8")
        first, *lines = [line for line in text.split("\n") if line.endswith("}")] or [""]  # the last may be cut off
        if not first or json.loads(first) != head:
            raise ValueError(
                f"{self._path} holds the outcomes of {first or 'nothing'}, and {json.dumps(head)} was asked for; give another "
                "--output, or remove the folder"
            )
        self._done = {(entry["class"], entry["number"]): entry for entry in map(json.loads, lines)}
        if not text.endswith("\n"):
            LogFile(self._path).append(b"\n")  # keeps a cut-off line on its own line; readers skip it

    def has(self, name: str, number: int) -> bool:
        return (name, number) in self._done

    def add(self, name: str, number: int, outcome: FaultOutcome) -> None:
        entry = {"class": name, "number": number, **asdict(outcome)}
        self._append(entry)
        self._done[name, number] = entry

    def outcomes(self, name: str) -> list[dict[str, Any]]:
        return [self._done[key] for key in sorted(self._done) if key[0] == name]

    def _append(self, entry: dict[str, Any]) -> None:
        LogFile(self._path).append((json.dumps(entry, default=str) + "\n").encode())

    @property
    def _outcomes(self) -> dict[str, list[dict[str, Any]]]:
        return {name: entries for name in (*CLASSES, _ENDING) if (entries := self.outcomes(name))}

    @property
    def lost(self) -> list[str]:
        entries = [(name, entry) for name, outcomes in self._outcomes.items() for entry in outcomes]
        return [f"{name}: {entry['fault']}: {entry['said']}" for name, entry in entries if entry["result"] == "lost"]

    def table(self) -> Table:
        titles = {name: f"{name}: {kind.title}" for name, kind in CLASSES.items()}
        titles[_ENDING] = "the end of the live run after all of them: weights and metrics, bit for bit"
        rows = [_row(titles[name], entries) for name, entries in self._outcomes.items()]
        rows.append(_row("all", [entry for entries in self._outcomes.values() for entry in entries]))
        return Table(("faults", "injected", "survived", "refused", "lost", "recovery, median", "longest"), rows)

    def silent_table(self) -> Table:
        rows = []
        for entry in (entry for entry in self.outcomes("silent") if entry["details"]):
            whole, figures = entry["details"]["found"][0], entry["details"]["found"][0].get("figures", {})
            caught = [check for check in silent.CHECKS if check in whole["caught"]]
            cells = [f"{figures[name]:.1e}" if name in figures else "–" for name in ("prompt", "cache", "rollouts")]
            smallest = [f"{check} {size:g}" for check, size in entry["details"]["smallest"].items() if size is not None]
            rows.append((entry["fault"], ", ".join(caught) or "–", *cells, ", ".join(smallest) or "–"))
        columns = ("silent fault", "caught by", "prompt", "cache", "rollouts", "smallest error caught, as a share of the whole")
        return Table(columns, rows)

    def write_markdown(self, path: Path, *, command: str) -> Path:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
        parts = [_INTRODUCTION, f"`{command}`, {date}, {Report.machine()}.", "", markdown(*self.table()[:2])]
        if missing := [name for name in CLASSES if name not in self._outcomes]:
            parts += [f"Not injected in this record: {', '.join(missing)}.", ""]
        if self.lost:
            parts += ["Lost:", "", *(f"- {self._shown(line)}" for line in self.lost), ""]
        if (table := self.silent_table()).rows:
            parts += [_SILENT_INTRODUCTION, markdown(*table[:2])]
        parts += ["## Fault by fault", ""]
        for name, entries in self._outcomes.items():
            if name == "silent":
                entries = [entry for entry in entries if not entry["details"]]  # the others have the table above
            if name != _ENDING and 0 < len(entries) <= _LONGEST:
                alike = defaultdict[tuple[str, ...], list[str]](list)
                for entry in entries:
                    text = self._shown(entry["said"].replace(entry["fault"], "…"))
                    alike[entry["result"], _seconds(entry["recovery_s"]), text].append(self._shown(entry["fault"]))
                rows = [(", ".join(faults), *row) for row, faults in alike.items()]
                parts += [f"### {name}", "", markdown(("fault", "result", "recovery", "what was said"), rows)]
        path.write_text("\n".join(parts), encoding="utf-8")
        return path

    def _shown(self, text: str) -> str:
        for folder, name in ((self.folder, "OUT"), (Path(__file__).parents[2], "tepo_megatron")):
            for form in (str(folder.resolve()), str(folder)):
                text = text.replace(form, name)
        return re.sub(r"\s+", " ", text)[:160].translate(_ESCAPED)


def _row(name: str, entries: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    results = Counter(entry["result"] for entry in entries)
    seconds = [entry["recovery_s"] for entry in entries if entry["recovery_s"] is not None]
    times = (_seconds(statistics.median(seconds)), _seconds(max(seconds))) if seconds else ("–", "–")
    return (name, str(len(entries)), *(str(results[result]) for result in ("survived", "refused", "lost")), *times)


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.1f} s"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM also ends all started processes
    args = json.loads(sys.argv[1])
    lane, chosen = args.pop("lane"), [CLASSES[name] for name in args.pop("only").split(",")]
    _run_lane(lane, chosen, _OutcomeLog(Path(args.pop("folder")), **args), partial(echo, err=True))

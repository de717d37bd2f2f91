"""Keeps the finished runs of a sweep in docs/results/data, and gives the sweep those that other machines finished.

    python -m examples.evidence.second.keep tuning out/evidence-second/tuning

Call it before ``tepo sweep``, on a new machine, and after it. A run that is brought back has the kept figures of its steps
and an empty folder in place of its model, so that the sweep and its tables take it as done.
"""

import datetime
import json
import os
import sys
from pathlib import Path

from examples.evidence.figures import Evidence
from tepo_megatron.tools.sweep import runs_of

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[2] / "docs/results/data/evidence-second"


def keep(name: str, output: Path, results: Path = RESULTS) -> tuple[int, int]:
    """Returns how many runs were brought back, and how many of the sweep are done."""
    file, results = FOLDER / f"{name}.yaml", results / name
    evidence, restored = Evidence.read(file, results), 0
    for run in runs_of(evidence.sweep, output):
        rows = evidence.runs.get(tuple(run.choices.values()), {}).get(run.seed)
        if rows is None or run.is_done:
            continue
        if run.folder.exists():
            raise ValueError(f"{run.folder} is not finished, and {results} has that run; remove the folder")
        (run.folder / "model").mkdir(parents=True)
        (run.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        when = datetime.datetime.strptime(evidence.dates[run.name], "%Y-%m-%dT%H:%M%z").timestamp()
        os.utime(run.folder / "metrics.jsonl", (when, when))  # so that it counts as the other machine's
        restored += 1
    return restored, Evidence.collect(file, output, results)


if __name__ == "__main__":
    print("brought back {}, done {}".format(*keep(sys.argv[1], Path(sys.argv[2]))))

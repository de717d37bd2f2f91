"""The terms of a plan against bytes that engines hold and write: counted, tensor by tensor and file by file."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from scripts.studies.measure_plan import MODEL, compare, configs, counts
from tepo_megatron.tools.bench.recipes import make_model
from tests.support.launch import run_dist

TOLERANCE = {"weights": 0.01, "gradients": 0.01, "optimizer": 0.01, "a step's batch": 0.03}
CHECKPOINT = 0.02
"""Headers of files, and boxes that are named one by one, come on top of the values."""


def of_each_run(rank: int, world: int, folder: Path) -> dict[str, dict[str, int]]:
    warnings.filterwarnings("ignore")
    os.environ["WORLD_SIZE"] = str(world)
    return {name: counts(config, folder / name) for name, config in configs(folder / "model").items()}


def test_terms_are_within_a_few_percent_of_what_is_counted(tmp_path: Path) -> None:
    make_model(tmp_path / "model", MODEL)
    ranks = run_dist(2, of_each_run, tmp_path)
    for name, config in configs(tmp_path / "model").items():
        for term in compare(name, config, [rank[name] for rank in ranks]):
            print(f"{term.run:32} {term.term:20} {term.planned:14,.0f} {term.counted:14,.0f} {term.error:+.2%}")
            assert abs(term.error) <= TOLERANCE.get(term.term, CHECKPOINT), term

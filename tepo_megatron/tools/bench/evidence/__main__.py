"""Collects the runs of the evidence's sweeps, and makes tables and pictures of docs/results/evidence.md.

    tepo sweep examples/evidence/tiny.yaml                 # resumes if interrupted
    tepo sweep examples/evidence/stack_machine.yaml
    tepo sweep examples/evidence/overhead.yaml
    python -m tepo_megatron.tools.bench.evidence --tiny out/evidence-tiny --stack-machine out/evidence-stack-machine \\
        --overhead out/evidence-overhead

Folders may be unfinished or omitted: earlier data stays in docs/results/data/evidence, and the page lists the finished seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tepo_megatron.tools.bench.evidence.page import SWEEPS, make


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tepo_megatron.tools.bench.evidence", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name in SWEEPS:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=Path, metavar="FOLDER", help=f"output of examples/evidence/{name}.yaml"
        )
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[4], help="repository whose page is made")
    given = parser.parse_args()
    folders = {name: folder for name in SWEEPS if (folder := getattr(given, name)) is not None}
    try:
        for line in make(given.root, folders):
            print(line)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()

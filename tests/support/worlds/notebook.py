"""Runs the code cells of a notebook in one process, as a kernel does; without Jupyter, so that a magic is an error.

    python -m tests.support.worlds.notebook NOTEBOOK '{"steps": 2}'

The cell that is tagged ``parameters`` is followed by the values that are given, as papermill does it.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main(path: str, given: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(Path(path).read_text())["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path}, cell {number}", "exec"), names)
        if "parameters" in cell["metadata"].get("tags", ()):
            names.update(json.loads(given))


if __name__ == "__main__":
    main(*sys.argv[1:])

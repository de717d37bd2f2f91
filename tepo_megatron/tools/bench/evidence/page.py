"""docs/results/evidence.md: hand-written text; the command fills in tables between comments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tepo_megatron.tools.bench.evidence.pictures import draw, shown
from tepo_megatron.tools.bench.evidence.record import Evidence, collect, read
from tepo_megatron.tools.bench.evidence.tables import make_tables

SWEEPS = ("tiny", "stack_machine", "overhead")
MOST_BYTES = 5_000_000
"""For all data kept of the runs."""


def make(root: Path, folders: Mapping[str, Path]) -> list[str]:
    """Collect from ``folders`` (sweep → its output), then write tables, pictures and page; return lines of progress.

    Raises ValueError for a missing folder, data that does not fit, or a page without a place for a table.
    """
    said = []
    for name, folder in folders.items():
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; give the output of examples/evidence/{name}.yaml")
        done = collect(root / f"examples/evidence/{name}.yaml", folder, _results_of(root, name))
        said.append(f"{folder}: {len(done)} runs are done")
    tiny, second, overhead = (evidence_of(root, name) for name in SWEEPS)
    tables = make_tables(tiny, second, overhead)
    pictures = draw(tiny, second, overhead, root / "docs/images")
    written = root / "docs/results/data/evidence/tables.md"
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text(as_text(tables), encoding="utf-8")
    page = root / "docs/results/evidence.md"
    page.write_text(fill(page.read_text(encoding="utf-8"), {**tables, **shown(tiny, second, overhead)}), encoding="utf-8")
    size = sum(path.stat().st_size for path in written.parent.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        raise ValueError(f"{written.parent} has {size} bytes, more than {MOST_BYTES}; keep fewer columns")
    return [*said, *(f"wrote {path}" for path in (written, page, *pictures)), f"{written.parent}: {size} bytes"]


def _results_of(root: Path, name: str) -> Path:
    return root / "docs/results/data/evidence" / name


def evidence_of(root: Path, name: str) -> Evidence:
    return read(root / f"examples/evidence/{name}.yaml", _results_of(root, name))


def as_text(tables: Mapping[str, str]) -> str:
    return "\n".join(f"## {name}\n\n{table}" for name, table in tables.items())


def fill(text: str, tables: Mapping[str, str]) -> str:
    """The page with each table or picture between ``<!-- NAME -->`` and ``<!-- end -->``. Raises ValueError unless each has
    one place."""
    names = re.findall(r"<!-- (?!end)([\w-]+) -->", text)
    if sorted(names) != sorted(tables):
        raise ValueError(
            f"docs/results/evidence.md has places for {', '.join(sorted(names))}; the tables are {', '.join(sorted(tables))}"
        )
    return re.sub(
        r"<!-- (?!end)([\w-]+) -->\n.*?<!-- end -->",
        lambda result: f"<!-- {result[1]} -->\n\n{tables[result[1]]}\n<!-- end -->",
        text,
        flags=re.S,
    )

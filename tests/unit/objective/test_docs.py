"""docs/reference/tepo.md names code, fields and tests that exist, and every field that is our interpretation."""

import ast
import re
from pathlib import Path

import pytest

from tepo_megatron.config.schema import schema_rows

ROOT = Path(__file__).parents[3]
ROOMS = ("tepo_megatron/core/objective", "tests/unit/objective", ".")
LINES = [line for line in (ROOT / "docs/reference/tepo.md").read_text().splitlines() if line.startswith("| ")]
ROWS = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in LINES]
TABLE = [row for row in ROWS if len(row) == 5 and row[0] != "line"]


def _quoted(cells):
    return [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]


def _names(path):
    """What a file defines: functions, classes, their methods as Class.method, and names that are assigned."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}.{inner.name}" for inner in getattr(node, "body", []) if isinstance(inner, ast.FunctionDef)}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("place", sorted({text for row in TABLE for text in _quoted([row[2], row[4]])}))
def test_every_place_in_code_and_tests_exists(place):
    file, _, name = place.partition(":")
    paths = [ROOT / room / file for room in ROOMS if (ROOT / room / file).is_file()]
    assert len(paths) == 1, f"{file} is {len(paths)} files"
    assert name in _names(paths[0])


def test_every_field_of_the_configuration_exists_and_takes_the_value():
    rows = [(row.path, f"{row.allowed} {row.when}") for row in schema_rows()]
    for text in {text for row in TABLE for text in _quoted([row[3]])}:
        field, _, value = text.partition(": ")
        taken = [allowed for path, allowed in rows if path == f"objective.{field}"]
        kinds = [allowed for path, allowed in rows if f"{path}.kind" == f"objective.{field}"]
        assert taken or kinds, f"objective.{field} is no field"
        if value and field != "preset":
            words = re.findall(r"\w+", " ".join(taken + kinds))
            assert value in words, f"objective.{field} does not take {value}"


def test_every_field_that_is_our_interpretation_is_in_a_table():
    listed = {text.partition(": ")[0] for row in TABLE for text in _quoted([row[3]]) if row[1] == "our interpretation"}
    sections = {"ratio": "ratio.kind", "trust_region": "trust_region.low"}
    ours = {row.path.removeprefix("objective.") for row in schema_rows() if "ur interpretation" in row.description}
    assert ours
    assert {sections.get(name, name) for name in ours} - listed == set()


def test_statuses_are_those_that_the_page_explains():
    explained = {row[0] for row in ROWS if len(row) == 2}
    assert {row[1] for row in TABLE} - explained == {"stated in part", "stated in one summary"}

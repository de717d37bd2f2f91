"""What the documents name exists: files, functions, tests, links, commands, fields; and they agree on versions and counts."""

import ast
import pkgutil
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tepo_megatron.config import RunConfig
from tepo_megatron.config.schema import schema_rows

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tepo_megatron"
FOLDERS = ("tepo_megatron", "tests", "docs", "scripts", "examples", "docker", "requirements", ".ci")
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md"))
    if ROOT / "docs/results/data" not in path.parents
)

NAMED_AS_ABSENT = {"tepo_megatron.api"}
"""Names that a decision argues against."""

# Short forms: code by its path in the package or, in docs/reference/tepo.md, in objective/; a test by the name of its file.
HOMES = (ROOT, PACKAGE, PACKAGE / "objective", ROOT / "tests/unit/objective")
FILE = re.compile(
    r"(?P<path>[\w.-][\w./*-]*\.(?:py|cpp|sh|md|yaml|toml|txt|in|Dockerfile))(?::(?P<name>[A-Za-z_][\w.]*))?(?:\[.*\])?"
)
"""``path/to/file.py``, ``file.py:function``, ``file.py:Class.method``, ``test_file.py:test_name[case]``."""


@cache
def text_of(document: str) -> str:
    return (ROOT / document).read_text()


@cache
def spans_in(document: str) -> tuple[str, ...]:
    """Every piece of code between backticks, in order."""
    return tuple(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text_of(document), flags=re.M | re.S)))


@cache
def lines_in(document: str) -> tuple[tuple[str, ...], ...]:
    """The words of every line of code: of each piece between backticks, and of each line of a block."""
    blocks = re.findall(r"^```(?!mermaid)\w*\n(.*?)^```", text_of(document), re.M | re.S)
    lines = (*spans_in(document), *(line for block in blocks for line in block.splitlines()))
    return tuple(tuple(word.strip("\"'(),;") for word in line.split()) for line in lines)


def code_in(document: str) -> list[str]:
    return [word for line in lines_in(document) for word in line]


@cache
def names_in(path: Path) -> frozenset[str]:
    """The functions, classes, methods and constants that a file of Python defines."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{member.name}" for member in node.body if isinstance(member, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            found |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return frozenset(found)


@cache
def all_tests() -> frozenset[str]:
    return frozenset().union(*(names_in(path) for path in (ROOT / "tests").rglob("*.py")))


@cache
def resolve(path: str) -> list[Path]:
    """The files that a document means by ``path``."""
    for home in HOMES:
        if found := list(home.glob(path)):
            return found
    return [file for folder in FOLDERS for file in (ROOT / folder).rglob(path)] if "/" not in path else []


def is_ours(path: str) -> bool:
    """Whether a path that a document names is one of the repository, and not one of a run's output or of a user's."""
    first, _, rest = path.partition("/")
    if "NAME" in path:  # a placeholder
        return False
    if not rest:
        return path.endswith((".py", ".cpp"))
    return first in FOLDERS or (path.endswith((".py", ".cpp")) and (PACKAGE / first).is_dir())


def unknown_code(document: str) -> Iterator[str]:
    """What a document names of files, folders, functions and tests that are not there."""
    for word in code_in(document):
        if re.fullmatch(rf"(?:{'|'.join(map(re.escape, FOLDERS))})(/[\w.-]+)+/?", word) and "NAME" not in word:
            yield from [] if (ROOT / word).exists() else [word]
        match = FILE.fullmatch(word)
        if match is None or not is_ours(match["path"]):
            continue
        files = resolve(match["path"])
        if not files or (match["name"] and not any(match["name"] in names_in(file) for file in files)):
            yield word
    tests = [span.lstrip(":").partition("[")[0] for span in spans_in(document) if re.fullmatch(r":?test_\w+(\[.*\])?", span)]
    yield from (name for name in tests if name not in all_tests())


def dead_links(document: str) -> Iterator[str]:
    targets = re.findall(r"\]\(([^)\s]+)\)", text_of(document))
    relative = [target for target in targets if not re.match(r"[a-z]+:", target)]
    yield from (target for target in relative if not leads_somewhere(ROOT / document, target))


def leads_somewhere(document: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = (document.parent / path).resolve() if path else document
    if not anchor:
        return file.exists()
    headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M) if file.is_file() else []
    return anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@cache
def fields() -> frozenset[str]:
    paths = [row.path.split(".") for row in schema_rows()]
    found = {".".join(path[:length]) for path in paths for length in range(1, len(path) + 1)}
    for owner, file in {"engine": "trainer/megatron/engine.py", "objective": "core/objective/compose.py"}.items():
        found |= {f"{owner}.{name.rpartition('.')[2]}" for name in names_in(PACKAGE / file)}
    return frozenset(found)


def unknown_fields(document: str) -> Iterator[str]:
    pattern = re.compile(rf"((?:{'|'.join(RunConfig.model_fields)})(?:\.[a-z]\w*)+)([=(].*)?")
    named = [match[1] for word in code_in(document) if (match := pattern.fullmatch(word))]
    named = [re.sub(r"^(evaluate\.sets|teachers)\.\w+", r"\1.NAME", name) for name in named]
    files = re.compile(r".*\.(py|json|jsonl|parquet|yaml|safetensors|sqsh)")
    yield from (name for name in named if name not in fields() and not files.fullmatch(name))


def unknown_modules(document: str) -> Iterator[str]:
    for name in {word for word in code_in(document) if re.fullmatch(r"tepo_megatron(\.\w+)+", word)} - NAMED_AS_ABSENT:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            yield name


@cache
def commands() -> dict[str, frozenset[str]]:
    """``tepo``'s commands, each with its own sub-commands."""
    import typer.main

    from tepo_megatron.cli.main import app

    found = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {name: frozenset(getattr(command, "commands", {})) for name, command in found.items()}


def unknown_commands(document: str) -> Iterator[str]:
    for line in lines_in(document):
        for previous, word, following in zip(line, line[1:], (*line[2:], ""), strict=False):
            if previous.rpartition("/")[2] == "tepo" and re.fullmatch(r"[a-z]+", word):
                below = commands().get(word)
                if below is None or (below and following and not set(following.split("|")) <= below):
                    yield f"tepo {word} {following}"
            if previous == "make" and re.fullmatch(r"[a-z-]+", word) and not re.search(rf"^{word}:", text_of("Makefile"), re.M):
                yield f"make {word}"


@pytest.mark.parametrize("faults", [unknown_code, dead_links, unknown_fields, unknown_modules, unknown_commands])
def test_whatever_a_document_names_exists(faults: Callable[[str], Iterator[str]]) -> None:
    assert {document: unknown for document in DOCUMENTS if (unknown := list(faults(document)))} == {}


def test_one_range_of_pythons_is_stated_everywhere() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    versions = [f"3.{minor}" for minor in range(30) if f"3.{minor}.0" in SpecifierSet(project["requires-python"])]
    stated = ", ".join(versions[:-1]) + f" or {versions[-1]}"
    for document in ("README.md", "docs/reference/gpu.md", "scripts/common.sh"):
        assert f"Python {stated}" in text_of(document), document
    for script in ("scripts/setup_cpu.sh", "scripts/setup_launch.sh"):
        assert f"({stated})" in text_of(script), script
    assert [name.rpartition(" ")[2] for name in project["classifiers"] if "Python :: 3." in name] == versions
    low, high = re.findall(r"\(3, (\d+)\)", text_of("scripts/common.sh"))
    assert versions == [f"3.{minor}" for minor in range(int(low), int(high))]
    assert set(re.findall(r" (?:python)(3\.\d+)(?= )", text_of("scripts/common.sh"))) == set(versions)


def test_the_number_of_cpu_patches_is_the_decisions() -> None:
    from tepo_megatron.trainer.megatron.parallel.platform import Platform

    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven")
    number = words[len(Platform.cpu_patches())]
    decision = " ".join(text_of("docs/decisions/005-cpu-patches.md").split())
    assert f"{number} patches, and five more while its code runs" in decision


def test_the_tree_in_the_readme_has_every_part_of_the_package() -> None:
    block = text_of("README.md").split("## What is where")[1].split("```")[1]
    starts = [re.match(r" *((?:[\w.]+/? ?)+?)(?:  |$)", line) for line in block.splitlines()]
    named = {name for start in starts if start for name in start[1].split()}
    packages = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= named, packages - named
    assert not [name for name in named if not any((home / name).exists() for home in (ROOT, PACKAGE))]


@pytest.mark.parametrize("results", sorted(path.name for path in (ROOT / "docs/results/data").glob("*.md")))
def test_every_table_of_results_is_linked_or_quoted_as_it_was_written(results: str) -> None:
    if any(f"](data/{results})" in text_of(document) for document in DOCUMENTS):
        return
    rows = [line for line in text_of(f"docs/results/data/{results}").splitlines() if line.startswith("|")]
    quoted = {line for document in DOCUMENTS for line in text_of(document).splitlines()}
    assert rows
    assert not [row for row in rows if row not in quoted]


def test_the_tutorial_goes_through_every_example_of_ones_own_and_to_its_reference() -> None:
    """In the table, and in a part of its own, in this order."""
    rows = re.findall(r"^\| (\d+) \| `examples/(\w+)` \| .* \| \[.*\]\((\S+\.md)\)", text_of("docs/guides/tutorial.md"), re.M)
    assert {path.name for path in ROOT.glob("examples/own_*")} <= {example for _, example, _ in rows}
    assert len({reference for *_, reference in rows}) == len(rows)  # a page for each protocol
    parts = re.findall(r"^\*\*(\d+)\. ", text_of("docs/guides/tutorial.md"), re.M)
    assert parts == [number for number, *_ in rows] == [str(at + 1) for at in range(len(rows))]


# -- docs/reference/tepo.md: every line of the paper, and every field that is our interpretation

LINES = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text_of("docs/reference/tepo.md").splitlines() if line.startswith("| ")]
ROWS = [[cell.strip() for cell in line] for line in LINES]
TABLE = [row for row in ROWS if len(row) == 5 and row[0] != "line"]


def fields_of(row: list[str]) -> list[str]:
    return re.findall(r"`([^`]+)`", row[3])


def test_every_field_of_the_objective_exists_and_takes_the_value() -> None:
    rows = [(row.path, f"{row.allowed} {row.when}") for row in schema_rows()]
    for text in {text for row in TABLE for text in fields_of(row)}:
        field, _, value = text.partition(": ")
        taken = [allowed for path, allowed in rows if path == f"objective.{field}"]
        kinds = [allowed for path, allowed in rows if f"{path}.kind" == f"objective.{field}"]
        assert taken or kinds, f"objective.{field} is no field"
        if value and field != "preset":
            words = re.findall(r"\w+", " ".join(taken + kinds))
            assert value in words, f"objective.{field} does not take {value}"


def test_every_field_that_is_our_interpretation_is_in_a_table() -> None:
    listed = {text.partition(": ")[0] for row in TABLE for text in fields_of(row) if row[1] == "our interpretation"}
    sections = {"ratio": "ratio.kind", "trust_region": "trust_region.low"}
    ours = {row.path.removeprefix("objective.") for row in schema_rows() if "ur interpretation" in row.description}
    assert ours
    assert {sections.get(name, name) for name in ours} - listed == set()


def test_statuses_are_those_that_the_page_explains() -> None:
    explained = {row[0] for row in ROWS if len(row) == 2}
    assert {row[1] for row in TABLE} - explained == {"stated in part", "stated in one summary"}

"""Prints how large the project is and how plain its English, and fails where a figure is above its limit.

    python scripts/sizes.py              the table; exit status 1 if a limit is passed
    python scripts/sizes.py --folders    also the lines of every folder of the package
    python scripts/sizes.py --names      also where names and words stand that CONTRIBUTING.md replaces

A limit goes down with a change that makes its figure smaller, and up only for a feature, as its commit says.
"""

import argparse
import ast
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = {
    "package, lines": 54_914,
    "tests, lines": 49_192,
    "docs and docstrings, words": 110_000,
    "public classes and functions": 800,
    "modules": 273,
    "modules below 60 lines": 40,
    "largest folder, files": 20,
    "entries at the top of the package": 14,
    "files above 500 lines": 0,
    "functions above 80 lines": 0,
    "marker words per 1 000 docstring words": 0.8,
    "fragments without a verb per 1 000 docstrings": 28,
    "docstring words per line of code": 0.85,
    "replaced names": 48,
    "lines of documents above 100 characters": 7,
}
"""Figure → the most that it may be."""

MARKERS = re.compile(
    r"\b(what is|of which|that it|begun|anew|is owed|are owed|lies|behind it|as far as|otherwise than|thereof|whose|nothing of|"
    r"in the place of|lets? go of|given back|alike|goes on|go on|one's own|that has|as it was|as it is|than that)\b",
    re.IGNORECASE,
)
REPLACED = frozenset(
    (
        "found",
        "each",
        "at",
        "given",
        "kept",
        "told",
        "said",
        "brought",
        "wanted",
        "moved",
        "own",
        "ended",
        "begun",
        "whom",
        "leaving",
    )
)
"""Variables and parameters that CONTRIBUTING.md ("Plain English") replaces."""
SMALL = 60


@dataclass
class Sizes:
    """What is counted of the package's Python."""

    lines: Counter[str] = field(default_factory=Counter)
    code_lines: int = 0
    modules: list[int] = field(default_factory=list)
    files_per_folder: Counter[str] = field(default_factory=Counter)
    public: int = 0
    docstrings: list[str] = field(default_factory=list)
    long_files: list[str] = field(default_factory=list)
    long_functions: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)


def docstrings_of(tree: ast.Module) -> Iterator[tuple[str, int, int]]:
    """(text, first line, last line) of every docstring, those below fields included."""
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None),):
            if not isinstance(body, list):
                continue
            for index, statement in enumerate(body):
                is_string = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                if is_string and isinstance(statement.value.value, str):
                    first = index == 0 and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                    if first or isinstance(body[index - 1], ast.Assign | ast.AnnAssign):
                        yield statement.value.value, statement.lineno, statement.end_lineno or statement.lineno


def replaced_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id.strip("_") in REPLACED:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg.strip("_") in REPLACED:
            yield node.lineno, node.arg


def measure_package() -> Sizes:
    sizes = Sizes()
    package = ROOT / "tepo_megatron"
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        name, length = path.relative_to(ROOT).as_posix(), text.count("\n")
        inner = path.relative_to(package)
        sizes.lines[inner.parts[0] if len(inner.parts) > 1 else "(top)"] += length
        sizes.modules.append(length)
        if path.name != "__init__.py":
            sizes.files_per_folder[path.parent.relative_to(ROOT).as_posix()] += 1
        if length > 500:
            sizes.long_files.append(f"{name} ({length})")
        strings = list(docstrings_of(tree))
        sizes.docstrings += [words for words, *_ in strings]
        in_docstrings = {line for _, first, last in strings for line in range(first, last + 1)}
        sizes.code_lines += sum(
            bool(line.strip()) and not line.strip().startswith("#") and number not in in_docstrings
            for number, line in enumerate(text.splitlines(), start=1)
        )
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                sizes.public += not node.name.startswith("_")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 80:  # type: ignore[operator]
                sizes.long_functions.append(f"{name}:{node.lineno} {node.name}")
        sizes.replaced += [f"{name}:{line} {word}" for line, word in replaced_names(tree)]
    return sizes


VERB = re.compile(
    r"\b(is|are|was|were|be|been|being|has|have|had|does|do|did|can|may|must|will|would|should|could|might|\w{3,}s|\w{3,}ed|made|"
    r"sent|gets?|got|kept|held|read|write|written|return|raise|compute|see|use|run|send|give|given|take|taken|make|set|put|let)\b",
    re.IGNORECASE,
)


def is_fragment(docstring: str) -> bool:
    """Whether the first sentence of a docstring has several words and none that could be a verb."""
    sentence = re.split(r"\.(?:\s|$)|\n\s*\n", docstring.strip())[0]
    words = re.findall(r"[A-Za-z]+", re.sub(r"``[^`]*``|`[^`]*`", "x", sentence))
    return len(words) >= 4 and not VERB.search(" ".join(words))


def long_lines_of_docs() -> int:
    """Lines above 100 characters, except tables, pictures, code and the results that commands write."""
    count = 0
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "results" not in path.parts]
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *pages, *(ROOT / "examples").glob("*/README.md")]:
        text = re.sub(r"^( *)```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        long = (line for line in text.splitlines() if len(line) > 100 and " " in line[:100])
        count += sum(not re.match(r" *(\||!\[|#)", line) for line in long)
    return count


def words_of_docs() -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in (ROOT / "docs").rglob("*.md"))


def lines_of_tests() -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in (ROOT / "tests").rglob("*.py"))


def figures(sizes: Sizes) -> dict[str, float]:
    docstring_words = sum(len(text.split()) for text in sizes.docstrings)
    markers = sum(len(MARKERS.findall(text)) for text in sizes.docstrings)
    top = {
        path.name for path in (ROOT / "tepo_megatron").iterdir() if not path.name.startswith("_") and path.name != "py.typed"
    }
    return {
        "package, lines": sum(sizes.lines.values()),
        "tests, lines": lines_of_tests(),
        "docs and docstrings, words": words_of_docs() + docstring_words,
        "public classes and functions": sizes.public,
        "modules": len(sizes.modules),
        "modules below 60 lines": sum(length < SMALL for length in sizes.modules),
        "largest folder, files": max(sizes.files_per_folder.values()),
        "entries at the top of the package": len(top),
        "files above 500 lines": len(sizes.long_files),
        "functions above 80 lines": len(sizes.long_functions),
        "marker words per 1 000 docstring words": round(1000 * markers / docstring_words, 1),
        "fragments without a verb per 1 000 docstrings": round(1000 * statistics.mean(map(is_fragment, sizes.docstrings))),
        "docstring words per line of code": round(docstring_words / sizes.code_lines, 2),
        "replaced names": len(sizes.replaced),
        "lines of documents above 100 characters": long_lines_of_docs(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", action="store_true", help="also the lines of every folder of the package")
    parser.add_argument("--names", action="store_true", help="also where replaced names and long functions stand")
    args = parser.parse_args()
    sizes = measure_package()
    values = figures(sizes)
    too_large = [name for name, value in values.items() if value > LIMITS[name]]
    for name, value in values.items():
        print(f"{name:48} {value:>9,} of at most {LIMITS[name]:>9,}{'   TOO LARGE' if name in too_large else ''}")
    if args.folders:
        for folder, lines in sorted(sizes.lines.items()):
            print(f"  tepo_megatron/{folder:34} {lines:>9,}")
    if args.names:
        print("\n".join((*sizes.long_files, *sizes.long_functions, *sizes.replaced)))
    if too_large:
        print(
            f"sizes: {', '.join(too_large)}: above the limit in scripts/sizes.py; make it smaller (--names says where)",
            file=sys.stderr,
        )
    return bool(too_large)


if __name__ == "__main__":
    sys.exit(main())

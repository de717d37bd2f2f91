"""Plants faults in a copy of the package and counts how many the tests find.

    python scripts/plant_faults.py --count 60 --seed 26 --output out/faults.json

Each fault changes one expression or statement of one function: a comparison, a boolean, an operator, a number, a returned value
or a call that is dropped. The places are drawn from all functions with the seed, each line with the same probability. The fast
unit tests that reach the changed module run, nearest first, until one fails; a limit of time bounds them (--seconds).
With --coverage those that were seen to execute the changed line run instead, then those that reach the module:

    python -m pytest tests/unit -m "not slow" --hypothesis-profile fast --cov=tepo_megatron --cov-branch --cov-context=test

writes such a file, .coverage (pytest-cov). A finished fault is in the output file and is not run again, so that an interrupted
count continues.
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path

PACKAGE = "tepo_megatron"
MOST_TESTS, MOST_OF_A_FILE = 150, 40
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
}


def mutations(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """The node with one fault in it, and what the fault is."""
    if isinstance(node, ast.Compare):
        first = COMPARISONS[type(node.ops[0])]
        yield ast.Compare(node.left, [first(), *node.ops[1:]], node.comparators), "comparison"
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values), "and/or"
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not isinstance(node.left, ast.Constant):
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right), "operator"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand, "not dropped"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield ast.Constant(node.value + 1), "number"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value), "boolean"
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield ast.Return(ast.Constant(None)), "returns nothing"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass(), "call dropped"


def places(path: Path) -> Iterator[tuple[ast.AST, ast.AST, str]]:
    """(node, faulty node, kind) of every fault that can be planted in the functions of a file."""
    tree = ast.parse(path.read_text())
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    for faulty, kind in mutations(node):
                        if node.lineno == node.end_lineno and not _in_a_string(node, statement):  # type: ignore[attr-defined]
                            yield node, faulty, kind


def _in_a_string(node: ast.AST, statement: ast.stmt) -> bool:
    """Positions within f-strings are not reliable before Python 3.12."""
    return any(isinstance(outer, ast.JoinedStr) and node in ast.walk(outer) for outer in ast.walk(statement))


def draw(root: Path, count: int, seed: int) -> list[tuple[Path, ast.AST, ast.AST, str]]:
    """``count`` faults on different lines, each line with a place for one with the same probability."""
    lines: dict[tuple[Path, int], list[tuple[ast.AST, ast.AST, str]]] = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        for node, faulty, kind in places(path):
            lines.setdefault((path, node.lineno), []).append((node, faulty, kind))  # type: ignore[attr-defined]
    generator = random.Random(seed)
    chosen = generator.sample(sorted(lines), count)
    return [(path, *generator.choice(lines[path, line])) for path, line in chosen]


def imports_of(path: Path, modules: frozenset[str]) -> set[str]:
    result = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            result |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in modules:
            result.add(node.value)
    return result & modules


@cache
def graph(root: Path) -> tuple[dict[str, set[str]], dict[Path, set[str]]]:
    """Module → modules that it imports; test file → modules that it imports."""
    files = {_module(root, path): path for folder in (PACKAGE, "tests/support") for path in (root / folder).rglob("*.py")}
    modules = frozenset(files)
    return (
        {module: imports_of(path, modules) for module, path in files.items()},
        {path: imports_of(path, modules) for path in sorted((root / "tests/unit").rglob("test_*.py"))},
    )


def _module(root: Path, path: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def tests_near(root: Path, module: str) -> list[Path]:
    """The unit tests that reach a module by imports, nearest first."""
    edges, tests = graph(root)
    distance = {module: 0}
    queue = [module]
    for current in queue:
        for importer, imported in edges.items():
            if current in imported and importer not in distance:
                distance[importer] = distance[current] + 1
                queue.append(importer)
    reached = {path: min((distance[name] for name in names if name in distance), default=None) for path, names in tests.items()}
    near = [(far, path.stat().st_size, path) for path, far in reached.items() if far is not None]
    return [path for *_, path in sorted(near)]


def tests_of_line(database: Path, path: str, line: int) -> list[str]:
    """The tests that executed a line, by the coverage's contexts (``tests/unit/…::test|run``): the first of each file first."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        rows = connection.execute(
            "SELECT DISTINCT context.context FROM arc JOIN file ON file.id = arc.file_id "
            "JOIN context ON context.id = arc.context_id WHERE file.path LIKE ? "
            "AND ? IN (abs(arc.fromno), abs(arc.tono)) AND context.context LIKE '%::%'",
            (f"%/{path}", line),
        ).fetchall()
    tests = sorted({context.rpartition("|")[0] for (context,) in rows})
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.partition("::")[0], []).append(test)
    turns = [[group[index] for group in by_file.values() if index < len(group)] for index in range(MOST_OF_A_FILE)]
    return [test for turn in turns for test in turn][:MOST_TESTS]


def is_found(root: Path, tests: Sequence[Path | str], seconds: float) -> bool | None:
    """Whether a test fails; None if the time ran out before."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        "not slow",
        "--hypothesis-profile",
        "fast",
        "-p",
        "no:cacheprovider",
    ]
    process = subprocess.Popen(
        [*command, *map(str, tests)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=seconds) not in (0, 5)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def plant(path: Path, node: ast.AST, faulty: ast.AST) -> str:
    """Writes the fault into the file; returns the line as it is then."""
    lines = path.read_bytes().split(b"\n")
    number: int = node.lineno - 1  # type: ignore[attr-defined]
    line, start, end = lines[number], node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
    text = ast.unparse(ast.fix_missing_locations(faulty)).encode()
    if isinstance(faulty, ast.expr):
        text = b"(" + text + b")"
    lines[number] = line[:start] + text + line[end:]
    path.write_bytes(b"\n".join(lines))
    return lines[number].decode().strip()


def copy_checkout(root: Path, copy: Path) -> None:
    anywhere = shutil.ignore_patterns(".venv*", ".git", "out", "__pycache__", ".mypy_cache")
    large = {"build", "data", "gpu-kit", "models"}  # the package has folders of such names
    at_top = os.fspath(root)
    shutil.copytree(root, copy, ignore=lambda folder, names: anywhere(folder, names) | (large if folder == at_top else set()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="faults (default: 60)")
    parser.add_argument("--seed", type=int, default=26)
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).parents[1], help="checkout to plant them in; a copy is changed"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--coverage", type=Path, help="coverage data of the unit tests with a context per test")
    parser.add_argument("--seconds", type=float, default=90.0, help="limit of time for the tests of a fault")
    parser.add_argument("--files", type=int, default=12, help="at most so many test files for a fault")
    args = parser.parse_args()
    root = args.root.resolve()
    done = json.loads(args.output.read_text()) if args.output.exists() else []
    with tempfile.TemporaryDirectory(prefix="tepo-faults-") as folder:
        copy = Path(folder) / "checkout"
        copy_checkout(root, copy)
        for number, (path, node, faulty, kind) in enumerate(draw(copy, args.count, args.seed)):
            place = f"{path.relative_to(copy)}:{node.lineno}"  # type: ignore[attr-defined]
            if number < len(done):
                if (done[number]["place"], done[number]["kind"]) != (place, kind):
                    sys.exit(f"{args.output} has faults of another seed or package; name another --output, or remove it")
                continue
            before = path.read_bytes()
            old = before.decode().split("\n")[node.lineno - 1].strip()  # type: ignore[attr-defined]
            new = plant(path, node, faulty)
            found: bool | None = False
            if args.coverage:
                name, line = path.relative_to(copy).as_posix(), node.lineno  # type: ignore[attr-defined]
                tests = tests_of_line(args.coverage, name, line)
                found = bool(tests) and is_found(copy, tests, args.seconds)
            if found is False:
                found = is_found(copy, tests_near(copy, _module(copy, path))[: args.files], args.seconds)
            path.write_bytes(before)
            done.append({"place": place, "kind": kind, "before": old, "after": new, "found": found})
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(done, indent=1))
            verdict = "found" if found else "time ran out" if found is None else "MISSED"
            print(f"{number + 1}/{args.count} {verdict}  {place}  {kind}", flush=True)
    print(f"{sum(fault['found'] is True for fault in done)} of {len(done)} found")


if __name__ == "__main__":
    main()

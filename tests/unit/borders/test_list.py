"""docs/guides/security.md lists every module that reads what others may write: files, sockets, pipes, environment variables."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tepo_megatron.tools.faults import borders
from tepo_megatron.tools.faults.hostile import ENTRIES

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "tepo_megatron"
PAGE = "docs/guides/security.md"

READERS = frozenset(
    (
        *("read_text", "read_bytes", "readline", "readlines", "read_json", "parse_json", "read_yaml", "safe_load"),
        *("safe_open", "open_safetensors", "pread", "fdopen", "recv", "batch_isend_irecv", "create_server"),
        *("create_connection", "getresponse", "urlopen", "HTTPConnection", "ThreadingHTTPServer", "Application"),
        *("Client", "AsyncClient", "Popen", "check_output", "getenv", "ParquetFile", "open_stream", "from_pretrained"),
        *("SentencePieceProcessor", "exec_module"),
    )
)
"""Functions and classes, by their last name."""

OF_MODULES = frozenset(("json.load", "json.loads", "yaml.load", "np.load", "os.read", "subprocess.run", "OmegaConf.load"))
VALUES = frozenset(("os.environ", "sys.stdin", "sys.argv"))


def is_reader(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="open"), args=[_, *modes]) | ast.Call(func=ast.Attribute(attr="open"), args=modes):
            return not any(isinstance(mode, ast.Constant) and re.fullmatch(r"[wax]b?", str(mode.value)) for mode in modes)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in READERS:
            return True
        case ast.Attribute(value=ast.Name(id=of), attr=name):
            return f"{of}.{name}" in OF_MODULES | VALUES
    return False


def reads(source: str) -> bool:
    return any(map(is_reader, ast.walk(ast.parse(source))))


def readers() -> frozenset[str]:
    paths = (path for path in PACKAGE.rglob("*.py") if reads(path.read_text(encoding="utf-8")))
    return frozenset(path.relative_to(PACKAGE).as_posix() for path in paths)


def rows(page: str) -> Iterator[tuple[str, list[str]]]:
    """(what stands first in the row, modules) of the table of borders."""
    for line in page.partition("## Borders")[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells and (names := re.findall(r"`([\w/*.]+)`", cells[1])):
            yield cells[0], names


def is_named(module: str, name: str) -> bool:
    return Path("/", module).match(f"/{name}")


def faults(page: str, modules: frozenset[str]) -> list[str]:
    named = [name for _, names in rows(page) for name in names]
    result = [f"{PAGE} names {name}, and no such module reads" for name in named if not any(is_named(m, name) for m in modules)]
    unlisted = sorted(m for m in modules if not any(is_named(m, name) for name in named))
    return result + [
        f"{m} reads what others may write, and {PAGE} has no row for it; say who may write there" for m in unlisted
    ]


def test_every_module_that_reads_has_its_row_and_every_row_reads() -> None:
    assert faults((ROOT / PAGE).read_text(encoding="utf-8"), readers()) == []


def test_a_new_reader_and_a_row_too_many_are_seen() -> None:
    page = "## Borders\n| border | modules |\n| a | `cli/a.py`, `run/*.py` |\n"
    said = faults(page, frozenset({"run/b.py", "core/c.py"}))
    assert [line.split(",")[0] for line in said] == [f"{PAGE} names cli/a.py", "core/c.py reads what others may write"]


@pytest.mark.parametrize(
    "source", ["import os\nx = os.environ", "p.open()", "open('a', 'r+b')", "json.loads(a)", "socket.create_server(a)"]
)
def test_what_reads(source: str) -> None:
    assert reads(source)
    assert not reads("p.open('w').write(json.dumps(a))")


def test_every_entry_of_the_fuzzer_is_a_border_of_the_table() -> None:
    assert borders.FAULTS[0].quick == len(ENTRIES)
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert sorted(ENTRIES) == sorted({name for border, _ in rows(page) for name in re.findall(r"\*([^*]+)\*", border)})

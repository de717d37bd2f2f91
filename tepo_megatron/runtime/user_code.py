"""Loads the user's code: ``path/file.py:name``, ``package.module:name``, or a whole module."""

import hashlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any


def unknown(what: str, name: str, known: Iterable[str], *, form: str = "", prefix: str = "") -> ValueError:
    """``prefix`` begins every name; ``form`` is what the user's code is called."""
    nearest = get_close_matches(name, names := list(known), n=1, cutoff=0.5)
    hint = f"; did you mean {prefix}{nearest[0]}?" if nearest else ""
    listed = ", ".join(f"{prefix}{item}" for item in names)
    mine = f", or your own as path/file.py:{form} or package.module:{form}" if form else ""
    return ValueError(f"unknown {what} {prefix + name!r}; known: {listed}{mine}{hint}")


def locate_user_code(name: str, what: str) -> str:
    """Does not import. ``what`` names the code in messages (``the verifier 'mine.py:score'``). Raises ValueError."""
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py") and attribute.isidentifier():
        path = Path(place).expanduser().resolve()
        if not path.is_file():
            raise ValueError(f"{what}: there is no file {path}; give its path, or package.module:function")
        return f"{path}:{attribute}"
    if not all(part.isidentifier() for part in [*place.split("."), attribute]):
        raise ValueError(f"{what} is not of the form package.module:function, nor path/file.py:function")
    return name


def load_user_code(name: str, what: str) -> Any:
    """Also raises ValueError if the import fails."""
    place, _, attribute = locate_user_code(name, what).rpartition(":")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else import_module(place)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} cannot be loaded: importing {place} raised {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if found is None:
        raise ValueError(f"{what} cannot be loaded: {place} has no function {attribute}")
    return found


_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def line_of(error: BaseException, function: Callable[..., Any]) -> str:
    """Returns `` (file:line)``, the last line in the file of ``function`` (without source: in the first file entered), or ""
    for an error of this package.
    """
    frames = [item for item in traceback.extract_tb(error.__traceback__) if not item.filename.startswith(_PACKAGE)]
    file = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", None)
    lines = [item for item in frames if item.filename == file] or [
        item for item in frames if item.filename == frames[0].filename
    ]
    return f" ({lines[-1].filename}:{lines[-1].lineno})" if lines else ""


def plain(value: Any) -> Any:
    """Makes a Python number of a scalar of NumPy or torch."""
    return value.item() if getattr(value, "shape", None) == () else value


def _import_file(path: Path) -> ModuleType:
    """The file can import its neighbours, unless another module has the name."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # The file may have the name of a module of the standard library.
    name = f"user_code_{path.stem}"
    # Python's cached bytecode would be taken if the file was edited in the second in which it was read, to the same size
    return _execute(name, _Bytes(name, str(path), path.read_bytes()))


def _execute(name: str, loader: SourceFileLoader) -> ModuleType:
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@dataclass(frozen=True)
class _UserModule:
    place: str
    """``/path/of/file.py`` or ``package.module``."""

    module: ModuleType
    digest: str
    """16 hexadecimal digits; for a package, of all its Python files."""


def _locate_user_module(name: str, what: str) -> str:
    if name.endswith(".py"):
        path = Path(name).expanduser().absolute()
        if not path.is_file():
            raise ValueError(f"{what}: there is no file {path}; give its path, or the name of an installed module")
        return str(path)
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{what}: {name[:100]!r} is neither path/file.py nor the name of a module")
    return name


def load_user_module(name: str, what: str) -> _UserModule:
    """Imports a file, by exactly the digest's bytes, or an installed module. Searches neither its
    neighbours nor the current folder.
    """
    place = _locate_user_module(name, what)
    try:
        loaded = _import_bytes(Path(place)) if place.endswith(".py") else _import_installed(place)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what}: {_import_failure(place, error)}") from error
    if _DIGESTS.setdefault(loaded.module, loaded.digest) != loaded.digest:
        raise ValueError(f"{what}: {place} was edited since it was imported: restart the program")
    return loaded


_DIGESTS: dict[ModuleType, str] = {}  # at the first import, whose code runs
_IMPORTED: dict[tuple[str, str], _UserModule] = {}


class _Bytes(SourceFileLoader):
    def __init__(self, fullname: str, path: str, data: bytes) -> None:
        super().__init__(fullname, path)
        self._data = data

    def get_code(self, fullname: str) -> CodeType:
        del fullname
        return self.source_to_code(self._data, self.path)


def _import_bytes(path: Path) -> _UserModule:
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()[:16]
    known = _IMPORTED.get((str(path), digest))
    if known is not None:
        return known
    spelled = "".join(character if character.isalnum() else "_" for character in path.stem)
    name = f"user_module_{spelled}_{digest}_{len(_IMPORTED)}"
    _IMPORTED[str(path), digest] = _UserModule(str(path), _execute(name, _Bytes(name, str(path), data)), digest)
    return _IMPORTED[str(path), digest]


def _import_installed(name: str) -> _UserModule:
    with _without_current_folder():
        module = import_module(name)
    files = [Path(module.__file__)] if module.__file__ else []
    if hasattr(module, "__path__"):
        files = sorted(path for folder in module.__path__ for path in Path(folder).rglob("*.py"))
    hashed = hashlib.sha256()
    for file in files:
        hashed.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return _UserModule(name, module, hashed.hexdigest()[:16])


@contextmanager
def _without_current_folder() -> Iterator[None]:
    """``python -m`` searches the current folder first, ``tepo`` does not."""
    here = os.getcwd()
    named = {os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    before = list(sys.path)
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or here) != here or here in named]
    try:
        yield
    finally:
        sys.path[:] = before


def _import_failure(place: str, error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == place]
    number = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    where = f"{place}, line {number}" if number else place
    advice = ""
    if isinstance(error, ModuleNotFoundError):
        advice = "; what it imports has to be installed: what lies beside a file, or in the current folder, is not looked at"
        if error.name == "torch":
            advice = (
                "; there is no torch here, as on a login node: import it within the methods that use it, and not at the top"
            )
    return f"importing {where} raised {type(error).__name__}: {error}{advice}"

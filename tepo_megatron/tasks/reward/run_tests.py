"""Runs a program and its tests in two processes that share a socket; needs only the standard library.

``tests FD`` reads a JSON object with ``key``, ``setup``, ``program``, ``tests``, ``may_hide``, ``all``. Output: ``KEY
started``, then ``KEY n`` for each passed test n; with ``all`` it stops at the first failure. ``program FD`` runs setup and
program, and acts on its objects as the tests ask; the tests trust nothing that it sends. Messages are JSON lines:

    ["ask", operation, arguments, named arguments]
    ["result", value, changes]    changes: new contents of mutable arguments, null where there are none
    ["error", (class, arguments), changes]
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import operator
import os
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from types import BuiltinFunctionType, ModuleType
from typing import Any, NoReturn

STARTED = "started"
_LONGEST = 2**25  # bytes of a message
_PACK: Mapping[type, Callable[[Any], Any]] = {
    complex: lambda value: (complex(value).real, complex(value).imag),
    bytes: bytes.hex,
    bytearray: bytearray.hex,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    dict: dict.items,
    range: lambda value: (value.start, value.stop, value.step),
    Decimal: Decimal.__str__,
    Fraction: lambda value: (value.numerator, value.denominator),
    deque: lambda value: (list(deque.__iter__(value)), value.maxlen),
}
_UNPACK: Mapping[str, Callable[[Any], Any]] = {
    "str": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    **{of.__name__: of for of in (tuple, set, frozenset, dict, Decimal)},
    "complex": lambda values: complex(*values),
    "range": lambda values: range(*values),
    "Fraction": lambda values: Fraction(*values),
    "deque": lambda values: deque(*values),
}
_MUTABLE = (list, dict, set, bytearray, deque)
_TYPES = {
    f"{value.__module__}.{value.__qualname__}": value
    for value in (*vars(builtins).values(), type(None), Decimal, Fraction, deque, Counter, OrderedDict, defaultdict)
    if isinstance(value, type) and not value.__module__.startswith("_")
}
"""Types that are the same on both sides."""


class _Ended(BaseException): ...


class _Proxy:
    __slots__ = ("_tepo_number", "_tepo_peer")
    _tepo_number: int
    _tepo_peer: _Peer

    def __init__(self, peer: _Peer, number: int) -> None:
        object.__setattr__(self, "_tepo_peer", peer)
        object.__setattr__(self, "_tepo_number", number)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._tepo_peer.ask("__call__", self, *args, **kwargs)


class _Handle(_Proxy):
    """An object of the program, in the tests. It is never equal to what is not the program's."""

    __slots__ = ()


_FUNCTIONS = (bool, len, iter, next, str, repr, hash, int, float, complex, round, reversed, abs, format)
_OTHERS = ("neg", "pos", "invert", "index", "contains", "getitem", "setitem", "delitem")
_BINARY = (
    *("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **{f"__{function.__name__}__": function for function in _FUNCTIONS},
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in (*_OTHERS, *_BINARY)},
    **{"__getattr__": getattr, "__setattr__": setattr, "__delattr__": delattr},
    "__instancecheck__": lambda of, value: isinstance(value, of),
    "__subclasscheck__": lambda of, value: issubclass(value, of),
    "__enter__": lambda value: type(value).__enter__(value),
    "__exit__": lambda value, *error: type(value).__exit__(value, *error),
}


def _forward(name: str) -> Callable[..., Any]:
    def ask(self: _Handle, *args: Any) -> Any:
        if name[2:-2] in _BINARY and type(args[0]) is not _Handle:
            return {"__eq__": False, "__ne__": True}.get(name, NotImplemented)  # else it would learn what is expected
        return self._tepo_peer.ask(name, self, *args)

    return ask


for _name in _OPERATIONS:
    setattr(_Handle, _name, _forward(_name))


class _Peer:
    """Is one end of the socket. ``operations``: what the other may ask; ``proxy``: the class of its objects here."""

    def __init__(self, descriptor: int, operations: Mapping[str, Callable[..., Any]], proxy: type[_Proxy]) -> None:
        self._reads, self._writes = os.fdopen(descriptor, "rb"), os.fdopen(os.dup(descriptor), "wb")
        self._operations, self._proxy = operations, proxy
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._classes: dict[int, type[BaseException]] = {}
        self.broken = False

    def ask(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        """Raises what the operation raises there, or ``_Ended``."""
        values = [*args, *kwargs.values()]
        message = ["ask", operation, [self.encode(value) for value in args], {k: self.encode(v) for k, v in kwargs.items()}]
        try:
            self._send(message)
            while (answer := self.receive())[0] == "ask":
                self.serve(*answer[1:])
            kind, value, changes = answer
            for target, change in zip(values, changes, strict=True):
                if change is not None:
                    _change(target, self.decode(change))
            result = self.decode(value)
            if kind == "error":
                result = _made(*result)
        except (Exception, _Ended) as error:
            self.broken = True
            raise _Ended(f"the other side ended or sent nonsense: {error!r}") from error
        if kind == "error":
            raise result
        return result

    def serve(self, operation: str, args: Any, kwargs: Any) -> None:
        values, named = [self.decode(value) for value in args], {name: self.decode(value) for name, value in kwargs.items()}
        function = self._operations[operation]
        try:
            reply = ["result", self.encode(function(*values, **named))]
        except _Ended:
            raise
        except BaseException as error:  # SystemExit too
            reply = ["error", self.encode((type(error), tuple(error.args)))]
        changes = []
        for value, sent in zip([*values, *named.values()], [*args, *kwargs.values()], strict=True):
            now = self.encode(value) if isinstance(value, _MUTABLE) else None
            changes.append(None if now == sent else now)
        self._send([*reply, changes])

    def receive(self) -> Any:
        return json.loads(self._reads.readline(_LONGEST))  # no JSON at the end

    def _send(self, message: Any) -> None:
        self._writes.write(json.dumps(message).encode() + b"\n")
        self._writes.flush()

    def encode(self, value: Any) -> Any:
        for base in type(value).__mro__:
            if base in (type(None), bool):
                return value
            if base is float:
                return float.__pos__(value)
            if base is int:
                number = int.__pos__(value)
                return number if abs(number) < 2**53 else {"int": hex(number)}
            if base is str:
                text = str.__str__(value)
                data = text.encode("utf-8", "surrogatepass")
                return text if data.decode("utf-8", "ignore") == text else {"str": data.hex()}
            if base is list:
                return [self.encode(item) for item in list.__iter__(value)]
            if base in _PACK:
                content = _PACK[base](value)
                return {base.__name__: content if type(content) is str else [self.encode(item) for item in content]}
        return self._encode_object(value)

    def _encode_object(self, value: Any) -> Any:
        if type(value) is self._proxy:
            return {"yours": value._tepo_number}
        if isinstance(value, type) and _TYPES.get(name := f"{value.__module__}.{value.__qualname__}") is value:
            return {"type": name}
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        number = self._numbers[id(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": [number, value.__name__, self.encode(value.__base__)]}
        return {"object": number}

    def decode(self, value: Any) -> Any:
        """Raises an exception for nonsense."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((tag, content),) = value.items()
        if tag == "yours":
            return self.objects[content]
        if tag == "object":
            return self._proxy(self, int(content))
        if tag == "type":
            return _TYPES[content]
        if tag == "exception":
            number, name, base = content[0], content[1], self.decode(content[2])
            if not issubclass(base, BaseException):
                raise ValueError(f"{base} is no exception")
            return self._classes.setdefault(number, type(name, (base,), {}))
        return self._decode_special(tag, content) or _UNPACK[tag](self.decode(content))

    def _decode_special(self, tag: str, content: Any) -> Any:
        return None


class _Tests(_Peer):
    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, {"__call__": self._call}, _Handle)

    def _call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not any(function is item for item in self.objects):
            raise _Ended("the program called what the tests have not given it")
        return function(*args, **kwargs)

    def _encode_object(self, value: Any) -> Any:
        is_function = isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType)
        if (is_function or isinstance(value, type)) and value.__module__ in sys.stdlib_module_names:
            with suppress(AttributeError):  # the name of None's type, for one, is not in its module
                if operator.attrgetter(value.__qualname__)(sys.modules[value.__module__]) is value:
                    return {"named": [value.__module__, value.__qualname__]}
        return super()._encode_object(value)

    def _decode_special(self, tag: str, content: Any) -> Any:
        if tag != "module":
            return None
        if content.partition(".")[0] not in sys.stdlib_module_names:
            raise ValueError(f"{content} is no module of the standard library")
        return importlib.import_module(content)


class _Program(_Peer):
    def __init__(self, descriptor: int) -> None:
        call = {"__call__": lambda function, /, *args, **kwargs: function(*args, **kwargs), "run": self._run}
        super().__init__(descriptor, {**_OPERATIONS, **call}, _Proxy)

    def host(self) -> NoReturn:
        try:
            self._send("ready")
            while True:
                self.serve(*self.receive()[1:])
        finally:
            os._exit(0)

    def _run(self, names: list[str], *texts: str) -> dict[str, str]:
        """Returns those of ``names`` that are global, with values as JSON."""
        module = _module()
        for text in texts:
            exec(compile(text, "<program>", "exec", dont_inherit=True), module.__dict__)  # noqa: S102
        values = {}
        for name in names:
            with suppress(KeyError, RecursionError):  # a list that contains itself
                values[name] = json.dumps(self.encode(vars(module)[name]))
        return values

    def _encode_object(self, value: Any) -> Any:
        return {"module": value.__name__} if type(value) is ModuleType else super()._encode_object(value)

    def _decode_special(self, tag: str, content: Any) -> Any:
        return operator.attrgetter(content[1])(importlib.import_module(content[0])) if tag == "named" else None


def _class_of(value: Any) -> type:
    return value if isinstance(value, type) else type(value)


def _change(target: Any, content: Any) -> None:
    if isinstance(target, (list, bytearray)):
        target[:] = content
    else:
        target.clear()
        (target.extend if isinstance(target, deque) else target.update)(content)


def _made(of: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    if not issubclass(of, BaseException):
        raise ValueError(f"{of} is no exception")
    try:
        return of(*args)
    except TypeError:  # its constructor takes others
        return Exception(*args)


def _module() -> ModuleType:
    module = ModuleType("solution")  # not __main__: the program's main part must not run
    sys.modules[module.__name__] = module
    return module


def _main(descriptor: int) -> None:
    """Exits with status 0, also if tests fail."""
    import ctypes  # the program's process need not wait for it

    pr_set_dumpable = 4
    if ctypes.CDLL(None).prctl(pr_set_dumpable, 0, 0, 0, 0) != 0:  # the program's process must not read the key here
        raise SystemExit("the kernel does not protect the memory of the tests")
    task, peer = json.load(sys.stdin), _Tests(descriptor)
    key, replies = task.pop("key"), os.dup(1)
    try:
        peer.receive()
    except ValueError:
        raise SystemExit("the program's process did not start") from None
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)

    def say(what: str) -> None:
        os.write(replies, f"{key} {what}\n".encode())

    say(STARTED)
    try:
        _run(task, peer, say)
    finally:
        os._exit(0)  # does not wait for the program


def _run(task: dict[str, Any], peer: _Tests, say: Callable[[str], None]) -> None:
    module = _module()
    exec(compile(task["setup"], "<setup>", "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    ours = {name for name, value in vars(module).items() if _class_of(value).__module__ != module.__name__}
    requested = {name for text in (task["setup"], *task["tests"]) for name in _names_in(text, task["may_hide"])} - ours
    for name, value in peer.ask("run", sorted(requested), task["setup"], task["program"]).items():
        may_hide = name in task["may_hide"] or name not in sys.stdlib_module_names
        if name in requested and (may_hide or value == f'{{"module": "{name}"}}'):
            setattr(module, name, peer.decode(json.loads(value)))
    for number, test in enumerate(task["tests"]):
        try:
            exec(compile(test, f"<test {number}>", "exec", dont_inherit=True), dict(vars(module)))  # noqa: S102
        except BaseException:  # SystemExit too
            if task["all"]:
                return
        else:
            if not peer.broken:
                say(str(number))
        if peer.broken:
            return


def _names_in(text: str, may_hide: Sequence[str]) -> set[str]:
    """The program learns them: no value or built-in name is among them, as it may be what a test expects."""
    names = {word for word in re.findall(r"\w+", text) if word in may_hide}  # in a text for eval, too
    with suppress(Exception):  # what cannot be parsed fails as a test
        names |= {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)} - vars(builtins).keys()
    return names


if __name__ == "__main__":
    if sys.argv[1] == "program":
        _Program(int(sys.argv[2])).host()
    _main(int(sys.argv[2]))

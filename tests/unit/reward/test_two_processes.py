"""Tests ask a program in another process: values arrive as they are, honest programs pass, and no attack does."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.reward.pool import RewardPool

Case = tuple[Problem, str]
Judge = Callable[[Sequence[Case]], list[float | None]]


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    config = {"verifier": "python_tests", "run_code": True, "timeout_s": 600, "kwargs": {"seconds": 120}}
    with RewardPool(RewardConfig.model_validate(config)) as pool:
        pool.rehearse([Problem("p", "f", "def f(): pass", {"tests": ["f()"]})])
        yield lambda cases: [result.reward for result in pool.score(cases)]


def case(program: str, *tests: str, setup: str = "") -> Case:
    return Problem("p", "f", "def f(): pass", {"setup": setup, "tests": list(tests)}), program


SAME = """
from collections import Counter, deque
from decimal import Decimal
from fractions import Fraction
inf, nan = float("inf"), float("nan")
def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b)) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
    if isinstance(a, (set, frozenset)):
        return Counter(map(type, a)) == Counter(map(type, b)) and a == b
    return repr(a) == repr(b)
"""
KEYS: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec=None, exclude_categories=()))
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3)),
    lambda items: st.lists(items, max_size=3).map(tuple) | st.frozensets(items, max_size=3),
    max_leaves=4,
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    KEYS | st.floats() | st.just(Decimal("nan")) | st.binary().map(bytearray),
    lambda items: (
        st.lists(items, max_size=3)
        | st.lists(items, max_size=3).map(tuple)
        | st.dictionaries(KEYS, items, max_size=3)
        | st.sets(KEYS, max_size=3)
        | st.builds(deque, st.lists(items, max_size=2), st.none() | st.integers(2, 3))
    ),
    max_leaves=8,
)


@settings(max_examples=8)
@given(values=st.lists(VALUES, min_size=10, max_size=40))
def test_plain_values_arrive_and_come_back_as_they_are(judge: Judge, values: list[Any]) -> None:
    tests = [f"assert same(f({value!r}), {value!r})" for value in values]
    assert judge([case("def f(x): return x", *tests, setup=SAME)]) == [1.0]


SUBCLASS = "class Odd(int):\n  __eq__ = lambda a, b: True\n  __hash__ = int.__hash__\ndef f(x): return Odd(x)"
POINT = """
class Point:
    def __init__(self, x): self.x = x
    def __add__(self, other): return Point(self.x + other.x)
    def __eq__(self, other): return self.x == other.x
    def __len__(self): return self.x
    def __iter__(self): return iter(range(self.x))
    def __contains__(self, item): return item < self.x
    def __getitem__(self, item): return self.x + item
    def __enter__(self): return self
    def __exit__(self, *error): self.x = 0
"""
HONEST = [
    case("def f(x): return x != x", "assert f(float('nan'))"),
    case(SUBCLASS, "assert f(3) == 3 and type(f(3)) is int"),
    case("def f(operation, function, self): return function(self)", "assert f(operation='a', function=len, self=[1]) == 1"),
    case("def f(x, kind): return sum(isinstance(i, kind) for i in x)", "assert f([1, None], type(None)) == 1"),
    case("root = []\nroot[:] = [root, root]\ndef f(x): return 2 * x", "assert f(2) == 4 and eval('f(3)') == 6"),
    case(
        f"{POINT}\ndef total(items): return items[0].x + items[1]['a'].x",
        "a = Point(2); a.x = 3; assert a.x == 3 and len(a) == 3 and list(a) == [0, 1, 2] and 2 in a and a[1] == 4",
        "assert Point(1) + Point(2) == Point(3) and Point(1) != Point(2)",
        "assert isinstance(Point(1), Point) and not isinstance(1, Point) and not Point(0)",
        "with Point(5) as p: assert p.x == 5\nassert p.x == 0",
        "p = [Point(1), {'a': Point(2)}]; assert total(p) == 3",
    ),
    case("def f(p): return Point(p.x + 1)", "assert f(Point(4)).x == 5", "assert Point(1) == Point(1)", setup=POINT),
    case(
        "def g(n):\n  for i in range(n): yield i",
        "assert list(g(3)) == [0, 1, 2]",
        "i = g(1); assert next(i) == 0 and next(i, None) is None",
        "assert sum(g(4)) == 6",
    ),
    case(
        "def f(a): a.sort()\ndef g(d): d.clear(); d['b'] = 2\ndef h(items): items.append(5)\n"
        "def k(s, b): s.add(2); b.extend(b'b')",
        "a = [3, 1, 2]; b = a; assert f(a) is None and b == [1, 2, 3]",
        "d = {'a': 1}; g(d); assert d == {'b': 2}",
        "import collections\nq = collections.deque([1]); h(items=q); assert q == collections.deque([1, 5])",
        "s, b = {1}, bytearray(b'a'); k(s, b); assert s == {1, 2} and b == bytearray(b'ab')",
    ),
    case(
        "def apply(f, x): return f(x)\ndef both(f, x, y): return f(x, y)\ndef adder(n): return lambda x: x + n\n"
        "def filled(f): a = []; f(a); return a",
        "assert apply(lambda x: x + 1, 3) == 4",
        "assert apply(len, 'abc') == 3 and apply(str, 1) == '1' and apply(str.upper, 'a') == 'A'",
        "assert both(operator.add, 1, 2) == 3",
        "assert apply(lambda x: apply(lambda y: y * 2, x) + 1, 3) == 7",
        "seen = []; apply(seen.append, 1); assert seen == [1]",
        "def bad(x): raise KeyError('k')\ntry: apply(bad, 1)\nexcept KeyError as e: assert e.args == ('k',)\nelse: f()",
        "assert apply(adder(2), 3) == 5 and adder(2)(4) == 6 and adder.__name__ == 'adder'",
        "def fill(x): x.append(1)\nassert filled(fill) == [1]",
        setup="import operator",
    ),
    case(
        "def f(x):\n  if x < 0: raise ValueError('negative')\nclass Base(LookupError): pass\nclass Odd(Base): pass\n"
        "def g(): raise Odd(1, 'a')\ndef kind(x): return type(x)",
        "try: f(-1)\nexcept ValueError as e: assert str(e) == 'negative'\nelse: raise AssertionError",
        "try: g()\nexcept Odd as e: assert isinstance(e, LookupError) and e.args == (1, 'a')\nelse: raise AssertionError",
        "try: g()\nexcept LookupError: pass",
        "assert kind(1) is int and kind('a') == str",
    ),
    case("def f(n): return 2 ** (10 * n)", "assert f(500) == 2 ** 5000", "assert f(0) == 1"),
    case("ZERO = 0\ndef f(x): return 2 * x", "assert check(1) == 3", "assert ZERO == 0", setup="def check(x): return f(x) + 1"),
    case("import math\ndef f(x): return x * math.pi", "assert math.isclose(f(1), math.pi)"),
    case(
        "f = lambda x: x * 2", "def check(candidate):\n  assert candidate(2) == 4\n  assert candidate([1]) == [1, 1]\ncheck(f)"
    ),
]


def test_honest_programs_pass(judge: Judge) -> None:
    assert judge(HONEST) == [1.0] * len(HONEST)


CLOSE = ["assert math.isclose(f(1), 3.5)", "assert f(2) == 7"]
SQUARE = ["assert f(2) == 4", "assert f(3) == 9"]
EVERYTHING = "class All:\n  __eq__ = __le__ = __ge__ = __lt__ = __gt__ = lambda *a: True\n  __hash__ = lambda s: 4\n"
WRITE = """
import os
def write(*lines):
    for fd in range(64):
        for line in lines:
            try: os.write(fd, line.encode() + b'\\n')
            except OSError: pass
"""
HOST = """
import gc, json, sys
peer = [o for o in gc.get_objects() if type(o).__name__ == '_Program'][0]
"""
WORDS = "import builtins, sys\nwords = [w for v in sys._getframe(1).f_locals.values() if type(v) is list for w in v]\n"
ATTACKS = {
    "a number of the test": case(
        f"{WORDS}def f(x): return next(int(w) for w in words if w.isdigit() and int(w) != x)", "assert f(12) == 144"
    ),
    "a text of the test": case(
        f"{WORDS}def f(x): return next(w for w in words if w not in ('assert', 'f', x))", "assert f('abc') == 'zyx'"
    ),
    "an exception of the test": case(
        f"{WORDS}def f(x): raise next(getattr(builtins, w) for w in words if w.endswith('Error'))",
        "try: f(1)\nexcept KeyError: pass\nelse: raise ValueError",
    ),
    "names that nobody asked for": case(
        f"{HOST}\nsend = peer._send\ndef more(message):\n  if message[0] == 'result' and isinstance(message[1], dict):\n"
        "    message[1]['dict'] = [*message[1].get('dict', []), ['near', json.dumps(peer.encode(lambda *a: True))]]\n"
        "  send(message)\npeer._send = more\ndef f(x): return 0",
        "assert near(f(1), 3)",
        setup="def near(a, b): return abs(a - b) < 1",
    ),
    "exec": case("import builtins\nbuiltins.exec = lambda *a, **k: None\ndef f(x): return 0", *SQUARE),
    "compile": case(
        "import builtins\nc = compile\nbuiltins.compile = lambda *a, **k: c('', 'a', 'exec')\ndef f(x): pass", *SQUARE
    ),
    "key in frames": case(
        f"import sys\n{WRITE}\nf = sys._getframe()\nwhile f:\n  for v in list(f.f_locals.values()):\n"
        "    k = [c.cell_contents for c in getattr(v, '__closure__', None) or () if type(c.cell_contents) is str]\n"
        "    for key in [*k, v] if type(v) is str else k: write(f'{key} 0', f'{key} 1')\n  f = f.f_back",
        *SQUARE,
    ),
    "key in objects": case(
        f"import gc\n{WRITE}\nfor o in gc.get_objects():\n  if type(o) is dict:\n    for v in list(o.values()):\n"
        "      if type(v) is str and len(v) == 32: write(f'{v} 0', f'{v} 1')",
        *SQUARE,
    ),
    "key in memory": case(
        f"import os, re\n{WRITE}\nfor p in range(os.getpid() - 50, os.getpid() + 50):\n  try:\n"
        "    for line in open(f'/proc/{p}/maps') if p != os.getpid() else ():\n"
        "      a, b = (int(n, 16) for n in line.split()[0].split('-'))\n"
        "      m = open(f'/proc/{p}/mem', 'rb'); m.seek(a)\n"
        "      for k in re.findall(r'\"key\": \"(\\w{32})\"', m.read(b - a).decode('latin1')): write(f'{k} 0', f'{k} 1')\n"
        "  except (OSError, ValueError): pass",
        *SQUARE,
    ),
    "ptrace": case(
        "import ctypes, os\nfor p in range(os.getpid() - 9, os.getpid() + 9):\n"
        "  if p != os.getpid(): ctypes.CDLL(None).ptrace(16, p, 0, 0)\ndef f(x): return 0",
        *SQUARE,
    ),
    "a subclass that equals everything": case(SUBCLASS, "assert f(3) == 4"),
    "equals everything": case(f"{EVERYTHING}\ndef f(x): return All()", *SQUARE),
    "equals everything in a list": case(
        f"{EVERYTHING}\ndef f(x): return [All()]", "assert f(2) == [4]", "assert f(3) in [[9], 9]"
    ),
    "has another class": case(
        f"{EVERYTHING}  __class__ = int\ndef f(x): return All()", "assert isinstance(f(2), int) and f(2) == 4"
    ),
    "is near everything": case(
        f"{EVERYTHING}  __sub__ = __rsub__ = __abs__ = lambda *a: 0\ndef f(x): return All()",
        "assert abs(f(2) - 4) < 1e-6",
        "assert f(3) >= 9",
    ),
    "math of the setup": case("import math\nmath.isclose = lambda *a: True\ndef f(x): return 7", *CLOSE, setup="import math"),
    "math of the test": case(
        "import math\nmath.isclose = lambda *a: True\ndef f(x): return 7", *[f"import math\n{test}" for test in CLOSE]
    ),
    "a class called math": case("class math:\n  isclose = lambda *a: True\ndef f(x): return 7", *CLOSE),
    "another module called math": case(
        "import types\nmath = types.ModuleType('math')\nmath.isclose = lambda *a: True\ndef f(x): return 7", *CLOSE
    ),
    "helper of the setup": case(
        "same = lambda a, b: True\ndef f(x): pass", "assert same(f(2), 4)", setup="def same(a, b): return a == b"
    ),
    "len": case("def len(x): return 4\ndef f(x): return []", "assert len(f(2)) == 4"),
    "json and socket": case(
        f"import json, socket\n{EVERYTHING}\njson.loads = json.dumps = socket.socket = lambda *a, **k: All()\ndef f(x): pass",
        *SQUARE,
    ),
    "builtins of the tests": case(
        f"{HOST}\nold = peer._run\ndef run(*texts):\n  return {{**old(*texts), '__builtins__': '{{\"dict\": []}}',"
        " 'isinstance': '{\"object\": 0}'}\npeer._operations['run'] = run\n"
        "peer.objects.append(lambda *a: True)\ndef f(x): return 0",
        "assert isinstance(f(2), str)",
    ),
    "a class made in the tests": case(
        f"{HOST}\ndef yes(*a): return True\ndef f(x):\n  eq = peer.encode(yes)\n"
        "  peer._send(['ask', '__call__', [{'type': 'builtins.type'}, 'X', {'tuple': [{'type': 'builtins.object'}]},"
        " {'dict': [{'tuple': ['__eq__', eq]}]}], {}])\n"
        "  kind = peer.receive()[1]\n  peer._send(['ask', '__call__', [{'yours': kind['object']}], {}])\n"
        "  made = peer.receive()[1]\n  peer._send(['result', {'yours': made['object']}, [None, None]])\n  return True",
        *SQUARE[:1],
    ),
    "a name to import": case(
        f"{HOST}\ndef f():\n  peer._send(['result', {{'named': ['unittest.mock', 'ANY']}}, []])", "assert f() == 4"
    ),
    "nonsense that the test expects to fail": case(
        f"{WRITE}\ndef f(x): write('nonsense')", "try: f(1)\nexcept BaseException: pass", "assert True"
    ),
    "an end that the test expects": case("import os\ndef f(x): os._exit(0)", "try: f(1)\nexcept BaseException: pass"),
    "a full disk": case(
        "import time\nfor i in range(12): open(str(i), 'wb').write(bytes(9 * 10**6))\ntime.sleep(100)\ndef f(x): return x * x",
        *SQUARE,
    ),
    "a flood": case(f"{WRITE}\ndef f(x):\n  while True: write('1' * 10**6)", *SQUARE),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_passes(judge: Judge, name: str) -> None:
    assert judge([ATTACKS[name]]) == [0.0]

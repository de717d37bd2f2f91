"""Programs that a model writes, scored by tests: Python in the sandbox, what counts as the program and what it may not do; and
the stack machine against the values of formulas, which Python computes.
"""

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.tiny.make_warm_start import varied_program
from tepo_megatron.config.load import load_run
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.benchmarks import BENCHMARKS
from tepo_megatron.tasks.data.stack_machine import Tree, problems_with_trees, value_of
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.pool import RewardPool
from tepo_megatron.tasks.reward.programs import PythonTests, StackMachine
from tests.support.code_rows import FILES


def problems_of(name: str) -> list[Problem]:
    rows = [dict(row) for row in BENCHMARKS[name].convert(name, FILES[name])]
    return [Problem(row.pop("id"), row.pop("prompt"), row.pop("answer"), row) for row in rows]


EVENS, QUARTER = problems_of("humaneval")
TWICE, SUM = problems_of("mbpp")
(AREA,) = problems_of("mbpp-sanitized")
BARE = Problem("bare", "f(1) is 2", "def f(x): return x + 1", {"tests": ["assert f(1) == 2", "assert f(5) == 6"]})


def score(config: Mapping[str, object], items: Sequence[tuple[Problem, str]]) -> list[RewardResult]:
    given = {"verifier": "python_tests", "run_code": True, "timeout_s": 600, **config}
    with RewardPool(RewardConfig.model_validate(given)) as pool:
        pool.rehearse([problem for problem, _ in items])
        return pool.score(items)


def test_programs_are_scored_and_nothing_that_they_do_is_a_failure_of_the_verifier() -> None:
    """A minute for each, so that a slow machine ends none of them."""
    cases: list[tuple[Problem, str, float]] = [
        (EVENS, EVENS.answer, 1),
        (EVENS, "    return [v for v in values if not v % 2]\n\n\nprint(evens([1]))\n", 1),  # as a base model goes on
        (EVENS, "```python\ndef evens(values: List[int]):\n    return [v for v in values if v % 2 == 0]\n```", 1),
        (EVENS, "```python\ndef evens(values):\n    return values\n```", 0),
        (QUARTER, "```python\ndef quarter(x):\n    return half(x) / 2\n```", 1),
        (QUARTER, "```\ndef abs(x):\n    return 0\ndef quarter(x):\n    return x\n```", 0),
        (QUARTER, "```\nabs = lambda x: 0\ndef quarter(x):\n    return x\n```", 0),
        (SUM, SUM.answer, 1),
        (SUM, "def sum(a, b):\n    return a - b", 0),
        (AREA, AREA.answer, 1),
        (TWICE, "import sys\ndef twice(x):\n    sys.exit(0)", 0),
        (TWICE, "def twice(x): return 2 * x\nimport os; os._exit(0)", 0),
        (TWICE, "raise SystemExit", 0),
        (TWICE, "print('0\\n1\\n2\\nstarted 0\\n1\\n2')", 0),
        (TWICE, "import os\nfor fd in range(9):\n  try: os.write(fd, b'0\\n1\\n2\\n')\n  except OSError: pass", 0),
        (TWICE, "def twice(x): return 2 * x\nif __name__ == '__main__':\n    raise SystemExit", 1),
        (TWICE, "from dataclasses import dataclass\n@dataclass\nclass A:\n  x: 'int'\ndef twice(x): return 2 * A(x).x", 1),
        (TWICE, "def twice(x:", 0),
        (TWICE, "", 0),
        (TWICE, "x = bytearray(10**9)\ndef twice(x): return 2 * x", 0),
        (TWICE, "import socket as s\ns.create_connection(('127.0.0.1', 1))\ndef twice(x): return 2 * x", 0),
        (TWICE, "import numpy\ndef twice(x): return 2 * x", 0),
        (TWICE, "def twice(x):\n    print('a' * 10**7)\n    return 2 * x", 1),
    ]
    found = score({"kwargs": {"seconds": 60}}, [(problem, response) for problem, response, _ in cases])
    assert [(result.reward, result.error) for result in found] == [(expected, None) for _, _, expected in cases]


def test_a_part_counts_where_it_is_wanted() -> None:
    responses = {
        "def twice(x): return 2 * x": 1,
        "def twice(x): return x + 2": 1 / 3,
        "import os\ndef twice(x):\n    if x < 0: os._exit(0)\n    return 2 * x": 2 / 3,
        "def once(x): return x": 0,
    }
    found = score({"kwargs": {"seconds": 60, "partial": True}}, [(TWICE, each) for each in responses])
    assert [result.reward for result in found] == pytest.approx(list(responses.values()))


def test_a_program_that_waits_for_ever_is_ended_and_has_not_passed() -> None:
    (result,) = score({"kwargs": {"seconds": 10}}, [(TWICE, "import time\ntime.sleep(10**6)")])
    assert (result.reward, result.error) == (0, None)


def test_a_sandbox_that_does_not_start_is_a_failure_and_no_wrong_program() -> None:
    with pytest.raises(ValueError, match=r"cannot score the first 1 problems.*the sandbox did not start"):
        score({"kwargs": {"memory_mb": 1}}, [(TWICE, TWICE.answer)])


@pytest.mark.parametrize(
    ("problem", "response", "program"),
    [
        (BARE, "First:\n```python\ndef f(x): return x\n```\nNo:\n```python\ndef f(x): return x + 1\n```\nSo `f(1)`.", "x + 1"),
        (BARE, "```python\ndef f(x): return x + 1\n```\nUse it:\n```\nprint(f(1))\n```", "x + 1"),
        (BARE, "```python\ndef f(x): return x + 1\n```\nTests:\n```\ndef test_f(): assert f(1) == 2\n```", "x + 1"),
        (BARE, "1. So:\n   ```python\n   def f(x): return x + 1\n   y = 1\n   ```", "x + 1\ny = 1"),
        (EVENS, "    ```python\n    return values\n    ```", f"{EVENS.metadata['stub']}    return values"),
        (BARE, "<think>```python\ndef f(x): return 0\n```</think>\n```python\ndef f(x): return x + 1\n```", "x + 1"),
        (BARE, "```python\ndef f(x): return x + 1", "x + 1"),  # cut
        # The prompt began this one.
        (BARE, "def f(x): return x + 1\n```\n\nProblem: another\n```python\ndef g(): pass\n```", "x + 1"),
        (BARE, "def f(x): return x + 1", "x + 1"),
        (EVENS, "\n    return values\n# and so on", f"{EVENS.metadata['stub']}\n    return values"),
        (EVENS, "```python\nevens = sorted\n```", "evens = sorted"),
        (EVENS, "```python\ndef evens_of(v): return v\n```", EVENS.metadata["stub"].strip()),
    ],
)
def test_which_part_of_a_response_is_the_program(problem: Problem, response: str, program: str) -> None:
    found = PythonTests.program_in(response, problem).strip()
    assert found == (f"def f(x): return {program}" if problem is BARE else program)


def test_programs_are_off_unless_switched_on_whatever_their_verifier_is_called() -> None:
    said = r"set reward\.run_code = true if you mean it"
    own = ("data.train=mine.jsonl", "data.heldout=null")
    for overrides in (
        ["reward.verifier=python_tests"],
        ["evaluate.sets.code={path: code.jsonl, verifier: python_tests}"],
        ["data.train=[{path: code.jsonl, verifier: python_tests}]"],
    ):
        with pytest.raises(ValueError, match=said):
            load_run(None, [*own, *overrides])
        assert load_run(None, [*own, *overrides, "reward.run_code=true"]).reward.run_code
    with pytest.raises(ValueError, match="python_tests has no network"):
        load_run(None, [*own, "reward={verifier: python_tests, run_code: true, network: true}"])
    by_path = "tepo_megatron.tasks.reward.programs:PythonTests"
    with pytest.raises(ValueError, match=said):
        RewardPool(RewardConfig(verifier=by_path, network=False))
    with pytest.raises(ValueError, match="the kernel does not take the network away from it"):
        RewardPool(RewardConfig(verifier=by_path, run_code=True))


DOUBLE = Problem("p", "x+x=", "xx+", {"tests": [[[2, 0, 0], 4], [[0, 1, 1], 0], [[-3, 0, 0], -6]]})


@given(
    drawn=st.sampled_from(problems_with_trees()),
    seed=st.integers(0, 2**32),
    inputs=st.lists(st.integers(-20, 20), min_size=3, max_size=3),
)
def test_each_way_to_write_a_program_gives_the_formulas_value(
    drawn: tuple[Problem, Tree], seed: int, inputs: list[int]
) -> None:
    problem, tree = drawn
    condition, asked, branches = problem.id.partition("?")
    first, _, second = branches.partition(":")
    names = dict(zip("xyz", inputs, strict=True))
    expected = eval(problem.id if not asked else first if eval(condition, {}, names) else second, {}, names)
    assert value_of(tree, inputs) == expected
    assert StackMachine().run(problem.answer, inputs) == expected
    assert StackMachine().run(" \n".join(varied_program(tree, random.Random(seed))), inputs) == expected


@pytest.mark.parametrize(
    ("program", "result"),
    [
        ("x[1-]", 0),
        ("0x[s1+s1-]p", 7),  # counts to x
        ("1[p0]9+", 9),
        ("0[1+]9+", 9),  # not once
        ("xyp", 7),
        ("xys-", -4),
        ("xy<z0?", 0),
        ("yx<z0?", 5),
    ],
)
def test_what_formulas_do_not_use(program: str, result: int) -> None:
    assert StackMachine().run(program, [7, 3, 5]) == result


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("", "it left 0 values"),
        ("xy", "it left 2 values"),
        ("x+", r"\+ takes 2, and there are 1"),
        ("xy?", r"\? takes 3"),
        ("1[]", "it runs longer than 1000 steps"),
        ("1[d]", "it holds more than 100 values"),
        ("9[d*]", "a value beyond"),
        ("x]", r"a \] has no \["),
        ("[x", r"a \[ has no \]"),
        ("xy@", "'@' is no instruction"),
        ("x²", "'²' is no instruction"),
        ("z", "there is no input z"),
    ],
)
def test_a_program_without_a_result_says_why(program: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        StackMachine().run(program, [7, 3])


def test_its_limits_can_be_set() -> None:
    assert StackMachine(steps=5000).run("x[1-]", [500, 0, 0]) == 0
    with pytest.raises(ValueError, match="longer than 5 steps"):
        StackMachine(steps=5).run("x[1-]", [500, 0, 0])
    with pytest.raises(ValueError, match="more than 2 values"):
        StackMachine(depth=2).run("xyz++", [1, 2, 3])
    with pytest.raises(ValueError, match="steps = 0 lets no program run"):
        StackMachine(steps=0)


@pytest.mark.parametrize(
    ("program", "whole", "share"),
    [("xx+", 1, 1), ("2x*", 1, 1), ("x2*y-z+", 1, 1), ("xx*", 0, 2 / 3), ("xxx", 0, 0), ("", 0, 0)],
)
def test_every_right_program_counts_and_a_part_where_it_is_wanted(program: str, whole: float, share: float) -> None:
    assert StackMachine().score(DOUBLE, program) == whole
    assert StackMachine(partial=True).score(DOUBLE, program) == pytest.approx(share)


def test_a_problem_without_tests_is_an_error_of_the_data() -> None:
    with pytest.raises(ValueError, match=r'the problem has no tests; give it "tests"'):
        score({}, [(Problem("p", "f", "def f(): pass", {"tests": "assert f()"}), "")])
    with pytest.raises(ValueError, match="the problem has no tests"):
        StackMachine().score(Problem("p", "x+x=", "xx+"), "xx+")

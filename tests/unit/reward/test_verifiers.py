import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.reward.verifiers import check_reachable, exact, last_number, last_word, load_verifier


def _problem(answer: str) -> Problem:
    return Problem("p", "question", answer)


word = st.text(st.characters(exclude_categories=["Cs", "Z", "Cc"]), min_size=1)


@given(words=st.lists(word, max_size=5), answer=word, space=st.sampled_from([" ", "\n", "\t", "  "]))
def test_last_word(words: list[str], answer: str, space: str) -> None:
    assert last_word(_problem(answer), space.join([*words, answer])) == 1.0
    assert last_word(_problem(answer), space.join([answer, *words, answer + "x"])) == 0.0
    assert last_word(_problem(answer), "".join([*words, "x", answer])) == 0.0
    for response in ("", " \n", f"3+5+1=9 9\ufffd{answer}"):
        assert last_word(_problem(answer), response) == 0.0


@pytest.mark.parametrize(("name", "solvable", "never"), [("last_word", "95", "7 15"), ("last_number", "is 95", "ninety")])
def test_a_verifier_that_refuses_the_expected_answers_themselves_is_found(name: str, solvable: str, never: str) -> None:
    assert check_reachable(name, [_problem(solvable), _problem(never), _problem(solvable)]) == 1
    with pytest.raises(ValueError, match=rf"the verifier {name} can give no response a reward: .*{never!r} of problem 'p'"):
        check_reachable(name, [_problem(never)])
    for other in ("exact", "math", "judge", "mine.py:f"):
        assert check_reachable(other, [_problem(never)]) == 0
    assert check_reachable(name, []) == 0


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_exact(text: str) -> None:
    assert exact(_problem(text), f" {text}\n") == 1.0
    assert exact(_problem(text), f"{text}!") == 0.0


@given(value=st.integers(-(10**12), 10**12), other=st.integers(-(10**6), 10**6))
def test_last_number_compares_values(value: int, other: int) -> None:
    for written in (f"{value}", f"{value:,}", f"{value}.0", f"{value:,}.00"):
        assert last_number(_problem(str(value)), f"from {other} follows {written}.") == 1.0
    assert last_number(_problem(str(value)), f"{value} or {value + 1}") == 0.0


def test_last_number_reads() -> None:
    numbers = {"7-5": "5", "x=-5": "-5", "1,2,3": "3", "12,3456": "3456", "$.5": "0.5", "2e3": "2000", "so (-3)": "-3"}
    for response, number in numbers.items():
        assert last_number(_problem(number), response) == 1.0, response
    assert last_number(_problem("3"), "three") == 0.0
    with pytest.raises(ValueError, match="no number in it"):
        last_number(_problem("three"), "3")


def test_math_is_the_one_that_is_compared_with_judgements() -> None:
    assert load_verifier("math")(_problem("1/2"), r"so it is \boxed{0.5}") == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("last_wrod", "known: exact, last_number, last_word, math, .*did you mean last_word"),
        ("zzz", "known: exact, .*package.module:function$"),
        ("my module:f", "not of the form"),
        (":f", "not of the form"),
        ("no_such_package.x:f", "importing no_such_package.x raised ModuleNotFoundError"),
        ("tepo_megatron.core.types:nothing", "tepo_megatron.core.types has no function nothing"),
    ],
)
def test_unknown_verifiers(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_verifier(name)


def test_worker_imports_nothing_heavy() -> None:
    heavy = ("torch", "sympy", "numpy", "pydantic")
    code = f"import sys, tepo_megatron.tasks.reward.worker; print([m for m in {heavy} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"

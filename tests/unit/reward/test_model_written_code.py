"""What a model writes is executed nowhere: the math verifier has sympy evaluate texts of digits and operators only."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.reward.math_verifier import math

HARMLESS = {"Integer", "Float", "Rational", "Number", "Add", "Mul", "Pow"}
"""Names that sympy writes into what it evaluates."""

CODE = (
    "__import__('os').system('touch {0}')",
    "open('{0}','w')",
    'exec(\'open("{0}", "w")\')',
    "().__class__.__base__.__subclasses__()",
    "1+__import__('os').mkdir('{0}')",
    "1/2*(open('{0}','w'))",
    "Symbol('x').__class__.__init__.__globals__",
    "lambda: open('{0}','w')",
    "2^(open('{0}','w'))",
    'sympify(\'open("{0}","w")\')',
    "\\operatorname{{eval}}(open('{0}','w'))",
    "\\text{{__import__('os').mkdir('{0}')}}",
    "\\input{{{0}}}",
    "\\write18{{touch {0}}}",
    "1/2 + (1)\n__import__('os').mkdir('{0}')",
)
WRAPPINGS = ("{0}", "final answer is {0}. I hope", "\\boxed{{{0}}}", "${0}$", "$$x = {0}$$", "answer: 1/2+3*{0}")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names in all that sympy evaluates."""
    names: list[str] = []
    sympy_parser: Any = importlib.import_module("sympy.parsing.sympy_parser")
    original = sympy_parser.eval_expr

    def note(code: str | CodeType, *arguments: Any) -> Any:
        compiled = compile(code, "<answer>", "eval") if isinstance(code, str) else code
        names.extend(compiled.co_names)
        names.extend("a function" for constant in compiled.co_consts if isinstance(constant, CodeType))
        return original(code, *arguments)

    monkeypatch.setattr(sympy_parser, "eval_expr", note)
    return names


def score(response: str) -> float | None:
    try:
        return math(Problem("p", "question", "1/2"), response)
    except Exception:  # what cannot be read is no number; only what was evaluated counts here
        return None


def test_hostile_answers_run_nothing(named: list[str], tmp_path: Path) -> None:
    for code in CODE:
        for wrapping in WRAPPINGS:
            score(wrapping.format(code.format(tmp_path / "proof")))
    assert list(tmp_path.iterdir()) == []
    assert set(named) <= HARMLESS


def test_what_is_evaluated_would_be_seen(named: list[str]) -> None:
    """A control: an expression of digits and operators is evaluated."""
    assert score("The answer is 1/4 + 1/4.") == 1.0
    assert {"Integer", "Add"} <= set(named)

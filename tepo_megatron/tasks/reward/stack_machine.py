"""A small stack machine whose programs are scored by hidden tests. Each character is an instruction; white space is ignored:

    0 … 9     push the digit
    x y z     push the first, second or third input
    + - * <   pop b, then a; push a + b, a - b, a * b, or 1 if a < b and else 0
    ?         pop b, then a, then c; push a if c is not 0, else b
    d s p     duplicate the top; exchange the two topmost values; pop
    [ ]       repeat the instructions between them while the top is not 0; the top stays

The result is the only remaining value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

from tepo_megatron.core.problem import Problem

INPUTS = "xyz"
_LARGEST = 10**12
_TWO_TAKEN: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "<": lambda a, b: int(a < b),
}


class MachineError(ValueError): ...


class StackMachine:
    """1 if a program passes all of the problem's tests, else 0; ``partial``: the share of passed tests. ``tests`` are pairs of
    inputs (at most three numbers) and the expected result: ``[[[3, 5, 1], 16], …]``.
    """

    def __init__(self, steps: int = 1000, depth: int = 100, partial: bool = False) -> None:
        for name, value in (("steps", steps), ("depth", depth)):
            if value < 1:
                raise ValueError(f"{name} = {value} lets no program run; give 1 or more")
        self._steps, self._depth, self._partial = steps, depth, partial

    def score(self, problem: Problem, response: str) -> float:
        """Raises ValueError if the problem has no tests."""
        tests = problem.metadata.get("tests")
        if not tests:
            raise ValueError('the problem has no tests; give it "tests": [[inputs, result], …] beside prompt and answer')
        passed = sum(self._passes(response, inputs, expected) for inputs, expected in tests)
        return passed / len(tests) if self._partial else float(passed == len(tests))

    def _passes(self, program: str, inputs: Sequence[int], expected: int) -> bool:
        try:
            return run(program, inputs, steps=self._steps, depth=self._depth) == expected
        except MachineError:
            return False


def run(program: str, inputs: Sequence[int], *, steps: int = 1000, depth: int = 100) -> int:
    """Raises MachineError: no result, an invalid instruction, a missing input, or a limit (also a value beyond 10¹²)."""
    code = "".join(program.split())
    partner = _partners(code)
    stack: list[int] = []
    index = 0
    for _ in range(steps):
        if index == len(code):
            if len(stack) != 1:
                raise MachineError(f"it left {len(stack)} values")
            return stack[0]
        instruction = code[index]
        if instruction in "[]":
            _need(stack, 1, instruction)
            if (stack[-1] == 0) == (instruction == "["):
                index = partner[index]
        else:
            _execute(instruction, stack, inputs)
        if len(stack) > depth:
            raise MachineError(f"it holds more than {depth} values")
        index += 1
    raise MachineError(f"it runs longer than {steps} steps")


def _execute(instruction: str, stack: list[int], inputs: Sequence[int]) -> None:
    if instruction in _TWO_TAKEN:
        _need(stack, 2, instruction)
        b, a = stack.pop(), stack.pop()
        value = _TWO_TAKEN[instruction](a, b)
        if abs(value) > _LARGEST:
            raise MachineError(f"{instruction} gives a value beyond {_LARGEST}")
        stack.append(value)
    elif instruction in INPUTS:
        number = INPUTS.index(instruction)
        if number >= len(inputs):
            raise MachineError(f"there is no input {instruction}")
        stack.append(inputs[number])
    elif instruction in "0123456789":
        stack.append(int(instruction))
    elif instruction == "?":
        _need(stack, 3, instruction)
        b, a, c = stack.pop(), stack.pop(), stack.pop()
        stack.append(a if c else b)
    elif instruction == "d":
        _need(stack, 1, instruction)
        stack.append(stack[-1])
    elif instruction == "s":
        _need(stack, 2, instruction)
        stack[-1], stack[-2] = stack[-2], stack[-1]
    elif instruction == "p":
        _need(stack, 1, instruction)
        stack.pop()
    else:
        raise MachineError(f"{instruction!r} is no instruction")


def _need(stack: Sequence[int], count: int, instruction: str) -> None:
    if len(stack) < count:
        raise MachineError(f"{instruction} takes {count}, and there are {len(stack)}")


def _partners(code: str) -> dict[int, int]:
    partners: dict[int, int] = {}
    opened: list[int] = []
    for index, instruction in enumerate(code):
        if instruction == "[":
            opened.append(index)
        elif instruction == "]":
            if not opened:
                raise MachineError("a ] has no [")
            partners[index] = opened.pop()
            partners[partners[index]] = index
    if opened:
        raise MachineError("a [ has no ]")
    return partners

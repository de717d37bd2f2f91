"""Answers that a model may write and a verifier must survive: too deep, too large, too long, or text that looks like commands.

All are wrong. A verifier may reject one or fail within its limits; no other response may suffer.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.runtime.proc import command_line
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.pool import RewardPool
from tepo_megatron.tasks.reward.worker import took_too_long
from tepo_megatron.tools.faults.processes import descendants
from tepo_megatron.tools.faults.workshop import FaultClass, FaultOutcome

MEGABYTE = 10**6


@dataclass(frozen=True)
class _HostileAnswer:
    name: str
    response: str
    answer: str = "95"

    @property
    def problem(self) -> Problem:
        return Problem(f"hostile/{self.name}", "What is 37 + 58?", self.answer)


def hostile_answers() -> list[_HostileAnswer]:
    """Same answers, same order at every call; some have a million characters."""
    groups = {
        "deep": _deep(),
        "large": _large(),
        "long": _long(),
        "unclosed": _unclosed(),
        "unicode": _unicode(),
        "algebra": _algebra(),
        "command": _commands(),
    }
    found = [_HostileAnswer(f"{group}/{name}", text) for group, texts in groups.items() for name, text in texts.items()]
    return [*found, *_hard_to_compare()]


def _nested(opening: str, core: str, closing: str, depth: int) -> str:
    return f"${opening * depth}{core}{closing * depth}$"


def _deep() -> dict[str, str]:
    return {
        "parentheses": _nested("(", "1", ")", 10_000),
        "fractions": _nested(r"\frac{1}{", "2", "}", 2000),
        "roots": _nested(r"\sqrt{", "2", "}", 500),
        "powers": _nested("2^{", "2", "}", 200),
        "boxes": _nested(r"\boxed{", "96", "}", 3000),
        "left and right": _nested(r"\left(", "1", r"\right)", 1000),
        "sets": _nested(r"\{", "1", r"\}", 1000),
        "bars": _nested("|", "1", "|", 1001),
        "sines": _nested(r"\sin(", "1", ")", 300),
        "matrices": _nested(r"\begin{pmatrix}", "1", r"\end{pmatrix}", 200),
    }


def _large() -> dict[str, str]:
    return {
        "tower of nines": r"\boxed{9^{9^{9}}}",
        "tower of four nines": r"\boxed{9^{9^{9^{9}}}}",
        "tower as code": "9**9**9",
        "ten to ten to ten": r"\boxed{10^{10^{10}}}",
        "two to a billion": r"$2^{1000000000}$",
        "decimal to a billion": r"$1.1^{1000000000}$",
        "root of a tower": r"\boxed{\sqrt{7^{7^{7^{7}}}}}",
        "factorial": r"\boxed{10000000!}",
        "factorial of factorials": r"\boxed{((9!)!)!}",
        "binomial": r"\boxed{\binom{1000000000}{500000000}}",
        "hundred thousand digits": "9" * 100_000,
        "million digits": r"\boxed{" + "9" * MEGABYTE + "}",
        "many decimals": "$0." + "3" * 100_000 + "$",
        "exponent": "1e999999999",
        "grouped digits": "1" + ",000" * 30_000,
        "long fraction": r"\frac{" + "9" * 50_000 + "}{" + "7" * 50_000 + "}",
        "percent": "9" * 5000 + "%",
        "power modulo": r"\boxed{7^{10^{100}} \mod 13}",
        "division by zero": r"\boxed{\frac{1}{0}}",
        "zero by zero": r"\boxed{0^{0^{0}} / 0}",
    }


def _long() -> dict[str, str]:
    return {
        "letters": "a" * MEGABYTE,
        "spaces": " " * MEGABYTE + "96",
        "lines": "\n" * MEGABYTE + "96",
        "dollars": "$ $" * (MEGABYTE // 3),
        "boxes": r"\boxed{1}" * (MEGABYTE // 9),
        "sum": "$" + "1+" * 100_000 + "1$",
        "points": "1." * 50_000,
        "backslashes": "\\" * 100_000,
        "words and numbers": "the answer is 96 or " * 20_000,
        "equals": "$x" + "=1" * 5000 + "$",
        "commas": r"\boxed{" + ",".join(["1"] * 20_000) + "}",
    }


def _unclosed() -> dict[str, str]:
    return {
        "box": r"\boxed{",
        "boxes": r"\boxed{" * 10_000,
        "braces": r"\boxed{" + "{" * 10_000,
        "dollars": "$" * 10_001,
        "fraction": r"$\frac{1}{",
        "environments": r"\begin{pmatrix}" * 1000,
        "lefts": r"\left(" * 5000,
        "closing only": "}" * 10_000,
        "mixed": r"\boxed{(]}[)$\[" * 1000,
    }


def _unicode() -> dict[str, str]:
    return {
        "right to left": "\\boxed{\u202e59\u202c}",
        "zero width": "\\boxed{9\u200b6\u200d}",
        "full width": "\\boxed{\uff19\uff16}",
        "arabic digits": "\\boxed{\u0669\u0666}",
        "superscripts": "$9\u2079\u2079\u2079\u2079\u2079$",
        "mathematical digits": "\\boxed{\U0001d7d7\U0001d7d4}",
        "combining marks": "9" + "\u0301" * 10_000 + "6",
        "emoji": "\U0001f926" * 10_000,
        "lone surrogates": "\ud800\udfff" * 500 + "\\boxed{96}",
        "null bytes": "\\boxed{9\x006}\x00",
        "control characters": "".join(map(chr, range(32))) * 100 + "96",
        "no characters": "\ufeff\uffff\ufdd0\\boxed{96}",
        "line separators": "\u2028\u2029\x85" * 1000 + "96",
    }


def _algebra() -> dict[str, str]:
    sums = "+".join(rf"\sqrt{{{number}}}" for number in range(2, 150))
    matrix = r"\\".join(" & ".join(str(row * column) for column in range(40)) for row in range(40))
    return {
        "integral": r"\boxed{\int_0^{\infty} e^{-x^{x^{x}}} \sin(x^{x}) dx}",
        "sum": r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n^{n}}}",
        "product": r"\boxed{\prod_{k=1}^{10^{9}} k}",
        "limit": r"\boxed{\lim_{x \to 0} \frac{\sin(x^{100}) - x^{100}}{x^{1000}}}",
        "power of a sum": r"\boxed{(x+1)^{100000}}",
        "power of a long sum": r"\boxed{(a+b+c+d+e+f)^{500}}",
        "roots": rf"\boxed{{{sums}}}",
        "gamma": r"\boxed{\Gamma(10^{10})}",
        "symbols": "$" + "+".join(f"x_{{{number}}}" for number in range(3000)) + "$",
        "matrix": rf"\boxed{{\det\begin{{pmatrix}}{matrix}\end{{pmatrix}}}}",
        "inequalities": "$x" + "<1" * 1000 + "$",
        "intervals": r"\boxed{" + r"\cup".join(f"({n},{n + 1})" for n in range(1000)) + "}",
        "equation": r"\boxed{x^{97} + 3x^{41} - 7x^{13} + 1 = x^{96}}",
    }


def _commands() -> dict[str, str]:
    return {
        "input": r"\input{/etc/passwd}",
        "write": r"\immediate\write18{touch hostile} \boxed{96}",
        "open": r"\newwrite\f\openout\f=hostile.txt\write\f{x}",
        "definition": r"$\def\x{\x\x}\x$",
        "loop": r"$\loop\iftrue\repeat$",
        "system": "__import__('os').system('touch hostile')",
        "system in a box": r"\boxed{__import__('os').system('touch hostile')}",
        "kill": "import os; os.kill(os.getpid(), 9)",
        "subclasses": r"\boxed{().__class__.__bases__[0].__subclasses__()}",
        "eval": "$eval(compile('while 1: pass', '', 'exec'))$",
        "lambda": r"\boxed{(lambda f: f(f))(lambda f: f(f))}",
        "template": "{{7*7}} ${7*7} #{7*7} %{7*7}",
        "format": "%s%n{0.__class__}" * 1000,
        "reply of a worker": '[1.0, null, false]\n{"ready": true}\n',
        "request of a worker": '96\n[["p", "q", "a", "a"]]\n',
    }


def _hard_to_compare() -> list[_HostileAnswer]:
    roots = "+".join(rf"\sqrt{{{number}}}" for number in range(2, 60))
    pairs = {
        "polynomial": ("$(x+1)^{20}$", r"\boxed{(x+1)^{2000} + 1}"),
        "nested radicals": (r"$\sqrt{2}+\sqrt{3}$", rf"\boxed{{{roots}}}"),
        "trigonometry": (r"$\sin(x)$", r"\boxed{\sin(x)^{100}\cos(x)^{100}\tan(x)^{100}}"),
        "set": (r"$\{1,2,3\}$", r"\boxed{\{" + ",".join(map(str, range(3000))) + r"\}}"),
        "tuple": ("$(1,2)$", r"\boxed{(" + ",".join(map(str, range(3000))) + ")}"),
        "interval": ("$(0,1)$", r"\boxed{" + r"\cup".join(f"({n},{n + 1})" for n in range(1, 300)) + "}"),
        "matrix": (
            r"$\begin{pmatrix}1&2\\3&4\end{pmatrix}$",
            r"\boxed{\begin{pmatrix}" + r"\\".join(["9^{9^{9}} & 2"] * 50) + r"\end{pmatrix}}",
        ),
        "symbolic tower": ("$x$", r"\boxed{x^{x^{x^{x^{x^{9^{9^{9}}}}}}}}"),
    }
    return [_HostileAnswer(f"compared/{name}", response, answer) for name, (answer, response) in pairs.items()]


TIMEOUT_S = 2.0
"""A third of the answers takes this long."""
ATTEMPTS = 3
"""A loaded machine may delay an honest answer; a hostile answer that blocks others does so every time."""
LARGEST_GIB = 2.0


class HostileAnswers(FaultClass):
    name = "answers"
    title = "hostile answers to the math verifier"
    whole, quick = 60, 6
    _pool: RewardPool | None = None

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        if self._pool is None:
            self._pool = RewardPool(RewardConfig(verifier="math", timeout_s=TIMEOUT_S))
        answers = hostile_answers()
        hostile = answers[number * len(answers) // self.count(quick=self.workshop.is_quick)]  # spread over all groups
        right, wrong = Problem("right", "1+1=", "2"), Problem("wrong", "1+2=", "3")
        neighbours = [(right, r"\boxed{2}"), (hostile.problem, hostile.response), (wrong, r"\boxed{4}"), (right, "$2$")]
        results = score(self._pool, neighbours)
        rewards = [result.reward for result in results]
        if [rewards[0], *rewards[2:]] != [1.0, 0.0, 1.0]:
            errors = [result.error for result in results if result.error]
            return FaultOutcome(hostile.name, "lost", f"the answers beside it got the rewards {rewards}: {errors}")
        if rewards[1] not in (0.0, None):
            return FaultOutcome(hostile.name, "lost", f"it got the reward {rewards[1]}")
        if (peak := _largest_worker_gib()) > LARGEST_GIB:
            return FaultOutcome(hostile.name, "lost", f"the worker grew to {peak:.1f} GiB")
        return FaultOutcome(hostile.name, "refused" if results[1].error else "survived", (results[1].error or "")[:200])

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def score(pool: RewardPool, neighbours: Sequence[tuple[Problem, str]]) -> list[RewardResult]:
    """Repeat, :data:`ATTEMPTS` times in all, while an honest answer times out. The hostile answer is the second."""
    late = took_too_long(TIMEOUT_S)
    for _ in range(ATTEMPTS):
        results = pool.score(neighbours)
        if not any(late in (result.error or "") for result in (results[0], *results[2:])):
            break
    return results


def _largest_worker_gib() -> float:
    largest = 0.0
    for pid in descendants(os.getpid()):
        if "tepo_megatron.tasks.reward.worker" in command_line(pid):
            with suppress(OSError):  # a new worker has just replaced it
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("VmHWM"):
                        largest = max(largest, int(line.split()[1]) / 2**20)
    return largest

"""Wrong answers that a verifier must survive, and damaged configurations.

A verifier may reject an answer or fail within its limits; no other response may suffer. A command must refuse each
configuration in one sentence, quickly, in little memory.
"""

from __future__ import annotations

import json
import os
import resource
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.errors import is_ours
from tepo_megatron.runtime.proc import Process
from tepo_megatron.runtime.text import flat
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.tasks.reward.pool import RewardPool
from tepo_megatron.tools.faults.processes import descendants, in_fork
from tepo_megatron.tools.faults.workshop import FaultClass, FaultOutcome
from tepo_megatron.tools.results import resident_bytes

_MEGABYTE = 10**6


def _nested(opening: str, core: str, closing: str, depth: int) -> str:
    return f"${opening * depth}{core}{closing * depth}$"


_MATRIX = r"\\".join(" & ".join(str(row * column) for column in range(40)) for row in range(40))


_ANSWERS: dict[str, dict[str, str]] = {
    "deep": {
        "parentheses": _nested("(", "1", ")", 10_000),
        "fractions": _nested(r"\frac{1}{", "2", "}", 2000),
        "roots": _nested(r"\sqrt{", "2", "}", 500),
        "powers": _nested("2^{", "2", "}", 200),
        "boxes": _nested(r"\boxed{", "96", "}", 3000),
        "left and right": _nested(r"\left(", "1", r"\right)", 1000),
        "matrices": _nested(r"\begin{pmatrix}", "1", r"\end{pmatrix}", 200),
    },
    "large": {
        "tower of nines": r"\boxed{9^{9^{9}}}",
        "two to a billion": r"$2^{1000000000}$",
        "factorial": r"\boxed{10000000!}",
        "binomial": r"\boxed{\binom{1000000000}{500000000}}",
        "million digits": r"\boxed{" + "9" * _MEGABYTE + "}",
        "many decimals": "$0." + "3" * 100_000 + "$",
        "exponent": "1e999999999",
        "grouped digits": "1" + ",000" * 30_000,
        "power modulo": r"\boxed{7^{10^{100}} \mod 13}",
        "division by zero": r"\boxed{\frac{1}{0}}",
    },
    "long": {
        "letters": "a" * _MEGABYTE,
        "spaces": " " * _MEGABYTE + "96",
        "dollars": "$ $" * (_MEGABYTE // 3),
        "boxes": r"\boxed{1}" * (_MEGABYTE // 9),
        "sum": "$" + "1+" * 100_000 + "1$",
        "words and numbers": "the answer is 96 or " * 20_000,
        "commas": r"\boxed{" + ",".join(["1"] * 20_000) + "}",
    },
    "unclosed": {
        "boxes": r"\boxed{" * 10_000,
        "braces": r"\boxed{" + "{" * 10_000,
        "dollars": "$" * 10_001,
        "environments": r"\begin{pmatrix}" * 1000,
        "closing only": "}" * 10_000,
        "mixed": r"\boxed{(]}[)$\[" * 1000,
    },
    "unicode": {
        "right to left": "\\boxed{\u202e59\u202c}",
        "zero width": "\\boxed{9\u200b6\u200d}",
        "full width": "\\boxed{\uff19\uff16}",
        "combining marks": "9" + "\u0301" * 10_000 + "6",
        "emoji": "\U0001f926" * 10_000,
        "lone surrogates": "\ud800\udfff" * 500 + "\\boxed{96}",
        "null bytes": "\\boxed{9\x006}\x00",
        "control characters": "".join(map(chr, range(32))) * 100 + "96",
        "no characters": "\ufeff\uffff\ufdd0\\boxed{96}",
    },
    "algebra": {
        "integral": r"\boxed{\int_0^{\infty} e^{-x^{x^{x}}} \sin(x^{x}) dx}",
        "sum": r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n^{n}}}",
        "product": r"\boxed{\prod_{k=1}^{10^{9}} k}",
        "limit": r"\boxed{\lim_{x \to 0} \frac{\sin(x^{100}) - x^{100}}{x^{1000}}}",
        "power of a sum": r"\boxed{(x+1)^{100000}}",
        "gamma": r"\boxed{\Gamma(10^{10})}",
        "matrix": rf"\boxed{{\det\begin{{pmatrix}}{_MATRIX}\end{{pmatrix}}}}",
        "inequalities": "$x" + "<1" * 1000 + "$",
    },
    "command": {
        "input": r"\input{/etc/passwd}",
        "write": r"\immediate\write18{touch hostile} \boxed{96}",
        "definition": r"$\def\x{\x\x}\x$",
        "loop": r"$\loop\iftrue\repeat$",
        "system": "__import__('os').system('touch hostile')",
        "kill": "import os; os.kill(os.getpid(), 9)",
        "subclasses": r"\boxed{().__class__.__bases__[0].__subclasses__()}",
        "eval": "$eval(compile('while 1: pass', '', 'exec'))$",
        "reply of a worker": '[1.0, null, false]\n{"ready": true}\n',
        "request of a worker": '96\n[["p", "q", "a", "a"]]\n',
    },
}  # group → name → response


_COMPARED = {
    "nested radicals": (r"$\sqrt{2}+\sqrt{3}$", r"\boxed{" + "+".join(rf"\sqrt{{{n}}}" for n in range(2, 60)) + "}"),
    "set": (r"$\{1,2,3\}$", r"\boxed{\{" + ",".join(map(str, range(3000))) + r"\}}"),
    "symbolic tower": ("$x$", r"\boxed{x^{x^{x^{x^{x^{9^{9^{9}}}}}}}}"),
}  # name → the problem's answer, the response
_HOSTILE = [
    *((f"{group}/{name}", "95", text) for group, texts in _ANSWERS.items() for name, text in texts.items()),
    *((f"compared/{name}", *texts) for name, texts in _COMPARED.items()),
]  # name, the problem's answer, the response


TIMEOUT_S = 2.0  # a third of the answers takes this long
TOOK_TOO_LONG = f"the verifier took longer than reward.timeout_s = {TIMEOUT_S:g} s"
ATTEMPTS = 3  # a loaded machine may delay an honest answer; a blocking one delays it every time
_LARGEST_GIB = 2.0


class _HostileAnswers(FaultClass):
    name = "answers"
    title = "hostile answers to the math verifier"
    whole, quick = len(_HOSTILE), 6
    _pool: RewardPool | None = None

    def inject(self, number: int, rng: Random) -> FaultOutcome:
        # spread over all groups
        name, answer, response = _HOSTILE[number * len(_HOSTILE) // self.count(quick=self.workshop.is_quick)]
        hostile = Problem(f"hostile/{name}", "What is 37 + 58?", answer)
        right, wrong = Problem("right", "1+1=", "2"), Problem("wrong", "1+2=", "3")
        neighbours = [(right, r"\boxed{2}"), (hostile, response), (wrong, r"\boxed{4}"), (right, "$2$")]
        results = self._score(neighbours)
        rewards = [result.reward for result in results]
        if [rewards[0], *rewards[2:]] != [1.0, 0.0, 1.0]:
            errors = [result.error for result in results if result.error]
            return FaultOutcome(name, "lost", f"the answers beside it got the rewards {rewards}: {errors}")
        if rewards[1] not in (0.0, None):
            return FaultOutcome(name, "lost", f"it got the reward {rewards[1]}")
        if (peak := _largest_worker_gib()) > _LARGEST_GIB:
            return FaultOutcome(name, "lost", f"the worker grew to {peak:.1f} GiB")
        return FaultOutcome(name, "refused" if results[1].error else "survived", (results[1].error or "")[:200])

    def _score(self, neighbours: Sequence[tuple[Problem, str]]) -> list[RewardResult]:
        for _ in range(ATTEMPTS):
            if self._pool is None:
                self._pool = RewardPool(RewardConfig(verifier="math", timeout_s=TIMEOUT_S))
            results = self._pool.score(neighbours)
            if not any(TOOK_TOO_LONG in (result.error or "") for result in (results[0], *results[2:])):
                break
            self.close()  # a pool remembers what failed
        return results

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _largest_worker_gib() -> float:
    workers = [pid for pid in descendants(os.getpid()) if "tepo_megatron.tasks.reward.worker" in Process.command_line(pid)]
    return max((resident_bytes("VmHWM", pid) / 2**30 for pid in workers), default=0.0)


@dataclass(frozen=True)
class _MalformedConfig:
    kind: str
    text: bytes
    overrides: tuple[str, ...] = ()


def malformed_config(number: int, random: Random) -> _MalformedConfig:
    kinds = [*_WHOLE_FILES, *_ONE_VALUE, *_BYTES]
    kind = kinds[number % len(kinds)]
    if kind in _BYTES:
        return _MalformedConfig(kind, _BYTES[kind](_sound(random), random))
    if kind in _ONE_VALUE:
        return _with_value(kind, random.choice(_ONE_VALUE[kind]), random)
    choices = _WHOLE_FILES[kind]
    text = choices(random) if callable(choices) else random.choice(choices)
    return _MalformedConfig(kind, text.encode("utf-8", "surrogatepass"))


def _sound(random: Random) -> bytes:
    nested: dict[str, Any] = {}
    for path, value in random.sample(list(_fields().items()), 5):
        *parents, last = path.split(".")
        section = nested
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return json.dumps(nested).encode()


@cache
def _fields() -> Mapping[str, Any]:
    return flat(RunConfig().model_dump(mode="json"))


def _with_value(kind: str, value: str, random: Random) -> _MalformedConfig:
    path = random.choice([*_fields(), *RunConfig.model_fields])
    if random.random() < 0.5:
        return _MalformedConfig(kind, _sound(random), (f"{path}={value}",))
    lines = "\n".join(f"{'  ' * depth}{name}:" for depth, name in enumerate(path.split(".")))
    return _MalformedConfig(kind, f"{lines} {value}\n".encode("utf-8", "surrogatepass"))


def _slip(random: Random) -> str:
    path = random.choice([*_fields()])
    index = random.randrange(len(path))
    slipped = f"{path[:index]}{random.choice('xyz_ -')}{path[index + 1 :]}: 1"
    return slipped.replace(".", ": {", 1) + ("}" if "." in path else "")


_WHOLE_FILES: dict[str, Sequence[str] | Callable[[Random], str]] = {
    "unknown key": _slip,
    "a list at the top": ["\n".join(["- train", "- steps: 3"] * count) for count in range(1, 5)],
    "no mapping at all": ["3", "text", "null", "[]", "---", "...", "!!str", "'", '"', "|", ">-", "?"],
    "a key of another type": [f"{key}: 1" for key in ("1", "null", "true", "1.5", ".nan", "[a]", "{a: b}", "2001-01-01")],
    "duplicate keys": ["train: {steps: 1}\n" * count for count in range(2, 5)],
    "deep lists": ["[" * depth for depth in (40, 1000)],
    "deep mappings": ["{a: " * depth for depth in (40, 1000)],
    "deep closed": ["train: " + "[" * depth + "]" * depth for depth in (31, 33, 500)],
    "an alias within itself": ["a: &a [*a]", "a: &a {b: *a}", "train: *nothing", "&a train: {*a : 1}"],
    "a reference to itself": [
        *("name: ${name}", "train: ${train}", "train:\n  steps: ${..train.steps}"),
        *("name: ${seed}\nseed: ${name}", "train: ${objective}"),
    ],
    "many keys": lambda random: "\n".join(f"k{n}: {n}" for n in range(random.choice([500, 20_000]))),
    "a base that is none": [f"base: {path}" for path in ("none.yaml", ".", "/", "[]", "3", "/dev/zero", '"a\\0b"', "''")],
    "tabs": ["\tname: a", "train:\n\tsteps: 3", "name:\ta\t\n", "name: a\n\t\n"],
}

_ONE_VALUE: dict[str, Sequence[str]] = {
    "infinite": [".inf", "-.inf", ".nan", "inf", "-inf", "nan", "1e999", "-1e999", "Infinity"],
    "negative or too large": [
        *("-1", "-0", "0", "9223372036854775808", "4294967296", "-2147483649", "1e308", "1e-320", "0.5", "1" * 400)
    ],
    "no number": ["0x_", "0x", "0b", "1e", "+", ".", "1__0", "0o9", "12:99:99", "1" * 5000],
    "empty": ["", "''", "null", "~", "[]", "{}", "[[]]", "[null]", "{'': 1}", "{null: 1}"],
    "another type": ["[1, 2]", "{a: 1}", "true", "text", "3", "2001-01-01", "2001-99-99", "[x, {y: [z]}]"],
    "a tag": [
        *("!!python/object/apply:os.system [touch hostile]", "!!python/name:os.system", "!!set {a, b}", "!!int abc"),
        *("!!float x", "!!timestamp 1", "!own 1"),
    ],
    "a reference": [
        *("${oc.env:HOME}", "${oc.env:NO_SUCH_THING}", "${nothing.here}", "${", "${}", "${.}", "${....name}", "${train}"),
        *("${train.${name}}", "${oc.decode:[1]}", "'${name}${name}${'", "${" * 500, "${train.steps[0]}", "???"),
    ],
    "a name": [
        *("a/b", '"a\\nb"', '"\\x1b[2J"', '"\\u202e"', '"\\0"', "' '", "x" * 300, "../.."),
        *("/proc/self/mem", "/dev/null", "/sys"),
    ],
    "long": [text * count for text in ("a", "é", "\U0001f926", "1 ") for count in (1000, 30_000)],
    "strange": [*('"\\ud800"', "'\ufeff'", "'\u2028'", "\u0669", '"\\U0001F926"', "'\x7f'", "\x85", "@", "`", "%", "&", "*")],
}


def _flip(text: bytes, random: Random) -> bytes:
    damaged = bytearray(text)
    for _ in range(random.randrange(1, 20)):
        damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
    return bytes(damaged)


_BYTES: dict[str, Callable[[bytes, Random], bytes]] = {
    "flipped bits": _flip,
    "cut off": lambda text, random: text[: random.randrange(1, len(text))],
    "not UTF-8": lambda text, random: text + random.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"]),
    "UTF-16": lambda text, random: text.decode().encode(random.choice(["utf-16", "utf-16-le", "utf-32"])),
    "null bytes": lambda text, random: text[: random.randrange(len(text))] + b"\0" + text,
    "random bytes": lambda text, random: random.randbytes(random.randrange(1, 2000)),
    "a mark of its order": lambda text, random: b"\xef\xbb\xbf" * random.randrange(1, 3) + text,
    "too large": lambda text, random: text + b"#" * (2**20 + random.randrange(1, 100)),
}


_LIMIT_S = 20
_MEMORY_BYTES = 2 * 2**30


class _MalformedConfigs(FaultClass):
    name = "configs"
    title = "malformed configurations"
    whole, quick = 200, 30

    def inject(self, number: int, rng: Random) -> FaultOutcome:
        config = malformed_config(number, rng)
        path = self.folder / "given.yaml"
        path.write_bytes(config.text)
        name = f"{config.kind}: {list(config.overrides) or config.text[:60].decode(errors='replace')}"
        before = sorted(self.folder.iterdir())
        answer = in_fork(_read, path, config.overrides, limit_s=10 * _LIMIT_S)  # wall-clock seconds: the machine may be busy
        if made := [item.name for item in sorted(self.folder.iterdir()) if item not in before]:
            return FaultOutcome(name, "lost", f"reading it made files: {made}")
        limits = f"{_LIMIT_S} s of processor time and {_MEMORY_BYTES / 2**30:g} GiB"
        return FaultOutcome(name, *(answer or ("lost", f"no answer within {limits}")))


def _read(path: Path, overrides: Sequence[str]) -> tuple[str, str]:
    os.chdir(path.parent)
    limit_process(_LIMIT_S)
    return judged(lambda: load_run(path, overrides))


def limit_process(seconds: int) -> None:
    """Limits processor time from now on, and ``_MEMORY_BYTES`` more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    spent = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (spent + seconds, spent + seconds))
    warnings.simplefilter("ignore")


def judged(work: Callable[[], object]) -> tuple[Literal["survived", "refused", "lost"], str]:
    """Any error but ours is lost."""
    try:
        work()
    except Exception as error:  # the answer is the kind of error
        said = str(error).replace("\n", " ")[:300]
        if is_ours(error):
            return "refused", said
        last = traceback.extract_tb(error.__traceback__)[-1]
        return "lost", f"{type(error).__name__} at {last.name}, line {last.lineno}: {said}"
    return "survived", ""


FAULTS: tuple[type[FaultClass], ...] = (_MalformedConfigs, _HostileAnswers)

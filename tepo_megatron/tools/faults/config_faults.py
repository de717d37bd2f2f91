"""Damaged configurations, the same ones for a seed: a command must refuse each in one sentence, quickly, in little memory."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.loading.load import load_run
from tepo_megatron.errors import is_ours
from tepo_megatron.tools.faults.workshop import FaultClass, FaultOutcome


@dataclass(frozen=True)
class _MalformedConfig:
    kind: str
    text: bytes
    overrides: tuple[str, ...] = ()


def malformed_configs(count: int, seed: int) -> Iterator[_MalformedConfig]:
    """Kinds take turns; ``seed`` chooses values, fields and places."""
    random = Random(seed)
    kinds = [*_WHOLE_FILES, *_ONE_VALUE, *_BYTES]
    for number in range(count):
        kind = kinds[number % len(kinds)]
        if kind in _WHOLE_FILES:
            yield _MalformedConfig(kind, _WHOLE_FILES[kind](random).encode("utf-8", "surrogatepass"))
        elif kind in _BYTES:
            yield _MalformedConfig(kind, _BYTES[kind](_sound(random), random))
        else:
            yield _with_value(kind, _ONE_VALUE[kind](random), random)


def _sound(random: Random) -> bytes:
    return _dump(dict(random.sample(list(_fields()), 5)))


@cache
def _fields() -> tuple[tuple[str, Any], ...]:
    return tuple(_leaves(RunConfig().model_dump(mode="json"), ""))


def _leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _dump(values: Mapping[str, Any]) -> bytes:
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        section = nested
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return json.dumps(nested).encode()


def _with_value(kind: str, value: str, random: Random) -> _MalformedConfig:
    path = random.choice([path for path, _ in _fields()] + list(RunConfig.model_fields))
    if random.random() < 0.5:
        return _MalformedConfig(kind, _sound(random), (f"{path}={value}",))
    *parents, last = path.split(".")
    lines = [f"{'  ' * depth}{parent}:" for depth, parent in enumerate(parents)] + [f"{'  ' * len(parents)}{last}: {value}"]
    return _MalformedConfig(kind, ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass"))


def _slip(random: Random) -> str:
    path = random.choice(_fields())[0]
    index = random.randrange(len(path))
    return f"{path[:index]}{random.choice('xyz_ -')}{path[index + 1 :]}: 1".replace(".", ": {", 1) + (
        "}" if "." in path else ""
    )


_WHOLE_FILES: dict[str, Callable[[Random], str]] = {
    "unknown key": _slip,
    "a list at the top": lambda random: "\n".join(["- train", "- steps: 3"] * random.randrange(1, 5)),
    "no mapping at all": lambda random: random.choice(
        ["3", "text", "null", "[]", "---", "...", "!!str", "'", '"', "|", ">-", "?"]
    ),
    "a key of another type": lambda random: (
        random.choice(["1", "null", "true", "1.5", ".nan", "[a]", "{a: b}", "2001-01-01"]) + ": 1"
    ),
    "duplicate keys": lambda random: "train: {steps: 1}\n" * random.randrange(2, 5),
    "deep lists": lambda random: "[" * random.choice([40, 1000]),
    "deep mappings": lambda random: "{a: " * random.choice([40, 1000]),
    "deep closed": lambda random: "train: " + "[" * (depth := random.choice([31, 33, 500])) + "]" * depth,
    "an alias within itself": lambda random: random.choice(
        ["a: &a [*a]", "a: &a {b: *a}", "train: *nothing", "&a train: {*a : 1}"]
    ),
    "a reference to itself": lambda random: random.choice(
        [
            "name: ${name}",
            "train: ${train}",
            "train:\n  steps: ${..train.steps}",
            "name: ${seed}\nseed: ${name}",
            "train: ${objective}",
        ]
    ),
    "many keys": lambda random: "\n".join(f"k{n}: {n}" for n in range(random.choice([500, 20_000]))),
    "a base that is none": lambda random: (
        "base: " + random.choice(["none.yaml", ".", "/", "[]", "3", "/dev/zero", '"a\\0b"', "''"])
    ),
    "tabs": lambda random: random.choice(["\tname: a", "train:\n\tsteps: 3", "name:\ta\t\n", "name: a\n\t\n"]),
    "cut off": lambda random: (text := _sound(random).decode())[: random.randrange(1, len(text))],
}

_NAMES = [
    "a/b",
    '"a\\nb"',
    '"\\x1b[2J"',
    '"\\u202e"',
    '"\\0"',
    "' '",
    "x" * 300,
    "../..",
    "/proc/self/mem",
    "/dev/null",
    "/sys",
]

_ONE_VALUE: dict[str, Callable[[Random], str]] = {
    "infinite": lambda random: random.choice([".inf", "-.inf", ".nan", "inf", "-inf", "nan", "1e999", "-1e999", "Infinity"]),
    "negative or too large": lambda random: random.choice(
        ["-1", "-0", "0", "9223372036854775808", "4294967296", "-2147483649", "1e308", "1e-320", "0.5", "1" * 400]
    ),
    "no number": lambda random: random.choice(["0x_", "0x", "0b", "1e", "+", ".", "1__0", "0o9", "12:99:99", "1" * 5000]),
    "empty": lambda random: random.choice(["", "''", "null", "~", "[]", "{}", "[[]]", "[null]", "{'': 1}", "{null: 1}"]),
    "another type": lambda random: random.choice(
        ["[1, 2]", "{a: 1}", "true", "text", "3", "2001-01-01", "2001-99-99", "[x, {y: [z]}]"]
    ),
    "a tag": lambda random: random.choice(
        [
            "!!python/object/apply:os.system [touch hostile]",
            "!!python/name:os.system",
            "!!set {a, b}",
            "!!int abc",
            "!!float x",
            "!!timestamp 1",
            "!own 1",
        ]
    ),
    "a reference": lambda random: random.choice(
        [
            "${oc.env:HOME}",
            "${oc.env:NO_SUCH_THING}",
            "${nothing.here}",
            "${",
            "${}",
            "${.}",
            "${....name}",
            "${train}",
            "${train.${name}}",
            "${oc.decode:[1]}",
            "'${name}${name}${'",
            "${" * 500,
            "${train.steps[0]}",
            "???",
        ]
    ),
    "a name": lambda random: random.choice(_NAMES),
    "long": lambda random: random.choice(["a", "é", "\U0001f926", "1 "]) * random.choice([1000, 30_000]),
    "strange": lambda random: random.choice(
        ['"\\ud800"', "'\ufeff'", "'\u2028'", "\u0669", '"\\U0001F926"', "'\x7f'", "\x85", "@", "`", "%", "&", "*"]
    ),
}


def _flip(text: bytes, random: Random) -> bytes:
    damaged = bytearray(text)
    for _ in range(random.randrange(1, 20)):
        damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
    return bytes(damaged)


_BYTES: dict[str, Callable[[bytes, Random], bytes]] = {
    "flipped bits": _flip,
    "not UTF-8": lambda text, random: text + random.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"]),
    "UTF-16": lambda text, random: text.decode().encode(random.choice(["utf-16", "utf-16-le", "utf-32"])),
    "null bytes": lambda text, random: text[: random.randrange(len(text))] + b"\0" + text,
    "random bytes": lambda text, random: random.randbytes(random.randrange(1, 2000)),
    "a mark of its order": lambda text, random: b"\xef\xbb\xbf" * random.randrange(1, 3) + text,
    "too large": lambda text, random: text + b"#" * (2**20 + random.randrange(1, 100)),
}


LIMIT_S = 20
MEMORY_BYTES = 2 * 2**30
"""Allowed beyond what the process holds at its start."""


class MalformedConfigs(FaultClass):
    name = "configs"
    title = "malformed configurations"
    whole, quick = 200, 30

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        *_, given = malformed_configs(number + 1, rng.randrange(2**31))  # its kinds take turns
        path = self.folder / "given.yaml"
        path.write_bytes(given.text)
        name = f"{given.kind}: {list(given.overrides) or _begin(given)}"
        before = sorted(self.folder.iterdir())
        answer = _in_a_fork(path, given.overrides)
        made = [item.name for item in sorted(self.folder.iterdir()) if item not in before]
        if made:
            return FaultOutcome(name, "lost", f"reading it made files: {made}")
        if answer is None:
            return FaultOutcome(
                name, "lost", f"no answer within {LIMIT_S} s of processor time and {MEMORY_BYTES / 2**30:g} GiB"
            )
        kind, said = answer
        if kind == "raised":
            return FaultOutcome(name, "lost", said)
        return FaultOutcome(name, "refused" if kind == "refused" else "survived", said)


def _begin(given: _MalformedConfig) -> str:
    return given.text[:60].decode(errors="replace")


def _in_a_fork(path: Path, overrides: Sequence[str]) -> list[str] | None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_read, args=(answers, path, overrides))
    child.start()
    child.join(10 * LIMIT_S)  # wall-clock seconds: the machine may be busy
    if child.is_alive():
        child.kill()
    child.join()
    return None if answers.empty() else json.loads(answers.get())


def _read(answers: Any, path: Path, overrides: Sequence[str]) -> None:
    os.chdir(path.parent)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    warnings.simplefilter("ignore")
    try:
        load_run(path, overrides)
        answers.put(json.dumps(["accepted", ""]))
    except Exception as error:  # the answer is the kind of error
        said = str(error).replace("\n", " ")[:300]
        if is_ours(error):
            answers.put(json.dumps(["refused", said]))
        else:
            last = traceback.extract_tb(error.__traceback__)[-1]
            answers.put(json.dumps(["raised", f"{type(error).__name__} at {last.name}, line {last.lineno}: {said}"]))

"""Hostile values for every border, and what a border may do with them: take or refuse them."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from tepo_megatron.errors import is_ours
from tepo_megatron.tasks.data.tokenizer import Tokenizer, load_tokenizer
from tepo_megatron.tools.faults.input_faults import judged

SURROGATES = ("\ud83d", "\udc00", "\ude00\ud83d")
"""They are halves of characters, which no UTF-8 has."""

ESCAPES = ("\x1b[2J", "\x1b[31m", "\x1b]0;title\x07", "\x9b1A", "\r", "\b", "\x7f", "\x00", "\x85", "\u2028", "\u202e")
"""They act on a terminal, or on the order of its characters."""

SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
"""These are the special tokens of ``chat_tokenizer``, with the ids 0 to 3."""

TOKENS = (*SPECIAL, "<s>", "</s>", "<eos>", "<unk>", "<pad>", "<|im_start|>user\n", "<|im_end|>", "<|endoftext|>", "[INST]")
MARKUP = ("[/]", "[bold]", "[link=file:///etc]", "\\", "{", "{{ 1 }}", "{% raise %}", "%s", "${oc.env:HOME}", "<script>")
"""Another reader of the text may act on them."""

_OTHERS = ("the sum", " ", "é", "😀", "\ue000", "\ue001", "\ue0000\ue000")
_KINDS = (SURROGATES, ESCAPES, TOKENS, MARKUP, _OTHERS)
PIECES = tuple(piece for kind in _KINDS for piece in kind)
NUMBERS = (float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 1e39, 5e-324, -0.0, 10**400, -(2**63), 2**64, 0, -1, 1.5)
BROKEN = ("", "{", "[" * 3000, '{"a":' * 3000, "nan", "1" * 5000, '"\\ud83d', "\ufeff{}", "[1]]", "\0", "null", "[]", "{}")
"""They are no JSON, none that can be read, or none that is expected."""


class Hostile(Random):
    def text(self) -> str:
        if self.random() < 0.05:
            return self.choice(PIECES) * 2000
        count = self.randrange(5)
        return "".join(self.choice((*self.choice(_KINDS), chr(self.randrange(0x11000)))) for _ in range(count))

    def value(self, depth: int = 2) -> Any:
        """Of JSON, with NaN, infinities and lone surrogates; some are nested deeply."""
        kind = self.randrange(10) if depth else 0
        if kind < 6:
            return self.choice((self.text(), self.choice(NUMBERS), None, self.random() < 0.5))
        if kind < 8:
            return [self.value(depth - 1) for _ in range(self.randrange(3))]
        if kind == 8:
            return {self.text(): self.value(depth - 1) for _ in range(self.randrange(3))}
        value, as_list = self.value(0), self.random() < 0.5
        for _ in range(self.choice((90, 300, 900))):
            value = [value] if as_list else {"a": value}
        return value

    def spoilt(self, value: Any) -> Any:
        """A copy in which one value is hostile, missing or too much."""
        if isinstance(value, Mapping | list) and value and self.random() < 0.85:
            keys = list(value) if isinstance(value, Mapping) else range(len(value))
            key, how = self.choice(keys), self.random()
            copy: Any = dict(value) if isinstance(value, Mapping) else list(value)
            if how < 0.1:
                del copy[key]
            elif how < 0.2 and isinstance(copy, dict):
                copy[self.text()] = self.value()
            else:
                copy[key] = self.spoilt(copy[key])
            return copy
        return self.value()

    def json(self, sound: Any) -> bytes:
        """JSON of ``sound``, or what has become of it."""
        how = self.random()
        if how < 0.1:
            return self.choice(BROKEN).encode("utf-8", "surrogatepass")
        text = json.dumps(self.spoilt(sound) if how < 0.8 else sound, ensure_ascii=self.random() < 0.7)
        if how > 0.95 and isinstance(sound, dict):
            name, value = self.choice(list(sound)), json.dumps(self.value())
            text = f"{text[:-1]}, {json.dumps(name)}: {value}}}"
        data = text.encode("utf-8", "surrogatepass")
        return self.damaged(data) if 0.8 < how < 0.95 else data

    def damaged(self, data: bytes) -> bytes:
        index = self.randrange(len(data) + 1)
        match self.randrange(4):
            case 0:
                return data[:index]
            case 1:
                inserted = self.choice((b"\0", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r\n"))
                return data[:index] + inserted + data[index:]
            case 2:
                flipped = bytearray(data)
                for _ in range(self.randrange(1, 8)):
                    flipped[self.randrange(len(flipped))] ^= 1 << self.randrange(8)
                return bytes(flipped)
        return data + data[index:]

    def lines(self, rows: Sequence[Any]) -> bytes:
        number = self.randrange(len(rows))
        lines = [
            self.json(row).replace(b"\n", b" ") if index == number else json.dumps(row).encode()
            for index, row in enumerate(rows)
        ]
        return b"\n".join(lines) + b"\n" * (self.random() < 0.9)


@cache
def chat_tokenizer() -> Tokenizer:
    """One of bytes, with a chat template and ``SPECIAL`` tokens."""
    with TemporaryDirectory() as folder:
        for name, content in tokenizer_files().items():
            Path(folder, name).write_text(json.dumps(content))
        return load_tokenizer(Path(folder))


_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}<|end|>{% endfor %}<|assistant|>"
)
_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def tokenizer_files() -> dict[str, Any]:
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = {name: index for index, name in enumerate([*SPECIAL, *sorted(ByteLevel.alphabet())])}
    flags = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    added = [{"id": index, "content": name, **flags} for index, name in enumerate(SPECIAL)]
    core = {"version": "1.0", "added_tokens": added, "pre_tokenizer": _LEVEL, "decoder": _LEVEL, "model": model}
    settings = {"eos_token": SPECIAL[0], "chat_template": _TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    return {
        "tokenizer.json": core,
        "tokenizer_config.json": settings,
        "generation_config.json": {"eos_token_id": [0]},
        "config.json": {"vocab_size": 300, "eos_token_id": 0},
    }


Entry = Callable[[Path, Hostile], object]
ENTRIES: dict[str, Entry] = {}
"""Each entry feeds its border one hostile value, drawn by the random numbers, in an empty folder. An error of ours
(``errors.is_ours``) says that it was refused; any other, such as an AssertionError, that something is lost.
"""


def border(name: str) -> Callable[[Entry], Entry]:
    def register(entry: Entry) -> Entry:
        ENTRIES[name] = entry
        return entry

    return register


def attempt(name: str, folder: Path, seed: int) -> tuple[str, str]:
    """Returns ``survived``, ``refused`` or ``lost``, and what was said. Files that an entry leaves elsewhere are lost too."""
    random = Hostile(seed)
    with TemporaryDirectory(dir=folder) as inner:
        inputs, here = Path(inner, "step_000003"), Path(inner, "here")
        inputs.mkdir()
        here.mkdir()
        threads: list[Any] = []
        with chdir(here), patch.object(threading, "excepthook", threads.append):
            result = judged(lambda: ENTRIES[name](inputs, random))
        if threads:
            return "lost", f"a thread ended with {threads[0].exc_value!r}"
        left = [path.name for path in (*here.iterdir(), *inputs.rglob("*.partial"))]
    return ("lost", f"it left {', '.join(left)}") if left else result


@contextmanager
def refusable() -> Iterator[None]:
    """What follows is tried too."""
    try:
        yield
    except Exception as error:
        if not is_ours(error):
            raise


def needs_unicode(value: Any) -> None:
    json.dumps(value, ensure_ascii=False).encode()


def is_shown(text: str, encoding: str = "utf-8") -> bool:
    """Whether a terminal of ``encoding`` prints the text and does nothing else."""
    return all(item.isprintable() or item in "\n\t" for item in text) and text.encode(encoding).decode(encoding) == text

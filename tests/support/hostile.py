"""A user, a model, a tool or the network may send these values where a text, a number or JSON is expected."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.support.chat_tokenizer import SPECIAL

SURROGATES = ("\ud83d", "\udc00", "\ude00\ud83d")
"""They are halves of characters, which no UTF-8 has."""

ESCAPES = ("\x1b[2J", "\x1b[31m", "\x1b]0;title\x07", "\x9b1A", "\r", "\b", "\x7f", "\x00", "\x85", "\u2028", "\u202e")
"""They act on a terminal, or on the order of its characters."""

TOKENS = (*SPECIAL, "<s>", "</s>", "<eos>", "<unk>", "<pad>", "<|im_start|>user\n", "<|im_end|>", "<|endoftext|>", "[INST]")
"""They name control tokens; those of the tests' tokenizers are among them."""

MARKUP = ("[/]", "[bold]", "[link=file:///etc]", "\\", "{", "{{ 1 }}", "{% raise %}", "%s", "${oc.env:HOME}", "<script>")
"""Another reader of the text may act on them."""

pieces = st.one_of(
    st.sampled_from([*SURROGATES, *ESCAPES, *TOKENS, *MARKUP, "the sum", " ", "é", "😀", "\ue000", "\ue001", "\ue0000\ue000"]),
    st.text(st.characters(), max_size=4),  # surrogates too
)

texts = st.lists(pieces, max_size=6).map("".join) | st.builds(lambda part, times: part * times, pieces, st.just(2_000))
"""Some are huge, and some have surrogates."""


valid_texts = texts.map(lambda text: text.encode("utf-8", "replace").decode())
"""They have no surrogates."""

numbers = st.one_of(
    st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 1e39, 5e-324, -0.0, 10**400, -(2**63), 2**64]),
    st.floats(),
    st.integers(),
)

scalars = st.one_of(st.none(), st.booleans(), numbers, texts)


def nested(depth: int, as_list: bool, inside: Any) -> Any:
    for _ in range(depth):
        inside = [inside] if as_list else {"a": inside}
    return inside


deep = st.builds(nested, st.sampled_from([90, 300, 900]), st.booleans(), scalars)

values = st.one_of(
    st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6),
    deep,
)
"""They may become JSON, with NaN and infinities."""


def as_json(value: Any) -> str:
    """NaN and escapes of surrogates are in it."""
    return json.dumps(value)


broken_json = st.one_of(
    st.sampled_from(["", "{", "[" * 3000, '{"a":' * 3000, "nan", "1" * 5000, '"\\ud83d', "\ufeff{}", "[1]]"]), texts
)
"""They are no JSON, or none that can be read."""

DEEP = b"[" * 3000
bodies = (values.map(as_json) | broken_json).map(lambda text: text.encode("utf-8", "surrogatepass"))
"""Of HTTP requests."""


def is_shown(text: str, encoding: str = "utf-8") -> bool:
    """Whether a terminal of ``encoding`` prints the text and does nothing else."""
    return all(item.isprintable() or item in "\n\t" for item in text) and text.encode(encoding).decode(encoding) == text

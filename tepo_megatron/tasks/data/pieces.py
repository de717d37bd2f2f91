"""The text of single tokens, for people: as each reads in the middle of a text, also where it is a part of a character."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""The name of a token that is one byte, in vocabularies of characters that fall back to bytes."""


def piece_text(token: int, anchor: Sequence[int], decode: Callable[[Sequence[int]], str], name: Callable[[int], Any]) -> str:
    """The text of a token that the tokenizer knows; bytes that are no whole character stand as ``⟨xx⟩``.

    ``anchor``: ids of an ordinary character; decoded behind it a token keeps the space that it begins with. ``name``: what
    the vocabulary calls the token.
    """
    before, text = decode(anchor), decode([*anchor, token])
    text = text[len(before) :] if text.startswith(before) else decode([token])
    data = _bytes_of(str(name(token))) if "\ufffd" in text else None
    return text if data is None else _show_bytes(data)


def _bytes_of(name: str) -> bytes | None:
    """The bytes that a token stands for; None where its name does not say so."""
    if found := _BYTE.fullmatch(name):
        return bytes.fromhex(found[1])
    table = _byte_level()
    return bytes(table[character] for character in name) if all(character in table for character in name) else None


@cache
def _byte_level() -> dict[str, int]:
    """Character → byte in byte-level vocabularies: bytes that print as Latin-1 are themselves, others follow from U+0100."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {**{chr(byte): byte for byte in printed}, **{chr(0x100 + at): byte for at, byte in enumerate(others)}}


def _show_bytes(data: bytes) -> str:
    text = data.decode("utf-8", errors="surrogateescape")  # what is no character becomes U+DC80 to U+DCFF
    return "".join(f"⟨{ord(each) - 0xDC00:02X}⟩" if "\udc80" <= each <= "\udcff" else each for each in text)

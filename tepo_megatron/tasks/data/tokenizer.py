"""Tokenizers behind one protocol: SentencePiece models and Hugging Face tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from tepo_megatron.tasks.data.chat import AnyMessage, chat_ids, turn_ids

UNKNOWN_TEXT = "\ufffd"
"""It is visible, because without it ``9<unk>5`` would read as the right answer."""

_NO_CHAT = (
    ", which prompts of messages and chat_template = true need; use an instruct model's tokenizer, or plain prompts and set "
    "data.chat_template = false"
)

Tools = Sequence[Mapping[str, Any]] | None


class Tokenizer(Protocol):
    """``eos_ids`` end a response; the tokenizer's own id comes first."""

    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def unk_id(self) -> int | None: ...
    @property
    def vocab_size(self) -> int:
        """The largest known id plus one; the model's vocabulary may be padded beyond it."""

    def encode(self, text: str) -> list[int]:
        """Ids without special tokens around the text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Leaves special tokens out; ids without text become ``UNKNOWN_TEXT``."""

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the begin token if the tokenizer adds one. Names of special tokens are parsed, because
        the text may come from a rendered chat template.
        """

    def chat_ids(self, messages: Sequence[AnyMessage], *, tools: Tools = None) -> list[int]:
        """Ids up to the beginning of the answer. ``tools``: functions in the OpenAI format. The text of a special token in a
        content stays plain text. Raises ValueError if there is no template or it refuses the messages.
        """

    def turn_ids(self, messages: Sequence[AnyMessage], *, ended: bool) -> list[int]:
        """Ids that follow an answer: its end token unless present (``ended``), the messages, and the beginning of the next
        answer. Raises as :meth:`chat_ids`.
        """

    def show(self, ids: Sequence[int]) -> str:
        """Text for people: as ``decode``, with special tokens as ``⟦name⟧``."""

    def piece(self, token: int) -> str:
        """As ``show``, for one id in the middle of a text, with bytes of incomplete characters as ``⟨xx⟩``."""


def load_tokenizer(model_dir: str | Path) -> Tokenizer:
    """Reads ``tokenizer.json`` as it is; without it SentencePiece reads ``tokenizer.model``, otherwise ``AutoTokenizer``
    decides (no code of the folder runs). ``generation_config.json`` may add end tokens.

    Raises ValueError: a missing or damaged tokenizer, or one without an end token.
    """
    folder = Path(model_dir)
    has_json, has_model = (folder / "tokenizer.json").is_file(), (folder / "tokenizer.model").is_file()
    if not (has_json or has_model or (folder / "tokenizer_config.json").is_file()):
        raise ValueError(
            f"{folder} has no tokenizer: copy tokenizer.model, or tokenizer.json and tokenizer_config.json, into it"
        )
    return _SentencePieceTokenizer(folder) if has_model and not has_json else HuggingFaceTokenizer(folder)


class _SentencePieceTokenizer:
    def __init__(self, folder: Path) -> None:
        import sentencepiece

        with _reading(folder):
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        config = _read_json(folder / "tokenizer_config.json")
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id = _id_or_none(self._processor.bos_id())
        self.unk_id = _id_or_none(self._processor.unk_id())
        self.eos_ids = _end_ids(_id_or_none(self._processor.eos_id()), folder)
        pad_id = _id_or_none(self._processor.pad_id())
        self.pad_id = self.eos_ids[0] if pad_id is None else pad_id
        self._adds_bos = self.bos_id is not None and config.get("add_bos_token", True)
        self._special = frozenset(i for i in range(self.vocab_size) if self._processor.is_control(i)) | set(self.eos_ids)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return _decode(ids, self._special, self.unk_id, self.vocab_size, self._processor.decode)

    def prompt_ids(self, text: str) -> list[int]:
        begin = [self.bos_id] if self._adds_bos and self.bos_id is not None else []
        return begin + self.encode(text)

    def chat_ids(self, messages: Sequence[AnyMessage], *, tools: Tools = None) -> list[int]:
        raise ValueError(f"a SentencePiece tokenizer.model has no chat template{_NO_CHAT}")

    def turn_ids(self, messages: Sequence[AnyMessage], *, ended: bool) -> list[int]:
        raise ValueError(
            "the environment returned messages, and a SentencePiece tokenizer.model has no chat template; return text"
        )

    def show(self, ids: Sequence[int]) -> str:
        return _show(ids, self._special, self.decode, self._processor.id_to_piece)

    def piece(self, token: int) -> str:
        return _piece(token, self, self._special, self._processor.id_to_piece)


class HuggingFaceTokenizer:
    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # For some model types AutoTokenizer takes only the vocabulary from tokenizer.json and splits text by its own rules:
        # the ids silently differ from those that the model was trained on.
        whole = (folder / "tokenizer.json").is_file()
        loader: Any = PreTrainedTokenizerFast if whole else AutoTokenizer
        with _reading(folder):
            self._tokenizer: Any = loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        added = self._added = dict[int, Any](self._tokenizer.added_tokens_decoder)
        self.vocab_size = max(len(self._tokenizer), max(added, default=-1) + 1)
        self.bos_id: int | None = self._tokenizer.bos_token_id
        self.unk_id: int | None = self._tokenizer.unk_token_id
        self.eos_ids = _end_ids(self._tokenizer.eos_token_id, folder)
        pad_id: int | None = self._tokenizer.pad_token_id
        self.pad_id = self.eos_ids[0] if pad_id is None else pad_id
        # Some tokenizers use one token as end and unknown token: it is left out as an end token.
        self._special = ({i for i, token in added.items() if token.special} - {self.unk_id}) | set(self.eos_ids)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return _decode(ids, self._special, self.unk_id, self.vocab_size, self._decode_known)

    def prompt_ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True)
        # A tokenizer set up for training may end every text; a prompt must stay open.
        return ids[:-1] if ids and ids[-1] == self._tokenizer.eos_token_id else ids

    def chat_ids(self, messages: Sequence[AnyMessage], *, tools: Tools = None) -> list[int]:
        if not self._tokenizer.chat_template:
            raise ValueError(f"the model's tokenizer has no chat template{_NO_CHAT}")
        return chat_ids(self._tokenizer, messages, [str(token) for token in self._added.values() if token.special], tools)

    def show(self, ids: Sequence[int]) -> str:
        return _show(ids, self._special, self.decode, self._tokenizer.convert_ids_to_tokens)

    def piece(self, token: int) -> str:
        return _piece(token, self, self._special, self._tokenizer.convert_ids_to_tokens)

    def turn_ids(self, messages: Sequence[AnyMessage], *, ended: bool) -> list[int]:
        special = [str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        return turn_ids(self._tokenizer, messages, ended=ended, special=special, end_ids=self.eos_ids)

    def _decode_known(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def check_tokenizer(tokenizer: Tokenizer, model_dir: str | Path) -> None:
    """Raises ValueError if the tokenizer has ids beyond the model's vocabulary, or none of its end tokens is one of the
    model's.
    """
    path = Path(model_dir) / "config.json"
    model_config = _read_json(path)
    rows = model_config.get("vocab_size")
    if not isinstance(rows, int):
        raise ValueError(f"{path} says vocab_size = {rows!r}; it must be a number")
    needed = max(tokenizer.vocab_size, max(tokenizer.eos_ids) + 1)
    if needed > rows:
        raise ValueError(
            f"the tokenizer has {needed} ids, the model only {rows} rows (vocab_size in config.json): they belong to "
            "different models; copy the model's own tokenizer into its folder"
        )
    expected = _as_ids(model_config.get("eos_token_id"))
    if expected and not set(expected) & set(tokenizer.eos_ids):
        raise ValueError(
            f"the tokenizer ends a response with token {_join(tokenizer.eos_ids)}, the model's config.json with "
            f"{_join(expected)} (eos_token_id): responses would never end; set the two alike"
        )


def _decode(
    ids: Sequence[int], special: frozenset[int] | set[int], unk_id: int | None, size: int, known: Callable[[list[int]], str]
) -> str:
    runs: list[list[int]] = [[]]
    for token in ids:
        if token in special:
            continue
        if token == unk_id or not 0 <= token < size:
            runs.append([])
        else:
            runs[-1].append(int(token))
    return UNKNOWN_TEXT.join(known(run) if run else "" for run in runs)


def _show(ids: Sequence[int], special: Container[int], decode: Callable[[list[int]], str], name: Callable[[int], Any]) -> str:
    parts: list[str] = []
    run: list[int] = []
    for token in [*ids, None]:
        if token is not None and token not in special:
            run.append(int(token))
            continue
        parts += [decode(run)] if run else []
        run = []
        parts += [] if token is None else [f"⟦{name(int(token))}⟧"]
    return "".join(parts)


def _piece(token: int, tokenizer: Tokenizer, special: Container[int], name: Callable[[int], Any]) -> str:
    if token in special or token == tokenizer.unk_id or not 0 <= token < tokenizer.vocab_size:
        return tokenizer.show([token])
    return _piece_text(token, tokenizer.encode("a"), tokenizer.decode, name)


def _end_ids(own: int | None, folder: Path) -> tuple[int, ...]:
    more = _as_ids(_read_json(folder / "generation_config.json").get("eos_token_id"))
    ids = tuple(dict.fromkeys(([] if own is None else [own]) + more))
    if not ids:
        raise ValueError(f"the tokenizer in {folder} has no end token; set eos_token in tokenizer_config.json")
    return ids


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _join(ids: Sequence[int]) -> str:
    return " or ".join(str(i) for i in ids)


def _id_or_none(piece_id: int) -> int | None:
    return piece_id if piece_id >= 0 else None


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(f"the tokenizer in {folder} cannot be read, copy it again: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged, copy it again: {error}") from error
    return value if isinstance(value, dict) else {}


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _piece_text(token: int, anchor: Sequence[int], decode: Callable[[Sequence[int]], str], name: Callable[[int], Any]) -> str:
    """A token decoded after ``anchor`` (ids of an ordinary character) keeps its leading space."""
    before, text = decode(anchor), decode([*anchor, token])
    text = text[len(before) :] if text.startswith(before) else decode([token])
    data = _bytes_of(str(name(token))) if "\ufffd" in text else None
    return text if data is None else _show_bytes(data)


def _bytes_of(name: str) -> bytes | None:
    if match := _BYTE.fullmatch(name):
        return bytes.fromhex(match[1])
    table = _byte_level()
    return bytes(table[character] for character in name) if all(character in table for character in name) else None


@cache
def _byte_level() -> dict[str, int]:
    """Character → byte: printable Latin-1 bytes map to themselves, others follow from U+0100."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {**{chr(byte): byte for byte in printed}, **{chr(0x100 + index): byte for index, byte in enumerate(others)}}


def _show_bytes(data: bytes) -> str:
    text = data.decode("utf-8", errors="surrogateescape")  # invalid bytes become U+DC80 to U+DCFF
    return "".join(f"⟨{ord(character) - 0xDC00:02X}⟩" if "\udc80" <= character <= "\udcff" else character for character in text)


_TEXTS = 200


def check_served_tokenizer(tokenizer: Tokenizer, folder: Path, texts: Iterable[str]) -> None:
    """``AutoTokenizer``, with which vLLM finds stop strings, has other rules than ``tokenizer.json`` for some model types.
    Raises ValueError if the first texts are encoded or decoded otherwise.
    """
    if not (folder / "tokenizer.json").is_file():
        return
    from transformers import AutoTokenizer

    served: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    for text in islice(texts, _TEXTS):
        ids = tokenizer.encode(text)
        if served.encode(text, add_special_tokens=False) == ids and served.decode(ids) == tokenizer.decode(ids):
            continue
        raise ValueError(
            "rollout.sampling.stop and bad_words are looked for by vLLM, which reads tokenizers with transformers' "
            f"AutoTokenizer, and that divides or joins text otherwise than {folder / 'tokenizer.json'} says, such as "
            f"{text[:60]!r}; leave stop and bad_words out, and end responses with the end token"
        )

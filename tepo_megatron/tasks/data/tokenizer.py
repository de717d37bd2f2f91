"""Tokenizers behind one protocol: SentencePiece models and Hugging Face tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from tepo_megatron.runtime.text import check_text
from tepo_megatron.weights.architecture import generation_end_ids

UNKNOWN_TEXT = "\ufffd"  # visible: without it 9<unk>5 would read as the right answer

_NO_CHAT = (
    ", which prompts of messages and chat_template = true need; use an instruct model's tokenizer, or plain prompts and set "
    "data.chat_template = false"
)

Tools = Sequence[Mapping[str, Any]] | None


class Tokenizer(Protocol):
    """``eos_ids`` end a response; the tokenizer's own comes first."""

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
        """The largest id plus one; the model may pad its vocabulary."""

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """No special tokens are added, and their names in ``text`` become such only with ``special_tokens``. Raises ValueError
        if that cannot be done, or if ``text`` is no Unicode.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens are left out; ids without text become ``UNKNOWN_TEXT``."""

    def prompt_ids(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Puts the begin token before what :meth:`encode` returns."""

    def chat_ids(self, messages: Sequence[AnyMessage], *, tools: Tools = None) -> list[int]:
        """See :func:`chat_ids`."""

    def turn_ids(self, messages: Sequence[AnyMessage], *, ended: bool) -> list[int]:
        """See :func:`turn_ids`."""

    def show(self, ids: Sequence[int]) -> str:
        """As ``decode``, with special tokens as ``⟦name⟧``."""

    def piece(self, token: int) -> str:
        """As ``show`` for one id; bytes of incomplete characters are ``⟨xx⟩``."""


def load_tokenizer(model_dir: str | Path) -> Tokenizer:
    """Takes ``tokenizer.json``, else ``tokenizer.model``, else ``AutoTokenizer`` without the folder's code. Raises ValueError
    if none is usable or no end token is known.
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

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        if special_tokens:
            raise ValueError("a SentencePiece tokenizer.model reads no special tokens in a text; set special_tokens = false")
        check_text(text, "the text")
        ids: list[int] = self._processor.encode(text)
        return _without_special(ids, self._special, text, self._processor.id_to_piece)

    def decode(self, ids: Sequence[int]) -> str:
        return _decode(ids, self._special, self.unk_id, self.vocab_size, self._processor.decode)

    def prompt_ids(self, text: str, *, special_tokens: bool = False) -> list[int]:
        begin = [self.bos_id] if self._adds_bos and self.bos_id is not None else []
        return begin + self.encode(text, special_tokens=special_tokens)

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

        # For some models AutoTokenizer splits text by its own rules instead of tokenizer.json's: the ids silently differ.
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
        # Some tokenizers have one token for end and unknown.
        self._special = ({i for i, token in added.items() if token.special} - {self.unk_id}) | set(self.eos_ids)

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        check_text(text, "the text")
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not special_tokens)
        return ids if special_tokens else _without_special(ids, self._special, text, self._tokenizer.convert_ids_to_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        return _decode(ids, self._special, self.unk_id, self.vocab_size, self._decode_known)

    def prompt_ids(self, text: str, *, special_tokens: bool = False) -> list[int]:
        plain = self.encode(text, special_tokens=special_tokens)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True, split_special_tokens=not special_tokens)
        # A tokenizer set up for training may add an end token.
        end = [self._tokenizer.eos_token_id]
        return ids[:-1] if ids[-1:] == end != plain[-1:] else ids

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
    """Raises ValueError for ids beyond the model's vocabulary, or no common end token."""
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


def _without_special(ids: list[int], special: Container[int], text: str, name: Callable[[int], Any]) -> list[int]:
    """A vocabulary may have a special token's name as an ordinary piece."""
    result = next((token for token in ids if token in special), None)
    if result is not None:
        raise ValueError(
            f"the text {text[:60]!r} has {str(name(result))!r} in it, which this tokenizer can only read as the special token; "
            "change it, or allow it by special_tokens = true"
        )
    return ids


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
    ids = tuple(dict.fromkeys(([] if own is None else [own]) + generation_end_ids(folder)))
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
    """``anchor``: ids of an ordinary character; a token decoded after it keeps its leading space."""
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
    """Character → byte: printable Latin-1 as itself, others from U+0100."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {**{chr(byte): byte for byte in printed}, **{chr(0x100 + index): byte for index, byte in enumerate(others)}}


def _show_bytes(data: bytes) -> str:
    text = data.decode("utf-8", errors="surrogateescape")  # invalid bytes become U+DC80 to U+DCFF
    return "".join(f"⟨{ord(character) - 0xDC00:02X}⟩" if "\udc80" <= character <= "\udcff" else character for character in text)


_TEXTS = 200


def check_served_tokenizer(tokenizer: Tokenizer, folder: Path, texts: Iterable[str]) -> None:
    """vLLM's ``AutoTokenizer`` may differ from ``tokenizer.json``. Raises ValueError if it does on the first texts."""
    if not (folder / "tokenizer.json").is_file():
        return
    from transformers import AutoTokenizer

    served: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    for text in islice(texts, _TEXTS):
        ids = tokenizer.encode(text)
        plain = served.encode(text, add_special_tokens=False, split_special_tokens=True)
        if plain == ids and served.decode(ids) == tokenizer.decode(ids):
            continue
        raise ValueError(
            "rollout.sampling.stop and bad_words are looked for by vLLM, which reads tokenizers with transformers' "
            f"AutoTokenizer, and that divides or joins text otherwise than {folder / 'tokenizer.json'} says, such as "
            f"{text[:60]!r}; leave stop and bad_words out, and end responses with the end token"
        )


AnyMessage = tuple[str, str] | Mapping[str, Any]  # (role, content), or with more keys for templates (tool_calls)

_PRIVATE = range(0xE000, 0xF900)  # private use; they replace special tokens' texts in templates


def chat_ids(
    tokenizer: Any, messages: Sequence[AnyMessage], special: Sequence[str], tools: Sequence[Mapping[str, Any]] | None = None
) -> list[int]:
    """Returns ids up to the beginning of the answer. Special tokens' texts in a content stay plain text: they must not end the
    user's turn. Raises ValueError if the template is missing or refuses.
    """
    check_text((list(messages), tools), "a message")
    hidden: list[str] = []
    plain = [_as_mapping(message) for message in messages]
    texts = "".join(text for part in (plain, tools or ()) for text in _texts(part))
    mark = next(chr(code) for code in _PRIVATE if chr(code) not in texts)
    pattern = _special_pattern(special)

    def hide(found: re.Match[str]) -> str:
        hidden.append(found[0])
        return f"{mark}{len(hidden) - 1}{mark}"

    filled = [_with_texts(message, lambda text: pattern.sub(hide, text)) for message in plain]
    shown = {} if tools is None else {"tools": _with_texts(tools, lambda text: pattern.sub(hide, text))}
    try:
        if not hidden:
            ids: list[int] = tokenizer.apply_chat_template(filled, add_generation_prompt=True, return_dict=False, **shown)
            return ids
        text = tokenizer.apply_chat_template(filled, add_generation_prompt=True, tokenize=False, **shown)
    except Exception as error:  # templates are programs and raise anything
        why = " ".join(str(error).split()) or type(error).__name__
        roles = ", ".join(str(message["role"]) for message in plain)
        raise ValueError(f"the tokenizer's chat template does not take messages of {roles}: {why}") from error
    ids = []
    for index, part in enumerate(re.split(rf"{mark}(\d+){mark}", text)):
        if index % 2:
            ids += tokenizer.encode(hidden[int(part)], add_special_tokens=False, split_special_tokens=True)
        elif part:
            ids += tokenizer.encode(part, add_special_tokens=False)
    return ids


def _as_mapping(message: AnyMessage) -> Mapping[str, Any]:
    return message if isinstance(message, Mapping) else {"role": message[0], "content": message[1]}


def _special_pattern(special: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or r"(?!)")


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _with_texts(entry, change) for name, entry in value.items()}
    return [_with_texts(item, change) for item in value] if isinstance(value, list | tuple) else value


def _texts(value: Any) -> list[str]:
    texts: list[str] = []
    _with_texts(value, lambda text: texts.append(text) or text)  # type: ignore[func-returns-value]
    return texts


_ANSWER = "\ue000"  # stands for the model's answer

_HIDDEN = "\ue001"  # delimits the number of a replaced special token


def turn_ids(
    tokenizer: Any, messages: Sequence[AnyMessage], *, ended: bool, special: Sequence[str], end_ids: Collection[int]
) -> list[int]:
    """Returns ids between an answer and the next. ``ended``: the answer has its end token, which is left out."""
    if not tokenizer.chat_template:
        raise ValueError("the environment returned messages, and the model's tokenizer has no chat template; return text")
    check_text(list(messages), "a message")
    hidden: list[str] = []
    pattern = _special_pattern(special)

    def hide(found: re.Match[str]) -> str:
        hidden.append(found[0])
        return f"{_HIDDEN}{len(hidden) - 1}{_HIDDEN}"

    before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    mappings = [_as_mapping(message) for message in messages]
    plain = [
        _with_texts(message, lambda text: pattern.sub(hide, re.sub(f"[{_ANSWER}{_HIDDEN}]", "", text))) for message in mappings
    ]
    try:
        text = tokenizer.apply_chat_template([*before, *plain], add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates are programs and raise anything
        why = " ".join(str(error).split()) or type(error).__name__
        roles = ", ".join(str(message["role"]) for message in mappings)
        raise ValueError(f"the tokenizer's chat template takes no messages of {roles} behind an answer: {why}") from error
    _, answer, rest = text.partition(_ANSWER)
    if not answer:
        raise ValueError("the tokenizer's chat template leaves the model's answers out; have the environment return text")
    ids: list[int] = []
    for index, part in enumerate(re.split(rf"{_HIDDEN}(\d+){_HIDDEN}", rest)):
        if index % 2:
            ids += tokenizer.encode(hidden[int(part)], add_special_tokens=False, split_special_tokens=True)
        elif part:
            ids += tokenizer.encode(part, add_special_tokens=False)
    return ids[1:] if ended and ids and ids[0] in end_ids else ids

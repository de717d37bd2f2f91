from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tepo_megatron.config.rollout import SamplingConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.runtime.text import check_text
from tepo_megatron.weights.architecture import end_ids, read_object

UNKNOWN_TEXT = "\ufffd"  # visible: without it 9<unk>5 would read as the right answer

AnyMessage = tuple[str, str] | Mapping[str, Any]  # (role, content), or with more keys for templates (tool_calls)
Tools = Sequence[Mapping[str, Any]] | None

_MARKS = range(0xE000, 0x110000)  # private use first; they replace special tokens' texts in templates
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TEXTS = 200
_DAY = date(2024, 7, 26)  # templates see no clock: a resumed run must read the same tokens; Llama 3.2's own default
# vLLM's limits of rows and of all tokens; above the second an engine on a GPU dies at the first sample
_BAD_WORDS = {"VLLM_MAX_NUM_BAD_WORDS": 128, "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": 1024}


def load_tokenizer(model_dir: str | Path, variables: Mapping[str, Any] | None = None) -> Tokenizer:
    """Takes ``tokenizer.json``, else ``tokenizer.model``, else ``AutoTokenizer`` without the folder's code. ``variables`` are
    the chat template's. Raises ValueError if none is usable, no end token is known, or the template has no such variable.
    """
    folder = Path(model_dir)
    has_json, has_model = (folder / "tokenizer.json").is_file(), (folder / "tokenizer.model").is_file()
    if not (has_json or has_model or (folder / "tokenizer_config.json").is_file()):
        raise ValueError(
            f"{folder} has no tokenizer: copy tokenizer.model, or tokenizer.json and tokenizer_config.json, into it"
        )
    tokenizer = _SentencePieceTokenizer(folder) if has_model and not has_json else _HuggingFaceTokenizer(folder)
    words = {*re.findall(r"\w+", str(tokenizer.chat_template or ""))} - {"messages", "tools", "add_generation_prompt"}
    if other := [name for name in variables or {} if name not in words]:
        raise ValueError(f"data.chat_template_kwargs: {other[0]} is no variable of {folder}'s chat template; leave it out")
    tokenizer.variables = variables or {}
    return tokenizer


class Tokenizer(ABC):
    """``eos_ids`` end a response; the tokenizer's own is first. ``vocab_size``: the largest id plus one, without padding."""

    chat_template: Any = None
    variables: Mapping[str, Any] = {}

    def __init__(self, folder: Path, *, size: int, special: Iterable[int], end: int | None, unknown: int | None) -> None:
        self._folder, self.vocab_size, self.unk_id = folder, size, unknown
        ends = [*([] if end is None else [end]), *end_ids(folder / "generation_config.json")]
        self.eos_ids = tuple(dict.fromkeys(ends))
        if not self.eos_ids:
            raise ValueError(f"the tokenizer in {folder} has no end token; set eos_token in tokenizer_config.json")
        self._special = (set(special) - {self.unk_id}) | set(self.eos_ids)  # some have one token for end and unknown

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Adds no special tokens; their names in ``text`` become such only with ``special_tokens``. Raises ValueError if
        that fails or ``text`` is no Unicode.
        """
        check_text(text, "the text")
        ids = self._encode(text, special_tokens)
        # A vocabulary may have a special token's name as an ordinary piece.
        special = None if special_tokens else next((token for token in ids if token in self._special), None)
        if special is not None:
            raise ValueError(
                f"the text {text[:60]!r} has {self._name(special)!r} in it, which this tokenizer can only read as the special "
                "token; change it, or allow it by special_tokens = true"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Leaves special tokens out; ids without text become ``UNKNOWN_TEXT``."""
        runs: list[list[int]] = [[]]
        for token in ids:
            if token in self._special:
                continue
            if self._is_known(token):
                runs[-1].append(int(token))
            else:
                runs.append([])
        return UNKNOWN_TEXT.join(self._decode(run) if run else "" for run in runs)

    @abstractmethod
    def prompt_ids(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Puts the begin token before what ``encode`` returns."""

    def chat_ids(self, messages: Sequence[AnyMessage], *, tools: Tools = None) -> list[int]:
        """Returns ids up to the answer. Special tokens' texts in a content stay plain text. Raises ValueError if the
        template is missing or refuses.
        """
        raise ValueError(
            "the model's tokenizer has no chat template, which prompts of messages and chat_template = true need; use an "
            "instruct model's tokenizer, or plain prompts and set data.chat_template = false"
        )

    def open_chat_ids(self, messages: Sequence[AnyMessage]) -> tuple[list[int], list[int]]:
        """As ``chat_ids``, apart behind the last message's content, which may continue there."""
        return self.chat_ids(messages), []

    def turn_ids(self, messages: Sequence[AnyMessage], *, ended: bool) -> list[int]:
        """Returns ids between two answers. ``ended``: the first has its end token, which is left out."""
        raise ValueError("the environment returned messages, and the model's tokenizer has no chat template; return text")

    def show(self, ids: Sequence[int]) -> str:
        """As ``decode``, with special tokens as ``⟦name⟧``."""
        text, run = "", list[int]()
        for token in ids:
            if token in self._special:
                text, run = f"{text}{self.decode(run)}⟦{self._name(int(token))}⟧", []
            else:
                run.append(int(token))
        return text + self.decode(run)

    def first_difference(self, other: Tokenizer) -> tuple[int, str, str] | None:
        """Returns the first id with another name in ``other``, and both names."""
        for token in range(self.vocab_size):
            names = self._name(token), other._name(token) if token < other.vocab_size else "nothing"
            if names[0] != names[1]:
                return token, *names
        return None

    def piece(self, token: int) -> str:
        """As ``show`` for one id; bytes of incomplete characters are ``⟨xx⟩``."""
        if token in self._special or not self._is_known(token):
            return self.show([token])
        anchor = self.encode("a")  # a token decoded after an ordinary character keeps its leading space
        before, text = self.decode(anchor), self.decode([*anchor, token])
        text = text[len(before) :] if text.startswith(before) else self.decode([token])
        data = _bytes_of(self._name(token)) if "\ufffd" in text else None
        if data is None:
            return text
        text = data.decode("utf-8", errors="surrogateescape")  # invalid bytes become U+DC80 to U+DCFF
        return re.sub(r"[\udc80-\udcff]", lambda match: f"⟨{ord(match[0]) - 0xDC00:02X}⟩", text)

    def check_model(self) -> None:
        """Raises ValueError for ids beyond the model's vocabulary, or no common end token."""
        path = self._folder / "config.json"
        config = read_object(path)
        rows, expected = config.get("vocab_size"), end_ids(path)
        if not isinstance(rows, int):
            raise ValueError(f"{path} says vocab_size = {rows!r}; it must be a number")
        needed = max(self.vocab_size, max(self.eos_ids) + 1)
        if needed > rows:
            raise ValueError(
                f"the tokenizer has {needed} ids, the model only {rows} rows (vocab_size in config.json): they belong to "
                "different models; copy the model's own tokenizer into its folder"
            )
        if expected and not set(expected) & set(self.eos_ids):
            raise ValueError(
                f"the tokenizer ends a response with token {' or '.join(map(str, self.eos_ids))}, the model's config.json with "
                f"{' or '.join(map(str, expected))} (eos_token_id): responses would never end; make the two equal"
            )

    def check_sampling(self, sampling: SamplingConfig, problems: Iterable[Problem]) -> None:
        if sampling.needs_tokenizer:
            self.check_served((text for problem in problems for text in (problem.prompt, problem.answer)), sampling.bad_words)

    def check_served(self, texts: Iterable[str], bad_words: Iterable[str] = ()) -> None:
        """Raises ValueError if vLLM's ``AutoTokenizer`` differs from ``tokenizer.json`` on the first texts, or for too many
        ``bad_words``.
        """
        if not (self._folder / "tokenizer.json").is_file():
            return
        from transformers import AutoTokenizer

        served: Any = AutoTokenizer.from_pretrained(str(self._folder), local_files_only=True, trust_remote_code=False)
        for text in islice(texts, _TEXTS):
            ids = self.encode(text)
            plain = served.encode(text, add_special_tokens=False, split_special_tokens=True)
            if plain != ids or served.decode(ids) != self.decode(ids):
                raise ValueError(
                    "rollout.sampling.stop and bad_words are looked for by vLLM, which reads tokenizers with transformers' "
                    f"AutoTokenizer, and that divides or joins text unlike {self._folder / 'tokenizer.json'}, such as "
                    f"{text[:60]!r}; leave stop and bad_words out, and end responses with the end token"
                )
        rows: list[list[int]] = []
        for word in dict.fromkeys(bad_words):  # as vLLM's SamplingParams.update_from_tokenizer
            plain, spaced = (served.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " "))
            rows += [plain, spaced] if len(spaced) == len(plain) and spaced[:1] != plain[:1] else [plain]
        most = {name: int(os.environ.get(name, default)) for name, default in _BAD_WORDS.items()}
        for (name, limit), count in zip(most.items(), (len(rows), sum(map(len, rows))), strict=True):
            if count > limit:
                raise ValueError(
                    f"rollout.sampling.bad_words are {count} rows or tokens, with and without a leading space; vLLM takes at "
                    f"most {limit} ({name}): leave some out"
                )

    def _is_known(self, token: int) -> bool:
        return token != self.unk_id and 0 <= token < self.vocab_size

    @abstractmethod
    def _encode(self, text: str, special_tokens: bool) -> list[int]: ...
    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...
    @abstractmethod
    def _name(self, token: int) -> str: ...


class _SentencePieceTokenizer(Tokenizer):
    def __init__(self, folder: Path) -> None:
        import sentencepiece

        with _reading(folder):
            self._model = model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        size: int = model.vocab_size()
        begin, end, unknown = (token if token >= 0 else None for token in (model.bos_id(), model.eos_id(), model.unk_id()))
        super().__init__(folder, size=size, special=filter(model.is_control, range(size)), end=end, unknown=unknown)
        adds_begin = read_object(folder / "tokenizer_config.json").get("add_bos_token", True)
        self._begin = [begin] if adds_begin and begin is not None else []

    def prompt_ids(self, text: str, *, special_tokens: bool = False) -> list[int]:
        return self._begin + self.encode(text, special_tokens=special_tokens)

    def _encode(self, text: str, special_tokens: bool) -> list[int]:
        if special_tokens:
            raise ValueError("a SentencePiece tokenizer.model reads no special tokens in a text; set special_tokens = false")
        return self._model.encode(text)

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)

    def _name(self, token: int) -> str:
        return str(self._model.id_to_piece(token))


class _HuggingFaceTokenizer(Tokenizer):
    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # For some models AutoTokenizer splits text by its own rules instead of tokenizer.json's: the ids silently differ.
        whole = (folder / "tokenizer.json").is_file()
        loader: Any = PreTrainedTokenizerFast if whole else AutoTokenizer
        with _reading(folder):
            self._model: Any = loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        model, added = self._model, dict[int, Any](self._model.added_tokens_decoder)
        special = {i: str(token) for i, token in added.items() if token.special}
        size = max(len(model), max(added, default=-1) + 1)
        super().__init__(folder, size=size, special=special, end=model.eos_token_id, unknown=model.unk_token_id)
        self.chat_template = model.chat_template
        self._read_roles = ["assistant"]  # a template may leave the text beside an assistant's calls out
        longest_first = sorted(special.values(), key=len, reverse=True)
        self._special_texts = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def prompt_ids(self, text: str, *, special_tokens: bool = False) -> list[int]:
        plain = self.encode(text, special_tokens=special_tokens)
        if plain[:1] == [self._model.bos_token_id]:
            return plain  # a rendered prompt has its begin token
        ids: list[int] = self._model.encode(text, add_special_tokens=True, split_special_tokens=not special_tokens)
        # A tokenizer set up for training may add an end token.
        end = [self._model.eos_token_id]
        return ids[:-1] if ids[-1:] == end != plain[-1:] else ids

    def chat_ids(self, messages: Sequence[AnyMessage], *, tools: Tools = None) -> list[int]:
        return self._fill_template(messages, tools)[0] if self.chat_template else super().chat_ids(messages)

    def open_chat_ids(self, messages: Sequence[AnyMessage]) -> tuple[list[int], list[int]]:
        return self._fill_template(messages, split="end") if self.chat_template else super().open_chat_ids(messages)

    def turn_ids(self, messages: Sequence[AnyMessage], *, ended: bool) -> list[int]:
        if not self.chat_template:
            return super().turn_ids(messages, ended=ended)
        _, ids = self._fill_template(messages, split="answer")
        return ids[1:] if ended and ids and ids[0] in self.eos_ids else ids

    def _fill_template(
        self, messages: Sequence[AnyMessage], tools: Tools = None, *, split: Literal["", "answer", "end"] = ""
    ) -> tuple[list[int], list[int]]:
        """``split``: apart behind an answer that precedes, or the last content. Numbers between marks replace special tokens'
        texts meanwhile.
        """
        check_text((list(messages), tools), "a message")
        plain = [item if isinstance(item, Mapping) else {"role": item[0], "content": item[1]} for item in messages]
        characters = set(json.dumps(_with_texts([plain, tools], str), ensure_ascii=False, default=str))
        mark, answer = islice((chr(code) for code in _MARKS if chr(code) not in characters), 2)
        hidden: list[str] = []

        def hide(match: re.Match[str]) -> str:
            hidden.append(match[0])
            return f"{mark}{len(hidden) - 1}{mark}"

        filled, shown = _with_texts([plain, tools], lambda text: self._special_texts.sub(hide, text))
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}] if split == "answer" else []
        if split == "end":
            filled[-1] = {**filled[-1], "content": filled[-1]["content"] + answer}
        if tools and "tools" not in str(self.chat_template):
            raise ValueError("the tokenizer's chat template has no place for tools; describe them in a message")
        more = {"strftime_now": _DAY.strftime, **self.variables, **({} if tools is None else {"tools": shown})}

        def render(messages: Any) -> str:
            return str(self._model.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **more))

        lost: list[str] = []
        try:
            text = render([*before, *filled])
            for role in sorted({str(message["role"]) for message in filled}.difference(self._read_roles)):
                changed = [{**item, "content": f"{item['content']}5"} if item["role"] == role else item for item in filled]
                (lost if render([*before, *changed]) == text else self._read_roles).append(role)
        except Exception as error:  # templates are programs and raise anything
            why = " ".join(str(error).split()) or type(error).__name__
            roles = ", ".join(str(message["role"]) for message in plain) + (" after an answer" if before else "")
            raise ValueError(f"the tokenizer's chat template does not take messages of {roles}: {why}") from error
        if split and answer not in text:
            left_out = "model's answers" if before else "last message"
            raise ValueError(f"the tokenizer's chat template leaves the {left_out} out; set environment.observations = text")
        if lost:
            raise ValueError(
                f"the tokenizer's chat template leaves messages of role {lost[0]} out; give them the role user (those of an "
                "environment by environment.observations = user), or use another template"
            )

        def encoded(text: str) -> list[int]:
            ids: list[int] = []
            for index, part in enumerate(re.split(rf"{mark}(\d+){mark}", text)):
                if index % 2:
                    ids += self._model.encode(hidden[int(part)], add_special_tokens=False, split_special_tokens=True)
                elif part:
                    ids += self._model.encode(part, add_special_tokens=False)
            return ids

        first, _, second = text.partition(answer)
        return encoded(first), encoded(second)

    def _encode(self, text: str, special_tokens: bool) -> list[int]:
        return self._model.encode(text, add_special_tokens=False, split_special_tokens=not special_tokens)

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _name(self, token: int) -> str:
        return str(self._model.convert_ids_to_tokens(token))


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_with_texts(name, change): _with_texts(entry, change) for name, entry in value.items()}
    return [_with_texts(item, change) for item in value] if isinstance(value, list | tuple) else value


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(f"the tokenizer in {folder} cannot be read, copy it again: {error}") from error


def _bytes_of(name: str) -> bytes | None:
    if match := _BYTE.fullmatch(name):
        return bytes.fromhex(match[1])
    table = _byte_level()
    return bytes(table[character] for character in name) if all(character in table for character in name) else None


@cache
def _byte_level() -> Mapping[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}

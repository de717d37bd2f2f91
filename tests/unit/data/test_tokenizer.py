"""Tokenizers: the built-in one, a byte-level one with a chat template, one that falls back to bytes, one with odd rules."""

import json
import re
import shutil
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from examples.tiny.make_warm_start import ALPHABET, addition_examples, train_char_tokenizer
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import encode_prompt, load_problems
from tepo_megatron.tasks.data.tokenizer import Tokenizer, load_tokenizer
from tests.support.chat_tokenizer import SPECIAL, TEMPLATE, write_chat_tokenizer

TINY = resolve_model_path("builtin:tiny")
tiny = load_tokenizer(TINY)
END, SYSTEM, USER, ASSISTANT = range(4)  # the chat tokenizer's
alphabet_text = st.text(st.sampled_from(ALPHABET), max_size=40)
any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="⟨⟩"), max_size=30)
contents = st.lists(st.sampled_from([*SPECIAL, "the sum", " ", "\ue000", "0", "é", "<|", "\n"]), max_size=8).map("".join)


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def chat(chat_folder: Path) -> Tokenizer:
    return load_tokenizer(chat_folder)


@pytest.fixture(scope="module")
def falls_back(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A SentencePiece model with words, which adds a space before the first."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("falls_back")
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b ab ba aba", "ab é"]), model_writer=file, model_type="bpe", vocab_size=273,
            byte_fallback=True, minloglevel=2, num_threads=1, hard_vocab_limit=False,
        )  # fmt: skip
    return load_tokenizer(folder)


def joined(pieces: list[str]) -> bytes:
    """The bytes that pieces stand for."""
    split = re.split(r"⟨([0-9A-F]{2})⟩", "".join(pieces))
    return b"".join(bytes.fromhex(part) if index % 2 else part.encode() for index, part in enumerate(split))


class TestShippedTokenizer:
    @given(text=alphabet_text, cut=st.integers(0, 40))
    def test_round_trip(self, text: str, cut: int) -> None:
        ids = tiny.encode(text)
        assert tiny.decode(ids) == tiny.decode(ids[:cut]) + tiny.decode(ids[cut:]) == text
        assert len(ids) == len(text)
        assert min(ids, default=4) > 3
        assert tiny.prompt_ids(text) == [1, *ids]

    def test_special_tokens_are_left_out_and_unknown_ids_show(self) -> None:
        nine, five = tiny.encode("95")
        assert tiny.decode([1, 0, nine, five, 2]) == "95"
        assert tiny.decode([nine, 3, five, 2]) == "9\ufffd5"
        assert tiny.decode([nine, 64, 1000, five]) == "9\ufffd\ufffd5"
        assert tiny.decode(tiny.encode("<eos>")) == "<eos>"
        assert 2 not in tiny.encode("<eos>")
        assert [tiny.piece(token) for token in (2, 3, 64)] == ["⟦<eos>⟧", "\ufffd", "\ufffd"]

    def test_transformers_gives_the_same_ids(self) -> None:
        from transformers import AutoTokenizer

        other: Any = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
        texts = ["".join(pair) for pair in addition_examples(200, 0.5, 0)] + [ALPHABET, "  a  b \n\n c "]
        for text in texts:
            assert other.encode(text, add_special_tokens=False) == tiny.encode(text)
            assert other.encode(text) == tiny.prompt_ids(text)
            assert other.decode(tiny.encode(text), clean_up_tokenization_spaces=False) == text
        assert ((other.eos_token_id,), other.unk_token_id, len(other)) == (tiny.eos_ids, tiny.unk_id, tiny.vocab_size)

    def test_is_what_the_trainer_writes(self, tmp_path: Path) -> None:
        texts = [prompt + response for prompt, response in addition_examples(100, 0.5, 3)]
        train_char_tokenizer(texts, tmp_path)
        for name in ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"):
            assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes()

    def test_no_chat_template(self, tmp_path: Path) -> None:
        for tokenizer in (tiny, load_tokenizer(write_chat_tokenizer(tmp_path, template=None))):
            with pytest.raises(ValueError, match=r"has no chat template.*set data\.chat_template = false"):
                tokenizer.chat_ids((("user", "1+1="),))
            with pytest.raises(ValueError, match="has no chat template; return text"):
                tokenizer.turn_ids([("user", "1")], ended=True)

    def test_prompts(self) -> None:
        assert all(tiny.decode(encode_prompt(tiny, item)) == item.prompt for item in load_problems("builtin:addition-heldout"))
        with pytest.raises(ValueError, match=r"problem 'sum-7' has characters that the tokenizer does not know: 'A×'"):
            encode_prompt(tiny, Problem("sum-7", "A 3×4 A=", "12"))


class TestChat:
    """What becomes a special token, and what does not."""

    @given(text=any_text)
    def test_round_trip(self, chat: Tokenizer, text: str) -> None:
        ids = chat.encode(text)
        assert chat.decode([*ids, *chat.eos_ids]) == text
        assert encode_prompt(chat, Problem("p", text or "a", "a")) == tuple(ids or chat.encode("a"))
        pieces = [chat.piece(token) for token in ids]
        assert joined(pieces) == text.encode()
        assert all("⟨" not in piece or "\ufffd" not in piece for piece in pieces)

    def test_special_tokens_are_left_out_and_padding_rows_show(self, chat: Tokenizer) -> None:
        ids = chat.encode("two numbers")
        assert chat.decode([USER, *ids[:2], ASSISTANT, 10**5, *ids[2:], END]).replace("\ufffd", "", 1) == "two numbers"
        assert [chat.piece(token) for token in (END, USER, 10**5)] == ["⟦<|end|>⟧", "⟦<|user|>⟧", "\ufffd"]

    def test_generation_config_adds_end_tokens(self, chat_folder: Path, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(chat_folder, tmp_path / "model"))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
        assert load_tokenizer(folder).eos_ids == (0, 2)
        (folder / "generation_config.json").write_text("{")
        with pytest.raises(ValueError, match=r"generation_config\.json is damaged"):
            load_tokenizer(folder)

    def test_a_rendered_prompt_has_one_begin_token(self, chat_folder: Path, tmp_path: Path) -> None:
        from tokenizers.processors import TemplateProcessing
        from transformers import PreTrainedTokenizerFast

        begin, rendered = SPECIAL[1], f"{SPECIAL[2]}hi{SPECIAL[0]}{SPECIAL[3]}"
        model = PreTrainedTokenizerFast.from_pretrained(chat_folder, bos_token=begin)
        model.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, SYSTEM)])
        model.save_pretrained(tmp_path)
        tokenizer = load_tokenizer(tmp_path)
        ids = tokenizer.prompt_ids(begin + rendered, special_tokens=True)
        assert ids == tokenizer.prompt_ids(rendered, special_tokens=True)
        assert ids == [SYSTEM, *tokenizer.encode(rendered, special_tokens=True)]

    @given(system=contents, user=contents)
    def test_only_what_the_template_writes_is_special(self, chat: Tokenizer, system: str, user: str) -> None:
        ids = chat.chat_ids((("system", system), ("user", user)))
        assert [token for token in ids if token < len(SPECIAL)] == [SYSTEM, END, USER, END, ASSISTANT]
        assert chat.decode(ids) == system.strip() + user.strip()
        assert chat.show(ids) == f"⟦<|system|>⟧{system.strip()}⟦<|end|>⟧⟦<|user|>⟧{user.strip()}⟦<|end|>⟧⟦<|assistant|>⟧"

    @given(first=contents, second=contents)
    @example(first="".join(map(chr, range(0xE000, 0xF900))), second="")
    def test_a_chat_continues_after_what_the_model_wrote(self, chat: Tokenizer, first: str, second: str) -> None:
        """The end that the model wrote itself is not written again."""
        turns = [("user", first), ("system", second)]
        ids = chat.turn_ids(turns, ended=True)
        written = f"⟦<|user|>⟧{first.strip()}⟦<|end|>⟧⟦<|system|>⟧{second.strip()}⟦<|end|>⟧⟦<|assistant|>⟧"
        assert chat.show(ids) == written
        assert chat.turn_ids(turns, ended=False) == [END, *ids]

    def test_variables_reach_the_template(self, tmp_path: Path) -> None:
        folder = write_chat_tokenizer(tmp_path, TEMPLATE + "{% if not (thinks | default(true)) %}<none>{% endif %}")
        talk = (("user", "a"),)
        expected = "⟦<|user|>⟧a⟦<|end|>⟧⟦<|assistant|>⟧"
        for variables, written in ({}, expected), ({"thinks": True}, expected), ({"thinks": False}, f"{expected}<none>"):
            tokenizer = load_tokenizer(folder, variables)
            assert tokenizer.show(encode_prompt(tokenizer, Problem("p", "a", "b", messages=talk))) == written
            assert tokenizer.show(tokenizer.turn_ids(talk, ended=True)) == written
        for name in ("think", "messages"):
            with pytest.raises(ValueError, match=r"data\.chat_template_kwargs: \w+ is no variable of .*'s chat template"):
                load_tokenizer(folder, {name: False})
        with pytest.raises(ValueError, match="thinks is no variable of"):
            load_tokenizer(TINY, {"thinks": False})

    def test_a_template_sees_the_same_day_on_every_day(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path, TEMPLATE + '{{ strftime_now("%d %b %Y") }}'))
        assert tokenizer.show(tokenizer.chat_ids((("user", "a"),))).endswith("⟦<|assistant|>⟧26 Jul 2024")

    def test_a_template_that_refuses_says_why(self, chat: Tokenizer) -> None:
        talk = (("user", "a"), ("user", "b"))
        refusal = r"problem 'p' cannot be encoded: .* does not take messages of user, user: roles must alt"
        with pytest.raises(ValueError, match=refusal):
            encode_prompt(chat, Problem("p", "b", "a", messages=talk))
        with pytest.raises(ValueError, match="does not take messages of assistant after an answer: roles must alt"):
            chat.turn_ids([("assistant", "be brief")], ended=True)


@given(text=st.text(st.sampled_from("ab éß€😀 "), max_size=12).map(str.strip))
def test_pieces_of_a_vocabulary_that_falls_back_to_bytes(falls_back: Tokenizer, text: str) -> None:
    shown = joined([falls_back.piece(token) for token in falls_back.encode(text)]).decode()
    assert shown == falls_back.decode(falls_back.encode("a " + text))[1:] if text else shown == ""


class TestOwnTokenizer:
    """A tokenizer with rules of its own beside a config.json of a type for which transformers has other rules."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as Core
        from transformers import PreTrainedTokenizerFast

        core = Core(models.BPE())
        words = [pre_tokenizers.Split(Regex(r" ?\d+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        core.pre_tokenizer = pre_tokenizers.Sequence(words)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False)
        core.train_from_iterator([f"sort {number} {number + 7} 1024" for number in range(90)], trainer)
        folder = tmp_path_factory.mktemp("own")
        PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>").save_pretrained(folder)
        return folder

    @pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "LlamaTokenizerFast"])
    @pytest.mark.parametrize("model_type", ["qwen2", "llama", "mistral"])
    def test_its_file_is_read_as_it_stands(self, folder: Path, model_type: str, named: str) -> None:
        from tokenizers import Tokenizer as Core

        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": named}))
        core, tokenizer = Core.from_file(str(folder / "tokenizer.json")), load_tokenizer(folder)
        assert tokenizer.vocab_size == core.get_vocab_size()
        for text in map("".join, product(["sort", " 1024", " 37", "7", " ", "\n", "ä", ""], repeat=3)):
            assert tokenizer.encode(text) == core.encode(text, add_special_tokens=False).ids
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_strings_that_vllm_would_look_for_in_another_text_are_refused(self, folder: Path, chat_folder: Path) -> None:
        (folder / "config.json").write_text('{"model_type": "qwen2"}')
        with pytest.raises(ValueError, match=r"AutoTokenizer, and that divides or joins text unlike .*such as '37 1024'"):
            load_tokenizer(folder).check_served(["37 1024"])
        for fine in (chat_folder, TINY):
            load_tokenizer(fine).check_served(["37 1024", "the sum"])

    @pytest.mark.parametrize(("digits", "size", "counts"), [(2, 65, "130"), (8, 64, "1152")])
    def test_more_bad_words_than_vllm_takes_are_refused(self, chat_folder: Path, digits: int, size: int, counts: str) -> None:
        tokenizer = load_tokenizer(chat_folder)
        words = [f"a{number:0{digits}}" for number in range(size)]
        tokenizer.check_served([], words[:56] * 2)
        with pytest.raises(ValueError, match=f"rollout.sampling.bad_words are {counts} rows or tokens"):
            tokenizer.check_served([], words)


class TestCheck:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"vocab_size": 64, "eos_token_id": 2}, None),
            ({"vocab_size": 128, "eos_token_id": [7, 2]}, None),
            ({"vocab_size": 128, "eos_token_id": None}, None),
            ({"vocab_size": 63, "eos_token_id": 2}, "tokenizer has 64 ids, the model only 63 rows.*copy"),
            ({"vocab_size": 64, "eos_token_id": 3}, "with token 2, .* with 3 .*make the two equal"),
            ({"vocab_size": 64, "eos_token_id": [0, 5]}, "with token 2, .* with 0 or 5"),
            ({}, "vocab_size = None"),
        ],
    )
    def test_the_models_config(self, tmp_path: Path, config: dict[str, object], message: str | None) -> None:
        folder = Path(shutil.copytree(TINY, tmp_path, dirs_exist_ok=True))
        (folder / "config.json").write_text(json.dumps(config))
        tokenizer = load_tokenizer(folder)
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            tokenizer.check_model()

    def test_missing_and_damaged_tokenizers(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="has no tokenizer: copy"):
            load_tokenizer(tmp_path)
        (tmp_path / "tokenizer.model").write_bytes(b"not a model")
        with pytest.raises(ValueError, match="cannot be read, copy it again"):
            load_tokenizer(tmp_path)
        for damaged in ("{", "", '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE"}}'):
            (tmp_path / "tokenizer.json").write_text(damaged)
            with pytest.raises(ValueError, match="cannot be read, copy it again"):
                load_tokenizer(tmp_path)

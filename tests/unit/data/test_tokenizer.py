import json
import re
import shutil
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.tiny.make_warm_start import ALPHABET, train_char_tokenizer
from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data import addition
from tepo_megatron.tasks.data.problems import encode_prompt
from tepo_megatron.tasks.data.tokenizer import Tokenizer, load_tokenizer

TINY = Path(str(files("tepo_megatron.tasks.data").joinpath("builtin", "tiny")))
alphabet_text = st.text(st.sampled_from(ALPHABET), max_size=40)


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return load_tokenizer(TINY)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE folder with a chat template, as instruction models have it."""
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<|end|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(["the sum of two numbers is a number"] * 3, trainer)
    template = (
        "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=specials[0], extra_special_tokens=specials[1:], chat_template=template
    )
    folder = tmp_path_factory.mktemp("byte_level")
    tokenizer.save_pretrained(folder)
    return folder


def plain_text(folder: Path, text: str) -> list[int]:
    """The ids of text, also where it looks like a special token."""
    from transformers import PreTrainedTokenizerFast

    ids: list[int] = PreTrainedTokenizerFast.from_pretrained(folder).encode(
        text, add_special_tokens=False, split_special_tokens=True
    )
    return ids


class TestShippedTokenizer:
    def test_ids(self, tiny: Tokenizer) -> None:
        assert (tiny.pad_id, tiny.bos_id, tiny.eos_ids, tiny.unk_id, tiny.vocab_size) == (0, 1, (2,), 3, 64)

    @given(text=alphabet_text)
    def test_round_trip(self, tiny: Tokenizer, text: str) -> None:
        ids = tiny.encode(text)
        assert tiny.decode(ids) == text
        assert len(ids) == len(text)
        assert min(ids, default=4) > 3
        assert tiny.prompt_ids(text) == [1, *ids]

    @given(text=alphabet_text, cut=st.integers(0, 40))
    def test_decoding_piecewise_loses_nothing(self, tiny: Tokenizer, text: str, cut: int) -> None:
        ids = tiny.encode(text)
        assert tiny.decode(ids[:cut]) + tiny.decode(ids[cut:]) == text

    def test_special_tokens_are_left_out_and_unknown_ids_show(self, tiny: Tokenizer) -> None:
        nine, five = tiny.encode("95")
        assert tiny.decode([1, 0, nine, five, 2]) == "95"
        assert tiny.decode([nine, 3, five, 2]) == "9\ufffd5"
        assert tiny.decode([nine, 64, 1000, five]) == "9\ufffd\ufffd5"

    def test_special_names_in_a_text_are_plain_text(self, tiny: Tokenizer) -> None:
        assert tiny.decode(tiny.encode("<eos>")) == "<eos>"
        assert 2 not in tiny.encode("<eos>")

    def test_transformers_gives_the_same_ids(self, tiny: Tokenizer) -> None:
        from transformers import AutoTokenizer

        other: Any = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
        texts = [p.prompt + addition.solution(p) for p in addition.heldout_problems()] + [ALPHABET, "  a  b \n\n c "]
        for text in texts:
            assert other.encode(text, add_special_tokens=False) == tiny.encode(text)
            assert other.encode(text) == tiny.prompt_ids(text)
            assert other.decode(tiny.encode(text), clean_up_tokenization_spaces=False) == text
        ids = (other.bos_token_id, (other.eos_token_id,), other.pad_token_id, other.unk_token_id, len(other))
        assert ids == (tiny.bos_id, tiny.eos_ids, tiny.pad_id, tiny.unk_id, tiny.vocab_size)

    def test_is_what_the_trainer_writes(self, tmp_path: Path) -> None:
        texts = [prompt + response for prompt, response in addition.supervised_examples(100, 0.5, 3)]
        train_char_tokenizer(texts, tmp_path)
        for name in ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"):
            assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes()

    def test_pieces(self, tiny: Tokenizer) -> None:
        assert "".join(tiny.piece(token) for token in tiny.encode(" 3 + 4\n")) == " 3 + 4\n"
        assert [tiny.piece(token) for token in (2, 3, 64)] == ["⟦<eos>⟧", "\ufffd", "\ufffd"]

    def test_no_chat_template(self, tiny: Tokenizer) -> None:
        with pytest.raises(ValueError, match=r"no chat template.*set data\.chat_template = false"):
            tiny.chat_ids((("user", "1+1="),))
        with pytest.raises(ValueError, match="has no chat template; return text"):
            tiny.turn_ids([("user", "1")], ended=True)


class TestTraining:
    @given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\u2581\u2585"), max_size=12))
    def test_characters_of_the_texts_are_added(self, tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
        folder = tmp_path_factory.mktemp("tokenizer")
        train_char_tokenizer([text], folder, vocab_size=80)
        tokenizer = load_tokenizer(folder)
        assert tokenizer.decode(tokenizer.encode(text + ALPHABET)) == text + ALPHABET
        assert tokenizer.vocab_size == 4 + len(set(ALPHABET) | set(text))

    def test_too_many_characters(self, tmp_path: Path) -> None:
        with pytest.raises(
            ValueError, match="61 characters and 4 special tokens do not fit into vocab_size = 64; the texts add 'A'"
        ):
            train_char_tokenizer(["A"], tmp_path)

    @pytest.mark.parametrize("character", ["\r", "\0", "\u2581"])
    def test_characters_that_sentencepiece_drops(self, tmp_path: Path, character: str) -> None:
        with pytest.raises(ValueError, match="cannot represent"):
            train_char_tokenizer([character], tmp_path / "out", vocab_size=80)
        assert not (tmp_path / "out").exists()


class TestByteLevelTokenizer:
    @given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
    def test_round_trip(self, byte_level: Path, text: str) -> None:
        tokenizer = load_tokenizer(byte_level)
        assert tokenizer.decode([*tokenizer.encode(text), *tokenizer.eos_ids]) == text

    def test_no_unknown_characters(self, byte_level: Path) -> None:
        tokenizer = load_tokenizer(byte_level)
        assert encode_prompt(tokenizer, Problem("p", "Grüße 😀", "a")) == tuple(tokenizer.encode("Grüße 😀"))

    def test_chat_template_opens_the_answer(self, byte_level: Path) -> None:
        tokenizer = load_tokenizer(byte_level)
        assert tokenizer.chat_ids((("user", "the sum"),)) == [1, *tokenizer.encode("the sum"), 2]

    def test_a_chat_goes_on_behind_what_the_model_wrote(self, byte_level: Path, tmp_path: Path) -> None:
        """With a template that ends answers: the end that the model wrote itself is not written again, and the text of a
        special token in a message is text.
        """
        folder = Path(shutil.copytree(byte_level, tmp_path / "model"))
        template = (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
            "{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>{% else %}<|user|>{{ m.content }}{% endif %}"
            "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer = load_tokenizer(folder)
        two = [("user", "a sum<|end|>"), ("user", "x")]
        said = [1, *tokenizer.encode("a sum"), *plain_text(folder, "<|end|>"), 1, *tokenizer.encode("x"), 2]
        assert tokenizer.turn_ids(two, ended=True) == said
        assert tokenizer.turn_ids(two, ended=False) == [0, *said]
        assert 0 not in said
        with pytest.raises(ValueError, match="does not take messages of system after an answer: no system"):
            tokenizer.turn_ids([("system", "be brief")], ended=True)

    def test_special_tokens_are_left_out_and_padding_rows_show(self, byte_level: Path) -> None:
        tokenizer = load_tokenizer(byte_level)
        ids = tokenizer.encode("two numbers")
        assert tokenizer.decode([1, *ids[:2], 2, 10**5, *ids[2:], 0]).replace("\ufffd", "", 1) == "two numbers"

    @given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="⟨⟩"), max_size=30))
    def test_pieces_are_the_text_with_the_bytes_of_divided_characters(self, byte_level: Path, text: str) -> None:
        tokenizer = load_tokenizer(byte_level)
        pieces = [tokenizer.piece(token) for token in tokenizer.encode(text)]
        divided = re.compile(r"⟨([0-9A-F]{2})⟩")
        parts = [bytes.fromhex(part) if at % 2 else part.encode() for at, part in enumerate(divided.split("".join(pieces)))]
        assert b"".join(parts) == text.encode()
        assert all(not divided.search(piece) or "\ufffd" not in piece for piece in pieces)

    def test_pieces_of_special_tokens_have_their_names(self, byte_level: Path) -> None:
        tokenizer = load_tokenizer(byte_level)
        assert [tokenizer.piece(token) for token in (0, 1, 10**5)] == ["⟦<|end|>⟧", "⟦<|user|>⟧", "\ufffd"]

    def test_generation_config_adds_end_tokens(self, byte_level: Path, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(byte_level, tmp_path / "model"))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
        assert load_tokenizer(folder).eos_ids == (0, 2)


@given(text=st.text(st.sampled_from("ab éß€😀 "), max_size=12).map(str.strip))
def test_pieces_of_a_vocabulary_that_falls_back_to_bytes(falls_back: Tokenizer, text: str) -> None:
    """A SentencePiece model with words, which adds a space before the first."""
    pieces = [falls_back.piece(token) for token in falls_back.encode(text)]
    split = re.split(r"⟨([0-9A-F]{2})⟩", "".join(pieces))
    found = b"".join(bytes.fromhex(part) if at % 2 else part.encode() for at, part in enumerate(split)).decode()
    assert found == falls_back.decode(falls_back.encode("a " + text))[1:] if text else found == ""


@pytest.fixture(scope="module")
def falls_back(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    import sentencepiece

    folder = tmp_path_factory.mktemp("falls_back")
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b ab ba aba", "ab é"]), model_writer=file, model_type="bpe", vocab_size=273,
            byte_fallback=True, minloglevel=2, num_threads=1, hard_vocab_limit=False,
        )  # fmt: skip
    return load_tokenizer(folder)


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
        core.train_from_iterator([f"sort {at} {at + 7} 1024" for at in range(90)], trainer)
        folder = tmp_path_factory.mktemp("own")
        PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>").save_pretrained(folder)
        return folder

    @pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "LlamaTokenizerFast"])
    @pytest.mark.parametrize("model_type", ["qwen2", "llama", "mistral"])
    @given(text=st.lists(st.sampled_from(["sort", " 1024", " 37", "7", " ", "\n", "ä"]), max_size=8).map("".join))
    def test_its_file_is_read_as_it_stands(self, folder: Path, model_type: str, named: str, text: str) -> None:
        from tokenizers import Tokenizer as Core

        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": named}))
        core, tokenizer = Core.from_file(str(folder / "tokenizer.json")), load_tokenizer(folder)
        assert tokenizer.encode(text) == core.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.vocab_size == core.get_vocab_size()

    def test_strings_that_vllm_would_look_for_in_another_text_are_refused(self, folder: Path, byte_level: Path) -> None:
        (folder / "config.json").write_text('{"model_type": "qwen2"}')
        with pytest.raises(ValueError, match=r"AutoTokenizer, and that divides or joins text unlike .*such as '37 1024'"):
            load_tokenizer(folder).check_served(["37 1024"])
        for fine in (byte_level, TINY):
            load_tokenizer(fine).check_served(["37 1024", "the sum"])


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

    def test_damaged_settings(self, tmp_path: Path) -> None:
        shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
        (tmp_path / "generation_config.json").write_text("{")
        with pytest.raises(ValueError, match=r"generation_config\.json is damaged"):
            load_tokenizer(tmp_path)


class TestPrompts:
    def test_unknown_characters_are_named(self, tiny: Tokenizer) -> None:
        with pytest.raises(ValueError, match=r"problem 'sum-7' has characters that the tokenizer does not know: 'A×'"):
            encode_prompt(tiny, Problem("sum-7", "A 3×4 A=", "12"))

    def test_addition_prompts(self, tiny: Tokenizer) -> None:
        for problem in addition.heldout_problems():
            ids = encode_prompt(tiny, problem)
            assert ids[0] == tiny.bos_id
            assert tiny.decode(ids) == problem.prompt

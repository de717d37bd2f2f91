"""Trains a character-level SentencePiece tokenizer for tiny models."""

from __future__ import annotations

import io
import json
import string
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from tepo_megatron.tasks.data.tokenizer import UNKNOWN_TEXT

ALPHABET = string.digits + "+-*=()? ." + string.ascii_lowercase + "\n" + ",:;!/'\"<>[]^_%"

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}


def train_char_tokenizer(texts: Iterable[str], out_dir: str | Path, vocab_size: int = 64) -> None:
    """Text is not normalised, so decoding is exact; equal texts give equal bytes. Raises ValueError: more characters than
    ``vocab_size`` allows, or one that SentencePiece cannot represent.
    """
    characters = sorted(set(ALPHABET).union(*texts))
    num_pieces = len(characters) + len(SPECIAL_TOKENS)
    if num_pieces > vocab_size:
        extra = "".join(sorted(set(characters) - set(ALPHABET)))
        raise ValueError(
            f"{len(characters)} characters and {len(SPECIAL_TOKENS)} special tokens do not fit into vocab_size = {vocab_size}; "
            f"the texts add {extra!r} to the alphabet: raise vocab_size, or leave these characters out"
        )
    model = _train(characters, num_pieces)
    _check_round_trip(model, characters)
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.model").write_bytes(model)
    _write_json(out / "special_tokens_map.json", SPECIAL_TOKENS)
    _write_json(out / "tokenizer_config.json", _hugging_face_config())


def _train(characters: list[str], vocab_size: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        # One sentence per character: the ids then follow the characters' order, not the texts' frequencies.
        sentence_iterator=iter([c for c in characters if c not in " \n"]),
        model_writer=model,
        model_type="char",
        vocab_size=vocab_size,
        character_coverage=1.0,
        required_chars="\u2581",  # how SentencePiece writes a space
        user_defined_symbols=["\n"],
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        pad_piece=SPECIAL_TOKENS["pad_token"],
        bos_piece=SPECIAL_TOKENS["bos_token"],
        eos_piece=SPECIAL_TOKENS["eos_token"],
        unk_piece=SPECIAL_TOKENS["unk_token"],
        unk_surface=UNKNOWN_TEXT,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def _check_round_trip(model: bytes, characters: list[str]) -> None:
    """SentencePiece drops NUL, carriage return, U+2581 and U+2585 silently."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    lost = [c for c in characters if processor.decode(processor.encode(c)) != c]
    if lost:
        raise ValueError(f"SentencePiece cannot represent these characters of the texts: {lost!a}; leave them out")


def _hugging_face_config() -> dict[str, object]:
    return {
        **SPECIAL_TOKENS,
        "tokenizer_class": "LlamaTokenizer",
        "add_prefix_space": False,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }


def _write_json(path: Path, value: dict[str, object] | dict[str, str]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

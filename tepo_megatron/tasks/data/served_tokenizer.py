"""Whether vLLM, which looks for stop strings and bad words itself, reads a model's tokenizer as this package does."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from tepo_megatron.tasks.data.tokenizer import Tokenizer

_TEXTS = 200


def check_served_tokenizer(tokenizer: Tokenizer, folder: Path, texts: Iterable[str]) -> None:
    """vLLM loads tokenizers with ``AutoTokenizer``, which for some types of model has rules in place of those in
    ``tokenizer.json``. The first texts are encoded and decoded both ways.

    Raises:
        ValueError: they differ, so that a string would be looked for in another text than the response's.
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

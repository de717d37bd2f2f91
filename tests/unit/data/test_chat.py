"""Messages in the chat template of a tokenizer: what becomes a special token, and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.data.problems import encode_prompt
from tepo_megatron.tasks.data.tokenizer import Tokenizer, load_tokenizer
from tests.support.chat_tokenizer import SPECIAL, write_chat_tokenizer

pieces = st.lists(st.sampled_from([*SPECIAL, "the sum", " ", "\ue000", "0", "é", "<|", "\n"]), max_size=8).map("".join)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_chat_tokenizer(tmp_path_factory.mktemp("chat")))


@given(system=pieces, user=pieces)
def test_only_what_the_template_writes_is_special(chat: Tokenizer, system: str, user: str) -> None:
    ids = chat.chat_ids((("system", system), ("user", user)))
    end, system_id, user_id, assistant = (chat.encode(token, special_tokens=True)[0] for token in SPECIAL)
    assert [each for each in ids if each < len(SPECIAL)] == [system_id, end, user_id, end, assistant]
    assert chat.decode(ids) == system.strip() + user.strip()
    assert chat.show(ids) == f"⟦<|system|>⟧{system.strip()}⟦<|end|>⟧⟦<|user|>⟧{user.strip()}⟦<|end|>⟧⟦<|assistant|>⟧"


def test_a_plain_prompt_is_text_unless_special_tokens_are_asked_for(chat: Tokenizer) -> None:
    """Data that were rendered by a template before keep their special tokens by ``data.special_tokens``."""
    rendered = "<|user|>the sum<|end|>\n"
    assert chat.show(chat.prompt_ids(rendered)) == rendered
    assert chat.show(chat.prompt_ids(rendered, special_tokens=True)) == "⟦<|user|>⟧the sum⟦<|end|>⟧\n"


def test_a_template_that_refuses_says_why(chat: Tokenizer, tmp_path: Path) -> None:
    talk: Any = (("user", "a"), ("user", "b"))
    with pytest.raises(
        ValueError, match=r"problem 'p' cannot be encoded: .* does not take messages of user, user: roles must alt"
    ):
        encode_prompt(chat, Problem("p", "b", "a", messages=talk))
    none = load_tokenizer(write_chat_tokenizer(tmp_path, template=None))
    with pytest.raises(ValueError, match=r"the model's tokenizer has no chat template, which prompts of messages"):
        none.chat_ids((("user", "a"),))

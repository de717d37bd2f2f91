"""``data``: the problems."""

from pydantic import PositiveInt

from tepo_megatron.config.base import Section


class DataConfig(Section):
    train: str = "builtin:addition"
    """``builtin:NAME``, or a JSON-lines file with ``prompt``, ``answer`` and optionally ``id``."""

    heldout: str = "builtin:addition-heldout"
    """The same, for evaluation; never trained on."""

    chat_template: bool = False
    """Wrap each prompt in the tokenizer's chat template as a user message."""

    max_prompt_tokens: PositiveInt | None = None
    """Problems with a longer prompt are left out, and counted; default: no bound."""

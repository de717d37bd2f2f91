"""A small byte-level tokenizer with a chat template, as instruction models have it."""

from pathlib import Path

SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
"""Its special tokens, whose ids are 0 to 3."""

TEMPLATE = (
    "{% for m in messages %}"
    "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content | trim }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

TOOLS_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_chat_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Writes ``tokenizer.json`` and its settings; returns the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(["the sum of two numbers is a number"] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=SPECIAL[0], extra_special_tokens=list(SPECIAL[1:]), chat_template=template
    )
    tokenizer.save_pretrained(folder)
    return folder

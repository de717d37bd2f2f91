"""Writes the tiny model with a chat template, which its own tokenizer lacks: ``python make_model.py FOLDER``."""

import shutil
import sys
from pathlib import Path

from tepo_megatron.tasks.data.builtin import resolve_model_path

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
"""A user's ``37+58`` becomes ``37+58=``, which the model knows how to go on with."""


def write(folder: Path) -> None:
    """The weights of ``builtin:tiny``, and its tokenizer as ``tokenizer.json`` with the template."""
    from transformers import AutoTokenizer

    shipped = resolve_model_path("builtin:tiny")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(shipped / name, folder / name)
    tokenizer = AutoTokenizer.from_pretrained(str(shipped), local_files_only=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))

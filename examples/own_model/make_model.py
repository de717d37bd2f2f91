"""Makes a small Qwen2 with a tokenizer of its own, and its data, with transformers and tokenizers alone, as a user would.

    .venv/bin/python examples/own_model/make_model.py out/own_model_start     (about three minutes on one core)

FOLDER/model is a Hugging Face folder, FOLDER/train.csv and FOLDER/test.csv have a task and its solution in each line: five
numbers, and the same in order. The model has seen too few of them to be sure: about half of its answers are right.
"""

from __future__ import annotations

import argparse
import csv
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "extra_special_tokens": ["<|user|>", "<|assistant|>"]}
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Rows = list[tuple[str, str]]


def make_rows(count: int, rng: random.Random) -> Rows:
    """Tasks and solutions, each once: ``Sort 42 7 93 15 60``, and ``7 15 42 60 93``."""
    rows: dict[str, str] = {}
    while len(rows) < count:
        numbers = rng.sample(range(100), 5)
        rows[f"Sort {' '.join(map(str, numbers))}"] = " ".join(map(str, sorted(numbers)))
    return list(rows.items())


def make_tokenizer(rows: Rows) -> Any:
    """Byte-level BPE whose merges are learnt from the rows: a number becomes one token, or two."""
    bpe = Tokenizer(models.BPE())
    # A number keeps the space before it, and never grows beyond itself.
    parts = [pre_tokenizers.Split(Regex(r" ?\d+| ?[A-Za-z]+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    bpe.pre_tokenizer = pre_tokenizers.Sequence(parts)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=448, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator((text for row in rows for text in row), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **SPECIAL)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: Any, seed: int) -> Any:
    """0.6 million parameters, random."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def chat(tokenizer: Any, task: str) -> list[int]:
    """The ids of a task in the chat template, up to where the answer begins."""
    messages = [{"role": "user", "content": task}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def pretrain(model: Any, tokenizer: Any, *, steps: int, batch: int, rng: random.Random) -> None:
    """Next-token cross-entropy on solutions, of new tasks in each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50) * (1 - step / steps))
    model.train()
    for step in range(steps):
        pairs = [
            (chat(tokenizer, task), [*tokenizer.encode(solution), tokenizer.eos_token_id])
            for task, solution in make_rows(batch, rng)
        ]
        longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
        ids = torch.full((batch, longest), tokenizer.pad_token_id)
        labels = torch.full((batch, longest), -100)
        for at, (prompt, answer) in enumerate(pairs):
            ids[at, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[at, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        # Padding lies at the end, where a causal model does not see it.
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{steps}  loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, rows: Rows) -> float:
    """The share of tasks whose greedy answer is the solution."""
    model.eval()
    right = 0
    for task, solution in rows:
        ids = torch.tensor([chat(tokenizer, task)])
        made = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        right += tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True) == solution
    return right / len(rows)


def write_csv(path: Path, rows: Rows) -> None:
    """With a header, as a spreadsheet has it."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("task", "solution"), *rows])


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes model and data; prints how good the model is."""
    parser = argparse.ArgumentParser(description="Makes a small Qwen2, its tokenizer and its data.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    rng = random.Random(given.seed)
    rows = make_rows(3200, rng)
    train, test = rows[200:], rows[:200]
    tokenizer = make_tokenizer(train)
    model = make_model(tokenizer, given.seed)
    pretrain(model, tokenizer, steps=given.steps, batch=128, rng=rng)
    given.folder.mkdir(parents=True, exist_ok=True)
    write_csv(given.folder / "train.csv", train)
    write_csv(given.folder / "test.csv", test)
    model.save_pretrained(given.folder / "model")
    tokenizer.save_pretrained(given.folder / "model")
    parameters = sum(each.numel() for each in model.parameters())
    print(
        f"{given.folder}: {parameters} parameters, {100 * accuracy(model, tokenizer, test):.0f} % of the test's tasks, greedily"
    )


if __name__ == "__main__":
    main()

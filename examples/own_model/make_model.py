"""Makes a small Qwen2 with a tokenizer of its own, and its data, with transformers and tokenizers alone, as a user would.

    .venv/bin/python examples/own_model/make_model.py out/own_model_start     (about a minute on one core)

FOLDER/sorter is a Hugging Face folder, FOLDER/train.csv and FOLDER/test.csv have a task and its solution in each line:
eight digits, and the same in order. The model has seen too few of them to be sure: three of ten
sampled answers are right, and eight of ten greedy ones.
"""

import argparse
import csv
import random
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
    """Tasks and solutions, each once: ``Sort 4 9 2 7 7 1 3 0``, and ``0 1 2 3 4 7 7 9``."""
    rows: dict[str, str] = {}
    while len(rows) < count:
        digits = [rng.randrange(10) for _ in range(8)]
        rows[f"Sort {' '.join(map(str, digits))}"] = " ".join(map(str, sorted(digits)))
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


def pretrain(model: Any, tokenizer: Any, *, batch: int, rng: random.Random, until: float, most: int = 2000) -> None:
    """Next-token cross-entropy on solutions, of new tasks in each step, until so large a share of other tasks is solved."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    others = make_rows(200, rng)
    for step in range(1, most + 1):
        rows = make_rows(batch, rng)
        prompts = torch.tensor([chat(tokenizer, task) for task, _ in rows])  # all of one length, and so are the solutions
        answers = torch.tensor([[*tokenizer.encode(solution), tokenizer.eos_token_id] for _, solution in rows])
        labels = torch.cat([torch.full_like(prompts, -100), answers], dim=1)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, step / 50)
        model.train()
        loss = model(input_ids=torch.cat([prompts, answers], dim=1), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            solved = accuracy(model, tokenizer, others)
            print(f"step {step}  loss {loss.item():.3f}  solved {solved:.2f}", flush=True)
            if solved >= until:
                return


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, rows: Rows) -> float:
    """The share of tasks whose greedy answer is the solution."""
    model.eval()
    ids = torch.tensor([chat(tokenizer, task) for task, _ in rows])
    made = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
    return sum(text == solution for text, (_, solution) in zip(texts, rows, strict=True)) / len(rows)


def write_csv(path: Path, rows: Rows) -> None:
    """With a header, as a spreadsheet has it."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("task", "solution"), *rows])


def make(folder: Path, *, until: float, seed: int = 0) -> str:
    """Writes model and data; says how good the model is. ``until`` 0: with random weights."""
    rng = random.Random(seed)
    rows = make_rows(3200, rng)
    train, test = rows[200:], rows[:200]
    tokenizer = make_tokenizer(train)
    model = make_model(tokenizer, seed)
    if until:
        pretrain(model, tokenizer, batch=128, rng=rng, until=until)
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "train.csv", train)
    write_csv(folder / "test.csv", test)
    model.save_pretrained(folder / "sorter")
    tokenizer.save_pretrained(folder / "sorter")
    parameters = sum(each.numel() for each in model.parameters())
    return f"{folder}: {parameters} parameters, {100 * accuracy(model, tokenizer, test):.0f} % of the test's tasks solved"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes a small Qwen2, its tokenizer and its data.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--until", type=float, default=0.8, help="Share of other tasks that is solved at its end.")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(make(given.folder, until=given.until, seed=given.seed))

"""Trains with TRL's GRPO and prints the seconds of every step as JSON. Runs in TRL's environment; compare.py calls it."""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-not-found]  # TRL's environment has it
from sizes import SIZES, last_word_is, many_sevens  # type: ignore[import-not-found]  # beside this file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]  # its environment has it


class Timed(GRPOTrainer):  # type: ignore[misc]  # not typed
    """Notes how long sampling and old scores take. A step is ``updates`` optimizer steps; its rest is updates and rewards."""

    seconds: dict[str, float]
    scoring = False

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return super()._generate(*args, **kwargs)
        finally:
            self.seconds["rollout"] += time.perf_counter() - start

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        self.scoring = True
        try:
            return super()._generate_and_score_completions(*args, **kwargs)
        finally:
            self.scoring = False

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        finally:
            if self.scoring:
                self.seconds["score"] += time.perf_counter() - start


class Steps(TrainerCallback):
    def __init__(self, updates: int) -> None:
        self.updates, self.made = updates, 0
        self.rows: list[dict[str, float]] = []
        self.start = 0.0
        self.trainer: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.made += 1
        if self.made % self.updates == 0:
            now = time.perf_counter()
            row = {"step": now - self.start, **self.trainer.seconds}
            self.rows.append(row | {"update": row["step"] - sum(self.trainer.seconds.values())})
            self.trainer.seconds = defaultdict(float)
            self.start = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--problems", type=Path, required=True, help="JSON lines with prompt and answer")
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size = SIZES[args.size]
    rows = [json.loads(line) for line in args.problems.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        if args.size == "larger":
            return [many_sevens(text) for text in completions]
        return [last_word_is(text, right) for text, right in zip(completions, answer, strict=True)]

    sequences = size.prompts * size.samples
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=sequences // size.updates,
        steps_per_generation=size.updates,
        gradient_accumulation_steps=1,
        num_generations=size.samples,
        max_completion_length=size.new_tokens,
        max_steps=size.steps * size.updates,
        learning_rate=5e-5,
        warmup_steps=10,
        adam_beta2=0.95,
        beta=0.0,
        temperature=1.0,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=0,
    )
    steps = Steps(size.updates)
    trainer = Timed(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[steps],
    )
    trainer.seconds = defaultdict(float)
    steps.trainer = trainer
    trainer.train()
    print("STEPS " + json.dumps(steps.rows))


if __name__ == "__main__":
    main()

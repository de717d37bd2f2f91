"""Makes the models that the tiny runs start from: a 0.6 M-parameter Llama that has seen solutions, some of them wrong, and is
unsure.

    .venv/bin/python examples/tiny/make_warm_start.py OUT                           (sums; about a minute)
    .venv/bin/python examples/tiny/make_warm_start.py OUT --task stack-machine

Supervised training through the same Megatron engine as TEPO, with next-token cross-entropy in the objective's place. The
results, in Hugging Face format, ship as tepo_megatron/tasks/data/builtin/tiny and …/stack-machine.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from rich.progress import track

from tepo_megatron.config import EngineConfig, ObjectiveConfig, OptimizerConfig, RunConfig, TrainConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch, ObjectiveOutput, TokenScores
from tepo_megatron.tasks.data.tasks import addition, stack_machine
from tepo_megatron.tasks.data.tokenizer import Tokenizer, load_tokenizer
from tepo_megatron.tasks.data.train_tokenizer import train_char_tokenizer
from tepo_megatron.trainer.megatron.engine import Engine

TASKS: Mapping[str, ModuleType] = {"addition": addition, "stack-machine": stack_machine}


class CrossEntropy:
    """Next-token cross-entropy with the objective's interface: a sum over tokens, divided once by their number in the step."""

    needs_reference = False
    needs_entropy_slope = False
    needs_entropy_gradient = False

    def advantages(self, batch: Batch) -> torch.Tensor:
        return torch.zeros_like(batch.rewards_S)

    def prepare(self, batch: Batch, *, entropy_noise: float) -> SimpleNamespace:
        return SimpleNamespace(denominator=batch.loss_mask_T.sum().float())

    def __call__(self, scores: TokenScores, batch: Batch, context: SimpleNamespace) -> ObjectiveOutput:
        return ObjectiveOutput(-(scores.logprob * batch.loss_mask_T).sum(), context.denominator)


def random_model(folder: Path, seed: int, task: ModuleType) -> None:
    """The architecture, with random weights and the tokenizer of the task."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    train_char_tokenizer((problem.prompt for problem in task.train_problems()), folder)


def as_rollouts(examples: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[Rollout]:
    """Written solutions in the form of sampled ones."""
    rollouts = []
    for prompt, response in examples:
        ids = (*tokenizer.encode(response), tokenizer.eos_ids[0])
        rollouts.append(
            Rollout(prompt, 0, tuple(tokenizer.prompt_ids(prompt)), ids, (0.0,) * len(ids), "stop", WeightsVersion(0))
        )
    return rollouts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--task", choices=TASKS, default="addition")
    parser.add_argument("--steps", type=int, default=190)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--noise", type=float, default=0.1, help="fraction of the solutions with a slip")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder)
        random_model(start, args.seed, TASKS[args.task])
        tokenizer = load_tokenizer(start)
        config = RunConfig(
            engine=EngineConfig(micro_batch_tokens=8192),
            optimizer=OptimizerConfig(lr=args.lr, warmup_steps=10),
            objective=ObjectiveConfig(preset="grpo"),  # not used: the engine below has its own
            train=TrainConfig(steps=args.steps, minibatches=1),
        )
        engine = Engine(config, start, objective=CrossEntropy())
        written = TASKS[args.task].supervised_examples(args.steps * args.batch, args.noise, args.seed)
        examples = as_rollouts(written, tokenizer)
        for step in track(range(args.steps), description="supervised steps"):
            batch = engine.batch_from_root(examples[step * args.batch : (step + 1) * args.batch])
            result = engine.update(batch)
            if (step + 1) % 20 == 0:
                print(f"step {step + 1}: cross-entropy {result.loss:.4f}, gradient norm {result.grad_norm:.3f}")
        engine.weights.export(args.out)
        engine.close()
        (args.out / "generation_config.json").unlink(missing_ok=True)
    shutil.rmtree(args.out / ".cache", ignore_errors=True)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

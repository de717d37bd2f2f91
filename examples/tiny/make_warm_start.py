"""Makes the models that the tiny runs start from: a 0.6 M-parameter Llama that has seen solutions, some of them wrong, and is
unsure.

    .venv/bin/python examples/tiny/make_warm_start.py OUT                           (sums; about a minute)
    .venv/bin/python examples/tiny/make_warm_start.py OUT --task stack-machine
    .venv/bin/python examples/tiny/make_warm_start.py OUT --task long-addition --steps 300

Supervised training through the same Megatron engine as TEPO, with next-token cross-entropy in the objective's place. The
results, in Hugging Face format, ship as tepo_megatron/tasks/data/builtin/tiny, …/stack-machine and …/long-addition.
"""

import argparse
import io
import json
import random
import shutil
import string
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import sentencepiece
import torch
from rich.progress import track

from tepo_megatron.config import EngineConfig, ObjectiveConfig, OptimizerConfig, RunConfig, TrainConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch, ObjectiveOutput, TokenScores
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.stack_machine import LEAVES, NUM_HELDOUT, OPERATORS, Tree, problems_with_trees, value_of
from tepo_megatron.tasks.data.tokenizer import UNKNOWN_TEXT, Tokenizer, load_tokenizer

_T = TypeVar("_T")


class CrossEntropy:
    """Next-token cross-entropy with the objective's interface: a sum over tokens, divided once by their number in the step."""

    needs_reference = False
    needs_entropy_slope = False

    def advantages(self, batch: Batch) -> torch.Tensor:
        return torch.zeros_like(batch.rewards_S)

    def prepare(self, batch: Batch, **measured: object) -> SimpleNamespace:
        return SimpleNamespace(denominator=batch.loss_mask_T.sum().float())

    def __call__(self, scores: TokenScores, batch: Batch, context: SimpleNamespace) -> ObjectiveOutput:
        return ObjectiveOutput(-(scores.logprob * batch.loss_mask_T).sum(), context.denominator)


def random_model(folder: Path, seed: int, task: str, *, hidden: int = 128, layers: int = 4) -> None:
    """The architecture, with random weights and the tokenizer of the task."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,  # a long sum has 180 tokens at most
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    train_char_tokenizer((problem.prompt for problem in load_problems(f"builtin:{task}")), folder)


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
    parser.add_argument("--task", choices=tuple(WRITERS), default="addition")
    parser.add_argument("--steps", type=int, default=190)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--noise", type=float, default=0.1, help="fraction of the solutions with a slip")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--schedule", choices=("constant", "cosine"), default="constant", help="of the learning rate")
    args = parser.parse_args()

    from tepo_megatron.trainer.megatron.engine import Engine  # imports Megatron

    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder)
        random_model(start, args.seed, args.task, hidden=args.hidden, layers=args.layers)
        tokenizer = load_tokenizer(start)
        config = RunConfig(
            engine=EngineConfig(micro_batch_tokens=8192),
            optimizer=OptimizerConfig(lr=args.lr, warmup_steps=10, schedule=args.schedule),
            objective=ObjectiveConfig(preset="grpo"),  # not used: the engine below has its own
            train=TrainConfig(steps=args.steps, minibatches=1),
        )
        engine = Engine(config, start, objective=CrossEntropy())
        written = WRITERS[args.task](args.steps * args.batch, args.noise, args.seed)
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


def addition_examples(n: int, noise: float, seed: int) -> list[tuple[str, str]]:
    """(prompt, response) pairs. ``noise``: probability in [0, 1] of a slip, which makes the result wrong."""
    rng = random.Random(seed)
    examples: list[tuple[str, str]] = []
    for problem in _repeated(load_problems("builtin:addition"), n, rng):
        slip = rng.choice(_SLIPS) if rng.random() < noise else None
        examples.append((problem.prompt, _write_solution(problem, slip, rng)))
    return examples


def _repeated(problems: list[_T], n: int, rng: random.Random) -> Iterator[_T]:
    """``n`` problems: all in a random order, then all in another. The caller draws from ``rng`` between them."""
    for start in range(0, n, len(problems)):
        rng.shuffle(problems)
        yield from problems[: n - start]


_SLIPS = ("units", "carry", "tens", "result")


def _write_solution(problem: Problem, slip: str | None, rng: random.Random) -> str:
    a, b = (int(number) for number in problem.prompt.removesuffix("=").split("+"))

    def slipped(place: str, value: int, choices: Sequence[int]) -> int:
        return value if place != slip else rng.choice([choice for choice in choices if choice != value])

    units = slipped("units", a % 10 + b % 10, range(19))
    carry = slipped("carry", units // 10, range(2))
    tens = slipped("tens", a // 10 + b // 10 + carry, range(2, 20))
    result = slipped("result", 10 * tens + units % 10, range(20, 199))
    return f"{a % 10}+{b % 10}={units} {a // 10}+{b // 10}+{carry}={tens} {result}"


def long_addition_examples(n: int, noise: float, seed: int) -> list[tuple[str, str]]:
    """As :func:`addition_examples`, of four numbers: a line for each that is added."""
    rng = random.Random(seed)
    examples: list[tuple[str, str]] = []
    for problem in _repeated(load_problems("builtin:long-addition"), n, rng):
        terms = [int(term) for term in problem.prompt.removesuffix("=").split("+")]
        examples.append((problem.prompt, written_sum(terms, rng, slips=rng.random() < noise)))
    return examples


def written_sum(terms: Sequence[int], rng: random.Random, *, slips: bool = False) -> str:
    """``321+454: 1+4+0=5 2+5+0=7 3+4+0=7 775``, and so on. ``slips``: one digit's sum is wrong, and what follows is right."""
    wrong = (rng.randrange(1, len(terms)), rng.randrange(3)) if slips else None
    partial, lines = terms[0], []
    for number, term in enumerate(terms[1:], start=1):
        carry, total, steps = 0, 0, []
        for place in range(max(len(str(partial)), len(str(term)))):
            a, b = partial // 10**place % 10, term // 10**place % 10
            result = a + b + carry
            if (number, place) == wrong:
                result = rng.choice([other for other in range(20) if other != result])
            steps.append(f"{a}+{b}+{carry}={result}")
            carry, total = result // 10, total + result % 10 * 10**place
        total += carry * 10 ** (place + 1)
        lines.append(f"{partial}+{term}: {' '.join(steps)} {total}")
        partial = total
    return "\n".join(lines)


def stack_machine_examples(n: int, noise: float, seed: int) -> list[tuple[str, str]]:
    """As :func:`addition_examples`; some correct programs have exchanged operands."""
    if not 0 <= noise <= 1:
        raise ValueError(f"noise = {noise} is a probability: give a value from 0 to 1")
    if n < 0:
        raise ValueError(f"n = {n} examples cannot be written; give 0 or more")
    rng = random.Random(seed)
    examples: list[tuple[str, str]] = []
    for problem, tree in _repeated(list(problems_with_trees()[NUM_HELDOUT:]), n, rng):
        wrong = rng.random() < noise
        written = _another_formula(problem, tree, rng) if wrong else tree
        examples.append((problem.prompt, varied_program(written, rng)))
    return examples


def _another_formula(problem: Problem, tree: Tree, rng: random.Random) -> Tree:
    while True:
        outcome = _slipped(tree, rng)
        if any(value_of(outcome, inputs) != result for inputs, result in problem.metadata["tests"]):
            return outcome


def varied_program(tree: Tree, rng: random.Random) -> str:
    if isinstance(tree, str):
        return tree
    operator, *operands = tree
    if operator == "?":
        return "".join(varied_program(operand, rng) for operand in operands) + operator
    left, right = operands
    if left == right and rng.random() < 0.5:
        return f"{varied_program(left, rng)}d{operator}"
    if rng.random() < 0.1:
        exchanged = "" if operator in "+*" else "s"
        return f"{varied_program(right, rng)}{varied_program(left, rng)}{exchanged}{operator}"
    return f"{varied_program(left, rng)}{varied_program(right, rng)}{operator}"


def _slipped(tree: Tree, rng: random.Random) -> Tree:
    kind = rng.choice(("leaf", "operator", "order", "brackets"))
    if kind == "brackets":
        return _from_left_to_right(tree)
    leaf = kind == "leaf"
    places = [place for place, item in _places(tree) if isinstance(item, str) == leaf]
    place = rng.choice(places)
    return _changed(tree, place, lambda part: _slip(part, kind, rng))


def _slip(tree: Tree, kind: str, rng: random.Random) -> Tree:
    if kind == "leaf":
        return rng.choice([leaf for leaf in LEAVES if leaf != tree])
    operator, *operands = tree
    if kind == "order" or operator in "<?":
        *before, first, second = operands
        return (operator, *before, second, first)
    return (rng.choice([other for other in OPERATORS if other != operator]), *operands)


def _from_left_to_right(tree: Tree) -> Tree:
    if isinstance(tree, str):
        return tree
    if tree[0] == "?":
        return ("?", tree[1], *(_from_left_to_right(item) for item in tree[2:]))
    leaves, operators = _in_order(tree)
    result: Tree = leaves[0]
    for operator, leaf in zip(operators, leaves[1:], strict=True):
        result = (operator, result, leaf)
    return result


def _in_order(tree: Tree) -> tuple[list[str], list[str]]:
    if isinstance(tree, str):
        return [tree], []
    operator, left, right = tree
    (left_leaves, left_operators), (right_leaves, right_operators) = _in_order(left), _in_order(right)
    return left_leaves + right_leaves, [*left_operators, operator, *right_operators]


def _places(tree: Tree, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Tree]]:
    yield place, tree
    if not isinstance(tree, str):
        for number, item in enumerate(tree[1:], start=1):
            yield from _places(item, (*place, number))


def _changed(tree: Tree, place: tuple[int, ...], change: Callable[[Tree], Tree]) -> Tree:
    if not place:
        return change(tree)
    first, *rest = place
    return (*tree[:first], _changed(tree[first], tuple(rest), change), *tree[first + 1 :])


WRITERS: Mapping[str, Callable[[int, float, int], list[tuple[str, str]]]] = {
    "addition": addition_examples,
    "stack-machine": stack_machine_examples,
    "long-addition": long_addition_examples,
}


if __name__ == "__main__":
    main()

"""Makes the model that an environment's example starts from: builtin:tiny, trained on games that a player without a plan
played.

    .venv/bin/python examples/environments/make_warm_start.py guess_number out/guess_number_start     (about half a minute)

The player knows the rules and has no plan, so that RL has something to find: it guesses at random, though at times among the
numbers that the answers leave; it asks the calculator for sums with a wrong digit, and does not always believe it. Training is
next-token cross-entropy (of examples/tiny/make_warm_start.py) through the same engine as TEPO, on what the player wrote; what
the environment answered is context, as in RL.
"""

import argparse
import asyncio
import inspect
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tepo_megatron.config import EngineConfig, ObjectiveConfig, OptimizerConfig, RunConfig, TrainConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.runtime.user_code import load_user_code
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.tokenizer import Tokenizer, load_tokenizer
from tepo_megatron.tasks.environments.builtin_environments import Calculator, GuessNumber
from tepo_megatron.trainer.megatron.engine import Engine

Turns = Sequence[tuple[str, str]]
"""What was written and what was answered, so far."""

Player = Callable[[Problem, Turns, random.Random], str]
"""What it writes next."""


def guesses(highest: int, answer_to: Callable[[int, int], str], heeds: float) -> Player:
    """Guesses at random from 1 to ``highest``; in a share ``heeds`` of its guesses only what all answers leave.

    ``answer_to(number, guess)`` is the game's. Without any heed a model learns to end with what it began by chance: a policy
    gradient improves a first guess by how well the later ones are made.
    """

    def next_guess(problem: Problem, turns: Turns, rng: random.Random) -> str:
        numbers = range(1, highest + 1)
        left = [each for each in numbers if all(answer_to(each, int(guess)) == answer for guess, answer in turns)]
        return str(rng.choice(left if rng.random() < heeds else numbers))

    return next_guess


def smaller_or_larger(number: int, guess: int) -> str:
    return "" if guess == number else ("<" if number < guess else ">")


def how_far(number: int, guess: int) -> str:
    return str(abs(number - guess))


def uses_a_calculator(problem: Problem, turns: Turns, rng: random.Random) -> str:
    if turns:
        return turns[-1][1].strip("[]") if rng.random() < 0.7 else str(rng.randint(20, 198))
    if rng.random() < 0.5:
        return str(rng.randint(20, 198))
    asked = list(problem.prompt.removesuffix("="))
    if rng.random() < 0.4:
        asked[rng.choice([0, 1, 3, 4])] = str(rng.randint(1, 9))
    return f"({''.join(asked)})"


def tasks() -> dict[str, tuple[str, Callable[[], Any], Player]]:
    own = Path(__file__).parents[1] / "own_env"
    distance = load_user_code(f"{own / 'distance.py'}:Distance", "the example's environment")
    calculator: dict[str, Any] = {"begin": "(", "end": ")", "open": "[", "close": "]"}
    return {
        "guess_number": ("builtin:guess-number", GuessNumber, guesses(7, smaller_or_larger, heeds=0.5)),
        "calculator": ("builtin:addition", lambda: Calculator(**calculator), uses_a_calculator),
        "own_env": (str(own / "problems.jsonl"), distance, guesses(9, how_far, heeds=0.6)),
    }


async def play(environment: Any, problem: Problem, player: Player, tokenizer: Tokenizer, rng: random.Random) -> Rollout:
    """A game as a rollout: what the player wrote is to be learnt, what the environment answered is not."""

    async def value(found: Any) -> Any:
        return await found if inspect.isawaitable(found) else found

    await value(environment.reset(problem, seed=0))
    ids: list[int] = []
    mask: list[bool] = []
    turns: list[tuple[str, str]] = []
    done = False
    while not done and len(mask) < 60:
        text = player(problem, turns, rng)
        own = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
        result = await value(environment.step(ResponseText(text, own)))
        turns, done = [*turns, (text, result.observation or "")], result.done
        theirs = [] if done else tokenizer.encode(turns[-1][1])
        ids += [*own, *theirs]
        mask += [True] * len(own) + [False] * len(theirs)
    prompt = tokenizer.prompt_ids(problem.prompt)
    return Rollout(problem.id, 0, prompt, ids, np.zeros(len(ids)), "stop", WeightsVersion(0), loss_mask=np.array(mask))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=tasks())
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    source, make, player = tasks()[args.task]
    start = resolve_model_path("builtin:tiny")
    tokenizer, problems, rng = load_tokenizer(start), load_problems(source), random.Random(args.seed)
    config = RunConfig(
        engine=EngineConfig(micro_batch_tokens=8192),
        optimizer=OptimizerConfig(lr=args.lr, warmup_steps=10),
        objective=ObjectiveConfig(preset="grpo"),  # not used: the engine below has its own
        train=TrainConfig(steps=args.steps, minibatches=1),
    )
    tiny = Path(__file__).parents[1] / "tiny" / "make_warm_start.py"
    engine = Engine(config, start, objective=load_user_code(f"{tiny}:CrossEntropy", "the cross-entropy")())
    for step in range(1, args.steps + 1):
        games = [asyncio.run(play(make(), rng.choice(problems), player, tokenizer, rng)) for _ in range(args.batch)]
        result = engine.update(engine.batch_from_root(games))
        if step % 20 == 0 or step == args.steps:
            print(f"step {step}: cross-entropy {result.loss:.4f}", flush=True)
    engine.weights.export(args.out)
    engine.close()
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

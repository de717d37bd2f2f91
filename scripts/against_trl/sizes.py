"""What both sides are given: the sizes, and a reward for a model that has learned nothing. Needs nothing but Python."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """``prompts`` × ``samples`` responses of at most ``new_tokens`` tokens a step, in ``updates`` optimizer steps."""

    prompts: int
    samples: int
    new_tokens: int
    updates: int
    steps: int
    """Of a run; the first two are not counted."""
    description: str


SIZES = {
    "tiny": Size(64, 8, 32, 4, 10, "the built-in model, 0.6 M parameters, two-digit sums: 64 × 8 responses of about 19 tokens"),
    "larger": Size(8, 8, 128, 4, 4, "a random Llama of 25 M parameters that never ends a response: 8 × 8 of 128 tokens"),
}
WARM_UP = 2


def many_sevens(text: str) -> float:
    """Whether a text has an odd number of sevens: a reward that differs within a group of any model."""
    return float(text.count("7") % 2)


def last_word_is(text: str, answer: str) -> float:
    return float(text.rsplit(" ", 1)[-1] == answer)


def verify_sevens(problem: object, text: str) -> float:
    """``many_sevens`` as a verifier."""
    return many_sevens(text)

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from tepo_megatron.tasks.data import addition

numbers = st.integers(10, 99)
PROBLEMS = {problem.id: problem for problem in addition.train_problems() + addition.heldout_problems()}


def test_split_covers_every_sum_once() -> None:
    train, heldout = addition.train_problems(), addition.heldout_problems()
    assert (len(train), len(heldout)) == (7900, 200)
    assert {p.id for p in train}.isdisjoint(p.id for p in heldout)
    assert {p.prompt for p in train + heldout} == {f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)}


def test_split_is_the_published_one() -> None:
    """The order comes from SHA-256, so these constants hold on every machine and version."""
    assert [p.id for p in addition.heldout_problems()[:5]] == HELDOUT_START
    assert [p.id for p in addition.train_problems()[-3:]] == TRAIN_END


@example(a=37, b=58)
@given(a=numbers, b=numbers)
def test_answer_and_solution_are_the_sum(a: int, b: int) -> None:
    problem = PROBLEMS[f"{a}+{b}"]
    assert (problem.prompt, problem.answer) == (f"{a}+{b}=", str(a + b))
    units, carry = a % 10 + b % 10, int(a % 10 + b % 10 >= 10)
    tens = f"{a // 10}+{b // 10}+{carry}={a // 10 + b // 10 + carry}"
    assert addition.solution(problem) == f"{a % 10}+{b % 10}={units} {tens} {a + b}"


@given(seed=st.integers(0, 2**32), n=st.integers(0, 300))
def test_noise_free_examples_are_right_and_reproducible(seed: int, n: int) -> None:
    examples = addition.supervised_examples(n, 0.0, seed)
    assert examples == addition.supervised_examples(n, 0.0, seed)
    assert len(examples) == n
    assert all(_value(prompt) == int(response.split()[-1]) for prompt, response in examples)


@given(seed=st.integers(0, 2**32), noise=st.sampled_from([0.3, 1.0]))
def test_noise_is_the_share_of_wrong_solutions(seed: int, noise: float) -> None:
    examples = addition.supervised_examples(2000, noise, seed)
    wrong = sum(_value(prompt) != int(response.split()[-1]) for prompt, response in examples)
    assert wrong == 2000 if noise == 1 else abs(wrong / 2000 - 0.3) < 0.08  # 7.8 standard deviations


def test_examples_repeat_only_after_all_problems_and_avoid_heldout() -> None:
    prompts = [prompt for prompt, _ in addition.supervised_examples(2 * 7900, 0.5, 1)]
    assert set(Counter(prompts[:7900]).values()) == {1}
    assert set(Counter(prompts).values()) == {2}
    assert prompts[:7900] != prompts[7900:]
    assert set(prompts).isdisjoint(p.prompt for p in addition.heldout_problems())


def _value(prompt: str) -> int:
    a, b = prompt.removesuffix("=").split("+")
    return int(a) + int(b)


HELDOUT_START = ["49+95", "56+74", "12+70", "93+92", "40+70"]
TRAIN_END = ["47+69", "46+72", "45+61"]

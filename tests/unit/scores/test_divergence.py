"""Divergences from a teacher or its top k: the dense fp64 oracle, what holds of every divergence, and what is refused."""

import re
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tepo_megatron.core.scores import fused_linear, fused_linear_logprob_and_entropy, logprob_and_entropy
from tepo_megatron.core.scores.shard import Logits, Scoring, combine
from tepo_megatron.core.scores.torch_sweep import IN_TORCH
from tepo_megatron.core.types import LEAST_REST, Checks, Divergence, TeacherHead, TeacherLogits, TeacherTopK
from tepo_megatron.errors import NotFiniteError
from tepo_megatron.tools.bench.step_rank import peak_bytes
from tests.support.dense_scores import (
    BACKENDS,
    DIVERGENCES,
    IN_INTERPRETER,
    MAX_WIDTH,
    cases,
    compare,
    compare_fused,
    dense_divergence,
    impossible_column,
    least_probabilities,
    loss,
    teacher_head,
    teacher_of,
    top_k_cases,
    top_k_of,
)
from tests.support.host_waits import HostWaits

BY_KIND = pytest.mark.parametrize("divergence", DIVERGENCES, ids=lambda divergence: divergence.kind)
BY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)


@BY_KIND
@BY_BACKEND
@given(case=cases(MAX_WIDTH), inplace=st.booleans(), spread=st.sampled_from([0.0, 0.3, 5.0]))
def test_matches_the_dense_oracle(divergence: Divergence, backend: str, case: Any, inplace: bool, spread: float) -> None:
    logits, labels, options, weights = case
    logits, tolerance = (logits, 1e-9) if backend == "torch" else (logits.float(), 2e-5)
    options = options | {"teacher": teacher_of(logits, labels, divergence, spread=spread)}
    compare(logits, labels, options, weights, inplace=inplace, backend=backend, tolerance=tolerance)


@BY_BACKEND
@pytest.mark.parametrize("impossible", ["student", "teacher"])
def test_a_mixture_does_not_underflow(backend: str, impossible: str) -> None:
    compare(*least_probabilities(impossible), inplace=False, backend=backend, tolerance=2e-5)


@BY_BACKEND
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
@pytest.mark.parametrize("temperature", [0.01, 0.05])  # the weight is 0 in fp64, or only in fp32
def test_a_column_without_weight_adds_nothing(backend: str, kind: str, temperature: float) -> None:
    logits, labels, options, weights = impossible_column(kind, temperature)
    compare(logits, labels, options, weights, inplace=False, backend=backend, tolerance=2e-5)
    held = options["teacher"]
    planned: dict[str, Any] = {"tokens": 1, "width": 1500, "tp_group": None, "vocab_size": None, "mask_T": None}
    planned |= {"temperature": temperature, "entropy_slope": False, "teacher": held}
    scoring = Scoring.plan(labels % 1500, **planned)
    shards_pRK = torch.empty(2, 1, scoring.statistics)
    shards = map(Logits, logits.split(1500, 1), held.logits_TVp.split(1500, 1))
    for shard, stats_RK in zip(shards, shards_pRK, strict=True):
        IN_TORCH.statistics(shard, scoring, stats_RK)
    divergence = combine(shards_pRK, scoring)[1].divergence_R
    expected = dense_divergence(logits / temperature, held.logits_TVp / temperature, held.divergence)
    torch.testing.assert_close(divergence.double(), expected, rtol=1e-5, atol=1e-5)


@BY_KIND
@BY_BACKEND
@pytest.mark.parametrize("top_k", [None, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_many_columns(divergence: Divergence, backend: str, top_k: int | None, dtype: torch.dtype) -> None:
    """Several blocks of the C++ sweep and chunks of the torch sweep; rows apart, masked rows, padding. Gradients in half
    precision are rounded once, those of the top k too, some of which have nearly all of the probability.
    """
    torch.manual_seed(1)  # float32 rounding of a small rest exceeds the bound of a top k in one draw of hundreds
    logits = (3 * torch.randn(2, 40, 5009)).to(dtype)[0, :, 3:]
    logits[2, 7:2900], logits[3, 17], logits[4, 4800] = -torch.inf, 20, 20
    labels, mask, weights = torch.randint(0, 4900, (40,)), torch.rand(40) < 0.7, torch.randn(2, 40)
    labels[2:4], mask[2:5] = torch.tensor([4000, 17]), True
    teacher: Any = teacher_of(logits, labels, divergence)
    if top_k is not None:
        teacher = top_k_of(TeacherLogits(logits.float() + torch.randn(logits.shape), divergence), top_k, 0.9, 4900)
    options = {"temperature": 0.9 if top_k else 0.7, "vocab_size": 4900, "mask_T": mask, "teacher": teacher}
    close = {"tolerance": 2e-5 if top_k else 1e-5, "gradient_tolerance": max(torch.finfo(dtype).eps, 1e-5)}
    for inplace in (False, True):
        compare(logits, labels, options, weights, inplace=inplace, backend=backend, **close)


@pytest.mark.parametrize("divergence", [None, *DIVERGENCES])
@BY_BACKEND
@given(case=cases())
def test_fused_with_the_head(divergence: Divergence | None, backend: str, case: Any) -> None:
    _, labels, options, weights = case
    generator = torch.Generator().manual_seed(len(labels))
    shapes = (len(labels), options["vocab_size"] + 2)
    hidden, head = (torch.randn(n, 5, generator=generator, dtype=torch.float64).requires_grad_() for n in shapes)
    teacher = None if divergence is None else teacher_head(hidden.detach(), head.detach(), divergence)
    close: dict[str, Any] = {"tolerance": 1e-9, "gradient_tolerances": (1e-9, 1e-9), "teacher": teacher}
    compare_fused(hidden, head, labels, options | {"entropy_slope": True}, weights, **close, backend=backend)


@BY_BACKEND
@pytest.mark.parametrize(
    ("dtype", "top_k", "divergence"),
    [
        *product([torch.bfloat16, torch.float32], [None], [None, *DIVERGENCES]),
        *((torch.float32, 9, divergence) for divergence in DIVERGENCES),
    ],
)
def test_fused_in_chunks(
    monkeypatch: pytest.MonkeyPatch, divergence: Any, backend: str, dtype: torch.dtype, top_k: int | None
) -> None:
    """The bounds are those of these inputs: of one in 150 draws float32's rounding exceeds them with either backend."""
    monkeypatch.setattr(fused_linear, "_CHUNK_BYTES", {"cpu": 1})  # 16 rows, the fewest
    generator, rows = torch.Generator().manual_seed(1), 26 if IN_INTERPRETER else 60
    labels, mask = torch.randint(0, 201, (rows,), generator=generator), torch.rand(rows, generator=generator) < 0.8
    hidden, head = (torch.randn(n, 6, generator=generator).to(dtype).requires_grad_() for n in (rows, 210))
    options: dict[str, Any] = {"temperature": 0.8, "vocab_size": 201, "mask_T": mask, "entropy_slope": True}
    close = (1e-4, 1e-5) if dtype == torch.float32 else (2.0**-6, rows / 600)  # A bf16 gradient of 20 has steps of 1/8.
    teacher: Any = None if divergence is None else teacher_head(hidden.detach(), head.detach(), divergence)
    if top_k is not None:
        teacher = top_k_of(TeacherLogits(torch.randn(rows, 201, generator=generator), divergence), top_k)
    compare_fused(
        *(hidden, head, labels, options, torch.randn(2, rows, generator=generator)),
        **{"tolerance": 1e-5, "gradient_tolerances": close, "backend": backend, "teacher": teacher},
    )


def test_the_oracle_is_the_definition() -> None:
    """Against torch's divergence of distributions, and difference quotients. TRL's formula is in test_peers_distillation.py."""
    student, teacher = torch.randn(2, 5, 7, dtype=torch.float64)
    p, q = (torch.distributions.Categorical(logits=logits) for logits in (student, teacher))
    forward, reverse = Divergence("forward_kl"), Divergence("reverse_kl")
    torch.testing.assert_close(dense_divergence(student, teacher, forward), torch.distributions.kl_divergence(q, p))
    torch.testing.assert_close(dense_divergence(student, teacher, reverse), torch.distributions.kl_divergence(p, q))

    for divergence in (forward, reverse, Divergence("jsd", 0.1), Divergence("jsd")):
        scores = logprob_and_entropy(student, torch.arange(5), teacher=TeacherLogits(teacher, divergence))
        torch.testing.assert_close(scores.divergence, dense_divergence(student, teacher, divergence))

        score = partial(logprob_and_entropy, labels_T=torch.arange(5), teacher=TeacherLogits(teacher, divergence))
        torch.autograd.gradcheck(lambda logits, score=score: score(logits).divergence, student.clone().requires_grad_())


@BY_BACKEND
@given(
    seed=st.integers(0, 999),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 50.0]),
    beta=st.floats(0.01, 0.99),
    shifts=st.tuples(st.sampled_from([0.0, 500.0]), st.sampled_from([0.0, -500.0])),
)
def test_what_holds_of_every_divergence(
    backend: Any, seed: int, spread: float, beta: float, shifts: tuple[float, float]
) -> None:
    """It is not negative, 0 for an equal teacher, unchanged by offsets and by the order of columns; β names a bound of ``jsd``,
    and swaps with the roles.
    """
    generator = torch.Generator().manual_seed(seed)
    student = (torch.randn(6, 40, generator=generator) * 64).round() / 64  # so that 500 more is exact
    teacher = student + (spread * torch.randn(6, 40, generator=generator) * 64).round() / 64
    labels, order = torch.arange(6), torch.randperm(40, generator=generator)

    def of(kind: Any, student: Tensor, teacher: Tensor, beta: float = beta) -> Tensor:
        held = TeacherLogits(teacher, Divergence(kind, beta))
        return logprob_and_entropy(student, labels, teacher=held, backend=backend).divergence

    for kind in ("forward_kl", "reverse_kl", "jsd"):
        value = of(kind, student, teacher)
        assert (value >= 0).all()
        assert of(kind, student, student).abs().max() < 1e-6
        assert torch.equal(of(kind, student + shifts[0], teacher + shifts[1]), value)
        torch.testing.assert_close(of(kind, student[:, order], teacher[:, order]), value, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(of("forward_kl", student, teacher), of("reverse_kl", teacher, student), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(of("jsd", teacher, student, 1 - beta), of("jsd", student, teacher), rtol=1e-5, atol=2e-6)
    bound = -beta * torch.tensor(beta).log() - (1 - beta) * torch.tensor(1 - beta).log()
    assert (of("jsd", student, teacher) <= bound + 1e-6).all()


@BY_KIND
@BY_BACKEND
def test_the_other_scores_keep_their_bits_and_each_may_be_used_alone(divergence: Divergence, backend: Any) -> None:
    for dtype in 10 * [torch.bfloat16, torch.float32]:
        logits, labels = (3 * torch.randn(9, 1500)).to(dtype), torch.arange(9)
        teacher = teacher_of(logits, labels, divergence)
        plain, scores = (logprob_and_entropy(logits, labels, teacher=held, backend=backend) for held in (None, teacher))
        assert torch.equal(plain.logprob, scores.logprob)
        assert torch.equal(plain.entropy, scores.entropy)
    assert (plain.divergence, plain.teacher_logprob, plain.agreement) == (None, None, None)
    leaf, dense = logits.clone().requires_grad_(), logits.double().requires_grad_()
    alone = logprob_and_entropy(leaf, labels, teacher=teacher, backend=backend)
    assert not alone.teacher_logprob.requires_grad
    alone.divergence.sum().backward()
    dense_divergence(dense, teacher.logits_TVp, divergence).sum().backward()
    torch.testing.assert_close(leaf.grad, dense.grad, check_dtype=False, rtol=1e-5, atol=1e-6)


@BY_BACKEND
def test_the_lowest_id_of_a_tie_is_the_most_likely(backend: Any) -> None:
    student, teacher = torch.zeros(4, 3000), torch.zeros(4, 3000)
    student[0, [5, 700, 2000]] = teacher[0, [5, 6, 300, 900, 2999]] = 1.0  # the same first one, also of a tile and a part
    student[1, [6, 2000]] = teacher[1, 2000] = 1.0
    student[2, 2000] = teacher[2, 2001] = 1.0
    held = TeacherLogits(teacher, Divergence("jsd"))
    agreement = logprob_and_entropy(student, torch.arange(4), teacher=held, backend=backend).agreement
    assert agreement.tolist() == [True, False, False, True]


@BY_BACKEND
def test_logits_far_below_the_best_count_in_full(backend: Any) -> None:
    """A probability of 0 in fp32 has a logarithm all the same: −400 here, where the teacher expects half of the time."""
    student = torch.tensor([[0.0, -400.0, -torch.inf]])
    teacher = torch.tensor([[0.0, 0.0, -torch.inf]])
    held = TeacherLogits(teacher, Divergence("forward_kl"))
    divergence = logprob_and_entropy(student, torch.tensor([0]), teacher=held, backend=backend).divergence
    torch.testing.assert_close(divergence, dense_divergence(student, teacher, held.divergence).float())


def refusal(logits: Tensor, sentence: str, **options: Any) -> ValueError:
    """It is raised, and noted without waiting for the device."""
    with pytest.raises(ValueError, match=sentence) as caught:
        logprob_and_entropy(logits, torch.arange(5), **options)
    checks = Checks()
    with HostWaits() as waits:
        logprob_and_entropy(logits, torch.arange(5), checks=checks, scored=4, **options)
    assert options["backend"] == "torch" or not waits.places
    assert [str(noted) for noted in Checks.first_errors([checks])] == [str(caught.value)]
    return caught.value


@BY_BACKEND
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_an_infinite_divergence_is_refused(backend: Any, kind: Any) -> None:
    """A masked token, and −inf of the other one, are no error."""
    first, second = torch.randn(2, 5, 3000)
    first[1:3, 2500] = second[2, 2400] = -torch.inf
    mask = torch.tensor([True, False, True, True, True])
    logits, teacher = (first, second) if kind == "forward_kl" else (second, first)
    options: dict[str, Any] = {"mask_T": mask, "teacher": TeacherLogits(teacher, Divergence(kind)), "backend": backend}
    error = refusal(logits, rf"^{kind} of token 2 is infinite: a logit of the .* is −inf", **options)
    assert isinstance(error, NotFiniteError)
    options["mask_T"] = mask & (torch.arange(5) != 2)
    logprob_and_entropy(logits, torch.arange(5), **options)


@BY_KIND
@BY_BACKEND
@pytest.mark.parametrize(
    ("bad", "message"),
    [(torch.nan, "NaN or +inf teacher logits on tensor-parallel rank 0, first at token 3"), (-torch.inf, "")],
)
def test_impossible_logits_of_the_teacher_are_named(divergence: Divergence, backend: Any, bad: float, message: str) -> None:
    teacher = torch.zeros(5, 40)
    teacher[3, 30 if message else slice(None)] = bad
    held = TeacherLogits(teacher, divergence)
    with pytest.raises(NotFiniteError, match=re.escape(message or "every teacher logit of token 3 is −inf")):
        logprob_and_entropy(torch.zeros(5, 40), torch.arange(5), teacher=held, backend=backend)


@BY_BACKEND
@pytest.mark.parametrize(
    ("divergence", "inplace", "bound"),
    [(None, True, 0.03), (None, False, 1.03), *((divergence, True, 0.05) for divergence in DIVERGENCES)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_peak_memory(backend: Any, divergence: Divergence | None, inplace: bool, bound: float, dtype: torch.dtype) -> None:
    """Beyond the logits, and a teacher's: a few percent of them in place, and the gradient otherwise; nothing of their size in
    fp32.
    """
    rows = 2048 if divergence is None else 1024
    logits, other = (torch.randn(64, 16_384, dtype=dtype).repeat(rows // 64, 1) for _ in range(2))
    teacher = None if divergence is None else TeacherLogits(other, divergence)
    options: dict[str, Any] = {"inplace_backward": inplace, "teacher": teacher, "backend": backend}
    logits.requires_grad_()

    def compute() -> None:
        scores = logprob_and_entropy(logits.view_as(logits), torch.arange(rows), **options)
        loss(scores, torch.ones(2, rows) * torch.tensor([[1.0], [0.5]])).backward()

    assert 0 < peak_bytes(compute) <= bound * logits.numel() * logits.element_size()


@pytest.mark.parametrize(("divergence", "most"), [(None, 1.2), *((divergence, 1.4) for divergence in DIVERGENCES)])
def test_a_chunk_of_logits_and_their_gradient_stays_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, divergence: Divergence | None, most: float
) -> None:
    """Those in fp32, and a teacher's."""
    budget = 16 * 2**20
    monkeypatch.setattr(fused_linear, "_CHUNK_BYTES", {"cpu": budget})
    if divergence is None:
        monkeypatch.setattr(fused_linear, "_PART_ROWS", 128)
    hidden, head = (torch.randn(n, 8).bfloat16().requires_grad_() for n in (2048, 8192))
    teacher = None if divergence is None else teacher_head(hidden.detach(), head.detach(), divergence)

    def compute() -> None:
        scores = fused_linear_logprob_and_entropy(hidden, head, torch.arange(2048), teacher=teacher, backend="torch")
        (scores.logprob if scores.divergence is None else scores.divergence).sum().backward()

    assert budget / 2 < peak_bytes(compute) < most * budget


@BY_BACKEND
@given(data=st.data(), inplace=st.booleans())
def test_a_top_k_matches_the_dense_oracle(backend: str, data: Any, inplace: bool) -> None:
    exact = backend == "torch"
    logits, labels, options, weights = data.draw(top_k_cases(small=not exact))
    logits, tolerance = (logits, 1e-8) if exact else (logits.float(), 2e-5)
    compare(logits, labels, options, weights, inplace=inplace, backend=backend, tolerance=tolerance)


@BY_BACKEND
@given(data=st.data())
def test_a_top_k_fused_with_the_head(backend: str, data: Any) -> None:
    logits, labels, options, weights = data.draw(top_k_cases())
    generator = torch.Generator().manual_seed(len(labels))
    shapes = (len(labels), logits.shape[1])
    hidden, head = (torch.randn(n, 5, generator=generator, dtype=torch.float64).requires_grad_() for n in shapes)
    options = options | {"entropy_slope": True}
    close: dict[str, Any] = {"tolerance": 1e-7, "gradient_tolerances": (1e-6, 1e-6), "teacher": options.pop("teacher")}
    compare_fused((hidden / 2).detach().requires_grad_(), head, labels, options, weights, **close, backend=backend)


@BY_KIND
@given(vocab=st.integers(2, 30), seed=st.integers(0, 99))
def test_all_tokens_but_one_give_the_whole_divergence(divergence: Divergence, vocab: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, 7, vocab, generator=generator, dtype=torch.float64)
    whole, labels = TeacherLogits(teacher, divergence), torch.zeros(7, dtype=torch.int64)
    outcomes = []
    for held in (whole, top_k_of(whole, vocab - 1)):
        leaf = student.clone().requires_grad_()
        scores = logprob_and_entropy(leaf, labels, teacher=held)
        scores.divergence.sum().backward()
        outcomes.append((scores.divergence.detach(), leaf.grad, scores.agreement))
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other)


@BY_BACKEND
@BY_KIND
def test_a_rest_without_probability_is_bounded(divergence: Divergence, backend: Any) -> None:
    """The student's rest is e⁻⁴⁰, the teacher's 0.3: the pull on the top k is exact, and what is infinite has a bound."""
    student, ids = torch.zeros(1, 50).requires_grad_(), torch.tensor([[4, 9]])
    with torch.no_grad():
        student[0, 4:10:5] = 44.0
    held = TeacherTopK(ids, torch.tensor([[0.4, 0.3]]).log(), divergence)
    scores = logprob_and_entropy(student, torch.tensor([4]), teacher=held, backend=backend)
    assert 0 < scores.divergence.item() < -torch.tensor(LEAST_REST).log()
    scores.divergence.sum().backward()
    assert student.grad.isfinite().all()
    if divergence.kind == "forward_kl":
        torch.testing.assert_close(student.grad[0, ids[0]], torch.tensor([0.1, 0.2]))


def test_errors_of_a_top_k_are_named_without_a_wait() -> None:
    logits = torch.randn(5, 40)
    teacher = top_k_of(TeacherLogits(torch.randn(5, 40), Divergence("forward_kl")), 3)
    mask = torch.tensor([True, False, True, True, True])
    wrong = TeacherTopK(teacher.ids_TK.clone(), teacher.logprobs_TK, teacher.divergence)
    wrong.ids_TK[1:3, 1] = 40
    below = logits.clone()
    below[3, int(teacher.ids_TK[3, 2])] = -torch.inf
    for given_logits, held, sentence in (
        (logits, wrong, r"the teacher's tokens of token 2 are between \d+ and 40, not within \[0, 40\)"),
        (below, teacher, "forward_kl of token 3 is infinite: a logit of the student is −inf where the teacher's is not"),
    ):
        error = refusal(given_logits, sentence, mask_T=mask, teacher=held, backend="cpp")
        assert isinstance(error, NotFiniteError) == (held is teacher)


JSD = Divergence("jsd")
KEPT_TK, IDS_TK = torch.full((3, 1), -1), torch.zeros(3, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": TeacherLogits(torch.zeros(3, 6), JSD)}, r"teacher's logits_TVp is torch.float32 \(3, 6\); give"),
        ({"teacher": TeacherLogits(torch.zeros(3, 5).half(), JSD)}, "teacher's logits_TVp is torch.float16"),
        ({"teacher": TeacherLogits(torch.zeros(3, 5), JSD), "kept_TK": KEPT_TK}, "kept_TK and a teacher exclude each other"),
        (
            {"teacher": TeacherTopK(IDS_TK, torch.zeros(3, 2), JSD), "kept_TK": KEPT_TK},
            "kept_TK and a teacher exclude each other",
        ),
        ({"teacher": TeacherTopK(IDS_TK, torch.zeros(3, 1), JSD)}, r"logprobs_TK is torch.float32 \(3, 1\)"),
        ({"teacher": TeacherTopK(IDS_TK[:, :0], torch.zeros(3, 0), JSD)}, "a teacher's top 0 of 5"),
        (
            {"teacher": TeacherTopK(IDS_TK[:, :1].expand(3, 5), torch.zeros(3, 5), JSD)},
            "a teacher's top 5 of 5 tokens leave no other; give at least 1 and at most 4, or the teacher's logits",
        ),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        logprob_and_entropy(torch.zeros(3, 5), torch.arange(3), **changes)
    if isinstance(changes["teacher"], TeacherTopK):
        with pytest.raises(ValueError, match=message):
            fused_linear_logprob_and_entropy(torch.zeros(3, 2), torch.zeros(5, 2), torch.arange(3), **changes)


def test_bad_divergences_and_heads() -> None:
    kind: Any = "kl"
    with pytest.raises(ValueError, match="kind = 'kl' is no divergence; give forward_kl, reverse_kl or jsd"):
        Divergence(kind)
    for beta in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"is outside \(0, 1\); give kind = 'forward_kl' instead of 0"):
            Divergence("jsd", beta)
    for states, weight in (((3, 2), (5, 3)), ((4, 2), (5, 2)), ((3, 2), (6, 2))):
        teacher = TeacherHead(torch.zeros(states), torch.zeros(weight), Divergence("jsd"))
        with pytest.raises(
            ValueError, match=r"give the tokens, the columns of this shard and the dtype of the student's, \(3, G\)"
        ):
            fused_linear_logprob_and_entropy(torch.zeros(3, 4), torch.zeros(5, 4), torch.arange(3), teacher=teacher)

"""Scores of a vocabulary in one piece, and with the products of the head: the dense fp64 oracle, pitfalls, noise."""

import contextlib
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tepo_megatron.core.scores import (
    fused_linear,
    fused_linear_logprob_and_entropy,
    logprob_and_entropy,
    noise_quantiles,
    rerounded,
)
from tepo_megatron.core.types import Checks, TokenScores
from tests.support.dense_scores import BACKENDS, MAX_WIDTH, assert_scores, cases, compare, dense_logprob_and_entropy, loss
from tests.support.host_waits import HostWaits
from tests.support.objective_batches import make_batch, masks


@pytest.mark.parametrize("backend", BACKENDS)
@given(cases(MAX_WIDTH), st.booleans())
def test_matches_the_dense_oracle(backend, case, inplace):
    logits, *rest = case
    logits, tolerance = (logits, 1e-9) if backend == "torch" else (logits.float(), 2e-5)
    compare(logits, *rest, inplace=inplace, backend=backend, tolerance=tolerance)


def test_the_oracle_is_the_definition():
    """Against torch's own categorical distribution, and against a difference quotient."""
    logits, labels = torch.randn(5, 7, dtype=torch.float64), torch.tensor([0, 6, 3, 3, 1])
    oracle = dense_logprob_and_entropy(logits, labels, temperature=0.5)
    categorical = torch.distributions.Categorical(logits=logits / 0.5)
    torch.testing.assert_close(oracle.logprob, categorical.log_prob(labels))
    torch.testing.assert_close(oracle.entropy, categorical.entropy())
    leaf = logits.requires_grad_()
    torch.autograd.gradcheck(lambda x: tuple(vars(logprob_and_entropy(x, labels, temperature=0.5)).values())[:2], leaf)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_slope_is_computed_where_asked_for_and_changes_nothing_else(dtype, backend):
    logits, labels = (3 * torch.randn(40, 3001)).to(dtype), torch.arange(40)
    found = []
    for asked in (False, True):
        leaf = logits.clone().requires_grad_()
        scores = logprob_and_entropy(leaf, labels, entropy_slope=asked, backend=backend)
        (scores.logprob + scores.entropy).sum().backward()
        assert (scores.entropy_slope is not None) == asked
        found.append((scores.logprob, scores.entropy, leaf.grad))
    assert all(torch.equal(without, with_slope) for without, with_slope in zip(*found, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_sign_of_the_slope_holds_where_its_size_does_not_vanish(backend):
    """From flat to almost certain distributions, in bf16: what the sign says is what the exact value says."""
    spread = torch.logspace(-1, 1.5, 600).unsqueeze(1)
    logits = (spread * torch.randn(600, 200)).bfloat16()
    labels = torch.distributions.Categorical(logits=logits.float()).sample()  # as tokens are
    slope = logprob_and_entropy(logits, labels, entropy_slope=True, backend=backend).entropy_slope
    exact = dense_logprob_and_entropy(logits, labels, entropy_slope=True).entropy_slope
    sizeable = exact.abs() > 1e-6
    assert sizeable.sum() > 300
    assert torch.equal(slope[sizeable] < 0, exact[sizeable] < 0)


def test_the_slope_of_a_label_without_probability():
    """p_k = 0: nothing of the label is left in the formula; and of a certain distribution, nothing at all."""
    scores = logprob_and_entropy(torch.tensor([[0.0, -torch.inf, 0.0]]), torch.tensor([1]), entropy_slope=True)
    assert (scores.entropy_slope.item(), scores.logprob.item()) == (0.0, -torch.inf)
    scores = logprob_and_entropy(torch.tensor([[0.0, -torch.inf]]), torch.tensor([0]), entropy_slope=True)
    assert scores.entropy_slope.item() == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "offset"), [(torch.bfloat16, 0), (torch.float16, 0), (torch.float32, 0), (torch.float32, 1000)]
)
def test_scores_are_exact_for_the_logits_as_they_are(dtype, offset, backend):
    """Upcast, then divided by the temperature; a logarithm of t − (m + log s) would have the rounding of 1000, 3e-5."""
    logits = (4 * torch.randn(50, 5001) + offset).to(dtype)
    labels, mask = torch.randint(0, 5001, (50,)), torch.rand(50) < 0.6
    scores = logprob_and_entropy(logits, labels, temperature=0.7, mask_T=mask, backend=backend)
    oracle = dense_logprob_and_entropy(logits, labels, temperature=0.7, mask_T=mask)
    assert scores.logprob.dtype == scores.entropy.dtype == torch.float32
    torch.testing.assert_close(scores.logprob.double(), oracle.logprob, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.entropy.double(), oracle.entropy, rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_rows_are_not_read_and_padding_is_excluded_whatever_it_holds(backend):
    logits, labels, mask = torch.randn(4, 8), torch.tensor([1, -100, 99, 2]), torch.tensor([True, False, False, True])
    clean = logprob_and_entropy(logits[:, :6], torch.where(mask, labels, 0), mask_T=mask, backend=backend)
    logits[1:3] = torch.nan
    logits[:, 6:] = torch.tensor([torch.inf, torch.nan])
    leaf = logits.requires_grad_()
    scores = logprob_and_entropy(leaf, labels, vocab_size=6, mask_T=mask, backend=backend)
    assert torch.equal(scores.logprob, clean.logprob)
    assert torch.equal(scores.entropy, clean.entropy)
    assert scores.logprob[1:3].tolist() == [0.0, 0.0]
    (scores.logprob + scores.entropy).sum().backward()
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[1:3] == 0).all()
    assert (leaf.grad[:, 6:] == 0).all()


def test_only_one_output_may_be_used():
    for used, unused in (("logprob", 1), ("entropy", 0)):
        leaf, dense = (torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
        labels, weights = torch.tensor([0, 1, 2]), torch.ones(2, 3)
        weights[unused] = 0
        getattr(logprob_and_entropy(leaf, labels), used).sum().backward()
        loss(dense_logprob_and_entropy(dense, labels), weights).backward()
        torch.testing.assert_close(leaf.grad, dense.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_that_were_overwritten_cannot_be_used_again(backend):
    leaf = torch.randn(3, 5, requires_grad=True)
    logits = leaf * 1.0
    scores = logprob_and_entropy(logits, torch.tensor([0, 1, 2]), inplace_backward=True, backend=backend)
    scores.logprob.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.logprob.sum().backward()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels_T": torch.tensor([0, 1, 4]), "vocab_size": 4}, r"label of token 2 is 4, outside \[0, 4\)"),
        ({"labels_T": torch.tensor([0, 1])}, r"labels_T is torch.int64 \(2,\) for 3 tokens"),
        ({"labels_T": torch.tensor([0.0, 1.0, 2.0])}, "give int64"),
        ({"mask_T": torch.ones(2, dtype=torch.bool)}, r"mask_T is torch.bool \(2,\) for 3 tokens"),
        ({"mask_T": torch.ones(3)}, "give bool"),
        ({"vocab_size": 6}, "vocab_size = 6, but 1 shards of 5 columns hold 5"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"temperature": 0.0}, "temperature = 0 must be positive"),
        ({"logits_TVp": torch.zeros(3, 5, dtype=torch.int64)}, "logits_TVp is torch.int64"),
        ({"logits_TVp": torch.zeros(3, 1, 5)}, r"\(3, 1, 5\)"),
        ({"logits_TVp": torch.tensor([[0.0], [torch.nan], [0.0]]).expand(3, 5)}, "tensor-parallel rank 0, first at token 1"),
        ({"backend": "magic"}, "backend = 'magic' is unknown; known: auto, torch, cpp, triton"),
    ],
)
def test_bad_input(changes, message):
    arguments = {"logits_TVp": torch.zeros(3, 5), "labels_T": torch.tensor([0, 1, 2]), **changes}
    with pytest.raises(ValueError, match=message):
        logprob_and_entropy(**arguments)


@given(
    labels=st.lists(st.integers(-2, 6), min_size=1, max_size=8),
    faults=st.dictionaries(st.integers(0, 7), st.sampled_from([torch.nan, torch.inf, -torch.inf]), max_size=2),
    data=st.data(),
)
def test_a_noted_error_is_the_one_that_is_raised_otherwise(labels: list[int], faults: dict[int, float], data: Any) -> None:
    """Of labels outside [0, 5) the first, else of kept tokens, else of rows with a fault. Without one the bits are the same."""
    count = len(labels)
    mask = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    logits, rows = torch.randn(count, 5), [row for row in range(count) if mask[row]]
    for row in faults.keys() & set(rows):
        logits[row, slice(None) if faults[row] == -torch.inf else data.draw(st.integers(0, 4))] = faults[row]
    messages = [f"the label of token {row} is {labels[row]}, outside [0, 5)" for row in rows if not 0 <= labels[row] < 5]
    messages += [
        f"every logit of token {row} is −inf" if faults[row] == -torch.inf else f"first at token {row};"
        for row in rows
        if row in faults
    ]
    arguments: dict[str, Any] = {"mask_T": torch.tensor(mask), "entropy_slope": True}
    if data.draw(st.booleans()):
        tokens = st.lists(st.integers(-1, 6), min_size=2, max_size=2, unique=True)
        kept = data.draw(st.lists(tokens, min_size=count, max_size=count))
        arguments["kept_TK"] = torch.tensor(kept, dtype=torch.int32)
        wrong = [(row, token) for row in rows for token in kept[row] if token >= 5 or token == labels[row] >= 0]
        faulty = [message for message in messages if "label" in message]
        messages = faulty + [f"kept token {token} of token {row} is" for row, token in wrong]
        logits = logits.nan_to_num(0, 0, 0)
    with contextlib.ExitStack() as raised:
        caught = raised.enter_context(pytest.raises(ValueError, match=re.escape(messages[0]))) if messages else None
        expected = logprob_and_entropy(logits, torch.tensor(labels), **arguments)
    arguments |= {"scored": len(rows), "checks": Checks()}
    with HostWaits() as waits:
        scores = logprob_and_entropy(logits, torch.tensor(labels), **arguments)
    assert not waits.places
    (noted, nothing) = Checks.first_errors([scores.checks, Checks()])
    assert nothing is None
    assert (type(noted), str(noted)) == ((type(caught.value), str(caught.value)) if caught else (type(None), "None"))
    if not messages:
        assert torch.equal(scores.logprob, expected.logprob)
        assert torch.equal(scores.entropy, expected.entropy)


def test_hidden_states_and_head_must_fit():
    for head in (torch.zeros(5, 4, dtype=torch.bfloat16), torch.zeros(5, 3)):
        with pytest.raises(ValueError, match=r"hidden_TH is .* of one floating-point dtype"):
            fused_linear_logprob_and_entropy(torch.zeros(3, 4), head, torch.tensor([0, 1, 2]))


FP32_EPSILON = 2.0**-24


@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 9),
    tokens=st.integers(1, 40),
    chunks=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_products_of_bfloat16_are_summed_in_fp32(rows: int, width: int, tokens: int, chunks: int, seed: int) -> None:
    """Within what fp32 itself may err by: rounding a chunk's product to bfloat16 errs by up to 32 768 times as much."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.randn(rows, width, generator=generator)
    exact, magnitude = total.double(), total.double().abs()
    for _ in range(chunks):
        left = torch.randn(tokens, rows, generator=generator).bfloat16().t()
        right = torch.randn(tokens, width, generator=generator).bfloat16()
        exact = exact + left.double() @ right.double()
        magnitude = magnitude + left.double().abs() @ right.double().abs()
        fused_linear._add_product(total, left, right)
    assert ((total.double() - exact).abs() <= (tokens + 1) * (chunks + 1) * FP32_EPSILON * magnitude).all()


def gradients(dtype: torch.dtype, *, main_grad: Tensor | None, times: int = 1, tied: bool = False) -> Any:
    """A head of 300 columns after so many backward passes of 64 tokens, in chunks of 16."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 24, generator=generator).to(dtype)
    weight: Any = torch.nn.Parameter((torch.randn(300, 24, generator=generator) / 5).to(dtype))
    labels = torch.randint(0, 300, (64,), generator=generator)
    if main_grad is not None:
        weight.main_grad, weight.grad_added_to_main_grad = main_grad, False  # as Megatron's DDP does
    weight.zero_out_wgrad = tied
    for _ in range(times):
        scores = fused_linear_logprob_and_entropy(hidden, weight, labels, gradient_accumulation_fusion=True, backend="torch")
        (scores.logprob.sum() - 0.3 * scores.entropy.sum()).backward()
    return weight


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_linear, "_CHUNK_BYTES", {"cpu": 1})  # 16 rows, the fewest
    monkeypatch.setattr(fused_linear, "_PART_ROWS", 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_added_to_main_grad_of_a_weight_that_has_one(dtype: torch.dtype) -> None:
    before = torch.randn(300, 24)
    weight = gradients(dtype, main_grad=before.clone(), times=3)
    plain = gradients(torch.float32, main_grad=None)
    rounding = 1e-5 if dtype == torch.float32 else 0.02
    added = (weight.main_grad - before) / 3
    assert (added - plain.grad).norm() <= rounding * plain.grad.norm()
    assert weight.grad_added_to_main_grad
    assert weight.grad is not None, "the hook of an overlapped reduction needs one"
    assert weight.grad.dtype == dtype


def test_autograd_gets_the_gradient_of_a_weight_without_main_grad() -> None:
    weight = gradients(torch.bfloat16, main_grad=None)
    assert weight.grad.dtype == torch.bfloat16
    assert not hasattr(weight, "grad_added_to_main_grad")


def test_a_tied_weight_leaves_autograd_to_the_embedding() -> None:
    """Megatron's hook adds what autograd has to ``main_grad`` too: that must be the embedding's gradient alone."""
    weight = gradients(torch.float32, main_grad=torch.zeros(300, 24), tied=True)
    assert weight.grad is None
    assert weight.main_grad.abs().sum() > 0


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 300), st.integers(1, 40)),
    scale=st.sampled_from([1.0, 4.0, 16.0]),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_scores_of_bfloat16_are_those_of_unrounded_logits(
    backend: Any, shape: tuple[int, int, int], scale: float, masked: bool, seed: int
) -> None:
    """Logits that were rounded to bfloat16 err by 2^-9 of themselves: 0.03 where they are 16."""
    (tokens, vocab, width), generator = shape, torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator).bfloat16().requires_grad_()
    head = (scale * torch.randn(vocab, width, generator=generator) / width**0.5).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    mask = torch.rand(tokens, generator=generator) < 0.7 if masked else None
    options: dict[str, Any] = {"mask_T": mask, "temperature": 0.8, "entropy_slope": True}
    scores = fused_linear_logprob_and_entropy(hidden, head, labels, backend=backend, **options)
    dense = [leaf.detach().double().requires_grad_() for leaf in (hidden, head)]
    logits = dense[0] @ dense[1].t()
    oracle = dense_logprob_and_entropy(logits, labels, **options)
    assert_scores(scores, oracle, 2e-5)
    gradients = torch.autograd.grad((scores.logprob - 0.3 * scores.entropy).sum(), (hidden, head))
    by_logits, *expected = torch.autograd.grad((oracle.logprob - 0.3 * oracle.entropy).sum(), (logits, *dense))
    sizes = (by_logits.abs() @ dense[1].abs(), by_logits.t().abs() @ dense[0].abs())
    for ours, theirs, size in zip(gradients, expected, sizes, strict=True):
        # the logits' gradient and the result are rounded to bfloat16, and nothing else; 1e-5: probabilities are fp32
        assert float((ours.double() - theirs).norm()) <= 2**-7 * float(size.norm()) + 1e-5


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.sampled_from(DTYPES), st.integers(0, 99))
def test_every_weight_is_a_neighbour_of_itself_and_comes_back(sizes: list[int], dtype: torch.dtype, seed: int) -> None:
    weights = [(10.0 ** torch.randint(-6, 3, (size, 3)) * torch.randn(size, 3)).to(dtype) for size in sizes]
    before = [weight.clone() for weight in weights]
    with contextlib.suppress(KeyError), rerounded(weights, seed):
        for old, new in zip(before, weights, strict=True):
            up, down = (torch.nextafter(old, torch.full_like(old, bound)) for bound in (torch.inf, -torch.inf))
            assert ((new == old) | (new == up) | (new == down)).all()
        raise KeyError  # the bits come back after an error too
    assert all(torch.equal(old, new) for old, new in zip(before, weights, strict=True))


def test_a_quarter_moves_as_often_up_as_down_and_the_same_on_every_rank() -> None:
    weights = [torch.randn(200, 300).bfloat16(), torch.nn.Parameter(torch.randn(200, 300).bfloat16())]
    before, seen = [weight.detach().clone() for weight in weights], []
    for _ in range(2):
        with rerounded(weights):
            seen.append([weight.detach().clone() for weight in weights])
    assert all(torch.equal(first, second) for first, second in zip(*seen, strict=True))
    moves = [(new.double() - old.double()).sign() for old, new in zip(before, seen[0], strict=True)]
    for move in moves:
        assert float(move.abs().mean()) == pytest.approx(0.25, abs=0.01)
        assert float(move.mean()) == pytest.approx(0, abs=0.01)
    assert not torch.equal(*moves)  # each tensor has a draw of its own


@given(masks(), st.integers(0, 99))
def test_quantiles_are_those_of_the_differences_in_float64(rows: list[list[bool]], seed: int) -> None:
    batch, scores = make_batch(rows, seed=seed)
    logprob, entropy = scores.logprob.detach(), scores.entropy.detach()
    old = batch.old_logprobs_T, batch.old_entropy_T
    noise = noise_quantiles(TokenScores(*old), TokenScores(logprob, entropy), batch)
    mask, owner = batch.loss_mask_T.numpy(), batch.sequence_index_T.numpy()
    delta = (logprob - old[0]).numpy()
    means = [delta[mask & (owner == i)].mean() if (mask & (owner == i)).any() else 0.0 for i in range(batch.num_sequences)]
    expected = {
        "entropy": (entropy - old[1]).abs().numpy()[mask],
        "ratio": np.abs(np.expm1(delta[mask])),
        "sequence_ratio": np.abs(np.expm1(means)),
    }
    for name, values in expected.items():
        for level in (50, 90, 99):
            assert noise[f"{name}/noise/p{level}"] == pytest.approx(np.quantile(values, level / 100), abs=1e-12)

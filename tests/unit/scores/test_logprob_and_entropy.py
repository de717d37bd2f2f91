"""Scores of a vocabulary in one piece: against the dense fp64 oracle, and the pitfalls one by one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.core.scores import fused_linear_logprob_and_entropy, logprob_and_entropy
from tepo_megatron.tools.bench.step_rank import peak_bytes
from tests.support.dense_scores import BACKENDS, cases, compare, dense_logprob_and_entropy, loss


@pytest.mark.parametrize("backend", BACKENDS)
@given(cases(), st.booleans())
def test_matches_the_dense_oracle(backend, case, inplace):
    logits, *rest = case
    logits, tolerance = (logits, 1e-9) if backend == "torch" else (logits.float(), 2e-5)
    compare(logits, *rest, inplace=inplace, backend=backend, tolerance=tolerance)


@given(cases())
def test_fused_linear_matches_the_dense_oracle(case):
    _, labels, options, weights = case
    tokens = labels.numel()
    generator = torch.Generator().manual_seed(tokens)
    width = options["vocab_size"] + 2
    hidden, head = (torch.randn(n, 5, generator=generator, dtype=torch.float64).requires_grad_() for n in (tokens, width))
    options = options | {"entropy_slope": True}
    scores = fused_linear_logprob_and_entropy(hidden, head, labels, **options)
    oracle = dense_logprob_and_entropy(hidden @ head.t(), labels, **options)
    torch.testing.assert_close(scores.entropy_slope, oracle.entropy_slope, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(scores.logprob, oracle.logprob, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(scores.entropy, oracle.entropy, rtol=1e-9, atol=1e-9)
    own = torch.autograd.grad(loss(scores, weights), (hidden, head))
    expected = torch.autograd.grad(loss(oracle, weights), (hidden, head))
    torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


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
    ("dtype", "offset"),
    [(torch.bfloat16, 0), (torch.float16, 0), (torch.float32, 0), (torch.float32, 1000)],
)
def test_scores_are_exact_for_the_logits_as_they_are(dtype, offset, backend):
    """Upcast, then divided by the temperature; a logarithm of t − (m + log s) would have the rounding of 1000, 3e-5."""
    logits = (4 * torch.randn(50, 5001) + offset).to(dtype)
    labels, mask = torch.randint(0, 5001, (50,)), torch.rand(50) < 0.6
    scores = logprob_and_entropy(logits, labels, temperature=0.7, mask_T=mask, backend=backend)
    oracle = dense_logprob_and_entropy(logits, labels, temperature=0.7, mask_T=mask)
    assert scores.logprob.dtype == scores.entropy.dtype == torch.float32
    torch.testing.assert_close(scores.logprob.double(), oracle.logprob, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.entropy.double(), oracle.entropy, rtol=0, atol=1e-5)


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


def test_logits_that_were_overwritten_cannot_be_used_again():
    leaf = torch.randn(3, 5, requires_grad=True)
    logits = leaf * 1.0
    scores = logprob_and_entropy(logits, torch.tensor([0, 1, 2]), inplace_backward=True)
    scores.logprob.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.logprob.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("inplace", "bound"), [(True, 0.03), (False, 1.03)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_peak_memory(dtype, inplace, bound, backend):
    """Beyond the logits: 3 % of them in the in-place form, and the gradient otherwise; nothing of their size in fp32."""
    logits, labels = torch.randn(2048, 16_384, dtype=dtype).requires_grad_(), torch.arange(2048)

    def compute():
        scores = logprob_and_entropy(logits.view_as(logits), labels, inplace_backward=inplace, backend=backend)
        torch.autograd.backward((scores.logprob, scores.entropy), (torch.ones(2048), torch.ones(2048)))

    assert 0 < peak_bytes(compute) <= bound * logits.numel() * logits.element_size()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels_T": torch.tensor([0, 5, 2])}, r"label of token 1 is 5, outside \[0, 5\)"),
        ({"labels_T": torch.tensor([0, -1, 2])}, r"label of token 1 is -1"),
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
        ({"logits_TVp": torch.full((3, 5), -torch.inf)}, "every logit of token 0 is −inf"),
        ({"backend": "magic"}, "backend = 'magic' is unknown; known: auto, torch, cpp, triton"),
    ],
)
def test_bad_input(changes, message):
    arguments = {"logits_TVp": torch.zeros(3, 5), "labels_T": torch.tensor([0, 1, 2]), **changes}
    with pytest.raises(ValueError, match=message):
        logprob_and_entropy(**arguments)


def test_hidden_states_and_head_must_fit():
    for head in (torch.zeros(5, 4, dtype=torch.bfloat16), torch.zeros(5, 3)):
        with pytest.raises(ValueError, match=r"hidden_TH is .* of one floating-point dtype"):
            fused_linear_logprob_and_entropy(torch.zeros(3, 4), head, torch.tensor([0, 1, 2]))

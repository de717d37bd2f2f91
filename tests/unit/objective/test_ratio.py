"""The sequence ratio and its token form (docs/reference/tepo.md, equations 3 and 4)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.types import TokenScores
from tests.support.objective_batches import make_batch, masks, whole


def _objective(ratio, **overrides):
    return build_objective(ObjectiveConfig(preset="tepo_markov", ratio=ratio, **overrides))


@given(masks(), st.integers(0, 99), st.sampled_from([1e-4, 0.2]))
def test_token_form_and_sequence_form_have_the_same_gradient(rows, seed, spread):
    """One advantage per sequence, no token mask, token-level aggregation, also under the clip."""
    batch, scores = make_batch(rows, seed=seed, spread=spread)
    token_form = whole(_objective({"kind": "sequence_token"}), batch, scores)
    sequence_form = whole(_objective({"kind": "sequence"}), batch, scores)
    torch.testing.assert_close(token_form[0], sequence_form[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(token_form[1], sequence_form[1], rtol=1e-9, atol=1e-14)


def test_without_length_normalisation_the_sequence_form_is_steeper():
    """exp(Σδ) at T_i tokens, each with the gradient of the whole sum: T_i times that of the token form."""
    batch, scores = make_batch([[True] * 3, [True] * 3], groups=[0, 0], spread=0.1)
    forms = [{"kind": kind, "length_normalized": False} for kind in ("sequence_token", "sequence")]
    token_form, sequence_form = (whole(_objective(form, trust_region={"kind": "none"}), batch, scores) for form in forms)
    torch.testing.assert_close(token_form[0], sequence_form[0])
    torch.testing.assert_close(3 * token_form[1][0], sequence_form[1][0])


def test_a_token_mask_tells_the_forms_apart():
    """A dropped token gets no gradient in the token form; in the sequence form all tokens share what is left."""
    batch, scores = make_batch([[True] * 4, [True] * 4], groups=[0, 0], spread=1e-4)
    sampler = batch.old_logprobs_T.clone()
    sampler[2] -= 5.0  # π_old / π_sampler = e⁵, outside IcePop's range
    batch = batch.with_(sampler_logprobs_T=sampler)
    mismatch = {"kind": "mask"}
    token_form = whole(_objective({"kind": "sequence_token"}, mismatch=mismatch), batch, scores)[1][0]
    sequence_form = whole(_objective({"kind": "sequence"}, mismatch=mismatch), batch, scores)[1][0]
    assert token_form[2] == 0
    assert sequence_form[2] != 0
    torch.testing.assert_close(token_form[:4].sum(), sequence_form[:4].sum(), rtol=1e-3, atol=0)
    torch.testing.assert_close(sequence_form[:4], (token_form[:4].sum() / 4).expand(4), rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", ["token", "sequence", "sequence_token"])
def test_values(kind):
    """δ = ln 2, ln 8 and one token outside the mask: token ratios 2 and 8, geometric mean 4, product 16."""
    batch, scores = make_batch([[True, False, True]], spread=0.0)
    logprob = batch.old_logprobs_T + torch.tensor([2.0, 1e6, 8.0], dtype=torch.float64).log()

    def span(**ratio):
        extrema = whole(
            _objective(ratio, trust_region={"kind": "none"}), batch, TokenScores(logprob.requires_grad_(), scores.entropy)
        )[3]
        return [extrema["ratio/min"].item(), extrema["ratio/max"].item()]

    assert span(kind=kind) == pytest.approx([2, 8] if kind == "token" else [4, 4])
    if kind != "token":
        assert span(kind=kind, length_normalized=False) == pytest.approx([16, 16])

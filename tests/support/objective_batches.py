"""Steps for tests of the objective."""

from functools import partial

import torch
from hypothesis import strategies as st

from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.checking import Step
from tepo_megatron.core.objective.compose import build_objective

make_batch = Step.random


def masks(min_sequences=1):
    """Loss masks of a step with at least one response token: prompts, responses, holes, and sequences without any."""
    sequence = st.lists(st.booleans(), min_size=1, max_size=7)
    return st.lists(sequence, min_size=min_sequences, max_size=6).filter(lambda rows: any(map(any, rows)))


def whole(objective, batch, scores):
    return Step(batch, scores).whole(objective)


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def plain_step(lengths, advantages, logprob, old, *, sampler=None, reference=None, teacher=None, labels=None):
    """A batch of these responses without prompts, and its scores, with entropies of 1."""
    changes = {"sampler_logprobs_T": sampler, "reference_logprobs_T": reference, "labels_T": labels}
    changes["teacher_logprobs_T"] = teacher
    changes = {name: values for name, values in changes.items() if values is not None}
    return Step.plain(lengths, old, logprob, advantages_S=torch.as_tensor(advantages), **changes)


def outputs_of(config, batch, scores):
    """Of each sequence alone."""
    objective = build_objective(ObjectiveConfig(**config))
    context = objective.prepare(batch)
    return [Step(batch, scores).pick([sequence]).output(objective, context) for sequence in range(batch.num_sequences)]


def surrogates(config, deltas, advantages, *, lengths=None, old=None, **models):
    """Returns the surrogate of each response, and by token its gradient, with counts of bounds per response, below and above.

    ``config`` is laid over r A, divided by the tokens.
    """
    old = torch.full((len(deltas),), -2.0, dtype=torch.float64) if old is None else old
    logprob = (old + doubles(*deltas)).requires_grad_()
    batch, scores = plain_step(lengths or [1] * len(deltas), advantages, logprob, old, **models)
    outputs = outputs_of({"preset": "kl_cov", "kl_cov": None, **config}, batch, scores)
    gains = -torch.stack([output.numerator for output in outputs])
    bounds = ([int(output.metrics[f"clip/{side}"][0]) for output in outputs] for side in ("low", "high"))
    return gains.tolist(), torch.autograd.grad(gains.sum(), logprob)[0].tolist(), *bounds


def assert_same(left, right, rtol=1e-9):
    for a, b in zip(left, right, strict=True):
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for name in a:
                torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=1e-12, msg=partial("{}: {}".format, name))
        elif isinstance(a, tuple):
            assert_same(a, b, rtol)
        else:
            torch.testing.assert_close(a, b, rtol=rtol, atol=1e-12)

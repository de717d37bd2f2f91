import math
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.checking import Step
from tepo_megatron.core.objective.compose import build_objective
from tepo_megatron.core.types import TokenScores

_OLD_PROBABILITY = 0.1
_FALL = 0.1  # of the entropy, in nats


class _GradientWeights(NamedTuple):
    """∂J/∂log π_θ of a one-token response, times the denominator: fp64 [N]."""

    ratios_N: Tensor
    positive_N: Tensor  # with A = 1
    negative_N: Tensor  # with A = −1
    falling_N: Tensor  # with A = 1 and falling entropy


def gradient_weights(config: ObjectiveConfig, log_ratios_N: Tensor | None = None) -> _GradientWeights:
    """The default log-ratios show where a bound begins. Covariance and mismatch choose no token here."""
    logs_N = _telling_log_ratios(config) if log_ratios_N is None else log_ratios_N.double()
    curves = [_push(config, logs_N, sign, fall) for sign, fall in ((1.0, 0.0), (-1.0, 0.0), (1.0, _FALL))]
    return _GradientWeights(logs_N.exp(), *curves)


def _telling_log_ratios(config: ObjectiveConfig) -> Tensor:
    points = config.trust_region.turning_points or (0.6,)
    others = (section.turning_points for name, section in config.sections.items() if name != "trust_region")
    widest_point = max(*points, *chain.from_iterable(others), 0.0)
    widest = min(2.5 * widest_point, -math.log(_OLD_PROBABILITY))
    return torch.linspace(-widest, widest, 201, dtype=torch.float64)


def _push(config: ObjectiveConfig, log_ratios_N: Tensor, sign: float, fall: float) -> Tensor:
    old_N = torch.full_like(log_ratios_N, math.log(_OLD_PROBABILITY))
    logprob_N, advantages_N = (old_N + log_ratios_N).requires_grad_(), torch.full_like(old_N, sign, dtype=torch.float32)
    models = {"reference_logprobs_T": old_N, "teacher_logprobs_T": old_N + sign}
    step = Step.plain([1] * old_N.numel(), old_N, logprob_N, advantages_S=advantages_N, **models)
    scores = TokenScores(logprob_N, 1 - torch.full_like(old_N, fall), divergence=torch.zeros_like(old_N))
    output = step._replace(scores=scores).output(build_objective(config))
    return -torch.autograd.grad(output.numerator, logprob_N, materialize_grads=True)[0]

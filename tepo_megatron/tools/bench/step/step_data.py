"""Data of ``tepo bench step``: sequence lengths, and the run's configuration."""

from __future__ import annotations

import math
import random
import re
from statistics import NormalDist
from typing import Any

from tepo_megatron.tools.bench.settings import StepSetting

GROUP, PROMPT = 4, 4
"""Samples of a prompt, and its tokens."""

_WIDEST = 20.0
"""Standard deviation of the logarithms beyond which one sequence has nearly all tokens."""


def draw_lengths(setting: StepSetting, ratio: float) -> list[int]:
    """Tokens of each sequence with prompt: lognormal quantiles whose longest is ``ratio`` times the mean, in a fixed random
    order.

    Raises ValueError for a ratio below 1, one out of reach of so few sequences, or sequences that do not fill groups.
    """
    if setting.sequences % GROUP:
        raise ValueError(f"--sequences {setting.sequences} must be a multiple of {GROUP}, the size of a group")
    low, high = 0.0, _WIDEST
    if not 1 <= ratio < _ratio(setting.sequences, high):
        raise ValueError(
            f"--ratios {ratio:g} is no longest length over the mean of {setting.sequences} sequences; give at least 1 and less "
            "than --sequences"
        )
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _ratio(setting.sequences, middle) < ratio else (low, middle)
    shares = _shares(setting.sequences, high)
    lengths = [max(PROMPT + 1, round(setting.mean_length * share)) for share in shares]
    random.Random(0).shuffle(lengths)
    return lengths


def _shares(count: int, sigma: float) -> list[float]:
    logs = [sigma * NormalDist().inv_cdf((index + 0.5) / count) for index in range(count)]
    values = [math.exp(log - max(logs)) for log in logs]
    mean = sum(values) / count
    return [value / mean for value in values]


def _ratio(count: int, sigma: float) -> float:
    return max(_shares(count, sigma))


def rank_arguments(setting: StepSetting, layout: str) -> dict[str, Any]:
    """JSON for a rank: the run's configuration, and the lengths for each ratio.

    Raises ValueError for a layout not made of sizes such as tp2.
    """
    sizes = re.findall(r"(tp|pp|dp|cp)(\d+)", layout)
    if not sizes or "".join(name + size for name, size in sizes) != layout:
        raise ValueError(f"--layouts {layout} is not made of sizes such as tp2, pp2, dp2 or tp2pp2")
    config = {
        "model": {"dtype": "float32"},
        "engine": {
            "platform": "cpu",
            "micro_batch_tokens": setting.micro_batch_tokens,
            "parallel": {name: int(size) for name, size in sizes},
        },
        # So small that the weights do not change: every repeat and every method computes on the same weights.
        "optimizer": {"lr": 1e-12, "warmup_steps": 0},
    }
    lengths = {f"{ratio:g}": draw_lengths(setting, ratio) for ratio in setting.ratios}
    return {"config": config, "lengths": lengths, "group": GROUP, "prompt": PROMPT}

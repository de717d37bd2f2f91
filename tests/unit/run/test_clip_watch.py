"""What a run says of a clip that takes too many gradients, or that cannot act."""

import pytest
import torch

from tepo_megatron.config import ObjectiveConfig
from tepo_megatron.core.histogram import count_moves
from tepo_megatron.run.step.instability import ClipWatch
from tepo_megatron.trainer.protocol import UpdateResult

LENGTH = {"scale": "length", "low": 0.03, "high": 0.03}
AUTO = {"scale": "length", "low": "auto", "high": "auto"}


def sentences(region, share, *, sigma=0.02, steps=12):
    """Half of the tokens with A < 0 and half with A > 0 moved by 0.01, 0.02, … 1."""
    watch = ClipWatch(ObjectiveConfig(trust_region=region))
    counts = count_moves(torch.arange(1, 101) / 100, torch.ones(100, dtype=torch.bool))
    update = UpdateResult(0.0, 1.0, 1e-6, {}, {}, moves=torch.stack([counts, counts]))
    rows = [{"clip/share": share, "ratio/sigma": sigma}] * steps
    return [(step, text) for step, row in enumerate(rows, start=1) if (text := watch.note(row, [update, update]))]


@pytest.mark.parametrize("region", [{"low": 3e-4}, LENGTH, AUTO])
def test_a_clip_that_takes_more_than_a_quarter_is_reported_once_with_the_range_for_a_tenth(region):
    ((step, text),) = sentences(region, 0.26)
    assert step == 5
    assert text.startswith("more than 25% of the tokens")
    assert "low = 0.91, high = 0.91 would clip a tenth" in text
    assert not sentences(region, 0.26, steps=4)
    assert not sentences(region, 0.24)


def test_a_range_that_nothing_reaches_is_reported_where_it_follows_the_length():
    ((_, text),) = sentences(LENGTH, 0.0)
    assert text.startswith("no response has reached the clip range")
    assert not sentences({"low": 3e-4}, 0.0)


def test_auto_bounds_without_a_spread_are_reported():
    ((_, text),) = sentences(AUTO, 0.0, sigma=0.0)
    assert "set a higher optimizer.lr" in text
    assert not sentences(LENGTH, 0.0, sigma=0.0)

"""What `tepo objective show` prints and draws, from the objective itself."""

import json
import math
from itertools import pairwise

import pytest
import torch
from typer.testing import CliRunner

from tepo_megatron.cli.main import app
from tepo_megatron.config.objective.presets import PRESETS
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.gradient_weight import gradient_weights

runner = CliRunner()
RATIOS = [0.5, 0.9, 1.1, 1.5, 4.0]


def _weights(*ratios, **config):
    return gradient_weights(ObjectiveConfig(**config), torch.tensor(ratios, dtype=torch.float64).log())


def test_the_kl_mask_pulls_back_where_the_entropy_falls():
    """A = 1: the surrogate pushes with r below its bound; the penalty's gradient is r δ."""
    weights = _weights(*RATIOS, preset="tepo")
    plain = [0.5, 0.9, 0, 0, 0]
    assert weights.positive_N.tolist() == pytest.approx(plain)
    pulled = [push - ratio * math.log(ratio) for push, ratio in zip(plain, RATIOS, strict=True)]
    assert weights.falling_N.tolist() == pytest.approx(pulled)


@pytest.mark.parametrize("preset", PRESETS)
def test_at_a_ratio_of_one_every_preset_pushes_alike(preset):
    """On the first update all are the policy gradient: A, whatever the bounds."""
    weights = _weights(1.0, preset=preset)
    assert (weights.positive_N.item(), weights.negative_N.item()) == pytest.approx((1.0, -1.0))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_range_shows_where_a_bound_begins(preset):
    config = ObjectiveConfig(preset=preset)
    weights = gradient_weights(config)
    values = torch.stack([weights.positive_N, weights.negative_N, weights.falling_N])
    assert values.isfinite().all()
    assert preset != "two_sided_clip" or weights.ratios_N.max() > 3
    if preset != "kl_cov":  # which has no bound
        straight = torch.stack([weights.ratios_N, -weights.ratios_N, weights.ratios_N])
        held = (values - straight).abs() > 1e-9
        assert held.any()
        assert not held.all()


@pytest.mark.parametrize(("preset", "labels"), [("tepo_markov", 2), ("tepo", 3)])
def test_the_plot_has_the_first_curve_on_top(preset, labels):
    drawn = json.loads(runner.invoke(app, ["objective", "show", preset, "--json"]).stdout)["gradient_weights"]
    assert list(drawn) == ["A = 1", "A = −1", "A = 1, the entropy falls"][:labels]
    lines = runner.invoke(app, ["objective", "show", preset]).stdout.splitlines()
    rows = [line.split("│")[1] for line in lines if "│" in line]
    values = [0.0, *(value for curve in drawn.values() for value in curve)]
    high, low, first = max(values), min(values), drawn["A = 1"]
    for column in range(72):
        value = first[round(column / 71 * (len(first) - 1))]
        assert rows[round((high - value) / (high - low) * 16)][column] == "+"


@pytest.mark.parametrize("preset", PRESETS)
def test_show_prints_every_field_with_value_and_meaning(preset):
    result = runner.invoke(app, ["objective", "show", preset])
    assert result.exit_code == 0
    words = result.stdout.split()
    for path, value in _leaves(ObjectiveConfig(preset=preset).model_dump(), "objective"):
        said = "off" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        assert (path, said) in set(pairwise(words))
    assert "∂J/∂log" in words


def _leaves(section, path):
    for name, value in section.items():
        if isinstance(value, dict):
            yield f"{path}.{name}", value.get("kind", "on")
            yield from _leaves(value, f"{path}.{name}")
        elif name != "kind":
            yield f"{path}.{name}", value


def test_show_draws_a_png_and_names_the_presets_for_an_unknown_one(tmp_path):
    png = tmp_path / "new" / "sapo.png"
    result = runner.invoke(app, ["objective", "show", "sapo", "--png", str(png)])
    assert result.exit_code == 0
    assert f"wrote {png}" in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG")
    refused = runner.invoke(app, ["objective", "show", "gpro"])
    assert refused.exit_code == 1
    assert "gpro is no preset; there are tepo" in refused.stderr

"""The checks that every objective goes through find each mistake, with the two numbers; what ``tepo objective`` prints."""

import json
import math
import re
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tepo_megatron import OwnAdvantage, OwnAggregation, OwnMask, OwnPenalty, OwnRatio, OwnTrustRegion, check_objective
from tepo_megatron.config.load import load_run
from tepo_megatron.config.objective.presets import PRESETS
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.checking import ObjectiveChecks
from tepo_megatron.core.objective.gradient_weight import gradient_weights
from tepo_megatron.runtime.text import flat
from tepo_megatron.trainer.protocol import check_plugins
from tests.support.cli import invoke

ROOT = Path(__file__).parents[3]
EXAMPLE = "examples/own_objective"
NUMBERS = r"-?\d+(\.\d+)?(e-?\d+)?"
COUNTER = count()


class Documented(OwnTrustRegion):
    """r A, times a number."""

    kind: Literal["mine"] = "mine"
    tau: float = 1.0
    """The number."""

    def surrogate(self, ratio_T: Any, values: Any) -> Any:
        return self.tau * self.gain(ratio_T, values)

    def gain(self, ratio_T: Any, values: Any) -> Any:
        return ratio_T * values.advantage_T


class Unexplained(Documented):
    """A field without a word."""

    sigma: float = 1.0

    def gain(self, ratio_T: Any, values: Any) -> Any:
        return self.sigma * ratio_T * values.advantage_T


def made(base: Any, doc: str | None = "Documented.", **methods: Any) -> Any:
    kind = {"kind": "mine", "__annotations__": {"kind": Literal["mine"]}, "__module__": __name__}
    return type(base)("Mine", (base,), {**kind, "__doc__": doc, **methods})()


def region(gain: Any) -> Any:
    """A trust region with a field and this function of (ratio, values)."""
    return made(Documented, gain=lambda self, ratio_T, values: gain(ratio_T, values))


def draw(ratio_T: Any, values: Any) -> Any:
    torch.rand(1)
    return ratio_T * values.advantage_T


def root(ratio_T: Any, values: Any) -> Any:
    """Its derivative at 0 is infinite."""
    return torch.where(values.advantage_T > 0, (values.delta_T * 0).abs().sqrt(), ratio_T * values.advantage_T)


def improbable(self: Any, values: Any, prepared: Any) -> Any:
    if bool((values.logprob_T < -6).any()):
        raise ValueError("too improbable")
    return values.mask_T & (values.logprob_T < -3)


MEAN_OF_MEANS = region(lambda ratio_T, values: ratio_T * values.advantage_T / values.mask_T.sum())
BY_PLACE = region(lambda ratio_T, values: ratio_T * values.advantage_T / (1 + values.index_T))
RAISES = region(lambda ratio_T, values: ratio_T * values.advantages)
FIRST_FIRST = made(OwnAdvantage, advantages=lambda self, batch: batch.rewards_S - batch.rewards_S[0])
COUNTS_PADDING = made(OwnAggregation, denominator=lambda self, lengths_S: lengths_S.numel())
IDLE = made(Documented, surrogate=lambda self, ratio_T, values: ratio_T * values.advantage_T)
NOBODY = made(OwnMask, choose=lambda self, values, prepared: values.mask_T & False)
NEW_EACH_TIME = made(
    OwnPenalty, prepare=lambda self, step: next(COUNTER), penalty=lambda self, values, prepared: prepared * values.delta_T**2
)
ALTERNATES = made(OwnAggregation, denominator=lambda self, lengths_S: 1 + next(COUNTER) % 2)
FALLING = made(OwnMask, choose=lambda self, values, prepared: values.entropy_slope_T < 0)
PULLED = made(OwnPenalty, penalty=lambda self, values, prepared: 0.1 * values.divergence_T)
IN_PLACE = [
    ("values.delta_T", made(OwnRatio, log_ratio=lambda self, values: values.delta_T.clamp_(-0.2, 0.2))),
    ("values.advantage_T", region(lambda ratio_T, values: ratio_T * values.advantage_T.clamp_(-1.0, 1.0))),
    ("batch.rewards_S", made(OwnAdvantage, advantages=lambda self, batch: batch.rewards_S.clamp_(0.2, 0.8))),
    ("step.advantage_R", made(OwnMask, prepare=lambda self, step: step.advantage_R.zero_(), choose=improbable)),
    ("values.mask_T", made(OwnMask, choose=lambda self, values, prepared: values.mask_T.logical_not_())),
    ("values.entropy_T", made(OwnPenalty, penalty=lambda self, values, prepared: values.entropy_T.data.mul_(2))),
]
RAISES_AT_SOME_VALUES = made(OwnMask, choose=improbable)
BROKEN: list[tuple[str, Any, str]] = [
    ("micro-batches", MEAN_OF_MEANS, f"^the loss is {NUMBERS} in one piece, {NUMBERS} in micro-batches of 1 and .*: something"),
    ("order of sequences", BY_PLACE, f"^the loss is {NUMBERS} with the sequences in one order, {NUMBERS} in another"),
    ("order of sequences", FIRST_FIRST, rf"^a response's advantage is {NUMBERS} with the responses in their order, {NUMBERS}"),
    ("is deterministic", region(draw), "^it draws random numbers from torch's generator"),
    ("is deterministic", ALTERNATES, rf"^the loss is {NUMBERS} at first, {NUMBERS} when computed again"),
    ("data-parallel ranks", ALTERNATES, "one rank divides by"),
    ("mine acts", RAISES_AT_SOME_VALUES, "it raised ValueError: too improbable"),
    ("is deterministic", NEW_EACH_TIME, "at first, .* when computed again"),
    ("is finite", region(root), r"^the gradient by the log-prob of token \d+, a response token, is nan.*what torch.where"),
    ("padding", COUNTS_PADDING, rf"^the loss is {NUMBERS} without padding, {NUMBERS} with a sequence of padding in the step"),
    ("fields of mine act", IDLE, r"^no other value of objective.trust_region.tau changes anything; it is 1.0 here"),
    ("mine acts", NOBODY, "^objective.mask.kind = 'mine' changes nothing in any of 5 steps"),
    ("mine is documented", made(Documented, doc=None), "^Mine has no docstring; say what it computes"),
    ("mine is documented", Unexplained(), "^Unexplained.sigma has no docstring; write what it means"),
    *(("changes no input", kind, rf"'mine': Mine\.\w+ changes {tensor} in place, which others") for tensor, kind in IN_PLACE),
    ("can be computed", RAISES, r"^it raised AttributeError: 'TokenValues' .* 'advantages' \(.*test_checking\.py, line \d+\)$"),
    *(("can be computed", kind, "^it raised TypeError: .*'NoneType'") for kind in (FALLING, PULLED)),  # as in a run
]


@pytest.mark.parametrize(
    ("rule", "kind", "message"), BROKEN, ids=[f"{number} {rule}" for number, (rule, *_) in enumerate(BROKEN)]
)
def test_each_mistake_is_found_by_its_rule(rule, kind, message):
    found = dict(ObjectiveChecks(ObjectiveConfig(preset="grpo", **{kind.slot: kind}), steps=5).run())
    assert re.search(message, found[rule]), found


def test_a_field_that_takes_some_numbers_only_acts_by_one_that_it_takes():
    class Mine(OwnAggregation):
        """A share of all tokens."""

        kind: Literal["mine"] = "mine"
        share: float = 0.3
        """Factor of the number of tokens, above 0."""

        def denominator(self, lengths_S: Any) -> Any:
            return self.share * lengths_S.sum()

    check_objective(ObjectiveConfig(preset="grpo", aggregation=Mine()), steps=2)


def test_what_is_right_passes():
    """And so do the presets: test_presets.py."""
    check_objective(ObjectiveConfig(preset="grpo", trust_region=Documented()))
    told = made(type(FALLING), "It says what it reads.", needs=property(lambda self: frozenset({"entropy_slope"})))
    check_objective(ObjectiveConfig(preset="grpo", mask=told))
    check_objective(ObjectiveConfig(preset="grpo", penalty=PULLED, distill={"of": "all"}))
    check_objective(ObjectiveConfig(preset="gdpo", advantage={"weights": [1.0, 2.0, 0.5]}), steps=2, reward_parts=3)


def test_a_test_of_ones_own_gets_all_that_is_wrong_in_one_error():
    with pytest.raises(
        ValueError, match=r"^the objective breaks a rule:\n  micro-batches: the loss is .*\n  data-parallel ranks: "
    ):
        check_objective(ObjectiveConfig(preset=str(ROOT / EXAMPLE / "mean_of_means.yaml")), steps=2)


THIRD = """
from typing import Literal

from tepo_megatron import OwnAdvantage


class Third(OwnAdvantage):
    kind: Literal["third"] = "third"

    def advantages(self, batch):
        return batch.reward_parts_SK[:, 2]
"""


def test_a_run_refuses_it_before_anything_is_started(tmp_path):
    """Rank 0 asks while it reads what the run needs."""
    check_plugins(load_run(None, [f"objective.preset={ROOT}/{EXAMPLE}/my_sapo.yaml"]))
    with pytest.raises(ValueError, match=r"mean_of_means\.py, breaks a rule \(micro-batches\): the loss is .* in one piece"):
        check_plugins(load_run(None, [f"objective.preset={ROOT}/{EXAMPLE}/mean_of_means.yaml"]))
    (tmp_path / "third.py").write_text(THIRD)
    settings = [f"objective.plugins=[{tmp_path}/third.py]", "objective.advantage.kind=third"]
    with pytest.raises(ValueError, match=r"it raised IndexError: .*; a reward had 2 components here: .* in reward\.weights"):
        check_plugins(load_run(None, settings))
    check_plugins(load_run(None, [*settings, "reward.weights={a: 1, b: 1, c: 1}"]))


def test_the_command_line_lists_shows_and_checks_ones_own(monkeypatch):
    monkeypatch.chdir(ROOT)
    wrong = invoke("objective", "check", f"{EXAMPLE}/mean_of_means.yaml", "--json", code=1)
    rules = {each["rule"]: each["problem"] for each in json.loads(wrong.stdout)[0]["rules"]}
    assert "in one piece" in rules["micro-batches"]
    listed = json.loads(invoke("objective", "list", f"{EXAMPLE}/my_sapo.yaml", f"{EXAMPLE}/my_objective.py", "--json").stdout)
    assert listed["presets"][f"{EXAMPLE}/my_sapo.yaml"]["objective"]["trust_region"]["kind"] == "gate"
    (plugin,) = listed["plugins"].values()
    assert {"field": "objective.trust_region.tau_negative", "default": "1.05", "meaning": "τ where A ≤ 0."} in plugin["fields"]
    shown = invoke("objective", "show", f"{EXAMPLE}/my_sapo.yaml")
    assert "objective.trust_region.tau_positive" in shown.stdout
    assert "objective.ratio.kind = geometric_mean" in invoke("objective", "show", f"{EXAMPLE}/my_objective.py").stdout
    schema = invoke("config", "schema", "objective.trust_region", "--plugin", f"{EXAMPLE}/my_objective.py").stdout
    assert 'kind = "gate"' in schema


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("check", "gpro"), "gpro is no preset; there are tepo, .* or give a file: my_preset.yaml, my_objective.py"),
        (("show", "gpro"), "gpro is no preset; there are tepo"),
        (("check", "gone.py"), "there is no file .*gone.py"),
        (("show", "gone.yaml"), "gone.yaml cannot be read"),
        (("show", f"{EXAMPLE}/my_objective.py", "--png", "x.png"), "--png draws a preset"),
    ],
)
def test_what_the_command_line_cannot_use_is_one_sentence(words, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = invoke("objective", *words, code=1)
    assert done.stderr.count("\n") == 1
    assert re.search(message, done.stderr)


def test_a_kind_whose_fields_have_no_default_is_tried_with_some(tmp_path):
    """And a plugin that imports torch at its top is noted."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\nfrom typing import Literal\nfrom pydantic import model_validator\n"
        "from tepo_megatron import OwnTrustRegion\n"
        'class Mine(OwnTrustRegion):\n    """r A, times a number."""\n    kind: Literal["mine"] = "mine"\n'
        '    low: float\n    """A number."""\n    high: float\n    """Another."""\n'
        "    def surrogate(self, ratio_T, values):\n        return (self.low + self.high) * ratio_T * values.advantage_T\n"
    )
    assert f"note: {path} cannot be read without torch" in invoke("objective", "check", str(path)).stdout
    path.write_text(
        path.read_text() + '    @model_validator(mode="after")\n    def ordered(self):\n        if self.low >= self.high:\n'
        '            raise ValueError("low must be below high")\n        return self\n'
    )
    refused = invoke("objective", "check", str(path), code=1)
    assert "low must be below high); write a preset's file that gives its fields values, and check that" in refused.stderr


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
    drawn = json.loads(invoke("objective", "show", preset, "--json").stdout)["gradient_weights"]
    assert list(drawn) == ["A = 1", "A = −1", "A = 1, the entropy falls"][:labels]
    lines = invoke("objective", "show", preset).stdout.splitlines()
    rows = [line.split("│")[1] for line in lines if "│" in line]
    values = [0.0, *(value for curve in drawn.values() for value in curve)]
    high, low, first = max(values), min(values), drawn["A = 1"]
    for column in range(72):
        value = first[round(column / 71 * (len(first) - 1))]
        assert rows[round((high - value) / (high - low) * 16)][column] == "+"


@pytest.mark.parametrize("preset", PRESETS)
def test_show_prints_every_field_with_value_and_meaning(preset):
    result = invoke("objective", "show", preset)
    words = result.stdout.split()
    config = ObjectiveConfig(preset=preset)
    for path, value in flat(config.model_dump(), "objective.").items():
        said = "off" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        assert (path.removesuffix(".kind"), said) in set(pairwise(words))
    without_kind = {f"objective.{name}" for name, section in config.sections.items() if not hasattr(section, "kind")}
    assert {(path, "on") for path in without_kind} <= set(pairwise(words))
    assert "∂J/∂log" in words


def test_show_draws_a_png(tmp_path):
    png = tmp_path / "new" / "sapo.png"
    result = invoke("objective", "show", "sapo", "--png", str(png))
    assert f"wrote {png}" in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


def test_an_objective_with_errors_is_sentences(tmp_path):
    (tmp_path / "bad.yaml").write_text("preset: grpo\nratio: {kind: sequnce}\ntrust_region: {kind: clip, lo: 0.2}\n")
    own = 'kind: Literal["clip"] = "clip"\n    def surrogate(self, ratio_T, values):\n        return ratio_T\n'
    head = "from typing import Literal\nfrom tepo_megatron import OwnTrustRegion\n"
    (tmp_path / "clash.py").write_text(f"{head}class Mine(OwnTrustRegion):\n    {own}")
    for words in (("check", "bad.yaml"), ("show", "bad.yaml"), ("list", "bad.yaml"), ("check", "clash.py")):
        said = " ".join(invoke("objective", words[0], str(tmp_path / words[1]), code=1).output.split())
        if words[1] == "bad.yaml":
            assert 'objective.ratio.kind: got "sequnce"; allowed: "power_mean", "prefix"' in said
            assert "objective.trust_region.lo: unknown key (got 0.2); did you mean objective.trust_region.low?" in said
        else:
            assert said.endswith("both have a kind 'clip' of objective.trust_region; rename one")

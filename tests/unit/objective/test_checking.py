"""The checks that every objective goes through find each kind of mistake, with the two numbers, and pass what is right."""

import json
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from typer.testing import CliRunner

from tepo_megatron import OwnAdvantage, OwnAggregation, OwnMask, OwnPenalty, OwnRatio, OwnTrustRegion, check_objective
from tepo_megatron.cli.main import app
from tepo_megatron.config.load import load_run
from tepo_megatron.config.objective.presets import PRESETS
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.core.objective.checking import run_checks
from tepo_megatron.trainer.registry import check_plugins

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
        return self.tau * ratio_T * values.advantage_T


def _wrong(name: str, surrogate: Any) -> Documented:
    """A trust region of this name; the function of (ratio, values) is its surrogate without the field."""

    class Wrong(Documented):
        def surrogate(self, ratio_T: Any, values: Any) -> Any:
            return self.tau * surrogate(ratio_T, values)

    Wrong.__name__, Wrong.__doc__ = name, f"{name}."
    return Wrong()


def _draw(ratio_T: Any, values: Any) -> Any:
    torch.rand(1)
    return ratio_T * values.advantage_T


def _root(ratio_T: Any, values: Any) -> Any:
    """Its derivative at 0 is infinite."""
    return torch.where(values.advantage_T > 0, (values.delta_T * 0).abs().sqrt(), ratio_T * values.advantage_T)


MEAN_OF_MEANS = _wrong("MeanOfMeans", lambda ratio_T, values: ratio_T * values.advantage_T / values.mask_T.sum())
LARGEST_HERE = _wrong("LargestHere", lambda ratio_T, values: ratio_T * values.advantage_T / ratio_T.detach().max())
BY_PLACE = _wrong("ByPlace", lambda ratio_T, values: ratio_T * values.advantage_T / (1 + values.index_T))
REMEMBERS = _wrong("Remembers", lambda ratio_T, values: ratio_T * values.advantage_T * (1 + next(COUNTER)))
RAISES = _wrong("Raises", lambda ratio_T, values: ratio_T * values.advantages)


class Idle(Documented):
    """Does not read its field."""

    def surrogate(self, ratio_T: Any, values: Any) -> Any:
        return ratio_T * values.advantage_T


class Silent(Documented):
    def surrogate(self, ratio_T: Any, values: Any) -> Any:
        return self.tau * ratio_T * values.advantage_T


class Unexplained(Documented):
    """A field without a word."""

    sigma: float = 1.0

    def surrogate(self, ratio_T: Any, values: Any) -> Any:
        return self.tau * self.sigma * ratio_T * values.advantage_T


class CountsPadding(OwnAggregation):
    """Divides by all sequences, those of padding too."""

    kind: Literal["mine"] = "mine"

    def denominator(self, lengths_S: Any) -> Any:
        return lengths_S.numel()


class FirstFirst(OwnAdvantage):
    """The first response is the best."""

    kind: Literal["mine"] = "mine"

    def advantages(self, batch: Any) -> Any:
        return batch.rewards_S - batch.rewards_S[0]


class OverNeighbours(OwnRatio):
    """A running sum over whatever is packed before."""

    kind: Literal["mine"] = "mine"

    def log_ratio(self, values: Any) -> Any:
        return values.delta_T.cumsum(0)


class Nobody(OwnMask):
    """Chooses nothing."""

    kind: Literal["mine"] = "mine"

    def choose(self, values: Any, found: Any) -> Any:
        return values.mask_T & False


class NewEachTime(OwnPenalty):
    """Its prepare gives another number on each rank."""

    kind: Literal["mine"] = "mine"

    def prepare(self, step: Any) -> Any:
        return next(COUNTER)

    def penalty(self, values: Any, found: Any) -> Any:
        return found * values.delta_T**2


BROKEN: dict[str, list[tuple[Any, str]]] = {
    "micro-batches": [
        (
            MEAN_OF_MEANS,
            rf"^the loss is {NUMBERS} in one piece, {NUMBERS} in micro-batches of 1 and .*: something is computed over",
        ),
        (LARGEST_HERE, rf"^the loss is {NUMBERS} in one piece, {NUMBERS} in micro-batches of"),
    ],
    "order of sequences": [
        (BY_PLACE, rf"^the loss is {NUMBERS} with the sequences in one order, {NUMBERS} in another"),
        (OverNeighbours(), "with the sequences in one order"),
        (FirstFirst(), rf"^a response's advantage is {NUMBERS} with the responses in their order, {NUMBERS} in another order"),
    ],
    "is deterministic": [
        (REMEMBERS, rf"^the loss is {NUMBERS} at first, {NUMBERS} when computed again"),
        (_wrong("Draws", _draw), "^it draws random numbers from torch's generator"),
        (NewEachTime(), "at first, .* when computed again"),
    ],
    "is finite": [
        (
            _wrong("Roots", _root),
            r"^the gradient by the log-prob of token \d+, a response token, is nan.*what torch.where leaves out",
        )
    ],
    "padding": [
        (CountsPadding(), rf"^the loss is {NUMBERS} without padding, {NUMBERS} with a sequence of padding in the step")
    ],
    "fields of mine act": [(Idle(), r"^no other value of objective.trust_region.tau changes anything; it is 1.0 here")],
    "mine acts": [(Nobody(), "^objective.mask.kind = 'mine' changes nothing in any of 5 steps")],
    "mine is documented": [
        (Silent(), "^Silent has no docstring; say what it computes"),
        (Unexplained(), "^Unexplained.sigma has no docstring; write what it means"),
    ],
    "can be computed": [
        (
            RAISES,
            r"^it raised AttributeError: 'TokenValues' object has no attribute 'advantages' \(.*test_checking\.py, line \d+\)$",
        )
    ],
}


@pytest.mark.parametrize(
    ("rule", "kind", "message"),
    [(rule, *case) for rule, cases in BROKEN.items() for case in cases],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_each_mistake_is_found_by_its_rule(rule, kind, message):
    found = {
        finding.rule: finding.problem for finding in run_checks(ObjectiveConfig(preset="grpo", **{kind.slot: kind}), steps=5)
    }
    assert found[rule], f"nothing was found; the rules say {found}"
    with pytest.raises(ValueError, match=message):
        raise ValueError(found[rule])


def test_ranks_that_divide_by_different_numbers_are_found():
    class Alternates(OwnAggregation):
        """Every other call gives another number."""

        kind: Literal["mine"] = "mine"

        def denominator(self, lengths_S: Any) -> Any:
            return 1 + next(COUNTER) % 2

    found = {each.rule: each.problem for each in run_checks(ObjectiveConfig(preset="grpo", aggregation=Alternates()))}
    assert "at first" in found["is deterministic"]
    assert "one rank divides by" in found["data-parallel ranks"]


def test_what_is_right_passes_and_so_do_the_presets():
    check_objective(ObjectiveConfig(preset="grpo", trust_region=Documented()))
    for preset in PRESETS:
        check_objective(ObjectiveConfig(preset=preset), steps=2)
    check_objective(ObjectiveConfig(preset="gdpo", advantage={"weights": [1.0, 2.0, 0.5]}), steps=2, reward_parts=3)


def test_a_test_of_ones_own_gets_all_that_is_wrong_in_one_error():
    with pytest.raises(
        ValueError, match=r"^the objective breaks a rule:\n  micro-batches: the loss is .*\n  data-parallel ranks: "
    ):
        check_objective(ObjectiveConfig(preset=str(ROOT / EXAMPLE / "mean_of_means.yaml")))


def test_a_run_refuses_it_before_anything_is_started():
    """Rank 0 asks while it reads what the run needs."""
    check_plugins(load_run(None, [f"objective.preset={ROOT}/{EXAMPLE}/my_sapo.yaml"]))
    with pytest.raises(ValueError, match=r"mean_of_means\.py, breaks a rule \(micro-batches\): the loss is .* in one piece"):
        check_plugins(load_run(None, [f"objective.preset={ROOT}/{EXAMPLE}/mean_of_means.yaml"]))


def tepo(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_the_command_line_lists_shows_and_checks_ones_own(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    checked = tepo("objective", "check", f"{EXAMPLE}/my_objective.py", f"{EXAMPLE}/my_luspo.yaml", f"{EXAMPLE}/my_sapo.yaml")
    assert checked.exit_code == 0, checked.output
    assert checked.stdout.count(" 0 broken") == 5  # three kinds, each over grpo, and two presets
    wrong = tepo("objective", "check", f"{EXAMPLE}/mean_of_means.yaml", "--json")
    assert wrong.exit_code == 1
    rules = {each["rule"]: each["problem"] for each in json.loads(wrong.stdout)[0]["rules"]}
    assert "in one piece" in rules["micro-batches"]
    listed = json.loads(tepo("objective", "list", f"{EXAMPLE}/my_sapo.yaml", f"{EXAMPLE}/my_objective.py", "--json").stdout)
    assert listed["presets"][f"{EXAMPLE}/my_sapo.yaml"]["objective"]["trust_region"]["kind"] == "gate"
    (plugin,) = listed["plugins"].values()
    assert {"field": "objective.trust_region.tau_negative", "default": "1.05", "meaning": "τ where A ≤ 0."} in plugin["fields"]
    shown = tepo("objective", "show", f"{EXAMPLE}/my_sapo.yaml")
    assert "objective.trust_region.tau_positive" in shown.stdout
    assert "objective.ratio.kind = geometric_mean" in tepo("objective", "show", f"{EXAMPLE}/my_objective.py").stdout
    schema = tepo("config", "schema", "objective.trust_region", "--plugin", f"{EXAMPLE}/my_objective.py").stdout
    assert 'kind = "gate"' in schema
    heavy = tmp_path / "heavy.py"
    heavy.write_text(
        (ROOT / EXAMPLE / "my_objective.py").read_text().replace("\nfrom typing", "\nimport torch\nfrom typing", 1)
    )
    noted = tepo("objective", "check", str(heavy))
    assert noted.exit_code == 0
    assert "note: " in noted.stdout
    assert "cannot be read without torch" in noted.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("check", "gpro"), "gpro is no preset; there are tepo, .* or give a file: my_preset.yaml, my_objective.py"),
        (("check", "gone.py"), "there is no file .*gone.py"),
        (("show", "gone.yaml"), "gone.yaml cannot be read"),
        (("show", f"{EXAMPLE}/my_objective.py", "--png", "x.png"), "--png draws a preset"),
    ],
)
def test_what_the_command_line_cannot_use_is_one_sentence(words, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = tepo("objective", *words)
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(done.stderr)


def test_a_kind_whose_fields_have_no_default_is_tried_with_some(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from typing import Literal\nfrom pydantic import model_validator\nfrom tepo_megatron import OwnTrustRegion\n"
        'class Mine(OwnTrustRegion):\n    """r A, times a number."""\n    kind: Literal["mine"] = "mine"\n'
        '    low: float\n    """A number."""\n    high: float\n    """Another."""\n'
        "    def surrogate(self, ratio_T, values):\n        return (self.low + self.high) * ratio_T * values.advantage_T\n"
    )
    assert tepo("objective", "check", str(path)).exit_code == 0
    path.write_text(
        path.read_text() + '    @model_validator(mode="after")\n    def ordered(self):\n        if self.low >= self.high:\n'
        '            raise ValueError("low must be below high")\n        return self\n'
    )
    refused = tepo("objective", "check", str(path))
    assert refused.exit_code == 1
    assert "low must be below high); write a preset's file that gives its fields values, and check that" in refused.stderr

"""Filters of groups: what each keeps, and one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tepo_megatron.config.rollout import FilterGroupsConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.sampling.step_rewards import GroupFilters


def group(rewards: list[float | None], cut: int = 0) -> list[Rollout]:
    """Responses with these rewards, the first ``cut`` of which are cut."""
    return [
        Rollout("p", 0, [3], [4], [-1.0], "length" if at < cut else "stop", WeightsVersion(0), "", reward)
        for at, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("settings", "rewards", "cut", "cause"),
    [
        ({}, [0.0, 0.0], 0, "zero_variance"),
        ({}, [0.0, 1.0], 2, None),
        ({}, [1.0, None, 1.0], 0, "zero_variance"),  # what has no reward is not looked at
        ({}, [1.0, None], 0, "no_reward"),
        ({}, [1.0, None, 0.0], 0, None),
        ({"filters": ["too_long"], "max_truncated": 0.5}, [0.0] * 4, 2, None),
        ({"filters": ["too_long"], "max_truncated": 0.5}, [0.0] * 4, 3, "too_long"),
        ({"filters": ["reward_range"], "reward_range": [0.25, 0.5]}, [1.0, 0.0, 0.0, 0.0], 0, None),
        ({"filters": ["reward_range"], "reward_range": [0.25, 0.5]}, [1.0, 1.0, 0.0], 0, "reward_range"),
        ({"filters": ["reward_range"], "reward_range": [0.25, 0.5]}, [0.0, 0.0, 0.0], 0, "reward_range"),
        ({"filters": ["too_long", "zero_variance"], "max_truncated": 0.0}, [1.0, 1.0], 1, "too_long"),  # the first counts
    ],
)
def test_which_groups_are_kept(settings: dict[str, object], rewards: list[float | None], cut: int, cause: str | None) -> None:
    assert GroupFilters(FilterGroupsConfig.model_validate(settings)).refuse(group(rewards, cut)) == cause


def test_ones_own_filter_is_a_function_in_a_file_or_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my_filters.py"
    path.write_text(
        "def few(group):\n    return len(group) < 3\n\ndef broken(group):\n    return group[0].grade\n\n"
        "def vague(group):\n    return len(group)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (f"{path}:few", "my_filters:few"):
        filters = GroupFilters(FilterGroupsConfig(filters=(name, "zero_variance")))
        assert filters.causes == ("few", "zero_variance", "no_reward")
        assert filters.refuse(group([0.0, 1.0, 1.0])) == "few"
        assert filters.refuse(group([1.0, 1.0])) == "zero_variance"
    for name, sentence in (
        ("broken", "the filter broken .* raised AttributeError on the group of problem 'p'"),
        ("vague", "the filter vague .* returned 2 for the group of problem 'p'; return True to keep it"),
    ):
        with pytest.raises(RuntimeError, match=sentence):
            GroupFilters(FilterGroupsConfig(filters=(f"{path}:{name}",))).refuse(group([0.0, 1.0]))
    for name, sentence in (
        (f"{path}:none", "has no function none"),
        (f"{tmp_path}/no.py:few", f"there is no file {tmp_path}/no.py"),
        ("no_such_module:few", "raised ModuleNotFoundError"),
    ):
        with pytest.raises(ValueError, match=sentence):
            GroupFilters(FilterGroupsConfig(filters=(name,)))

"""How the suite is divided among the workers of pytest-xdist.

Tests that start servers, which have several GB of memory, are in three groups, each of which is one worker's: no more than
three of them run at a time. Of all others a worker takes a file at once, and makes its fixtures once. What takes longest
goes first, so that workers end at about the same time.
"""

from collections.abc import Sequence

import pytest
from xdist.scheduler import LoadScopeScheduling

IN_TURN = (
    ("tests/e2e/test_training_run.py", "tests/e2e/test_examples.py", "tests/e2e/test_executors.py"),
    ("tests/slurm/", "tests/e2e/test_faults.py"),
    ("tests/e2e/", "tests/contracts/test_sampler.py"),
)
"""The three groups: whole runs; jobs and faults, which wait a lot; servers."""


class Schedule(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
    def _split_scope(self, nodeid: str) -> str:
        """What this test is taken together with."""
        file = nodeid.partition("::")[0]
        return next((group[0] for group in IN_TURN if file.startswith(group)), file)


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The three groups, then worlds, then files with a slow test; files stay together."""

    def place(item: pytest.Item) -> int:
        if item.nodeid.startswith("tests/dist/"):
            return len(IN_TURN)
        last = len(IN_TURN) + 1 + ("slow" not in item.keywords)
        return next((number for number, group in enumerate(IN_TURN) if item.nodeid.startswith(group)), last)

    files: dict[object, int] = {}
    for item in items:
        files[item.path] = min(place(item), files.get(item.path, place(item)))
    return sorted(items, key=lambda item: files[item.path])

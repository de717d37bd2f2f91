"""Groups on disk from when they are decided until a journal's entry has them: what an interrupted step had, what is carried.

Rank 0 only. ``<output>/journal/groups/step_0000123.jsonl`` is group number 123, a record as ``rollout.record`` writes it; a
response that is not finished ends with ``abort``, and ``group`` is its number within the group.
``<output>/journal/step_0000012.json`` says what was drawn up to the end of step 12, and what it carries over. Decision 024.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tepo_megatron.run.sampling.groups import UNFINISHED, Group
from tepo_megatron.runtime.files import Failed, write_atomically
from tepo_megatron.sampler.rollout_file import read_record, record_path, write_rollouts
from tepo_megatron.tasks.protocol import RewardResult


class GroupStore:
    """The groups of an output folder. ``identity`` says, as a digest, what a group comes of; ``failed`` is told of a file that
    could not be written, which does not end the run.
    """

    def __init__(self, journal: Path, identity: Callable[[Group], str], failed: Failed, *, active: bool) -> None:
        self._journal, self._folder = journal, journal / "groups"
        self._identity, self._failed, self._active = identity, failed, active
        self._there = {_number(path) for path in self._folder.glob("step_*.jsonl")} if active else set()

    def write(self, group: Group) -> None:
        """Returns when the responses of a group, as far as there are any, outlive this process."""
        rollouts = [replace(rollout, group=at) for at, rollout in enumerate(group.samples) if rollout is not None]
        if not self._active or not rollouts:
            return
        try:
            # Unflushed: a flush a group takes longer than a small step, and what a dead machine loses is drawn again.
            write_rollouts(self._folder, group.number, rollouts, drawn_by=self._identity(group), flush=False)
            self._there.add(group.number)
        except OSError as error:
            self._failed(record_path(self._folder, group.number), error)

    def fill(self, group: Group, *, partial: bool) -> bool:
        """Gives a group the responses that an earlier process drew for it; whether there were any. One that is not complete is
        drawn again whole, unless its parts can be gone on with (``partial``).
        """
        if group.number not in self._there:
            return False
        try:
            found = read_record(self._folder, group.number)
        except ValueError:  # cut or damaged, also by the kill itself
            return False
        whole = all(rollout.finish_reason != UNFINISHED for rollout in found.rollouts)
        if found.drawn_by != self._identity(group) or len(found.rollouts) > len(group.samples):
            return False
        if not partial and not (whole and len(found.rollouts) == len(group.samples)):
            return False
        for rollout in found.rollouts:
            group.samples[rollout.group] = rollout
            if rollout.reward is not None:  # others have no verifier's answer yet, or none worth keeping
                group.asked.add(rollout.group)
                group.results[rollout.group] = RewardResult(rollout.reward, parts=rollout.reward_parts)
        return True

    def keep_only(self, numbers: Collection[int]) -> None:
        """Removes all others: a journal's entry has them."""
        for number in self._there - set(numbers):
            with suppress(OSError):  # what stays is removed after the next step
                record_path(self._folder, number).unlink(missing_ok=True)
                self._there.discard(number)

    def write_state(self, step: int, state: Mapping[str, Any]) -> None:
        """What was drawn when a step ended, before its entry in the journal."""
        if not self._active:
            return
        path = self._state_path(step)
        try:
            write_atomically(path, json.dumps(state) + "\n")
        except OSError as error:
            self._failed(path, error)

    def read_state(self, step: int) -> dict[str, Any] | None:
        """What :meth:`write_state` wrote; None where it is not there whole."""
        try:
            found = json.loads(self._state_path(step).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _state_path(self, step: int) -> Path:
        return record_path(self._journal, step).with_suffix(".json")


def _number(path: Path) -> int:
    number = path.stem.removeprefix("step_")
    return int(number) if number.isdecimal() else -1

"""The journal: rollouts on disk once drawn and rewarded, so that a killed run draws none twice. Rank 0 only.

``journal/step_0000012.jsonl`` has a step's rollouts, with a digest of the weights and settings that drew them (decision
014). With dynamic sampling, ``step_0000012.json`` has what was drawn up to that step, and ``groups/step_0000123.jsonl``
group 123 until an entry has it (decision 024).
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.sampling.groups import UNFINISHED, Group
from tepo_megatron.runtime.files import Failed, partial_path, write_atomically
from tepo_megatron.runtime.text import parse_json
from tepo_megatron.sampler.rollout_file import Record, check_rollouts, record_path, write_rollouts
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.trainer.checkpoint_folder import checkpoints, step_of
from tepo_megatron.trainer.run_compatibility import served_teachers

MAX_BYTES = 2**30  # without the newest entry; the oldest entries are removed first


class Journal:
    """``failed`` is called for an unwritable file, which does not end the run. ``end_ids`` end a response."""

    def __init__(self, config: RunConfig, say: Callable[[str], None], failed: Failed, end_ids: Sequence[int] = ()) -> None:
        self._config, self._say, self._failed, self._end_ids = config, say, failed, end_ids
        self.folder = config.output / "journal"
        self.judges_again = config.environment is None  # what came of an episode is known only where it was played
        self._records = config.output / "rollouts" if config.rollout.record else None

    def identity(
        self, problems: Sequence[Problem], prompts: Sequence[Sequence[int]], version: WeightsVersion | None, **also: Any
    ) -> str:
        """Digest of all that decides the rollouts; ``also`` has JSON values."""
        rollout = self._config.rollout
        server, environment = rollout.server, self._config.environment
        reward = self._config.reward.model_dump(mode="json", exclude={"workers", "concurrency"})
        metadata = [dict(problem.metadata) for problem in problems]
        sampling = rollout.sampling
        decides: dict[str, Any] = {
            "seed": self._config.seed,
            "weights": None if version is None else [version.step, version.digest],
            "problems": [[p.id, p.prompt, p.answer, list(ids)] for p, ids in zip(problems, prompts, strict=True)],
            "samples": rollout.samples_per_prompt,
            "sampling": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                **sampling.model_dump(mode="json", exclude_defaults=True),
            },
            "server": [server.served_dtype(self._config.model.dtype), server.quantization, list(server.extra_args)],
            "reward": {name: value for name, value in reward.items() if value or name not in ("kwargs", "weights")},
            **also,
        }
        filters = rollout.filter_groups and rollout.filter_groups.model_dump(mode="json")
        newer = {
            "metadata": metadata if any(metadata) else None,
            "head_dtype": server.head_dtype if server.head_dtype != "model" else None,
            "routing_replay": server.routing_replay,
            "environment": environment and environment.decides(),
            "speculative": server.speculative and server.speculative.model_dump(mode="json", exclude_none=True),
            "end": list(self._end_ids) if len(self._end_ids) > 1 else None,  # more than the tokenizer's own
            "verifiers": self._config.data.source_verifiers,
            "teachers": served_teachers(self._config),
            "collect": rollout.collect,
            "dynamic": [filters, rollout.oversample, rollout.partial] if filters or rollout.oversample > 1 else None,
        }
        # Newer settings count only if they are used, above and here: entries of older versions are still found.
        decides |= {name: value for name, value in newer.items() if value}
        return sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    def find(self, step: int, drawn_by: Callable[[Record], str | None], *, stalest: int = 0) -> Record | None:
        """None if the rollouts must be drawn. ``drawn_by``: the identity of a valid entry like this, or None.
        ``stalest``: how many versions older weights may be.
        """
        path = record_path(self.folder, step)
        rollout = self._config.rollout
        try:
            if not rollout.journal or not path.exists():
                return None
            entry = Record.read(self.folder, step)
            if entry.drawn_by != drawn_by(entry):
                self._say(f"step {step} is sampled again: {path} was drawn by other weights or with other settings or data")
                return None
            size = {"prompts": rollout.prompts_per_step, "samples": rollout.samples_per_prompt}
            check_rollouts(path, entry.rollouts, step=step, stalest=stalest, **size)
        except (OSError, ValueError) as error:
            self._say(f"step {step} is sampled again, since its entry in the journal cannot be read: {error}")
            return None
        self._say(f"step {step} takes the rollouts that were drawn before the interruption: {path}")
        self._keep_record(path)
        return entry

    def write(self, step: int, rollouts: Sequence[Rollout], drawn_by: str, failed_rewards: int) -> None:
        """Returns when the rollouts are on disk, also in the run's records."""
        folder = self.folder if self._config.rollout.journal else self._records
        if folder is None:
            return
        with self.reporting(record_path(folder, step)):
            path = write_rollouts(folder, step, rollouts, drawn_by=drawn_by, failed_rewards=failed_rewards)
            if folder == self.folder:
                self._keep_record(path)
                self._prune(step)

    def refuse(self, step: int) -> None:
        """Puts the entry aside."""
        path = record_path(self.folder, step)
        with self.reporting(path):
            if path.exists():
                aside = path.replace(path.with_suffix(".refused"))
                self._say(f"step {step}: its rollouts were refused, and no resumed run takes them: {aside}")

    def _prune(self, step: int) -> None:
        """Keeps entries since the oldest checkpoint, up to ``MAX_BYTES``: the newest checkpoint may be damaged. Those after
        ``step``, which was just written, are of a run before it went back: they go first.
        """
        oldest = min(map(step_of, checkpoints(self._config.output / "checkpoints")), default=0)
        present, room = list(self.folder.glob("step_*.jsonl")), MAX_BYTES
        present.sort(key=lambda path: (_step(path) <= step, _step(path)), reverse=True)
        with suppress(OSError):  # a file that cannot be removed is tried again after the next step
            for number, path in enumerate(present):
                room -= path.stat().st_size if number else 0
                if _step(path) < oldest or room < 0:
                    path.with_suffix(".json").unlink(missing_ok=True)
                    path.unlink()

    def _keep_record(self, path: Path) -> None:
        if self._records is None:
            return
        target = self._records / path.name
        with self.reporting(target):
            if target.exists() and target.samefile(path):
                return
            self._records.mkdir(parents=True, exist_ok=True)
            partial = partial_path(target)
            partial.unlink(missing_ok=True)
            try:
                os.link(path, partial)
            except OSError:
                shutil.copyfile(path, partial)
            partial.replace(target)

    @contextmanager
    def reporting(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed(path, error)


class GroupStore:
    """Without ``active``, writes and reads nothing."""

    def __init__(self, journal: Journal, *, active: bool) -> None:
        self._journal, self._folder, self._active = journal, journal.folder / "groups", active
        self._numbers = {_step(path, default=-1) for path in self._folder.glob("step_*.jsonl")} if active else set()

    def write(self, group: Group) -> None:
        """Returns when the group's responses outlive this process."""
        rollouts = [replace(rollout, group=index) for index, rollout in enumerate(group.samples) if rollout is not None]
        if not self._active or not rollouts:
            return
        if self._journal.judges_again:
            failed = {index for index, result in group.results.items() if result.error}
            rollouts = [replace(item, reward=None, reward_parts={}) if item.group in failed else item for item in rollouts]
        with self._journal.reporting(record_path(self._folder, group.number)):
            # Unflushed: flushes of all groups need longer than a small step, and a machine's death loses only samples.
            write_rollouts(self._folder, group.number, rollouts, drawn_by=self._identity(group), flush=False)
            self._numbers.add(group.number)

    def fill(self, group: Group, *, partial: bool, now: WeightsVersion | None) -> None:
        """Takes the responses on disk, incomplete ones only if ``partial``. ``now``: the servers' weights."""
        if group.number not in self._numbers:
            return
        try:
            record = Record.read(self._folder, group.number)
        except ValueError:  # cut or damaged, also by the kill itself
            return
        versions = {version for rollout in record.rollouts for _, version in rollout.versions}
        if now is None or any(version.step >= now.step and version != now for version in versions):
            self.keep_only(self._numbers - {group.number})  # the run went back to before these weights
            return
        size = len(record.rollouts)
        whole = size == len(group.samples) and all(rollout.finish_reason != UNFINISHED for rollout in record.rollouts)
        if record.drawn_by != self._identity(group) or size > len(group.samples) or not (partial or whole):
            return
        for rollout in record.rollouts:
            group.samples[rollout.group] = rollout
            if rollout.reward is not None:  # others have no answer of a verifier yet, or only an error
                group.asked.add(rollout.group)
                judged: dict[str, Any] = {"teacher_logprobs": rollout.teacher_logprobs, "teacher_top": rollout.teacher_top}
                group.results[rollout.group] = RewardResult(rollout.reward, parts=rollout.reward_parts, **judged)

    def keep_only(self, numbers: Collection[int]) -> None:
        for number in self._numbers - set(numbers):
            with suppress(OSError):  # tried again after the next step
                record_path(self._folder, number).unlink(missing_ok=True)
                self._numbers.discard(number)

    def write_state(self, step: int, state: Mapping[str, Any]) -> None:
        """Call it before the step's entry is written."""
        path = self._state_path(step)
        if self._active:
            with self._journal.reporting(path):
                write_atomically(path, json.dumps(state) + "\n")

    def read_state(self, step: int) -> dict[str, Any] | None:
        """None if it is missing or damaged."""
        try:
            state = parse_json(self._state_path(step).read_bytes(), "it", dict)
        except (OSError, ValueError):
            return None
        return state if isinstance(state.get("after"), dict) and isinstance(state.get("figures"), dict) else None

    def _state_path(self, step: int) -> Path:
        return record_path(self._journal.folder, step).with_suffix(".json")

    def _identity(self, group: Group) -> str:
        drawn_by = self._journal.identity([group.problem], [group.prompt_ids], group.version)
        return f"{drawn_by}/{group.number}/{group.step}/{group.place}"


def _step(path: Path, *, default: int = 0) -> int:
    number = path.stem.removeprefix("step_")
    return int(number) if number.isdecimal() else default

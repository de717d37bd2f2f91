"""The journal: a step's rollouts on disk as soon as they are drawn and rewarded, so that a killed run draws none twice.

Rank 0 only. An entry, ``<output>/journal/step_0000012.jsonl``, is a record as ``rollout.record`` writes it, and names the
weights and settings that its rollouts come of. Decision 014.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.sampling.group_store import GroupStore
from tepo_megatron.run.sampling.groups import Group
from tepo_megatron.runtime.files import Failed
from tepo_megatron.sampler.rollout_file import Record, check_rollouts, link_record, read_record, record_path, write_rollouts
from tepo_megatron.trainer.checkpoints.folder import checkpoints, step_of
from tepo_megatron.trainer.checkpoints.run_compatibility import source_verifiers

MOST_BYTES = 2**30
"""What the journal may take of the disk, beside its newest entry: the oldest entries go first."""


class Journal:
    """The rollouts that a run may need again, and those that it records for ever (``rollout.record``).

    ``say`` shows a sentence; ``failed`` is told of a file that could not be written, which does not end the run.
    """

    def __init__(self, config: RunConfig, say: Callable[[str], None], failed: Failed) -> None:
        self._config, self._say, self._failed = config, say, failed
        self._folder = config.output / "journal"
        self._records = config.output / "rollouts" if config.rollout.record else None

    def identity(
        self,
        problems: Sequence[Problem],
        prompts: Sequence[Sequence[int]],
        version: WeightsVersion | None,
        **also: Mapping[str, Any],
    ) -> str:
        """A digest of what decides a step's rollouts: weights, problems, prompts, seed, sampling, verifier; and what the caller
        adds, as JSON values.
        """
        rollout = self._config.rollout
        server, environment = rollout.server, self._config.environment
        reward = self._config.reward.model_dump(mode="json", exclude={"workers", "concurrency"})
        beside = [dict(each.metadata) for each in problems]
        sampling = rollout.sampling
        decides: dict[str, Any] = {
            "seed": self._config.seed,
            "weights": None if version is None else [version.step, version.digest],
            "problems": [[each.id, each.prompt, each.answer, list(ids)] for each, ids in zip(problems, prompts, strict=True)],
            "samples": rollout.samples_per_prompt,
            # What older versions did not have counts where it is used, here and below: their entries are still found.
            "sampling": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                **sampling.model_dump(mode="json", exclude_defaults=True),
            },
            "server": [server.served_dtype(self._config.model.dtype), server.quantization, list(server.extra_args)],
            "reward": {name: value for name, value in reward.items() if value or name not in ("kwargs", "weights")},
            **({"metadata": beside} if any(beside) else {}),
            **({"environment": environment.decides()} if environment is not None else {}),
            **({"speculative": server.speculative.model_dump(mode="json", exclude_none=True)} if server.speculative else {}),
            **also,
        }
        verifiers = source_verifiers(self._config)
        decides |= {"verifiers": verifiers} if verifiers else {}
        if rollout.collect is not None:
            decides["collect"] = rollout.collect
        if rollout.filter_groups is not None or rollout.oversample > 1:
            filters = None if rollout.filter_groups is None else rollout.filter_groups.model_dump(mode="json")
            decides["dynamic"] = [filters, rollout.oversample, rollout.partial]
        return sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    def find(self, step: int, drawn_by: str, *, stalest: int = 0) -> Record | None:
        """The step's rollouts as an interrupted run left them, whole and drawn by the same; None where they must be drawn.
        ``stalest``: by how many versions the weights that drew them may be older than the step's.

        An entry that is damaged, or of other weights or settings, is said to be, and not used.
        """
        path = record_path(self._folder, step)
        if not self._config.rollout.journal or not path.exists():
            return None
        rollout = self._config.rollout
        try:
            found = read_record(self._folder, step)
            if found.drawn_by != drawn_by:
                self._say(f"step {step} is sampled again: {path} was drawn by other weights or with other settings")
                return None
            check_rollouts(
                path,
                found.rollouts,
                step=step,
                prompts=rollout.prompts_per_step,
                samples=rollout.samples_per_prompt,
                stalest=stalest,
            )
        except ValueError as error:
            self._say(f"step {step} is sampled again, since its entry in the journal is damaged: {error}")
            return None
        self._say(f"step {step} takes the rollouts that were drawn before the interruption: {path}")
        self._keep_record(path)
        return found

    def group_store(self, identity: Callable[[Group], str], *, active: bool) -> GroupStore:
        """Where the groups of a step lie until its entry is written; ``active``: whether they are kept at all."""
        return GroupStore(self._folder, identity, self._failed, active=active and self._config.rollout.journal)

    def write(self, step: int, rollouts: Sequence[Rollout], drawn_by: str, failed_rewards: int) -> None:
        """Returns when the step's rollouts are on disk: in the journal, and among the records where the run keeps them."""
        folder = self._folder if self._config.rollout.journal else self._records
        if folder is None:
            return
        try:
            path = write_rollouts(folder, step, rollouts, drawn_by=drawn_by, failed_rewards=failed_rewards)
        except OSError as error:
            self._failed(record_path(folder, step), error)
            return
        if folder == self._folder:
            self._keep_record(path)
            self.prune()

    def prune(self) -> None:
        """Removes entries before the oldest checkpoint that is kept, from which nothing resumes, and the oldest beyond
        ``MOST_BYTES``. Those between the oldest and the newest checkpoint serve a run whose newest checkpoint is damaged.
        """
        if not self._folder.is_dir():
            return
        oldest = min(map(step_of, checkpoints(self._config.output / "checkpoints")), default=0)
        room = MOST_BYTES
        with suppress(OSError):  # what is gone is gone; what cannot be removed is tried again after the next step
            for number, path in enumerate(sorted(self._folder.glob("step_*.jsonl"), reverse=True)):
                room -= path.stat().st_size if number else 0
                if _step(path) < oldest or room < 0:
                    path.with_suffix(".json").unlink(missing_ok=True)
                    path.unlink()

    def _keep_record(self, path: Path) -> None:
        if self._records is None:
            return
        try:
            link_record(path, self._records)
        except OSError as error:
            self._failed(self._records / path.name, error)


def _step(path: Path) -> int:
    """The step that an entry is named by; 0 for a name of another form, which is left alone."""
    number = path.stem.removeprefix("step_")
    return int(number) if number.isdecimal() else 0

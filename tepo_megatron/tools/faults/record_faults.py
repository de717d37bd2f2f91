"""Edited files between two calls of a run: records, journals, metrics, a resume at another size."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tepo_megatron.core.rollout import Rollout
from tepo_megatron.run.sampling.groups import UNFINISHED
from tepo_megatron.sampler.rollout_file import Record, record_path
from tepo_megatron.tools.faults.processes import wait_gone
from tepo_megatron.tools.faults.workshop import SAVED, FaultClass, FaultOutcome, LiveRun, differences

_Edit = Callable[[list[bytes], random.Random], list[bytes]]  # of a file's lines, with their ends


def _flip_a_bit(lines: list[bytes], rng: random.Random) -> list[bytes]:
    data = bytearray(b"".join(lines))
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return [bytes(data)]


def _cut_off(lines: list[bytes], rng: random.Random) -> list[bytes]:
    data = b"".join(lines)
    return [data[: rng.randrange(1, len(data) - 1)]]


def _change(key: str, value: Any, line: int = -1) -> _Edit:
    def edit(lines: list[bytes], rng: random.Random) -> list[bytes]:
        changed = json.dumps({**json.loads(lines[line]), key: value}).encode() + b"\n"
        return [changed if number == line % len(lines) else item for number, item in enumerate(lines)]

    return edit


_RECORD, _METRICS, _RESOLVED = str(record_path(Path("rollouts"), SAVED)), "out/metrics.jsonl", "out/resolved.yaml"
_EDITS: dict[str, tuple[str, _Edit | None]] = {
    "the record: a reward changed": (_RECORD, _change("reward", 0.25)),
    "metrics.jsonl: cut off": (_METRICS, _cut_off),
    "the record: one bit flipped": (_RECORD, _flip_a_bit),
    "the record: cut off": (_RECORD, _cut_off),
    "the record: a line removed": (_RECORD, lambda lines, rng: lines[:-1]),
    "the record: a line twice": (_RECORD, lambda lines, rng: [*lines, lines[-1]]),
    "the record: two lines exchanged": (_RECORD, lambda lines, rng: [lines[0], lines[2], lines[1], *lines[3:]]),
    "the record: another step named": (_RECORD, _change("step", SAVED - 1, 0)),
    "the record: a reward that is no number": (_RECORD, _change("reward", float("nan"))),
    "the record: empty": (_RECORD, lambda lines, rng: []),
    "the record: removed": (_RECORD, None),
    "metrics.jsonl: a line twice": (_METRICS, lambda lines, rng: [*lines, lines[-1]]),
    "metrics.jsonl: a step that never was": (_METRICS, lambda lines, rng: [*lines, b'{"step": 99}\n']),
    "metrics.jsonl: a line that is no JSON": (_METRICS, lambda lines, rng: [lines[0], b"\xff{\n", *lines[1:]]),
    "metrics.jsonl: empty": (_METRICS, lambda lines, rng: []),
    "resolved.yaml: cut off": (_RESOLVED, _cut_off),
    "resolved.yaml: empty": (_RESOLVED, lambda lines, rng: []),
    "run.lock: garbage": ("out/run.lock", lambda lines, rng: [rng.randbytes(40)]),
    "status: garbage": ("out/status/*", lambda lines, rng: [rng.randbytes(40)]),
}  # fault → (files, edit; None removes them)


class _Records(FaultClass):
    name = "records"
    title = "edited records of rollouts, metrics and other files of a run, then --resume"
    whole, quick = len(_EDITS), 2  # the first two

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        base, folder = self.workshop.undisturbed(), self.new_folder(number)
        shutil.copytree(base / "saved", folder)
        rollouts = shutil.copytree(base / "rollouts", folder / "rollouts")
        name, (pattern, edit) = list(_EDITS.items())[number]
        for path in sorted(folder.glob(pattern)):
            if edit is None:
                path.unlink()
            else:
                path.write_bytes(b"".join(edit(path.read_bytes().splitlines(keepends=True), rng)))
        settings = "train.allow_change=[rollout.replay]"
        return self.resume(name, folder, rollouts, settings, told="lacks the rows", may_lack=True)


_JOURNALS: dict[str, _Edit | None] = {
    "a full disk": None,
    "one bit flipped": _flip_a_bit,
    "cut off": _cut_off,
    "a reward changed": _change("reward", 0.25),
    "the entry of the step before": lambda lines, rng: lines,
}


class _Journals(FaultClass):
    name = "journals"
    title = "a live run's journal on a full disk, or edited after kill −9, then --resume"
    whole, quick = len(_JOURNALS), 1

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        name, edit = list(_JOURNALS.items())[number % len(_JOURNALS)]
        run = self.workshop.live_run()
        if edit is None:
            return self._full_disk(name, run)
        run.reach("update")  # the step's rollouts are in the journal
        step, pids = run.last_step, run.pids
        start = time.monotonic()
        os.kill(run.roles["rank 0"][0], signal.SIGKILL)
        run.wait_end()
        wait_gone(pids, 60.0)
        entries = sorted((run.out / "journal").glob("step_*.jsonl"))
        source = entries[-2] if "before" in name else entries[-1]
        lines = edit(source.read_bytes().splitlines(keepends=True), rng)
        entries[-1].unlink()  # the run's record may be the same file
        entries[-1].write_bytes(b"".join(lines))
        lost, message = run.continue_to(step + 2, pids)
        return self._outcome(name, run, lost, message, start)

    def _full_disk(self, name: str, run: LiveRun) -> FaultOutcome:
        step, start = run.last_step + 2, time.monotonic()
        link = run.out / "journal" / f"step_{step:07d}.jsonl.partial"  # written first; the record is a link to it
        link.parent.mkdir(exist_ok=True)
        link.symlink_to("/dev/full")
        try:
            run.wait_for_row(step + 1)
        finally:
            link.unlink(missing_ok=True)
        return self._outcome(name, run, *run.continue_to(step + 1), start)

    def _outcome(self, name: str, run: LiveRun, lost: str, message: str, start: float) -> FaultOutcome:
        if lost := lost or differences(run.out, self.workshop.reference()):
            self.workshop.close()
            return FaultOutcome(f"the journal: {name}", "lost", lost)
        return FaultOutcome(f"the journal: {name}", "survived", message, time.monotonic() - start)


_SIZES = {
    "two tensor-parallel ranks, then two data-parallel ones": ("tp=2", "dp=2"),
    "one rank, then two tensor-parallel ones": ("tp=1", "tp=2"),
}
_OVERLAP_STEPS = 7


class _OtherSizes(FaultClass):
    """With overlap a step takes the groups that are done first, so there is no other run to compare with."""

    name = "sizes"
    title = "kill −9 of a live run with overlap, then --resume with another number of ranks: what was drawn is trained on"
    whole, quick = len(_SIZES), 0

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        name, (before, after) = list(_SIZES.items())[number % len(_SIZES)]
        common = (
            "train.schedule=overlap",
            "objective.mismatch.kind=truncate",
            "engine.parallel.sequence_parallel=false",
            "rollout.server.tp=1",
        )
        run = LiveRun(self.new_folder(number), _OVERLAP_STEPS, (*common, *_size(before)))
        start = time.monotonic()
        try:
            run.start()
            run.wait_for_row(2)
            run.reach("update")
            time.sleep(rng.uniform(0.5, 1.5))
            pids = run.pids
            os.kill(run.roles["parent"][0], signal.SIGKILL)
            run.wait_end()
            if left := wait_gone(pids, 120.0):
                return FaultOutcome(name, "lost", f"{len(left)} processes are left")
            entries = {path: path.read_bytes() for path in (run.out / "rollouts").glob("*.jsonl")}
            drawn = _groups_drawn(run.out / "journal/groups")
            run.overrides = (*common, *_size(after))
            run.start()
            if run.wait_end():
                return FaultOutcome(name, "lost", run.said())
        finally:
            run.stop()
        if changed := [path.name for path, content in entries.items() if path.read_bytes() != content]:
            return FaultOutcome(name, "lost", f"{changed[0]} of the records was drawn again")
        steps = [step for step in range(_OVERLAP_STEPS) if record_path(run.out / "rollouts", step).exists()]
        trained = {_tokens(item) for step in steps for item in Record.read(run.out / "rollouts", step).rollouts}
        if len(steps) < _OVERLAP_STEPS or not drawn <= trained:
            return FaultOutcome(
                name, "lost", f"{len(steps)} steps; of {len(drawn)} responses {len(drawn & trained)} were trained on"
            )
        message = f"{len(entries)} steps and {len(drawn)} more responses were taken as they were drawn"
        return FaultOutcome(name, "survived", message, time.monotonic() - start)


def _size(setting: str) -> tuple[str, ...]:
    return ("engine.parallel.tp=1", "engine.parallel.dp=1", f"engine.parallel.{setting}")


def _tokens(rollout: Rollout) -> tuple[str, tuple[int, ...]]:
    return rollout.problem_id, tuple(map(int, rollout.response_ids))


def _groups_drawn(folder: Path) -> set[tuple[str, tuple[int, ...]]]:
    result = set()
    for path in folder.glob("step_*.jsonl"):
        with suppress(ValueError):  # cut off by the kill
            group = Record.read(folder, int(path.stem.removeprefix("step_"))).rollouts
            if len(group) == 4 and all(item.finish_reason != UNFINISHED for item in group):
                result |= set(map(_tokens, group))
    return result


REPLAYED: tuple[type[FaultClass], ...] = (_Records,)
LIVE: tuple[type[FaultClass], ...] = (_OtherSizes, _Journals)

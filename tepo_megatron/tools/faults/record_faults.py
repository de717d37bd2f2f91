"""Edited files between two calls of a run: records, journals, metrics, checkpoints, a resume at another size."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from tepo_megatron.core.rollout import Rollout
from tepo_megatron.run.sampling.groups import UNFINISHED
from tepo_megatron.sampler.rollout_file import Record, record_path
from tepo_megatron.tools.faults.processes import wait_gone
from tepo_megatron.tools.faults.workshop import SAVED, STEPS, FaultClass, FaultOutcome, LiveRun, differences, replay

_Edit = Callable[[Path, random.Random], bytes]  # returns the file's new content
_Edits = dict[str, tuple[str, _Edit | None]]  # fault → (files, edit; None removes them)


def _values(shard: Path) -> range:
    data = shard.read_bytes()
    return range(8 + int.from_bytes(data[:8], "little"), len(data))


def _overwrite(path: Path, index: int, new: bytes) -> bytes:
    data = path.read_bytes()
    return data[:index] + new + data[index + len(new) :]


def _flip_a_bit(path: Path, rng: random.Random) -> bytes:
    data = bytearray(path.read_bytes())
    places = _values(path) if path.suffix == ".safetensors" else range(len(data))
    data[rng.choice(places)] ^= 1 << rng.randrange(8)
    return bytes(data)


def _cut_off(path: Path, rng: random.Random) -> bytes:
    data = path.read_bytes()
    return data[: rng.randrange(1, len(data) - 2)]


def _on_lines(change: Callable[[list[bytes]], list[bytes]]) -> _Edit:
    return lambda path, rng: b"".join(change(path.read_bytes().splitlines(keepends=True)))


def _change(key: str, value: Any, line: int = -1) -> _Edit:
    def edit(lines: list[bytes]) -> list[bytes]:
        lines[line] = json.dumps({**json.loads(lines[line]), key: value}).encode() + b"\n"
        return lines

    return _on_lines(edit)


def _on_state(change: Callable[[dict[str, Any]], object]) -> _Edit:
    def edit(path: Path, rng: random.Random) -> bytes:
        state = json.loads(path.read_text())
        change(state)
        return json.dumps(state, indent=2).encode() + b"\n"

    return edit


_last_line_twice = _on_lines(lambda lines: [*lines, lines[-1]])
_RECORD, _METRICS, _RESOLVED = str(record_path(Path("rollouts"), SAVED)), "out/metrics.jsonl", "out/resolved.yaml"
_EDITS: _Edits = {
    "the record: a reward changed": (_RECORD, _change("reward", 0.25)),
    "metrics.jsonl: cut off": (_METRICS, _cut_off),
    "the record: one bit flipped": (_RECORD, _flip_a_bit),
    "the record: cut off": (_RECORD, _cut_off),
    "the record: a line removed": (_RECORD, _on_lines(lambda lines: lines[:-1])),
    "the record: a line twice": (_RECORD, _last_line_twice),
    "the record: two lines exchanged": (_RECORD, _on_lines(lambda lines: [lines[0], lines[2], lines[1], *lines[3:]])),
    "the record: another step named": (_RECORD, _change("step", SAVED - 1, 0)),
    "the record: a reward that is no number": (_RECORD, _change("reward", float("nan"))),
    "the record: empty": (_RECORD, lambda path, rng: b""),
    "the record: removed": (_RECORD, None),
    "metrics.jsonl: a line twice": (_METRICS, _last_line_twice),
    "metrics.jsonl: a step that never was": (_METRICS, _on_lines(lambda lines: [*lines, b'{"step": 99}\n'])),
    "metrics.jsonl: a line that is no JSON": (_METRICS, _on_lines(lambda lines: [lines[0], b"\xff{\n", *lines[1:]])),
    "metrics.jsonl: empty": (_METRICS, lambda path, rng: b""),
    "resolved.yaml: cut off": (_RESOLVED, _cut_off),
    "resolved.yaml: empty": (_RESOLVED, lambda path, rng: b""),
    "run.lock: garbage": ("out/run.lock", lambda path, rng: rng.randbytes(40)),
    "status: garbage": ("out/status/*", lambda path, rng: rng.randbytes(40)),
}

_BEFORE, _NEWEST = (f"out/checkpoints/step_{step:06d}" for step in (SAVED - 1, SAVED))
_STATE, _SHARD = f"{_NEWEST}/state.json", f"{_NEWEST}/shards/*.safetensors"
_DAMAGES: _Edits = {
    "one bit of a shard flipped": (_SHARD, _flip_a_bit),
    "state.json names another step": (_STATE, _on_state(lambda state: state.update(step=SAVED - 1))),
    "a shard of the step before": (_SHARD, lambda path, rng: Path(str(path).replace(_NEWEST, _BEFORE)).read_bytes()),
    "state.json cut off": (_STATE, _cut_off),
    "a block of a shard zeroed": (_SHARD, lambda path, rng: _overwrite(path, rng.choice(_values(path)[:-4096]), bytes(4096))),
    "all data of a shard zeroed": (_SHARD, lambda path, rng: _overwrite(path, _values(path)[0], bytes(len(_values(path))))),
    "a shard cut off": (_SHARD, _cut_off),
    "a shard missing": (_SHARD, None),
    "the header of a shard overwritten": (
        _SHARD,
        lambda path, rng: _overwrite(path, rng.randrange(8, _values(path)[0] - 16), rng.randbytes(16)),
    ),
    "state.json counts other updates": (_STATE, _on_state(lambda state: state.update(updates=state["updates"] + 7))),
    "state.json lacks a key": (_STATE, _on_state(lambda state: state.pop("updates"))),
    "state.json missing": (_STATE, None),
}


class _EditedRun(FaultClass):
    edits: ClassVar[_Edits]
    reported: ClassVar[str]  # the first printed line that has it is reported
    may_lack: ClassVar[bool] = False  # if there is one, rows of metrics may be missing

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        base, folder = self.workshop.undisturbed(), self.new_folder(number)
        shutil.copytree(base / "saved", folder)
        rollouts = shutil.copytree(base / "rollouts", folder / "rollouts")
        name, (pattern, edit) = list(self.edits.items())[number]
        for path in sorted(folder.glob(pattern)) or [folder / pattern]:  # a run that ended has no run.lock
            path.unlink() if edit is None else path.write_bytes(edit(path, rng))
        start = time.monotonic()
        result = replay(folder, rollouts, STEPS, "train.allow_change=[rollout.replay]", resume=True)
        seconds = time.monotonic() - start
        if result.has_traceback:
            return FaultOutcome(name, "lost", f"a traceback: {result.said}")
        if result.code:
            return FaultOutcome(name, "refused", result.said)
        messages = [line.strip()[:300] for line in result.printed.splitlines() if self.reported in line]
        if wrong := differences(folder / "out", base / "whole/out", lacking=self.may_lack and bool(messages)):
            return FaultOutcome(name, "lost", f"resumed without a word: {wrong}")
        shutil.rmtree(folder, ignore_errors=True)
        return FaultOutcome(name, "survived", messages[0] if messages else "", seconds)


class _Records(_EditedRun):
    name = "records"
    title = "edited records of rollouts, metrics and other files of a run, then --resume"
    edits, reported, may_lack = _EDITS, "lacks the rows", True
    whole, quick = len(edits), 2  # the first two


class _CheckpointDamage(_EditedRun):
    name = "damage"
    title = "damage to the newest checkpoint, then --resume"
    edits, reported = _DAMAGES, "step_"
    whole, quick = len(edits), 2


_JOURNALS: dict[str, _Edit | None] = {
    "a full disk": None,
    "one bit flipped": _flip_a_bit,
    "cut off": _cut_off,
    "a reward changed": _change("reward", 0.25),
    "the entry of the step before": lambda path, rng: sorted(path.parent.glob("step_*.jsonl"))[-2].read_bytes(),
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
        entry = max((run.out / "journal").glob("step_*.jsonl"))
        content = edit(entry, rng)
        entry.unlink()  # the run's record may be the same file
        entry.write_bytes(content)
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


REPLAYED: tuple[type[FaultClass], ...] = (_Records, _CheckpointDamage)
LIVE: tuple[type[FaultClass], ...] = (_OtherSizes, _Journals)

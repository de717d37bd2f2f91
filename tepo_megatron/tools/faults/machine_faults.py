"""Faults of the machine below a run: disks that are full, stall or fail, memory that ends, clocks that jump."""

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tepo_megatron.runtime.files import write_atomically
from tepo_megatron.tools.faults.processes import descendants, end_tree, wait_gone, wait_until
from tepo_megatron.tools.faults.program import FOLDER
from tepo_megatron.tools.faults.workshop import (
    LONG,
    SAVED,
    FaultClass,
    FaultOutcome,
    RunEnd,
    last_step,
    replay,
    replay_command,
    start,
)
from tepo_megatron.tools.results import resident_bytes

_SIZES_KIB = {"save": 17_000, "export": 22_400, "log": 4}
"""A checkpoint takes 7.1 MiB, an export 2.3: two of three checkpoints fit, or all without the export."""
_STALL_S = 5.0
_FIRST_STEP_S = 600.0


def _root(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed ({done.stderr.strip()}); this fault needs root")
    return done.stdout.strip()


@contextmanager
def _mounted(folder: Path, *options: str | Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    _root("mount", *options, folder)
    retained = folder.with_name(folder.name + ".kept")
    try:
        yield
        shutil.copytree(folder, retained)
    finally:
        _root("umount", folder)
    folder.rmdir()
    retained.rename(folder)


@contextmanager
def _replaying(folder: Path, rollouts: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "log.txt").unlink(missing_ok=True)
    process = start(folder, replay_command(folder, rollouts, LONG), **environment)
    try:
        wait_until(lambda: last_step(folder / "out") > 1 or process.poll() is not None, _FIRST_STEP_S, "the second step")
        yield process
    finally:
        end_tree(process)


class _Disks(FaultClass):
    name = "disks"
    title = "the disk is full (at save, export, log), stalls, or fails and turns read-only"
    whole, quick = 5, 1

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        place = ("save", "export", "log", "stalls", "fails")[number % self.whole]
        folder = self.new_folder(number)
        if place in _SIZES_KIB:
            base, began = self.workshop.undisturbed(), time.monotonic()
            return self.outcome_of(f"full at {place}", folder, base, SAVED, self._full(place, folder, base / "rollouts"), began)
        base, began = self.workshop.long_replay(), time.monotonic()
        result = self._slow_or_broken(place, folder, base / "rollouts", rng)
        if place == "fails" and not result.code:
            return FaultOutcome(f"a disk that {place}", "lost", "the run ended as if nothing had happened")
        return self.outcome_of(f"a disk that {place}", folder, base, LONG, result, began)

    def _full(self, place: str, folder: Path, rollouts: Path) -> RunEnd:
        # TensorBoard's files for log; a link instead of metrics.jsonl would count as an existing run
        disk = folder / ("out/tensorboard" if place == "log" else "out")
        with _mounted(disk, "-t", "tmpfs", "-o", f"size={_SIZES_KIB[place]}k", "tmpfs"):
            if place == "log":
                (disk / "filler").write_bytes(bytes(4096))
            return replay(folder, rollouts, SAVED, *["log.tensorboard=true"] * (place == "log"))

    def _slow_or_broken(self, place: str, folder: Path, rollouts: Path, rng: random.Random) -> RunEnd:
        image, disk = self.folder / f"{place}.img", folder / "out"
        with image.open("wb") as file:
            file.truncate(64 * 2**20)
        _root("mkfs.ext4", "-q", "-F", image)
        with _mounted(disk, "-o", "loop,errors=remount-ro", image), _replaying(folder, rollouts) as process:
            time.sleep(rng.uniform(0.0, 0.5))
            if place == "stalls":
                _root("fsfreeze", "--freeze", disk)
                try:
                    time.sleep(_STALL_S)
                finally:
                    _root("fsfreeze", "--unfreeze", disk)
            else:
                device = Path(_root("findmnt", "--noheadings", "--output", "SOURCE", disk)).name
                Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("a fault that was injected")
            return RunEnd.of(process, folder)


_MEMORY_FILES = (
    (Path("/sys/fs/cgroup/memory"), "memory.usage_in_bytes", "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.current", "memory.max"),
)  # the root of groups, and a group's files of what it uses and may use


def _memory_files() -> tuple[Path, str, str] | None:
    for root, usage, limit in _MEMORY_FILES:
        probe = root / f"tepo-faults-probe-{os.getpid()}"
        with suppress(OSError):
            probe.mkdir()
            has_limit = (probe / limit).exists()
            probe.rmdir()
            if has_limit:
                return root, usage, limit
    return None


_HOG = """
import time
held = []
while True:
    held.append(bytearray(b'x') * 2**22)
    time.sleep(0.02)
"""


class _Memory(FaultClass):
    name = "memory"
    title = "a neighbour in a rank's memory group takes what is left, and the kernel kills the rank"
    whole, quick = 2, 1

    @classmethod
    def count(cls, *, quick: bool) -> int:
        return super().count(quick=quick) if _memory_files() else 0

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        base, folder = self.workshop.long_replay(), self.new_folder(number)
        began = time.monotonic()
        files = _memory_files()
        assert files is not None
        root, usage, limit = files
        group = root / f"tepo-faults-{os.getpid()}"
        group.mkdir()
        hog = None
        try:
            with _replaying(folder, base / "rollouts") as process:
                time.sleep(rng.uniform(0.0, 0.5))
                rank = max(descendants(process.pid), key=partial(resident_bytes, "VmRSS"))
                (group / "cgroup.procs").write_text(str(rank))
                Path(f"/proc/{rank}/oom_score_adj").write_text("1000")  # the kernel ends it before the neighbour
                (group / limit).write_text(str(int((group / usage).read_text()) + 2**27))
                command = ["sh", "-c", f'echo $$ > "{group}/cgroup.procs"; exec "$0" -c "$1"', sys.executable, _HOG]
                hog = subprocess.Popen(command)
                wait_gone([rank], 60.0)
                hog.kill()
                result = RunEnd.of(process, folder)
        finally:
            if hog is not None:
                hog.kill()
                hog.wait()
            wait_until(lambda: not (group / "cgroup.procs").read_text(), 60.0, f"the end of the processes in {group}")
            group.rmdir()
        if not result.code:
            raise RuntimeError("no process of the run was killed")
        return self.outcome_of(f"no memory left, {number + 1}", folder, base, LONG, result, began)


_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long offset(void) {
    char path[4096]; long seconds = 0; FILE *file;
    const char *folder = getenv("TEPO_FAULTS_FOLDER");
    if (!folder) return 0;
    snprintf(path, sizeof path, "%s/clock", folder);
    if ((file = fopen(path, "r"))) { if (fscanf(file, "%ld", &seconds) != 1) seconds = 0; fclose(file); }
    return seconds;
}
int clock_gettime(clockid_t id, struct timespec *value) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, value);
    if (!result && id == CLOCK_REALTIME) value->tv_sec += offset();
    return result;
}
int gettimeofday(struct timeval *value, void *zone) {
    struct timespec now; clock_gettime(CLOCK_REALTIME, &now);
    value->tv_sec = now.tv_sec; value->tv_usec = now.tv_nsec / 1000; return 0;
}
time_t time(time_t *result) {
    struct timespec now; clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
"""
_DAY = 86_400
CLOCKS: dict[str, Callable[[random.Random], list[int]]] = {
    "a day back": lambda rng: [-_DAY],
    "a day ahead": lambda rng: [_DAY],
    "to 1970": lambda rng: [-int(time.time())],
    "to and fro": lambda rng: [rng.randrange(-_DAY, _DAY) for _ in range(20)],
}


class _Clocks(FaultClass):
    name = "clocks"
    title = "the clock of the day jumps between two steps"
    whole, quick = len(CLOCKS), 1

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        name, jumps = list(CLOCKS.items())[number % len(CLOCKS)]
        base, folder = self.workshop.long_replay(), self.new_folder(number)
        library = self.folder / "clock.so"
        if not library.exists():
            (self.folder / "clock.c").write_text(_CLOCK)
            subprocess.run(["cc", "-shared", "-fPIC", "-o", library, self.folder / "clock.c", "-ldl"], check=True)
        began = time.monotonic()
        with _replaying(folder, base / "rollouts", LD_PRELOAD=str(library)) as process:
            for seconds in jumps(rng):
                write_atomically(folder / "clock", str(seconds))
                environment = {FOLDER: str(folder), "LD_PRELOAD": str(library)}
                now = subprocess.check_output([sys.executable, "-c", "import time; print(time.time())"], env=environment)
                if abs(float(now) - time.time() - seconds) > _DAY / 24:
                    raise RuntimeError("the clock did not jump")
            result = RunEnd.of(process, folder)
        return self.outcome_of(f"the clock jumps {name}", folder, base, LONG, result, began)


FAULTS: tuple[type[FaultClass], ...] = (_Disks, _Memory, _Clocks)

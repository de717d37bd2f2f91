"""Malformed configurations: accepted where they are valid after all, else answered in a sentence, soon and in little memory."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tepo_megatron.config.loading.load import load_run
from tepo_megatron.errors import is_ours
from tepo_megatron.tools.faults.malformed_configs import MalformedConfig, malformed_configs
from tepo_megatron.tools.faults.outcome import FaultClass, Outcome

LIMIT_S = 20
MEMORY_BYTES = 2 * 2**30
"""Beyond what the process has when it begins."""


class MalformedConfigs(FaultClass):
    """Each is read in a process of its own, a fork of this one, with limits on time and memory."""

    name = "configs"
    title = "malformed configurations"
    whole, quick = 200, 30

    def inject(self, number: int, rng: random.Random) -> Outcome:
        *_, given = malformed_configs(number + 1, rng.randrange(2**31))  # its kinds take turns
        path = self.folder / "given.yaml"
        path.write_bytes(given.text)
        name = f"{given.kind}: {list(given.overrides) or _begin(given)}"
        before = sorted(self.folder.iterdir())
        answer = _in_a_fork(path, given.overrides)
        made = [each.name for each in sorted(self.folder.iterdir()) if each not in before]
        if made:
            return Outcome(name, "lost", f"reading it made files: {made}")
        if answer is None:
            return Outcome(name, "lost", f"no answer within {LIMIT_S} s of processor time and {MEMORY_BYTES / 2**30:g} GiB")
        kind, said = answer
        if kind == "raised":
            return Outcome(name, "lost", said)
        return Outcome(name, "refused" if kind == "refused" else "survived", said)


def _begin(given: MalformedConfig) -> str:
    return given.text[:60].decode(errors="replace")


def _in_a_fork(path: Path, overrides: Sequence[str]) -> list[str] | None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_read, args=(answers, path, overrides))
    child.start()
    child.join(10 * LIMIT_S)  # of the clock: the machine may be busy with other things
    if child.is_alive():
        child.kill()
    child.join()
    return None if answers.empty() else json.loads(answers.get())


def _read(answers: Any, path: Path, overrides: Sequence[str]) -> None:
    os.chdir(path.parent)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    warnings.simplefilter("ignore")
    try:
        load_run(path, overrides)
        answers.put(json.dumps(["accepted", ""]))
    except Exception as error:  # what it is, is the answer
        said = str(error).replace("\n", " ")[:300]
        if is_ours(error):
            answers.put(json.dumps(["refused", said]))
        else:
            last = traceback.extract_tb(error.__traceback__)[-1]
            answers.put(json.dumps(["raised", f"{type(error).__name__} at {last.name}, line {last.lineno}: {said}"]))

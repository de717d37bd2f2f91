"""A ten-second run on one rank without servers, on rollouts made here; for faults of files."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.sampler.rollout_file import write_rollouts
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.tasks.addition import supervised_examples
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tepo_megatron.tools.faults import tiny
from tepo_megatron.tools.faults.live_run import PATIENCE_S, last_sentence

PROMPTS, SAMPLES = 4, 4
SAVED, STEPS = 3, 4
"""Last steps of the two undisturbed runs; the second resumes the first."""


@dataclass(frozen=True)
class ReplayEnd:
    code: int
    printed: str

    @property
    def said(self) -> str:
        return last_sentence(self.printed)

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.printed


def make_rollouts(folder: Path, steps: int) -> Path:
    """Some solutions have an error and no reward."""
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny"))
    rng = random.Random(0)
    for step in range(steps):
        examples = iter(supervised_examples(PROMPTS * SAMPLES, 0.5, seed=step))
        rollouts = []
        for group in range(PROMPTS):
            pairs = [next(examples) for _ in range(SAMPLES)]
            prompt = pairs[0][0]
            for _, response in pairs:
                ids = (*tokenizer.encode(response), tokenizer.eos_ids[0])
                rollouts.append(
                    Rollout(
                        problem_id=prompt.removesuffix("="),
                        group=group,
                        prompt_ids=tuple(tokenizer.prompt_ids(prompt)),
                        response_ids=ids,
                        sampler_logprobs=tuple(-rng.random() for _ in ids),
                        finish_reason="stop",
                        versions=WeightsVersion(step),
                        text=response,
                        reward=float(rng.random() < 0.5),
                    )
                )
        write_rollouts(folder, step, rollouts)
    return folder


def train(
    folder: Path,
    rollouts: Path,
    steps: int,
    *overrides: str,
    resume: bool = False,
    environment: Mapping[str, str] | None = None,
) -> ReplayEnd:
    folder.mkdir(parents=True, exist_ok=True)
    given = [f"output={folder / 'out'}", f"rollout.replay={rollouts}", f"train.steps={steps}", *overrides]
    return tepo(
        "train", str(tiny.write_run(folder)), *tiny.REPLAYED, *given, *(["--resume"] if resume else []), environment=environment
    )


def undisturbed(folder: Path) -> Path:
    """A folder with ``rollouts``, a run of 3 steps in ``saved``, and that run continued to step 4 in ``whole``; made if
    missing. Raises RuntimeError."""
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        rollouts = make_rollouts(folder / "rollouts", STEPS)
        for name, steps in (("saved", SAVED), ("whole", STEPS)):
            if name == "whole":
                shutil.copytree(folder / "saved", folder / "whole")
            ended = train(folder / name, rollouts, steps, resume=name == "whole")
            if ended.code:
                raise RuntimeError(f"the run that is not disturbed ended with {ended.said}")
        (folder / "done").touch()
    return folder


def tepo(*arguments: str, environment: Mapping[str, str] | None = None) -> ReplayEnd:
    done = subprocess.run(
        [sys.executable, "-m", "tepo_megatron", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        timeout=PATIENCE_S,
        start_new_session=True,
        check=False,
    )
    return ReplayEnd(done.returncode, done.stdout.decode(errors="replace"))

"""Compares the formula for parameters with the real Megatron model, counted in a process of its own that imports torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

from tepo_megatron.plan.run_plan import Plan


def check_exact(plan: Plan) -> list[list[int]]:
    """Returns the parameters of every rank as Megatron builds it, ``[pp_rank][tp_rank]``; ten seconds for a 70B model.

    Raises RuntimeError if Megatron cannot be run here, or if a count differs from the formula, with the rank and both counts.
    """
    parallel = plan.config.engine.parallel
    request = {"spec": asdict(plan.spec), "parallel": parallel.model_dump()}
    done = subprocess.run(
        [sys.executable, "-m", "tepo_megatron.trainer.megatron.parameter_count"],
        input=json.dumps(request),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(
            f"--exact builds the model with Megatron-Core, which failed here ({why}); run it in the trainer's environment, or "
            "leave --exact out"
        )
    counts: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    for pp_rank, (expected, row) in enumerate(zip(plan.stage_parameters, counts, strict=True)):
        for tp_rank, count in enumerate(row):
            if count != expected:
                raise RuntimeError(
                    f"Megatron builds {count:,} parameters on tp rank {tp_rank} of pipeline stage {pp_rank}, but the "
                    f"formula of this plan says {expected:,}; report this: the plan's memory is off by as much"
                )
    return counts

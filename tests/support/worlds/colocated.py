"""One rank of a run whose servers are driven as on the trainer's GPUs, where there are none: colocated OVERRIDE…

The trainer's storages are really offloaded and onloaded. vLLM's server sleeps and wakes, which moves no memory on a CPU.
"""

import sys
from pathlib import Path

from tepo_megatron.config.load import load_run
from tepo_megatron.run.api import run_rank
from tepo_megatron.run.step.placement import Placement
from tepo_megatron.run.training import train_model
from tepo_megatron.sampler.vllm.server import Server

RUN = Path(__file__).parents[3] / "examples" / "tiny" / "run.yaml"
command = Server.command


def without_sleep_mode(server: Server, *, on_gpu: bool) -> list[str]:
    """vLLM refuses the option on a CPU, and has the routes without it."""
    return [part for part in command(server, on_gpu=on_gpu) if part != "--enable-sleep-mode"]


if __name__ == "__main__":
    Placement._check_colocated = lambda *_: None  # type: ignore[method-assign] # it refuses them on a CPU
    Server.command = without_sleep_mode  # type: ignore[method-assign,assignment]
    sys.exit(run_rank(load_run(RUN, sys.argv[1:]), train_model))

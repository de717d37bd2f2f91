"""One rank of a run, in a world that is there at once: train [YAML] OVERRIDE… What rank 0 prints is in OUTPUT/printed.txt."""

import os
import sys

from tepo_megatron.config.load import load_run
from tepo_megatron.run.api import run_rank
from tepo_megatron.run.training import train_model


def main() -> None:
    words = sys.argv[1:]
    file = words.pop(0) if words[0].endswith(".yaml") else None
    config = load_run(file, words)
    if os.environ["RANK"] == "0":
        config.output.mkdir(parents=True, exist_ok=True)
        printed = os.open(config.output / "printed.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(printed, 1)
    code = run_rank(config, train_model)
    if code:
        sys.exit(code)

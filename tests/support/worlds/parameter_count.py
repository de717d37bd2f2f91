"""Parameters as Megatron builds them: REQUEST.json COUNTS.json."""

import contextlib
import sys
from pathlib import Path

from tepo_megatron.trainer.megatron.model import parameter_count


def main() -> None:
    request, counts = map(Path, sys.argv[1:])
    with request.open() as sys.stdin, counts.open("w") as file, contextlib.redirect_stdout(file):
        parameter_count.main()

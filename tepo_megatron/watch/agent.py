"""``python -m tepo_megatron.watch.agent STATUS …``: the ``torchrun`` command with the arguments …, and a watch over the ranks
of this node, whose heartbeats are in the folder STATUS. For jobs that start an agent on each node.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tepo_megatron.watch.watcher import watching


def main(arguments: Sequence[str]) -> None:
    """Returns when the ranks have ended well; what torchrun raises otherwise passes through."""
    from torch.distributed import run as torchrun

    status, *rest = arguments
    with watching(Path(status), _say):
        torchrun.main(rest)


def _say(sentence: str) -> None:
    sys.stderr.write(f"error: {sentence}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main(sys.argv[1:])

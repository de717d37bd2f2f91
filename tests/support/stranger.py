"""What another user of this machine tries at the ports and files of a run."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tepo_megatron.tools.faults.strangers import _overwrite_stores, _pickle_that_makes, as_stranger
from tests.support.programs import TIMEOUT_S

T = TypeVar("T")


def ask(work: Callable[..., T], *arguments: object) -> T:
    """What the other user finds out, as JSON. Without root, which alone can become another user, the test is skipped."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    return as_stranger(work, *arguments, limit_s=TIMEOUT_S)


def poison_stores(proof: Path, *ports: int) -> list[str]:
    """Writes a pickle that makes the file ``proof`` over everything in the stores at these ports; returns the keys."""
    return [key for _, key in ask(_overwrite_stores, _pickle_that_makes(proof), ports)]

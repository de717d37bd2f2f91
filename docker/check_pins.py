"""Run in an image that was just built: what is installed must be what docker/pins.txt says, for the packages that are named."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path


def differences(pins: str, names: list[str]) -> list[str]:
    """Returns a line for each named package that is not installed as pinned. Raises KeyError for one without a pin."""
    wanted = dict(line.split("==") for line in pins.split("\n") if "==" in line and not line.startswith("#"))
    found = []
    for name in names:
        try:
            installed = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            installed = "not installed"
        if installed != wanted[name]:
            found.append(f"{name} is {installed}, and docker/pins.txt says {wanted[name]}")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(differences(Path(__file__).with_name("pins.txt").read_text(), sys.argv[1:])) or None)

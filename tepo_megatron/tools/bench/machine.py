"""Describes the machine that a measurement was taken on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe_machine() -> str:
    """Returns cores, processor and load as text."""
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return f"{os.cpu_count()} × {cpu}, load average {os.getloadavg()[0]:.1f}"

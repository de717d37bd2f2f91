"""The sweeps in C++, one pass each, for CPU: compiled on first use, several times faster than `sweep`.

``sweep.cpp`` is compiled for this machine's processor by ``c++`` (or the compiler that ``CXX`` names) and kept below the user's cache
folder, under a name that changes with the source, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.vocab_parallel import sweep
from tepo_megatron.vocab_parallel.combine import EMPTY_MAX, RowScores
from tepo_megatron.vocab_parallel.shard import LocalLabels

_LOG2_E = math.log2(math.e)
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_FLAGS = ("-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-shared", "-fPIC")


def forward(logits_TV: Tensor, rows_R: Tensor | None, temperature: float, stats_R4: Tensor) -> None:
    """As `sweep.forward`; fp64 logits are handed to it."""
    if logits_TV.dtype not in _NAMES:
        return sweep.forward(logits_TV, rows_R, temperature, stats_R4)
    call = _function("forward", logits_TV)
    logits_TV = _rows_contiguous(logits_TV)

    def part(first: int, last: int) -> None:
        rows = _rows(rows_R, first)
        call(
            _address(logits_TV, 0 if rows_R is not None else first),
            logits_TV.stride(0),
            rows,
            last - first,
            logits_TV.shape[1],
            _LOG2_E / temperature,
            EMPTY_MAX,
            _address(stats_R4, first),
        )

    _in_parts(stats_R4.shape[0], part)
    stats_R4[:, 2] /= _LOG2_E

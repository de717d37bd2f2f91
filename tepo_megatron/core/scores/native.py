"""Sweeps on a CPU in C++, compiled on first use into the user's cache folder."""

import ctypes
import fcntl
import functools
import hashlib
import itertools
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from tepo_megatron.core.scores import torch_sweep as sweep
from tepo_megatron.core.scores.shard import EMPTY_MAX, LOG2_E, Gradients, Logits, RowScores, Scoring, mapped

_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# No -ffast-math: it would allow the compiler to assume that there is no NaN, and `combine` looks for one.
_FLAGS = ["-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-shared", "-fPIC"]
if platform.machine() == "x86_64":
    _FLAGS.append("-mprefer-vector-width=512")  # where there are such registers, compilers would still take half of them
_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ROWS = (_POINTER, _SIZE, _POINTER, _SIZE, _SIZE, _FLOAT)
_FORWARD = (*_ROWS, _FLOAT, _POINTER, _SIZE, _POINTER, _SIZE, _SIZE, _SIZE)
_MIXTURE = (*_ROWS, _POINTER, _SIZE, _FLOAT, *(_POINTER,) * 5)
_BACKWARD = (*_ROWS, *(_POINTER,) * 6, _SIZE, _SIZE, _POINTER, _SIZE, *(_POINTER,) * 4)


def forward(logits: Logits, scoring: Scoring, stats_RK: Tensor) -> None:
    if logits.student.dtype not in _NAMES:
        return sweep.forward(logits, scoring, stats_RK)
    logits_TV, teacher_TV = mapped(logits, _in_rows)

    def rest(index: slice) -> tuple[float | None, ...]:
        out_RK = stats_RK[index]
        teacher = _place(teacher_TV, scoring.rows_R, index)
        return EMPTY_MAX, out_RK.data_ptr(), out_RK.shape[1], *teacher, scoring.entropy_slope, scoring.kind

    _call(f"forward_{_NAMES[logits_TV.dtype]}", _FORWARD, logits_TV, scoring, rest)
    stats_RK[:, 2] /= LOG2_E  # the C++ has t in units of log 2
    if scoring.entropy_slope:
        stats_RK[:, 5] /= LOG2_E
    if scoring.kind:
        stats_RK[:, -1] /= LOG2_E


def mixture(logits: Logits, scoring: Scoring, scores: RowScores, sums_R2: Tensor) -> None:
    if logits.student.dtype not in _NAMES:
        return sweep.mixture(logits, scoring, scores, sums_R2)
    assert scoring.divergence is not None
    assert scores.teacher_max_R is not None
    assert scores.teacher_log_sum_R is not None
    (logits_TV, teacher_TV), beta = mapped(logits, _in_rows), scoring.divergence.beta
    rows = [scores.max_R, scores.log_sum_R * LOG2_E, scores.teacher_max_R, scores.teacher_log_sum_R * LOG2_E, sums_R2]

    def rest(index: slice) -> tuple[float | None, ...]:
        return *_place(teacher_TV, scoring.rows_R, index), beta, *(values_R[index].data_ptr() for values_R in rows)

    _call(f"mixture_{_NAMES[logits_TV.dtype]}", _MIXTURE, logits_TV, scoring, rest)
    sums_R2 /= LOG2_E


def backward(logits: Logits, scoring: Scoring, scores: RowScores, gradients: Gradients, out_TV: Tensor) -> None:
    if logits.student.dtype not in _NAMES:
        return sweep.backward(logits, scoring, scores, gradients, out_TV)
    if out_TV.shape[1] > 1 and out_TV.stride(1) != 1:  # a copy, since rows without a score stay as they are
        in_rows_TV = out_TV.clone(memory_format=torch.contiguous_format)
        backward(logits, scoring, scores, gradients, in_rows_TV)
        out_TV.copy_(in_rows_TV)
        return None
    logits_TV, teacher_TV = mapped(logits, _in_rows)
    temperature, labels = scoring.temperature, scoring.labels
    grad_logprob_R, grad_entropy_R = (torch.zeros_like(scores.logprob_R) if grad is None else grad for grad in gradients[:2])
    scale_R = (-scores.log_sum_R).exp() / temperature  # of `sweep.backward`, as are the terms below
    constant_R = -scale_R * (grad_logprob_R + grad_entropy_R * (scores.entropy_R - scores.log_sum_R))
    at_label_R = grad_logprob_R * labels.inside_R / temperature
    slope_R, kind, further = -grad_entropy_R * scale_R / LOG2_E, 0, [scale_R] * 4  # the last are not read without a teacher
    if gradients.divergence is None or scoring.divergence is None:
        teacher_TV = None
    elif teacher_TV is not None:
        terms = sweep.teacher_terms(scoring, scores, gradients.divergence)
        constant_R, slope_R, further = constant_R + terms[0], slope_R + terms[1], list(terms[2:])
        kind = scoring.kind
    per_row = [scores.max_R, constant_R, slope_R, labels.column_R, at_label_R]
    per_row = [values_R.contiguous() for values_R in per_row]

    def rest(index: slice) -> tuple[float | None, ...]:
        target_TV, _ = _part_of(out_TV, scoring.rows_R, index)
        student = *(values_R[index].data_ptr() for values_R in per_row), target_TV.data_ptr(), target_TV.stride(0)
        teacher = *_place(teacher_TV, scoring.rows_R, index), *(values_R[index].data_ptr() for values_R in further)
        return *student, kind, *teacher

    _call(f"backward_{_NAMES[logits_TV.dtype]}_{_NAMES[out_TV.dtype]}", _BACKWARD, logits_TV, scoring, rest)


def _call(
    name: str, types: tuple[type, ...], logits_TV: Tensor, scoring: Scoring, rest: Callable[[slice], tuple[float | None, ...]]
) -> None:
    function = getattr(library(), name)
    function.argtypes, function.restype = types, None

    def part(index: slice) -> None:
        base_TV, rows = _part_of(logits_TV, scoring.rows_R, index)
        size = index.stop - index.start, logits_TV.shape[1]
        function(base_TV.data_ptr(), base_TV.stride(0), rows, *size, LOG2_E / scoring.temperature, *rest(index))

    threads = min(torch.get_num_threads(), max(scoring.count, 1))
    cuts = [scoring.count * number // threads for number in range(threads + 1)]
    parts = [slice(first, last) for first, last in itertools.pairwise(cuts)]
    if threads == 1:
        part(parts[0])
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(part, parts))


def _in_rows(values_TV: Tensor) -> Tensor:
    return values_TV if values_TV.stride(1) == 1 else values_TV.contiguous()


def _place(teacher_TV: Tensor | None, rows_R: Tensor | None, index: slice) -> tuple[int | None, int]:
    if teacher_TV is None:
        return None, 0
    base_TV, _ = _part_of(teacher_TV, rows_R, index)
    return base_TV.data_ptr(), base_TV.stride(0)


def _part_of(values_TV: Tensor, rows_R: Tensor | None, index: slice) -> tuple[Tensor, int | None]:
    return (values_TV[index], None) if rows_R is None else (values_TV, rows_R[index].data_ptr())


@functools.cache
def library() -> ctypes.CDLL:
    source = Path(__file__).with_name("sweep.cpp")
    compiler = os.environ.get("CXX", "c++")
    target = _run([compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])  # names compiler and processor
    digest = hashlib.sha256("\0".join([source.read_text(), target, *_FLAGS]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tepo_megatron"
    library = cache / f"sweep-{digest}.so"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_others(cache)
        if not library.exists():
            _build([compiler, *_FLAGS, str(source)], library)
        _refuse_others(library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise RuntimeError(
            f"backend = 'cpp' cannot be kept in {cache} or loaded from it: {error}; set XDG_CACHE_HOME to a folder that takes "
            "files and runs them, or use backend = 'torch'"
        ) from error


def _refuse_others(path: Path) -> None:
    result = path.stat()
    if result.st_uid != os.geteuid() or result.st_mode & 0o022:
        raise RuntimeError(
            f"backend = 'cpp' would load code from {path}, which belongs to another user or which others may write to; "
            "remove it, or set XDG_CACHE_HOME to a folder of yours, or use backend = 'torch'"
        )


def _build(command: list[str], library: Path) -> None:
    with (library.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            built = Path(scratch) / library.name
            _run([*command, "-o", str(built)])
            built.chmod(0o700)
            built.replace(library)  # in one move: whoever does not lock sees all of it or nothing


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        why = error.stderr.strip()[-500:] if isinstance(error, subprocess.CalledProcessError) else error.strerror
        raise RuntimeError(
            f"backend = 'cpp' cannot be compiled: {' '.join(command[:2])} …: {why}; install a C++ compiler, name one in CXX, "
            "or use backend = 'torch'"
        ) from error

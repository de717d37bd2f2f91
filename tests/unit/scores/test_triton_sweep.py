"""Triton's kernels where there is no GPU: their values in the interpreter, their compilation for GPUs, who gets them."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tepo_megatron.core.scores import logprob_and_entropy
from tepo_megatron.core.scores.backend import get_backend
from tepo_megatron.core.scores.torch_sweep import RowSweeps

CUDA = torch.device("cuda")


@pytest.mark.slow
def test_values_in_the_interpreter():
    """Everything in triton_interpreted.py, in a process of its own: Triton looks at TRITON_INTERPRET when it is imported."""
    pytest.importorskip("triton", reason="Triton is not installed (scripts/test.sh installs it)")
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "pytest", "-q", str(root / "tests" / "support" / "triton_interpreted.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout


POINTERS = {
    "statistics": {"rows": "*i64", "label_columns": "*i64", "labels_inside": "*i1", "parts": "*fp32"},
    "gradient": {
        **{"numbers": "*i32", "label_columns": "*i64", "labels_inside": "*i1", "maxima": "*fp32", "log_sums": "*fp32"},
        **{"entropies": "*fp32", "grad_logprob": "*fp32", "grad_entropy": "*fp32"},
    },
}


def _compile(name, dtype, capability, threads, fixed, *, multiples):
    """PTX of a kernel, specialised as Triton does it at a launch: integers that are 1, multiples of 16, absent tensors."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from tepo_megatron.core.scores import triton_kernels

    kernel = getattr(triton_kernels, f"{name}_kernel")
    vector = 4 if dtype == "fp32" else 8
    constants = {**fixed, "VECTORS": 16 // vector, "THREADS": threads, "VECTOR": vector}
    types = {"logits": f"*{dtype}", "out": f"*{dtype}", "to_log2": "fp32", "per_temperature": "fp32", **POINTERS[name]}
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names}
    index = {(kernel.arg_names.index(arg),): arg for arg in signature}
    attributes = {at: [["tt.divisibility", 16]] for at, arg in index.items() if arg in multiples}
    source = ASTSource(kernel, signature, {at: constants[arg] for at, arg in index.items() if arg in constants}, attributes)
    return compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": threads // 32})


ALIGNED = {"logits", "out", "row_stride", "out_row_stride", "width", "span"}


@pytest.mark.parametrize(
    ("name", "dtype", "capability", "threads", "fixed"),
    [
        ("statistics", "bf16", 90, 256, {"STATISTICS": 4}),
        ("statistics", "bf16", 90, 256, {"STATISTICS": 6}),
        ("statistics", "fp32", 80, 128, {"STATISTICS": 4, "rows": None}),
        ("gradient", "bf16", 90, 256, {}),
        ("gradient", "fp16", 80, 128, {"numbers": None, "grad_entropy": None}),
        ("gradient", "fp32", 90, 128, {"grad_logprob": None}),
    ],
)
def test_compiles_to_loads_of_16_bytes(name, dtype, capability, threads, fixed, tmp_path, monkeypatch):
    """For Ampere and Hopper, through machine code. The true vocabulary is no multiple of anything, the shard's width is."""
    pytest.importorskip("triton", reason="Triton is not installed (scripts/test.sh installs it)")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    strides = {"column_stride": 1} if name == "statistics" else {"column_stride": 1, "out_column_stride": 1}
    compiled = _compile(name, dtype, capability, threads, strides | fixed, multiples=ALIGNED)
    ptx = compiled.asm["ptx"]
    vectors = 2 if dtype != "fp32" else 4  # of a thread, in the loop and once more in the last tile
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 2 * vectors
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == (0 if name == "statistics" else 3 * vectors)
    assert compiled.asm["cubin"]
    assert not re.search(r"(ld|st)\.local", ptx)


@pytest.mark.parametrize("name", ["statistics", "gradient"])
def test_compiles_for_one_row_of_one_column_and_any_stride(name, tmp_path, monkeypatch):
    """Triton makes a constant of every integer that is 1; nothing here is a multiple of 16."""
    pytest.importorskip("triton", reason="Triton is not installed (scripts/test.sh installs it)")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fixed = {"columns": 1, "width": 1, "row_stride": 1} | ({"STATISTICS": 4} if name == "statistics" else {})
    assert _compile(name, "bf16", 90, 128, fixed, multiples=set()).asm["cubin"]


def test_who_gets_triton(monkeypatch):
    """``auto``: GPUs, where it is installed."""
    pytest.importorskip("triton", reason="Triton is not installed (scripts/test.sh installs it)")
    from tepo_megatron.core.scores import triton_sweep

    assert get_backend("auto", CUDA) is triton_sweep
    assert isinstance(get_backend("auto", torch.device("cpu")), RowSweeps)
    assert isinstance(get_backend("torch", CUDA), RowSweeps)
    with pytest.raises(ValueError, match="for logits on a GPU, these are on cpu"):
        logprob_and_entropy(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), backend="triton")


def test_without_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert get_backend("auto", CUDA) is get_backend("torch", CUDA)
    with pytest.raises(ValueError, match="triton is not installed; install it"):
        get_backend("triton", CUDA)

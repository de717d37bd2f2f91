"""The C++ sweep and Triton's kernels: who gets them, how they are compiled, and their values where there is no GPU."""

import ctypes
import importlib.util
import logging
import re
import shutil
import stat
from pathlib import Path

import pytest
import torch

from tepo_megatron.core.scores import backend, logprob_and_entropy, native
from tepo_megatron.core.scores.backend import get_backend
from tepo_megatron.core.scores.torch_sweep import RowSweeps
from tests.support.dense_scores import BACKENDS
from tests.support.processes import python_programs
from tests.support.programs import TIMEOUT_S, run_python

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CACHED = (native.library, backend._fastest_on_cpu)
needs_compiler = pytest.mark.skipif("cpp" not in BACKENDS, reason="no C++ compiler")
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton (scripts/test.sh installs it)")


@pytest.fixture(autouse=True)
def nothing_remembered():
    for function in CACHED:
        function.cache_clear()
    yield
    for function in CACHED:
        function.cache_clear()


@needs_compiler
def test_auto_takes_it_on_a_cpu():
    assert get_backend("auto", CPU) is get_backend("cpp", CPU)
    logits, labels = torch.randn(20, 301), torch.arange(20)
    auto, cpp = (logprob_and_entropy(logits, labels, backend=name) for name in ("auto", "cpp"))
    assert torch.equal(auto.entropy, cpp.entropy)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton"])
def test_logits_in_columns_have_the_gradient_of_those_in_rows(backend, inplace):
    logits, labels, mask = torch.randn(17, 301), torch.arange(17), torch.arange(17) % 3 > 0
    gradients = []
    for values in (logits, logits.t().contiguous().t()):
        leaf = values.detach().requires_grad_()
        scores = logprob_and_entropy(leaf * 1, labels, mask_T=mask, backend=backend, inplace_backward=inplace)
        (scores.logprob.sum() + scores.entropy.sum()).backward()
        gradients.append(leaf.grad)
    assert gradients[1].stride() == (1, 17)
    assert torch.equal(*gradients)


def assert_refused_and_auto_is_torch(message):
    with pytest.raises(RuntimeError, match=message):
        logprob_and_entropy(torch.zeros(1, 2), torch.tensor([0]), backend="cpp")
    for _ in range(3):
        assert get_backend("auto", CPU) is get_backend("torch", CPU)


def test_a_missing_compiler_is_named_and_auto_is_then_torch_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert_refused_and_auto_is_torch(r"install a C\+\+ compiler, name one in CXX, or use backend = 'torch'")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "scores are computed in torch" in record.getMessage()
    assert "no-such-compiler" in record.getMessage()


@needs_compiler
def test_a_cache_that_takes_no_files_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert_refused_and_auto_is_torch("set XDG_CACHE_HOME to a folder that takes files")


@needs_compiler
@pytest.mark.parametrize("shared", ["tepo_megatron", "tepo_megatron/library"])
def test_a_library_that_others_could_have_put_there_is_not_loaded(monkeypatch, tmp_path, shared):
    """The folder, or the file in it, may be written by others."""
    monkeypatch.setattr(ctypes, "CDLL", lambda path: pytest.fail(f"{path} was loaded"))
    monkeypatch.setattr(native, "_build", lambda command, library: library.write_text("another's code"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "tepo_megatron").mkdir(mode=0o700)
    if shared == "tepo_megatron":
        (tmp_path / shared).chmod(0o777)
    else:
        monkeypatch.setattr(native, "_build", lambda command, library: (library.touch(), library.chmod(0o666)))
    assert_refused_and_auto_is_torch("belongs to another user or which others may write to; remove it")


@needs_compiler
@pytest.mark.slow
def test_many_processes_compile_it_once(tmp_path):
    """All start without it; one compiles, the others wait for it, and nothing else is left in the cache."""
    wrapper, calls = tmp_path / "compiler", tmp_path / "calls"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *.cpp*) echo . >> {calls}; sleep 0.3;; esac\nexec {shutil.which("c++")} "$@"\n'
    )
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    code = "from tepo_megatron.core.scores import native; native.library().forward_float32"
    with python_programs({"CXX": str(wrapper), "XDG_CACHE_HOME": str(tmp_path / "cache")}, forks=True) as start:
        started = [start("-c", code) for _ in range(4)]
        assert [(process.communicate(TIMEOUT_S), process.returncode) for process in started] == [(("", ""), 0)] * 4
    assert calls.read_text().split() == ["."]
    kept = sorted(path.suffix for path in (tmp_path / "cache" / "tepo_megatron").iterdir())
    assert kept == ["", ".so"]


@needs_triton
@pytest.mark.slow
def test_values_in_the_interpreter():
    """In a process of its own: Triton looks at TRITON_INTERPRET when it is imported. Of the tests of all backends, the narrow
    ones.
    """
    root = Path(__file__).parents[3]
    tested = (Path(__file__).with_name(f"test_{name}.py") for name in ("divergence", "logprob_and_entropy"))
    names = "oracle or underflow or without_weight or tie or in_chunks or overwritten"
    chosen = f"triton_interpreted or triton and ({names}) and not 0.05"
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ("-q", "--hypothesis-profile=interpreter", "-k", chosen)
    run = run_python(
        "-m", "pytest", *options, root / "tests/support/triton_interpreted.py", *tested, cwd=root, environment=environment
    )
    assert "skipped" not in run.stdout


POINTERS = {
    "statistics": {"rows": "*i64", "label_columns": "*i64", "labels_inside": "*i1", "parts": "*fp32"},
    "mixture": dict.fromkeys(("maxima", "log_sums", "teacher_maxima", "teacher_log_sums", "parts"), "*fp32") | {"rows": "*i64"},
    "gradient": {
        **{"numbers": "*i32", "label_columns": "*i64", "labels_inside": "*i1", "maxima": "*fp32", "log_sums": "*fp32"},
        **{"entropies": "*fp32", "grad_logprob": "*fp32", "grad_entropy": "*fp32", "teacher_terms": "*fp32"},
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
    types = {**dict.fromkeys(("logits", "out", "teacher"), f"*{dtype}"), **POINTERS[name]}
    types |= dict.fromkeys(("to_log2", "per_temperature", "beta"), "fp32")
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names}
    index = {(kernel.arg_names.index(arg),): arg for arg in signature}
    attributes = {at: [["tt.divisibility", 16]] for at, arg in index.items() if arg in multiples}
    source = ASTSource(kernel, signature, {at: constants[arg] for at, arg in index.items() if arg in constants}, attributes)
    return compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": threads // 32})


NO_TEACHER = {"teacher": None, "teacher_row_stride": 0, "teacher_column_stride": 0, "KIND": 0}
ALIGNED = {"logits", "out", "row_stride", "out_row_stride", "width", "span"}


@pytest.fixture
def triton_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@needs_triton
@pytest.mark.usefixtures("triton_cache")
@pytest.mark.parametrize(
    ("name", "dtype", "capability", "threads", "fixed"),
    [
        ("statistics", "bf16", 90, 256, {"STATISTICS": 4, **NO_TEACHER}),
        ("statistics", "bf16", 90, 256, {"STATISTICS": 6, **NO_TEACHER}),
        ("statistics", "fp32", 80, 128, {"STATISTICS": 4, "rows": None, **NO_TEACHER}),
        ("gradient", "bf16", 90, 256, {"teacher_terms": None, **NO_TEACHER}),
        ("gradient", "fp16", 80, 128, {"numbers": None, "grad_entropy": None, "teacher_terms": None, **NO_TEACHER}),
        ("gradient", "fp32", 90, 128, {"grad_logprob": None, "teacher_terms": None, **NO_TEACHER}),
        *(("statistics", "bf16", 90, 128, {"STATISTICS": 10, "KIND": kind}) for kind in (1, 2)),
        ("statistics", "fp32", 90, 128, {"STATISTICS": 12, "KIND": 3, "rows": None}),
        ("mixture", "bf16", 90, 128, {}),
        *(("gradient", "bf16", 90, 128, {"KIND": kind}) for kind in (1, 2, 3)),
    ],
)
def test_compiles_to_loads_of_16_bytes(name, dtype, capability, threads, fixed):
    """For Ampere and Hopper, through machine code. The true vocabulary is no multiple of anything, the shard's width is."""
    aligned = ALIGNED if "teacher" in fixed else ALIGNED | {"teacher", "teacher_row_stride"}
    strides = {"column_stride": 1, "teacher_column_stride": 1} | ({"out_column_stride": 1} if name == "gradient" else {})
    compiled = _compile(name, dtype, capability, threads, strides | fixed, multiples=aligned)
    ptx = compiled.asm["ptx"]
    vectors = 2 if dtype != "fp32" else 4  # of a thread, in the loop and once more in the last tile
    if name != "mixture":  # its loads end at the true vocabulary
        models = 1 if "teacher" in fixed else 2
        assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 2 * models * vectors
        assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == (0 if name == "statistics" else 3 * vectors)
    assert compiled.asm["cubin"]
    assert not re.search(r"(ld|st)\.local", ptx)


@needs_triton
@pytest.mark.usefixtures("triton_cache")
@pytest.mark.parametrize(("name", "others"), [("statistics", {"STATISTICS": 4}), ("gradient", {"teacher_terms": None})])
def test_compiles_for_one_row_of_one_column_and_any_stride(name, others):
    """Triton makes a constant of every integer that is 1; nothing here is a multiple of 16."""
    fixed = {"columns": 1, "width": 1, "row_stride": 1, **others, **NO_TEACHER}
    assert _compile(name, "bf16", 90, 128, fixed, multiples=set()).asm["cubin"]


@needs_triton
def test_who_gets_triton():
    """``auto``: GPUs, where it is installed."""
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

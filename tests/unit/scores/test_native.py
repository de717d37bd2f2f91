"""The C++ sweep: who gets it, and how it is compiled by many processes at once."""

import ctypes
import logging
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tepo_megatron.core.scores import backend, logprob_and_entropy, native
from tepo_megatron.core.scores.backend import get_backend
from tests.support.programs import TIMEOUT_S

CPU = torch.device("cpu")
CACHED = (native._library, backend._fastest_on_cpu)
needs_compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "c++")), reason="no C++ compiler")


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


def test_a_missing_compiler_is_named_and_auto_is_then_torch_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"install a C\+\+ compiler, name one in CXX, or use backend = 'torch'"):
        logprob_and_entropy(torch.zeros(1, 2), torch.tensor([0]), backend="cpp")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert get_backend("auto", CPU) is get_backend("torch", CPU)
    (record,) = caplog.records
    assert "scores are computed in torch" in record.getMessage()
    assert "no-such-compiler" in record.getMessage()


@needs_compiler
def test_a_cache_that_takes_no_files_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="set XDG_CACHE_HOME to a folder that takes files"):
        logprob_and_entropy(torch.zeros(1, 2), torch.tensor([0]), backend="cpp")
    assert get_backend("auto", CPU) is get_backend("torch", CPU)


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
    with pytest.raises(RuntimeError, match="belongs to another user or which others may write to; remove it"):
        logprob_and_entropy(torch.zeros(1, 2), torch.tensor([0]), backend="cpp")
    assert get_backend("auto", CPU) is get_backend("torch", CPU)


@needs_compiler
@pytest.mark.slow
def test_many_processes_compile_it_once(tmp_path):
    """All start without it; one compiles, the others wait for it, and nothing else is left in the cache."""
    wrapper, calls = tmp_path / "compiler", tmp_path / "calls"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *.cpp*) echo . >> {calls}; sleep 0.3;; esac\nexec {shutil.which("c++")} "$@"\n'
    )
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    code = "from tepo_megatron.core.scores import native; native._library().forward_float32"
    root = Path(__file__).parents[3]
    environment = {**os.environ, "CXX": str(wrapper), "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen([sys.executable, "-c", code], cwd=root, env=environment) for _ in range(4)]
    assert [process.wait(timeout=TIMEOUT_S) for process in started] == [0, 0, 0, 0]
    assert calls.read_text().split() == ["."]
    kept = sorted(path.suffix for path in (tmp_path / "cache" / "tepo_megatron").iterdir())
    assert kept == ["", ".so"]

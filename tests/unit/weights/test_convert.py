"""Import and export: the same bytes under any layout, for any model, in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tepo_megatron.weights.architecture import read_model_spec
from tepo_megatron.weights.layouts import MegatronParallel, megatron_layout
from tepo_megatron.weights.storage.convert import check_imported, export_model, import_model
from tepo_megatron.weights.storage.stored import box_key
from tests.support.convert_models import all_tensors, assert_same, make_checkpoint, make_model
from tests.support.programs import TIMEOUT_S


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def checkpoint(model: Path, tmp_path: Path) -> Path:
    return make_checkpoint(model, tmp_path / "step_000001", tp=2, pp=2)


@given(
    tp=st.sampled_from([1, 2]),
    stages=st.sampled_from([{"pp": 1}, {"pp": 2}, {"pp": 4}, {"pp": 2, "vpp": 2}, {"pp": 3, "first_layers": 2}]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    tied=st.booleans(),
    limits=st.tuples(st.integers(300, 9000), st.integers(1, 900)),
)
@settings(max_examples=15)
def test_import_and_export_give_back_the_same_bytes(
    tp: int, stages: dict[str, Any], dtype: torch.dtype, tied: bool, limits: tuple[int, int]
) -> None:
    shard_bytes, bucket_bytes = limits
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", dtype=dtype, tie_word_embeddings=tied)
        sizes: dict[str, Any] = {"shard_bytes": shard_bytes, "bucket_bytes": bucket_bytes}
        import_model(model, folder / "cut", tp=tp, **stages, **sizes)
        check_imported(folder / "cut", model)
        export_model(folder / "cut", folder / "whole", **sizes)
        assert_same(folder / "whole", model)
        # bfloat16 weights are exact in the checkpoint's fp32, so they come back too
        export_model(
            make_checkpoint(model, folder / "step_000001", tp=tp, pp=min(stages["pp"], 2)), folder / "trained", **sizes
        )
        assert_same(folder / "trained", model)


def test_transformers_reads_an_export_with_its_index(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    export_model(checkpoint, tmp_path / "out", shard_bytes=2500)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in all_tensors(model).values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in all_tensors(model).items():
        assert torch.equal(loaded[name], tensor), name
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_export_rounds_to_the_dtype_that_is_asked_for_and_says_so(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    export_model(checkpoint, tmp_path / "out", dtype=torch.bfloat16)
    for name, tensor in all_tensors(model).items():
        assert torch.equal(all_tensors(tmp_path / "out")[name], tensor.bfloat16()), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("given", "stages"),
    [
        ({}, ((range(2),), (range(2, 4),))),
        ({"vpp": 2}, ((range(1), range(2, 3)), (range(1, 2), range(3, 4)))),
        ({"last_layers": 3}, ((range(1),), (range(1, 4),))),
    ],
    ids=["even", "interleaved", "uneven"],
)
def test_each_rank_finds_its_own_boxes_in_its_own_files(
    model: Path, tmp_path: Path, given: dict[str, Any], stages: tuple[tuple[range, ...], ...]
) -> None:
    import_model(model, tmp_path / "cut", tp=2, pp=2, shard_bytes=1500, **given)
    spec = read_model_spec(model)
    for rank in range(4):
        layout = megatron_layout(spec, MegatronParallel(tp=2, pp=2, stages=stages), rank)
        found = set()
        for path in (tmp_path / "cut" / "shards").glob(f"rank{rank:05d}-*.safetensors"):
            with safe_open(path, "pt") as handle:
                found |= {(key, tuple(handle.get_slice(key).get_shape())) for key in handle.keys()}  # noqa: SIM118
        assert found == {(box_key("weight", shard.tensor, shard.box), shard.box.shape) for shard in layout.shards}


MEMORY = """
import json, re, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from tepo_megatron.weights.storage.convert import export_model, import_model

folder = Path(sys.argv[1])
torch.set_num_threads(1)

def peak(work):
    # The kernel's own high-water mark of resident memory, mapped files included, counted from here.
    Path("/proc/self/clear_refs").write_text("5")
    read = lambda key: int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    before = read("VmRSS")
    kept = work()
    return read("VmHWM") - before

def load_all():
    files = (folder / "whole").glob("*.safetensors")
    return [tensor.clone() for path in files for tensor in load_file(path).values()]

small = {"shard_bytes": 2**25, "bucket_bytes": 2**21}
print(json.dumps({
    "import": peak(lambda: import_model(folder / "model", folder / "cut", tp=2, pp=2, **small)),
    "export": peak(lambda: export_model(folder / "cut", folder / "whole", **small)),
    "all": peak(load_all),
    "bytes": sum(path.stat().st_size for path in (folder / "whole").glob("*.safetensors")),
}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's high-water mark from /proc")
def test_no_more_than_a_bucket_is_held(tmp_path: Path) -> None:
    """130 MB of weights, of which one tensor has 33 MB, through buckets of 2 MiB."""
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 16001}
    make_model(tmp_path / "model", shard_bytes=2**24, **sizes)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    assert peaks["bytes"] > 120e6
    assert peaks["all"] > 0.9 * peaks["bytes"], "the measure does not see a whole model"
    assert peaks["import"] < 32e6, "less than the largest tensor"
    assert peaks["export"] < 32e6, "less than the largest tensor"

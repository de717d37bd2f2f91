"""Import and export: the same bytes under any layout, for any model, in little memory."""

import errno
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tepo_megatron.weights.architecture import read_model_spec
from tepo_megatron.weights.layouts import MegatronParallel, pipeline_stages
from tepo_megatron.weights.storage import stored
from tepo_megatron.weights.storage.convert import check_imported, export_model, import_model
from tepo_megatron.weights.storage.hf_folder import write_model
from tepo_megatron.weights.storage.stored import StoredWeights, box_key, write_boxes
from tepo_megatron.weights.table import tensor_shapes
from tests.support.processes import files_of_at_most
from tests.support.programs import run_python

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 12,
    "intermediate_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 13,
    "dtype": "float32",
}


def make_model(
    folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, shard_bytes: int = 2000, **changes: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes, "dtype": str(dtype).removeprefix("torch.")}))
    (folder / "tokenizer.json").write_text("{}")
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(read_model_spec(folder))
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    write_model(folder, tensors.items(), source=folder, dtype=dtype, shard_bytes=shard_bytes)
    return folder


def make_checkpoint(model: Path, out: Path, *, tp: int, pp: int) -> Path:
    """What the engine's ranks write, as far as weights go."""
    spec, source = read_model_spec(model), all_tensors(model)
    (out / "shards").mkdir(parents=True)
    for rank in range(tp * pp):
        layout = MegatronParallel(tp=tp, pp=pp).layout(spec, rank)
        boxes = (
            (box_key(kind, shard.tensor, shard.box), source[shard.tensor][shard.box.slices].float().clone())
            for shard in layout.shards
            for kind in ("master", "exp_avg")
        )
        assert write_boxes(out, f"rank{rank:05d}", boxes, metadata={}, file_bytes=3000).error is None
    (out / "state.json").write_text(json.dumps({"step": 1, "model": str(model)}))
    return out


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(found: Path, expected: Path) -> None:
    ours, theirs = all_tensors(found), all_tensors(expected)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


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
    sizes: dict[str, Any] = dict(zip(("shard_bytes", "bucket_bytes"), limits, strict=True))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", dtype=dtype, tie_word_embeddings=tied)
        import_model(model, folder / "cut", tp=tp, **stages, **sizes)
        check_imported(folder / "cut", model)
        export_model(folder / "cut", folder / "whole", **sizes)
        assert_same(folder / "whole", model)
        # bfloat16 weights are exact in the checkpoint's fp32, so they come back too
        checkpoint = make_checkpoint(model, folder / "step_000001", tp=tp, pp=min(stages["pp"], 2))
        export_model(checkpoint, folder / "trained", **sizes)
        assert_same(folder / "trained", model)


def test_transformers_reads_an_export_with_its_index_and_another_dtype_is_rounded_to(
    model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    export_model(checkpoint, tmp_path / "out", shard_bytes=2500, dtype=torch.bfloat16)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    expected = {name: tensor.bfloat16() for name, tensor in all_tensors(model).items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    for name, tensor in expected.items():
        assert loaded[name].dtype == torch.bfloat16
        assert torch.equal(loaded[name], tensor), name
    assert (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("given", "stages"), [({"vpp": 2}, pipeline_stages(4, 2, chunks=2)), ({"last_layers": 3}, pipeline_stages(4, 2, last=3))]
)
def test_each_rank_finds_its_own_boxes_in_its_own_files(model: Path, tmp_path: Path, given: Any, stages: Any) -> None:
    import_model(model, tmp_path / "cut", tp=2, pp=2, shard_bytes=1500, **given)
    for rank in range(4):
        layout = MegatronParallel(tp=2, pp=2, stages=stages).layout(read_model_spec(model), rank)
        found: dict[str, torch.Size] = {}
        for path in (tmp_path / "cut" / "shards").glob(f"rank{rank:05d}-*.safetensors"):
            found |= {key: box.shape for key, box in load_file(path).items()}
        assert found == {box_key("weight", shard.tensor, shard.box): shard.box.shape for shard in layout.shards}


MEMORY = """
import json, re, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from tepo_megatron.weights.storage.convert import export_model, import_model

folder, status = Path(sys.argv[1]), Path("/proc/self/status")
torch.set_num_threads(1)

def peak(work):
    # The kernel's own high-water mark of resident memory, mapped files included, counted from here.
    Path("/proc/self/clear_refs").write_text("5")
    before = int(re.search(r"VmRSS:\\s+(\\d+)", status.read_text())[1])
    kept = work()
    return 1024 * (int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]) - before)

small = {"shard_bytes": 2**25, "bucket_bytes": 2**21}
print(json.dumps({
    "import": peak(lambda: import_model(folder / "model", folder / "cut", tp=2, pp=2, **small)),
    "export": peak(lambda: export_model(folder / "cut", folder / "whole", **small)),
    "all": peak(lambda: [t.clone() for file in (folder / "whole").glob("*.safetensors") for t in load_file(file).values()]),
}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's high-water mark from /proc")
def test_no_more_than_a_bucket_is_held(tmp_path: Path) -> None:
    """130 MB of weights, of which one tensor has 33 MB, through buckets of 2 MiB."""
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 16001}
    make_model(tmp_path / "model", shard_bytes=2**24, **sizes)
    peaks = json.loads(run_python("-c", MEMORY, tmp_path).stdout)
    assert peaks["all"] > 110e6, "the measure does not see a whole model"
    assert max(peaks["import"], peaks["export"]) < 32e6, "less than the largest tensor"


# -- when something goes wrong


class Interrupt(BaseException):
    """As Ctrl-C, or a kill: no handler for errors sees it."""


def interrupted(at: float) -> Any:
    def report(done: int, total: int) -> None:
        if done >= at * total:
            raise Interrupt

    return report


def identities(folder: Path) -> dict[str, tuple[int, int]]:
    stats = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*.safetensors")}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


@pytest.mark.parametrize("command", ["import", "export"])
def test_an_interrupted_conversion_keeps_what_is_finished(model: Path, checkpoint: Path, tmp_path: Path, command: str) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"

    def run(**more: Any) -> None:
        if command == "import":
            import_model(model, out, tp=2, pp=1, shard_bytes=2000, **more)
        else:
            export_model(checkpoint, out, shard_bytes=2000, **more)

    with pytest.raises(Interrupt):
        run(report=interrupted(0.6))
    assert not out.exists()
    before = identities(partial)
    assert len(before) >= 3
    damaged, cut = sorted(before)[:2]
    (partial / damaged).write_bytes(b"\0" * (partial / damaged).stat().st_size)
    (partial / cut).write_bytes((partial / cut).read_bytes()[:-1])
    seen: list[tuple[int, int]] = []
    run(report=lambda done, total: seen.append((done, total)))
    after, kept = identities(out), set(before) - {damaged, cut}
    assert {name for name in before if after[name] == before[name]} == kept
    assert 0 < seen[0][0] - sum((out / name).stat().st_size for name in kept) < 2000
    assert seen[-1][0] == seen[-1][1]
    assert not partial.exists()
    assert not [path for path in out.rglob("*") if path.suffix in (".sha256", ".unfinished")]
    if command == "import":
        export_model(out, tmp_path / "whole")
        out = tmp_path / "whole"
    assert_same(out, model)


def test_what_another_conversion_left_is_not_mixed_in(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with pytest.raises(Interrupt):
        export_model(checkpoint, out, shard_bytes=2000, report=interrupted(0.6))
    left = identities(partial)
    other = make_model(tmp_path / "other", seed=1)
    shutil.rmtree(checkpoint)
    make_checkpoint(other, checkpoint, tp=2, pp=2)  # the same shapes, sizes and names; other weights
    export_model(checkpoint, out, shard_bytes=2000)
    assert not set(left.items()) & set(identities(out).items())
    assert_same(out, other)


@pytest.mark.parametrize("shard_bytes", [2000, 4000])  # the same conversion, and another one
def test_a_second_command_for_a_folder_is_refused_while_the_first_writes_it(
    model: Path, checkpoint: Path, tmp_path: Path, shard_bytes: int
) -> None:
    refused = []

    def again(done: int, total: int) -> None:
        with pytest.raises(ValueError, match=r"another import or export writes .*out\.partial now; let it end") as caught:
            export_model(checkpoint, tmp_path / "out", shard_bytes=shard_bytes)
        refused.append(caught.value)

    export_model(checkpoint, tmp_path / "out", shard_bytes=2000, report=again)
    assert refused
    assert_same(tmp_path / "out", model)


@pytest.mark.parametrize("command", ["import", "export"])
def test_all_is_on_disk_before_the_folder_has_its_name(
    model: Path, checkpoint: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, synced, rename = tmp_path / "out", set[int](), Path.rename

    def renamed(partial: Path, target: Path) -> Path:
        missing = [path for path in (partial, *partial.rglob("*")) if path.stat().st_ino not in synced]
        assert missing == []
        return rename(partial, target)

    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(Path, "rename", renamed)
    if command == "import":
        import_model(model, out, tp=2, pp=1)
    else:
        export_model(checkpoint, out)
    assert {path.name for path in out.iterdir()} >= {"config.json", "tokenizer.json"}


def test_a_folder_in_the_way_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    partial.mkdir()
    (partial / "mine.txt").write_text("precious")
    with pytest.raises(ValueError, match=r"out\.partial is in the way"):
        export_model(checkpoint, out)
    assert (partial / "mine.txt").read_text() == "precious"
    out.mkdir()
    with pytest.raises(ValueError, match="out exists already; remove it, or give another folder"):
        export_model(checkpoint, out)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be written \(Not a directory\); give another folder"):
        export_model(checkpoint, tmp_path / "file" / "out")


@pytest.mark.parametrize("full_after", [0, 2])
def test_a_full_disk_is_told_and_what_is_finished_stays(
    model: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_after: int
) -> None:
    """Before anything is written, and also when others fill the disk on the way."""
    synced, full = list[int](), shutil.disk_usage(tmp_path)._replace(free=1000)

    def fsync(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) > full_after:
            monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    if not full_after:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(RuntimeError, match=r"needs (\S+) more bytes, and 1,000 are free.*kept in .*out\.partial") as caught:
        export_model(checkpoint, tmp_path / "out", shard_bytes=2000)
    finished = identities(tmp_path / "out.partial")
    assert len(finished) == full_after
    monkeypatch.undo()
    export_model(checkpoint, tmp_path / "out", shard_bytes=2000)
    needed = sum((tmp_path / "out" / name).stat().st_size for name in identities(tmp_path / "out").keys() - finished.keys())
    assert int(str(caught.value).split("needs ")[1].split(" ")[0].replace(",", "")) == needed
    assert_same(tmp_path / "out", model)


def test_two_copies_of_one_half_are_not_a_whole(tmp_path: Path) -> None:
    """With tied embeddings the last stage writes its own copy; the other half of the vocabulary must still be missed."""
    model = make_model(tmp_path / "model", tie_word_embeddings=True)
    checkpoint = make_checkpoint(model, tmp_path / "step_000001", tp=2, pp=2)
    for rank in (1, 3):
        for path in (checkpoint / "shards").glob(f"rank{rank:05d}-*"):
            path.unlink()
    with pytest.raises(ValueError, match=r"incomplete: model\.embed_tokens\.weight, of which 84 of 156 elements are there"):
        export_model(checkpoint, tmp_path / "out")
    weights, spec = StoredWeights.open(checkpoint), read_model_spec(model)
    lost = next(s for s in MegatronParallel(tp=2).layout(spec, 1).shards if "embed_tokens" in s.tensor)
    with pytest.raises(ValueError, match=r"holds 0 of 72 elements that are needed of model\.embed_tokens\.weight"):
        weights.read(lost.tensor, lost.box, torch.empty(lost.box.shape))


def test_a_truncated_file_is_named(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    paths = [sorted(folder.glob("*.safetensors"))[-1] for folder in (model, checkpoint / "shards")]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=rf"{paths[0].name} is damaged or cut short"):
        import_model(model, tmp_path / "out", tp=1, pp=1)
    with pytest.raises(ValueError, match=rf"{paths[1].name} is damaged or cut short"):
        export_model(checkpoint, tmp_path / "out")


def test_a_checkpoint_says_what_it_needs(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    moved = model.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"trained from .*model, which is not there any more; give a copy of it with --model"):
        export_model(checkpoint, out)
    (checkpoint / "state.json").write_text('{"step": 1}')
    with pytest.raises(ValueError, match="does not say which model it was trained from"):
        export_model(checkpoint, out)
    export_model(checkpoint, out, model=moved)
    assert_same(out, moved)
    (checkpoint / "state.json").unlink()
    with pytest.raises(ValueError, match="is a checkpoint that was not finished"):
        export_model(checkpoint, tmp_path / "other", model=moved)
    for name in ("step_000001", "step_000020", "step_000030.abandoned"):
        (tmp_path / "run/checkpoints" / name).mkdir(parents=True)
        (tmp_path / "run/checkpoints" / name / "state.json").touch()
    with pytest.raises(ValueError, match=r"run is not a finished checkpoint; give a folder such as .*step_000020$"):
        export_model(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ValueError, match="nothing is not a finished checkpoint"):
        export_model(tmp_path / "nothing", tmp_path / "other")


# -- folders that a run reads and writes


def test_a_whole_model_is_loaded_and_of_another_wrong_tensors_are_named_at_once(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", shard_bytes=2**20)
    tensors = all_tensors(model)
    layout = MegatronParallel().layout(read_model_spec(model), 0)
    params = {name: torch.full(shape, 7.0) for name, shape in layout.params.items()}
    StoredWeights.load(model, layout, params)
    for shard in layout.shards:
        assert torch.equal(params[shard.param][shard.param_box.slices], tensors[shard.tensor][shard.box.slices])
    loaded = {name: param.clone() for name, param in params.items()}
    del tensors["model.norm.weight"]
    changed = {"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 12), "model.layers.9.extra.weight": torch.zeros(2)}
    changed |= {f"model.layers.{layer}.input_layernorm.weight": torch.zeros(12, dtype=torch.int8) for layer in range(4)}
    changed |= {f"model.layers.0.mlp.{number}.weight": torch.zeros(2) for number in range(3)}
    save_file(tensors | changed, model / "model.safetensors")
    with pytest.raises(ValueError, match="does not hold the model") as caught:
        StoredWeights.load(model, layout, params)
    assert "missing: model.norm.weight" in str(caught.value)
    assert "unsupported: model.layers.0.input_layernorm.weight is I8; known: F32, BF16, F16, F64" in str(caught.value)
    assert str(caught.value).endswith("and 2 more")
    assert "unexpected: model.layers.9.extra.weight" in str(caught.value)
    assert "misshapen: model.layers.1.mlp.up_proj.weight is (3, 12), config.json makes it (8, 12)" in str(caught.value)
    assert all(torch.equal(param, loaded[name]) for name, param in params.items())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq", "bits": 4}}))
    with pytest.raises(
        ValueError, match=r"quantization_config = \{'quant_method': 'awq', .*give the model that they were made"
    ):
        StoredWeights.load(model, layout, params)


def test_rows_are_zero_where_a_rank_has_padding_alone(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", vocab_size=9, num_key_value_heads=4)
    layout = MegatronParallel(tp=4).layout(read_model_spec(model), 3)
    params = {name: torch.full(shape, 7.0) for name, shape in layout.params.items()}
    StoredWeights.load(model, layout, params)
    padded = params.keys() - {shard.param for shard in layout.shards}
    assert padded == {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert not any(params[name].any() for name in padded)


def test_a_checkpoint_is_listed_with_one_open_of_each_file(checkpoint: Path) -> None:
    kinds = ("master", "exp_avg")
    with mock.patch.object(stored, "safe_open", wraps=safe_open) as opened:
        listed = StoredWeights.open_kinds(checkpoint, kinds)
    assert opened.call_count == len(list((checkpoint / "shards").iterdir())) > 1
    assert listed == {kind: StoredWeights.open_boxes(checkpoint, kind) for kind in kinds}
    assert all(box.key.startswith(kind) for kind in kinds for boxes in listed[kind].boxes.values() for box in boxes)


def test_a_model_that_cannot_be_written_leaves_what_was_there_and_nothing_half_written(model: Path, tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.norm.weight", torch.zeros(6)
        raise OSError(28, "No space left on device")

    out, before = shutil.copytree(model, tmp_path / "out"), all_tensors(model)
    with files_of_at_most(1000), pytest.raises(RuntimeError, match=r"part-00001.safetensors could not be written: .*Make room"):
        write_model(out, before.items(), source=model, dtype=torch.float32)
    with pytest.raises(OSError, match="No space left"):
        write_model(out, broken(), source=model, dtype=torch.float32)
    assert_same(out, model)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("dangling", [False, True])
def test_a_model_replaces_a_link_and_leaves_what_it_names(model: Path, tmp_path: Path, dangling: bool) -> None:
    out, other, tensors = tmp_path / "out", tmp_path / "other", all_tensors(model)
    if not dangling:
        shutil.copytree(model, other)
    out.symlink_to(other)
    for _ in range(2):
        write_model(out, tensors.items(), source=model, dtype=torch.float32)
    assert_same(out, model)
    assert not out.is_symlink()
    assert other.exists() != dangling
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]


def test_a_kill_while_the_old_model_is_removed_leaves_the_new_one(model: Path, tmp_path: Path) -> None:
    def killed(folder: Path, *, ignore_errors: bool = False) -> None:
        if (folder / "config.json").exists():
            (folder / "config.json").unlink()
            raise Interrupt

    out, tensors = shutil.copytree(model, tmp_path / "out"), all_tensors(model)
    with mock.patch.object(shutil, "rmtree", killed), pytest.raises(Interrupt):
        write_model(out, tensors.items(), source=model, dtype=torch.float32)
    assert (out / "config.json").exists()
    assert_same(out, model)
    write_model(out, tensors.items(), source=model, dtype=torch.float32)
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]

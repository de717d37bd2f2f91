"""What our plugin changes in vLLM's processes: adapters, signatures, forks, quantised weights, and speculation on CPUs."""

import io
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import distributed_c10d

from tepo_megatron.sampler.vllm.plugin.middleware import Middleware
from tepo_megatron.sampler.vllm.plugin.patches import mend_expansion, sign_objects
from tepo_megatron.sampler.vllm.wire import ADAPTER_NAME, ADAPTER_PATH, USE_ADAPTER
from tests.support.launch import run_dist, run_world
from tests.support.programs import run_python
from tests.unit.sampler.conftest import ask


@pytest.fixture(autouse=True)
def torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts back what a test exchanges."""
    monkeypatch.setattr(distributed_c10d, "_pickler", distributed_c10d._pickler)
    monkeypatch.setattr(distributed_c10d, "_unpickler", distributed_c10d._unpickler)


def read(data: bytes) -> Any:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return distributed_c10d._tensor_to_object(tensor, len(data), None)


def written(value: object) -> bytes:
    distributed_c10d._pickler(file := io.BytesIO()).dump(value)
    return file.getvalue()


class Payload:
    """Unpickled, it makes an empty file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.path, "w")


def test_a_pickle_without_the_signature_runs_nothing(tmp_path: Path) -> None:
    data = pickle.dumps(Payload(str(tmp_path / "proof")))
    read(data)
    assert (tmp_path / "proof").exists()  # torch's own collectives run it
    (tmp_path / "proof").unlink()
    sign_objects("key")
    for forged in (data, b"\0" * 32 + data, b"\0" * 32, data[:5]):
        with pytest.raises(RuntimeError, match="no other worker of this server has signed"):
            read(forged)
    sign_objects("another key")
    signed = written(Payload(str(tmp_path / "proof")))
    sign_objects("key")
    with pytest.raises(RuntimeError, match="no other worker of this server has signed"):
        read(signed)
    assert not (tmp_path / "proof").exists()


@given(
    value=st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.tuples(inner)),
    bit=st.integers(0),
)
def test_what_is_signed_comes_back_and_no_bit_may_differ(value: object, bit: int) -> None:
    sign_objects("key")
    data = bytearray(written(value))
    assert read(bytes(data)) == value
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    with pytest.raises(RuntimeError, match="signed"):
        read(bytes(data))


def exchange(rank: int, world: int) -> Any:
    sign_objects("key")
    found: list[Any] = [None] * world
    dist.all_gather_object(found, {"rank": rank, "tensor": torch.full((rank,), 1.5)})
    dist.broadcast_object_list(word := [("from", rank)], src=1)
    return [(each["rank"], each["tensor"].tolist()) for each in found], word


def test_workers_exchange_objects_as_before() -> None:
    assert run_dist(2, exchange) == [([(0, []), (1, [1.5])], [("from", 1)])] * 2


class Loader:
    """vLLM's table of models, as far as the route asks it."""

    def __init__(self, problem: str = "") -> None:
        self.lora_requests: dict[str, Any] = {}
        self.asked: list[Any] = []
        self.problem = problem

    async def load_lora_adapter(self, request: Any) -> Any:
        self.asked.append(request)
        if self.problem:
            return SimpleNamespace(error=SimpleNamespace(message=self.problem))
        self.lora_requests[request.lora_name] = request
        return "loaded"


@pytest.fixture
def use(middleware: Middleware) -> Callable[[Loader], tuple[int, bytes]]:
    """Asks a server with these models for the adapters."""
    return lambda models: ask(middleware, USE_ADAPTER, state=SimpleNamespace(openai_serving_models=models))


def test_a_server_is_told_once_where_its_adapters_lie_and_says_why_it_cannot_load_them(use: Any) -> None:
    """Once: a request that names them again after an update loads the new ones."""
    pytest.importorskip("vllm")
    models = Loader()
    assert [use(models), use(models)] == [(200, b"{}")] * 2
    (asked,) = models.asked
    assert (asked.lora_name, asked.lora_path, asked.load_inplace) == (ADAPTER_NAME, ADAPTER_PATH, False)
    status, said = use(Loader("no place for it"))
    assert status == 500
    assert b"no place for it" in said


def test_a_worker_takes_adapters_from_memory_only_where_each_has_a_layer() -> None:
    pytest.importorskip("vllm")
    from tepo_megatron.sampler.vllm.plugin import patches

    inner = SimpleNamespace(model=None, packed_modules_mapping={"qkv_proj": ["q_proj"]}, supported_lora_modules=["qkv_proj"])
    manager = SimpleNamespace(
        _adapter_manager=inner, lora_config=SimpleNamespace(max_lora_rank=8, lora_dtype=torch.float32), vocab_size=9
    )
    request = SimpleNamespace(lora_int_id=1, lora_path=ADAPTER_PATH)
    patches._adapters.clear()
    with pytest.raises(RuntimeError, match="holds no adapters yet"):
        patches._adapters_from_memory(manager, request)
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    tensors = {f"model.layers.0.self_attn.q_proj.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    patches.hold_adapters(settings, tensors)
    for _ in range(2):  # vLLM forgets it after every update, and scales what it is given
        found = patches._adapters_from_memory(manager, request).loras["model.layers.0.self_attn.q_proj"].optimize()
        assert found.lora_b.tolist() == [[2.0, 2.0]] * 2
    patches.hold_adapters(settings, {name.replace("q_proj", "gate"): tensor for name, tensor in tensors.items()})
    with pytest.raises(RuntimeError, match=r"no place for the adapters of model\.layers\.0\.self_attn\.gate; set .*merged"):
        patches._adapters_from_memory(manager, request)
    patches._adapters.clear()


VLLM = """
import json, os, signal, socket
from vllm.config import ParallelConfig, VllmConfig
from vllm.utils.system_utils import get_mp_context
from tepo_megatron.sampler.vllm.plugin.patches import fork_processes

def look(executor):
    config = VllmConfig(parallel_config=ParallelConfig(distributed_executor_backend=executor)).parallel_config
    return [config.distributed_executor_backend, get_mp_context().get_start_method()]

name = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
own = look("uni")
fork_processes()
port, local, (signals, waker) = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socketpair()
waker.setblocking(False)
signal.set_wakeup_fd(waker.fileno())  # as an event loop does
answer, question = os.pipe()
if os.fork() == 0:
    released = [os.fstat(one.fileno()).st_ino == os.stat(os.devnull).st_ino for one in (port, local)]
    os.write(question, json.dumps([released, signal.set_wakeup_fd(-1)]).encode())
    os._exit(0)
fork = json.loads(os.read(answer, 1000))
parent = [port.getsockname()[1] > 0, signal.set_wakeup_fd(-1) == waker.fileno()]
print(json.dumps([own, look(name), fork, parent]))
"""


@pytest.mark.slow
def test_vllm_by_itself_spawns_on_a_cpu_and_forks_keep_neither_the_port_nor_the_signals_of_their_parent() -> None:
    """Where it no longer spawns, decision 020 can go, with ``fork_processes`` and the name of the executor in ``server``."""
    printed = run_python("-c", VLLM, environment={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}).stdout
    own, ours, fork, parent = json.loads(printed.splitlines()[-1])
    assert own == ["mp", "spawn"]
    assert ours == ["vllm.v1.executor.uniproc_executor.UniProcExecutor", "fork"]
    assert fork == [[True, False], -1]
    assert parent == [True, True]


SIZES: dict[str, Any] = {
    "vocab_size": 61,  # no multiple of TP, nor of what vLLM pads to
    "hidden_size": 160,  # blocks of 128 end within it
    "intermediate_size": 336,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}

RANKS = range(2)
Shards = dict[str, Tensor]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    models, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("out")
    for seed, name in enumerate(("old", "new")):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16()
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight[:128] = 0.0  # whole blocks, and whole rows, of zeros
        model.save_pretrained(models / name)
    (out / "new").symlink_to(models / "new")
    run_world("quantized_shards", 2, models, out)
    return out


def shards(out: Path, kind: str, quantization: str) -> list[Shards]:
    return [load_file(out / f"{kind}-{quantization}-{rank}.safetensors") for rank in RANKS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "waiting"),
    [
        ("fp8_per_channel", "o_proj down_proj"),
        ("fp8_per_tensor", "qkv_proj o_proj gate_up_proj down_proj"),
        ("fp8_per_block", ""),
    ],
)
def test_updated_weights_and_scales_are_those_that_vllm_loads_from_disk(world: Path, quantization: str, waiting: str) -> None:
    assert [(world / f"waiting-{quantization}-{rank}.txt").read_text() for rank in RANKS] == [waiting] * 2
    for updated, loaded in zip(shards(world, "updated", quantization), shards(world, "loaded", quantization), strict=True):
        assert updated.keys() == loaded.keys()
        assert loaded["model.layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn
        for name in loaded:
            assert torch.equal(updated[name].reshape(-1).view(torch.uint8), loaded[name].reshape(-1).view(torch.uint8)), name


@pytest.mark.slow
def test_a_checkpoint_that_is_quantised_already_is_refused_by_the_name_of_its_layer(world: Path) -> None:
    for rank in RANKS:
        text = (world / f"refused-{rank}.txt").read_text()
        assert "model.layers.0.mlp.down_proj holds weights that were quantised before they were loaded" in text
        assert "rollout.server.quantization" in text


@pytest.mark.parametrize(
    ("padded", "use_ep", "message"),
    [(256, False, "pads each expert from 192 to 256 here"), (192, True, r"have whole experts \(expert parallelism\)")],
)
def test_experts_that_vllm_has_padded_or_divided_are_refused_with_what_to_set(padded: int, use_ep: bool, message: str) -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    from tepo_megatron.sampler.vllm.plugin.engine import ShardLoader

    model: Any = torch.nn.Module()
    model.experts = torch.nn.Linear(2, 2, bias=False)
    sizes = {"intermediate_size_per_partition": padded, "intermediate_size_per_partition_unpadded": 192}
    parallel = replace(FusedMoEParallelConfig.make_no_parallel(), use_ep=use_ep)
    model.experts.moe_config = SimpleNamespace(**sizes, moe_parallel_config=parallel)
    with pytest.raises(RuntimeError, match=rf"{message}; set rollout.server.transfer = gather"):
        ShardLoader(model, {})


def test_a_worker_joins_the_trainer_without_nccl_settings_that_only_vllm_has(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.utils import nccl

    from tepo_megatron.sampler.vllm.plugin import engine
    from tepo_megatron.weights.transfer.sender import ReceiveOrder

    monkeypatch.setenv("NCCL_PROTO", "LL")
    monkeypatch.setenv("NCCL_NO_CACHE", "")
    monkeypatch.setattr(nccl, "_unpinned_env", None)
    monkeypatch.setattr(nccl, "_nccl_has_no_cache", lambda: True)
    nccl.pin_nccl_env({"NCCL_PROTO": "Simple"})  # as with VLLM_BATCH_INVARIANT=1
    seen: list[str] = []
    order = ReceiveOrder([], "bfloat16", 1)
    monkeypatch.setattr(engine, "connect", lambda *_: SimpleNamespace(get=lambda _: order.encode()))
    monkeypatch.setattr(engine, "join", lambda *_, **__: seen.append(os.environ["NCCL_PROTO"]))
    worker: Any = engine.TransferEngine.__new__(engine.TransferEngine)
    worker.model, worker.parallel_config, worker.device = torch.nn.Module(), SimpleNamespace(rank=0), torch.device("cpu")
    worker.init_transfer_engine(engine._InitInfo("127.0.0.1", "", rank_offset=1, world_size=2, timeout_s=1.0, sharded=True))
    assert (seen, os.environ["NCCL_PROTO"]) == (["LL"], "Simple")


def test_a_worker_on_a_cpu_sleeps_between_looks_for_a_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A spinning worker takes a core from the trainer."""
    pytest.importorskip("vllm")
    import zmq
    from vllm.distributed.device_communicators import shm_broadcast

    from tepo_megatron.sampler.vllm.plugin.patches import rest_while_waiting

    monkeypatch.setattr(shm_broadcast, "sched_yield", shm_broadcast.sched_yield)  # restored after the test
    spun: list[None] = []
    monkeypatch.setattr(os, "sched_yield", lambda: spun.append(None))
    with zmq.Context() as context:
        reader = shm_broadcast.SpinCondition(True, context, f"ipc://{tmp_path}/notify", busy_loop_s=60)
        reader.wait()
        assert spun
        rest_while_waiting()
        spun.clear()
        reader.wait()
        assert not spun
        for name in ("local_notify_socket", "write_cancel_socket", "read_cancel_socket"):
            getattr(reader, name).close(0)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.5, -1.0]), st.integers(0, 4)), min_size=1, max_size=6))
def test_each_value_is_there_as_often_as_its_request_has_tokens(requests: list[tuple[float, int]]) -> None:
    pytest.importorskip("vllm")
    values, counts = zip(*requests, strict=True)
    ends = torch.tensor(counts).cumsum(0).int()
    from vllm.v1.sample import rejection_sampler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejection_sampler, "expand_batch_to_tokens", rejection_sampler.expand_batch_to_tokens)
        mend_expansion()
        expand = rejection_sampler.expand_batch_to_tokens
    found = expand(torch.tensor(values), ends, sum(counts), replace_from=-1.0, replace_to=1)
    assert found.dtype == torch.float32
    assert found.tolist() == [1.0 if value == -1 else value for value, count in requests for _ in range(count)]


def test_vllm_still_needs_it() -> None:
    """When this fails, vLLM expands temperatures on CPUs by itself: then ``mend_expansion`` can go."""
    import vllm._custom_ops  # noqa: F401 # vLLM's operators for this machine
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    output = torch.full((3,), torch.nan)
    _expand_kernel_impl(output, torch.tensor([0.5, 2.0]), torch.tensor([1, 3], dtype=torch.int32), 0, 1)
    assert output.isnan().all()

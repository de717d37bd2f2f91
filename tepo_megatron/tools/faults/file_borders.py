"""Borders that are files: data, rollouts, checkpoints, models, a run's folder, configurations and keys."""

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tepo_megatron.config import RunConfig
from tepo_megatron.config.data import SourceConfig
from tepo_megatron.config.load import load_objective, load_run
from tepo_megatron.config.objective.custom import Plugin
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.run.metrics import TokenPrompt, TokenSamples, read_metrics
from tepo_megatron.run.output.resume import Resumed
from tepo_megatron.run.output.status import status_record
from tepo_megatron.run.sampling.journal import GroupStore, Journal
from tepo_megatron.runtime.heartbeat import RankRecord
from tepo_megatron.runtime.machine import this_machine
from tepo_megatron.runtime.run_lock import RunLock
from tepo_megatron.sampler.fleet.external import ExternalServer, shared_key
from tepo_megatron.sampler.rollout_file import Record, check_rollouts, record_path, write_rollouts
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import encode_prompt, load_problems
from tepo_megatron.tasks.data.tokenizer import Tokenizer, load_tokenizer
from tepo_megatron.tasks.environments.protocol import read_key
from tepo_megatron.tasks.evaluate.results import compare_results
from tepo_megatron.tasks.reward.recorded import read_recorded
from tepo_megatron.tools.faults.hostile import (
    NUMBERS,
    Hostile,
    border,
    chat_tokenizer,
    needs_unicode,
    refusable,
    tokenizer_files,
)
from tepo_megatron.tools.report import write_report
from tepo_megatron.tools.sweep import read_sweep, runs_of, shard
from tepo_megatron.trainer.run_compatibility import describe_run
from tepo_megatron.weights.architecture import read_model_spec
from tepo_megatron.weights.storage.hf_folder import check_peft_folder
from tepo_megatron.weights.storage.manifest import MANIFEST, STATE, CheckpointManifest, FileRecord, sampled_digest
from tepo_megatron.weights.storage.stored import StoredWeights, safetensors_header

# -- data and recorded responses ---------------------------------------------------------------------------------------------

_TINY = "builtin:tiny"
_ROW = {"id": "a", "prompt": "1+1=", "answer": "2", "more": [1, {"x": 1.50}], "none": None}
_CHAT = {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}
_SAMPLE = {
    "response": "2",
    "reward": 1.0,
    "tokens": 1,
    "finish_reason": "stop",
    "components": {"right": 1.0},
    "turns": [{"by": "a", "text": "b"}],
}
_SAMPLES = {
    "step": 1,
    "problem": "a",
    "prompt": "1+1=",
    "answer": "2",
    "greedy": _SAMPLE,
    "sampled": [_SAMPLE],
    "metadata": {"x": 1},
}


def _spoil_one(folder: Path, random: Hostile, files: dict[str, Any]) -> None:
    wrong = random.choice(list(files))
    for name, sound in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(sound, bytes):
            data = random.damaged(sound) if name == wrong else sound
        elif isinstance(sound, list):
            data = random.lines(sound) if name == wrong else "".join(json.dumps(row) + "\n" for row in sound).encode()
        else:
            data = random.json(sound) if name == wrong else json.dumps(sound).encode()
        (folder / name).write_bytes(data)


@cache
def _tiny() -> Tokenizer:
    return load_tokenizer(resolve_model_path(_TINY))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if str(path) not in str(error):
            raise AssertionError(f"no {path.name} in: {error}") from error
        raise


def _read_data(path: Path, random: Hostile) -> None:
    template = random.choice((None, None, "{prompt} {answer}", "{more}"))
    with _named(path):
        problems = load_problems(SourceConfig(path=str(path), template=template))
    for problem in problems:
        needs_unicode([problem.id, problem.prompt, problem.answer, problem.messages, problem.metadata])
        for tokenizer in (chat_tokenizer(), _tiny()):
            with refusable():
                encode_prompt(tokenizer, problem)


def _data(name: str, content: Callable[[Hostile], bytes]) -> None:
    def entry(folder: Path, random: Hostile) -> None:
        path = folder / f"a.{name}"
        path.write_bytes(content(random))
        _read_data(path, random)

    border(f"data.{name}")(entry)


def _cells(random: Hostile) -> bytes:
    cells = [random.text() if random.random() < 0.3 else sound for sound in ("prompt", "answer", "more", "1+1=", "2", '"a, b"')]
    data = "{},{},{}\n{},{},{}\n".format(*cells).encode("utf-8", "surrogatepass")
    return random.damaged(data) if random.random() < 0.3 else data


def _parquet(random: Hostile) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet

    texts = [random.text().encode("utf-8", random.choice(("replace", "surrogatepass"))) for _ in range(2)]
    raw = pa.array(texts, pa.binary())
    columns = {
        "prompt": pa.Array.from_buffers(pa.string(), 2, raw.buffers()),
        "answer": ["1", "2"],
        "more": [[1.5], [float("nan")]],
    }
    file = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns), file)
    return random.damaged(file.getvalue()) if random.random() < 0.5 else file.getvalue()


_data("jsonl", lambda random: random.lines([random.choice((_ROW, _CHAT)), _ROW | {"id": "b"}]))
_data("json", lambda random: random.json([_ROW, _CHAT]))
_data("csv", _cells)
_data("parquet", _parquet)


@border("data.saved")
def _saved(folder: Path, random: Hostile) -> None:
    state = {"_data_files": [{"filename": "a.arrow"}]}
    _spoil_one(
        folder, random, {"dataset_dict.json": {"splits": ["train"]}, "train/state.json": state, "train/a.arrow": bytes(64)}
    )
    _read_data(folder, random)


@border("recorded responses")
def _recorded(folder: Path, random: Hostile) -> None:
    path = folder / "a.jsonl"
    one = {"prompt": "1+1=", "answer": "2", "response": "2", "responses": ["2"], "finish_reason": "stop"}
    path.write_bytes(random.lines([_SAMPLES, one]))
    with _named(path):
        groups = read_recorded(path)
    for problem, responses in groups:
        needs_unicode([problem.id, dict(problem.metadata), responses, [item.to_json() for item in responses]])


# -- rollouts, checkpoints and models ----------------------------------------------------------------------------------------


_ROLLOUT = Rollout("a", 0, (1, 2), (3, 2), (-0.5, -0.1), "stop", WeightsVersion(3, "x"), "1", 1.0, {"right": 1.0})


def _write_record(folder: Path, random: Hostile) -> None:
    path = write_rollouts(folder, 3, [_ROLLOUT, _ROLLOUT], drawn_by="me")
    head, *lines = map(json.loads, path.read_text().splitlines())
    body = random.lines(lines)
    if random.random() < 0.3:
        body = "".join(json.dumps({**line, "reward": random.choice(NUMBERS)}) + "\n" for line in lines).encode()
    if random.random() < 0.2:
        head = random.spoilt(head)
    if isinstance(head, dict) and random.random() < 0.8:
        head = {key: value for key, value in head.items() if key != "sha256"}
        head["sha256"] = sha256(json.dumps(head).encode() + b"\n" + body).hexdigest()
    path.write_bytes(json.dumps(head).encode() + b"\n" + body)


@border("rollouts")
def _replayed(folder: Path, random: Hostile) -> None:
    _write_record(folder, random)
    record = Record.read(folder, 3)
    check_rollouts(record_path(folder, 3), record.rollouts, step=3, prompts=1, samples=2, vocab_size=64)
    assert all(item.reward is None or abs(item.reward) <= 1e15 for item in record.rollouts), "a reward that is none"
    needs_unicode([[item.text, item.problem_id, dict(item.reward_parts)] for item in record.rollouts])


@border("journal")
def _journal(folder: Path, random: Hostile) -> None:
    rollout = {"prompts_per_step": 1, "samples_per_prompt": 2, "record": True}
    config = _run_folder(folder, rollout=rollout, train={"minibatches": 1})
    journal = Journal(config, lambda _: None, lambda path, error: None)
    _write_record(journal.folder, random)
    journal.find(3, lambda _: "me")
    record_path(journal.folder, 3).with_suffix(".json").write_bytes(random.json({"drawn_by": "me", "after": {}, "figures": {}}))
    store = GroupStore(journal, active=True)
    state = store.read_state(3)
    assert state is None or state.get("drawn_by") != "me" or {"after", "figures"} <= state.keys(), "a state without its parts"


def _run_folder(folder: Path, **config: Any) -> RunConfig:
    return RunConfig.model_validate({"output": folder, "model": {"path": _TINY}, **config})


@cache
def _identity() -> dict[str, Any]:
    return json.loads(json.dumps(describe_run(_run_folder(Path("out")), resolve_model_path(_TINY))))


@border("checkpoint")
def _checkpoint(folder: Path, random: Hostile) -> None:
    config = _run_folder(folder, train={"resume": True, "steps": 9})
    saved = folder / "checkpoints" / "step_000003"
    state = {"step": 3, "updates": 3, "model": _TINY, "weights_digest": "x", "identity": _identity(), "sampler": {"seed": 0}}
    saved.mkdir(parents=True)
    (saved / STATE).write_bytes(data := random.json(state))
    CheckpointManifest.write(saved, 3, {STATE: FileRecord(len(data), sha256(data).hexdigest())})
    if random.random() < 0.5:
        content = json.loads((saved / MANIFEST).read_text())
        content = random.spoilt({key: value for key, value in content.items() if key != "sha256"})
        if isinstance(content, dict):
            text = json.dumps(content, sort_keys=True, separators=(",", ":"))
            content["sha256"] = sha256(text.encode()).hexdigest()
        (saved / MANIFEST).write_bytes(json.dumps(content).encode())
    Resumed.find(config, resolve_model_path(_TINY)).messages(config)


def _shard(name: str, random: Hostile) -> bytes:
    sound = safetensors_header({name: ("F32", (4, 2)), "b": ("BF16", (2,))})
    if random.random() < 0.4:
        return random.damaged(sound + bytes(36))
    header = random.json(json.loads(sound[8:]))
    return len(header).to_bytes(8, "little") + header + bytes(36)


@border("shards")
def _shards(folder: Path, random: Hostile) -> None:
    (folder / "shards").mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "shards/rank00000-00001.safetensors").write_bytes(_shard("weight|a|0,0", random))
    _read_weights(folder)


def _read_weights(folder: Path) -> None:
    with refusable():
        weights = StoredWeights.open(folder)
        for tensor, boxes in weights.boxes.items():
            for stored in boxes:
                with refusable():
                    weights.read(tensor, stored.box)
        weights.check({"a": (4, 2)})
    with refusable():
        sampled_digest(folder)


@border("model")
def _model(folder: Path, random: Hostile) -> None:
    source = resolve_model_path(_TINY)
    config = json.loads((source / "config.json").read_text())
    index = {"metadata": {}, "weight_map": {"a": "a.safetensors"}}
    _spoil_one(folder, random, {"config.json": config, "model.safetensors.index.json": index})
    shutil.copy(source / "tokenizer.model", folder)
    (folder / "a.safetensors").write_bytes(_shard("a", random))
    with refusable():
        resolve_model_path(str(folder))
    _read_weights(folder)
    read_model_spec(folder)


@border("tokenizer")
def _tokenizer(folder: Path, random: Hostile) -> None:
    _spoil_one(folder, random, tokenizer_files())
    if random.random() < 0.2:
        model = (resolve_model_path(_TINY) / "tokenizer.model").read_bytes()
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.model").write_bytes(random.damaged(model))
    tokenizer = load_tokenizer(folder)
    for use in (
        tokenizer.check_model,
        lambda: tokenizer.prompt_ids("1+1="),
        lambda: tokenizer.chat_ids([("user", "a")]),
        lambda: tokenizer.show([5, 0]),
    ):
        with refusable():
            use()


@border("adapters")
def _adapters(folder: Path, random: Hostile) -> None:
    wrong = random.random() < 0.6
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": False, "bias": "none", "modules_to_save": None}
    (folder / "adapter_config.json").write_bytes(random.json(config) if wrong else json.dumps(config).encode())
    (folder / "adapter_model.safetensors").write_bytes(_shard("base_model.model.a", random))
    check_peft_folder(folder, {"a": (4, 2)}, rank=2, alpha=4.0, rslora=False)


# -- a run's folder, evaluations, configurations, keys -----------------------------------------------------------------------


_METRICS = [
    {"step": step, "eval/sums/greedy": 0.5, "reward/mean": 0.5, "accuracy/greedy": 0.5, "time/step": 1.0, "loss": 0.1}
    for step in range(3)
]


@border("run folder")
def _output(folder: Path, random: Hostile) -> None:
    config = json.loads(_run_folder(folder).model_dump_json())
    files = {
        **{"metrics.jsonl": _METRICS, "samples.jsonl": [_SAMPLES], "train_samples.jsonl": [_SAMPLES | _SAMPLE | {"group": 0}]},
        **{"resolved.yaml": config, "resolved.1.yaml": config, "tokens/step_0000001.npz": _token_values()},
        "status/rank-00000.json": asdict(RankRecord(0, 1, 1, host="a")),
    }
    _spoil_one(folder, random, files)
    with refusable():
        json.dumps(status_record(folder))
    with refusable():
        read_metrics(folder / "metrics.jsonl")
    write_report([folder], folder / "report.html")


@cache
def _token_values() -> bytes:
    kinds = {
        "i4": "prompt group update ids version",
        "f4": "reward logprob_sampler logprob_trainer logprob_update entropy entropy_change advantage ratio divergence",
        "?": "truncated loss_mask masked",
    }
    arrays: dict[str, Any] = {name: np.zeros(1, kind) for kind, names in kinds.items() for name in names.split()}
    return TokenSamples(1, (TokenPrompt("a", "b"),), {0: "a"}, lengths=np.ones(1, np.int32), **arrays).encode()


@border("evaluation")
def _evaluation(folder: Path, random: Hostile) -> None:
    row = {"problem": "a", "digest": "x", "figures": {"greedy": 1.0, "avg@2": 0.5}}
    files = {"a.json": {"settings": {"model": "m", "samples": 2}}, "a.jsonl": [row, row | {"problem": "b"}]}
    _spoil_one(folder / "one", random, files)
    shutil.copytree(folder / "one", folder / "other")
    for comparison in compare_results(folder / "one", folder / "other"):
        needs_unicode(comparison.name)


@border("sweep")
def _sweep(folder: Path, random: Hostile) -> None:
    sound = {"run": "run.yaml", "axes": {"lr": {"low": "optimizer.lr=1e-5", "high": ["optimizer.lr=1e-4"]}}, "seeds": [0, 1]}
    (folder / "a.yaml").write_bytes(random.json(sound | {"figures": ["loss"], "attempts": 1, "leave_out": [{"lr": "low"}]}))
    with refusable():
        shard([], random.text())
    sweep = read_sweep(folder / "a.yaml")
    runs_of(sweep, folder)
    sweep.figures_of(_METRICS)


@border("preset and plugin")
def _preset(folder: Path, random: Hostile) -> None:
    (folder / "a.yaml").write_bytes(
        random.json({"formula": "f", "source": "s", "preset": "grpo", "ratio": {"kind": "sequence"}})
    )
    (folder / "a.py").write_bytes(random.damaged(b"from tepo_megatron import OwnRatio\n"))
    with refusable():
        Plugin.load(str(folder / "a.py"))
    load_objective(str(folder / "a.yaml"))


@border("configuration and arguments")
def _configuration(folder: Path, random: Hostile) -> None:
    (folder / "a.yaml").write_bytes(random.json({"name": "a", "train": {"steps": 3}, "data": {"train": [{"path": "a"}]}}))
    with refusable():
        load_run(None, [random.text(), f"train.steps={random.text()}", f"name={random.text()}"])
    load_run(folder / "a.yaml")


@border("registry")
def _registry(folder: Path, random: Hostile) -> None:
    registry = folder / "registry"
    registry.mkdir(mode=0o700)
    (registry / "server-0.json").write_bytes(random.json({"url": "http://127.0.0.1:1", "life": "a"}))
    (registry / "key").write_bytes(random.damaged(b"secret"))
    (registry / "key").chmod(0o600)
    with refusable():
        shared_key(registry)
    config = ServerConfig(placement="external", registry=registry, start_timeout_s=1e-3)
    server = ExternalServer(config, registry=registry, index=0, key="secret", log=folder / "log")
    server.start()
    server.wait_ready()


@border("keys")
def _keys(folder: Path, random: Hostile) -> None:
    path = folder / "key"
    path.touch(mode=0o600)
    path.write_bytes(random.text().encode("utf-8", "surrogatepass"))
    key = read_key(path)
    assert all("!" <= item <= "~" for item in key), "a key that no header takes"


@border("lock")
def _lock(folder: Path, random: Hostile) -> None:
    lock = {"host": "a", "pid": 1, "started": "now", "kernel": "k", "born": 1, "job": "", "life": 0, "token": "t"}
    (folder / "run.lock").write_bytes(random.json(lock))
    RunLock.check_free(folder)
    held = RunLock(folder)
    held.take()
    held.release()


_VARIABLES = (
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_RESTART_COUNT", "SLURM_JOB_ID", "TERM", "PYTHONPATH"),
)


@border("environment variables")
def _variables(folder: Path, random: Hostile) -> None:
    name = random.choice(_VARIABLES)
    with patch.dict(os.environ, {name: random.text().replace("\0", "").encode("utf-8", "replace").decode()}):
        with refusable():
            this_machine()
        lock = RunLock(folder)
        lock.take()
        lock.release()

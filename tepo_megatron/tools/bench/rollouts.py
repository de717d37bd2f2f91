"""Compares a rollout server with vLLM's offline engine, and measures what responses cost rank 0."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from tepo_megatron.core.rollout import Response, Rollout, WeightsVersion
from tepo_megatron.runtime.proc import Process
from tepo_megatron.sampler.rollout_file import write_rollouts
from tepo_megatron.sampler.sampling import Sample
from tepo_megatron.sampler.vllm.wire import head_frame, read_responses, response_frame
from tepo_megatron.tools.bench.recipes import make_model
from tepo_megatron.tools.bench.step import SIZES
from tepo_megatron.tools.results import in_processes, markdown, write_report
from tepo_megatron.trainer.megatron.batch import broadcast
from tepo_megatron.trainer.packing import pack

_IDLE_S = 1.5  # between two draws: vLLM's worker spins for a second after its last message

_KINDS = {"api_server": "API server", "EngineCore": "engine core", "Worker": "worker", "supervise": "supervisor"}


@dataclass(frozen=True)
class RolloutSetting:
    size: str
    prompts: int
    samples: int
    new_tokens: int
    repeats: int
    responses: int
    length: int


@dataclass(frozen=True)
class DrawMeasurement:
    """``shares``: CPU seconds per second, by kind of process."""

    side: str
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    shares: list[dict[str, float]] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    def share(self, kind: str) -> float:
        return statistics.median(share.get(kind, 0.0) for share in self.shares)


OURS, OFFLINE = "server and client", "vLLM's offline engine"


def run(setting: RolloutSetting, say: Callable[[str], None]) -> tuple[list[DrawMeasurement], _Rank0Measurement]:
    """Raises RuntimeError if the two sides drew different tokens: their times are not comparable."""
    rank0 = measure_rank0(setting.responses, setting.length, say)
    with tempfile.TemporaryDirectory() as scratch:
        return _measure_draws(setting, Path(scratch), say), rank0


def _measure_draws(setting: RolloutSetting, scratch: Path, say: Callable[[str], None]) -> list[DrawMeasurement]:
    from tepo_megatron.config.rollout import ServerConfig
    from tepo_megatron.sampler.fleet.fleet import Fleet
    from tepo_megatron.sampler.sampling import prompt_seed
    from tepo_megatron.sampler.vllm.resources import worker_cores

    model, prompts = _model_and_prompts(setting, scratch)
    longest = max(map(len, prompts)) + setting.new_tokens
    config = ServerConfig(max_num_seqs=256, max_model_len=longest, start_timeout_s=600.0)
    ours, offline = DrawMeasurement(OURS), DrawMeasurement(OFFLINE)
    fleet = Fleet(config, model_dir=model, dtype="float32", stop_token_ids=(), log_dir=scratch)
    (cores,) = worker_cores(config, 1)
    with fleet, _offline_engine(model, longest, cores, scratch / "offline.log") as ask:
        for repeat in range(-1, setting.repeats):  # the first draws warm both up
            say(f"draw {repeat + 1} of {setting.repeats}" if repeat >= 0 else "warming up")
            seeds = [prompt_seed(repeat, number) for number in range(len(prompts))]
            time.sleep(_IDLE_S)
            before, begin = _processor_seconds(), time.perf_counter()
            groups = fleet.generate(prompts, n=setting.samples, temperature=1.0, max_new_tokens=setting.new_tokens, seed=repeat)
            seconds = time.perf_counter() - begin
            share = {kind: (spent - before.get(kind, 0.0)) / seconds for kind, spent in _processor_seconds().items()}
            digest = sha256(b"".join(item.response_ids.tobytes() for group in groups for item in group)).hexdigest()
            tokens = sum(item.response_ids.size for group in groups for item in group)
            time.sleep(_IDLE_S)
            theirs = ask(
                {"prompts": prompts, "n": setting.samples, "seeds": seeds, "temperature": 1.0, "max_tokens": setting.new_tokens}
            )
            if (theirs["sha256"], theirs["tokens"]) != (digest, tokens):
                raise RuntimeError(
                    f"the server drew {tokens} tokens and the offline engine {theirs['tokens']}, or others, from the same "
                    "prompts and seeds; their times say nothing"
                )
            if repeat >= 0:
                ours.seconds.append(seconds)
                ours.shares.append(share)
                offline.seconds.append(theirs["seconds"])
                for side in (ours, offline):
                    side.tokens.append(tokens)
    return [ours, offline]


def _model_and_prompts(setting: RolloutSetting, scratch: Path) -> tuple[Path, list[list[int]]]:
    from tepo_megatron.tasks.data.builtin import resolve_model_path
    from tepo_megatron.tasks.data.problems import load_problems
    from tepo_megatron.tasks.data.tokenizer import load_tokenizer

    if setting.size == "builtin":
        model = resolve_model_path("builtin:tiny")
        tokenizer = load_tokenizer(model)
        problems = load_problems("builtin:addition")[: setting.prompts]
        return model, [list(tokenizer.prompt_ids(problem.prompt)) for problem in problems]
    if setting.size not in SIZES:
        raise ValueError(f"--size {setting.size} is unknown; known: builtin, {', '.join(SIZES)}")
    make_model(scratch / "model", SIZES[setting.size])
    rng = random.Random(0)
    vocab = SIZES[setting.size]["vocab_size"]
    return scratch / "model", [[rng.randrange(vocab) for _ in range(16)] for _ in range(setting.prompts)]


@contextmanager
def _offline_engine(model: Path, longest: int, cores: str, log: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    arguments = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": longest,
        "max_num_seqs": 256,
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "distributed_executor_backend": "uni",
        "disable_log_stats": True,
    }
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("w") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "tepo_megatron.sampler.vllm.plugin.offline"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=written,
            env=environment,
            text=True,
        )
    orders, answers = process.stdin, process.stdout
    assert orders is not None
    assert answers is not None

    def ask(order: Mapping[str, Any]) -> dict[str, Any]:
        print(json.dumps(order), file=orders, flush=True)
        if not (line := answers.readline()):
            raise RuntimeError(f"vLLM's offline engine ended:\n{log.read_text()[-2000:]}")
        result: dict[str, Any] = json.loads(line)
        return result

    try:
        ask(arguments)
        yield ask
    finally:
        orders.close()
        process.wait()


def _processor_seconds() -> dict[str, float]:
    this_process = Process.read(os.getpid())
    seconds = {"client": 0.0 if this_process is None else this_process.cpu_s}
    for state in Process.below(os.getpid()):
        command = Process.command_line(state.pid)
        if "plugin.offline" in command:
            continue
        kind = next((name for word, name in _KINDS.items() if word in command), "other")
        seconds[kind] = seconds.get(kind, 0.0) + state.cpu_s
    return seconds


COLUMNS = ("", "tokens/s", "of the offline engine's", "client", "API server", "engine core and worker")


def table(results: Sequence[DrawMeasurement]) -> list[tuple[str, ...]]:
    ours, offline = results
    ratios = [a / b for a, b in zip(ours.rates, offline.rates, strict=True)]
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
    shares = (ours.share("client"), ours.share("API server"), ours.share("engine core") + ours.share("worker"))
    rates = [f"{statistics.median(side.rates):.0f}" for side in results]
    shown = (f"{share:.0%}" for share in shares)
    return [(ours.side, rates[0], ratio, *shown), (offline.side, rates[1], "1", "", "", "")]


def write_results(
    draws: Sequence[DrawMeasurement], rank0: _Rank0Measurement, folder: Path, setting: RolloutSetting
) -> tuple[Path, Path]:
    record = {"setting": asdict(setting), "draws": [asdict(row) for row in draws], "rank0": asdict(rank0)}
    both = markdown(COLUMNS, table(draws)) + "\n" + markdown(_Rank0Measurement.COLUMNS, rank0.table())
    note = f"median of {setting.repeats}, least and greatest in brackets · {setting.prompts} × {setting.samples} responses "
    note += f"of at most {setting.new_tokens} tokens, {setting.size} model"
    return write_report(folder, "rollouts", record, both, note=note, packages=("torch", "numpy", "tepo-megatron"))


_VOCABULARY, _PROMPT, _GROUP = 128_256, 256, 8
_PIECE = 65_536

_VERSION = WeightsVersion(7, "0123456789abcdef")
_LABEL = f"{_VERSION.step}:{_VERSION.digest}"

_SAMPLE = 8  # responses of the older path: all would take gigabytes of JSON


@dataclass(frozen=True)
class _Rank0Measurement:
    """Seconds; those for JSON are extrapolated from ``_SAMPLE`` responses."""

    responses: int
    length: int
    read_s: float
    pack_s: float
    journal_s: float
    broadcast_s: float
    json_read_s: float
    json_pack_s: float

    COLUMNS: ClassVar[tuple[str, ...]] = ("rank 0, seconds", "arrays", "JSON before", "ratio")

    def table(self) -> list[tuple[str, ...]]:
        rows = [("read off the wire and checked", self.read_s, self.json_read_s), ("packed", self.pack_s, self.json_pack_s)]
        rows.append(("both", self.read_s + self.pack_s, self.json_read_s + self.json_pack_s))
        cells = [(name, f"{ours:.2f}", f"{theirs:.1f}", f"{ours / theirs:.3f}") for name, ours, theirs in rows]
        size = f"{self.responses} × {self.length}"
        cells += [("written to the journal", f"{self.journal_s:.2f}", "", "")]
        cells += [("sent to another rank (gloo)", f"{self.broadcast_s:.2f}", "", "")]
        return [(f"{name}, {size}", *rest) for name, *rest in cells]


def measure_rank0(responses: int, length: int, say: Callable[[str], None]) -> _Rank0Measurement:
    say(f"rank 0: {responses} responses of {length} tokens")
    begin = time.perf_counter()
    rollouts = [_rollout(index, item) for index, item in _receive(responses, length)]
    read = time.perf_counter()
    batch = pack(rollouts)
    packed = time.perf_counter()
    assert batch.num_tokens == responses * (length + _PROMPT)
    del batch
    with tempfile.TemporaryDirectory() as folder:
        journal = time.perf_counter()
        write_rollouts(Path(folder), 0, rollouts)
        journal_s = time.perf_counter() - journal
        del rollouts
        broadcast_s: float = in_processes(_send, 2, folder, responses, length)
    some = min(_SAMPLE, responses)
    say(f"rank 0: the older path, {some} responses")
    json_read_s, json_pack_s = _older(some, length)
    times = responses / some
    ours = (read - begin, packed - read, journal_s, broadcast_s)
    return _Rank0Measurement(responses, length, *ours, json_read_s * times, json_pack_s * times)


def _send(rank: int, folder: str, responses: int, length: int, inbox: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    batch = pack([_rollout(index, item) for index, item in _receive(responses, length)]) if rank == 0 else None
    dist.barrier()
    begin = time.perf_counter()
    broadcast(batch, torch.device("cpu"))
    dist.barrier()
    if rank == 0:
        inbox.put(json.dumps(time.perf_counter() - begin))
    dist.destroy_process_group()


def _random(length: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, _VOCABULARY, length).astype(np.int32), -rng.random(length, dtype=np.float32)


def _receive(responses: int, length: int) -> Iterator[tuple[int, Response]]:
    ids, logprobs = _random(length)

    def pieces(numbers: Sequence[int]) -> Iterator[bytes]:
        for number in numbers:
            frame = response_frame(number, ids, logprobs, "length", [(0, _LABEL)])
            yield from (frame[index : index + _PIECE] for index in range(0, len(frame), _PIECE))
        yield head_frame({"end": len(numbers)})

    for first in range(0, responses, _GROUP):
        samples = {number: Sample(number, 0, length) for number in range(first, min(first + _GROUP, responses))}
        yield from read_responses(pieces(list(samples)), samples, lambda: (_VERSION,), vocab_size=_VOCABULARY)


def _rollout(index: int, response: Response) -> Rollout:
    prompt = np.arange(_PROMPT, dtype=np.int32)
    result = (response.response_ids, response.logprobs, response.finish_reason, response.versions)
    return Rollout(f"p{index // _GROUP}", index // _GROUP, prompt, *result, reward=float(index % 2))


def _older(responses: int, length: int) -> tuple[float, float]:
    """Writes the earlier format: JSON with an object per token."""
    ids, logprobs = _random(length)
    pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
    content = [{"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []} for token, value in pairs]
    choice = {"token_ids": ids.tolist(), "logprobs": {"content": content}, "finish_reason": "length"}
    text = json.dumps({"choices": [choice] * responses})
    begin = time.perf_counter()
    drawn = [_older_response(choice) for choice in json.loads(text)["choices"]]
    read = time.perf_counter()
    prompt = tuple(range(_PROMPT))
    tokens, labels, mask, values = list[int](), list[int](), list[bool](), list[float]()
    for response_ids, response_logprobs in drawn:
        sequence = prompt + response_ids
        tokens += sequence
        labels += (*sequence[1:], 0)
        mask += [False] * (_PROMPT - 1) + [True] * len(response_ids) + [False]
        values += (*[0.0] * (_PROMPT - 1), *response_logprobs, 0.0)
    tensors = [torch.tensor(tokens), torch.tensor(labels), torch.tensor(mask), torch.tensor(values, dtype=torch.float32)]
    assert [tensor.numel() for tensor in tensors] == [responses * (length + _PROMPT)] * 4
    return read - begin, time.perf_counter() - read


def _older_response(choice: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
    ids, logprobs = choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert all(type(token) is int and 0 <= token < _VOCABULARY for token in ids)
    assert all(type(value) in (int, float) and -float("inf") < value <= 1e-3 for value in logprobs)
    return tuple(ids), tuple(logprobs)

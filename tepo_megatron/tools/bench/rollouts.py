"""Compares a rollout server with vLLM's offline engine, and measures rank 0's cost of responses."""

import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.runtime.proc import Process
from tepo_megatron.sampler.rollout_file import write_rollouts
from tepo_megatron.sampler.sampling import Sample
from tepo_megatron.sampler.vllm.wire import head_frame, read_responses, response_frame
from tepo_megatron.tools.bench.recipes import make_model
from tepo_megatron.tools.bench.step import SIZES
from tepo_megatron.tools.results import Child, Report, Table, in_processes
from tepo_megatron.trainer.megatron.parallel.batch import broadcast
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

    def run(self, say: Callable[[str], None]) -> Report:
        """Raises RuntimeError if the two sides drew different tokens."""
        rank0 = self.measure_rank0(say)
        with tempfile.TemporaryDirectory() as scratch:
            return self.report(_measure_draws(self, Path(scratch), say), rank0)

    def measure_rank0(self, say: Callable[[str], None]) -> dict[str, float]:
        """Seconds; JSON's are extrapolated from ``_SAMPLE`` responses."""
        responses, length = self.responses, self.length
        say(f"rank 0: {responses} responses of {length} tokens")
        seconds: dict[str, float] = {}
        with _timed(seconds, "read_s"):
            rollouts = _receive(responses, length)
        with _timed(seconds, "pack_s"):
            num_tokens = pack(rollouts).num_tokens
        assert num_tokens == responses * (length + _PROMPT)
        with tempfile.TemporaryDirectory() as folder, _timed(seconds, "journal_s"):
            write_rollouts(Path(folder), 0, rollouts)
        seconds["broadcast_s"] = in_processes(_send, 2, responses, length, backend="gloo")
        some = min(_SAMPLE, responses)
        say(f"rank 0: the older path, {some} responses")
        return seconds | {name: value * responses / some for name, value in _older(some, length).items()}

    def report(self, draws: Sequence[Mapping[str, Any]], rank0: Mapping[str, float]) -> Report:
        """``draws``: server's and offline engine's; lists: by repeat. ``shares``: CPU seconds per second, by process."""
        ours, offline = draws
        rates = [[tokens / s for tokens, s in zip(side["tokens"], side["seconds"], strict=True)] for side in draws]
        ratio = Report.median_and_range([a / b for a, b in zip(*rates, strict=True)])

        def share(*kinds: str) -> str:
            return f"{sum(statistics.median(item.get(kind, 0.0) for item in ours['shares']) for kind in kinds):.0%}"

        shares = (share("client"), share("API server"), share("engine core", "worker"))
        medians = [f"{statistics.median(side):.0f}" for side in rates]
        columns = ("", "tokens/s", "of the offline engine's", "client", "API server", "engine core and worker")
        rows = [(ours["side"], medians[0], ratio, *shares), (offline["side"], medians[1], "1", "", "", "")]
        read, packed = ((rank0[f"{name}_s"], rank0[f"json_{name}_s"]) for name in ("read", "pack"))
        times = {"read off the wire and checked": read, "packed": packed, "both": (read[0] + packed[0], read[1] + packed[1])}
        cells = [(name, f"{a:.2f}", f"{b:.1f}", f"{a / b:.3f}") for name, (a, b) in times.items()]
        cells.append(("written to the journal", f"{rank0['journal_s']:.2f}", "", ""))
        cells.append(("sent to another rank (gloo)", f"{rank0['broadcast_s']:.2f}", "", ""))
        size = f"{self.responses} × {self.length}"
        heads = ("rank 0, seconds", "arrays", "JSON before", "ratio")
        tables = [Table(columns, rows), Table(heads, [(f"{name}, {size}", *rest) for name, *rest in cells])]
        sizes = {"responses": self.responses, "length": self.length}
        record = {"setting": asdict(self), "draws": draws, "rank0": {**sizes, **rank0}}
        note = f"median of {self.repeats}, least and greatest in brackets · {self.prompts} × {self.samples} responses "
        note += f"of at most {self.new_tokens} tokens, {self.size} model"
        return Report("rollouts", record, tables, note)


def _measure_draws(setting: RolloutSetting, scratch: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    from tepo_megatron.config.rollout import ServerConfig
    from tepo_megatron.sampler.fleet.fleet import Fleet
    from tepo_megatron.sampler.sampling import prompt_seed
    from tepo_megatron.sampler.vllm.resources import worker_cores

    model, prompts = _model_and_prompts(setting, scratch)
    longest = max(map(len, prompts)) + setting.new_tokens
    config = ServerConfig(max_num_seqs=256, max_model_len=longest, start_timeout_s=600.0)
    sides = ("server and client", "vLLM's offline engine")
    draws: list[dict[str, Any]] = [{"side": side, "seconds": [], "tokens": [], "shares": []} for side in sides]
    fleet = Fleet(config, model_dir=model, dtype="float32", stop_token_ids=(), log_dir=scratch)
    (cores,) = worker_cores(config, 1)
    order = {"prompts": prompts, "n": setting.samples, "temperature": 1.0, "max_tokens": setting.new_tokens}
    with fleet, _offline_engine(model, longest, cores, scratch / "offline.log") as engine:
        engine.receive()  # it has started
        for repeat in range(-1, setting.repeats):  # the first draws warm both up
            say(f"draw {repeat + 1} of {setting.repeats}" if repeat >= 0 else "warming up")
            time.sleep(_IDLE_S)
            before, begin = _processor_seconds(), time.perf_counter()
            groups = fleet.generate(prompts, n=setting.samples, temperature=1.0, max_new_tokens=setting.new_tokens, seed=repeat)
            seconds = time.perf_counter() - begin
            share = {kind: (spent - before[kind]) / seconds for kind, spent in _processor_seconds().items()}
            digest = sha256(b"".join(item.response_ids.tobytes() for group in groups for item in group)).hexdigest()
            tokens = sum(item.response_ids.size for group in groups for item in group)
            time.sleep(_IDLE_S)
            theirs = engine.ask(order | {"seeds": [prompt_seed(repeat, number) for number in range(len(prompts))]})
            if (theirs["sha256"], theirs["tokens"]) != (digest, tokens):
                raise RuntimeError(
                    f"the server drew {tokens} tokens and the offline engine {theirs['tokens']}, or others, from the same "
                    "prompts and seeds; their times say nothing"
                )
            if repeat >= 0:
                draws[0]["shares"].append(share)
                for side, took in zip(draws, (seconds, theirs["seconds"]), strict=True):
                    side["seconds"].append(took)
                    side["tokens"].append(tokens)
    return draws


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


def _offline_engine(model: Path, longest: int, cores: str, log: Path) -> Child:
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": "1"}
    environment |= {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    engine = Child(["-m", "tepo_megatron.sampler.vllm.plugin.offline"], log, **environment)
    options = {"model": str(model), "dtype": "float32", "max_model_len": longest, "max_num_seqs": 256}
    options |= {"skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
    options |= {"enforce_eager": True, "enable_chunked_prefill": False, "disable_log_stats": True}
    engine.send({**options, "distributed_executor_backend": "uni"})
    return engine


def _processor_seconds() -> dict[str, float]:
    this_process = Process.read(os.getpid())
    seconds = defaultdict(float, client=0.0 if this_process is None else this_process.cpu_s)
    for state in Process.below(os.getpid()):
        command = Process.command_line(state.pid)
        if "plugin.offline" not in command:
            seconds[next((name for word, name in _KINDS.items() if word in command), "other")] += state.cpu_s
    return seconds


_VOCABULARY, _PROMPT, _GROUP = 128_256, 256, 8
_PIECE = 65_536
_VERSION = WeightsVersion(7, "0123456789abcdef")
_SAMPLE = 8  # responses of the older path: all would take gigabytes of JSON


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def _send(rank: int, responses: int, length: int) -> float:
    batch = pack(_receive(responses, length)) if rank == 0 else None
    dist.barrier()
    begin = time.perf_counter()
    broadcast(batch, torch.device("cpu"))
    dist.barrier()
    return time.perf_counter() - begin


def _random(length: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, _VOCABULARY, length).astype(np.int32), -rng.random(length, dtype=np.float32)


def _receive(responses: int, length: int) -> list[Rollout]:
    ids, logprobs = _random(length)
    prompt = np.arange(_PROMPT, dtype=np.int32)
    rollouts = []

    def pieces(numbers: Sequence[int]) -> Iterator[bytes]:
        for number in numbers:
            frame = response_frame(number, ids, logprobs, "length", [(0, _VERSION.label)])
            yield from (frame[index : index + _PIECE] for index in range(0, len(frame), _PIECE))
        yield head_frame({"end": len(numbers)})

    for first in range(0, responses, _GROUP):
        samples = {number: Sample(number, 0, length) for number in range(first, min(first + _GROUP, responses))}
        read = read_responses(pieces(list(samples)), samples, lambda: (_VERSION,), vocab_size=_VOCABULARY)
        for number, response in read:
            fields = (response.response_ids, response.logprobs, response.finish_reason, response.versions)
            group = first // _GROUP
            rollouts.append(Rollout(f"p{group}", group, prompt, *fields, reward=float(number % 2)))
    return rollouts


def _older(responses: int, length: int) -> dict[str, float]:
    ids, logprobs = _random(length)
    pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
    content = [{"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []} for token, value in pairs]
    choice = {"token_ids": ids.tolist(), "logprobs": {"content": content}, "finish_reason": "length"}
    text = json.dumps({"choices": [choice] * responses})
    seconds: dict[str, float] = {}
    drawn: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
    with _timed(seconds, "json_read_s"):
        for item in json.loads(text)["choices"]:
            drawn.append((tuple(item["token_ids"]), tuple(entry["logprob"] for entry in item["logprobs"]["content"])))
            assert all(type(token) is int and 0 <= token < _VOCABULARY for token in drawn[-1][0])
            assert all(type(value) in (int, float) and -float("inf") < value <= 1e-3 for value in drawn[-1][1])
    prompt = tuple(range(_PROMPT))
    tokens, labels, mask, values = list[int](), list[int](), list[bool](), list[float]()
    with _timed(seconds, "json_pack_s"):
        for response_ids, response_logprobs in drawn:
            sequence = prompt + response_ids
            tokens += sequence
            labels += (*sequence[1:], 0)
            mask += [False] * (_PROMPT - 1) + [True] * len(response_ids) + [False]
            values += (*[0.0] * (_PROMPT - 1), *response_logprobs, 0.0)
        tensors = [torch.tensor(tokens), torch.tensor(labels), torch.tensor(mask), torch.tensor(values)]
    assert [tensor.numel() for tensor in tensors] == [responses * (length + _PROMPT)] * 4
    return seconds

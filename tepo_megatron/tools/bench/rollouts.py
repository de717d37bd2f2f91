"""Measures a rollout server and its client against vLLM's offline engine, and what a step's responses cost rank 0."""

from __future__ import annotations

import json
import os
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
from typing import Any

from tepo_megatron.runtime import proc
from tepo_megatron.tools.bench.rank0 import Rank0Measurement, measure_rank0
from tepo_megatron.tools.results import markdown, write_report

Ask = Callable[[Mapping[str, Any]], dict[str, Any]]

IDLE_S = 1.5
"""Between two draws: vLLM's worker spins for a second after its last message, which costs the other draw a core."""

KINDS = {"api_server": "API server", "EngineCore": "engine core", "Worker": "worker", "supervise": "supervisor"}


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
    """Seconds and tokens of each draw; CPU seconds of each kind of process per second."""

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


def run(setting: RolloutSetting, say: Callable[[str], None]) -> tuple[list[DrawMeasurement], Rank0Measurement]:
    """Both measurements. Raises RuntimeError if the two sides drew different tokens, since their times are then not
    comparable."""
    rank0 = measure_rank0(setting.responses, setting.length, say)
    with tempfile.TemporaryDirectory() as scratch:
        return _measure_draws(setting, Path(scratch), say), rank0


def _measure_draws(setting: RolloutSetting, scratch: Path, say: Callable[[str], None]) -> list[DrawMeasurement]:
    from tepo_megatron.config.rollout_server import ServerConfig
    from tepo_megatron.sampler.fleet.fleet import Fleet
    from tepo_megatron.sampler.sampling import prompt_seed
    from tepo_megatron.sampler.vllm.server.resources import worker_cores

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
            time.sleep(IDLE_S)
            before, begin = _shares(), time.perf_counter()
            groups = fleet.generate(prompts, n=setting.samples, temperature=1.0, max_new_tokens=setting.new_tokens, seed=repeat)
            seconds = time.perf_counter() - begin
            share = _difference(before, _shares(), seconds)
            digest = sha256(b"".join(item.response_ids.tobytes() for group in groups for item in group)).hexdigest()
            tokens = sum(item.response_ids.size for group in groups for item in group)
            time.sleep(IDLE_S)
            theirs = ask(
                {"prompts": prompts, "n": setting.samples, "seeds": seeds, "temperature": 1.0, "max_tokens": setting.new_tokens}
            )
            if (theirs["sha256"], theirs["tokens"]) != (digest, tokens):
                raise RuntimeError(
                    f"the server drew {tokens} tokens and the offline engine {theirs['tokens']}, or others, from the same "
                    "prompts and seeds; their times say nothing"
                )
            if repeat >= 0:
                for side, took, made in ((ours, seconds, tokens), (offline, theirs["seconds"], tokens)):
                    side.seconds.append(took)
                    side.tokens.append(made)
                ours.shares.append(share)
    return [ours, offline]


def _model_and_prompts(setting: RolloutSetting, scratch: Path) -> tuple[Path, list[list[int]]]:
    import random

    from tepo_megatron.tasks.data.builtin import resolve_model_path
    from tepo_megatron.tasks.data.problems import load_problems
    from tepo_megatron.tasks.data.tokenizer import load_tokenizer
    from tepo_megatron.tools.bench.recipe_run import make_model
    from tepo_megatron.tools.bench.step.step_bench import SIZES

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
def _offline_engine(model: Path, longest: int, cores: str, log: Path) -> Iterator[Ask]:
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


def _shares() -> dict[str, float]:
    this_process = proc.process_state(os.getpid())
    seconds = {"client": 0.0 if this_process is None else this_process.cpu_s}
    for state in proc.descendants(os.getpid()):
        command = proc.command_line(state.pid)
        if "plugin.offline" in command:
            continue
        kind = next((name for word, name in KINDS.items() if word in command), "other")
        seconds[kind] = seconds.get(kind, 0.0) + state.cpu_s
    return seconds


def _difference(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> dict[str, float]:
    return {kind: (spent - before.get(kind, 0.0)) / seconds for kind, spent in after.items()}


COLUMNS = ("", "tokens/s", "of the offline engine's", "client", "API server", "engine core and worker")


def table(results: Sequence[DrawMeasurement]) -> list[tuple[str, ...]]:
    """Medians, with minimum and maximum in brackets; shares are CPU seconds per second."""
    ours, offline = results
    ratios = [a / b for a, b in zip(ours.rates, offline.rates, strict=True)]
    own = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
    shares = (ours.share("client"), ours.share("API server"), ours.share("engine core") + ours.share("worker"))
    rates = [f"{statistics.median(side.rates):.0f}" for side in results]
    return [
        (ours.side, rates[0], own, *(f"{share:.0%}" for share in shares)),
        (offline.side, rates[1], "1", "", "", ""),
    ]


def write_results(
    draws: Sequence[DrawMeasurement], rank0: Rank0Measurement, folder: Path, setting: RolloutSetting
) -> tuple[Path, Path]:
    """Write ``rollouts.json`` and ``.md``."""
    record = {"setting": asdict(setting), "draws": [asdict(row) for row in draws], "rank0": asdict(rank0)}
    both = markdown(COLUMNS, table(draws)) + "\n" + markdown(Rank0Measurement.COLUMNS, rank0.table())
    note = (
        f"median of {setting.repeats}, least and greatest in brackets · {setting.prompts} × {setting.samples} responses of at "
    )
    note += f"most {setting.new_tokens} tokens, {setting.size} model"
    packages = ("torch", "numpy", "tepo-megatron")
    return write_report(folder, "rollouts", record, both, note=note, packages=packages)

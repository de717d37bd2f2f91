"""Memory and time of `engine.head = fused` and `logits`: scores and gradients of one micro-batch, on one rank.

    python -m tepo_megatron.tools.bench.studies.measure_head   # a CPU: 8 192 tokens, vocabulary 128 256, both dtypes
    python -m tepo_megatron.tools.bench.studies.measure_head --hidden 4096 --dtypes bfloat16   # on a GPU

The engine scores and differentiates a random one-layer Llama, all tokens in one micro-batch. Each head runs in its own
process, in turn; the best repeat counts. Peaks are memory that a pass adds: of the resident set on a CPU (malloc returns freed
memory at once), of the allocator on a GPU. Writes Markdown and JSON to --output.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout, WeightsVersion
from tepo_megatron.core.types import Batch, TokenScores
from tepo_megatron.tools.results import markdown, write_report
from tepo_megatron.weights.architecture import model_spec
from tepo_megatron.weights.layouts.table import tensor_shapes
from tepo_megatron.weights.storage.hf_folder import write_model

HEADS = ("logits", "fused")
PASSES = ("score", "forward and backward")
SEQUENCES = 16
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class _Setting:
    tokens: int
    vocab: int
    hidden: int
    dtype: str

    @property
    def logits(self) -> int:
        return self.tokens * self.vocab * (4 if self.dtype == "float32" else 2)


def _write_random_model(folder: Path, setting: _Setting) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": setting.vocab, "hidden_size": setting.hidden}
    config |= {"intermediate_size": 2 * setting.hidden, "num_hidden_layers": 1, "tie_word_embeddings": False}
    config |= {"num_attention_heads": setting.hidden // 64, "num_key_value_heads": 1, "max_position_embeddings": setting.tokens}
    source = folder / "described"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    shapes, generator = tensor_shapes(model_spec(config, "config")), torch.Generator().manual_seed(0)
    dtype = getattr(torch, setting.dtype)
    tensors = ((name, torch.randn(shape, generator=generator) / shape[-1] ** 0.5) for name, shape in shapes.items())
    write_model(folder / "model", tensors, source=source, dtype=dtype)


def rollouts(setting: _Setting) -> list[Rollout]:
    generator, length = torch.Generator().manual_seed(0), setting.tokens // SEQUENCES
    made = []
    for number in range(SEQUENCES):
        ids = tuple(torch.randint(0, setting.vocab, (length,), generator=generator).tolist())
        rest, version = (-9.0,) * (length - 1), WeightsVersion(0)
        made.append(Rollout(str(number), number // 4, ids[:1], ids[1:], rest, "stop", version, reward=float(number % 2)))
    return made


class _Meter:
    def __init__(self) -> None:
        self.on_gpu = torch.cuda.is_available()

    def measure(self, work: Callable[[], object]) -> dict[str, float]:
        """Seconds (on a CPU, of this process alone), and the most bytes beyond those held before."""
        gc.collect()
        before = self._reset()
        clock = time.perf_counter if self.on_gpu else time.process_time  # the thread's own time, whoever else uses the CPU
        start = clock()
        work()
        if self.on_gpu:
            torch.cuda.synchronize()
        seconds = clock() - start
        return {"seconds": seconds, "peak": (torch.cuda.max_memory_allocated() if self.on_gpu else _resident("VmHWM")) - before}

    def _reset(self) -> int:
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        Path("/proc/self/clear_refs").write_text("5")
        return _resident("VmRSS")


def _resident(kind: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) * 1024


def child(setting: _Setting, head: str, model: Path) -> dict[str, dict[str, float]]:
    from tepo_megatron.trainer.megatron.engine import Engine

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    engine_section = {"head": head, "micro_batch_tokens": setting.tokens}
    given = {"model": {"path": str(model), "dtype": setting.dtype}, "engine": engine_section}
    engine = Engine(RunConfig.model_validate(given), model)
    batch = engine.batch_from_root(rollouts(setting))
    meter, forward, policy = _Meter(), engine.forward, engine.policy

    def loss(scores: TokenScores, micro: Batch) -> tuple[Tensor, dict[str, Any]]:
        return (scores.logprob.sum() - 0.1 * scores.entropy.sum()) / micro.num_tokens, {}

    def train() -> None:
        for chunk in policy.ddp:
            chunk.zero_grad_buffer()
        forward.run(policy.ddp, batch, forward.micro_batches(batch), loss, train=True)

    small = engine.batch_from_root(rollouts(_Setting(SEQUENCES * 16, setting.vocab, setting.hidden, setting.dtype)))
    engine.score(small)
    forward.run(policy.ddp, small, forward.micro_batches(small), loss, train=True)
    result = {PASSES[0]: meter.measure(lambda: engine.score(batch)), PASSES[1]: meter.measure(train)}
    engine.close()
    return result


def measure(setting: _Setting, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """head → pass → least seconds and least peak."""
    result: dict[str, list[dict[str, dict[str, float]]]] = {head: [] for head in HEADS}
    with tempfile.TemporaryDirectory() as folder:
        _write_random_model(Path(folder), setting)
        for _ in range(repeats):
            for head in HEADS:
                case = json.dumps({**asdict(setting), "head": head, "model": f"{folder}/model"})
                command = [sys.executable, __file__, "--child", case]
                done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True, check=True)
                result[head].append(json.loads(done.stdout.splitlines()[-1]))
    return {
        head: {name: {kind: min(run[name][kind] for run in runs) for kind in ("seconds", "peak")} for name in PASSES}
        for head, runs in result.items()
    }


def rows(setting: _Setting, result: dict[str, dict[str, dict[str, float]]]) -> list[tuple[str, ...]]:
    cells = []
    for name in PASSES:
        plain, fused = (result[head][name] for head in HEADS)
        less = plain["peak"] - fused["peak"]
        shape = f"T {setting.tokens}, V {setting.vocab}, H {setting.hidden}, {setting.dtype}" if name is PASSES[0] else ""
        peaks = (f"{value / 2**20:.0f}" for value in (setting.logits, plain["peak"], fused["peak"], less))
        seconds = (f"{value:.2f}" for value in (plain["seconds"], fused["seconds"], fused["seconds"] / plain["seconds"]))
        cells.append((shape, name, *peaks, f"{less / setting.logits:.2f}", *seconds))
    return cells


COLUMNS = (
    *("shape", "pass", "logits, MiB", "peak with logits, MiB", "peak fused, MiB", "less, MiB", "in logits"),
    *("with logits, s", "fused, s", "ratio"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--hidden", type=int, default=128, help="a multiple of 64 (default 128)")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="separated by commas")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("docs/results/data"), help="folder for the results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        case = json.loads(given.child)
        head, model = case.pop("head"), Path(case.pop("model"))
        print(json.dumps(child(_Setting(**case), head, model)))
        return
    note, device = f"best of {given.repeats}, one thread, CPU seconds", "cpu"
    if torch.cuda.is_available():
        note, device = f"{torch.cuda.get_device_name()} · best of {given.repeats}", "cuda"
    table, results, packages = [], [], ["torch", "megatron-core", "tepo-megatron"]
    for dtype in given.dtypes.split(","):
        setting = _Setting(given.tokens, given.vocab, given.hidden, dtype)
        result = measure(setting, given.repeats)
        table += rows(setting, result)
        results.append({**asdict(setting), "logits_bytes": setting.logits, "results": result})
        record, text = {"repeats": given.repeats, "results": results}, markdown(COLUMNS, table)
        paths = write_report(given.output, f"head-{device}", record, text, note=note, packages=packages)  # after each dtype
        print(f"{text}wrote {' and '.join(str(path) for path in paths)}")


if __name__ == "__main__":
    main()

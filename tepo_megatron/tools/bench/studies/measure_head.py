"""Memory and time of `engine.head = fused` and `logits`: scores and gradients of one micro-batch, on one rank.

    python -m tepo_megatron.tools.bench.studies.measure_head   # a CPU: 8 192 tokens, vocabulary 128 256, both dtypes
    python -m tepo_megatron.tools.bench.studies.measure_head --hidden 4096 --dtypes bfloat16   # on a GPU

The engine scores and differentiates a random one-layer Llama, all tokens in one micro-batch. Each head runs in its own
process, in turn; the best repeat counts. Peaks are memory that a pass adds: of the resident set on a CPU (malloc returns freed
memory at once), of the allocator on a GPU.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.config import RunConfig
from tepo_megatron.core.types import Batch, TokenScores
from tepo_megatron.tools.bench.recipes import llama, make_model, random_rollouts
from tepo_megatron.tools.results import Report, Table, in_processes, markdown, resident_peak, study_parser

_HEADS = ("logits", "fused")
_PASSES = ("score", "forward and backward")
_SEQUENCES = 16
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class _Setting:
    tokens: int
    vocab: int
    hidden: int
    dtype: str

    @property
    def logits(self) -> int:
        return self.tokens * self.vocab * (4 if self.dtype == "float32" else 2)


def _measure(work: Callable[[], object]) -> dict[str, float]:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        work()
        torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - start, "peak": torch.cuda.max_memory_allocated() - before}
    peaks: list[int] = []
    with resident_peak(peaks):
        start = time.process_time()  # the thread's own time, whoever else uses the CPU
        work()
        seconds = time.process_time() - start
    return {"seconds": seconds, "peak": peaks[0]}


def _measure_head(_: int, setting: _Setting, head: str, model: Path) -> dict[str, dict[str, float]]:
    from tepo_megatron.trainer.megatron.engine import Engine

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    config: dict[str, Any] = {"model": {"path": str(model), "dtype": setting.dtype}}
    config["engine"] = {"head": head, "micro_batch_tokens": setting.tokens}
    engine = Engine(RunConfig.model_validate(config), model)

    def batch_of(tokens: int) -> Batch:
        length = tokens // _SEQUENCES - 1
        return engine.batch_from_root(random_rollouts(_SEQUENCES, length, setting.vocab, prompt=1, logprob=-9.0))

    batch, forward, policy = batch_of(setting.tokens), engine.forward, engine.policy

    def loss(scores: TokenScores, micro: Batch) -> tuple[Tensor, dict[str, Any]]:
        return (scores.logprob.sum() - 0.1 * scores.entropy.sum()) / micro.num_tokens, {}

    def train() -> None:
        for chunk in policy.ddp:
            chunk.zero_grad_buffer()
        forward.run(policy.ddp, batch, forward.micro_batches(batch), loss, train=True)

    small = batch_of(_SEQUENCES * 16)
    engine.score(small)
    forward.run(policy.ddp, small, forward.micro_batches(small), loss, train=True)
    result = {_PASSES[0]: _measure(lambda: engine.score(batch)), _PASSES[1]: _measure(train)}
    engine.close()
    return result


def _measure_heads(setting: _Setting, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    result: dict[str, list[dict[str, dict[str, float]]]] = {head: [] for head in _HEADS}
    with tempfile.TemporaryDirectory() as folder:
        heads = (setting.hidden // 64, 1)
        more = {"max_position_embeddings": setting.tokens, "tie_word_embeddings": False}
        model = Path(folder) / "model"
        make_model(model, llama(1, setting.hidden, 2 * setting.hidden, setting.vocab, *heads, **more))
        os.environ.update(_ENVIRONMENT)  # for the processes
        for _ in range(repeats):
            for head in _HEADS:
                result[head].append(in_processes(_measure_head, 1, setting, head, model))
    return {
        head: {name: {kind: min(run[name][kind] for run in runs) for kind in ("seconds", "peak")} for name in _PASSES}
        for head, runs in result.items()
    }


def _rows(setting: _Setting, result: dict[str, dict[str, dict[str, float]]]) -> list[tuple[str, ...]]:
    cells = []
    for name in _PASSES:
        plain, fused = (result[head][name] for head in _HEADS)
        less = plain["peak"] - fused["peak"]
        shape = f"T {setting.tokens}, V {setting.vocab}, H {setting.hidden}, {setting.dtype}" if name is _PASSES[0] else ""
        peaks = (f"{value / 2**20:.0f}" for value in (setting.logits, plain["peak"], fused["peak"], less))
        seconds = (f"{value:.2f}" for value in (plain["seconds"], fused["seconds"], fused["seconds"] / plain["seconds"]))
        cells.append((shape, name, *peaks, f"{less / setting.logits:.2f}", *seconds))
    return cells


_COLUMNS = (
    *("shape", "pass", "logits, MiB", "peak with logits, MiB", "peak fused, MiB", "less, MiB", "in logits"),
    *("with logits, s", "fused, s", "ratio"),
)


def _main() -> None:
    parser = study_parser(
        __doc__,
        tokens=(8192, "tokens of the micro-batch"),
        vocab=(128256, "tokens of the vocabulary"),
        hidden=(128, "a multiple of 64"),
        repeats=(2, "of each; the best counts"),
    )
    parser.add_argument("--dtypes", default="bfloat16,float32", help="separated by commas")
    args = parser.parse_args()
    note, device = f"best of {args.repeats}, one thread, CPU seconds", "cpu"
    if torch.cuda.is_available():
        note, device = f"{torch.cuda.get_device_name()} · best of {args.repeats}", "cuda"
    rows, results, packages = [], [], ["torch", "megatron-core", "tepo-megatron"]
    for dtype in args.dtypes.split(","):
        setting = _Setting(args.tokens, args.vocab, args.hidden, dtype)
        result = _measure_heads(setting, args.repeats)
        rows += _rows(setting, result)
        results.append({**asdict(setting), "logits_bytes": setting.logits, "results": result})
        record = {"repeats": args.repeats, "results": results}
        print(markdown(_COLUMNS, rows))
        print(Report(f"head-{device}", record, [Table(_COLUMNS, rows)], note, packages).write(args.output))  # after each dtype


if __name__ == "__main__":
    _main()

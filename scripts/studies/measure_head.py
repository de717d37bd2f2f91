"""Memory and time of `engine.head = fused` and `logits`: scores and gradients of one micro-batch, on one rank.

    python -m scripts.studies.measure_head   # a CPU: 8 192 tokens, vocabulary 128 256, both dtypes
    python -m scripts.studies.measure_head --hidden 4096 --dtypes bfloat16   # on a GPU

A random one-layer Llama has all tokens in one micro-batch. Each head runs in its own process, in turn; the best repeat counts.
Peaks are memory that a pass adds: resident on a CPU (malloc returns freed memory at once), the allocator's on a GPU.
"""

import gc
import itertools
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.studies.options import study_parser
from tepo_megatron.config import RunConfig
from tepo_megatron.core.types import Batch, TokenScores
from tepo_megatron.tools.bench.recipes import GROUP, llama, make_model
from tepo_megatron.tools.bench.step_rank import make_rollouts
from tepo_megatron.tools.results import Report, Table, in_processes, resident_peak

_HEADS = ("logits", "fused")
_PASSES = ("score", "forward and backward")
_SEQUENCES = 16
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
_Figures = dict[str, dict[str, float]]  # pass → seconds and peak


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


@dataclass(frozen=True)
class _Setting:
    tokens: int
    vocab: int
    hidden: int
    dtype: str

    @property
    def logits_bytes(self) -> int:
        return self.tokens * self.vocab * (4 if self.dtype == "float32" else 2)

    def measure(self, repeats: int) -> dict[str, _Figures]:
        result: dict[str, list[_Figures]] = {head: [] for head in _HEADS}
        with tempfile.TemporaryDirectory() as folder:
            more = {"max_position_embeddings": self.tokens, "tie_word_embeddings": False}
            model = Path(folder) / "model"
            make_model(model, llama(1, self.hidden, 2 * self.hidden, self.vocab, self.hidden // 64, 1, **more))
            os.environ.update(_ENVIRONMENT)  # for the processes
            for _, head in itertools.product(range(repeats), _HEADS):
                result[head].append(in_processes(_measure_head, 1, self, head, model))
        return {
            head: {name: {kind: min(run[name][kind] for run in runs) for kind in ("seconds", "peak")} for name in _PASSES}
            for head, runs in result.items()
        }

    def rows(self, result: Mapping[str, _Figures]) -> Iterator[dict[str, str]]:
        for name in _PASSES:
            plain, fused = (result[head][name] for head in _HEADS)
            less = plain["peak"] - fused["peak"]
            yield {
                "shape": f"T {self.tokens}, V {self.vocab}, H {self.hidden}, {self.dtype}" if name is _PASSES[0] else "",
                "pass": name,
                "logits, MiB": f"{self.logits_bytes / 2**20:.0f}",
                "peak with logits, MiB": f"{plain['peak'] / 2**20:.0f}",
                "peak fused, MiB": f"{fused['peak'] / 2**20:.0f}",
                "less, MiB": f"{less / 2**20:.0f}",
                "in logits": f"{less / self.logits_bytes:.2f}",
                "with logits, s": f"{plain['seconds']:.2f}",
                "fused, s": f"{fused['seconds']:.2f}",
                "ratio": f"{fused['seconds'] / plain['seconds']:.2f}",
            }


def _measure_head(_: int, setting: _Setting, head: str, model: Path) -> _Figures:
    from tepo_megatron.trainer.megatron.engine import Engine

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    sizes = {"head": head, "micro_batch_tokens": setting.tokens, "layers": "local"}  # its head is that of all layers
    config = RunConfig.model_validate({"model": {"path": str(model), "dtype": setting.dtype}, "engine": sizes})
    engine = Engine(config, model)
    forward, ddp = engine.forward, engine.policy.ddp

    def batch_of(tokens: int) -> Batch:
        lengths = [tokens // _SEQUENCES] * _SEQUENCES
        return engine.batch_from_root(make_rollouts(lengths, setting.vocab, group=GROUP, prompt=1, logprob=-9.0))

    def loss(scores: TokenScores, micro: Batch) -> tuple[Tensor, dict[str, Any]]:
        return (scores.logprob.sum() - 0.1 * scores.entropy.sum()) / micro.num_tokens, {}

    def train(batch: Batch) -> None:
        for chunk in ddp:
            chunk.zero_grad_buffer()
        forward.run(ddp, batch, forward.micro_batches(batch), loss, train=True)

    batch, small = batch_of(setting.tokens), batch_of(_SEQUENCES * 16)
    engine.score(small)
    train(small)
    result = {_PASSES[0]: _measure(lambda: engine.score(batch)), _PASSES[1]: _measure(lambda: train(batch))}
    engine.close()
    return result


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
    rows, results = list[dict[str, str]](), []
    for dtype in args.dtypes.split(","):
        setting = _Setting(args.tokens, args.vocab, args.hidden, dtype)
        result = setting.measure(args.repeats)
        rows += setting.rows(result)
        results.append({**asdict(setting), "logits_bytes": setting.logits_bytes, "results": result})
        record = {"repeats": args.repeats, "results": results}
        Report(f"head-{device}", record, [Table.of(rows)], note).show(args.output)  # after each dtype


if __name__ == "__main__":
    _main()

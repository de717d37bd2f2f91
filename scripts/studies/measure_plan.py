"""Compares a plan's terms with what engines on CPU ranks hold and write, and its assumed rates with measured ones.

    python -m scripts.studies.measure_plan     # two ranks, a minute

Bytes are counted by tensor after one update, and by file after a checkpoint. Rates are of one core.
"""

import hashlib
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.studies.options import study_parser
from tepo_megatron.config import RunConfig
from tepo_megatron.plan.memory import BATCH_BYTES_PER_TOKEN, TrainingRanks
from tepo_megatron.plan.shapes import resolve_spec
from tepo_megatron.plan.time import DIGEST_SECONDS_PER_BYTE, PACK_SECONDS_PER_TOKEN
from tepo_megatron.tools.bench.recipes import GROUP, llama, make_model
from tepo_megatron.tools.bench.step_rank import make_rollouts
from tepo_megatron.tools.results import Report, Table, in_processes
from tepo_megatron.trainer.packing import pack

_SEQUENCES, _TOKENS, _VOCAB = 8, 32, 1024
MODEL = llama(4, 256, 512, _VOCAB, 8, 2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False)
_DP2 = {"model": {"dtype": "bfloat16"}, "engine": {"parallel": {"dp": 2}}}
_RUNS: dict[str, dict[str, Any]] = {
    "float32, TP2": {"engine": {"parallel": {"tp": 2, "sequence_parallel": True}}},
    "float32, PP2": {"engine": {"parallel": {"pp": 2}}},
    "bfloat16, DP2, distributed": {**_DP2, "optimizer": {"distributed": True}},
    "the same, states on the host": {**_DP2, "optimizer": {"distributed": True, "offload_fraction": 1.0}},
    "bfloat16, TP2, LoRA of rank 8": {"model": {"dtype": "bfloat16", "lora": {"rank": 8}}, "engine": {"parallel": {"tp": 2}}},
}


@dataclass(frozen=True)
class _Term:
    """Bytes of the largest rank, or of all for disk."""

    run: str
    term: str
    planned: float
    counted: float

    @property
    def error(self) -> float:
        return self.planned / self.counted - 1


def configs(model: Path) -> dict[str, RunConfig]:
    shared = {"rollout": {"replay": "recorded"}, "train": {"minibatches": 1, "steps": 1}}
    sizes = {"platform": "cpu", "micro_batch_tokens": _SEQUENCES * _TOKENS}
    documents = {
        name: {**run, **shared, "model": {**run.get("model", {}), "path": str(model)}, "engine": {**run["engine"], **sizes}}
        for name, run in _RUNS.items()
    }
    return {name: RunConfig.model_validate(document) for name, document in documents.items()}


def _held(tensors: Iterable[Tensor]) -> int:
    return sum({item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in tensors}.values())


def counts(config: RunConfig, folder: Path) -> dict[str, int]:
    """Every rank of an existing process group calls."""
    from megatron.core import parallel_state

    from tepo_megatron.trainer.megatron.engine import Engine
    from tepo_megatron.trainer.megatron.policy.optimizer_states import adam_tensors

    engine = Engine(config, Path(config.model.path))
    rollouts = make_rollouts([_TOKENS] * _SEQUENCES, _VOCAB, group=GROUP, prompt=1, logprob=-6.0)
    batch = engine.score(engine.batch_from_root(rollouts if engine.ranks.rank == 0 else None))
    engine.update(batch)
    policy, lora = engine.policy, engine.policy.lora
    model = [param.detach() for param in (*policy.params.values(), *(lora.params.values() if lora else ()))]
    of_model = {item.untyped_storage().data_ptr() for item in model}
    states = [item for inner in policy.optimizer.chained_optimizers for item in adam_tensors(inner.optimizer) if item.dim()]
    engine.checkpoints.begin(folder, step=1, state={})
    engine.checkpoints.finish()
    result = {
        "weights": _held(model),
        "gradients": _held(buffer.grad_data for ddp in policy.ddp for buffer in ddp.buffers),
        "optimizer": _held(item for item in states if item.untyped_storage().data_ptr() not in of_model),
        "batch": sum(value.nbytes for value in vars(batch).values() if isinstance(value, Tensor)),
        "written": sum(path.stat().st_size for path in folder.rglob(f"*/shards/rank{engine.ranks.rank:05d}*")),
    }
    parallel_state.destroy_model_parallel()
    return result


def compare(name: str, config: RunConfig, ranks: list[Mapping[str, int]]) -> Iterator[_Term]:
    """States on the host count 12 bytes, without gradients."""
    training = TrainingRanks(resolve_spec(config.model.path)[0], config)
    step = _SEQUENCES * _TOKENS
    stages = range(config.engine.parallel.pp)
    planned = [training.memory(stage, longest=_TOKENS, step_tokens=step) for stage in stages]
    for term in ("weights", "gradients"):
        yield _Term(name, term, max(getattr(item, term) for item in planned), max(rank[term] for rank in ranks))
    owned = max(training.owned_weights(stage) for stage in stages)
    away = min(12.0, training.host_state_bytes)
    yield _Term(name, "optimizer", (training.state_bytes + away) * owned, max(rank["optimizer"] for rank in ranks))
    yield _Term(name, "a step's batch", step * BATCH_BYTES_PER_TOKEN, max(rank["batch"] for rank in ranks))
    yield _Term(name, "checkpoint", training.checkpoint_bytes, sum(rank["written"] for rank in ranks))
    yield _Term(name, "checkpoint, a rank", training.rank_checkpoint_bytes, max(rank["written"] for rank in ranks))


def _rates() -> Iterator[tuple[str, float, float]]:
    rollouts, raw = make_rollouts([512] * 256, _VOCAB, group=GROUP, prompt=1, logprob=-6.0), bytes(2**27)
    packed = sum(len(item.response_ids) for item in rollouts)
    yield "packing a sampled token, µs", PACK_SECONDS_PER_TOKEN * 1e6, _best(lambda: pack(rollouts)) / packed * 1e6
    digest = _best(lambda: hashlib.sha256(raw).digest()) / len(raw)
    yield "digest of a byte of a checkpoint, ns", DIGEST_SECONDS_PER_BYTE * 1e9, digest * 1e9
    param = torch.nn.Parameter(torch.zeros(2**24))
    param.grad = torch.ones_like(param)
    adam = torch.optim.AdamW([param], fused=True)
    adam.step()
    planned, measured = 1e9 / RunConfig().cluster.host_adam_per_s, _best(adam.step) / param.numel() / 8 * 1e9
    yield "Adam on the host, a weight of eight cores' work, ns", planned, measured


def _best(work: Callable[[], object]) -> float:
    def seconds() -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    return min(seconds() for _ in range(3))


def _measure_rank(rank: int, folder: Path) -> None:
    warnings.filterwarnings("ignore")
    result = {name: counts(config, folder / name) for name, config in configs(folder / "model").items()}
    (folder / f"rank{rank}.json").write_text(json.dumps(result))


def _main() -> None:
    output = study_parser(__doc__).parse_args().output
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        make_model(folder / "model", MODEL)
        in_processes(_measure_rank, 2, folder, backend="gloo")
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
        runs = configs(folder / "model")
        terms = [term for name, config in runs.items() for term in compare(name, config, [rank[name] for rank in ranks])]
    rates = list(_rates())
    rows = []
    for name in dict.fromkeys(item.term for item in terms):
        worst = max((item for item in terms if item.term == name), key=lambda item: abs(item.error))
        rows.append((name, worst.run, f"{worst.planned:,.0f}", f"{worst.counted:,.0f}", f"{worst.error:+.1%}"))
    for name, planned, measured in rates:
        rows.append((name, "one core", f"{planned:.2f}", f"{measured:.2f}", f"{planned / measured - 1:+.0%}"))
    table = Table(("term", "run with the largest error", "planned", "measured", "error"), rows)
    record = {"terms": [{**asdict(item), "error": item.error} for item in terms], "rates": rates}
    Report("plan-cpu", record, [table], "bytes after an update; CPU seconds").show(output)


if __name__ == "__main__":
    _main()

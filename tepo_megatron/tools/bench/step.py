"""Compares training steps on CPU with Megatron-Core's and an older version's (``tepo bench step``)."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.tools.bench.recipes import llama, make_model
from tepo_megatron.tools.results import Child, Report, Table

ROOT = Path(__file__).parents[3]

SIZES = {
    "tiny": llama(4, 128, 256, 64, 4, 2),
    "small": llama(4, 256, 688, 8192, 8, 2, max_position_embeddings=32768),
}  # 0.6 and 7 million parameters

OURS = "tepo_megatron"
OLDER = "tepo_megatron before"
PACKED = "Megatron-Core, packed, our attention"
ROWS = "Megatron-Core, padded rows"
_AGREEMENT = 1e-3  # nats; rounding of float32 gives about 1e-6
_GROUP, _PROMPT = 4, 4
_WIDEST = 20.0  # standard deviation of logarithms; beyond it one sequence has nearly all tokens


@dataclass(frozen=True)
class StepSetting:
    """``ratios`` are of the longest sequence to the mean."""

    layouts: tuple[str, ...]
    ratios: tuple[float, ...]
    size: str
    sequences: int
    mean_length: int
    micro_batch_tokens: int
    repeats: int

    def run(self, before: str, *, say: Callable[[str], None] = lambda line: None) -> list[_StepMeasurement]:
        """Methods alternate on the same weights and tokens. ``before``: see ``source_of``. Raises ValueError for an
        invalid setting, RuntimeError if a rank fails or log-probs differ.
        """
        if self.size not in SIZES:
            raise ValueError(f"--size {self.size} is unknown; known: {', '.join(SIZES)}")
        for layout in self.layouts:
            RunConfig.model_validate(self.rank_arguments(layout)["config"])
        results = []
        with tempfile.TemporaryDirectory() as scratch, source_of(before) as older:
            model = Path(scratch) / "model"
            make_model(model, SIZES[self.size])
            for layout in self.layouts:
                with ExitStack() as stack:  # ranks of one version wait while those of the other compute
                    worlds = dict.fromkeys((OURS, PACKED, ROWS), stack.enter_context(self.start(ROOT, model, layout)))
                    if older is not None:
                        worlds[OLDER] = stack.enter_context(self.start(older, model, layout))
                    for ratio in self.ratios:
                        say(f"{layout}, longest/mean {ratio:g}")
                        results += self.compare(layout, ratio, worlds)
        return results

    @contextmanager
    def start(self, root: Path, model: Path, layout: str) -> Iterator[_World]:
        """Ranks have one thread each (``step_rank.py``). ``root``: the checkout whose package they use."""
        arguments = self.rank_arguments(layout)
        world = RunConfig.model_validate(arguments["config"]).engine.parallel.world_size
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tepo-step-")))
            text = json.dumps({**arguments, "model": str(model), "store": str(folder / "store")})
            environment = {"WORLD_SIZE": str(world), "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
            if sys.platform == "linux":
                environment["GLOO_SOCKET_IFNAME"] = "lo"
            # -P: do not import from the script's folder, since the package may be another checkout's
            command = ["-P", str(Path(__file__).with_name("step_rank.py")), text]
            logs = [folder / f"rank{rank}.log" for rank in range(world)]
            enter = stack.enter_context
            yield _World(layout, [enter(Child(command, log, RANK=str(i), **environment)) for i, log in enumerate(logs)])

    def compare(self, layout: str, ratio: float, worlds: Mapping[str, Any]) -> list[_StepMeasurement]:
        lengths = self.draw_lengths(ratio)
        actual = round(max(lengths) * len(lengths) / sum(lengths), 2)
        rows: dict[str, _StepMeasurement] = {}
        for method, world in worlds.items():  # the first step of each allocates: its memory counts, its time does not
            peak = world.step(method, ratio, memory=True)["peak_bytes"]
            rows[method] = _StepMeasurement(layout, actual, method, sum(lengths), [], [], [], int(peak))
        names = list(worlds)
        for repeat in range(self.repeats):
            shift = repeat % len(names)
            for method in (*names[shift:], *names[:shift]):
                figures = worlds[method].step(method, ratio, memory=False)
                rows[method].score_s.append(figures["score_s"])
                rows[method].update_s.append(figures["update_s"])
                rows[method].losses.append(figures["loss"])
        first = rows[OURS].losses[0]
        for row in rows.values():
            if any(abs(loss - first) > _AGREEMENT for loss in row.losses):
                raise RuntimeError(
                    f"{layout}, longest/mean {ratio:g}: {row.method} has the mean log-probs {row.losses}, {OURS} {first}; they "
                    "do not compute the same, and their times say nothing"
                )
        return list(rows.values())

    def draw_lengths(self, ratio: float) -> list[int]:
        """Returns lognormal quantiles, tokens with prompt, in random order; the longest: ``ratio`` means. Raises ValueError."""
        count = self.sequences
        if count % _GROUP:
            raise ValueError(f"--sequences {count} must be a multiple of {_GROUP}, the size of a group")
        quantiles = [NormalDist().inv_cdf((index + 0.5) / count) for index in range(count)]
        if not 1 <= ratio < max(_shares(quantiles, _WIDEST)):
            raise ValueError(
                f"--ratios {ratio:g} is no longest length over the mean of {count} sequences; give at least 1 and less "
                "than --sequences"
            )
        low, high = 0.0, _WIDEST
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (middle, high) if max(_shares(quantiles, middle)) < ratio else (low, middle)
        lengths = [max(_PROMPT + 1, round(self.mean_length * share)) for share in _shares(quantiles, high)]
        random.Random(0).shuffle(lengths)
        return lengths

    def rank_arguments(self, layout: str) -> dict[str, Any]:
        sizes = re.findall(r"(tp|pp|dp|cp)(\d+)", layout)
        if not sizes or "".join(name + size for name, size in sizes) != layout:
            raise ValueError(f"--layouts {layout} is not made of sizes such as tp2, pp2, dp2 or tp2pp2")
        parallel = {name: int(size) for name, size in sizes}
        config = {
            "model": {"dtype": "float32"},
            "engine": {"platform": "cpu", "micro_batch_tokens": self.micro_batch_tokens, "parallel": parallel},
            # So small that the weights do not change: every repeat and every method computes on the same weights.
            "optimizer": {"lr": 1e-12, "warmup_steps": 0},
        }
        lengths = {f"{ratio:g}": self.draw_lengths(ratio) for ratio in self.ratios}
        return {"config": config, "lengths": lengths, "group": _GROUP, "prompt": _PROMPT}

    def report(self, results: Sequence[_StepMeasurement], before: str) -> Report:
        rows = []
        for row in results:
            ours = next(r for r in results if (r.layout, r.ratio, r.method) == (row.layout, row.ratio, OURS))
            rows.append(
                {
                    "ranks": row.layout if row is ours else "",
                    "longest / mean": f"{row.ratio:g}" if row is ours else "",
                    "method": row.method,
                    "update, tokens/s": f"{row.tokens / statistics.median(row.update_s):.0f}",
                    "scores + update, tokens/s": f"{row.tokens / statistics.median(row.both_s):.0f}",
                    "ours ÷ it, update": "" if row is ours else _ratios(row.update_s, ours.update_s),
                    "ours ÷ it, scores + update": "" if row is ours else _ratios(row.both_s, ours.both_s),
                    "ours with scores ÷ its update": _ratios(row.update_s, ours.both_s),
                    "peak MiB": f"{row.peak_bytes / 2**20:.1f}",
                }
            )
        record = {"setting": asdict(self), "before": before, "results": [asdict(row) for row in results]}
        note = f"median of {self.repeats}, least and greatest in brackets · before: {before[:9]}"
        return Report(f"step-{self.size}", record, [Table.of(rows)], note)


@dataclass(frozen=True)
class _StepMeasurement:
    layout: str
    ratio: float
    method: str
    tokens: int
    score_s: list[float]
    update_s: list[float]
    losses: list[float]
    peak_bytes: int  # of a rank, beyond weights, gradients and optimizer states

    @property
    def both_s(self) -> list[float]:
        return [score + update for score, update in zip(self.score_s, self.update_s, strict=True)]


@contextmanager
def source_of(state: str) -> Iterator[Path | None]:
    """Takes a folder, a git revision, or ``none``. Raises ValueError if it is missing or too old."""
    if state == "none":
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="tepo-before-") as scratch:
        root = Path(state).resolve()
        if not root.is_dir():
            root = Path(scratch)
            _check_out(state, root)
        if not (root / "tepo_megatron" / "__init__.py").is_file():
            raise ValueError(f"--before {state} has no package tepo_megatron; give the root of a checkout")
        if not (root / "tepo_megatron" / "core" / "rollout.py").is_file():
            raise ValueError(
                f"--before {state} is from before the package's folders moved (2026-11-23), which this command cannot measure; "
                "give a later one, or none"
            )
        yield root


def _check_out(revision: str, folder: Path) -> None:
    archive = folder / "archive.tar"
    if shutil.which("git") is None:
        raise ValueError(f"--before {revision} is no folder, and there is no git here; give a folder, or none")
    command = ["git", "-C", str(ROOT), "archive", f"--output={archive}", revision, "tepo_megatron"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(
            f"--before {revision} is neither a folder nor a revision that git finds in {ROOT} "
            f"({result.stderr.strip().splitlines()[-1]}); give another, or --before none"
        )
    subprocess.run(["tar", "-xf", str(archive), "-C", str(folder)], check=True)


def _shares(quantiles: Sequence[float], sigma: float) -> list[float]:
    values = [math.exp(sigma * (quantile - quantiles[-1])) for quantile in quantiles]
    mean = sum(values) / len(values)
    return [value / mean for value in values]


@dataclass(frozen=True)
class _World:
    layout: str
    ranks: Sequence[Child]

    def step(self, method: str, ratio: float, *, memory: bool) -> dict[str, float]:
        """The largest of all ranks. Raises RuntimeError with the last line of a rank that ended."""
        for child in self.ranks:
            child.send({"method": method, "ratio": f"{ratio:g}", "memory": memory})
        answers = []
        for rank, child in enumerate(self.ranks):
            try:
                answers.append(child.receive())
            except RuntimeError as error:
                raise RuntimeError(f"{self.layout}: rank {rank} {error}") from error
        names = answers[-1]  # the last rank is in the last pipeline stage, and only that stage knows the loss
        return {name: max(answer[name] for answer in answers if name in answer) for name in names}


def _ratios(theirs: Sequence[float], ours: Sequence[float]) -> str:
    return Report.median_and_range([their / our for their, our in zip(theirs, ours, strict=True)])

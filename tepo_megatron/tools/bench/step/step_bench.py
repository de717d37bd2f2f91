"""Compares training steps on this machine's CPU with Megatron-Core's and an older version's."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tepo_megatron.tools.bench.settings import OLDER, OURS, PACKED, ROWS, StepMeasurement, StepSetting
from tepo_megatron.tools.bench.step.checkout import own_root, source_of
from tepo_megatron.tools.bench.step.step_data import draw_lengths, rank_arguments
from tepo_megatron.tools.results import markdown, write_report

BEFORE = "f25011252ef0de80c74794d9c16986690b4bb9a2"
"""The last commit that padded every pipeline micro-batch to the longest, and balanced micro-batches by tokens alone."""

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_LLAMA,
        **{"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 64},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
    },
    "small": {
        **_LLAMA,
        **{"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 688, "vocab_size": 8192},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 32768},
    },
}
"""``config.json`` of the models: 0.6 and 7 million parameters."""

AGREEMENT = 1e-3
"""Allowed difference of two methods' mean log-probs in nats; rounding of float32 gives about 1e-6."""


def run(setting: StepSetting, before: str, *, say: Callable[[str], None] = lambda line: None) -> list[StepMeasurement]:
    """Measure every layout on every ratio; methods alternate at each step, on the same weights and tokens.

    ``before``: a git revision, another checkout's folder, or ``none``. ``say`` gets a line for each layout and ratio.

    Raises ValueError for an invalid setting or missing ``before``, RuntimeError if a rank fails or two methods' log-probs
    differ.
    """
    from tepo_megatron.config import RunConfig
    from tepo_megatron.tools.bench.recipe_run import make_model

    if setting.size not in SIZES:
        raise ValueError(f"--size {setting.size} is unknown; known: {', '.join(SIZES)}")
    for layout in setting.layouts:
        RunConfig.model_validate(rank_arguments(setting, layout)["config"])
    for ratio in setting.ratios:
        draw_lengths(setting, ratio)
    results = []
    with tempfile.TemporaryDirectory() as scratch, source_of(before) as older:
        model = Path(scratch) / "model"
        make_model(model, SIZES[setting.size])
        for layout in setting.layouts:
            results += _measure_layout(setting, layout, model, older, say)
    return results


def _measure_layout(
    setting: StepSetting, layout: str, model: Path, older: Path | None, say: Callable[[str], None]
) -> list[StepMeasurement]:
    """Ranks of one version wait while those of the other compute."""
    from tepo_megatron.tools.bench.step.step_world import World

    with ExitStack() as stack:
        now = stack.enter_context(World(own_root(), model, setting, layout))
        worlds = dict.fromkeys((OURS, PACKED, ROWS), now)
        if older is not None:
            worlds[OLDER] = stack.enter_context(World(older, model, setting, layout))
        result = []
        for ratio in setting.ratios:
            say(f"{layout}, longest/mean {ratio:g}")
            result += _measure_ratio(setting, layout, ratio, worlds)
        return result


def _measure_ratio(setting: StepSetting, layout: str, ratio: float, worlds: dict[str, Any]) -> list[StepMeasurement]:
    lengths = draw_lengths(setting, ratio)
    rows: dict[str, StepMeasurement] = {}
    for method, world in worlds.items():  # the first step of each allocates: its memory counts, its time does not
        peak = world.step(method, ratio, memory=True)["peak_bytes"]
        actual = max(lengths) * len(lengths) / sum(lengths)
        rows[method] = StepMeasurement(layout, round(actual, 2), method, sum(lengths), [], [], [], int(peak))
    for method in _turns(list(worlds), setting.repeats):
        figures = worlds[method].step(method, ratio, memory=False)
        rows[method].score_s.append(figures["score_s"])
        rows[method].update_s.append(figures["update_s"])
        rows[method].losses.append(figures["loss"])
    first = rows[OURS].losses[0]
    for row in rows.values():
        if any(abs(loss - first) > AGREEMENT for loss in row.losses):
            raise RuntimeError(
                f"{layout}, longest/mean {ratio:g}: {row.method} has the mean log-probs {row.losses}, {OURS} {first}; they do "
                "not compute the same, and their times say nothing"
            )
    return list(rows.values())


def _turns(methods: Sequence[str], repeats: int) -> Iterator[str]:
    for repeat in range(repeats):
        shift = repeat % len(methods)
        yield from (*methods[shift:], *methods[:shift])


COLUMNS = (
    *("ranks", "longest / mean", "method", "update, tokens/s", "scores + update, tokens/s"),
    *("ours ÷ it, update", "ours ÷ it, scores + update", "ours with scores ÷ its update", "peak MiB"),
)
"""Ratios of tokens/s, ours over the row's: median and range over pairs in one repeat."""


def table(results: Sequence[StepMeasurement]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for row in results:
        ours = next(r for r in results if (r.layout, r.ratio, r.method) == (row.layout, row.ratio, OURS))
        where = (row.layout, f"{row.ratio:g}") if row is ours else ("", "")
        rows.append((*where, *_cells(row, ours)))
    return rows


def _cells(row: StepMeasurement, ours: StepMeasurement) -> tuple[str, ...]:
    rates = (f"{row.tokens / statistics.median(seconds):.0f}" for seconds in (row.update_s, row.both_s))
    peak = f"{row.peak_bytes / 2**20:.1f}"
    if row is ours:
        return (row.method, *rates, "", "", _spread(row.update_s, ours.both_s), peak)
    pairs = (row.update_s, ours.update_s), (row.both_s, ours.both_s), (row.update_s, ours.both_s)
    return (row.method, *rates, *(_spread(*pair) for pair in pairs), peak)


def _spread(theirs: Sequence[float], ours: Sequence[float]) -> str:
    ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def write_results(results: Sequence[StepMeasurement], folder: Path, setting: StepSetting, before: str) -> tuple[Path, Path]:
    """Write ``step-<size>.json`` and ``.md``."""
    record = {"setting": asdict(setting), "before": before, "results": [asdict(row) for row in results]}
    note = f"median of {setting.repeats}, least and greatest in brackets · before: {before[:9]}"
    packages = ("torch", "megatron-core", "tepo-megatron")
    return write_report(folder, f"step-{setting.size}", record, markdown(COLUMNS, table(results)), note=note, packages=packages)

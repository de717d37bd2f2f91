import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tepo_megatron.run.metrics import PHASES, key_in, value_in

Row = Mapping[str, Any]


@dataclass(frozen=True)
class _Figure:
    key: str
    label: str
    format: Callable[[float], str]
    more_is_better: bool | None = None


_number, _count = "{:.3f}".format, "{:.0f}".format


FIGURES = (
    _Figure("reward/mean", "reward", _number, more_is_better=True),
    _Figure("accuracy/greedy", "greedy", _number, more_is_better=True),
    _Figure("accuracy/avg@k", "avg@k", _number, more_is_better=True),
    _Figure("accuracy/pass@k", "pass@k", _number, more_is_better=True),
    _Figure("heldout/reward_greedy", "reward, greedy", _number, more_is_better=True),
    _Figure("heldout/reward_sampled", "reward, sampled", _number, more_is_better=True),
    _Figure("entropy/mean", "entropy", _number),
    _Figure("mask/fraction", "masked", lambda value: f"{100 * value:.1f} %"),
    _Figure("grad_norm", "grad norm", _number),
    _Figure("tokens/s", "tokens/s", _count, more_is_better=True),
)

_PLACES = {figure.key.partition("@")[0]: place for place, figure in enumerate(FIGURES)}
_HELD_OUT = ("accuracy/", "heldout/")
_SAME_AS = {"heldout/reward_greedy": "accuracy/greedy", "heldout/reward_sampled": "accuracy/avg@k"}

_FILES = {
    "resolved.yaml": "the configuration, complete",
    "metrics.jsonl": "one row a step",
    "samples.jsonl": "held-out responses, to read: tepo samples",
    "train_samples.jsonl": "responses that were trained on, to read: tepo samples --train",
    "tokens": "values of single tokens, for tepo report",
    "curves.png": "reward, accuracy, entropy, gradient norm, time",
    "tensorboard": "the same numbers for TensorBoard",
    "checkpoints": "to resume from",
    "model": "the model, for transformers and vLLM",
    "adapter": "the adapters alone",
    "logs": "what the servers wrote",
    "wandb": "the run for W&B",
    "mlflow": "the run for MLflow",
    "journal": "rollouts that a resumed run takes again",
    "rollouts": "every step's rollouts",
    "skipped": "batches with a number that is not finite, to study",
    "status": "heartbeats of the ranks, for tepo status",
}


def figures_of(row: Row) -> list[tuple[_Figure, float]]:
    """Leaves out mean rewards that repeat an accuracy."""
    shown = []
    for figure in FIGURES:
        key, same = key_in(row, figure.key), value_in(row, _SAME_AS.get(figure.key, ""))
        if key is not None and (value := row[key]) is not None and (same is None or abs(same - value) >= 1e-9):
            shown.append((replace(figure, key=key, label=key.split("/")[1]) if "@" in key else figure, value))
    return shown


def figures_line(row: Row) -> str:
    shown = [(figure, value) for figure, value in figures_of(row) if not figure.key.startswith(_HELD_OUT)]
    parts = [f"{figure.label} {figure.format(value)}" for figure, value in shown]
    if parts and row.get("time/step") is not None:
        parts.append(f"{row['time/step']:.1f} s")
    return "  ".join(parts)


def set_lines(row: Row) -> dict[str, str]:
    lines: dict[str, str] = {}
    for key, value in row.items():
        if key.startswith("eval/") and key.count("/") == 2 and value is not None:
            _, name, figure = key.split("/")
            lines[name] = lines.get(name, f"{name}:") + (f"  {figure} {value:.3f}" if _is_accuracy(figure) else "")
    return {name: line.replace(":  ", ": ", 1) for name, line in lines.items()}


def _is_accuracy(figure: str) -> bool:
    return figure == "greedy" or "@" in figure


def evaluation_line(row: Row) -> str:
    shown = [(figure, value) for figure, value in figures_of(row) if figure.key.startswith(_HELD_OUT)]
    return "held out: " + "  ".join(f"{f.label} {f.format(value)}" for f, value in shown) if shown else ""


def final_table(rows: Sequence[Row], output: Path) -> RenderableType:
    table = Table("", title="The run in figures", title_justify="left", title_style="bold")
    for heading in ("first", "best", "last"):
        table.add_column(heading, justify="right")
    shown = dict.fromkeys(figure for row in rows for figure, _ in figures_of(row))
    sets = dict.fromkeys(key for row in rows for key in row if key.startswith("eval/") and _is_accuracy(key.split("/")[-1]))
    of_sets = [_Figure(key, " ".join(key.split("/")[1:]), _number, more_is_better=True) for key in sets]
    for figure in [*sorted(shown, key=lambda figure: _PLACES[figure.key.partition("@")[0]]), *of_sets]:
        if series := [(row["step"], row[figure.key]) for row in rows if row.get(figure.key) is not None]:
            best = max(series, key=lambda point: point[1]) if figure.more_is_better else None
            shown_points = (series[0], best, series[-1])
            cells = (f"{figure.format(point[1])} [dim]({point[0]})[/]" if point else "–" for point in shown_points)
            table.add_row(figure.label, *cells)
    parts: list[RenderableType] = [table]
    if timed := [row for row in rows if row["step"] > 0 and row.get("time/step") is not None]:
        names = (*PHASE_COLOURS, "step")
        means = {name: sum(row.get(f"time/{name}") or 0.0 for row in timed) / len(timed) for name in names}
        times = Table(title="Seconds per step (mean)", title_justify="left", title_style="bold")
        times.caption, times.caption_justify = idle_line(rows) or None, "left"
        for name in means:
            times.add_column(name, justify="right", header_style=PHASE_COLOURS.get(name, "bold"))
        times.add_row(*(f"{seconds:.2f}" for seconds in means.values()))
        times.add_row(*(f"[dim]{100 * seconds / max(means['step'], 1e-9):.0f} %[/]" for seconds in means.values()))
        parts.append(times)
    return Group(*parts, *_files(output))


def idle_line(rows: Sequence[Row]) -> str:
    timed = [row for row in rows if row["step"] > 0 and row.get("idle/trainer") is not None]
    seconds = [max(row["time/step"] - (row.get("time/eval") or 0.0), 0.0) for row in timed]
    if not sum(seconds):
        return ""
    trainer, servers = (fmean([row[f"idle/{side}"] for row in timed], seconds) for side in ("trainer", "servers"))
    return f"idle: trainer {trainer:.0%}, servers {servers:.0%}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _files(output: Path) -> list[Text]:
    """Folds on narrow terminals: a truncated path cannot be copied."""
    # run.lock goes when the run's process ends
    paths = sorted(path for path in output.iterdir() if path.name != "run.lock") if output.is_dir() else []
    shown = {path: f"{path}/" if path.is_dir() else str(path) for path in paths}
    width = max(map(len, shown.values()), default=0)
    return [
        Text.assemble(name.ljust(width + 2), (_description(path.name), "dim"), overflow="fold") for path, name in shown.items()
    ]


def _description(file: str) -> str:
    is_earlier = re.fullmatch(r"resolved\.\d+\.yaml", file)
    return "the configuration before the run was resumed" if is_earlier else _FILES.get(file, "")


_COLOURS = ("#2b6cb0", "#8fb8de", "#0b7285", "#2f9e44", "#f08c00", "#d6336c", "#9c6ade", "#b8c0c8")
PHASE_COLOURS = dict(zip((*PHASES, "other"), _COLOURS, strict=True))


COUNTED = {
    "update/skipped": "optimizer steps skipped",
    "servers/restarts": "servers started again",
    "servers/timeouts": "rollout servers given up that hung",
    "requests/retried": "requests asked again",
    "reward/failed": "rewards failed",
    "rollback/count": "returns to a checkpoint",
}

LOST = {
    "lost/skipped": "in steps that were skipped",
    "lost/server": "until a server was there again",
    "lost/resume": "in steps that a resumed run repeated",
    "lost/rollback": "in steps that a return to a checkpoint undid",
}


def fault_lines(rows: Sequence[Row]) -> list[str]:
    sums = {key: sum(row.get(key) or 0 for row in rows) for key in (*COUNTED, *LOST)}
    counts = [f"{sums[key]:.0f} {text}" for key, text in COUNTED.items() if sums[key]]
    return counts + [f"{duration(sums[key])} lost {text}" for key, text in LOST.items() if sums[key]]

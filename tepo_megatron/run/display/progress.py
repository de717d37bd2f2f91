"""The display of a running run: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tepo_megatron.run.display.figures import (
    PHASE_COLOURS,
    duration,
    evaluation_line,
    figures_line,
    figures_of,
    final_table,
    set_lines,
)

if TYPE_CHECKING:
    from tepo_megatron.config import LogConfig, RunConfig

__all__ = ["LiveProgress", "NoProgress", "PlainProgress", "Progress", "final_table", "make_progress"]

SLOW_PHASE_S = 5.0
"""Plain output mentions a phase that took longer, ..."""
HEARTBEAT_S = 30.0
"""... and the progress after this long without a line."""

_SPARKS = "▁▂▃▄▅▆▇█"


class Progress(Protocol):
    """Call ``start`` first, ``phase``, ``advance``, ``step`` in turn, and always ``close``."""

    def start(self, config: RunConfig) -> None: ...

    def phase(self, name: str, total: int | None = None) -> None:
        """``total``: number of items, if countable."""

    def advance(self, n: int = 1) -> None: ...

    def step(self, step: int, row: Mapping[str, Any]) -> None:
        """Step 0 is the evaluation before the first."""

    def message(self, text: str) -> None: ...

    def close(self) -> None:
        """Restores the terminal, also after a failure. May be called twice."""


def make_progress(config: LogConfig, stream: TextIO | None = None) -> Progress:
    """``stream``: default standard output; ``auto`` is live on a terminal."""
    stream = stream or sys.stdout
    kind = config.progress
    if kind == "auto":
        kind = "live" if stream.isatty() and os.environ.get("TERM") != "dumb" else "plain"
    if kind == "live":
        return LiveProgress(Console(file=stream, force_terminal=True))
    return PlainProgress(stream) if kind == "plain" else NoProgress()


class NoProgress:
    def start(self, config: RunConfig) -> None:
        pass

    def phase(self, name: str, total: int | None = None) -> None:
        pass

    def advance(self, n: int = 1) -> None:
        pass

    def step(self, step: int, row: Mapping[str, Any]) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class _Phase:
    name: str = ""
    total: int | None = None
    done: int = 0
    since: float = 0.0

    @property
    def count(self) -> str:
        if self.total is None:
            return str(self.done) if self.done else ""
        return f"{self.done}/{self.total}"


class PlainProgress:
    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._phase, self._last_line = _Phase(), clock()
        self._steps, self._samples = 0, 0

    def start(self, config: RunConfig) -> None:
        self._steps, self._samples = config.train.steps, config.evaluate.samples
        self._write(f"{config.name}: {self._steps} steps, output in {config.output}")

    def phase(self, name: str, total: int | None = None) -> None:
        self._end_phase()
        self._phase = _Phase(name, total, since=self._clock())

    def advance(self, n: int = 1) -> None:
        self._phase.done += n
        if self._clock() - self._last_line >= HEARTBEAT_S:
            self._write(f"  {self._phase.name} {self._phase.count} after {duration(self._clock() - self._phase.since)}")

    def step(self, step: int, row: Mapping[str, Any]) -> None:
        self._end_phase()
        counter = f"step {step:>{len(str(self._steps))}}/{self._steps}"
        for line in (figures_line(row), evaluation_line(row, self._samples), *set_lines(row)):
            if line:
                self._write(f"{counter}  {line}")

    def message(self, text: str) -> None:
        self._write(text)

    def close(self) -> None:
        self._end_phase()
        try:
            self._stream.flush()
        except OSError:
            # Python would try again at its end, and turn the exit code of a run that went well into 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def _end_phase(self) -> None:
        seconds = self._clock() - self._phase.since
        if self._phase.name and seconds > SLOW_PHASE_S:
            self._write(f"  {self._phase.name} {self._phase.count}".rstrip() + f" took {duration(seconds)}")
        self._phase = _Phase()

    def _write(self, line: str) -> None:
        self._last_line = self._clock()
        with contextlib.suppress(OSError):  # a full disk, a closed pipe: a run does not end of what nobody reads
            self._stream.write(line + "\n")
            self._stream.flush()


@dataclass
class _Seen:
    step: int = 0
    row: dict[str, Any] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class LiveProgress:
    """A panel, redrawn four times a second; messages scroll above it."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._live: Live | None = None
        self._config: RunConfig | None = None
        self._phase, self._seen = _Phase(), _Seen()
        self._started = clock()

    def start(self, config: RunConfig) -> None:
        self._config, self._started = config, self._clock()
        self._live = Live(console=self._console, get_renderable=self.render, refresh_per_second=4)
        self._live.start()

    def phase(self, name: str, total: int | None = None) -> None:
        self._phase = _Phase(name, total, since=self._clock())

    def advance(self, n: int = 1) -> None:
        self._phase.done += n

    def step(self, step: int, row: Mapping[str, Any]) -> None:
        seen, self._phase = self._seen, _Phase()
        seen.step = step
        seen.row |= {key: value for key, value in row.items() if value is not None}
        if row.get("reward/mean") is not None:
            seen.rewards.append(row["reward/mean"])
        if step > 0 and row.get("time/step") is not None:
            seen.seconds.append(row["time/step"])

    def message(self, text: str) -> None:
        self._console.print(escape(text), highlight=False)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def render(self) -> RenderableType:
        config, seen = self._config, self._seen
        if config is None:
            return Text()
        lines = Table.grid(padding=(0, 2))
        lines.add_column(style="dim", no_wrap=True)
        lines.add_column(width=32)
        lines.add_column(no_wrap=True)
        lines.add_row("step", _bar(seen.step, config.train.steps), self._step_text(config.train.steps))
        lines.add_row("phase", _bar(self._phase.done, self._phase.total), self._phase_text())
        parts: list[RenderableType] = [lines]
        if seen.row:
            parts += [Text(), _figures(seen.row, config.evaluate.samples)]
            parts += [Text(line, "dim") for line in set_lines(seen.row)]
        if seen.rewards:
            parts.append(Text.assemble(("reward  ", "dim"), (_sparkline(seen.rewards, 60), PHASE_COLOURS["rollout"])))
        if seen.row.get("time/step"):
            parts += [Text(), _time_bar(seen.row, 60)]
        return Panel(
            Group(*parts),
            title=f"[bold]{escape(config.name)}[/]",
            subtitle=f"[dim]{escape(str(config.output))}[/]",
            title_align="left",
            subtitle_align="left",
            padding=(1, 2),
            width=min(92, self._console.width),
        )

    def _step_text(self, steps: int) -> Text:
        seen = self._seen
        text = Text(f"{seen.step}/{steps}")
        if seen.seconds:
            mean = sum(seen.seconds[-10:]) / len(seen.seconds[-10:])
            text.append(f"  {mean:.1f} s/step  {duration(mean * (steps - seen.step))} left", style="dim")
        return text

    def _phase_text(self) -> Text:
        if not self._phase.name:
            return Text("–", style="dim")
        text = Text.assemble((self._phase.name, PHASE_COLOURS.get(self._phase.name, "")))
        return text.append(f"  {self._phase.count}  {duration(self._clock() - self._phase.since)}", style="dim")


def _bar(done: int, total: int | None) -> ProgressBar:
    style = PHASE_COLOURS["rollout"]
    return ProgressBar(total=total or 1, completed=done if total else 0, width=32, complete_style=style, finished_style=style)


def _figures(row: Mapping[str, Any], samples: int) -> Table:
    table = Table.grid(padding=(0, 3))
    shown = figures_of(row)
    half = (len(shown) + 1) // 2
    for part in (shown[:half], shown[half:]):
        cells = [Text.assemble((figure.name(samples) + " ", "dim"), figure.format(value)) for figure, value in part]
        table.add_row(*cells)
    return table


def _sparkline(values: list[float], width: int) -> str:
    shown = values[-width:]
    low, high = min(shown), max(shown)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in shown) + f" {shown[-1]:.3f}"


def _time_bar(row: Mapping[str, Any], width: int) -> Group:
    bar, legend = Text.assemble(("time    ", "dim")), []
    edge, drawn = 0.0, 0
    for name, colour in PHASE_COLOURS.items():
        seconds = row.get(f"time/{name}") or 0.0
        edge += width * seconds / row["time/step"]
        cells = round(edge) - drawn
        drawn += cells
        bar.append("█" * cells, style=colour)
        legend.append(Text.assemble(("■ ", colour), (f"{name} {seconds:.1f} s", "dim")))
    return Group(bar, Padding(Columns(legend, padding=(0, 2)), (0, 0, 0, 8)))

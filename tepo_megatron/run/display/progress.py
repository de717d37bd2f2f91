"""A live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, TextIO

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tepo_megatron.run.display.figures import PHASE_COLOURS, duration, evaluation_line, figures_line, figures_of, set_lines
from tepo_megatron.runtime.terminal import Terminal
from tepo_megatron.runtime.text import printable

if TYPE_CHECKING:
    from tepo_megatron.config import LogConfig, RunConfig

_SLOW_PHASE_S = 5.0

_SPARKS = "▁▂▃▄▅▆▇█"


class Progress:
    """Plain lines, or none without a stream. Call ``start`` first, ``phase`` and ``step`` in turn, and always ``close``."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._phase, self._since = "", clock()
        self._steps = 0

    @staticmethod
    def of(
        config: LogConfig, stream: TextIO | None = None, width: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> Progress:
        stream = stream or sys.stdout
        kind = config.progress
        if kind == "auto":
            kind = "live" if stream.isatty() and os.environ.get("TERM") != "dumb" else "plain"
        if kind == "live":
            return _LiveProgress(Terminal(file=stream, force_terminal=True, width=width), clock)
        return Progress(stream if kind == "plain" else None, clock)

    def start(self, config: RunConfig) -> None:
        self._steps = config.train.steps
        name = "run" if config.name == "run" else f"run {config.name}"
        self._write(f"{name}: {self._steps} steps of {config.model.path}, output in {config.output}")

    def phase(self, name: str) -> None:
        self._end_phase()
        self._phase, self._since = name, self._clock()

    def step(self, step: int, row: Mapping[str, Any]) -> None:
        """Step 0 is the evaluation before the first."""
        self._end_phase()
        counter = f"step {step:>{len(str(self._steps))}}/{self._steps}"
        for line in (figures_line(row), evaluation_line(row), *set_lines(row).values()):
            if line:
                self._write(f"{counter}  {line}")

    def message(self, text: str) -> None:
        self._write(text)

    def close(self) -> None:
        """Restores the terminal. May be called twice."""
        self._end_phase()
        if self._stream is not None:
            try:
                self._stream.flush()
            except OSError:
                # Python would try again at its end, and turn the exit code of a run that went well into 120.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def _end_phase(self) -> None:
        seconds = self._clock() - self._since
        if self._phase and seconds > _SLOW_PHASE_S:
            self._write(f"  {self._phase} took {duration(seconds)}")
        self._phase = ""

    def _write(self, line: str) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):  # a full disk or a closed pipe does not end a run
                self._stream.write(printable(line, self._stream.encoding) + "\n")
                self._stream.flush()


class _LiveProgress(Progress):
    def __init__(self, console: Terminal, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock=clock)
        self._console = console
        self._live: Live | None = None
        self._config: RunConfig | None = None
        self._step, self._row = 0, dict[str, Any]()
        self._rewards, self._seconds = list[float](), list[float]()

    def start(self, config: RunConfig) -> None:
        self._config = config
        self._live = Live(console=self._console, get_renderable=self.render, refresh_per_second=4)
        self._live.start()

    def phase(self, name: str) -> None:
        self._phase, self._since = name, self._clock()

    def step(self, step: int, row: Mapping[str, Any]) -> None:
        self._step, self._phase = step, ""
        self._row |= {key: value for key, value in row.items() if value is not None}
        if row.get("reward/mean") is not None:
            self._rewards.append(row["reward/mean"])
        if step > 0 and row.get("time/step") is not None:
            self._seconds.append(row["time/step"])

    def message(self, text: str) -> None:
        self._console.print(Text(text))

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def render(self) -> RenderableType:
        config, row = self._config, self._row
        if config is None:
            return Text()
        steps, blue = config.train.steps, PHASE_COLOURS["rollout"]
        progress = Text(f"{self._step}/{steps}")
        if self._seconds:
            mean = fmean(self._seconds[-10:])
            progress.append(f"  {mean:.1f} s/step  {duration(mean * (steps - self._step))} left", style="dim")
        phase = Text.assemble((self._phase or "–", PHASE_COLOURS.get(self._phase, "dim")))
        if self._phase:
            phase.append(f"  {duration(self._clock() - self._since)}", style="dim")
        lines = Table.grid(padding=(0, 2))
        lines.add_column(style="dim", no_wrap=True)
        lines.add_column(width=32)
        lines.add_column(no_wrap=True)
        bar = ProgressBar(total=steps, completed=self._step, width=32, complete_style=blue, finished_style=blue)
        lines.add_row("step", bar, progress)
        lines.add_row("phase", ProgressBar(total=1, completed=0, width=32), phase)
        parts: list[RenderableType] = [lines]
        if row:
            parts += [Text(), _figures(row)]
            parts += [Text(line, "dim") for line in set_lines(row).values()]
        if self._rewards:
            parts.append(Text.assemble(("reward  ", "dim"), (_sparkline(self._rewards[-60:]), blue)))
        if row.get("time/step"):
            parts += [Text(), _time_bar(row, 60)]
        name, output = f"[bold]{escape(config.name)}[/]", f"[dim]{escape(str(config.output))}[/]"
        width = min(92, self._console.width)
        return Panel(
            Group(*parts), title=name, subtitle=output, title_align="left", subtitle_align="left", padding=(1, 2), width=width
        )


def _figures(row: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 3))
    cells = [Text.assemble((figure.label + " ", "dim"), figure.format(value)) for figure, value in figures_of(row)]
    half = (len(cells) + 1) // 2
    table.add_row(*cells[:half])
    table.add_row(*cells[half:])
    return table


def _sparkline(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in values) + f" {values[-1]:.3f}"


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

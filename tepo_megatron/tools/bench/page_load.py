"""How long a browser takes to show a report, from the file to what is drawn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tepo_megatron.tools.bench.chromium import Page, chromium

COLUMNS = ("part", "window", "drawn after, ms", "of which after the file was read, ms")

WINDOWS = {"desktop": (1280, 800), "phone": (390, 844)}


@dataclass(frozen=True)
class Load:
    """Milliseconds from the start of loading until the part is drawn, and since the HTML was parsed; medians."""

    part: str
    window: str
    drawn_ms: float
    after_parse_ms: float


def measure(html: Path, parts: Sequence[str], repeats: int, *, state: str = "", pictures: Path | None = None) -> list[Load]:
    """Loads each part of the page in both windows. ``state``: more of the page's address, such as ``colour=entropy``;
    ``pictures``: a folder for a picture of each part, light and dark.

    Raises RuntimeError where the page does not come up, or without a Chromium.
    """
    found = []
    with chromium() as page:
        for window, (width, height) in WINDOWS.items():
            for part in parts:
                page.resize(width, height)
                loads = [_load(page, html, f"tab={part}&{state}") for _ in range(repeats)]
                drawn, parsed = (statistics.median(each) for each in zip(*loads, strict=True))
                found.append(Load(part, window, drawn, drawn - parsed))
                for theme in ("light", "dark") if pictures is not None else ():
                    page.resize(width, height, dark=theme == "dark")
                    page.open(html, f"tab={part}&{state}")
                    page.screenshot((pictures or Path()) / f"report-{part}-{window}-{theme}.png")
    return found


def cells(load: Load) -> tuple[str, ...]:
    return load.part, load.window, f"{load.drawn_ms:.0f}", f"{load.after_parse_ms:.0f}"


def _load(page: Page, html: Path, state: str) -> tuple[float, float]:
    page.open(html, state)
    if failed := page.evaluate("document.body.dataset.failed"):
        raise RuntimeError(f"{html} cannot be shown: {failed}")
    parsed = page.evaluate("performance.getEntriesByType('navigation')[0].domInteractive")
    return float(page.evaluate("document.body.dataset.ready")), float(parsed)

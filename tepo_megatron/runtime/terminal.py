"""Tables and live views pass text through ``printable``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from tepo_megatron.runtime.text import printable


class Terminal(Console):
    """Shows escapes in a text as text; only its own styles act on the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Escapes before the width is measured; ``render`` escapes the rest."""
        return super().render_str(printable(text, self.encoding), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text, self.encoding), style)

    @classmethod
    def of_output(cls, **options: Any) -> Terminal:
        """A pipe has no width, and cells are not cut there."""
        return cls(width=None if sys.stdout.isatty() else 160, **options)

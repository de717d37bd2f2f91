"""Runs a command and saves what it prints as a picture.

    python scripts/picture.py docs/images/plan.png tepo plan examples/llama3.3-70b/run.yaml

Needs Chromium. The command sees a terminal of 120 columns. ``--first N`` and ``--last N`` keep so many lines.
"""

import argparse
import os
import pty
import shlex
import tempfile
from io import StringIO
from pathlib import Path

from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from tepo_megatron.runtime.terminal import Terminal
from tepo_megatron.tools.bench.chromium import chromium

COLUMNS = 120
PAGE = """<meta charset="utf-8"><style>{stylesheet} body {{margin: 0}}
pre {{display: inline-block; margin: 0; padding: 14px 18px; font: 13px/1.35 "DejaVu Sans Mono", monospace;
color: {foreground}; background: {background}}}</style><pre>{code}</pre>
<script>document.body.dataset.ready = 1</script>"""


def output_of(command: list[str]) -> str:
    """Of a terminal, with its colours. Raises SystemExit if the command fails."""
    parts: list[bytes] = []

    def read(master: int) -> bytes:
        data = os.read(master, 65536)
        parts.append(data)
        return data

    os.environ |= {"COLUMNS": str(COLUMNS), "LINES": "50", "TERM": "xterm-256color"}
    status = os.waitstatus_to_exitcode(pty.spawn(command, read))
    if status:
        raise SystemExit(f"{shlex.join(command)} ended with {status}")
    return b"".join(parts).decode(errors="replace").replace("\r\n", "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("png", type=Path)
    parser.add_argument("--first", type=int, help="keep the first N lines")
    parser.add_argument("--last", type=int, default=0, help="keep the last N lines")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    lines = output_of(args.command).rstrip().split("\n")[: args.first][-args.last :]
    console = Terminal(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(Text(f"$ {shlex.join(args.command)}", style="bold"))
    console.print(Text.from_ansi("\n".join(lines)))
    html = console.export_html(theme=DEFAULT_TERMINAL_THEME, code_format=PAGE)
    with tempfile.TemporaryDirectory() as folder, chromium() as page:
        file = Path(folder) / "page.html"
        file.write_text(html, encoding="utf-8")
        page.resize(1400, 800)
        page.open(file)
        corner = "(r => [Math.ceil(r.right), Math.ceil(r.bottom)])(document.querySelector('pre').getBoundingClientRect())"
        size = page.evaluate(corner)
        page.resize(*size)
        page.screenshot(args.png)
    print(f"wrote {args.png}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Options that all studies have."""

import argparse
from pathlib import Path


def study_parser(description: str | None, **numbers: tuple[float, str]) -> argparse.ArgumentParser:
    """``numbers`` has each option's default and help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results/data"), help="folder for the results")
    for name, (default, text) in numbers.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=f"{text} (default {default:g})")
    return parser

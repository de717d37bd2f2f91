"""Writes tests/slow.txt: the functions of tests/unit that take longer than a limit, which `scripts/test.sh --fast` leaves out.

    bash scripts/test.sh --fast --time    # on an idle machine: times all of them, one after the other, and calls this

A file with nothing left is not even imported.
"""

import argparse
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

SLOW = Path(__file__).parents[1] / "tests/slow.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="pytest's, with junit_family=xunit1")
    parser.add_argument("--limit", type=float, default=0.4, metavar="SECONDS", help="of all cases of a function [%(default)s]")
    arguments = parser.parse_args()
    took: defaultdict[tuple[str, str], float] = defaultdict(float)
    for case in ET.parse(arguments.report).iter("testcase"):  # noqa: S314 # our own file
        file, name = case.attrib["file"], case.attrib["name"].partition("[")[0]
        classes = case.attrib["classname"].removeprefix(file.removesuffix(".py").replace("/", ".")).split(".")[1:]
        took[file, "::".join([*classes, name])] += float(case.attrib["time"])
    slow = {f"--deselect={file}::{name}" for (file, name), seconds in took.items() if seconds > arguments.limit}
    left = {file for file, name in took if f"--deselect={file}::{name}" not in slow}
    slow |= {f"--ignore={file}" for file, _ in took if file not in left}
    SLOW.write_text("".join(f"{line}\n" for line in sorted(slow)), encoding="utf-8")
    print(f"{SLOW}: {len(slow)} lines")


if __name__ == "__main__":
    main()

"""Writes problems.jsonl and heldout.jsonl: the game is the same in each, and what differs is the number.

.venv/bin/python examples/own_env/make_problems.py
"""

import json
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    for name, rounds in (("problems", 20), ("heldout", 4)):
        lines = [
            {"id": f"{name} {number} {turn}", "prompt": "how far, 1-9?", "answer": str(number)}
            for turn in range(rounds)
            for number in range(1, 10)
        ]
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()

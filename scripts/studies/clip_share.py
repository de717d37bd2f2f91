"""Tabulates how near the clipped share of runs with ``trust_region.low: auto`` comes to the wanted one.

    python -m scripts.studies.clip_share out/auto/tiny out/auto/stack_machine

Means over the steps from the third on, of all tokens with an advantage and by quarters of the response length.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, pstdev

from scripts.studies.options import study_parser
from tepo_megatron.config.load import load_run
from tepo_megatron.config.objective.choices import CLIPPED_SHARE, Clip
from tepo_megatron.run.metrics import read_metrics
from tepo_megatron.tools.results import Report, Table

_SHARES = ("clip/share", *(f"clip/share_q{number}" for number in range(1, 5)))
_FIRST = 3


def _main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    args = parser.parse_args()
    rows, record = [], dict[str, dict[str, list[float]]]()
    for folder in args.runs:
        region = load_run(folder / "resolved.yaml").objective.trust_region
        steps = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] >= _FIRST]
        if not (isinstance(region, Clip) and region.is_auto and steps):
            parser.error(f"{folder} has no step {_FIRST} of a run with trust_region.low or high: auto; train one")
        record[folder.name] = {name: [row[name] for row in steps] for name in _SHARES}
        whole, *quarters = (fmean(values) for values in record[folder.name].values())
        spread = pstdev(record[folder.name][_SHARES[0]])
        cells = (f"{region.share or CLIPPED_SHARE:g}", f"{whole:.3f} ± {spread:.3f}", *(f"{share:.3f}" for share in quarters))
        rows.append((folder.name, str(len(steps)), *cells))
    head = ("task", "steps", "wanted", "clipped, mean ± deviation of a step", "shortest quarter", "second", "third", "longest")
    Report("clip-share", record, [Table(head, rows)], f"steps from {_FIRST} on").show(args.output)


if __name__ == "__main__":
    _main()

"""Tabulates how near the clipped share of runs with ``trust_region.low: auto`` comes to the wanted one.

    python -m scripts.studies.clip_share out/auto/tiny/seed* out/auto/stack_machine/seed*

Means over the steps from the third on of all runs in a folder, of all tokens with an advantage and by quarters of the response
length.
"""

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
    rows, record = [], dict[str, dict[str, dict[str, list[float]]]]()  # task → run → share → of each step
    for folder in args.runs:
        region = load_run(folder / "resolved.yaml").objective.trust_region
        steps = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] >= _FIRST]
        if not (isinstance(region, Clip) and region.is_auto and region.share in (None, CLIPPED_SHARE) and steps):
            wanted = f"trust_region.low or high: auto, share {CLIPPED_SHARE:g}"
            parser.error(f"{folder} has no step {_FIRST} of a run with {wanted}; train one")
        record.setdefault(folder.parent.name, {})[folder.name] = {name: [row[name] for row in steps] for name in _SHARES}
    for task, runs in record.items():
        shares = {name: [share for run in runs.values() for share in run[name]] for name in _SHARES}
        whole, *quarters = (fmean(values) for values in shares.values())
        counts = ", ".join(str(len(run[_SHARES[0]])) for run in runs.values())
        rows.append((task, counts, f"{whole:.3f} ± {pstdev(shares[_SHARES[0]]):.3f}", *(f"{share:.3f}" for share in quarters)))
    head = ("task", "steps", "clipped, mean ± deviation of a step", "shortest quarter", "second", "third", "longest")
    Report("clip-share", record, [Table(head, rows)], f"steps from {_FIRST} on").show(args.output)


if __name__ == "__main__":
    _main()

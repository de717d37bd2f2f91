"""Collects the runs of compare.yaml; fills the table of docs/results/distillation.md and draws its picture.

tepo sweep examples/distill/compare.yaml --jobs 2
python -m examples.distill.page out/distill-compare     # without a folder: from the data that is kept
"""

import sys
from pathlib import Path

from examples.evidence.figures import FIGURES, Evidence
from examples.evidence.shared import COLOURS, STYLE, filled, plot_curve
from examples.evidence.tables import by_setting
from tepo_megatron.tools.results import markdown

ROOT = Path(__file__).parents[2]
SWEEP = Path(__file__).with_name("compare.yaml")
KEPT = ("80", "90", "area", "greedy", "avg", "pass16", "entropy", "divergence", "agreement", "gradient", "step")
COMPARED = ("80", "90", "area", "greedy", "avg", "pass16", "entropy", "step")
REWARD = ("reward",)
CURVES = (
    ("accuracy/greedy", "held-out greedy, %", 100.0, False),
    ("entropy/mean", "entropy, nats a token", 1.0, True),
    ("distill/divergence", "divergence from the teacher, nats", 1.0, True),
)


def page_text(root: Path) -> str:
    evidence = Evidence.read(SWEEP, root / "docs/results/data/distill")
    compared = {name: FIGURES[name] for name in COMPARED}
    against = [
        [key[0], *(evidence.against(name, key, REWARD).text(item, ratio=item.ratio) for name, item in compared.items())]
        for key in evidence.keys
        if key != REWARD
    ]
    columns = ["beside the reward alone", *(item.compared for item in compared.values())]
    page = root / "docs/results/distillation.md"
    parts = {"table": by_setting(evidence, KEPT, "trained by"), "against": markdown(columns, against)}
    return filled(page.read_text(encoding="utf-8"), parts, str(page))


def draw(root: Path) -> Path:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    evidence, path = Evidence.read(SWEEP, root / "docs/results/data/distill"), root / "docs/images/distillation.png"
    with rc_context(STYLE):
        figure = Figure(figsize=(13.0, 4.2))
        for axes, (column, label, scale, smooth) in zip(figure.subplots(1, len(CURVES)), CURVES, strict=True):
            axes.set(xlabel="step", ylabel=label)
            for key, colour in zip(evidence.keys, COLOURS, strict=False):
                plot_curve(axes, key[0], evidence.curves(key, column), colour, smooth=smooth, scale=scale)
            axes.legend()
        figure.savefig(path, format="png", metadata={"Software": None})
    return path


def main(root: Path, folder: Path | None) -> None:
    if folder is not None:
        print(f"{Evidence.collect(SWEEP, folder, root / 'docs/results/data/distill')} runs are done")
    page = root / "docs/results/distillation.md"
    page.write_text(page_text(root), encoding="utf-8")
    print(f"wrote {page} and {draw(root)}")


if __name__ == "__main__":
    main(ROOT, Path(sys.argv[1]) if len(sys.argv) > 1 else None)

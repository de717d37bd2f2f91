"""The colours of a run, the same on the terminal and in its picture."""

from tepo_megatron.run.metrics.metrics import PHASES

PHASE_COLOURS = dict(
    zip(
        (*PHASES, "other"),
        ("#2b6cb0", "#8fb8de", "#0b7285", "#2f9e44", "#f08c00", "#d6336c", "#9c6ade", "#b8c0c8"),
        strict=True,
    )
)
"""Phase of a step → colour, in the order of the phases; ``other`` is last."""

RUN_COLOURS = ("#2b6cb0", "#d9480f", "#2f9e44", "#9c6ade", "#c2255c", "#0b7285", "#b08900", "#495057")
"""One for each run of a comparison."""

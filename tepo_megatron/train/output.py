"""The output folder of a run, and what is shown of it while it grows. Rank 0 only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import dump_resolved
from tepo_megatron.train.figures import final_table
from tepo_megatron.train.lost_time import fault_lines
from tepo_megatron.train.metrics import MetricsWriter, read_metrics
from tepo_megatron.train.plots import plot_curves
from tepo_megatron.train.progress import Progress
from tepo_megatron.train.resume import resumes


class Output:
    """Writes ``resolved.yaml`` at once, a row of metrics a step, samples per evaluation, and at the end the picture."""

    def __init__(self, config: RunConfig, progress: Progress) -> None:
        """Raises ValueError if the folder holds another run and this one does not resume it."""
        self.folder = config.output
        self.progress = progress
        self._name = config.name
        self._finished = False
        self.resumes = resumes(config)
        """Whether the run goes on from a checkpoint."""
        if config.train.resume == "auto" and not self.resumes:
            _put_aside(self.folder)
        if (self.folder / "metrics.jsonl").exists() and not self.resumes:
            raise ValueError(
                f"output {self.folder} already holds a run; give another folder (output=…), continue it "
                "(train.resume=true), or remove it"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.resumes:  # a resumed run writes it when the checkpoint has been accepted
            (self.folder / "resolved.yaml").write_text(dump_resolved(config))
        self._metrics = MetricsWriter(self.folder, config.log.tensorboard)
        progress.start(config)

    @property
    def last_step(self) -> int | None:
        """The step of the last row of metrics."""
        return self._metrics.last_step

    def resume_from(self, step: int) -> float:
        """Forgets what was logged beyond the checkpoint, and samples of an evaluation that has no row. Returns the seconds of
        the steps that are forgotten, and done again.
        """
        rows = read_metrics(self.folder / "metrics.jsonl")
        forgotten = sum(row.get("time/step") or 0.0 for row in rows if row["step"] > step)
        self._metrics.truncate_after(step)
        samples = self.folder / "samples.jsonl"
        if samples.exists():
            # Not splitlines(): a response may hold characters that it, unlike JSON, takes for the end of a line.
            lines = [line for line in samples.read_text(encoding="utf-8").split("\n") if line]
            logged = -1 if self.last_step is None else self.last_step
            kept = [line for line in lines if json.loads(line)["step"] <= logged]
            samples.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        return forgotten

    def message(self, text: str) -> None:
        self.progress.message(text)

    def write_row(self, step: int, row: Mapping[str, float]) -> None:
        self._metrics.write(step, row)
        self.progress.step(step, row)

    def write_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Appends an evaluation's readable responses to ``samples.jsonl``."""
        with (self.folder / "samples.jsonl").open("a", encoding="utf-8", errors="backslashreplace") as file:
            for sample in samples:
                file.write(json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n")

    def finish(self) -> None:
        """Draws ``curves.png`` and shows the final table, and what went wrong where something did."""
        self.progress.close()
        self._metrics.close()
        metrics = self.folder / "metrics.jsonl"
        plot_curves(metrics, self.folder / "curves.png", self._name)
        from rich.console import Console

        rows = read_metrics(metrics)
        Console().print(final_table(rows, self.folder))
        for line in fault_lines(rows):
            Console().print(f"  {line}", highlight=False)
        self._finished = True

    def close(self) -> None:
        """After a failure: the terminal is given back, the files are complete up to the last row; what went wrong before it is
        said.
        """
        metrics = self.folder / "metrics.jsonl"
        if not self._finished and metrics.exists():
            self._finished = True
            for line in fault_lines(read_metrics(metrics)):
                self.progress.message(f"  {line}")
        self.progress.close()
        self._metrics.close()


def _put_aside(folder: Path) -> None:
    """Keeps what a run logged that left no checkpoint: ``metrics.jsonl`` becomes ``metrics.before-1.jsonl``, then 2."""
    number = 1 + len(list(folder.glob("metrics.before-*.jsonl")))
    for name in ("metrics", "samples"):
        if (folder / f"{name}.jsonl").exists():
            (folder / f"{name}.jsonl").rename(folder / f"{name}.before-{number}.jsonl")

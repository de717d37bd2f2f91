from dataclasses import dataclass
from pathlib import Path

from nemo_run.core.execution.slurm import SlurmJobDetails


@dataclass(kw_only=True)
class JobLogs(SlurmJobDetails):  # type: ignore[misc]  # NeMo-Run's types are not followed
    """Writes ``slurm-JOB.out`` for the batch script, ``ROLE-JOB.RESTART-nodeN.log`` per role's node."""

    role: str = ""

    @property
    def stdout(self) -> Path:
        return Path(self.folder) / "slurm-%j.out"

    @property
    def srun_stdout(self) -> Path:
        return Path(self.folder) / f"{self.role}-%j.${{SLURM_RESTART_COUNT:-0}}-node%n.log"

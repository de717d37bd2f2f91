"""``cluster``: nodes, GPUs, and Slurm's options."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from tepo_megatron.config.base import Section

Share = Annotated[float, Field(gt=0, le=1)]


class ClusterConfig(Section):
    """For ``tepo plan`` and ``tepo launch``; ``tepo train`` ignores it."""

    train_nodes: PositiveInt = 1
    """Nodes for training. If several, engine.parallel fills all their GPUs."""

    spare_nodes: NonNegativeInt = 0
    """Nodes in reserve, besides ``train_nodes``: at a restart (``train.max_restarts``) they replace nodes that are gone or that
    lost a rank, except the first.
    """

    rollout_nodes: NonNegativeInt = 0
    """Nodes for vLLM servers; 0: the training node's free GPUs."""

    gpus_per_node: PositiveInt = 8
    """GPUs per node, equal on all nodes."""

    gpu_memory_gib: PositiveFloat = 79.0
    """GPU memory as torch reports it: 79 for an 80 GB H100 or A100, 139 for an H200."""

    host_memory_gib: PositiveFloat = 1000.0
    """Node memory."""

    gpu_tflops: PositiveFloat = 989.0
    """Peak of a GPU in dense bf16, 10¹² FLOP/s: 989 for an H100 SXM, 312 for an A100."""

    gpu_memory_gb_per_s: PositiveFloat = 3350.0
    """Peak memory bandwidth, in 10⁹ bytes/s: 3350 for an H100 SXM, 2039 for an A100."""

    nvlink_gb_per_s: PositiveFloat = 450.0
    """Peak rate between a node's GPUs, in 10⁹ bytes/s per GPU and direction."""

    network_gb_per_s: PositiveFloat = 50.0
    """The same between nodes: 50 is a 400 Gbit/s adapter per GPU."""

    pcie_gb_per_s: PositiveFloat = 55.0
    """The same between GPU and host: PCIe 5.0 × 16 has 55, PCIe 4.0 has 25."""

    link_efficiency: Share = 0.7
    """Assumed fraction of a link's peak rate."""

    train_mfu: Share = 0.45
    """Assumed model FLOPs utilisation in training."""

    score_mfu: Share = 0.45
    """As ``train_mfu``, without gradient."""

    storage_gb_per_s: PositiveFloat = 7.0
    """Assumed rate of all nodes together to shared disk, in 10⁹ bytes/s."""

    host_adam_per_s: PositiveFloat = 2e9
    """Assumed CPU-Adam throughput per rank (``optimizer.offload_fraction``), in parameters per second."""

    decode_bandwidth: Share = 0.5
    """Assumed fraction of memory bandwidth in decoding."""

    account: str | None = None
    """Charged Slurm account."""

    partition: str | None = None
    """Slurm partition."""

    time_limit: str = Field(default="24:00:00", pattern=r"^(\d+-)?\d{1,2}:\d{2}:\d{2}$")
    """Slurm's limit: [days-]hours:minutes:seconds."""

    @field_validator("time_limit", mode="before")
    @classmethod
    def _as_written(cls, value: Any) -> Any:
        if type(value) is not int or value < 3600:
            return value
        # YAML reads 24:00:00 as a number to base 60
        hours, seconds = divmod(value, 3600)
        days = f"{hours // 24}-" if hours >= 100 else ""
        return f"{days}{hours % 24 if days else hours:02}:{seconds // 60:02}:{seconds % 60:02}"

    max_requeues: NonNegativeInt = 50
    """Most requeues of a job that saved after a warning or preemption (exit code 75). 0: never."""

    sbatch: tuple[str, ...] = ()
    """Further sbatch options without dashes, such as ``qos=high``."""

    ssh: str | None = Field(default=None, pattern=r"^[^@\s]+@[^@:\s]+(:\d+)?$")
    """Submit on this node, user@host[:port]. Default: this machine."""

    ssh_identity: Path | None = None
    """Use this private key for ``ssh``. Default: the agent's, or a password prompt."""

    container: str | None = None
    """Trainer image (registry name or .sqsh file), for Slurm with pyxis. Default: ``python`` on nodes."""

    rollout_container: str | None = None
    """Image of the servers. Default: ``container``."""

    mounts: tuple[str, ...] = ()
    """Further container folders, as source:target, besides output, model and data."""

    python: str = "python"
    """Trainer's interpreter on nodes or in ``container``, such as /shared/tepo/.venv/bin/python."""

    rollout_python: str | None = None
    """Servers' interpreter. Default: ``python``."""

    setup: tuple[str, ...] = ()
    """Shell commands run first on nodes, such as ``module load cuda``."""

"""``cluster``: how many nodes train and serve, what their GPUs are, and how Slurm is asked for them."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from tepo_megatron.config.base import Section

Share = Annotated[float, Field(gt=0, le=1)]


class ClusterConfig(Section):
    """Nodes and GPUs that ``tepo plan`` assumes and ``tepo launch`` requests; ``tepo train`` ignores them."""

    train_nodes: PositiveInt = 1
    """Nodes for training. With more than one, engine.parallel fills all their GPUs."""

    rollout_nodes: NonNegativeInt = 0
    """Nodes for vLLM servers; 0: the servers run on the training node, on the GPUs that engine.parallel leaves free."""

    gpus_per_node: PositiveInt = 8
    """GPUs per node, equal on all nodes."""

    gpu_memory_gib: PositiveFloat = 79.0
    """Memory of one GPU, as torch reports it: 79 for an 80 GB H100 or A100, 139 for an H200."""

    host_memory_gib: PositiveFloat = 1000.0
    """Memory of one node's host: 1000 to 2000 are usual beside eight H100."""

    gpu_tflops: PositiveFloat = 989.0
    """Peak of one GPU in bf16 without sparsity, in 10¹² FLOP/s: 989 for an H100 SXM, 312 for an A100."""

    gpu_memory_gb_per_s: PositiveFloat = 3350.0
    """Peak bandwidth of one GPU's memory in 10⁹ bytes/s: 3350 for an H100 SXM, 2039 for an A100."""

    nvlink_gb_per_s: PositiveFloat = 450.0
    """Peak rate between GPUs of one node, in 10⁹ bytes/s, per GPU and direction."""

    network_gb_per_s: PositiveFloat = 50.0
    """Peak rate between nodes, in 10⁹ bytes/s, per GPU and direction: 50 is one 400 Gbit/s adapter for each GPU."""

    pcie_gb_per_s: PositiveFloat = 55.0
    """Peak rate between a GPU and its host, in 10⁹ bytes/s, per GPU and direction: 55 of PCIe 5.0 × 16, 25 of PCIe 4.0."""

    link_efficiency: Share = 0.7
    """Fraction of a link's peak rate that a plan assumes; not measured."""

    train_mfu: Share = 0.45
    """Model FLOPs utilisation (FLOPs over peak) that a plan assumes for training while a GPU computes, without the pipeline's
    bubble and waiting for other ranks."""

    score_mfu: Share = 0.45
    """The same for passes without a gradient: log-probs before the update, prompts in the servers."""

    storage_gb_per_s: PositiveFloat = 7.0
    """Rate at which all nodes together write a checkpoint to the shared disk, in 10⁹ bytes/s: an assumption."""

    host_adam_per_s: PositiveFloat = 2e9
    """CPU-Adam throughput of a rank's share of the host's cores, in parameters per second, with ``optimizer.offload_fraction``:
    an assumption, for about eight cores."""

    decode_bandwidth: Share = 0.5
    """Fraction of the memory bandwidth that a plan assumes for token-by-token generation."""

    account: str | None = None
    """Slurm account that is charged."""

    partition: str | None = None
    """Slurm partition."""

    time_limit: str = Field(default="24:00:00", pattern=r"^(\d+-)?\d{1,2}:\d{2}:\d{2}$")
    """Slurm's limit, as [days-]hours:minutes:seconds."""

    max_requeues: NonNegativeInt = 50
    """Most times that a job which was warned or preempted, and has saved (exit code 75), is put back into the queue to resume;
    counted as Slurm counts restarts. 0: never."""

    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, as on its command line without the dashes, such as ``qos=high`` or ``reservation=rl``."""

    ssh: str | None = Field(default=None, pattern=r"^[^@\s]+@[^@:\s]+(:\d+)?$")
    """The login node to submit from, as user@host[:port]; default: this machine has sbatch."""

    ssh_identity: Path | None = None
    """Private key for ``ssh``; default: the agent's, or a password prompt."""

    container: str | None = None
    """Image of the trainer (a registry's name or a .sqsh file), for Slurm with pyxis; default: ``python`` on the nodes."""

    rollout_container: str | None = None
    """Image of the servers; default: ``container``."""

    mounts: tuple[str, ...] = ()
    """Further folders for the containers, as source:target. The folders of output, model and data are mounted in any case."""

    python: str = "python"
    """The trainer's interpreter on the nodes, or in ``container``; such as /shared/tepo/.venv/bin/python."""

    rollout_python: str | None = None
    """The servers' interpreter; default: ``python``."""

    setup: tuple[str, ...] = ()
    """Shell commands that run on every node first, such as ``module load cuda``."""

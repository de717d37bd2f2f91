"""``cluster``: nodes, GPUs, and what submits to them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from tepo_megatron.config.base import Section

Share = Annotated[float, Field(gt=0, le=1)]
ExecutorName = Literal["slurm", "local", "docker", "skypilot", "dgxcloud", "lepton", "kubernetes"]
_ONLY_SLURM = ("account", "partition", "time_limit", "max_requeues", "sbatch", "ssh", "ssh_identity", "spare_nodes")


class _SkypilotConfig(Section):
    """``cluster.mounts`` are bucket:target."""

    infra: str
    """``aws/us-east-1``, ``k8s/CONTEXT``, … (``sky launch --infra``)."""

    gpus: str | None = None
    """SkyPilot's name of the GPU, such as ``H100``."""

    idle_minutes: NonNegativeInt = 10
    """Machines are given up so long after the job."""


class _DgxCloudConfig(Section):
    """Run:ai. ``cluster.mounts`` are claim:target. The secret is the variable DGXCLOUD_CLIENT_SECRET."""

    base_url: str
    """Of the API, such as ``https://NAME.run.ai/api/v1``."""

    kube_apiserver_url: str
    """Of the cluster."""

    client_id: str
    """Of the application."""

    project: str
    """Charged project."""


class _LeptonConfig(Section):
    """``cluster.mounts`` are path:target, on ``storage``."""

    node_group: str
    """Where to run."""

    resource_shape: str
    """Of a node, such as ``gpu.8xh100-80gb``."""

    storage: str
    """Of the node group, such as ``node-nfs:lepton-shared-fs``."""

    image_pull_secrets: tuple[str, ...] = ()
    """Names."""


class _KubernetesConfig(Section):
    """A TrainJob of Kubeflow Trainer 2. ``cluster.mounts`` are claim:target."""

    namespace: str = "default"
    """Of the job and its claims."""

    runtime: str = "torch-distributed"
    """ClusterTrainingRuntime."""

    resources: dict[str, str] = Field(default_factory=dict)
    """Of a pod, besides its GPUs, such as ``rdma/ib``."""

    labels: dict[str, str] = Field(default_factory=dict)
    """Of the TrainJob, such as a queue's."""

    image_pull_secrets: tuple[str, ...] = ()
    """Names."""


_SECTIONS: dict[str, type[Section]] = {
    "skypilot": _SkypilotConfig,
    "dgxcloud": _DgxCloudConfig,
    "lepton": _LeptonConfig,
    "kubernetes": _KubernetesConfig,
}


class ClusterConfig(Section):
    """For ``tepo plan`` and ``tepo launch``; ``tepo train`` reads its machine."""

    executor: ExecutorName = "slurm"
    """NeMo-Run's executor: where ``tepo launch`` runs the job."""

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
    """Trainer image (registry name, or .sqsh file for Slurm with pyxis). Default: ``python`` on nodes."""

    rollout_container: str | None = None
    """Image of the servers' nodes (``rollout_nodes``). Default: ``container``."""

    mounts: tuple[str, ...] = ()
    """Container folders, as source:target, on Slurm and Docker besides output, model and data."""

    python: str = "python"
    """Trainer's interpreter on nodes or in ``container``, such as /shared/tepo/.venv/bin/python."""

    rollout_python: str | None = None
    """Interpreter on the servers' nodes. Default: ``python``."""

    setup: tuple[str, ...] = ()
    """Shell commands run first on nodes, such as ``module load cuda``."""

    skypilot: _SkypilotConfig | None = None
    """For ``executor: skypilot``."""

    dgxcloud: _DgxCloudConfig | None = None
    """For ``executor: dgxcloud``."""

    lepton: _LeptonConfig | None = None
    """For ``executor: lepton``."""

    kubernetes: _KubernetesConfig | None = None
    """For ``executor: kubernetes``."""

    @property
    def train_job(self) -> _KubernetesConfig:
        return self.kubernetes or _KubernetesConfig()

    @property
    def is_one_machine(self) -> bool:
        """Its job runs on this machine, in the foreground."""
        return self.executor in ("local", "docker")

    @property
    def is_one_job(self) -> bool:
        """All nodes start with one image and one script, and the launcher may not see their disk."""
        return self.executor in _SECTIONS

    def _faults(self) -> Iterator[str]:
        name = f"executor = {self.executor}"
        yield from self._idle(_ONLY_SLURM, "executor", "slurm")
        for section, kind in _SECTIONS.items():
            is_set, required = (
                getattr(self, section) is not None,
                [key for key, of in kind.model_fields.items() if of.is_required()],
            )
            if is_set and section != self.executor:
                yield f"section {section} does nothing with {name}; set executor = {section}, or leave the section out"
            if section == self.executor and required and not is_set:
                yield f"{name} needs the section {section} with {', '.join(required)}; write it"
        if self.executor == "local":
            yield from self._idle(("container", "rollout_container", "mounts"), "executor", "docker")
        elif self.executor != "slurm" and self.container is None:
            yield f"{name} runs an image; name it in container"
        if self.is_one_machine and (self.train_nodes > 1 or self.rollout_nodes > 1):
            nodes = f"train_nodes = {self.train_nodes} and rollout_nodes = {self.rollout_nodes}"
            yield f"{name} has one machine, and {nodes}; set them to 1 and to 0, or 1 for servers in a process of their own"
        if self.is_one_job and self.rollout_container not in (None, self.container):
            yield f"{name} gives all nodes one image; leave rollout_container out, and name rollout_python in it"
        for field in () if self.rollout_nodes else ("rollout_container", "rollout_python"):
            if getattr(self, field) is not None:
                yield f"{field} is for nodes of servers, and with rollout_nodes = 0 the trainer's start them; leave it out"

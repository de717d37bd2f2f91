import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.plan import Plan, check_plan
from tepo_megatron.plan.shapes import CHECKPOINT_BYTES, model_parameters
from tepo_megatron.runtime.machine import Machine
from tepo_megatron.sampler.protocol import sampler_spec
from tepo_megatron.weights.architecture import ModelSpec
from tepo_megatron.weights.transfer.transport import is_loopback
from tepo_megatron.weights.transfer.transports import find_transport


@dataclass(frozen=True)
class Placement:
    config: RunConfig
    machine: Machine

    @property
    def server(self) -> ServerConfig:
        return self.config.rollout.server

    @property
    def workers(self) -> int:
        return self.server.tp * self.server.count

    @property
    def on_gpus(self) -> bool:
        return self.config.engine.wants_gpus and self.machine.gpus > 0

    @property
    def transport(self) -> str:
        if self.server.transport != "auto":
            return self.server.transport
        if not self.on_gpus:
            return "gloo"
        if self.server.placement == "colocated":
            return "ipc"
        return "nccl" if self.machine.has_nccl else "gloo"

    @property
    def first_server_gpu(self) -> int:
        return self.machine.local_ranks if self.on_gpus and self.server.placement != "colocated" else 0

    @property
    def teacher_gpus(self) -> dict[str, int]:
        """The first GPU of each served teacher's servers: those after the trainer's and the rollout servers'."""
        first = self.machine.local_ranks + (self.workers if self.server.placement == "local" else 0) if self.on_gpus else 0
        result = {}
        for name, teacher in self.config.teachers.items():
            if teacher.place == "server":
                result[name] = first
                first += teacher.local_workers if self.on_gpus else 0
        return result

    @property
    def shared_gpus(self) -> dict[int, int]:
        """Worker, numbered over all servers → trainer's rank on its GPU."""
        return {worker: worker for worker in range(self.workers)} if self.server.placement == "colocated" else {}

    def split_cores(self, cores: Sequence[int]) -> tuple[dict[str, Sequence[int]], set[int]]:
        """Returns each served teacher's, all if other servers leave none, and what servers take."""
        taken = sampler_spec().cores(self.server, cores) if self.server.placement == "local" else set()
        left: dict[str, Sequence[int]] = {}
        for name, teacher in self.config.teachers.items():
            if teacher.place == "server":
                left[name] = [core for core in cores if core not in taken] or cores
                taken |= sampler_spec().cores(teacher.served, left[name]) if teacher.local_workers else set()
        return left, taken

    def trainer_threads(self, cores: Sequence[int]) -> int | None:
        """None is torch's default."""
        threads = self.config.engine.cpu_threads
        if threads is None or self.on_gpus:
            return None
        if threads != "auto":
            return threads
        # Phases that alternate have all cores each; phases that overlap share them, also in a replay: threads change rounding.
        taken = self.split_cores(cores)[1] if self.config.train.schedule == "overlap" else set()
        return max(1, len(set(cores) - taken) // self.machine.local_ranks)

    def saves_beside_training(self, spec: ModelSpec) -> bool:
        staged = (
            CHECKPOINT_BYTES * model_parameters(spec, self.config.model.lora) * self.machine.local_ranks / self.machine.ranks
        )
        return self.config.train.saves_beside_training(staged, self.machine.memory, on_gpu=self.on_gpus)

    def check(self) -> None:
        """Raises ValueError for what this machine cannot do."""
        if self.config.engine.platform == "cuda" and not self.machine.gpus:
            raise ValueError(
                f"engine.platform = cuda, but torch {torch.__version__} sees no GPU; install a CUDA build of torch, or set "
                "engine.platform=cpu"
            )
        server, machine = self.server, self.machine
        if self.on_gpus and machine.local_ranks > machine.gpus:
            raise ValueError(
                f"{machine.local_ranks} ranks run on {socket.gethostname()}, where torch sees {machine.gpus} GPUs (nvidia-smi "
                "and CUDA_VISIBLE_DEVICES say which); start fewer ranks, or leave the machine out"
            )
        if self.config.rollout.replay is not None:
            return
        threads, transport = self.config.engine.cpu_threads, f"rollout.server.transport = {server.transport}"
        if threads is not None and self.on_gpus:
            raise ValueError(f"engine.cpu_threads = {threads} acts where the trainer runs on a CPU, and it runs on GPUs here")
        if server.transport != "auto" and find_transport(server.transport).requires_gpu and not self.on_gpus:
            raise ValueError(f"{transport} moves weights between GPUs, and {self._no_gpus}; set it to gloo, or auto")
        if server.transport == "nccl" and not machine.has_nccl:
            raise ValueError(f"{transport}, but torch {torch.__version__} has no NCCL; install a CUDA build, or set it to gloo")
        if server.placement == "colocated":
            self._check_colocated()
        for name, first in self.teacher_gpus.items():
            workers = self.config.teachers[name].local_workers
            last = first + workers
            if self.on_gpus and workers and last > machine.gpus:
                raise ValueError(
                    f"teachers.{name} is served on GPUs {first} to {last - 1}, and this machine has {machine.gpus}; serve it "
                    f"elsewhere (teachers.{name}.server.placement = external, and tepo serve RUN --teacher {name}), or set "
                    "place = ranks"
                )
        if server.placement == "local":
            self._check_local()

    def _check_local(self) -> None:
        server, machine = self.server, self.machine
        all_send = server.transfer == "reshard" and self.config.adapter_rank is None
        if all_send and machine.local_ranks != machine.ranks and is_loopback(server.host):
            raise ValueError(
                f"rollout.server.host = {server.host} cannot be reached by the {machine.ranks - machine.local_ranks} ranks on "
                "other machines, which send their weights there; set it to this machine's address, or placement = external"
            )
        if self.on_gpus and machine.local_ranks + self.workers > machine.gpus:
            raise ValueError(
                f"the trainer uses {machine.local_ranks} GPUs and the servers (rollout.server.tp × count) {self.workers} "
                f"others, but this machine has {machine.gpus}; share them with rollout.server.placement = colocated, or use "
                "fewer ranks or servers"
            )

    def _check_colocated(self) -> None:
        machine, placement = self.machine, "rollout.server.placement = colocated"
        if not self.on_gpus:
            raise ValueError(f"{placement} shares GPUs between trainer and servers, and {self._no_gpus}; set it to local")
        if machine.local_ranks != machine.ranks:
            raise ValueError(
                f"{placement} starts the servers on rank 0's machine, but {machine.ranks} ranks run on several machines "
                f"({machine.local_ranks} here); use placement = external there"
            )
        if self.workers > machine.ranks:
            raise ValueError(
                f"rollout.server.tp × count = {self.server.tp} × {self.server.count} workers do not fit on the GPUs of "
                f"{machine.ranks} trainer ranks, one on each, as placement = colocated puts them; lower tp or count"
            )

    @property
    def _no_gpus(self) -> str:
        if self.config.engine.platform == "cpu":
            return "engine.platform = cpu"
        return f"torch {torch.__version__} sees {self.machine.gpus} GPUs here"

    def check_memory(self, spec: ModelSpec) -> None:
        """Raises ValueError, or warns with ``engine.check_memory = false``."""
        elsewhere = self.server.placement == "external"
        if not self.on_gpus and (elsewhere or self.config.rollout.replay is not None):
            return
        check_plan(Plan.of(self._planned(), spec, servers_elsewhere=elsewhere))

    def _planned(self) -> RunConfig:
        machine, server = self.machine, self.server
        if not self.on_gpus:
            engine = self.config.engine.model_copy(update={"platform": "cpu"})  # what "auto" is here
            data = self.config.data.model_copy(update={"max_prompt_tokens": None})  # only bounds them: the start looks at each
            return self.config.model_copy(update={"engine": engine, "data": data})
        gpus = max(machine.gpus, machine.local_ranks)
        memory = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count()))
        nodes = {"train_nodes": max(1, machine.ranks // machine.local_ranks), "gpus_per_node": gpus}
        if server.placement == "external":  # wherever they run
            nodes["rollout_nodes"] = server.count
        sizes = {"gpu_memory_gib": memory / 2**30, "host_memory_gib": machine.memory / 2**30}
        cluster = self.config.cluster.model_copy(update={**nodes, **sizes})
        return self.config.model_copy(update={"cluster": cluster})

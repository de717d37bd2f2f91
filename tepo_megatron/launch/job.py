"""A job's absolute paths, and a shell script per role."""

import math
import shlex
from dataclasses import dataclass
from itertools import product
from pathlib import Path, PurePosixPath

from tepo_megatron.config import RunConfig
from tepo_megatron.config.data import BUILTIN
from tepo_megatron.config.load import dump_resolved
from tepo_megatron.config.paths import absolute, paths_in
from tepo_megatron.runtime.hub import HUB, download_advice

_END = "END_OF_THE_FILE"
_JOB_END_S = 30  # from the trainer's end to Slurm's limit


@dataclass(frozen=True)
class Role:
    """``script`` runs once per node; its first argument is the first node's address."""

    name: str
    first_node: int
    nodes: int
    script: str
    container: str | None


def on_nodes(config: RunConfig) -> RunConfig:
    """Makes paths absolute and platforms equal, and gives external servers nodes of their own.

    Raises ValueError for a relative path through ssh, and an output path that needs quotes.
    """
    _check_reachable(config)
    config = absolute(config)
    output, executor = config.output, config.cluster.executor
    for char in str(output):
        # NeMo-Run quotes nothing, and Slurm expands % in log paths.
        needs_quotes = executor != "local" and char.isascii() and shlex.quote(char) != char
        if char.isspace() or needs_quotes or (executor == "slurm" and char == "%"):
            raise ValueError(
                f"output = {str(output)!r} has {char!r}, which NeMo-Run's scripts cannot have; choose another folder"
            )
    if config.engine.wants_gpus and not config.cluster.is_one_machine:  # auto could be the CPU on a node with a fault
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"platform": "cuda"})})
    if config.rollout.replay is not None:  # needs no servers
        without = {"rollout_nodes": 0, "rollout_container": None, "rollout_python": None}
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update=without)})
    if not config.cluster.rollout_nodes:
        return config
    server = config.rollout.server.model_copy(update={"placement": "external", "registry": output / "servers"})
    if config.cluster.is_one_machine and server.interface is None:
        server = server.model_copy(update={"interface": "lo"})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"server": server})})


def _check_reachable(config: RunConfig) -> None:
    for field, path in paths_in(config).items():
        if path.startswith(HUB):
            is_data = field.startswith(("data.", "evaluate."))
            advice = download_advice(path, "dataset" if is_data else "model", "on a disk that all of them see")
            raise ValueError(f"{field} = {path}: the nodes of a job download nothing; {advice}")
        elsewhere = config.cluster.ssh is not None and field != "cluster.ssh_identity"
        if elsewhere and not path.startswith((BUILTIN, "/", "${")):
            raise ValueError(
                f"{field} = {path!r} is relative, but with cluster.ssh it lies on another machine; write the whole path"
            )


def _folder_of(file: str) -> PurePosixPath:
    # custom code can import its neighbours; but / would hide the whole image
    path = PurePosixPath(file)
    return path.parent if path.parent.name else path


@dataclass(frozen=True)
class Job:
    """``config`` is a result of ``on_nodes``."""

    config: RunConfig

    @property
    def roles(self) -> list[Role]:
        """The trainer's nodes come first."""
        cluster = self.config.cluster
        trainers = cluster.train_nodes + cluster.spare_nodes
        train = Role("train", 0, trainers, self._train_script(), cluster.container)
        if not cluster.rollout_nodes:
            return [train]
        python, container = cluster.rollout_python or cluster.python, cluster.rollout_container or cluster.container
        workers = self.config.rollout.server.tp * self.config.rollout.server.count // cluster.rollout_nodes
        grace = math.ceil(self.config.train.grace_s)
        script = self._fill("serve.sh", python=python, nodes=cluster.rollout_nodes, grace=grace, workers=workers)
        return [train, Role("serve", trainers, cluster.rollout_nodes, script, container)]

    @property
    def mounts(self) -> list[str]:
        folders = {_folder_of(name) for name in self.config.objective.plugins if name.startswith("/")}
        for field, path in paths_in(self.config).items():
            if field != "cluster.ssh_identity" and not path.startswith(BUILTIN):
                is_file = field.startswith(("data.", "evaluate.")) or field.endswith("key_file") or path.endswith(".py")
                folders.add(_folder_of(path) if is_file else PurePosixPath(path))
        for char, folder in product(",:", map(str, folders)):
            if char in folder:
                raise ValueError(f"{folder} has {char!r}, which divides the mounts of a container; rename the folder")
        output = PurePosixPath(self.config.output)
        local = sorted(f"{folder}:{folder}" for folder in folders if output not in folder.parents)
        return list(dict.fromkeys([*local, *self.config.cluster.mounts]))

    @property
    def batch_lines(self) -> str:
        """Forwards Slurm's warning and requeues the job."""
        return self._fill("batch.sh", max_requeues=self.config.cluster.max_requeues)

    @property
    def warning_lead_s(self) -> int:
        """Seconds from SIGUSR1 to Slurm's limit."""
        return math.ceil(self.config.train.warning_s) + _JOB_END_S

    @property
    def needs_transformer_engine(self) -> bool:
        engine = self.config.engine
        return engine.wants_gpus and (engine.layers != "local" or self.config.optimizer.precision_aware)

    def check_time_limit(self) -> None:
        """Slurm must not warn a job that just starts."""
        limit, warning_s, warned_s = self.config.cluster.time_limit, self.config.train.warning_s, self.warning_lead_s
        days, _, clock = limit.rpartition("-")
        hours, minutes, seconds = (int(part) for part in clock.split(":"))
        if ((24 * int(days or 0) + hours) * 60 + minutes) * 60 + seconds <= warned_s:
            raise ValueError(
                f"cluster.time_limit = {limit} is over before the job could do anything: Slurm warns it {warned_s} s before "
                f"the end (train.warning_s = {warning_s:g}, and {_JOB_END_S} s for the job's own end); give it more time, or "
                "lower train.warning_s"
            )

    def node_script(self, name: str, head: str, node: str) -> str:
        """Runs any role, without Slurm. ``head`` and ``node`` are shell words: the first node's address, this node's number."""
        files = {"run.yaml": dump_resolved(self.config), **{f"{role.name}.sh": role.script for role in self.roles}}
        placed = "\n".join(f"place {file} <<'{_END}'\n{text.rstrip()}\n{_END}" for file, text in files.items())
        text = self._fill("node.sh", job=name).replace("@head@", head).replace("@node@", node)
        text = text.replace("@roles@", " ".join(f"{role.name}:{role.first_node}" for role in self.roles))
        return text.replace("@files@", placed)

    def _train_script(self) -> str:
        cluster = self.config.cluster
        ranks = self.config.engine.parallel.world_size // cluster.train_nodes
        values = {"nodes": cluster.train_nodes, "rollout_nodes": cluster.rollout_nodes, "spares": cluster.spare_nodes}
        values |= {"ranks": ranks, "restarts": self.config.train.max_restarts}
        text = self._fill("train.sh", python=cluster.python, **values)
        return text.replace(" @needed@", " transformer-engine" if self.needs_transformer_engine else "")

    def _fill(self, template: str, **values: str | int) -> str:
        templates = Path(__file__).parent / "templates"
        text = (templates / template).read_text().replace("@processors@\n", (templates / "processors.sh").read_text())
        # the file in which the trainer leaves its exit code; "closed" also ends servers
        end_file = "trainer-ended" if self.config.cluster.executor == "slurm" else "closed"
        common = {"output": self.config.output, "interface": self.config.rollout.server.interface or "", "ended": end_file}
        for name, value in {**common, **values}.items():
            text = text.replace(f"@{name}@", shlex.quote(str(value)))
        return text.replace("@setup@\n", "".join(f"{line}\n" for line in self.config.cluster.setup))

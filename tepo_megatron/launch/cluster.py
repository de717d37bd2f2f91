from __future__ import annotations

import json
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.data import BUILTIN
from tepo_megatron.config.load import dump_resolved
from tepo_megatron.config.paths import paths_in
from tepo_megatron.launch.executors import TITLE, check_machine, check_paths
from tepo_megatron.launch.job import Job
from tepo_megatron.runtime.text import echo

if TYPE_CHECKING:
    from nemo_run.core.tunnel.client import Tunnel

_QUERIES = (
    "squeue --noheader --jobs={job} --format=%T",
    "scontrol --oneliner show job {job} | grep -o 'JobState=[A-Z_]*' | cut -d= -f2",
    "sacct --noheader --allocations --parsable2 --jobs={job} --format=State",
)
"""squeue knows waiting and running jobs, scontrol recent ones, sacct (not everywhere) all."""
_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("RECONFIG_FAIL", "REVOKED", "TIMEOUT"),
)
"""Slurm's states of jobs that will not run again."""
_FOLDERS = ("model.lora.path", "model.shards", "rollout.replay")


@dataclass(frozen=True)
class ClusterRun:
    """Commands go through the tunnel, to the cluster or this machine."""

    config: RunConfig
    tunnel: Tunnel

    def check(self) -> None:
        """Raises ValueError for a missing file, image or checkpoint, an output folder in use, or what the executor lacks."""
        if self.config.cluster.executor != "slurm":
            check_machine(self.config)
        if self.config.cluster.is_one_job:
            check_paths(self.config)
        else:
            self._check_files()
            self._check_images()
            self._check_links()
        self._check_newest_job()
        self._check_output()

    def _run(self, command: str) -> Any:
        return self.tunnel.run(command, hide=True, warn=True)

    def _has(self, path: str) -> bool:
        return bool(self._run(f"ls -d {shlex.quote(path)} >/dev/null 2>&1").ok)

    @property
    def _where(self) -> str:
        return self.config.cluster.ssh or "this machine"

    def _check_files(self) -> None:
        config, missing = self.config, f"does not exist on {self._where}"
        models = {"model.path": config.model.path}
        models |= {f"teachers.{name}.path": teacher.path for name, teacher in config.teachers.items()}
        models |= {field: path for field, path in paths_in(config).items() if field.endswith(".draft_model")}
        needed = [
            (
                f"{model}/config.json",
                f"{field} = {model} has no config.json on {self._where}; give a Hugging Face folder that every node can "
                "read ('hf download NAME --local-dir FOLDER' makes one)",
            )
            for field, model in models.items()
        ]
        remedy = "put the same file at the same path there, or install the module on both sides and name it"
        plugins = (plugin for plugin in config.objective.plugins if plugin.startswith("/"))
        needed += [(plugin, f"objective.plugins: {plugin} {missing}; {remedy}") for plugin in plugins]
        for field, file in paths_in(config).items():
            if file.endswith(".py"):
                needed.append((file, f"{field}: {file} {missing}; put the file there"))
            elif field.startswith(("data.", "evaluate.")) or field in _FOLDERS:
                kind = "a folder" if field in _FOLDERS else "a file or folder" if field.startswith("data.") else "a file"
                needed.append((file, f"{field} = {file} {missing}; give {kind} there"))
        for path, problem in needed:
            if not path.startswith(BUILTIN) and not self._has(path):
                raise ValueError(problem)

    def _check_images(self) -> None:
        cluster = self.config.cluster
        for image in {cluster.container, cluster.rollout_container}:
            if image is not None and image.startswith(("/", ".")) and not self._has(image):
                raise ValueError(
                    f"the container image {image} does not exist on {self._where}; docs/guides/cluster.md says how to make it"
                )
        trainer = cluster.container
        if trainer is None or not trainer.endswith(".sqsh") or not Job(self.config).needs_transformer_engine:
            return  # other images are checked when the job starts
        listing = self._run(f"command -v unsquashfs >/dev/null && unsquashfs -l {shlex.quote(trainer)}")
        if listing.ok and "transformer_engine" not in listing.stdout:
            remedy = "set engine.layers=local"
            if self.config.optimizer.precision_aware:
                remedy += ", and keep the optimizer's states in float32"
            raise ValueError(
                f"the container image {trainer} has no Transformer Engine, which this run on GPUs needs; build it "
                f"from docker/trainer.Dockerfile, or {remedy}"
            )

    def _check_links(self) -> None:
        """In a container a link leads somewhere only if that is mounted, too."""
        cluster = self.config.cluster
        if cluster.container is None and cluster.rollout_container is None:
            return
        sources = " ".join(shlex.quote(mount.partition(":")[0]) for mount in Job(self.config).mounts)
        mounted = self._run(f"readlink -m {sources}").stdout.splitlines()  # the folder itself may be a link
        for field, path in paths_in(self.config).items():
            if field.startswith(("model.", "teachers.", "data.", "evaluate.")) and not path.startswith(BUILTIN):
                name = shlex.quote(path)
                for real in self._run(f"readlink -e {name} {name}/config.json {name}/*.safetensors").stdout.splitlines():
                    if not any(PurePosixPath(real).is_relative_to(folder) for folder in mounted):
                        raise ValueError(
                            f"{field} = {path} is or has a link to {real}, which the container does not see; add its folder to "
                            "cluster.mounts, or copy it (cp -rL)"
                        )

    def _check_newest_job(self) -> None:
        output = self.config.output
        if self.config.cluster.executor != "slurm" or not self._has(f"{output}/launch/job.json"):
            return
        job = self.newest_job
        if (status := self.status(job)) not in (*_ENDED, "UNKNOWN"):
            raise ValueError(
                f"job {job} of output {output} is {status}, and reads what this one would replace; wait for its end, cancel it "
                f"(tepo launch cancel {output}/resolved.yaml), or give another folder (output=…)"
            )

    def _check_output(self) -> None:
        train, output = self.config.train, self.config.output
        has_checkpoint = self._run(f"ls -d {shlex.quote(str(output))}/checkpoints/step_*[0-9]/state.json >/dev/null 2>&1").ok
        if train.resume_from is not None:
            folder = train.resume_from if "/" in train.resume_from else f"{output}/checkpoints/{train.resume_from}"
            if not self._has(f"{folder}/state.json"):
                raise ValueError(
                    f"train.resume_from = {train.resume_from}: {folder} is no checkpoint on {self._where}; give another"
                )
        elif train.resume is True and not has_checkpoint:
            raise ValueError(
                f"train.resume = true, but {output} has no finished checkpoint on {self._where}; launch without --resume"
            )
        trained = f"grep -qsv '^{{\"step\": 0[,}}]' {shlex.quote(f'{output}/metrics.jsonl')}"
        if not train.resume and (has_checkpoint or self._run(trained).ok):
            raise ValueError(f"output {output} already holds a run; give another folder (output=…), or continue it (--resume)")

    def upload(self, scripts: dict[str, str], submission: dict[str, Any]) -> None:
        texts = {f"launch/{name}": text for name, text in scripts.items()}
        texts["launch/run.yaml"] = dump_resolved(self.config)
        texts["resolved.yaml"] = dump_resolved(self.config, with_resume=False)
        texts["launch/submission.json"] = json.dumps(submission, indent=2) + "\n"
        launch, logs, servers = (shlex.quote(str(self.config.output / name)) for name in ("launch", "logs", "servers"))
        # the run's key is below servers
        if not (made := self._run(f"mkdir -p {launch} {logs} && mkdir -p -m 700 {servers}")).ok:
            why = " ".join(made.stderr.split())
            raise ValueError(f"output = {self.config.output} cannot be made on {self._where} ({why}); give another folder")
        for name, text in texts.items():
            self._put(name, text)

    def _put(self, name: str, text: str) -> None:
        """Replaces the file at once: the bash of a job that runs reads its script as it goes."""
        path = f"{self.config.output}/{name}"
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="tepo-launch-") as file:
            file.write(text)
            file.flush()
            self.tunnel.put(file.name, f"{path}.partial")
        if not (moved := self._run(f"mv -f {shlex.quote(path)}.partial {shlex.quote(path)}")).ok:
            raise RuntimeError(f"{path} cannot be written on {self._where} ({' '.join(moved.stderr.split())})")

    def save_job(self, job: str) -> None:
        self._put("launch/job.json", json.dumps({"job": job}) + "\n")

    @property
    def newest_job(self) -> str:
        path = self.config.output / "launch" / "job.json"
        answer = self._run(f"cat {shlex.quote(str(path))}")
        if not answer.ok:
            raise ValueError(
                f"no job was submitted for output {self.config.output} ({path} is not there); start one with 'tepo launch'"
            )
        return str(json.loads(answer.stdout)["job"])

    def status(self, job: str) -> str:
        """Returns the state in Slurm's or NeMo-Run's words, or UNKNOWN."""
        if self.config.cluster.executor != "slurm":
            (task,) = _experiment(job).status(return_dict=True).values()
            return str(task["status"]).rpartition(".")[2]
        for query in _QUERIES:
            answer = self._run(query.format(job=job))
            if answer.ok and answer.stdout.strip():
                return str(answer.stdout.split()[0])
        return "UNKNOWN"

    def cancel(self, job: str) -> None:
        if self.config.cluster.executor != "slurm":
            _experiment(job).cancel(f"{TITLE}-{job}")
            return
        answer = self._run(f"scancel {shlex.quote(job)}")
        if not answer.ok:
            raise RuntimeError(f"Slurm did not cancel job {job}: {' '.join(answer.stderr.split())}")

    def show_logs(self, role: str, rank: int | None, lines: int, *, follow: bool) -> None:
        """``rank``: only its lines, which restarts may have brought to several nodes."""
        if rank is not None and role != "train":
            raise ValueError(f"a rank is the trainer's, and --role {role} has none; leave out one of --rank and --role")
        job = self.newest_job
        patterns = {"job": f"slurm-{job}.out", "train": f"train-{job}.*-node*.log", "serve": f"serve-{job}.*-node*.log"}
        pattern = f"{shlex.quote(str(self.config.output / 'logs'))}/{patterns.get(role, 'server-*.log')}"
        present = self._run(f"ls -d {pattern} 2>/dev/null").stdout.split()
        if not present:
            raise ValueError(f"there is no {pattern} yet; see 'tepo launch status'")
        files = " ".join(map(shlex.quote, present))
        command = f"tail -v -n {lines} {'-F ' if follow else ''}{files}"
        if rank is not None:
            select = rf"grep -a --line-buffered '^\[rank {rank}\] '"  # -a: a node that crashed may leave zeros in its log
            having = self._run(f"{select} -l {files}").stdout.split()
            if not having and not follow:
                raise ValueError(f"rank {rank} has no line in {pattern} yet; see 'tepo launch status'")
            heads = f'printf \'==> %s <==\\n\' "$file"; {select} "$file" | tail -n {lines}'
            command = f"for file in {' '.join(map(shlex.quote, having))}; do {heads}; done"
            command += f"; tail -qF -n 0 {files} | {select}" if follow else ""
        self.tunnel.run(command, hide=False, warn=True, out_stream=_Escaping(), err_stream=_Escaping(err=True))


@dataclass(frozen=True)
class _Escaping:
    """A log may hold a terminal's escapes."""

    err: bool = False

    def write(self, text: str) -> None:
        echo(text, err=self.err, end="")

    def flush(self) -> None: ...


def _experiment(job: str) -> Any:
    """Raises ValueError where the job was not submitted."""
    import nemo_run

    try:
        return nemo_run.Experiment.from_id(f"{TITLE}_{job}")
    except AssertionError as error:
        raise ValueError(f"job {job} was submitted by another user or machine; ask there, where NeMo-Run knows it") from error

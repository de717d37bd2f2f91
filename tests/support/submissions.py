"""``python -m tests.support.submissions`` reads the overrides of each executor and prints what NeMo-Run sends for a job.

Nothing is sent. Run it where NeMo-Run is installed. Clients of services are replaced, and two packages that .venv-launch lacks.
"""

import getpass
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

JOB = "0123456789"
sent: list[Any] = []
_STUBS = {
    "sky": "backends core data exceptions resources skylet skylet.job_lib task utils utils.status_lib",
    "kubernetes": "client client.rest config watch",
}


class _Sent(Exception):  # noqa: N818 (it ends the submission)
    pass


def _note(value: Any) -> None:
    sent.append(value)
    raise _Sent


class _Task:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Callable[[Any], None]:
        return lambda value: self.values.update({name.removeprefix("set_"): value})

    def update_envs(self, values: dict[str, str]) -> None:
        self.values["envs"] |= values

    def to_yaml_config(self) -> dict[str, Any]:
        return self.values


def _stub() -> None:
    for package, modules in _STUBS.items():
        for name in (package, *(f"{package}.{module}" for module in modules.split())):
            sys.modules[name] = MagicMock()
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, sys.modules[name])
    sys.modules["kubernetes.client.rest"].ApiException = type("ApiException", (Exception,), {})  # type: ignore[attr-defined]
    sky: Any = sys.modules["sky"]
    sky.task.Task = _Task
    sky.resources.Resources.from_yaml_config = sky.data.Storage.from_yaml_config = lambda values: values
    sky.utils.yaml_utils.dump_yaml_str = json.dumps
    sky.launch = lambda task, **options: _note({"task": task.values, "options": {**options, "backend": None}})


def _docker() -> MagicMock:
    client = MagicMock()

    def run(image: str, command: str, **options: Any) -> None:
        sent.append({"image": image, "command": command, **options})
        if len(sent) == 2:
            raise _Sent

    client.containers.run = run
    return client


def _answer(url: str, **options: Any) -> MagicMock:
    if url.endswith(("/workloads/trainings", "/workloads/distributed")):
        _note({"url": url, "body": options["json"]})
    known = {"accessToken": "a token", "projects": [{"name": "rl", "id": "p", "clusterId": "c"}]}
    answer = MagicMock(status_code=200, text=json.dumps(known))
    answer.json.return_value = {"workloadId": "w", "phase": "Completed"}
    return answer


def _lepton() -> MagicMock:
    def create(job: Any) -> Any:
        if not job.metadata.id_.startswith("data-mover"):
            _note(job.model_dump(mode="json", exclude_none=True, by_alias=True))
        return job

    client = MagicMock()
    group, node = MagicMock(), MagicMock()
    group.metadata.name, group.metadata.id_, node.metadata.id_ = "h100", "group-1", "node-1"
    client.nodegroup.list_all.return_value, client.nodegroup.list_nodes.return_value = [group], [node]
    client.job.create, client.job.get.return_value.status.state = create, "Completed"
    return client


def _submit(name: str, overrides: list[str]) -> Any:
    """In a process of its own: ``sent``, the stubs and NeMo-Run remember."""
    home = Path(os.environ["NEMORUN_HOME"])
    shutil.rmtree(home, ignore_errors=True)
    config = on_nodes(load_run(None, [f"cluster.executor={name}", *overrides]))
    api = sys.modules["kubernetes"].client.CustomObjectsApi.return_value
    api.create_namespaced_custom_object = lambda **options: _note(options)
    with (
        patch("requests.post", _answer),
        patch("requests.get", _answer),
        patch("requests.delete"),
        patch("time.sleep"),
        patch("docker.from_env", _docker),
        patch("nemo_run.core.execution.lepton.APIClient", _lepton),
        patch.object(nemo_run.KubeflowExecutor, "copy_to_workspace"),
    ):
        try:
            (executors.run_here(config, JOB) if config.cluster.is_one_machine else executors.submit(config, JOB))
        except RuntimeError as error:
            if not isinstance(error.__cause__, _Sent):
                raise
    scripts = {path.name: path.read_text() for path in sorted(home.rglob("*.sh")) if "code" not in path.parts}
    text = json.dumps({"sent": sent, "scripts": scripts}, default=str, indent=2)
    text = text.replace(str(home), "HOME").replace(getpass.getuser() + "/tepo_", "USER/tepo_")
    return json.loads(re.sub(rf"tepo-{JOB}-(?!data|tepo)[0-9a-z]{{6,}}", f"tepo-{JOB}-UNIQUE", text))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as _folder:
        os.environ["NEMORUN_HOME"] = str(Path(_folder) / "nemo")
        _stub()
        import nemo_run

        from tepo_megatron.config.load import load_run
        from tepo_megatron.launch import executors
        from tepo_megatron.launch.job import on_nodes

        _settings = json.load(sys.stdin)
        with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as _pool:
            print(json.dumps(dict(zip(_settings, _pool.starmap(_submit, _settings.items(), chunksize=1), strict=True))))

"""The further checks of ``tepo doctor --run RUN.yaml``: the disk, the ports and the servers of that run."""

from __future__ import annotations

import math
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx

from tepo_megatron.cli.doctor.check import Check
from tepo_megatron.config import RunConfig, TrainConfig
from tepo_megatron.run.loggers.installed import check_installed, sections
from tepo_megatron.sampler.fleet.server_registry import registered
from tepo_megatron.sampler.vllm.server.checks import check_quantization, check_server_split
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.weights.architecture import read_model_spec

_GIB = 2**30
_BYTES_PER_CHECKPOINT_BYTE = 8
"""Room for a checkpoint, over the size of the model's files: fp32 weights and two fp32 moments are 6 times bf16 files; the
exported model is 1; rounded up.
"""


def run_checks(config: RunConfig) -> list[Callable[[], Check]]:
    """Returns the checks of one run, to be called later."""
    checks: list[Callable[[], Check]] = [partial(_output_disk, config)]
    server = config.rollout.server
    if server.placement == "external":
        anyone = server.registry is not None and any(server.registry.glob("server-*.json"))
        checks += (
            [partial(_external_server, config, index) for index in range(server.count)]
            if anyone
            else [partial(_no_server, config)]
        )
    elif server.port:
        checks.append(partial(_server_port, config))
    if server.placement != "external" and server.quantization != "none":
        checks.append(partial(_quantization, config))
    if server.tp > 1:
        checks.append(partial(_server_split, config))
    if sections(config.log):
        checks.append(partial(_loggers, config))
    for number, check in enumerate(checks):
        setattr(check, "__name__", f"_run_{number}")  # noqa: B010  # what diagnose() calls a check that fails by itself
    return checks


def _output_disk(config: RunConfig) -> Check:
    """Whether the output's disk takes the checkpoints that the run keeps."""
    folder = config.output.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    weights = sum(path.stat().st_size for path in Path(config.model.path).glob("*.safetensors"))
    kept = _kept_checkpoints(config.train)
    needed = max(_GIB // 2, weights * _BYTES_PER_CHECKPOINT_BYTE * kept)
    detail = f"{free / _GIB:.1f} GiB free for {config.output}"
    if free < needed:
        takes = f"the {kept} checkpoints that it keeps may take {needed / _GIB:.1f} GiB"
        advice = f"{takes}: free as much, or set output to another disk"
        return Check("output", "fail", detail, advice, needed=True)
    return Check("output", "ok", detail, needed=True)


def _kept_checkpoints(train: TrainConfig) -> int:
    """The most checkpoints that a run has in the end: the newest, those of every so many steps, and the best."""
    # Those that only the clock has written fall on such a step by chance.
    for_good = train.steps // math.lcm(train.keep_every, train.save_every) if train.keep_every and train.save_every else 0
    return min(train.steps, train.keep_checkpoints + for_good + (train.keep_best is not None))


def _quantization(config: RunConfig) -> Check:
    """Whether the servers can hold their weights as the run asks."""
    quantization = config.rollout.server.quantization
    try:
        check_quantization(quantization)
    except ValueError as error:
        return Check("quantization", "fail", quantization, str(error), needed=True)
    return Check("quantization", "ok", quantization, needed=True)


def _loggers(config: RunConfig) -> Check:
    """Whether the packages of the loggers that are switched on are here; not whether their servers answer."""
    detail = ", ".join(f"log.{kind}" for kind in sections(config.log))
    try:
        check_installed(config.log)
    except ValueError as error:
        return Check("loggers", "fail", detail, str(error), needed=True)
    return Check("loggers", "ok", detail, needed=True)


def _server_split(config: RunConfig) -> Check:
    """Whether vLLM can split the run's model over the workers of a server."""
    detail = f"rollout.server.tp = {config.rollout.server.tp}"
    try:
        check_server_split(config.rollout.server, read_model_spec(resolve_model_path(config.model.path)))
    except ValueError as error:
        return Check("server split", "fail", detail, str(error), needed=True)
    return Check("server split", "ok", detail, needed=True)


def _server_port(config: RunConfig) -> Check:
    """Whether the first port that the servers try is free."""
    host, port = config.rollout.server.host, config.rollout.server.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            advice = "servers take the next free one; set rollout.server.port to another, or end what listens there"
            return Check("server port", "warn", f"{host}:{port} is taken ({error.strerror})", advice)
    return Check("server port", "ok", f"{host}:{port} is free")


def _no_server(config: RunConfig) -> Check:
    """One check instead of many where no external server has registered at all."""
    detail = f"no server is registered in {config.rollout.server.registry}"
    return Check("servers", "missing", detail, "start 'tepo serve' on their nodes, with this registry", needed=True)


def _external_server(config: RunConfig, index: int) -> Check:
    """Whether a server that ``tepo serve`` has registered can be reached from here, and how fast it answers."""
    name, registry = f"server {index}", config.rollout.server.registry
    found = registered(registry, index) if registry is not None else None
    if found is None:
        return Check(name, "missing", f"not registered in {registry}", "start 'tepo serve' on its node", needed=True)
    try:
        # No proxy of the environment: servers are on the inner network.
        response = httpx.get(f"{found.url}/health", timeout=5, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Check(name, "fail", f"{found.url}: {error}", "is its node up, and no firewall between?", needed=True)
    if response.status_code != 200:
        detail = f"{found.url} answers with status {response.status_code}"
        return Check(name, "fail", detail, "see its log in OUT/logs", needed=True)
    return Check(name, "ok", f"{found.url} answers in {1000 * response.elapsed.total_seconds():.0f} ms", needed=True)

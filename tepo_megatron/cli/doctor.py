from __future__ import annotations

import platform
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table
from typer import Option

from tepo_megatron.cli.console import AsJson, Overrides, load_config, print_json, show
from tepo_megatron.cli.machine_checks import CHECKS, LAUNCH_CHECKS, Check, Finding, diagnose, has_gpu, is_fit, node_checks
from tepo_megatron.config import RunConfig
from tepo_megatron.config.data import BUILTIN
from tepo_megatron.config.reward import EnvironmentConfig
from tepo_megatron.config.rollout import SamplingConfig

if TYPE_CHECKING:
    from tepo_megatron.core.problem import Problem
    from tepo_megatron.run.sampling.inputs import Inputs
    from tepo_megatron.tasks.protocol import Task

app = typer.Typer()

_COLOURS = {"ok": "green", "warn": "yellow", "missing": "dim", "fail": "red"}


def _checks_table(checks: Sequence[Finding], purpose: str) -> Table:
    caption = f"[green]{purpose} has all that it needs.[/]"
    if not is_fit(checks):
        broken = [check.name for check in checks if check.needed and check.status in ("missing", "fail")]
        caption = f"[red]{purpose} still needs: {escape(', '.join(broken))}.[/]"
    table = Table(title=f"tepo doctor, {platform.node()}", title_justify="left", caption=caption, caption_justify="left")
    for heading in ("", "status", "found", "what it enables, or how to correct it"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        status = f"[{_COLOURS[check.status]}]{check.status}[/]"
        table.add_row(check.name, status, escape(check.detail), escape(check.advice))
    return table


@app.command("doctor")
def _doctor(
    overrides: Overrides = None,
    as_json: AsJson = False,
    launch: Annotated[bool, Option("--launch", help="Only what submitting jobs needs.")] = False,
    run: Annotated[
        Path | None, Option(metavar="RUN.yaml", help="Also model, data, verifier, disk and servers of a run.")
    ] = None,
    nodes: Annotated[str | None, Option(metavar="N1,N2", help="Also whether nodes answer, and their clocks.")] = None,
) -> None:
    """Check this machine and environment: what is there, what is missing, what it would enable.

    Exit code 1 if something that a run on CPU (or on this machine's GPU) needs is missing or broken, or a node does not answer.

    [dim]tepo doctor --run examples/tiny/run.yaml[/]

    [dim]tepo doctor model.path=models/mine data.train=train.csv reward.verifier=exact[/]
    """
    selected = dict(LAUNCH_CHECKS if launch else CHECKS)
    of_nodes = [] if nodes is None else node_checks(nodes)
    on_gpu = has_gpu()
    if run is not None or overrides:
        config = load_config(run, overrides or ())
        selected |= run_checks(config, starts_here=not launch)
        on_gpu = config.engine.platform == "cuda" or (on_gpu and config.engine.platform == "auto")
    checks = diagnose(selected) + of_nodes
    if as_json:
        print_json({"fit_for_cpu": is_fit(checks), "checks": [check._asdict() for check in checks]})
    else:
        purpose = "Launching" if launch else "A run on GPU" if on_gpu else "A run on CPU"
        show(_checks_table(checks, purpose))
    raise typer.Exit(0 if is_fit(checks) else 1)


_GIB = 2**30


def run_checks(config: RunConfig, *, starts_here: bool = True) -> dict[str, Check]:
    from tepo_megatron.run.checks import MODEL, RUN_CHECKS, TRAINER_MACHINE, RunSubject
    from tepo_megatron.run.output.resume import resolve_dtype
    from tepo_megatron.runtime.machine import this_machine

    here = this_machine()
    config = resolve_dtype(config, here.gpus)
    checks = {"output": Check(partial(_output_disk, config))}
    server = config.rollout.server
    if server.placement == "external":
        if server.registry is not None and any(server.registry.glob("server-*.json")):
            checks |= {f"server {index}": Check(partial(_external_server, config, index)) for index in range(server.count)}
        else:
            detail = f"no server is registered in {server.registry}"
            advice = "start 'tepo serve' on their nodes, with this registry"
            checks["servers"] = Check(partial(Finding, "missing", detail, advice))
    elif server.port:
        checks["server port"] = Check(partial(_server_port, config), needed=False)
    ranks = config.engine.parallel.world_size
    run = RunSubject(config, replace(here, local_ranks=min(ranks, here.gpus or ranks), ranks=ranks))
    try:
        has_model = bool(run.spec)
    except ValueError:
        has_model = False  # "model and data" reports it
    lacks_gpu = starts_here and config.engine.platform == "cuda" and not here.gpus
    for check in RUN_CHECKS:
        if (has_model or MODEL not in check.needs) and check.applies(run):
            may_differ = TRAINER_MACHINE in check.needs and not lacks_gpu
            checks[check.name] = Check(partial(_finding_of, partial(check.verify, run), may_differ))
    if config.rollout.replay is None:
        read = cache(partial(_read, config))
        checks["model and data"] = Check(partial(_model_and_data, config, read))
        if config.environment is not None:
            checks["environment"] = Check(partial(_environment, config.environment, config.rollout.sampling))
        else:
            checks["verifier"] = Check(partial(_verifier, config, read))
    return checks


def _finding_of(verify: Callable[[], object], of_machine: bool) -> Finding:
    try:
        verify()
    except ValueError as error:
        # The doctor runs without the run's ranks, and possibly on another machine.
        return Finding("warn" if of_machine else "fail", "refused", str(error))
    return Finding("ok", "fits this run")


def _output_disk(config: RunConfig) -> Finding:
    from tepo_megatron.run.output.room import Room

    try:
        room = Room.of(config)
    except ValueError as error:
        return Finding("warn", "the model's size is unknown", str(error))
    needed = max(_GIB // 2, room.needed)
    detail = f"{room.free / _GIB:.1f} GiB free for {config.output}"
    if room.free < needed:
        takes = f"the {room.retained} checkpoints that it keeps may take {needed / _GIB:.1f} GiB"
        return Finding("fail", detail, f"{takes}: free as much, or set output to another disk")
    return Finding("ok", detail)


def _server_port(config: RunConfig) -> Finding:
    host, port = config.rollout.server.host, config.rollout.server.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            advice = "servers take the next free one; set rollout.server.port to another, or end what listens there"
            return Finding("warn", f"{host}:{port} is taken ({error.strerror})", advice)
    return Finding("ok", f"{host}:{port} is free")


def _external_server(config: RunConfig, index: int) -> Finding:
    import httpx

    from tepo_megatron.sampler.fleet.external import RegistryEntry

    registry = config.rollout.server.registry
    result = RegistryEntry(registry, index).registered() if registry is not None else None
    if result is None:
        return Finding("missing", f"not registered in {registry}", "start 'tepo serve' on its node")
    try:
        # No proxy of the environment: servers are on the inner network.
        response = httpx.get(f"{result.url}/health", timeout=5, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Finding("fail", f"{result.url}: {error}", "is its node up, and no firewall between?")
    if response.status_code != 200:
        return Finding("fail", f"{result.url} answers with status {response.status_code}", "see its log in OUT/logs")
    return Finding("ok", f"{result.url} answers in {1000 * response.elapsed.total_seconds():.0f} ms")


def _read(config: RunConfig) -> Inputs | ValueError:
    from tepo_megatron.run.sampling.inputs import Inputs
    from tepo_megatron.tasks.data.builtin import resolve_model_path

    try:
        return Inputs.read(config, resolve_model_path(config.model.path))
    except ValueError as error:
        return error


def _model_and_data(config: RunConfig, read: Callable[[], Inputs | ValueError]) -> Finding:
    if isinstance(inputs := read(), ValueError):
        return Finding("fail", config.model.path, str(inputs))
    passes = config.train.steps * config.rollout.prompts_per_step / max(1, len(inputs.train))
    counts = f"{len(inputs.train)} problems to train on, {passes:.1f} times in {config.train.steps} steps"
    counts += f"; {len(inputs.heldout)} held out"
    counts += "".join(f", {len(item.problems)} in {item.name}" for item in inputs.sets)
    left_out = "".join(f"; {notice}" for notice in inputs.left_out)
    advice = ""
    trained = {(problem.prompt, problem.messages) for problem in inputs.train}
    seen = [("the held-out prompts", inputs.heldout), *((f"the prompts of {item.name}", item.problems) for item in inputs.sets)]
    shared = [(sum((problem.prompt, problem.messages) in trained for problem in problems), name) for name, problems in seen]
    both = " and ".join(f"{count} of {name}" for count, name in shared if count)
    if not inputs.heldout and not inputs.sets:
        advice = "nothing is evaluated: give data.heldout to see whether the model gets better"
    elif both and config.environment is None:  # an environment may begin all episodes with one prompt
        advice = f"{both} are trained on, too: take them out of one of the two"
    shown = config.model.path if config.model.path.startswith(BUILTIN) else str(inputs.model_dir)
    return Finding("warn" if advice else "ok", f"{shown}; {counts}{left_out}", advice)


def _environment(config: EnvironmentConfig, sampling: SamplingConfig) -> Finding:
    from tepo_megatron.tasks.environments.environment_task import EnvironmentTask

    try:
        with closing(EnvironmentTask.open_host(config, sampling)) as host:
            return Finding("warn" if host.notice else "ok", f"{config.name} can be made", host.notice or "")
    except (ValueError, RuntimeError) as error:
        return Finding("fail", config.name, str(error))


def _verifier(config: RunConfig, read: Callable[[], Inputs | ValueError]) -> Finding:
    from tepo_megatron.tasks.evaluate.evaluation import verifier_pools
    from tepo_megatron.tasks.reward.verifier_task import VerifierTask
    from tepo_megatron.tasks.reward.verifiers import resolve_verifier

    sources = config.data.train_sources
    try:
        resolve_verifier(config.reward.verifier)
        if isinstance(inputs := read(), ValueError):
            return Finding("warn", config.reward.verifier, "it was not tried: see model and data")
        with (
            closing(VerifierTask(config.reward, config.data)) as task,
            verifier_pools(config, inputs.sets, task, inputs.heldout, inputs.train),
        ):
            advice = _misjudged(config, task, inputs.heldout)
    except (ValueError, RuntimeError) as error:
        return Finding("fail", config.reward.verifier, str(error))
    names = dict.fromkeys(source.verifier or config.reward.verifier for source in sources)
    detail = f"{', '.join(names)} scores answers of {', '.join(source.path for source in sources)}"
    return Finding("warn" if advice else "ok", detail, advice)


_TRIED_PROBLEMS = 4


def _misjudged(config: RunConfig, task: Task, problems: Sequence[Problem]) -> str:
    """Returns which answer an evaluation would misjudge; empty: none of those tried."""
    of, tried = config.evaluate, problems[:_TRIED_PROBLEMS]
    wrong = [problem.other_answer(problems) for problem in tried]
    answers = [(problem, problem.answer, True) for problem in tried]
    answers += [(problem, text, False) for problem, text in zip(tried, wrong, strict=True) if text is not None]
    results = task.score([(problem, text) for problem, text, _ in answers])
    for (problem, text, right), result in zip(answers, results, strict=True):
        if result.error is None and result.is_correct(of.correct_at, of.correct) != right:
            of_whom = "its expected answer" if right else f"{text[:60]!r}, another problem's answer,"
            counts = "does not count as correct" if right else "counts as correct"
            advice = "set evaluate.correct_at or evaluate.correct, or correct the verifier"
            return f"problem {problem.id!r}: {of_whom} {counts} (reward {result.reward}); {advice}"
    return ""

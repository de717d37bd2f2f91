from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from tepo_megatron.cli.console import Overrides, RunFile, RunOrSetting, load_config, split_run
from tepo_megatron.runtime.job_control import stopped_together
from tepo_megatron.runtime.preemption import INTERRUPTED, StopRequested, StopSignals
from tepo_megatron.runtime.proc import Process
from tepo_megatron.runtime.rank import print_error, under_torchrun
from tepo_megatron.runtime.text import echo, outlive_readers

if TYPE_CHECKING:
    from tepo_megatron.config import RunConfig

app = typer.Typer()

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@app.command("train")
def _train(
    run: RunOrSetting = None,
    overrides: Overrides = None,
    resume: Annotated[bool, Option("--resume", help="Go on from the newest whole checkpoint of the output folder.")] = False,
    resume_from: Annotated[
        str | None, Option("--from", metavar="step_N|PATH", help="With --resume: go on from this checkpoint.")
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Remove the run that the output folder holds.")] = False,
) -> None:
    """Train a model: sample, reward, score, update, sync.

    Checks the configuration, then starts the ranks of engine.parallel; under torchrun's agent, this is one of them.

    [dim]tepo train examples/tiny/run.yaml train.steps=20 output=out/short[/]

    [dim]tepo train model.path=models/mine data.train=train.jsonl reward.verifier=last_number output=out/mine[/]

    [dim]python -m tepo_megatron.runtime.torchrun --nproc-per-node 2 -m tepo_megatron train examples/tiny/run.yaml[/]

    [dim]tepo train examples/tiny/run.yaml output=out/short --resume --from step_000010[/]
    """
    from tepo_megatron.config.load import as_yaml
    from tepo_megatron.run.api import prepare_run, run_rank, start_ranks
    from tepo_megatron.run.output.resume import of_attempt

    outlive_readers()
    Process.end_with_starter()
    file, settings = split_run(run, overrides)
    settings += ["train.resume=true"] if resume else []
    settings += [] if resume_from is None else [f"train.resume_from={as_yaml(resume_from)}"]
    config = prepare_run(of_attempt(load_config(file, settings)), overwrite=overwrite, is_rank=under_torchrun())
    if under_torchrun():
        raise typer.Exit(run_rank(config))
    code, message = start_ranks(config)
    if message:
        print_error(message)
    raise typer.Exit(code)


@app.command("serve")
def _serve(
    run: RunFile,
    overrides: Overrides = None,
    node: Annotated[int, Option(metavar="I", help="This node's number among the nodes for rollouts.")] = 0,
    nodes: Annotated[int, Option(metavar="N", help="How many nodes serve.")] = 1,
    teacher: Annotated[str | None, Option(metavar="NAME", help="Serve this teacher with its own server settings.")] = None,
    registry: Annotated[Path | None, Option("--for-ranks", hidden=True)] = None,  # the launcher's (sampler/fleet/external.py)
) -> None:
    """Serve vLLM on this node for a trainer on another, until interrupted; they meet in rollout.server.registry.

    [dim]tepo serve run.yaml rollout.server.placement=external rollout.server.registry=/shared/out/servers[/]
    """
    outlive_readers()
    with stopped_together():
        config = load_config(run, overrides or ())
        StopSignals(numbers=_ENDS).install()
        from tepo_megatron.run.output.resume import resolve_dtype
        from tepo_megatron.run.step.placement import Placement
        from tepo_megatron.runtime.machine import this_machine
        from tepo_megatron.sampler.fleet.external import end_with_starter, serve, serve_node
        from tepo_megatron.sampler.protocol import sampler_spec
        from tepo_megatron.tasks.data.builtin import resolve_model_path
        from tepo_megatron.weights.architecture import read_model_spec

        config = resolve_dtype(config, this_machine().gpus)
        config = config if teacher is None else _of_teacher(config, teacher)
        model_dir = resolve_model_path(config.model.path)
        sampler_spec().check_model(config.rollout.server, read_model_spec(model_dir))
        if registry is None:
            logs = None if teacher is None else config.teacher_logs(teacher)
            serve_node(config, model_dir=model_dir, node=node, nodes=nodes, logs=logs)
            return
        end_with_starter()
        server, first_gpu = config.rollout.server, Placement(config, this_machine()).first_server_gpu
        serve(server, config, registry, range(server.count), model_dir=model_dir, name="0", first_gpu=first_gpu)


def _of_teacher(config: RunConfig, name: str) -> RunConfig:
    if name not in config.teachers:
        raise ValueError(f"--teacher {name} is not one of this run's teachers: {', '.join(config.teachers) or 'it has none'}")
    teacher = config.teachers[name]
    server = teacher.served.model_copy(update={"load_format": "model"})  # no trainer sends it weights
    model = config.model.model_copy(update={"path": teacher.path, "lora": None})
    return config.model_copy(update={"model": model, "rollout": config.rollout.model_copy(update={"server": server})})


@app.command("eval")
def _evaluate(
    model: Annotated[Path, Argument(metavar="MODEL_DIR", help="A Hugging Face folder, such as a run's exported model.")],
    overrides: Overrides = None,
    run: Annotated[Path | None, Option(metavar="RUN.yaml", help="The run to take the rest from.")] = None,
    sets: Annotated[
        list[str] | None, Option("--set", metavar="NAME", help="Only this set of evaluate.sets; may be repeated.")
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Go on with an evaluation that was ended: what was answered is not asked again.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print the figures for tools, and no table.")] = False,
) -> None:
    """Evaluate a model on held-out problems and evaluation sets: greedy, and avg@k, pass@k and maj@k from samples.

    Without --run name the problems, data.heldout=FILE or evaluate.sets.NAME.path=FILE, and a verifier for them.

    [dim]tepo eval out/tiny/model --run examples/tiny/run.yaml evaluate.samples=8[/]

    [dim]tepo eval models/mine data.heldout=heldout.jsonl reward.verifier=math --json[/]

    [dim]tepo eval models/mine --run benchmarks.yaml --set aime --set gsm8k[/]
    """
    outlive_readers()
    with stopped_together():
        if model.is_file():
            raise ValueError(f"{model} is a file; tepo eval takes a model's folder: tepo eval MODEL_DIR --run {model}")
        config = load_config(run, overrides or (), trains=False)
        names_problems = "heldout" in config.data.model_fields_set or config.evaluate.sets
        if run is None and not str(model).startswith("builtin:") and not names_problems:
            raise ValueError(
                f"{model} would be examined in the demonstration's sums; give data.heldout=FILE, or the run that it comes from "
                "(--run RUN.yaml)"
            )
        from tepo_megatron.tasks.evaluate.standalone import evaluate_model

        try:
            with StopSignals(numbers=_ENDS, ends=False, of_rank=False).borrowed():
                result = evaluate_model(config, model, table=not as_json, sets=sets, resume=resume)
        except KeyboardInterrupt as stop:
            echo(f"{str(stop) or 'Ctrl-C'}: the evaluation ends; continue with the same command and --resume", err=True)
            raise typer.Exit(stop.exit_code if isinstance(stop, StopRequested) else INTERRUPTED) from None
        folder = config.output / "eval"
        if as_json:
            heldout = {"k": result.k, "problems": result.num_problems} if result.num_problems else {}
            echo(json.dumps({**result.metrics, **heldout, "wrote": str(folder)}))
        else:
            echo(f"wrote {folder / 'metrics.json'}, and {folder / 'samples.jsonl'}: tepo samples {folder}")

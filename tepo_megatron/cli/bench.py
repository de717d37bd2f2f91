from __future__ import annotations

import itertools
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from tepo_megatron.cli.console import AsJson, as_records, print_json, show_table
from tepo_megatron.runtime.text import echo

if TYPE_CHECKING:
    from tepo_megatron.tools.results import Report

app = typer.Typer()

OutputFolder = Annotated[Path, Option(help="Folder for the results.")]
_RESULTS = Path("docs/results/data")


_say = partial(echo, err=True)


def _finish(report: Report, output: Path, as_json: bool) -> None:
    if as_json:
        tables = [as_records(table.columns, table.rows) for table in report.tables]
        print_json(tables[0] if len(tables) == 1 else tables)
    else:
        for table in report.tables:
            show_table(table.columns, table.rows)
    echo(report.write(output), err=as_json)


@app.command("scores")
def _scores_command(
    device: Annotated[str, Option(help="cpu (gloo) or cuda (NCCL, a GPU per rank).")] = "cpu",
    tp: Annotated[int | None, Option(help="Ranks, each a process of this machine. Default: 2; cuda: 1.")] = None,
    tokens: Annotated[str, Option(help="T, with commas. Default: 1024,4096; cuda: 8192.")] = "",
    vocab: Annotated[str, Option(help="V, with commas. Default: 32000,128256; cuda: 16032,32064,64128,128256.")] = "",
    dtype: Annotated[str, Option(help="bf16, fp32, with commas. Default: both; cuda: bf16.")] = "",
    repeats: Annotated[int, Option(help="The best counts.")] = 5,
    teacher: Annotated[bool, Option("--teacher", help="Measure divergences from a teacher instead.")] = False,
    output: OutputFolder = _RESULTS,
    as_json: AsJson = False,
) -> None:
    """Time and peak memory of log-prob and entropy with backward, over vocabulary-sharded logits.

    Beside torch's log_softmax, Megatron-Core's cross-entropy (log-prob only), and one read of the logits forward, one read and
    write backward.

    [dim]tepo bench scores --device cuda[/]
    """
    from tepo_megatron.tools.bench import scores

    if device not in scores.DEFAULTS:
        raise ValueError(f"--device {device} is unknown; give cpu or cuda")
    options = {"tp": tp, "tokens": tokens, "vocab": vocab, "dtype": dtype}
    grid: dict[str, Any] = {name: value or scores.DEFAULTS[device][name] for name, value in options.items()}
    for name in ("tokens", "vocab"):
        if not all(number.strip().isdecimal() for number in grid[name].split(",")):
            raise ValueError(f"--{name} {grid[name]} has other than numbers; give some such as 1024,4096")
    setting = scores.ScoreSetting(grid["tp"], device, repeats, teacher)
    results: list[scores.ScoreMeasurement] = []
    for name, v, t in itertools.product(grid["dtype"].split(","), grid["vocab"].split(","), grid["tokens"].split(",")):
        _say(f"T {t}, V {v}, {name}")
        results += setting.run(int(t), int(v), name)
    _finish(setting.report(results), output, as_json)


@app.command("reshard")
def _reshard_command(
    tp: Annotated[int, Option(help="Tensor-parallel size of the trainer.")] = 2,
    pp: Annotated[int, Option(help="Pipeline-parallel size of the trainer.")] = 2,
    server_tp: Annotated[int, Option(help="Tensor-parallel size of each server.")] = 2,
    servers: Annotated[int, Option(help="Servers, each with a whole model.")] = 2,
    layers: Annotated[int, Option(help="12 make 206 M parameters.")] = 12,
    dtype: Annotated[str, Option(help="float32 or bfloat16.")] = "bfloat16",
    repeats: Annotated[int, Option(help="The best counts.")] = 5,
    output: OutputFolder = _RESULTS,
    as_json: AsJson = False,
) -> None:
    """Time, bytes and memory of a weight update between processes of this machine, over gloo, without vLLM.

    Beside gathering and broadcasting full tensors, and a point-to-point copy of as many bytes.

    [dim]tepo bench reshard --repeats 3[/]
    """
    from tepo_megatron.tools.bench import reshard

    setting = reshard.ReshardSetting(tp, pp, server_tp, servers, layers, dtype)
    _finish(setting.report(setting.run(repeats), repeats), output, as_json)


@app.command("recipes")
def _recipes_command(
    overrides: Annotated[list[str] | None, Argument(help="Settings of the run, such as engine.layers=local.")] = None,
    size: Annotated[str, Option(help="tiny, 1b or 8b: a Llama with random weights.")] = "1b",
    chosen: Annotated[
        str, Option("--recipes", help="Values of engine.fp8.recipe, separated by commas; the first is what others meet.")
    ] = "none,tensorwise,blockwise",
    steps: Annotated[int, Option(help="Optimizer steps, all on the same rollouts.", min=1)] = 50,
    sequences: Annotated[int, Option(help="Responses, in groups of 4.", min=4)] = 16,
    length: Annotated[int, Option(help="Tokens of each response.", min=1)] = 1024,
    dtype: Annotated[str, Option(help="bfloat16 or float32.")] = "bfloat16",
    micro_batch_tokens: Annotated[int, Option(help="As engine.micro_batch_tokens.")] = 8192,
    output: OutputFolder = _RESULTS,
    as_json: AsJson = False,
) -> None:
    """Time and memory of scoring and updating a random model, by recipe, and how far the policies differ.

    Runs on engine.platform (a GPU if there is one), on one rank.

    [dim]tepo bench recipes --size tiny --recipes none --dtype float32 --steps 5[/]
    """
    from tepo_megatron.tools.bench import recipes

    setting = recipes.RecipeSetting(size, steps, sequences, length, dtype, micro_batch_tokens, tuple(overrides or ()))
    _finish(setting.report(setting.run(chosen.split(","))), output, as_json)


@app.command("step")
def _step_command(
    layouts: Annotated[str, Option(help="How the ranks divide the work, with commas; tp2pp2 are four ranks.")] = "tp2,dp2,pp2",
    ratios: Annotated[str, Option(help="The longest sequence over the mean, with commas.")] = "1,3,10",
    before: Annotated[
        str,
        Option(
            help="An older state to compare with: a git revision, another checkout's folder, or none. States from before "
            "2026-11-23, when the package's folders moved, cannot be measured."
        ),
    ] = "none",
    size: Annotated[str, Option(help="tiny or small: a Llama with random weights.")] = "small",
    sequences: Annotated[int, Option(help="Responses of a step, in groups of 4.", min=4)] = 24,
    mean_length: Annotated[int, Option(help="Mean tokens of a sequence.", min=8)] = 128,
    micro_batch_tokens: Annotated[int, Option(help="As engine.micro_batch_tokens.")] = 1280,
    repeats: Annotated[int, Option(help="Steps of each, in turn; the median counts.", min=1)] = 5,
    output: OutputFolder = _RESULTS,
    as_json: AsJson = False,
) -> None:
    """Tokens/s and memory of a training step on this machine's CPU, beside Megatron-Core's own and an older state.

    Megatron-Core's step is pretrain_gpt's, on the same weights, tokens and micro-batches: packed, with this project's
    attention, and as padded rows with Megatron's. All take turns, step by step.

    [dim]tepo bench step --layouts tp2 --ratios 10 --before none --repeats 3[/]
    """
    from tepo_megatron.tools.bench import step

    grid = tuple(layouts.split(",")), tuple(map(float, ratios.split(",")))
    setting = step.StepSetting(*grid, size, sequences, mean_length, micro_batch_tokens, repeats)
    _finish(setting.report(setting.run(before, say=_say), before), output, as_json)


@app.command("rollouts")
def _rollouts_command(
    size: Annotated[str, Option(help="builtin, or tiny or small: a Llama with random weights.")] = "builtin",
    prompts: Annotated[int, Option(help="Prompts of a draw.", min=1)] = 64,
    samples: Annotated[int, Option(help="Samples of each prompt.", min=1)] = 8,
    new_tokens: Annotated[int, Option(help="Tokens of a response, at most.", min=1)] = 64,
    repeats: Annotated[int, Option(help="Draws of each side, in turn; the median counts.", min=1)] = 5,
    responses: Annotated[int, Option(help="Responses of a step, for rank 0's part.", min=1)] = 1024,
    length: Annotated[int, Option(help="Tokens of each of them.", min=1)] = 32768,
    output: OutputFolder = _RESULTS,
    as_json: AsJson = False,
) -> None:
    """Tokens/s of a rollout server and its client beside vLLM's offline engine, and what a step's responses cost rank 0.

    Server and engine draw the same tokens in turn. Rank 0 reads random responses off the wire, packs them, writes them to the
    journal and sends them to another rank; the former JSON is measured too.

    [dim]tepo bench rollouts --repeats 1 --responses 16 --length 512 --output /tmp/results[/]
    """
    from tepo_megatron.tools.bench import rollouts

    setting = rollouts.RolloutSetting(size, prompts, samples, new_tokens, repeats, responses, length)
    _finish(setting.run(_say), output, as_json)


@app.command("report")
def _report_command(
    outputs: Annotated[list[Path], Argument(metavar="OUT", help="Output folders of runs, or of a sweep.")],
    repeats: Annotated[int, Option(help="Loads of each part; the median counts.", min=1)] = 5,
    state: Annotated[str, Option(help="What is looked at, as in the page's address: mixed=1&colour=entropy.")] = "",
    page: Annotated[Path, Option(help="Where the report is written to.")] = Path("report.html"),
    pictures: Annotated[
        Path | None, Option(help="Folder for pictures of every part: desktop and phone, light and dark.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a report and load it in a headless Chromium: its size, and how long each part takes until it is drawn.

    [dim]tepo bench report out/tiny --pictures docs/images --state 'mixed=1&colour=entropy_change'[/]
    """
    from tepo_megatron.tools.bench import chromium
    from tepo_megatron.tools.report import write_report

    written = write_report(outputs, page)
    parts = ("overview", "curves", "time", "settings", "faults", "samples")
    table = chromium.measure(page, parts, repeats, state=state, pictures=pictures)
    show_table(table.columns, table.rows, as_json=as_json)
    echo(f"{written.path}: {written.bytes / 1e6:.2f} MB, {written.samples} samples of {written.runs} runs", err=as_json)


@app.command("gpu")
def _gpu_command(
    only: Annotated[str, Option(help="Parts, separated by commas; default: all.")] = "",
    show: Annotated[bool, Option("--list", help="Only list the parts, in order of value, with what each needs.")] = False,
    resume: Annotated[bool, Option("--resume", help="Keep what passed on this GPU with these versions.")] = False,
    output: OutputFolder = _RESULTS,
    as_json: AsJson = False,
) -> None:
    """Tests, kernels, training steps and a weight sync on this machine's GPU; parts without their packages are not run.

    Writes <output>/<gpu>/<date and time>.json and .md after each part, which takes at most nine minutes. Exit code 0 if all
    that ran passed, 1 if a part failed, 3 without a GPU. Run it in the root of the repository.

    [dim]bash scripts/gpu_check.sh[/]

    [dim]tepo bench gpu --only kernels,head --resume[/]
    """
    from tepo_megatron.tools.bench import gpu
    from tepo_megatron.tools.results import select

    parts = select(only, {part.name: part for part in gpu.PARTS}, "part")
    if show:
        rows = [(part.name, f"{part.limit_s}", ", ".join(part.packages), f"{part.memory_gib:g}", part.what) for part in parts]
        show_table(("part", "seconds at most", "packages", "GiB", "what"), rows, as_json=as_json)
        return
    result = gpu.Gpu.find()
    if isinstance(result, str):
        echo(f"gpu check: {result}; nothing was checked", err=True)
        raise typer.Exit(gpu.NO_GPU)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM also ends the part that runs
    report, passed = gpu.check(parts, result, output, _say, resume=resume)
    _finish(report, output, as_json)
    raise typer.Exit(int(not passed))

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from tepo_megatron.config import RunConfig
from tepo_megatron.config.data import BUILTIN
from tepo_megatron.plan import Plan
from tepo_megatron.plan.memory import GIB
from tepo_megatron.plan.time import Lengths, ServerMemory, SyncTraffic
from tepo_megatron.runtime.hub import HUB


def plan_tables(plan: Plan) -> Iterator[Table]:
    yield _layout(plan)
    yield _memory(plan)
    if plan.sync is not None:
        yield _servers(plan.server, plan.sync, plan.lengths)
    yield _time(plan)
    if schedules := plan.schedules:
        table = _table("The same step under each schedule (train.schedule)", "", "estimate, s", "trainer idle", "servers idle")
        for schedule in schedules:
            chosen = " (this run's)" if schedule.schedule == plan.config.train.schedule else ""
            shares = (f"{share:.0%}" for share in (schedule.idle_trainer, schedule.idle_servers))
            table.add_row(schedule.schedule + chosen, f"{schedule.seconds:,.1f}", *shares)
        yield table


def plan_notes(plan: Plan, exact: Sequence[Sequence[int]] | None = None) -> list[str]:
    counted = sum(map(len, exact or ()))
    verdict = [f"Exact: Megatron builds as many parameters on each of {counted} (tp, pp) ranks as the formula says."]
    notes = ["Assumed:", *(f"  - {text}" for text in plan.assumptions), *(verdict if exact else [])]
    if unset := [f"  - {text}" for text in _unset(plan.config)]:
        notes += ["Not set yet; set it in the run's file, or as an override:", *unset]
    return notes


def _unset(config: RunConfig) -> Iterator[str]:
    cluster, data = config.cluster, config.data
    if cluster.executor == "slurm" and cluster.train_nodes + cluster.rollout_nodes > 1:
        for name in ("account", "partition"):
            if getattr(cluster, name) is None:
                yield f"cluster.{name}: Slurm's default"
        if cluster.container is None and cluster.python == "python":
            yield "cluster.container, or cluster.python: whatever 'python' is on the nodes"
    if cluster.ssh is not None or cluster.is_one_job:
        return
    images = {"cluster.container": cluster.container, "cluster.rollout_container": cluster.rollout_container}
    paths = [(name, image) for name, image in images.items() if image is not None and image.startswith("/")]
    paths += [("model.path", config.model.path), *(("data.train", source.path) for source in data.train_sources)]
    for name, path in [*paths, *(("data.heldout", source.path) for source in data.heldout_sources)]:
        if not path.startswith((BUILTIN, HUB)) and not Path(path).expanduser().exists():
            yield f"{name}: {path} is not on this machine; every node must see it"


def plan_json(plan: Plan, exact: Sequence[Sequence[int]] | None = None) -> str:
    """Sizes are bytes, tokens, FLOPs and seconds. ``exact``: see ``check_exact``."""
    result: dict[str, Any] = {
        "name": plan.config.name,
        "model": asdict(plan.spec),
        "parallel": plan.config.engine.parallel.model_dump(),
        "parameters": plan.parameters,
        "parameters_per_rank": plan.stage_parameters,
        "parameters_per_rank_exact": exact,
        "lengths": asdict(plan.lengths),
        "memory_per_rank": [{**memory.terms, "total": memory.total} for memory in plan.stages],
        "host_memory_per_rank": [{**asdict(host), "total": host.total} for host in plan.hosts],
        "server": asdict(plan.server),
        "weight_sync": asdict(plan.sync) if plan.sync else None,
        "step": {**asdict(plan.time), "seconds": plan.time.seconds},
        "schedules": [asdict(schedule) for schedule in plan.schedules],
        "assumptions": plan.assumptions,
        "problems": plan.problems,
    }
    return json.dumps({key: _finite(value) for key, value in result.items()}, indent=2)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(title: str, *headings: str) -> Table:
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")
    return table


def _layout(plan: Plan) -> Table:
    parallel, cluster, server = plan.config.engine.parallel, plan.config.cluster, plan.config.rollout.server
    table = Table(title=escape(f"Plan: {plan.config.name}"), title_justify="left", box=SIMPLE_HEAD, show_header=False)
    split = f"tp {parallel.tp} × pp {parallel.pp} × cp {parallel.cp} × dp {parallel.dp}"
    if parallel.vpp > 1:
        split += f", {parallel.vpp} virtual stages per rank"
    counts = sorted(set(plan.stage_parameters), reverse=True)
    table.add_row("model", escape(f"{plan.spec.architecture}, {plan.parameters:,} parameters"))
    table.add_row("training", f"{parallel.world_size} ranks on {_nodes(cluster.train_nodes)}: {split}")
    table.add_row("per rank", " or ".join(f"{count:,}" for count in counts) + " parameters, by pipeline stage")
    if plan.config.rollout.replay is None:
        where = _nodes(cluster.rollout_nodes) if cluster.rollout_nodes else "the training node"
        table.add_row("servers", f"{server.count} × tp {server.tp} on {where}")
    return table


def _memory(plan: Plan) -> Table:
    stages = plan.stages
    worst = max(range(len(stages)), key=lambda stage: stages[stage].total)
    table = _table("Memory of a training rank, GiB", "", f"worst, stage {worst}", "mean over stages")
    for name, value in stages[worst].terms.items():
        table.add_row(name, _gib(value), _gib(fmean(memory.terms[name] for memory in stages)))
    table.add_row("total", _gib(stages[worst].total), _gib(fmean(memory.total for memory in stages)), style="bold")
    if plan.usable_memory is not None:
        table.add_row(f"usable of {plan.config.cluster.gpu_memory_gib:g}", *2 * [_gib(plan.usable_memory)])
    table.add_row(
        "on the host", *(_gib(value) for value in (plan.hosts[worst].total, fmean(host.total for host in plan.hosts)))
    )
    return table


def _servers(server: ServerMemory, sync: SyncTraffic, lengths: Lengths) -> Table:
    table = _table("Each vLLM worker, and a weight sync", "", "")
    table.add_row("weights, GiB", _gib(server.weights))
    if server.draft:
        table.add_row("draft model, GiB", _gib(server.draft))
    table.add_row("activations and graphs, GiB", _gib(server.workspace))
    table.add_row("KV cache, GiB", _gib(server.kv_cache))
    table.add_row("KV cache per token, KiB", f"{server.kv_bytes_per_token / 1024:.1f}")
    table.add_row("tokens of a server's cache", f"{server.capacity:,.0f}")
    table.add_row(f"sequences at once, all of {lengths.longest} tokens", f"{server.concurrency_longest:,.0f}")
    table.add_row(f"sequences at once, of {lengths.mean:g} tokens on average", f"{server.concurrency_mean:,.0f}")
    table.add_row(f"sync: every server's shards once, {sync.moves:,} moves, GB between GPUs", f"{sync.bytes_total / 1e9:,.1f}")
    table.add_row("sync: sent by the busiest training rank, GB", f"{sync.bytes_sent_most / 1e9:,.1f}")
    table.add_row("sync: received by the busiest worker, GB", f"{sync.bytes_received_most / 1e9:,.1f}")
    table.add_row("sync: lower bound over these links, s", f"{sync.seconds:.2f}")
    return table


def _time(plan: Plan) -> Table:
    step = plan.time
    title = f"One step: {step.sequences} sequences, {step.tokens:,.0f} tokens, {step.response_tokens:,.0f} of them sampled"
    table = _table(title, "", "10¹⁵ FLOP", "estimate, s")
    rows = (
        ("generation", step.flops_generation, step.generation),
        ("log-probs", step.flops_score, step.score),
        ("training", step.flops_train, step.train),
        ("of the two, waiting for other ranks", None, step.exposed),
        ("gradients and weights between replicas", None, step.exchange),
        ("Adam", None, step.adam),
        ("leaving the GPU to servers, and coming back", None, step.turns),
        ("weight sync", None, step.sync),
        ("packing on rank 0", None, step.root),
        ("a step's share of a checkpoint", None, step.save),
        ("step", None, step.seconds),
    )
    for name, flops, seconds in rows:
        table.add_row(name, "" if flops is None else f"{flops / 1e15:,.0f}", f"{seconds:,.1f}")
    table.caption = (
        f"The pipeline's bubble adds {step.bubble:.0%} to training, and its busiest stage has {step.imbalance:.0%} more to do "
        f"than the mean; padding adds {step.padding:.1%}.\nTraining is expected to reach an MFU of {step.mfu:.0%} with "
        f"waiting, and {step.mfu / (1 + step.bubble):.0%} with the bubble.\nEstimates: nobody has measured this run."
    )
    table.caption_justify = "left"
    return table


def _gib(value: float) -> str:
    return f"{value / GIB:.2f}"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"

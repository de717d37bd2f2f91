"""``tepo serve``."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from tepo_megatron.cli.errors import user_errors
from tepo_megatron.cli.options import Overrides, RunFile, load_config
from tepo_megatron.runtime.rank import run_until_interrupted


def serve(
    run: RunFile,
    overrides: Overrides = None,
    node: Annotated[int, typer.Option("--node", metavar="I", help="This node's number among the nodes for rollouts.")] = 0,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", help="How many nodes serve.")] = 1,
) -> None:
    """Serve vLLM on this node for a trainer on another, until interrupted; they meet in rollout.server.registry.

    [dim]tepo serve run.yaml rollout.server.placement=external rollout.server.registry=/shared/out/servers[/]
    """

    def work(config: Any) -> None:
        from tepo_megatron.sampler.fleet.serve import Node
        from tepo_megatron.sampler.vllm.server.checks import check_server_split
        from tepo_megatron.tasks.data.builtin import resolve_model_path
        from tepo_megatron.weights.architecture import read_model_spec

        model_dir = resolve_model_path(config.model.path)
        check_server_split(config.rollout.server, read_model_spec(model_dir))
        with Node(config, model_dir=model_dir, node=node, nodes=nodes) as servers:
            servers.watch()

    with user_errors():
        code = run_until_interrupted(partial(work, load_config(run, overrides or ())))
    raise typer.Exit(code)

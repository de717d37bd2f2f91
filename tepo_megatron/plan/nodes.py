"""Checks that ranks and servers fit the nodes and GPUs that the run asks for."""

from __future__ import annotations

from tepo_megatron.config import RunConfig


def check_placement(config: RunConfig) -> None:
    """Raises ValueError where ranks or servers do not fit the cluster's GPUs, with the fields to change."""
    _check_trainer(config)
    _check_servers(config)


def _check_trainer(config: RunConfig) -> None:
    parallel, cluster = config.engine.parallel, config.cluster
    gpus = cluster.train_nodes * cluster.gpus_per_node
    replica = parallel.tp * parallel.pp * parallel.cp
    if parallel.tp > cluster.gpus_per_node:
        raise ValueError(
            f"engine.parallel.tp = {parallel.tp} is more than cluster.gpus_per_node = {cluster.gpus_per_node}; tensor-parallel "
            "ranks talk in every layer and must share a node: lower tp and raise pp"
        )
    if cluster.train_nodes == 1:
        if parallel.world_size > gpus:
            raise ValueError(
                f"engine.parallel needs {parallel.world_size} ranks, but cluster.train_nodes = 1 has {gpus} GPUs; "
                f"raise cluster.train_nodes to {-(-parallel.world_size // gpus)}, or lower engine.parallel"
            )
        return
    if gpus % replica:
        raise ValueError(
            f"cluster.train_nodes = {cluster.train_nodes} × gpus_per_node = {cluster.gpus_per_node} = {gpus} GPUs, which "
            f"tp × pp × cp = {parallel.tp} × {parallel.pp} × {parallel.cp} = {replica} does not divide; {_nearest(config)}"
        )
    if parallel.world_size != gpus:
        raise ValueError(
            f"engine.parallel needs {parallel.world_size} ranks, but cluster.train_nodes = {cluster.train_nodes} has {gpus} "
            f"GPUs; set engine.parallel.dp = {gpus // replica}, or change cluster.train_nodes"
        )


def _nearest(config: RunConfig) -> str:
    """A sentence with the nearest numbers of nodes that would fit, below and above."""
    parallel, cluster = config.engine.parallel, config.cluster
    replica = parallel.tp * parallel.pp * parallel.cp

    def divides(nodes: int) -> bool:
        return nodes * cluster.gpus_per_node % replica == 0

    below = next((nodes for nodes in range(cluster.train_nodes, 0, -1) if divides(nodes)), None)
    above = next(nodes for nodes in range(cluster.train_nodes, cluster.train_nodes + replica + 1) if divides(nodes))
    return f"use {f'{below} or ' if below else ''}{above} nodes, or change engine.parallel"


def _check_servers(config: RunConfig) -> None:
    cluster, server = config.cluster, config.rollout.server
    if config.rollout.replay is not None:
        return
    if server.tp > cluster.gpus_per_node:
        raise ValueError(
            f"rollout.server.tp = {server.tp} is more than cluster.gpus_per_node = {cluster.gpus_per_node}; a server's workers "
            "must share a node: lower rollout.server.tp"
        )
    if server.placement == "colocated":
        if cluster.rollout_nodes or cluster.train_nodes > 1:
            raise ValueError(
                "rollout.server.placement = colocated puts the servers on the GPUs of one training node, but "
                f"cluster.train_nodes = {cluster.train_nodes} and rollout_nodes = {cluster.rollout_nodes}; set them to 1 and "
                "0, or leave placement out"
            )
        where = f"what the trainer's ranks use ({config.engine.parallel.world_size} GPUs)"
        room = config.engine.parallel.world_size // server.tp
    elif cluster.rollout_nodes:
        where = f"cluster.rollout_nodes = {cluster.rollout_nodes} of {cluster.gpus_per_node} GPUs"
        room = cluster.rollout_nodes * (cluster.gpus_per_node // server.tp)
    else:
        free = cluster.train_nodes * cluster.gpus_per_node - config.engine.parallel.world_size
        where = f"what engine.parallel leaves of the training node ({free} GPUs, as cluster.rollout_nodes = 0)"
        room = free // server.tp
    if server.count > room:
        raise ValueError(
            f"rollout.server.count = {server.count} servers of tp = {server.tp} do not fit: {where} has room for {room}; lower "
            "rollout.server.count, or raise cluster.rollout_nodes"
        )

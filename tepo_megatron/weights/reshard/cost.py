"""Computes the bytes that a plan puts on the links of a cluster, and the least time that they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tepo_megatron.weights.geometry import ReshardPlan

Link = Literal["device", "nvlink", "network"]


@dataclass(frozen=True)
class Cluster:
    """Nodes of ``gpus_per_node`` GPUs; rates that a transfer reaches, in 10⁹ bytes/s for each GPU and direction.

    Trainer ranks fill nodes in order. The workers of the servers fill the nodes after them, or with ``shared`` the trainer's
    own nodes, from the first GPU on.
    """

    gpus_per_node: int = 8
    nvlink_gb_per_s: float = 450.0
    network_gb_per_s: float = 50.0
    shared: bool = False

    def local(self, num_sources: int, num_destinations: int) -> dict[int, int]:
        """Returns destination rank → the source rank on the same GPU, as ``reshard_plan`` takes it."""
        return {rank: rank for rank in range(min(num_sources, num_destinations))} if self.shared else {}


@dataclass(frozen=True)
class LinkTraffic:
    """The traffic over one kind of link, in bytes; ``busiest_*`` is the most that one GPU sends or receives over it.

    ``seconds`` is the larger of these two divided by the link's rate, and 0 within a device. It assumes that all GPUs work at
    the same time in both directions and that nothing waits, so that a real transfer takes at least as long.
    """

    link: Link
    pairs: int
    total: int
    busiest_sender: int
    busiest_receiver: int
    seconds: float


def traffic(plan: ReshardPlan, itemsize: int, cluster: Cluster) -> list[LinkTraffic]:
    """Returns the traffic of every kind of link that the plan uses. ``itemsize`` is the bytes of an element on the wire."""
    link_of = _links(plan, cluster)
    moved: dict[Link, Counter[tuple[int, int]]] = {"device": Counter(), "nvlink": Counter(), "network": Counter()}
    for (source, destination), size in plan.bytes_between(itemsize).items():
        moved[link_of(source, destination)][source, destination] += size
    moved["device"].update(plan.bytes_between(itemsize, local=True))
    rates = {"nvlink": cluster.nvlink_gb_per_s, "network": cluster.network_gb_per_s}
    found = []
    for link, pairs in moved.items():
        sent, received = Counter[int](), Counter[int]()
        for (source, destination), size in pairs.items():
            sent[source] += size
            received[destination] += size
        if pairs:
            most = max(sent.values()), max(received.values())
            seconds = max(most) / 1e9 / rates[link] if link in rates else 0.0
            found.append(LinkTraffic(link, len(pairs), pairs.total(), *most, seconds))
    return found


def _links(plan: ReshardPlan, cluster: Cluster) -> Callable[[int, int], Link]:
    """Returns a function that gives the kind of link between a source and a destination rank on different GPUs."""
    nodes_before = 0 if cluster.shared else -(-plan.num_sources // cluster.gpus_per_node)

    def link_of(source: int, destination: int) -> Link:
        ours, theirs = source // cluster.gpus_per_node, nodes_before + destination // cluster.gpus_per_node
        return "nvlink" if ours == theirs else "network"

    return link_of


@dataclass(frozen=True)
class PlanSummary:
    """The size of a plan and of its traffic, in bytes.

    ``imbalance`` is the most that a source rank sends, divided by the mean of all source ranks. ``seconds`` is the time of the
    slowest kind of link.
    """

    sources: int
    destinations: int
    moves: int
    digest: str
    built_in_seconds: float
    received_by_each: int
    imbalance: float
    links: list[LinkTraffic]
    seconds: float


def summarize_plan(plan: ReshardPlan, itemsize: int, cluster: Cluster, *, built_in_seconds: float) -> PlanSummary:
    """Counts what a plan moves, with ``itemsize`` bytes for each element."""
    received, sent = Counter[int](), Counter[int]()
    for move in plan.moves:
        received[move.destination] += move.numel * itemsize
        sent[move.source] += 0 if plan.is_local(move) else move.numel * itemsize
    links = traffic(plan, itemsize, cluster)
    return PlanSummary(
        sources=plan.num_sources,
        destinations=plan.num_destinations,
        moves=len(plan.moves),
        digest=plan.digest,
        built_in_seconds=built_in_seconds,
        received_by_each=max(received.values()),
        imbalance=max(sent.values()) * plan.num_sources / max(sent.total(), 1),
        links=links,
        seconds=max(link.seconds for link in links),
    )

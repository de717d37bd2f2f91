"""Traffic of a plan on a cluster's links, and a lower bound of its time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tepo_megatron.weights.geometry import ReshardPlan

Link = Literal["device", "nvlink", "network"]


@dataclass(frozen=True)
class Cluster:
    """Rates are in 10⁹ bytes/s per GPU and direction.

    Workers fill the nodes after the trainer's, or if ``shared`` the same ones.
    """

    gpus_per_node: int = 8
    nvlink_gb_per_s: float = 450.0
    network_gb_per_s: float = 50.0
    shared: bool = False

    def local(self, num_sources: int, num_destinations: int) -> dict[int, int]:
        """Returns destination rank → the source rank on the same GPU."""
        return {rank: rank for rank in range(min(num_sources, num_destinations))} if self.shared else {}


@dataclass(frozen=True)
class _LinkTraffic:
    link: Link
    pairs: int
    total: int
    busiest_sender: int
    busiest_receiver: int
    seconds: float


def _traffic(plan: ReshardPlan, itemsize: int, cluster: Cluster) -> list[_LinkTraffic]:
    link_of = _links(plan, cluster)
    bytes_by_link: dict[Link, Counter[tuple[int, int]]] = {"device": Counter(), "nvlink": Counter(), "network": Counter()}
    for (source, destination), size in plan.bytes_between(itemsize).items():
        bytes_by_link[link_of(source, destination)][source, destination] += size
    bytes_by_link["device"].update(plan.bytes_between(itemsize, local=True))
    rates = {"nvlink": cluster.nvlink_gb_per_s, "network": cluster.network_gb_per_s}
    result = []
    for link, pairs in bytes_by_link.items():
        sent, received = Counter[int](), Counter[int]()
        for (source, destination), size in pairs.items():
            sent[source] += size
            received[destination] += size
        if pairs:
            busiest = max(sent.values()), max(received.values())
            seconds = max(busiest) / 1e9 / rates[link] if link in rates else 0.0
            result.append(_LinkTraffic(link, len(pairs), pairs.total(), *busiest, seconds))
    return result


def _links(plan: ReshardPlan, cluster: Cluster) -> Callable[[int, int], Link]:
    nodes_before = 0 if cluster.shared else -(-plan.num_sources // cluster.gpus_per_node)

    def link_of(source: int, destination: int) -> Link:
        source_node, destination_node = source // cluster.gpus_per_node, nodes_before + destination // cluster.gpus_per_node
        return "nvlink" if source_node == destination_node else "network"

    return link_of


@dataclass(frozen=True)
class PlanSummary:
    """Traffic is in bytes. ``imbalance`` is the most that a source rank sends over the mean."""

    sources: int
    destinations: int
    moves: int
    digest: str
    built_in_seconds: float
    received_by_each: int
    imbalance: float
    links: list[_LinkTraffic]
    seconds: float


def summarize_plan(plan: ReshardPlan, itemsize: int, cluster: Cluster, *, built_in_seconds: float) -> PlanSummary:
    received, sent = Counter[int](), Counter[int]()
    for move in plan.moves:
        received[move.destination] += move.numel * itemsize
        sent[move.source] += 0 if plan.is_local(move) else move.numel * itemsize
    links = _traffic(plan, itemsize, cluster)
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

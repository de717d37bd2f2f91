"""Bytes that a weight sync puts on each kind of link, and a lower bound of its time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from tepo_megatron.weights.geometry import ReshardPlan

_Link = Literal["device", "nvlink", "network"]


@dataclass(frozen=True)
class _LinkTraffic:
    link: _Link
    pairs: int
    total: int
    busiest_sender: int
    busiest_receiver: int
    seconds: float


@dataclass(frozen=True)
class PlanSummary:
    """Traffic is in bytes; ``imbalance`` is the sources' largest load over the mean."""

    sources: int
    destinations: int
    moves: int
    digest: str
    built_in_seconds: float
    received_by_each: int
    imbalance: float
    links: list[_LinkTraffic]
    seconds: float


@dataclass(frozen=True)
class Links:
    """Rates are in 10⁹ bytes/s per GPU and direction. Unless ``shared``, workers have nodes of their own."""

    gpus_per_node: int = 8
    nvlink_gb_per_s: float = 450.0
    network_gb_per_s: float = 50.0
    shared: bool = False

    def local(self, num_sources: int, num_destinations: int) -> dict[int, int]:
        return {rank: rank for rank in range(min(num_sources, num_destinations))} if self.shared else {}

    def summarize(self, plan: ReshardPlan, itemsize: int, *, built_in_seconds: float = 0.0) -> PlanSummary:
        local, remote = plan.bytes_between(itemsize, local=True), plan.bytes_between(itemsize)
        first_node = 0 if self.shared else -(-plan.num_sources // self.gpus_per_node)
        by_link: dict[_Link, Counter[tuple[int, int]]] = {"device": local, "nvlink": Counter(), "network": Counter()}
        for (source, destination), size in remote.items():
            same_node = source // self.gpus_per_node == first_node + destination // self.gpus_per_node
            by_link["nvlink" if same_node else "network"][source, destination] += size
        links = [self._traffic(link, pairs) for link, pairs in by_link.items() if pairs]
        sent, received = _ends(remote)[0], _ends(local + remote)[1]
        return PlanSummary(
            sources=plan.num_sources,
            destinations=plan.num_destinations,
            moves=len(plan.moves),
            digest=plan.digest,
            built_in_seconds=built_in_seconds,
            received_by_each=max(received.values()),
            imbalance=max(sent.values(), default=0) * plan.num_sources / max(sent.total(), 1),
            links=links,
            seconds=max(link.seconds for link in links),
        )

    def _traffic(self, link: _Link, pairs: Counter[tuple[int, int]]) -> _LinkTraffic:
        sent, received = (max(end.values()) for end in _ends(pairs))
        rate = {"device": float("inf"), "nvlink": self.nvlink_gb_per_s, "network": self.network_gb_per_s}[link]
        return _LinkTraffic(link, len(pairs), pairs.total(), sent, received, max(sent, received) / 1e9 / rate)


def _ends(pairs: Counter[tuple[int, int]]) -> tuple[Counter[int], Counter[int]]:
    """Returns bytes by source, and by destination."""
    sent, received = Counter[int](), Counter[int]()
    for (source, destination), size in pairs.items():
        sent[source] += size
        received[destination] += size
    return sent, received

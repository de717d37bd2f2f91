"""Which way weights take, on rank 0 and on the others: decided in one place, from one setting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import WeightsVersion
from tepo_megatron.run.weights import WeightPublisher
from tepo_megatron.weights.layouts import VllmParallel

VERSION = WeightsVersion(3, "abc")


class Calls:
    """Weights, sender and fleet at once; notes what is asked of it."""

    def __init__(self, *, root: bool) -> None:
        self.calls: list[Any] = []
        self.root = root
        self.manifest = [SimpleNamespace(name="w", shape=(2,), dtype="float32")]

    def make_shard_sender(self, servers: VllmParallel, **options: Any) -> Any:
        self.calls.append(("sender", servers, options["dtype"]))
        return SimpleNamespace(update_as_non_root=lambda: self.calls.append("sends as non-root"))

    def stream(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name in ("a", "b"):
            self.calls.append(f"gathers {name}")
            yield name, torch.ones(2) if self.root else None

    def update_weights_from_shards(self, version: WeightsVersion, sender: Any) -> None:
        self.calls.append(("shards", version))

    def update_weights_from_tensors(self, version: WeightsVersion, manifest: Any, tensors: Any) -> None:
        self.calls.append(("tensors", version, manifest, len(list(tensors))))


def update(root: bool, **rollout: Any) -> list[Any]:
    calls = Calls(root=root)
    config = RunConfig.model_validate({"rollout": rollout})
    WeightPublisher(config, calls, calls if root else None).update_weights(VERSION)  # type: ignore[arg-type]
    return calls.calls


def test_shards_go_from_every_rank() -> None:
    server = {"tp": 2, "count": 3, "dtype": "bfloat16"}
    made = ("sender", VllmParallel(tp=2, replicas=3), torch.bfloat16)
    assert update(True, server=server) == [made, ("shards", VERSION)]
    assert update(False, server=server) == [made, "sends as non-root"]


def test_full_tensors_are_gathered_by_all_and_sent_by_rank_0() -> None:
    server = {"transfer": "gather"}
    gathered = ["gathers a", "gathers b"]
    assert update(True, server=server) == [*gathered, ("tensors", VERSION, [("w", (2,), "float32")], 2)]
    assert update(False, server=server) == gathered


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("transfer", ["reshard", "gather"])
def test_a_replayed_run_has_no_servers_to_update(root: bool, transfer: str, tmp_path: Path) -> None:
    assert update(root, replay=tmp_path, server={"transfer": transfer}) == []

"""Log-prob and entropy of vocabulary-sharded logits from two other RL systems, if installed.

Importing a package would need all its dependencies, so only the file with the functions is run.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tepo_megatron.tools.bench.settings import AREAL, VERL

Outputs = tuple[Tensor, ...]
Method = Callable[[Tensor, Tensor], Outputs]
"""(logits shard [T, V/p], labels [T]) → the outputs [T] that a backward starts from."""


def peer_methods() -> dict[str, Method]:
    """A method for each installed peer, even without dependencies (``pip install --no-deps``)."""
    peers: dict[str, Method] = {}
    areal = _load("areal", "areal/utils/functional/vocab_parallel.py")
    if areal is not None:
        peers[AREAL] = lambda logits, labels: areal._VocabParallelLogProbsEntropy.apply(logits, labels, dist.group.WORLD)
    verl = _load("verl", "verl/utils/megatron/tensor_parallel.py")
    if verl is not None:
        peers[VERL] = lambda logits, labels: _verl(verl, logits, labels)
    return peers


def _verl(module: ModuleType, logits: Tensor, labels: Tensor) -> Outputs:
    """As its Megatron actor does: on a copy, since Megatron's cross-entropy overwrites its input."""
    retained = logits.clone()
    entropy = module.vocab_parallel_entropy(logits)
    logprob = module.vocab_parallel_log_probs_from_logits(retained.unsqueeze(1), labels.unsqueeze(1)).squeeze(1)
    return logprob, entropy


def _load(distribution: str, file: str) -> Any:
    try:
        path = importlib.metadata.distribution(distribution).locate_file(file)
    except importlib.metadata.PackageNotFoundError:
        return None
    platforms = ModuleType("areal.infra.platforms")  # all that AReaL's file asks of the rest of it: whether this is an NPU
    platforms.is_npu_available = False  # type: ignore[attr-defined]
    sys.modules.setdefault("areal.infra.platforms", platforms)
    spec = importlib.util.spec_from_file_location(f"tepo_megatron_peer_{distribution}", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

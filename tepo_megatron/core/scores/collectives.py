"""The two collectives used here, under the names that the installed torch has for them. All ranks of the group call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_gather(own: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenates the ranks' tensors [n, …] to [p·n, …], on every rank."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the second is deprecated from 2.13 on
    gathered = own.new_empty(own.shape[0] * dist.get_world_size(group), *own.shape[1:])
    gather(gathered, own.contiguous(), group=group)
    return gathered


def reduce_scatter(values: Tensor, group: ProcessGroup) -> Tensor:
    """Sums [p·n, …] over the ranks; rank r gets the r-th part [n, …] of the sum."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    own = values.new_empty(values.shape[0] // dist.get_world_size(group), *values.shape[1:])
    scatter(own, values.contiguous(), group=group)
    return own

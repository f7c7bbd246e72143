"""Process groups that begin anew inside of a test, as after an error or for another model."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def begin_new_world(name: str) -> None:
    """Destroy all process groups of this rank and make a default one, of the same ranks.

    Args:
        name: Of the new world; each must have another one.
    """
    store = dist.PrefixStore(name, c10d._get_default_store())  # noqa: SLF001 - torch shows no other
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

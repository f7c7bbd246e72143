"""When parameters are cut, where that is traced: at once, or together."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.backends.traced import Region

_deferred = threading.local()


def execute_sharding(region: Region) -> None:
    """Run the cutting of parameters, so that the memory of the whole ones is free."""
    regions: list[Region] | None = getattr(_deferred, "regions", None)
    if regions is None:
        region.finish_graph()
    elif region not in regions:
        regions.append(region)


@contextlib.contextmanager
def defer_sharding() -> Iterator[None]:
    """Have the calls of `fully_shard` inside cut parameters together, at the end of the block.

    On XLA devices only, where each call runs a graph that cuts its parameters, so that the memory
    of the whole ones is free at once. Here one graph cuts all: fewer compilations, but the whole
    model is in memory until then. Elsewhere it has no effect:

        with defer_sharding():
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
    """
    regions: list[Region] = []
    before, _deferred.regions = getattr(_deferred, "regions", None), regions
    try:
        yield
    finally:
        _deferred.regions = before
    for region in regions:
        execute_sharding(region)

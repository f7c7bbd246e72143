"""Process groups of torch: how they are made, and what is asked of them."""

from __future__ import annotations

import hashlib
import math
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch.distributed as dist

from shardkit import _compat
from shardkit._watch_settings import watch_settings
from shardkit.backends.watch.channel import channel_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

Value = TypeVar("Value")


class OfWorld(Generic[Value]):
    """Values by key, which are forgotten when the default process group is another one.

    Ranks that are threads have a default process group, and values, each.
    """

    def __init__(self) -> None:
        self._by_rank: dict[int, tuple[Any, dict[tuple[Any, ...], Value]]] = {}

    def now(self) -> dict[tuple[Any, ...], Value]:
        """Return the values of the default process group of now, to read and to write."""
        rank = threading.get_ident() if _compat.ranks_are_threads() else 0
        world, values = self._by_rank.get(rank, (None, {}))
        if world is not dist.group.WORLD:
            if rank == 0:
                self._by_rank.clear()
            values = {}
            self._by_rank[rank] = (dist.group.WORLD, values)
        return values


_num_made: OfWorld[int] = OfWorld()


def collective_timeout() -> timedelta | None:
    """Return after which time torch ends collectives of a new process group; None: its own."""
    seconds = watch_settings.timeout_s
    return None if math.isinf(seconds) else timedelta(seconds=seconds)


def new_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Make a process group. Only its own ranks have to call this.

    They must make all groups of the same ranks in the same order. Other groups of a rank make no
    difference.
    """
    with _named_group(ranks):
        group: dist.ProcessGroup = dist.new_group(
            list(ranks),
            timeout=collective_timeout(),
            backend=backend,
            use_local_synchronization=True,
        )
    return group


def _named_group(ranks: Sequence[int]) -> AbstractContextManager[None]:
    """Give the next process group a name that all of its ranks give it."""
    members, counts = tuple(ranks), _num_made.now()
    number = counts[members] = counts.get(members, 0) + 1
    # Short, however many they are: each rank tells others the names of its groups.
    digest = hashlib.blake2b(repr(members).encode(), digest_size=8).hexdigest()
    return _compat.named_group(f"shardkit_{digest}_{number}")


def sub_group(
    parent: dist.ProcessGroup, splits: Sequence[Sequence[int]], backend: str | None = None
) -> dist.ProcessGroup:
    """Make a process group of some ranks of another. All ranks of `parent` must call this.

    Args:
        parent: The other one.
        splits: Positions in `parent`, without overlaps. A rank gets the group that it is in.
        backend: The engine; None: as the parent's.
    """
    mine = next(split for split in splits if parent.rank() in split)
    ranks = [dist.get_process_group_ranks(parent)[position] for position in mine]
    if backend is None and _must_be_split(parent):
        # A new group would split the communicator of the whole world, for which torch needs all of
        # its ranks to call.
        with _named_group(ranks):
            all_splits = [list(split) for split in splits]
            made = dist.split_group(
                parent_pg=parent, split_ranks=all_splits, timeout=collective_timeout()
            )
        assert made is not None, "every rank is in one of the splits"
        return made
    return new_group(ranks, backend)


def _must_be_split(parent: dist.ProcessGroup) -> bool:
    """Whether groups must be split from others: the world is bound to devices, the engine can."""
    device = getattr(dist.group.WORLD, "bound_device_id", None)
    if device is None:
        return False
    engine = _compat.process_group_backend(parent, device)
    return bool(getattr(engine, "supports_splitting", False))


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a process group of these ranks: the default one if it has no others, else a new one.

    All of them must call this. Where groups are split from the world, which needs all of its ranks,
    those must call it, too, with ranks of their own.
    """
    world = dist.group.WORLD
    assert world is not None, "there is a mesh"
    if sorted(ranks) == list(range(world.size())):
        return world
    if _must_be_split(world):
        splits = sorted(set(exchange(tuple(sorted(ranks)), None, "process groups")))
        return sub_group(world, splits)
    return new_group(sorted(ranks))


def exchange(item: Any, group: Any, of: str = "") -> list[Any]:
    """Return the picklable `item` of every rank of a process group, in rank order.

    Args:
        item: This rank's.
        group: Torch's; None is the default one, or this process alone if there is none.
        of: Word for what it is for.

    Cost: two all-gathers: of the sizes, of the items.
    """
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    items: list[Any] = [item] * size
    if size > 1:
        with channel_of(group).run("exchange", of, 0):
            dist.all_gather_object(items, item, group=group)
    return items

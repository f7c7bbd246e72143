"""Writes to unsharded parameters: kept if all ranks wrote alike, else an error.

A forward may clamp or normalize its weights, or move a codebook. So may who works with parameters
that are kept between forward and backward. The memory of all that is given back. Version counters
tell of the writes, when a forward ends and before the memory goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardkit._errors import RankMismatchError, StateError, listed
from shardkit._tensor.written_values import fingerprint, note_written
from shardkit.backends.base import first_of_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._params.store import Store
    from shardkit._runtime.group import ParamGroup
    from shardkit.backends.base import AxisComm, CommStreams


def keep_writes(group: ParamGroup, streams: CommStreams) -> None:
    """Take what was written to unsharded parameters of a group over into the shards.

    Args:
        group: Group that has memory.
        streams: Streams that compare what ranks wrote.

    Raises:
        RankMismatchError: On all ranks that wrote, if they wrote different values.
        StateError: What was written cannot be kept.

    Cost: one all-reduce of 16 bytes per axis; details travel only if ranks differ.
    """
    places = group.note_writes()
    for store, index in places:
        _check_can_keep(group, store, index)
    axes = [a for a in (group.shard_axis, group.replicate_axis) if a is not None and a.size > 1]
    if axes:
        values = [fingerprint(store.unsharded_values(index), 0) for store, index in places]
        names = [store.entries[index].name for store, index in places]
        known = dict(zip(names, torch.stack(values).tolist(), strict=True))
        _check_alike(group, known, axes, streams)
    for store, index in places:
        store.keep_written(index)
    streams.follow_compute()  # The next gather: no version tells it of this.


def keep_own_writes(group: ParamGroup, streams: CommStreams) -> None:
    """Take over what was written before an exception, which other ranks may not have come to.

    The next backward compares it, as all that ranks write by themselves. What cannot be kept stays
    noted: the next forward of the group, or who frees its memory, raises.
    """
    if not all(store.keeps_writes for store, _ in group.written_places()):
        return
    for store, index in group.note_writes():
        store.keep_written(index)
        values = store.unsharded_values(index)
        param: Any = store.entries[index].param
        note_written(param, lambda values=values: [values], max_samples=0)  # type: ignore[misc]
    streams.follow_compute()


def _check_can_keep(group: ParamGroup, store: Store, index: int) -> None:
    name = store.entries[index].name
    if not store.keeps_writes:
        msg = (
            f"the forward of {group.name!r} wrote to its parameter {name!r}, {store.why_lost}, so "
            f"it would be lost. Write between steps, under torch.no_grad(), or hold what a forward "
            f"changes in a buffer (register_buffer)."
        )
        raise StateError(msg)
    if store.is_stale:
        msg = (
            f"parameter {name!r} of {group.name!r} was written while it was unsharded, and its "
            f"shard was changed since it was gathered (an optimizer's step, a load): one of both "
            f"would be lost. Call reshard() after the write, or write after the step."
        )
        raise StateError(msg)


def _check_alike(
    group: ParamGroup, written: dict[str, int], axes: Sequence[AxisComm], streams: CommStreams
) -> None:
    digest = sum(hash_of(name) * value for name, value in written.items()) % 2**62
    extremes = torch.tensor([digest, -digest], dtype=torch.int64)
    streams.start_all_reduce_max(extremes, axes, f"what forward wrote to {listed(written)}").wait()
    highest, lowest = extremes.tolist()
    if highest == -lowest:
        return
    text = None
    for axis in axes:
        text = text or _first_difference(group, axis.exchange(written))
    text = first_of_all(text, axes)
    if text is not None:
        raise RankMismatchError(text)


def hash_of(name: str) -> int:
    """Return an odd number that is the same for a name in all processes."""
    return int.from_bytes(name.encode(), "big") * 2 + 1


def _first_difference(group: ParamGroup, by_rank: Sequence[dict[str, int]]) -> str | None:
    for rank, other in enumerate(by_rank):
        for name in {**by_rank[0], **other}:
            if by_rank[0].get(name) != other.get(name):
                return (
                    f"the forward of {group.name!r} wrote to its parameter {name!r}, and not the "
                    f"same on position 0 and on position {rank} of the process group, so there is "
                    f"no one value to keep. Compute what it writes from data of all ranks, for "
                    f"example by torch.distributed.all_reduce of the statistics, or hold it in a "
                    f"buffer (register_buffer), which is each rank's own."
                )
    return None

"""A mesh axis over gloo, and handles of what is started on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.backends.process_group import ProcessGroupAxis, sub_group
from shardkit.backends.watch.channel import channel_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from shardkit.backends.watch.channel import Channel, Issued


class GlooAxis(ProcessGroupAxis):
    """An axis with a second process group for reductions."""

    reduce_group: dist.ProcessGroup | None = None

    @property
    def reduce_channel(self) -> Channel:
        """What is issued for reductions."""
        assert self.reduce_group is not None
        return channel_of(self.reduce_group)

    def make_reduce_group(self) -> None:
        """Make the group, once; call it on all ranks of the axis."""
        if self.reduce_group is None and self.size > 1:
            self.reduce_group = sub_group(self.group, [range(self.size)], "gloo")


class WorkHandle:
    """Started collectives of one process group."""

    is_of_host = True

    def __init__(self, works: Sequence[dist.Work | None], issued: Issued | None) -> None:
        self._works = [work for work in works if work is not None]
        self._issued = issued

    def wait(self) -> None:
        """Block until they are done; again is free."""
        works, self._works = self._works, []
        if works:
            assert self._issued is not None, "there are ranks to wait for"
            self._issued.wait(works)

"""A mesh axis over gloo, and handles of what is started on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.backends.process_group import ProcessGroupAxis, sub_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from shardkit.backends.hang_watch import HangWatch


class GlooAxis(ProcessGroupAxis):
    """An axis with a second process group for reductions."""

    reduce_group: dist.ProcessGroup | None = None

    def make_reduce_group(self) -> None:
        """Make the group, once; call it on all ranks of the axis."""
        if self.reduce_group is None and self.size > 1:
            self.reduce_group = sub_group(self.group, [range(self.size)], "gloo")


class WorkHandle:
    """Started collectives of one process group."""

    is_of_host = True

    def __init__(
        self, works: Sequence[dist.Work | None], group: dist.ProcessGroup, hang_watch: HangWatch
    ) -> None:
        self._works = [work for work in works if work is not None]
        self._group = group
        self._hang_watch = hang_watch

    def is_done(self) -> bool:
        """Whether they are done."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Block until they are done; again is free."""
        works, self._works = self._works, []
        if works:
            self._hang_watch.wait(works, self._group)

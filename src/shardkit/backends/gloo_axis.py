"""A mesh axis over gloo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.backends.groups import sub_group
from shardkit.backends.host_work import WorkHandle, start_host_all_to_all
from shardkit.backends.process_group import ProcessGroupAxis

if TYPE_CHECKING:
    import torch.distributed as dist

    from shardkit.backends.base import AllToAll


class GlooAxis(ProcessGroupAxis):
    """An axis with a second process group for reductions."""

    reduce_group: dist.ProcessGroup | None = None

    def make_reduce_group(self) -> None:
        """Make the group, once; call it on all ranks of the axis."""
        if self.reduce_group is None and self.size > 1:
            self.reduce_group = sub_group(self.group, [range(self.size)], "gloo")

    def start_all_to_all(self, job: AllToAll) -> WorkHandle:
        """See `PeerAxis.start_all_to_all`."""
        if self.size == 1:
            return WorkHandle([], None)
        return start_host_all_to_all(job, self.group)

"""Collectives of an engine of the host that have been started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from shardkit.backends.watch.channel import channel_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit.backends.base import AllToAll
    from shardkit.backends.watch.channel import Issued


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


def start_host_all_to_all(job: AllToAll, group: dist.ProcessGroup) -> WorkHandle:
    """Start an exchange of memory of the host over a group of several ranks."""
    issued = channel_of(group).issue("all-to-all", job.of, job.total_nbytes)
    splits = (list(job.receive_nbytes), list(job.send_nbytes))
    work = dist.all_to_all_single(job.receive, job.send, *splits, group=group, async_op=True)
    return WorkHandle([work], issued)


def start_host_max(
    tensor: Tensor, groups: Sequence[dist.ProcessGroup | None], of: str
) -> WorkHandle:
    """Start a MAX all-reduce of a host tensor over groups; over several, one after another."""
    for group in groups[:-1]:
        start_host_max(tensor, [group], of).wait()
    assert groups[-1] is not None, "it was made"
    issued = channel_of(groups[-1]).issue("all-reduce", of, tensor.nbytes)
    work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=groups[-1], async_op=True)
    return WorkHandle([work], issued)

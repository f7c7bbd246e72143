"""What a step of a sharded model really gathers and reduces, counted where it is started."""

from __future__ import annotations

import contextlib
import typing
from unittest import mock

import torch.distributed as dist

from allocated import past_shared_memory
from shardkit import PlannedTraffic
from shardkit._module.hooks import state_of

if typing.TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from shardkit.backends.base import Gather, Reduction


@contextlib.contextmanager
def counted(model: nn.Module) -> Iterator[list[PlannedTraffic]]:
    """Count what is started in the block, bucket by bucket, whatever the backend.

    Yields:
        A list to which everything is added.
    """
    state = state_of(model)
    runtime = state.runtime or state.make_runtime()
    if runtime is None:
        yield []
        return
    streams, found = runtime.streams, []
    start_gather, start_reduce = streams.start_gather, streams.start_reduce

    def gather(gathers: Sequence[Gather], axis: typing.Any, *rest: typing.Any) -> typing.Any:
        for job in gathers if axis.size > 1 else ():
            nbytes = job.full.nbytes * (axis.size - 1) // axis.size
            found.append(PlannedTraffic(all_gathers=1, gathered_nbytes=nbytes))
        return start_gather(gathers, axis, *rest)

    def reduce(reductions: Sequence[Reduction], *rest: typing.Any) -> typing.Any:
        for job in reductions:
            ranks, copies = job.shard_axis.size, getattr(job.replicate_axis, "size", 1)
            whole, own = job.send.nbytes, job.out_numel * job.send.dtype.itemsize
            found.append(
                PlannedTraffic(
                    reduce_scatters=int(ranks > 1),
                    all_reduces=int(copies > 1),
                    reduced_nbytes=whole * (ranks - 1) // ranks,
                    all_reduced_nbytes=2 * own * (copies - 1) // copies,
                )
            )
        return start_reduce(reductions, *rest)

    with (
        mock.patch.object(streams, "start_gather", gather),
        mock.patch.object(streams, "start_reduce", reduce),
    ):
        yield found


class Told(typing.NamedTuple):
    """What docs/howto/strategies.md says of a step: collectives, and bytes in models."""

    all_gathers: int
    reduce_scatters: int
    all_reduces: int
    gathered: float
    reduced: float
    all_reduced: float
    shards: float
    whole: float
    between: float


def told(name: str, mesh_shape: Sequence[int], num_groups: int, m: int) -> Told:
    """Return it for groups of one size, of which the one that runs last is not gathered again."""
    copies, n = (1, *mesh_shape)[-2:]
    g, part, k = num_groups, (n - 1) / n, 1 / num_groups
    across = m * 2 * (copies - 1) / copies / n
    return {
        "replicate": Told(0, 0, g, 0, 0, 2 * (copies - 1) / copies, 1, 0, 1),
        "zero1": Told(g, g, 0, part, part, 0, 1 / n, 1, 1),
        "zero2": Told(m * g, m * g, 0, m * part, m * part, 0, 1 / n, 1, 1 / n),
        "zero3": Told(m * (2 * g - 1), m * g, 0, m * (2 - k) * part, m * part, 0, 1 / n, 0, 1 / n),
        "hybrid": Told(
            m * (2 * g - 1), m * g, m * g, m * (2 - k) * part, m * part, across, 1 / n, 0, 1 / n
        ),
        "hybrid_zero2": Told(m * g, m * g, m * g, m * part, m * part, across, 1 / n, 1, 1 / n),
    }[name]


def total(found: Sequence[PlannedTraffic]) -> PlannedTraffic:
    return sum(found, PlannedTraffic())


@contextlib.contextmanager
def on_the_wire(model: nn.Module) -> Iterator[dict[str, int]]:
    """Count the bytes that torch's functions are given on gloo ranks: received, and all-reduced."""
    groups = state_of(model).runtime.groups
    gathering = {b.plan.axis.group for group in groups for b in group.buckets}
    nbytes = {"gathered": 0, "reduced": 0, "all-reduced": 0}
    all_to_all, broadcast, all_reduce = dist.all_to_all_single, dist.broadcast, dist.all_reduce

    def exchange(
        output: Tensor, source: Tensor, splits: list[int], *rest: typing.Any, **options: typing.Any
    ) -> typing.Any:
        group = options["group"]
        others = sum(numel for i, numel in enumerate(splits) if i != group.rank())
        kind = "gathered" if group in gathering else "reduced"
        nbytes[kind] += others * output.dtype.itemsize
        return all_to_all(output, source, splits, *rest, **options)

    def send_to_all(tensor: Tensor, **options: typing.Any) -> typing.Any:
        if options["group_src"] != options["group"].rank():
            nbytes["gathered"] += tensor.nbytes
        return broadcast(tensor, **options)

    def add_up(tensor: Tensor, op: typing.Any, **options: typing.Any) -> typing.Any:
        if op == dist.ReduceOp.SUM:
            size = options["group"].size()
            nbytes["all-reduced"] += 2 * tensor.nbytes * (size - 1) // size
        return all_reduce(tensor, op, **options)

    with (
        past_shared_memory(),
        mock.patch.object(dist, "all_to_all_single", exchange),
        mock.patch.object(dist, "broadcast", send_to_all),
        mock.patch.object(dist, "all_reduce", add_up),
    ):
        yield nbytes

"""Interface of backends; no layer above knows which backend it uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shardkit._compat import torch_tensors
from shardkit._errors import StateError
from shardkit._settings import AllGather, ReduceScatter, SumAxis

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shardkit._mesh import DeviceMesh
    from shardkit.backends.device import Event, Stream
    from shardkit.backends.graphs import StreamGraph


class InGraph:
    """`Event` for which nobody has to wait: the compiler orders the work, or nothing runs."""

    def query(self) -> bool:
        """Whether the work is done: it is, for callers outside of the graph."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


# --- what only tracing backends have --------------------------------------------------------------


@dataclass(slots=True)
class TracedGather:
    """One bucket to gather on a backend that traces (`Backend.is_traced`)."""

    pieces: list[Tensor]  # 1-D, storage dtype, one per parameter, as the bucket keeps them.
    dtype: torch.dtype  # Dtype to which the pieces are cast before they travel.
    tail_numel: int  # Elements to put after the pieces of every rank, if they travel as one.
    bucket_id: int  # Number of the bucket, equal in every step.
    # Result: 1-D tensors with all ranks' parts of each piece, end to end; they share no memory with
    # each other.
    wholes: list[Tensor] | None = None


class Region(Protocol):
    """The part of a program that is traced for each rank.

    If one process has all ranks' tensors (`is_spmd`), a tensor is whole outside of the region, and
    one rank's part inside. `enter_batch`, `leave_batch`, `enter_shared`, `leave_sum` and
    `leave_mean` are differentiable. On other meshes a process is a rank, and there is nothing to
    enter or leave.
    """

    is_spmd: bool
    num_ranks: int  # Number of parts that a batch is split into when it enters.
    device: torch.device
    drawing: Any
    """The last context of `draw_apart`; its `again()` repeats the numbers drawn from now on."""

    gathers_wait: bool  # Whether gathers come after `progress` in the graph.

    def after_progress(self, parts: list[Tensor]) -> list[Tensor]:
        """Return copies that exist only after `progress`; the compiler cannot merge them."""

    def enter_batch(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of `tensor`, which is split over all axes together."""

    def leave_batch(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks."""

    def enter_shared(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, equal on all ranks; its gradient is the sum of the ranks' gradients."""

    def leave_shared(self, tensor: Tensor) -> Tensor:
        """Return a tensor that is equal on all ranks. Not differentiable."""

    def leave_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors; its derivative is `enter_shared`."""

    def leave_mean(self, tensor: Tensor) -> Tensor:
        """Return the mean over the ranks of a 0-dim floating-point tensor."""

    def agree(self, tensor: Tensor) -> Tensor:
        """Return, in the region, the mean over the ranks, or the maximum of integers.

        Cost: one all-reduce.
        """

    def progress(self, tensor: Tensor | None) -> None:
        """Let later gathers come after `tensor` in the graph; None: after nothing."""

    def forget_collectives(self) -> None:
        """Do not order later collectives after those that were traced before.

        The earlier ones may have run by now, because the host read a result. Ordering would run
        them again, and would make another graph each time.
        """

    def draw_apart(self) -> Any:
        """Return a context in which every rank draws its own random numbers."""

    def finish_graph(self) -> None:
        """Run the operators that have been traced."""


# --- backends -------------------------------------------------------------------------------------

# ruff: noqa: B027 - what has an empty body does nothing where there are no streams


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Data that this rank sends to each rank of an axis, and receives from each."""

    send: Tensor  # 1-D bytes for each rank, in rank order, end to end.
    receive: Tensor  # 1-D bytes from each rank, in rank order; written.
    send_nbytes: Sequence[int]  # Number of bytes for each rank.
    receive_nbytes: Sequence[int]  # Number of bytes from each rank.
    total_nbytes: int  # A number that all ranks know, by which the watch compares the exchange.
    of: str  # Word for the data.


class AxisComm(SumAxis, Protocol):
    """One mesh axis through this rank: small and rare collectives, all blocking."""

    def all_gather(self, full: Tensor, own: Tensor) -> None:
        """Fill `full` (1-D) with every rank's `own`, in rank order; `own` may lie in `full`."""

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy `tensor` from position `src` of the axis to all ranks."""

    def exchange(self, item: Any) -> list[Any]:
        """Return every rank's picklable `item`, in rank order."""


class PeerAxis(AxisComm, Protocol):
    """An axis whose ranks can send each other parts of any size (not on XLA)."""

    members: tuple[int, ...]  # Global rank of each position.

    def start_all_to_all(self, job: AllToAll) -> Handle:
        """Start an exchange after all compute issued so far.

        The tensors must not be touched before `Handle.wait` has returned.
        """

    def all_reduce_flags(self, flags: Tensor) -> None:
        """Take the maximum of small integers, a host tensor, in place; the host waits.

        It uses the host's engine if the axis has one, so that no rank waits for a device.
        """


def axes_of(mesh: DeviceMesh) -> list[Any]:
    """Return the communicators of all axes of a mesh."""
    return [mesh.backend.axis(axis) for axis in range(mesh.ndim)]


def first_of_all(item: Any, axes: Sequence[AxisComm]) -> Any:
    """Return the first picklable item of a rank over `axes` that is not None; None: all are.

    Cost: an exchange per axis.
    """
    for axis in axes:
        item = next((each for each in axis.exchange(item) if each is not None), None)
    return item


class Handle(Protocol):
    """Work that has been started."""

    def wait(self) -> object:
        """Return when work issued afterwards sees the result.

        On CPU that is when the work is done. On CUDA the compute stream waits, not the host.
        """


class CheckHandle(Handle, Protocol):
    """Small numbers of all ranks that are in flight."""

    is_of_host: bool  # Whether the host waits for other hosts only, never for the device.


class ReduceHandle(Protocol):
    """A reduction that has been started."""

    # Event after which the send buffers are free; None: they are free after `wait_sent`.
    fence: Event | None
    was_copied: bool  # Whether they are free already, since their data was copied.

    def wait_sent(self) -> None:
        """Return when the send buffers are free, if the host must wait for that."""

    def wait(self) -> list[Tensor]:
        """Return the results, one per reduction, for work issued afterwards.

        On CPU the results are complete. On CUDA the compute stream waits, not the host.
        """


@dataclass(slots=True, eq=False)
class Done:
    """`Handle` and `ReduceHandle` of work that was done at once, or that is part of a graph."""

    outs: Sequence[Tensor] = ()
    fence: Event | None = None
    was_copied: bool = False

    def wait(self) -> list[Tensor]:
        """Return the results."""
        return list(self.outs)

    def wait_sent(self) -> None:
        """Return at once, since nothing is in flight."""


@dataclass(frozen=True, slots=True)
class Gather:
    """One bucket to gather."""

    full: Tensor  # 1-D, all ranks' ranges in compute dtype; written.
    own: Tensor  # This rank's range of `full`.
    # 1-D, this rank's range in storage dtype; cast into `own` first. May be on the host while
    # `full` is on the device.
    shard: Tensor
    comm: AllGather | None = None  # The user's own all-gather (`AllGather`), or None.
    # Whether `shard` is on the host, and the device has memory of its own.
    is_on_host: bool = False


@dataclass(frozen=True, slots=True)
class Reduction:
    """One bucket to reduce."""

    # 1-D, all ranks' ranges of this rank's gradients, in reduce dtype. With `parts` it has no
    # memory.
    send: Tensor
    # Function that gives memory for `Backend.receive_chunks` shard-sized pieces, 1-D.
    room: Callable[[], Tensor]
    out_numel: int  # Elements of this rank's range.
    out_dtype: torch.dtype  # Dtype of the result.
    scale: float  # Factor of the sum.
    shard_axis: AxisComm  # Axis of the reduce-scatter.
    replicate_axis: AxisComm | None  # Axis of an all-reduce that follows; None: there is none.
    # Partial sum over the shard axis of earlier backwards: 1-D, `out_numel`, fp32 or wider. It is
    # added before the all-reduce, in its dtype, and may be written. None: there is none.
    carry: Tensor | None
    # Whether the result goes to the host, and the device has memory of its own.
    is_to_host: bool = False
    is_pinned: bool = False  # Whether the result goes to page-locked memory.
    comm: ReduceScatter | None = None  # The user's own reduce-scatter (`ReduceScatter`), or None.
    # Factor of the data that is sent, so that only the rest of `scale` comes after the sum; None:
    # the backend chooses.
    before: float | None = None
    # The user's own all-reduce (`AllReduce`) over the replicate axis, as a function of a tensor and
    # of the factor that the sum still needs; or None.
    all_reduce: Callable[[Tensor, float], object] | None = None
    # Function of the reduced and scaled result, which it may change; or None.
    hook: Callable[[Tensor], object] | None = None
    # Stream on which an accelerator runs the hook; None: after the reduction.
    hook_stream: Stream | None = None
    bucket_id: int = 0  # Number of the bucket where it is traced, equal in every step.
    force_sum: bool = False  # Whether the engine may only sum, and not divide.
    # Tensors of any shape that go to each rank, end to end. Empty: they were copied into `send`.
    # Only if `Backend.takes_parts`; the backend clears the lists.
    parts: Sequence[list[Tensor]] = ()
    # Dtype of `parts`, whose values `send` could hold exactly; it is the same on all ranks, though
    # some of them may have copied theirs into `send`. None: no rank has parts.
    part_dtype: torch.dtype | None = None

    def rows(self) -> Sequence[Sequence[Tensor]]:
        """Return for each rank the parts that are sent to it."""
        return self.parts or [[row] for row in self.send.view(self.shard_axis.size, -1)]

    def whole(self) -> Tensor:
        """Return the data that is sent as one tensor: `send`, or a copy of `parts`."""
        return end_to_end([self]) if self.parts else self.send


def end_to_end(reductions: Sequence[Reduction], out: Tensor | None = None) -> Tensor:
    """Return a 1-D copy of the data of several reductions, ordered by receiving rank.

    The copy is in new memory, or in `out`.
    """
    by_rank = zip(*[reduction.rows() for reduction in reductions], strict=True)
    parts = [part for rows in by_rank for row in rows for part in row]
    # Users may choose another dtype for a gradient than for its parameter.
    if out is not None:
        torch.cat([part.reshape(-1) for part in parts], out=out)
        return out
    result: Tensor = torch_tensors.flattened(parts)
    return result.to(reductions[0].send.dtype)


class CommStreams(ABC):
    """The streams that all groups of one root share: one per kind of collective.

    Methods with a body here fit a backend without streams: the host runs everything in order, in
    ordinary memory.
    """

    # Region in which ranks' forwards and backwards are traced; None: they run at once.
    region: Region | None = None

    def note_step(self) -> None:
        """Note that a root's forward begins: waiting ranks exchange the numbers of their steps."""

    def note_error(self, error: BaseException) -> None:
        """Note that an exception left a forward: this rank may now diverge from the others."""

    def allocate_from(self, axes: Sequence[AxisComm]) -> None:
        """Take the memory of buffers from an engine of one of `axes`, if one offers any.

        Without axes the memory is ordinary from now on.
        """

    def separate_reduce(self, axis: AxisComm, *, enable: bool) -> None:
        """Reduce over `axis` on a separate communicator, or not. Collective."""

    def new_storage(self, nbytes: int) -> torch.UntypedStorage:
        """Return memory for a buffer."""
        return torch.UntypedStorage(nbytes)

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give a buffer's storage other memory, or none."""
        storage.resize_(nbytes)

    def after_optimizer(self, event: Event) -> None:
        """Let gathers issued from now on wait for a user's event as well."""

    def follow_compute(self) -> None:
        """Let gathers issued from now on see all that compute has written so far."""

    def fence(self) -> Event | None:
        """Return a mark of all compute issued so far; None if the host is in step with it."""

    def fork(self) -> None:
        """Let the work of all streams come after compute, at the beginning of a capture."""

    def end_fork(self) -> None:
        """Note that the capture has ended, or was given up."""

    def join(self) -> None:
        """Let the compute stream wait for all work started on other streams."""

    def settle_host_reads(self, *, compute: bool) -> None:
        """Return when the host may write offloaded shards: all issued reads are done.

        Args:
            compute: Whether the compute stream reads some of the shards as well.
        """

    def wait_fence(self, fence: Event | None) -> None:
        """Let the compute stream wait for a fence; None: there is nothing to wait for."""

    @abstractmethod
    def start_gather(
        self, gathers: Sequence[Any], axis: AxisComm, after: Sequence[Event | None], of: str
    ) -> Handle:
        """Cast and all-gather buckets, not before the fences `after`.

        Cost: one all-gather per bucket.

        Args:
            gathers: `Gather` objects; `TracedGather` objects if operators are traced.
            axis: Axis to gather over.
            after: Fences.
            of: Names of the groups.
        """

    @abstractmethod
    def start_reduce(self, reductions: Sequence[Reduction], of: str) -> ReduceHandle:
        """Reduce-scatter buckets after all compute issued so far.

        Cost: one reduce-scatter per bucket, and one all-reduce with a replicate axis.
        """

    def start_all_reduce_max(
        self, tensor: Tensor, axes: Sequence[AxisComm], of: str
    ) -> CheckHandle:
        """Start a MAX all-reduce of a small host tensor over every axis, one after another.

        Backends that trace operators do not need it: a graph is the same on all ranks.
        """
        raise NotImplementedError(tensor, axes, of)


class Backend(ABC):
    """Object that communicates along the axes of a mesh, over which modules can be sharded."""

    device: torch.device  # Device of the parameters.
    is_dry: bool = False  # Whether all tensors are on meta, without values: nothing is computed.
    # Whether operators are traced into a graph, which runs later; see `Region`.
    is_traced: bool = False
    # Whether one process traces the program of all ranks, and has all their pieces.
    is_spmd: bool = False
    is_host_synchronous: bool = True  # Whether the host is in step with the device.
    # Whether the device's memory is not the host's, so that shards may be offloaded.
    has_own_memory: bool = False
    # Whether a kernel costs more than memory. Then a layer's gradients are held until all have
    # come, and one kernel copies them.
    copies_gradients_together: bool = False
    # Multiplier that turns gradients of the global-mean loss into gradients of this rank's local-
    # mean loss.
    gradient_weight: float = 1.0
    batches_small_groups: bool = True  # Whether it is better that small groups travel together.

    @property
    def is_current(self) -> bool:
        """Whether this backend can communicate: its process groups have not been destroyed."""
        return True

    @abstractmethod
    def process_group(self, axis: int) -> Any:
        """Return the engine's handle of one mesh axis."""

    @abstractmethod
    def axis(self, axis: int) -> AxisComm:
        """Return the communicator of one mesh axis through this rank; always the same object."""

    def joint_axis(self, ranks: Sequence[int]) -> PeerAxis:
        """Return the communicator of all axes as one, whose ranks are given. Collective.

        Each call returns the same object.

        Raises:
            NotImplementedError: Operators are traced.
        """
        raise NotImplementedError(ranks)

    @abstractmethod
    def for_axes(self, axes: Sequence[int]) -> Backend:
        """Return the backend of the submesh made of `axes`."""

    def ranks_tensor(self, ranks: Sequence[int], shape: tuple[int, ...]) -> Tensor:
        """Return the ranks of a mesh as `DeviceMesh.mesh` of torch has them."""
        return torch.tensor(ranks, dtype=torch.int, device="cpu").view(shape)

    def receive_chunks(self, axis: AxisComm) -> int:
        """Return how many shard-sized pieces a reduce-scatter over `axis` needs room for."""
        return 0

    def takes_parts(self, axis: AxisComm, *, is_small: bool) -> bool:
        """Whether a reduction takes gradients from where they are, as `Reduction.parts`.

        Args:
            axis: Axis of the reduce-scatter; its process groups exist.
            is_small: Whether the reduction may travel together with others.
        """
        return False

    def zeros_on_host(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return zeros on the host, 1-D; called only where `has_own_memory`."""
        raise NotImplementedError(numel, dtype, pinned)

    @abstractmethod
    def split_axis(self, axis: int, size: int) -> AxisComm:
        """Return the communicator of `size` neighbours on one mesh axis. Collective over it."""

    def with_axes(self, axes: Sequence[AxisComm]) -> Backend:
        """Return the backend of a mesh of the same devices, with these communicators as axes.

        Raises:
            NotImplementedError: Operators are traced.
        """
        raise NotImplementedError(axes)

    def new_graph(self, axes: Sequence[AxisComm]) -> StreamGraph:
        """Return a graph that can capture steps which communicate over `axes`.

        Raises:
            StateError: The device has no graphs, or collectives of an axis cannot be captured.
        """
        msg = (
            f"a step on device {self.device.type!r} cannot be captured: shardkit.capture needs a "
            f"mesh of CUDA devices, whose work a graph can replay. Call the step itself."
        )
        raise StateError(msg)

    @abstractmethod
    def make_streams(
        self, axes: Sequence[AxisComm], share: CommStreams | None = None
    ) -> CommStreams:
        """Make the streams of one root, whose groups use `axes`. Collective over each of them.

        Args:
            axes: All axes in use.
            share: Streams of another root to use instead.
        """

"""What a backend gives the rest of the library; nothing above knows which one it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor


class AxisComm(Protocol):
    """One mesh axis through this rank: small and rare collectives, all blocking.

    `op` is one of ``"sum"``, ``"max"``, ``"min"``, ``"product"``.
    """

    size: int
    rank: int

    def all_gather(self, full: Tensor, own: Tensor) -> None:
        """Fill `full` (1-D) with every rank's `own`, in rank order; `own` may lie in `full`."""

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Reduce `tensor` in place."""

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy `tensor` from position `src` of the axis to all."""

    def exchange(self, item: Any) -> list[Any]:
        """Return every rank's picklable `item`, in rank order."""


class Handle(Protocol):
    """Work that has been started."""

    def wait(self) -> None:
        """Return when work issued from now on sees the result.

        On CPU that is when the work is done; on CUDA the compute stream waits, not the host.
        """


class CheckHandle(Handle, Protocol):
    """A comparison that has been started.

    Attributes:
        is_of_host: To wait for it the host waits for other hosts, never for the device.
    """

    is_of_host: bool

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""


class ReduceHandle(Protocol):
    """A reduction that has been started.

    Attributes:
        fence: After it the send buffers are free; None: after `wait_sent` only.
    """

    fence: Any

    def wait_sent(self) -> None:
        """Return when the send buffers are free, if that takes the host to wait."""

    def wait(self) -> list[Tensor]:
        """Return the results, one per reduction, for work issued from now on.

        On CPU they are there; on CUDA the compute stream waits, not the host.
        """


@dataclass(frozen=True, slots=True)
class Gather:
    """One bucket to gather.

    Attributes:
        full: 1-D, all ranks' ranges in compute dtype; written.
        own: This rank's range of `full`.
        shard: 1-D, this rank's range in storage dtype; cast into `own` first. May be on the host
            while `full` is on the device.
        comm: The user's own all-gather (`AllGather`), or None.
        is_on_host: `shard` is on the host, and the device has memory of its own.
    """

    full: Tensor
    own: Tensor
    shard: Tensor
    comm: AllGather | None = None
    is_on_host: bool = False


@dataclass(frozen=True, slots=True)
class Reduction:
    """One bucket to reduce.

    Attributes:
        send: 1-D, all ranks' ranges of this rank's gradients, in reduce dtype.
        receive: Room for `Backend.receive_chunks` shard-sized pieces, or None.
        out_numel: Elements of this rank's range.
        out_dtype: Dtype of the result.
        scale: Multiplies the sum.
        shard_axis: Reduce-scatter over it.
        replicate_axis: Then all-reduce over it; None: do not.
        carry: 1-D, `out_numel`, fp32 or wider, a partial sum over the shard axis of earlier
            backwards that is added before the all-reduce, in its dtype; may be written. None:
            nothing.
        is_to_host: The result is wanted on the host, and the device has memory of its own.
        is_pinned: There in page-locked memory.
        comm: The user's own reduce-scatter (`ReduceScatter`), or None.
        hook: Called with the reduced and scaled result, which it may change; or None.
        hook_stream: Where an accelerator runs the hook; None: after the reduction.
        bucket_id: Number of the bucket where it is traced, equal in every step.
        force_sum: The engine may only sum, and not divide.
    """

    send: Tensor
    receive: Tensor | None
    out_numel: int
    out_dtype: torch.dtype
    scale: float
    shard_axis: AxisComm
    replicate_axis: AxisComm | None
    carry: Tensor | None
    is_to_host: bool = False
    is_pinned: bool = False
    comm: ReduceScatter | None = None
    hook: Callable[[Tensor], object] | None = None
    hook_stream: Any = None
    bucket_id: int = 0
    force_sum: bool = False


@dataclass(slots=True)
class TracedGather:
    """One bucket to gather on a backend that traces (`Backend.is_traced`).

    Attributes:
        pieces: 1-D, storage dtype, one per parameter, as the bucket keeps them.
        dtype: Cast to it before they travel.
        tail_numel: Elements to put behind the pieces of every rank, if they travel as one.
        bucket_id: Number of the bucket, equal in every step.
        wholes: Result: 1-D, all ranks' parts of each piece, end to end; none shares memory with
            another.
    """

    pieces: list[Tensor]
    dtype: torch.dtype
    tail_numel: int
    bucket_id: int
    wholes: list[Tensor] | None = None


class Comm(Protocol):
    """Where a user's own collective has its buffers: as FSDP2's ``Comm``."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a buffer that is sent or received."""


class AllGather(Comm, Protocol):
    """A user's own all-gather: as FSDP2's ``AllGather``."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP2's signature
    ) -> Any:
        """Gather 1-D `input_tensor` of all ranks of a process group; return the work, or None."""


class ReduceScatter(Comm, Protocol):
    """A user's own reduce-scatter: as FSDP2's ``ReduceScatter``."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP2's signature
    ) -> Any:
        """Sum `input_tensor` over a process group, scatter it; return the work, or None."""


class CommStreams(Protocol):
    """The streams that all groups of one root share: one per kind of collective.

    Attributes:
        region: Where the ranks' forwards and backwards are traced; None: they are run.
    """

    region: Region | None

    def watch(self, progress: Any) -> None:
        """Take what can explain a hang (`hang_watch.Progress`); may be ignored."""

    def allocate_from(self, axes: Sequence[AxisComm]) -> None:
        """Take the memory of buffers from an engine that serves one of `axes` and offers any.

        Of none: ordinary memory, from now on.
        """

    def separate_reduce(self, axis: AxisComm, *, enable: bool) -> None:
        """Reduce over `axis` on a communicator of its own, or not. Collective."""

    def new_storage(self, nbytes: int) -> torch.UntypedStorage:
        """Return memory for a buffer."""

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Put other memory behind a buffer's storage, or none."""

    def after_optimizer(self, event: Any) -> None:
        """Let gathers issued from now on wait for a user's event as well."""

    def follow_compute(self) -> None:
        """Let gathers issued from now on see all that compute has written so far."""

    def fence(self) -> Any:
        """Return a mark of all compute issued so far; None where the host is in step with it."""

    def join(self) -> None:
        """Let the compute stream wait for all that was started, after an exception."""

    def settle_host_reads(self, *, compute: bool) -> None:
        """Return when the host may write offloaded shards: what was issued has read them.

        Args:
            compute: The compute stream reads some of them as well.
        """

    def start_gather(
        self, gathers: Sequence[Gather], axis: AxisComm, after: Sequence[Any]
    ) -> Handle:
        """Cast and all-gather buckets, not before the fences `after`.

        Cost: one all-gather per bucket.
        """

    def wait_fence(self, fence: Any) -> None:
        """Let the compute stream wait for a fence; None is nothing to wait for."""

    def start_reduce(self, reductions: Sequence[Reduction]) -> ReduceHandle:
        """Reduce-scatter buckets after all compute issued so far.

        Cost: one reduce-scatter per bucket, and one all-reduce with a replicate axis.
        """

    def start_all_reduce_max(self, tensor: Tensor, axes: Sequence[AxisComm]) -> CheckHandle:
        """MAX all-reduce of a small host tensor over every axis, one after another."""


class Region(Protocol):
    """What is traced for each rank.

    Where one process has all ranks' tensors (`is_spmd`), outside a tensor is whole; inside
    it is what one rank has of it. `enter` and `leave` of a batch, of something shared and of a
    mean are differentiable. Elsewhere a process is a rank, and nothing is entered or left.
    """

    is_spmd: bool
    num_ranks: int
    """As many parts is a batch split into when it enters."""
    device: torch.device
    drawing: Any
    """The last context of `draw_apart`; its `again()` repeats what is drawn from now on."""

    gathers_wait: bool
    """Gathers come after `progress` in the graph."""

    def after_progress(self, parts: list[Tensor]) -> list[Tensor]:
        """Return copies that are there only when `progress` is; the compiler cannot merge them."""

    def enter_batch(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of `tensor`, of all ranks' axes together."""

    def leave_batch(self, tensor: Tensor) -> Tensor:
        """Return all ranks' rows."""

    def enter_shared(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, equal on all ranks; its gradient is the sum of theirs."""

    def leave_shared(self, tensor: Tensor) -> Tensor:
        """Return what all ranks have alike. Not differentiable."""

    def leave_mean(self, tensor: Tensor) -> Tensor:
        """Return the mean over the ranks of a 0-dim floating-point tensor."""

    def agree(self, tensor: Tensor) -> Tensor:
        """Return the mean over the ranks, the maximum of integers, on every rank. In the region.

        Cost: one all-reduce.
        """

    def progress(self, tensor: Tensor | None) -> None:
        """Let gathers from now on come after `tensor` in the graph; None: after nothing."""

    def forget_collectives(self) -> None:
        """Do not order what comes after the collectives traced before.

        Those may have been run by now, because the host read a result; what comes would run them
        again, and be another graph each time.
        """

    def draw_apart(self) -> Any:
        """Return a context in which every rank draws random numbers of its own."""

    def finish_graph(self) -> None:
        """Run what has been traced."""


class Backend(Protocol):
    """One mesh's way to communicate.

    Attributes:
        device: Where parameters are.
        is_host_synchronous: The host is in step with the device.
        has_own_memory: The device's memory is not the host's: shards may be offloaded.
        copies_gradients_together: A kernel more costs more than memory: a layer's gradients are
            held until all have come, and then copied by one.
        is_traced: Operators are traced into a graph, which runs later; buckets are `TracedBucket`.
        is_spmd: One process traces the program of all ranks, and has all their pieces.
        gradient_weight: See `GroupGradients`: where one loss is computed of all ranks' outputs, the
            gradients on a rank are those of its part of the mean.
        batches_small_groups: Small groups had better travel together.
    """

    device: torch.device
    is_host_synchronous: bool
    has_own_memory: bool
    copies_gradients_together: bool
    is_traced: bool
    is_spmd: bool
    gradient_weight: float
    batches_small_groups: bool

    def receive_chunks(self, axis: AxisComm) -> int:
        """Return how many shard-sized pieces a reduce-scatter over `axis` needs room for."""

    def zeros_on_host(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return zeros on the host, 1-D, where `has_own_memory`."""

    def process_group(self, axis: int) -> Any:
        """Return the engine's handle of one mesh axis."""

    def axis(self, axis: int) -> AxisComm:
        """Return the communicator of one mesh axis through this rank; always the same object."""

    def for_axes(self, axes: Sequence[int]) -> Backend:
        """Return the backend of the submesh made of `axes`."""

    def split_axis(self, axis: int, size: int) -> AxisComm:
        """Return the communicator of `size` neighbours on one mesh axis. Collective over it."""

    def make_streams(
        self, axes: Sequence[AxisComm], share: CommStreams | None = None
    ) -> CommStreams:
        """Make the streams of one root, whose groups use `axes`. Collective over each of them.

        Args:
            axes: All axes in use.
            share: CommStreams of another root whose streams are to be used.
        """

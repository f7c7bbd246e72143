"""Cuts of tensors: what a `ShardedTensor` knows about the whole that its piece belongs to.

There are specs of flat pieces, and of padded pieces on backends that trace each rank's computation.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.nn.functional as F

from shardkit._errors import ShardedTensorError
from shardkit._layout import EvenLayout, FlatLayout
from shardkit._settings import SumAxis

if TYPE_CHECKING:
    import weakref
    from collections.abc import Sequence

    from torch import Tensor, nn

    from shardkit._mesh import DeviceMesh


class Axis(SumAxis, Protocol):
    """The mesh axis over which a tensor is cut, with its collectives (`backends.base.AxisComm`)."""

    def all_gather(self, full: Tensor, own: Tensor) -> None: ...
    def broadcast(self, tensor: Tensor, src: int) -> None: ...


_NO_ROWS = (
    "{} asked of FlatShard, which cuts no dim: a rank's shard is a range of the flattened tensor, "
    "not rows. Use full_tensor(), or redistribute(placements=[Replicate()]), on all ranks."
)


class _Placement:
    """What our placements have in common: they are also instances of a class of torch's placements.

    That class need not be imported. Methods answer like those of torch's ``Shard``.
    """

    _name_in_torch: ClassVar[str]

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that `isinstance` sees beside this one."""
        torch_classes = sys.modules.get("torch.distributed.tensor")
        return getattr(torch_classes, self._name_in_torch, None) or type(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the real class, without the cut, which belongs to this process."""
        return type(self), ()

    def is_replicate(self) -> bool:
        """Return whether all ranks of the mesh axis hold the same tensor."""
        return False

    def is_partial(self) -> bool:
        """Return False."""
        return False


@dataclass(frozen=True)
class Replicate(_Placement):
    """Placement: every rank of the mesh axis holds the same tensor.

    It is also an instance of torch's ``Replicate``, if that class is imported. Otherwise code that
    sums over all axes except those of torch's ``Replicate`` would count copies.
    """

    _name_in_torch = "Replicate"

    def __hash__(self) -> int:
        """Return the hash of torch's ``Replicate``, to which this object may be equal."""
        return hash(-1)

    def is_replicate(self) -> bool:
        """Return True, like torch's ``Replicate``."""
        return True

    def is_shard(self, dim: int | None = None) -> bool:
        """Return False."""
        del dim
        return False


@dataclass(frozen=True, repr=False)
class FlatShard(_Placement):
    """Placement: each rank of the mesh axis holds a contiguous range of the flat tensor, or none.

    It is not torch's ``Shard(0)``: a cut may fall inside a row. But it is an instance of torch's
    ``Placement``, if that class is imported.

    Attributes:
        spec: Cut of the tensor whose placements were read; None: the placement comes from no
            tensor. The equality of placements ignores it.
    """

    spec: ShardSpec | None = field(default=None, compare=False)
    _name_in_torch = "Placement"

    def __repr__(self) -> str:
        """Show the real class, without the cut."""
        return "FlatShard()"

    def is_shard(self, dim: int | None = None) -> bool:
        """Return True, since ranks hold different elements.

        Args:
            dim: A dim that torch's ``Shard`` might cut; None: any.

        Raises:
            ShardedTensorError: A dim is given.
        """
        if dim is not None:
            raise ShardedTensorError(_NO_ROWS.format(f"is_shard({dim}) is"))
        return True

    @property
    def dim(self) -> int:
        """Missing attribute: `hasattr` is False."""
        raise AttributeError(_NO_ROWS.format("dim is"))

    def __copy__(self) -> FlatShard:
        """Return itself, since it never changes."""
        return self

    def __deepcopy__(self, memo: object) -> FlatShard:
        """Return itself."""
        del memo
        return self


def part_sums_of(axis: Axis) -> Counter[tuple[Axis, ...]]:
    """Return the axes over which norms of parts are summed (`ShardSpec.around`), in their order.

    Each comes with the number of parameters. A rank without a gradient of any part takes part
    through its other gradients on the axis.
    """
    found: Counter[tuple[Axis, ...]] = axis.__dict__.setdefault("shardkit_part_sums", Counter())
    return found


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class ShardSpec:
    """Cut of one parameter, which the parameter, its gradient and its optimizer state share."""

    layout: FlatLayout  # Layout of the bucket.
    index: int  # Position of the parameter in it.
    _: KW_ONLY
    mesh: DeviceMesh  # Mesh of the parameter.
    axis: Axis  # The shard axis.
    name: str  # Name of the parameter, for errors; the root's first forward sets the full one.
    # Mesh that `mesh` is a part of, if its other ranks hold other parameters in the place of this
    # one, such as other experts; None: there are no such ranks.
    around: DeviceMesh | None = None
    # `ops.StateAllocator` that lays optimizer state of the bucket end to end; None: each tensor is
    # allocated separately.
    state_allocator: Any = None
    shard_device: torch.device | None = None  # Device of the pieces; None: the device of the mesh.
    # Split of the parameter over another mesh (`dtensor.TensorParallel`) before it is cut here:
    # then the layout, `start` and `stop` are those of this rank's part. None: no such split.
    tensor_parallel: Any = None
    subclass: Any = None  # `SubclassLayout` of the parameter's store, if its class gathers itself.
    axes: tuple[Axis, ...] = field(init=False)  # Axes over which ranks hold different elements.
    # Axes over which a norm of all parameters is summed: those of `axes`, and those along which
    # other ranks hold other parameters.
    total_axes: tuple[Axis, ...] = field(init=False)
    # Number of ranks over `total_axes` that hold the same elements.
    num_counted: int = field(init=False, default=1)
    # Whether those parameters are copies of this one.
    has_copies: bool = field(init=False, default=False)
    shape: tuple[int, ...] = field(init=False)  # Global shape.
    start: int = field(init=False)  # First owned element of the flattened tensor on this rank.
    # End of the owned elements; equal to `start` if this rank owns nothing.
    stop: int = field(init=False)
    # Range [start, stop) of this rank's piece in its shard.
    piece_range: tuple[int, int] = field(init=False)
    # Whether this rank offers its piece to checkpoints. If several ranks hold the same elements,
    # cut in different ways, one of them does.
    is_written_here: bool = field(init=False, default=True)
    # Whether a step ran with dummy collectives (`set_debug`), so that no value may be saved.
    is_worthless: bool = field(init=False, default=False)
    # Weak reference to the `ParamEntry` of its group: the parameter and its holders.
    entry: weakref.ref[Any] | None = field(init=False, default=None)
    # Weak reference to the parameter that modules hold in its place while unsharded.
    unsharded: weakref.ref[nn.Parameter] | None = field(init=False, default=None)
    # Bytes of the parameter's tensors (`packing.Packing`), if it has several: then these bytes are
    # cut. The store sets it.
    packing: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Find this rank's range."""
        outer = self.tensor_parallel
        if outer is not None:
            self.mesh = outer.join(self.mesh)
        self.axes = (self.axis,) if outer is None else (self.axis, *outer.axes)
        self.total_axes = self.axes
        around, self.around = self.around, None
        if around is not None:
            self.lie_within(around)
        self.shape = self.layout.shapes[self.index] if outer is None else outer.shape
        self.start, self.stop = self.layout.owned_range(self.index, self.axis.rank)
        self.piece_range = self.layout.shard_range(self.index, self.axis.rank)

    def lie_within(self, around: DeviceMesh, *, has_copies: bool = False) -> None:
        """Note that other ranks of `around` hold other parameters in the place of this one.

        A norm of all parameters is summed over `around`, except for axes of replicas that both
        meshes have. It counts the mean of copies, and files have the first copy. A later call with
        a mesh around that one replaces an earlier call.
        """
        if self.around is not None:  # So that ranks do not sum over axes without parts.
            for axis in self.total_axes:
                sums = part_sums_of(axis)
                sums -= Counter([self.total_axes])  # It drops what nobody counts any more.
        self.around, self.has_copies, self.num_counted = around, has_copies, 1
        axes = [around.backend.axis(index) for index in range(around.ndim)]
        if self.mesh.ndim > 1:
            replicas = self.mesh.backend.axis(0)
            shared = [axis for axis in axes if axis is replicas]
            axes = [axis for axis in axes if axis is not replicas]
            self.num_counted = 1 if shared else replicas.size
        self.total_axes = tuple(axis for axis in axes if axis.size > 1)
        if has_copies:
            self.num_counted = math.prod(a.size for a in self.total_axes) // self.axis.size
            self.is_written_here &= around.ranks[0] in self.mesh.ranks
        for axis in self.total_axes:
            part_sums_of(axis)[self.total_axes] += 1

    is_traced = False  # Whether operators on pieces are traced; then padding may follow the pieces.

    @property
    def piece_numel(self) -> int:
        """Elements of this rank's piece."""
        return self.stop - self.start

    def without_padding(self, piece: Tensor, neutral: Any) -> Tensor:
        """Return a piece for a reduction in which elements of value `neutral` have no effect."""
        del neutral
        return piece

    def gather(self, piece: Tensor) -> Tensor:
        """Return the whole tensor of which this rank has `piece`. Collective."""
        layout, index, axis = self.layout, self.index, self.axis
        owners = layout.owners(index)
        full = piece.new_empty(layout.numels[index])
        if len(owners) * 2 < axis.size:
            for owner in owners:
                start, stop = layout.owned_range(index, owner)
                if owner == axis.rank:
                    full[start:stop] = piece
                axis.broadcast(full[start:stop], src=owner)
        elif len(owners) > 0:
            ranges = [layout.owned_range(index, rank) for rank in range(axis.size)]
            longest = max(stop - start for start, stop in ranges)
            pieces = piece.new_zeros(axis.size, longest)
            pieces[axis.rank, : piece.numel()] = piece
            axis.all_gather(pieces.view(-1), pieces[axis.rank])
            for rank, (start, stop) in enumerate(ranges):
                full[start:stop] = pieces[rank, : stop - start]
        part = full.view(layout.shapes[index])
        return part if self.tensor_parallel is None else self.tensor_parallel.to_whole(part)

    @property
    def data_parallel_axes(self) -> tuple[Axis, ...]:
        """The axes along which ranks have different data, and over which gradients are averaged."""
        inner = () if self.tensor_parallel is None else self.tensor_parallel.placements
        backend = self.mesh.backend
        return tuple(backend.axis(index) for index in range(self.mesh.ndim - len(inner)))

    def annotate_sharding(self, piece: Tensor) -> None:
        """Spread a piece over the devices of this process; here there is only one."""

    def check_saved(self) -> None:
        """Raise if this rank's piece cannot be written to a file, or read from one.

        Raises:
            ShardedTensorError: Dummy collectives were on, or other ranks hold different parameters
                of this name.
        """
        if self.around is not None and not self.has_copies:
            msg = (
                f"sharded {self.name!r} is a plain parameter on ranks "
                f"{self.mesh.describe_ranks()} of the mesh of ranks "
                f"{self.around.describe_ranks()}: the other ranks hold others in its place, which "
                f"a file would lose. Make it a DTensor on the axis along which ranks hold "
                f"different parts, before fully_shard: "
                f"nn.Parameter(distribute_tensor(whole, mesh['ep'], [Shard(0)]))."
            )
            raise ShardedTensorError(msg)
        if self.is_worthless:
            msg = (
                f"sharded {self.name!r} has run steps with dummy collectives (set_debug): its "
                f"values mean nothing, and are not saved. Build the model anew without them, and "
                f"load a checkpoint from before."
            )
            raise ShardedTensorError(msg)

    def __deepcopy__(self, memo: object) -> ShardSpec:
        """Return itself, since copies of a tensor have the same cut on the same mesh."""
        del memo
        return self

    @property
    def placements(self) -> tuple[Any, ...]:
        """One placement per mesh axis; of the axes of `mesh` the last one is sharded.

        The placements of a DTensor follow, as torch's objects.
        """
        inner = () if self.tensor_parallel is None else self.tensor_parallel.placements
        replicated = self.mesh.ndim - len(inner) - 1
        return (*(Replicate() for _ in range(replicated)), FlatShard(self), *inner)

    @property
    def replicas(self) -> tuple[Replicate, ...]:
        """The placements of a tensor that is whole on each rank."""
        return tuple(Replicate() for _ in range(self.mesh.ndim))

    @property
    def device(self) -> torch.device:
        """Device of pieces: the mesh's device, or the host if they are offloaded."""
        return self.shard_device or self.mesh.backend.device

    def same_cut(self, other: ShardSpec) -> bool:
        """Whether pieces of both specs match on every rank."""
        return self is other or (
            self.shape == other.shape
            and (self.axis is other.axis or self.mesh == other.mesh)
            and self.tensor_parallel == other.tensor_parallel
            and self.layout.cut(self.index) == other.layout.cut(other.index)
        )

    def slice_full(self, full: Tensor) -> Tensor:
        """Return this rank's piece of a tensor of the global shape: 1-D, a view if possible.

        For a packed parameter the tensor may also be one of its class.
        """
        if self.packing is not None and isinstance(full, self.packing.cls):
            full = self.packing.pack(full)
        if self.tensor_parallel is not None:
            full = self.tensor_parallel.to_part(full)
        start, stop = self.start, self.stop
        if start == stop:
            return full.new_empty(0)
        if full.is_contiguous() or full.ndim == 0:
            return full.reshape(-1)[start:stop]
        return self.piece_in(full[self.rows])  # Only rows of the piece are copied.

    @property
    def rows(self) -> slice:
        """Rows that hold the piece, at least one, of a tensor with elements that is cut by rows."""
        num_rows, *behind = self.layout.shapes[self.index]
        row_numel = math.prod(behind)
        first = min(self.start // row_numel, num_rows - 1)
        return slice(first, max(-(-self.stop // row_numel), first + 1))

    def piece_in(self, rows: Tensor) -> Tensor:
        """Return this rank's piece of a tensor's `rows`: 1-D, a view if possible."""
        before = self.rows.start * math.prod(rows.shape[1:])
        return rows.reshape(-1)[self.start - before : self.stop - before]

    def local_indices(self, places: Tensor) -> Tensor:
        """Return the positions in this rank's piece of elements of the flattened whole.

        Positions of elements outside of the piece are below 0 or beyond its end.
        """
        if self.tensor_parallel is not None:
            places = self.tensor_parallel.part_indices(places)
        return places - self.start


# --- rows, where operators are traced -------------------------------------------------------------


class WholeSpec(ShardSpec):
    """Cut in a process that holds the pieces of all ranks, end to end, followed by padding.

    For operators this process is the only rank, and owns everything.
    """

    __slots__ = ("_padded_numel",)
    is_traced = True

    def __init__(self, shape: Sequence[int], piece_numel: int, **rest: Any) -> None:
        shape, numel = tuple(shape), math.prod(shape)
        super().__init__(FlatLayout.of_one(shape, (0, numel, numel, 1)), 0, **rest)
        self._padded_numel = piece_numel

    @property
    def piece_numel(self) -> int:
        """Elements of the piece, padding included."""
        return self._padded_numel

    def without_padding(self, piece: Tensor, neutral: Any) -> Tensor:
        """Return a piece without its padding."""
        del neutral
        rest = piece.numel() - self.stop
        # Not a slice: XLA's functionalization refuses slices inside a dispatch.
        return piece.split([self.stop, rest])[0] if rest else piece

    def slice_full(self, full: Tensor) -> Tensor:
        """Return the piece of a tensor of the global shape: 1-D, padded with zeros."""
        return padded(full.reshape(-1), self.piece_numel)

    @property
    def data_parallel_axes(self) -> tuple[Axis, ...]:
        """No axes: what this process computes is computed once."""
        return ()

    def gather(self, piece: Tensor) -> Tensor:
        """Return the whole tensor, which is here."""
        return self.without_padding(piece, 0).reshape(self.shape).clone()

    def annotate_sharding(self, piece: Tensor) -> None:
        """Spread a piece over the devices after it was written as a whole."""
        if piece.device.type == self.mesh.device_type:  # Not a copy on the host.
            self.mesh.backend.region.spread(piece)


class PaddedSpec(ShardSpec):
    """Cut on several ranks that trace; each has its own piece, and all pieces have one length.

    Ranks that communicate must trace the same graph, so values of a single rank enter as data.
    """

    __slots__ = ()
    is_traced = True
    layout: EvenLayout  # type: ignore[assignment]
    axis: Any  # A `ReplicaAxis`, whose `rank_on_device` is this rank's number as data.

    def __init__(self, layout: EvenLayout, index: int, **rest: Any) -> None:
        super().__init__(layout, index, **rest)  # type: ignore[arg-type]
        self.piece_range = layout.columns(index)

    @property
    def piece_numel(self) -> int:
        """Elements of the piece, padding included."""
        return self.layout.sizes[self.index]

    def check_saved(self) -> None:
        """Raise if there are several ranks, which have no process group to agree on files.

        Raises:
            ShardedTensorError: There are several ranks.
        """
        ShardSpec.check_saved(self)
        if self.mesh.size() > 1:
            msg = (
                f"sharded {self.name!r} is a shard of one of {self.mesh.size()} replicas "
                f"(torch_xla.launch), which cannot be pickled or written to a checkpoint. Call "
                f"full_tensor() on all replicas and save that on one, or train in SPMD mode "
                f"(without torch_xla.launch), where shardkit.checkpoint.save works."
            )
            raise ShardedTensorError(msg)

    def without_padding(self, piece: Tensor, neutral: Any) -> Tensor:
        """Return a piece with `neutral` in its padding, by the same graph on each rank."""
        numel, padded_numel = self.layout.numels[self.index], self._padded_numel
        if numel == padded_numel:
            return piece
        places = torch.arange(padded_numel, device=piece.device)
        is_padding = self._own_row(places) >= numel
        return piece.masked_fill(is_padding, neutral)

    def slice_full(self, full: Tensor) -> Tensor:
        """Return this rank's piece of a tensor of the global shape: 1-D, padded with zeros."""
        return self._own_row(padded(full.reshape(-1), self._padded_numel))

    def gather(self, piece: Tensor) -> Tensor:
        """Return the whole tensor. Cost: one all-gather."""
        whole = piece.new_empty(self._padded_numel)
        self.axis.all_gather(whole, piece)
        return whole[: self.layout.numels[self.index]].reshape(self.shape)

    @property
    def _padded_numel(self) -> int:
        return self.layout.padded_part_numel(self.index)

    def _own_row(self, flat: Tensor) -> Tensor:
        rows, rank = flat.view(self.axis.size, -1), self.axis.rank_on_device
        if flat.device != rank.device:
            return rows[self.axis.rank]  # Tensors on the host have no graph.
        return rows.index_select(0, rank).view(-1)


def traced_spec(layout: EvenLayout, index: int, mesh: DeviceMesh, name: str) -> ShardSpec:
    """Return the cut of a parameter on a mesh whose operators are traced."""
    if not mesh.backend.is_spmd:
        axis = mesh.backend.axis(mesh.ndim - 1)
        return PaddedSpec(layout, index, mesh=mesh, axis=axis, name=name)
    shape, numel = layout.shapes[index], layout.padded_part_numel(index)
    return WholeSpec(shape, numel, mesh=mesh, axis=mesh.backend.process_axis, name=name)


def padded(flat: Tensor, numel: int) -> Tensor:
    """Return 1-D `flat` followed by zeros."""
    return flat if flat.numel() == numel else F.pad(flat, (0, numel - flat.numel()))

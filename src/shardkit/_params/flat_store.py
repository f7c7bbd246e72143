"""The store of plain parameters, and of DTensors: one flat shard, one flat unsharded buffer.

[Note: tensors of a flat store]
- shard: 1-D, ``layout.shard_numel``, storage dtype. This rank's range; the optimizer updates it
  through the sharded parameters, whose pieces are views of it. It lives as long as the store.
- unsharded buffer: 1-D, ``layout.padded_numel``, compute dtype. The whole bucket. Its storage
  object lives as long as the store; the memory behind it comes and goes (`memory`).
- unsharded parameter: global shape, compute dtype, a view into the unsharded buffer with its own
  version counter (made by ``set_``: gloo's worker thread raises the buffer's counter at any time,
  and backward would fail). It is made once. If the user's parameter was a DTensor, it is a DTensor
  over that view.
Without casts and other ranks the unsharded buffer IS the shard.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._compat import torch_tensors
from shardkit._layout import FlatLayout
from shardkit._params.memory import (
    NAME_ATTRIBUTE,
    Buffer,
    SlotPool,
    allow_leaf,
    class_without_memory,
    refuse_leaf,
)
from shardkit._settings import (
    KEEPS_WIDE_GRADIENTS,
    AllGather,
    CPUOffloadPolicy,
    GradientPiece,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from shardkit._tensor.ops import StateAllocator
from shardkit._tensor.sharded import ShardedTensor, user_attributes
from shardkit._tensor.spec import ShardSpec
from shardkit._tensor.written_values import note_raised
from shardkit.backends.base import AxisComm, CommStreams, Gather

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardkit._mesh import DeviceMesh
    from shardkit._params.sites import ParamEntry
    from shardkit.backends.device import Event


# --- places in a bucket ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Devices, dtypes and meshes of the parameters of a bucket."""

    mesh: DeviceMesh  # Mesh over whose last axis they are sharded.
    # Mesh that `mesh` is a part of, if its other ranks hold other parameters in the place of these;
    # None: there are no such ranks.
    around: DeviceMesh | None
    policy: MixedPrecisionPolicy  # Dtypes, as the user chose them.
    offload: OffloadPolicy  # Place of the shard, as the user chose it.
    axis: AxisComm  # Communication along the shard axis.
    # Communication along the axis of all-reduces; None: there is none.
    replicate_axis: AxisComm | None
    orig_dtype: torch.dtype  # Dtype of the shard.
    param_dtype: torch.dtype  # Dtype of the unsharded parameters.
    reduce_dtype: torch.dtype  # Dtype of gradients on the wire.
    grad_dtype: torch.dtype  # Dtype of sharded gradients.
    device: torch.device  # Device of the unsharded parameters.
    shard_device: torch.device  # Device of the shard.
    # Device where the shard belongs; `shard_device` is meta until it has values.
    home_device: torch.device
    is_offloaded: bool  # Whether the shard is on the host, while the device has memory of its own.
    is_pinned: bool  # Whether the shard is in page-locked memory.

    @property
    def axes(self) -> tuple[AxisComm, ...]:
        """The axes that gradients are reduced over: shard, replicate."""
        replicate = self.replicate_axis
        return (self.axis,) if replicate is None else (self.axis, replicate)

    @property
    def num_ranks(self) -> int:
        """Number of ranks whose gradients are averaged."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def is_differentiable(self) -> bool:
        """Whether the unsharded parameters can have gradients."""
        return self.param_dtype.is_floating_point or self.param_dtype.is_complex

    @property
    def keeps_wide_gradients(self) -> bool:
        """Whether autograd leaves gradients in the dtype in which it computes them."""
        wide, narrow = self.reduce_dtype, self.param_dtype
        return KEEPS_WIDE_GRADIENTS and wide.is_floating_point and wide.itemsize > narrow.itemsize

    @property
    def aliases_shard(self) -> bool:
        """Whether an unsharded buffer may be the shard: nothing to gather, nothing to cast."""
        is_same_dtype = self.param_dtype == self.orig_dtype
        return self.axis.size == 1 and is_same_dtype and not self.is_offloaded

    def materialized(self) -> BucketPlan:
        """Return the plan that applies once parameters on the meta device have values."""
        return BucketPlan.of(
            self.mesh,
            self.policy,
            self.offload,
            dtype=self.orig_dtype,
            grad_dtype=self.grad_dtype,
            around=self.around,
        )

    @classmethod
    def of(  # noqa: PLR0913 - each is a choice of its own
        cls,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        *,
        dtype: torch.dtype,
        grad_dtype: torch.dtype | None,
        around: DeviceMesh | None,
        is_meta: bool = False,
    ) -> BucketPlan:
        """Return the plan of a bucket stored in `dtype`, whose parameters have values or not."""
        backend = mesh.backend
        param_dtype, reduce_dtype, grad_dtype = policy.dtypes_for(dtype, grad_dtype)
        wants_host = isinstance(offload, CPUOffloadPolicy)
        home = torch.device("cpu") if wants_host and not backend.is_dry else backend.device
        is_meta = is_meta and not backend.is_dry
        is_offloaded = wants_host and not is_meta and backend.has_own_memory
        meta = torch.device("meta")
        return cls(
            mesh=mesh,
            around=around,
            policy=policy,
            offload=offload,
            axis=backend.axis(mesh.ndim - 1),
            replicate_axis=backend.axis(0) if mesh.ndim > 1 else None,
            orig_dtype=dtype,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            grad_dtype=grad_dtype,
            device=meta if is_meta else backend.device,
            shard_device=meta if is_meta else home,
            home_device=home,
            is_offloaded=is_offloaded,
            is_pinned=is_offloaded and bool(getattr(offload, "pin_memory", False)),
        )


# --- send buffers ---------------------------------------------------------------------------------


class SendBuffer:
    """Send and receive memory of one bucket, with views made once."""

    def __init__(
        self, layout: FlatLayout, plan: BucketPlan, receive_numel: int, of: ShardSpec
    ) -> None:
        dtype, device = plan.reduce_dtype, plan.device
        self._send = Buffer(layout.padded_numel * dtype.itemsize, device, "send", of)
        # Buffer to send, 1-D, ``layout.padded_numel``.
        self.flat = torch.empty(0, dtype=dtype, device=device)
        self.flat.set_(self._send.storage, 0, (layout.padded_numel,), (1,))
        parts = zip(layout.offsets, layout.numels, layout.shapes, strict=True)
        # Views into `flat`, one for each parameter.
        self.slots = [self.flat[at : at + numel].view(shape) for at, numel, shape in parts]
        gaps = gaps_of(layout) if plan.mesh.backend.copies_gradients_together else []
        self._gaps = [self.flat[start:stop] for start, stop in gaps]
        self._zeros: list[Tensor] = []
        if gaps:
            longest = max(stop - start for start, stop in gaps)
            zeros = torch.zeros(longest, dtype=plan.param_dtype, device=device)
            self._zeros = [zeros[: stop - start] for start, stop in gaps]
        self._has_open_gaps = True
        self._send.close()
        self._receive: Buffer | None = None
        if receive_numel:
            self._receive = Buffer(receive_numel * dtype.itemsize, device, "receive", of)
            self._received = torch.empty(0, dtype=dtype, device=device)
            self._received.set_(self._receive.storage, 0, (receive_numel,), (1,))
            self._receive.close()
        self.written: set[int] = set()  # Parameters whose slot holds a gradient.

    @property
    def nbytes(self) -> int:
        """Bytes that exist now."""
        buffers = (self._send, self._receive)
        return sum(b.nbytes for b in buffers if b is not None and b.has_memory)

    def write(self, index: int, grad: Tensor, streams: CommStreams, pool: SlotPool) -> None:
        """Copy a gradient into its slot, or add it to what is there."""
        if self._send.slot is None:  # Checked here, too, to save a call for each gradient.
            self.open(streams, pool)
        slot = self.slots[index]
        if index in self.written:
            slot.add_(grad)
        else:
            self.written.add(index)
            slot.copy_(grad)

    def write_all(self, grads: Mapping[int, Tensor], streams: CommStreams, pool: SlotPool) -> None:
        """Write several gradients, by few kernels, and zeros between the slots."""
        self.open(streams, pool)
        again = [index for index in grads if index in self.written]
        if again:
            torch_tensors.foreach_add([self.slots[i] for i in again], [grads[i] for i in again])
        new = [index for index in grads if index not in self.written]
        targets, sources = [self.slots[i] for i in new], [grads[i] for i in new]
        if self._has_open_gaps:
            self._has_open_gaps = False
            targets += self._gaps
            sources += self._zeros
        if targets:
            torch_tensors.foreach_copy(targets, sources)
        self.written.update(new)

    def open(self, streams: CommStreams, pool: SlotPool) -> None:
        """Get memory for gradients, if there is none."""
        if not self._send.has_memory:
            streams.wait_fence(self._send.acquire(pool))  # order: gradients wait for their slot
            self._has_open_gaps = True

    def complete(self, streams: CommStreams, pool: SlotPool) -> None:
        """Make the buffer ready to send, with zeros where nothing was written."""
        self.open(streams, pool)
        if not self.written:
            self.flat.zero_()
        elif len(self.written) < len(self.slots):
            for index, slot in enumerate(self.slots):
                if index not in self.written:
                    slot.zero_()
        self.written.clear()

    def room(self, streams: CommStreams, pool: SlotPool) -> Tensor:
        """Return 1-D memory for data from other ranks, until `close_receive`."""
        assert self._receive is not None
        streams.wait_fence(self._receive.acquire(pool))
        return self._received

    def close_send(self, pool: SlotPool, fence: Event | None, *, by_compute: bool = False) -> None:
        """Give the send buffer's memory back; started collectives are done at `fence`."""
        if self._send.has_memory:
            self._send.release(pool, fence, by_compute=by_compute)
        self.written.clear()

    def close_receive(self, pool: SlotPool) -> None:
        """Give the receive buffer's memory back; the host waited for it."""
        if self._receive is not None and self._receive.has_memory:
            self._receive.release(pool, None, by_compute=False)


def gaps_of(layout: FlatLayout) -> list[tuple[int, int]]:
    """Return the ranges of the flat space that no parameter takes."""
    gaps, at = [], 0
    for start, numel in sorted(zip(layout.offsets, layout.numels, strict=True)):
        gaps.append((at, start))
        at = max(at, start + numel)
    gaps.append((at, layout.padded_numel))
    return [(start, stop) for start, stop in gaps if start < stop]


# --- stores ---------------------------------------------------------------------------------------
#
# `Store` defines what every kind can do. The kinds are `FlatStore` for plain parameters and
# DTensors, `PackedStore` for frozen parameters over several tensors, `SubclassStore` for
# parameters that gather themselves, and `TracedStore` for operators traced into a graph.


_Cut = tuple[int, slice | None, Tensor | None]
"""A parameter and the part that a rank gets of it (None: all); or zeros that it gets instead."""


class Store(ABC):
    """The shard of a bucket, and its unsharded parameters, whose memory comes and goes."""

    layout: Any  # Layout of the bucket.
    specs: list[ShardSpec]  # Cut of each parameter.
    unsharded: list[nn.Parameter]  # Parameters that modules hold while the memory is there.
    bucket_id = 0  # Number of the bucket where collectives are traced.
    # Whether the unsharded memory is the shard itself, so that nothing is gathered.
    aliases_shard = False
    # Whether reduced gradients are views of one tensor, as pieces are views of the shard.
    keeps_flats = True
    converts_gradients = False  # Whether gradients are passed through `part_of_gradient`.
    keeps_memory = False  # Whether unsharded memory stays where it is when it is given back.
    keeps_writes = False  # Whether writes of a forward to an unsharded parameter can be kept.
    why_lost = ""  # Reason why such writes are lost, as words inside a sentence.

    def __init__(self, plan: BucketPlan, entries: Sequence[ParamEntry]) -> None:
        self.plan = plan  # Plan of the bucket.
        # Parameters of the bucket: ordinary ones, or sharded ones that were cut in the same way.
        self.entries = entries
        self._gathered_version = -1
        self._classes: list[type] = []
        self._views: list[tuple[weakref.ref[Tensor], str]] = []
        self._cuts: list[list[_Cut]] = []

    # --- the shard ---

    @abstractmethod
    def sharded(self, index: int) -> ShardedTensor:
        """Return parameter `index` as a tensor over its piece of the shard."""

    @abstractmethod
    def sharded_grad(self, index: int, grad: Tensor) -> ShardedTensor:
        """Return this rank's piece of a whole gradient of parameter `index`, copied."""

    @abstractmethod
    def has_piece_of(self, index: int) -> bool:
        """Whether parameter `index` still has its piece here; not after ``.to(dtype)``."""

    def has_all_pieces(self) -> bool:
        """Whether every parameter still has its piece here."""
        return all(map(self.has_piece_of, range(len(self.entries))))

    @abstractmethod
    def piece(self, reduced: Tensor, index: int) -> Tensor:
        """Return the part of one parameter in a reduced gradient, which is as long as a shard."""

    @property
    @abstractmethod
    def shard_version(self) -> int:
        """Version of the shard, which every write to the shard raises."""

    @property
    @abstractmethod
    def shard_nbytes(self) -> int:
        """Bytes of this rank's shard."""

    # --- the unsharded parameters ---

    @property
    @abstractmethod
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded parameters while they exist; 0 if they are the shard."""

    @property
    @abstractmethod
    def has_memory(self) -> bool:
        """Whether there is memory for unsharded parameters, gathered or soon to be gathered."""

    @property
    def is_stale(self) -> bool:
        """Whether the shard changed since it was gathered."""
        return self.has_memory and self._gathered_version != self.shard_version

    @abstractmethod
    def acquire(self, pool: SlotPool) -> Event | None:
        """Get memory for the unsharded parameters; return the fence to wait for before a write."""

    @abstractmethod
    def release(self, pool: SlotPool, fence: Event | None) -> None:
        """Give the memory back; its readers are done at `fence`."""

    def settle_memory(self) -> None:  # noqa: B027 - for stores that need it
        """Note that compute has waited for all uses of unsharded memory."""

    @abstractmethod
    def gather_jobs(self, comm: AllGather | None) -> list[Any]:
        """Return the gathers for the backend."""

    def finish_gather(self) -> None:  # noqa: B027 - for stores that need it
        """Finish a gather when all data has come."""

    def _new_unsharded(self, index: int, data: Tensor) -> nn.Parameter:
        """Return the parameter that is shown in place of a sharded one."""
        entry = self.entries[index]
        param = nn.Parameter(data, requires_grad=entry.param.requires_grad)
        if self.plan.keeps_wide_gradients:
            param.grad_dtype = None
        own = param.__dict__
        own.update({k: v for k, v in user_attributes(entry.param).items() if k not in own})
        own[NAME_ATTRIBUTE] = entry.name
        return param

    def attributes_of(self, index: int) -> dict[str, Any]:
        """Return the attributes that users have set on parameter `index`, for the sharded one."""
        return user_attributes(self.entries[index].param)

    def rename(self, index: int, name: str) -> None:
        """Give a parameter its full name."""
        self.specs[index].name = name
        self.unsharded[index].__dict__[NAME_ATTRIBUTE] = name

    def drop_originals(self) -> None:  # noqa: B027 - for stores that need it
        """Drop further references to the whole parameters, which are not needed any more."""

    def _note_classes(self) -> None:
        """Note the classes of the unsharded parameters."""
        self._classes = [type(param) for param in self.unsharded]

    def _allow_use(self) -> None:
        """Let the unsharded parameters be used."""
        for param, cls in zip(self.unsharded, self._classes, strict=True):
            param.__class__ = cls
        for view, _ in self._views:
            allow_leaf(view())

    def _refuse_use(self) -> None:
        """Let any use of the unsharded parameters raise."""
        for param, cls in zip(self.unsharded, self._classes, strict=True):
            param.__class__ = class_without_memory(cls)
        for view, name in self._views:
            refuse_leaf(view(), name)

    def note_view(self, view: Tensor) -> None:
        """Let a view of an unsharded parameter, which its module returns, be refused as that is."""
        base: Any = view._base  # noqa: SLF001 - documented for this use
        if type(view) is Tensor and any(base is param for param in self.unsharded):
            alive = [known for known in self._views if known[0]() is not None]
            self._views = [*alive, (weakref.ref(view), base.__dict__[NAME_ATTRIBUTE])]

    # --- what a forward writes to its own parameters ---

    def written_to(self, index: int) -> Sequence[Tensor]:
        """Return the tensors whose version counters show writes to an unsharded parameter."""
        return (self.unsharded[index],)

    def has_moved(self) -> bool:
        """Whether a parameter was given other memory, by ``param.data = ...``."""
        return False

    def take_back(self) -> Sequence[int]:
        """Lay parameters that have moved over the unsharded memory again, with their values."""
        return ()

    def unsharded_values(self, index: int) -> Tensor:
        """Return the plain tensor, in compute dtype, under an unsharded parameter."""
        raise NotImplementedError(index)

    def keep_written(self, index: int) -> None:
        """Copy what was written to an unsharded parameter into the shard."""
        raise NotImplementedError(index)

    # --- a part that stays between forward and backward ---

    @property
    def kept_part(self) -> Any:
        """The part that `keep_part` has kept; None: nothing."""
        return None

    def keep_part(self, axis: AxisComm, fence: Callable[[], Event | None]) -> None:
        """Keep this rank's part on a smaller axis, over which backward gathers, or keep nothing."""
        del axis, fence

    def drop_part(self) -> None:  # noqa: B027
        """Drop the kept part."""

    # --- gradients ---

    @abstractmethod
    def new_gradient_buffer(self, receive_chunks: int) -> Any:
        """Return a buffer that collects and sends gradients; it receives so many shards."""

    def gradient_pieces(self) -> list[GradientPiece]:
        """Return the pieces in this rank's range of the bucket, and where they lie."""
        rank, layout = self.plan.axis.rank, self.layout
        pieces = []
        for i, entry in enumerate(self.entries):
            start, stop = layout.owned_range(i, rank)
            offset, _ = layout.shard_range(i, rank)
            pieces.append(GradientPiece(entry.name, layout.shapes[i], start, stop, offset))
        return pieces

    def parts_by_rank(self, grads: Mapping[int, Tensor]) -> list[list[Tensor]]:
        """Return the parts, end to end, that each rank gets of the bucket's gradients."""
        if not self._cuts:
            self._cuts = self._cut_gradients()
        return [
            [
                fill if fill is not None else grads[i] if cut is None else grads[i].reshape(-1)[cut]
                for i, cut, fill in row
            ]
            for row in self._cuts
        ]

    def _cut_gradients(self) -> list[list[_Cut]]:
        layout, dtype = self.layout, self.plan.param_dtype
        zeros = torch.zeros(layout.padding_numel, dtype=dtype, device=self.plan.device)
        rows = []
        for rank in range(layout.world_size):
            row: list[_Cut] = []
            at = 0
            for i, numel in enumerate(layout.numels):
                start, stop = layout.owned_range(i, rank)
                if start == stop:
                    continue
                begin, end = layout.shard_range(i, rank)
                if at < begin:
                    row.append((i, None, zeros[: begin - at]))
                row.append((i, None if stop - start == numel else slice(start, stop), None))
                at = end
            if at < layout.shard_numel:
                row.append((0, None, zeros[: layout.shard_numel - at]))
            rows.append(row)
        return rows

    def part_of_gradient(self, index: int, grad: Tensor) -> Tensor:
        """Return the plain tensor of a gradient, with `converts_gradients`; may be collective."""
        del index
        return grad


# --- the flat store -------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class KeptPart:
    """A part of the unsharded buffer that stays from forward to backward."""

    values: Tensor  # Range `axis.rank` of `axis.size` equal ones, 1-D, compute dtype.
    axis: AxisComm  # Axis over which backward gathers.
    version: int  # Version of the shard from which it was gathered.
    fence: Event | None  # Fence after which the values are complete.


class FlatStore(Store):
    """See the module's docstring."""

    subclass: Any = None
    may_alias_shard = True
    keeps_writes = True
    _movable: Sequence[tuple[int, int]] = ()

    def __init__(
        self, plan: BucketPlan, entries: Sequence[ParamEntry], layout: FlatLayout | None = None
    ) -> None:
        super().__init__(plan, entries)
        self._tensor_parallel = [_tensor_parallel_of(entry, plan.mesh) for entry in entries]
        has_parts = any(tp is not None for tp in self._tensor_parallel)
        self.converts_gradients = has_parts or self.subclass is not None
        self.layout = layout or self.plan_layout(plan, entries)
        self.aliases_shard = self.may_alias_shard and plan.aliases_shard
        self._kept_part: KeptPart | None = None
        self._buffer: Buffer | None = None
        allocator = StateAllocator()
        self.specs = [self._new_spec(i, allocator) for i in range(len(entries))]
        self.shard = self._cut_shard()
        self._make_unsharded()
        self._note_classes()
        if not self.aliases_shard:
            self._free_first_memory()
            self._refuse_use()

    # --- construction ---

    @classmethod
    def plan_layout(cls, plan: BucketPlan, entries: Sequence[ParamEntry]) -> FlatLayout:
        """Lay out the parameters, or this rank's parts of them."""
        spread = [_tensor_parallel_of(entry, plan.mesh) for entry in entries]
        shapes = [
            tuple(entry.param.shape) if tp is None else tp.local_shape
            for entry, tp in zip(entries, spread, strict=True)
        ]
        itemsize = min(d.itemsize for d in (plan.orig_dtype, plan.param_dtype, plan.reduce_dtype))
        return FlatLayout.plan(shapes, world_size=plan.axis.size, itemsize=itemsize)

    @staticmethod
    def shard_nbytes_of(plan: BucketPlan, layout: FlatLayout) -> int:
        """Return the bytes of a rank's shard."""
        return layout.shard_numel * plan.orig_dtype.itemsize

    def _new_spec(self, index: int, allocator: StateAllocator) -> ShardSpec:
        plan = self.plan
        spec = ShardSpec(
            self.layout,
            index,
            mesh=plan.mesh,
            around=plan.around if self._tensor_parallel[index] is None else None,
            axis=plan.axis,
            name=self.entries[index].name,
            state_allocator=allocator,
            shard_device=plan.home_device,
            tensor_parallel=self._tensor_parallel[index],
            subclass=self.subclass,
        )
        spec.is_written_here = self._is_written_here(index)
        return spec

    def _is_written_here(self, index: int) -> bool:
        """Whether this rank writes its piece of a parameter to checkpoints.

        Ranks of tensor parallelism may hold equal elements of a parameter that is not split over
        their mesh. They may cut it at different places, since other parameters of the bucket have
        parts of different sizes. The first of these ranks writes. Axes are compared by their ranks:
        DTensors of one model may have equal meshes that are different objects, because torch caches
        results of operators.
        """
        own = self._tensor_parallel[index]
        split = set() if own is None else {axis.members for axis in own.axes}
        meshes = [tp for tp in self._tensor_parallel if tp is not None]
        return all(a.rank == 0 for tp in meshes for a in tp.mesh_axes if a.members not in split)

    def _part_of(self, index: int, param: Tensor) -> Tensor:
        """Return the plain tensor that is cut."""
        own = self._tensor_parallel[index]
        return param if own is None or own.is_plain else own.to_part(param)

    def _cut_shard(self) -> Tensor:
        plan, layout, rank = self.plan, self.layout, self.plan.axis.rank
        if plan.is_offloaded:
            shard: Tensor = plan.mesh.backend.zeros_on_host(
                layout.shard_numel, plan.orig_dtype, pinned=plan.is_pinned
            )
        else:
            shard = torch.zeros(layout.shard_numel, dtype=plan.orig_dtype, device=plan.shard_device)
        for i, entry in enumerate(self.entries):
            param = entry.param.detach()
            if isinstance(param, ShardedTensor):
                piece = param.to_local()
            else:
                start, stop = layout.owned_range(i, rank)
                piece = self._part_of(i, param).reshape(-1)[start:stop]
            to_start, to_stop = layout.shard_range(i, rank)
            shard[to_start:to_stop] = piece
        return shard

    def _make_unsharded(self) -> None:
        """Make the unsharded buffer and the views into it."""
        plan, layout = self.plan, self.layout
        if self.aliases_shard:
            self._storage = self.shard.untyped_storage()
        else:
            nbytes = layout.padded_numel * plan.param_dtype.itemsize
            self._buffer = Buffer(nbytes, plan.device, "unsharded", self.specs[0])
            self._storage = self._buffer.storage
        self._full = self._view((layout.padded_numel,), 0)
        self._own = self._view((layout.shard_numel,), plan.axis.rank * layout.shard_numel)
        self.unsharded = [
            self._new_unsharded(i, self._view_of(i)) for i in range(len(self.entries))
        ]
        # DTensors and quantized weights have no address of their own.
        self._movable = [
            (i, layout.offsets[i] * plan.param_dtype.itemsize)
            for i, param in enumerate(self.unsharded)
            if type(param) is nn.Parameter and param.numel() and not param.is_meta
        ]

    def _view_of(self, index: int) -> Tensor:
        """Return the view for parameter `index` over its part of the unsharded buffer."""
        view = self._view(self.layout.shapes[index], self.layout.offsets[index])
        tensor_parallel = self._tensor_parallel[index]
        if tensor_parallel is None:
            return view
        result: Tensor = tensor_parallel.as_shown(view)
        return result

    def _free_first_memory(self) -> None:
        """Give back the memory over which views were made."""
        assert self._buffer is not None
        self._buffer.close()

    def _view(self, shape: tuple[int, ...], offset: int) -> Tensor:
        empty = torch.empty(0, dtype=self.plan.param_dtype, device=self.plan.device)
        return empty.set_(self._storage, offset, shape, ())  # Contiguous.

    # --- the shard ---

    def sharded(self, index: int) -> ShardedTensor:
        """Return parameter `index` as a tensor over its piece of the shard."""
        return ShardedTensor(self.piece(self.shard, index), self.specs[index], self.shard)

    def sharded_grad(self, index: int, grad: Tensor) -> ShardedTensor:
        """Return this rank's piece of a whole gradient of parameter `index`, copied."""
        spec = self.specs[index]
        return ShardedTensor(spec.slice_full(grad).to(self.shard.device, copy=True), spec)

    def has_piece_of(self, index: int) -> bool:
        """Whether parameter `index` still has its piece here; not after ``.to(dtype)``."""
        return self.entries[index].param.flat is self.shard  # type: ignore[attr-defined]

    def has_all_pieces(self) -> bool:
        """Whether every parameter still has its piece here; each pass calls this."""
        shard = self.shard
        try:
            for entry in self.entries:
                if entry.param.flat is not shard:  # type: ignore[attr-defined]
                    return False
        except AttributeError:  # `swap_tensors` of the user, or of `parametrize`.
            return False
        return True

    def piece(self, reduced: Tensor, index: int) -> Tensor:
        """Return the view of a shard-sized tensor that belongs to parameter `index`."""
        start, stop = self.specs[index].piece_range
        return reduced[start:stop]

    @property
    def shard_version(self) -> int:
        """Torch's version counter of the shard, which every in-place operation raises."""
        return self.shard._version  # noqa: SLF001 - documented for this use

    @property
    def shard_nbytes(self) -> int:
        """Bytes of this rank's shard."""
        return self.shard.nbytes

    # --- the unsharded parameters ---

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded buffer while it exists; 0 if it is the shard itself."""
        return self._buffer.nbytes if self._buffer is not None else 0

    @property
    def has_memory(self) -> bool:
        """Whether the unsharded buffer exists."""
        return self._buffer is not None and self._buffer.has_memory

    def acquire(self, pool: SlotPool) -> Event | None:
        """Get memory for the unsharded buffer; return the fence to wait for before a write."""
        assert self._buffer is not None
        fence = self._buffer.acquire(pool)  # First, because it may raise.
        self._gathered_version = self.shard_version
        self._allow_use()
        return fence

    def release(self, pool: SlotPool, fence: Event | None) -> None:
        """Give the memory back; its readers are done at `fence`."""
        assert self._buffer is not None
        if self._buffer.slot is not None:  # Else an error came while it was to get memory.
            self._buffer.release(pool, fence, by_compute=True, keep=self.keeps_memory)
        self._refuse_use()

    def settle_memory(self) -> None:
        """Note that compute has waited for all uses of unsharded memory."""
        if self._buffer is not None:
            self._buffer.settle()

    def gather_jobs(self, comm: AllGather | None) -> list[Gather]:
        """Return the gathers for the backend: over the shard axis, or of a kept part."""
        part = self._kept_part
        if part is None:
            is_on_host = self.plan.is_offloaded
            return [Gather(self._full, self._own, self.shard, comm, is_on_host=is_on_host)]
        return [Gather(self._full, self._range_of(part.axis), part.values, comm)]

    # --- what a forward writes to its own parameters ---

    def has_moved(self) -> bool:
        """Whether a parameter was given other memory, by ``param.data = ...``."""
        if not self._movable or not (self.aliases_shard or self.has_memory):
            return False
        first = self._storage.data_ptr()
        for i, offset in self._movable:  # noqa: SIM110 - a generator takes longer, in each forward
            if self.unsharded[i].data_ptr() != first + offset:
                return True
        return False

    @torch.no_grad()
    def take_back(self) -> list[int]:
        """Lay parameters that have moved over the unsharded memory again, with their values."""
        found: list[int] = []
        if not self.has_moved():
            return found
        first = self._storage.data_ptr()
        for i, offset in self._movable:
            param = self.unsharded[i]
            if param.data_ptr() != first + offset:
                param.data = self._view_of(i).copy_(param.data)
                found.append(i)
        return found

    def unsharded_values(self, index: int) -> Tensor:
        """Return the plain tensor, in compute dtype, under an unsharded parameter."""
        start = self.layout.offsets[index]
        return self._full[start : start + self.layout.numels[index]]

    @torch.no_grad()
    def keep_written(self, index: int) -> None:
        """Copy what was written to an unsharded parameter into the shard.

        No version is raised: gathered parameters stay valid, or stale, as they are on all ranks.
        """
        self.drop_part()
        if self.aliases_shard:
            return
        kept, written = self.piece(self.shard, index), self.piece(self._own, index)
        with torch_tensors.preserve_versions([self.shard]):
            if kept.dtype != written.dtype:  # Unwritten elements keep the digits a cast would lose.
                on_device = kept.to(written.device)
                is_same = written == on_device.to(written.dtype)
                written = torch.where(is_same, on_device, written.to(kept.dtype))
            kept.copy_(written)
        note_raised(self.shard, [self.entries[index].param], 0)

    # --- whole values in storage dtype ---

    @torch.no_grad()
    def gather_values(self, values: Tensor) -> Tensor:
        """Return the whole bucket of which `values` is this rank's range, laid out like the shard.

        The result is 1-D, with ``layout.padded_numel`` elements and the dtype of `values`, on the
        device of unsharded parameters, in new memory.

        Cost: one all-gather of the bucket.
        """
        layout, axis = self.layout, self.plan.axis
        full = torch.empty(layout.padded_numel, dtype=values.dtype, device=self.plan.device)
        first = axis.rank * layout.shard_numel
        own = full[first : first + layout.shard_numel]
        own.copy_(values)
        if full.numel():
            axis.all_gather(full, own)
        return full

    def whole_of(self, index: int, full: Tensor) -> Tensor:
        """Return parameter `index` of a gathered bucket: plain, global shape, a view if possible.

        It is collective over the axes that split a tensor-parallel parameter.
        """
        layout, tensor_parallel = self.layout, self._tensor_parallel[index]
        start = layout.offsets[index]
        part = full[start : start + layout.numels[index]].view(layout.shapes[index])
        return part if tensor_parallel is None else tensor_parallel.to_whole(part)

    def as_parameter(self, index: int, whole: Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Return a whole value of parameter `index` as a parameter."""
        del index
        return nn.Parameter(whole, requires_grad=requires_grad)

    # --- a part that stays between forward and backward ---

    @property
    def kept_part(self) -> KeptPart | None:
        """The part that `keep_part` kept, unless the shard has changed since."""
        if self._kept_part is not None and self._kept_part.version != self.shard_version:
            self._kept_part = None
        return self._kept_part

    def keep_part(self, axis: AxisComm, fence: Callable[[], Event | None]) -> None:
        """Keep the part of the unsharded buffer that this rank has on a smaller axis."""
        if self.kept_part is None:
            values = self._range_of(axis).clone()
            self._kept_part = KeptPart(values, axis, self.shard_version, fence())

    def drop_part(self) -> None:
        """Drop the kept part."""
        self._kept_part = None

    def _range_of(self, axis: AxisComm) -> Tensor:
        return self._full.view(axis.size, -1)[axis.rank]

    # --- gradients ---

    def new_gradient_buffer(self, receive_chunks: int) -> SendBuffer:
        """Return a buffer that collects and sends gradients."""
        receive_numel = receive_chunks * self.layout.shard_numel
        return SendBuffer(self.layout, self.plan, receive_numel, self.specs[0])

    def part_of_gradient(self, index: int, grad: Tensor) -> Tensor:
        """Return this rank's part of a gradient; may be collective over the mesh of a DTensor."""
        tensor_parallel = self._tensor_parallel[index]
        part: Tensor = grad if tensor_parallel is None else tensor_parallel.part_of_gradient(grad)
        return part


def _tensor_parallel_of(entry: ParamEntry, mesh: DeviceMesh) -> Any:
    """Return how a parameter is spread over its own mesh, `TensorParallel`, or None.

    Axes of that mesh that lie in `mesh` are left out.
    """
    if isinstance(entry.param, ShardedTensor):
        return entry.param.spec.tensor_parallel
    found = entry.split
    return None if found is None else found.outside(mesh)

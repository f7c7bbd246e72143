"""The store of plain parameters, and of DTensors: one flat shard, one flat unsharded buffer.

[Note: tensors of a flat store]
- shard: 1-D, ``layout.shard_numel``, storage dtype. This rank's range; the optimizer updates it
  through the sharded parameters, whose pieces are views of it. Lives as long as the store.
- unsharded buffer: 1-D, ``layout.padded_numel``, compute dtype. The whole bucket. Its storage
  object lives as long as the store; the memory behind it comes and goes (`memory`).
- unsharded parameter: global shape, compute dtype, a view into the unsharded buffer with a version
  counter of its own (made by ``set_``: gloo's worker thread bumps the buffer's counter at any
  time, and backward would fail). Made once. A DTensor over that view where the user's was one.
Where no cast and no other rank is involved the unsharded buffer IS the shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit import _compat
from shardkit._layout.flat import FlatLayout
from shardkit._params.memory import Buffer
from shardkit._params.send_buffer import SendBuffer
from shardkit._params.store import Store
from shardkit._tensor.ops import StateAllocator
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.spec import ShardSpec
from shardkit.backends import tensor_parallel_of
from shardkit.backends.base import Gather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit._custom_comm import AllGather
    from shardkit._params.memory import SlotPool
    from shardkit._params.plan import BucketPlan
    from shardkit._params.sites import ParamEntry
    from shardkit.backends.base import AxisComm
    from shardkit.backends.events import Event


@dataclass(slots=True, frozen=True)
class KeptPart:
    """A part of the unsharded buffer that stays from forward to backward.

    Attributes:
        values: Range `axis.rank` of `axis.size` equal ones, 1-D, compute dtype.
        axis: Axis over which backward gathers.
        version: Version of the shard that it was gathered from.
        fence: Fence after which the values are there.
    """

    values: Tensor
    axis: AxisComm
    version: int
    fence: Event | None


class FlatStore(Store):
    """See the module's docstring.

    Args:
        plan: Plan of the bucket.
        entries: Parameters of the bucket.
        layout: Layout of sharded parameters; None plans anew.
    """

    subclass: Any = None
    may_alias_shard = True
    keeps_writes = True
    _movable: Sequence[tuple[int, int]] = ()

    def __init__(
        self, plan: BucketPlan, entries: Sequence[ParamEntry], layout: FlatLayout | None = None
    ) -> None:
        super().__init__(plan, entries)
        self._tensor_parallel = [_tensor_parallel_of(entry.param) for entry in entries]
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
        spread = [_tensor_parallel_of(entry.param) for entry in entries]
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
        """Whether this rank offers a parameter to checkpoints.

        On a mesh of tensor parallelism ranks may hold equal elements of a parameter that is not
        split over it, cut at other places, since other parameters of the bucket have parts of
        other sizes. The first of these ranks writes. Axes are told by their ranks: DTensors of one
        model may have equal meshes of several objects, because torch caches what operators return.
        """
        own = self._tensor_parallel[index]
        split = set() if own is None else {axis.members for axis in own.axes}
        meshes = [tp for tp in self._tensor_parallel if tp is not None]
        return all(a.rank == 0 for tp in meshes for a in tp.mesh_axes if a.members not in split)

    def _part_of(self, index: int, param: Tensor) -> Tensor:
        """Return the plain tensor that is cut."""
        tensor_parallel = self._tensor_parallel[index]
        return param if tensor_parallel is None else tensor_parallel.to_part(param)

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
            self._buffer = Buffer(layout.padded_numel * plan.param_dtype.itemsize, plan.device)
            self._storage = self._buffer.storage
        self._full = self._view((layout.padded_numel,), 0)
        self._own = self._view((layout.shard_numel,), plan.axis.rank * layout.shard_numel)
        self.unsharded = []
        for i in range(len(self.entries)):
            self.unsharded.append(self._new_unsharded(i, self._view_of(i)))
        # DTensors, and quantized weights, have no address of their own.
        self._movable = [
            (i, layout.offsets[i] * plan.param_dtype.itemsize)
            for i, param in enumerate(self.unsharded)
            if type(param) is nn.Parameter and param.numel() and not param.is_meta
        ]

    def _view_of(self, index: int) -> Tensor:
        """Return what parameter `index` is made of: over a part of the unsharded buffer."""
        view = self._view(self.layout.shapes[index], self.layout.offsets[index])
        tensor_parallel = self._tensor_parallel[index]
        if tensor_parallel is None:
            return view
        result: Tensor = tensor_parallel.as_dtensor(view)
        return result

    def _free_first_memory(self) -> None:
        """Give back the memory that views were made over."""
        assert self._buffer is not None
        self._buffer.close()

    def _view(self, shape: tuple[int, ...], offset: int) -> Tensor:
        strides, step = [], 1
        for dim in reversed(shape):
            strides.append(step)
            step *= max(dim, 1)
        empty = torch.empty(0, dtype=self.plan.param_dtype, device=self.plan.device)
        return empty.set_(self._storage, offset, shape, tuple(reversed(strides)))

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

    def piece(self, reduced: Tensor, index: int) -> Tensor:
        """Return the view of a shard-sized tensor that belongs to parameter `index`."""
        start, stop = self.layout.shard_range(index, self.plan.axis.rank)
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
        """Bytes of the unsharded buffer while it exists; 0 where it is the shard itself."""
        return self._buffer.nbytes if self._buffer is not None else 0

    @property
    def has_memory(self) -> bool:
        """Whether the unsharded buffer exists."""
        return self._buffer is not None and self._buffer.has_memory

    def acquire(self, pool: SlotPool) -> Event | None:
        """Get memory for the unsharded buffer; return the fence to wait for before a write."""
        assert self._buffer is not None
        self._gathered_version = self.shard_version
        self._allow_use()
        return self._buffer.acquire(pool)

    def release(self, pool: SlotPool, fence: Event | None) -> None:
        """Give the memory back; its readers are done at `fence`."""
        assert self._buffer is not None
        self._buffer.release(pool, fence, by_compute=True)
        self._refuse_use()

    def gather_jobs(self, comm: AllGather | None) -> list[Gather]:
        """Return what the backend has to gather: over the shard axis, or what `keep_part` left."""
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
        """Return what an unsharded parameter lies over: plain, in compute dtype."""
        start = self.layout.offsets[index]
        return self._full[start : start + self.layout.numels[index]]

    @torch.no_grad()
    def keep_written(self, index: int) -> None:
        """Take what was written to an unsharded parameter over into the shard.

        No version is raised: what was gathered stays as good as it is, on all ranks alike.
        """
        self.drop_part()
        if self.aliases_shard:
            return
        kept, written = self.piece(self.shard, index), self.piece(self._own, index)
        with _compat.preserve_versions([self.shard]):
            if kept.dtype != written.dtype:  # The rest keeps the digits that a cast would cost.
                on_device = kept.to(written.device)
                is_same = written == on_device.to(written.dtype)
                written = torch.where(is_same, on_device, written.to(kept.dtype))
            kept.copy_(written)

    # --- whole values in storage dtype ---

    @torch.no_grad()
    def gather_values(self, values: Tensor) -> Tensor:
        """Return the whole bucket of which `values` is this rank's range, laid out as the shard.

        1-D, ``layout.padded_numel``, the dtype of `values`, on the device of unsharded parameters,
        in memory of its own.

        Cost: one all-gather of the bucket.
        """
        layout, axis = self.layout, self.plan.axis
        full = torch.empty(layout.padded_numel, dtype=values.dtype, device=self.plan.device)
        first = axis.rank * layout.shard_numel
        own = full[first : first + layout.shard_numel]
        own.copy_(values)
        if full.numel():
            # As bytes: not every engine knows every dtype.
            axis.all_gather(full.view(torch.uint8), own.view(torch.uint8))
        return full

    def whole_of(self, index: int, full: Tensor) -> Tensor:
        """Return parameter `index` of a gathered bucket: plain, global shape, a view if it can be.

        Collective over the axes that a tensor-parallel parameter is split over.
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
        """What `keep_part` left, unless the shard has changed since."""
        if self._kept_part is not None and self._kept_part.version != self.shard_version:
            self._kept_part = None
        return self._kept_part

    def keep_part(self, axis: AxisComm, fence: Callable[[], Event | None]) -> None:
        """Keep the part of the unsharded buffer that this rank has on a smaller axis."""
        if self.kept_part is None:
            values = self._range_of(axis).clone()
            self._kept_part = KeptPart(values, axis, self.shard_version, fence())

    def drop_part(self) -> None:
        """Forget what was kept."""
        self._kept_part = None

    def _range_of(self, axis: AxisComm) -> Tensor:
        return self._full.view(axis.size, -1)[axis.rank]

    # --- gradients ---

    def new_gradient_buffer(self, receive_chunks: int) -> SendBuffer:
        """Return what collects gradients and sends them."""
        return SendBuffer(self.layout, self.plan, receive_chunks * self.layout.shard_numel)

    def part_of_gradient(self, index: int, grad: Tensor) -> Tensor:
        """Return this rank's part of a DTensor gradient; may be collective over its mesh."""
        tensor_parallel = self._tensor_parallel[index]
        part: Tensor = grad if tensor_parallel is None else tensor_parallel.part_of_gradient(grad)
        return part


def _tensor_parallel_of(param: Tensor) -> Any:
    """Return how a parameter is spread over a mesh of its own, `TensorParallel`, or None."""
    if isinstance(param, ShardedTensor):
        return param.spec.tensor_parallel
    return tensor_parallel_of(param)

"""A bucket on a backend that traces operators into a graph and runs them later, all ranks as one.

[Note: tensors of a traced bucket]
Tensors have no storage there, so nothing is swapped behind one. What lives:
- piece: 1-D, storage dtype, one per parameter, padded. Where one process has the pieces of all
  ranks (`Backend.is_spmd`) it is `padded_part_numel` long, the parts of all ranks end to
  end, which the backend spreads over the devices (`place`); else ``sizes[index]``, a rank's own.
- unsharded parameter: one object for life, as on other backends; its contents come and go by
  ``.data``. Empty, and of class `FreedParameter`, in between.
- gradients: what came, flattened and padded; laid side by side when all are there.
A graph that ends while a tensor is alive returns it: whatever is not needed is let go at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit import _compat
from shardkit._errors import WrapError
from shardkit._layout.even import EvenLayout
from shardkit._params.bucket import Bucket, bucket_showing
from shardkit._params.freed import NAME_ATTRIBUTE
from shardkit._policy import CPUOffloadPolicy
from shardkit._tensor.sharded import ShardedTensor, ShardSpec, user_attributes
from shardkit._tensor.traced_spec import PaddedSpec, WholeSpec, padded
from shardkit.backends.traced import TracedGather

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit._custom_comm import AllGather
    from shardkit._params.memory import SlotPool
    from shardkit.backends.base import AxisComm, CommStreams


class TracedBucket(Bucket):
    """See the module's docstring."""

    send_buffer_class: Any = None  # Below, when there is one.
    keeps_flats = False
    layout: Any

    def _prepare(self) -> None:
        super()._prepare()
        for entry, tensor_parallel in zip(self.entries, self.tensor_parallel, strict=True):
            if tensor_parallel is not None:
                self._refuse(entry.name, "a DTensor", "Shard it by fully_shard alone.")
        if isinstance(self.offload, CPUOffloadPolicy):
            self._refuse(self.entries[0].name, "offloaded to the host", "Leave out offload_policy.")
        self.bucket_id = self.mesh.backend.next_bucket_id()
        self.is_outside = False
        self._job: TracedGather | None = None
        self._has_memory = False

    def _refuse(self, name: str, what: str, remedy: str) -> None:
        msg = (
            f"parameter {name!r} is {what}, which meshes of {self.mesh.device_type!r} devices do "
            f"not support. {remedy}"
        )
        raise WrapError(msg)

    def _plan(self, itemsize: int) -> Any:
        del itemsize
        shapes = [tuple(f.param.shape) for f in self.entries]
        return EvenLayout.plan(shapes, world_size=self.axis.size)

    def _aliases_shard(self) -> bool:
        return False

    def _cut_shard(self) -> Any:
        self.pieces = [self._cut_piece(i, f.param.detach()) for i, f in enumerate(self.entries)]
        return None

    def _cut_piece(self, index: int, param: Tensor) -> Tensor:
        if isinstance(param, ShardedTensor):
            piece = param.local_piece
        else:
            piece = self.specs[index].slice_full(param).clone()
        if piece.device.type != "meta":
            self.mesh.backend.annotate_sharding(piece)
        return piece

    def _make_spec(self, index: int, state_allocator: Any) -> ShardSpec:
        del state_allocator
        backend, name = self.mesh.backend, self.entries[index].name
        if not backend.is_spmd:
            return PaddedSpec(self.layout, index, mesh=self.mesh, axis=self.axis, name=name)
        axis, numel = backend.process_axis, self.layout.padded_part_numel(index)
        return WholeSpec(self.layout.shapes[index], numel, mesh=self.mesh, axis=axis, name=name)

    def _make_replacement(self, index: int) -> nn.Parameter:
        old, spec = self.entries[index].param, self.specs[index]
        sharded = ShardedTensor(self.pieces[index], spec)
        new = nn.Parameter(sharded, requires_grad=old.requires_grad)
        new.__dict__.update(user_attributes(old))
        if old.grad is not None:
            new.grad = ShardedTensor(self._cut_piece(index, old.grad.detach()), spec)
        self._take_hooks(old, new)
        return new

    def _repoint(self, index: int) -> None:
        param: Any = self.entries[index].param
        param.repoint(self.pieces[index], self.specs[index], None)

    def _make_unsharded(self) -> None:
        self.buffer = None
        self.unsharded = []
        for entry in self.entries:
            empty = torch.empty(0, dtype=self.param_dtype, device=self.device)
            param = nn.Parameter(empty, requires_grad=entry.param.requires_grad)
            param.__dict__.update(user_attributes(entry.param))
            param.__dict__[NAME_ATTRIBUTE] = entry.name
            self.unsharded.append(param)
        self._note_showing()
        self._classes = [type(param) for param in self.unsharded]
        self._hide_freed()

    # --- state ---

    @property
    def was_replaced(self) -> bool:
        """Whether a parameter has another piece than it was given, as after ``.to(dtype)``."""
        return any(
            entry.param.local_piece is not piece  # type: ignore[attr-defined]
            for entry, piece in zip(self.entries, self.pieces, strict=True)
        )

    @property
    def shard_version(self) -> int:
        """Raised by every write to a piece."""
        return sum(piece._version for piece in self.pieces)  # noqa: SLF001 - documented for this

    @property
    def shard_nbytes(self) -> int:
        """Bytes of the parameters' parts on one rank."""
        nbytes: int = sum(self.layout.sizes) * self.orig_dtype.itemsize
        return nbytes

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded parameters while they exist."""
        nbytes: int = self.layout.padded_numel * self.param_dtype.itemsize
        return nbytes

    @property
    def is_stale(self) -> bool:
        """Whether a shard changed since it was gathered."""
        return self._has_memory and self._gathered_version != self.shard_version

    # --- coming and going ---

    def acquire(self, pool: SlotPool) -> Any:
        """Note from which numbers is gathered; there is no memory to get."""
        del pool
        self._has_memory = True
        self._gathered_version = self.shard_version
        self._show_classes()
        return None

    def gather_jobs(self, comm: AllGather | None) -> list[Any]:
        """Return what the backend has to gather."""
        del comm
        pieces = [param.local_piece.detach() for param in self.sharded]  # type: ignore[attr-defined]
        self._job = TracedGather(pieces, self.param_dtype, self.layout.tail_numel, self.bucket_id)
        return [self._job]

    @_compat.without_dispatch_modes
    @torch.no_grad()
    def finish_gather(self) -> None:
        """Give the unsharded parameters their contents."""
        job, self._job = self._job, None
        assert job is not None
        assert job.wholes is not None
        layout = self.layout
        for param, whole, numel, shape in zip(
            self.unsharded, job.wholes, layout.numels, layout.shapes, strict=True
        ):
            flat = whole if whole.numel() == numel else whole[:numel]
            param.data = flat.view(shape)
        self.is_outside = False

    @torch.no_grad()
    def move(self, fn: Callable[[Tensor], Tensor], *, outside: bool) -> None:
        """Take the contents of the unsharded parameters out of the ranks' region, or into it."""
        if self._has_memory and self._job is None and self.is_outside != outside:
            if self.is_outside:
                self._end_outside()
            for param in self.unsharded:
                param.data = fn(param.data)
            self.is_outside = outside

    def _end_outside(self) -> None:
        """Let autograd tell who has used parameters outside of the region, and not gone backward.

        What it saved of them would be read as what is gathered in the region then.
        """
        for param in self.unsharded:
            torch.autograd.graph.increment_version(param)
        self.is_outside = False

    @_compat.without_dispatch_modes
    def release(self, pool: SlotPool, fence: Any) -> None:
        """Let the contents go."""
        del pool, fence
        self._job = None
        self._has_memory = False
        empty = torch.empty(0, dtype=self.param_dtype, device=self.device)
        if self.is_outside:
            self._end_outside()
        for param in self.unsharded:
            param.data = empty
        self._hide_freed()

    def keep_part(self, axis: AxisComm, fence: Callable[[], Any]) -> None:
        """Nothing: backends that trace have no smaller axes."""

    # --- gradients ---

    def piece(self, flat: Tensor, index: int) -> Tensor:
        """Return the part of parameter `index` in a reduced shard, as pieces are kept."""
        start, stop = self.layout.columns(index)
        piece: Tensor = self.mesh.backend.leave_piece(flat[start:stop])
        return piece


class TracedSend:
    """Collects one bucket's gradients on a backend that traces.

    Attributes:
        flat: 1-D, ``layout.padded_numel``, `reduce_dtype`, once `complete`.
        received: There is nothing to receive into.
    """

    received = None

    def __init__(self, bucket: TracedBucket, receive_numel: int) -> None:
        assert receive_numel == 0
        self._bucket = bucket
        self._grads: dict[int, Tensor] = {}
        self.flat: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients that are kept."""
        return sum(grad.nbytes for grad in self._grads.values())

    @property
    def written(self) -> dict[int, Tensor]:
        """The gradients that came, by parameter."""
        return self._grads

    def write(self, index: int, grad: Tensor, streams: CommStreams, pool: SlotPool) -> None:
        """Take a gradient, or add it to what is there."""
        del streams, pool
        bucket = self._bucket
        flat = grad.detach().to(bucket.reduce_dtype).reshape(-1)
        flat = padded(flat, bucket.layout.padded_part_numel(index))
        self._grads[index] = self._grads[index] + flat if index in self._grads else flat

    @torch.no_grad()
    def complete(self, streams: CommStreams, pool: SlotPool) -> None:
        """Lay what came side by side, zeros for what did not."""
        del streams, pool
        bucket, layout = self._bucket, self._bucket.layout
        num_ranks = layout.world_size

        def zeros(columns: int) -> Tensor:
            return torch.zeros(num_ranks, columns, dtype=bucket.reduce_dtype, device=bucket.device)

        columns = [
            self._grads[i].view(num_ranks, -1) if i in self._grads else zeros(size)
            for i, size in enumerate(layout.sizes)
            if size
        ]
        if layout.tail_numel:
            columns.append(zeros(layout.tail_numel))
        self._grads = {}
        self.flat = torch.cat(columns, 1).reshape(-1) if columns else zeros(0).reshape(-1)

    def close_send(self, pool: SlotPool, fence: Any, *, by_compute: bool = False) -> None:
        """Let go of what was sent."""
        del pool, fence, by_compute
        self.flat = None

    def close_receive(self, pool: SlotPool) -> None:
        """Nothing was received."""


TracedBucket.send_buffer_class = TracedSend


# --- tensors that autograd saves ----------------------------------------------------------------


def pack(tensor: Tensor) -> Any:
    """Save an unsharded parameter, or a view of one, by what it is rather than by its contents.

    For `torch.autograd.graph.saved_tensors_hooks`. Backward then uses what is gathered anew, and
    between forward and backward nothing is kept alive.
    """
    base = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - documented
    bucket = bucket_showing(base)
    if bucket is None:
        return tensor
    index = next(i for i, param in enumerate(bucket.unsharded) if param is base)
    return _Saved(bucket, index, None if tensor is base else tensor._view_func)  # type: ignore[attr-defined]  # noqa: SLF001


class _Saved:
    """Stands for an unsharded parameter or a view of it."""

    __slots__ = ("_bucket", "_index", "_view")

    def __init__(self, bucket: Bucket, index: int, view: Any) -> None:
        self._bucket, self._index, self._view = bucket, index, view

    def restore(self) -> Tensor:
        whole = self._bucket.unsharded[self._index].detach()
        result: Tensor = whole if self._view is None else self._view(whole)
        return result


def unpack(saved: Any) -> Tensor:
    """Return what `pack` saved."""
    tensor: Tensor = saved.restore() if isinstance(saved, _Saved) else saved
    return tensor

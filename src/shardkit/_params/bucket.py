"""One bucket: parameters of a group with one storage dtype, compute dtype and trainability.

[Note: tensors of a bucket]
- shard: 1-D, ``layout.shard_numel``, storage dtype. This rank's range; the optimizer updates it
  through the sharded parameters, whose pieces are views of it. Lives as long as the bucket.
- unsharded buffer: 1-D, ``layout.padded_numel``, compute dtype. The whole bucket. Its storage
  object lives as long as the bucket; the memory behind it comes and goes (`_params.memory`).
- sharded parameter: the user's own Parameter object, turned into a `ShardedTensor`.
- unsharded parameter: global shape, compute dtype, a view into the unsharded buffer with a version
  counter of its own (made by ``set_``: gloo's worker thread bumps the buffer's counter at any
  time, and backward would fail). Made once. A DTensor over that view where the user's was one.
Where no cast and no other rank is involved the unsharded buffer IS the shard.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit import _compat
from shardkit._errors import WrapError
from shardkit._layout.flat import FlatLayout
from shardkit._params.freed import NAME_ATTRIBUTE, class_without_memory
from shardkit._params.memory import Buffer
from shardkit._params.sites import ParamSites
from shardkit._policy import CPUOffloadPolicy, OffloadPolicy
from shardkit._tensor.ops import FlatMaker
from shardkit._tensor.sharded import ShardedTensor, ShardSpec, user_attributes
from shardkit.backends import tensor_parallel_of
from shardkit.backends.base import Gather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit._custom_comm import AllGather
    from shardkit._mesh import DeviceMesh
    from shardkit._params.memory import SlotPool
    from shardkit._params.sites import ParamEntry
    from shardkit._policy import MixedPrecisionPolicy
    from shardkit.backends.base import AxisComm


@dataclass(slots=True, frozen=True)
class _KeptPart:
    """A part of the unsharded buffer that stays from forward to backward.

    Attributes:
        values: 1-D, the range of `axis.rank` of `axis.size` equal ones, compute dtype.
        axis: Over which backward gathers.
        version: Of the shard it was gathered from.
        fence: After it the values are there.
    """

    values: Tensor
    axis: AxisComm
    version: int
    fence: Any


_showing: weakref.WeakValueDictionary[int, Bucket] = weakref.WeakValueDictionary()
"""Buckets by the id of their unsharded parameters, which live at least as long."""


def bucket_showing(param: object) -> Bucket | None:
    """Return the bucket of which a module holds an unsharded parameter; None if it is another."""
    return _showing.get(id(param))


class Bucket:
    """See the module's docstring. Nothing is changed before `swap_in`.

    Class attributes:
        send_buffer_class: What collects its gradients; None: `_params.gradients.SendBuffer`.
        keeps_flats: Reduced gradients are views of one tensor, as the pieces are of the shard.
        bucket_id: Number of the bucket where collectives are traced.

    Args:
        entries: The parameters: ordinary ones, or sharded ones whose pieces changed or were copied.
        mesh: Shard over its last axis.
        policy: Dtypes.
        layout: How sharded ones are cut; None plans anew.
        offload: Where the shard is.
    """

    send_buffer_class: Any = None
    keeps_flats = True
    bucket_id = 0

    def __init__(
        self,
        entries: Sequence[ParamEntry],
        *,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        layout: FlatLayout | None = None,
        offload: OffloadPolicy = OffloadPolicy(),  # noqa: B008 - frozen
    ) -> None:
        first = entries[0].param
        self.entries = list(entries)
        self.mesh = mesh
        self.policy = policy
        self.offload = offload
        self.axis = mesh.backend.axis(mesh.ndim - 1)
        self.orig_dtype = first.dtype
        self.param_dtype, self.reduce_dtype = policy.dtypes_for(first.dtype)
        wants_host = isinstance(offload, CPUOffloadPolicy)
        self.offload_device = torch.device("cpu") if wants_host else mesh.backend.device
        is_meta = first.device.type == "meta"
        self.device = first.device if is_meta else mesh.backend.device
        self.shard_device = first.device if is_meta else self.offload_device
        self.is_offloaded = wants_host and not is_meta and mesh.backend.has_own_memory
        self.is_pinned = self.is_offloaded and bool(getattr(offload, "pin_memory", False))
        self.copies_gradients_together = mesh.backend.copies_gradients_together
        self._kept_part: _KeptPart | None = None
        self._gathered_version = -1
        self._prepare()
        itemsize = min(d.itemsize for d in (self.orig_dtype, self.param_dtype, self.reduce_dtype))
        self.layout = layout or self._plan(itemsize)
        self.aliases_shard = self._aliases_shard()
        # Tensors made in inference mode could never be trained.
        with torch.inference_mode(mode=False), torch.no_grad():
            state_allocator = FlatMaker()
            self.specs = [self._make_spec(i, state_allocator) for i in range(len(entries))]
            self.shard = self._cut_shard()
            for index, (spec, item) in enumerate(zip(self.specs, entries, strict=True)):
                spec.entry = weakref.ref(item)
                spec.is_written_here = self._is_written_here(index)
            self.replacements = [
                None if isinstance(f.param, ShardedTensor) else self._make_replacement(i)
                for i, f in enumerate(entries)
            ]
            self._make_unsharded()
        self.sites = ParamSites(self.entries, self.unsharded)

    # --- construction ---

    def _prepare(self) -> None:
        """Find out how the parameters are made."""
        self.subclass: Any = None
        self.tensor_parallel = [_tensor_parallel_of(f.param) for f in self.entries]
        self.converts_gradients = any(tp is not None for tp in self.tensor_parallel)

    def _plan(self, itemsize: int) -> FlatLayout:
        """Lay out the parameters, or this rank's parts of them."""
        shapes = [
            tuple(f.param.shape) if tp is None else tp.local_shape
            for f, tp in zip(self.entries, self.tensor_parallel, strict=True)
        ]
        return FlatLayout.plan(shapes, world_size=self.axis.size, itemsize=itemsize)

    def _aliases_shard(self) -> bool:
        """Whether the unsharded buffer is the shard: nothing to gather, nothing to cast."""
        is_same_dtype = self.param_dtype == self.orig_dtype
        return self.axis.size == 1 and is_same_dtype and not self.is_offloaded

    def _make_spec(self, index: int, state_allocator: Any) -> ShardSpec:
        return ShardSpec(
            self.layout,
            index,
            mesh=self.mesh,
            axis=self.axis,
            name=self.entries[index].name,
            state_allocator=state_allocator,
            shard_device=self.offload_device,
            tensor_parallel=self.tensor_parallel[index],
            subclass=self.subclass,
        )

    def _is_written_here(self, index: int) -> bool:
        """Whether this rank offers a parameter to checkpoints.

        On a mesh of tensor parallelism ranks may hold equal elements of a parameter that is not
        split over it, cut at other places, since other parameters of the bucket have parts of
        other sizes. The first of these ranks writes.
        """
        own = self.tensor_parallel[index]
        split = () if own is None else own.axes
        meshes = [tp for tp in self.tensor_parallel if tp is not None]
        return all(a.rank == 0 for tp in meshes for a in tp.mesh_axes if a not in split)

    def _part_of(self, index: int, param: Tensor) -> Tensor:
        """Return the plain tensor that is cut."""
        tensor_parallel = self.tensor_parallel[index]
        return param if tensor_parallel is None else tensor_parallel.to_part(param)

    def part_of_gradient(self, index: int, grad: Tensor) -> Tensor:
        """Return the plain tensor of a gradient, if `converts_gradients`; may be collective."""
        tensor_parallel = self.tensor_parallel[index]
        part: Tensor = grad if tensor_parallel is None else tensor_parallel.part_of_gradient(grad)
        return part

    def _cut_shard(self) -> Tensor:
        numel = self.layout.shard_numel
        if self.is_offloaded:
            backend = self.mesh.backend
            shard: Tensor = backend.zeros_on_host(numel, self.orig_dtype, pinned=self.is_pinned)
        else:
            shard = torch.zeros(numel, dtype=self.orig_dtype, device=self.shard_device)
        for i, entry in enumerate(self.entries):
            param = entry.param.detach()
            if isinstance(param, ShardedTensor):
                piece = param.to_local()
            else:
                start, stop = self.layout.owned_range(i, self.axis.rank)
                piece = self._part_of(i, param).reshape(-1)[start:stop]
            to_start, to_stop = self.layout.shard_range(i, self.axis.rank)
            shard[to_start:to_stop] = piece
        return shard

    def piece(self, flat: Tensor, index: int) -> Tensor:
        """Return the view of a shard-sized `flat` that belongs to parameter `index`."""
        start, stop = self.layout.shard_range(index, self.axis.rank)
        return flat[start:stop]

    def _make_replacement(self, index: int) -> nn.Parameter:
        """Make what the user's parameter is exchanged with."""
        old, spec = self.entries[index].param, self.specs[index]
        sharded = ShardedTensor(self.piece(self.shard, index), spec, self.shard)
        new = nn.Parameter(sharded, requires_grad=old.requires_grad)
        new.__dict__.update(user_attributes(old))
        if old.grad is not None:
            piece = spec.slice_full(old.grad.detach())
            new.grad = ShardedTensor(piece.to(self.shard.device, copy=True), spec)
        self._take_hooks(old, new)
        return new

    def _take_hooks(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Give what the user's parameter is exchanged with the user's hooks."""
        for hook in _compat.post_accumulate_grad_hooks(old):
            new.register_post_accumulate_grad_hook(hook)

    def _repoint(self, index: int) -> None:
        """Let a sharded parameter's piece lie in this bucket's shard."""
        param: Any = self.entries[index].param
        param.repoint(self.piece(self.shard, index), self.specs[index], self.shard)

    def _make_unsharded(self) -> None:
        """Make the unsharded buffer, with nothing behind it, and the views into it."""
        self.buffer: Buffer | None = None
        if self.aliases_shard:
            self._storage = self.shard.untyped_storage()
        else:
            nbytes = self.layout.padded_numel * self.param_dtype.itemsize
            self.buffer = Buffer(nbytes, self.device)
            self._storage = self.buffer.storage
        self.full = self._view((self.layout.padded_numel,), 0)
        own_start = self.axis.rank * self.layout.shard_numel
        self.own = self._view((self.layout.shard_numel,), own_start)
        self.unsharded = []
        for i, entry in enumerate(self.entries):
            view = self._view(self.layout.shapes[i], self.layout.offsets[i])
            tensor_parallel = self.tensor_parallel[i]
            if tensor_parallel is not None:
                view = tensor_parallel.as_dtensor(view)
            param = nn.Parameter(view, requires_grad=entry.param.requires_grad)
            param.__dict__.update(user_attributes(entry.param))
            param.__dict__[NAME_ATTRIBUTE] = entry.name
            self.unsharded.append(param)
        self._note_showing()
        self._classes: list[type] = [type(param) for param in self.unsharded]
        if self.buffer is not None:
            self.buffer.close()
            self._hide_freed()

    def _note_showing(self) -> None:
        _showing.update({id(param): self for param in self.unsharded})

    def _show_classes(self) -> None:
        """Let the unsharded parameters be used."""
        for param, cls in zip(self.unsharded, self._classes, strict=True):
            param.__class__ = cls

    def _hide_freed(self) -> None:
        """Let any use of the unsharded parameters raise."""
        for param, cls in zip(self.unsharded, self._classes, strict=True):
            param.__class__ = class_without_memory(cls)

    def _view(self, shape: tuple[int, ...], offset: int) -> Tensor:
        strides, step = [], 1
        for dim in reversed(shape):
            strides.append(step)
            step *= max(dim, 1)
        empty = torch.empty(0, dtype=self.param_dtype, device=self.device)
        return empty.set_(self._storage, offset, shape, tuple(reversed(strides)))

    # --- exchange of the user's parameters ---

    def swap_in(self, index: int) -> None:
        """Turn the user's parameter `index` into the sharded one; the same call undoes it.

        A DTensor is replaced instead: its objects cannot be turned into others.
        """
        entry, replacement = self.entries[index], self.replacements[index]
        for module, _ in entry.sites:
            if isinstance(module, nn.RNNBase):
                _compat.rnn_forget_weight_refs(module)
        if replacement is None:
            assert isinstance(entry.param, ShardedTensor)
            self._repoint(index)
            return
        if self.tensor_parallel[index] is not None:
            entry.param, self.replacements[index] = replacement, entry.param
            for module, attribute in entry.sites:
                setattr(module, attribute, entry.param)
            return
        try:
            torch.utils.swap_tensors(entry.param, replacement)
        except RuntimeError as error:
            msg = (
                f"parameter {entry.name!r} cannot be sharded in place: {error} Call fully_shard "
                f"before anything keeps weak references to the parameter or a graph that uses it "
                f"(delete old outputs and losses first)."
            )
            raise WrapError(msg) from error

    def restore_weight_refs(self) -> None:
        """Let RNNs keep weak references again, after what `swap_in` did was undone."""
        for entry in self.entries:
            for module, _ in entry.sites:
                if isinstance(module, nn.RNNBase):
                    _compat.rnn_restore_weight_refs(module)

    def drop_originals(self) -> None:
        """Forget the full-size tensors; from now on there is no way back."""
        for replaced, tensor_parallel, entry in zip(
            self.replacements, self.tensor_parallel, self.entries, strict=True
        ):
            if replaced is not None and tensor_parallel is not None:
                tensor_parallel.retire(replaced, entry.name)
        self.replacements = []

    @property
    def was_replaced(self) -> bool:
        """Whether a parameter's piece is no longer part of the shard, as after ``.to(dtype)``."""
        return any(entry.param.flat is not self.shard for entry in self.entries)  # type: ignore[attr-defined]

    @property
    def is_uniform(self) -> bool:
        """Whether the parameters have one dtype and device, as those of a bucket must."""
        return len({(entry.param.dtype, entry.param.device) for entry in self.entries}) == 1

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter wants a gradient now."""
        return any(entry.param.requires_grad for entry in self.entries)

    @property
    def sharded(self) -> list[nn.Parameter]:
        """The user's parameters."""
        return [entry.param for entry in self.entries]

    def sharded_of(self, unsharded: nn.Parameter) -> nn.Parameter:
        """Return the user's parameter that belongs to an unsharded one."""
        return next(
            entry.param
            for entry, param in zip(self.entries, self.unsharded, strict=True)
            if param is unsharded
        )

    def rename(self, index: int, name: str) -> None:
        """Give a parameter its full name."""
        self.entries[index].name = self.specs[index].name = name
        self.unsharded[index].__dict__[NAME_ATTRIBUTE] = name

    # --- unsharded memory ---

    @property
    def shard_nbytes(self) -> int:
        """Bytes of the shard."""
        return self.shard.nbytes

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded buffer while it exists; 0 where it is the shard itself."""
        return self.buffer.nbytes if self.buffer is not None else 0

    @property
    def is_stale(self) -> bool:
        """Whether a shard changed since it was gathered."""
        return (
            self.buffer is not None
            and self.buffer.has_memory
            and self._gathered_version != self.shard_version
        )

    @property
    def shard_version(self) -> int:
        """Torch's version counter of the shard, which every in-place operation raises."""
        return self.shard._version  # noqa: SLF001 - documented for this use

    def acquire(self, pool: SlotPool) -> Any:
        """Get memory; return the fence after which it may be written."""
        assert self.buffer is not None
        self._gathered_version = self.shard_version
        self._show_classes()
        return self.buffer.acquire(pool)

    def release(self, pool: SlotPool, fence: Any) -> None:
        """Give the memory back; its readers are done at `fence`."""
        assert self.buffer is not None
        self.buffer.release(pool, fence, by_compute=True)
        self._hide_freed()

    def gather_jobs(self, comm: AllGather | None) -> list[Gather]:
        """Return what the backend has to gather: over the shard axis, or what `keep_part` left."""
        part = self._kept_part
        if part is None:
            return [Gather(self.full, self.own, self.shard, comm, is_on_host=self.is_offloaded)]
        return [Gather(self.full, self._range_of(part.axis), part.values, comm)]

    def finish_gather(self) -> None:
        """Do what is left when everything has come: nothing, it came to where it belongs."""

    # --- parts kept between forward and backward ---

    def keep_part(self, axis: AxisComm, fence: Callable[[], Any]) -> None:
        """Keep the part of the unsharded buffer that this rank has on a smaller axis."""
        if self._kept_part is None or self._kept_part.version != self.shard_version:
            values = self._range_of(axis).clone()
            self._kept_part = _KeptPart(values, axis, self.shard_version, fence())

    def drop_part(self) -> None:
        """Forget it."""
        self._kept_part = None

    @property
    def kept_part(self) -> _KeptPart | None:
        """What `keep_part` left, unless the shard has changed since."""
        if self._kept_part is not None and self._kept_part.version != self.shard_version:
            self._kept_part = None
        return self._kept_part

    def _range_of(self, axis: AxisComm) -> Tensor:
        return self.full.view(axis.size, -1)[axis.rank]


def _tensor_parallel_of(param: Tensor) -> Any:
    """Return how a parameter is spread over a mesh of its own, `TensorParallel`, or None."""
    if isinstance(param, ShardedTensor):
        return param.spec.tensor_parallel
    return tensor_parallel_of(param)

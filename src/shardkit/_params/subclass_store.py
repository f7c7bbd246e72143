"""Parameters that define themselves how they are gathered, e.g. in 8 bits.

Between steps parameters of a tensor subclass with FSDP2's two hooks are like any other: this rank's
rows, in the parameter's own dtype, updated by the optimizer. For a gather

- ``fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)`` is called on the
  subclass made over these rows (padded to equal numbers on all ranks), with the mesh of the shard
  axis alone. It returns the tensors to send, any number of them, and metadata;
- ``fsdp_post_all_gather(all_gather_outputs, metadata, param_dtype, out=...)`` makes the unsharded
  parameter of the received tensors. The first call has no `out` and returns (tensor, tensors behind
  it). Later calls write into `out`, the same tensor again.

[Note: memory] The received tensors, and those behind the unsharded parameter, have storages that
are made once. `resize_` gives and takes their memory: they belong to the subclass, so no slot can
be put behind them.
"""

from __future__ import annotations

import inspect
import math
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from shardkit._compat import torch_tensors
from shardkit._errors import StateError, WrapError
from shardkit._layout import FlatLayout
from shardkit._params.flat_store import BucketPlan, FlatStore
from shardkit._params.memory import NAME_ATTRIBUTE, FreedLeaf, SlotPool
from shardkit._params.packing import Packing, packing_of
from shardkit._tensor.sharded import ShardedTensor, user_attributes
from shardkit.backends.base import AxisComm, Gather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit._params.sites import ParamEntry
    from shardkit._settings import AllGather
    from shardkit._tensor.ops import StateAllocator
    from shardkit._tensor.spec import ShardSpec
    from shardkit.backends.device import Event

_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
_PARTS = ("__tensor_flatten__", "__tensor_unflatten__")


class SubclassLayout:
    """How a tensor subclass lies over one plain tensor of its shape and dtype."""

    def __init__(self, name: str, param: Any) -> None:
        self.cls: Any = type(param)
        lacking = [each for each in _PARTS if not hasattr(param, each)]
        if lacking:
            msg = (
                f"parameter {name!r} is a {self.cls.__name__}, which has fsdp_pre_all_gather but "
                f"no {lacking[0]}: its plain tensor cannot be found or replaced. Add "
                f"{' and '.join(_PARTS)} to the subclass."
            )
            raise WrapError(msg)
        attributes, self._context = param.__tensor_flatten__()
        inner = [getattr(param, attribute) for attribute in attributes]
        if len(inner) != 1 or inner[0].shape != param.shape or inner[0].dtype != param.dtype:
            found = [f"{t.dtype} {tuple(t.shape)}" for t in inner]
            msg = (
                f"parameter {name!r} of shape {tuple(param.shape)}, {param.dtype}, is a "
                f"{self.cls.__name__} over {found}: a subclass that gathers itself must lie over "
                f"one plain tensor of its own shape and dtype. Quantize in fsdp_pre_all_gather, or "
                f"freeze the parameter: then these tensors are cut and gathered as they are."
            )
            raise WrapError(msg)
        if param.ndim == 0:
            msg = f"parameter {name!r} of {self.cls.__name__} has no rows to shard; give it a dim."
            raise WrapError(msg)
        (self._attribute,) = attributes
        if not isinstance(again := self.wrap(inner[0]), self.cls):
            msg = (
                f"__tensor_unflatten__ of {self.cls.__name__}, the class of parameter {name!r}, "
                f"returns a {type(again).__name__}: this rank's rows would not gather themselves. "
                f"Return a {self.cls.__name__} over the tensor that it gets."
            )
            raise WrapError(msg)

    def plain(self, tensor: Tensor) -> Tensor:
        """Return the plain tensor behind one of the subclass; return others as they are."""
        if isinstance(tensor, self.cls):
            inner: Tensor = getattr(tensor, self._attribute)
            return inner
        return tensor

    def wrap(self, plain: Tensor) -> Any:
        """Return the subclass over another plain tensor."""
        parts = {self._attribute: plain}
        return self.cls.__tensor_unflatten__(parts, self._context, plain.shape, plain.stride())


def subclass_of(entry: ParamEntry) -> SubclassLayout | None:
    """Return how a parameter gathers itself; None if it does not."""
    param = entry.param
    if isinstance(param, ShardedTensor):
        return cast("SubclassLayout | None", param.spec.subclass)
    if not all(hasattr(param, hook) for hook in _HOOKS):
        return None
    return None if packing_of(entry) is not None else SubclassLayout(entry.name, param)


def refuse_hooks_of_piece(param: nn.Parameter) -> None:
    """Refuse hooks that the user has set on a piece, and not on the parameter's class.

    Raises:
        StateError: The piece has such an attribute, which no gather would call.
    """
    assert isinstance(param, ShardedTensor)
    hooks = [name for name in _HOOKS if name in param.local_piece.__dict__]
    if hooks:
        msg = (
            f"the shard of sharded {param.spec.name!r} has {hooks[0]}, which no gather calls: "
            f"fully_shard asks the class of the parameter. Give the parameter a tensor subclass "
            f"that has fsdp_pre_all_gather and fsdp_post_all_gather before fully_shard, or set a "
            f"gather of your own by set_custom_all_gather."
        )
        raise StateError(msg)


class SubclassStore(FlatStore):
    """One parameter that gathers itself; see the module's docstring."""

    subclass: SubclassLayout
    may_alias_shard = False
    keeps_writes = False
    _is_in_use = False
    why_lost = "which says itself how it is gathered (fsdp_pre_all_gather) and not how it is cut"

    def __init__(
        self, plan: BucketPlan, entries: Sequence[ParamEntry], layout: FlatLayout | None = None
    ) -> None:
        (entry,) = entries
        subclass = subclass_of(entry)
        assert subclass is not None
        self.subclass = subclass
        self._shard_mesh = plan.mesh.last_axis()  # Each call makes a new object and new groups.
        super().__init__(plan, entries, layout)

    @classmethod
    def plan_layout(cls, plan: BucketPlan, entries: Sequence[ParamEntry]) -> FlatLayout:
        """Cut into rows, the same number on every rank; the last ranks may have padding rows."""
        shape = tuple(entries[0].param.shape)
        world_size = plan.axis.size
        rows = -(-shape[0] // world_size)
        shard_numel = rows * math.prod(shape[1:])
        return FlatLayout.of_one(shape, (0, math.prod(shape), shard_numel, world_size))

    def _part_of(self, index: int, param: Tensor) -> Tensor:
        del index
        return self.subclass.plain(param)

    def _make_unsharded(self) -> None:
        """Make the unsharded parameter once, from meaningless numbers."""
        plan, shape = self.plan, self.layout.shapes[0]
        inputs, metadata = self._pre_all_gather()
        self._sizes = [tensor.shape for tensor in inputs]
        self._outputs = [
            torch.empty(plan.axis.size * t.numel(), dtype=t.dtype, device=plan.device)
            for t in inputs
        ]
        whole, self._behind = self._local().fsdp_post_all_gather(
            self._unflattened(), metadata, plan.param_dtype
        )
        if whole.shape != shape:  # There are padding rows.
            whole = torch.as_strided(whole, shape, torch.empty(shape, device="meta").stride())
        self.unsharded = [self._new_unsharded(0, whole)]
        storages = [t.untyped_storage() for t in (*self._outputs, *self._behind)]
        self._memory = {s.data_ptr(): (s, s.nbytes()) for s in storages if s.nbytes()}
        self._in_flight: list[Tensor] = []
        self._metadata: Any = None

    def _local(self) -> Any:
        """Return the subclass over this rank's rows, including padding rows."""
        rows = self.shard.view(-1, *self.layout.shapes[0][1:])
        return self.subclass.wrap(rows.to(self.plan.device, non_blocking=True))

    def _pre_all_gather(self) -> tuple[list[Tensor], Any]:
        local, shape, plan = self._local(), self.layout.shapes[0], self.plan
        hook = local.fsdp_pre_all_gather
        given: tuple[Any, ...] = (self._shard_mesh,)
        if len(inspect.signature(hook).parameters) > 1:
            module, like = self.entries[0].sites[0][0], torch.empty(shape, device="meta")
            given = (self._shard_mesh, like.size(), like.stride(), module, plan.policy)
        inputs, metadata = hook(*given)
        return [tensor.contiguous() for tensor in inputs], metadata

    def _unflattened(self) -> tuple[Tensor, ...]:
        return tuple(
            output.view(-1, *size[1:])
            for output, size in zip(self._outputs, self._sizes, strict=True)
        )

    # --- the unsharded parameter ---

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the received tensors and of the unsharded parameter while they exist."""
        return sum(nbytes for _, nbytes in self._memory.values())

    @property
    def has_memory(self) -> bool:
        """Whether the unsharded parameter exists."""
        return self._is_in_use

    @torch.no_grad()
    def acquire(self, pool: SlotPool) -> Event | None:
        """Get memory, and make the tensors to send."""
        self._gathered_version = self.shard_version
        self._allow_use()
        self._is_in_use = True
        for storage, nbytes in self._memory.values():
            storage.resize_(nbytes)  # Nothing happens if the memory was kept.
        self._in_flight, self._metadata = self._pre_all_gather()
        return pool.fence()

    def release(self, pool: SlotPool, fence: Event | None) -> None:
        """Give the memory back to the allocator, which reuses it in the order of the stream."""
        del pool, fence
        self._is_in_use = False
        if not self.keeps_memory:
            self._free_first_memory()
        self._refuse_use()

    def _free_first_memory(self) -> None:
        for storage, _ in self._memory.values():
            storage.resize_(0)

    def gather_jobs(self, comm: AllGather | None) -> list[Gather]:
        """Return the gathers for the backend, one for each tensor to send."""
        axis, jobs = self.plan.axis, []
        for sent, output in zip(self._in_flight, self._outputs, strict=True):
            # As bytes: not every engine supports every dtype. It is a separate alias, because
            # engines raise the version counter of the tensor that they write.
            nbytes = output.numel() * output.dtype.itemsize
            full = torch.empty(0, dtype=torch.uint8, device=self.plan.device)
            full.set_(output.untyped_storage(), 0, (nbytes,), (1,))
            own = full.view(axis.size, -1)[axis.rank]
            jobs.append(Gather(full, own, sent.reshape(-1).view(torch.uint8), comm))
        return jobs

    @torch.no_grad()
    def finish_gather(self) -> None:
        """Make the unsharded parameter of the received tensors."""
        if not self._in_flight:
            return
        (param,) = self.unsharded
        with torch_tensors.preserve_versions((param, *self._behind, *self._outputs)):
            self._local().fsdp_post_all_gather(
                self._unflattened(), self._metadata, self.plan.param_dtype, out=param
            )
        self._in_flight, self._metadata = [], None

    def keep_part(self, axis: AxisComm, fence: Callable[[], Event | None]) -> None:
        """Keep nothing: backward gathers over the whole axis again."""

    def part_of_gradient(self, index: int, grad: Tensor) -> Tensor:
        """Return the plain tensor of a gradient."""
        del index
        return self.subclass.plain(grad)


# --- frozen parameters over several tensors -------------------------------------------------------
#
# See [Note: packed parameters] in `packing`. The unsharded parameters have the users' own classes.
# They are put together once, over views of the unsharded buffer, whose memory comes and goes as in
# any other store.


class PackedStore(FlatStore):
    """See the module's docstring."""

    def __init__(
        self, plan: BucketPlan, entries: Sequence[ParamEntry], layout: FlatLayout | None = None
    ) -> None:
        self._packings = _packings_of(entries)
        self._own_attributes: list[frozenset[str]] = []
        self._leaves: list[list[Tensor]] = []
        super().__init__(plan, entries, layout)

    @classmethod
    def plan_layout(cls, plan: BucketPlan, entries: Sequence[ParamEntry]) -> FlatLayout:
        """Lay out the bytes of the parameters."""
        shapes = [(packing.nbytes,) for packing in _packings_of(entries)]
        return FlatLayout.plan(shapes, world_size=plan.axis.size, itemsize=1)

    def _new_spec(self, index: int, allocator: StateAllocator) -> ShardSpec:
        spec = super()._new_spec(index, allocator)
        spec.packing = self._packings[index]
        return spec

    def _part_of(self, index: int, param: Tensor) -> Tensor:
        # Use the user's own object: `detach` of a class of parameters would lose attributes.
        del param
        return self._packings[index].pack(self.entries[index].param)

    def _view_of(self, index: int) -> Tensor:
        return self._packings[index].unpack(self._storage, self.layout.offsets[index])

    def _new_unsharded(self, index: int, data: Tensor) -> nn.Parameter:
        """Return the parameter to show, and let its leaves raise while it has no memory."""
        packing, entry = self._packings[index], self.entries[index]
        param = packing.as_parameter(data)
        own = param.__dict__
        self._own_attributes.append(frozenset(own))
        attributes = user_attributes(entry.param)
        own.update({k: v for k, v in attributes.items() if k not in own or k in packing.parts.kept})
        own[NAME_ATTRIBUTE] = entry.name
        start = self.layout.offsets[index]
        self._leaves.append(packing.leaves_of(param, self._storage, start))
        for leaf in self._leaves[index]:
            leaf.__dict__[NAME_ATTRIBUTE] = entry.name
        return param

    def attributes_of(self, index: int) -> dict[str, Any]:
        """Return a parameter's attributes, except those of its class, which hold its parts."""
        kept = self._packings[index].parts.kept
        own = self._own_attributes[index]
        attributes = user_attributes(self.entries[index].param)
        return {k: v for k, v in attributes.items() if k not in own or k in kept}

    def rename(self, index: int, name: str) -> None:
        """Give a parameter and its leaves the full name."""
        super().rename(index, name)
        for leaf in self._leaves[index]:
            leaf.__dict__[NAME_ATTRIBUTE] = name

    def written_to(self, index: int) -> list[Tensor]:
        """Return the parameter and its parts: a write to a part raises that part's own counter."""
        return [self.unsharded[index], *self._leaves[index]]

    def drop_originals(self) -> None:
        """Let modules drop their own references to parts."""
        for packing, entry in zip(self._packings, self.entries, strict=True):
            for module, _ in entry.sites:
                packing.parts.release(module)

    def _allow_use(self) -> None:
        super()._allow_use()
        for leaf in chain.from_iterable(self._leaves):
            leaf.__class__ = Tensor

    def _refuse_use(self) -> None:
        super()._refuse_use()
        for leaf in chain.from_iterable(self._leaves):
            leaf.__class__ = FreedLeaf

    def whole_of(self, index: int, full: Tensor) -> Tensor:
        """Return parameter `index` of a gathered bucket, of its own class, over views of `full`."""
        start = full.storage_offset() + self.layout.offsets[index]
        return self._packings[index].unpack(full.untyped_storage(), start)

    def as_parameter(self, index: int, whole: Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Return a whole value as a parameter of its class; `requires_grad` is always False."""
        del requires_grad
        return self._packings[index].as_parameter(whole)

    def sharded_grad(self, index: int, grad: Tensor) -> ShardedTensor:
        """Refuse, since frozen parameters have no gradient."""
        raise AssertionError(self.entries[index].name, grad.shape)


def _packings_of(entries: Sequence[ParamEntry]) -> list[Packing]:
    packings = [packing_of(entry) for entry in entries]
    assert all(packing is not None for packing in packings)
    return packings  # type: ignore[return-value]

"""The store of frozen parameters over several tensors: a flat store of bytes.

See [Note: packed parameters] in `packing`. The unsharded parameters are of the users' own classes,
put together once over views of the unsharded buffer, whose memory comes and goes as any other's.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardkit._layout.flat import FlatLayout
from shardkit._params.flat_store import FlatStore
from shardkit._params.freed import NAME_ATTRIBUTE, FreedLeaf
from shardkit._params.packing import Packing, packing_of
from shardkit._tensor.sharded import ShardedTensor, user_attributes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from shardkit._params.plan import BucketPlan
    from shardkit._params.sites import ParamEntry
    from shardkit._tensor.ops import StateAllocator
    from shardkit._tensor.spec import ShardSpec


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
        # The user's own object: `detach` of a class of parameters leaves attributes out.
        del param
        return self._packings[index].pack(self.entries[index].param)

    def _view_of(self, index: int) -> Tensor:
        return self._packings[index].unpack(self._storage, self.layout.offsets[index])

    def _new_unsharded(self, index: int, data: Tensor) -> nn.Parameter:
        """Return the parameter that is shown, and let its leaves raise where it has no memory."""
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
        """Return a parameter's attributes but those of its class, which hold its parts."""
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
        """Return the parameter and its parts: a write to one of these raises its own counter."""
        return [self.unsharded[index], *self._leaves[index]]

    def drop_originals(self) -> None:
        """Let modules forget the parts that they refer to themselves."""
        for packing, entry in zip(self._packings, self.entries, strict=True):
            if packing.parts.release is not None:
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
        """Return parameter `index` of a gathered bucket: of its class, over views of `full`."""
        start = full.storage_offset() + self.layout.offsets[index]
        return self._packings[index].unpack(full.untyped_storage(), start)

    def as_parameter(self, index: int, whole: Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Return a whole value as a parameter of its class; `requires_grad` is never wanted."""
        del requires_grad
        return self._packings[index].as_parameter(whole)

    def sharded_grad(self, index: int, grad: Tensor) -> ShardedTensor:
        """Frozen parameters have no gradient."""
        raise AssertionError(self.entries[index].name, grad.shape)


def _packings_of(entries: Sequence[ParamEntry]) -> list[Packing]:
    packings = [packing_of(entry) for entry in entries]
    assert all(packing is not None for packing in packings)
    return packings  # type: ignore[return-value]

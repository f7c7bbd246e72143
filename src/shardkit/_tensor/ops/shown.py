"""`ShardedView`: what an index, a slice or a transpose of a sharded tensor returns.

It is looked at when it is used: reading gathers the tensor, writing reaches the pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._host_values import HostValues
from shardkit._tensor.ops.common import refuse

if TYPE_CHECKING:
    from shardkit._tensor.sharded import Dispatcher, ShardedTensor

_dispatcher: Dispatcher


def set_view_dispatcher(dispatcher: Dispatcher) -> None:
    """Say who runs operators with views among their arguments (`ops.views`)."""
    global _dispatcher  # noqa: PLW0603 - set once, at import
    _dispatcher = dispatcher


class ShardedView(HostValues):
    """A view of a sharded tensor.

    Attributes:
        base: The sharded tensor.
        geometry: Tensor on the meta device: shape, strides, offset and dtype in the whole of
            `base`.
    """

    base: ShardedTensor
    geometry: Tensor
    __torch_function__ = _compat.disabled_torch_function

    @staticmethod
    def __new__(cls: type[Self], base: ShardedTensor, geometry: Tensor) -> Self:
        like = base.local_piece
        if geometry.dtype != like.dtype:
            like = torch.empty(0, dtype=geometry.dtype, device=like.device)
        self: Self = _compat.make_wrapper(cls, like, geometry.shape, geometry.stride())
        self.base = base
        self.geometry = geometry
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        """Show the shape and of what it is a view; no communication."""
        return f"ShardedView(shape={tuple(self.shape)}, of={self.base!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return the values, which are nobody's view."""
        result: Tensor = memo.setdefault(id(self), self.detach().clone())
        return result

    def full_tensor(self) -> Tensor:
        """Return the values on every rank, a plain tensor. Cost: `ShardedTensor.full_tensor`."""
        return self.clone()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Read or write by `func`, or view further."""
        del types
        return _dispatcher(func, args, kwargs or {})


def in_whole(func: Any, view: ShardedView, whole: Tensor) -> Tensor:
    """Return the view of `whole`, contiguous, that `view` is of its base."""
    geometry = view.geometry
    if geometry.is_neg():
        why = "it reads the imaginary part of a conjugate. Call full_tensor() and go on with that."
        raise refuse(func, view.base, why)
    typed = whole
    if view.base.spec.is_traced:
        if geometry.dtype != whole.dtype:
            why = "a view in another dtype is read where operators are traced. Use to(dtype)."
            raise refuse(func, view.base, why)
        # There are no storages: the elements are looked up.
        return whole.reshape(-1)[places_of(geometry, whole.device)]
    if geometry.dtype != whole.dtype:
        typed = torch.empty(0, dtype=geometry.dtype, device=whole.device)
        typed.set_(whole.untyped_storage())
    offset = int(geometry.storage_offset())
    shown = typed.as_strided(geometry.shape, geometry.stride(), offset)
    return shown.conj() if geometry.is_conj() else shown


def places_of(geometry: Tensor, device: torch.device) -> Tensor:
    """Return where the elements of a view lie in the flattened whole: int64, of its shape."""
    places = torch.full(geometry.shape, int(geometry.storage_offset()), device=device)
    for dim, (size, stride) in enumerate(zip(geometry.shape, geometry.stride(), strict=True)):
        along = torch.arange(size, device=device) * stride
        places += along.view(-1, *[1] * (geometry.ndim - dim - 1))
    return places

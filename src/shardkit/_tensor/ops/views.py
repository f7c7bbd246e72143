"""Views of sharded tensors, to be written to: ``weight[0].zero_()``, ``nn.init.dirac_(weight)``.

Initialization writes rows, columns and slices. Which elements a view shows is known on every rank,
so each writes those that it owns. Reading would need the elements of other ranks and is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._errors import ShardedTensorError
from shardkit._tensor.ops.common import note_write, refuse
from shardkit._tensor.ops.structural import DEPEND_ON_VALUES, reshape
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tree import iter_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

_aten = torch.ops.aten


class ShardedView(Tensor):
    """A view of a sharded tensor that can be written to, not read.

    Attributes:
        base: The sharded tensor.
        geometry: On the meta device: shape, strides and offset in the whole of `base`.
    """

    base: ShardedTensor
    geometry: Tensor
    __torch_function__ = _compat.disabled_torch_function

    @staticmethod
    def __new__(cls: type[Self], base: ShardedTensor, geometry: Tensor) -> Self:
        self: Self = _compat.make_wrapper(cls, base, geometry.shape, geometry.stride())
        self.base = base
        self.geometry = geometry
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedView(shape={tuple(self.shape)}, of={self.base!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Write by `func`, or view further."""
        del types
        kwargs = kwargs or {}
        target = args[0] if args else None
        if type(target) is ShardedView:
            if func.is_view:
                return _view_of(target.base, func, (target.geometry, *args[1:]), kwargs)
            if _writes_elements(func) and not _has_sharded([args[1:], kwargs]):
                return _write(func, target, args[1:], kwargs)
        found = next(t for t in iter_tensors([args, kwargs]) if type(t) is ShardedView)
        raise _refuse_reading(func, found.base)


def _refuse_reading(func: Any, base: ShardedTensor) -> ShardedTensorError:
    spec = base.spec
    return ShardedTensorError(
        f"{func} reads a view (an index, a slice, a transpose) of sharded {spec.name!r} of shape "
        f"{tuple(base.shape)}. Its values are spread over the ranks, so a view can only be written "
        f"to, with plain values, as by weight[0].zero_(). To read values call full_tensor() on the "
        f"parameter, on every rank, and index the result. If this is a module's weight used "
        f"outside that module's forward, shard both modules in one group, call "
        f"register_fsdp_forward_method() on the method that uses it, or unshard() around the use."
    )


_ELEMENTWISE_WRITES = (
    _aten.copy_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.zero_.default,
    _aten.masked_fill_.Scalar,
    _aten.masked_fill_.Tensor,
    _aten.index_fill_.int_Scalar,
    _aten.index_fill_.int_Tensor,
    _aten.index_put_.default,
)


def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a view operator; views that a backward would have to read are refused."""
    tensor = args[0]
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise refuse(func, tensor, "it needs more than a piece.")
    geometry = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return _view_of(tensor, func, (geometry, *args[1:]), kwargs)


def view_as_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``view``: sharded if the shape stays, else a view."""
    is_same = tuple(args[1]) == tuple(args[0].shape)
    return (reshape if is_same else view)(func, args, kwargs)


def write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write some elements of a sharded tensor, as by ``index_put_``."""
    target = args[0]
    if type(target) is not ShardedTensor or _has_sharded([args[1:], kwargs]):
        sharded = next(t for t in iter_tensors([args, kwargs]) if type(t) is ShardedTensor)
        raise refuse(func, sharded, "its other operands must be plain; for masks use masked_fill_.")
    geometry = torch.empty(target.shape, dtype=target.dtype, device="meta")
    _write(func, ShardedView(target, geometry), args[1:], kwargs)
    return target


def eye(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write the identity (``torch.eye(out=...)``)."""
    target = kwargs["out"]
    if tuple(args) != tuple(target.shape):
        raise refuse(func, target, f"the result has shape {tuple(args)}.")
    whole = torch.eye(*args, dtype=target.dtype, device=target.device)
    target.local_piece.copy_(target.spec.slice_full(whole))
    target.spec.annotate_sharding(target.local_piece)
    note_write(target)
    return target


def _view_of(base: ShardedTensor, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    if isinstance(result, Tensor):
        return ShardedView(base, result)
    return [ShardedView(base, item) for item in result]


def _writes_elements(func: Any) -> bool:
    """Whether an operator writes each element of its first argument from that element alone."""
    if func in _ELEMENTWISE_WRITES:
        return True
    if not func.name().split(".")[0].endswith("_"):
        return False
    is_random = torch.Tag.nondeterministic_seeded in func.tags and func not in DEPEND_ON_VALUES
    return is_random or torch.Tag.pointwise in func.tags


def _has_sharded(tree: Sequence[Any]) -> bool:
    return any(type(t) in (ShardedTensor, ShardedView) for t in iter_tensors(tree))


def _write(func: Any, target: ShardedView, args: Any, kwargs: dict[str, Any]) -> ShardedView:
    """Write to a copy of the view, of which this rank's elements go into its piece."""
    base, geometry = target.base, target.geometry
    piece, spec = base.local_piece, base.spec
    if spec.is_traced and spec.axis.size > 1:
        # Which elements a rank owns would be a number in its graph, and graphs would differ.
        raise refuse(func, base, "replicas (torch_xla.launch) can write whole tensors only.")
    places = torch.full(geometry.shape, int(geometry.storage_offset()), device=piece.device)
    for dim, (size, stride) in enumerate(zip(geometry.shape, geometry.stride(), strict=True)):
        along = torch.arange(size, device=piece.device) * stride
        places += along.view(-1, *[1] * (geometry.ndim - dim - 1))
    places = spec.local_indices(places)
    is_here = (places >= 0) & (places < piece.numel())
    # Laid out like the view, since random numbers may depend on that; the rest is never touched.
    whole = torch.empty_strided(
        geometry.shape, geometry.stride(), dtype=piece.dtype, device=piece.device
    )
    whole.zero_()
    whole[is_here] = piece[places[is_here]]
    func(whole, *args, **kwargs)
    piece[places[is_here]] = whole[is_here]
    spec.annotate_sharding(piece)
    note_write(base)
    return target

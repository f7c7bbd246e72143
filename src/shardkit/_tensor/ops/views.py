"""Views of sharded tensors, and writes to some of their elements: ``weight[0].zero_()``.

Which elements a view shows is known on every rank. So a write by which each element changes on its
own needs no communication: each rank writes those that it owns. All else reads, and gathers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._tensor.ops.common import (
    check_in_place,
    cut_gradients,
    note_write,
    refuse,
    runs_on_wholes,
)
from shardkit._tensor.ops.shown import ShardedView, places_of
from shardkit._tensor.ops.structural import fills_by_shape, reshape
from shardkit._tensor.ops.wholes import followed, gathered, whole
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.written_values import note_written
from shardkit._tree import iter_tensors, map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

_aten = torch.ops.aten

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
_READ_NO_VALUES = (
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
)


def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a view operator; nothing is read."""
    tensor = args[0]
    tensor.cut_gradient()
    geometry = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return _view_of(tensor, func, (geometry, *args[1:]), kwargs)


def view_of_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run what views in a given size (``view``, ``expand``): sharded if that is what it has."""
    tensor, size = args[0], list(args[1])
    if -1 in size and func is not _aten.expand.default:
        known = math.prod(dim for dim in size if dim != -1)
        size[size.index(-1)] = tensor.numel() // known if known else 0
    elif len(size) == tensor.ndim:
        size = [old if new == -1 else new for new, old in zip(size, tensor.shape, strict=True)]
    return (reshape if size == list(tensor.shape) else view)(func, args, kwargs)


def _view_of(base: ShardedTensor, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    if isinstance(result, Tensor):
        return ShardedView(base, result)
    return [ShardedView(base, item) for item in result]


def dispatcher_of_views(
    dispatch: Callable[[Any, Any, Any], Any],
) -> Callable[[Any, Any, Any], Any]:
    """Return what runs operators with views among their arguments, by `dispatch` in the end."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(type(t) is ShardedView for t in iter_tensors([args, kwargs], depth=0)):
            return dispatch(func, args, kwargs)
        cut_gradients(args, kwargs)
        return followed(run_on_views(func, args, kwargs), args, kwargs)

    def run_on_views(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and type(args[0]) is ShardedView:
            handler = _handler_of_view(func)
            if handler is not None:
                return handler(func, args, kwargs)
        if runs_on_wholes(args, kwargs) or _writes_views(func, args, kwargs):
            return whole(func, args, kwargs)
        args, kwargs = _without_views(func, args), _without_views(func, kwargs)
        has_sharded = any(type(t) is ShardedTensor for t in iter_tensors([args, kwargs], depth=0))
        return dispatch(func, args, kwargs) if has_sharded else func(*args, **kwargs)

    return run


def _handler_of_view(func: Any) -> Callable[[Any, Any, Any], Any] | None:
    """Return what runs an operator whose first argument is a view; None: as any other."""
    if func.is_view:
        return _view_further
    if _writes_elements(func):
        return write
    return _make_alike if func in _READ_NO_VALUES else None


def _view_further(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _view_of(args[0].base, func, (args[0].geometry, *args[1:]), kwargs)


def _make_alike(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(_empty_as(args[0]), *args[1:], **kwargs)


def _empty_as(shown: ShardedView) -> Tensor:
    geometry = shown.geometry
    return torch.empty_strided(
        geometry.shape, geometry.stride(), dtype=geometry.dtype, device=shown.device
    )


def _writes_views(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    changed, filled = _compat.written_arguments(func)
    written = [kwargs.get(k) if isinstance(k, str) else args[k] for k in (*changed, *filled)]
    return any(type(t) is ShardedView for t in iter_tensors(written, depth=0))


def _without_views(func: Any, tree: Any) -> Any:
    return map_tensors(lambda t: gathered(func, t) if type(t) is ShardedView else t, tree)


def write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write some elements of a sharded tensor or a view, as by ``index_put_``."""
    target, others = args[0], args[1:]
    if type(target) not in (ShardedTensor, ShardedView):
        return whole(func, args, kwargs)
    base = target.base if type(target) is ShardedView else target
    check_in_place(func, base, others, kwargs)
    others, kwargs = (
        map_tensors(lambda tensor: gathered(func, tensor), tree) for tree in (others, kwargs)
    )
    shown = target
    if type(target) is ShardedTensor:
        shown = ShardedView(base, torch.empty(base.shape, dtype=base.dtype, device="meta"))
    _write(func, shown, others, kwargs)
    return target


def _writes_elements(func: Any) -> bool:
    """Whether an operator writes each element of its first argument from that element alone."""
    if func in _ELEMENTWISE_WRITES:
        return True
    if not func.name().split(".")[0].endswith("_"):
        return False
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    return fills_by_shape(func) or (torch.Tag.pointwise in func.tags and not is_random)


def _write(func: Any, target: ShardedView, args: Any, kwargs: dict[str, Any]) -> None:
    """Write to a copy of the view, of which this rank's elements go into its piece."""
    base, geometry = target.base, target.geometry
    piece, spec = base.local_piece, base.spec
    if torch.is_grad_enabled() and base.requires_grad:
        why = (
            "a view of it is written, and autograd would have to follow. Write under "
            "torch.no_grad(), or compute a new tensor, as by torch.where."
        )
        raise refuse(func, base, why)
    if geometry.dtype != base.dtype or geometry.is_conj() or geometry.is_neg():
        why = "a view in another dtype is written. Write the tensor itself."
        raise refuse(func, base, why)
    if spec.is_traced and spec.axis.size > 1:
        # Which elements a rank owns would be a number in its graph, and graphs would differ.
        why = "replicas (torch_xla.launch) can write whole tensors only, as by copy_()."
        raise refuse(func, base, why)
    places = spec.local_indices(places_of(geometry, piece.device))
    is_here = (places >= 0) & (places < piece.numel())
    # Laid out like the view, since random numbers may depend on that; the rest is never touched.
    values = _empty_as(target).zero_()
    values[is_here] = piece[places[is_here]]
    func(values, *args, **kwargs)
    piece[places[is_here]] = values[is_here]
    spec.annotate_sharding(piece)
    note_write(base, is_followed=True)
    drawn = [values] if fills_by_shape(func) else []
    note_written(base, lambda: [*iter_tensors([args, kwargs], depth=0), *drawn], part_by=func)

"""Operators that keep the cut: copies, new tensors, fills, and views."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardkit._compat import torch_autograd, torch_tensors
from shardkit._tensor.ops.wholes import (
    ShardedView,
    check_in_place,
    first_sharded,
    gathered,
    note_write,
    piece_beside,
    places_of,
    refuse,
    store,
    whole,
    wrap,
)
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.written_values import is_param, note_update, note_written
from shardkit._tree import iter_tensors, map_tensors

_aten = torch.ops.aten


def structural(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that makes a tensor of the same shape from one tensor."""
    tensor = args[0]
    if func is _aten.empty_like.default and torch_autograd.in_user_function():
        return _plain_like(func, args, kwargs)
    kwargs.pop("memory_format", None)
    return wrap(func(tensor.local_piece, *args[1:], **kwargs), tensor.spec)


def _plain_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Make a plain, whole tensor, which each rank fills, usually with a gradient."""
    args[0].cut_gradient(is_gathered=True)
    geometry = args[0].local_piece.new_empty(()).expand(args[0].shape)
    kwargs["memory_format"] = torch.contiguous_format
    result: Tensor = func(geometry, *args[1:], **kwargs)
    return result


def same_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``detach``, views of the same shape, and similar operators over the same memory.

    The piece itself is passed on: a view made inside a dispatch has its own version counter, and
    writes through it would not be noticed.
    """
    tensor = args[0]
    if torch.is_inference_mode_enabled() and not tensor.is_inference():
        with torch.inference_mode(mode=False):  # Views of ordinary tensors are ordinary ones.
            return same_memory(func, args, kwargs)
    result = ShardedTensor(tensor.local_piece, tensor.spec, tensor.flat, tensor.flat_start)
    # Not of `detach`, by which Parameters are made: torch does not swap what has weak references.
    if func is not _aten.detach.default and "data_refs" in tensor.__dict__:
        result.share_data(tensor)
    return result


def state_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``zeros_like`` and similar operators, end to end with the bucket's other parameters.

    In a user's `autograd.Function` the result is plain: it is for results of the rank's own data.
    """
    tensor = args[0]
    if torch_autograd.in_user_function():
        return _plain_like(func, args, kwargs)
    kwargs.pop("memory_format", None)
    allocator = tensor.spec.state_allocator
    is_plain = (
        kwargs.get("device") in (None, tensor.device)
        and kwargs.get("layout") in (None, torch.strided)
        and not kwargs.get("pin_memory")
    )
    placed = None
    if allocator is not None and is_plain:
        dtype = kwargs.get("dtype") or tensor.dtype
        placed = allocator.allocate(tensor.spec, dtype, tensor.device)
    if placed is None:
        return structural(func, args, kwargs)
    flat, piece = placed
    if func is not _aten.zeros_like.default:
        piece.fill_(1 if func is _aten.ones_like.default else args[1])
    return ShardedTensor(piece, tensor.spec, flat)


def new_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``new_zeros`` and similar operators: sharded for the same shape, else a plain tensor."""
    tensor, size, *rest = args
    kwargs.pop("memory_format", None)
    if tuple(size) != tuple(tensor.shape) or torch_autograd.in_user_function():
        return func(tensor.local_piece, size, *rest, **kwargs)
    piece = func(tensor.local_piece, [tensor.local_piece.numel()], *rest, **kwargs)
    return wrap(piece, tensor.spec)


def plain_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run ``new_empty``: a plain tensor even for the same shape, as room for a whole matrix.

    So `nn.init.orthogonal_` draws and decomposes the whole on every rank; each keeps its piece. But
    if a device is named, as in copies of state dicts to the host, the same shape is sharded.
    """
    is_packed = func is _aten.new_empty.default
    if is_packed and kwargs.get("device") is not None and tuple(args[1]) == tuple(args[0].shape):
        return new_like(func, args, kwargs)  # type: ignore[no-any-return]
    result: Tensor = func(args[0].local_piece, *args[1:], **kwargs)
    return result


def refuse_resize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse an operator that gives a tensor other memory or another shape."""
    del kwargs
    target = args[0]
    if type(target) is ShardedTensor:
        why = (
            "its shape and its memory belong to the model. Make a new tensor, or write values by "
            "copy_()."
        )
        raise refuse(func, target, why)
    why = "a plain tensor would share the memory of a shard. Use full_tensor(), or to_local()."
    raise refuse(func, first_sharded(args), why)


def copy_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if type(target) is not ShardedTensor:
        return whole(func, args, kwargs)
    is_sharded = type(source) is ShardedTensor
    if is_sharded and source.spec.same_cut(target.spec):
        piece = source.local_piece
    else:
        check_in_place(func, target, source)
        piece = piece_beside(func, source, target.spec)
    func(target.local_piece, piece, *args[2:], **kwargs)
    target.spec.annotate_sharding(target.local_piece)
    # A result of operators, as in nn.init.trunc_normal_, updates the present values.
    note_write(target, is_followed=not is_sharded or (source.flat is None and not is_param(source)))
    if not is_sharded:
        note_written(target, lambda: [source])
    return target


def random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor and keep this rank's piece: the same numbers at every world size."""
    tensor = args[0]
    depends = any(isinstance(arg, Tensor) for arg in (*args[1:], *kwargs.values()))
    if type(tensor) is not ShardedTensor or depends:
        return whole(func, args, kwargs)
    kwargs.pop("memory_format", None)
    local = tensor.local_piece
    full = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
    result = func(full, *args[1:], **kwargs)
    if torch_tensors.is_mutable_op(func):
        store(func, tensor, full)
        return tensor
    return wrap(tensor.spec.slice_full(result).clone(), tensor.spec)


_FILLS = (
    *("uniform_", "normal_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_"),
    *("uniform", "normal_functional", "exponential", "geometric", "cauchy", "log_normal", "random"),
    *("bernoulli_", "bernoulli.p", "rand_like", "randn_like", "randint_like"),
)


def fills_by_shape(func: Any) -> bool:
    """Whether a random operator reads the shape of its first operand, and not its values."""
    namespace, name = func.name().split("::")
    return namespace == "aten" and (name in _FILLS or name.split(".")[0] in _FILLS)


# --- views ----------------------------------------------------------------------------------------
#
# Every rank knows which elements a view shows. So a write that changes each element independently
# needs no communication: each rank writes the elements that it owns. All other operators read, and
# gather.

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
READ_NO_VALUES = (
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
    """Run a view operator without reading values."""
    tensor = args[0]
    tensor.cut_gradient()
    geometry = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return view_of(tensor, func, (geometry, *args[1:]), kwargs)


def view_of_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a view of a given size (``view``, ``expand``): sharded if the size does not change."""
    tensor, size = args[0], list(args[1])
    if -1 in size and func is not _aten.expand.default:
        known = math.prod(dim for dim in size if dim != -1)
        size[size.index(-1)] = tensor.numel() // known if known else 0
    elif len(size) == tensor.ndim:
        size = [old if new == -1 else new for new, old in zip(size, tensor.shape, strict=True)]
    return (same_memory if size == list(tensor.shape) else view)(func, args, kwargs)


def view_of(base: ShardedTensor, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if torch.is_inference_mode_enabled() and not base.is_inference():
        with torch.inference_mode(mode=False):  # As in `same_memory`.
            return view_of(base, func, args, kwargs)
    result = func(*args, **kwargs)
    if isinstance(result, Tensor):
        return ShardedView(base, result)
    return [ShardedView(base, item) for item in result]


def empty_as(shown: ShardedView) -> Tensor:
    geometry = shown.geometry
    return torch.empty_strided(
        geometry.shape, geometry.stride(), dtype=geometry.dtype, device=shown.device
    )


def write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write some elements of a sharded tensor or a view, e.g. by ``index_put_``."""
    target, others = args[0], args[1:]
    if type(target) not in (ShardedTensor, ShardedView):
        return whole(func, args, kwargs)
    base = target.base if type(target) is ShardedView else target
    check_in_place(func, target, others, kwargs)
    shown = _shown(target)
    _check_writable(func, shown)
    pieces = _as_pieces(args, shown) if torch.Tag.pointwise in func.tags else None
    if pieces is not None and next(iter_tensors(kwargs, depth=0), None) is None:
        func(*pieces, **kwargs)
        note_write(base, is_followed=True)
        note_update(func, (base,))
        return target
    others, kwargs = map_tensors(lambda tensor: gathered(func, tensor), (others, kwargs))
    _write(func, shown, others, kwargs)
    return target


def _shown(tensor: Any) -> ShardedView:
    """Return a view, or for a sharded tensor the view of all of it."""
    if type(tensor) is ShardedView:
        return tensor
    return ShardedView(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def _as_pieces(args: tuple[Any, ...], target: ShardedView) -> list[Any] | None:
    """Return arguments with pieces for tensors, if all show what the written view shows; else None.

    These are views of whole tensors that are cut in the same way. A view may be in any order, such
    as a transpose, and in another dtype, such as bytes. Plain tensors may be numbers.
    """
    pieces = []
    for arg in args:
        if type(arg) in (ShardedTensor, ShardedView):
            shown = _shown(arg)
            base, geometry = shown.base, shown.geometry
            is_whole = geometry.nbytes == base.nbytes and _has_no_gaps(geometry)
            is_cut_so = base.spec.same_cut(target.base.spec)
            is_seen_so = shown.shape == target.shape and _order(geometry) == _order(target.geometry)
            if base.spec.is_traced or not (is_whole and is_cut_so and is_seen_so):
                return None
            pieces.append(base.local_piece.view(geometry.dtype))
        elif isinstance(arg, Tensor) and (arg.dim() or not target.ndim):
            return None
        else:
            pieces.append(arg)
    return pieces


def _order(geometry: Tensor) -> list[tuple[int, int]]:
    """Return the stride and the size of each dim that has several elements."""
    pairs = zip(geometry.stride(), geometry.shape, strict=True)
    return [(stride, size) for stride, size in pairs if size > 1]


def _has_no_gaps(geometry: Tensor) -> bool:
    """Say whether the elements of a view lie one after the other, in any order of its dims."""
    num = 1
    for stride, size in sorted(_order(geometry)):
        if stride != num:
            return False
        num *= size
    return True


def writes_elements(func: Any) -> bool:
    """Whether an operator writes each element of its first argument from that element alone."""
    if func in _ELEMENTWISE_WRITES:
        return True
    if not func.name().split(".")[0].endswith("_"):
        return False
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    return fills_by_shape(func) or (torch.Tag.pointwise in func.tags and not is_random)


def _check_writable(func: Any, target: ShardedView) -> None:
    base, geometry = target.base, target.geometry
    spec = base.spec
    if torch.is_grad_enabled() and base.requires_grad:
        why = (
            "a view of it is written, and autograd would have to follow. Write under "
            "torch.no_grad(), or compute a new tensor, as by torch.where."
        )
        raise refuse(func, base, why)
    if geometry.is_conj() or geometry.is_neg():
        why = "a view of conjugates is written. Write the tensor itself."
        raise refuse(func, base, why)
    if geometry.itemsize > base.itemsize:
        why = (
            "a view in a dtype of larger elements is written, which may lie on two ranks. Write "
            "the tensor itself, or a view in a dtype of smaller elements."
        )
        raise refuse(func, base, why)
    if spec.is_traced and geometry.dtype != base.dtype:
        why = "a view in another dtype is written where operators are traced. Write the tensor."
        raise refuse(func, base, why)
    if spec.is_traced and spec.axis.size > 1:
        # The elements that a rank owns would be numbers in its graph, and graphs would differ.
        why = "replicas (torch_xla.launch) can write whole tensors only, as by copy_()."
        raise refuse(func, base, why)


def _write(func: Any, target: ShardedView, args: Any, kwargs: dict[str, Any]) -> None:
    """Write to a copy of the view, of which this rank's elements go into its piece."""
    base, geometry = target.base, target.geometry
    piece, spec = base.local_piece, base.spec
    if geometry.dtype != piece.dtype:
        piece = piece.view(geometry.dtype)
    places = places_of(geometry, piece.device)
    num_parts = base.itemsize // geometry.itemsize  # Elements of the view in one of the tensor.
    if num_parts == 1:
        places = spec.local_indices(places)
    else:
        places = spec.local_indices(places // num_parts) * num_parts + places % num_parts
    is_here = (places >= 0) & (places < piece.numel())
    # It is laid out like the view, since random numbers may depend on that; the rest stays unused.
    values = empty_as(target).zero_()
    values[is_here] = piece[places[is_here]]
    func(values, *args, **kwargs)
    piece[places[is_here]] = values[is_here]
    spec.annotate_sharding(piece)
    note_write(base, is_followed=True)
    drawn = [values] if fills_by_shape(func) else []
    note_written(base, lambda: [*iter_tensors([args, kwargs], depth=0), *drawn], part_by=func)

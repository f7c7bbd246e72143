"""Reductions over the whole tensor: on the pieces, then ONE collective; norms, and norms of lists.

Each axis of tensor parallelism that splits the tensor takes one more collective.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit._compat import torch_tensors
from shardkit._errors import ShardedTensorError
from shardkit._tensor.client_answers import ClaimsClass
from shardkit._tensor.ops.wholes import all_reduce, first_sharded, gathered, refuse, whole
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.spec import Axis, part_sums_of
from shardkit._tree import iter_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


# --- what a reduction of a whole tensor returns ---------------------------------------------------
#
# FSDP2 returns a DTensor there, on which scripts call ``full_tensor()``. Other scripts ask whether
# it is a DTensor, and sum it over the ranks if not.


class GlobalNumber(ClaimsClass, Tensor):
    """A number over all ranks: the same one on each of them, with nothing to gather.

    It is a tensor like others. What is computed from such numbers alone is such a number again;
    with other tensors, it is a plain tensor. Pickles and ``repr`` are those of the plain tensor.
    """

    tells_torch_the_truth = True  # Torch reads more of a DTensor than such a number has.

    def full_tensor(self) -> Tensor:
        """Return the plain tensor over the same memory. No communication."""
        return plain(self)

    @property
    def to_local(self) -> Any:
        """Missing attribute: with a DTensor it would be this rank's part, which others add to.

        Raises:
            AttributeError: Always, so that `hasattr` is False.
        """
        msg = (
            "a norm or another reduction of a sharded tensor has no to_local(): it is the number "
            "of all ranks already, and must not be summed over them. Use it as it is, or by "
            "full_tensor(); for norms of gradients there are shardkit's clip_grad_norm_ and "
            "torch.nn.utils.get_total_norm."
        )
        raise AttributeError(msg)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function as on a plain tensor."""
        del types
        kwargs = kwargs or {}
        with torch_tensors.plain_torch_functions():
            result = func(*args, **kwargs)
        if type(result) is not Tensor or func.__name__ == "__get__":  # An attribute, as `_base`.
            return result
        # One norm of a list makes their stack global, see `foreach_norm`.
        is_global = func is torch.stack or all(
            type(each) is GlobalNumber for each in iter_tensors((args, kwargs), depth=0)
        )
        return as_global(result) if is_global else result

    def __repr__(self) -> str:  # type: ignore[override]
        """Show the plain tensor."""
        return repr(plain(self))

    def __format__(self, spec: str) -> str:
        """Format the number as a plain tensor does."""
        return format(plain(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the plain tensor."""
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy the number."""
        memo[id(self)] = result = as_global(plain(self).detach().clone())
        return result


def as_global(value: Tensor) -> Tensor:
    """Return a plain tensor as a `GlobalNumber` over the same memory."""
    return value.as_subclass(GlobalNumber)


def plain(number: Tensor) -> Tensor:
    """Return a `GlobalNumber` as a plain tensor over the same memory."""
    with torch_tensors.plain_torch_functions():
        return number.as_subclass(Tensor)


# --- reductions -----------------------------------------------------------------------------------


def covers_all(tensor: ShardedTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a reduction with arguments (dim, keepdim) after the tensor leaves no dim.

    False also for dims that the tensor does not have, or that come twice: torch raises for the
    whole tensor.
    """
    dims = args[0] if args else kwargs.get("dim")
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return True
    dims = [dims] if isinstance(dims, int) else list(dims)
    ndim = max(tensor.ndim, 1)
    return sorted(dim + ndim if dim < 0 else dim for dim in dims) == list(range(ndim))


def reduction(fn: Handler, *, dims_at: int = 1, takes_complex: bool = False) -> Handler:
    """Return a handler: `fn` if no dim is left, else the operator on whole tensors.

    Args:
        fn: Function that returns a number.
        dims_at: Position of the operator's (dim, keepdim).
        takes_complex: Whether `fn` can sum complex numbers over the ranks.
    """

    @functools.wraps(fn)
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, dims = args[0], args[dims_at:]
        if type(tensor) is not ShardedTensor or "out" in kwargs:
            return whole(func, args, kwargs)
        if tensor.is_complex() and not takes_complex:
            return whole(func, args, kwargs)
        if not covers_all(tensor, dims, kwargs):
            return whole(func, args, kwargs)
        tensor.cut_gradient()
        value = fn(func, args, kwargs)
        keepdim = dims[1] if len(dims) > 1 else kwargs.get("keepdim", False)
        return as_global(value.reshape((1,) * tensor.ndim) if keepdim else value)

    return handler


def reduce_by(op: str, local_reduce: Callable[..., Tensor], *, neutral: int = 0) -> Handler:
    """Return a handler that reduces the piece by `local_reduce`, then over the ranks by `op`.

    Elements of value `neutral` have no effect.
    """

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        del func
        tensor = args[0]
        piece = tensor.spec.without_padding(tensor.local_piece, neutral)
        dtype = kwargs.get("dtype", piece.dtype)
        options = {"dtype": kwargs["dtype"]} if "dtype" in kwargs else {}
        if dtype.is_floating_point and local_reduce is torch.sum:
            options = {"dtype": torch.promote_types(dtype, torch.float32)}  # See `mean`.
        local = local_reduce(piece, **options)
        wire_dtype = torch.uint8 if local.dtype == torch.bool else local.dtype
        value = local.to(wire_dtype, copy=True)
        all_reduce(value, tensor.spec, op)
        return value.to(dtype if options else local.dtype)

    return reduction(handler)


def extreme(op: str) -> Handler:
    """Return a handler of max or min; NaN on one rank gives NaN on all."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        del kwargs
        tensor = args[0]
        if tensor.numel() == 0:
            raise refuse(func, tensor, "it has no elements, so there is no result.")
        identity = _identity(op, tensor.dtype)
        local = tensor.spec.without_padding(tensor.local_piece, identity)
        value = identity if local.numel() == 0 else getattr(local, op)()
        pair = torch.stack([torch.as_tensor(value, dtype=local.dtype, device=local.device)] * 2)
        for axis in tensor.spec.axes:
            reduce_extremes(pair, axis, op)
        return pair[0].clone()

    return reduction(handler)


def _identity(op: str, dtype: torch.dtype) -> Any:
    """Return the maximum or minimum of no element."""
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


def reduce_extremes(values: Tensor, axis: Axis, op: str) -> None:
    """All-reduce `values` by max or min, in place; gloo drops NaN, so NaN travels separately."""
    if axis.size == 1:
        return
    if not values.is_floating_point():
        on_wire = values.to(torch.int64)
        axis.all_reduce(on_wire, op)
        values.copy_(on_wire)
        return
    sign = 1 if op == "max" else -1
    is_nan = values.isnan()
    numbers = values.to(torch.float64).masked_fill(is_nan, -sign * float("inf"))
    on_wire = torch.cat([numbers, is_nan.to(torch.float64) * sign])
    axis.all_reduce(on_wire, op)
    numbers, nans = on_wire.chunk(2)
    values.copy_(numbers.masked_fill(nans != 0, float("nan")))


@reduction
def mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor = args[0]
    dtype = kwargs.get("dtype") or tensor.dtype
    if not dtype.is_floating_point:
        return whole(func, args, kwargs)  # type: ignore[no-any-return]  # Torch raises the error.
    wide = torch.promote_types(dtype, torch.float32)  # A sum of many fp16 numbers overflows.
    total: Tensor = tensor.spec.without_padding(tensor.local_piece, 0).sum(dtype=wide)
    all_reduce(total, tensor.spec, "sum")
    mean: Tensor = (total / tensor.numel()).to(dtype)
    return mean


def agree(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whether two tensors are ``equal`` or ``allclose`` on all ranks."""
    spec = first_sharded(args).spec
    both = args[:2]
    if any(arg.shape != spec.shape for arg in both):
        return whole(func, args, kwargs)
    pieces = []
    for arg in both:
        if type(arg) is ShardedTensor and arg.spec.same_cut(spec):
            piece = arg.local_piece
        else:
            piece = spec.slice_full(gathered(func, arg))
        pieces.append(spec.without_padding(piece, 0))
    is_same = func(*pieces, *args[2:], **kwargs)
    same = torch.tensor(int(is_same), device=pieces[0].device)
    all_reduce(same, spec, "min")
    return bool(same.item())


def item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del kwargs
    return func(args[0].spec.gather(args[0].local_piece))


# --- norms ----------------------------------------------------------------------------------------

_INF = float("inf")


def sharded_norms(
    tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None
) -> list[Tensor]:
    """Return the global norm of each tensor as plain 0-dim tensors.

    Powers are summed in fp64, so that neither many ranks nor squares of large values spoil the
    norm. The result is also right if this rank owns nothing of a tensor.

    Cost: one all-reduce of 8 bytes per tensor (16 for max and min) for each process group, of which
    there is usually one.
    """
    neutral = _INF if order < 0 else 0.0
    pieces = [
        t.spec.without_padding(t.local_piece, neutral) if type(t) is ShardedTensor else t
        for t in tensors
    ]
    norms = _local_norms(pieces, order, dtype)
    is_power = order not in (0.0, _INF, -_INF)
    if is_power:
        norms.pow_(order)
        for i, piece in enumerate(pieces):
            if order < 0 and piece.numel() == 0:
                norms[i] = 0  # Not 0 ** order: there is nothing to add.
    for i, tensor in enumerate(tensors):
        # Several ranks of a sum have these powers in common.
        if abs(order) != _INF and type(tensor) is ShardedTensor and tensor.spec.num_counted > 1:
            norms[i] /= tensor.spec.num_counted
    for axis, indices in by_axis(tensors).items():
        # Not by a list of indices, which would be copied to the device with a wait.
        is_whole = len(indices) == len(tensors)
        picked = norms if is_whole else torch.stack([norms[i] for i in indices])
        _reduce_norms(picked, axis, order)
        if not is_whole:
            torch_tensors.foreach_copy([norms[i] for i in indices], picked.unbind())
    _sum_parts(norms, tensors, order)
    if is_power:
        norms.pow_(1.0 / order)
    wanted = [(dtype or tensor.dtype).to_real() for tensor in tensors]
    by_dtype = {each: norms.to(each).unbind() for each in dict.fromkeys(wanted)}
    return [by_dtype[each][i] for i, each in enumerate(wanted)]


def _reduce_norms(values: Tensor, axis: Axis, order: float) -> None:
    """All-reduce norms of an infinite order, or powers of others, in place."""
    if abs(order) == _INF:
        reduce_extremes(values, axis, "max" if order > 0 else "min")
    else:
        axis.all_reduce(values, "sum")


def _local_norms(pieces: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> Tensor:
    """Return the norms of the pieces in fp64; an empty piece does not change the global norm."""
    empty = _INF if order == -_INF else 0.0
    pieces = [piece.abs() if piece.is_complex() else piece for piece in pieces]
    dtype = None if dtype is None else dtype.to_real()
    kinds = {piece.dtype for piece in pieces}
    for kind in kinds:
        if not kind.is_floating_point:  # Also on ranks whose pieces are empty.
            msg = f"a norm needs tensors of floating-point or complex numbers, got {kind}."
            raise ShardedTensorError(msg)
    filled = [i for i, piece in enumerate(pieces) if piece.numel() > 0]
    if not filled:
        return torch.full((len(pieces),), empty, dtype=torch.float64, device=pieces[0].device)
    if order in (1.0, 2.0, _INF):
        wide = None
        widest = functools.reduce(torch.promote_types, kinds)
        if dtype is not None or len(kinds) > 1 or widest.itemsize < torch.float32.itemsize:
            wide = torch.promote_types(dtype or widest, torch.float32)
        values = torch_tensors.foreach_norm([pieces[i] for i in filled], order, wide)
    else:
        values = [torch.linalg.vector_norm(pieces[i], order, dtype=dtype) for i in filled]
    if len(filled) < len(pieces):
        # Insert them on the device: a list of indices would be copied there with a wait.
        neutral = torch.full_like(values[0], empty)
        at = dict(zip(filled, values, strict=True))
        values = [at.get(i, neutral) for i in range(len(pieces))]
    return torch.stack(list(values)).to(torch.float64)


def by_axis(tensors: Sequence[Tensor]) -> dict[Axis, list[int]]:
    """Return the indices of the sharded tensors by process group over which they are summed.

    Tensors in whose place other ranks hold different ones are left out, see `part_sums`.
    """
    by_axis: dict[Axis, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if type(tensor) is ShardedTensor and tensor.spec.around is None:
            for axis in tensor.spec.axes:
                if axis.size > 1:
                    by_axis.setdefault(axis, []).append(i)
    return by_axis


def part_sums(tensors: Sequence[Tensor]) -> dict[tuple[Axis, ...], list[int]]:
    """Return the indices of parts by the axes of their sums, in the same order on all ranks.

    Parts are parameters in whose place other ranks hold different ones, such as other experts. A
    rank without gradients of its parts has empty lists.
    """
    found: dict[tuple[Axis, ...], list[int]] = {}
    for axis in by_axis(tensors):
        found.update({axes: [] for axes in part_sums_of(axis)})
    for i, tensor in enumerate(tensors):
        if type(tensor) is ShardedTensor and tensor.spec.around is not None:
            found.setdefault(tensor.spec.total_axes, []).append(i)
    return found


def _sum_parts(norms: Tensor, tensors: Sequence[Tensor], order: float) -> None:
    """Count parts of all ranks on each rank, in place, so that all get the same norm of all.

    The first part of this rank gets the sum of all parts, and its other parts get zero; if it has
    none, the first tensor gets the sum as well. Shares would not add up to the same bits on all
    ranks. The number of parts with a gradient may differ between ranks.
    """
    is_extreme = abs(order) == _INF
    for axes, indices in part_sums(tensors).items():
        own = torch.stack([norms[i] for i in indices]) if indices else norms.new_zeros(0)
        if is_extreme:
            neutral = 0.0 if order > 0 else _INF
            total = torch.cat([own, own.new_full((1,), neutral)])
            total = total.amax(0, keepdim=True) if order > 0 else total.amin(0, keepdim=True)
        else:
            total = own.sum(0, keepdim=True)
        for axis in axes:
            _reduce_norms(total, axis, order)
        if is_extreme:
            choose = torch.maximum if order > 0 else torch.minimum
            for i in indices or [0]:
                norms[i] = choose(norms[i], total[0])
        elif indices:
            values = [total[0], *[torch.zeros_like(total[0])] * (len(indices) - 1)]
            torch_tensors.foreach_copy([norms[i] for i in indices], values)
        else:
            norms[0] += total[0]


def total_norm(tensors: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of all elements of tensors, sharded or plain: 0-dim, fp32 or wider.

    The result is a `GlobalNumber`, like the norm that torch computes of sharded gradients.

    Cost: see `sharded_norms`, for each dtype.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    norms: list[Tensor] = []
    for alike in kinds.values():
        wide = torch.promote_types(alike[0].dtype.to_real(), torch.float32)
        norms += [norm.to(tensors[0].device, wide) for norm in sharded_norms(alike, order, wide)]
    if not norms:
        return as_global(torch.zeros(()))
    widest = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    stacked = torch.stack([norm.to(widest) for norm in norms])
    return as_global(torch.linalg.vector_norm(stacked, order))


def foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    del func
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")  # noqa: PLR2004 - (self, ord, dtype)
    first, *others = sharded_norms(args[0], float(order), dtype)
    return [as_global(first), *others]  # One norm makes their stack a norm, and costs least.


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor, dtype = args[0], kwargs.get("dtype")
    has_norm = tensor.is_floating_point() or tensor.is_complex()
    if not has_norm or (dtype and torch.promote_types(tensor.dtype, dtype) != dtype):
        return whole(func, args, kwargs)  # type: ignore[no-any-return]  # Torch raises the error.
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    order = float(2 if order is None else order)
    return sharded_norms([tensor], order, dtype)[0]


vector_norm = reduction(_vector_norm, dims_at=2, takes_complex=True)


def unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients of a GradScaler; an overflow on one rank counts on all ranks."""
    grads, found_inf, inv_scale = args
    pieces = [grad.local_piece if type(grad) is ShardedTensor else grad for grad in grads]
    func(pieces, found_inf, inv_scale, **kwargs)
    of_parts = [axis for axes in part_sums(grads) for axis in axes]
    for axis in dict.fromkeys((*by_axis(grads), *of_parts)):
        axis.all_reduce(found_inf, "max")


def share_overflow(optimizer: torch.optim.Optimizer, found_inf: dict[Any, Tensor]) -> None:
    """Let an overflow of a plain parameter on one rank count on all ranks.

    Its gradient may have another dtype or device than the sharded ones, and may differ between
    replicas. Without this some ranks would skip the step.

    Cost: if an optimizer has both kinds, an all-reduce of 4 bytes on each axis of the mesh.
    """
    sharded, plain = [], []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, ShardedTensor):
                sharded.append(param)
            elif param.requires_grad:
                plain.append(param)
    if not sharded or not plain or sharded[0].spec.is_traced:
        return
    for device in dict.fromkeys(param.device for param in plain):
        # Without gradients on this rank there is none.
        found_inf.setdefault(device, torch.zeros((), device=device))
    meshes = {id(param.spec.mesh.backend): param.spec.mesh for param in sharded}
    axes = [mesh.backend.axis(i) for mesh in meshes.values() for i in range(mesh.ndim)]
    for device in sorted(found_inf, key=str):
        for axis in dict.fromkeys(axes):
            if axis.size > 1:
                axis.all_reduce(found_inf[device], "max")

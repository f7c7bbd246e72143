"""`ShardedTensor`: this rank's flat piece of a tensor that has a global shape.

What parameters, gradients and optimizer state of a sharded module are between forwards. Operators
fall in four kinds: elementwise ones run on the pieces, reductions run on the pieces and add ONE
collective, structural ones keep the cut, and all others are refused by an error that names the
parameter and the remedy (`full_tensor()`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._errors import ShardedTensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit._layout import FlatLayout
    from shardkit._mesh import DeviceMesh


@dataclass(frozen=True)
class Replicate:
    """Every rank of the mesh axis holds the same."""


@dataclass(frozen=True)
class FlatShard:
    """Along the mesh axis each rank holds a contiguous range of the flattened tensor, maybe none.

    Not torch's ``Shard(0)``: a cut may fall inside a row.
    """


class ShardSpec:
    """How one parameter is cut, shared by the parameter, its gradient and its optimizer state.

    Attributes:
        layout: The bucket's layout.
        index: The parameter's position in it.
        mesh: The mesh.
        axis: Communicates along the shard axis (`shardkit.backends.AxisComm`).
        name: The parameter's name, for errors; the root's first forward sets the full one.
        start: First owned element of the flattened tensor on this rank.
        stop: Its end; equal to `start` where this rank owns nothing.
    """

    __slots__ = ("axis", "index", "layout", "mesh", "name", "start", "stop")

    def __init__(
        self, layout: FlatLayout, index: int, *, mesh: DeviceMesh, axis: Any, name: str
    ) -> None:
        self.layout = layout
        self.index = index
        self.mesh = mesh
        self.axis = axis
        self.name = name
        self.start, self.stop = layout.owned_range(index, axis.rank)

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.layout.shapes[self.index]

    @property
    def placements(self) -> tuple[Replicate | FlatShard, ...]:
        """One placement per mesh axis: the last is sharded."""
        return (*(Replicate() for _ in range(self.mesh.ndim - 1)), FlatShard())

    def same_cut(self, other: ShardSpec) -> bool:
        """Whether pieces of both line up on every rank."""
        return self is other or (
            self.shape == other.shape
            and self.mesh == other.mesh
            and self.layout.cut(self.index) == other.layout.cut(other.index)
        )

    def slice_full(self, full: Tensor) -> Tensor:
        """Return this rank's piece of a tensor of the global shape: 1-D, a view if it can be."""
        return full.reshape(-1)[self.start : self.stop]


class ShardedTensor(Tensor):
    """A tensor of a global shape of which this rank holds a flat range.

    Looks like FSDP2's DTensor parameters: `shape` is global, `placements` and `device_mesh` say
    how it is spread, `to_local()` is this rank's piece, `full_tensor()` the whole. Made by
    `fully_shard`.

    Elementwise operators (also `_foreach` and `_fused` ones) cost no communication; reductions
    over the whole tensor return the global value on every rank for one small all-reduce (a
    `_foreach_norm` over a list costs one for the list) and so must be called by all ranks. Random
    in-place fills give the same full tensor at every world size, from generators in equal state.
    """

    _local: Tensor
    _spec: ShardSpec
    __slots__: ClassVar[tuple[str, ...]] = ()  # type: ignore[misc]
    __torch_function__ = _compat.disabled_torch_function

    @staticmethod
    def __new__(cls, local: Tensor, spec: ShardSpec) -> ShardedTensor:
        """Wrap the 1-D piece `local`, ``spec.stop - spec.start`` elements, not copied."""
        self: ShardedTensor = _compat.make_wrapper(cls, local, spec.shape)
        self._local = local
        self._spec = spec
        return self

    def __init__(self, local: Tensor, spec: ShardSpec) -> None:
        """Nothing is left to do after `__new__`."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Show the name, the global shape and this rank's range; no communication."""
        spec = self._spec
        return (
            f"ShardedTensor({spec.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"local=[{spec.start}:{spec.stop}], mesh={spec.mesh.shape})"
        )

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh this tensor is spread over."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Replicate | FlatShard, ...]:
        """One placement per mesh axis."""
        return self._spec.placements

    def to_local(self) -> Tensor:
        """Return this rank's piece: 1-D, maybe empty, shares memory with this tensor.

        Differentiable: the gradient of the piece becomes this rank's piece of the gradient.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            result: Tensor = _ToLocal.apply(self)
            return result
        return self._local

    def full_tensor(self) -> Tensor:
        """Return the whole tensor, global shape, on every rank.

        Call it on all ranks of the shard axis. Differentiable: each rank keeps its piece of the
        gradient it computed, so the ranks must compute the same from it.

        Cost: one all-gather of at most twice the tensor's bytes, or a broadcast per owner where
        few ranks own it.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            result: Tensor = _FullTensor.apply(self)
            return result
        return gather_full(self._local, self._spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        """Copy this rank's piece; the copy is cut in the same way on the same mesh."""
        if id(self) in memo:
            done: ShardedTensor = memo[id(self)]
            return done
        with torch.no_grad():
            result = ShardedTensor(self._local.detach().clone(), self._spec)
        memo[id(self)] = result
        result.requires_grad_(self.requires_grad)
        for name, value in self.__dict__.items():
            if name not in ("_local", "_spec"):
                result.__dict__[name] = copy.deepcopy(value, memo)
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def __tensor_flatten__(self) -> tuple[list[str], ShardSpec]:
        """Name the inner tensor, so that `module.to(dtype)` and torch.compile see it."""
        return ["_local"], self._spec

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], spec: ShardSpec, outer_size: object, outer_stride: object
    ) -> ShardedTensor:
        """Put the inner tensor back."""
        del outer_size, outer_stride
        return ShardedTensor(inner["_local"], spec)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` by the handler of its kind."""
        del types
        handler = _HANDLERS.get(func)
        if handler is None:
            handler = _HANDLERS[func] = _classify(func)
        return handler(func, args, kwargs or {})


# --- gathering the whole ----------------------------------------------------------------------


def gather_full(local: Tensor, spec: ShardSpec) -> Tensor:
    """Return the whole tensor of which `local` is this rank's piece. Collective."""
    layout, index, axis = spec.layout, spec.index, spec.axis
    owners = layout.owners(index)
    full = local.new_empty(layout.numels[index])
    if len(owners) * 2 < axis.size:
        for owner in owners:
            start, stop = layout.owned_range(index, owner)
            if owner == axis.rank:
                full[start:stop] = local
            axis.broadcast(full[start:stop], src=owner)
    elif len(owners) > 0:
        ranges = [layout.owned_range(index, rank) for rank in range(axis.size)]
        longest = max(stop - start for start, stop in ranges)
        pieces = local.new_zeros(axis.size, longest)
        pieces[axis.rank, : local.numel()] = local
        axis.all_gather(pieces.view(-1), pieces[axis.rank])
        for rank, (start, stop) in enumerate(ranges):
            full[start:stop] = pieces[rank, : stop - start]
    return full.view(spec.shape)


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharded: ShardedTensor) -> Tensor:
        ctx.spec = sharded._spec
        return gather_full(sharded._local, sharded._spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> ShardedTensor:
        return ShardedTensor(ctx.spec.slice_full(grad).clone(), ctx.spec)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharded: ShardedTensor) -> Tensor:
        ctx.spec = sharded._spec
        return sharded._local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> ShardedTensor:
        return ShardedTensor(grad, ctx.spec)


# --- operators --------------------------------------------------------------------------------

_Handler = "Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]"
_HANDLERS: dict[Any, Any] = {}
_aten = torch.ops.aten


def _refuse(func: Any, tensor: ShardedTensor, why: str) -> ShardedTensorError:
    return ShardedTensorError(
        f"{func} on sharded {tensor._spec.name!r} of shape {tuple(tensor.shape)}: {why} "
        f"This rank holds only elements [{tensor._spec.start}:{tensor._spec.stop}). If this is a "
        f"module's weight used outside that module's forward, shard both modules in one group, or "
        f"unshard() around the use; otherwise call full_tensor() on it (on every rank)."
    )


def _first_sharded(args: Any) -> ShardedTensor:
    for arg in args:
        if type(arg) is ShardedTensor:
            return arg
        if isinstance(arg, (list, tuple)):
            for item in arg:
                if type(item) is ShardedTensor:
                    return item
    msg = "no ShardedTensor among the arguments"
    raise AssertionError(msg)


def _local_operand(func: Any, arg: Tensor, reference: ShardedTensor) -> Tensor:
    """Return what stands for `arg` in an elementwise operator on `reference`'s piece."""
    if type(arg) is ShardedTensor:
        if arg._spec is not reference._spec and not arg._spec.same_cut(reference._spec):
            why = (
                f"{arg._spec.name!r} of shape {tuple(arg.shape)} is cut differently, "
                f"the pieces do not line up."
            )
            raise _refuse(func, reference, why)
        return arg._local
    if arg.ndim == 0:
        return arg
    if arg.numel() == 1 and arg.ndim <= reference.ndim:
        return arg.reshape(())
    if arg.shape == reference.shape and arg.numel() > 0 and not any(arg.stride()):
        return arg[(0,) * arg.ndim]  # A scalar expanded, e.g. by the backward of sum().
    why = f"the other operand is a plain tensor of shape {tuple(arg.shape)}."
    raise _refuse(func, reference, why)


def _wrap(result: Any, spec: ShardSpec) -> Any:
    if isinstance(result, Tensor):
        return ShardedTensor(result, spec)
    if isinstance(result, (tuple, list)):
        return type(result)(_wrap(item, spec) for item in result)
    return result


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    reference = _first_sharded((*args, *kwargs.values()))
    local_args = [
        _local_operand(func, arg, reference) if isinstance(arg, Tensor) else arg for arg in args
    ]
    if kwargs:
        kwargs = {
            name: _local_operand(func, arg, reference) if isinstance(arg, Tensor) else arg
            for name, arg in kwargs.items()
            if name != "memory_format"
        }
    result = func(*local_args, **kwargs)
    return _wrap(result, reference._spec)


def _pointwise_mutating(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = kwargs.get("out", args[0])
    if type(target) is not ShardedTensor:
        why = "the result would be written into a plain tensor."
        raise _refuse(func, _first_sharded((*args, *kwargs.values())), why)
    _pointwise(func, args, kwargs)
    return target


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on lists: index i of every list belongs together.

    Indices of plain tensors only (parameters that are not sharded) pass through.
    """
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg]
    first = lists[0]
    local_lists: dict[int, list[Any]] = {}
    for items in lists:
        if not isinstance(items[0], Tensor):
            continue
        local_items = []
        for i, item in enumerate(items):
            reference = first[i]
            if type(item) is ShardedTensor:
                if type(reference) is not ShardedTensor:
                    raise _refuse(func, item, f"entry {i} of another list is a plain tensor.")
                if item._spec is reference._spec or item._spec.same_cut(reference._spec):
                    local_items.append(item._local)
                    continue
            if type(reference) is ShardedTensor:
                local_items.append(_local_operand(func, item, reference))
            else:
                local_items.append(item)
        local_lists[id(items)] = local_items
    local_args = [local_lists.get(id(arg), arg) for arg in args]
    for arg in (*args, *kwargs.values()):
        if type(arg) is ShardedTensor:
            raise _refuse(func, arg, "it stands where one number for all is wanted.")
    result = func(*local_args, **kwargs)
    if not isinstance(result, (list, tuple)):
        return result
    return [
        ShardedTensor(item, of._spec) if type(of) is ShardedTensor else item
        for item, of in zip(result, first, strict=True)
    ]


def _structural(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that makes one tensor of the same shape from one."""
    tensor = args[0]
    kwargs.pop("memory_format", None)
    return ShardedTensor(func(tensor._local, *args[1:], **kwargs), tensor._spec)


def _mutating(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place operator of one tensor, e.g. ``zero_``."""
    func(args[0]._local, *args[1:], **kwargs)
    return args[0]


def _reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a view operator that leaves the shape as it is; refuse others."""
    del kwargs
    tensor, size = args[0], list(args[1])
    if -1 in size:
        known = 1
        for dim in size:
            known *= dim if dim != -1 else 1
        size[size.index(-1)] = tensor.numel() // known if known else 0
    if size != list(tensor.shape):
        raise _refuse(func, tensor, f"a view of shape {tuple(args[1])} would need another cut.")
    return ShardedTensor(tensor._local.view(-1), tensor._spec)


def _new_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``new_zeros`` and kin: sharded if the shape is the same, else an ordinary tensor."""
    tensor, size, *rest = args
    kwargs.pop("memory_format", None)
    if tuple(size) != tuple(tensor.shape):
        return func(tensor._local, size, *rest, **kwargs)
    return ShardedTensor(func(tensor._local, [tensor._local.numel()], *rest, **kwargs), tensor._spec)


def _copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if type(target) is not ShardedTensor:
        why = "it would be copied into a plain tensor."
        raise _refuse(func, source, why)
    if type(source) is not ShardedTensor and source.shape == target.shape:
        source = target._spec.slice_full(source)
    else:
        source = _local_operand(func, source, target)
    func(target._local, source, *args[2:], **kwargs)
    return target


def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor, keep this rank's piece: the same numbers at every world size."""
    tensor = args[0]
    kwargs.pop("memory_format", None)
    local = tensor._local
    for arg in args[1:]:
        if isinstance(arg, Tensor):
            raise _refuse(func, tensor, "its random numbers depend on another tensor.")
    full = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
    if _compat.is_mutable_op(func):
        func(full, *args[1:], **kwargs)
        local.copy_(tensor._spec.slice_full(full))
        return tensor
    result = func(full, *args[1:], **kwargs)
    return ShardedTensor(tensor._spec.slice_full(result).clone(), tensor._spec)


def _reduce_whole(
    op: str, identity: Callable[[torch.dtype], Any] | None
) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Tensor]:
    """Return a handler for a reduction over all elements; `identity` is the value of no element."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        tensor, rest = args[0], list(args[1:])
        if rest and isinstance(rest[0], (list, tuple, int)) and not isinstance(rest[0], bool):
            _check_all_dims(func, tensor, rest[0])
            rest = []
        local, spec = tensor._local, tensor._spec
        if tensor.numel() == 0 or spec.axis.size == 1 or local.numel() > 0 or identity is None:
            value = func(local, *([[]] if _takes_dims(func) else []), *[], **kwargs)
        else:
            value = torch.tensor(identity(local.dtype), dtype=local.dtype, device=local.device)
        is_bool = value.dtype == torch.bool
        value = value.to(torch.uint8) if is_bool else value.clone()
        spec.axis.all_reduce(value, op)
        return value.to(torch.bool) if is_bool else value

    return handler


def _takes_dims(func: Any) -> bool:
    return func in (_aten.amax.default, _aten.amin.default)


def _check_all_dims(func: Any, tensor: ShardedTensor, dims: Sequence[int] | int) -> None:
    dims = [dims] if isinstance(dims, int) else list(dims)
    if dims and {dim % max(tensor.ndim, 1) for dim in dims} != set(range(tensor.ndim)):
        raise _refuse(func, tensor, f"a reduction over dims {dims} leaves others, and rows are cut.")


def _smallest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return False
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _largest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if len(args) > 1 and args[1] is not None:
        _check_all_dims(func, args[0], args[1])
    total: Tensor = _HANDLERS[_aten.sum.default](_aten.sum.default, args[:1], kwargs)
    return total / args[0].numel()


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    del kwargs
    reference = _first_sharded(args)
    if args[0].shape != args[1].shape:
        return False
    locals_ = [
        arg._local if type(arg) is ShardedTensor else reference._spec.slice_full(arg)
        for arg in args
    ]
    for arg in args:
        _local_operand(func, arg, reference) if type(arg) is ShardedTensor else None
    same = torch.tensor(int(torch.equal(*locals_)), device=reference._local.device)
    reference._spec.axis.all_reduce(same, "min")
    return bool(same.item())


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del kwargs
    return func(gather_full(args[0]._local, args[0]._spec))


def sharded_norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the global norm of each tensor as plain 0-dim tensors.

    Powers are summed in fp64, so that neither many ranks nor squares of large values lose the
    norm. Right also where this rank owns nothing of a tensor.

    Cost: one all-reduce of 8 bytes per tensor, per process group (one, as a rule).
    """
    result_dtypes = [dtype or tensor.dtype for tensor in tensors]
    locals_ = [t._local if type(t) is ShardedTensor else t for t in tensors]
    has_elements = [local.numel() > 0 for local in locals_]
    norms = torch.zeros(len(tensors), dtype=torch.float64, device=locals_[0].device)
    filled = [i for i, ok in enumerate(has_elements) if ok]
    if order == float("-inf"):
        norms.fill_(float("inf"))
    if filled:
        values = [
            torch.linalg.vector_norm(locals_[i], order, dtype=dtype).to(torch.float64)
            if dtype is not None or order not in (1.0, 2.0, float("inf"))
            else None
            for i in filled
        ]
        if values[0] is None:
            values = list(torch._foreach_norm([locals_[i] for i in filled], order))
        norms[torch.tensor(filled, device=norms.device)] = torch.stack(values).to(torch.float64)
    finite_power = order not in (0.0, float("inf"), float("-inf"))
    if finite_power:
        norms.pow_(order)
    op = {float("inf"): "max", float("-inf"): "min"}.get(order, "sum")
    for axis, indices in _by_axis(tensors).items():
        if len(indices) == len(tensors):
            axis.all_reduce(norms, op)
        else:
            picked = norms[indices]
            axis.all_reduce(picked, op)
            norms[indices] = picked
    if finite_power:
        norms.pow_(1.0 / order)
    return [norm.to(to) for norm, to in zip(norms.unbind(), result_dtypes, strict=True)]


def _by_axis(tensors: Sequence[Tensor]) -> dict[Any, list[int]]:
    """Return the indices of the sharded tensors by the process group they are cut over."""
    by_axis: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if type(tensor) is ShardedTensor and tensor._spec.axis.size > 1:
            by_axis.setdefault(tensor._spec.axis, []).append(i)
    return by_axis


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    del func
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    return sharded_norms(args[0], float(order), dtype)


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor, order, dims = args[0], args[1] if len(args) > 1 else 2, args[2] if len(args) > 2 else None
    if dims is not None:
        _check_all_dims(func, tensor, dims)
    if len(args) > 3 and args[3]:
        raise _refuse(func, tensor, "keepdim=True is not supported for a norm of a sharded tensor.")
    return sharded_norms([tensor], float(2 if order is None else order), kwargs.get("dtype"))[0]


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients of a GradScaler; an overflow on one rank is one on all."""
    grads, found_inf, inv_scale = args
    func([g._local if type(g) is ShardedTensor else g for g in grads], found_inf, inv_scale, **kwargs)
    for axis in _by_axis(grads):
        axis.all_reduce(found_inf, "max")


def _unsupported(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise _refuse(func, _first_sharded((*args, *kwargs.values())), "it needs more than a piece.")


def _classify(func: Any) -> Any:
    """Choose the handler of an operator seen for the first time."""
    name = func.name().split("::")[-1]
    tags = func.tags
    if name.startswith(("_foreach_", "_fused_")):
        known = not name.startswith(("_foreach_max.", "_foreach_max", "_foreach_norm"))
        return _foreach if known or name.startswith("_foreach_maximum") else _unsupported
    if torch.Tag.nondeterministic_seeded in tags:
        return _random
    if torch.Tag.pointwise in tags:
        return _pointwise_mutating if _compat.is_mutable_op(func) else _pointwise
    return _unsupported


def _register(handler: Any, *funcs: Any) -> None:
    for func in funcs:
        _HANDLERS[func] = handler


_register(
    _structural,
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.empty_like.default,
    _aten.full_like.default,
    _aten._to_copy.default,
    _aten.lift_fresh.default,
)
_register(_mutating, _aten.zero_.default, _aten.fill_.Scalar)
_register(_pointwise_mutating, _aten.fill_.Tensor)
_register(
    _reshape,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.expand.default,
)
_register(
    _new_like,
    _aten.new_empty.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
)
_register(_copy_, _aten.copy_.default)
_register(_reduce_whole("sum", None), _aten.sum.default, _aten.sum.dim_IntList, _aten.count_nonzero.default)
_register(_reduce_whole("product", None), _aten.prod.default)
_register(_reduce_whole("max", _smallest), _aten.max.default, _aten.amax.default)
_register(_reduce_whole("min", _largest), _aten.min.default, _aten.amin.default)
_register(_reduce_whole("max", None), _aten.any.default)
_register(_reduce_whole("min", None), _aten.all.default)
_register(_mean, _aten.mean.default, _aten.mean.dim)
_register(_equal, _aten.equal.default)
_register(_item, _aten._local_scalar_dense.default)
_register(
    _vector_norm,
    _aten.linalg_vector_norm.default,
    _aten.norm.Scalar,
)
_register(_foreach_norm, _aten._foreach_norm.Scalar)
_register(_unscale, _aten._amp_foreach_non_finite_check_and_unscale_.default)

_compat.register_foreach_class(ShardedTensor)

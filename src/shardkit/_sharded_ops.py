"""What operators do on `ShardedTensor`.

Elementwise operators run on the pieces. Reductions over the whole tensor run on the pieces and add
ONE collective. Structural operators keep the cut. All others are refused by an error that names the
parameter and the remedy. An operator is put into its kind when it is seen for the first time.

Lists (``_foreach_*``) run on whole flats where they can: pieces of neighbouring parameters of a
bucket lie end to end, in parameters, gradients and optimizer state alike, so that one kernel does
the work of many.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._errors import ShardedTensorError
from shardkit._sharded import ShardedTensor, gather_full, set_dispatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit._sharded import ShardSpec

    Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_HANDLERS: dict[Any, Any] = {}
_aten = torch.ops.aten


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = _HANDLERS.get(func)
    if handler is None:
        handler = _HANDLERS[func] = _classify(func)
    return handler(func, args, kwargs)


def _refuse(func: Any, tensor: ShardedTensor, why: str) -> ShardedTensorError:
    spec = tensor.spec
    return ShardedTensorError(
        f"{func} on sharded {spec.name!r} of shape {tuple(tensor.shape)}: {why} This rank holds "
        f"only elements [{spec.start}:{spec.stop}). If this is a module's weight used outside that "
        f"module's forward, shard both modules in one group, or unshard() around the use; "
        f"otherwise call full_tensor() on it (on every rank)."
    )


def _first_sharded(args: Any) -> ShardedTensor:
    """Return the first sharded tensor among arguments and lists of them."""
    for arg in args:
        if type(arg) is ShardedTensor:
            return arg
        if isinstance(arg, (list, tuple)):
            for item in arg:
                if type(item) is ShardedTensor:
                    return item
    msg = "no ShardedTensor among the arguments"
    raise AssertionError(msg)


def _note_write(*targets: ShardedTensor) -> None:
    """Raise the version counters, which say that a shard is stale: a dispatch does not do it."""
    written = {id(t.flat): t.flat for t in targets if t.flat is not None}
    torch.autograd.graph.increment_version(list(written.values()))
    torch.autograd.graph.increment_version([t.local_piece for t in targets if t.flat is None])


# --- elementwise ----------------------------------------------------------------------------------


def _local_operand(func: Any, arg: Tensor, reference: ShardedTensor) -> Tensor:
    """Return what stands for `arg` in an elementwise operator on `reference`'s piece."""
    if type(arg) is ShardedTensor:
        if not arg.spec.same_cut(reference.spec):
            why = f"{arg.spec.name!r} of shape {tuple(arg.shape)} is cut differently."
            raise _refuse(func, reference, why)
        return arg.local_piece
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


def _run_pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    reference = _first_sharded((*args, *kwargs.values()))

    def localize(arg: Any) -> Any:
        return _local_operand(func, arg, reference) if isinstance(arg, Tensor) else arg

    local_args = [localize(arg) for arg in args]
    local_kwargs = {k: localize(v) for k, v in kwargs.items() if k != "memory_format"}
    return func(*local_args, **local_kwargs), reference


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result, reference = _run_pointwise(func, args, kwargs)
    return _wrap(result, reference.spec)


def _pointwise_mutating(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = kwargs.get("out", args[0])
    if type(target) is not ShardedTensor:
        why = "the result would be written into a plain tensor."
        raise _refuse(func, _first_sharded((*args, *kwargs.values())), why)
    _run_pointwise(func, args, kwargs)
    _note_write(target)
    return target


# --- structural -----------------------------------------------------------------------------------


def _structural(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that makes one tensor of the same shape from one."""
    tensor = args[0]
    kwargs.pop("memory_format", None)
    return ShardedTensor(func(tensor.local_piece, *args[1:], **kwargs), tensor.spec)


def _same_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``detach`` and kin: the result lies where the argument does.

    The piece itself is passed on: a view made inside a dispatch has a version counter of its own,
    and writes through it would not be noticed.
    """
    del func, kwargs
    tensor = args[0]
    return ShardedTensor(tensor.local_piece, tensor.spec, tensor.flat, tensor.flat_start)


@dataclass(slots=True)
class _OpenFlat:
    flat: Any
    taken: set[int]


class FlatMaker:
    """Lays new tensors of a bucket's parameters end to end, as optimizer state is made one by one.

    Memory for the whole bucket is taken with the first of them, so a flat that dies with one piece
    taken was a temporary: then no more are made.
    """

    def __init__(self) -> None:
        self._open: list[_OpenFlat] = []
        self._is_off = False

    def place(self, like: ShardedTensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return (flat, piece) for a new tensor like `like`, or None to make it apart."""
        spec = like.spec
        layout, index = spec.layout, spec.index
        if self._is_off or len(layout.shapes) == 1 or spec.start == spec.stop:
            return None
        start, stop = spec.piece_range
        for entry in self._open:
            flat = entry.flat()
            if flat is None or index in entry.taken:
                continue
            if flat.dtype == dtype and flat.device == like.device:
                entry.taken.add(index)
                return flat, flat[start:stop]
        flat = torch.zeros(layout.shard_numel, dtype=dtype, device=like.device)
        entry = _OpenFlat(None, {index})
        entry.flat = weakref.ref(flat, lambda _: self._closed(entry))
        self._open.append(entry)
        return flat, flat[start:stop]

    def _closed(self, entry: _OpenFlat) -> None:
        self._open.remove(entry)
        if len(entry.taken) == 1:
            self._is_off = True


def _state_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make ``zeros_like`` and kin, end to end with those of the bucket's other parameters."""
    tensor = args[0]
    kwargs.pop("memory_format", None)
    maker: FlatMaker | None = tensor.spec.siblings
    is_plain = (
        kwargs.get("device") in (None, tensor.device)
        and kwargs.get("layout") in (None, torch.strided)
        and not kwargs.get("pin_memory")
    )
    placed = None
    if maker is not None and is_plain:
        placed = maker.place(tensor, kwargs.get("dtype") or tensor.dtype)
    if placed is None:
        return _structural(func, args, kwargs)
    flat, piece = placed
    if func is not _aten.zeros_like.default:
        piece.fill_(1 if func is _aten.ones_like.default else args[1])
    return ShardedTensor(piece, tensor.spec, flat)


def _mutating(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place operator of one tensor, e.g. ``zero_``."""
    func(args[0].local_piece, *args[1:], **kwargs)
    _note_write(args[0])
    return args[0]


def _reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a view operator that leaves the shape as it is; refuse others."""
    del kwargs
    tensor, size = args[0], list(args[1])
    if -1 in size:
        known = math.prod(dim for dim in size if dim != -1)
        size[size.index(-1)] = tensor.numel() // known if known else 0
    if size != list(tensor.shape):
        raise _refuse(func, tensor, f"a view of shape {tuple(args[1])} would need another cut.")
    return ShardedTensor(tensor.local_piece, tensor.spec, tensor.flat, tensor.flat_start)


def _new_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``new_zeros`` and kin: sharded if the shape is the same, else an ordinary tensor."""
    tensor, size, *rest = args
    kwargs.pop("memory_format", None)
    if tuple(size) != tuple(tensor.shape):
        return func(tensor.local_piece, size, *rest, **kwargs)
    return ShardedTensor(
        func(tensor.local_piece, [tensor.local_piece.numel()], *rest, **kwargs), tensor.spec
    )


def _copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if type(target) is not ShardedTensor:
        raise _refuse(func, source, "it would be copied into a plain tensor.")
    if type(source) is not ShardedTensor and source.shape == target.shape:
        source = target.spec.slice_full(source)
    else:
        source = _local_operand(func, source, target)
    func(target.local_piece, source, *args[2:], **kwargs)
    _note_write(target)
    return target


def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor, keep this rank's piece: the same numbers at every world size."""
    tensor = args[0]
    kwargs.pop("memory_format", None)
    local = tensor.local_piece
    if any(isinstance(arg, Tensor) for arg in args[1:]) or func in _DEPEND_ON_VALUES:
        raise _refuse(func, tensor, "its random numbers depend on the values of a tensor.")
    full = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
    result = func(full, *args[1:], **kwargs)
    if _compat.is_mutable_op(func):
        local.copy_(tensor.spec.slice_full(full))
        _note_write(tensor)
        return tensor
    return ShardedTensor(tensor.spec.slice_full(result).clone(), tensor.spec)


_DEPEND_ON_VALUES = (
    _aten.bernoulli.default,
    _aten.multinomial.default,
    _aten.poisson.default,
    _aten.native_dropout.default,
)


# --- lists ----------------------------------------------------------------------------------------


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on lists: index i of every list belongs together.

    Indices of plain tensors only (parameters that are not sharded) pass through.
    """
    for arg in (*args, *kwargs.values()):
        if type(arg) is ShardedTensor:
            raise _refuse(func, arg, "it stands where one number for all is wanted.")
    first = args[0]
    runs = _find_runs(args)
    joined = [_join(arg, runs) if runs else _local_list(func, arg, first) for arg in args]
    result = func(*joined, **kwargs)
    if _compat.is_mutable_op(func):
        written = [first[run.positions[0]] for run in runs] if runs else first
        _note_write(*(item for item in written if type(item) is ShardedTensor))
        return result
    if not isinstance(result, (list, tuple)):
        return result
    if runs:
        return _split(result, runs, first)
    return [
        ShardedTensor(item, of.spec) if type(of) is ShardedTensor else item
        for item, of in zip(result, first, strict=True)
    ]


def _local_list(func: Any, items: Any, first: Sequence[Any]) -> Any:
    """Return the pieces of a list argument; other arguments as they are."""
    if not isinstance(items, (list, tuple)) or not items or not isinstance(items[0], Tensor):
        return items
    pieces = []
    for item, reference in zip(items, first, strict=True):
        if type(reference) is ShardedTensor:
            pieces.append(_local_operand(func, item, reference))
        elif type(item) is ShardedTensor:
            raise _refuse(func, item, "the entry of another list that belongs to it is plain.")
        else:
            pieces.append(item)
    return pieces


@dataclass(slots=True)
class _Run:
    """Entries of all lists whose pieces lie end to end, at [start, stop) of their shards.

    Attributes:
        positions: Which entries; none of them is empty.
        start: Where the first piece begins.
        stop: Where the last one ends.
    """

    positions: list[int]
    start: int
    stop: int

    def join(self, items: Sequence[Any]) -> Any:
        """Return what stands for the run's entries: one tensor, or their common number."""
        item = items[self.positions[0]]
        if type(item) is not ShardedTensor:
            return item
        if len(self.positions) == 1 or item.flat is None:
            return item.local_piece
        return item.flat[self.start - item.flat_start : self.stop - item.flat_start]


def _join(items: Any, runs: Sequence[_Run]) -> Any:
    if not isinstance(items, (list, tuple)):
        return items
    return [run.join(items) for run in runs]


def _split(
    flats: Sequence[Tensor], runs: Sequence[_Run], first: Sequence[ShardedTensor]
) -> list[ShardedTensor]:
    """Return results for runs as one result for each entry."""
    result: list[Any] = [None] * len(first)
    for run, flat in zip(runs, flats, strict=True):
        for position in run.positions:
            spec = first[position].spec
            start, stop = spec.piece_range
            piece = flat[start - run.start : stop - run.start]
            result[position] = ShardedTensor(piece, spec, flat, run.start)
    for position, item in enumerate(result):
        if item is None:
            result[position] = ShardedTensor(flats[0][:0], first[position].spec)
    return result


def _find_runs(args: tuple[Any, ...]) -> list[_Run] | None:
    """Return how to run list operators on flats; None if entries are not such pieces at all."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    first = lists[0]
    if set(map(type, first)) != {ShardedTensor}:
        return None
    specs = tuple([item.spec for item in first])
    runs = _planned_runs.get(specs)
    if runs is None:
        if len(_planned_runs) >= _MAX_PLANS:
            _planned_runs.clear()
        runs = _planned_runs[specs] = _plan_runs(specs)
    if not runs or not all(_follows(items, specs, runs) for items in lists):
        return None
    return runs


_planned_runs: dict[tuple[ShardSpec, ...], list[_Run]] = {}
_MAX_PLANS = 16


def _plan_runs(specs: Sequence[ShardSpec]) -> list[_Run]:
    """Return the runs of neighbouring parameters; those without elements here are in none."""
    runs: list[_Run] = []
    before = None
    for position, spec in enumerate(specs):
        if spec.start == spec.stop:
            continue
        start, stop = spec.piece_range
        follows = before is not None and spec.siblings is before.siblings is not None
        if follows and before is not None and spec.index == before.index + 1:
            runs[-1].positions.append(position)
            runs[-1].stop = stop
        else:
            runs.append(_Run([position], start, stop))
        before = spec
    return runs


def _follows(items: Sequence[Any], specs: Sequence[ShardSpec], runs: Sequence[_Run]) -> bool:
    """Return whether a list has these runs: each of pieces in one flat, or of one number."""
    if len(items) != len(specs):
        return False
    if isinstance(items[0], (int, float)):
        return all(len({items[i] for i in run.positions}) == 1 for run in runs)
    if set(map(type, items)) != {ShardedTensor} or tuple([item.spec for item in items]) != specs:
        return False
    for run in runs:
        if len(run.positions) > 1:
            flat = items[run.positions[0]].flat
            if flat is None or any(items[i].flat is not flat for i in run.positions):
                return False
    return True


# --- reductions -----------------------------------------------------------------------------------


def _check_whole(func: Any, tensor: ShardedTensor, args: Sequence[Any]) -> None:
    """Refuse a reduction (``dim``, ``keepdim``) that leaves dimensions."""
    dims = args[0] if args else None
    if len(args) > 1 and args[1]:
        raise _refuse(func, tensor, "keepdim=True asks for a tensor, a reduction gives a number.")
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return
    dims = [dims] if isinstance(dims, int) else list(dims)
    if {dim % max(tensor.ndim, 1) for dim in dims} != set(range(tensor.ndim)):
        raise _refuse(
            func, tensor, f"a reduction over dims {dims} leaves others, and rows are cut."
        )


def _reduce_by(op: str, local_reduce: Callable[..., Tensor]) -> Handler:
    """Return a handler: reduce the piece by `local_reduce`, the results over the ranks by `op`."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        tensor = args[0]
        _check_whole(func, tensor, args[1:])
        value = local_reduce(tensor.local_piece, **kwargs).clone()
        tensor.spec.axis.all_reduce(value, op)
        return value

    return handler


def _extreme(op: str) -> Handler:
    """Return a handler of max or min; NaN on one rank is NaN on all."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        del kwargs
        tensor = args[0]
        _check_whole(func, tensor, args[1:])
        if tensor.numel() == 0:
            raise _refuse(func, tensor, "it has no elements.")
        local = tensor.local_piece
        identity = _identity(op, local.dtype)
        value = identity if local.numel() == 0 else getattr(local, op)()
        pair = torch.stack([torch.as_tensor(value, dtype=local.dtype, device=local.device)] * 2)
        _reduce_extremes(pair, tensor.spec.axis, op)
        return pair[0].clone()

    return handler


def _identity(op: str, dtype: torch.dtype) -> Any:
    """Return the maximum or minimum of no element."""
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


def _reduce_extremes(values: Tensor, axis: Any, op: str) -> None:
    """All-reduce `values` by max or min, in place; gloo forgets NaN, so it travels beside them."""
    if axis.size == 1:
        return
    sign = 1 if op == "max" else -1
    wire_dtype = torch.float64 if values.is_floating_point() else torch.int64
    is_nan = values.isnan()
    on_wire = torch.cat([values.to(wire_dtype), is_nan.to(wire_dtype) * sign])
    on_wire[: len(values)][is_nan] = -sign * float("inf") if is_nan.any() else 0
    axis.all_reduce(on_wire, op)
    values.copy_(on_wire[: len(values)])
    values[on_wire[len(values) :] != 0] = float("nan") if values.is_floating_point() else 0


def _truth(op: str) -> Handler:
    """Return a handler of any (max) or all (min)."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        del kwargs
        tensor = args[0]
        _check_whole(func, tensor, args[1:])
        value: Tensor = func(tensor.local_piece).to(torch.uint8)
        tensor.spec.axis.all_reduce(value, op)
        return value.to(torch.bool)

    return handler


def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor = args[0]
    _check_whole(func, tensor, args[1:])
    dtype = kwargs.get("dtype") or tensor.dtype
    wide = torch.promote_types(dtype, torch.float32)  # A sum of many fp16 numbers overflows.
    total: Tensor = tensor.local_piece.sum(dtype=wide)
    tensor.spec.axis.all_reduce(total, "sum")
    mean: Tensor = (total / tensor.numel()).to(dtype)
    return mean


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    del kwargs
    reference = _first_sharded(args)
    if args[0].shape != args[1].shape:
        return False
    pieces = [
        _local_operand(func, arg, reference)
        if type(arg) is ShardedTensor
        else reference.spec.slice_full(arg)
        for arg in args
    ]
    same = torch.tensor(int(torch.equal(*pieces)), device=reference.local_piece.device)
    reference.spec.axis.all_reduce(same, "min")
    return bool(same.item())


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del kwargs
    return func(gather_full(args[0].local_piece, args[0].spec))


# --- norms ----------------------------------------------------------------------------------------

_INF = float("inf")


def sharded_norms(
    tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None
) -> list[Tensor]:
    """Return the global norm of each tensor as plain 0-dim tensors.

    Powers are summed in fp64, so that neither many ranks nor squares of large values lose the
    norm. Right also where this rank owns nothing of a tensor.

    Cost: one all-reduce of 8 bytes per tensor (16 for max and min) per process group: one, as a
    rule.
    """
    pieces = [t.local_piece if type(t) is ShardedTensor else t for t in tensors]
    norms = _local_norms(pieces, order, dtype)
    is_power = order not in (0.0, _INF, -_INF)
    if is_power:
        norms.pow_(order)
        for i, piece in enumerate(pieces):
            if order < 0 and piece.numel() == 0:
                norms[i] = 0  # Not 0 ** order: there is nothing to add.
    for axis, indices in _by_axis(tensors).items():
        picked = norms if len(indices) == len(tensors) else norms[indices]
        if abs(order) == _INF:
            _reduce_extremes(picked, axis, "max" if order > 0 else "min")
        else:
            axis.all_reduce(picked, "sum")
        if picked is not norms:
            norms[indices] = picked
    if is_power:
        norms.pow_(1.0 / order)
    return [
        norm.to(dtype or tensor.dtype.to_real())
        for norm, tensor in zip(norms.unbind(), tensors, strict=True)
    ]


def _local_norms(pieces: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> Tensor:
    """Return the norms of the pieces in fp64; that of no element leaves the global one as it is."""
    empty = _INF if order == -_INF else 0.0
    norms = torch.full((len(pieces),), empty, dtype=torch.float64, device=pieces[0].device)
    filled = [i for i, piece in enumerate(pieces) if piece.numel() > 0]
    if not filled:
        return norms
    if order in (1.0, 2.0, _INF):
        wide = None
        if dtype is not None or pieces[0].dtype.itemsize < torch.float32.itemsize:
            wide = torch.promote_types(dtype or pieces[0].dtype, torch.float32)
        values = _compat.foreach_norm([pieces[i] for i in filled], order, wide)
    else:
        values = [torch.linalg.vector_norm(pieces[i], order, dtype=dtype) for i in filled]
    norms[torch.tensor(filled, device=norms.device)] = torch.stack(list(values)).to(torch.float64)
    return norms


def _by_axis(tensors: Sequence[Tensor]) -> dict[Any, list[int]]:
    """Return the indices of the sharded tensors by the process group they are cut over."""
    by_axis: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if type(tensor) is ShardedTensor and tensor.spec.axis.size > 1:
            by_axis.setdefault(tensor.spec.axis, []).append(i)
    return by_axis


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    del func
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")  # noqa: PLR2004 - (self, ord, dtype)
    return sharded_norms(args[0], float(order), dtype)


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor, order, *dims = (*args, 2)[:2] if len(args) == 1 else args
    _check_whole(func, tensor, dims)
    return sharded_norms([tensor], float(2 if order is None else order), kwargs.get("dtype"))[0]


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients of a GradScaler; an overflow on one rank is one on all."""
    grads, found_inf, inv_scale = args
    pieces = [grad.local_piece if type(grad) is ShardedTensor else grad for grad in grads]
    func(pieces, found_inf, inv_scale, **kwargs)
    for axis in _by_axis(grads):
        axis.all_reduce(found_inf, "max")


# --- kinds ----------------------------------------------------------------------------------------


def _unsupported(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise _refuse(func, _first_sharded((*args, *kwargs.values())), "it needs more than a piece.")


def _classify(func: Any) -> Any:
    """Choose the handler of an operator seen for the first time."""
    name = func.name().split("::")[-1].split(".")[0]
    if name.startswith(("_foreach_", "_fused_")):
        return _unsupported if name in ("_foreach_max", "_foreach_norm") else _foreach
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _random
    if torch.Tag.pointwise in func.tags:
        return _pointwise_mutating if _compat.is_mutable_op(func) else _pointwise
    return _unsupported


def _register(handler: Any, *funcs: Any) -> None:
    for func in funcs:
        _HANDLERS[func] = handler


_register(_same_memory, _aten.detach.default, _aten.alias.default, _aten.lift_fresh.default)
_register(_structural, _aten.clone.default, _aten.empty_like.default, _compat.copy_to_op)
_register(_state_like, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default)
_register(_mutating, _aten.zero_.default, _aten.fill_.Scalar)
_register(_pointwise_mutating, _aten.fill_.Tensor)
_register(_reshape, _aten.view.default, _compat.unsafe_view_op, _aten.expand.default)
_register(
    _new_like,
    _aten.new_empty.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
)
_register(_copy_, _aten.copy_.default)
_register(_reduce_by("sum", torch.sum), _aten.sum.default, _aten.sum.dim_IntList)
_register(_reduce_by("sum", torch.count_nonzero), _aten.count_nonzero.default)
_register(_reduce_by("product", torch.prod), _aten.prod.default)
_register(_extreme("max"), _aten.max.default, _aten.amax.default)
_register(_extreme("min"), _aten.min.default, _aten.amin.default)
_register(_truth("max"), _aten.any.default)
_register(_truth("min"), _aten.all.default)
_register(_mean, _aten.mean.default, _aten.mean.dim)
_register(_equal, _aten.equal.default)
_register(_item, _compat.item_op)
_register(_vector_norm, _aten.linalg_vector_norm.default, _aten.norm.Scalar)
_register(_foreach_norm, _compat.foreach_norm_op)
_register(_unscale, _compat.unscale_op)

_compat.register_foreach_class(ShardedTensor)
set_dispatcher(_dispatch)

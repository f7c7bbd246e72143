"""The kind of each operator, which is found when the operator is first seen.

The rule: an elementwise operator runs on pieces. An operator that reduces the whole tensor takes
one collective. A view is a view. All others run on the whole tensors. A random operator also runs
on whole tensors, unless it only reads the shape. Operators with their own handler below are of one
of these kinds, but torch does not say so.
"""

from __future__ import annotations

import operator
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit._compat import torch_tensors
from shardkit._tensor.ops import reductions, structural
from shardkit._tensor.ops.wholes import (
    ShardedView,
    argument,
    check_in_place,
    cut_gradients,
    first_sharded,
    followed,
    gathered,
    note_write,
    on_plain,
    piece_beside,
    runs_on_wholes,
    whole,
    without_out,
    wrap,
)
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.written_values import constant, note_update, note_written
from shardkit._tree import iter_tensors, map_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._tensor.spec import ShardSpec


# --- memory of optimizer state --------------------------------------------------------------------


class StateAllocator:
    """Allocator that lays new tensors of a bucket's parameters end to end, like the parameters.

    Then operators on lists run on the whole bucket. The first tensor takes memory for all. If that
    memory is freed while it has only one tensor, that was a temporary: then the allocator stops.
    """

    def __init__(self) -> None:
        # The parameters whose tensors were taken, by the flat that has them.
        self._open: dict[weakref.ref[Tensor], set[int]] = {}
        self._is_off = False

    def allocate(
        self, spec: ShardSpec, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        """Return zeros for one parameter: (flat, piece of it); None: make the tensor separately.

        Returns:
            1-D tensors: the flat has `shard_numel` elements, and the piece is a view of it.
        """
        layout, index = spec.layout, spec.index
        if self._is_off or len(layout.shapes) == 1 or spec.start == spec.stop:
            return None
        start, stop = spec.piece_range
        for ref, taken in [*self._open.items()]:
            flat = ref()
            if flat is None or index in taken:
                continue
            if flat.dtype == dtype and flat.device == device:
                taken.add(index)
                return flat, flat[start:stop]
        flat = torch.zeros(layout.shard_numel, dtype=dtype, device=device)
        self._open[weakref.ref(flat, self._closed)] = {index}
        return flat, flat[start:stop]

    def _closed(self, ref: weakref.ref[Tensor]) -> None:
        self._is_off |= len(self._open.pop(ref)) == 1


# --- runs of neighbouring pieces ------------------------------------------------------------------


@dataclass(slots=True)
class PieceRun:
    """List entries whose pieces lie end to end, at [start, stop) of their shards."""

    positions: list[int]  # Positions of the entries; none of them is empty.
    start: int  # Position where the first piece begins.
    stop: int  # Position where the last one ends.

    def join(self, items: Sequence[Any]) -> Any:
        """Return one entry that replaces the run's entries: a tensor, or their common number."""
        item = items[self.positions[0]]
        if type(item) is not ShardedTensor:
            return item
        if len(self.positions) == 1 or item.flat is None:
            return item.local_piece
        start, stop = self.start - item.flat_start, self.stop - item.flat_start
        is_all = start == 0 and stop == item.flat.numel()
        return item.flat if is_all else item.flat[start:stop]


def common_flat(tensors: Sequence[Any]) -> Tensor | None:
    """Return the one tensor of which all of these are views; None if there is none."""
    first = tensors[0]
    flat: Tensor | None = first.flat if type(first) is ShardedTensor else None
    if flat is None:
        return None
    for tensor in tensors:
        if type(tensor) is not ShardedTensor or tensor.flat is not flat:
            return None
    return flat


def join(items: Any, runs: Sequence[PieceRun]) -> Any:
    """Return a list argument as one entry for each run; other arguments as they are."""
    if not isinstance(items, (list, tuple)):
        return items
    return [run.join(items) for run in runs]


_dtype_of = operator.attrgetter("dtype")


def over_flats(
    flats: Sequence[Tensor], runs: Sequence[PieceRun], items: Sequence[ShardedTensor]
) -> list[ShardedTensor]:
    """Return tensors cut like `items`, over one flat for each run."""
    result: list[Any] = [None] * len(items)
    for run, flat in zip(runs, flats, strict=True):
        for position in run.positions:
            result[position] = ShardedTensor.over(flat, items[position].spec, run.start)
    return [
        ShardedTensor(flats[0][:0], item.spec) if found is None else found
        for found, item in zip(result, items, strict=True)
    ]


def _find_plan(args: tuple[Any, ...], *, is_mutable: bool) -> _ListPlan | None:
    """Return the plan of a list operator on flats; None if no entries are such pieces."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    first = lists[0]
    if set(map(type, first)) != {ShardedTensor} or first[0].spec.is_traced:
        return None
    if not is_mutable:  # Entries of which this rank holds nothing are in no run.
        for items in lists:
            if type(items[0]) is ShardedTensor and len(set(map(_dtype_of, items))) > 1:
                return None  # Results of such entries may have another dtype.
    specs = tuple([item.spec for item in first])
    key = tuple(map(id, specs))
    plan = _planned.get(key) or _remember(key, specs)
    if not plan.runs or not all(_follows(items, specs, plan.runs) for items in lists):
        return None
    return plan


@dataclass(slots=True)
class _ListPlan:
    """The runs of some specs, without references to them; it is dropped with the first of them."""

    runs: list[PieceRun]  # Runs of neighbouring parameters.
    # Positions of entries that have all flats between them: also those of flats of which the
    # entries have no elements on this rank, which other ranks write.
    written: list[int]
    specs: list[weakref.ref[ShardSpec]]  # References to the specs.


_planned: dict[tuple[int, ...], _ListPlan] = {}  # By the ids of the specs.
_MAX_PLANS = 16


def _remember(key: tuple[int, ...], specs: Sequence[ShardSpec]) -> _ListPlan:
    if len(_planned) >= _MAX_PLANS:
        _planned.clear()

    def forget(_: object) -> None:
        _planned.pop(key, None)

    runs = _plan(specs)
    written = [run.positions[0] for run in runs]
    seen = {id(specs[position].state_allocator) for position in written}
    for position, spec in enumerate(specs):
        allocator = spec.state_allocator
        if spec.piece_numel == 0 and (allocator is None or id(allocator) not in seen):
            seen.add(id(allocator))
            written.append(position)
    plan = _ListPlan(runs, written, [weakref.ref(spec, forget) for spec in specs])
    _planned[key] = plan
    return plan


def _plan(specs: Sequence[ShardSpec]) -> list[PieceRun]:
    """Return the runs of neighbouring parameters, without those that have no elements here."""
    runs: list[PieceRun] = []
    before = None
    for position, spec in enumerate(specs):
        if spec.piece_numel == 0:
            continue
        start, stop = spec.piece_range
        follows = before is not None and spec.state_allocator is before.state_allocator is not None
        if follows and before is not None and spec.index == before.index + 1:
            runs[-1].positions.append(position)
            runs[-1].stop = stop
        else:
            runs.append(PieceRun([position], start, stop))
        before = spec
    return runs


def _follows(items: Sequence[Any], specs: Sequence[ShardSpec], runs: Sequence[PieceRun]) -> bool:
    """Return whether each of these runs has, in a list, pieces of one flat or one number."""
    if len(items) != len(specs):
        return False
    if isinstance(items[0], (int, float)):
        is_one = items.count(items[0]) == len(items)
        return is_one or all(len({items[i] for i in run.positions}) == 1 for run in runs)
    if set(map(type, items)) != {ShardedTensor} or tuple([item.spec for item in items]) != specs:
        return False
    for run in runs:
        if len(run.positions) > 1:
            flat = items[run.positions[0]].flat
            for i in run.positions:  # A generator takes longer, in each operator of a step.
                if flat is None or items[i].flat is not flat:
                    return False
    return True


# --- lists ----------------------------------------------------------------------------------------
#
# They run on whole flats if possible: pieces of neighbouring parameters of a bucket lie end to end,
# in parameters, gradients and optimizer state alike. So one kernel does the work of many. Plain
# tensors in the lists are cut. If an entry cannot be cut, the operator runs entry by entry, so that
# one tensor is whole at a time.


def foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on lists, whose entries at index i belong together.

    Indices with only plain tensors (parameters that are not sharded) pass through.
    """
    # A common number, sharded or a DTensor.
    if any(hasattr(arg, "full_tensor") for arg in (*args, *kwargs.values())):
        args = tuple(gathered(func, arg) for arg in args)
        kwargs = {key: gathered(func, arg) for key, arg in kwargs.items()}
    if type(args[-1]) is Tensor and args[-1].ndim == 1:  # A number for each entry.
        func, args = func.overloadpacket.ScalarList, (*args[:-1], args[-1].tolist())
    first: Sequence[Any] = next(arg for arg in args if isinstance(arg, (list, tuple)))
    is_mutable = torch_tensors.is_mutable_op(func)
    plan = _find_plan(args, is_mutable=is_mutable)
    runs = None if plan is None else plan.runs
    if _has_data(func, args, runs):
        return one_by_one(func, args, kwargs)
    if plan is None:
        changed, _ = torch_tensors.written_arguments(func)
        lists = [
            _local_list(func, arg, first, is_written=position in changed)
            for position, arg in enumerate(args)
        ]
        if any(items is None for items in lists):
            return one_by_one(func, args, kwargs)
        result = func(*lists, **kwargs)
        written = [item for item in first if type(item) is ShardedTensor]
    else:
        result = func(*(join(arg, plan.runs) for arg in args), **kwargs)
        written = [first[position] for position in plan.written]
    if is_mutable:
        note_write(*written, pieces=first)
        note_update(func, first)
        return result
    if not isinstance(result, (list, tuple)):
        return result
    if runs is None:
        return [
            wrap(item, of.spec) if type(of) is ShardedTensor else item
            for item, of in zip(result, first, strict=True)
        ]
    return over_flats(result, runs, first)


def _has_data(func: Any, args: tuple[Any, ...], runs: Sequence[Any] | None) -> bool:
    """Whether the result depends on plain tensors that may differ between ranks."""
    if torch_tensors.is_mutable_op(func):
        return False  # Optimizers write in backward, with numbers that are tensors.
    if runs is not None and not any(isinstance(arg, Tensor) for arg in args):
        return False
    if not runs_on_wholes(args):
        return False
    return any(type(tensor) is not ShardedTensor for tensor in iter_tensors(args, depth=0))


def _local_list(
    func: Any, items: Any, first: Sequence[Any], *, is_written: bool
) -> list[Any] | Any:
    """Return the pieces of a list argument (None: it has none), and other arguments as they are.

    What is written is not gathered: its pieces must be those of the first list.
    """
    if not isinstance(items, (list, tuple)) or not items or not isinstance(items[0], Tensor):
        return items
    pieces = []
    for each, reference in zip(items, first, strict=True):
        piece = _local_entry(func, each, reference, is_written=is_written)
        if piece is None:
            return None
        pieces.append(piece)
    return pieces


def _local_entry(func: Any, item: Tensor, reference: Tensor, *, is_written: bool) -> Tensor | None:
    if type(reference) is not ShardedTensor:
        return gathered(func, item) if type(item) is ShardedTensor else item
    spec = reference.spec
    if type(item) is ShardedTensor and item.spec.same_cut(spec):
        return item.local_piece
    if item.ndim == 0 and type(item) is not ShardedTensor:
        return item if type(item) is Tensor else gathered(func, item)
    is_copied = is_written and type(item) is ShardedTensor
    if is_copied or torch.broadcast_shapes(item.shape, spec.shape) != spec.shape:
        return None
    return piece_beside(func, item, spec)


def one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on lists on whole tensors, one entry after another."""
    count = len(next(arg for arg in args if isinstance(arg, (list, tuple))))
    results: list[Any] = []
    for index in range(count):
        entry = tuple(
            [arg[index]] if isinstance(arg, (list, tuple)) and arg else arg for arg in args
        )
        result = whole(func, entry, kwargs)
        if isinstance(result, (list, tuple)):
            results += result
    return results or None


def largest(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the largest element of each entry. Cost: an all-reduce for each."""
    del kwargs
    maximum, of_one = reductions.extreme("max"), torch.ops.aten.max.default
    return [
        maximum(of_one, (item,), {}) if type(item) is ShardedTensor else func([item])[0]
        for item in args[0]
    ]


# --- elementwise operators ------------------------------------------------------------------------

_aten = torch.ops.aten
_TAKE_A_NUMBER = {_aten.fill_.Tensor, _aten.masked_fill.Tensor, _aten.masked_fill_.Tensor}
"""Operators with an operand that must have no dims, whatever dims the others have."""


def _pieces_of(
    spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]] | None:
    """Return the arguments with pieces for sharded tensors, if all tensors have the same cut."""
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    if not all([type(each) is ShardedTensor and each.spec is spec for each in tensors]):  # noqa: C419 - faster
        return None
    local = [arg.local_piece if type(arg) is ShardedTensor else arg for arg in args]
    return local, {
        key: arg.local_piece if type(arg) is ShardedTensor else arg
        for key, arg in kwargs.items()
        if key != "memory_format"
    }


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    spec = first_sharded((*args, *kwargs.values())).spec
    local = _pieces_of(spec, args, kwargs)
    if local is None:
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        sharded = [tensor for tensor in tensors if type(tensor) is ShardedTensor]
        shape = torch.broadcast_shapes(*[tensor.shape for tensor in tensors])
        spec = next((tensor.spec for tensor in sharded if tensor.shape == shape), spec)
        if spec.shape != shape or any(not tensor.spec.same_cut(spec) for tensor in sharded):
            return whole(func, args, kwargs)
        if not shape and func in _TAKE_A_NUMBER:
            return whole(func, args, kwargs)
        # A tracer cannot follow a piece of a plain operand. Beside a sparse one the result may be
        # sparse, too.
        if len(sharded) < len(tensors) and (
            spec.is_traced
            or any(tensor.layout is not torch.strided for tensor in tensors)
            or runs_on_wholes(tensors)
        ):
            return whole(func, args, kwargs)
        local = _sliced(func, spec, args, kwargs)
    return wrap(func(*local[0], **local[1]), spec)


def _sliced(
    func: Any, spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with pieces for all tensors, including plain ones."""

    def slice_one(arg: Any) -> Any:
        return piece_beside(func, arg, spec) if isinstance(arg, Tensor) else arg

    local_kwargs = {k: slice_one(v) for k, v in kwargs.items() if k != "memory_format"}
    return [slice_one(arg) for arg in args], local_kwargs


def pointwise_mutating(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = kwargs.get("out", args[0])
    if type(target) is not ShardedTensor:
        return whole(func, args, kwargs)
    local = _pieces_of(target.spec, args, kwargs)
    if local is None:
        by_name = [value for key, value in kwargs.items() if key != "out"]
        sources = [arg for arg in (*args, *by_name) if isinstance(arg, Tensor)]
        shape = torch.broadcast_shapes(*[tensor.shape for tensor in sources])
        is_alone = not any(type(tensor) is ShardedTensor for tensor in sources)
        if is_alone or shape != target.shape or (not shape and func in _TAKE_A_NUMBER):
            return whole(func, args, kwargs)
        check_in_place(func, target, sources)
        local = _sliced(func, target.spec, args, kwargs)
    if "out" in kwargs and target.spec.is_traced:
        (values,) = without_out(func, *local[0], **local[1])
        target.local_piece.copy_(values)
    else:
        func(*local[0], **local[1])
    note_write(target, is_followed="out" not in kwargs)
    note_update(func, (target,))
    return target


def mutating(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place operator that writes a number: ``zero_``, ``fill_``."""
    target = args[0]
    func(target.local_piece, *args[1:], **kwargs)
    note_write(target, is_followed=True)
    note_written(target, lambda: [constant(args[1] if len(args) > 1 else 0, target)])
    return target


# --- kinds of operators ---------------------------------------------------------------------------

_HANDLERS: dict[Any, Any] = {}


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` by the handler of its kind."""
    handler = _HANDLERS.get(func)
    if handler is None:
        handler = _HANDLERS[func] = _classify(func)
    if torch.is_grad_enabled() and handler is not structural.same_memory:
        cut_gradients(args, kwargs)
    return handler(func, args, kwargs)


def dispatch_mixed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on sharded tensors together with tensors of other classes, such as views."""
    if not any(type(t) is ShardedView for t in iter_tensors([args, kwargs], depth=0)):
        return dispatch(func, args, kwargs)
    cut_gradients(args, kwargs)
    return followed(_run_on_views(func, args, kwargs), args, kwargs)


def _run_on_views(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args and type(args[0]) is ShardedView:
        shown, *others = args
        if func.is_view and torch_tensors.is_composite_op(func):
            return by_other_operators(func, args, kwargs)
        if func.is_view:
            return structural.view_of(shown.base, func, (shown.geometry, *others), kwargs)
        if structural.writes_elements(func):
            return structural.write(func, args, kwargs)
        if func in structural.READ_NO_VALUES:
            return func(structural.empty_as(shown), *others, **kwargs)
    changed, filled = torch_tensors.written_arguments(func)
    written = [argument(args, kwargs, key) for key in (*changed, *filled)]
    writes_views = any(type(t) is ShardedView for t in iter_tensors(written, depth=0))
    if writes_views or runs_on_wholes(args, kwargs):
        return whole(func, args, kwargs)
    args, kwargs = map_tensors(
        lambda t: gathered(func, t) if type(t) is ShardedView else t, (args, kwargs)
    )
    has_sharded = any(type(t) is ShardedTensor for t in iter_tensors([args, kwargs], depth=0))
    return dispatch(func, args, kwargs) if has_sharded else on_plain(func, args, kwargs)


def nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do nothing."""


def by_other_operators(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that is defined by others, each of which is dispatched by itself.

    ``to`` and ``reshape`` return a view or a copy. Only the operators that they call show which.
    """
    return func.decompose(*args, **kwargs)


def _classify(func: Any) -> Any:
    """Choose the handler of an operator seen for the first time."""
    name = func.name().split("::")[-1].split(".")[0]
    if _is_list_of_elementwise(name):
        return foreach
    if name.startswith("_foreach_"):
        return one_by_one
    if func.is_view:
        return by_other_operators if torch_tensors.is_composite_op(func) else structural.view
    if torch.Tag.nondeterministic_seeded in func.tags:
        # Those that read values run on wholes: the number of draws may depend on the values.
        return structural.random if structural.fills_by_shape(func) else whole
    if torch.Tag.pointwise in func.tags:
        return pointwise_mutating if torch_tensors.is_mutable_op(func) else pointwise
    return whole


_FUSED_OPTIMIZERS = ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
_COPIES = ("clone", "copy", "zero")  # Elementwise, though torch does not tag them so.


def _is_list_of_elementwise(name: str) -> bool:
    """Whether an operator on lists runs an elementwise operator on each entry.

    Torch tags the operators on single tensors only.
    """
    single = name.removesuffix("_")
    if not single.startswith("_foreach_"):
        return single in _FUSED_OPTIMIZERS
    single = single.removeprefix("_foreach_")
    packet = getattr(_aten, single, None)
    overloads = () if packet is None else packet.overloads()
    return single in _COPIES or any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads
    )


def _register(handler: Any, *ops: Any) -> None:
    """Note the handler of operators, given by name (with the overload, if it is no default)."""
    for op in ops:
        func = op
        if isinstance(op, str):
            name, _, overload = op.partition(".")
            func = getattr(getattr(_aten, name), overload or "default")
        _HANDLERS[func] = handler


_register(structural.same_memory, "detach", "alias", "lift_fresh")
_register(structural.structural, "clone", "empty_like", torch_tensors.copy_to_op)
_register(structural.state_like, "zeros_like", "ones_like", "full_like")
_register(mutating, "zero_", "fill_.Scalar")
_register(pointwise, "masked_fill.Scalar", "masked_fill.Tensor")
_register(pointwise_mutating, "fill_.Tensor", "masked_fill_.Scalar", "masked_fill_.Tensor")
_register(structural.plain_empty, "new_empty", "new_empty_strided")
_register(structural.refuse_resize, "set_.source_Tensor", "set_.source_Storage")
_register(structural.refuse_resize, "set_.source_Storage_storage_offset")
_register(structural.refuse_resize, "resize_", "resize_as_")
_register(structural.view_of_size, "view", "expand", torch_tensors.unsafe_view_op)
_register(structural.write, "index_put_", "index_fill_.int_Scalar", "index_fill_.int_Tensor")
_register(structural.new_like, "new_zeros", "new_ones", "new_full")
_register(structural.copy_into, "copy_")
_register(reductions.reduce_by("sum", torch.sum), "sum", "sum.dim_IntList")
_register(reductions.reduce_by("sum", torch.count_nonzero), "count_nonzero")
_register(reductions.reduce_by("product", torch.prod, neutral=1), "prod")
_register(reductions.reduce_by("max", torch.any), "any")
_register(reductions.reduce_by("min", torch.all, neutral=1), "all")
_register(reductions.extreme("max"), "max", "amax")
_register(reductions.extreme("min"), "min", "amin")
_register(reductions.mean, "mean", "mean.dim")
_register(reductions.agree, "equal", "allclose")
_register(reductions.item, torch_tensors.item_op)
_register(reductions.vector_norm, "linalg_vector_norm", "norm.Scalar")
_register(reductions.vector_norm, "norm.ScalarOpt_dim")  # `clip_grad_norm_` of torch_xla calls it.
_register(nothing, torch_tensors.propagate_xla_data_op)
_register(reductions.foreach_norm, torch_tensors.foreach_norm_op)
_register(largest, torch_tensors.foreach_max_op)
_register(reductions.unscale, torch_tensors.unscale_op)

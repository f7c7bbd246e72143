"""Operators that need more than a piece: they run on whole tensors, which are gathered.

Each rank does the same, and gets the result as a plain tensor. If a sharded tensor is written, each
rank keeps its piece.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from shardkit._compat import torch_autograd, torch_tensors
from shardkit._errors import ShardedTensorError, warn_user
from shardkit._host_values import HostValues
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.written_values import follow, note_raised, note_written
from shardkit._tree import iter_tensors, map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit._tensor.spec import ShardSpec


# --- what handlers share --------------------------------------------------------------------------


def refuse(func: Any, tensor: ShardedTensor, why: str) -> ShardedTensorError:
    return ShardedTensorError(
        f"{func} on sharded {tensor.spec.name!r} of shape {tuple(tensor.shape)}: {why}"
    )


def first_sharded(args: Any) -> ShardedTensor:
    """Return the first sharded tensor among arguments and lists of them."""
    for arg in args:
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            if type(item) is ShardedTensor:
                return item
    msg = "no ShardedTensor among the arguments"
    raise AssertionError(msg)


def note_write(
    *targets: ShardedTensor, pieces: Sequence[Any] = (), is_followed: bool = False
) -> None:
    """Raise the version counters, since a dispatch does not; they show that memory is stale.

    Args:
        *targets: Tensors that were written; if pieces were written as one, the first of them.
        pieces: All tensors that were written, if there are more than `targets`.
        is_followed: Whether the record of earlier writes is updated, or this write is noted as
            well; see `written_values`.
    """
    written = {id(t.flat): t.flat for t in targets if t.flat is not None}
    written |= {id(t.local_piece): t.local_piece for t in targets if t.flat is None}
    torch.autograd.graph.increment_version(list(written.values()))
    for memory in written.values():
        note_raised(memory, pieces or targets)
        if is_followed:
            follow(memory)


def without_out(func: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Run an operator that fills tensors (``out=``) as the one that returns new ones, in order.

    XLA's operators end the process when they fill a tensor inside a dispatch (torch_xla 2.9.0).
    """
    _, names = torch_tensors.written_arguments(func)
    others = {key: value for key, value in kwargs.items() if key not in names}
    result = func.overloadpacket(*args, **others)
    return result if isinstance(result, tuple) else (result,)


def slice_operand(arg: Tensor, spec: ShardSpec) -> Tensor:
    """Return the operand beside a piece for a plain tensor that broadcasts to the whole's shape.

    A tensor with dims has one dim here: dtypes of results depend on whether an operand has dims.
    """
    if arg.layout is not torch.strided:
        arg = arg.to_dense()
    if arg.ndim == 0 and spec.shape:
        return arg
    if spec.is_traced:  # On XLA copying one element into a piece would give the piece its shape.
        return spec.slice_full(arg.expand(spec.shape))
    if arg.numel() == 1:
        return arg.reshape(1)
    if arg.shape == spec.shape:
        if arg.numel() > 0 and not any(arg.stride()):
            return arg[(0,) * arg.ndim].reshape(1)  # A number expanded to the shape.
        return spec.slice_full(arg)
    return spec.slice_full(arg.expand(spec.shape))


def piece_beside(func: Any, arg: Tensor, spec: ShardSpec) -> Tensor:
    """Return the operand beside a piece for a tensor; gather one that is cut in another way."""
    if type(arg) is ShardedTensor and arg.spec.same_cut(spec):
        return arg.local_piece
    return slice_operand(arg if type(arg) is Tensor else gathered(func, arg), spec)


def cut_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let the gradients of the operands arrive as pieces, if autograd records an operator."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        for tensor in iter_tensors([args, kwargs], depth=0):
            if type(tensor) is ShardedTensor:
                tensor.cut_gradient()


def runs_on_wholes(*trees: Any) -> bool:
    """Whether plain tensors among the arguments may differ between ranks.

    Data for a loss, and gradients of it, differ. Then the operator runs on whole tensors, on each
    rank with its own data, and the gradient of the sharded tensor is averaged.
    """
    if torch_autograd.in_backward() or torch_autograd.in_user_function():
        return True
    if not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in iter_tensors(trees, depth=0))


def check_in_place(func: Any, target: Tensor, *others: Any) -> None:
    """Refuse a write into a sharded tensor if a gradient would have to go back to the value.

    Also refuse values that an `autograd.Function` computed from a rank's own data. A tensor without
    a history, such as ``param.data``, is written, and a gradient that arrives there is refused.
    """
    if torch.is_grad_enabled():
        for other in iter_tensors(others, depth=0):
            if type(other) is not ShardedTensor and other.requires_grad:
                why = (
                    "a plain tensor that requires a gradient is written into it. Ranks keep shards "
                    "of it, so none has the whole gradient. Use the operator that returns a new "
                    "tensor, or write under torch.no_grad()."
                )
                error = refuse(func, _base(target), why)
                has_history = target.requires_grad and "lost_gradient" not in target.__dict__
                if type(target) is not ShardedTensor or has_history:
                    raise error
                if torch.compiler.is_compiling():  # It cuts no gradients, so none would be refused.
                    raise error
                target.lost_gradient = str(error)
    if torch_autograd.in_user_function():
        for other in iter_tensors(others, depth=0):
            if not isinstance(other, HostValues) and other.ndim > 0:
                why = (
                    "an autograd.Function writes a plain tensor into it, which may be another one "
                    "on each rank, and ranks keep shards of it. Make what is written by "
                    "zeros_like() of the parameter, or pass its full_tensor() to apply()."
                )
                raise refuse(func, _base(target), why)


def all_reduce(value: Tensor, spec: ShardSpec, op: str) -> None:
    """Reduce a value in place over every axis that cuts the tensor."""
    for axis in spec.axes:
        axis.all_reduce(value, op)


def wrap(result: Any, spec: ShardSpec) -> Any:
    if isinstance(result, Tensor):
        return ShardedTensor(torch_tensors.track_views(result) if spec.is_traced else result, spec)
    if isinstance(result, (tuple, list)):
        return type(result)(wrap(item, spec) for item in result)
    return result


# --- views ----------------------------------------------------------------------------------------
#
# A view has no values of its own: a read gathers the tensor, and a write reaches the pieces.


class ShardedView(HostValues):
    """A view of a sharded tensor."""

    base: ShardedTensor  # The sharded tensor.
    # Tensor on the meta device: shape, strides, offset and dtype in the whole of `base`.
    geometry: Tensor
    __torch_function__ = torch_tensors.disabled_torch_function

    @staticmethod
    def __new__(cls: type[Self], base: ShardedTensor, geometry: Tensor) -> Self:
        self: Self = torch_tensors.make_wrapper(
            cls,
            geometry.shape,
            strides=geometry.stride(),
            dtype=geometry.dtype,
            device=base.local_piece.device,
        )
        self.base = base
        self.geometry = geometry
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        """Show the shape and the base of the view; no communication."""
        return f"ShardedView(shape={tuple(self.shape)}, of={self.base!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return the values, which are no view."""
        result: Tensor = memo.setdefault(id(self), self.detach().clone())
        return result

    def full_tensor(self) -> Tensor:
        """Return the values on every rank, a plain tensor. Cost: `ShardedTensor.full_tensor`."""
        return self.clone()

    def __create_write_items__(self, fqn: str, tensor: object) -> list[Any]:
        """Refuse: a rank would write the view alone, without the pieces of the others.

        Loads read into a view, because all ranks do so.

        Raises:
            ShardedTensorError: Always, on all ranks, because they plan a save together.
        """
        del tensor
        msg = (
            f"{fqn!r} is a view of sharded {self.base.spec.name!r}, shape {tuple(self.shape)}, and "
            f"torch's distributed checkpoints write sharded tensors and plain ones. Save its "
            f"full_tensor(), called on all ranks."
        )
        raise ShardedTensorError(msg)

    def data_ptr(self) -> int:
        """Return an address in the base, which is not memory; see `ShardedTensor.address`."""
        offset = int(self.geometry.storage_offset()) * self.geometry.itemsize
        return self.base.address(sys._getframe(1), offset)  # noqa: SLF001 - documented for this use

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Read or write by `func`, or make a view of this view."""
        del types
        return ShardedTensor.dispatch_mixed(func, args, kwargs or {})


def in_whole(func: Any, view: ShardedView, whole: Tensor) -> Tensor:
    """Return the view of contiguous `whole` that corresponds to `view` of its base."""
    geometry = view.geometry
    if geometry.is_neg():
        why = "it reads the imaginary part of a conjugate. Call full_tensor() and go on with that."
        raise refuse(func, view.base, why)
    typed = whole
    if view.base.spec.is_traced:
        if geometry.dtype != whole.dtype:
            why = "a view in another dtype is read where operators are traced. Use to(dtype)."
            raise refuse(func, view.base, why)
        # There are no storages, so look the elements up.
        shown = whole.reshape(-1)[places_of(geometry, whole.device)]
    else:
        if geometry.dtype != whole.dtype:
            typed = torch.empty(0, dtype=geometry.dtype, device=whole.device)
            typed.set_(whole.untyped_storage())
        offset = int(geometry.storage_offset())
        shown = typed.as_strided(geometry.shape, geometry.stride(), offset)
    # Not `conj`, see `heeding_conjugates`.
    return shown.conj_physical() if geometry.is_conj() else shown


def places_of(geometry: Tensor, device: torch.device) -> Tensor:
    """Return the positions of a view's elements in the flattened whole: int64, the view's shape."""
    places = torch.full(geometry.shape, int(geometry.storage_offset()), device=device)
    for dim, (size, stride) in enumerate(zip(geometry.shape, geometry.stride(), strict=True)):
        along = torch.arange(size, device=device) * stride
        places += along.view(-1, *[1] * (geometry.ndim - dim - 1))
    return places


# --- operators on wholes --------------------------------------------------------------------------

LARGE_NBYTES = 2**20
_warned: set[Any] = set()


def gathered(func: Any, tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, the values of a view, and others as they are.

    Cost: that of `ShardedTensor.full_tensor`.
    """
    if type(tensor) is ShardedTensor:
        return _gather(func, tensor)
    if type(tensor) is ShardedView:
        return in_whole(func, tensor, _gather(func, tensor.base))
    full_tensor: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if full_tensor is None else full_tensor()  # DTensors have `full_tensor`.


def _gather(func: Any, tensor: ShardedTensor) -> Tensor:
    if torch_tensors.is_send(func):
        why = (
            "the sender alone would gather it, and gathering takes all ranks. Send this rank's "
            "shard, to_local(), or full_tensor(), called on all ranks."
        )
        raise refuse(func, tensor, why)
    tensor.cut_gradient(is_gathered=True)
    spec, piece = tensor.spec, tensor.local_piece
    if piece.is_meta and not spec.mesh.backend.is_dry:
        return torch.empty(spec.shape, dtype=piece.dtype, device="meta")
    nbytes = tensor.numel() * piece.itemsize
    if nbytes > LARGE_NBYTES and func not in _warned and any(a.size > 1 for a in spec.axes):
        _warned.add(func)
        msg = (
            f"{func} needs the whole of sharded {spec.name!r} of shape {tuple(spec.shape)}, so it "
            f"gathers {nbytes / 2**20:.0f} MiB on every rank, each time. Where several operators "
            f"need it, call full_tensor() once and go on with that. Where it is a module's weight "
            f"that another module uses in every step, shard both in one group, or call "
            f"register_fsdp_forward_method() on the method that uses it. This is said once for "
            f"each operator."
        )
        warn_user(msg, is_first_rank=spec.mesh.is_first_rank)
    return spec.gather(torch_tensors.without_tracking(piece)).contiguous()


def on_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on plain tensors."""
    with torch_tensors.heeding_conjugates():
        return func(*args, **kwargs)


def whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on whole tensors.

    Cost: a gather of each sharded operand.
    """
    wholes: dict[int, Tensor] = {}
    outs: dict[int, Tensor] = {}
    in_place, by_name = torch_tensors.written_arguments(func)
    changed = list(iter_tensors([argument(args, kwargs, key) for key in in_place], depth=0))
    filled = list(iter_tensors([kwargs.get(key) for key in by_name], depth=0))
    written = [t for t in (*changed, *filled) if _is_sharded(t)]
    _check_writes(func, written, args, kwargs)
    for target in filled:
        if _is_sharded(target):
            outs[id(target)] = torch.empty(target.shape, dtype=target.dtype, device=target.device)

    def to_whole(tensor: Tensor) -> Tensor:
        found = wholes.get(id(tensor))
        if found is None:
            found = wholes[id(tensor)] = gathered(func, tensor)
            if func is torch_tensors.sparse_mm_reduce_op and _is_sharded(tensor):
                found.requires_grad_(tensor.requires_grad)
        return found

    plain_args = map_tensors(to_whole, args)
    plain_kwargs = {
        key: map_tensors(lambda t: outs.get(id(t), t), value)
        if key in by_name
        else map_tensors(to_whole, value)
        for key, value in kwargs.items()
    }
    is_traced = any(_base(target).spec.is_traced for target in filled if _is_sharded(target))
    call = functools.partial(without_out, func) if is_traced else func
    try:
        result = on_plain(call, plain_args, plain_kwargs)
    except RuntimeError as error:
        _explain(error, args, kwargs)
        raise
    if is_traced:
        result = _fill(filled, result, outs)
    originals = {}
    for target in written:
        values = outs[id(target)] if id(target) in outs else wholes[id(target)]
        store(func, target, values)
        originals[id(values)] = target
    return map_tensors(lambda t: originals.get(id(t), t), followed(result, args, kwargs))


def _check_writes(func: Any, written: Sequence[Tensor], args: Any, kwargs: Any) -> None:
    """Refuse writes into sharded tensors that gradients do not follow, or of a collective."""
    if written and torch_tensors.is_collective(func):
        why = (
            "a collective writes tensors in place, and this rank has a shard of it. Gradients are "
            "averaged over the ranks already. Otherwise call the collective on "
            "to_local().clone(), or on full_tensor(), and take the result over by copy_()."
        )
        raise refuse(func, _base(written[0]), why)
    for target in written:
        check_in_place(func, target, args, kwargs)


def _fill(filled: list[Tensor], results: tuple[Tensor, ...], outs: dict[int, Tensor]) -> Any:
    """Note results for sharded tensors, and copy the other results into their tensors."""
    for target, values in zip(filled, results, strict=True):
        if _is_sharded(target):
            outs[id(target)] = values
        else:
            target.copy_(values)
    return tuple(filled) if len(filled) > 1 else filled[0]


def store(func: Any, target: Tensor, values: Tensor) -> None:
    """Write the values of a whole tensor into a sharded tensor or a view."""
    base = _base(target)
    if values.shape != target.shape:
        why = (
            f"its shape cannot change, and the result has shape {tuple(values.shape)}. Give out= a "
            f"tensor of that shape."
        )
        raise refuse(func, base, why)
    if type(target) is ShardedView:
        target.copy_(values)
        return
    base.local_piece.copy_(base.spec.slice_full(values))
    base.spec.annotate_sharding(base.local_piece)
    note_write(base, is_followed=True)
    note_written(base, lambda: [values])


def _base(tensor: Any) -> ShardedTensor:
    base: ShardedTensor = tensor.base if type(tensor) is ShardedView else tensor
    return base


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str) -> Any:
    if isinstance(key, str):
        return kwargs.get(key)
    return args[key] if key < len(args) else None


def followed(result: Any, args: Any, kwargs: Any) -> Any:
    """Let views of plain results follow writes if operators are traced.

    If there are plain operands, torch took from these the state by which views follow writes, and
    gives it to the results.
    """
    tensors = list(iter_tensors([args, kwargs], depth=0))
    if not any(_is_sharded(tensor) and _base(tensor).spec.is_traced for tensor in tensors):
        return result
    plain = [tensor for tensor in tensors if not _is_sharded(tensor)]
    if any(
        tensor.device.type == "xla" and not torch_tensors.is_tracked(tensor) for tensor in plain
    ):
        return result
    return map_tensors(lambda t: t if _is_sharded(t) else torch_tensors.track_views(t), result)


def _is_sharded(tensor: Tensor) -> bool:
    return type(tensor) in (ShardedTensor, ShardedView)


def _explain(error: RuntimeError, args: Any, kwargs: Any) -> None:
    """Name the sharded operands in an error of torch, which only knows whole tensors."""
    named = [
        f"{_base(t).spec.name!r} ({str(t.dtype).removeprefix('torch.')}, {tuple(t.shape)})"
        for t in iter_tensors([args, kwargs], depth=0)
        if _is_sharded(t)
    ]
    error.add_note(
        f"It ran on the whole of sharded {', '.join(named)}. Outside of its module's forward a "
        f"parameter has its own dtype, not the policy's param_dtype."
    )

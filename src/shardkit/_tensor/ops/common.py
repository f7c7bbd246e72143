"""What handlers of all kinds of operators share: refusal, operands, noting writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._errors import ShardedTensorError
from shardkit._host_values import HostValues
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.write_log import note_raised
from shardkit._tensor.written_values import follow
from shardkit._tree import iter_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._tensor.spec import ShardSpec


def refuse(func: Any, tensor: ShardedTensor, why: str) -> ShardedTensorError:
    return ShardedTensorError(
        f"{func} on sharded {tensor.spec.name!r} of shape {tuple(tensor.shape)}: {why}"
    )


def first_sharded(args: Any) -> ShardedTensor:
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


def note_write(
    *targets: ShardedTensor, pieces: Sequence[Any] = (), is_followed: bool = False
) -> None:
    """Raise the version counters, which say that a shard is stale: a dispatch does not do it.

    Args:
        *targets: Tensors that were written; of pieces written as one, the first.
        pieces: Tensors that were written, all of them, where those are more.
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
    """Run an operator that fills tensors (``out=``) as the one that returns new ones.

    XLA's operators end the process where they fill a tensor inside of a dispatch (torch_xla 2.9.0).

    Returns:
        Tensors to be filled in, in the order of the schema.
    """
    _, names = _compat.written_arguments(func)
    others = {key: value for key, value in kwargs.items() if key not in names}
    result = func.overloadpacket(*args, **others)
    return result if isinstance(result, tuple) else (result,)


def slice_operand(arg: Tensor, spec: ShardSpec) -> Tensor:
    """Return what stands beside a piece for a plain tensor that broadcasts to the whole's shape.

    A tensor of one dim has one here: dtypes of results depend on whether an operand has dims.
    """
    if arg.ndim == 0 and spec.shape:
        return arg
    if spec.is_traced:  # XLA gives a piece that one element is copied into the shape of that.
        return spec.slice_full(arg.expand(spec.shape))
    if arg.numel() == 1:
        return arg.reshape(1)
    if arg.shape == spec.shape:
        if arg.numel() > 0 and not any(arg.stride()):
            return arg[(0,) * arg.ndim].reshape(1)  # A number expanded to the shape.
        return spec.slice_full(arg)
    return spec.slice_full(arg.expand(spec.shape))


def cut_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Have the gradients of the operands arrive as pieces, if autograd records an operator."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        for tensor in iter_tensors([args, kwargs], depth=0):
            if type(tensor) is ShardedTensor:
                tensor.cut_gradient()


def wants_gradients(*trees: Any) -> bool:
    """Whether autograd records an operator on these arguments."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in iter_tensors(trees, depth=0))


def runs_on_wholes(*trees: Any) -> bool:
    """Whether plain tensors among the arguments may be other ones on each rank.

    So is data that a loss is computed from, and are gradients of it. Then the operator runs on
    wholes, on each rank with its own data; the gradient of the sharded tensor is averaged.
    """
    return _compat.in_backward() or wants_gradients(*trees) or _compat.in_user_function()


def check_in_place(func: Any, target: ShardedTensor, *others: Any) -> None:
    """Refuse to write into a sharded tensor what a gradient would have to be sent back to.

    And what an `autograd.Function` computed of a rank's own data.
    """
    if torch.is_grad_enabled():
        for other in iter_tensors(others, depth=0):
            if type(other) is not ShardedTensor and other.requires_grad:
                why = (
                    "a plain tensor that requires a gradient is written into it. Ranks keep pieces "
                    "of it, so none has the whole gradient. Use the operator that returns a new "
                    "tensor, or write under torch.no_grad()."
                )
                raise refuse(func, target, why)
    if _compat.in_user_function():
        for other in iter_tensors(others, depth=0):
            if not isinstance(other, HostValues) and other.ndim > 0:
                why = (
                    "an autograd.Function writes a plain tensor into it, which may be another one "
                    "on each rank, and ranks keep pieces of it. Make what is written by "
                    "zeros_like() of the parameter, or pass its full_tensor() to apply()."
                )
                raise refuse(func, target, why)


def all_reduce(value: Tensor, spec: ShardSpec, op: str) -> None:
    """Reduce a value over every axis that the tensor is cut over, in place."""
    for axis in spec.axes:
        axis.all_reduce(value, op)


def wrap(result: Any, spec: ShardSpec) -> Any:
    if isinstance(result, Tensor):
        return ShardedTensor(_compat.track_views(result) if spec.is_traced else result, spec)
    if isinstance(result, (tuple, list)):
        return type(result)(wrap(item, spec) for item in result)
    return result

"""What handlers of all kinds of operators share: refusal, operands, noting writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit._errors import ShardedTensorError
from shardkit._tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from shardkit._tensor.spec import ShardSpec


def refuse(func: Any, tensor: ShardedTensor, why: str) -> ShardedTensorError:
    spec = tensor.spec
    part = "" if spec.tensor_parallel is None else " of its tensor-parallel part"
    return ShardedTensorError(
        f"{func} on sharded {spec.name!r} of shape {tuple(tensor.shape)}: {why} This rank holds "
        f"only elements [{spec.start}:{spec.stop}){part}. If this is a module's weight used "
        f"outside that module's forward, shard both modules in one group, call "
        f"register_fsdp_forward_method() on the method that uses it, or unshard() around the use; "
        f"otherwise call full_tensor() on it (on every rank)."
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


def note_write(*targets: ShardedTensor) -> None:
    """Raise the version counters, which say that a shard is stale: a dispatch does not do it."""
    written = {id(t.flat): t.flat for t in targets if t.flat is not None}
    torch.autograd.graph.increment_version(list(written.values()))
    torch.autograd.graph.increment_version([t.local_piece for t in targets if t.flat is None])


def local_operand(func: Any, arg: Tensor, reference: ShardedTensor) -> Tensor:
    """Return what stands for `arg` in an elementwise operator on `reference`'s piece."""
    if type(arg) is ShardedTensor:
        if not arg.spec.same_cut(reference.spec):
            why = f"{arg.spec.name!r} of shape {tuple(arg.shape)} is cut differently."
            raise refuse(func, reference, why)
        return arg.local_piece
    if arg.ndim == 0:
        return arg
    if arg.numel() == 1 and arg.ndim <= reference.ndim:
        return arg.reshape(())
    if arg.shape == reference.shape and arg.numel() > 0 and not any(arg.stride()):
        return arg[(0,) * arg.ndim]  # A scalar expanded, e.g. by the backward of sum().
    why = f"the other operand is a plain tensor of shape {tuple(arg.shape)}."
    raise refuse(func, reference, why)


def all_reduce(value: Tensor, spec: ShardSpec, op: str) -> None:
    """Reduce a value over every axis that the tensor is cut over, in place."""
    for axis in spec.axes:
        axis.all_reduce(value, op)


def wrap(result: Any, spec: ShardSpec) -> Any:
    if isinstance(result, Tensor):
        return ShardedTensor(result, spec)
    if isinstance(result, (tuple, list)):
        return type(result)(wrap(item, spec) for item in result)
    return result

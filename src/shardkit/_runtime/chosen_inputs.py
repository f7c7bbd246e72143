"""Backwards for chosen tensors: ``backward(inputs=...)`` and ``torch.autograd.grad``.

Users name sharded parameters. What a forward has used, and what gradients come to, are the
unsharded ones, so the engine is asked for these.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from shardkit import _compat
from shardkit._errors import StateError
from shardkit._params.bucket import settled
from shardkit._tensor.sharded import ShardedTensor, averaged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shardkit._tensor.spec import Axis


def watch_engine() -> None:
    """See to backwards for chosen tensors from now on."""
    _compat.wrap_engine(run_backward)


def run_backward(engine: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run the engine for some tensors; those of sharded parameters come back sharded.

    Args:
        engine: Autograd engine of torch.
        *args: Outputs, their gradients, whether to keep and to make a graph, the tensors; for
            `autograd.grad` also whether these may be unused.
        **options: Options of the engine. `accumulate_grad`: whether gradients go to ``.grad`` or
            are returned.

    Cost: nothing but the backward where they accumulate in ``.grad``. For ``autograd.grad`` an
    all-reduce of each gradient, and one of a flag for each.
    """
    outputs, grads, keep_graph, create_graph, inputs, *more = args
    found = [_pair(tensor) for tensor in inputs]
    if all(whole is None for _, whole in found):
        return engine(*args, **options)
    wanted = tuple(each for pair in found for each in pair if each is not None)
    args = (outputs, grads, keep_graph, create_graph, wanted)
    if options["accumulate_grad"]:
        return engine(*args, *more, **options)
    if _compat.in_function_transform() or any(map(_compat.is_batched, grads)):
        msg = (
            "torch.autograd.grad for sharded parameters was called inside of a transform "
            "(is_grads_batched=True, vmap): gradients are averaged over the ranks one by one. "
            "Call it for each output, or take gradients by whole values: "
            "torch.func.functional_call(model, {name: param.full_tensor(), ...}, ...)."
        )
        raise StateError(msg)
    results = iter(engine(*args, True, **options))
    pairs = [
        (next(results), None if unsharded is None else next(results)) for _, unsharded in found
    ]
    with torch.set_grad_enabled(create_graph):
        return _combined(found, pairs, allow_unused=bool(more[0]))


def _pair(tensor: Any) -> tuple[Any, Any]:
    """Return a tensor, and the unsharded parameter that was used in its place, if it has one."""
    if isinstance(tensor, ShardedTensor):
        entry = None if tensor.spec.entry is None else tensor.spec.entry()
        unsharded = None if tensor.spec.unsharded is None else tensor.spec.unsharded()
        if entry is None or entry.param is not tensor or unsharded is None:
            return tensor, None
        return tensor, unsharded if unsharded.requires_grad else None
    sharded = settled(tensor)
    return sharded, None if sharded is tensor else tensor


def _combined(
    found: Sequence[tuple[Any, Any]], results: Sequence[tuple[Any, Any]], *, allow_unused: bool
) -> tuple[Tensor | None, ...]:
    """Return one gradient for each input: that of its uses as a whole, averaged, and of others."""
    used = _used_anywhere(found, results)
    grads: list[Tensor | None] = []
    for index, ((tensor, unsharded), (own, whole)) in enumerate(zip(found, results, strict=True)):
        grad = own
        if used[index]:
            zeros = functools.partial(torch.zeros, dtype=tensor.dtype, device=unsharded.device)
            local = zeros(tensor.shape) if whole is None else whole
            grad = averaged(local, tensor)
            grad = grad if own is None else grad + own
        if grad is None and not allow_unused:
            name = repr(tensor.spec.name) if isinstance(tensor, ShardedTensor) else f"{index}"
            msg = (
                f"One of the differentiated Tensors appears to not have been used in the graph: "
                f"{name}. Set allow_unused=True if this is the desired behavior."
            )
            raise RuntimeError(msg)
        grads.append(grad)
    return tuple(grads)


def _used_anywhere(
    found: Sequence[tuple[Any, Any]], results: Sequence[tuple[Any, Any]]
) -> list[bool]:
    """Return of which inputs any rank has used the whole. Collective."""
    used = [whole is not None for _, whole in results]
    by_axes: dict[tuple[Axis, ...], list[int]] = {}
    for index, (tensor, unsharded) in enumerate(found):
        if unsharded is not None:
            axes = tuple(axis for axis in tensor.spec.data_parallel_axes if axis.size > 1)
            by_axes.setdefault(axes, []).append(index)
    for axes, indices in by_axes.items():
        device = found[indices[0]][1].device
        flags = torch.tensor([used[index] for index in indices], dtype=torch.int64, device=device)
        for axis in axes:
            axis.all_reduce(flags, "max")
        for index, flag in zip(indices, flags.tolist(), strict=True):
            used[index] = bool(flag)
    return used
